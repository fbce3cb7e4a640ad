"""Which entries of the table a graph shows, and the refusal of an engine that one of them is about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.errors import InputError, KnownBadError
from vitdeploy.known_bad.entries import REFUSED, AttributeRule, Entry, Pattern, table
from vitdeploy.known_bad.matchers import FUNCTIONS
from vitdeploy.known_bad.platform import Platform, entries_for
from vitdeploy.lint.view import View, label, prepare

# Nodes that an error names.
SHOWN_NODES = 3
OPTION = "--accept-known-bad"


@dataclass(frozen=True)
class Match:
    """An entry that a graph shows, at `nodes`."""

    entry: Entry
    nodes: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The first nodes, and how many more there are."""
        rest = len(self.nodes) - SHOWN_NODES
        return ", ".join(self.nodes[:SHOWN_NODES]) + (f" and {rest} more" if rest > 0 else "")


def matches(model: ir.Model, entries: Iterable[Entry] | None = None) -> list[Match]:
    """The entries, of all or of these, whose pattern a graph shows; the model is left as it is.

    Raises:
        KnownBadTableError: the table cannot be read.
    """
    chosen = table() if entries is None else tuple(entries)
    if not chosen:
        return []
    view = prepare(model)
    found = ((entry, tuple(label(node) for node in _nodes(entry.pattern, view))) for entry in chosen)
    return [Match(entry, nodes) for entry, nodes in found if nodes]


def matches_on(model: ir.Model, platform: Platform) -> list[Match]:
    """The entries about a platform that a graph shows."""
    return matches(model, entries_for(platform))


def _nodes(pattern: Pattern, view: View) -> list[ir.Node]:
    if pattern.matcher is not None:
        return list(FUNCTIONS[pattern.matcher](view))
    kinds = {node.op_type for node in view.nodes}
    if view.opset < pattern.opset or not set(pattern.beside) <= kinds:
        return []
    rules = pattern.attributes.items()
    return [
        node
        for node in view.model.graph
        if node.op_type in pattern.operators
        and node.domain == pattern.domain
        and all(_fits(node.attributes.get(name), rule) for name, rule in rules)
    ]


def _fits(attribute: ir.Attr | None, rule: AttributeRule) -> bool:
    if attribute is None or rule.absent:
        return attribute is None and rule.absent
    if rule.present:
        return True
    if rule.at_least is not None:
        return attribute.type == ir.AttributeType.INT and attribute.as_int() >= rule.at_least
    return attribute.value in rule.values


def check_ids(ids: Collection[str]) -> None:
    """Raise InputError if one of the ids that are to be accepted is no entry's."""
    known = [entry.id for entry in table()]
    if unknown := sorted(set(ids) - set(known)):
        raise InputError(
            f"no entry of the table of runtimes known to be wrong is called {', '.join(unknown)}",
            wanted=", ".join(known),
            fix="copy the id from the refusal, or from `vitdeploy inspect`",
        )


def refuse_known_bad(
    found: Sequence[Match], platform: Platform, name: str, accepted: Collection[str] = ()
) -> tuple[str, ...]:
    """Raise if a match of the graph called `name` is a reason not to compile it; else the accepted ids that would be.

    Raises:
        KnownBadError: what goes wrong, where, and the way out.
    """
    bad = [match for match in found if match.entry.action in REFUSED]
    open_ones = [match for match in bad if match.entry.id not in accepted]
    if not open_ones:
        return tuple(match.entry.id for match in bad)
    ids = tuple(match.entry.id for match in open_ones)
    unread = all(match.entry.action == "unreadable" for match in open_ones)
    known = f"cannot read {name}" if unread else f"is known to compute {name} wrongly"
    error = KnownBadError(
        f"{platform.runtime} {platform.version or 'of an unknown version'} {known}",
        found="; ".join(f"{match.entry.id} at {match.shown}: {match.entry.wrong}" for match in open_ones),
        wanted="; ".join(f"a release outside of {each.entry.versions or 'all that there are'}" for each in open_ones),
        fix=" ".join(match.entry.way_out for match in open_ones)
        + f" See {' '.join(match.entry.sources[0] for match in open_ones)}. "
        + f"Compile it all the same: {' '.join(f'{OPTION} {each}' for each in ids)}",
    )
    error.entries = ids
    raise error

"""Which known bad versions are here."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from vitdeploy.errors import InputError, KnownBadError
from vitdeploy.graph.io import admit, files
from vitdeploy.known_bad.entries import DONE, REFUSED, AttributeRule, KnownBadEntry, Pattern, table
from vitdeploy.known_bad.matchers import FUNCTIONS
from vitdeploy.known_bad.platform import Platform, entries_for, holds_for, platform_of
from vitdeploy.lint.view import GraphView, LintFinding, Severity, label, prepare
from vitdeploy.spec import EngineSpec, encode

# --- Which entries of the table a graph shows, and the refusal of an engine that one of them is about -----------------


# Nodes that an error names.
SHOWN_NODES = 3
OPTION = "--accept-known-bad"


@dataclass(frozen=True)
class Match:
    """An entry that a graph shows, at `nodes`."""

    entry: KnownBadEntry
    nodes: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The first nodes, and how many more there are."""
        rest = len(self.nodes) - SHOWN_NODES
        return ", ".join(self.nodes[:SHOWN_NODES]) + (f" and {rest} more" if rest > 0 else "")


def matches(model: ir.Model, entries: Iterable[KnownBadEntry] | None = None) -> list[Match]:
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


def _nodes(pattern: Pattern, view: GraphView) -> list[ir.Node]:
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
            expected=", ".join(known),
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
        expected="; ".join(f"a release outside of {each.entry.versions or 'all that there are'}" for each in open_ones),
        fix=" ".join(match.entry.way_out for match in open_ones)
        + f" See {' '.join(match.entry.sources[0] for match in open_ones)}. "
        + f"Compile it all the same: {' '.join(f'{OPTION} {each}' for each in ids)}",
    )
    error.entries = ids
    raise error


# --- The table asked of a compiled engine, by the facts that it records of where it was compiled ----------------------


def engine_matches(engine: EngineSpec, folder: Path) -> list[Match]:
    """The entries about an engine whose files lie in `folder`, each once."""
    found: dict[str, Match] = {}
    for part in engine.parts or (engine,):
        for match in matches_on(admit.admit_graph(folder / part.graph), _platform(engine, part)):
            found.setdefault(match.entry.id, match)
    return list(found.values())


def accepted_of(
    engine: EngineSpec, graphs: Mapping[str, Path], name: str, accepted: Sequence[str] = ()
) -> tuple[str, ...]:
    """The `accepted` entries that are about an engine that another machine made of `graphs`, by part.

    Raises:
        KnownBadError: an entry that is not accepted is about it.
    """
    taken: dict[str, None] = {}
    for part in engine.parts or (engine,):
        platform = _platform(engine, part)
        found = matches_on(files.load_graph(graphs[part.part]), platform)
        taken.update(dict.fromkeys(refuse_known_bad(found, platform, name, accepted)))
    return tuple(taken)


def _platform(engine: EngineSpec, part: EngineSpec) -> Platform:
    return dataclasses.replace(platform_of(engine), precision=part.precision)


# --- The table as findings of the linter, which judges graphs by releases of TensorRT ---------------------------------


RUNTIME = "tensorrt"


def known_findings(model: ir.Model, versions: Sequence[str]) -> list[LintFinding]:
    """A finding for each node that shows an entry about one of these releases: an error where every engine of the graph
    would be refused, a warning where it depends on the precision or the GPU.

    Raises:
        KnownBadTableError: the table cannot be read.
    """
    releases = {entry.id: tuple(v for v in versions if holds_for(entry.versions, v)) for entry in table()}
    asked = [entry for entry in table() if entry.runtime == RUNTIME and releases[entry.id]]
    precision = _precision(model)
    return [
        LintFinding(
            entry.id,
            _severity(entry, precision),
            node,
            entry.wrong,
            f"a release outside of {entry.versions}",
            f"{entry.way_out} See {' '.join(entry.sources)}",
            releases[entry.id],
        )
        for entry, nodes in ((match.entry, match.nodes) for match in matches(model, asked))
        for node in nodes
    ]


def _precision(model: ir.Model) -> str | None:
    return files.get_metadata(model, "the graph").precision if files.METADATA_KEY in model.metadata_props else None


def _severity(entry: KnownBadEntry, precision: str | None) -> Severity:
    sure = not entry.isa and not entry.without and (not entry.precisions or precision in entry.precisions)
    return "error" if entry.action in REFUSED and sure else "warning"


# --- Entries of the table as a person, or a JSON document, is told of them --------------------------------------------


def releases(entry: KnownBadEntry) -> str:
    """Which releases an entry is about, on what: "openvino <2025.4 on a CPU"."""
    where = ["on any device" if entry.device == "any" else f"on a {entry.device}"]
    where += [f"with {', '.join(entry.isa)}"] if entry.isa else []
    where += [f"without {', '.join(entry.without)}"] if entry.without else []
    where += [f"in {' or '.join(entry.precisions)}"] if entry.precisions else []
    return f"{entry.runtime} {entry.versions or 'of every release'} {' '.join(where)}"


def match_lines(match: Match, done: str = "") -> list[str]:
    """What goes wrong, where, and the way out; `done` says what was done about it, where that is not the usual."""
    entry = match.entry
    return [
        f"{entry.id}  {done or DONE[entry.action]}: {releases(entry)}: {entry.wrong}",
        f"        at:      {match.shown}",
        f"        way out: {entry.way_out}",
        f"        source:  {' '.join(entry.sources)}",
    ]


def described(match: Match) -> dict[str, Any]:
    """The entry, without its pattern, and the nodes that show it."""
    entry = {key: value for key, value in encode(match.entry).items() if key != "pattern"}
    return {**entry, "nodes": list(match.nodes)}


def in_spite(artifact: str, accepted: Sequence[str]) -> list[str]:
    """Remarks on an engine whose runtime is known to compute such a graph wrongly, which was accepted."""
    wrong = {entry.id: entry.wrong for entry in table()}
    return [f"{artifact} was compiled in spite of {each}: {wrong.get(each, 'unknown')}." for each in accepted]

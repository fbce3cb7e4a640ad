"""Find known bad runtime releases."""

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

# --- Match the table's entries with a graph, and refuse affected engines ----------------------------------------------


# The number of nodes that an error names.
SHOWN_NODES = 3
OPTION = "--accept-known-bad"


@dataclass(frozen=True)
class Match:
    """An entry that matches a graph, at `nodes`."""

    entry: KnownBadEntry
    nodes: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The first nodes, and the number of further ones."""
        rest = len(self.nodes) - SHOWN_NODES
        return ", ".join(self.nodes[:SHOWN_NODES]) + (f" and {rest} more" if rest > 0 else "")


def matches(model: ir.Model, entries: Iterable[KnownBadEntry] | None = None) -> list[Match]:
    """Return the entries (of all, or of `entries`) whose pattern a graph contains; the model is not modified.

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
    """Return a platform's entries whose pattern a graph contains."""
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
    """Raise InputError if an id to accept is not in the table."""
    known = [entry.id for entry in table()]
    if unknown := sorted(set(ids) - set(known)):
        raise InputError(
            f"unknown entries of the known-bad table: {', '.join(unknown)}",
            expected=", ".join(known),
            fix="copy the id from the error message, or from `vitdeploy inspect`",
        )


def refuse_known_bad(
    found: Sequence[Match], platform: Platform, name: str, accepted: Collection[str] = ()
) -> tuple[str, ...]:
    """Refuse to compile the graph called `name` if a match is not accepted; return the ids of accepted matches.

    Raises:
        KnownBadError: with the defect, the nodes and the fix.
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
        expected="; ".join(
            f"a release outside {each.entry.versions}" if each.entry.versions else "another runtime (all releases fail)"
            for each in open_ones
        ),
        fix=" ".join(match.entry.way_out for match in open_ones)
        + f" See {' '.join(match.entry.sources[0] for match in open_ones)}. "
        + f"To compile anyway: {' '.join(f'{OPTION} {each}' for each in ids)}",
    )
    error.entries = ids
    raise error


# --- Check a compiled engine against the table, by the platform that it records ---------------------------------------


def engine_matches(engine: EngineSpec, folder: Path) -> list[Match]:
    """Return the entries that match an engine whose files are in `folder`, each once."""
    found: dict[str, Match] = {}
    for part in engine.parts or (engine,):
        for match in matches_on(admit.admit_graph(folder / part.graph), _platform(engine, part)):
            found.setdefault(match.entry.id, match)
    return list(found.values())


def accepted_of(
    engine: EngineSpec, graphs: Mapping[str, Path], name: str, accepted: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the `accepted` entries that match an engine compiled from `graphs` (by part) on another machine.

    Raises:
        KnownBadError: an entry that is not accepted matches.
    """
    taken: dict[str, None] = {}
    for part in engine.parts or (engine,):
        platform = _platform(engine, part)
        found = matches_on(files.load_graph(graphs[part.part]), platform)
        taken.update(dict.fromkeys(refuse_known_bad(found, platform, name, accepted)))
    return tuple(taken)


def _platform(engine: EngineSpec, part: EngineSpec) -> Platform:
    return dataclasses.replace(platform_of(engine), precision=part.precision)


# --- The table's entries as findings of the TensorRT linter -----------------------------------------------------------


RUNTIME = "tensorrt"


def known_findings(model: ir.Model, versions: Sequence[str]) -> list[LintFinding]:
    """Return a finding for each node that matches an entry for one of these releases: an error if every engine of the
    graph would be refused, a warning if that depends on the precision or the GPU.

    Raises:
        KnownBadTableError: the table cannot be read.
    """
    releases = {entry.id: tuple(v for v in versions if holds_for(entry.versions, v)) for entry in table()}
    chosen = [entry for entry in table() if entry.runtime == RUNTIME and releases[entry.id]]
    precision = _precision(model)
    return [
        LintFinding(
            entry.id,
            _severity(entry, precision),
            node,
            entry.wrong,
            f"a release outside {entry.versions}",
            f"{entry.way_out} See {' '.join(entry.sources)}",
            releases[entry.id],
        )
        for entry, nodes in ((match.entry, match.nodes) for match in matches(model, chosen))
        for node in nodes
    ]


def _precision(model: ir.Model) -> str | None:
    return files.get_metadata(model, "the graph").precision if files.METADATA_KEY in model.metadata_props else None


def _severity(entry: KnownBadEntry, precision: str | None) -> Severity:
    sure = not entry.isa and not entry.without and (not entry.precisions or precision in entry.precisions)
    return "error" if entry.action in REFUSED and sure else "warning"


# --- Entries as text and as JSON --------------------------------------------------------------------------------------


def releases(entry: KnownBadEntry) -> str:
    """Return the affected releases and platform of an entry: "openvino <2025.4 on a CPU"."""
    where = ["on any device" if entry.device == "any" else f"on a {entry.device}"]
    where += [f"with {', '.join(entry.isa)}"] if entry.isa else []
    where += [f"without {', '.join(entry.without)}"] if entry.without else []
    where += [f"in {' or '.join(entry.precisions)}"] if entry.precisions else []
    return f"{entry.runtime} {entry.versions or '(all releases)'} {' '.join(where)}"


def match_lines(match: Match, done: str = "") -> list[str]:
    """Return lines with the defect, the nodes and the fix; `done` replaces the entry's usual action."""
    entry = match.entry
    return [
        f"{entry.id}  {done or DONE[entry.action]}: {releases(entry)}: {entry.wrong}",
        f"        at:     {match.shown}",
        f"        fix:    {entry.way_out}",
        f"        source: {' '.join(entry.sources)}",
    ]


def described(match: Match) -> dict[str, Any]:
    """Return the entry without its pattern, with the matching nodes."""
    entry = {key: value for key, value in encode(match.entry).items() if key != "pattern"}
    return {**entry, "nodes": list(match.nodes)}


def in_spite(artifact: str, accepted: Sequence[str]) -> list[str]:
    """Return remarks on an engine that was compiled although its runtime is known to compute it wrongly."""
    wrong = {entry.id: entry.wrong for entry in table()}
    return [f"{artifact} was compiled despite {each}: {wrong.get(each, 'unknown')}." for each in accepted]

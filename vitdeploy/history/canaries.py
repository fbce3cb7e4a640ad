"""Failed golden canaries, and the entries that they propose for the known-bad table."""

import json
import re
from collections.abc import Callable, Sequence

from vitdeploy.backends import TARGETS
from vitdeploy.document.history import CanaryFacts
from vitdeploy.history.row import ResultRow, joined
from vitdeploy.known_bad.entries import Device, KnownBadEntry, Pattern
from vitdeploy.spec import encode

# Key in a canary's document: {"operators": ["Add", ...], "opset": 20} of the engine's graph.
GRAPH = "graph"
_DEVICES: dict[str, Device] = {"CPU": "CPU", "GPU": "GPU", "NPU": "NPU"}


def canaries_of(rows: Sequence[ResultRow], document_of: Callable[[ResultRow], str | None]) -> tuple[CanaryFacts, ...]:
    """Return the failed canaries of a history's rows, grouped by engine and release."""
    groups: dict[tuple[str, ...], list[ResultRow]] = {}
    for row in rows:
        if row.kind == "canary" and row.target in TARGETS:
            key = (row.runtime, row.runtime_version, row.model, row.artifact, row.target, row.precision)
            groups.setdefault(key, []).append(row)
    right = [row for row in rows if _gave_golden_answers(row)]
    return tuple(_canary(group, right, document_of) for group in groups.values())


def _gave_golden_answers(row: ResultRow) -> bool:
    """Whether a row belongs to a bundle's engine that ran: golden answers are checked before a measurement."""
    of_bundle = row.kind in ("run", "compare", "sweep") or row.artifact == f"{row.target}-{row.precision}"
    return of_bundle and not row.error and row.target in TARGETS and bool(row.runtime_version)


def _canary(
    rows: Sequence[ResultRow], right: Sequence[ResultRow], document_of: Callable[[ResultRow], str | None]
) -> CanaryFacts:
    last = rows[-1]
    same_release = [row for row in right if (row.runtime, row.runtime_version) == (last.runtime, last.runtime_version)]
    elsewhere = [row for row in same_release if _engine(row) == _engine(last)]
    releases = {row.runtime_version for row in right if _engine(row) == _engine(last) and row.runtime == last.runtime}
    others = {_engine(row) for row in same_release} - {_engine(last)}
    machines = tuple(dict.fromkeys(map(_machine, rows)))
    right_machines = tuple(dict.fromkeys(map(_machine, elsewhere)))
    right_releases = tuple(sorted(releases - {last.runtime_version}, key=_version))
    graph = _graph(document_of(last))
    return CanaryFacts(
        runtime=last.runtime,
        version=last.runtime_version,
        model=last.model,
        artifact=last.artifact,
        target=last.target,
        precision=last.precision,
        results=len(rows),
        machines=machines,
        time=last.time.isoformat(timespec="seconds"),
        error=last.error,
        right_machines=right_machines,
        right_releases=right_releases,
        right_engines=len(others),
        sentence=_sentence(last, len(rows), machines, right_machines, right_releases, len(others)),
        proposal=_proposal(rows, elsewhere, right_releases, *graph) if graph else None,
    )


def _sentence(
    last: ResultRow,
    results: int,
    machines: Sequence[str],
    right_machines: Sequence[str],
    right_releases: Sequence[str],
    right_engines: int,
) -> str:
    times = "" if results == 1 else f"{results} times "
    what = f"{last.runtime} {last.runtime_version or '(unknown release)'}"
    wrong = f"{what} {times}gave wrong answers with {last.model} {last.artifact} on {joined(machines)}"
    right = [f"this engine on {joined(right_machines)}"] if right_machines else []
    right += [f"{right_engines} other engine{'' if right_engines == 1 else 's'}"] if right_engines else []
    same = (
        f"the same release was correct with {joined(right)}"
        if right
        else "no other engine was correct with this release"
    )
    before = f"; this engine was correct with {joined(right_releases)}" if right_releases else ""
    return f"{wrong}; {same}{before}."


def _proposal(
    rows: Sequence[ResultRow],
    elsewhere: Sequence[ResultRow],
    right_releases: Sequence[str],
    operators: tuple[str, ...],
    opset: int,
) -> dict[str, object] | None:
    """Return an entry that covers exactly the failures. If the same engine is correct on another machine, the entry is
    limited to instruction sets that only the failing machines have. None if the release is not a version number."""
    last = rows[-1]
    wrong_isa = set.intersection(*(set(row.isa.split()) for row in rows))
    isa = sorted(wrong_isa - {each for row in elsewhere for each in row.isa.split()}) if elsewhere else []
    machines = joined(list(dict.fromkeys(map(_machine, rows))))
    seen = f"{last.runtime_version} wrong: {last.error}; {machines}, {last.time:%Y-%m-%d}"
    try:
        entry = KnownBadEntry(
            id=re.sub(
                r"[^a-z0-9.]+", "-", f"{last.runtime}-{last.runtime_version}-{last.model}-{last.precision}".lower()
            ),
            runtime=last.runtime,
            device=_DEVICES.get(TARGETS[last.target].device.rpartition(" ")[2], "any"),
            versions=f"=={last.runtime_version}",
            pattern=Pattern(operators=operators, beside=operators, opset=opset),
            action="refuse",
            wrong=f"{last.artifact} of {last.model} does not give its golden answers; the node is not yet known",
            way_out=f"Install {last.runtime} {right_releases[-1]}."
            if right_releases
            else "Choose another target or release.",
            sources=("the URL of an issue",),
            reproduced=seen + (f"; {', '.join(right_releases)} correct" if right_releases else ""),
            isa=tuple(isa),
            precisions=(last.precision,) if last.precision else (),
        )
    except ValueError:
        return None
    found: dict[str, object] = encode(entry)
    return found


def _graph(document: str | None) -> tuple[tuple[str, ...], int] | None:
    """Return the operators and the opset in a canary's document; None without them."""
    try:
        found = json.loads(document or "{}").get(GRAPH) or {}
        operators, opset = tuple(str(each) for each in found["operators"]), int(found["opset"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return (operators, opset) if operators else None


def _engine(row: ResultRow) -> tuple[str, str]:
    return row.model, row.artifact


def _machine(row: ResultRow) -> str:
    return ", ".join(filter(None, [row.device, row.cpu])) or row.host or "an unknown machine"


def _version(text: str) -> list[tuple[int, str]]:
    """Sort key of releases."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"[.+-]", text)]

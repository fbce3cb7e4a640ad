"""Look-ups in the report that tables and plots share."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitdeploy.benchmark.summary import Row
from vitdeploy.document.bench import Bench
from vitdeploy.document.report import Judgement
from vitdeploy.document.sweep import TuneDocument
from vitdeploy.report import figures, text

# The name of the original among the artifacts; a report may not ask the pipeline for it.
ORIGINAL = "original"


def artifact_order(report: Judgement) -> list[str]:
    """All artifacts, the original first, then the engines in the report's order, then what was only benched."""
    names = [ORIGINAL, *(engine.artifact for engine in report.engines), *bench_results(report)]
    return list(dict.fromkeys(names))


def bench_results(report: Judgement) -> dict[str, Row]:
    """The bench results by artifact; empty if there was no bench."""
    return {row.artifact: row for row in report.bench.results} if report.bench else {}


def undecided(report: Judgement) -> Mapping[str, str]:
    """The artifacts whose speed is not decided, each with the reason."""
    return report.bench.undecided if report.bench else {}


def starred(report: Judgement) -> str | None:
    """The recommended artifact, if decided: its own gate does not fail, and its speed is known."""
    name, engine = report.verdict.recommended, report.engine(report.verdict.recommended)
    if engine is not None and engine.gate.status in ("fail", "undecided"):
        return None
    if report.verdict.grade is None and name in undecided(report):  # of a search
        return None
    return name


def focus(report: Judgement) -> list[str]:
    """The engines that a reader cares for: the leading one, then those that are shipped; else all."""
    names = [engine.artifact for engine in report.engines]
    shipped = [engine.artifact for engine in report.engines if engine.shipped]
    first = [name for name in names if name == report.verdict.stands_for_all]
    return list(dict.fromkeys([*first, *shipped])) or names


def reference_value(report: Judgement) -> float | None:
    """The original's value of the task's metric, measured on the same samples as the engines; None without labels."""
    values = (engine.verify.reference_value for engine in report.engines)
    return next((value for value in values if text.known(value)), None)


def data_uri(picture: bytes | None) -> str | None:
    """A PNG or JPEG as what an image of a page is loaded from."""
    if picture is None:
        return None
    kind = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def target_colours(document: TuneDocument) -> dict[str, int]:
    """The colour and marker number of each target of a search."""
    targets = dict.fromkeys(each.target for each in document.variants)
    return {target: 1 + index % (len(figures.SERIES) - 1) for index, target in enumerate(targets)}


def colours(report: Judgement) -> dict[str, int]:
    """The colour and marker number of every artifact: 0 for the original, the others share the rest. In a search all
    variants for a target have one."""
    if isinstance(report, TuneDocument):
        of_targets = target_colours(report)
        return {ORIGINAL: 0, **{each.name: of_targets[each.target] for each in report.variants}}
    return _colours(artifact_order(report))


def _colours(names: Sequence[str]) -> dict[str, int]:
    return {name: 1 + (index - 1) % (len(figures.SERIES) - 1) if index else 0 for index, name in enumerate(names)}


@dataclass(frozen=True)
class Measured:
    """A bench as plots show it: its rows by artifact, in order, and the colour and marker number of each."""

    bench: Bench
    rows: dict[str, Row]
    colours: dict[str, int]


def measured(report: Judgement) -> Measured | None:
    """The bench of a report in the order of its engines; None if it was not run."""
    if report.bench is None:
        return None
    rows = bench_results(report)
    ordered = {name: rows[name] for name in artifact_order(report) if name in rows}
    return Measured(report.bench, ordered, colours(report))


def measured_alone(bench: Bench) -> Measured:
    """A bench of what is in no report, in its own order."""
    rows = {row.artifact: row for row in bench.results}
    return Measured(bench, rows, _colours(list(dict.fromkeys([ORIGINAL, *rows]))))

"""The frame of a page: its sections, its notices, and the colours of artifacts."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitdeploy.benchmark.summary import Row
from vitdeploy.document.bench import Bench
from vitdeploy.document.report import ORIGINAL, Judgement, Report
from vitdeploy.document.sweep import TuneDocument
from vitdeploy.report import figures

# --- The structure of a page: a table of sections, each with its part of the document and its template ----------------


Document = TypeVar("Document")


@dataclass(frozen=True)
class RunPage:
    """A report and the pictures of its examples."""

    report: Report
    images: Mapping[str, bytes]


@dataclass(frozen=True)
class Section(Generic[Document]):
    """A section of a page.

    `views` returns the values for the template's `view`, usually parts of the document: none if the document has no
    such part, several if `anchor` numbers them by "{number}". `title` may contain attributes of the view and of the
    document, such as "{view.artifact}". `css`: the class of the section.
    """

    anchor: str
    title: str
    views: Callable[[Document], Sequence[object]]
    template: str
    css: str = ""


# The sections that are not collapsed on screen; a plot may be, see `figures.Plot`.
OPEN = {"summary", "comparison", "outputs", "heads", "sizes", "changed", "plot-{number}", "variants", "engines"}
OPEN |= {"verdicts", "changes", "canaries", "all", "machine", "steps", "model-{number}"}


# --- Notes on the numbers: warnings of the run, undecided measurements, and the meaning of the flags ------------------
# docs/measuring.md defines when each flag is set.


MEANINGS = {
    "not shipped": "a baseline for the comparison, not in the bundle",
    "throttled": "the machine slowed down during the measurement, because of heat or lack of power",
    "unstable": "times vary between blocks or processes, so that the median is uncertain by more than 10 %",
    "contended": "other processes, or other virtual machines, used the same CPUs",
    "fallback": "it ran on a different provider from the one that the engine was compiled for",
    "short": "too few queries for the highest requested percentile",
    "overloaded": "queries arrived faster than they were answered, so the queue kept growing",
    "suspended": "the machine slept during the measurement",
    "unwatched": "this system does not report what other processes do",
}


@dataclass(frozen=True)
class Notice:
    """A box on top of a page. `kind`: the class of its colours, as for a gate. `folded`: its lines are collapsed."""

    kind: str
    title: str
    lines: list[str]
    folded: bool = False


def notices(warnings: Sequence[str], *undecided: Mapping[str, str]) -> list[Notice]:
    """The warnings, and the artifacts of each bench whose speed is not decided, grouped by reason."""
    found = [Notice("fail", "Check this first", list(warnings))] if warnings else []
    if lines := by_reason(*undecided):
        found.append(Notice("undecided", "Speed is not decided", lines, folded=True))
    return found


def by_reason(*undecided: Mapping[str, str]) -> list[str]:
    """The artifacts of each bench whose speed is not decided, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for bench in undecided:
        for artifact, reason in bench.items():
            reasons.setdefault(reason, []).append(artifact)
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]


def legend(flags: Iterable[str]) -> list[tuple[str, str]]:
    """The distinct flags with their meanings, in the order of MEANINGS; an unknown flag has the meaning ""."""
    used = list(dict.fromkeys(flags))
    order = sorted(used, key=lambda flag: list(MEANINGS).index(flag) if flag in MEANINGS else len(MEANINGS))
    return [(flag, MEANINGS.get(flag, "")) for flag in order]


# --- Shared by plots and tables: the colours of artifacts, a bench in their order, pictures ---------------------------


def data_uri(picture: bytes | None) -> str | None:
    """A PNG or JPEG as a data URI."""
    if picture is None:
        return None
    kind = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def series_colour(index: int) -> int:
    """The colour and marker number of the artifact, target or recipe with this index; 0 is for the original."""
    return 1 + index % (len(figures.SERIES) - 1)


def target_colours(document: TuneDocument) -> dict[str, int]:
    """The colour and marker number of each target of a search."""
    targets = dict.fromkeys(variant.target for variant in document.variants)
    return {target: series_colour(index) for index, target in enumerate(targets)}


def colours(report: Judgement) -> dict[str, int]:
    """The colour and marker number of every artifact: 0 for the original, the others share the rest. In a search, all
    variants for a target have the same."""
    if isinstance(report, TuneDocument):
        of_targets = target_colours(report)
        return {ORIGINAL: 0, **{variant.name: of_targets[variant.target] for variant in report.variants}}
    return _colours(report.artifacts)


def _colours(names: Sequence[str]) -> dict[str, int]:
    return {name: series_colour(index - 1) if index else 0 for index, name in enumerate(names)}


@dataclass(frozen=True)
class MeasuredBench:
    """A bench for plots: its ordered rows by artifact, and the colour and marker number of each."""

    bench: Bench
    rows: dict[str, Row]
    colours: dict[str, int]


def measured(report: Judgement) -> MeasuredBench | None:
    """The bench of a report in the order of its engines; None if it was not run."""
    if report.bench is None:
        return None
    results = report.results
    ordered = {name: results[name] for name in report.artifacts if name in results}
    return MeasuredBench(report.bench, ordered, colours(report))


def measured_alone(bench: Bench) -> MeasuredBench:
    """A bench without a report, in its own order."""
    rows = {row.artifact: row for row in bench.results}
    return MeasuredBench(bench, rows, _colours(list(dict.fromkeys([ORIGINAL, *rows]))))

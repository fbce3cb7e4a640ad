"""The frame of a page: its sections, its notes, and the colours of artifacts."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitdeploy.benchmark.summary import Row
from vitdeploy.document.bench import Bench
from vitdeploy.document.report import ORIGINAL, Judgement, Report
from vitdeploy.document.sweep import TuneDocument
from vitdeploy.report import figures

# --- The structure of a page: a table of sections, each with what it shows of a document and its template -------------


Document = TypeVar("Document")


@dataclass(frozen=True)
class RunPage:
    """A report, with the pictures that its examples name."""

    report: Report
    images: Mapping[str, bytes]


@dataclass(frozen=True)
class Section(Generic[Document]):
    """A row of a page's table.

    `views` gives what the template shows as `view`, most often a part of the document: nothing where the document has
    nothing of the kind, several where `anchor` counts them by "{number}". In `title` attributes of the view and of the
    document may stand, as "{view.artifact}". `css`: a class of the section.
    """

    anchor: str
    title: str
    views: Callable[[Document], Sequence[object]]
    template: str
    css: str = ""


# --- Notes to the numbers: warnings of the run, undecided measurements, and the meaning of the flags ------------------
# docs/measuring.md says exactly when each flag is set.


MEANINGS = {
    "not shipped": "made for the comparison, and not in the bundle",
    "throttled": "the machine became slower while it was measured, as when it is too hot or has too little power",
    "unstable": "the times of blocks, or of processes, vary so much that the median is not known to 10 %",
    "contended": "other programs, or other virtual machines, used the same processors",
    "fallback": "it ran on something else than when the engine was made",
    "short": "too few queries for the highest percentile that was asked for",
    "overloaded": "more queries arrived than could be answered: the queue only grew",
    "suspended": "the machine slept while it was measured",
}


@dataclass(frozen=True)
class Notice:
    """`kind` is the class of its colours, as of a gate. `folded`: the lines show when they are asked for."""

    kind: str
    title: str
    lines: list[str]
    folded: bool = False


def notices(warnings: Sequence[str], *undecided: Mapping[str, str]) -> list[Notice]:
    """The warnings, and the artifacts of each bench whose speed is not decided, by name with the reason; those of one
    reason together."""
    found = [Notice("fail", "Check this first", list(warnings))] if warnings else []
    if lines := by_reason(*undecided):
        found.append(Notice("undecided", "Speed is not decided", lines, folded=True))
    return found


def by_reason(*undecided: Mapping[str, str]) -> list[str]:
    """The artifacts of each bench whose speed is not decided, those of one reason together."""
    reasons: dict[str, list[str]] = {}
    for bench in undecided:
        for artifact, reason in bench.items():
            reasons.setdefault(reason, []).append(artifact)
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]


def legend(flags: Iterable[str]) -> list[tuple[str, str]]:
    """Each flag that is used with its meaning, in the order of MEANINGS; one that is not known has none."""
    used = list(dict.fromkeys(flags))
    order = sorted(used, key=lambda flag: list(MEANINGS).index(flag) if flag in MEANINGS else len(MEANINGS))
    return [(flag, MEANINGS.get(flag, "")) for flag in order]


# --- What plots and tables share: the colours of artifacts, a bench in their order, pictures --------------------------


def data_uri(picture: bytes | None) -> str | None:
    """A PNG or JPEG as what an image of a page is loaded from."""
    if picture is None:
        return None
    kind = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def series_colour(index: int) -> int:
    """The colour and marker number of the artifact, target or recipe with this index; 0 is that of the original."""
    return 1 + index % (len(figures.SERIES) - 1)


def target_colours(document: TuneDocument) -> dict[str, int]:
    """The colour and marker number of each target of a search."""
    targets = dict.fromkeys(each.target for each in document.variants)
    return {target: series_colour(index) for index, target in enumerate(targets)}


def colours(report: Judgement) -> dict[str, int]:
    """The colour and marker number of every artifact: 0 for the original, the others share the rest. In a search all
    variants for a target have one."""
    if isinstance(report, TuneDocument):
        of_targets = target_colours(report)
        return {ORIGINAL: 0, **{each.name: of_targets[each.target] for each in report.variants}}
    return _colours(report.artifacts)


def _colours(names: Sequence[str]) -> dict[str, int]:
    return {name: series_colour(index - 1) if index else 0 for index, name in enumerate(names)}


@dataclass(frozen=True)
class MeasuredBench:
    """A bench as plots show it: its rows by artifact, in order, and the colour and marker number of each."""

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
    """A bench of what is in no report, in its own order."""
    rows = {row.artifact: row for row in bench.results}
    return MeasuredBench(bench, rows, _colours(list(dict.fromkeys([ORIGINAL, *rows]))))

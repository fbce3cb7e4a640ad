"""The rows of the main table and the few numbers above it, as text that the template only has to place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitdeploy.benchmark.summary import Latency
from vitdeploy.benchmark.summary import Row as BenchRow
from vitdeploy.document.bench import Ratio
from vitdeploy.document.comparison import AccuracyChange
from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.report import Judgement, RunVerdict, VerdictFacts
from vitdeploy.report import lookup, measures, text
from vitdeploy.report import page as notes
from vitdeploy.report.measures import Cell
from vitdeploy.report.text import MISSING
from vitdeploy.spec import GateStatus, Grade, bound_words
from vitdeploy.tasks.answers import Metric
from vitdeploy.verification.comparison import Comparison, Control


@dataclass(frozen=True)
class Gate:
    """A gate status as a badge: never colour alone, always a symbol and words too."""

    status: str
    symbol: str
    words: str


@dataclass(frozen=True)
class Row:
    """One artifact in the main table."""

    artifact: str
    series: int
    original: bool
    recommended: bool
    gate: Gate | None
    precision: Cell
    provider: str
    value: str
    drop: Cell
    agreement: Cell
    latency: tuple[str, str, str]
    throughput: Cell
    ratio: Cell
    size: str
    flags: list[str]


@dataclass(frozen=True)
class ComparisonView:
    """The section of the main table. `samples`: how many were verified on. `metric`: None without labels."""

    noun: str
    samples: int
    metric: Metric | None
    agreement_of: str
    counts_nothing: bool
    benched: bool
    rows: list[Row]
    legend: list[tuple[str, str]]


_GATES: dict[GateStatus, tuple[str, str]] = {
    "pass": ("✓", "passed"),
    "fail": ("✕", "failed"),
    "undecided": ("?", "undecided"),
    "none": ("–", "no bound"),
}
_GRADES: dict[Grade, tuple[str, str]] = {
    "recommended": ("pass", "✓"),
    "leading": ("undecided", "?"),
    "no ranking": ("none", "–"),
}


def judges(report: Judgement) -> str:
    """What the gates of a report judge: answers, or a budget that bounds latency, size or memory too."""
    budget = report.verdict.budget if isinstance(report.verdict, RunVerdict) else getattr(report, "budget", "")
    return "Budget" if any(f"max_{kind} " in str(budget) for kind in ("latency", "size", "memory")) else "Answers"


def gate(status: GateStatus, of: str = "Gate") -> Gate:
    """The badge of a gate status; `of`: what the gate judges."""
    symbol, words = _GATES[status]
    return Gate(status, symbol, f"{of}: {words}")


def grade(verdict: VerdictFacts) -> Gate | None:
    """The badge of a verdict's grade; None of one that has none, and where the answers decided."""
    if verdict.grade is None or verdict.gate in ("fail", "undecided"):
        return None
    status, symbol = _GRADES[verdict.grade]
    return Gate(status, symbol, f"Speed: {verdict.grade}")


def comparison_view(report: Judgement) -> list[ComparisonView]:
    """The section of the main table."""
    rows = main_rows(report)
    return [
        ComparisonView(
            report.data.noun,
            report.data.evaluation_images,
            measures.metric(report),
            measures.agreement_of(report),
            measures.counts_nothing(report),
            bool(lookup.bench_results(report)),
            rows,
            notes.legend(flag for row in rows for flag in row.flags),
        )
    ]


def main_rows(report: Judgement) -> list[Row]:
    """One row per artifact, the original first."""
    return [_row(report, artifact) for artifact in lookup.artifact_order(report)]


def _row(report: Judgement, artifact: str) -> Row:
    """The row of one artifact, which may have been verified, benched, or both."""
    engine = report.engine(artifact)
    result = lookup.bench_results(report).get(artifact)
    source = engine or result
    latency = result.latency_ms if result else None
    verify = engine.verify if engine else None
    original = artifact == lookup.ORIGINAL
    return Row(
        artifact=artifact,
        series=lookup.colours(report)[artifact],
        original=original,
        recommended=artifact == lookup.starred(report),
        gate=gate(engine.gate.status, judges(report)) if engine and engine.gate.status != "none" else None,
        precision=Cell(
            (source and source.precision) or MISSING, _kernels(engine.kernels, engine.precision) if engine else ""
        ),
        provider=(source and source.provider) or MISSING,
        value=text.number(verify.value if verify else lookup.reference_value(report) if original else None),
        drop=with_interval(verify.drop, verify.drop_ci95) if verify else Cell(MISSING),
        agreement=agreement(verify) if verify else Cell(MISSING),
        latency=(_ms(latency, "p50"), _ms(latency, "p90"), _ms(latency, "p99")),
        throughput=_throughput(result),
        ratio=Cell("1", "original") if original and result else _ratio_cell(report, artifact),
        size=text.megabytes(engine.bytes) if engine else MISSING,
        flags=_flags(engine, result),
    )


def with_interval(value: float | None, bounds: Sequence[float] | None) -> Cell:
    """A value with its 95 % interval, where there is one."""
    return Cell(text.number(value), text.interval(bounds) if bounds else "")


def _kernels(kernels: Mapping[str, int], precision: str) -> str:
    """The precisions in which the kernels actually ran; noted only if mixed, or INT8 has none in INT8."""
    used = {kind: count for kind, count in kernels.items() if count}
    noted = len(used) > 1 or (precision == "int8" and "int8" not in used)
    return "\u00a0+ ".join(f"{count}\u00a0{kind}" for kind, count in used.items()) if noted else ""


def _ms(latency: Latency | None, percentile: str) -> str:
    """A latency percentile in milliseconds."""
    return text.significant(getattr(latency, percentile, None))


def _throughput(result: BenchRow | None) -> Cell:
    """Samples per second, with the batch size they were measured at."""
    if result is None:
        return Cell(MISSING)
    return Cell(text.significant(result.throughput), f"batch {result.batch.offline}")


def latency_ratio(report: Judgement, artifact: str) -> Ratio | None:
    """The measured latency ratio of an artifact against the original."""
    return report.bench.ratio(artifact, lookup.ORIGINAL) if report.bench else None


def _ratio_cell(report: Judgement, artifact: str) -> Cell:
    """The latency ratio against the original with its interval."""
    ratio = latency_ratio(report, artifact)
    if ratio is None:
        return Cell(MISSING)
    if not ratio.decided:
        words = bound_words(ratio.bounds)
        return Cell(words or "not decided", "machine not quiet" if words else "")
    return Cell(f"{text.significant(ratio.ratio)}", text.ratio_interval(ratio.ci95))


def agreement(facts: Comparison | AccuracyChange) -> Cell:
    """The agreement with its interval, and beside it that of answers to other images."""
    cell = with_interval(facts.agreement, facts.agreement_ci95)
    return Cell(cell.value, cell.note + unrelated(facts.control))


def unrelated(control: Control | None) -> str:
    """The control, to stand behind an interval; "" without one."""
    return f"; unrelated {text.number(control.agreement)}" if control is not None else ""


def _flags(engine: EngineFacts | None, result: BenchRow | None) -> list[str]:
    """What a reader must know before trusting a row."""
    shipped = [] if engine is None or engine.shipped else ["not shipped"]
    return [*shipped, *(result.flags if result else [])]


def headline(report: Judgement) -> list[Cell]:
    """The recommended artifact in a few labelled numbers, claimed only as far as the intervals support them. If none is
    recommended, the one that represents the run."""
    engine = report.engine(report.verdict.stands_for_all)
    if engine is None:
        return []
    verify = engine.verify
    cells = _times(report, engine.artifact)
    metric = measures.metric(report)
    if metric is not None and verify.drop is not None:
        cells.append(_drop(verify.drop, verify.drop_ci95, metric.words))
    samples = text.count(verify.n, report.data.noun)
    detail = f"agreement with the original, on {samples}; 95 % interval {text.interval(verify.agreement_ci95)}"
    detail += unrelated(verify.control)
    cells.append(Cell(f"{text.number(verify.agreement)} %", detail))
    cells.append(Cell(f"{text.megabytes(engine.bytes)} MB", "on disk"))
    return cells


def _times(report: Judgement, artifact: str) -> list[Cell]:
    """The ratio of the latencies, with those that it is of; without a ratio the latency of all queries."""
    ratio, results = latency_ratio(report, artifact), lookup.bench_results(report)
    cells = []
    if ratio is not None and text.known(ratio.ratio) and ratio.ratio > 0:
        cells.append(speed(ratio))
    if artifact in results and ratio is None:
        p50 = {name: results[name].latency_ms.p50 for name in (artifact, lookup.ORIGINAL) if name in results}
        one, *others = (f"{text.significant(value)} ms" for value in p50.values())
        cells.append(Cell(one, "; the original’s ".join(["p50 latency of all queries", *others])))
    return cells


def speed(ratio: Ratio) -> Cell:
    """The speed relative to the original, stated only as firmly as the interval allows."""
    # The latencies that the ratio is the quotient of: p50 of all queries of each may be in another proportion.
    known = ratio.a_ms is not None and ratio.b_ms is not None
    detail = f": {text.significant(ratio.a_ms)} ms, the original {text.significant(ratio.b_ms)} ms" if known else ""
    value, bounds = ratio.ratio, ratio.ci95
    if not ratio.decided and ratio.sure[1] < 1:
        least = bound_words((1 / ratio.sure[1], None)).removeprefix("at least ")
        return Cell(f"≥ {least}×", "as fast as the original, at least, beside what else ran: the machine was not quiet")
    if not ratio.decided:
        return Cell(bound_words(ratio.bounds) or "not decided", "how fast it is against the original")
    how = f"by the blocks that they took in turns{detail}"
    if bounds[0] <= 1 <= bounds[1]:
        return Cell(f"{text.ratio_interval(bounds)}×", f"the original’s latency {how}, no clear difference")
    if value < 1:
        inverse = [1 / bound for bound in reversed(bounds)]
        return Cell(f"{text.significant(1 / value)}×", f"as fast as the original {how}{_interval(inverse)}")
    return Cell(f"{text.significant(value)}×", f"the original’s latency {how}, so slower{_interval(bounds)}")


def _interval(bounds: Sequence[float]) -> str:
    return f"; 95 % interval {text.ratio_interval(bounds)}"


def _drop(drop: float, bounds: tuple[float, float] | None, metric: str) -> Cell:
    """The drop in points, or the gain; where the interval has zero in it, neither: then what may be lost at most."""
    if bounds and bounds[0] <= 0 <= bounds[1]:
        found = f"measured {text.number(drop)}, 95 % interval {text.interval(bounds)}: no difference is proven"
        return Cell(f"≤ {text.number(bounds[1])} pt", f"drop in {metric}; {found}")
    words = f"drop in {metric}" if drop >= 0 else f"gain in {metric}"
    detail = f", 95 % interval of the drop {text.interval(bounds)}" if bounds else ""
    return Cell(f"{text.number(abs(drop))} pt", words + detail)

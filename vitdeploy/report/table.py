"""The cells of the tables, and the headline numbers above them."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitdeploy.benchmark.summary import Ratio, Row
from vitdeploy.document import comparison
from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.report import ORIGINAL, Judgement, RunVerdict, VerdictFacts
from vitdeploy.report import text
from vitdeploy.report.text import MISSING
from vitdeploy.search.frame import Expected
from vitdeploy.spec import GateStatus, Grade, bound_words
from vitdeploy.tasks import answers, registry
from vitdeploy.tasks.heads import HeadFacts, HeadsComparison
from vitdeploy.verification.comparison import Comparison, Control


@dataclass(frozen=True)
class Cell:
    """A value and, in small print below it, its interval or condition."""

    value: str
    note: str = ""


@dataclass(frozen=True)
class Badge:
    """A gate status as a badge, always with a symbol and words in addition to its colour."""

    status: str
    symbol: str
    words: str


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


def budget(report: Judgement) -> str:
    """The budget of a run or a search, in words."""
    return report.verdict.budget if isinstance(report.verdict, RunVerdict) else str(getattr(report, "budget", ""))


def judges(report: Judgement) -> str:
    """What the gates of a report judge: the answers, or a budget that also bounds latency, size or memory."""
    return "Budget" if any(f"max_{kind} " in budget(report) for kind in ("latency", "size", "memory")) else "Answers"


def gate(status: GateStatus, of: str = "Gate") -> Badge:
    """The badge of a gate status; `of`: what the gate judges."""
    symbol, words = _GATES[status]
    return Badge(status, symbol, f"{of}: {words}")


def grade(verdict: VerdictFacts) -> Badge:
    """The badge of a verdict's grade; the speed is not judged if the answers decided."""
    if verdict.grade is None or verdict.gate in ("fail", "undecided"):
        return Badge("none", "–", "Speed: not judged")
    if verdict.recommended == ORIGINAL:
        return Badge("none", "–", "Speed: original kept")
    status, symbol = _GRADES[verdict.grade]
    return Badge(status, symbol, f"Speed: {verdict.grade}")


def drop(facts: Comparison | comparison.AccuracyChange | None) -> Cell:
    """The drop with its 95 % interval, if known."""
    return _with_interval(facts.drop, facts.drop_ci95) if facts else Cell(MISSING)


def agreement(facts: Comparison | comparison.AccuracyChange | None) -> Cell:
    """The agreement with its interval, and the agreement of unrelated answers."""
    if facts is None:
        return Cell(MISSING)
    cell = _with_interval(facts.agreement, facts.agreement_ci95)
    return Cell(cell.value, cell.note + _unrelated(facts.control))


def _with_interval(value: float | None, bounds: Sequence[float] | None) -> Cell:
    return Cell(text.number(value), text.interval(bounds) if bounds else "")


def _unrelated(control: Control | None) -> str:
    """The control as text to append to an interval; "" without one."""
    return f"; unrelated {text.number(control.agreement)}" if control is not None else ""


def expected(facts: Expected | None) -> str:
    """The expected agreement of a classifier."""
    return MISSING if facts is None else text.number(facts.agreement)


def kernels(engine: EngineFacts | None) -> str:
    """The numbers of linears and convolutions by the precision that they ran in; "" unless mixed, or without INT8 in an
    INT8 engine."""
    used = {kind: count for kind, count in engine.kernels.items() if count} if engine else {}
    noted = len(used) > 1 or (engine is not None and engine.precision == "int8" and "int8" not in used)
    return "\u00a0+ ".join(f"{count}\u00a0{kind}" for kind, count in used.items()) + " layers" if noted else ""


def throughput(result: Row | None) -> Cell:
    """Samples per second, with the batch size."""
    return Cell(text.significant(result.throughput), f"batch {result.batch.offline}") if result else Cell(MISSING)


def latency_ratio(report: Judgement, artifact: str) -> Cell:
    """The latency ratio against the original with its interval."""
    if artifact == ORIGINAL and artifact in report.results:
        return Cell("1", "original")
    ratio = report.ratio(artifact)
    if ratio is None:
        return Cell(MISSING)
    if not ratio.decided:
        words = bound_words(ratio.bounds)
        return Cell(words or "not decided", "machine not quiet" if words else "")
    return Cell(f"{text.significant(ratio.ratio)}", text.ratio_interval(ratio.ci95))


def time_ratio(ratio: comparison.TimeRatio) -> Cell:
    """A ratio of candidate and baseline, with its interval and verdict, or the reason if it is not decided."""
    if not ratio.decided:
        return Cell(bound_words(ratio.bounds) or "not decided", ratio.reason)
    return Cell(text.number(ratio.ratio, 3), f"{text.ratio_interval(ratio.ci95)}, {ratio.difference}")


def shown_engine(report: Judgement) -> EngineFacts | None:
    """The engine whose numbers represent the run: the recommended or leading one, or else the first shipped one."""
    return report.engine(next(iter(report.focus), None))


def headline(report: Judgement) -> list[Cell]:
    """At most four labelled numbers of the engine that represents the run, claimed only if the intervals support
    them."""
    engine = shown_engine(report)
    if engine is None:
        return []
    verify = engine.verify
    cells = _times(report, engine.artifact)
    known = metric(report)
    if known is not None and verify.drop is not None:
        cells.append(_drop(verify.drop, verify.drop_ci95, known.words))
    samples = text.count(verify.n, report.data.noun)
    detail = f"agreement with the original, on {samples}; 95 % interval {text.interval(verify.agreement_ci95)}"
    if verify.control is not None:
        detail += f"; unrelated answers agree to {text.number(verify.control.agreement)} %"
    cells.append(Cell(f"{text.number(verify.agreement)} %", detail))
    full = report.engine(f"{engine.target}-fp32") or engine
    versus = f"; {full.artifact} has {text.size(full.bytes)}" if full is not engine else ""
    cells.append(Cell(text.size(engine.bytes), f"size of {engine.artifact} on disk{versus}"))
    return cells


def _times(report: Judgement, artifact: str) -> list[Cell]:
    """The ratio of the latencies, with both latencies; without a ratio, the latency of all queries."""
    ratio, results = report.ratio(artifact), report.results
    cells = []
    if ratio is not None and text.known(ratio.ratio) and ratio.ratio > 0:
        cells.append(speed(ratio))
    if artifact in results and ratio is None:
        p50 = {name: results[name].latency_ms.p50 for name in (artifact, ORIGINAL) if name in results}
        one, *others = (f"{text.significant(value)} ms" for value in p50.values())
        cells.append(Cell(one, "; the original’s ".join(["p50 latency of all queries", *others])))
    return cells


def speed(ratio: Ratio) -> Cell:
    """The speed relative to the original, claimed only if the interval supports it."""
    # The latencies of the ratio: the p50 of all queries may have another ratio.
    known = ratio.a_ms is not None and ratio.b_ms is not None
    both = f"{text.significant(ratio.a_ms)} ms vs {text.significant(ratio.b_ms)} ms, " if known else ""
    value, bounds = ratio.ratio, ratio.ci95
    if not ratio.decided and ratio.sure[1] < 1:
        least = bound_words((1 / ratio.sure[1], None)).removeprefix("at least ")
        return Cell(f"≥ {least}×", "as fast as the original, a lower bound measured on a busy machine")
    if not ratio.decided:
        return Cell(bound_words(ratio.bounds) or "not decided", "latency relative to the original")
    how = f"({both}alternating runs)"
    if bounds[0] <= 1 <= bounds[1]:
        return Cell(f"{text.ratio_interval(bounds)}×", f"the original’s latency {how}, no clear difference")
    if value < 1:
        inverse = [1 / bound for bound in reversed(bounds)]
        return Cell(f"{text.significant(1 / value)}×", f"as fast as the original {how}{_interval(inverse)}")
    return Cell(f"{text.significant(value)}×", f"the original’s latency {how}, so slower{_interval(bounds)}")


def _interval(bounds: Sequence[float]) -> str:
    return f"; 95 % interval {text.ratio_interval(bounds)}"


def _drop(drop: float, bounds: tuple[float, float] | None, metric: str) -> Cell:
    """The drop or the gain in points; if the interval contains zero, the largest possible drop."""
    if bounds and bounds[0] <= 0 <= bounds[1]:
        found = f"measured {text.number(drop)}, 95 % interval {text.interval(bounds)}: no proven difference"
        return Cell(f"≤ {text.number(bounds[1])} pt", f"drop in {metric}; {found}")
    words = f"drop in {metric}" if drop >= 0 else f"gain in {metric}"
    detail = f", 95 % interval of the drop {text.interval(bounds)}" if bounds else ""
    return Cell(f"{text.number(abs(drop))} pt", words + detail)


# --- The measures of each task: its metric against labels, its agreement, and its own numbers -------------------------


def metric(report: Judgement) -> answers.Metric | None:
    """The metric that is measured against labels; None without labels. An unknown metric keeps its own name."""
    name = next((engine.verify.metric for engine in report.engines if engine.verify.metric is not None), None)
    known = {metric.name: metric for adapter in registry.TASKS.values() for metric in adapter.metrics}
    return None if name is None else known.get(name, answers.Metric(name))


def agreement_of(report: Judgement) -> str:
    """The definition of agreement with the original, in a few words; empty without engines."""
    return next((engine.verify.agreement_of for engine in report.engines), "")


def counts_nothing(report: Judgement) -> bool:
    """Whether the original gave no answers at all, which makes an agreement of 100 % meaningless."""
    key = registry.TASKS[report.task].counts
    return bool(key) and any(getattr(engine.verify, key) == 0 for engine in report.engines)


def columns(report: Judgement) -> list[answers.Measure]:
    """The task's own numbers for which at least one engine has a value."""
    return [
        measure
        for measure in registry.TASKS[report.task].measures
        if any(_value(engine.verify, measure.key) is not None for engine in report.engines)
    ]


def cell(verify: Comparison, measure: answers.Measure) -> Cell:
    """One engine's value, with the original's or its interval below it."""

    def form(value: float | None) -> str:
        return text.small(value, 3) if measure.digits is None else text.number(value, measure.digits)

    note = ""
    if measure.original:
        note = f"original {form(_value(verify, f'reference_{measure.key}'))}"
    elif measure.interval:
        bounds = getattr(verify, measure.interval)
        note = " to ".join(map(form, bounds)) if bounds is not None else text.MISSING
    return Cell(form(_value(verify, measure.key)), note)


def _value(verify: Comparison, key: str) -> float | None:
    outer, _, inner = key.partition(".")
    value = getattr(verify, outer)
    if inner and value is not None:
        value = getattr(value, inner)
    return None if value is None else float(value)


@dataclass(frozen=True)
class HeadRow:
    """One head of an engine: its comparison, the name of its metric, and its task's further measures in words."""

    artifact: str
    head: str
    facts: Comparison
    metric: str
    value: Cell
    more: str


def heads(report: Judgement) -> list[HeadRow]:
    """Each head of each engine, for a model with several heads."""
    return [
        _head(engine.artifact, part)
        for engine in report.engines
        if isinstance(engine.verify, HeadsComparison)
        for part in engine.verify.parts
    ]


def _head(artifact: str, part: HeadFacts) -> HeadRow:
    facts, more = part.comparison, list[str]()
    for measure in registry.TASKS[part.task].measures:
        if measure.original and _value(facts, measure.key) is not None:
            found = cell(facts, measure)
            more.append(f"{measure.title} {found.value} ({found.note})")
    value = Cell(text.MISSING)
    if facts.metric is not None:
        value = Cell(text.number(facts.value), f"original {text.number(facts.reference_value)}")
    return HeadRow(artifact, part.name, facts, facts.metric or text.MISSING, value, "; ".join(more))

"""The rows of the main table and the few numbers above it, as text that the template only has to place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitdeploy.report import lookup, measures, text
from vitdeploy.report.measures import Cell
from vitdeploy.report.text import MISSING


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


_GATES = {
    "pass": Gate("pass", "✓", "Gate passed"),
    "fail": Gate("fail", "✕", "Gate failed"),
    "undecided": Gate("undecided", "?", "Gate undecided"),
    "none": Gate("none", "–", "No budget set"),
}


def gate(status: str) -> Gate:
    """The badge of a gate status. A status that is not known is shown as it is, in neutral colours."""
    return _GATES.get(status) or Gate("none", "–", status)


def main_rows(report: Mapping[str, Any]) -> list[Row]:
    """One row per artifact, the original first."""
    return [_row(report, artifact) for artifact in lookup.artifact_order(report)]


def _row(report: Mapping[str, Any], artifact: str) -> Row:
    """The row of one artifact, which may have been verified, benched, or both."""
    engine = lookup.engine_of(report, artifact)
    result = lookup.bench_results(report).get(artifact)
    source = engine or result or {}
    latency = result["latency_ms"] if result else {}
    original = artifact == lookup.ORIGINAL
    return Row(
        artifact=artifact,
        series=lookup.series(report, artifact),
        original=original,
        recommended=artifact == lookup.starred(report),
        gate=gate(engine["gate"]["status"]) if engine and engine["gate"]["status"] != "none" else None,
        precision=Cell(source.get("precision") or MISSING, _kernels(engine["kernels"]) if engine else ""),
        provider=source.get("provider") or MISSING,
        **_accuracy_cells(engine, lookup.reference_value(report) if original else None),
        latency=(_ms(latency, "p50"), _ms(latency, "p90"), _ms(latency, "p99")),
        throughput=_throughput(result),
        ratio=Cell("1", "original") if original and result else _ratio_cell(report, artifact),
        size=text.megabytes(engine["bytes"]) if engine else MISSING,
        flags=_flags(engine, result),
    )


def _accuracy_cells(engine: Mapping[str, Any] | None, reference: float | None) -> dict[str, Any]:
    """The columns that come from verification; the original only has a value of the metric."""
    if engine is None:
        return {"value": text.number(reference), "drop": Cell(MISSING), "agreement": Cell(MISSING)}
    verify = engine["verify"]
    return {
        "value": text.number(verify["value"]),
        "drop": with_interval(verify["drop"], verify["drop_ci95"]),
        "agreement": with_interval(verify["agreement"], verify["agreement_ci95"]),
    }


def with_interval(value: float | None, bounds: Sequence[float] | None) -> Cell:
    """A value with its 95 % interval, where there is one."""
    return Cell(text.number(value), text.interval(bounds) if bounds else "")


def _kernels(kernels: Mapping[str, int]) -> str:
    """Which precisions the kernels really ran in; only worth a note if they were mixed."""
    used = {precision: count for precision, count in kernels.items() if count}
    return "\u00a0+ ".join(f"{count}\u00a0{precision}" for precision, count in used.items()) if len(used) > 1 else ""


def _ms(latency: Mapping[str, float], percentile: str) -> str:
    """A latency percentile in milliseconds."""
    return text.significant(latency.get(percentile))


def _throughput(result: Mapping[str, Any] | None) -> Cell:
    """Samples per second, with the batch size they were measured at."""
    if result is None:
        return Cell(MISSING)
    return Cell(text.significant(result["throughput"]), f"batch {result['batch']['offline']}")


def latency_ratio(report: Mapping[str, Any], artifact: str) -> Mapping[str, Any] | None:
    """The measured latency ratio of an artifact against the original."""
    ratios = report["bench"]["ratios"] if report["bench"] else []
    wanted = (artifact, lookup.ORIGINAL, "latency")
    return next((ratio for ratio in ratios if (ratio["a"], ratio["b"], ratio["metric"]) == wanted), None)


def _ratio_cell(report: Mapping[str, Any], artifact: str) -> Cell:
    """The latency ratio against the original with its interval."""
    ratio = latency_ratio(report, artifact)
    if ratio is None:
        return Cell(MISSING)
    if not lookup.is_decided(ratio):
        return Cell("not decided")
    return Cell(f"{text.significant(ratio['ratio'])}", text.ratio_interval(ratio["ci95"]))


def _flags(engine: Mapping[str, Any] | None, result: Mapping[str, Any] | None) -> list[str]:
    """What a reader must know before trusting a row."""
    shipped = [] if engine is None or engine["shipped"] else ["not shipped"]
    return [*shipped, *(result["flags"] if result else [])]


def headline(report: Mapping[str, Any]) -> list[Cell]:
    """The recommended artifact in a few numbers, each with what it is of, and claimed only as far as its interval
    carries. Where none is recommended, the one that stands for the run."""
    engine = lookup.engine_of(report, lookup.leading(report))
    if engine is None:
        return []
    verify = engine["verify"]
    cells = _times(report, engine["artifact"])
    metric = measures.metric(report)
    if metric is not None and verify["drop"] is not None:
        cells.append(_drop(verify, metric.words))
    samples = text.count(verify["n"], report["data"]["noun"])
    detail = f"agreement with the original, on {samples}; 95 % interval {text.interval(verify['agreement_ci95'])}"
    cells.append(Cell(f"{text.number(verify['agreement'])} %", detail))
    cells.append(Cell(f"{text.megabytes(engine['bytes'])} MB", "on disk"))
    return cells


def _times(report: Mapping[str, Any], artifact: str) -> list[Cell]:
    """The ratio of the latencies, with those that it is of. Reports of earlier versions have the latencies of all
    queries alone: another estimate, so another card."""
    ratio, results = latency_ratio(report, artifact), lookup.bench_results(report)
    cells = []
    if ratio is not None and text.known(ratio["ratio"]) and ratio["ratio"] > 0:
        cells.append(speed(ratio))
    if artifact in results and "a_ms" not in (ratio or {}):
        p50 = {name: results[name]["latency_ms"]["p50"] for name in (artifact, lookup.ORIGINAL) if name in results}
        cells.append(Cell(f"{text.significant(p50[artifact])} ms", f"p50 latency of all queries{_beside(p50, ratio)}"))
    return cells


def _beside(p50: Mapping[str, float], ratio: Mapping[str, Any] | None) -> str:
    """The original's latency; and that the two are no ratio, where the interval of the ratio says another one."""
    values = list(p50.values())
    if len(values) < 2:
        return ""
    words = f"; the original’s {text.significant(values[1])} ms"
    bounds = ratio and ratio["ci95"]
    if not bounds or not values[0] or bounds[0] <= values[0] / values[1] <= bounds[1]:
        return words
    quotient = text.significant(values[1] / values[0])
    return f"{words}. Their quotient, {quotient}, is no estimate: the machine’s speed changed between blocks"


def speed(ratio: Mapping[str, Any]) -> Cell:
    """How fast it is against the original, said only as surely as the interval allows."""
    # The latencies that the ratio is the quotient of: p50 of all queries of each may be in another proportion.
    beside = [text.significant(ratio[name]) for name in ("a_ms", "b_ms") if name in ratio]
    detail = f": {beside[0]} ms, the original {beside[1]} ms" if len(beside) == 2 else ""
    value, bounds = ratio["ratio"], ratio["ci95"]
    if not lookup.is_decided(ratio):
        return Cell("not decided", "how fast it is against the original")
    how = f"by the blocks that they took in turns{detail}"
    if bounds and bounds[0] <= 1 <= bounds[1]:
        return Cell(f"{text.ratio_interval(bounds)}×", f"the original’s latency {how}, no clear difference")
    if value < 1:
        inverse = [1 / bound for bound in reversed(bounds)] if bounds else None
        return Cell(f"{text.significant(1 / value)}×", f"as fast as the original {how}{_interval(inverse)}")
    return Cell(f"{text.significant(value)}×", f"the original’s latency {how}, so slower{_interval(bounds)}")


def _interval(bounds: Sequence[float] | None) -> str:
    return f"; 95 % interval {text.ratio_interval(bounds)}" if bounds else ""


def _drop(verify: Mapping[str, Any], metric: str) -> Cell:
    """The drop in points, or the gain; where the interval has zero in it, neither: then what may be lost at most."""
    drop, bounds = verify["drop"], verify["drop_ci95"]
    if bounds and bounds[0] <= 0 <= bounds[1]:
        found = f"measured {text.number(drop)}, 95 % interval {text.interval(bounds)}: no difference is proven"
        return Cell(f"≤ {text.number(bounds[1])} pt", f"drop in {metric}; {found}")
    words = f"drop in {metric}" if drop >= 0 else f"gain in {metric}"
    detail = f", 95 % interval of the drop {text.interval(bounds)}" if bounds else ""
    return Cell(f"{text.number(abs(drop))} pt", words + detail)

"""Two reports compared by what they say; nothing is run."""

from __future__ import annotations

from typing import Any

from vitdeploy.pipeline.regression.findings import Found
from vitdeploy.pipeline.regression.pairs import Pair, pair_up
from vitdeploy.pipeline.regression.recorded import RecordedReport
from vitdeploy.verify.intervals import unpaired_difference, unpaired_log_ratio

# The accuracy of these tasks is a share of the samples that were answered rightly.
SHARES = ("classification", "sequence")
MACHINE = ("cpu", "cores", "machine")
NOT_IN_TURNS = "The two were measured in two runs: drift between them is not part of the intervals."


def compare_reports(
    baseline: RecordedReport, candidate: RecordedReport, target: str | None
) -> tuple[list[Found], list[str]]:
    """What the reports say of each pair of engines, and remarks.

    Raises:
        TargetError: they have no engine in common.
    """
    names = [[e.artifact for e in report.engines if _is_of(e.artifact, target)] for report in (baseline, candidate)]
    pairs, remarks = pair_up(*names)
    hindered = "" if _machine(baseline) == _machine(candidate) else _other_machine(baseline, candidate)
    found = [
        Found(
            pair.name,
            _accuracy(baseline, candidate, pair),
            _latency(baseline, candidate, pair),
            _flags(baseline, candidate, pair),
            hindered,
        )
        for pair in pairs
    ]
    if any(each.ratios for each in found):
        remarks.append(hindered or NOT_IN_TURNS)
    if baseline.provenance.data.evaluation != candidate.provenance.data.evaluation:
        remarks.append("The two were evaluated on different images: their accuracy is not compared.")
    return found, remarks


def _is_of(artifact: str, target: str | None) -> bool:
    return target is None or artifact.rpartition("-")[0] == target


def _accuracy(baseline: RecordedReport, candidate: RecordedReport, pair: Pair) -> dict[str, Any] | None:
    """Compared as if on different images, since a report has no single answers: the interval is wider than it could
    be."""
    old, new = baseline.engine(pair.baseline), candidate.engine(pair.candidate)
    assert old is not None and new is not None
    a, b = old.verify, new.verify
    if (baseline.task, a.metric, a.n) != (candidate.task, b.metric, b.n) or a.value is None or b.value is None:
        return None
    if baseline.provenance.data.evaluation != candidate.provenance.data.evaluation:
        return None
    interval: tuple[float, float] | None = None
    if baseline.task in SHARES:
        right = round(a.value * a.n / 100), round(b.value * b.n / 100)
        low, high = unpaired_difference(right[0], a.n, right[1], b.n)
        interval = (100 * low, 100 * high)
    files = baseline.provenance.of_engine(pair.baseline)
    same = bool(files) and files == candidate.provenance.of_engine(pair.candidate)
    if same:  # nothing can be lost
        interval = (0.0, 0.0)
    return {
        "how": "same files" if same else "recorded",
        "n": a.n,
        "metric": a.metric,
        "baseline": a.value,
        "candidate": b.value,
        "drop": a.value - b.value,
        "drop_ci95": interval,
        "agreement": None,
        "agreement_ci95": None,
    }


def _latency(baseline: RecordedReport, candidate: RecordedReport, pair: Pair) -> list[dict[str, Any]]:
    if baseline.bench is None or candidate.bench is None:
        return []
    old = baseline.bench.block_medians_ms.get(pair.baseline, [])
    new = candidate.bench.block_medians_ms.get(pair.candidate, [])
    if min(len(old), len(new)) < 2:
        return []
    ratio, low, high = unpaired_log_ratio(new, old)
    return [{"metric": "latency", "ratio": ratio, "ci95": (low, high)}]


def _flags(baseline: RecordedReport, candidate: RecordedReport, pair: Pair) -> list[str]:
    found = [*(baseline.bench.flags(pair.baseline) if baseline.bench else ())]
    found += candidate.bench.flags(pair.candidate) if candidate.bench else ()
    return list(dict.fromkeys(found))


def _machine(report: RecordedReport) -> dict[str, Any]:
    return {key: report.environment.get(key) for key in MACHINE}


def _other_machine(baseline: RecordedReport, candidate: RecordedReport) -> str:
    texts = (", ".join(f"{value}" for value in _machine(report).values()) for report in (baseline, candidate))
    return f"The two were measured on different machines: {' against '.join(texts)}."

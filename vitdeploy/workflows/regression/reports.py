"""Two reports compared by what they say; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitdeploy.benchmark.evidence import PROCESS_FREEDOM, PROCESS_SPREAD, quantile
from vitdeploy.document.comparison import AccuracyChange, TimeRatio
from vitdeploy.document.report import Report
from vitdeploy.verification.intervals import unpaired_difference, unpaired_log_ratio
from vitdeploy.workflows.regression.findings import Found, Pair, pair_up

# The accuracy of these tasks is a share of the samples that were answered rightly.
SHARES = ("classification", "sequence", "zero-shot")
MACHINE = ("board", "cpu", "cores", "quota", "machine", "emulated")
RUNTIMES = ("vitdeploy", "onnxruntime", "openvino", "tensorrt")
# Half width of a ratio's interval due to differences between three processes of each side, which are unknown here.
BETWEEN_PROCESSES = quantile(PROCESS_FREEDOM + 2) * PROCESS_SPREAD / math.sqrt(3)
NOT_IN_TURNS = "The two were measured in two runs: drift between them is not part of the intervals."


def compare_reports(
    baseline: Report, candidate: Report, target: str | None
) -> tuple[list[Found], list[str], list[str]]:
    """Compare each pair of engines by the reports; returns also remarks, and the targets that the candidate lacks.

    Raises:
        TargetError: they have no engine in common.
    """
    names = [[e.artifact for e in report.engines if _is_of(e.artifact, target)] for report in (baseline, candidate)]
    pairs, remarks, missing = pair_up(*names)
    hindered = "" if _machine(baseline) == _machine(candidate) else _other_machine(baseline, candidate)
    found = [_found(baseline, candidate, pair, hindered) for pair in pairs]
    if any(each.ratios for each in found):
        remarks.append(hindered or NOT_IN_TURNS)
    if baseline.provenance.data.evaluation != candidate.provenance.data.evaluation:
        remarks.append("The two were evaluated on different images: their accuracy is not compared.")
    return found, remarks, missing


def _found(baseline: Report, candidate: Report, pair: Pair, hindered: str) -> Found:
    accuracy = _accuracy(baseline, candidate, pair)
    if not hindered and _same_engine(baseline, candidate, pair):
        # As of two bundles: one engine has one latency. What two runs of it differ by is the machine.
        return Found(pair.name, accuracy, (), same_engine=True)
    flags = _flags(baseline, candidate, pair)
    reason = hindered or _undecided(baseline, candidate, pair) or _flagged(flags)
    return Found(pair.name, accuracy, _latency(baseline, candidate, pair, reason), flags)


def _same_engine(baseline: Report, candidate: Report, pair: Pair) -> bool:
    """Whether both are the same files, run by the same versions."""
    versions = [[report.environment.get(name) for name in RUNTIMES] for report in (baseline, candidate)]
    return _same_files(baseline, candidate, pair) and versions[0] == versions[1]


def _same_files(baseline: Report, candidate: Report, pair: Pair) -> bool:
    files = baseline.provenance.of_engine(pair.baseline)
    return bool(files) and files == candidate.provenance.of_engine(pair.candidate)


def _undecided(baseline: Report, candidate: Report, pair: Pair) -> str:
    """The reason, as recorded then, why one of the two runs decides nothing about the engine's latency."""
    for side, report, name in (("baseline", baseline, pair.baseline), ("candidate", candidate, pair.candidate)):
        if report.bench is not None and name in report.bench.undecided:
            return f"in the {side}, {report.bench.undecided[name]}"
    return ""


def _flagged(flags: Sequence[str]) -> str:
    """The two latencies were measured apart: where one cannot be relied on, neither more nor less can be said."""
    return f"the measurement is flagged {', '.join(flags)}: measure again" if flags else ""


def _is_of(artifact: str, target: str | None) -> bool:
    return target is None or artifact.rpartition("-")[0] == target


def _accuracy(baseline: Report, candidate: Report, pair: Pair) -> AccuracyChange | None:
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
    same = _same_files(baseline, candidate, pair)
    if same:  # nothing can be lost
        interval = (0.0, 0.0)
    return AccuracyChange(
        how="same files" if same else "recorded",
        n=a.n,
        metric=a.metric,
        baseline=a.value,
        candidate=b.value,
        drop=a.value - b.value,
        drop_ci95=interval,
        agreement=None,
        agreement_ci95=None,
    )


def _latency(baseline: Report, candidate: Report, pair: Pair, hindered: str) -> list[TimeRatio]:
    """The ratio by the rounds of both, where there are some; it is not decided where something hinders that."""
    if baseline.bench is None or candidate.bench is None:
        return []
    old = baseline.bench.block_medians_ms.get(pair.baseline, ())
    new = candidate.bench.block_medians_ms.get(pair.candidate, ())
    if min(len(old), len(new)) < 2:
        return []
    ratio, low, high = unpaired_log_ratio(new, old)
    # The blocks of a report do not say what its processes have in common.
    wider = math.exp(math.hypot(math.log(high / low) / 2, BETWEEN_PROCESSES))
    return [TimeRatio("latency", ratio, (ratio / wider, ratio * wider), not hindered, hindered)]


def _flags(baseline: Report, candidate: Report, pair: Pair) -> list[str]:
    """Without "short": few queries say little of a high percentile, and what is compared is the median."""
    benches = (baseline.bench, pair.baseline), (candidate.bench, pair.candidate)
    rows = [bench.row(name) for bench, name in benches if bench is not None]
    found = dict.fromkeys(flag for row in rows if row is not None for flag in row.flags)
    return [flag for flag in found if flag != "short"]


def _machine(report: Report) -> dict[str, str]:
    """What the report says of it: only those of Arm machines name the board, and only newer ones."""
    return {key: report.environment[key] for key in MACHINE if key in report.environment}


def _other_machine(baseline: Report, candidate: Report) -> str:
    texts = (", ".join(f"{value}" for value in _machine(report).values()) for report in (baseline, candidate))
    return f"The two were measured on different machines: {' against '.join(texts)}."

"""Differences between two sets of bundles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vitdeploy.document.comparison import AccuracyChange, Check, ComparisonLimits, DigestPair, PairFacts, TimeRatio
from vitdeploy.document.report import Provenance, Report
from vitdeploy.errors import TargetError
from vitdeploy.spec import Budget, DecodeError, Manifest, bound_words, decode
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Gate, accuracy_gate, drop_gate, join, slowdown_gate

# --- The findings of a comparison of one pair of engines, and its gates; all JSON-ready -------------------------------


@dataclass(frozen=True)
class Found:
    """One pair. `accuracy` is None if it was not compared. `flags`: of either side's measurement. `same_engine`:
    both sides are one engine, on one machine."""

    name: str
    accuracy: AccuracyChange | None
    ratios: Sequence[TimeRatio]
    flags: Sequence[str] = ()
    same_engine: bool = False


def judge(found: Found, limits: ComparisonLimits) -> tuple[PairFacts, Gate]:
    """The pair as the document has it, with one check for accuracy and one for each time, and the gate of all."""
    gates = {"accuracy": _accuracy_gate(found, limits)}
    if limits.max_slowdown is not None and found.same_engine:
        gates["latency"] = Gate("pass")
    elif limits.max_slowdown is not None and not found.ratios:
        gates["latency"] = Gate("undecided", ("max_slowdown needs times, and there are none",))
    for ratio in found.ratios:
        gates[ratio.metric] = _time_gate(found, ratio, limits)
    facts = PairFacts(
        found.name,
        found.accuracy,
        tuple(replace(ratio, difference=_difference(ratio)) for ratio in found.ratios),
        tuple(found.flags),
        found.same_engine,
        tuple(Check(name, gate.status, gate.reasons) for name, gate in gates.items()),
    )
    return facts, join([gate.named(found.name) for gate in gates.values()])


def _difference(ratio: TimeRatio) -> str:
    """The meaning of the interval of candidate / baseline in words, or of its bounds if it is not reliable."""
    low, high = ratio.ci95 if ratio.decided else (ratio.bounds[0] or 0.0, ratio.bounds[1] or math.inf)
    if low <= 1 <= high:
        return "no difference" if ratio.decided else "not decided"
    return "faster" if (high < 1) == (ratio.metric == "latency") else "slower"


def _accuracy_gate(found: Found, limits: ComparisonLimits) -> Gate:
    if found.accuracy is None:
        unknown = Gate("undecided", ("max_drop needs images with labels (--data)",))
        return Gate("none") if limits.max_drop is None else unknown
    facts = found.accuracy
    if limits.max_drop is not None and facts.drop is not None and facts.drop_ci95 is None:
        return Gate("undecided", (f"two recorded values of {facts.metric} have no interval: give bundles and --data",))
    if facts.how == "measured" and facts.agreement is not None and facts.agreement_ci95 is not None:
        measured = Comparison(
            n=facts.n,
            metric=facts.metric,
            value=facts.candidate,
            reference_value=facts.baseline,
            drop=facts.drop,
            drop_ci95=facts.drop_ci95,
            agreement=facts.agreement,
            agreement_ci95=facts.agreement_ci95,
            agreement_of="",
            max_difference=0.0,
            control=facts.control,
        )
        return accuracy_gate(measured, Budget(max_drop=limits.max_drop))
    return drop_gate(facts.n, facts.drop, facts.drop_ci95, limits.max_drop)


def _time_gate(found: Found, ratio: TimeRatio, limits: ComparisonLimits) -> Gate:
    """Throughput is judged as the time of an image."""
    if limits.max_slowdown is not None and not ratio.decided:
        return _bound_gate(ratio, limits.max_slowdown)
    value, (low, high) = ratio.ratio, ratio.ci95
    if ratio.metric == "throughput":
        value, low, high = 1 / value, 1 / high, 1 / low
    what = "latency" if ratio.metric == "latency" else "time per image"
    return slowdown_gate(what, value, (low, high), limits.max_slowdown, found.flags)


def _bound_gate(ratio: TimeRatio, max_slowdown: float) -> Gate:
    """What the bounds of a ratio decide, which has no interval to rely on."""
    low, high = ratio.bounds if ratio.metric == "latency" else ratio.bounds[::-1]
    most = 1 + max_slowdown / 100 if ratio.metric == "latency" else 1 / (1 + max_slowdown / 100)
    sign = 1 if ratio.metric == "latency" else -1
    if high is not None and sign * (most - high) >= 0:
        return Gate("pass")
    text = f"{ratio.metric} {bound_words(ratio.bounds) or 'not decided'}"
    if low is not None and sign * (low - most) > 0:
        return Gate("fail", (f"{text} times the baseline's, budget {max_slowdown:+g} %",))
    return Gate("undecided", (f"{text}: {ratio.reason}",))


# --- Choose which engine of the candidate is compared with which of the baseline --------------------------------------


@dataclass(frozen=True)
class Pair:
    """The names of two engines, most often the same one."""

    baseline: str
    candidate: str

    @property
    def name(self) -> str:
        return self.candidate if self.baseline == self.candidate else f"{self.baseline} → {self.candidate}"


def pair_up(baseline: Sequence[str], candidate: Sequence[str]) -> tuple[list[Pair], list[str], list[str]]:
    """The pairs, in the candidate's order, a remark for each engine without a partner, and the targets for which only
    the baseline has engines.

    Engines with the same name are partners. An app gets a target's first engine: if the candidate no longer has that of
    the baseline, because it may have failed its budget, its own first one for the target is the partner. If no name is
    in both, and each side has one engine, these are partners.

    Raises:
        TargetError: there is no pair.
    """
    pairs = [Pair(name, name) for name in candidate if name in baseline]
    first, instead = _first_of_targets(baseline), _first_of_targets(candidate)
    pairs += [Pair(first[each], instead[each]) for each in first if each in instead and first[each] not in candidate]
    if not pairs and len(baseline) == len(candidate) == 1:
        return [Pair(baseline[0], candidate[0])], [], []
    if not pairs:
        raise TargetError(
            "the two have no engine in common",
            found=f"{', '.join(baseline) or 'none'} against {', '.join(candidate) or 'none'}",
            wanted="engines of one target on both sides, or one engine on each",
            fix="name the target that is to be compared with --target",
        )
    left = [f"{name} is in the baseline only" for name in baseline if name not in [p.baseline for p in pairs]]
    left += [f"{name} is in the candidate only" for name in candidate if name not in [p.candidate for p in pairs]]
    return pairs, left, [target for target in first if target not in instead]


def _first_of_targets(artifacts: Sequence[str]) -> dict[str, str]:
    """The first engine of each target; the name of an artifact is its target and its precision."""
    return {artifact.rpartition("-")[0]: artifact for artifact in reversed(artifacts)}


# --- Every digest of the two sides of a comparison, side by side ------------------------------------------------------


def of_bundle(manifest: Manifest) -> dict[str, str]:
    """The sha256 of every file of a bundle, and of its sources if recorded."""
    files = {entry.path: entry.sha256 for entry in manifest.files}
    try:
        return {**_inputs(decode(Provenance, manifest.provenance)), **files}
    except DecodeError:  # a bundle of something else than `run`
        return files


def of_report(report: Report) -> dict[str, str]:
    """The same of what a report lists: what it was made from, the exported graph, and what engines were compiled to."""
    return {**_inputs(report.provenance), **{each.path: each.sha256 for each in report.provenance.files}}


def _inputs(provenance: Provenance) -> dict[str, str]:
    data = {"calibration data": provenance.data.calibration, "evaluation data": provenance.data.evaluation}
    return {**provenance.source.sha256, **{name: digest for name, digest in data.items() if digest}}


def side_by_side(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> tuple[DigestPair, ...]:
    """A row for each name, in the baseline's order."""
    names = dict.fromkeys([*baseline, *candidate])
    return tuple(DigestPair(name, baseline.get(name), candidate.get(name)) for name in names)

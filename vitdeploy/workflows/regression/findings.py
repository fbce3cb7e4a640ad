"""The findings of a comparison of one pair of engines, and its gates; all JSON-ready."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitdeploy.document.comparison import AccuracyChange, Check, Limits, PairFacts, TimeRatio
from vitdeploy.spec import Budget, bound_words
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Gate, accuracy_gate, drop_gate, join, slowdown_gate


@dataclass(frozen=True)
class Found:
    """One pair. `accuracy` is None if it was not compared. `flags`: of either side's measurement. `same_engine`:
    both sides are one engine, on one machine."""

    name: str
    accuracy: AccuracyChange | None
    ratios: Sequence[TimeRatio]
    flags: Sequence[str] = ()
    same_engine: bool = False


def judge(found: Found, limits: Limits) -> tuple[PairFacts, Gate]:
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


def _accuracy_gate(found: Found, limits: Limits) -> Gate:
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


def _time_gate(found: Found, ratio: TimeRatio, limits: Limits) -> Gate:
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

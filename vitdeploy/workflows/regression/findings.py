"""What a comparison says of one pair of engines, and the gates of it; all JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitdeploy.verify.gate import Gate, drop_gate, join, slowdown_gate


@dataclass(frozen=True)
class Limits:
    """What the candidate may lose: points of accuracy, and percent of time. None is not judged."""

    max_drop: float | None
    max_slowdown: float | None


@dataclass(frozen=True)
class Found:
    """One pair. `accuracy` is None where it was not compared; it has "how", "n", "metric", "baseline", "candidate"
    (percents), "drop" and "drop_ci95" (points), "agreement" and "agreement_ci95" (percents); None what is not known.

    `ratios`: candidate / baseline, each with "metric" ("latency" or "throughput"), "ratio", "ci95", and where it is not
    to be relied on "decided", which is false, with a "reason". `flags`: of either side's measurement. `same_engine`:
    both sides are one engine, on one machine.
    """

    name: str
    accuracy: Mapping[str, Any] | None
    ratios: Sequence[Mapping[str, Any]]
    flags: Sequence[str] = ()
    same_engine: bool = False


def judge(found: Found, limits: Limits) -> tuple[dict[str, Any], Gate]:
    """The pair as the document has it, with one check for accuracy and one for each time, and the gate of all."""
    gates = {"accuracy": _accuracy_gate(found, limits)}
    if limits.max_slowdown is not None and found.same_engine:
        gates["latency"] = Gate("pass")
    elif limits.max_slowdown is not None and not found.ratios:
        gates["latency"] = Gate("undecided", ("max_slowdown needs times, and there are none",))
    for ratio in found.ratios:
        gates[ratio["metric"]] = _time_gate(found, ratio, limits)
    named = {
        name: Gate(gate.status, tuple(f"{found.name}: {reason}" for reason in gate.reasons))
        for name, gate in gates.items()
    }
    facts = {
        "engine": found.name,
        "accuracy": found.accuracy,
        "ratios": [{**ratio, "difference": _difference(ratio)} for ratio in found.ratios],
        "flags": list(found.flags),
        "same_engine": found.same_engine,
        "checks": [
            {"name": name, "status": gate.status, "reasons": list(gate.reasons)} for name, gate in gates.items()
        ],
    }
    return facts, join(list(named.values()))


def _difference(ratio: Mapping[str, Any]) -> str:
    """In words, what the interval of candidate / baseline says, as far as it can be relied on."""
    if not ratio.get("decided", True):
        return "not decided"
    low, high = ratio["ci95"]
    if low <= 1 <= high:
        return "no difference"
    return "faster" if (high < 1) == (ratio["metric"] == "latency") else "slower"


def _accuracy_gate(found: Found, limits: Limits) -> Gate:
    if found.accuracy is None:
        unknown = Gate("undecided", ("max_drop needs images with labels (--data)",))
        return Gate("none") if limits.max_drop is None else unknown
    facts = found.accuracy
    if limits.max_drop is not None and facts["drop"] is not None and facts["drop_ci95"] is None:
        return Gate(
            "undecided", (f"two recorded values of {facts['metric']} have no interval: give bundles and --data",)
        )
    return drop_gate(facts["n"], facts["drop"], facts["drop_ci95"], limits.max_drop)


def _time_gate(found: Found, ratio: Mapping[str, Any], limits: Limits) -> Gate:
    """Throughput is judged as the time of an image."""
    if limits.max_slowdown is not None and not ratio.get("decided", True):
        return Gate("undecided", (f"{ratio['metric']} not decided: {ratio['reason']}",))
    value, (low, high) = ratio["ratio"], ratio["ci95"]
    if ratio["metric"] == "throughput":
        value, low, high = 1 / value, 1 / high, 1 / low
    what = "latency" if ratio["metric"] == "latency" else "time per image"
    return slowdown_gate(what, value, (low, high), limits.max_slowdown, found.flags)

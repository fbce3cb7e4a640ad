"""Which artifact to ship, in one sentence that a person can defend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitdeploy.pipeline.measure import ORIGINAL
from vitdeploy.pipeline.plan import Candidate
from vitdeploy.spec import Budget
from vitdeploy.verify.gate import Gate, bound_gate, join


@dataclass(frozen=True)
class Verdict:
    """`gate` judges the recipe's own engines: the budget is met when one of them meets it."""

    sentence: str
    recommended: str
    gate: Gate


def engine_gate(accuracy: Gate, budget: Budget, size: int, row: Mapping[str, Any] | None) -> Gate:
    """One gate of accuracy, size and latency (left undecided where it was not measured)."""
    gates = [accuracy, bound_gate("size", size, budget.max_size, "bytes")]
    if budget.max_latency is not None:
        if row is None:
            gates.append(Gate("undecided", ("max_latency needs a bench",)))
        else:
            gates.append(
                bound_gate("p50 latency", row["latency_ms"]["p50"], budget.max_latency, "ms", tuple(row["flags"]))
            )
    return join(gates)


def decide(
    candidates: Sequence[Candidate],
    gates: Mapping[str, Gate],
    results: Sequence[Mapping[str, Any]],
    ratios: Sequence[Mapping[str, Any]],
) -> Verdict:
    """Recommend the fastest of all that may be shipped: the original, and engines whose gate does not fail."""
    latency = {row["artifact"]: float(row["latency_ms"]["p50"]) for row in results}
    allowed = [c for c in candidates if gates[c.artifact].status in ("pass", "none")]
    names = [ORIGINAL, *(c.artifact for c in allowed)]
    recommended = min(names, key=lambda name: latency[name])
    shipped = [c for c in candidates if c.shipped]
    gate = _best([gates[c.artifact] for c in shipped])
    return Verdict(_sentence(recommended, shipped, gates, ratios), recommended, gate)


def _best(gates: Sequence[Gate]) -> Gate:
    for status in ("pass", "none", "undecided"):
        for gate in gates:
            if gate.status == status:
                return gate
    return gates[0]


def _sentence(
    recommended: str, shipped: Sequence[Candidate], gates: Mapping[str, Gate], ratios: Sequence[Mapping[str, Any]]
) -> str:
    parts = []
    if recommended == ORIGINAL:
        parts.append("No engine is both within the budget and faster than the original: keep PyTorch.")
    else:
        ratio = _find(ratios, recommended, ORIGINAL)
        gain = ""
        if ratio is not None:
            low, high = 1 / ratio["ci95"][1], 1 / ratio["ci95"][0]
            gain = f": {1 / ratio['ratio']:.2f} times as fast as the original [{low:.2f}, {high:.2f}]"
        parts.append(f"Ship {recommended}{gain}.")
    for candidate in shipped:
        ratio = _find(ratios, candidate.artifact, f"{candidate.target}-fp32")
        if candidate.precision != "fp32" and ratio is not None:
            parts += _against_float(candidate, ratio)
        if gates[candidate.artifact].status in ("fail", "undecided"):
            word = "misses the budget" if gates[candidate.artifact].status == "fail" else "is undecided"
            parts.append(f"{candidate.artifact} {word}.")
    return " ".join(parts)


def _against_float(candidate: Candidate, ratio: Mapping[str, Any]) -> list[str]:
    """Said only where it is not the expected gain."""
    name = candidate.precision.upper()
    if ratio["ci95"][0] > 1:
        return [
            f"{name} is slower than FP32 on {candidate.target} (latency ratio {ratio['ratio']:.2f}): ship FP32 there."
        ]
    if ratio["ci95"][1] >= 1:
        return [f"{name} is no faster than FP32 on {candidate.target} (latency ratio {ratio['ratio']:.2f})."]
    return []


def _find(ratios: Sequence[Mapping[str, Any]], a: str, b: str) -> Mapping[str, Any] | None:
    return next((r for r in ratios if r["a"] == a and r["b"] == b and r["metric"] == "latency"), None)

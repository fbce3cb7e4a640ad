"""Which artifact to ship, in one sentence that a person can defend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitdeploy.pipeline.origin import ORIGINAL
from vitdeploy.pipeline.plan import Candidate
from vitdeploy.spec import Budget
from vitdeploy.verify.gate import Gate, bound_gate, join


@dataclass(frozen=True)
class Verdict:
    """`sentence` recommends; `remarks` say what it keeps and what speaks against the engines that were asked for.

    `gate` judges the recipe's own engines: the budget is met when one of them meets it.
    """

    sentence: str
    remarks: tuple[str, ...]
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
    verified: Mapping[str, Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    ratios: Sequence[Mapping[str, Any]],
) -> Verdict:
    """Recommend the fastest of all that may be shipped: the original, and every engine that keeps its answers.

    With a budget that is an engine whose gate passes; without one, an engine that does not provably lose accuracy.
    """
    latency = {row["artifact"]: float(row["latency_ms"]["p50"]) for row in results}
    allowed = [c for c in candidates if keeps_answers(gates[c.artifact], verified[c.artifact])]
    names = [ORIGINAL, *(c.artifact for c in allowed)]
    recommended = min(names, key=lambda name: latency[name])
    shipped = [c for c in candidates if c.shipped]
    gate = _best([gates[c.artifact] for c in shipped])
    remarks = [kept(recommended, verified[recommended])] if recommended != ORIGINAL else []
    for candidate in shipped:
        remarks += _remarks(candidate, gates[candidate.artifact], verified[candidate.artifact], ratios)
    return Verdict(sentence(recommended, ratios), tuple(remarks), recommended, gate)


def keeps_answers(gate: Gate, verified: Mapping[str, Any]) -> bool:
    """Whether an engine's answers may be shipped: they meet the budget, or without one nothing is provably lost."""
    return gate.status == "pass" or (gate.status == "none" and not _provably_loses(verified))


def _provably_loses(verified: Mapping[str, Any]) -> bool:
    """The whole interval of the drop is above zero; without labels nothing is proven."""
    return verified["drop_ci95"] is not None and verified["drop_ci95"][0] > 0


def _best(gates: Sequence[Gate]) -> Gate:
    for status in ("pass", "none", "undecided"):
        for gate in gates:
            if gate.status == status:
                return gate
    return gates[0]


def sentence(recommended: str, ratios: Sequence[Mapping[str, Any]]) -> str:
    """What to ship, and how much faster than the original that is."""
    if recommended == ORIGINAL:
        return "Keep the original: no engine is faster and keeps its answers."
    ratio = find_ratio(ratios, recommended, ORIGINAL)
    if ratio is None:
        return f"Ship {recommended}."
    low, high = 1 / ratio["ci95"][1], 1 / ratio["ci95"][0]
    return f"Ship {recommended}: {1 / ratio['ratio']:.2f} times as fast as the original [{low:.2f}, {high:.2f}]."


def kept(recommended: str, verified: Mapping[str, Any]) -> str:
    """How much of the original's answers and accuracy an engine keeps."""
    low, high = verified["agreement_ci95"]
    kept = f"{recommended} gives {verified['agreement']:.2f} % of the original's answers [{low:.2f}, {high:.2f}]"
    if verified["drop"] is None:
        return f"{kept}."
    low, high = verified["drop_ci95"]
    return f"{kept}; {verified['metric']} drop {_plain(verified['drop'])} points [{_plain(low)}, {_plain(high)}]."


def _remarks(
    candidate: Candidate, gate: Gate, verified: Mapping[str, Any], ratios: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What speaks against an engine that was asked for; nothing where it is faster and keeps the answers."""
    remarks = []
    name, ratio = candidate.precision.upper(), find_ratio(ratios, candidate.artifact, f"{candidate.target}-fp32")
    if ratio is not None and ratio["ci95"][0] > 1:
        remarks.append(
            f"{name} is slower than FP32 on {candidate.target} (latency ratio {ratio['ratio']:.2f}): ship FP32 there."
        )
    elif ratio is not None and ratio["ci95"][1] >= 1:
        remarks.append(f"{name} is not provably faster than FP32 on {candidate.target}.")
    if gate.status == "none" and _provably_loses(verified):
        low, high = verified["drop_ci95"]
        remarks.append(
            f"{candidate.artifact} loses {verified['drop']:.2f} points of {verified['metric']} [{low:.2f}, {high:.2f}]."
        )
    if gate.status in ("fail", "undecided"):
        word = "misses the budget" if gate.status == "fail" else "is not proven to meet the budget"
        remarks.append(f"{candidate.artifact} {word}.")
    return remarks


def _plain(value: float) -> str:
    """Two decimals, without the sign of a zero."""
    return f"{value + 0.0 if abs(value) >= 0.005 else 0.0:.2f}"


def find_ratio(ratios: Sequence[Mapping[str, Any]], a: str, b: str) -> Mapping[str, Any] | None:
    """The measured ratio of two latencies, None where the pair was not compared."""
    return next((r for r in ratios if r["a"] == a and r["b"] == b and r["metric"] == "latency"), None)

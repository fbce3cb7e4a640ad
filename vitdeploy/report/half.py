"""Half precision that is typed in an engine's graph, as the page shows it: what is in float32 and why, what is lost."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.engine import HalfFacts
from vitdeploy.document.report import Report
from vitdeploy.report import text

_TYPES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class HalfTyped:
    """One engine: a line of summary, the operations in float32 with the reason of each, and the tensors that lose most
    of their numbers to zero, each with the share that it loses."""

    artifact: str
    summary: str
    float32: dict[str, str]
    underflow: dict[str, str]


def half_engines(report: Report) -> list[HalfTyped]:
    """Every engine whose graph has types of half precision."""
    return [_typed(engine.artifact, engine.half) for engine in report.engines if engine.half is not None]


def _typed(artifact: str, facts: HalfFacts) -> HalfTyped:
    macs = facts.macs
    share = text.percent(macs.float32 / max(macs.half + macs.float32, 1))
    parts = [f"{share} of the products in float32", text.count(len(facts.float32), "operation") + " in float32"]
    if facts.residual_exponent:
        parts.append(f"residual stream scaled by 2^-{facts.residual_exponent}, exactly")
    underflow = {name: text.percent(lost) for name, lost in facts.underflow.items()}
    return HalfTyped(artifact, f"{_TYPES[facts.type]}: {', '.join(parts)}", dict(facts.float32), underflow)

"""The rows of a self-test's page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitdeploy.report import lookup, text
from vitdeploy.report.measures import Cell

# How a step ended, by the class of its chip.
CHIPS = {"done": "pass", "failed": "fail", "not run": "none"}


@dataclass(frozen=True)
class EngineRow:
    """One artifact of a model: an engine, or PyTorch, which has times alone."""

    artifact: str
    kernels: str
    provider: str
    agreement: Cell
    difference: str
    p50: str
    p99: str
    throughput: str
    ratio: Cell
    size: str
    flags: list[str]


def engine_rows(model: Mapping[str, Any]) -> list[EngineRow]:
    """Every artifact of a model, the one that the others are compared with first, where there is one."""
    bench = model["bench"] or {"results": [], "ratios": []}
    times = {row["artifact"]: row for row in bench["results"]}
    ratios = {row["a"]: row for row in bench["ratios"] if row["metric"] == "latency"}
    engines = {engine["artifact"]: engine for engine in model["engines"]}
    names = list(dict.fromkeys([*times, *engines]))
    return [_row(name, engines.get(name), times.get(name), ratios.get(name)) for name in names]


def _row(
    name: str, engine: Mapping[str, Any] | None, times: Mapping[str, Any] | None, ratio: Mapping[str, Any] | None
) -> EngineRow:
    verify = engine["verify"] if engine else None
    kernels = engine["kernels"] if engine else {}
    decided = ratio is not None and lookup.is_decided(ratio)
    latency = times["latency_ms"] if times else {}
    return EngineRow(
        artifact=name,
        kernels=", ".join(f"{count} in {kind}" for kind, count in kernels.items()) or text.MISSING,
        provider=(engine or times or {})["provider"],
        agreement=Cell(
            text.number(verify["agreement"]) if verify else text.MISSING,
            text.interval(verify["agreement_ci95"]) if verify else "",
        ),
        difference=text.small(verify["max_difference"]) if verify else text.MISSING,
        p50=text.significant(latency.get("p50")),
        p99=text.significant(latency.get("p99")),
        throughput=text.significant(times["throughput"]) if times else text.MISSING,
        ratio=Cell(
            text.significant(ratio["ratio"]) if decided and ratio else "not decided" if ratio else text.MISSING,
            text.ratio_interval(ratio["ci95"]) if decided and ratio else "",
        ),
        size=text.megabytes(engine["bytes"]) if engine else text.MISSING,
        flags=list(times["flags"]) if times else [],
    )

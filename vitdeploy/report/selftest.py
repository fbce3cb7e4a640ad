"""The rows of a self-test's page."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.benchmark.row import Row
from vitdeploy.document.bench import Ratio
from vitdeploy.document.selftest import SelftestDocument, SelftestEngine, SelftestModel, StepFacts, StepStatus
from vitdeploy.report import table, text
from vitdeploy.report.measures import Cell

# How a step ended, by the class of its chip.
CHIPS: dict[StepStatus, str] = {"done": "pass", "failed": "fail", "not run": "none"}


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


@dataclass(frozen=True)
class ModelView:
    """One model; `reference`: what the ratios are to, None without any."""

    name: str
    trained: bool
    rows: list[EngineRow]
    reference: str | None


@dataclass(frozen=True)
class StepsView:
    """The section of the steps; `chips`: how each way to end is coloured."""

    steps: tuple[StepFacts, ...]
    chips: dict[StepStatus, str]


def steps_view(document: SelftestDocument) -> list[StepsView]:
    """The section of the steps."""
    return [StepsView(document.steps, CHIPS)]


def model_views(document: SelftestDocument) -> list[ModelView]:
    """A section for each model."""
    return [_model_view(model) for model in document.models]


def _model_view(model: SelftestModel) -> ModelView:
    ratios = model.bench.ratios if model.bench else ()
    return ModelView(model.name, model.trained, engine_rows(model), ratios[0].b if ratios else None)


def engine_rows(model: SelftestModel) -> list[EngineRow]:
    """Every artifact of a model, the one that the others are compared with first, where there is one."""
    bench = model.bench
    times = {row.artifact: row for row in bench.results} if bench else {}
    ratios = {ratio.a: ratio for ratio in bench.ratios if ratio.metric == "latency"} if bench else {}
    engines = {engine.artifact: engine for engine in model.engines}
    names = list(dict.fromkeys([*times, *engines]))
    return [_row(name, engines.get(name), times.get(name), ratios.get(name)) for name in names]


def _row(name: str, engine: SelftestEngine | None, times: Row | None, ratio: Ratio | None) -> EngineRow:
    verify = engine.verify if engine else None
    kernels = engine.kernels if engine else {}
    source = engine or times
    latency = times.latency_ms if times else None
    return EngineRow(
        artifact=name,
        kernels=", ".join(f"{count} in {kind}" for kind, count in kernels.items()) or text.MISSING,
        provider=source.provider if source else text.MISSING,
        agreement=table.agreement(verify) if verify else Cell(text.MISSING),
        difference=text.small(verify.max_difference) if verify else text.MISSING,
        p50=text.significant(latency.p50 if latency else None),
        p99=text.significant(latency.p99 if latency else None),
        throughput=text.significant(times.throughput) if times else text.MISSING,
        ratio=Cell(
            text.MISSING if ratio is None else text.significant(ratio.ratio) if ratio.decided else "not decided",
            text.ratio_interval(ratio.ci95) if ratio and ratio.decided else "",
        ),
        size=text.megabytes(engine.bytes) if engine else text.MISSING,
        flags=list(times.flags) if times else [],
    )

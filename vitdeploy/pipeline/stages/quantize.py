"""Calibration, and the graphs of one target in one precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import batches
from vitdeploy.errors import CapabilityError, GraphError, TargetError
from vitdeploy.graph.io import fixed_batch, get_metadata, graph_spec, load_graph, save_graph, set_metadata
from vitdeploy.graph.normalise import drop_unused
from vitdeploy.pipeline.progress import Counter, Progress, silent
from vitdeploy.pipeline.stages.files import MODEL_FILE, graphs_in, write_json
from vitdeploy.quantize.observers import BATCH, observe
from vitdeploy.quantize.placement import choose, place, shape
from vitdeploy.quantize.prepare import prepare
from vitdeploy.quantize.scores import separate_scores
from vitdeploy.quantize.statistics import load_statistics, save_statistics
from vitdeploy.spec import TARGETS, Precision


def calibrate(graph: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Writes statistics.npz, of every layer's input over the samples, and ranges.json: its bounds."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    if metadata.precision is not None:
        raise GraphError(
            f"{graph} is quantized or placed already",
            found=f"{metadata.precision} for {metadata.target}",
            wanted="the float graph written by `vitdeploy export`",
        )
    separate_scores(model)  # so that queries and keys are tensors of their own, which some target quantizes
    count = Counter(progress, "calibrate", len(samples))
    size = fixed_batch(graph_spec(model, MODEL_FILE)) or BATCH
    pixels = batches(samples, metadata.images, size)
    found = observe(model, _whole(pixels, size, len(samples)) if size != BATCH else pixels, metadata.images, count)
    save_statistics(found, out / "statistics.npz")
    bounds = {name: {"low": float(each.low.min()), "high": float(each.high.max())} for name, each in found.items()}
    write_json(out / "ranges.json", bounds)


def _whole(pixels: Any, size: int, total: int) -> Any:
    """Only whole batches, for a graph with a fixed one."""
    if total < size:
        raise GraphError(
            f"the graph has the fixed batch {size}", found=f"{total} calibration images", wanted=f"at least {size}"
        )
    return (batch for batch in pixels if len(batch) == size)


@dataclass(frozen=True)
class PlaceConfig:
    target: str
    precision: Precision
    ignore: tuple[str, ...] = ()


def place_graphs(config: PlaceConfig, folder: Path, statistics: Path | None, out: Path) -> None:
    """Writes the placement of every graph in `folder`; errors as `place_graph`."""
    for file in graphs_in(folder).values():
        place_graph(config, file, statistics, out)


def place_graph(config: PlaceConfig, graph: Path, statistics: Path | None, out: Path) -> dict[str, Any]:
    """Writes the graph for one target in one precision under its own file name, and placement.json."""
    check_precision(config.target, config.precision)
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    placed: dict[str, Any] = {"target": config.target, "int8": (), "float": {}}
    if config.precision == "int8":
        if statistics is None:
            raise GraphError("INT8 needs calibration", wanted="images", fix="--data DIR")
        shape(model, config.target, config.ignore)
        layers = choose(model, config.target, config.ignore).int8
        prepared = prepare(model, load_statistics(statistics), layers, config.target)
        placed = asdict(place(model, prepared.ranges, config.target, config.ignore, prepared.weights))
        placed["folds"] = [asdict(fold) for fold in prepared.folds]
        placed["hidden"] = [asdict(each) for each in prepared.hidden]
        drop_unused(model)
    set_metadata(model, replace(metadata, target=config.target, precision=config.precision))
    save_graph(model, out / graph.name)
    write_json(out / "placement.json", placed)
    return placed


def check_precision(target: str, precision: str) -> None:
    """Raise what `compile` would, before any work is done."""
    if target not in TARGETS:
        raise TargetError(f"no target is called {target!r}", wanted=", ".join(TARGETS))
    if precision not in TARGETS[target].precisions:
        raise CapabilityError(
            f"{target} cannot run {precision}",
            found=precision,
            wanted=", ".join(TARGETS[target].precisions),
            fix="choose one of these, or another target",
        )

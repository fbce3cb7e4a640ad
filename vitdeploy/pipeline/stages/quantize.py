"""Calibration, and the graphs of one target in one precision."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import batches
from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.files import (
    GraphMetadata,
    fixed_batch,
    get_metadata,
    graph_spec,
    load_graph,
    save_graph,
    set_metadata,
)
from vitdeploy.graph.passes.pixel_cast import cast_pixels_first
from vitdeploy.pipeline.capability import check_placed as check_placed
from vitdeploy.pipeline.capability import check_precision as check_precision
from vitdeploy.pipeline.progress import Counter, Progress, silent
from vitdeploy.pipeline.stages.files import MODEL_FILE, graphs_in, write_json
from vitdeploy.pipeline.stages.unfinished import load_state, save_state
from vitdeploy.quantize.estimate import estimate
from vitdeploy.quantize.image_checks import LEAST_IMAGES
from vitdeploy.quantize.observers import BATCH, Observation
from vitdeploy.quantize.placement import choose, place, shape
from vitdeploy.quantize.placement_reader import reject_quantized
from vitdeploy.quantize.prepare import prepare
from vitdeploy.quantize.scores import separate_scores
from vitdeploy.quantize.statistics import load_statistics, save_statistics
from vitdeploy.search.mixed import Mixed
from vitdeploy.spec import Precision, WeightBits

# What is observed is saved after each so many batches; an interruption loses no more.
SAVED_BATCHES = 32


def calibrate(
    graph: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent, scratch: Path | None = None
) -> dict[str, Any]:
    """Writes statistics.npz, of every layer's input over the samples, ranges.json: its bounds, and calibrate.json: the
    images, the memory estimated, and warnings of unsuitable images.

    With `scratch`, a folder for this graph and these samples, an interrupted calibration goes on from what it holds.

    Raises:
        GraphError: the graph is quantized already, or has a fixed batch of more images than there are.
        DataError: an activation is not finite, or no image has any detail.
    """
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    refuse_placed(model, metadata, graph)
    separate_scores(model)  # so that queries and keys are tensors of their own, which some target quantizes
    size = fixed_batch(graph_spec(model, MODEL_FILE)) or BATCH
    shown, left = samples[: len(samples) // size * size], len(samples) % size
    if not shown:
        raise GraphError(
            f"the graph has the fixed batch {size}",
            found=f"{len(samples)} calibration images",
            wanted=f"at least {size}",
        )
    names = [f"{sample.path.parent.name}/{sample.path.name}" for sample in shown]
    memory = estimate(model, size, len(shown))
    count = Counter(progress, f"calibrate (about {memory.total / 1e6:.0f} MB of memory)", len(shown))
    with Observation(model, metadata.images, len(shown)) as observation:
        if scratch is not None and (state := load_state(scratch)) is not None:
            observation.restore(state)
            count(observation.images)
        for pixels in batches(shown[observation.images :], metadata.images, size):
            observation.update(pixels, names[observation.images : observation.images + size])
            count(size)
            if scratch and observation.batches % SAVED_BATCHES == 0 and observation.images < len(shown):
                save_state(scratch, observation.state())
    found, warnings = observation.statistics(), _warnings(observation, names, size)
    if left:
        warnings.append(f"{left} of {len(samples)} calibration images are left out: the graph has the batch {size}.")
    save_statistics(found, out / "statistics.npz")
    bounds = {name: {"low": float(each.low.min()), "high": float(each.high.max())} for name, each in found.items()}
    write_json(out / "ranges.json", bounds)
    distinct = observation.checks.distinct
    facts = {"images": len(shown), "distinct": distinct, "memory": asdict(memory), "warnings": warnings}
    write_json(out / "calibrate.json", facts)
    return facts


def refuse_placed(model: ir.Model, metadata: GraphMetadata, graph: Path) -> None:
    """Raise GraphError for a graph that is quantized, or placed for a target, already."""
    if metadata.precision is not None:
        raise GraphError(
            f"{graph} is quantized or placed already",
            found=f"{metadata.precision} for {metadata.target}",
            wanted="the float graph written by `vitdeploy export`",
        )
    reject_quantized(model, str(graph))


def _warnings(observation: Observation, names: Sequence[str], size: int) -> list[str]:
    """What is wrong with the images of these names, which were shown in batches of `size`: a sentence each."""
    distinct, found = observation.checks.distinct, observation.checks.warnings(names)
    if distinct < LEAST_IMAGES:  # chance decides over the ranges
        images = f"{distinct} calibration image{'s' if distinct > 1 else ''}"
        images += f", {len(names)} with repetitions" if len(names) > distinct else ""
        return [
            *found,
            f"Only {images}: ranges will be too narrow for others, and weights are rounded to the nearest where GPTQ "
            "has too few rows. Some 100 images are usual.",
        ]
    for batch, times in observation.standing_out().items():
        image = " or ".join(names[batch * size : (batch + 1) * size])
        found.append(
            f"{image} alone makes many ranges wider, {times:.1f} times in the median: look whether it belongs to the "
            "calibration images."
        )
    return found


@dataclass(frozen=True)
class PlaceConfig:
    """`weight_bits`: of INT8 weights."""

    target: str
    precision: Precision
    ignore: tuple[str, ...] = ()
    weight_bits: WeightBits = 8


def place_graphs(
    config: PlaceConfig, folder: Path, statistics: Path | None, out: Path, mixed: Mixed | None = None
) -> None:
    """Writes the placement of every graph in `folder`; errors as `place_graph`."""
    for file in graphs_in(folder).values():
        place_graph(config, file, statistics, out, mixed)


def place_graph(
    config: PlaceConfig, graph: Path, statistics: Path | None, out: Path, mixed: Mixed | None = None
) -> dict[str, Any]:
    """Writes the graph for one target in one precision under its own file name, and placement.json.

    Args:
        mixed: what a search found, where the precision is mixed.
    """
    check_precision(config.target, config.precision)
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    placed: dict[str, Any] = {"target": config.target, "int8": (), "float": {}}
    bits = None
    if TARGETS[config.target].typed:
        cast_pixels_first(model)
    if config.precision in ("int8", "mixed"):
        if statistics is None:
            raise GraphError("INT8 needs calibration", wanted="images", fix="--data DIR")
        float_fallback = mixed.float_fallback if mixed is not None else ()
        ignore = (*config.ignore, *map(glob.escape, float_fallback))
        shape(model, config.target, config.ignore)
        layers = choose(model, config.target, ignore).int8
        overrides = mixed.overrides if mixed is not None else None
        bits = config.weight_bits
        prepared = prepare(model, load_statistics(statistics), layers, config.target, overrides, bits)
        placed = asdict(place(model, prepared.ranges, config.target, ignore, prepared.weights))
        placed["float"] |= dict.fromkeys(float_fallback, "worth its time in float")
        placed["folds"] = [{**asdict(fold), "what": fold.what} for fold in prepared.folds]
        placed["hidden"] = [{**asdict(each), "what": each.what} for each in prepared.hidden]
        drop_unused(model)
    set_metadata(model, replace(metadata, target=config.target, precision=config.precision, weight_bits=bits))
    save_graph(model, out / graph.name)
    write_json(out / "placement.json", placed)
    return placed

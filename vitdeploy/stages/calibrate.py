"""Calibration: what the inputs of layers hold on the calibration images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import batches
from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import fixed_batch, graph_spec
from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.quantization.estimate import estimate
from vitdeploy.quantization.image_checks import LEAST_IMAGES
from vitdeploy.quantization.observers import BATCH, Observation
from vitdeploy.quantization.scores import separate_scores
from vitdeploy.quantization.statistics import save_statistics
from vitdeploy.stages.calibrate_parts import calibrate_parts
from vitdeploy.stages.files import MODEL_FILE, STATISTICS_FILE, graphs_in, write_json
from vitdeploy.stages.float_graph import load_float_graph
from vitdeploy.stages.step import CALIBRATE, OPTIMIZE, Folders, Step
from vitdeploy.stages.tools import package_versions
from vitdeploy.stages.unfinished import load_state, save_state

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data
    from vitdeploy.tasks.drive import Drive

# Observations are saved after this many batches; an interruption loses no more.
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
    model, metadata = load_float_graph(graph)
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
    save_statistics(found, out / STATISTICS_FILE)
    bounds = {name: {"low": float(each.low.min()), "high": float(each.high.max())} for name, each in found.items()}
    write_json(out / "ranges.json", bounds)
    assert observation.checks is not None
    distinct = observation.checks.distinct
    facts = {"images": len(shown), "distinct": distinct, "memory": asdict(memory), "warnings": warnings}
    write_json(out / "calibrate.json", facts)
    return facts


def _warnings(observation: Observation, names: Sequence[str], size: int) -> list[str]:
    """Warnings about the images of these names, which were shown in batches of `size`: a sentence each."""
    assert observation.checks is not None
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


def calibrate_step(data: Data, drive: Drive | None = None) -> Step:
    """The statistics of the job's float graph on the calibration images; of a model of several graphs those of each,
    while `drive` runs them."""
    samples = data.calibration

    def write(folders: Folders, out: Path, progress: Progress, scratch: Path) -> None:
        if drive is not None:
            calibrate_parts(graphs_in(folders[OPTIMIZE].path), drive, out, progress)
        else:
            calibrate(folders[OPTIMIZE].path / MODEL_FILE, samples, out, progress, scratch)

    return Step(
        CALIBRATE,
        "calibrate",
        write,
        {},
        (OPTIMIZE,),
        {"images": data.calibration_digest},
        package_versions(("onnxruntime", "pillow", "numpy")),
        resumable=True,
    )

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
from vitdeploy.quantization.estimate import Memory, estimate
from vitdeploy.quantization.image_checks import LEAST_IMAGES
from vitdeploy.quantization.observers import BATCH, Observation
from vitdeploy.quantization.scores import separate_scores
from vitdeploy.quantization.statistics import save_statistics
from vitdeploy.runtime.host import usable_cores
from vitdeploy.stages.calibrate_parts import calibrate_parts
from vitdeploy.stages.calibrate_shards import THREADS, GraphFile, Shards, observe_head, sample_name
from vitdeploy.stages.files import MODEL_FILE, STATISTICS_FILE, graphs_in, write_json
from vitdeploy.stages.float_graph import load_float_graph
from vitdeploy.stages.step import CALIBRATE, OPTIMIZE, Folders, Step
from vitdeploy.stages.tools import package_versions
from vitdeploy.stages.unfinished import load_state, save_state
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.store import Store

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data
    from vitdeploy.tasks.drive import Drive

# More images than this are observed in shards.
IN_ONE = 256
# Runs at once hold no more activations than this.
AT_ONCE_BYTES = 1 << 30
# Of what an interrupted calibration leaves, where no store keeps shards.
SHARDS = "shards"
# Observations are saved after this many batches; an interruption loses no more.
SAVED_BATCHES = 32


def calibrate(
    graph: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
    scratch: Path | None = None,
    workers: Workers = HERE,
    key: str | None = None,
) -> dict[str, Any]:
    """Writes statistics.npz, of every layer's input over the samples, ranges.json: its bounds, and calibrate.json: the
    images, the memory estimated, and warnings of unsuitable images.

    More than `IN_ONE` images are observed in shards, by `workers`: the same bytes on any.

    Args:
        scratch: a folder for this graph and these samples: an interrupted calibration goes on from what it holds.
        key: of the artifact that the graph lies in, by which workers elsewhere find it.

    Raises:
        GraphError: the graph is quantized already, or has a fixed batch of more images than there are.
        DataError: an activation is not finite, no image has any detail, or an image changed meanwhile.
        WorkerError: a worker died. Errors of the executor propagate.
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
    names, memory = [sample_name(sample) for sample in shown], estimate(model, size, len(shown))
    runs = _runs(memory, len(shown))
    told = memory.total + (runs["at_once"] - 1) * memory.activations
    count = Counter(progress, f"calibrate (about {told / 1e6:.0f} MB of memory)", len(shown))
    with Observation(model, metadata.images, len(shown), **runs) as observation:
        if scratch is not None and (state := load_state(scratch)) is not None:
            observation.restore(state)
            count(observation.images)
        if len(shown) <= IN_ONE:
            _observe_all(observation, shown, size, count, scratch)
        else:
            _observe_in_shards(observation, GraphFile.of(graph, key), shown, size, count, scratch, workers)
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


def _runs(memory: Memory, images: int) -> dict[str, int]:
    """The threads of each run, and how many are made at once: as the shards of many images have them, or one with all
    that the runtime takes."""
    if images <= IN_ONE:
        return {"threads": 0, "at_once": 1}
    return {"threads": THREADS, "at_once": max(1, min(usable_cores(), AT_ONCE_BYTES // max(memory.activations, 1)))}


def _observe_all(
    observation: Observation, shown: Sequence[Sample], size: int, count: Counter, scratch: Path | None
) -> None:
    assert observation.preprocess is not None
    for pixels in batches(shown[observation.images :], observation.preprocess, size):
        names = [sample_name(sample) for sample in shown[observation.images : observation.images + size]]
        observation.update(pixels, names)
        count(size)
        if scratch and observation.batches % SAVED_BATCHES == 0 and observation.images < len(shown):
            save_state(scratch, observation.state())


def _observe_in_shards(
    observation: Observation,
    graph: GraphFile,
    shown: Sequence[Sample],
    size: int,
    count: Counter,
    scratch: Path | None,
    workers: Workers,
) -> None:
    begun = observation.images
    observe_head(observation, shown, size, count)
    if scratch is not None and observation.images > begun:
        save_state(scratch, observation.state())
    kept = Store(scratch / SHARDS) if scratch is not None else None
    Shards(observation, graph, shown, size).observe(workers, workers.store or kept, count)


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


def calibrate_step(data: Data, drive: Drive | None = None, workers: Workers = HERE) -> Step:
    """The statistics of the job's float graph on the calibration images, many of them observed by `workers`; of a model
    of several graphs those of each, while `drive` runs them."""
    samples = data.calibration

    def write(folders: Folders, out: Path, progress: Progress, scratch: Path) -> None:
        if drive is not None:
            calibrate_parts(graphs_in(folders[OPTIMIZE].path), drive, out, progress)
        else:
            graph = folders[OPTIMIZE]
            calibrate(graph.path / MODEL_FILE, samples, out, progress, scratch, workers, graph.key)

    return Step(
        CALIBRATE,
        "calibrate",
        write,
        {},
        (OPTIMIZE,),
        {"images": data.calibration_digest},
        package_versions(("onnxruntime", "pillow", "numpy")),
        resumable=True,
        shared_out=drive is None and workers.executor is not None and len(samples) > IN_ONE,
    )

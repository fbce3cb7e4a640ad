"""Calibration: statistics of a float graph's tensors on the calibration images."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.data import decoding, folder
from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import fixed_batch, graph_spec
from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.quantization import observers, placement_reader, prepare, probe, ranges
from vitdeploy.runtime.host import usable_cores
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.stages import calibrate_shards, step
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.store import Store

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data, Drive


# --- Calibration of a model with several graphs, or with further inputs besides the image -----------------------------
# It observes the input of each layer while the whole float model runs.


class _ObservedRunner(Runner):
    """A runner of a float graph that passes all its inputs to an observation."""

    def __init__(self, observation: observers.Observation, name: str, noun: str) -> None:
        super().__init__(name)
        self.observation, self.noun = observation, noun
        self._own = [str(value.name) for value in observation.model.graph.outputs]

    def _load(self) -> None:
        runner = self.observation.runner.load()
        self.inputs = runner.inputs
        self.outputs = tuple(tensor for tensor in runner.outputs if tensor.name in self._own)
        self.provider = runner.provider

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        shown = f"run {self.observation.batches + 1} of the {self.name} graph"
        found = self.observation.show(feeds, shown, self.noun)
        return {name: found[name] for name in self._own}

    def _close(self) -> None:
        self.observation.runner.close()


def calibrate_parts(graphs: Mapping[str, Path], drive: Drive, out: Path, progress: Progress = silent) -> step.Facts:
    """Write the statistics of each graph, ranges.json (bounds by "part/tensor", or by tensor for a single graph), and
    calibrate.json.

    Raises:
        GraphError: a graph is already quantized, or no sample reached it.
        DataError: an activation is not finite.
    """
    models = {name: placement_reader.load_float_graph(file)[0] for name, file in graphs.items()}
    for model in models.values():
        ranges.separate_scores(model)
    memory = _together([probe.estimate(model, 1, drive.total) for model in models.values()])
    count = Counter(progress, f"calibrate (about {memory.total / 1e6:.0f} MB of memory)", drive.total)
    observations = {name: observers.Observation(model, None) for name, model in models.items()}
    with contextlib.ExitStack() as opened:
        runners = {name: _ObservedRunner(each, name, drive.noun) for name, each in observations.items()}
        for runner in runners.values():
            opened.enter_context(runner)
        drive(runners, count)
    bounds: dict[str, dict[str, float]] = {}
    for name, observation in observations.items():
        if not observation.batches:
            raise GraphError(f"no calibration {drive.noun} reach the {name} graph", found=f"{drive.total} {drive.noun}")
        found = observation.statistics()
        ranges.save_statistics(found, out / step.statistics_file(name))
        bounds |= {
            (f"{name}/{tensor}" if len(graphs) > 1 else tensor): {
                "low": float(each.low.min()),
                "high": float(each.high.max()),
            }
            for tensor, each in found.items()
        }
    step.write_json(out / "ranges.json", bounds)
    facts = {"images": drive.total, "distinct": drive.distinct, "memory": asdict(memory), "warnings": _warnings(drive)}
    step.write_json(out / "calibrate.json", facts)
    return facts


def _together(parts: list[probe.CalibrationMemory]) -> probe.CalibrationMemory:
    return probe.CalibrationMemory(
        *(sum(getattr(part, name) for part in parts) for name in ("graph", "activations", "covariances"))
    )


def _warnings(drive: Drive) -> list[str]:
    if drive.distinct >= prepare.LEAST_IMAGES:
        return drive.warnings()
    few = f"Only {drive.distinct} calibration {drive.noun}: ranges will be too narrow for new data. Use about 100."
    return [*drive.warnings(), few]


# --- Calibration of one graph: statistics of the layers' inputs on the calibration images -----------------------------


# More images than this are observed in shards.
IN_ONE = 256
# Limit on the activations of all concurrent runs, in bytes.
AT_ONCE_BYTES = 1 << 30
# The folder for the shards of an interrupted calibration if no store keeps them.
SHARDS = "shards"
# Observations are saved after this many batches; an interruption loses no more.
SAVED_BATCHES = 32


def calibrate(
    graph: Path,
    samples: Sequence[folder.Sample],
    out: Path,
    progress: Progress = silent,
    scratch: Path | None = None,
    workers: Workers = HERE,
    key: str | None = None,
) -> dict[str, Any]:
    """Write statistics.npz (the input of every layer over the samples), ranges.json (their bounds) and calibrate.json
    (the number of images, the estimated memory, and warnings about unsuitable images).

    `workers` observe more than `IN_ONE` images in shards; the result has the same bytes whatever they are.

    Args:
        scratch: a folder for this graph and these samples, from which an interrupted calibration resumes.
        key: the key of the graph's artifact, by which workers on other nodes find it.

    Raises:
        GraphError: the graph is already quantized, or its fixed batch is larger than the number of images.
        DataError: an activation is not finite, no image has any detail, or an image changed during the calibration.
        WorkerError: a worker died. Errors of the executor propagate.
    """
    model, metadata = placement_reader.load_float_graph(graph)
    ranges.separate_scores(model)  # makes queries and keys separate tensors, which some targets quantize
    size = fixed_batch(graph_spec(model, step.MODEL_FILE)) or observers.BATCH
    shown, left = samples[: len(samples) // size * size], len(samples) % size
    if not shown:
        raise GraphError(
            f"the graph has a fixed batch size of {size}",
            found=f"{len(samples)} calibration images",
            expected=f"at least {size}",
        )
    names, memory = [calibrate_shards.sample_name(sample) for sample in shown], probe.estimate(model, size, len(shown))
    runs = _runs(memory, len(shown))
    total = memory.total + (runs["at_once"] - 1) * memory.activations
    count = Counter(progress, f"calibrate (about {total / 1e6:.0f} MB of memory)", len(shown))
    with observers.Observation(model, metadata.images, len(shown), **runs) as observation:
        if scratch is not None and (state := calibrate_shards.load_state(scratch)) is not None:
            observation.restore(state)
            count(observation.images)
        if len(shown) <= IN_ONE:
            _observe_all(observation, shown, size, count, scratch)
        else:
            _observe_in_shards(
                observation, calibrate_shards.GraphFile.of(graph, key), shown, size, count, scratch, workers
            )
    found, warnings = observation.statistics(), _calibrate_warnings(observation, names, size)
    if left:
        warnings.append(f"{left} of {len(samples)} calibration images are left out: the graph's batch is {size}.")
    ranges.save_statistics(found, out / step.STATISTICS_FILE)
    bounds = {name: {"low": float(each.low.min()), "high": float(each.high.max())} for name, each in found.items()}
    step.write_json(out / "ranges.json", bounds)
    assert observation.checks is not None
    distinct = observation.checks.distinct
    facts = {"images": len(shown), "distinct": distinct, "memory": asdict(memory), "warnings": warnings}
    step.write_json(out / "calibrate.json", facts)
    return facts


def _runs(memory: probe.CalibrationMemory, images: int) -> dict[str, int]:
    """The threads of each run and the number of concurrent runs: those of shards if there are many images, otherwise
    one run with the runtime's default threads."""
    if images <= IN_ONE:
        return {"threads": 0, "at_once": 1}
    return {
        "threads": calibrate_shards.THREADS,
        "at_once": max(1, min(usable_cores(), AT_ONCE_BYTES // max(memory.activations, 1))),
    }


def _observe_all(
    observation: observers.Observation, shown: Sequence[folder.Sample], size: int, count: Counter, scratch: Path | None
) -> None:
    assert observation.preprocess is not None
    for pixels in decoding.batches(shown[observation.images :], observation.preprocess, size):
        names = [
            calibrate_shards.sample_name(sample) for sample in shown[observation.images : observation.images + size]
        ]
        observation.update(pixels, names)
        count(size)
        if scratch and observation.batches % SAVED_BATCHES == 0 and observation.images < len(shown):
            calibrate_shards.save_state(scratch, observation.state())


def _observe_in_shards(
    observation: observers.Observation,
    graph: calibrate_shards.GraphFile,
    shown: Sequence[folder.Sample],
    size: int,
    count: Counter,
    scratch: Path | None,
    workers: Workers,
) -> None:
    begun = observation.images
    calibrate_shards.observe_head(observation, shown, size, count)
    if scratch is not None and observation.images > begun:
        calibrate_shards.save_state(scratch, observation.state())
    kept = Store(scratch / SHARDS) if scratch is not None else None
    calibrate_shards.Shards(observation, graph, shown, size).observe(workers, workers.store or kept, count)


def _calibrate_warnings(observation: observers.Observation, names: Sequence[str], size: int) -> list[str]:
    """Warnings about the images of these names, which were observed in batches of `size`; one sentence each."""
    assert observation.checks is not None
    distinct, found = observation.checks.distinct, observation.checks.warnings(names)
    if distinct < prepare.LEAST_IMAGES:  # the ranges depend on chance
        images = f"{distinct} calibration image{'s' if distinct > 1 else ''}"
        images += f", {len(names)} with repetitions" if len(names) > distinct else ""
        return [
            *found,
            f"Only {images}: ranges will be too narrow for new data, and weights are rounded to nearest where GPTQ has "
            "too few rows. Use about 100 images.",
        ]
    for batch, times in observation.standing_out().items():
        image = " or ".join(names[batch * size : (batch + 1) * size])
        found.append(
            f"{image} alone widens many ranges (median {times:.1f} times): check whether it belongs to the calibration "
            "images."
        )
    return found


def calibrate_step(data: Data, drive: Drive | None = None, workers: Workers = HERE) -> step.Step:
    """The step for the statistics of the job's float graph on the calibration images; `workers` observe many of them.
    With a `drive`, which runs a model with several graphs, the statistics of each graph."""
    samples = data.calibration

    def write(folders: step.Folders, out: Path, progress: Progress, scratch: Path) -> None:
        if drive is not None:
            calibrate_parts(step.graphs_in(folders[step.OPTIMIZE].path), drive, out, progress)
        else:
            graph = folders[step.OPTIMIZE]
            calibrate(graph.path / step.MODEL_FILE, samples, out, progress, scratch, workers, graph.key)

    return step.Step(
        step.CALIBRATE,
        "calibrate",
        write,
        {},
        (step.OPTIMIZE,),
        {"images": data.calibration_digest},
        step.package_versions(("onnxruntime", "pillow", "numpy")),
        resumable=True,
        shared_out=drive is None and workers.executor is not None and len(samples) > IN_ONE,
    )

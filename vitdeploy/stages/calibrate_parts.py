"""Calibration of a model of several graphs: what each layer's input holds while the float model runs as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.errors import GraphError
from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.quantization.estimate import Memory, estimate
from vitdeploy.quantization.image_checks import LEAST_IMAGES
from vitdeploy.quantization.observers import Observation
from vitdeploy.quantization.scores import separate_scores
from vitdeploy.quantization.statistics import save_statistics
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.stages.files import Facts, statistics_file, write_json
from vitdeploy.stages.float_graph import load_float_graph

if TYPE_CHECKING:
    from vitdeploy.tasks.drive import Drive


class ObservedRunner(Runner):
    """A float graph as a runner that shows its observation everything that it is fed."""

    def __init__(self, observation: Observation, name: str, noun: str) -> None:
        super().__init__(name)
        self.observation, self.noun = observation, noun
        self._own = [str(value.name) for value in observation.model.graph.outputs]

    def _load(self) -> None:
        runner = self.observation.runner.load()
        self.inputs = runner.inputs
        self.outputs = tuple(tensor for tensor in runner.outputs if tensor.name in self._own)
        self.provider = runner.provider

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        shown = f"run {self.observation.batches + 1} of the graph {self.name}"
        found = self.observation.show(feeds, shown, self.noun)
        return {name: found[name] for name in self._own}

    def _close(self) -> None:
        self.observation.runner.close()


def calibrate_parts(graphs: Mapping[str, Path], drive: Drive, out: Path, progress: Progress = silent) -> Facts:
    """Writes the statistics of each graph, ranges.json: the bounds of all, by "part/tensor", and calibrate.json.

    Raises:
        GraphError: a graph is quantized already, or no sample reached one.
        DataError: an activation is not finite.
    """
    models = {name: load_float_graph(file)[0] for name, file in graphs.items()}
    for model in models.values():
        separate_scores(model)
    memory = _together([estimate(model, 1, drive.total) for model in models.values()])
    count = Counter(progress, f"calibrate (about {memory.total / 1e6:.0f} MB of memory)", drive.total)
    observations = {name: Observation(model, None) for name, model in models.items()}
    with contextlib.ExitStack() as opened:
        runners = {name: ObservedRunner(each, name, drive.noun) for name, each in observations.items()}
        for runner in runners.values():
            opened.enter_context(runner)
        drive(runners, count)
    bounds: dict[str, dict[str, float]] = {}
    for name, observation in observations.items():
        if not observation.batches:
            raise GraphError(f"the calibration {drive.noun} never reach the graph {name}", found=f"{drive.total}")
        found = observation.statistics()
        save_statistics(found, out / statistics_file(name))
        bounds |= {
            f"{name}/{tensor}": {"low": float(each.low.min()), "high": float(each.high.max())}
            for tensor, each in found.items()
        }
    write_json(out / "ranges.json", bounds)
    facts = {"images": drive.total, "distinct": drive.distinct, "memory": asdict(memory), "warnings": _warnings(drive)}
    write_json(out / "calibrate.json", facts)
    return facts


def _together(parts: list[Memory]) -> Memory:
    return Memory(*(sum(getattr(part, name) for part in parts) for name in ("graph", "activations", "covariances")))


def _warnings(drive: Drive) -> list[str]:
    if drive.distinct >= LEAST_IMAGES:
        return drive.warnings()
    few = f"Only {drive.distinct} calibration {drive.noun}: ranges will be too narrow for others. Some 100 are usual."
    return [*drive.warnings(), few]

"""Schedules of token merging that may pay on a target: see `search.schedules`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.data.folder import Sample
from vitdeploy.graph.io.files import load_graph
from vitdeploy.progress import Progress, silent
from vitdeploy.search.latency import measure_latencies
from vitdeploy.search.schedules import Schedule, find_tokens, predict_times, shapes_to_time, try_schedules
from vitdeploy.spec import decode, encode
from vitdeploy.stages.files import MODEL_FILE, read_json, write_json
from vitdeploy.stages.reference_outputs import float_reference_outputs
from vitdeploy.stages.step import OPTIMIZE, Folders, Step
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data

LATENCY_FILE, SCHEDULES_FILE = "latency.json", "schedules.json"
# Every schedule is a pass over this many images.
IMAGES = 32


@dataclass(frozen=True)
class Schedules:
    """`tokens`: how many there are without merging."""

    tokens: int
    schedules: tuple[Schedule, ...]


def find_schedules(target: str, graph: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Write latency.json, measured here, and schedules.json: the schedules that look promising by these times.

    Raises:
        GraphError: tokens of this graph cannot be merged.
    """
    tokens = find_tokens(load_graph(graph))
    table = measure_latencies(shapes_to_time(tokens), target, precisions=("int8",), progress=progress)
    predicted = predict_times(tokens, table)
    reference_outputs = float_reference_outputs(graph, samples[:IMAGES]) if predicted else None
    found = try_schedules(graph, predicted, reference_outputs, progress) if reference_outputs is not None else []
    table.save(out / LATENCY_FILE)
    write_json(out / SCHEDULES_FILE, encode(Schedules(tokens.count, tuple(found))))


def read_schedules(folder: Path) -> Schedules:
    return decode(Schedules, read_json(folder / SCHEDULES_FILE))


def schedules_step(target: str, data: Data) -> Step:
    """Schedules of token merging for the job's float graph."""
    samples = data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        find_schedules(target, folders[OPTIMIZE].path / MODEL_FILE, samples, out, progress)

    return Step(
        f"schedules {target}",
        "schedules",
        write,
        {"target": target},
        (OPTIMIZE,),
        {"images": data.calibration_digest},
        {**target_tools(target), **package_versions(("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy"))},
        measured=True,
    )

"""Find in which precision INT8 engines compute their float operators on this machine: see `search.rest_timing`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.compilation.backend import COMPILE
from vitdeploy.data.folder import Sample
from vitdeploy.graph.analysis.linears import find_linears
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.graph.io.files import fixed_batch, graph_spec, load_graph
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.search.float_rest import FloatRestTable
from vitdeploy.search.rest_timing import measure_float_rest, not_measured
from vitdeploy.spec import Task, WeightBits, encode
from vitdeploy.stages.asked_rest import FLOAT_REST, FLOAT_REST_FILE
from vitdeploy.stages.files import MODEL_FILE, STATISTICS_FILE, read_json, write_json
from vitdeploy.stages.place import PlaceConfig, place_graph
from vitdeploy.stages.reference_outputs import float_reference_outputs
from vitdeploy.stages.step import CALIBRATE, OPTIMIZE, Candidate, Folders, Step
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data

# MACs of linears and convolutions at batch 1. Below, an engine is done before a few percent can be told apart.
LEAST_MACS = 400_000_000


@dataclass(frozen=True)
class FloatRestConfig:
    target: str
    batch: int = 1
    ignore: tuple[str, ...] = ()
    weight_bits: WeightBits = 8


def has_half_rest(target: str, precision: str, task: Task) -> bool:
    """Whether an engine may be faster here with its float operators in bf16: INT8, of one graph, on such a CPU."""
    return precision == "int8" and task not in FLOWS and COMPILE[target].half_rest()


def find_float_rest(
    config: FloatRestConfig,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
) -> FloatRestTable:
    """Writes float_rest.json: what was measured of the model in plain INT8.

    Raises:
        GraphError, EngineError, CapabilityError, WorkerError: as `place_graph`, `compile_engine` and `run_benchmark`.
    """
    model = load_graph(graph)
    macs = sum(layer_macs(model, linear) or 0 for linear in find_linears(model))
    batch = fixed_batch(graph_spec(model, MODEL_FILE)) or config.batch
    if macs < LEAST_MACS:
        reason = f"{macs / 1e6:.0f} million products at batch 1, which are too few"
        found = not_measured(config.target, batch, reason)
    else:
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            place = PlaceConfig(config.target, "int8", config.ignore, config.weight_bits)
            place_graph(place, graph, statistics, Path(folder))
            placed, whole = Path(folder) / graph.name, float_reference_outputs(graph, samples)
            found = measure_float_rest(placed, config.target, batch, whole, progress=progress)
    write_json(out / FLOAT_REST_FILE, encode(found))
    return found


def float_rest_step(
    candidate: Candidate, batch: int, weight_bits: WeightBits, data: Data, ignore: tuple[str, ...] = ()
) -> Step:
    """The precision of a candidate's float operators; measured on this machine. Layers of `ignore` stay in float."""
    config, samples = FloatRestConfig(candidate.target, batch, ignore, weight_bits), data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph, statistics = folders[OPTIMIZE].path / MODEL_FILE, folders[CALIBRATE].path / STATISTICS_FILE
        find_float_rest(config, graph, statistics, samples, out, progress)

    return Step(
        candidate.step(FLOAT_REST),
        FLOAT_REST,
        write,
        asdict(config),
        (OPTIMIZE, CALIBRATE),
        {"images": data.calibration_digest},
        {**target_tools(candidate.target), **package_versions(("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy"))},
        measured=True,
        usable=lambda folder: not read_json(folder / FLOAT_REST_FILE)["disturbed"],
    )

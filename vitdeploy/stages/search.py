"""Searches on the calibration images: which layer costs how much in INT8, and which to override."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.data.folder import Sample
from vitdeploy.graph.io.files import load_graph
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.statistics import load_statistics
from vitdeploy.search.latency import load_table, measure_latencies
from vitdeploy.search.mixed import choose_mends, shapes_to_time
from vitdeploy.search.overrides import Mixed
from vitdeploy.search.sensitivity import Sensitivity, measure_sensitivity
from vitdeploy.search.trials import Trials, opened
from vitdeploy.spec import Budget, WeightBits, decode, encode
from vitdeploy.stages.files import MIXED_FILE, MODEL_FILE, STATISTICS_FILE, read_json, write_json
from vitdeploy.stages.reference_outputs import float_reference_outputs
from vitdeploy.stages.step import CALIBRATE, OPTIMIZE, Candidate, Folders, Step
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data

SENSITIVITY_FILE, SENSITIVITY_PAGE = "sensitivity.json", "sensitivity.html"
LATENCY_FILE = "latency.json"
# Every trial of a layer is a pass over this many images; the ranks are stable from a few tens on.
IMAGES = 32


@dataclass(frozen=True)
class SearchConfig:
    target: str
    ignore: tuple[str, ...] = ()
    weight_bits: WeightBits = 8


def find_sensitivity(
    config: SearchConfig,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
) -> Sensitivity:
    """Writes sensitivity.json: see `search.sensitivity`."""
    with open_trials(config, graph, statistics, samples[:IMAGES], progress) as trials:
        found = measure_sensitivity(trials, config.target, progress)
    write_json(out / SENSITIVITY_FILE, encode(found))
    return found


def find_mixed(
    config: SearchConfig,
    budget: Budget,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
    table: Path | None = None,
) -> Mixed:
    """Writes sensitivity.json, latency.json (measured here, unless `table` is given) and mixed.json, the overrides.

    Raises:
        MissingFileError, InputError, TargetError: `table` is not there, or not of this device and target.
    """
    known = load_table(table, config.target) if table is not None else None
    with open_trials(config, graph, statistics, samples, progress) as trials:
        latencies = known or measure_latencies(shapes_to_time(trials), config.target, progress=progress)
        sensitivity = measure_sensitivity(trials, config.target, progress)
        mixed = choose_mends(trials, sensitivity, latencies, budget, progress)
    write_json(out / SENSITIVITY_FILE, encode(sensitivity))
    latencies.save(out / LATENCY_FILE)
    write_json(out / MIXED_FILE, encode(mixed))
    return mixed


def read_sensitivity(folder: Path) -> Sensitivity:
    return decode(Sensitivity, read_json(folder / SENSITIVITY_FILE))


@contextmanager
def open_trials(
    config: SearchConfig,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    progress: Progress,
    images: int = IMAGES,
) -> Iterator[Trials]:
    """Trials of all layers at once run on all samples, those of single layers on the first few, `images`."""
    progress("open the layers", 0, 1)
    model, known, whole = load_graph(graph), load_statistics(statistics), float_reference_outputs(graph, samples)
    few = whole.first(images)
    with opened(model, known, config.target, few, config.ignore, whole, config.weight_bits) as trials:
        progress("open the layers", 1, 1)
        yield trials


def search_step(
    candidate: Candidate, weight_bits: WeightBits, budget: Budget, data: Data, ignore: tuple[str, ...] = ()
) -> Step:
    """The overrides of a candidate in mixed precision; measured on this machine. Layers of `ignore` stay in float."""
    config, samples = SearchConfig(candidate.target, ignore, weight_bits), data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph, statistics = folders[OPTIMIZE].path / MODEL_FILE, folders[CALIBRATE].path / STATISTICS_FILE
        find_mixed(config, budget, graph, statistics, samples, out, progress)

    return Step(
        candidate.step("search"),
        "search",
        write,
        {**asdict(config), "min_agreement": budget.min_agreement, "max_drop": budget.max_drop},
        (OPTIMIZE, CALIBRATE),
        {"images": data.calibration_digest},
        {**target_tools(candidate.target), **package_versions(("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy"))},
        measured=True,
    )

"""Searches on the calibration images: which layer costs how much in INT8, and which to override."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.data.folder import Sample
from vitdeploy.graph.io import load_graph
from vitdeploy.pipeline.progress import Progress, silent
from vitdeploy.pipeline.stages.files import read_json, write_json
from vitdeploy.pipeline.stages.score import float_reference_outputs
from vitdeploy.quantize.statistics import load_statistics
from vitdeploy.report.html import render_sensitivity
from vitdeploy.search.latency import load_table, measure_latencies
from vitdeploy.search.mixed import Mixed, choose_mends, shapes_to_time
from vitdeploy.search.sensitivity import Sensitivity, measure_sensitivity
from vitdeploy.search.trials import Trials, opened
from vitdeploy.spec import Budget, WeightBits, decode, encode

SENSITIVITY_FILE, SENSITIVITY_PAGE = "sensitivity.json", "sensitivity.html"
LATENCY_FILE, MIXED_FILE = "latency.json", "mixed.json"
# Every question about a layer is a pass over so many images; their ranks are steady from some tens on.
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
    with _trials(config, graph, statistics, samples[:IMAGES], progress) as trials:
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
    with _trials(config, graph, statistics, samples, progress) as trials:
        latencies = known or measure_latencies(shapes_to_time(trials), config.target, progress=progress)
        sensitivity = measure_sensitivity(trials, config.target, progress)
        mixed = choose_mends(trials, sensitivity, latencies, budget, progress)
    write_json(out / SENSITIVITY_FILE, encode(sensitivity))
    latencies.save(out / LATENCY_FILE)
    write_json(out / MIXED_FILE, encode(mixed))
    return mixed


def read_mixed(folder: Path) -> Mixed:
    return decode(Mixed, read_json(folder / MIXED_FILE))


def read_sensitivity(folder: Path) -> Sensitivity:
    return decode(Sensitivity, read_json(folder / SENSITIVITY_FILE))


@contextmanager
def _trials(
    config: SearchConfig, graph: Path, statistics: Path, samples: Sequence[Sample], progress: Progress
) -> Iterator[Trials]:
    """On all samples the questions about all layers at once, on the first of them those about single layers."""
    progress("open the layers", 0, 1)
    model, known, whole = load_graph(graph), load_statistics(statistics), float_reference_outputs(graph, samples)
    few = whole.first(IMAGES)
    with opened(model, known, config.target, few, config.ignore, whole, config.weight_bits) as trials:
        progress("open the layers", 1, 1)
        yield trials


def write_page(found: Sensitivity, name: str, out: Path) -> None:
    """Writes sensitivity.html, for a model of this name."""
    (out / SENSITIVITY_PAGE).write_text(render_sensitivity(found, name), encoding="utf-8")

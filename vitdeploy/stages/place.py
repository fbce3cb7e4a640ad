"""The graphs of one target in one precision, where that is no precision typed in the graph (see `typed`)."""

from __future__ import annotations

import glob
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitdeploy.backends import TARGETS
from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph, set_metadata
from vitdeploy.graph.passes.pixel_cast import cast_pixels_first
from vitdeploy.progress import Progress
from vitdeploy.quantization.placement import choose, place, shape
from vitdeploy.quantization.prepare import prepare
from vitdeploy.quantization.statistics import load_statistics
from vitdeploy.search.overrides import Mixed
from vitdeploy.spec import Precision, WeightBits, decode
from vitdeploy.stages.capability import check_precision
from vitdeploy.stages.files import MIXED_FILE, STATISTICS_FILE, graphs_in, read_json, write_json
from vitdeploy.stages.step import CALIBRATE, OPTIMIZE, QUANTIZED, Candidate, Folders, Step
from vitdeploy.stages.tools import backend_versions, package_versions


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


def place_step(candidate: Candidate, weight_bits: WeightBits) -> Step:
    """The placement of a candidate whose precision is not typed in the graph. `weight_bits`: of INT8 weights."""
    quantized, mixed = candidate.precision in QUANTIZED, candidate.precision == "mixed"
    config = PlaceConfig(candidate.target, candidate.precision, weight_bits=weight_bits if quantized else 8)

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        progress(candidate.step("place"), 0, 1)
        statistics = folders[CALIBRATE].path / STATISTICS_FILE if quantized else None
        found = decode(Mixed, read_json(folders[candidate.step("search")].path / MIXED_FILE)) if mixed else None
        place_graphs(config, folders[OPTIMIZE].path, statistics, out, found)
        progress(candidate.step("place"), 1, 1)

    return Step(
        candidate.step("place"),
        "place",
        write,
        asdict(config),
        (OPTIMIZE, *((CALIBRATE,) if quantized else ()), *((candidate.step("search"),) if mixed else ())),
        packages={**package_versions(("onnx", "onnx-ir", "numpy")), **backend_versions(candidate.target)},
    )

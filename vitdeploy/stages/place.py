"""Placement: the quantized graph for one target, from the float graph, its calibration and the searches' results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.document.engine import PlacementFacts
from vitdeploy.errors import GraphError, InputError
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph, set_metadata
from vitdeploy.graph.passes.folds import cast_pixels_first
from vitdeploy.progress import Progress
from vitdeploy.quantization import four_bits, ranges
from vitdeploy.quantization.placement import LayerPrecision, choose, place, shape
from vitdeploy.quantization.prepare import prepare
from vitdeploy.runtime.host import family
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.search.precision import FloatRestChoice, HighPrecision, Mixed
from vitdeploy.spec import FloatRest, Precision, Task, WeightBits, decode
from vitdeploy.stages.step import (
    CALIBRATE,
    HIGH_PRECISION,
    HIGH_PRECISION_FILE,
    MIXED_FILE,
    OPTIMIZE,
    QUANTIZED,
    Candidate,
    Facts,
    Folders,
    Search,
    Step,
    backend_versions,
    check_precision,
    graphs_in,
    package_versions,
    read_json,
    statistics_file,
    write_json,
)

PLACEMENT_FILE = "placement.json"
# Searches for the precisions of a placement.
FLOAT_REST = "float_rest"
MIXED_SEARCH = Search("search", MIXED_FILE, Mixed)
HIGH_PRECISION_SEARCH = Search(HIGH_PRECISION, HIGH_PRECISION_FILE, HighPrecision)
FLOAT_REST_SEARCH = Search(FLOAT_REST, "float_rest.json", FloatRestChoice)

# --- The graphs for one target and precision, unless the precision is typed in the graph (see `typed`) ----------------


@dataclass(frozen=True)
class PlaceConfig:
    """The target and precision of a placement. `weight_bits`: bits of INT8 weights. `float_parts`: graphs that stay in
    float, in a model with several; for such a model, `ignore` names layers as "part/layer"."""

    target: str
    precision: Precision
    ignore: tuple[str, ...] = ()
    weight_bits: WeightBits = 8
    float_parts: tuple[str, ...] = ()


def place_graphs(
    config: PlaceConfig, folder: Path, calibrated: Path | None, out: Path, asked: Sequence[LayerPrecision] = ()
) -> Facts:
    """Write the placement of every graph in `folder`, and placement.json; arguments and errors as in `place_graph`.

    Args:
        calibrated: the folder of a calibration, for INT8.

    Raises:
        GraphError: `ignore` matches no layer, or every graph is among the float parts.
    """
    graphs = graphs_in(folder)
    statistics = {name: calibrated / statistics_file(name) if calibrated is not None else None for name in graphs}
    if list(graphs) == ["model"]:
        return place_graph(config, graphs["model"], statistics["model"], out, asked)
    _check_parts(config, list(graphs))
    whole: Facts = {"target": config.target, "int8": [], "float": {}, "folds": [], "hidden": []}
    if config.precision == "int4":
        whole |= {"int4": [], "group": {}, "embeddings": []}
    for name, file in graphs.items():
        ignore = tuple(each.removeprefix(f"{name}/") for each in config.ignore if each.startswith(f"{name}/"))
        precision = "fp32" if name in config.float_parts else config.precision
        part = replace(config, precision=precision, ignore=ignore, float_parts=())
        placed = place_graph(part, file, statistics[name], out)
        for key, known in whole.items():
            of_part = placed.get(key, ())
            if isinstance(known, dict):
                known |= {f"{name}/{layer}": value for layer, value in dict(of_part).items()}
            elif key == "folds":
                known += [{**fold, "layers": [f"{name}/{layer}" for layer in fold["layers"]]} for fold in of_part]
            elif key == "hidden":
                known += [{**each, "layer": f"{name}/{each['layer']}"} for each in of_part]
            elif key != "target":
                known += [f"{name}/{layer}" for layer in of_part]
    write_json(out / PLACEMENT_FILE, whole)
    return whole


def read_placement(folder: Path) -> PlacementFacts:
    return decode(PlacementFacts, read_json(folder / PLACEMENT_FILE))


def check_float_parts(task: Task, float_parts: Sequence[str]) -> None:
    """Raise InputError if a model of this task has no graph with one of these names."""
    flow = flow_of(task)
    names = () if flow is None else flow.parts
    unknown = [name for name in float_parts if name not in names]
    if unknown:
        raise InputError(
            f"float_parts names unknown graphs: {', '.join(unknown)}",
            found=f"a model for the task {task}",
            expected=" or ".join(names) or "no float_parts: the model has a single graph",
        )


def _check_parts(config: PlaceConfig, names: list[str]) -> None:
    unknown = [each for each in config.ignore if each.partition("/")[0] not in names]
    if unknown:
        raise GraphError(
            f"no layer matches {', '.join(unknown)}",
            found=f"a model with the graphs {', '.join(names)}",
            expected="GRAPH/LAYER, with * as a wildcard",
        )
    if config.precision in QUANTIZED and not set(names) - set(config.float_parts):
        raise GraphError(
            "float_parts leaves no graph to quantize",
            found=f"precision {config.precision}, float parts {', '.join(config.float_parts)}",
            expected="at least one graph in INT8",
            fix="use --precision fp32 (in a recipe precision: fp32)",
        )


def place_graph(
    config: PlaceConfig,
    graph: Path,
    statistics: Path | None,
    out: Path,
    asked: Sequence[LayerPrecision] = (),
) -> Facts:
    """Write the graph for one target and precision under its own file name, and placement.json.

    Args:
        asked: precisions of single layers that searches have chosen; for INT8 and mixed.
    """
    check_precision(config.target, config.precision)
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    placed: Facts = {"target": config.target, "int8": (), "float": {}}
    bits = None
    if TARGETS[config.target].typed:
        cast_pixels_first(model)
    if config.precision in QUANTIZED and statistics is None:
        kind = "INT4" if config.precision == "int4" else "INT8"
        raise GraphError(f"{kind} needs calibration images", fix="--data DIR")
    if config.precision == "int4" and statistics is not None:
        four = four_bits.place_four_bits(model, ranges.load_statistics(statistics), config.target, config.ignore)
        placed = four.facts((), ())
    if config.precision in ("int8", "mixed") and statistics is not None:
        bits = config.weight_bits
        placed = place_int8(model, config, ranges.load_statistics(statistics), asked)
        drop_unused(model)
    set_metadata(model, replace(metadata, target=config.target, precision=config.precision, weight_bits=bits))
    save_graph(model, out / graph.name)
    write_json(out / PLACEMENT_FILE, placed)
    return placed


def place_int8(
    model: ir.Model,
    config: PlaceConfig,
    statistics: Mapping[str, ranges.Statistics],
    asked: Sequence[LayerPrecision] = (),
) -> Facts:
    """Quantize a float graph to INT8 in place; arguments as in `place_graph`. Returns what placement.json contains."""
    shape(model, config.target, config.ignore)
    chosen = choose(model, config.target, config.ignore, asked)
    prepared = prepare(model, statistics, chosen, config.weight_bits)
    placed = place(model, prepared.ranges, config.target, config.ignore, prepared.weights, asked=asked)
    return placed.facts(prepared.folds, prepared.hidden)


def _machine() -> dict[str, str]:
    """The machine's CPU family, which decides over layers except on x86."""
    return {} if family() in ("x86", "") else {"machine": family()}


def place_step(
    candidate: Candidate, plain: PlaceConfig, float_parts: tuple[str, ...] = (), *, raises: bool = False
) -> Step:
    """The step that places a candidate whose precision is not typed in the graph. `plain`: the config of plain INT8;
    `float_parts`: graphs that stay in float; `raises`: a step of the plan chooses layers for a higher precision."""
    config, quantized = PlaceConfig(candidate.target, candidate.precision), candidate.precision in QUANTIZED
    if quantized:
        config = replace(plain, precision=candidate.precision, float_parts=float_parts)
    by_need: dict[Search[Mixed] | Search[HighPrecision], bool] = {
        MIXED_SEARCH: candidate.precision == "mixed",
        HIGH_PRECISION_SEARCH: raises,
    }
    searches = {search: candidate.step(search.kind) for search, needed in by_need.items() if needed}
    shown = f"{'quantize' if quantized else 'write float graph'} for {candidate.target}"
    shown += " (insert Q/DQ nodes)" if quantized else ""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        progress(shown, 0, 1)
        calibrated = folders[CALIBRATE].path if quantized else None
        asked = [each for search, name in searches.items() for each in search.read(folders[name].path).precisions]
        place_graphs(config, folders[OPTIMIZE].path, calibrated, out, asked)
        progress(shown, 1, 1)

    return Step(
        candidate.step("place"),
        "place",
        write,
        asdict(config),
        (OPTIMIZE, *((CALIBRATE,) if quantized else ()), *searches.values()),
        packages={**package_versions(("onnx", "onnx-ir", "numpy")), **backend_versions(candidate.target), **_machine()},
    )


# --- The precision of an INT8 engine's float operators, from the recipe or from a step of the plan --------------------


@dataclass(frozen=True)
class AskedRest:
    """The precision `given`, or the result of the step named `step`, with its share of the `config` and `inputs` of a
    step that depends on it."""

    given: FloatRest = "fp32"
    step: str | None = None

    def of(self, folders: Folders) -> FloatRest:
        return FLOAT_REST_SEARCH.read(folders[self.step].path).best if self.step is not None else self.given

    @property
    def config(self) -> Facts:
        return {"float_rest": self.given} if self.given != "fp32" else {}

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.step,) if self.step is not None else ()


def rest_of(candidate: Candidate, rest: FloatRest | Literal["chosen"]) -> AskedRest:
    return AskedRest(step=candidate.step(FLOAT_REST)) if rest == "chosen" else AskedRest(rest)

"""Placement: a quantized graph for one target, of the float graph, its calibration, and what searches found."""

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
# What searches say of a placement's precisions.
FLOAT_REST = "float_rest"
MIXED_SEARCH = Search("search", MIXED_FILE, Mixed)
HIGH_PRECISION_SEARCH = Search(HIGH_PRECISION, HIGH_PRECISION_FILE, HighPrecision)
FLOAT_REST_SEARCH = Search(FLOAT_REST, "float_rest.json", FloatRestChoice)

# --- The graphs of one target in one precision, where that is no precision typed in the graph (see `typed`) -----------


@dataclass(frozen=True)
class PlaceConfig:
    """`weight_bits`: of INT8 weights. `float_parts`: graphs of a model of several that stay in float; there `ignore`
    names layers as "part/layer"."""

    target: str
    precision: Precision
    ignore: tuple[str, ...] = ()
    weight_bits: WeightBits = 8
    float_parts: tuple[str, ...] = ()


def place_graphs(
    config: PlaceConfig, folder: Path, calibrated: Path | None, out: Path, asked: Sequence[LayerPrecision] = ()
) -> Facts:
    """Writes the placement of every graph in `folder`, and placement.json; arguments and errors as `place_graph`.

    Args:
        calibrated: the folder of a calibration, for INT8.

    Raises:
        GraphError: `ignore` names no layer, or every graph is among the float parts.
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
    """Raise InputError if a model of this task has no graph of such a name."""
    flow = flow_of(task)
    names = () if flow is None else flow.parts
    unknown = [name for name in float_parts if name not in names]
    if unknown:
        raise InputError(
            f"the model has no graph called {', '.join(unknown)}",
            found=f"the task {task}",
            expected=" or ".join(names) or "no float_parts: it has one graph",
        )


def _check_parts(config: PlaceConfig, names: list[str]) -> None:
    unknown = [each for each in config.ignore if each.partition("/")[0] not in names]
    if unknown:
        raise GraphError(
            f"no layer matches {', '.join(unknown)}",
            found=f"a model of the graphs {', '.join(names)}",
            expected="GRAPH/LAYER, with * for any",
        )
    if config.precision in QUANTIZED and not set(names) - set(config.float_parts):
        raise GraphError(
            "every graph is to stay in float",
            found=f"precision {config.precision}, float parts {', '.join(config.float_parts)}",
            expected="at least one graph in INT8",
            fix="choose the precision fp32",
        )


def place_graph(
    config: PlaceConfig,
    graph: Path,
    statistics: Path | None,
    out: Path,
    asked: Sequence[LayerPrecision] = (),
) -> Facts:
    """Writes the graph for one target in one precision under its own file name, and placement.json.

    Args:
        asked: the precision of single layers, as searches found it; for INT8 and mixed.
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
        raise GraphError(f"{kind} needs calibration", expected="images", fix="--data DIR")
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
    """Write INT8 into a float graph, in place; arguments as of `place_graph`. Returns what placement.json says."""
    shape(model, config.target, config.ignore)
    chosen = choose(model, config.target, config.ignore, asked)
    prepared = prepare(model, statistics, chosen, config.weight_bits)
    placed = place(model, prepared.ranges, config.target, config.ignore, prepared.weights, asked=asked)
    return placed.facts(prepared.folds, prepared.hidden)


def _machine() -> dict[str, str]:
    """The kind of machine where it decides over layers, which on x86 it never did."""
    return {} if family() in ("x86", "") else {"machine": family()}


def place_step(
    candidate: Candidate, plain: PlaceConfig, float_parts: tuple[str, ...] = (), *, raises: bool = False
) -> Step:
    """The placement of a candidate whose precision is not typed in the graph. `plain`: the config of plain INT8;
    `float_parts`: graphs that stay in float; `raises`: the plan's step for layers out of plain INT8 says which are."""
    config, quantized = PlaceConfig(candidate.target, candidate.precision), candidate.precision in QUANTIZED
    if quantized:
        config = replace(plain, precision=candidate.precision, float_parts=float_parts)
    by_need: dict[Search[Mixed] | Search[HighPrecision], bool] = {
        MIXED_SEARCH: candidate.precision == "mixed",
        HIGH_PRECISION_SEARCH: raises,
    }
    searches = {search: candidate.step(search.kind) for search, needed in by_need.items() if needed}

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        progress(candidate.step("place"), 0, 1)
        calibrated = folders[CALIBRATE].path if quantized else None
        asked = [each for search, name in searches.items() for each in search.read(folders[name].path).precisions]
        place_graphs(config, folders[OPTIMIZE].path, calibrated, out, asked)
        progress(candidate.step("place"), 1, 1)

    return Step(
        candidate.step("place"),
        "place",
        write,
        asdict(config),
        (OPTIMIZE, *((CALIBRATE,) if quantized else ()), *searches.values()),
        packages={**package_versions(("onnx", "onnx-ir", "numpy")), **backend_versions(candidate.target), **_machine()},
    )


# --- The precision of an INT8 engine's float operators, as a recipe gives it or as a step of the plan finds it --------


@dataclass(frozen=True)
class AskedRest:
    """`given`, or what the step of the name `step` has found. Of a step that depends on it: what it adds to the
    `config` and to the `inputs`."""

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

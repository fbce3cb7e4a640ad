"""Placement: a quantized graph for one target, of the float graph and its calibration."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitdeploy.backends import TARGETS
from vitdeploy.errors import GraphError, InputError
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph, set_metadata
from vitdeploy.graph.passes.folds import cast_pixels_first
from vitdeploy.progress import Progress
from vitdeploy.quantization.four_bits import place_four_bits
from vitdeploy.quantization.placement import choose, place, shape
from vitdeploy.quantization.prepare import prepare
from vitdeploy.quantization.rounding import Rounded
from vitdeploy.quantization.statistics import load_statistics
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.runtime.host import family
from vitdeploy.search.high_precision import FloatRestTable, HighPrecision, Raised
from vitdeploy.search.trials import Mixed
from vitdeploy.spec import FloatRest, Precision, Task, WeightBits, decode
from vitdeploy.stages.step import (
    CALIBRATE,
    HIGH_PRECISION,
    HIGH_PRECISION_FILE,
    MIXED_FILE,
    OPTIMIZE,
    QUANTIZED,
    STATISTICS_FILE,
    Candidate,
    Facts,
    Folders,
    Step,
    backend_versions,
    check_precision,
    graphs_in,
    package_versions,
    read_json,
    statistics_file,
    write_json,
)

# --- The graphs of one target in one precision, where that is no precision typed in the graph (see `typed`) -----------


IN_FLOAT = "worth its time in float"


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
    config: PlaceConfig,
    folder: Path,
    calibrated: Path | None,
    out: Path,
    mixed: Mixed | None = None,
    raised: Raised | None = None,
) -> Facts:
    """Writes the placement of every graph in `folder`, and placement.json; errors as `place_graph`.

    Args:
        calibrated: the folder of a calibration, for INT8.

    Raises:
        GraphError: `ignore` names no layer, or every graph is among the float parts.
    """
    graphs = graphs_in(folder)
    if list(graphs) == ["model"]:
        statistics = calibrated / STATISTICS_FILE if calibrated is not None else None
        return place_graph(config, graphs["model"], statistics, out, mixed, raised)
    _check_parts(config, list(graphs))
    whole: Facts = {"target": config.target, "int8": [], "float": {}, "folds": [], "hidden": []}
    if config.precision == "int4":
        whole |= {"int4": [], "group": {}, "embeddings": []}
    for name, file in graphs.items():
        ignore = tuple(each.removeprefix(f"{name}/") for each in config.ignore if each.startswith(f"{name}/"))
        stays = name in config.float_parts
        own = replace(config, precision="fp32" if stays else config.precision, ignore=ignore, float_parts=())
        statistics = calibrated / statistics_file(name) if calibrated is not None else None
        placed = place_graph(own, file, statistics, out)
        whole["int8"] += [f"{name}/{layer}" for layer in placed["int8"]]
        if "int4" in placed:
            whole["int4"] += [f"{name}/{layer}" for layer in placed["int4"]]
            whole["group"] |= {f"{name}/{layer}": size for layer, size in placed["group"].items()}
            whole["embeddings"] += [f"{name}/{layer}" for layer in placed["embeddings"]]
        whole["float"] |= {f"{name}/{layer}": reason for layer, reason in placed["float"].items()}
        for fold in placed.get("folds", ()):
            whole["folds"].append({**fold, "layers": [f"{name}/{layer}" for layer in fold["layers"]]})
        whole["hidden"] += [{**each, "layer": f"{name}/{each['layer']}"} for each in placed.get("hidden", ())]
    write_json(out / "placement.json", whole)
    return whole


def check_float_parts(task: Task, float_parts: Sequence[str]) -> None:
    """Raise InputError if a model of this task has no graph of such a name."""
    names = FLOWS[task].parts if task in FLOWS else ()
    unknown = [name for name in float_parts if name not in names]
    if unknown:
        raise InputError(
            f"the model has no graph called {', '.join(unknown)}",
            found=f"the task {task}",
            wanted=" or ".join(names) or "no float_parts: it has one graph",
        )


def _check_parts(config: PlaceConfig, names: list[str]) -> None:
    unknown = [each for each in config.ignore if each.partition("/")[0] not in names]
    if unknown:
        raise GraphError(
            f"no layer matches {', '.join(unknown)}",
            found=f"a model of the graphs {', '.join(names)}",
            wanted="GRAPH/LAYER, with * for any",
        )
    if config.precision in QUANTIZED and not set(names) - set(config.float_parts):
        raise GraphError(
            "every graph is to stay in float",
            found=f"precision {config.precision}, float parts {', '.join(config.float_parts)}",
            wanted="at least one graph in INT8",
            fix="choose the precision fp32",
        )


def place_graph(
    config: PlaceConfig,
    graph: Path,
    statistics: Path | None,
    out: Path,
    mixed: Mixed | None = None,
    raised: Raised | None = None,
    rounding: Rounded | None = None,
) -> Facts:
    """Writes the graph for one target in one precision under its own file name, and placement.json.

    Args:
        mixed: what a search found, where the precision is mixed.
        raised: layers that are out of plain INT8, where the precision is INT8.
        rounding: what other placements of the graph have rounded.
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
        raise GraphError(f"{kind} needs calibration", wanted="images", fix="--data DIR")
    if config.precision == "int4" and statistics is not None:
        four = place_four_bits(model, load_statistics(statistics), config.target, config.ignore)
        placed = {**asdict(four), "int8": (), "folds": (), "hidden": ()}
    if config.precision in ("int8", "mixed") and statistics is not None:
        float_fallback, dynamic = _out_of_int8(mixed, raised)
        ignore = (*config.ignore, *map(glob.escape, float_fallback))
        shape(model, config.target, config.ignore)
        layers = choose(model, config.target, ignore, dynamic)
        overrides = mixed.overrides if mixed is not None else None
        bits, known = config.weight_bits, load_statistics(statistics)
        prepared = prepare(model, known, layers.int8, config.target, overrides, bits, layers.dynamic, rounding)
        made = place(model, prepared.ranges, config.target, ignore, prepared.weights, dynamic=dynamic)
        placed = asdict(made)
        placed["float"] |= dict.fromkeys(float_fallback, IN_FLOAT)
        if raised is not None:
            placed["why"] = raised.why
        placed["folds"] = [{**asdict(fold), "what": fold.what} for fold in prepared.folds]
        placed["hidden"] = [{**asdict(each), "what": each.what} for each in prepared.hidden]
        drop_unused(model)
    set_metadata(model, replace(metadata, target=config.target, precision=config.precision, weight_bits=bits))
    save_graph(model, out / graph.name)
    write_json(out / "placement.json", placed)
    return placed


def _out_of_int8(mixed: Mixed | None, raised: Raised | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layers in float, and those whose activations the runtime quantizes."""
    in_float = mixed.float_fallback if mixed is not None else ()
    if raised is None:
        return in_float, ()
    return (raised.layers, ()) if raised.form == "float" else (in_float, raised.layers)


def _machine() -> dict[str, str]:
    """The kind of machine where it decides over layers, which on x86 it never did."""
    return {} if family() in ("x86", "") else {"machine": family()}


def read_high_precision(folder: Path) -> HighPrecision:
    """What a search for layers out of plain INT8 found."""
    return decode(HighPrecision, read_json(folder / HIGH_PRECISION_FILE))


def place_step(
    candidate: Candidate,
    weight_bits: WeightBits,
    float_parts: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    *,
    raises: bool = False,
) -> Step:
    """The placement of a candidate whose precision is not typed in the graph. `weight_bits`: of INT8 weights;
    `float_parts`: graphs that stay in float; `ignore`: layers that do; `raises`: the plan's step for layers out of
    plain INT8 says which are."""
    quantized, mixed = candidate.precision in QUANTIZED, candidate.precision == "mixed"
    bits = weight_bits if quantized else 8
    parts, left = (float_parts, ignore) if quantized else ((), ())
    config = PlaceConfig(candidate.target, candidate.precision, left, bits, parts)

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        progress(candidate.step("place"), 0, 1)
        calibrated = folders[CALIBRATE].path if quantized else None
        found = decode(Mixed, read_json(folders[candidate.step("search")].path / MIXED_FILE)) if mixed else None
        high = read_high_precision(folders[candidate.step(HIGH_PRECISION)].path) if raises else None
        place_graphs(config, folders[OPTIMIZE].path, calibrated, out, found, high.raised if high else None)
        progress(candidate.step("place"), 1, 1)

    return Step(
        candidate.step("place"),
        "place",
        write,
        asdict(config),
        (OPTIMIZE, *((CALIBRATE,) if quantized else ()), *_searches(candidate, mixed, raises)),
        packages={**package_versions(("onnx", "onnx-ir", "numpy")), **backend_versions(candidate.target), **_machine()},
    )


def _searches(candidate: Candidate, mixed: bool, raises: bool) -> tuple[str, ...]:
    """The names of the steps that search before the placement."""
    asked = {"search": mixed, HIGH_PRECISION: raises}
    return tuple(candidate.step(kind) for kind, wanted in asked.items() if wanted)


# --- The precision of an INT8 engine's float operators, as a recipe gives it or as a step of the plan finds it --------


FLOAT_REST, FLOAT_REST_FILE = "float_rest", "float_rest.json"


@dataclass(frozen=True)
class AskedRest:
    """`given`, or what the step of the name `step` has found. Of a step that depends on it: what it adds to the
    `config` and to the `inputs`."""

    given: FloatRest = "fp32"
    step: str | None = None

    def of(self, folders: Folders) -> FloatRest:
        return read_float_rest(folders[self.step].path).best if self.step is not None else self.given

    @property
    def config(self) -> dict[str, Any]:
        return {"float_rest": self.given} if self.given != "fp32" else {}

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.step,) if self.step is not None else ()


def rest_of(candidate: Candidate, rest: FloatRest | Literal["measured"]) -> AskedRest:
    return AskedRest(step=candidate.step(FLOAT_REST)) if rest == "measured" else AskedRest(rest)


def read_float_rest(folder: Path) -> FloatRestTable:
    return decode(FloatRestTable, read_json(folder / FLOAT_REST_FILE))

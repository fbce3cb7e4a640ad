"""Graphs of targets whose precision is typed in the graph: float16, bfloat16, or INT8 with the rest in float16."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from vitdeploy.data import decoding, folder
from vitdeploy.data.inputs import InputFiles
from vitdeploy.graph.analysis import rows, work
from vitdeploy.graph.canonical.normalise import upgrade_opset
from vitdeploy.graph.half.half import Half, emulate, patches_to_matmul, touches_floats, type_graph
from vitdeploy.graph.io.files import fixed_batch, graph_spec, load_graph, save_graph, set_metadata
from vitdeploy.graph.passes.folds import cast_pixels_first
from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.quantization import observers, placement_reader, prepare
from vitdeploy.quantization.half import HalfPlan, lift_masks, plan_half
from vitdeploy.quantization.placement import IGNORED, LayerPrecision, ignored, place
from vitdeploy.quantization.ranges import Statistics, load_statistics, range_of
from vitdeploy.runtime.inputs import Further, stacked
from vitdeploy.search.precision import layers_by_worth
from vitdeploy.spec import Precision, PreprocessSpec, WeightBits
from vitdeploy.stages import search, step
from vitdeploy.stages.place import PLACEMENT_FILE, PlaceConfig, place_int8

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data

# The first opset with float16 scales of Q/DQ nodes and with FP8.
QDQ_OPSET = 19
EIGHT_BITS = ("int8", "fp8")
BATCH = 4
# At most this share of the MACs of linears and convolutions stays out of INT8; no GPU has a cost table.
MACS_SHARE = 0.1
TOO_DEAR = "INT8 changes more answers here than the layer's share of the MACs justifies"
# Tensors in which a larger share of the values underflows to zero are reported.
UNDERFLOW = 0.01


@dataclass(frozen=True)
class RangeImages:
    """The images of a range pass: the samples, their preprocessing, and their further inputs."""

    samples: Sequence[folder.Sample]
    preprocess: PreprocessSpec
    inputs: InputFiles | None = None

    def batches(self, model: ir.Model) -> Iterator[tuple[np.ndarray, Further]]:
        """Batches of uint8 [n, height, width, channels], with their further inputs [n, ...] by name. Samples that do
        not fill a fixed batch are left out."""
        fixed = fixed_batch(graph_spec(model, step.MODEL_FILE))
        shown, size = self.samples[: len(self.samples) // fixed * fixed if fixed else None], fixed or BATCH
        for number, pixels in enumerate(decoding.batches(shown, self.preprocess, size)):
            samples = shown[number * size : number * size + len(pixels)]
            yield pixels, {} if self.inputs is None else stacked(list(self.inputs.each(samples)))


def place_typed(
    config: PlaceConfig,
    graph: Path,
    statistics: Path | None,
    samples: Sequence[folder.Sample],
    out: Path,
    progress: Progress = silent,
    inputs: InputFiles | None = None,
) -> step.Facts:
    """Write the typed graph under its own file name, and placement.json. With INT8 and FP8, the rest is in float16;
    with INT8, so are the layers whose cost is highest for the time that they save (see `layers_by_worth`), and
    sensitivity.json is written too.

    Args:
        statistics: statistics of the layers' inputs, for INT8 and FP8.
        samples: the samples for the ranges of all tensors and for the evaluation of the typed graph.
        inputs: further inputs of the samples, for a model that takes more than the image; not for INT8.

    Raises:
        GraphError: the graph is already placed or quantized.
        DataError: an activation is not finite in float32 or in half precision; names the node.
    """
    step.check_precision(config.target, config.precision)
    model, metadata = placement_reader.load_float_graph(graph)
    eight, half = config.precision in EIGHT_BITS, half_of(config.precision)
    if eight:
        upgrade_opset(model, QDQ_OPSET)
    images = RangeImages(samples, metadata.images, inputs)
    plan = _prepare_types(model, half, images, () if eight else config.ignore, progress)
    placed: step.Facts = {"target": config.target, "int8": (), "float": {}}
    if eight:
        assert statistics is not None
        kept_float: list[str] = []
        if config.precision == "int8":
            plain = PlaceConfig(config.target, "int8", config.ignore)
            costs = search.find_sensitivity(plain, search.CalibratedGraph(graph, statistics, samples), out, progress)
            plain_graph = load_graph(graph)
            macs = {linear.name: work.layer_macs(plain_graph, linear) or 0 for linear in rows.find_linears(plain_graph)}
            in_float, _ = layers_by_worth(costs, macs, MACS_SHARE * sum(macs.values()), lambda left: False)
            kept_float = list(in_float)
        placed = _place(model, config, load_statistics(statistics), plan, kept_float)
    placed["half"] = _write_types(model, half, plan, images, progress)
    bits: WeightBits | None = 8 if config.precision == "int8" else None
    set_metadata(model, replace(metadata, target=config.target, precision=config.precision, weight_bits=bits))
    save_graph(model, out / graph.name)
    step.write_json(out / PLACEMENT_FILE, placed)
    return placed


def half_of(precision: Precision) -> Half:
    return "bf16" if precision == "bf16" else "fp16"


def _place(
    model: ir.Model, config: PlaceConfig, known: dict[str, Statistics], plan: HalfPlan, kept_float: Sequence[str]
) -> step.Facts:
    """INT8 or FP8 in all layers except those that stay in float."""
    by_name = {linear.name: str(linear.node.name) for linear in rows.find_linears(model)}
    asked = [LayerPrecision(name, "float", IGNORED) for name, node in by_name.items() if node in plan.float_fallback]
    if config.precision == "fp8":
        ranges = {name: range_of(found) for name, found in prepare.widened(known).items()}
        return place(model, ranges, config.target, config.ignore, fp8=True, asked=asked).facts((), ())
    asked += [LayerPrecision(name, "float", TOO_DEAR) for name in kept_float]
    return place_int8(model, config, known, asked)


def _prepare_types(
    model: ir.Model, half: Half, images: RangeImages, ignore: Sequence[str], progress: Progress
) -> HalfPlan:
    """Prepare a float32 graph for its types, in place. Layers in `ignore` stay in float32."""
    lift_masks(model)
    cast_pixels_first(model)
    if half == "bf16":
        patches_to_matmul(model)
    plan = plan_half(model, _extremes(model, images, "measure tensor ranges", progress).largest(), half)
    nodes = {linear.name: str(linear.node.name) for linear in rows.find_linears(model)}
    asked = {nodes[name]: IGNORED for name in ignored(list(nodes), ignore)}
    return replace(plan, float_fallback={**plan.float_fallback, **asked})


def _write_types(model: ir.Model, half: Half, plan: HalfPlan, images: RangeImages, progress: Progress) -> step.Facts:
    """Write the types into the graph in place, and evaluate the typed graph on all images. Returns the entry for
    placement.json."""
    type_graph(model, half, plan.float_fallback)
    text = {"fp16": "float16", "bf16": "bfloat16"}[half]
    lost = _extremes(emulate(model), images, f"evaluate in {text}", progress, text).lost()
    underflow = {name: share for name, share in sorted(lost.items(), key=lambda row: -row[1]) if share > UNDERFLOW}
    return {"type": half, "residual_exponent": plan.exponent, **_census(model, plan), "underflow": underflow}


def _extremes(
    model: ir.Model, images: RangeImages, text: str, progress: Progress, precision: str = "float32"
) -> observers.Extremes:
    fixes = {} if precision == "float32" else {"fix": "keep this node's layer in float32 (--ignore), or use bf16"}
    counter = Counter(progress, text, len(images.samples))
    with observers.Extremes(model, images.preprocess, precision, **fixes) as extremes:
        for pixels, further in images.batches(model):
            extremes.update(pixels, further)
            counter(len(pixels))
    return extremes


def _census(model: ir.Model, plan: HalfPlan) -> step.Facts:
    """The float32 operators with the reasons, and the MACs in half precision and in float32."""
    macs: collections.Counter[str] = collections.Counter()
    for node in model.graph:
        kind = "float32" if any(value.dtype == ir.DataType.FLOAT for value in node.outputs) else "half"
        macs[kind] += work.node_macs(model, node) or 0
    names = {str(node.name) for node in model.graph if touches_floats(node) and node.op_type != "Cast"}
    return {
        "float32": {name: plan.float_fallback[name] for name in plan.float_fallback if name in names},
        "macs": {kind: macs[kind] for kind in ("half", "float32")},
    }


def typed_step(candidate: step.Candidate, data: Data, ignore: tuple[str, ...] = ()) -> step.Step:
    """The step that places a candidate whose precision is typed in the graph. Layers in `ignore` stay in float32."""
    samples, inputs, quantized = data.calibration, data.inputs, candidate.precision in step.QUANTIZED
    config = PlaceConfig(candidate.target, candidate.precision, ignore)
    shown = f"convert to {candidate.precision.upper()} for {candidate.target}"

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        progress(shown, 0, 1)
        statistics = folders[step.CALIBRATE].path / step.STATISTICS_FILE if quantized else None
        place_typed(config, folders[step.OPTIMIZE].path / step.MODEL_FILE, statistics, samples, out, progress, inputs)
        progress(shown, 1, 1)

    return step.Step(
        candidate.step("place"),
        "place",
        write,
        asdict(config),
        (step.OPTIMIZE, *((step.CALIBRATE,) if quantized else ())),
        {"images": data.calibration_digest},
        {
            **step.package_versions(("onnx", "onnx-ir", "numpy", "onnxruntime", "pillow")),
            **step.backend_versions(candidate.target),
        },
    )

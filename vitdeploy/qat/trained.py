"""Check and export trained models."""

import copy
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import nn

from vitdeploy.api import artifacts, deploy, quantize, values
from vitdeploy.bundle.read import is_bundle, read_bundle
from vitdeploy.errors import GraphError, InputError, NonFiniteWeightsError
from vitdeploy.graph.analysis.rows import Linear, origin
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.graph.io.files import save_graph, set_metadata
from vitdeploy.graph.passes.folds import takes_pixels
from vitdeploy.qat.float_graph import export_like, float_graph, whole
from vitdeploy.qat.folds import Folds, spread
from vitdeploy.qat.layers import (
    Floats,
    LayerPart,
    LayerPiece,
    LayerQuantization,
    PlacedLayer,
    detach,
    gathered,
    ratio_of,
    read_norms,
    weighted,
)
from vitdeploy.qat.plan import ATTRIBUTE, Plan, check_same, first_of, numbers_of, plan_of, refuse_types
from vitdeploy.quantization.folds import copy_columns, insert_scale
from vitdeploy.quantization.placement import DYNAMIC, IGNORED, LayerPrecision, place
from vitdeploy.quantization.ranges import TINY, QuantizedWeight, Range, output_of
from vitdeploy.stages.step import LABELS_FILE, MODEL_FILE, OUTPUT_NAMES, write_json

# --- Find the placed graph: a graph, its folder or file, or a bundle with its engines ---------------------------------


Graphs: TypeAlias = artifacts.Graph | artifacts.Bundle | deploy.Deployment | str | Path


def placed_file(graph: Graphs, target: str | None) -> Path:
    """Return the ONNX file of a placement.

    Raises:
        GraphError: the bundle has no INT8 engine, or none for `target`. MissingFileError, ManifestError: the path is
            missing or not readable. InputError: `target` was given with a graph, which has its own.
    """
    folder = graph.folder if isinstance(graph, artifacts.Graph | artifacts.Bundle | deploy.Deployment) else Path(graph)
    if not is_bundle(folder):
        if target is not None:
            raise InputError("target applies to bundles only", found=f"target {target}", fix="omit target")
        return artifacts.graph_file(graph if isinstance(graph, artifacts.Graph) else folder)
    engines = read_bundle(folder).engines
    fits = [engine for engine in engines if engine.precision in ("int8", "mixed") and target in (None, engine.target)]
    if not fits:
        raise GraphError(
            f"{folder} has no INT8 engine{f' for {target}' if target else ''}",
            found=", ".join(each.artifact for each in engines),
            fix="vitdeploy quantize GRAPH --data IMAGES --target TARGET -o DIR",
        )
    return folder / fits[0].graph


# --- Write folds, integers, steps and biases into the float graph of the trained module -------------------------------


def place_trained(model: ir.Model, plan: Plan, trained: nn.Module) -> dict[str, Any]:
    """Turn the trained module's float graph into the INT8 graph, in place. Returns the content of placement.json;
    arguments as `write_trained`.

    Raises:
        GraphError: the graph's nodes differ from those of the placement.
    """
    placement = plan.placement
    ranges, weights = write_trained(model, plan, trained)
    layers = [LayerPrecision(name, "float", IGNORED) for name, each in plan.layers.items() if each.codes is None]
    integers = {name: each for name, each in plan.layers.items() if each.codes is not None}
    layers += [LayerPrecision(name, "dynamic", DYNAMIC) for name, each in integers.items() if each.read is None]
    placed = place(model, ranges, placement.target, (), weights, asked=layers)
    drop_unused(model)
    found, expected = (
        Counter((node.op_type, str(node.name)) for node in each.graph) for each in (model, placement.model)
    )
    if found != expected:
        more, less = found - expected, expected - found
        raise GraphError(
            "the module's graph and the placement have different nodes",
            found=f"only in the module's graph: {', '.join(name for _, name in list(more)[:3]) or 'none'}; "
            f"only in the placement: {', '.join(name for _, name in list(less)[:3]) or 'none'}",
            expected="the same nodes: a graph made by this release of vitdeploy, without token merging",
            fix="export, optimize and quantize this module again",
        )
    return placed.facts()


def write_trained(
    model: ir.Model, plan: Plan, trained: nn.Module
) -> tuple[dict[str, Range], dict[str, QuantizedWeight]]:
    """Apply the placement's folds to the trained module's float graph, in place, and set the weights of its layers.

    Args:
        model: the rewritten and shaped graph, without quantizers.
        trained: the module with its quantizers, as returned by `whole`.

    Returns: the arguments of `placement.place`: ranges by tensor and integers by layer.
    """
    editor = Editor(model)
    parts = _parts(trained, plan)
    layers = _layers(editor, plan, trained, parts)
    for name, (scale, shift) in _norms(editor, plan).items():
        node = next(node for node in model.graph if node.name == name)
        gamma, beta = read_norms(model)[name]
        editor.set_input(node, 1, (gamma / scale).astype(np.float32))
        editor.set_input(node, 2, ((beta - shift) / scale).astype(np.float32))
    _insert(editor, plan, layers)
    for linear in list(editor.linears):
        if linear.name in layers:
            layer = layers[linear.name]
            weight = layer.weight.T if linear.kind == "matmul" else layer.weight
            nameless = linear.bias is None and linear.kind == "matmul" and linear.output.is_graph_output()
            editor.set_linear(linear, weight, None if nameless else layer.bias)
    weights = {}
    for linear in editor.linears:
        made = layers.get(linear.name)
        if made is not None and made.codes is not None and made.steps is not None:
            codes = made.codes.T if linear.kind == "matmul" else made.codes
            weights[linear.name] = (np.ascontiguousarray(codes), made.steps)
    return _ranges(editor, plan, parts), weights


def _parts(trained: nn.Module, plan: Plan) -> dict[tuple[str, str], LayerPart]:
    """Return the parts of all quantized layers, by the path of the layer and the name of the graph's layer."""
    found = {}
    for path, layer in weighted(trained).items():
        quantization = getattr(layer, "quantization", None)
        if isinstance(quantization, LayerQuantization):
            for part in quantization.parts:
                assert isinstance(part, LayerPart)
                found[path, part.name] = part
    return found


def _layers(
    editor: Editor, plan: Plan, trained: nn.Module, parts: Mapping[tuple[str, str], LayerPart]
) -> dict[str, PlacedLayer]:
    """Return the layers that the placement changes."""
    weights, biases = numbers_of(trained)
    tensors = {path: layer.weight for path, layer in weighted(trained).items()}
    found = {}
    for linear in editor.linears:
        pieces = plan.pieces.get(linear.name) or ()
        if not pieces:
            continue
        folds, count = plan.folds[linear.name], len(plan.folds[linear.name].factor)
        if plan.layers[linear.name].codes is None and not folds.changed:
            continue
        ratio = ratio_of(linear, pieces, weights, biases, plan.placement.metadata.preprocess)
        factor = ratio.factor * folds.own
        added = np.zeros(count) if folds.absorbs else np.where(folds.free, 0.0, ratio.shift)
        weight, own, codes, steps = gathered(pieces, weights, count), gathered(pieces, biases, count), None, None
        if plan.layers[linear.name].codes is not None:
            weight, codes, steps = _rounded(weight, linear, folds, pieces, parts, tensors, factor)
        wide = (-1, *(1,) * (weight.ndim - 1))
        moved = 0.0
        if folds.scale is not None and folds.shift is not None:
            spreads = spread(folds.shift, weight, linear.groups)
            moved = (weight * spreads).sum(axis=tuple(range(1, weight.ndim)))
            weight = weight * spread(folds.scale, weight, linear.groups)
        weight = weight * factor.reshape(wide)
        if takes_pixels(linear) and steps is not None:  # the writer scales them to the unit range
            weight, steps = weight / 255, steps / np.float32(255)
        bias = factor * (own + moved - folds.moved) + added
        found[linear.name] = PlacedLayer(linear.name, weight, bias, codes, steps)
    return found


def _rounded(
    weight: Floats,
    linear: Linear,
    folds: Folds,
    pieces: Sequence[LayerPiece],
    parts: Mapping[tuple[str, str], LayerPart],
    tensors: Mapping[str, torch.Tensor],
    factor: Floats,
) -> tuple[Floats, npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Return (the dequantized weight in the module, its integers, their steps)."""
    codes, steps = np.zeros(weight.shape, np.int8), np.zeros(len(weight))
    for piece in pieces:
        part = parts[piece.path, piece.layer]
        assert part.weight is not None
        with torch.no_grad():
            codes[piece.columns] = part.weight.codes(part.own(tensors[piece.path])).cpu().numpy()
            steps[piece.columns] = part.weight.steps().cpu().numpy()
    wide = (-1, *(1,) * (weight.ndim - 1))
    weight = codes * steps.reshape(wide)
    if folds.scale is not None:
        weight = weight / spread(folds.scale, weight, linear.groups)
    signed = (codes * np.sign(factor).reshape(wide)).astype(np.int8)
    return weight, signed, np.maximum(steps * np.abs(factor), TINY).astype(np.float32)


def _norms(editor: Editor, plan: Plan) -> dict[str, tuple[Floats, Floats]]:
    """Return the scale and shift folded into each LayerNormalization, by node name."""
    found = {}
    for linear in editor.linears:
        folds, read = plan.folds.get(linear.name), plan.layers[linear.name].read
        inserted = read is not None and read.factor is not None
        if folds is None or folds.absorbs or inserted or folds.scale is None or folds.shift is None:
            continue
        norm = origin(linear.input).producer()
        if norm is not None and norm.op_type == "LayerNormalization":
            found[str(norm.name)] = folds.scale, folds.shift
    return found


def _insert(editor: Editor, plan: Plan, layers: dict[str, PlacedLayer]) -> None:
    """Insert the operators before quantizers, and the copies of hidden channels."""
    done = set[str]()
    for linear in list(editor.linears):
        placed = plan.layers[linear.name]
        read = placed.read
        if read is None or read.factor is None or read.offset is None or read.name in done:
            continue
        done.add(read.name)
        if linear.kind == "conv":
            readers = [each for each in editor.linears if each.input is linear.input and each.name in layers]
            insert_scale(editor, readers, read.factor, read.offset)
            continue
        if placed.source is not None:
            own = {each.name: each for each in editor.linears}
            first = first_of(own, linear.name)
            assert first is not None
            copy_columns(editor, own[first], linear, placed.source)
            if first in layers:
                layers[first] = layers[first].taken(placed.source)
            layers[linear.name] = layers[linear.name].reading(placed.source)
        insert_scale(editor, [linear], read.factor, read.offset)


def _ranges(editor: Editor, plan: Plan, parts: Mapping[tuple[str, str], LayerPart]) -> dict[str, Range]:
    """Return the range of every quantized tensor, under the names that `place` uses."""
    ranges = {}
    for linear in editor.linears:
        for piece in plan.pieces.get(linear.name) or ():
            part = parts.get((piece.path, piece.layer))
            if part is None or part.read is None:
                continue
            with torch.no_grad():
                step, (low, high) = float(part.read.step()), part.read.limits
                input_range = Range((low - part.read.zero) * step, (high - part.read.zero) * step)
                ranges[_read(linear)] = input_range
                if part.output is not None:
                    of_output = float(part.output.step())
                    ranges[output_of(linear)] = Range(-127 * of_output, 127 * of_output)
    return ranges


def _read(linear: Linear) -> str:
    value = linear.node.inputs[0]
    assert value is not None
    return str(value.name)


# --- Export the INT8 graph of a prepared module -----------------------------------------------------------------------


WRAPPERS = ("module", "_orig_mod")


def export(prepared: nn.Module, folder: str | Path | None = None) -> quantize.QuantizedGraph:
    """Export the INT8 graph of a prepared module, to compile, verify and bench like that of `vitdeploy.quantize`.

    The graph has the nodes and layers of the graph that the module was prepared for. Integers, steps, biases and all
    float values come from the module. Module and graph are compared before anything is written.

    Args:
        prepared: the trained result of `prepare`, also wrapped by DistributedDataParallel or torch.compile, or a copy
            such as a weight average. It is not modified.
        folder: the output folder; by default a temporary folder that is deleted when this process ends.

    Raises:
        InputError: the module was not prepared, or is not in float32.
        NonFiniteWeightsError: a step or a weight is not finite.
        GraphError: the graph's nodes would differ from the placement. ExportError: its outputs would differ from the
            module's. OutputError: `folder` holds files that vitdeploy did not write.
    """
    while getattr(prepared, ATTRIBUTE, None) is None:
        inner = next((getattr(prepared, name, None) for name in WRAPPERS if hasattr(prepared, name)), None)
        if not isinstance(inner, nn.Module):
            break
        prepared = inner
    plan, home = plan_of(prepared), values.home_of(folder, "quantized", OUTPUT_NAMES)
    refuse_types(prepared)
    refuse_nonfinite(prepared)
    own = copy.deepcopy(prepared).cpu()
    model, placed = _graph(own, plan)
    plain = copy.deepcopy(own)
    detach(plain)
    difference = check_same(own, plain, model, plan.placement, "the trained module")
    placed["difference"] = difference
    with values.filling(home, OUTPUT_NAMES) as work:
        save_graph(model, work / MODEL_FILE)
        write_json(work / "placement.json", placed)
        if labels := plan.placement.metadata.labels:
            (work / LABELS_FILE).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    dynamic = tuple(placed["dynamic"])
    int8 = (*placed["int8"], *dynamic)
    line = f"trained for {placed['target']}: {len(int8)} layers in INT8, {len(placed['float'])} in float"
    document = {**placed, "int8": list(int8), "dynamic": list(dynamic), "precision": plan.placement.metadata.precision}
    document["path"] = str(home / MODEL_FILE)
    lines = (line, f"largest difference from the module: {difference:.1e} (|a - b| / |b|)")
    return quantize.QuantizedGraph(home, document, lines, int8=int8, float=placed["float"], dynamic=dynamic)


def refuse_nonfinite(prepared: nn.Module) -> None:
    """Raise NonFiniteWeightsError if a parameter or buffer is not finite after training."""
    tensors = {**dict(prepared.named_parameters()), **dict(prepared.named_buffers())}
    broken = [name for name, each in tensors.items() if each.is_floating_point() and not each.isfinite().all()]
    if broken:
        steps = [name for name in broken if name.endswith(".log_ratio")]
        raise NonFiniteWeightsError(
            f"the trained module has NaN or infinity in {len(broken)} of its tensors, {len(steps)} of them steps",
            found=", ".join((steps or broken)[:3]),
            expected="finite numbers",
            fix="train again with a smaller learning rate, or clip gradients (torch.nn.utils.clip_grad_norm_)",
        )


def _graph(own: nn.Module, plan: Plan) -> tuple[ir.Model, dict[str, Any]]:
    placement = plan.placement
    plain = copy.deepcopy(own)
    detach(plain)
    delattr(plain, ATTRIBUTE)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as scratch:
        file = Path(scratch) / MODEL_FILE
        export_like(whole(plain.float(), placement), placement, file)
        model = float_graph(file, placement, plan.options)
    placed = place_trained(model, plan, whole(own, placement))
    set_metadata(model, placement.metadata)
    return model, placed

"""The data that a prepared module carries: the placement, and how it maps to the module."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import Tensor, nn

from vitdeploy.errors import ExportError, InputError
from vitdeploy.graph.analysis.rows import Linear
from vitdeploy.graph.io.files import fixed_batch, graph_spec, save_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.qat.float_graph import PlacedGraph, whole
from vitdeploy.qat.folds import Folds
from vitdeploy.qat.layers import Floats, LayerPiece, PlacedLayer, weighted
from vitdeploy.quantization.probe import ImageProbe
from vitdeploy.runtime import ort, preprocess

ATTRIBUTE = "_vitdeploy_qat"


@dataclass(frozen=True)
class Plan:
    """The data that `export` needs from a prepared module. Copies of a module share it."""

    placement: PlacedGraph
    options: OptimizeOptions | None
    pieces: Mapping[str, Sequence[LayerPiece]]
    folds: Mapping[str, Folds]
    layers: Mapping[str, PlacedLayer]

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self


def plan_of(module: nn.Module) -> Plan:
    """Return the plan of a prepared module; raises InputError for other modules."""
    plan = getattr(module, ATTRIBUTE, None)
    if not isinstance(plan, Plan):
        raise InputError(
            "the module is not prepared",
            found=type(module).__name__,
            expected="the module that vitdeploy.qat.prepare returned, or a copy of it",
        )
    return plan


def refuse_types(module: nn.Module) -> None:
    """Raise InputError if the parameters of a module are not all in float32."""
    other = {name: each.dtype for name, each in module.named_parameters() if each.dtype != torch.float32}
    if other:
        name, kind = next(iter(other.items()))
        raise InputError(
            "the module is not in float32",
            found=f"{name} in {str(kind).removeprefix('torch.')}",
            expected="float32: rounding a weight or step changes its integers",
            fix="module.float(); use torch.autocast for mixed-precision training",
        )


def first_of(linears: Mapping[str, Linear], second: str) -> str | None:
    """Return the layer before the activation that `second` reads."""
    node = linears[second].input.producer()
    source = node.inputs[0] if node is not None and node.inputs else None
    return next((name for name, each in linears.items() if each.output is source), None)


def numbers_of(module: nn.Module) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return weights and biases of all layers by path; zeros for a missing bias."""
    weights, biases = {}, {}
    for path, layer in weighted(module).items():
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        weights[path] = weight.detach().cpu().numpy().astype(np.float64)
        own = bias.detach().cpu().numpy() if isinstance(bias, Tensor) else np.zeros(len(weight))
        biases[path] = own.astype(np.float64)
    return weights, biases


# --- Compare a prepared module with its graph on the same images; the graph runs on ONNX Runtime ----------------------


SEED, IMAGES = 0, 4
# The largest difference between module and graph, absolute and as a share of the difference that INT8 makes. Numbers
# next to a rounding tie may round differently and propagate. A difference as large as that of INT8 would mean that a
# quantizer is missing.
TOLERANCE, SHARE = 1e-2, 0.5

Outputs = Sequence[npt.NDArray[np.floating]]


def check_same(prepared: nn.Module, plain: nn.Module, model: ir.Model, placement: PlacedGraph, what: str) -> float:
    """Compare a prepared module with its graph; `plain` is the module without quantizers. Returns |a - b| / |b|.

    Raises:
        ExportError: they differ by more than roundings do.
    """
    pixels = images(placement)
    expected = graph_outputs(model, pixels, placement)
    found = apart(module_outputs(prepared, pixels, placement), expected)
    floating = apart(module_outputs(plain, pixels, placement), expected)
    if not found <= max(TOLERANCE, SHARE * floating):
        raise ExportError(
            f"{what} and its graph give different outputs",
            found=f"a difference of {found:.2g} (|a - b| / |b|); without quantizers {floating:.2g}",
            expected=f"at most {max(TOLERANCE, SHARE * floating):.2g}",
            fix="call each layer in forward(): a weight that is used without calling its layer is not quantized",
        )
    return found


def images(placement: PlacedGraph) -> npt.NDArray[np.uint8]:
    """Return seeded images of smooth blobs, uint8 [batch, height, width, channels]."""
    spec, generator = placement.metadata.images, np.random.default_rng(SEED)
    height, width = spec.crop
    count = fixed_batch(graph_spec(placement.model, "the placed graph")) or IMAGES
    coarse = generator.random((count, spec.channels, 6, 6), np.float32)
    fine = torch.nn.functional.interpolate(torch.from_numpy(coarse), (height, width), mode="bicubic")
    return np.asarray((fine.clamp(0, 1) * 255).round().numpy().astype(np.uint8).transpose(0, 2, 3, 1))


def graph_outputs(model: ir.Model, pixels: npt.NDArray[np.uint8], placement: PlacedGraph) -> Outputs:
    """Return the outputs of a graph in its order, computed without graph optimisation."""
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        file = Path(folder) / "model.onnx"
        save_graph(model, file)
        runner = ort.OnnxRuntimeRunner(file, name="the placed graph", plain=True)
        with ImageProbe(model, placement.metadata.images, runner) as probe:
            found = probe.run(probe.feeds(pixels))
            return [found[tensor.name] for tensor in runner.outputs]


def module_outputs(module: nn.Module, pixels: npt.NDArray[np.uint8], placement: PlacedGraph) -> Outputs:
    """Return the outputs of a module in evaluation mode, in the graph's order; the module's mode is restored."""
    image = torch.from_numpy(np.ascontiguousarray(preprocess.normalise(pixels, placement.metadata.images)))
    place = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        with torch.no_grad():
            found = whole(module, placement)(image.to(place))
    finally:
        for each in training:
            each.training = True
    tensors: tuple[Tensor, ...] = (found,) if isinstance(found, Tensor) else tuple(found)
    return [tensor.float().cpu().numpy() for tensor in tensors]


def apart(found: Outputs, expected: Outputs) -> float:
    """Return the largest |a - b| / |b| of all outputs, in the Euclidean norm."""
    pairs = zip(found, expected, strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float32).tiny)) for a, b in pairs)

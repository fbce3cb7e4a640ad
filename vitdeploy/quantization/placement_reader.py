"""Read a quantized graph: its quantized tensors and the layers that read them; turn some of them back to float.

Also reject quantized graphs where a float graph is expected: their ranges and weights are not those of the model.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph import edit, values
from vitdeploy.graph.analysis.rows import layer_name
from vitdeploy.graph.io.files import GraphMetadata, get_metadata, load_graph

# Parts of the names of all quantization operators: QuantizeLinear, QLinearConv, MatMulInteger, MatMulNBits ...
PARTS = ("quantize", "qlinear", "integer", "nbits", "qattention", "qgemm")


@dataclass(frozen=True)
class Quantized:
    """One quantized tensor and the layers that read it; for an `output` (queries or keys), the layer it comes from."""

    tensor: str
    layers: tuple[str, ...]
    output: bool = False


def find_quantized(model: ir.Model) -> list[Quantized]:
    """The quantized tensors in graph order, in any form of placement."""
    found = []
    for node in model.graph:
        if node.op_type == "QuantizeLinear" and node.inputs[0] is not None:
            layers, maker = _layers(node), node.inputs[0].producer()
            names = [layer_name(layer) for layer in layers or ([maker] if maker is not None else [])]
            found.append(Quantized(_source(node), tuple(names), not layers))
    return found


def make_float(model: ir.Model, tensors: Collection[str]) -> None:
    """Remove the quantizers of these tensors, in place: the layers that read them multiply float inputs by their
    dequantized int8 weights."""
    for node in list(model.graph):
        if node.op_type != "QuantizeLinear" or _source(node) not in tensors:
            continue
        source = node.inputs[0]
        assert source is not None
        for layer in _layers(node):
            if layer.op_type == "MatMulIntegerToFloat":
                _unfuse(model, layer, source)
            else:
                weight = layer.inputs[1]
                assert weight is not None
                layer.replace_input_with(0, source)
                dequantizer = weight.producer()
                if dequantizer is not None and dequantizer.op_type == "DequantizeLinear":
                    layer.replace_input_with(
                        1, edit.Names(model).constant(_dequantized(dequantizer), f"{weight.name}.float")
                    )
        for use in list(node.outputs[0].uses()):
            if use.node.op_type == "DequantizeLinear":
                ir.convenience.replace_all_uses_with(use.node.outputs[0], source)
    edit.drop_unused(model)


def reject_quantized(model: ir.Model, source: str) -> None:
    """Raise GraphError if the graph has quantization operators, from any tool."""
    counts: dict[str, int] = {}
    for node in model.graph:
        if any(part in node.op_type.lower() for part in PARTS):
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    if counts:
        raise GraphError(
            f"{source} is already quantized",
            found=", ".join(f"{count} {operator}" for operator, count in sorted(counts.items())),
            expected="the float graph that it was quantized from",
        )


def _source(quantizer: ir.Node) -> str:
    assert quantizer.inputs[0] is not None
    return str(quantizer.inputs[0].name)


def _layers(quantizer: ir.Node) -> list[ir.Node]:
    """The linears and convolutions that read the output of a QuantizeLinear, directly or after a DequantizeLinear."""
    layers = []
    for use in quantizer.outputs[0].uses():
        if use.node.op_type == "MatMulIntegerToFloat":
            layers.append(use.node)
        elif use.node.op_type == "DequantizeLinear":
            behind = use.node.outputs[0].uses()
            layers += [each.node for each in behind if each.node.op_type in ("MatMul", "Conv") and each.idx == 0]
    return layers


def _unfuse(model: ir.Model, layer: ir.Node, source: ir.Value) -> None:
    """Replace a MatMulIntegerToFloat by MatMul and Add."""
    _, weight, _, scale, _, zero_point, *bias = layer.inputs
    integers, scales, zeros = (values.array_of(each) for each in (weight, scale, zero_point))
    assert integers is not None and scales is not None and zeros is not None
    name = layer_name(layer)
    array = ((integers.astype(np.float32) - zeros.astype(np.float32)) * scales).astype(np.float32)
    names = edit.Names(model)
    weights = names.constant(array, f"{name}.weight.float")
    nodes, old = [names.node("MatMul", [source, weights], f"{name}/MatMul", output=f"{name}/product")], layer.outputs[0]
    if bias:
        nodes.append(names.node("Add", [nodes[0].outputs[0], bias[0]], f"{name}/Add"))
    new = nodes[-1].outputs[0]
    new.type, new.shape = old.type, old.shape
    ir.convenience.replace_nodes_and_values(model.graph, layer, [layer], nodes, [old], [new])


def _dequantized(node: ir.Node) -> npt.NDArray[Any]:
    """The value of a DequantizeLinear of constants."""
    integers, scales, *zeros = (values.array_of(value) for value in node.inputs)
    assert integers is not None and scales is not None
    shape = [1] * integers.ndim
    if scales.ndim:
        shape[node.attributes.get_int("axis", 1)] = -1
    zero = zeros[0].astype(np.float32).reshape(shape) if zeros and zeros[0] is not None else np.float32(0)
    return np.asarray((integers.astype(np.float32) - zero) * scales.reshape(shape), np.float32)


def load_float_graph(graph: Path) -> tuple[ir.Model, GraphMetadata]:
    """Load a graph that is neither quantized nor placed, with its metadata.

    Raises:
        GraphError: the graph is already quantized, or placed for a target.
    """
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    if metadata.precision is not None:
        raise GraphError(
            f"{graph} is already quantized or placed",
            found=f"{metadata.precision} for {metadata.target}",
            expected="the float graph written by `vitdeploy export`",
        )
    reject_quantized(model, str(graph))
    return model, metadata

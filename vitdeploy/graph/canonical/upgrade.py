"""Raise the opset of a graph, by ONNX's own version converter, without taking its weights through it."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.shapes.infer import Inference

LOWEST = 11
# Larger tensors stay outside the converter, which copies everything it is given several times; so do those on disk.
INSIDE = 1024


def upgrade_opset(model: ir.Model, opset: int) -> bool:
    """Convert a graph of opset 11 or later to `opset`, in place. False if it has that opset or a later one.

    Raises:
        GraphError: the opset is below 11, or the converter does not know how to convert one of the operators.
    """
    version = model.graph.opset_imports.get("", 0)
    if version >= opset:
        return False
    if version < LOWEST:
        raise GraphError(
            "the graph is written in an opset that is too old",
            found=f"opset {version}",
            wanted=f"opset {LOWEST} or later",
            fix="export it again with a later opset_version",
        )
    Inference(model)  # some adapters, such as Softmax-12's, write worse graphs where they know no shapes
    try:
        converted = onnx.version_converter.convert_version(_without_weights(model), opset)
        graph = ir.from_proto(converted).graph
    except Exception as error:  # the converter raises RuntimeError, ConvertError and others
        text = str(error).strip().splitlines()
        raise GraphError(
            f"the graph cannot be converted from opset {version} to {opset}",
            found=(text[-1] if text else type(error).__name__)[:200],
            fix=f"export it again with opset_version={opset}",
        ) from None
    _return_weights(model, graph)
    model.graph = graph
    return True


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    """The graph as a small proto: initializers of more than 1,024 elements, or on disk, stand as inputs."""
    proto = onnx.ModelProto(ir_version=max(model.ir_version, 8))
    proto.opset_import.extend(onnx.helper.make_opsetid(*item) for item in model.graph.opset_imports.items())
    large = {
        str(name): value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
        and (value.const_value.size > INSIDE or isinstance(value.const_value, ir.ExternalTensor))
    }
    for name in large:
        model.graph.initializers.pop(name)
    try:
        proto.graph.CopyFrom(ir.serde.serialize_graph(model.graph))
    finally:
        for value in large.values():
            model.graph.register_initializer(value)
    declared = {value.name for value in proto.graph.input}
    for name, value in large.items():
        if name not in declared and value.const_value is not None:
            tensor = value.const_value
            shape = [int(size) for size in tensor.shape.numpy()]
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, int(tensor.dtype), shape))
    return proto


def _return_weights(model: ir.Model, graph: ir.Graph) -> None:
    """Register the weights of `model` in the converted graph, under the names that its nodes read."""
    own = {value.name for value in model.graph.inputs}
    for value in list(graph.inputs):
        old = model.graph.initializers.get(str(value.name))
        if old is not None and old.const_value is not None:
            value.const_value = old.const_value
            graph.register_initializer(value)
            if value.name not in own:
                graph.inputs.remove(value)

"""Type and shape inference of one node by ONNX's own rules, remembered: the blocks of a ViT repeat a few nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from vitdeploy.graph.shapes.sizes import UNKNOWN, Dims, Extent, Size, Unknown

Result = tuple[tuple[ir.DataType | None, Dims | None], ...]


class Operand(NamedTuple):
    """The facts that inference may use about an input: type, shape, and a small known tensor as (shape, bytes)."""

    dtype: ir.DataType
    dims: Dims | None
    numbers: tuple[tuple[int, ...], bytes] | None


class Operators:
    """The inference rules of the opsets that a model imports."""

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self._opsets = dict(opsets)
        self._imports = [onnx.helper.make_opsetid(*item) for item in self._opsets.items()]
        self._known: dict[Any, Result] = {}

    def infer(self, node: ir.Node, operands: Sequence[Operand | None]) -> Result:
        """(type, shape) of each output; None if ONNX cannot tell. Empty for an operator that it does not know."""
        attributes = tuple(node.attributes.values())
        key: Any = (node.domain, node.op_type, len(node.outputs), *map(_simple, attributes), *operands)
        if None in map(_simple, attributes):
            return self._infer(node, operands)
        if key not in self._known:
            self._known[key] = self._infer(node, operands)
        return self._known[key]

    def _infer(self, node: ir.Node, operands: Sequence[Operand | None]) -> Result:
        names = [f"i{index}" if operand is not None else "" for index, operand in enumerate(operands)]
        sizes: dict[str, Extent] = {}
        types, data = {}, {}
        for name, operand in zip(names, operands, strict=True):
            if operand is not None:
                types[name] = _type_proto(operand, sizes)
                if operand.numbers is not None:
                    shape, content = operand.numbers
                    data[name] = onnx.TensorProto(dims=shape, data_type=int(operand.dtype), raw_data=content)
        proto = onnx.helper.make_node(
            node.op_type, names, [f"o{index}" for index in range(len(node.outputs))], domain=node.domain
        )
        try:
            proto.attribute.extend(ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
            schema = onnx.defs.get_schema(node.op_type, self._opsets[node.domain], node.domain)
            found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=self._imports)
        except Exception:  # an operator without inference, or a node that its inference refuses: nothing is known
            return ()
        return tuple(_result(found.get(output), sizes) for output in proto.output)


def _simple(attribute: ir.Attr) -> tuple[str, Any] | None:
    """An attribute as a part of a key; None for tensors and graphs."""
    value = attribute.value
    if isinstance(value, (int, float, str, bytes)):
        return attribute.name, value
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str, bytes)) for item in value):
        return attribute.name, tuple(value)
    return None


def _type_proto(operand: Operand, sizes: dict[str, Extent]) -> onnx.TypeProto:
    """Free sizes become names, which inference carries through; `sizes` collects what each stands for."""
    if operand.dims is None:
        return onnx.helper.make_tensor_type_proto(int(operand.dtype), None)
    sizes.update({str(size): size for size in operand.dims if isinstance(size, Size)})
    shape = [
        size if isinstance(size, int) else None if isinstance(size, Unknown) else str(size) for size in operand.dims
    ]
    return onnx.helper.make_tensor_type_proto(int(operand.dtype), shape)


def _result(proto: onnx.TypeProto | None, sizes: dict[str, Extent]) -> tuple[ir.DataType | None, Dims | None]:
    if proto is None or not proto.HasField("tensor_type"):
        return None, None
    tensor = proto.tensor_type
    dtype = ir.DataType(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return dtype, None
    return dtype, tuple(
        int(dim.dim_value) if dim.HasField("dim_value") else sizes.get(dim.dim_param, UNKNOWN)
        for dim in tensor.shape.dim
    )

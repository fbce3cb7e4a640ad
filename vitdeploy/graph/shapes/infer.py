"""Infer the shapes of all values, and the contents of integer tensors for shape arithmetic, up to free sizes.

ONNX's own inference (`onnx.shape_inference`, node by node) knows every operator, but it cannot do arithmetic on a free
size, such as batch * windows, or a Reshape to it. Those operators are computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from vitdeploy.graph.shapes import sizes
from vitdeploy.graph.shapes.sizes import UNKNOWN, Dims, Extent, FreeSize, Unknown, broadcast

Contents = npt.NDArray[np.object_]

# A shape has at most a few entries; longer integer tensors are data (indices of a relative position table).
CONTENT_LIMIT = 64
INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
ELEMENTWISE: dict[str, Callable[..., Extent]] = {
    "Add": sizes.plus,
    "Sub": sizes.minus,
    "Mul": sizes.times,
    "Div": sizes.divided,
    "Mod": sizes.modulo,
    "Equal": sizes.equal,
    "Where": sizes.chosen,
    "Max": sizes.larger,
}


# --- Type and shape inference of one node by ONNX's own rules, cached: the blocks of a ViT repeat a few nodes ---------


Result = tuple[tuple[ir.DataType | None, Dims | None], ...]


class _Operand(NamedTuple):
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

    def infer(self, node: ir.Node, operands: Sequence[_Operand | None]) -> Result:
        """(type, shape) of each output; None if ONNX cannot infer it. Empty for an operator that ONNX does not know."""
        attributes = tuple(node.attributes.values())
        key: Any = (node.domain, node.op_type, len(node.outputs), *map(_simple, attributes), *operands)
        if None in map(_simple, attributes):
            return self._infer(node, operands)
        if key not in self._known:
            self._known[key] = self._infer(node, operands)
        return self._known[key]

    def _infer(self, node: ir.Node, operands: Sequence[_Operand | None]) -> Result:
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
        except Exception:  # an operator without inference, or a node that inference rejects: nothing is known
            return ()
        return tuple(_result(found.get(output), sizes) for output in proto.output)


def _simple(attribute: ir.Attr) -> tuple[str, Any] | None:
    """An attribute as part of a cache key; None for tensors and graphs."""
    value = attribute.value
    if isinstance(value, (int, float, str, bytes)):
        return attribute.name, value
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str, bytes)) for item in value):
        return attribute.name, tuple(value)
    return None


def _type_proto(operand: _Operand, sizes: dict[str, Extent]) -> onnx.TypeProto:
    """The type with free sizes as names, which inference carries through; adds the meaning of each to `sizes`."""
    if operand.dims is None:
        return onnx.helper.make_tensor_type_proto(int(operand.dtype), None)
    sizes.update({str(size): size for size in operand.dims if isinstance(size, FreeSize)})
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


# --- Known facts about values -----------------------------------------------------------------------------------------


class Facts:
    """The facts known about values: `dims[value]` and `contents[value]`, if present.

    `operators` caches the results for equal nodes.
    """

    def __init__(self, operators: Operators) -> None:
        self.dims: dict[ir.Value, Dims] = {}
        self.contents: dict[ir.Value, Contents] = {}
        self._operators = operators

    def dims_of(self, value: ir.Value | None) -> Dims | None:
        if value is not None and value not in self.dims and value.const_value is not None:
            self.dims[value] = tuple(int(size) for size in value.const_value.shape.numpy())
        return self.dims.get(value) if value is not None else None

    def contents_of(self, value: ir.Value | None) -> Contents | None:
        """The entries of a small integer tensor, each an int, a FreeSize or UNKNOWN."""
        if value is None:
            return None
        tensor = value.const_value
        unread = value not in self.contents and tensor is not None and not value.is_graph_input()
        if unread and tensor is not None and tensor.dtype in INTEGERS and tensor.size <= CONTENT_LIMIT:
            array = tensor.numpy()
            self.contents[value] = _objects([int(entry) for entry in array.ravel()], array.shape)
        return self.contents.get(value)

    def numbers(self, value: ir.Value) -> npt.NDArray[Any] | None:
        """The content of a small tensor, constant or computed, if it contains no free size."""
        contents, tensor = self.contents_of(value), value.const_value
        if contents is not None and value.dtype is not None:
            known = all(isinstance(entry, int) for entry in contents.ravel())
            return _as_numbers(contents, value.dtype) if known else None
        text = tensor is not None and tensor.dtype == ir.DataType.STRING
        if tensor is not None and not text and tensor.size <= CONTENT_LIMIT and not value.is_graph_input():
            return tensor.numpy()
        return None

    def visit(self, node: ir.Node) -> None:
        """Add the facts that follow from the facts about a node's inputs."""
        self._infer_types(node)
        standard = node.domain in ("", "ai.onnx")
        if len(node.outputs) != 1:
            return
        output = node.outputs[0]
        rule = _DIMS.get(node.op_type) if standard else self._of_runtime(node)
        dims = rule(self, node) if rule is not None else None
        if dims is not None:
            self.dims[output] = dims
        contents = self._evaluate(node) if standard else None
        if contents is not None and contents.size <= CONTENT_LIMIT:
            self.contents[output] = contents
            self.dims[output] = contents.shape

    def _of_runtime(self, node: ir.Node) -> Callable[[Facts, ir.Node], Dims | None] | None:
        """The rule for an operator of ONNX Runtime. ONNX does not know it, so this also sets the type of its result."""
        typed, rule = RUNTIME_DIMS.get((node.domain, node.op_type), (0, None))
        if rule is None or len(node.inputs) < 3:
            return None
        like, output = node.inputs[typed], node.outputs[0]
        if output.type is None and like is not None and like.dtype is not None:
            output.type = ir.TensorType(like.dtype)
        return rule

    def _evaluate(self, node: ir.Node) -> Contents | None:
        try:
            if node.op_type in ELEMENTWISE:
                operands = [self.contents_of(value) for value in node.inputs]
                shapes = [operand.shape for operand in operands if operand is not None]
                if len(shapes) < len(operands) or math.prod(np.broadcast_shapes(*shapes)) > CONTENT_LIMIT:
                    return None
                function = np.frompyfunc(ELEMENTWISE[node.op_type], len(operands), 1)
                return _as_array(function(*operands))
            rule = _CONTENTS.get(node.op_type)
            return rule(self, node) if rule is not None else None
        except (IndexError, ValueError):  # an index out of range: an invalid file, which the runtime will report
            return None

    def _infer_types(self, node: ir.Node) -> None:
        operands: list[_Operand | None] = []
        for value in node.inputs:
            if value is not None and value.dtype is None:
                return
            operands.append(self._operand(value) if value is not None else None)
        found = self._operators.infer(node, operands)
        for output, (dtype, dims) in zip(node.outputs, found, strict=False):
            if output.type is None and dtype is not None:
                output.type = ir.TensorType(dtype)
            if dims is not None:
                self.dims[output] = dims

    def _operand(self, value: ir.Value) -> _Operand:
        numbers = self.numbers(value)
        assert value.dtype is not None
        return _Operand(
            value.dtype, self.dims_of(value), None if numbers is None else (numbers.shape, numbers.tobytes())
        )


class Inference(Facts):
    """The known facts about each value of the main graph.

    Writes inferred types into values that declare none, and shapes into all values. `operators` caches the results for
    equal nodes, from one inference of a model to the next.
    """

    def __init__(self, model: ir.Model, operators: Operators | None = None) -> None:
        super().__init__(operators or Operators(model.graph.opset_imports))
        for value in model.graph.inputs:
            if value.shape is not None:
                free = [f"{value.name}.{axis}" for axis in range(len(value.shape))]
                self.dims[value] = tuple(
                    size if isinstance(size, int) else FreeSize(1, (size.value or name,))
                    for size, name in zip(value.shape, free, strict=True)
                )
        for node in model.graph:
            self.visit(node)
        for value, dims in self.dims.items():
            if not value.is_graph_input():
                value.shape = ir.Shape([size if isinstance(size, int) else _symbol(size) for size in dims])


def _reshape(inference: Facts, node: ir.Node) -> Dims | None:
    data, target = inference.dims_of(node.inputs[0]), inference.contents_of(node.inputs[1])
    if target is None or target.ndim != 1:
        return None
    copied = not node.attributes.get_int("allowzero", 0)
    result: list[Extent] = []
    for axis, size in enumerate(target):
        if size == 0 and copied:
            if data is None or axis >= len(data):
                return None
            size = data[axis]
        result.append(size)
    if -1 in result:
        hole = result.index(-1)
        known = sizes.product((*result[:hole], *result[hole + 1 :]))
        result[hole] = sizes.divided(sizes.product(data), known) if data is not None else UNKNOWN
    return tuple(result)


def _flatten(inference: Facts, node: ir.Node) -> Dims | None:
    data = inference.dims_of(node.inputs[0])
    if data is None:
        return None
    axis = node.attributes.get_int("axis", 1)
    return sizes.product(data[:axis]), sizes.product(data[axis:])


def _expand(inference: Facts, node: ir.Node) -> Dims | None:
    data, target = inference.dims_of(node.inputs[0]), inference.contents_of(node.inputs[1])
    return broadcast(data, tuple(target)) if data is not None and target is not None and target.ndim == 1 else None


def _tile(inference: Facts, node: ir.Node) -> Dims | None:
    data, repeats = inference.dims_of(node.inputs[0]), inference.contents_of(node.inputs[1])
    if data is None or repeats is None or len(data) != repeats.size:
        return None
    return tuple(sizes.times(size, count) for size, count in zip(data, repeats, strict=True))


def _constant_of_shape(inference: Facts, node: ir.Node) -> Dims | None:
    target = inference.contents_of(node.inputs[0])
    return tuple(target) if target is not None and target.ndim == 1 else None


def _resize(inference: Facts, node: ir.Node) -> Dims | None:
    """The shape of a Resize: its sizes if given; else the batch is scaled by 1, which ONNX's inference does not carry
    through for a free size."""
    given = inference.contents_of(node.inputs[3]) if len(node.inputs) > 3 else None
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    if given is not None and given.ndim == 1 and "axes" not in node.attributes and policy == "stretch":
        return tuple(given)
    data, scales = inference.dims_of(node.inputs[0]), node.inputs[2] if len(node.inputs) > 2 else None
    factors, inferred = inference.numbers(scales) if scales is not None else None, inference.dims.get(node.outputs[0])
    if data is None or factors is None or inferred is None or len(data) != factors.size or "axes" in node.attributes:
        return None
    return tuple(own if factor == 1 else size for own, size, factor in zip(data, inferred, factors, strict=True))


def _range(inference: Facts, node: ir.Node) -> Dims | None:
    """0, 1, 2 ... up to a size."""
    start, limit, step = (inference.contents_of(value) for value in node.inputs)
    if start is None or limit is None or step is None or any(part.size != 1 for part in (start, limit, step)):
        return None
    first, last, by = start.item(), limit.item(), step.item()
    return (last,) if first == 0 and by == 1 and isinstance(last, FreeSize) else None


_DIMS: dict[str, Callable[[Facts, ir.Node], Dims | None]] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Expand": _expand,
    "Tile": _tile,
    "ConstantOfShape": _constant_of_shape,
    "Resize": _resize,
    "Range": _range,
}


def _integer_matmul(inference: Facts, node: ir.Node) -> Dims | None:
    rows, weight = inference.dims_of(node.inputs[0]), inference.dims_of(node.inputs[1])
    return (*rows[:-1], weight[-1]) if rows and weight else None


def _packed_matmul(inference: Facts, node: ir.Node) -> Dims | None:
    rows, columns = inference.dims_of(node.inputs[0]), node.attributes.get_int("N")
    return (*rows[:-1], columns) if rows and columns is not None else None


def _heads(inference: Facts, node: ir.Node) -> Dims | None:
    """The tokens of the queries with the channels of the values, if both have three axes."""
    queries, values = inference.dims_of(node.inputs[0]), inference.dims_of(node.inputs[2])
    known = queries is not None and values is not None and len(queries) == len(values) == 3
    return (*queries[:2], values[2]) if known and queries and values else None


# Operators of ONNX Runtime in placements: the input that gives the type of the result, and the shape rule.
RUNTIME_DIMS: dict[tuple[str, str], tuple[int, Callable[[Facts, ir.Node], Dims | None]]] = {
    ("com.microsoft", "MatMulIntegerToFloat"): (2, _integer_matmul),
    ("com.microsoft", "MatMulNBits"): (0, _packed_matmul),
    ("com.microsoft", "MultiHeadAttention"): (0, _heads),
}


def _shape(inference: Facts, node: ir.Node) -> Contents | None:
    dims = inference.dims_of(node.inputs[0])
    if dims is None:
        return None
    taken = dims[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(dims))]
    return _objects(list(taken), (len(taken),))


def _gather(inference: Facts, node: ir.Node) -> Contents | None:
    data, indices = inference.contents_of(node.inputs[0]), inference.contents_of(node.inputs[1])
    if data is None or indices is None or not all(isinstance(index, int) for index in indices.ravel()):
        return None
    return _as_array(np.take(data, indices.astype(np.int64), axis=node.attributes.get_int("axis", 0)))


def _slice(inference: Facts, node: ir.Node) -> Contents | None:
    parts = [inference.contents_of(value) for value in node.inputs]
    if parts[0] is None or parts[0].ndim != 1 or any(part is None or part.size != 1 for part in parts[1:]):
        return None
    start, end, *rest = (part.item() for part in parts[1:] if part is not None)
    step = rest[1] if len(rest) > 1 else 1
    if not all(isinstance(bound, int) for bound in (start, end, step)) or step < 1:
        return None
    return parts[0][slice(start, end, step)]


def _concat(inference: Facts, node: ir.Node) -> Contents | None:
    parts = [inference.contents_of(value) for value in node.inputs]
    known = [part for part in parts if part is not None and part.ndim == 1]
    return np.concatenate(known) if len(known) == len(parts) else None


def _viewed(inference: Facts, node: ir.Node) -> Contents | None:
    """Squeeze, Unsqueeze and Reshape keep the entries; the new shape was inferred before."""
    data, dims = inference.contents_of(node.inputs[0]), inference.dims.get(node.outputs[0])
    if data is None or dims is None or not all(isinstance(size, int) for size in dims):
        return None
    return data.reshape(dims)


def _cast(inference: Facts, node: ir.Node) -> Contents | None:
    return inference.contents_of(node.inputs[0]) if node.attributes.get_int("to") in INTEGERS[:2] else None


def _filled(inference: Facts, node: ir.Node) -> Contents | None:
    dims = inference.dims.get(node.outputs[0])
    value = node.attributes.get("value")
    if dims is None or value is None or not all(isinstance(size, int) for size in dims):
        return None
    tensor, count = value.as_tensor(), sizes.product(dims)
    if tensor.dtype not in INTEGERS or not isinstance(count, int) or count > CONTENT_LIMIT:
        return None
    return _objects([int(tensor.numpy().item())] * count, dims)


def _product(inference: Facts, node: ir.Node) -> Contents | None:
    data, dims = inference.contents_of(node.inputs[0]), inference.dims.get(node.outputs[0])
    if data is None or dims is None or any(size != 1 for size in dims):
        return None
    return _objects([sizes.product(tuple(data.ravel()))], tuple(1 for _ in dims))


_CONTENTS: dict[str, Callable[[Facts, ir.Node], Contents | None]] = {
    "Shape": _shape,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Squeeze": _viewed,
    "Unsqueeze": _viewed,
    "Reshape": _viewed,
    "Cast": _cast,
    "Identity": lambda inference, node: inference.contents_of(node.inputs[0]),
    "ConstantOfShape": _filled,
    "ReduceProd": _product,
}
# Operators whose results are computed here; a shape that none of them reads is used, not computed further.
ARITHMETIC = frozenset({*ELEMENTWISE, *_CONTENTS})


def _objects(entries: list[Any], shape: Sequence[Extent]) -> Contents:
    array = np.empty(len(entries), dtype=object)
    array[:] = entries
    return array.reshape(shape)


def _as_array(value: Any) -> Contents:
    if isinstance(value, np.ndarray):
        return value
    return _objects([value], ())


def _symbol(size: Extent) -> ir.SymbolicDim:
    return ir.SymbolicDim(str(size) if isinstance(size, FreeSize) else None)


def _as_numbers(contents: Contents, dtype: ir.DataType) -> npt.NDArray[Any] | None:
    """The contents as an array; None if one of them is out of range of the type."""
    try:
        return contents.astype(dtype.numpy())
    except OverflowError:
        return None

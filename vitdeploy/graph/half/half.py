"""Write half precision into a graph, and emulate it."""

from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import find_stream
from vitdeploy.graph.analysis.rows import Linear, is_dequantized, is_layout
from vitdeploy.graph.edit import Editor, Names, drop_unused
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.values import array_of, floats_of

# --- A smaller residual stream, by a power of two: the same function, with values that float16 can hold ---------------
# The stream of a pre-norm Transformer is read only through norms, and LN(a x) = LN(x) if epsilon is multiplied by a^2.
# So all writers of the stream (weights and biases of linears, positions, tokens) are multiplied by a = 2^-k, which is
# exact in binary floating point. The weights of linears that read the stream without a norm are divided by a.


# ONNX's default epsilon of a norm.
EPSILON = 1e-5


def stream_tensors(model: ir.Model) -> set[str]:
    """The names of all tensors of the residual stream that `scale_residual` scales, including products before biases;
    empty without such a stream."""
    editor = Editor(model)
    stream = find_stream(editor.linears, model)
    if stream is None:
        return set()
    products = {str(linear.node.outputs[0].name) for linear in editor.linears if linear.node in stream.writers}
    return products | {str(value.name) for value in stream.axes}


def scale_residual(model: ir.Model, exponent: int) -> int:
    """Multiply the residual stream by 2^-`exponent`, in place; exact within the range of float32.

    Args:
        model: a graph in canonical form.

    Returns: the number of norms that read the stream; 0, and no change, without a stream that can be scaled.
    """
    editor = Editor(model)
    stream = find_stream(editor.linears, model)
    if stream is None or not stream.norms:
        return 0
    factor = np.float32(2.0) ** -exponent
    for linear in editor.linears:
        writes, reads = linear.node in stream.writers, linear.node in stream.readers
        power = int(writes) - int(reads)  # 0: from the stream into the stream, or neither
        weight = linear.weight * factor**power if power else None
        bias = linear.bias * factor if writes and linear.bias is not None else None
        if weight is not None or bias is not None:
            editor.set_linear(linear, weight, bias)
    for node, index in stream.constants:
        array = floats_of(node.inputs[index])
        assert array is not None
        editor.set_input(node, index, array * factor)
    for node in stream.norms:
        epsilon = node.attributes.get_float("epsilon", EPSILON)
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", float(np.float32(epsilon) * factor * factor))
    return len(stream.norms)


# --- A convolution whose kernel tiles the image, as a MatMul of patches -----------------------------------------------
# For bfloat16, which Conv supports from opset 22 on.


def patches_to_matmul(model: ir.Model) -> int:
    """Rewrite every convolution without groups and padding whose stride equals its kernel, in place; exact.

    [batch, channels, height, width] becomes rows of patches [batch, rows, columns, channels * kernel * kernel], in the
    order of the weight. Returns the number of rewrites.
    """
    editor, count = Editor(model), 0
    for linear in editor.linears:
        if linear.kind == "conv" and _tiles(linear):
            _rewrite(editor, linear)
            count += 1
    return count


def _tiles(linear: Linear) -> bool:
    node, kernel = linear.node, linear.weight.shape[2:]
    shape = linear.input.shape
    strides = tuple(node.attributes.get_ints("strides", ()) or ())
    dilated = any(each != 1 for each in node.attributes.get_ints("dilations", ()) or ())
    if linear.groups > 1 or linear.padded or dilated or len(kernel) != 2 or strides != kernel or shape is None:
        return False
    return all(
        isinstance(size, int) and size % each == 0 for size, each in zip(list(shape)[2:], kernel, strict=True)
    ) and isinstance(shape[1], int)


def _rewrite(editor: Editor, linear: Linear) -> None:
    node, image = linear.node, linear.input
    assert image.shape is not None
    batch, channels, height, width = image.shape
    out, _, rows, columns = linear.weight.shape
    assert isinstance(height, int) and isinstance(width, int) and isinstance(channels, int)
    down, across, depth = height // rows, width // columns, channels * rows * columns
    name = linear.name

    def step(operator: str, inputs: list[ir.Value], label: str, shape: list[Any], **attributes: Any) -> ir.Value:
        return editor.node(node, operator, inputs, f"{name}/{label}", shape, **attributes)[0]

    def sizes(label: str, *numbers: int) -> ir.Value:
        return editor.constant(np.array(numbers, np.int64), f"{name}.{label}")

    tiled = [batch, channels, down, rows, across, columns]
    value = step("Reshape", [image, sizes("tiles", -1, *tiled[1:])], "tiles", tiled)
    value = step(
        "Transpose", [value], "patches", [batch, down, across, channels, rows, columns], perm=[0, 2, 4, 1, 3, 5]
    )
    value = step("Reshape", [value, sizes("rows", -1, down, across, depth)], "rows", [batch, down, across, depth])
    weight = editor.constant(linear.weight.reshape(out, depth).T, f"{name}.patch_weight")
    value = step("MatMul", [value, weight], "product", [batch, down, across, out])
    if linear.bias is not None:
        value = step(
            "Add", [value, editor.constant(linear.bias, f"{name}.patch_bias")], "bias", [batch, down, across, out]
        )
    node.outputs[0].name, old = None, str(node.outputs[0].name)
    value = step("Transpose", [value], "channels_first", [batch, out, down, across], perm=[0, 3, 1, 2])
    ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
    value.name = old
    editor.graph.remove(node, safe=True)


# --- Emulate a half-precision graph by a float32 graph that rounds and overflows alike --------------------------------
# Half-precision *storage* with float32 accumulation: kernels compute in float32, and every half-precision tensor goes
# through a Cast to half and back. ONNX Runtime keeps that pair (OpenVINO removes it), so overflow, underflow and
# rounding are those of the types. The summation inside one operation on a GPU is not emulated.
#
# In a product of two dequantized tensors, a GPU multiplies the integers and scales their exact sum; so the outputs of
# DequantizeLinear are not rounded there.


HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Operators that only move or select numbers, and so do not round.
_SELECTS = ("Cast", "Concat", "Expand", "Identity", "Max", "MaxPool", "Min", "ReduceMax", "Relu", "Where")


def emulate(model: ir.Model) -> ir.Model:
    """A float32 copy that gives the same numbers as the typed graph, except for the rounding inside operations."""
    copy = model.clone()
    names = Names(copy)
    for value in list(copy.graph.initializers.values()):
        if value.dtype in HALVES:
            _widen(copy, value, names)
    typed = {value for node in copy.graph for value in node.outputs if value.dtype in HALVES}
    kinds = {value: value.dtype for value in typed}
    for value in typed:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in list(copy.graph):
        halves = [value for value in node.outputs if value in typed]
        if node.op_type == "Cast" and halves:
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        # A Cast rounds float32 inputs; pixels and inputs that are already in half need no second rounding.
        rounds = not is_layout(node) and (node.op_type not in _SELECTS or node.op_type == "Cast")
        if rounds and not _into_integer_product(node):
            for value in halves:
                _round(node, value, kinds[value], names)
    return copy


def _widen(model: ir.Model, constant: ir.Value, names: Names) -> None:
    """Make all readers of `constant` read it in float32, through a Cast, so that weights keep their size."""
    readers = list(constant.uses())
    cast = names.node("Cast", [constant], f"{constant.name}/float32", {"to": int(ir.DataType.FLOAT)})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), constant.shape
    model.graph.insert_before(model.graph[0], cast)
    for reader, index in readers:
        reader.replace_input_with(index, cast.outputs[0])


def _round(node: ir.Node, value: ir.Value, kind: ir.DataType | None, names: Names) -> None:
    """Make all readers of `value` read it rounded to `kind`."""
    assert kind is not None
    readers = list(value.uses())
    down = names.node("Cast", [value], f"{value.name}/round", {"to": int(kind)})
    up = names.node("Cast", [down.outputs[0]], f"{value.name}/rounded", {"to": int(ir.DataType.FLOAT)})
    for made, dtype in ((down, kind), (up, ir.DataType.FLOAT)):
        made.outputs[0].type, made.outputs[0].shape = ir.TensorType(dtype), value.shape
    node.append([down, up])
    for reader, index in readers:
        reader.replace_input_with(index, up.outputs[0])


def _into_integer_product(node: ir.Node) -> bool:
    """Whether a node is a DequantizeLinear that only matrix products with another DequantizeLinear read."""
    readers = [use.node for use in node.outputs[0].uses()]
    return node.op_type == "DequantizeLinear" and all(
        reader.op_type in ("MatMul", "Conv", "Gemm") and all(is_dequantized(value) for value in reader.inputs[:2])
        for reader in readers
    )


# --- Write precision into a graph -------------------------------------------------------------------------------------
# Half everywhere except in parts that fall back to float32, with a Cast at every border.
#
# Strongly typed runtimes need this (TensorRT from version 11 on has no other mode): each operation is computed in the
# type of its inputs. Inputs and outputs of the graph keep their types. Operations that ONNX does not define in half
# precision stay in float32 (onnx.defs: the type constraints of each operator's schema), and so do branches and loops.


Half = Literal["fp16", "bf16"]
TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
NUMPY: dict[str, npt.DTypeLike] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
NAMES = {"fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}


# The inputs and outputs of an operation that are in half precision if the operation is.
Roles = tuple[tuple[bool, ...], tuple[bool, ...]]


def half_roles(node: ir.Node, opset: int, half: Half) -> Roles | None:
    """The roles that ONNX allows for an operation; None if it has no half precision, or contains a branch or loop."""
    if node.domain or any(attribute.type in GRAPHS for attribute in node.attributes.values()):
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    allowed = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in schema.type_constraints}

    def takes(formals: list[onnx.defs.OpSchema.FormalParameter], count: int) -> tuple[bool, ...]:
        last = len(formals) - 1
        kinds = [formals[min(i, last)].type_str for i in range(count)]
        return tuple(NAMES[half] in allowed.get(kind, {kind}) for kind in kinds)

    inputs, outputs = takes(list(schema.inputs), len(node.inputs)), takes(list(schema.outputs), len(node.outputs))
    pairs = [*zip(node.inputs, inputs, strict=True), *zip(node.outputs, outputs, strict=True)]
    return (inputs, outputs) if any(takes_half for value, takes_half in pairs if is_float(value)) else None


def is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.FLOAT


def touches_floats(node: ir.Node) -> bool:
    return any(is_float(value) for value in (*node.inputs, *node.outputs))


def type_graph(model: ir.Model, half: Half, float_fallback: Mapping[str, str]) -> None:
    """Write the types into a float32 graph, in place.

    Args:
        float_fallback: names of nodes that stay in float32, with the reasons.

    Raises:
        GraphError: a constant of an operation in half precision is out of range.
    """
    Inference(model)  # writes the types of all tensors
    opset = model.graph.opset_imports[""]
    typing = _Typing(model, half)
    for node in list(model.graph):
        if not touches_floats(node):
            continue
        roles = None if str(node.name) in float_fallback else half_roles(node, opset, half)
        typing.write(node, roles)
    typing.close()
    drop_unused(model)


class _Typing:
    """The state while types are written. `halves`: the tensors that are already in half."""

    def __init__(self, model: ir.Model, half: Half) -> None:
        self.model, self.half, self.names = model, half, Names(model)
        self.halves: set[ir.Value] = set()
        self._casts: dict[tuple[ir.Value, bool], ir.Value] = {}

    def write(self, node: ir.Node, roles: Roles | None) -> None:
        for i, value in enumerate(node.inputs):
            if value is None or not (is_float(value) or value in self.halves):
                continue
            expected = roles is not None and roles[0][i]
            if expected != (value in self.halves):
                node.replace_input_with(i, self._as(value, expected))
        if roles is None:
            return
        for output, takes_half in zip(node.outputs, roles[1], strict=True):
            if takes_half and is_float(output):
                output.type = ir.TensorType(TYPES[self.half])  # a new one: values may share theirs
                self.halves.add(output)
        if node.op_type == "Cast" and node.outputs[0] in self.halves:
            node.attributes["to"] = ir.AttrInt64("to", int(TYPES[self.half]))

    def close(self) -> None:
        """Cast the rest to float32: outputs of the graph, and what branches and loops read from outside."""
        for i, output in enumerate(self.model.graph.outputs):
            if output in self.halves:
                self.model.graph.outputs[i] = self._output(output)
        for value in list(self.halves):
            for node, index in list(value.uses()):
                if node.graph is not self.model.graph:
                    node.replace_input_with(index, self._as(value, False))

    def _as(self, value: ir.Value, half: bool) -> ir.Value:
        """The value in half precision or float32."""
        if (value, half) not in self._casts:
            array = array_of(value)
            made = self._cast(value, half) if array is None else self._constant(value, array)
            self._casts[value, half] = made
            if half:
                self.halves.add(made)
        return self._casts[value, half]

    def _constant(self, value: ir.Value, array: npt.NDArray[np.float32]) -> ir.Value:
        with np.errstate(over="ignore"):
            converted = array.astype(NUMPY[self.half])
        if (np.isinf(converted.astype(np.float32)) & np.isfinite(array)).any():
            raise GraphError(
                f"the constant {value.name} is out of range of {self.half}",
                found=f"{np.abs(array).max():.3g}",
                expected=f"a value that {self.half} can represent",
                fix="keep the layer that reads it in float32",
            )
        return self.names.constant(converted, f"{value.name}.{self.half}")

    def _cast(self, value: ir.Value, half: bool) -> ir.Value:
        kind = TYPES[self.half] if half else ir.DataType.FLOAT
        name = f"{value.name}/{self.half if half else 'fp32'}"
        node = self.names.node("Cast", [value], f"{name}/Cast", {"to": int(kind)}, output=name)
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(kind), value.shape
        producer = value.producer()
        if producer is None:
            self.model.graph.insert_before(self.model.graph[0], node)
        else:
            producer.append(node)
        return node.outputs[0]

    def _output(self, value: ir.Value) -> ir.Value:
        """Keep the graph output in float32, under its name."""
        name = str(value.name)
        value.name = self.names.free(f"{name}/{self.half}")
        made = self._as(value, False)
        made.name = name
        return made

"""Rewrite shapes into one form: views, stacks, free sizes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from vitdeploy.graph.canonical.products import FREE, at_size, sizes_at, viewed
from vitdeploy.graph.edit import Names, bypass, replace
from vitdeploy.graph.shapes.infer import ARITHMETIC, Inference
from vitdeploy.graph.shapes.sizes import Dims, Extent, FreeSize, Unknown, view_shape
from vitdeploy.graph.values import (
    array_of,
    floats_of,
    integers_of,
    is_constant,
    only_user,
    operands,
    producer,
    rank_of,
    stem,
)

# --- Sizes known only from the graph's inputs, such as the batch, computed once and shared ----------------------------


INT64 = ir.DataType.INT64
# Constants up to this size are computed at export; the largest are position embeddings, not weights.
FOLD_ELEMENTS = 1 << 26
# Operators computed element by element in Python, about 10^5 elements per second, and their limits.
SLOW = frozenset(
    {
        *("AveragePool", "Conv", "ConvTranspose", "GridSample", "LRN", "LpPool", "MaxPool", "NonMaxSuppression"),
        *("Resize", "RoiAlign", "ScatterElements", "ScatterND", "Unique", "Upsample"),
    }
)
SLOW_ELEMENTS = 1 << 20


class SizeChain:
    """Creates Shape(input, start, end), its multiples and their Concat, each only once, at the start of the graph.

    Nodes that the graph already has in this form are reused.
    """

    def __init__(self, model: ir.Model, known: Inference) -> None:
        self._model = model
        self._last: ir.Node | None = None
        self._made: dict[Dims, ir.Value] = {}
        self._origins: dict[str, tuple[ir.Value, int]] = {}
        for value in model.graph.inputs:
            for axis, size in enumerate(known.dims_of(value) or ()):
                if isinstance(size, FreeSize) and value.name not in model.graph.initializers:
                    self._origins.setdefault(str(size), (value, axis))

        for node in model.graph:
            for output in node.outputs:
                if output in known.contents and self.is_canonical(output):
                    self._made.setdefault(tuple(known.contents[output]), output)

    def is_canonical(self, value: ir.Value) -> bool:
        """Whether a value is a Concat of constants and sizes of inputs, or one such size."""
        node = value.producer()
        if node is not None and node.op_type == "Concat":
            return all(_is_size_of_input(part) or is_constant(part) for part in node.inputs)
        return _is_size_of_input(value)

    def vector(self, entries: Dims) -> ir.Value | None:
        """An int64 [n] value with `entries`; None if one of them is not a size of an input."""
        if entries in self._made:
            return self._made[entries]
        parts = []
        for entry in entries:
            part = self._entry(entry)
            if part is None:
                return None
            parts.append(part)
        value = parts[0] if len(parts) == 1 else self._append("Concat", parts, axis=0)
        self._made[entries] = value
        return value

    def _entry(self, entry: Extent) -> ir.Value | None:
        if isinstance(entry, Unknown):
            return None
        if (entry,) in self._made:
            return self._made[(entry,)]
        if isinstance(entry, int):
            value = Names(self._model).constant(np.array([entry], np.int64), f"size_{entry}")
        elif len(entry.names) > 1 or entry.names[0] not in self._origins:
            return None
        elif entry.factor == 1:
            source, axis = self._origins[entry.names[0]]
            value = self._append("Shape", [source], start=axis, end=axis + 1)
        else:
            one, factor = self._entry(FreeSize(1, entry.names)), self._entry(entry.factor)
            assert one is not None and factor is not None
            value = self._append("Mul", [one, factor])
        self._made[(entry,)] = value
        return value

    def _append(self, operator: str, inputs: Sequence[ir.Value], **attributes: int) -> ir.Value:
        node = Names(self._model).node(operator, inputs, f"sizes/{operator}_{len(self._made)}", attributes)
        value = node.outputs[0]
        value.dtype = INT64
        if self._last is None:
            self._model.graph.insert_before(self._model.graph[0], node)
        else:
            self._model.graph.insert_after(self._last, node)
        self._last = node
        return value


def _is_size_of_input(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    return (
        node is not None
        and node.op_type == "Shape"
        and node.inputs[0] is not None
        and node.inputs[0].is_graph_input()
        and {"start", "end"} <= node.attributes.keys()
    )


# --- Shapes as constants: known sizes are not computed, and a free size is read from the graph's input, once ----------
# A Reshape takes its shape from a constant, -1 for the free size; other users of a free size (the Expand of a class
# token) take it from one chain Shape(input, start, end) -> [Mul] -> Concat, shared by all.


def resolve_shapes(model: ir.Model, known: Inference, chain: SizeChain) -> int:
    """Write every `known` shape as a constant. Returns the number of rewritten node inputs."""
    # Constants if all numbers are known, then views, then the remaining uses of a free size.
    rewritten = _known_numbers(model, known)
    for node in list(model.graph):
        if node.domain == "" and node.op_type in _RULES:
            rewritten += _RULES[node.op_type](model, known, node)
    return rewritten + _free_sizes(model, known, chain)


def _known_numbers(model: ir.Model, known: Inference) -> int:
    """Replace computed tensors whose entries are all known by constants."""
    count, names = 0, Names(model)
    for value, contents in list(known.contents.items()):
        node = value.producer()
        if node is None or value.is_graph_output() or value.dtype not in (INT64, ir.DataType.INT32):
            continue
        if not value.uses() or not all(isinstance(entry, int) for entry in contents.ravel()):
            continue
        constant = names.constant(contents.astype(value.dtype.numpy()), f"{value.name}.constant")
        known.contents[constant] = contents
        count += len(value.uses())
        ir.convenience.replace_all_uses_with(value, constant)
    return count


def _reshape(model: ir.Model, known: Inference, node: ir.Node) -> int:
    return _view(model, known, node, node.inputs[0], known.dims_of(node.outputs[0]))


def _gather(model: ir.Model, known: Inference, node: ir.Node) -> int:
    """Replace a Gather that keeps every element in its place by a view."""
    found = viewed(known, node) if node.outputs[0] not in known.contents else None
    return _view(model, known, node, *found) if found is not None else 0


def _view(model: ir.Model, known: Inference, node: ir.Node, data: ir.Value | None, expected: Dims | None) -> int:
    target = view_shape(known.dims_of(data), expected)
    if expected is None or target is None:
        return 0
    current = array_of(node.inputs[1]) if node.op_type == "Reshape" else None
    if current is not None and current.tolist() == target:
        return 0
    shape = Names(model).constant(np.array(target, np.int64), f"{node.name}.shape")
    new = ir.node("Reshape", [data, shape], name=node.name)
    known.dims[new.outputs[0]] = expected
    replace(model, node, [new])
    return 1


def _tile(model: ir.Model, known: Inference, node: ir.Node) -> int:
    """Replace a Tile of axes of size 1 by an Expand."""
    data, repeats = known.dims_of(node.inputs[0]), known.contents_of(node.inputs[1])
    if data is None or repeats is None or len(data) != repeats.size:
        return 0
    if any(count != 1 and size != 1 for size, count in zip(data, repeats, strict=True)):
        return 0
    replace(model, node, [ir.node("Expand", list(node.inputs), name=node.name)])
    return 1


def _constant_of_shape(model: ir.Model, known: Inference, node: ir.Node) -> int:
    """Replace a ConstantOfShape of a free shape by the Expand of a number."""
    attribute, contents = node.attributes.get("value"), known.contents_of(node.inputs[0])
    if contents is None or contents.ndim != 1:
        return 0
    fill = np.zeros(1, np.float32) if attribute is None else attribute.as_tensor().numpy().reshape(1)
    constant = Names(model).constant(np.ascontiguousarray(fill), f"{node.name}.value")
    replace(model, node, [ir.node("Expand", [constant, node.inputs[0]], name=node.name)])
    return 1


_RULES = {
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Gather": _gather,
    "Tile": _tile,
    "ConstantOfShape": _constant_of_shape,
}


def _free_sizes(model: ir.Model, known: Inference, chain: SizeChain) -> int:
    """Compute node inputs that are shapes with a free size from one short chain, shared by equal shapes."""
    count = 0
    for node in list(model.graph):
        if node.op_type in ARITHMETIC and node.outputs[0] in known.contents:
            continue
        for index, value in enumerate(node.inputs):
            contents = known.contents.get(value) if value is not None else None
            if value is None or contents is None or value.producer() is None or value.dtype != INT64:
                continue
            if contents.ndim == 1 and not chain.is_canonical(value):
                short = chain.vector(tuple(contents))
                if short is not None:
                    node.replace_input_with(index, short)
                    count += 1
    return count


# --- Values that are the same for every image, computed once ----------------------------------------------------------
# A detector's padding mask, exported with free sizes, is ones expanded to the batch; the positions computed from it
# take a dozen operators, none of which mixes images. Each is computed for two batch sizes: if all images of both have
# the same value, it becomes a constant, which is expanded.


# The operators on a mask of scores in any graph: a cast, a new axis of heads, a repetition.
ALWAYS = frozenset({"Cast", "Tile", "Unsqueeze"})
# Elementwise operators that broadcast all their inputs.
BROADCASTING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "And", "Or", "Equal", "Where", "Greater", "Less"}
)
SHARED = ALWAYS | BROADCASTING
SHARED |= {"Concat", "Cos", "CumSum", "Exp", "Floor", "Gather", "Log", "Neg", "Not", "Reciprocal", "Reshape", "Resize"}
SHARED |= {"Sin", "Slice", "Sqrt", "Transpose"}


def compute_once(model: ir.Model, known: Inference, chain: SizeChain, node: ir.Node, masks: bool) -> bool:
    """Replace a node by the Expand of a constant if it computes the same for every image, from Expands of constants.

    `masks`: the graph counts the pixels of a mask, so replace all such nodes. In other graphs replace only those of
    score masks: learned values, such as queries, stay where the exporter expands them.
    """
    expands = [expand for value in node.inputs if (expand := producer(value, "Expand")) is not None]
    expected = known.dims_of(node.outputs[0])
    if not expands or node.op_type not in SHARED or expected is None or all(isinstance(size, int) for size in expected):
        return False
    if not masks and not _of_a_mask(known, node, expands[0], expected):
        return False
    results = [result for free in FREE if (result := _result(model, known, node, free)) is not None]
    one = results[0][tuple(slice(None if isinstance(size, int) else 1) for size in expected)] if results else None
    alike = one is not None and all(np.array_equal(each, np.broadcast_to(one, each.shape)) for each in results)
    target = chain.vector(expected) if alike and len(results) == len(FREE) else None
    if one is None or target is None:
        return False
    constant = Names(model).constant(np.ascontiguousarray(one), f"{stem(node)}/{node.op_type}")
    whole = ir.node("Expand", [constant, target], name=node.name)
    known.dims[constant], known.dims[whole.outputs[0]] = one.shape, expected  # for what follows in the same round
    replace(model, node, [whole])
    return True


def _of_a_mask(known: Inference, node: ir.Node, expand: ir.Node, expected: Dims) -> bool:
    """Whether the node is one of the operators on score masks and reads the Expand of a constant."""
    before, after = known.dims_of(expand.inputs[0]), known.dims_of(expand.outputs[0])
    if node.op_type in ALWAYS:
        alike = before is not None and after is not None and len(before) == len(after)
        return alike and node.inputs[0] is expand.outputs[0] and is_constant(expand.inputs[0])
    others = [value for value in node.inputs if value is not expand.outputs[0]]
    return node.op_type in BROADCASTING and after == expected and all(map(is_constant, (expand.inputs[0], *others)))


def _result(model: ir.Model, known: Inference, node: ir.Node, free: int) -> np.ndarray | None:
    """The result of a node with `free` for every free size; None if unknown."""
    shape = sizes_at(known.dims[node.outputs[0]], free)
    if shape is None or math.prod(shape) > (SLOW_ELEMENTS if node.op_type in SLOW else FOLD_ELEMENTS):
        return None
    arrays = {f"i{i}": at_size(known, value, free) for i, value in enumerate(node.inputs) if value is not None}
    inputs = [f"i{i}" if value is not None else "" for i, value in enumerate(node.inputs)]
    if any(array is None for array in arrays.values()):
        return None
    proto = onnx.helper.make_node(node.op_type, inputs, ["result"])
    proto.attribute.extend(ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
    kinds = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (*arrays, "result")]
    graph = onnx.helper.make_graph([proto], "node", kinds[:-1], kinds[-1:])
    opsets = [onnx.helper.make_opsetid("", model.graph.opset_imports[""])]
    try:
        with np.errstate(all="ignore"):
            [result] = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, arrays)
    except Exception:  # the operators' errors have no common base; a node that cannot be computed here stays
        return None
    return np.asarray(result) if np.shape(result) == shape else None


# --- Remove views between a product and its bias, and around a product ------------------------------------------------
# Keras' layers write a product on rows of a matrix, [batch tokens, in], or on heads, and add the bias after the Reshape
# that follows; converters of Einsum to MatMul merge all batch axes of a product into one. The numbers stay the same bit
# by bit: only views and the position of the bias change.


KEY = [0, 2, 1]


def settle_views(model: ir.Model) -> int:
    """Rewrite all three constructs, in place. Returns the number of rewrites."""
    nodes = list(model.graph)
    if not any(node.op_type == "MatMul" for node in nodes):
        return 0
    known, count = Inference(model), 0
    for node in nodes:
        if node.op_type == "Add" and node.graph is not None:
            count += _bias_before_view(model, known, node)
    for node in nodes:
        if node.op_type in ("Reshape", "Squeeze") and node.graph is not None:
            count += _product_of_heads(model, known, node)
    for node in nodes:
        if node.op_type == "Reshape" and node.graph is not None:
            count += _rows_kept(known, node)
    if count:
        Inference(model)  # shapes of the new nodes
    return count


def _bias_before_view(model: ir.Model, known: Inference, add: ir.Node) -> bool:
    """Rewrite Reshape(x W) + b as Reshape(x W + b) if the last axes are those of W's output and b covers only them."""
    pair = operands(add, "Add")
    for view, constant in (pair, pair[::-1]) if pair is not None else ():
        reshape, bias = producer(view, "Reshape"), floats_of(constant)
        product = producer(reshape.inputs[0], "MatMul") if reshape is not None else None
        if reshape is None or product is None or bias is None or only_user(view) is not add:
            continue
        weight, dims = floats_of(product.inputs[1]), known.dims_of(view)
        if weight is None or weight.ndim != 2 or dims is None or only_user(product.outputs[0]) is not reshape:
            continue
        vector = _vector(bias, dims, weight.shape[1])
        if vector is None or known.dims_of(add.outputs[0]) != dims:
            continue
        names = Names(model)
        summed = names.node(
            "Add", [product.outputs[0], names.constant(vector, f"{stem(product)}.bias")], f"{stem(product)}/Add_bias"
        )
        summed.outputs[0].type, summed.outputs[0].shape = view.type, product.outputs[0].shape
        before = known.dims_of(product.outputs[0])
        if before is not None:
            known.dims[summed.outputs[0]] = before
        model.graph.insert_after(product, summed)
        reshape.replace_input_with(0, summed.outputs[0])
        return bypass(add, view)
    return False


def _vector(bias: np.ndarray, dims: Dims, width: int) -> np.ndarray | None:
    """A bias on the last axes of a tensor of `dims`, with `width` elements in all, as [width]; None for others."""
    axes, size = 0, 1
    while size < width and axes < len(dims):
        axes += 1
        last = dims[-axes]
        if not isinstance(last, int):
            return None
        size *= last
    if size != width or bias.ndim > len(dims) or any(side != 1 for side in bias.shape[: max(bias.ndim - axes, 0)]):
        return None
    own = bias.reshape(bias.shape[max(bias.ndim - axes, 0) :])
    sides = tuple(side for side in dims[len(dims) - axes :] if isinstance(side, int))
    return np.ascontiguousarray(np.broadcast_to(own, sides or (1,)).reshape(-1))


class _Operand(NamedTuple):
    """An operand [batch heads, rows, columns] of a product as Transpose(source, perm) [batch, heads, rows, columns]."""

    source: ir.Value
    perm: list[int]
    dims: Dims


def _product_of_heads(model: ir.Model, known: Inference, last: ir.Node) -> bool:
    """Rewrite Reshape(MatMul(Reshape(a), Reshape(b))) with two batch axes outside as a product with four axes."""
    inner = last
    if last.op_type == "Squeeze":
        found = producer(last.inputs[0], "Reshape")
        if found is None or only_user(found.outputs[0]) is not last:
            return False
        inner = found
    product = producer(inner.inputs[0], "MatMul")
    if product is None or only_user(product.outputs[0]) is not inner:
        return False
    left, right = (_operand(known, value) for value in product.inputs)
    if left is None or right is None or left.dims[:2] != right.dims[:2]:
        return False
    if known.dims_of(last.outputs[0]) != (*left.dims[:3], right.dims[3]) or left.dims[3] != right.dims[2]:
        return False
    names, nodes, values = Names(model), [], []
    for operand, role in ((left, "left"), (right, "right")):
        value = operand.source
        if operand.perm != sorted(operand.perm):
            node = names.node("Transpose", [value], f"{stem(product)}/Transpose_{role}", {"perm": operand.perm})
            node.outputs[0].type = value.type
            known.dims[node.outputs[0]] = operand.dims
            nodes.append(node)
            value = node.outputs[0]
        values.append(value)
    new = names.node("MatMul", values, f"{stem(product)}/MatMul_heads")
    known.dims[new.outputs[0]] = (*left.dims[:3], right.dims[3])
    replace(model, last, [*nodes, new])
    return True


def _operand(known: Inference, value: ir.Value | None) -> _Operand | None:
    """The operand behind `value`, read through Transpose(0, 2, 1), Reshape, Transpose and Unsqueeze, each optional."""
    swapped = producer(value, "Transpose")
    if swapped is not None:
        if list(swapped.attributes.get_ints("perm", ())) != KEY:
            return None
        value = swapped.inputs[0]
    reshape = producer(value, "Reshape")
    merged = known.dims_of(value)
    if reshape is None or merged is None or len(merged) != 3:
        return None
    source, perm = _without_unit_axes(reshape.inputs[0])
    dims = known.dims_of(source)
    if source is None or dims is None or len(dims) != 4 or len(perm) != 4:
        return None
    moved = tuple(dims[axis] for axis in perm)
    if any(isinstance(size, Unknown) for size in moved) or merged[1:] != moved[2:]:
        return None
    if swapped is not None:
        perm, moved = [*perm[:2], perm[3], perm[2]], (*moved[:2], moved[3], moved[2])
    return _composed(known, source, perm, moved)


def _composed(known: Inference, source: ir.Value, perm: list[int], moved: Dims) -> _Operand:
    """The operand with the Transpose that computes its source, if any, merged into `perm`."""
    node = producer(source, "Transpose")
    below = node.inputs[0] if node is not None else None
    if node is not None and below is not None and known.dims_of(below) is not None:
        inner = list(node.attributes.get_ints("perm", ()))
        if len(inner) == 4:
            return _Operand(below, [inner[axis] for axis in perm], moved)
    return _Operand(source, perm, moved)


def _without_unit_axes(value: ir.Value | None) -> tuple[ir.Value | None, list[int]]:
    """(x, perm) of a value that is Transpose(x, perm), except for axes of 1 inserted by an Unsqueeze."""
    transpose = producer(value, "Transpose")
    inner = transpose.inputs[0] if transpose is not None else value
    perm = list(transpose.attributes.get_ints("perm", ())) if transpose is not None else []
    unsqueeze = producer(inner, "Unsqueeze")
    axes = array_of(unsqueeze.inputs[1]) if unsqueeze is not None else None
    if unsqueeze is None or axes is None:
        rank = len(inner.shape) if inner is not None and inner.shape is not None else 0
        return inner, perm or list(range(rank))
    source = unsqueeze.inputs[0]
    rank = (len(source.shape) if source is not None and source.shape is not None else 0) + axes.size
    put = {int(axis) % rank for axis in axes.ravel()} if rank else set()
    kept = [axis for axis in range(rank) if axis not in put]
    return source, [kept.index(axis) for axis in perm or range(rank) if axis in kept]


def _rows_kept(known: Inference, last: ir.Node) -> bool:
    """Rewrite Reshape(Reshape(x) W + b) that restores x's leading axes as x W + b."""
    summed = last.inputs[0]
    pair = operands(producer(summed, "Add"), "Add")
    product = None
    for value in pair or (summed,):
        product = product or producer(value, "MatMul")
    if product is None or summed is None or only_user(summed) is not last:
        return False
    if pair is not None and only_user(product.outputs[0]) is not summed.producer():
        return False
    rows = producer(product.inputs[0], "Reshape")
    weight = floats_of(product.inputs[1])
    x = rows.inputs[0] if rows is not None else None
    before, flat, after = known.dims_of(x), known.dims_of(product.inputs[0]), known.dims_of(last.outputs[0])
    if x is None or weight is None or weight.ndim != 2 or before is None or flat is None or after is None:
        return False
    expected: tuple[Extent, ...] = (*before[:-1], weight.shape[1])
    if len(flat) != 2 or after != expected or before[-1] != flat[-1] or view_shape(before, after) is None:
        return False
    if pair is not None and not any(_is_row(each, weight.shape[1]) for each in pair):
        return False
    product.replace_input_with(0, x)
    for value in (product.outputs[0], summed):
        known.dims[value] = expected
    return bypass(last, summed)


def _is_row(value: ir.Value, width: int) -> bool:
    array = array_of(value)
    return array is not None and array.shape == (width,)


# --- One part of a stack of tensors is that tensor: DETR's decoders stack the layers' results and return the last -----


def unstack(model: ir.Model) -> int:
    """Bypass every Gather of one part of a Concat of Unsqueezes along one axis, in place; return their number.

    Nodes that only the other parts need are then dead code.
    """
    return sum(
        node.op_type == "Gather" and (part := _part(node)) is not None and bypass(node, part)
        for node in list(model.graph)
    )


def _part(gather: ir.Node) -> ir.Value | None:
    """The tensor that `gather` selects from a stack; None for any other Gather."""
    stack, index = producer(gather.inputs[0], "Concat"), gather.inputs[1]
    chosen, rank = integers_of(index), rank_of(gather.inputs[0])
    if stack is None or chosen is None or len(chosen) != 1 or rank is None or rank_of(index) != 0:
        return None
    axis = stack.attributes.get_int("axis", 0) % rank
    parts = [producer(value, "Unsqueeze") for value in stack.inputs]
    if gather.attributes.get_int("axis", 0) % rank != axis or not -len(parts) <= chosen[0] < len(parts):
        return None
    if any(part is None or [a % rank for a in integers_of(part.inputs[1]) or ()] != [axis] for part in parts):
        return None
    part = parts[chosen[0]]
    return part.inputs[0] if part is not None else None

"""What is the same for every image, computed once: the Expand of a constant moves behind what reads it.

A detector's mask of padding, exported with free sizes, is ones expanded to the batch; the positions that are made of it
take a dozen operators, none of which mixes images. Each is computed for one image, and the last result is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.canonical.shapes import SizeChain
from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import Dims
from vitdeploy.graph.values import array_of, integers_of, is_constant, producer

# Each entry depends on the one at its place alone.
UNARY = ("Cast", "Cos", "Exp", "Floor", "Log", "Neg", "Not", "Reciprocal", "Sin", "Sqrt")
DEPTH = 64
# The node's inputs behind the data, and the axes of its result that are expanded.
Moved = tuple[list[ir.Value | None], set[int]]


# What moves in any graph: a mask of scores is cast, gets its axis of heads, and is repeated.
ALWAYS = ("Cast", "Tile", "Unsqueeze")


def sink_expand_of_constant(model: ir.Model, known: Inference, chain: SizeChain, node: ir.Node, masks: bool) -> bool:
    """Move the Expand of a constant behind `node`, where each entry along its axes depends on its own alone."""
    if not masks and not _is_plain(known, node):
        return False
    if node.op_type in ("Gather", "Reshape") and _of_equals(model, known, chain, node):
        return True
    if node.op_type == "Concat":
        return _sink_through_concat(model, known, chain, node)
    rule = _RULES.get(node.op_type)
    expand = producer(node.inputs[0], "Expand") if rule is not None else None
    data = expand.inputs[0] if expand is not None else None
    if rule is None or expand is None or data is None or not is_made_of_constants(data):
        return False
    after, wanted = known.dims_of(expand.outputs[0]), known.dims_of(node.outputs[0])
    if after is None or wanted is None:
        return False
    own, axes = _of_one(known, data, after)
    moved = rule(model, known, node, axes, wanted) if own is not None else None
    target = chain.vector(wanted) if moved is not None else None
    if moved is None or target is None or own is None:
        return False
    made = []
    if own != known.dims_of(data):  # also along axes of known sizes, which are no matter of the batch
        sizes = Names(model).constant(np.array(own, np.int64), f"{expand.name}.one")
        made.append(ir.node("Expand", [data, sizes]))
        made[0].outputs[0].type = data.type
        data = made[0].outputs[0]
        known.dims[data] = own
    inputs, expanded = moved
    inner = ir.node(node.op_type, [data, *inputs], attributes=dict(node.attributes))
    inner.outputs[0].type = node.outputs[0].type
    whole = ir.node("Expand", [inner.outputs[0], target])
    known.dims[inner.outputs[0]] = tuple(1 if axis in expanded else size for axis, size in enumerate(wanted))
    known.dims[whole.outputs[0]] = wanted
    replace(model, node, [*made, inner, whole])
    return True


def _is_plain(known: Inference, node: ir.Node) -> bool:
    """One of the operators that always move, on the Expand of a constant of as many axes."""
    expand = producer(node.inputs[0], "Expand") if node.op_type in ALWAYS else None
    if expand is None or not is_constant(expand.inputs[0]):
        return False
    before, after = known.dims_of(expand.inputs[0]), known.dims_of(expand.outputs[0])
    return before is not None and after is not None and len(before) == len(after)


def _of_one(known: Inference, data: ir.Value, whole: Dims) -> tuple[tuple[int, ...] | None, set[int]]:
    """The sizes that an Expand of `data` to `whole` has for one image, and the axes along which all images share it."""
    before = known.dims_of(data)
    if before is None or len(before) > len(whole):
        return None, set()
    padded = (*[1] * (len(whole) - len(before)), *before)
    axes = {axis for axis, (own, size) in enumerate(zip(padded, whole, strict=True)) if own == 1 != size}
    axes = {axis for axis in axes if not isinstance(whole[axis], int)}
    one = [1 if axis in axes else size for axis, size in enumerate(whole)]
    sizes = tuple(size for size in one if isinstance(size, int) and size > 0)
    return (sizes if axes and len(sizes) == len(one) else None), axes


def is_made_of_constants(value: ir.Value | None, depth: int = DEPTH) -> bool:
    """Whether it is a constant, or will be one as soon as constants are folded."""
    if is_constant(value):
        return True
    node = value.producer() if value is not None else None
    if node is None or not depth or not node.inputs:
        return False
    return all(each is None or is_made_of_constants(each, depth - 1) for each in node.inputs)


def _same(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved:
    return list(node.inputs[1:]), axes


def _unsqueeze(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved | None:
    put = integers_of(node.inputs[1])
    if put is None:
        return None
    new = {axis % len(wanted) for axis in put}
    kept = [axis for axis in range(len(wanted)) if axis not in new]
    return list(node.inputs[1:]), {kept[axis] for axis in axes}


def _tile(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved | None:
    repeats = known.contents_of(node.inputs[1])
    if repeats is None or any(repeats[axis] != 1 for axis in axes):
        return None
    return list(node.inputs[1:]), axes


def _slice(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved | None:
    cut = integers_of(node.inputs[3]) if len(node.inputs) > 3 else None
    if cut is None or {axis % len(wanted) for axis in cut} & axes:
        return None
    return list(node.inputs[1:]), axes


def _gather(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved | None:
    """By one index, which takes its axis away."""
    index = array_of(node.inputs[1])
    if index is None or index.ndim:
        return None
    axis = node.attributes.get_int("axis", 0) % (len(wanted) + 1)
    if axis in axes:
        return None
    return list(node.inputs[1:]), {each - (each > axis) for each in axes}


def _cumulative(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved | None:
    axis = array_of(node.inputs[1])
    if axis is None or axis.size != 1 or int(axis.item()) % len(wanted) in axes:
        return None
    return list(node.inputs[1:]), axes


def _resize(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved | None:
    """To given sizes, of which those of the expanded axes are 1 now."""
    if len(node.inputs) < 4 or node.inputs[3] is None or "axes" in node.attributes:
        return None
    data = known.dims_of(node.inputs[0])
    if data is None or any(data[axis] != wanted[axis] for axis in axes):
        return None
    sizes = _sizes(model, node, axes, wanted)
    return ([*node.inputs[1:3], sizes], axes) if sizes is not None else None


def _reshape(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved | None:
    """One that leaves the axes up to the last expanded one where they are."""
    data, last = known.dims_of(node.inputs[0]), max(axes, default=-1) + 1
    if data is None or data[:last] != wanted[:last]:
        return None
    sizes = _sizes(model, node, axes, wanted)
    return ([sizes], axes) if sizes is not None else None


def _of_equals(model: ir.Model, known: Inference, chain: SizeChain, node: ir.Node) -> bool:
    """Whatever a Gather or a Reshape makes of entries that are all equal has the same ones."""
    source = node.inputs[0]
    while (view := source.producer() if source is not None else None) is not None:
        if view.op_type not in ("Expand", "Reshape", "Flatten", "Unsqueeze", "Squeeze"):
            return False
        source = view.inputs[0]
    array, wanted = array_of(source), known.dims_of(node.outputs[0])
    if source is node.inputs[0] or array is None or wanted is None or all(isinstance(size, int) for size in wanted):
        return False  # where all sizes are known, folding computes it, if it is not too large
    if not array.size or np.any(array != array.flat[0]):
        return False
    target = chain.vector(wanted)
    if target is None:
        return False
    entry = Names(model).constant(np.full((1,) * len(wanted), array.flat[0], array.dtype), f"{node.name}.entry")
    whole = ir.node("Expand", [entry, target])
    known.dims[whole.outputs[0]] = wanted
    replace(model, node, [whole])
    return True


def _sink_through_concat(model: ir.Model, known: Inference, chain: SizeChain, node: ir.Node) -> bool:
    """The same for the Concat of such Expands, along an axis that none of them expands."""
    wanted = known.dims_of(node.outputs[0])
    axis = node.attributes.get_int("axis", 0) % len(wanted) if node.op_type == "Concat" and wanted else None
    if axis is None or wanted is None or isinstance(wanted[0], int) or axis == 0:
        return False
    one = (1, *wanted[1:])
    parts = []
    for value in node.inputs:
        expand = producer(value, "Expand")
        data = expand.inputs[0] if expand is not None else None
        own, whole = known.dims_of(data), known.dims_of(value)
        if own is None or whole is None or not is_made_of_constants(data):
            return False
        if whole[0] != wanted[0] or own != (1, *whole[1:]):
            return False
        parts.append(data)
    target = chain.vector(wanted)
    if target is None:
        return False
    inner = ir.node("Concat", parts, attributes={"axis": axis})
    inner.outputs[0].type = node.outputs[0].type
    whole_node = ir.node("Expand", [inner.outputs[0], target])
    known.dims[inner.outputs[0]], known.dims[whole_node.outputs[0]] = one, wanted
    replace(model, node, [inner, whole_node])
    return True


def _sizes(model: ir.Model, node: ir.Node, axes: Collection[int], wanted: Dims) -> ir.Value | None:
    own = [1 if axis in axes else size for axis, size in enumerate(wanted)]
    numbers = [size for size in own if isinstance(size, int) and size > 0]
    return Names(model).constant(np.array(numbers, np.int64), f"{node.name}.one") if len(numbers) == len(own) else None


def _transpose(model: ir.Model, known: Inference, node: ir.Node, axes: set[int], wanted: Dims) -> Moved | None:
    perm = list(node.attributes.get_ints("perm", ()))
    return ([], {perm.index(axis) for axis in axes}) if perm else None


_RULES: dict[str, Callable[[ir.Model, Inference, ir.Node, set[int], Dims], Moved | None]] = {
    **dict.fromkeys(UNARY, _same),
    "CumSum": _cumulative,
    "Gather": _gather,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}

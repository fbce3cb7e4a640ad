"""Find structures that can be pruned, and tensors at which a graph can be cut."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import create_value_mapping, extract

from vitdeploy.graph.analysis import rows, work
from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.values import array_of, dim, is_constant, only_user, scalar_of

# --- Find structures that pruning can remove: hidden channels between linears, and heads of attention -----------------
# A structure is some input channels of one linear, the reader, and everything computed for them alone: columns of the
# linears before it, and the nodes in between. Without these channels every tensor in between is smaller along one
# axis, and the graph computes the original function with the reader's rows of these channels set to zero.


# Elementwise operators with one input.
_SMOOTH = ("Elu", "Erf", "Exp", "Gelu", "Mish", "Sigmoid", "Softplus", "Sqrt", "Swish", "Tanh")
_UNARY = frozenset((*_SMOOTH, "Abs", "Clip", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Neg", "Relu"))
_BINARY = ("Add", "Div", "Mul", "Sub")


@dataclass(frozen=True)
class Prunable:
    """The structures before one linear.

    `inputs`: the input channels of `reader` that belong to each structure, [structures, channels of each].
    `columns`: for each linear before it, the output channels of each structure, [structures, any].
    `axes`: the tensors in between, with the axis that holds all structures. `splits`: Splits of such an axis.
    `products`: MatMul nodes that compute each head alone.
    """

    kind: Literal["channels", "heads"]
    reader: rows.Linear
    inputs: rows.Indices
    columns: tuple[tuple[rows.Linear, rows.Indices], ...]
    axes: Mapping[ir.Value, int]
    splits: tuple[ir.Node, ...] = ()
    products: tuple[ir.Node, ...] = ()

    @property
    def name(self) -> str:
        return self.reader.name

    @property
    def count(self) -> int:
        return len(self.inputs)

    def macs(self, model: ir.Model) -> int | None:
        """The MACs of one structure, at batch 1; None if a size is unknown."""
        shares = [(work.layer_macs(model, each), own.shape[1], each.weight.shape[1]) for each, own in self.columns]
        shares.append((work.layer_macs(model, self.reader), self.inputs.shape[1], len(self.reader.weight)))
        shares += [(work.node_macs(model, node), 1, self.count) for node in self.products]
        if any(macs is None for macs, _, _ in shares):
            return None
        return sum((macs or 0) * part // whole for macs, part, whole in shares)


def find_prunable(model: ir.Model) -> list[Prunable]:
    """All structures of a graph in canonical form, in graph order. No linear is part of two of them."""
    linears = [linear for linear in rows.find_linears(model) if linear.kind == "matmul"]
    by_output = {linear.output: linear for linear in linears}
    by_node = {linear.node: linear for linear in linears}
    found = [_heads(attention, by_output, by_node) for attention in find_attentions(model)]
    found += [_channels(linear, by_output) for linear in linears]
    order, taken, free = list(by_node), set[ir.Node](), []
    for each in sorted((one for one in found if one is not None), key=lambda one: order.index(one.reader.node)):
        parts = {each.reader.node, *(linear.node for linear, _ in each.columns)}
        if not parts & taken:
            taken |= parts
            free.append(each)
    return free


@dataclass
class _Climb:
    """The nodes between a reader and the linears before it, collected upwards."""

    by_output: Mapping[ir.Value, rows.Linear]
    nodes: set[ir.Node] = field(default_factory=set)
    values: dict[ir.Value, rows.Indices] = field(default_factory=dict)
    splits: dict[ir.Node, None] = field(default_factory=dict)
    columns: dict[ir.Node, tuple[rows.Linear, list[rows.Indices]]] = field(default_factory=dict)

    def up(self, value: ir.Value, channels: rows.Indices, width: int) -> bool:
        """Whether `value` comes from linears by operations on each channel alone; `channels` [width] are the reader's
        channels along its last axis."""
        if dim(value, -1) != width:
            return False
        linear = self.by_output.get(value)
        if linear is not None:
            _, parts = self.columns.setdefault(linear.node, (linear, []))
            if not any(np.array_equal(channels, part) for part in parts):
                parts.append(channels)
            self.values |= dict.fromkeys((linear.node.outputs[0], value), np.arange(width))
            self.nodes |= {linear.node} | ({linear.bias_add} if linear.bias_add is not None else set())
            return True
        if value in self.values:
            return np.array_equal(self.values[value], channels)
        node = value.producer()
        if node is None or node.domain:
            return False
        self.values[value] = channels
        self.nodes.add(node)
        first = node.inputs[0]
        rows_alone = node.op_type == "Reshape" and rows.reshape_sizes(node) is not None and dim(first, -1) == width
        if (node.op_type in _UNARY or rows_alone) and first is not None:
            return self.up(first, channels, width)
        if node.op_type in _BINARY:
            return self._operands(node, value, channels, width)
        return node.op_type == "Split" and first is not None and self._split(node, first, value, channels, width)

    def _operands(self, node: ir.Node, value: ir.Value, channels: rows.Indices, width: int) -> bool:
        computed = [tensor for tensor in node.inputs if tensor is not None and scalar_of(tensor) is None]
        shapes = [list(each.shape or ()) for each in computed]
        if not computed or any(shape != list(value.shape or ()) for shape in shapes) or any(map(is_constant, computed)):
            return False
        return all(self.up(each, channels, width) for each in computed)

    def _split(self, node: ir.Node, first: ir.Value, value: ir.Value, channels: rows.Indices, width: int) -> bool:
        rank, count = len(first.shape or ()), len(node.outputs)
        along_last = node.attributes.get_int("axis", 0) in (-1, rank - 1)
        if not along_last or any(dim(tensor, -1) != width for tensor in node.outputs):
            return False
        self.splits[node] = None
        return self.up(first, list(node.outputs).index(value) * width + channels, count * width)


def _channels(reader: rows.Linear, by_output: Mapping[ir.Value, rows.Linear]) -> Prunable | None:
    """The hidden channels before a linear: those of an MLP, or of both halves of a gated one (GLU)."""
    width, climb = len(reader.weight), _Climb(by_output)
    if not _may_read(reader) or not climb.up(reader.input, np.arange(width), width):
        return None
    halves = [output for node in climb.splits for output in node.outputs]
    between = dict.fromkeys((*climb.values, *halves))
    readers = {node for value in between for node, _ in value.uses()}
    if any(value.is_graph_output() for value in between) or not readers <= climb.nodes | {reader.node}:
        return None
    if [index for node, index in reader.input.uses() if node is reader.node] != [0]:
        return None
    columns = tuple((linear, np.stack(parts, axis=1)) for linear, parts in climb.columns.values())
    if any(each.size != linear.weight.shape[1] for linear, each in columns):
        return None
    axes = {value: len(value.shape) - 1 for value in between if value.shape is not None}
    return Prunable("channels", reader, np.arange(width)[:, None], columns, axes, tuple(climb.splits))


def _may_read(reader: rows.Linear) -> bool:
    """Whether the bias of a linear can be changed: a graph output must keep its name."""
    return reader.bias is not None or not reader.node.outputs[0].is_graph_output()


def _heads(
    attention: Attention, by_output: Mapping[ir.Value, rows.Linear], by_node: Mapping[ir.Node, rows.Linear]
) -> Prunable | None:
    """The heads of an attention [batch, heads, tokens, channels], with a linear per operand or one for all."""
    mix, axes, splits = attention.mix.outputs[0], dict[ir.Value, int](), dict[ir.Node, None]()
    heads, size = dim(mix, 1), dim(mix, 3)
    if heads is None or size is None or heads < 2 or len(mix.shape or ()) != 4 or not _alike(attention, heads):
        return None
    computed = (*(node.outputs[0] for node in (attention.scores, *attention.between, attention.softmax)), mix)
    axes.update(dict.fromkeys(computed, 1))
    shape = rows.static_shape(mix)
    assert shape is not None
    value, held = mix, np.broadcast_to(np.arange(heads)[:, None, None], shape)
    while (node := only_user(value)) is not None and rows.is_layout(node) and len(node.outputs) == 1:
        moved = rows.move(node, held)
        if moved is None or not _keeps(node, held):
            return None
        value, held = node.outputs[0], moved[0]
        if not _note(axes, value, held):
            return None
    reader = by_node.get(node) if node is not None else None
    if reader is None or reader.input is not value or not _may_read(reader) or axes[value] != held.ndim - 1:
        return None
    row = held.reshape(-1, held.shape[-1])[0]
    inputs = np.stack([np.flatnonzero(row == head) for head in range(heads)])
    columns = _operand_columns(attention, by_output, heads, axes, splits)
    if columns is None:
        return None
    return Prunable("heads", reader, inputs, columns, axes, tuple(splits), (attention.scores, attention.mix))


def _alike(attention: Attention, heads: int) -> bool:
    """Whether all operands between scores and softmax are the same for every head, and the weights have one reader."""
    between = [tensor for node in attention.between for tensor in node.inputs if tensor is not None]
    own = {attention.scores.outputs[0], *(node.outputs[0] for node in attention.between)}
    outputs = [*own, attention.softmax.outputs[0]]
    if any(only_user(each) is None for each in outputs):
        return False
    others = [each for each in between if each not in own]
    return all(other.shape is not None and (len(other.shape) < 3 or dim(other, -3) == 1) for other in others)


def _operand_columns(
    attention: Attention,
    by_output: Mapping[ir.Value, rows.Linear],
    heads: int,
    axes: dict[ir.Value, int],
    splits: dict[ir.Node, None],
) -> tuple[tuple[rows.Linear, rows.Indices], ...] | None:
    """The columns of each head in the linears of query, key and value; adds the tensors in between to `axes`."""
    of_column: dict[ir.Value, rows.Indices] = {}
    for operand in (attention.query, attention.key, attention.value):
        source = rows.origin(operand, through_scales=True)
        linear = by_output.get(source)
        found = rows.leaves(source, through_scales=True) if linear is not None else None
        leaf = next((each for each in found or () if each.value is operand), None)
        if linear is None or leaf is None or leaf.source.ndim != 4 or leaf.source.shape[1] != heads:
            return None
        owner = of_column.setdefault(source, np.full(linear.weight.shape[1], -1))
        columns = leaf.source % len(owner)
        if (columns != columns[:1]).any():
            return None
        for head in range(heads):
            mine = np.unique(columns[0, head])
            if (owner[mine] >= 0).any():
                return None
            owner[mine] = head
    made = []
    ends = {attention.scores, attention.mix}
    for source, owner in of_column.items():
        counts, linear = np.bincount(owner[owner >= 0], minlength=heads), by_output[source]
        shape = rows.static_shape(source)
        if shape is None or (owner < 0).any() or len(set(counts.tolist())) != 1:
            return None
        axes[linear.node.outputs[0]] = len(shape) - 1
        if not _follow(source, np.broadcast_to(owner, shape), ends, axes, splits):
            return None
        made.append((linear, np.stack([np.flatnonzero(owner == head) for head in range(heads)])))
    return tuple(made)


def _follow(
    value: ir.Value, held: rows.Indices, ends: set[ir.Node], axes: dict[ir.Value, int], splits: dict[ir.Node, None]
) -> bool:
    """Whether `value` reaches only `ends`; `held` is the head of each of its elements."""
    if value.is_graph_output() or not _note(axes, value, held):
        return False
    for node, index in value.uses():
        if node in ends or node.op_type == "Shape":
            continue
        scaled = rows.scaled_input(node) is not None
        moved = [held] if scaled else rows.move(node, held) if index == 0 else None
        if moved is None or not (scaled or _keeps(node, held)):
            return False
        if node.op_type == "Split" and _varies(held) == [node.attributes.get_int("axis", 0) % held.ndim]:
            splits[node] = None
        if not all(_follow(each, part, ends, axes, splits) for each, part in zip(node.outputs, moved, strict=True)):
            return False
    return True


def _note(axes: dict[ir.Value, int], value: ir.Value, held: rows.Indices) -> bool:
    """Record the axis of `value` that holds the heads; False unless it is a single axis of static size."""
    varies = _varies(held)
    if len(varies) != 1 or dim(value, varies[0]) != held.shape[varies[0]]:
        return False
    axes[value] = varies[0]
    return True


def _varies(held: rows.Indices) -> list[int]:
    return [axis for axis in range(held.ndim) if (held != held.take([0], axis)).any()]


def _keeps(node: ir.Node, held: rows.Indices) -> bool:
    """Whether a layout operation selects nothing along the axis of the heads, where pruning would change indices."""
    return all(axis not in _varies(held) for axis in _taken(node, held.ndim))


def _taken(node: ir.Node, rank: int) -> Iterator[int]:
    """The axes along which a Slice or Gather selects."""
    if node.op_type == "Gather":
        yield node.attributes.get_int("axis", 0) % rank
    elif node.op_type == "Slice":
        yield from (axis % rank for axis, _ in rows.slice_bounds(node) or [(axis, slice(0)) for axis in range(rank)])


# --- Find tensors at which a graph can be cut in two, and the part of a graph between two sets of tensors -------------


# Operators that compute a linear or a convolution, in any form of placement.
LAYERS = ("MatMul", "Conv", "MatMulIntegerToFloat", "MatMulNBits")


def single_cuts(model: ir.Model) -> list[str]:
    """The tensors that each separate the input of a graph from its outputs, in graph order, without inputs and outputs.

    In a ViT they are those of the residual stream. Only float32 tensors of known sizes, [batch, ...]. Reads of the
    input's size by Shape nodes do not count: a part of the graph may get the input in addition.
    """
    nodes = list(model.graph)
    position = {node: i for i, node in enumerate(nodes)}
    useful = _between(model, nodes)
    ends = set(model.graph.outputs)

    def last_read(value: ir.Value) -> int:
        if value in ends:
            return len(nodes)
        reads = [position[use.node] for use in value.uses() if use.node in useful and use.node.op_type != "Shape"]
        return max(reads, default=-1)

    # In any topological order every path passes a node if no tensor computed before the node is read after it.
    furthest = max((last_read(value) for value in model.graph.inputs), default=-1)
    found = []
    for i, node in enumerate(nodes):
        if node not in useful:
            continue
        reads = {value: last_read(value) for value in node.outputs}
        made = [value for value, last in reads.items() if last >= 0]
        if furthest <= i and len(made) == 1 and made[0] not in ends and _is_images(made[0], model):
            found.append(str(made[0].name))
        furthest = max(furthest, *reads.values())
    return found


def _between(model: ir.Model, nodes: Sequence[ir.Node]) -> set[ir.Node]:
    """The nodes that depend on the content of an input and that an output depends on."""
    depends = set(model.graph.inputs)
    for node in nodes:
        if node.op_type != "Shape" and any(value in depends for value in node.inputs if value is not None):
            depends.update(node.outputs)
    expected, useful = set(model.graph.outputs), set()
    for node in reversed(nodes):
        if any(value in expected and value in depends for value in node.outputs):
            useful.add(node)
            expected.update(value for value in node.inputs if value is not None)
    return useful


def _is_images(value: ir.Value, model: ir.Model) -> bool:
    """Whether a value is float32 [batch, ...] with the batch of the input and fixed sizes."""
    [image, *_] = model.graph.inputs
    if value.dtype != ir.DataType.FLOAT or not value.shape or not image.shape:
        return False
    return value.shape[0] == image.shape[0] and all(isinstance(size, int) for size in value.shape[1:])


def changed_tensors(placement: ir.Model, model: ir.Model) -> set[str]:
    """The tensors of a float graph that its placement lacks or computes differently, because of exact folds.

    A fold puts a factor or a shift into the constants of a node before a linear, or adds a node there, and reverts it
    in the linear's weight and bias: so after every linear the tensors are the same again, whatever its weight.
    (Factors in the columns of a linear that the next one reverts are not detected.)
    """
    theirs = create_value_mapping(placement.graph)
    layers = {rows.layer_name(node): node for node in placement.graph if node.op_type in LAYERS}
    linears = {linear.output: linear.name for linear in rows.find_linears(model)}
    renamed: dict[str, str] = {}
    moved, changed = set[str](), set[str]()
    for node in model.graph:
        for value in node.outputs:
            name = str(value.name)
            layer = layers.get(linears.get(value, ""))
            if layer is not None:
                output = str(_output_of(layer).name)
                renamed[output] = name
                if output != name:  # the placement added a bias
                    changed.add(name)
            elif name not in theirs or _differs(node, theirs[name].producer(), moved, renamed):
                moved.add(name)
    return moved | changed


def _output_of(layer: ir.Node) -> ir.Value:
    """The output of a linear in a placement, including its bias."""
    add = only_user(layer.outputs[0])
    bias = next((array_of(value) for value in add.inputs if array_of(value) is not None), None) if add else None
    return add.outputs[0] if add and add.op_type == "Add" and bias is not None and bias.ndim == 1 else layer.outputs[0]


def _differs(ours: ir.Node, theirs: ir.Node | None, moved: Collection[str], renamed: Mapping[str, str]) -> bool:
    if theirs is None or ours.op_type != theirs.op_type or len(ours.inputs) != len(theirs.inputs):
        return True
    for a, b in zip(ours.inputs, theirs.inputs, strict=True):
        if a is None or b is None:
            if a is not b:
                return True
            continue
        left, right = array_of(a), array_of(b)
        if left is None or right is None:
            if a.name != renamed.get(str(b.name), b.name) or str(a.name) in moved:
                return True
        elif left.shape != right.shape or (left != right).any():
            return True
    return False


def part(model: ir.Model, given: Sequence[str], expected: Sequence[str], batch: int) -> ir.Model:
    """A new model that computes the tensors `expected` from `given`, and from inputs of the graph if it needs them.

    Only the needed tensors of `given` become inputs, in graph order; a leading size equal to the input's dynamic batch
    is set to `batch`. Weights are shared with `model`.
    """
    values = create_value_mapping(model.graph)
    stops = {values[name] for name in given} | set(model.graph.inputs)
    needed, queue, seen = set(), [values[name] for name in expected], set()
    while queue:
        value = queue.pop()
        if value in stops:
            needed.add(value)
        elif value not in seen and (node := value.producer()) is not None:
            seen.add(value)
            queue.extend(tensor for tensor in node.inputs if tensor is not None)
    inputs = [value for value in values.values() if value in needed]
    size = next((value.shape[0] for value in model.graph.inputs if value.shape), None)
    graph = extract(model.graph, inputs, [values[name] for name in expected])
    for value in graph.inputs:
        if value.shape and not isinstance(value.shape[0], int) and value.shape[0] == size:
            value.shape = ir.Shape([batch, *value.shape[1:]])
    return ir.Model(graph, ir_version=model.ir_version)

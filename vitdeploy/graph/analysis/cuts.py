"""Find tensors at which a graph can be cut in two, and the part of a graph between two sets of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.convenience import create_value_mapping, extract

from vitdeploy.graph.analysis.linears import find_linears, layer_name
from vitdeploy.graph.values import array_of, only_user

# What computes a linear or a convolution, in any form that placements have.
LAYERS = ("MatMul", "Conv", "MatMulIntegerToFloat", "MatMulNBits")


def single_cuts(model: ir.Model) -> list[str]:
    """The tensors that alone separate the input of a graph from its outputs, in graph order, without both of these.

    In a ViT those of the residual stream. Only float32 tensors of known sizes, [batch, ...]. What is read of the input
    by a Shape node, its size, does not count: a part of the graph may be given it besides.
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

    # In any topological order a node is passed by every path if no tensor made before it is read behind it.
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
    """The nodes that depend on what an input holds, and that an output depends on."""
    depends = set(model.graph.inputs)
    for node in nodes:
        if node.op_type != "Shape" and any(value in depends for value in node.inputs if value is not None):
            depends.update(node.outputs)
    wanted, useful = set(model.graph.outputs), set()
    for node in reversed(nodes):
        if any(value in wanted and value in depends for value in node.outputs):
            useful.add(node)
            wanted.update(value for value in node.inputs if value is not None)
    return useful


def _is_images(value: ir.Value, model: ir.Model) -> bool:
    """float32 [batch, ...] with the batch of the input and sizes that are numbers."""
    [image, *_] = model.graph.inputs
    if value.dtype != ir.DataType.FLOAT or not value.shape or not image.shape:
        return False
    return value.shape[0] == image.shape[0] and all(isinstance(size, int) for size in value.shape[1:])


def changed_tensors(placement: ir.Model, model: ir.Model) -> set[str]:
    """The tensors of a float graph that its placement has not, or has as other functions: what exact folds moved.

    A fold puts a factor or a shift into the constants of a node in front of a linear, or adds a node there, and takes
    it back in the linear's weight and bias: so behind every linear tensors are the same again, whatever its weight.
    (Factors in the columns of a linear, which the next one takes back, are not seen here.)
    """
    theirs = create_value_mapping(placement.graph)
    layers = {layer_name(node): node for node in placement.graph if node.op_type in LAYERS}
    linears = {linear.output: linear.name for linear in find_linears(model)}
    renamed: dict[str, str] = {}
    moved, changed = set[str](), set[str]()
    for node in model.graph:
        for value in node.outputs:
            name = str(value.name)
            layer = layers.get(linears.get(value, ""))
            if layer is not None:
                output = str(_output_of(layer).name)
                renamed[output] = name
                if output != name:  # a bias that was not there before
                    changed.add(name)
            elif name not in theirs or _differs(node, theirs[name].producer(), moved, renamed):
                moved.add(name)
    return moved | changed


def _output_of(layer: ir.Node) -> ir.Value:
    """The output of a linear of a placement, including its bias."""
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


def part(model: ir.Model, given: Sequence[str], wanted: Sequence[str], batch: int) -> ir.Model:
    """A new model that computes the tensors `wanted` from `given`, and from inputs of the graph where it needs them.

    Of `given` only those that are needed become inputs, in graph order; a leading size that is the input's dynamic one
    is set to `batch`. Weights are shared with `model`.
    """
    values = create_value_mapping(model.graph)
    stops = {values[name] for name in given} | set(model.graph.inputs)
    needed, queue, seen = set(), [values[name] for name in wanted], set()
    while queue:
        value = queue.pop()
        if value in stops:
            needed.add(value)
        elif value not in seen and (node := value.producer()) is not None:
            seen.add(value)
            queue.extend(each for each in node.inputs if each is not None)
    inputs = [value for value in values.values() if value in needed]
    size = next((value.shape[0] for value in model.graph.inputs if value.shape), None)
    graph = extract(model.graph, inputs, [values[name] for name in wanted])
    for value in graph.inputs:
        if value.shape and not isinstance(value.shape[0], int) and value.shape[0] == size:
            value.shape = ir.Shape([batch, *value.shape[1:]])
    return ir.Model(graph, ir_version=model.ir_version)

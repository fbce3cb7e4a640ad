"""Edit a graph: new names, constants and nodes, replacements of nodes, new weights for a linear.

A graph may already use any name that a pass wants: an exporter gives two linears of one module the same stem, and a
rewritten graph may be rewritten again. So every name of a new value or node comes from here.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace as changed
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass, TopologicalSortPass

from vitdeploy.graph.analysis.rows import Linear, find_linears, reshape_sizes
from vitdeploy.graph.values import stem

Numbers = npt.NDArray[np.floating]


def free_name(name: str, taken: set[str]) -> str:
    """Return `name`, with a number appended if it is `taken`; add the result to `taken`."""
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    taken.add(free)
    return free


def constant(array: npt.NDArray[Any], name: str) -> ir.Value:
    """A constant that does not belong to a graph yet."""
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)


def _named(graph: ir.Graph) -> Iterator[ir.Value | ir.Node]:
    """Every value and node of a graph, including its branches and loops. One walk: a rewrite creates names often, and
    the library's walks take several times as long."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield node
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _named(attribute.as_graph())
            elif attribute.type == ir.AttributeType.GRAPHS:
                for part in attribute.as_graphs():
                    yield from _named(part)


class Names:
    """The names in use in a model: values, initializers and nodes, including branches and loops.

    Names returned here are taken. Names that other code adds to the model later are unknown here: create a new `Names`.
    """

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._taken = {str(each.name) for each in _named(model.graph)}

    def free(self, name: str) -> str:
        """Return `name`, with a number appended if it is taken."""
        return free_name(name, self._taken)

    def release(self, name: str) -> None:
        """Free a name for reuse after its value or node was removed."""
        self._taken.discard(name)

    def constant(self, array: npt.NDArray[Any], name: str) -> ir.Value:
        """A new initializer."""
        value = constant(array, self.free(name))
        self._graph.register_initializer(value)
        return value

    def node(
        self,
        operator: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        output: str | None = None,
        outputs: int = 1,
    ) -> ir.Node:
        """A node that does not belong to a graph yet. A single output is named `output`, by default like the node."""
        node = ir.node(operator, inputs, attributes, domain=domain, num_outputs=outputs, name=self.free(name))
        for i, value in enumerate(node.outputs):
            if outputs > 1:
                value.name = self.free(f"{node.name}.{i}")
            else:
                value.name = node.name if output is None else self.free(output)
        return node


def rename(model: ir.Model, value: ir.Value, name: str) -> None:
    """Rename `value`; another value with this name, as in third-party files, gets a new name."""
    for other in list(_named(model.graph)):
        if isinstance(other, ir.Value) and other is not value and other.name == name:
            other.name = Names(model).free(name)
    value.name = name


def replace(model: ir.Model, node: ir.Node, new: Sequence[ir.Node]) -> None:
    """Replace `node` by `new`; the first output of the last new node takes over the name and all uses."""
    names = Names(model)
    for other in new:
        if other.name is None or other.name != node.name:
            other.name = names.free(other.name or f"{stem(node)}/{other.op_type}")
    for other in new[:-1]:
        other.outputs[0].name = other.name if other.name != node.name else names.free(str(other.name))
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], new, [node.outputs[0]], [new[-1].outputs[0]])


def bypass(node: ir.Node, value: ir.Value) -> bool:
    """Make all readers of the output of `node` read `value`; False if the node must stay because of a graph output.

    A graph output must keep its name, so only an inner, computed value can replace it.
    """
    old = node.outputs[0]
    if old.is_graph_output():
        if value.producer() is None or value.is_graph_output():
            return False
        old_name = old.name
        old.name = None
        value.name = old_name
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    return True


def drop_unused(model: ir.Model) -> None:
    """Remove unused nodes, initializers and opset imports, and sort the remaining nodes, in place."""
    for clean in (RemoveUnusedNodesPass(), RemoveUnusedOpsetsPass(), TopologicalSortPass()):
        clean(model)


class Editor:
    """Adds constants and nodes to the main graph of a model. New names are unique; existing names never change.

    Constants are never changed in place: exporters store equal constants once, so other layers may read them too.
    """

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self._names = Names(model)
        self._linears = {linear.output: linear for linear in find_linears(model)}

    @property
    def linears(self) -> list[Linear]:
        """The current linears and convolutions, in their original graph order."""
        return list(self._linears.values())

    def linear_behind(self, value: ir.Value) -> Linear | None:
        """The linear (not a convolution) whose output, including the bias, is `value`."""
        linear = self._linears.get(value)
        return linear if linear is not None and linear.kind == "matmul" else None

    def constant(self, array: npt.NDArray[Any], name: str) -> ir.Value:
        """A new initializer."""
        return self._names.constant(np.array(array, order="C", copy=True), name)

    def node(
        self,
        before: ir.Node,
        operator: str,
        inputs: Sequence[ir.Value],
        name: str,
        *shapes: Sequence[Any] | ir.Shape | None,
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Insert a node with one output per shape before the node `before`, and return its outputs.

        The node is named `<name>/<operator>`, and so is a single output; outputs have the type of the first input.
        """
        node = self._node(operator, inputs, name, shapes, **attributes)
        self.graph.insert_before(before, node)
        return node.outputs

    def first(self, before: ir.Node, value: ir.Value, axis: int, count: int, name: str) -> ir.Value:
        """Insert a Split of a value after the first `count` along a static axis, and return the first part.

        A Slice would copy; if all axes before this one are 1, as at batch 1, a runtime may let a Split's output share
        the memory of the value, and OpenVINO does.
        """
        shape = list(value.shape or ())
        whole = shape[axis]
        assert isinstance(whole, int)
        parts = (count, whole - count)
        shapes = [[*shape[:axis], size, *shape[axis + 1 :]] for size in parts]
        sizes = self.constant(np.array(parts, np.int64), f"{name}.sizes")
        return self.node(before, "Split", [value, sizes], name, *shapes, axis=axis)[0]

    def set_input(self, node: ir.Node, index: int, array: npt.NDArray[Any]) -> None:
        """Set one input of one node to a new constant, under the name of the old one if it had no other readers."""
        old = node.inputs[index]
        assert old is not None
        name = str(old.name)
        if len(list(old.uses())) == 1 and not old.is_graph_output() and name in self.graph.initializers:
            node.replace_input_with(index, None)
            del self.graph.initializers[name]
            self._names.release(name)
        node.replace_input_with(index, self.constant(array, name))

    def set_linear(self, linear: Linear, weight: Numbers | None = None, bias: Numbers | None = None) -> Linear:
        """Set the weight or bias [out] of a linear or convolution (weight in its shape; stored as float32).

        The Add of a MatMul's bias is removed if the new bias is all zero, and inserted if it was missing.
        Returns: the changed linear.
        """
        if weight is not None:
            linear = changed(linear, weight=weight.astype(np.float32))
            self.set_input(linear.node, 1, linear.weight)
        if bias is not None:
            self._linears.pop(linear.output)
            linear = self._with_bias(linear, bias.astype(np.float32))
        self._linears[linear.output] = linear
        return linear

    def _with_bias(self, linear: Linear, bias: npt.NDArray[np.float32]) -> Linear:
        product, add = linear.node.outputs[0], linear.bias_add
        if linear.kind == "conv" and linear.bias is not None:
            self.set_input(linear.node, 2, bias)
        elif linear.kind == "conv" and bias.any():
            linear.node.resize_inputs(3)
            linear.node.replace_input_with(2, self.constant(bias, f"{linear.name}.bias"))
        elif add is not None and (bias.any() or add.outputs[0].is_graph_output()):
            self.set_input(add, 1 if add.inputs[0] is product else 0, bias)
        elif add is not None:
            bypass(add, product)
            return changed(linear, bias=None, bias_add=None)
        elif linear.kind == "matmul" and bias.any():
            assert not product.is_graph_output()
            readers = list(product.uses())
            vector = self.constant(bias, f"{linear.name}.bias")
            add = self._node("Add", [product, vector], linear.name, [product.shape])
            linear.node.append(add)
            for node, index in readers:
                node.replace_input_with(index, add.outputs[0])
        else:
            return linear
        return changed(linear, bias=bias, bias_add=add)

    def resize(self, value: ir.Value, axes: Collection[int], count: int) -> None:
        """Set the size of these axes of a tensor, whose inputs already changed, to `count`: in its shape, and in the
        constant sizes of a Reshape that computes it."""
        node = value.producer()
        sizes = reshape_sizes(node) if node is not None and node.op_type == "Reshape" else None
        if node is not None and sizes is not None and any(sizes[axis] > 0 for axis in axes):
            sizes = [count if axis in axes and size > 0 else size for axis, size in enumerate(sizes)]
            self.set_input(node, 1, np.array(sizes, np.int64))
        assert value.shape is not None
        value.shape = ir.Shape([count if axis in axes else size for axis, size in enumerate(value.shape)])

    def _node(
        self,
        operator: str,
        inputs: Sequence[ir.Value],
        name: str,
        shapes: Sequence[Sequence[Any] | ir.Shape | None],
        **attributes: Any,
    ) -> ir.Node:
        node = self._names.node(operator, inputs, f"{name}/{operator}", attributes, outputs=len(shapes))
        for output, shape in zip(node.outputs, shapes, strict=True):
            output.type, output.shape = inputs[0].type, None if shape is None else ir.Shape(shape)
        return node

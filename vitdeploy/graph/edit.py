"""Small, safe changes of a graph: new constants and nodes under free names, new weights for one linear."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.layout import reshape_sizes
from vitdeploy.graph.linears import Linear, find_linears
from vitdeploy.graph.names import Names

Numbers = npt.NDArray[np.floating]


class Editor:
    """Adds constants and nodes to the main graph of a model. Names are made unique; nothing is ever renamed.

    Constants are never changed in place: exporters give equal constants one tensor, which other layers then read too.
    """

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self._names = Names(model)
        self._linears = {linear.output: linear for linear in find_linears(model)}

    @property
    def linears(self) -> list[Linear]:
        """The linears and convolutions as they are now, in graph order of the start."""
        return list(self._linears.values())

    def linear_behind(self, value: ir.Value) -> Linear | None:
        """The linear, not convolution, whose output (with its bias) is `value`."""
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
        """Insert a node with one output for each of `shapes` in front of `before`, and return its outputs.

        The node is called `<name>/<operator>`, and so is a single output; outputs have the type of the first input.
        """
        node = self._node(operator, inputs, name, shapes, **attributes)
        self.graph.insert_before(before, node)
        return node.outputs

    def first(self, before: ir.Node, value: ir.Value, axis: int, count: int, name: str) -> ir.Value:
        """Insert a Split of a value behind the first `count` along a static axis, and return the part in front.

        Not a Slice, which copies: where nothing but ones is in front of the axis, as at batch 1, a runtime may give out
        the memory of the value itself, and OpenVINO does.
        """
        shape = list(value.shape or ())
        whole = shape[axis]
        assert isinstance(whole, int)
        parts = (count, whole - count)
        shapes = [[*shape[:axis], size, *shape[axis + 1 :]] for size in parts]
        sizes = self.constant(np.array(parts, np.int64), f"{name}.sizes")
        return self.node(before, "Split", [value, sizes], name, *shapes, axis=axis)[0]

    def set_input(self, node: ir.Node, index: int, array: npt.NDArray[Any]) -> None:
        """Give one input of one node a new constant, under the name of the old one where nothing else reads that."""
        old = node.inputs[index]
        assert old is not None
        name = str(old.name)
        if len(list(old.uses())) == 1 and not old.is_graph_output() and name in self.graph.initializers:
            node.replace_input_with(index, None)
            del self.graph.initializers[name]
            self._names.release(name)
        node.replace_input_with(index, self.constant(array, name))

    def set_linear(self, linear: Linear, weight: Numbers | None = None, bias: Numbers | None = None) -> Linear:
        """Give a linear or convolution another weight or bias [out] (in its shape; stored as float32).

        The Add of a MatMul's bias goes where the new bias is all zero, and comes where there was none.
        Returns: the linear as it is now.
        """
        if weight is not None:
            linear = replace(linear, weight=weight.astype(np.float32))
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
            self.bypass(add, product)
            return replace(linear, bias=None, bias_add=None)
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
        return replace(linear, bias=bias, bias_add=add)

    def resize(self, value: ir.Value, axes: Collection[int], count: int) -> None:
        """Let these axes of a tensor, whose inputs have changed so, be of `count`: in its shape, and in the constant
        sizes of a Reshape that makes it."""
        node = value.producer()
        sizes = reshape_sizes(node) if node is not None and node.op_type == "Reshape" else None
        if node is not None and sizes is not None and any(sizes[axis] > 0 for axis in axes):
            sizes = [count if axis in axes and size > 0 else size for axis, size in enumerate(sizes)]
            self.set_input(node, 1, np.array(sizes, np.int64))
        assert value.shape is not None
        value.shape = ir.Shape([count if axis in axes else size for axis, size in enumerate(value.shape)])

    def bypass(self, node: ir.Node, value: ir.Value) -> None:
        """Let what reads the output of `node` read `value`, and remove the node. Not for an output of the graph."""
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        self.graph.remove(node, safe=True)

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

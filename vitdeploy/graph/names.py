"""Free names: the one way to name a new value, initializer or node of a graph.

A file may hold any names, those that a pass would like to give included: an exporter gives two linears of one module
the same stem, a rewritten graph is rewritten again. So every name is asked for here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir


class Names:
    """The names that are taken in a model: of values, initializers and nodes, in branches and loops too.

    A name that is given is taken from then on. What others add to the model later is not known here: make a new one.
    """

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._taken = set(_names(model.graph))

    def free(self, name: str) -> str:
        """`name`, with a number behind it where it is taken."""
        free, count = name, 1
        while free in self._taken:
            count += 1
            free = f"{name}_{count}"
        self._taken.add(free)
        return free

    def release(self, name: str) -> None:
        """Let a name be given again: what had it is gone."""
        self._taken.discard(name)

    def constant(self, array: npt.NDArray[Any], name: str) -> ir.Value:
        """A new initializer."""
        name = self.free(name)
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
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
        """A node that is in no graph yet. A single output is called `output`, by default as the node."""
        node = ir.node(operator, inputs, attributes, domain=domain, num_outputs=outputs, name=self.free(name))
        for i, value in enumerate(node.outputs):
            if outputs > 1:
                value.name = self.free(f"{node.name}.{i}")
            else:
                value.name = node.name if output is None else self.free(output)
        return node


def _names(graph: ir.Graph) -> Iterator[str]:
    yield from (str(value.name) for value in (*graph.inputs, *graph.initializers.values()))
    for node in graph:
        yield str(node.name)
        yield from (str(value.name) for value in node.outputs)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _names(attribute.as_graph())
            elif attribute.type == ir.AttributeType.GRAPHS:
                for inner in attribute.as_graphs():
                    yield from _names(inner)

"""Sizes that only the graph's inputs know, such as the batch, as short and shared as they can be computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.edit import Names
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import Dims, Extent, Size, Unknown
from vitdeploy.graph.values import is_constant

INT64 = ir.DataType.INT64


class SizeChain:
    """Makes Shape(input, start, end), its multiples and their Concat, each only once, at the head of the graph.

    What the graph has in this form already is used again.
    """

    def __init__(self, model: ir.Model, known: Inference) -> None:
        self._model = model
        self._last: ir.Node | None = None
        self._made: dict[Dims, ir.Value] = {}
        self._origins: dict[str, tuple[ir.Value, int]] = {}
        for value in model.graph.inputs:
            for axis, size in enumerate(known.dims_of(value) or ()):
                if isinstance(size, Size) and value.name not in model.graph.initializers:
                    self._origins.setdefault(str(size), (value, axis))

        for node in model.graph:
            for output in node.outputs:
                if output in known.contents and self.is_canonical(output):
                    self._made.setdefault(tuple(known.contents[output]), output)

    def is_canonical(self, value: ir.Value) -> bool:
        """A Concat of constants and sizes of inputs, or one such size."""
        node = value.producer()
        if node is not None and node.op_type == "Concat":
            return all(_is_size_of_input(part) or is_constant(part) for part in node.inputs)
        return _is_size_of_input(value)

    def vector(self, entries: Dims) -> ir.Value | None:
        """An int64 [n] value that holds `entries`; None if a size in it is not one of the inputs'."""
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
            one, factor = self._entry(Size(1, entry.names)), self._entry(entry.factor)
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

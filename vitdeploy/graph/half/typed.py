"""Precision written into a graph: half everywhere but in parts that fall back to float32, with a Cast at every border.

This is what strongly typed runtimes take (TensorRT from version 11 knows nothing else): each operation is computed in
the type of its inputs. Inputs and outputs of the graph keep their types. What ONNX does not define in half precision
stays in float32, operation by operation (onnx.defs: the type constraints of each operator's schema), and so do branches
and loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import Names, drop_unused
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.values import array_of

Half = Literal["fp16", "bf16"]
TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
NUMPY: dict[str, npt.DTypeLike] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
NAMES = {"fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}


@dataclass(frozen=True)
class Roles:
    """The inputs and outputs of one operation that are in half precision if the operation is."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


def half_roles(node: ir.Node, opset: int, half: Half) -> Roles | None:
    """The roles that ONNX allows for an operation; None if it has no half precision, or holds a branch or loop."""
    if node.domain or any(attribute.type in GRAPHS for attribute in node.attributes.values()):
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}

    def takes(formals: list[onnx.defs.OpSchema.FormalParameter], count: int) -> tuple[bool, ...]:
        last = len(formals) - 1
        kinds = [formals[min(i, last)].type_str for i in range(count)]
        return tuple(NAMES[half] in allowed.get(kind, {kind}) for kind in kinds)

    roles = Roles(takes(list(schema.inputs), len(node.inputs)), takes(list(schema.outputs), len(node.outputs)))
    pairs = [*zip(node.inputs, roles.inputs, strict=True), *zip(node.outputs, roles.outputs, strict=True)]
    return roles if any(takes_half for value, takes_half in pairs if is_float(value)) else None


def is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.FLOAT


def touches_floats(node: ir.Node) -> bool:
    return any(is_float(value) for value in (*node.inputs, *node.outputs))


def type_graph(model: ir.Model, half: Half, float_fallback: Mapping[str, str]) -> None:
    """Write the types into a float32 graph, in place.

    Args:
        float_fallback: names of nodes that stay in float32, with the reasons.

    Raises:
        GraphError: a constant of an operation in half is beyond its range.
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
            wanted = roles is not None and roles.inputs[i]
            if wanted != (value in self.halves):
                node.replace_input_with(i, self._as(value, wanted))
        if roles is None:
            return
        for output, takes_half in zip(node.outputs, roles.outputs, strict=True):
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
        """The value in the other type."""
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
                f"the constant {value.name} is beyond the range of {self.half}",
                found=f"{np.abs(array).max():.3g}",
                wanted="at most 65504",
                fix="leave the layer that reads it in float32",
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
        """The same output of the graph in float32, under its name."""
        name = str(value.name)
        value.name = self.names.free(f"{name}/{self.half}")
        made = self._as(value, False)
        made.name = name
        return made

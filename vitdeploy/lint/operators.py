"""Rules on the file, its operators and their types: what the parser knows at all (TRT1xx)."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from vitdeploy.graph.values import rank_of
from vitdeploy.lint.restrictions import RESTRICTIONS
from vitdeploy.lint.support import Support
from vitdeploy.lint.view import QDQ, GraphView, Hit, label, listed, rule, type_name

UINT8, DOUBLE = ir.DataType.UINT8, ir.DataType.DOUBLE
GRAPH = "the graph"
# nvinfer1::Dims::MAX_DIMS
MOST_AXES = 8
# Operators whose type is that of what they make.
_SOURCES = frozenset(
    {"Constant", "ConstantOfShape", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_BRANCHES = frozenset({"If", "Loop", "Scan"})


@rule(
    "TRT101",
    "warning",
    "an opset that the parser's table is written for",
    "convert the graph to such an opset, or export it with --opset",
    by_release=True,
)
def _opset(view: GraphView, support: Support) -> Iterator[Hit]:
    known = support.opsets
    if view.opset not in known:
        yield Hit(GRAPH, f"opset {view.opset}", f"opset {known.start} to {known.stop - 1}")


@rule(
    "TRT102",
    "warning",
    "an IR version that the parser's ONNX knows",
    "write the lowest IR version that holds the opset, as vitdeploy does",
    by_release=True,
)
def _ir_version(view: GraphView, support: Support) -> Iterator[Hit]:
    if view.model.ir_version > support.ir_version:
        yield Hit(GRAPH, f"IR version {view.model.ir_version}", f"IR version {support.ir_version} at most")


@rule(
    "TRT103",
    "error",
    "operators of ai.onnx; plugins are not looked for",
    "give the graph as it was before another runtime's optimizer or quantizer rewrote it",
)
def _domains(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.model.graph.all_nodes():
        if node.domain:
            yield Hit(label(node), f"{node.domain}.{node.op_type}")


@rule(
    "TRT104",
    "error",
    "an operator that the parser has",
    "write it with other operators, or take a release that has it",
    by_release=True,
)
def _operators(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.model.graph.all_nodes():
        if not node.domain and support.types(node.op_type) is None:
            yield Hit(label(node), node.op_type)


@rule("TRT105", "error", "a type that the parser takes for that operator", "cast in front of it", by_release=True)
def _types(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.nodes:
        taken = support.types(node.op_type)
        for value in _data(node) if taken is not None else ():
            if taken is not None and value.dtype not in (None, UINT8, DOUBLE, *taken):
                yield Hit(label(node), f"{node.op_type} of {type_name(value.dtype)}", f"one of {listed(taken)}")


def _data(node: ir.Node) -> list[ir.Value]:
    """The tensors that the types of the parser's table are about."""
    if node.op_type in _BRANCHES | {"DequantizeLinear"}:  # what is dequantized has a rule of its own
        return []
    if node.op_type in _SOURCES:
        return [node.outputs[0]]
    first = node.inputs[1 if node.op_type == "Where" else 0]
    return [value for value in (first, *(node.outputs if "Cast" in node.op_type else ())) if value is not None]


@rule(
    "TRT106",
    "error",
    "attributes and inputs within the parser's restrictions",
    "fold constants and write the operator within them: `vitdeploy export GRAPH` does so where it can",
    by_release=True,
)
def _restrictions(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.nodes:
        restriction = RESTRICTIONS.get(node.op_type)
        for found, wanted in restriction(node, support) if restriction is not None else ():
            yield Hit(label(node), f"{node.op_type} with {found}", wanted)


@rule(
    "TRT107",
    "error",
    "types that ONNX allows for that operator at the graph's opset",
    "raise the opset, or cast in front of it",
)
def _outside_onnx(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.nodes:
        for value, parameter in view.typed_inputs(node):
            if f"tensor({type_name(value.dtype)})" in parameter.types:
                continue
            fix = ""
            if node.op_type == "Conv" and value.dtype == ir.DataType.BFLOAT16:
                fix = "raise the opset to 22, or write the patch embedding as MatMul"
            elif node.op_type in QDQ:
                fix = "raise the opset: 16-bit scales and float8 need 19"
            yield Hit(label(node), f"{node.op_type} of {type_name(value.dtype)} at opset {view.opset}", fix=fix)
            break


@rule(
    "TRT108",
    "error",
    "uint8 only as an input that Casts to float or float16 alone read, or as an output of a Cast",
    "let a Cast to float or float16 read the input, and all others read that; vitdeploy does so where it compiles",
)
def _uint8(view: GraphView, support: Support) -> Iterator[Hit]:
    """Tensors where uint8 begins; quantizers have a rule of their own."""
    for value in view.values:
        readers, producer = [use.node for use in value.uses()], value.producer()
        makers = [producer] if producer is not None else []
        if value.dtype != UINT8 or any(node.op_type in QDQ for node in (*readers, *makers)):
            continue
        if value.is_graph_input():
            for node in readers:
                if node.op_type != "Cast" or node.outputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
                    yield Hit(str(value.name), f"uint8 read by {label(node)} ({node.op_type})")
            continue
        moved = any(each is not None and each.dtype == UINT8 for node in makers for each in node.inputs)
        given_out = value.is_graph_output() and not readers and any(node.op_type == "Cast" for node in makers)
        if not moved and not given_out:
            yield Hit(str(value.name), "uint8 inside of the graph")


@rule("TRT111", "error", f"tensors of at most {MOST_AXES} axes", "join axes in a Reshape")
def _ranks(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.values:
        if (rank_of(value) or 0) > MOST_AXES:
            yield Hit(str(value.name), f"{rank_of(value)} axes")


@rule("TRT109", "warning", "float: the parser makes float of double", "write the tensor in float")
def _double(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.values:
        if value.dtype == DOUBLE:
            yield Hit(str(value.name), "double")


@rule(
    "TRT110",
    "note",
    "a graph without branches and loops: what is inside is judged by operator only",
    "normalise the graph, which removes branches with a constant condition",
)
def _branches(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.of(*sorted(_BRANCHES)):
        yield Hit(label(node), node.op_type)


RULES = (
    _opset,
    _ir_version,
    _domains,
    _operators,
    _types,
    _restrictions,
    _outside_onnx,
    _uint8,
    _double,
    _branches,
    _ranks,
)

"""Rules on the file, its operators and their types: what the parser supports (TRT1xx)."""

from collections.abc import Callable, Iterator

import onnx_ir as ir

from vitdeploy.graph.values import dim, is_constant, rank_of, scalar_of
from vitdeploy.lint.support import Support
from vitdeploy.lint.view import QDQ, GraphView, Hit, label, listed, rule, type_name

# --- The parser's restrictions other than types: attributes, ranks, inputs that must be constant ----------------------
# Not checked, because a static check cannot, or because vision models do not have them: activations of recurrent
# layers, scan outputs and carried shapes of loops, ranks of branches, caches of decoders.


# (found, expected) for one node.
Misfits = Iterator[tuple[str, str]]
Restriction = Callable[[ir.Node, Support], Misfits]

MOST_K = 3840
_REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"),
    *("ReduceSum", "ReduceSumSquare"),
)
_RESIZE = {
    "mode": ("nearest", ("nearest", "linear")),
    "coordinate_transformation_mode": (
        "half_pixel",
        ("half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners"),
    ),
    "nearest_mode": ("round_prefer_floor", ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")),
    "keep_aspect_ratio_policy": ("stretch", ("stretch",)),
}


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _constant(name: str, index: int, before: tuple[int, int] | None = None) -> Restriction:
    """The input must be constant; with `before`, only in releases before that one."""

    def check(node: ir.Node, support: Support) -> Misfits:
        value = _input(node, index)
        if value is not None and not is_constant(value) and (before is None or support.release < before):
            yield f"computed {name}", f"{name} as a constant"

    return check


def _attribute(name: str, only: int | str) -> Restriction:
    def check(node: ir.Node, support: Support) -> Misfits:
        attribute = node.attributes.get(name)
        value = only if attribute is None else attribute.value
        if value != only:
            yield f"{name} {value}", f"{name} {only}"

    return check


def _axes(taken: tuple[int, ...], expected: str) -> Restriction:
    def check(node: ir.Node, support: Support) -> Misfits:
        if rank_of(node.inputs[0]) not in (None, *taken):
            yield f"an input of {rank_of(node.inputs[0])} axes", expected

    return check


def _all_of(*restrictions: Restriction) -> Restriction:
    def check(node: ir.Node, support: Support) -> Misfits:
        for restriction in restrictions:
            yield from restriction(node, support)

    return check


def _one_output(node: ir.Node, support: Support) -> Misfits:
    if any(output.name for output in node.outputs[1:]):
        yield f"{len(node.outputs)} outputs", "only the first output"


def _no_indices(node: ir.Node, support: Support) -> Misfits:
    if any(output.name for output in node.outputs[1:]):
        yield "an output of indices", "only the first output"


def _undilated(node: ir.Node, support: Support) -> Misfits:
    dilations = node.attributes.get_ints("dilations", ()) or ()
    if any(size != 1 for size in dilations):
        yield f"dilations {list(dilations)}", "dilations of 1"


def _dropout(node: ir.Node, support: Support) -> Misfits:
    value = _input(node, 2)
    if value is not None and scalar_of(value) != 0:
        yield "training_mode", "training_mode as a constant false"


def _resize(node: ir.Node, support: Support) -> Misfits:
    for name, (default, taken) in _RESIZE.items():
        value = node.attributes.get_string(name, default)
        if value not in taken and (
            name != "nearest_mode" or node.attributes.get_string("mode", "nearest") == "nearest"
        ):
            yield f"{name} {value}", f"{name} one of {', '.join(taken)}"


def _top_k(node: ir.Node, support: Support) -> Misfits:
    k = scalar_of(_input(node, 1))
    if k is not None and k >= MOST_K:
        yield f"K {k:.0f}", f"K below {MOST_K}"


def _equal_pads(node: ir.Node, support: Support) -> Misfits:
    pads = list(node.attributes.get_ints("pads", ()) or ())
    if pads[: len(pads) // 2] != pads[len(pads) // 2 :]:
        yield f"pads {pads}", "equal pads at both ends of an axis"


def _eye_like(node: ir.Node, support: Support) -> Misfits:
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None or not shape.is_static():
        yield "an input of a dynamic shape", "a static shape"


def _hardmax(node: ir.Node, support: Support) -> Misfits:
    if dim(node.inputs[0], int(node.attributes.get_int("axis", -1))) is None:
        yield "a dynamic axis", "a static size along the axis"


def _einsum(node: ir.Node, support: Support) -> Misfits:
    """Ellipses and diagonals came with 10.12."""
    equation = str(node.attributes.get_string("equation", ""))
    terms = [term.strip() for term in equation.partition("->")[0].split(",")]
    diagonal = any(len(set(term)) != len(term) for term in terms)
    if support.release < (10, 12) and ("..." in equation or diagonal):
        yield f"the equation {equation}", "no ellipsis, and no letter twice in one operand"


def _attention(node: ir.Node, support: Support) -> Misfits:
    if any(rank_of(_input(node, index)) not in (None, 4) for index in range(4)):
        yield "operands without 4 axes", "query, key, value and mask with 4 axes"
    if any(_input(node, index) is not None for index in range(4, 7)):
        yield "a cache of keys and values", "only query, key, value and mask"
    if node.attributes.get_float("softcap", 0.0):
        yield "softcap", "no softcap"
    yield from _one_output(node, support)


def _constant_node(node: ir.Node, support: Support) -> Misfits:
    for name in sorted({"sparse_value", "value_string", "value_strings"} & set(node.attributes)):
        yield name, "a dense tensor of numbers"


_SPACE = _axes((4, 5), "2 or 3 spatial axes")
# TensorRT's layers have 2 or 3 spatial axes; the parser adds one to an input with 1.
_CONVOLUTION = _axes((3, 4, 5), "1 to 3 spatial axes")
RESTRICTIONS: dict[str, Restriction] = {
    "Attention": _attention,
    "AveragePool": _all_of(_undilated, _SPACE),
    "BatchNormalization": _all_of(_attribute("training_mode", 0), _one_output),
    "Constant": _constant_node,
    "Conv": _CONVOLUTION,
    "ConvTranspose": _CONVOLUTION,
    "CumSum": _constant("axis", 1),
    "DeformConv": _all_of(_equal_pads, _axes((3, 4), "1 or 2 spatial axes")),
    "Dropout": _dropout,
    "Einsum": _einsum,
    "EyeLike": _eye_like,
    "GridSample": _axes((4,), "4 axes"),
    "Hardmax": _hardmax,
    "LSTM": _all_of(_attribute("input_forget", 0), _attribute("layout", 0)),
    "LayerNormalization": _one_output,
    "LpPool": _undilated,
    "MaxPool": _all_of(_undilated, _SPACE, _no_indices),
    "OneHot": _constant("depth", 1),
    "Pad": _constant("axes", 3, (10, 4)),
    "Resize": _all_of(_resize, _attribute("antialias", 0)),
    "STFT": _all_of(_constant("frame_step", 1), _constant("window", 2)),
    "ScatterND": _attribute("reduction", "none"),
    "Squeeze": _constant("axes", 1),
    "TopK": _all_of(_attribute("sorted", 1), _top_k),
    "Unsqueeze": _constant("axes", 1),
    **dict.fromkeys(_REDUCTIONS, _constant("axes", 1)),
}


# --- The rules --------------------------------------------------------------------------------------------------------


UINT8, DOUBLE = ir.DataType.UINT8, ir.DataType.DOUBLE
GRAPH = "the graph"
# nvinfer1::Dims::MAX_DIMS
MOST_AXES = 8
# Operators whose type is the type of their output.
_SOURCES = frozenset(
    {"Constant", "ConstantOfShape", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_BRANCHES = frozenset({"If", "Loop", "Scan"})


@rule(
    "TRT101",
    "warning",
    "an opset that the parser's documentation covers",
    "convert the graph to one of these, or export it with --opset",
    by_release=True,
)
def _opset(view: GraphView, support: Support) -> Iterator[Hit]:
    known = support.opsets
    if view.opset not in known:
        yield Hit(GRAPH, f"opset {view.opset}", f"opset {known.start} to {known.stop - 1}")


@rule(
    "TRT102",
    "warning",
    "an IR version that the parser's ONNX release supports",
    "write the lowest IR version for the opset, as vitdeploy does",
    by_release=True,
)
def _ir_version(view: GraphView, support: Support) -> Iterator[Hit]:
    if view.model.ir_version > support.ir_version:
        yield Hit(GRAPH, f"IR version {view.model.ir_version}", f"at most IR version {support.ir_version}")


@rule(
    "TRT103",
    "error",
    "operators of the ai.onnx domain (plugins are not checked)",
    "use the graph from before another runtime's optimizer or quantizer rewrote it",
)
def _domains(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.model.graph.all_nodes():
        if node.domain:
            yield Hit(label(node), f"{node.domain}.{node.op_type}")


@rule(
    "TRT104",
    "error",
    "an operator that the parser supports",
    "express it with other operators, or use a release that supports it",
    by_release=True,
)
def _operators(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.model.graph.all_nodes():
        if not node.domain and support.types(node.op_type) is None:
            yield Hit(label(node), node.op_type)


@rule("TRT105", "error", "a type that the parser supports for the operator", "insert a Cast before it", by_release=True)
def _types(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.nodes:
        taken = support.types(node.op_type)
        for value in _data(node) if taken is not None else ():
            if taken is not None and value.dtype not in (None, UINT8, DOUBLE, *taken):
                yield Hit(label(node), f"{node.op_type} of {type_name(value.dtype)}", f"one of {listed(taken)}")


def _data(node: ir.Node) -> list[ir.Value]:
    """Return the tensors whose types the parser's table lists."""
    if node.op_type in _BRANCHES | {"DequantizeLinear"}:  # the input of DequantizeLinear has its own rule
        return []
    if node.op_type in _SOURCES:
        return [node.outputs[0]]
    first = node.inputs[1 if node.op_type == "Where" else 0]
    return [value for value in (first, *(node.outputs if "Cast" in node.op_type else ())) if value is not None]


@rule(
    "TRT106",
    "error",
    "attributes and inputs within the parser's restrictions",
    "fold constants and stay within these restrictions: `vitdeploy export GRAPH` does so where it can",
    by_release=True,
)
def _restrictions(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.nodes:
        restriction = RESTRICTIONS.get(node.op_type)
        for found, expected in restriction(node, support) if restriction is not None else ():
            yield Hit(label(node), f"{node.op_type} with {found}", expected)


@rule(
    "TRT107",
    "error",
    "types that ONNX allows for the operator at the graph's opset",
    "raise the opset, or insert a Cast before it",
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
    "uint8 only for inputs read solely by Casts to float or float16, and for outputs of a Cast",
    "cast the input to float or float16 once, and let all nodes read the result; vitdeploy does so when it compiles",
)
def _uint8(view: GraphView, support: Support) -> Iterator[Hit]:
    """Check tensors where uint8 begins; quantizers have their own rule."""
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
        moved = any(tensor is not None and tensor.dtype == UINT8 for node in makers for tensor in node.inputs)
        given_out = value.is_graph_output() and not readers and any(node.op_type == "Cast" for node in makers)
        if not moved and not given_out:
            yield Hit(str(value.name), "uint8 inside the graph")


@rule("TRT111", "error", f"tensors of at most {MOST_AXES} axes", "merge axes with a Reshape")
def _ranks(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.values:
        if (rank_of(value) or 0) > MOST_AXES:
            yield Hit(str(value.name), f"{rank_of(value)} axes")


@rule("TRT109", "warning", "float: the parser converts double to float", "store the tensor as float")
def _double(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.values:
        if value.dtype == DOUBLE:
            yield Hit(str(value.name), "double")


@rule(
    "TRT110",
    "note",
    "a graph without branches and loops: inside them only the operators are checked",
    "normalise the graph, which removes branches with a constant condition",
)
def _branches(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.of(*sorted(_BRANCHES)):
        yield Hit(label(node), node.op_type)

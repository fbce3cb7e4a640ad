"""The parser's restrictions other than operator types: attributes, ranks, inputs that must be constant.

Not checked, because no static check can, or no vision model has them: activations of recurrent layers, the scan
outputs and carried shapes of loops, the ranks of branches, caches of decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from vitdeploy.graph.values import dim, is_constant, rank_of, scalar_of
from vitdeploy.lint.support import Support

# (what was found, what is wanted) of one node.
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
    """The input must be constant; with `before`, in releases before that one."""

    def check(node: ir.Node, support: Support) -> Misfits:
        value = _input(node, index)
        if value is not None and not is_constant(value) and (before is None or support.release < before):
            yield f"computed {name}", f"{name} as a constant"

    return check


def _one_output(node: ir.Node, support: Support) -> Misfits:
    if any(output.name for output in node.outputs[1:]):
        yield f"{len(node.outputs)} outputs", "the first output alone"


def _pool(node: ir.Node, support: Support) -> Misfits:
    dilations = node.attributes.get_ints("dilations", ()) or ()
    if any(size != 1 for size in dilations):
        yield f"dilations {list(dilations)}", "dilations of 1"
    if node.op_type != "LpPool" and rank_of(node.inputs[0]) not in (None, 4, 5):
        yield f"an input of {rank_of(node.inputs[0])} axes", "2 or 3 axes of space"
    if node.op_type == "MaxPool" and any(output.name for output in node.outputs[1:]):
        yield "the output of indices", "the first output alone"


def _convolution(node: ir.Node, support: Support) -> Misfits:
    """Layers have 2 or 3 axes of space; the parser adds one where there is one."""
    if rank_of(node.inputs[0]) not in (None, 3, 4, 5):
        yield f"an input of {rank_of(node.inputs[0])} axes", "1 to 3 axes of space"


def _batch_normalization(node: ir.Node, support: Support) -> Misfits:
    if node.attributes.get_int("training_mode", 0):
        yield "training_mode 1", "training_mode 0"
    yield from _one_output(node, support)


def _dropout(node: ir.Node, support: Support) -> Misfits:
    value = _input(node, 2)
    if value is not None and scalar_of(value) != 0:
        yield "training_mode", "training_mode as a constant that is false"


def _resize(node: ir.Node, support: Support) -> Misfits:
    for name, (default, taken) in _RESIZE.items():
        value = node.attributes.get_string(name, default)
        if value not in taken and (
            name != "nearest_mode" or node.attributes.get_string("mode", "nearest") == "nearest"
        ):
            yield f"{name} {value}", f"{name} one of {', '.join(taken)}"
    if node.attributes.get_int("antialias", 0):
        yield "antialias 1", "antialias 0"


def _scatter_nd(node: ir.Node, support: Support) -> Misfits:
    reduction = node.attributes.get_string("reduction", "none")
    if reduction != "none":
        yield f"reduction {reduction}", "reduction none"


def _top_k(node: ir.Node, support: Support) -> Misfits:
    if node.attributes.get_int("sorted", 1) != 1:
        yield "sorted 0", "sorted 1"
    k = scalar_of(_input(node, 1))
    if k is not None and k >= MOST_K:
        yield f"K {k:.0f}", f"K below {MOST_K}"


def _deform_conv(node: ir.Node, support: Support) -> Misfits:
    pads = list(node.attributes.get_ints("pads", ()) or ())
    if pads[: len(pads) // 2] != pads[len(pads) // 2 :]:
        yield f"pads {pads}", "equal pads at both ends of an axis"
    if rank_of(node.inputs[0]) not in (None, 3, 4):
        yield f"an input of {rank_of(node.inputs[0])} axes", "1 or 2 axes of space"


def _grid_sample(node: ir.Node, support: Support) -> Misfits:
    if rank_of(node.inputs[0]) not in (None, 4):
        yield f"an input of {rank_of(node.inputs[0])} axes", "4 axes"


def _eye_like(node: ir.Node, support: Support) -> Misfits:
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None or not shape.is_static():
        yield "an input of a dynamic shape", "a static shape"


def _hardmax(node: ir.Node, support: Support) -> Misfits:
    if dim(node.inputs[0], int(node.attributes.get_int("axis", -1))) is None:
        yield "a dynamic axis", "a static size along the axis"


def _lstm(node: ir.Node, support: Support) -> Misfits:
    for name in ("input_forget", "layout"):
        if node.attributes.get_int(name, 0):
            yield f"{name} 1", f"{name} 0"


def _einsum(node: ir.Node, support: Support) -> Misfits:
    """Ellipses and diagonals came with 10.12."""
    equation = str(node.attributes.get_string("equation", ""))
    terms = [term.strip() for term in equation.partition("->")[0].split(",")]
    diagonal = any(len(set(term)) != len(term) for term in terms)
    if support.release < (10, 12) and ("..." in equation or diagonal):
        yield f"the equation {equation}", "no ellipsis, and no letter twice in one operand"


def _attention(node: ir.Node, support: Support) -> Misfits:
    if any(rank_of(_input(node, index)) not in (None, 4) for index in range(4)):
        yield "operands that have not 4 axes", "query, key, value and mask of 4 axes"
    if any(_input(node, index) is not None for index in range(4, 7)):
        yield "a cache of keys and values", "query, key, value and mask alone"
    if node.attributes.get_float("softcap", 0.0):
        yield "softcap", "no softcap"
    yield from _one_output(node, support)


def _constant_node(node: ir.Node, support: Support) -> Misfits:
    for name in sorted({"sparse_value", "value_string", "value_strings"} & set(node.attributes)):
        yield name, "a dense tensor of numbers"


def _both(*restrictions: Restriction) -> Restriction:
    def check(node: ir.Node, support: Support) -> Misfits:
        for restriction in restrictions:
            yield from restriction(node, support)

    return check


RESTRICTIONS: dict[str, Restriction] = {
    "Attention": _attention,
    "AveragePool": _pool,
    "BatchNormalization": _batch_normalization,
    "Constant": _constant_node,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "CumSum": _constant("axis", 1),
    "DeformConv": _deform_conv,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "EyeLike": _eye_like,
    "GridSample": _grid_sample,
    "Hardmax": _hardmax,
    "LSTM": _lstm,
    "LayerNormalization": _one_output,
    "LpPool": _pool,
    "MaxPool": _pool,
    "OneHot": _constant("depth", 1),
    "Pad": _constant("axes", 3, (10, 4)),
    "Resize": _resize,
    "STFT": _both(_constant("frame_step", 1), _constant("window", 2)),
    "ScatterND": _scatter_nd,
    "Squeeze": _constant("axes", 1),
    "TopK": _top_k,
    "Unsqueeze": _constant("axes", 1),
    **dict.fromkeys(_REDUCTIONS, _constant("axes", 1)),
}

"""Rules on attention: whether it can run in one fused kernel, and what keeps it from that (TRT4xx).

Sources: the page "Fused Attention" of NVIDIA's guide, and the limits that its chapter on fusing attention had (as
quoted in NVIDIA/TensorRT issues 2981 and 4167).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import onnx_ir as ir

from vitdeploy.graph.values import scalar_of
from vitdeploy.lint.fusible import Fusible, find_fusible
from vitdeploy.lint.support import Support
from vitdeploy.lint.view import QDQ, GraphView, Hit, Rule, label, shape_text, type_name

FLOAT16, BFLOAT16, INT8 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8
HALF_HEADS = range(16, 257, 8)
INT8_HEADS = (16, 32, 64)
INT8_LENGTH = 512
_MASKS = ("Add", "Where")


def _type(each: Fusible) -> str | None:
    if any(each.operands.values()) or each.dtype in (FLOAT16, BFLOAT16, None):
        return None
    return f"products in {type_name(each.dtype)}"


def _head(each: Fusible) -> str | None:
    head, int8 = each.head, INT8 in each.operands.values()
    if head is None:
        return f"heads of unknown size: queries {shape_text(_queries(each))}"
    taken = INT8_HEADS if int8 else HALF_HEADS
    return None if head in taken else f"heads of {head} channels in {'int8' if int8 else type_name(each.dtype)}"


def _queries(each: Fusible) -> ir.Value:
    value = each.scores.inputs[0]
    assert value is not None  # a MatMul has two inputs
    return value


def _length(each: Fusible) -> str | None:
    if INT8 not in each.operands.values() or all(size is not None and size <= INT8_LENGTH for size in each.lengths):
        return None
    return f"scores of {_tokens(each)} in int8"


def _tokens(each: Fusible) -> str:
    return " x ".join("?" if size is None else str(size) for size in each.lengths)


def _incomplete(each: Fusible) -> str | None:
    """An output's quantizer alone is that of the next layer."""
    if not any(each.operands.values()):
        return None
    missing = [place for place, dtype in {**each.operands, "output": each.output}.items() if dtype is None]
    return f"no quantizer at {', '.join(missing)}" if missing else None


def _late_scale(each: Fusible) -> str | None:
    late = [n for n in each.between if n.op_type in ("Div", "Mul") and any(scalar_of(v) is not None for v in n.inputs)]
    return f"a factor behind the first product ({', '.join(map(label, late))})" if late else None


def _other_readers(each: Fusible) -> str | None:
    shared = [
        node
        for node in (each.scores, *each.between, each.softmax, *each.after)
        if len(list(node.outputs[0].uses())) > 1 or node.outputs[0].is_graph_output()
    ]
    return f"other readers of {', '.join(map(label, shared))}" if shared else None


def _strangers(each: Fusible) -> str | None:
    strange = [node for node in each.between if node.op_type not in ("Add", "Cast", "Div", "Mul", "Where")]
    strange += [node for node in each.after if node.op_type not in QDQ | {"Cast", "Dropout"}]
    masks = [node for node in each.between if node.op_type in _MASKS]
    if len(masks) > 1:
        return f"{len(masks)} masks in a row ({', '.join(map(label, masks))})"
    return ", ".join(f"{node.op_type} ({label(node)})" for node in strange) + " in the pattern" if strange else None


_OBSTACLES: tuple[Callable[[Fusible], str | None], ...] = (
    *(_type, _head, _length, _incomplete, _late_scale, _other_readers, _strangers),
)


def _obstacle(what: Callable[[Fusible], str | None], view: GraphView, support: Support) -> Iterator[Hit]:
    for each in find_fusible(view):
        found = what(each)
        if found is not None:
            yield Hit(label(each.softmax), found)


def _fused(view: GraphView, support: Support) -> Iterator[Hit]:
    for each in find_fusible(view):
        if not any(what(each) for what in _OBSTACLES):
            found = f"{type_name(each.dtype)}, heads of {each.head} channels, scores of {_tokens(each)}"
            yield Hit(label(each.softmax), found)


RULES = (
    Rule(
        "TRT401",
        "note",
        "attention in the form of a fused kernel; TensorRT may still choose otherwise",
        "the engine inspector shows whether a kernel with mha in its name runs",
        _fused,
    ),
    Rule(
        "TRT402",
        "warning",
        "attention in float16, bfloat16, int8 or float8e4m3fn",
        "give the graph half precision: --precision fp16 or bf16",
        partial(_obstacle, _type),
    ),
    Rule(
        "TRT403",
        "warning",
        "heads of 16 to 256 channels, a multiple of 8; 16, 32 or 64 in int8",
        "leave the attention of other heads in half precision, without quantizers",
        partial(_obstacle, _head),
    ),
    Rule(
        "TRT404",
        "warning",
        f"at most {INT8_LENGTH} queries and keys in int8, known when the engine is built",
        "remove the attention's quantizers: half precision is faster there",
        partial(_obstacle, _length),
    ),
    Rule(
        "TRT405",
        "warning",
        "quantizers at query, key, softmax, value and output, or at none of the first four",
        "add those that miss, or remove all",
        partial(_obstacle, _incomplete),
    ),
    Rule(
        "TRT406",
        "warning",
        "the factor at the query, in front of the first product",
        "multiply the query, or fold the factor into its linear: `vitdeploy optimize`",
        partial(_obstacle, _late_scale),
    ),
    Rule(
        "TRT407",
        "warning",
        "one reader for scores, softmax and what is between",
        "export without the attention's weights as an output",
        partial(_obstacle, _other_readers),
    ),
    Rule(
        "TRT408",
        "warning",
        "one mask at most, and nothing else, between the products",
        "move it in front of the products, or make one mask of all",
        partial(_obstacle, _strangers),
    ),
)

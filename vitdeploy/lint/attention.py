"""Find attention as a fused kernel would match it (two matrix products, a softmax, and all nodes between them), and
check whether it can run in one (TRT4xx).

The nodes are expected in the order of ModelOpt's graphs, with optional nodes in brackets:

    Q -> DQ -> MatMul -> [Mul or Div] -> [Add or Where] -> Softmax -> [Cast] -> Q -> DQ -> MatMul -> Q -> DQ

`graph.analysis.attention` finds float32 attention by what it computes, for rewrites that must be exact. This finder
accepts any type, passes through quantizers, and keeps unexpected nodes, so that a rule can name them.

Sources of the rules: the page "Fused Attention" of NVIDIA's guide, and the limits that its chapter on fusing attention
had (as quoted in NVIDIA/TensorRT issues 2981 and 4167).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from vitdeploy.graph.analysis.rows import MOVES, climb
from vitdeploy.graph.values import dim, rank_of, scalar_of
from vitdeploy.lint.support import Support
from vitdeploy.lint.view import QDQ, GraphView, Hit, Rule, is_weight, label, quantized_type, shape_text, type_name

# Operators on the path from the first product to the softmax, and from there to the second product.
_SCORES = QDQ | MOVES | {"Add", "Cast", "Div", "Mul", "Sub", "Tanh", "Where"}
_PROBABILITIES = QDQ | MOVES | {"Cast", "Dropout", "Mul", "Where"}


@dataclass(frozen=True)
class _Fusible:
    """One attention: `between` are the nodes from the scores to the softmax, `after` those from there to `mix`."""

    scores: ir.Node
    between: tuple[ir.Node, ...]
    softmax: ir.Node
    after: tuple[ir.Node, ...]
    mix: ir.Node

    @property
    def operands(self) -> dict[str, ir.DataType | None]:
        """The quantized type of each operand of the two products; None without a quantizer."""
        first, second = self.scores.inputs, self.mix.inputs
        places = {"query": first[0], "key": first[1], "softmax": second[0], "value": second[1]}
        return {name: _type_behind(value) for name, value in places.items()}

    @property
    def output(self) -> ir.DataType | None:
        """The type of the quantizer that reads the result; it may belong to the next layer only."""
        return _type_ahead(self.mix.outputs[0])

    @property
    def dtype(self) -> ir.DataType | None:
        """The type that the products compute in: the quantized type if operands and output share it."""
        types = {*self.operands.values(), self.output}
        if len(types) == 1 and None not in types:
            return types.pop()
        query = self.scores.inputs[0]
        return query.dtype if query is not None else None

    @property
    def head(self) -> int | None:
        return dim(self.scores.inputs[0], -1)

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The numbers of queries and of keys."""
        output = self.scores.outputs[0]
        return dim(output, -2), dim(output, -1)


def _type_behind(value: ir.Value | None) -> ir.DataType | None:
    node = climb(value, MOVES | {"Cast"})[0].producer() if value is not None else None
    return quantized_type(node) if node is not None and node.op_type == "DequantizeLinear" else None


def _type_ahead(value: ir.Value) -> ir.DataType | None:
    """Return the type of the quantizer that reads `value`, directly or after layout operations."""
    while len(uses := list(value.uses())) == 1 and uses[0].node.op_type in MOVES:
        value = uses[0].node.outputs[0]
    return next((quantized_type(use.node) for use in uses if use.node.op_type == "QuantizeLinear"), None)


def find_fusible(view: GraphView) -> list[_Fusible]:
    """Return all attentions of the main graph: a product of two computed tensors, a softmax over rows, a product."""
    found = []
    for softmax in view.of("Softmax"):
        axis, axes = int(softmax.attributes.get_int("axis", -1)), rank_of(softmax.outputs[0])
        first, below = softmax.inputs[0], _to_mix(softmax)
        above = _to_scores(first) if first is not None and (axis == -1 or axis + 1 == axes) else None
        if above is not None and below is not None:
            found.append(_Fusible(above[0], tuple(above[1:]), softmax, tuple(below[:-1]), below[-1]))
    return found


def _to_scores(value: ir.Value) -> list[ir.Node] | None:
    """Return the nodes from the first product to `value`, in graph order; None without such a product."""
    ways, seen = [(value, list[ir.Node]())], set[ir.Value]()
    while ways:
        value, way = ways.pop(0)  # the nearest product first: a mask may be one, too
        node = value.producer()
        if node is None or node.domain or value in seen:
            continue
        seen.add(value)
        if node.op_type == "MatMul" and not any(is_weight(operand) for operand in node.inputs):
            return [node, *reversed(way)]
        if node.op_type in _SCORES:
            ways += [(operand, [*way, node]) for operand in node.inputs if operand is not None]
    return None


def _to_mix(softmax: ir.Node) -> list[ir.Node] | None:
    """Return the nodes after the softmax up to the product with the values, in graph order."""
    ways, seen = [(softmax, list[ir.Node]())], set[ir.Node]()
    while ways:
        node, way = ways.pop(0)
        for use in node.outputs[0].uses():
            if use.node.op_type == "MatMul" and use.idx == 0 and not is_weight(use.node.inputs[1]):
                return [*way, use.node]
            if use.node.op_type in _PROBABILITIES and use.node not in seen:
                seen.add(use.node)
                ways.append((use.node, [*way, use.node]))
    return None


# --- The rules --------------------------------------------------------------------------------------------------------


FLOAT16, BFLOAT16, INT8 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8
HALF_HEADS = range(16, 257, 8)
INT8_HEADS = (16, 32, 64)
INT8_LENGTH = 512
_MASKS = ("Add", "Where")


def _type(each: _Fusible) -> str | None:
    if any(each.operands.values()) or each.dtype in (FLOAT16, BFLOAT16, None):
        return None
    return f"products in {type_name(each.dtype)}"


def _head(each: _Fusible) -> str | None:
    head, int8 = each.head, INT8 in each.operands.values()
    if head is None:
        return f"heads of unknown size: queries {shape_text(_queries(each))}"
    taken = INT8_HEADS if int8 else HALF_HEADS
    return None if head in taken else f"heads of {head} channels in {'int8' if int8 else type_name(each.dtype)}"


def _queries(each: _Fusible) -> ir.Value:
    value = each.scores.inputs[0]
    assert value is not None  # a MatMul has two inputs
    return value


def _length(each: _Fusible) -> str | None:
    if INT8 not in each.operands.values() or all(size is not None and size <= INT8_LENGTH for size in each.lengths):
        return None
    return f"scores of {_tokens(each)} in int8"


def _tokens(each: _Fusible) -> str:
    return " x ".join("?" if size is None else str(size) for size in each.lengths)


def _incomplete(each: _Fusible) -> str | None:
    """A quantizer at the output only belongs to the next layer."""
    if not any(each.operands.values()):
        return None
    missing = [place for place, dtype in {**each.operands, "output": each.output}.items() if dtype is None]
    return f"no quantizer at {', '.join(missing)}" if missing else None


def _late_scale(each: _Fusible) -> str | None:
    late = [n for n in each.between if n.op_type in ("Div", "Mul") and any(scalar_of(v) is not None for v in n.inputs)]
    return f"a factor after the first product ({', '.join(map(label, late))})" if late else None


def _other_readers(each: _Fusible) -> str | None:
    shared = [
        node
        for node in (each.scores, *each.between, each.softmax, *each.after)
        if len(list(node.outputs[0].uses())) > 1 or node.outputs[0].is_graph_output()
    ]
    return f"other readers of {', '.join(map(label, shared))}" if shared else None


def _strangers(each: _Fusible) -> str | None:
    strange = [node for node in each.between if node.op_type not in ("Add", "Cast", "Div", "Mul", "Where")]
    strange += [node for node in each.after if node.op_type not in QDQ | {"Cast", "Dropout"}]
    masks = [node for node in each.between if node.op_type in _MASKS]
    if len(masks) > 1:
        return f"{len(masks)} masks in a row ({', '.join(map(label, masks))})"
    return ", ".join(f"{node.op_type} ({label(node)})" for node in strange) + " in the pattern" if strange else None


# By rule: the check for an obstacle to a fused kernel, the expected form, and the fix.
_OBSTACLES: dict[str, tuple[Callable[[_Fusible], str | None], str, str]] = {
    "TRT402": (
        _type,
        "attention in float16, bfloat16, int8 or float8e4m3fn",
        "use half precision: --precision fp16 or bf16",
    ),
    "TRT403": (
        _head,
        "heads of 16 to 256 channels, a multiple of 8; 16, 32 or 64 in int8",
        "leave attention with other head sizes in half precision, without quantizers",
    ),
    "TRT404": (
        _length,
        f"at most {INT8_LENGTH} queries and keys in int8, known when the engine is built",
        "remove the attention's quantizers: half precision is faster there",
    ),
    "TRT405": (
        _incomplete,
        "quantizers at query, key, softmax, value and output, or at none of the first four",
        "add the missing ones, or remove all",
    ),
    "TRT406": (
        _late_scale,
        "the scale factor applied to the query, before the first product",
        "scale the query, or fold the factor into its linear: `vitdeploy optimize`",
    ),
    "TRT407": (
        _other_readers,
        "one reader each for the scores, the softmax and the nodes between them",
        "export without the attention weights as an output",
    ),
    "TRT408": (
        _strangers,
        "at most one mask, and no other operators, between the products",
        "move other operators before the products, or combine the masks into one",
    ),
}


def _obstacle(what: Callable[[_Fusible], str | None], view: GraphView, support: Support) -> Iterator[Hit]:
    for attention in find_fusible(view):
        if (obstacle := what(attention)) is not None:
            yield Hit(label(attention.softmax), obstacle)


def _fused(view: GraphView, support: Support) -> Iterator[Hit]:
    for attention in find_fusible(view):
        if not any(what(attention) for what, _, _ in _OBSTACLES.values()):
            form = f"{type_name(attention.dtype)}, heads of {attention.head} channels"
            yield Hit(label(attention.softmax), f"{form}, scores of {_tokens(attention)}")


RULES = (
    Rule(
        "TRT401",
        "note",
        "attention that matches a fused kernel; TensorRT may still choose another kernel",
        "check with the engine inspector whether a kernel with mha in its name runs",
        _fused,
    ),
    *(
        Rule(code, "warning", expected, fix, partial(_obstacle, what))
        for code, (what, expected, fix) in _OBSTACLES.items()
    ),
)

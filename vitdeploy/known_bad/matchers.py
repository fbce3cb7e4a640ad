"""The table's patterns that data cannot express: functions that yield the matching nodes of a prepared graph."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.values import array_of, dim, is_constant, producer, rank_of, scalar_of
from vitdeploy.known_bad.entries import Matcher
from vitdeploy.lint.view import GraphView, is_weight

Match = Callable[[GraphView], Iterator[ir.Node]]
# Permutations that swap heads and tokens of [batch, tokens, heads, channels], and that cut windows from [batch, rows,
# height, columns, width, channels].
_SPLIT_HEADS = [0, 2, 1, 3]
_WINDOWS = [0, 1, 3, 2, 4, 5]
# Operators that mix channels; rotary positions and factors come after them.
_LAYERS = frozenset({"Conv", "Gemm", "LayerNormalization", "MatMul", "RMSNormalization", "Softmax"})


def antialiased_reduction(view: GraphView) -> Iterator[ir.Node]:
    """A Resize with antialias that may shrink an axis: antialias has no effect if all axes grow."""
    for node in view.of("Resize"):
        if node.attributes.get_int("antialias", 0) and not _grows(node):
            yield node


def _grows(node: ir.Node) -> bool:
    before, after = node.inputs[0], node.outputs[0]
    sizes = [(dim(before, axis), dim(after, axis)) for axis in range(rank_of(before) or 0)]
    scales = array_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if scales is not None and scales.size:
        return bool((scales >= 1).all())
    return bool(sizes) and all(old is not None and new is not None and new >= old for old, new in sizes)


def attention_over_free_lengths(view: GraphView) -> Iterator[ir.Node]:
    """Attention in a graph with an input that has a dynamic axis other than the leading one."""
    inputs = (value.shape for value in view.model.graph.inputs if value.shape is not None)
    if any(not isinstance(size, int) for shape in inputs for size in list(shape)[1:]):
        yield from (attention.softmax for attention in find_attentions(view.model))


def auto_pad_of_free_size(view: GraphView) -> Iterator[ir.Node]:
    """A ConvTranspose with automatic pads whose input has a dynamic size."""
    for node in view.of("ConvTranspose"):
        automatic = str(node.attributes.get_string("auto_pad", "NOTSET")).startswith("SAME")
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        if automatic and "output_shape" not in node.attributes and (shape is None or not shape.is_static()):
            yield node


def tokens_as_many_as_heads(view: GraphView) -> Iterator[ir.Node]:
    """A Transpose in a graph with attention, with equal numbers of tokens and heads: it does not change the shape."""
    if not find_attentions(view.model):
        return
    for node in view.of("Transpose"):
        heads, tokens = (dim(node.outputs[0], axis) for axis in (1, 2))
        if _order(node) == _SPLIT_HEADS and heads == tokens and heads not in (None, 1):
            yield node


def windowed_attention(view: GraphView) -> Iterator[ir.Node]:
    """Attention with a position bias in a graph that cuts its image into windows (arXiv 2103.14030, section 3.2)."""
    if any(_order(node) == _WINDOWS for node in view.of("Transpose")):
        yield from (attention.softmax for attention in find_attentions(view.model) if _has_bias(attention))


def _order(node: ir.Node) -> list[int]:
    return [int(axis) for axis in node.attributes.get_ints("perm", ()) or ()]


def _has_bias(attention: Attention) -> bool:
    return any(node.op_type == "Add" for node in attention.between)


def constant_keys_or_values(view: GraphView) -> Iterator[ir.Node]:
    """Attention with constant keys or values, as in a decoder whose first queries are learned."""
    for node in view.of("Softmax"):
        scores = next((each for each in _until_layers(node.inputs[0], past="MatMul") if each.op_type == "MatMul"), None)
        mix = next((use.node for use in node.outputs[0].uses() if use.node.op_type == "MatMul" and use.idx == 0), None)
        if scores is not None and mix is not None and any(map(_is_constant_operand, (scores, mix))):
            yield node


def _is_constant_operand(product: ir.Node) -> bool:
    """Whether a product's second operand is a constant with a batch axis; the weight of a linear does not have one."""
    operand = product.inputs[1]
    return (rank_of(operand) or 0) > 2 and is_weight(operand)


def rotary_attention(view: GraphView) -> Iterator[ir.Node]:
    """Attention with rotary positions in its queries: x cos + rotate(x) sin (arXiv 2104.09864, equation 34)."""
    yield from (attention.softmax for attention in find_attentions(view.model) if _is_turned(attention.query))


def _is_turned(query: ir.Value) -> bool:
    """Whether a sum or difference of two products with one common factor lies between a value and its linear."""
    for node in _until_layers(query):
        if node.op_type not in ("Add", "Sub"):
            continue
        products = [producer(value, "Mul") for value in node.inputs]
        if all(products) and products[0] is not products[1]:
            left, right = (_sources(product) for product in products if product is not None)
            if left & right:
                return True
    return False


def _sources(product: ir.Node) -> set[ir.Value]:
    """Return the layer outputs and the inputs that a product is computed from."""
    nodes = [product, *(node for value in product.inputs if value is not None for node in _until_layers(value))]
    values = {value for node in nodes for value in node.inputs if value is not None and not is_constant(value)}
    return {value for value in values if value.producer() is None or _op(value) in _LAYERS | {"Add"}}


def _op(value: ir.Value) -> str:
    node = value.producer()
    return node.op_type if node is not None else ""


def _until_layers(value: ir.Value | None, past: str = "") -> Iterator[ir.Node]:
    """Yield the nodes that a value is computed from, closest first, up to layers; of these, only operator `past` is
    included."""
    seen, queue = set[ir.Node](), deque([value])
    while queue:
        value = queue.popleft()
        node = value.producer() if value is not None else None
        if node is None or node in seen or node.op_type in _LAYERS - {past}:
            continue
        seen.add(node)
        yield node
        if node.op_type in _LAYERS:
            continue
        queue.extend(node.inputs)


def scaled_queries_and_keys(view: GraphView) -> Iterator[ir.Node]:
    """Attention that scales both queries and keys, as exporters write PyTorch's `scaled_dot_product_attention`."""
    for attention in find_attentions(view.model):
        if _scaled(attention.query) and _scaled(attention.key):
            yield attention.softmax


def _scaled(value: ir.Value) -> bool:
    node = producer(value, "Mul")
    return node is not None and any(scalar_of(tensor) is not None for tensor in node.inputs)


def mean_over_axes_of_an_input(view: GraphView) -> Iterator[ir.Node]:
    """A ReduceMean with its axes as an input, as from opset 18."""
    yield from (node for node in view.of("ReduceMean") if len(node.inputs) > 1 and node.inputs[1] is not None)


def unequal_axis_pads(view: GraphView) -> Iterator[ir.Node]:
    """A 2D convolution with equal pads at both ends of each axis, but different pads for its two axes."""
    for node in view.of("Conv"):
        pads = [int(size) for size in node.attributes.get_ints("pads", ()) or ()]
        if rank_of(node.inputs[0]) == 4 and len(pads) == 4 and pads[:2] == pads[2:] and pads[0] != pads[1]:
            yield node


def vector_behind_scores(view: GraphView) -> Iterator[ir.Node]:
    """A sum or product whose first operand is computed from a product of two activations, and whose second operand is a
    vector along the last axis, such as a mask of keys."""
    for node in view.of("Add", "Mul"):
        vector = node.inputs[1]
        last = (rank_of(vector) or 0) - 1
        if last < 0 or any(dim(vector, axis) != 1 for axis in range(last)) or dim(vector, last) == 1:
            continue
        between = _until_layers(node.inputs[0], past="MatMul")
        products = (each for each in between if each.op_type == "MatMul")
        if any(all((rank_of(value) or 0) > 2 for value in product.inputs) for product in products):
            yield node


FUNCTIONS: Mapping[Matcher, Match] = {
    "auto_pad_of_free_size": auto_pad_of_free_size,
    "constant_keys_or_values": constant_keys_or_values,
    "antialiased_reduction": antialiased_reduction,
    "attention_over_free_lengths": attention_over_free_lengths,
    "mean_over_axes_of_an_input": mean_over_axes_of_an_input,
    "rotary_attention": rotary_attention,
    "scaled_queries_and_keys": scaled_queries_and_keys,
    "tokens_as_many_as_heads": tokens_as_many_as_heads,
    "unequal_axis_pads": unequal_axis_pads,
    "vector_behind_scores": vector_behind_scores,
    "windowed_attention": windowed_attention,
}

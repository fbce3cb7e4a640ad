"""Classify the outputs of a graph by the nodes that compute them: softmax, sigmoid, boxes."""

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import Names
from vitdeploy.graph.io.meanings import Ending
from vitdeploy.graph.values import ancestors, array_of, operands, producer
from vitdeploy.runtime.tasks.detection import PostprocessSpec

# --- How an output of a third-party graph ends: in probabilities, as an embedding, or in logits -----------------------


# Nodes that keep all numbers of a row; nodes that keep or average some of them.
_VIEWS = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Dropout")
_PARTS = (*_VIEWS, "Gather", "Slice", "Transpose", "ReduceMean", "GlobalAveragePool")
_SIGMOIDS = ("Sigmoid", "HardSigmoid")
_NORMS = ("LayerNormalization", "BatchNormalization", "LpNormalization", "RMSNormalization", "Tanh")
_LENGTHS = ("ReduceL2", "Sqrt", "ReduceSumSquare")
_DEPTH = 12


def ending_of(output: ir.Value) -> Ending:
    """How an output [batch, width] ends."""
    if _row_sum(output) > 0:
        return "softmax"
    unscaled = _unscaled(output)
    node, views = _below(unscaled, _VIEWS)
    if node is not None and (node.op_type in _SIGMOIDS or _is_logistic(node) or (node.op_type == "Softmax" and views)):
        plain = unscaled is output and node.op_type != "Softmax"
        return "sigmoid" if plain else "scaled"
    node, _ = _below(output, _VIEWS)
    if node is None:
        return ""
    if node.op_type == "LogSoftmax":
        return "log"
    unbiased = node.op_type == "MatMul" or (node.op_type == "Gemm" and len(node.inputs) < 3)
    node, _ = _below(output, _PARTS)
    return "vector" if unbiased or (node is not None and _is_normalised(node)) else ""


def is_bounded(output: ir.Value) -> bool:
    """Whether the nodes show that all numbers of a map lie in 0..1: they come from a sigmoid, a softmax or a Clip, and
    are at most cropped, rearranged or interpolated after it."""
    node, _ = _below(output, (*_VIEWS, "Slice", "Gather", "Transpose", "Resize"))
    if node is not None and node.op_type == "Clip":
        bounds = [_number(bound) if bound is not None else None for bound in (*node.inputs[1:], None, None)[:2]]
        return [None if bound is None else float(bound.item()) for bound in bounds] == [0.0, 1.0]
    return node is not None and (node.op_type in (*_SIGMOIDS, "Softmax") or _is_logistic(node))


def as_logits(model: ir.Model, output: ir.Value) -> tuple[ir.Value, Literal["softmax", "sigmoid"] | None]:
    """Remove the softmax or sigmoid at the end of an output, in place; return the output and which of them it was.

    For probabilities that end in neither (a mean of softmaxes, percentages), return their logarithm: its softmax
    gives them back.
    """
    value: ir.Value | None = output
    reader: ir.Node | None = None
    while value is not None and (node := value.producer()) is not None:
        if (source := _before_scores(node)) is not None:
            if reader is None:
                source.type, source.shape = output.type, output.shape
                output = source
            else:
                reader.replace_input_with(0, source)
            return output, "sigmoid" if node.op_type == "Sigmoid" else "softmax"
        if node.op_type not in _VIEWS:
            break
        value, reader = node.inputs[0], node
    if not _row_sum(output) > 0:
        return output, None
    names = Names(model)
    least = names.constant(np.array(np.finfo(np.float32).tiny), "scores.least")
    nodes = [names.node("Max", [output, least], "scores/Max")]
    nodes.append(names.node("Log", [nodes[0].outputs[0]], "scores/Log"))
    for node in nodes:
        node.outputs[0].type, node.outputs[0].shape = output.type, output.shape
    model.graph.extend(nodes)
    return nodes[-1].outputs[0], "softmax"


def computed_of(output: ir.Value, kept: ir.Value) -> bool:
    """Whether an output is derived from another one: its softmax, its best classes."""
    above = {kept, *_chain(kept, (*_VIEWS, "Softmax"))}
    steps = (*_VIEWS, "Softmax", "Sigmoid", "ArgMax", "TopK", "Gather")
    return any(value in above for value in (output, *_chain(output, steps)))


def _chain(value: ir.Value, operators: tuple[str, ...]) -> Iterator[ir.Value]:
    node = value.producer()
    while node is not None and node.op_type in operators and node.inputs and node.inputs[0] is not None:
        yield node.inputs[0]
        node = node.inputs[0].producer()


def _below(value: ir.Value | None, operators: tuple[str, ...]) -> tuple[ir.Node | None, bool]:
    """The node that computes a value, with nodes of these operators skipped; and whether those reshape rows."""
    node, reshaped = value.producer() if value is not None else None, False
    while node is not None and node.op_type in operators and node.inputs and node.inputs[0] is not None:
        reshaped |= node.op_type in ("Reshape", "Flatten")
        node = node.inputs[0].producer()
    return (None if node is None or node.domain != "" else node), reshaped


def _before_scores(node: ir.Node) -> ir.Value | None:
    """The logits that a node turns into scores, also for a softmax written out in operators; None for other nodes."""
    if node.op_type in ("Softmax", "Sigmoid"):
        return node.inputs[0]
    exponential = producer(node.inputs[0], "Exp") if _is_share(node) else None
    return exponential.inputs[0] if exponential is not None else None


def _is_share(node: ir.Node) -> bool:
    """Whether the node is x / ReduceSum(x)."""
    total = producer(node.inputs[1], "ReduceSum") if node.op_type == "Div" else None
    return total is not None and total.inputs[0] is node.inputs[0]


def _row_sum(value: ir.Value | None, depth: int = _DEPTH) -> float:
    """The sum of each row of positive numbers, derived from the nodes; NaN if unknown."""
    node, reshaped = _below(value, _VIEWS)
    if node is None or not depth:
        return math.nan
    if node.op_type == "Softmax" or _is_share(node):
        parts = reshaped and node.op_type == "Softmax" and node.attributes.get_int("axis", -1) == -1
        return math.nan if parts else 1.0
    sums = [_row_sum(tensor, depth - 1) for tensor in node.inputs if tensor is not None and _number(tensor) is None]
    numbers = [number for each in node.inputs if (number := _number(each)) is not None]
    if node.op_type in ("Add", "Sum", "Mean") and not numbers:
        return round(math.fsum(sums) / (len(sums) if node.op_type == "Mean" else 1), 6)
    if node.op_type in ("Mul", "Div") and len(sums) == len(numbers) == 1 and numbers[0].size == 1:
        factor = float(numbers[0].item())
        return round(sums[0] * factor if node.op_type == "Mul" else sums[0] / factor, 6)
    if node.op_type == "Clip" and _keeps_shares(node):
        return _row_sum(node.inputs[0], depth - 1)
    if node.op_type == "ReduceMean":  # over several crops or models, which keeps the rows
        return sums[0]
    return 1.0 if node.op_type == "Concat" and _is_complement(*node.inputs) else math.nan


def _keeps_shares(clip: ir.Node) -> bool:
    """Whether a Clip changes only numbers close to 0 or 1, as before a logarithm."""
    least, most = ((_number(bound) if bound is not None else None) for bound in (*clip.inputs[1:], None, None)[:2])
    return (least is None or float(least.item()) <= 1e-3) and (most is None or float(most.item()) >= 0.999)


def _unscaled(value: ir.Value | None) -> ir.Value | None:
    """The value without the factors and limits at its end, such as the factor of percentages."""
    node, _ = _below(value, _VIEWS)
    while node is not None and node.op_type in ("Mul", "Div", "Clip"):
        computed = [operand for operand in node.inputs if operand is not None and _number(operand) is None]
        if len(computed) != 1 or (node.op_type == "Div" and computed[0] is not node.inputs[0]):
            break
        value = computed[0]
        node, _ = _below(value, _VIEWS)
    return value


def _is_complement(*parts: ir.Value | None) -> bool:
    """Whether two parts are p and 1 - p of a sigmoid p."""
    for p, other in (parts, parts[::-1]) if len(parts) == 2 else ():
        node = producer(other, "Sub")
        one = _number(node.inputs[0]) if node is not None and node.inputs[1] is p else None
        if one is not None and np.all(one == 1) and (below := _below(p, _VIEWS)[0]) is not None:
            return below.op_type == "Sigmoid"
    return False


def _is_logistic(node: ir.Node) -> bool:
    """Whether the node is 1 / (1 + Exp(-x))."""
    below = node.inputs[-1] if node.op_type in ("Div", "Reciprocal") else None
    total = producer(below, "Add")
    return total is not None and any(producer(tensor, "Exp") is not None for tensor in total.inputs)


def _is_normalised(node: ir.Node) -> bool:
    """Whether a node divides by a length or a standard deviation, with at most a scale and a shift after it."""
    for operator in ("Add", "Mul"):
        if node.op_type == operator and any(_number(tensor) is not None for tensor in node.inputs):
            above = next((each for each in node.inputs if _number(each) is None), None)
            below = above.producer() if above is not None else None
            if below is None or below.op_type not in ("Mul", "Div", *_NORMS):
                return False
            node = below
    if node.op_type in _NORMS:
        return True
    divided = node.inputs[1:] if node.op_type == "Div" else node.inputs if node.op_type == "Mul" else ()
    steps = ("Max", "Clip", "Add", "Expand", "Reciprocal", "Unsqueeze", "Pow", "Identity", "Cast")
    lengths = (_below(each, steps)[0] for each in divided)
    return any(length is not None and length.op_type in _LENGTHS for length in lengths)


def _number(value: ir.Value | None) -> np.ndarray | None:
    """The value of an initializer or of a Constant node, which are not lifted yet."""
    node = producer(value, "Constant")
    tensor = node.attributes.get("value") if node is not None else None
    return array_of(value, overridable=True) if tensor is None else tensor.as_tensor().numpy()


# --- Properties of a detector's outputs that names do not show, read from the nodes -----------------------------------
# Whether boxes are relative to the image: DETR and its successors end the boxes with a sigmoid, as centre and size in
# 0..1 (arXiv 2005.12872, section 3.2). Whether scores compete: detectors that choose queries by score, or sample by
# learned offsets, are trained by the focal loss on independent scores (arXiv 2010.04159, section A.4; 2304.08069).


# Operators that rearrange or select numbers without changing them.
_LAYOUT = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Gather", "GatherElements", "Slice", "Identity")
_CHOOSES_QUERIES = ("TopK", "GridSample")
# Numbers per box; numbers per box with its score and class.
_BOX, _RANKED = 4, 6


def independent_scores(boxes: ir.Value) -> bool:
    """Whether the detector chooses its queries by score, or samples by learned offsets."""
    return any(node.op_type in _CHOOSES_QUERIES for node in ancestors(boxes, past_sizes=False))


def joined(output: ir.Value) -> tuple[dict[str, ir.Value], PostprocessSpec] | None:
    """The outputs of a detector with a single tensor, as Ultralytics exports RT-DETR; None for any other tensor.

    Until 8.3 [batch, queries, 4 + classes]: boxes and the sigmoids of logits. From 8.4 on [batch, queries, 6]: box,
    score and class of the best pairs. Boxes are centre and size, relative to the image. Tensors of the same shape with
    boxes in pixels, such as YOLO's, return None.
    """
    node = producer(output, "Concat")
    if node is None or node.attributes.get_int("axis", 0) not in (-1, 2) or not _are_boxes(node.inputs[0]):
        return None
    if len(node.inputs) == 2 and (sigmoid := producer(node.inputs[1], "Sigmoid")) is not None:
        boxes, logits = node.inputs[0], sigmoid.inputs[0]
        if boxes is None or logits is None:
            return None
        for value, width in ((boxes, _BOX), (logits, None)):
            value.dtype, value.shape = ir.DataType.FLOAT, _with_last(output, width)
        return {"logits": logits, "boxes": boxes}, PostprocessSpec(scores="sigmoid")
    if len(node.inputs) == 3 and _is_best(node.inputs[1]):
        return _parts(node, output), PostprocessSpec(scores="given")
    return None


def ranked_in_pixels(boxes: ir.Value) -> None:
    """Check that boxes are not in pixels.

    Raises:
        GraphError: the boxes end in a multiplication by a constant above 1, such as the image size.
    """
    value = _below_layout(boxes)
    pair = operands(value.producer(), "Mul") if value is not None else None
    for factor in map(_number, pair or ()):
        if factor is not None and factor.size and np.abs(factor).max() > 1:
            raise GraphError(
                "the boxes are in pixels of a fixed image size",
                found=f"boxes multiplied by {', '.join(f'{each:g}' for each in factor.ravel()[:4])}",
                expected="boxes in 0..1, or in pixels of the input orig_target_sizes",
                fix="export the model with the input orig_target_sizes, or without the multiplication",
            )


def _is_sigmoid(value: ir.Value | None) -> bool:
    """Whether all numbers of a value come from one sigmoid, also through a Concat of one tensor."""
    below = _below_layout(value)
    return below is not None and producer(below, "Sigmoid") is not None


def _are_boxes(value: ir.Value | None) -> bool:
    """Whether a value is the sigmoid of a linear with four outputs."""
    sigmoid = producer(_below_layout(value), "Sigmoid")
    return sigmoid is not None and _width(sigmoid.inputs[0]) == _BOX


def _width(value: ir.Value | None, depth: int = 6) -> int | None:
    """The number of outputs of the linear that a value comes from, through sums and layout operations."""
    node = value.producer() if value is not None else None
    if node is None or not depth or node.domain != "":
        return None
    if node.op_type in ("MatMul", "Gemm"):
        weight = node.inputs[1]
        while (shared := producer(weight, "Identity")) is not None:  # the exporter stores equal weights once
            weight = shared.inputs[0]
        tensor = weight.const_value if weight is not None else None
        shape = [int(size) for size in tensor.shape.numpy()] if tensor is not None else []
        transposed = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
        return shape[0 if transposed else 1] if len(shape) == 2 else None
    through = node.inputs if node.op_type == "Add" else node.inputs[:1] if node.op_type in _LAYOUT else ()
    widths = (_width(each, depth - 1) for each in through)
    return next((width for width in widths if width is not None), None)


def _is_best(value: ir.Value | None) -> bool:
    below = _below_layout(value)
    node = producer(below, "TopK")
    return node is not None and below is node.outputs[0] and _is_sigmoid(node.inputs[0])


def _below_layout(value: ir.Value | None) -> ir.Value | None:
    while value is not None:
        node = value.producer()
        one = node is not None and node.op_type == "Concat" and len(node.inputs) == 1
        if node is None or node.domain != "" or not (one or node.op_type in _LAYOUT):
            return value
        value = node.inputs[0]
    return None


def _with_last(output: ir.Value, width: int | None) -> ir.Shape:
    """The shape of one of two parts along the last axis of `output`."""
    assert output.shape is not None
    batch, queries, both = output.shape
    rest = both - _BOX if isinstance(both, int) else None
    return ir.Shape([batch, queries, width or rest])


def _parts(concat: ir.Node, output: ir.Value) -> dict[str, ir.Value]:
    """Split a tensor [batch, queries, 6], no longer an output, into boxes, scores and labels."""
    graph = concat.graph
    assert isinstance(graph, ir.Graph) and output.shape is not None
    names = Names(ir.Model(graph, ir_version=8))
    batch, queries, _ = output.shape
    sizes = names.constant(np.array([_BOX, 1, 1], np.int64), "parts.sizes")
    axis = names.constant(np.array([2], np.int64), "parts.axis")
    split = names.node("Split", [output, sizes], "parts/Split", {"axis": 2}, outputs=3)
    boxes, score, index = split.outputs
    scores = names.node("Squeeze", [score, axis], "parts/Squeeze_scores")
    numbers = names.node("Squeeze", [index, axis], "parts/Squeeze_labels")
    labels = names.node("Cast", [numbers.outputs[0]], "parts/Cast", {"to": ir.DataType.INT64})
    graph.extend([split, scores, numbers, labels])
    found = {"labels": labels.outputs[0], "boxes": boxes, "scores": scores.outputs[0]}
    for name, value in found.items():
        value.dtype = ir.DataType.INT64 if name == "labels" else ir.DataType.FLOAT
        value.shape = ir.Shape([batch, queries, *([_BOX] if name == "boxes" else [])])
    return found

"""What the nodes behind a detector's outputs say of them, where their names do not.

Whether boxes are relative to the image: DETR and all after it end their boxes with a sigmoid, as centre and size in
0..1 (arXiv 2005.12872, section 3.2). Whether scores compete: detectors that choose queries by score, or sample by
learned offsets, are trained by the focal loss on independent scores (arXiv 2010.04159, section A.4; 2304.08069).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import Names
from vitdeploy.graph.values import ancestors, array_of, operands, producer
from vitdeploy.spec import PostprocessSpec

# Other layouts, and choices, of the same numbers.
_LAYOUT = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Gather", "GatherElements", "Slice", "Identity")
_CHOOSES_QUERIES = ("TopK", "GridSample")
# Of a box; and of a box, its score and its class.
_BOX, _RANKED = 4, 6


def independent_scores(boxes: ir.Value) -> bool:
    """Whether the detector chooses its queries by score, or samples by learned offsets."""
    return any(node.op_type in _CHOOSES_QUERIES for node in ancestors(boxes, past_sizes=False))


def joined(output: ir.Value) -> tuple[dict[str, ir.Value], PostprocessSpec] | None:
    """The outputs of a detector that gives one tensor, as Ultralytics exports RT-DETR; None for any other tensor.

    Until 8.3 [batch, queries, 4 + classes], boxes and the sigmoids of logits; from 8.4 on [batch, queries, 6], box,
    score and class of the best pairs. Boxes are centre and size, relative to the image. The same shapes with boxes in
    pixels, as of YOLO, are no boxes of a transformer, and none of these.
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
    """Let boxes pass that nothing says are in pixels.

    Raises:
        GraphError: the last that is done to them is a multiplication by a constant above 1, as by the image's size.
    """
    value = _below_layout(boxes)
    pair = operands(value.producer(), "Mul") if value is not None else None
    for factor in map(_constant, pair or ()):
        if factor is not None and factor.size and np.abs(factor).max() > 1:
            raise GraphError(
                "the boxes are in pixels of one image size, and vitdeploy takes boxes relative to the image",
                found=f"boxes multiplied by {', '.join(f'{each:g}' for each in factor.ravel()[:4])}",
                wanted="boxes in 0..1, or in pixels of an input orig_target_sizes",
                fix="export it with that input, or without the multiplication",
            )


def _is_sigmoid(value: ir.Value | None) -> bool:
    """Whether all that a value holds comes out of a sigmoid; a stack of one is such a value too."""
    below = _below_layout(value)
    return below is not None and producer(below, "Sigmoid") is not None


def _are_boxes(value: ir.Value | None) -> bool:
    """Whether they are sigmoids of what a linear of four outputs gives."""
    sigmoid = producer(_below_layout(value), "Sigmoid")
    return sigmoid is not None and _width(sigmoid.inputs[0]) == _BOX


def _width(value: ir.Value | None, depth: int = 6) -> int | None:
    """The outputs of the linear that a value comes from by sums."""
    node = value.producer() if value is not None else None
    if node is None or not depth or node.domain != "":
        return None
    if node.op_type in ("MatMul", "Gemm"):
        weight = node.inputs[1]
        while (shared := producer(weight, "Identity")) is not None:  # equal weights that the exporter keeps once
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


def _constant(value: ir.Value | None) -> np.ndarray | None:
    """Also of a Constant node: nothing has lifted them yet."""
    node = producer(value, "Constant")
    tensor = node.attributes.get("value") if node is not None else None
    return array_of(value) if tensor is None else tensor.as_tensor().numpy()


def _with_last(output: ir.Value, width: int | None) -> ir.Shape:
    """The shape of one of two parts along the last axis of `output`."""
    assert output.shape is not None
    batch, queries, both = output.shape
    rest = both - _BOX if isinstance(both, int) else None
    return ir.Shape([batch, queries, width or rest])


def _parts(concat: ir.Node, output: ir.Value) -> dict[str, ir.Value]:
    """Box, score and class apart, behind a tensor [batch, queries, 6] that is no output any longer."""
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

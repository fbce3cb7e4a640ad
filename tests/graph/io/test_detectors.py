"""What a detector's graph says of its boxes and scores, where the names of its outputs do not."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.graph.builder import Builder, difference, run, values
from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import import_graph, serialised
from vitdeploy.runtime.tasks.detection import PostprocessSpec

QUERIES, CLASSES, SIDE = 4, 3, 8


def heads(b, *, chooses=False):
    """(boxes before their sigmoid, logits) of a linear each on queries [batch, QUERIES, 6] of the image."""
    image = b.input("images", ["batch", 6, SIDE, SIDE])
    queries = b.add("Transpose", b.add("Reshape", image, np.array([0, 6, -1])), perm=[0, 2, 1])
    if chooses:  # by the score of each position
        scores = b.add("Squeeze", b.add("MatMul", queries, values(6, 1, seed=3)), np.array([2]))
        _, best = b.add("TopK", scores, np.array([QUERIES]), outputs=2, axis=1)
        index = b.add("Expand", b.add("Unsqueeze", best, np.array([2])), np.array([1, 1, 6]))
        queries = b.add("GatherElements", queries, index, axis=1)
    else:
        queries = b.add("Slice", queries, np.array([0]), np.array([QUERIES]), np.array([1]))
    box = b.add("Add", b.add("MatMul", queries, values(6, 4, seed=1)), values(4, seed=4))
    return box, b.add("MatMul", queries, values(6, CLASSES, seed=2))


def saved(b, tmp_path, *outputs):
    path = tmp_path / "detector.onnx"
    proto = b.model(*outputs)
    onnx.save(proto, str(path))
    return path, proto


def named(b, value, name):
    """Call an output of the last node so."""
    assert b.nodes[-1].output[0] == value
    b.nodes[-1].output[0] = name


@pytest.mark.parametrize(("chooses", "scores"), [(False, "softmax"), (True, "sigmoid")])
def test_scores_are_independent_where_queries_are_chosen_by_score(tmp_path, chooses, scores):
    b = Builder(17)
    box, logits = heads(b, chooses=chooses)
    named(b, logits, "pred_logits")
    named(b, b.add("Sigmoid", box), "pred_boxes")
    found = import_graph(saved(b, tmp_path, "pred_logits", "pred_boxes")[0])
    assert (found.task, found.postprocess) == ("detection", PostprocessSpec(scores=scores))
    assert any("independent" in note for note in found.notes) == chooses


def test_labels_of_rf_detr_are_logits(tmp_path):
    b = Builder(17)
    box, logits = heads(b)
    named(b, logits, "labels")
    named(b, b.add("Sigmoid", box), "dets")
    found = import_graph(saved(b, tmp_path, "dets", "labels")[0])
    assert (found.task, found.postprocess) == ("detection", PostprocessSpec(scores="sigmoid"))
    assert [value.name for value in found.model.graph.outputs] == ["logits", "boxes"]


def joined(b, box, logits, *, pixels=False):
    boxes = b.add("Sigmoid", box)
    if pixels:
        boxes = b.add("Mul", boxes, np.float32(640))
    return b.add("Concat", boxes, b.add("Sigmoid", logits), axis=-1)


def test_boxes_and_scores_in_one_tensor_are_told_apart(tmp_path):
    b = Builder(17)
    path, proto = saved(b, tmp_path, joined(b, *heads(b)))
    found = import_graph(path)
    assert (found.task, found.postprocess) == ("detection", PostprocessSpec(scores="sigmoid"))
    image = values(2, 6, SIDE, SIDE)
    [whole] = run(proto, images=image)
    logits, boxes = run(onnx.load_from_string(serialised(found.model)), image=image)
    assert difference(boxes, whole[..., :4]) == 0
    assert difference(1 / (1 + np.exp(-logits)), whole[..., 4:]) <= 1e-6


def test_best_pairs_in_one_tensor_are_told_apart(tmp_path):
    b = Builder(17)
    box, logits = heads(b)
    boxes = b.add("Sigmoid", box)
    flat = b.add("Flatten", b.add("Sigmoid", logits), axis=1)
    best, index = b.add("TopK", flat, np.array([QUERIES]), outputs=2, axis=1)
    query = b.add("Unsqueeze", b.add("Div", index, np.int64(CLASSES)), np.array([2]))
    boxes = b.add("GatherElements", boxes, b.add("Expand", query, np.array([1, 1, 4])), axis=1)
    label = b.add("Cast", b.add("Unsqueeze", b.add("Mod", index, np.int64(CLASSES)), np.array([2])), to=1)
    path, proto = saved(b, tmp_path, b.add("Concat", boxes, b.add("Unsqueeze", best, np.array([2])), label, axis=-1))
    found = import_graph(path)
    assert (found.task, found.postprocess) == ("detection", PostprocessSpec(scores="given", boxes="cxcywh"))
    image = values(2, 6, SIDE, SIDE)
    [whole] = run(proto, images=image)
    labels, boxes, scores = run(onnx.load_from_string(serialised(found.model)), image=image)
    np.testing.assert_array_equal(labels, whole[..., 5])
    np.testing.assert_array_equal(boxes, whole[..., :4])
    np.testing.assert_array_equal(scores, whole[..., 4])


@pytest.mark.parametrize("kind", ["boxes in pixels", "boxes of five numbers", "scores without a sigmoid", "channels"])
def test_one_tensor_that_may_mean_something_else_is_no_detectors(tmp_path, kind):
    b = Builder(17)
    box, logits = heads(b)
    if kind == "boxes of five numbers":
        box = b.add("MatMul", box, values(4, 5))
    if kind == "scores without a sigmoid":
        whole = b.add("Concat", b.add("Sigmoid", box), logits, axis=-1)
    else:
        whole = joined(b, box, logits, pixels=kind == "boxes in pixels")
    if kind == "channels":
        whole = b.add("Transpose", whole, perm=[0, 2, 1])
    path = saved(b, tmp_path, whole)[0]
    assert import_graph(path).task == "tensors"
    with pytest.raises(GraphError, match="cannot be used for the task"):
        import_graph(path, task="detection")


def test_given_boxes_in_pixels_are_refused_with_the_factor(tmp_path):
    b = Builder(17)
    box, logits = heads(b)
    named(b, b.add("ReduceMax", logits, axes=[2], keepdims=0), "scores")
    named(b, b.add("ArgMax", logits, axis=2, keepdims=0), "labels")
    named(b, b.add("Mul", b.add("Sigmoid", box), np.array([640, 480, 640, 480], np.float32)), "boxes")
    path = tmp_path / "detector.onnx"
    onnx.save(
        b.model("labels", "boxes", "scores", types=[TensorProto.INT64, TensorProto.FLOAT, TensorProto.FLOAT]), str(path)
    )
    with pytest.raises(GraphError, match="in pixels of a fixed image size") as refused:
        import_graph(path)
    assert "640, 480, 640, 480" in refused.value.found and "orig_target_sizes" in refused.value.expected

"""Parity finds a graph that is another function than its model, or that runs at one batch only."""

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitdeploy.errors import ExportError
from vitdeploy.exporter.parity import ask, check_graph, compare_graphs, relative_difference, worst_difference
from vitdeploy.exporter.ties import answers_of_choices
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.models.torch_runner import TorchRunner
from vitdeploy.spec import PreprocessSpec

PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))


@pytest.fixture(scope="module")
def reference(small_checkpoint):
    with TorchRunner(load_model(Source("vit_w32d2h2_patch8_32", small_checkpoint))) as runner:
        yield runner


@pytest.fixture
def proto(small_export):
    return onnx.load(str(small_export / "model.onnx"))


def change(proto, name, function):
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(function(numpy_helper.to_array(tensor)), name))


def check(proto, reference, tmp_path, preprocess=PREPROCESS, fixed_batch=None):
    onnx.save(proto, str(tmp_path / "model.onnx"))
    return check_graph(tmp_path / "model.onnx", ask(reference, preprocess, fixed_batch), preprocess)


def test_the_untouched_graph_passes(proto, reference, tmp_path):
    assert max(row.max_relative_difference for row in check(proto, reference, tmp_path)) <= 1e-5


def test_one_changed_bias_is_found(proto, reference, tmp_path):
    change(proto, "head.bias", lambda bias: bias + np.float32(0.01) * (np.arange(10) == 3).astype(np.float32))
    with pytest.raises(ExportError, match="not the same function") as caught:
        check(proto, reference, tmp_path)
    assert caught.value.expected == "at most 1e-04"


def test_a_nan_is_found(proto, reference, tmp_path):
    change(proto, "head.bias", lambda bias: np.full_like(bias, np.nan))
    with pytest.raises(ExportError, match="not the same function"):
        check(proto, reference, tmp_path)


def test_other_preprocessing_in_the_graph_is_found(proto, reference, tmp_path):
    with pytest.raises(ExportError, match="not the same function"):
        check(proto, reference, tmp_path, dataclasses.replace(PREPROCESS, mean=(0.4,)))


def test_a_reshape_with_a_constant_batch_is_found(proto, reference, tmp_path):
    """The kind of graph that other exporters make: it runs at the batch of its example only."""
    reshape = next(node for node in proto.graph.node if node.name == "blocks.0.attn/Reshape")
    change(proto, reshape.input[1], lambda shape: np.where(shape == -1, 2, shape))
    with pytest.raises(ExportError, match="does not run at batch 1: a batch size is baked into a constant") as caught:
        check(proto, reference, tmp_path)
    assert caught.value.found


def test_a_graph_with_a_fixed_batch_is_refused_where_every_batch_is_wanted(proto, reference, tmp_path):
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(ExportError, match="does not run at batch 1") as caught:
        check(proto, reference, tmp_path)
    assert caught.value.found == "uint8 [1, 32, 32, 1]"


def test_a_fixed_batch_is_run_thrice_on_other_pixels(proto, reference, tmp_path):
    rows = check(proto, reference, tmp_path, fixed_batch=3)
    assert [row.batch for row in rows] == [3, 3, 3]
    assert len({row.max_relative_difference for row in rows}) > 1


@pytest.mark.parametrize(
    ("ours", "reference", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, -2.0], 2.25),
        ([3.0, -4.0], [3.0, -5.0], 0.2),
    ],
)
def test_relative_difference_is_the_largest_error_over_the_largest_value(ours, reference, expected):
    assert relative_difference(np.array(ours, np.float32), np.array(reference, np.float32)) == pytest.approx(expected)


def test_relative_difference_of_a_nan_is_nan():
    assert np.isnan(relative_difference(np.array([np.nan, 1.0]), np.array([1.0, 1.0])))


# --- several outputs --------------------------------------------------------------------------------------------------


def outputs(**values):
    return {name: np.array(value, np.float32) for name, value in values.items()}


def test_the_worst_output_counts_each_by_its_own_size():
    ours = outputs(logits=[100.0, -50.0], boxes=[0.1, 0.2])
    reference = outputs(logits=[100.0, -49.0], boxes=[0.1, 0.25])
    assert worst_difference(ours, reference) == pytest.approx(0.2)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_nan_in_any_output_is_the_worst_difference(names):
    reference = {name: np.ones(3, np.float32) for name in names}
    assert np.isnan(worst_difference({**reference, "b": np.array([1, np.nan, 1], np.float32)}, reference))


RANKED = {
    "labels": np.array([[3, 5, 3]]),
    "scores": np.array([[0.9, 0.5, 0.2]], np.float32),
    "boxes": np.array([[[0, 0, 1, 1], [0.2, 0.2, 0.5, 0.5], [0.1, 0.1, 0.3, 0.4]]], np.float32),
}


def test_objects_that_swapped_their_ranks_are_the_same_objects():
    swapped = {name: array[:, [1, 0, 2]] for name, array in RANKED.items()}
    assert worst_difference(swapped, RANKED) == 0.0


@pytest.mark.parametrize(
    ("name", "index", "value", "expected"),
    [
        ("boxes", (0, 1, 2), 0.6, 0.1),
        ("scores", (0, 0), 0.8, 0.1),
        ("labels", (0, 1), 4, 0.3),  # its score above the lowest one
    ],
)
def test_another_box_score_or_label_is_a_difference(name, index, value, expected):
    ours = {key: array.copy() for key, array in RANKED.items()}
    ours[name][index] = value
    assert worst_difference(ours, RANKED) == pytest.approx(expected)


# --- a graph before and after it was rewritten ------------------------------------------------------------------------


def small_graph(path, *, weight=0.5, output="y", inputs=("x",)):
    """y = weight * (sum of the inputs): "x" is float, "pixels" uint8, "token" int64, each [batch, 3]."""
    kinds = {"x": TensorProto.FLOAT, "pixels": TensorProto.UINT8, "token": TensorProto.INT64}
    nodes = [helper.make_node("Cast", [name], [f"{name}f"], to=TensorProto.FLOAT) for name in inputs]
    nodes += [helper.make_node("Sum", [f"{name}f" for name in inputs], ["sum"])]
    nodes += [helper.make_node("Mul", ["sum", "w"], [output])]
    values = [helper.make_tensor_value_info(name, kinds[name], ["batch", 3]) for name in inputs]
    out = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", 3])
    weights = [numpy_helper.from_array(np.array(weight, np.float32), "w")]
    graph = helper.make_graph(nodes, "small", values, [out], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), str(path))
    return path


INPUTS = [("x",), ("pixels",), ("token",), ("x", "pixels", "token")]


@pytest.mark.parametrize("inputs", INPUTS, ids="+".join)
def test_the_same_graph_is_the_same_for_inputs_of_every_kind(tmp_path, inputs):
    graph = small_graph(tmp_path / "a.onnx", inputs=inputs)
    assert compare_graphs(graph, graph) == (0.0, None)


@pytest.mark.parametrize("inputs", INPUTS, ids="+".join)
def test_another_function_is_found_for_inputs_of_every_kind(tmp_path, inputs):
    before, after = (small_graph(tmp_path / f"{w}.onnx", weight=w, inputs=inputs) for w in (0.5, 0.5005))
    with pytest.raises(ExportError, match="not the same function as the original graph") as caught:
        compare_graphs(before, after)
    assert caught.value.found == "max|a-b| / max|b| = 1.00e-03"


def test_a_difference_of_rounding_is_passed_and_told(tmp_path):
    before, after = (small_graph(tmp_path / f"{w}.onnx", weight=w) for w in (0.5, 0.500001))
    worst, unproven = compare_graphs(before, after)
    assert 1e-6 < worst < 3e-6 and unproven is None


def test_of_an_output_that_is_always_the_same_a_rewrite_proves_nothing(tmp_path):
    constant = small_graph(tmp_path / "a.onnx", weight=0.0)
    assert compare_graphs(constant, constant) == (0.0, ("y",))


def test_a_graph_that_became_nan_is_found(tmp_path):
    before, after = (small_graph(tmp_path / f"{w}.onnx", weight=w) for w in (0.5, np.nan))
    with pytest.raises(ExportError, match="not the same function"):
        compare_graphs(before, after)


def test_other_outputs_are_found(tmp_path):
    before, after = small_graph(tmp_path / "a.onnx"), small_graph(tmp_path / "b.onnx", output="z")
    with pytest.raises(ExportError, match="has other outputs") as caught:
        compare_graphs(before, after)
    assert "name='z'" in caught.value.found


@pytest.mark.parametrize(
    ("taken", "allowed"),
    [([3, 1], True), ([1, 3], True), ([1, 2], True), ([1, 4], False), ([0, 5], False)],  # 2 and 3 tie at the cut
)
def test_a_choice_is_of_the_highest_scores_or_it_is_none(taken, allowed, tmp_path):
    nodes = [
        helper.make_node("TopK", ["scores", "two"], ["best", "cells"]),
        helper.make_node("GatherElements", ["values", "cells"], ["found"], axis=1),
    ]
    shape = ["batch", 6]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("scores", "values")]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("found", "best")]
    two = numpy_helper.from_array(np.array([2]), "two")
    graph = helper.make_graph(nodes, "choice", inputs, outputs, [two])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, tmp_path / "choice.onnx")
    scores = np.array([[0.1, 3, 2, 2 + 1e-6, 1.9, 0]], np.float32)
    values = np.arange(6, dtype=np.float32)[None]
    feeds, choices = [{"scores": scores, "values": values}], [[np.array([taken])]]
    found = answers_of_choices(tmp_path / "choice.onnx", feeds, choices, 1e-4)
    assert (found is not None) == allowed
    if found is not None:
        assert found[0]["found"].tolist() == [taken]
        assert found[0]["best"].tolist() == scores[:, taken].tolist()

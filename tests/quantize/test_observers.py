"""Calibration: the ranges are those of numpy over all values, whatever the order of the batches."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitdeploy.data.folder import split
from vitdeploy.data.pixels import batches
from vitdeploy.errors import DataError
from vitdeploy.graph.io import load_graph
from vitdeploy.graph.linears import find_linears
from vitdeploy.quantize.observers import Observer, observe
from vitdeploy.quantize.statistics import FIELDS, load_statistics, save_statistics
from vitdeploy.spec import PreprocessSpec

PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))


@pytest.fixture(scope="module")
def model(small_export):
    return load_graph(small_export / "model.onnx")


@pytest.fixture(scope="module")
def images(digits):
    """Five batches of four images, and one of two."""
    samples = split(digits, "folders", calibration=22, evaluation=1, seed=0).calibration
    return list(batches(samples, PREPROCESS, 4))


@pytest.fixture(scope="module")
def statistics(model, images):
    return observe(model, images, PREPROCESS)


def test_statistics_are_those_of_numpy_over_all_rows(small_export, images, statistics):
    """The same tensors, fetched from ONNX Runtime without any of our code."""
    names = sorted(statistics)
    proto = onnx.load(str(small_export / "model.onnx"))
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [session.run(names, {"image": batch}) for batch in images]
    convolved = next(linear.input.name for linear in find_linears(ir.from_proto(proto)) if linear.kind == "conv")
    for i, name in enumerate(names):
        axis = 1 if name == convolved else -1
        rows = np.concatenate([np.moveaxis(each[i], axis, -1).reshape(-1, each[i].shape[axis]) for each in outputs])
        rows, found = rows.astype(np.float64), statistics[name]
        np.testing.assert_allclose(found.low, rows.min(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.high, rows.max(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-3, atol=1e-4)
        wanted = np.cov(rows, rowvar=False, bias=True)
        np.testing.assert_allclose(found.covariance, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
        assert found.rows == len(rows)


def test_the_input_of_every_layer_is_observed_and_nothing_else(model, statistics):
    assert set(statistics) == {linear.input.name for linear in find_linears(model)}
    assert len(statistics) == 10


def bounds(found):
    return {name: (each.low.tolist(), each.high.tolist()) for name, each in found.items()}


def test_the_order_of_the_batches_does_not_matter_for_bounds(model, images, statistics):
    assert bounds(observe(model, images[::-1], PREPROCESS)) == bounds(statistics)


def test_more_images_only_widen_the_bounds(model, images, statistics):
    few = observe(model, images[:2], PREPROCESS)
    assert all((statistics[n].low <= few[n].low).all() and (statistics[n].high >= few[n].high).all() for n in few)
    assert bounds(few) != bounds(statistics)


def test_statistics_are_read_back_as_they_were_written(statistics, tmp_path):
    save_statistics(statistics, tmp_path / "statistics.npz")
    again = load_statistics(tmp_path / "statistics.npz")
    assert list(again) == list(statistics)
    for name, found in statistics.items():
        for field in FIELDS:
            wanted = np.asarray(getattr(found, field))
            wanted = wanted.astype(np.float32) if field == "covariance" else wanted  # half the file
            np.testing.assert_array_equal(getattr(again[name], field), wanted)


def test_progress_counts_the_images(model, images):
    counts = []
    observe(model, images, PREPROCESS, counts.append)
    assert counts == [4, 4, 4, 4, 4, 2]


def test_the_graph_is_not_changed(model, images):
    before = ir.to_proto(model)
    observe(model, images[:1], PREPROCESS)
    assert ir.to_proto(model) == before


def test_an_observer_keeps_the_extremes_of_all_batches_and_the_moments_of_some():
    observer = Observer(-1)
    for batch in ([[1.0, 2.0]], [[-3.0, 0.0]], [[2.5, -1.0]]):
        observer.update(np.array(batch, np.float32))
    found = observer.statistics()
    assert (found.low.tolist(), found.high.tolist()) == ([-3.0, -1.0], [2.5, 2.0])
    assert found.rows == 3
    many = np.zeros((5000, 2), np.float32)
    observer.update(many, moments=True)
    observer.update(many + 9, moments=False)
    found = observer.statistics()
    assert (found.high.tolist(), found.rows) == ([9.0, 9.0], 5003)


def root_model():
    """image -> sqrt -> linear: dark pixels, negative once normalised, become NaN."""
    nodes = [
        helper.make_node("Sqrt", ["image"], ["root"], name="root/Sqrt"),
        helper.make_node("Flatten", ["root"], ["flat"], name="flat/Flatten"),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"], name="head/MatMul"),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 2, 2])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    weight = numpy_helper.from_array(np.ones((4, 3), np.float32), "weight")
    graph = helper.make_graph(nodes, "root", [image], [logits], [weight])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))


BRIGHT, DARK = np.full((1, 2, 2, 1), 255, np.uint8), np.zeros((1, 2, 2, 1), np.uint8)
TINY_IMAGE = PreprocessSpec(2, (2, 2), "bicubic", (0.5,), (0.5,))


@pytest.mark.parametrize(
    "order",
    [[DARK], [DARK, BRIGHT], [BRIGHT, DARK], [BRIGHT, DARK, BRIGHT]],
    ids=["only", "first", "last", "between"],
)
def test_a_nan_in_any_batch_is_an_error_that_names_the_tensor(order):
    with pytest.raises(DataError, match="not finite") as caught:
        observe(root_model(), order, TINY_IMAGE)
    assert caught.value.found == "flat"


def test_a_graph_that_takes_floats_is_fed_normalised_pixels():
    found = observe(root_model(), [BRIGHT], TINY_IMAGE)
    assert bounds(found) == {"flat": ([1.0] * 4, [1.0] * 4)}

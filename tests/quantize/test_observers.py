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
from vitdeploy.quantize.observers import MinMaxObserver, Range, observe
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
def ranges(model, images):
    return observe(model, images, PREPROCESS)


def test_ranges_are_those_of_numpy_over_all_values(small_export, images, ranges):
    """The same tensors, fetched from ONNX Runtime without any of our code."""
    proto = onnx.load(str(small_export / "model.onnx"))
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in sorted(ranges))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [session.run(sorted(ranges), {"image": batch}) for batch in images]
    for i, name in enumerate(sorted(ranges)):
        everything = np.concatenate([values[i].ravel() for values in outputs])
        assert ranges[name].low == pytest.approx(float(everything.min()), rel=1e-5, abs=1e-6)
        assert ranges[name].high == pytest.approx(float(everything.max()), rel=1e-5, abs=1e-6)


def test_the_input_of_every_layer_is_observed_and_nothing_else(model, ranges):
    assert set(ranges) == {linear.input.name for linear in find_linears(model)}
    assert len(ranges) == 10


def test_the_order_of_the_batches_does_not_matter(model, images, ranges):
    assert observe(model, images[::-1], PREPROCESS) == ranges


def test_more_images_only_widen_the_ranges(model, images, ranges):
    few = observe(model, images[:2], PREPROCESS)
    assert all(ranges[name].low <= few[name].low and ranges[name].high >= few[name].high for name in few)
    assert few != ranges


def test_progress_counts_the_images(model, images):
    counts = []
    observe(model, images, PREPROCESS, counts.append)
    assert counts == [4, 4, 4, 4, 4, 2]


def test_the_graph_is_not_changed(model, images):
    before = ir.to_proto(model)
    observe(model, images[:1], PREPROCESS)
    assert ir.to_proto(model) == before


def test_an_observer_keeps_the_extremes_of_all_batches():
    observer = MinMaxObserver()
    for batch in ([1.0, 2.0], [-3.0, 0.0], [2.5, -1.0]):
        observer.update(np.array(batch, np.float32))
    assert observer.range() == Range(-3.0, 2.5)


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
    assert observe(root_model(), [BRIGHT], TINY_IMAGE) == {"flat": Range(1.0, 1.0)}

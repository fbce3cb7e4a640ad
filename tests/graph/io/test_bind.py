"""An input becomes a constant for every sample of the batch."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from tests.graph.builder import Builder, census, checked, run, values
from vitdeploy.errors import GraphError
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.inputs import bind_input


def scaled_boxes(batch="n", form="detector"):
    """Boxes (x [batch, 5, 4]) times the size of the image (size [batch, 2]: width, height), as detectors end."""
    b = Builder(17)
    x, size = b.input("x", ["batch", 5, 4]), b.input("size", [batch, 2], TensorProto.INT64)
    if form == "sum":  # a result for the whole batch, where broadcasting would be wrong
        return b.model(x, b.add("ReduceSum", size, np.array([0], np.int64)), types=[1, TensorProto.INT64])
    scale = b.add("Unsqueeze", b.add("Tile", size, np.array([1, 2], np.int64)), np.array([1], np.int64))
    return b.model(b.add("Mul", b.add("Sigmoid", x), b.add("Cast", scale, to=TensorProto.FLOAT)))


@pytest.mark.parametrize("batch", ["n", 1])
def test_boxes_come_out_relative_once_the_size_is_one(batch):
    proto = scaled_boxes(batch)
    model = ir.from_proto(proto)
    bind_input(model, "size", np.array([1, 1]))
    bound = checked(model)
    assert [value.name for value in bound.graph.input] == ["x"]
    normalise(model)
    assert census(checked(model)) == {"Sigmoid": 1}
    for count in (1, 3) if batch == "n" else (1,):
        x = values(count, 5, 4)
        expected = run(proto, x=x, size=np.ones((count, 2), np.int64))
        for result in (bound, checked(model)):
            np.testing.assert_array_equal(run(result, x=x), expected)


def test_any_value_can_be_bound():
    proto = scaled_boxes()
    model = ir.from_proto(proto)
    bind_input(model, "size", np.array([640, 480]))
    normalise(model)
    assert census(checked(model)) == {"Sigmoid": 1, "Mul": 1}
    x = values(2, 5, 4)
    np.testing.assert_array_equal(run(checked(model), x=x), run(proto, x=x, size=np.array([[640, 480]] * 2)))


@pytest.mark.parametrize("batch", ["n", 3])
def test_a_sum_over_the_batch_still_counts_every_sample(batch):
    proto = scaled_boxes(batch, form="sum")
    model = ir.from_proto(proto)
    bind_input(model, "size", np.array([4, 5]))
    normalise(model)
    assert run(checked(model), x=values(3, 5, 4))[1].tolist() == [[12, 15]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("other", [1, 1], "no input 'other'"),
        ("size", [1, 1, 1], "does not fit the input 'size'"),
        ("size", [[1, 1], [1, 1]], "does not fit the input 'size'"),
        ("size", [0.5, 1], "does not fit the input 'size'"),
    ],
)
def test_what_cannot_be_bound_is_named(name, value, message):
    with pytest.raises(GraphError, match=message) as caught:
        bind_input(ir.from_proto(scaled_boxes()), name, np.array(value))
    assert caught.value.found


def test_the_only_input_is_not_bound():
    b = Builder(17)
    model = ir.from_proto(b.model(b.add("Relu", b.input("x", ["batch", 3]))))
    with pytest.raises(GraphError, match="the only input"):
        bind_input(model, "x", np.ones(3))

"""Scales and zero points: the round trip through ONNX Runtime's operators loses at most half a step."""

import numpy as np
import onnxruntime
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper

from vitdeploy.quantization.ranges import (
    TINY,
    Range,
    Statistics,
    activation_scale,
    largest_weight,
    quantize_weight,
    range_of,
    step_of,
    symmetric_step,
)

values = st.floats(-(2.0**20), 2.0**20, width=32)
# Half a step, and what float32 division adds to it at 255 steps from zero.
HALF = 0.5 * (1 + 255 * 2.0**-22)


@pytest.fixture(scope="module")
def round_trip():
    """x -> DequantizeLinear(QuantizeLinear(x)) on ONNX Runtime, for any scale and zero point."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("scale", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("zero_point", TensorProto.UINT8, []),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph(nodes, "round_trip", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(x, parameters):
        feeds = {"x": x, "scale": np.array(parameters[0]), "zero_point": np.array(parameters[1])}
        return session.run(None, feeds)[0]

    return run


@given(x=hnp.arrays(np.float32, st.integers(1, 40), elements=values))
@settings(max_examples=200, deadline=None)
def test_inside_the_observed_range_the_error_is_at_most_half_a_step(round_trip, x):
    parameters = activation_scale(Range(float(x.min()), float(x.max())))
    error = np.abs(round_trip(x, parameters).astype(np.float64) - x)
    assert error.max() <= HALF * float(parameters[0])


@given(low=values, high=values)
@settings(max_examples=200, deadline=None)
def test_zero_is_represented_exactly_and_lies_within_the_range(round_trip, low, high):
    parameters = activation_scale(Range(min(low, high), max(low, high)))
    assert round_trip(np.zeros(1, np.float32), parameters)[0] == 0.0
    assert (parameters[0].dtype, parameters[1].dtype) == (np.float32, np.uint8)
    assert parameters[0] >= TINY


@given(low=values, high=values, outside=st.floats(1.5, 100, width=32))
@settings(max_examples=100, deadline=None)
def test_outside_the_observed_range_values_saturate_at_its_ends(round_trip, low, high, outside):
    low, high = min(low, high, 0.0), max(low, high, 0.0)
    assume(high - low >= 255 * TINY)  # a smaller range has a larger scale than its own: float32 has none below
    parameters = activation_scale(Range(low, high))
    ends = round_trip(np.array([low * outside, high * outside], np.float32), parameters)
    assert np.abs(ends - np.array([low, high])).max() <= HALF * float(parameters[0])


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"),
    [
        (0.0, 255.0, 1.0, 0),
        (-255.0, 0.0, 1.0, 255),
        (-51.0, 204.0, 1.0, 51),
        (10.0, 25.5, 0.1, 0),
        (-25.5, -10.0, 0.1, 255),
        (0.0, 0.0, TINY, 0),
    ],
)
def test_scales_and_zero_points_of_known_ranges(low, high, scale, zero_point):
    parameters = activation_scale(Range(low, high))
    assert float(parameters[0]) == pytest.approx(scale, rel=1e-7)
    assert parameters[1] == zero_point


weights = hnp.array_shapes(min_dims=2, max_dims=4, max_side=6).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(-(2.0**10), 2.0**10, width=32))
)


@given(weight=weights, first=st.booleans())
@settings(max_examples=200, deadline=None)
def test_each_channel_of_a_weight_loses_at_most_half_of_its_own_step(weight, first):
    axis = 0 if first else weight.ndim - 1
    quantized, scales = quantize_weight(weight, axis)
    assert (quantized.dtype, scales.dtype) == (np.int8, np.float32)
    assert quantized.shape == weight.shape
    assert scales.shape == (weight.shape[axis],)
    assert np.abs(quantized.astype(int)).max() <= 127
    steps = scales.reshape([-1 if i == axis else 1 for i in range(weight.ndim)]).astype(np.float64)
    assert (np.abs(quantized * steps - weight) <= HALF * steps).all()


@given(weight=weights)
@settings(max_examples=50, deadline=None)
def test_weights_are_symmetric(weight):
    positive, scales = quantize_weight(weight, 0)
    negative, other_scales = quantize_weight(-weight, 0)
    np.testing.assert_array_equal(positive, -negative)
    np.testing.assert_array_equal(scales, other_scales)


def test_a_channel_of_zeros_stays_zero_and_has_a_usable_scale():
    weight = np.array([[0.0, 1.0], [0.0, -2.0]], np.float32)
    quantized, scales = quantize_weight(weight, 1)
    assert quantized[:, 0].tolist() == [0, 0]
    assert quantized[:, 1].tolist() == [64, -127]
    assert scales[0] > 0
    assert np.isfinite(1 / scales).all()


def test_one_large_channel_does_not_coarsen_the_others():
    weight = np.array([[1000.0, 0.001]], np.float32)
    quantized, scales = quantize_weight(weight, 1)
    np.testing.assert_allclose(quantized * scales, weight, rtol=1e-6)


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (7, 63)])
def test_the_largest_weight_of_each_channel_takes_the_whole_range_of_its_bits(bits, largest):
    """Against int8 and float64 arithmetic on single values."""
    weight = np.random.default_rng(0).normal(0, 2, (3, 4, 5)).astype(np.float32)
    assert largest_weight(bits) == largest
    for axis in range(3):
        quantized, scales = quantize_weight(weight, axis, bits)
        for channel in range(weight.shape[axis]):
            values = np.take(weight, channel, axis).astype(np.float64)
            step = np.abs(values).max() / largest
            assert scales[channel] == pytest.approx(step, rel=1e-6)
            np.testing.assert_array_equal(np.take(quantized, channel, axis), np.round(values / step))
            assert np.abs(np.take(quantized, channel, axis)).max() == largest


def test_a_symmetric_step_holds_the_end_that_is_further_from_zero():
    assert symmetric_step(Range(-254.0, 127.0)) == 2
    assert symmetric_step(Range(-1.0, 12.7)) == pytest.approx(0.1)
    assert symmetric_step(Range(1.0, 12.7)) == pytest.approx(0.1)
    assert symmetric_step(Range(-12.7, -1.0)) == pytest.approx(0.1)
    assert symmetric_step(Range(0.0, 0.0)) == np.float32(TINY)
    assert symmetric_step(Range(0.0, 1.0)).dtype == np.float32


@pytest.mark.parametrize(("low", "high", "width"), [(-3.0, 7.2, 10.2), (2.0, 5.1, 5.1), (-5.1, -2.0, 5.1), (0, 0, 0)])
def test_a_step_is_a_255th_of_the_range_that_holds_zero(low, high, width):
    assert step_of(Range(low, high)) == pytest.approx(width / 255)
    assert float(activation_scale(Range(low, high))[0]) == pytest.approx(max(width / 255, TINY), rel=1e-6)


def test_a_range_is_from_the_smallest_to_the_largest_channel_and_can_be_clipped():
    found = Statistics(np.array([-1.0, -5.0, 0.5]), np.array([2.0, 1.0, 9.0]), np.zeros(3), np.ones(3), 7)
    assert range_of(found) == Range(-5.0, 9.0)
    assert range_of(found).times(0.5) == Range(-2.5, 4.5)


def test_a_zero_point_stays_within_uint8():
    """Also of a range so narrow that float32 has no scale as small as its own."""
    for low, high in ((-TINY, 0.0), (-300 * TINY, 0.0), (-1e38, 1e38), (0.0, TINY)):
        parameters = activation_scale(Range(low, high))
        assert 0 <= int(parameters[1]) <= 255
        assert np.isfinite(parameters[0]) and parameters[0] >= TINY

"""The normalisation of pixels goes into the patch embedding where it pads nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from tests.graph.small_graphs import Builder, assert_rewritten, weights
from vitdeploy.graph.passes.folds import fold_image_normalisation

CHANNELS, SIDE = 3, 8


def numbers(*shape, seed=0):
    """Positive multiples of 1/64."""
    return (np.random.default_rng(seed).integers(1, 32, shape) / 64).astype(np.float32)


def patches(b, x, *, bias=True, **attributes):
    weight = b.constant(b.random(5, CHANNELS, 4, 4), "proj.weight")
    inputs = [x, weight, *([b.constant(b.random(5), "proj.bias")] if bias else [])]
    return b.op("Conv", *inputs, name="proj/Conv", **{"strides": [4, 4], **attributes})


def image_model(steps, *, pixels=True, seed=0, outputs=(), **conv):
    """uint8 NHWC -> Transpose -> Cast (or float NCHW) -> steps: (operator, constant) -> Conv."""
    b = Builder(seed)
    x = "image"
    if pixels:
        x = b.op("Cast", b.op("Transpose", x, perm=[0, 3, 1, 2]), to=TensorProto.FLOAT)
    for operator, constant in steps:
        x = b.op(operator, x, b.constant(constant))
    shape = ([2, SIDE, SIDE, CHANNELS], TensorProto.UINT8) if pixels else [2, CHANNELS, SIDE, SIDE]
    return b.model({"image": shape}, b.op("Relu", patches(b, x, **conv)), *outputs)


PER_CHANNEL = st.sampled_from([(1, CHANNELS, 1, 1), (CHANNELS, 1, 1), (1,), ()])


@given(
    steps=st.lists(st.tuples(st.sampled_from(["Mul", "Add", "Sub"]), PER_CHANNEL), min_size=1, max_size=3),
    pixels=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_any_chain_of_factors_and_shifts_a_channel_is_folded(steps, pixels, bias, seed):
    steps = [(operator, numbers(*shape, seed=seed + i)) for i, (operator, shape) in enumerate(steps)]
    model = image_model(steps, pixels=pixels, bias=bias, seed=seed)
    # Three factors of multiples of 1/64 and 8 bits of pixel are more than float32 holds: the weights are rounded.
    assert_rewritten(model, fold_image_normalisation, 1, tolerance=1e-6)
    left = ["Transpose", "Cast", "Conv", "Relu"] if pixels else ["Conv", "Relu"]
    assert [node.op_type for node in model.graph] == left


def test_one_factor_and_one_shift_of_short_numbers_are_exact():
    steps = [("Mul", numbers(1, CHANNELS, 1, 1)), ("Add", -numbers(1, CHANNELS, 1, 1, seed=1))]
    assert_rewritten(image_model(steps), fold_image_normalisation, 1)


def test_mean_and_deviation_by_subtraction_and_division():
    steps = [
        ("Div", np.float32(256)),
        ("Sub", numbers(CHANNELS, 1, 1)),
        ("Div", np.float32([[[0.5]], [[0.25]], [[2]]])),
    ]
    assert_rewritten(image_model(steps), fold_image_normalisation, 1)


def test_a_chain_on_both_sides_of_the_transpose_is_folded():
    b = Builder()
    x = b.op("Cast", "image", to=TensorProto.FLOAT)
    x = b.op("Add", b.constant(numbers(CHANNELS)), b.op("Mul", b.constant(numbers(CHANNELS, seed=1)), x))
    x = b.op("Mul", b.op("Transpose", x, perm=[0, 3, 1, 2]), b.constant(np.float32(0.5)))
    model = b.model({"image": ([2, SIDE, SIDE, CHANNELS], TensorProto.UINT8)}, patches(b, x))
    assert_rewritten(model, fold_image_normalisation, 1)
    assert [node.op_type for node in model.graph] == ["Cast", "Transpose", "Conv"]


def test_a_convolution_without_bias_gets_one_for_a_shift_only():
    for operator, expected in (("Mul", False), ("Add", True)):
        model = image_model([(operator, numbers(1, CHANNELS, 1, 1))], bias=False)
        assert_rewritten(model, fold_image_normalisation, 1)
        assert ("proj.bias" in weights(model)) == expected


@pytest.mark.parametrize("conv", [{"pads": [1, 1, 1, 1]}, {"pads": [0, 0, 0, 1]}, {"auto_pad": "SAME_UPPER"}], ids=str)
def test_a_stem_that_pads_is_left_alone(conv):
    conv = conv if "pads" in conv else {**conv, "strides": [3, 3]}
    assert_rewritten(image_model([("Add", numbers(1, CHANNELS, 1, 1))], **conv), fold_image_normalisation, 0)


@pytest.mark.parametrize(("shape", "count"), [((1,), 1), ((CHANNELS, 1, 1), 0)], ids=["one number", "per channel"])
def test_a_convolution_of_groups_takes_one_number_for_all_channels_only(shape, count):
    b = Builder()
    x = b.op("Add", "image", b.constant(numbers(*shape)))
    weight = b.constant(b.random(6, 1, 4, 4))
    model = b.model({"image": [2, CHANNELS, SIDE, SIDE]}, b.op("Conv", x, weight, group=CHANNELS))
    assert_rewritten(model, fold_image_normalisation, count)


@pytest.mark.parametrize("shape", [(1, 1, 1, SIDE), (1, CHANNELS, SIDE, SIDE), (2, 1, 1, 1), (SIDE,)], ids=str)
def test_constants_that_are_not_per_channel_are_left_alone(shape):
    assert_rewritten(image_model([("Add", numbers(*shape))]), fold_image_normalisation, 0)


def test_a_constant_along_the_width_that_is_as_long_as_the_channels_is_left_alone():
    b = Builder()
    x = b.op("Add", "image", b.constant(numbers(CHANNELS)))
    weight = b.constant(b.random(5, CHANNELS, 2, 2))
    assert_rewritten(
        b.model({"image": [2, CHANNELS, SIDE, CHANNELS]}, b.op("Conv", x, weight)), fold_image_normalisation, 0
    )


def test_a_normalised_image_that_is_read_elsewhere_is_left_alone():
    b = Builder()
    x = b.op("Mul", "image", b.constant(numbers(CHANNELS, 1, 1)), name="normalised")
    model = b.model({"image": [2, CHANNELS, SIDE, SIDE]}, patches(b, x), b.op("ReduceMean", x))
    assert_rewritten(model, fold_image_normalisation, 0)
    steps = [("Mul", numbers(CHANNELS, 1, 1))]
    assert_rewritten(image_model(steps, outputs=["n2/Mul"]), fold_image_normalisation, 0)


def test_a_chain_that_does_not_reach_the_image_is_left_alone():
    model = image_model([("Mul", numbers(1, CHANNELS, 1, 1))])
    b = Builder()
    x = b.op("Mul", b.op("Relu", "image"), b.constant(numbers(CHANNELS, 1, 1)))
    later = b.model({"image": [2, CHANNELS, SIDE, SIDE]}, patches(b, x))
    assert (fold_image_normalisation(model), fold_image_normalisation(later)) == (1, 0)


def test_a_chain_of_which_a_part_is_read_elsewhere_is_left_alone():
    b = Builder()
    x = b.op("Mul", "image", b.constant(numbers(CHANNELS, 1, 1)))
    y = b.op("Add", x, b.constant(numbers(CHANNELS, 1, 1, seed=1)))
    model = b.model({"image": [2, CHANNELS, SIDE, SIDE]}, patches(b, y), b.op("ReduceMean", x))
    assert_rewritten(model, fold_image_normalisation, 0)


def test_a_division_of_a_constant_by_pixels_is_left_alone():
    b = Builder()
    x = b.op("Div", b.constant(np.float32(1)), "image")
    model = b.model({"image": [2, CHANNELS, SIDE, SIDE]}, patches(b, x))
    assert_rewritten(model, fold_image_normalisation, 0)

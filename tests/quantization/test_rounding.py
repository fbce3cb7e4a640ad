"""GPTQ against the published algorithm in plain numpy, with as many inputs as several of its blocks have."""

import numpy as np
import pytest

from tests.graph.small_graphs import Builder
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.quantization import rounding
from vitdeploy.quantization.ranges import Statistics, quantize_weight
from vitdeploy.quantization.rounding import round_linear, round_weight

# Inputs of a layer: two whole blocks of 128 and a part of one.
INPUTS = 272


def gathered(x):
    """Statistics of the rows of `x`, by numpy."""
    x = np.asarray(x, np.float64)
    return Statistics(x.min(axis=0), x.max(axis=0), x.mean(axis=0), np.cov(x, rowvar=False, bias=True), len(x))


def correlated(seed, rows=3100, inputs=INPUTS):
    """Rows whose channels go together, some of much more power than others, with a mean."""
    generator = np.random.default_rng(seed)
    sources = generator.standard_normal((rows, inputs // 3)) @ generator.standard_normal((inputs // 3, inputs))
    power = np.exp(generator.normal(0, 0.7, inputs))
    return (0.3 * sources + generator.standard_normal((rows, inputs)) + 1) * power


def gptq(weight, hessian, scales, largest=127, share=0.01):
    """arXiv 2210.17323 without its blocks and its Cholesky form: after each input channel, equation 2 moves all that
    are left, and equation 3 takes the channel out of the inverse Hessian. Channels in the order of their power (its
    "act-order"); `share` of the mean power is added to each (its section 4).
    """
    weight, left = weight.astype(np.float64).copy(), np.arange(len(weight))
    power = np.diag(hessian)
    inverse = np.linalg.inv(hessian + share * power.mean() * np.eye(len(power)))
    rounded = np.zeros(weight.shape)
    for channel in sorted(range(len(weight)), key=lambda i: -power[i]):
        rounded[channel] = np.clip(np.round(weight[channel] / scales), -largest, largest)
        place = int(np.flatnonzero(left == channel)[0])
        others = np.delete(np.arange(len(left)), place)
        column, pivot = inverse[others, place], inverse[place, place]
        error = weight[channel] - rounded[channel] * scales.astype(np.float64)
        left = left[others]
        weight[left] -= np.outer(column / pivot, error)
        inverse = inverse[np.ix_(others, others)] - np.outer(column, column) / pivot
    return rounded


def whole_scales(weight, largest=127):
    """Of each output channel, the scale that reaches its largest weight."""
    return np.abs(weight).max(axis=0) / largest


def weights_of(seed, inputs=INPUTS, outputs=8):
    """Some output channels have one large weight, and one a very large one."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((inputs, outputs))
    weight[generator.integers(0, inputs, outputs), np.arange(outputs)] *= generator.uniform(1, 3, outputs)
    weight[0, -1] = 100
    return weight.astype(np.float32)


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (7, 63)])
def test_weights_are_rounded_as_the_published_algorithm_rounds_them(bits, largest):
    x, weight, noise = 0.1 * correlated(0), weights_of(1), 1e-6
    found = gathered(x)
    rounded, scales = round_weight(weight, found, noise, bits=bits)
    assert (rounded.dtype, scales.dtype) == (np.int8, np.float32)
    hessian = found.covariance + noise * np.eye(INPUTS)
    np.testing.assert_allclose(scales, whole_scales(weight, largest), rtol=1e-6)
    np.testing.assert_array_equal(rounded, gptq(weight, hessian, scales, largest))


def test_weights_of_several_blocks_give_better_outputs_than_the_nearest_ones():
    """What one block does not make up for is left to the next ones: with another sign it is 1.5 times as much."""
    x, weight = correlated(2, inputs=384), weights_of(3, 384)
    centred = x - x.mean(axis=0)

    def error(rounded, scales):
        return np.square(centred @ (rounded * scales - weight)).mean()

    assert error(*round_weight(weight, gathered(x), 0.0)) < 0.5 * error(*quantize_weight(weight, 1))


def test_eight_rows_per_channel_say_enough_of_a_covariance():
    x, weight = correlated(4, inputs=24), weights_of(5, 24)
    enough = gathered(x[: 8 * 24])
    assert (round_weight(weight, enough, 0.1)[0] != quantize_weight(weight, 1)[0]).any()
    fewer = gathered(x[: 8 * 24 - 1])
    diagonal = enough.without_covariance()
    for found, bits in ((fewer, 8), (diagonal, 8), (fewer, 7)):
        for ours, nearest in zip(
            round_weight(weight, found, 0.1, bits=bits), quantize_weight(weight, 1, bits), strict=True
        ):
            np.testing.assert_array_equal(ours, nearest)


def test_a_variance_that_float32_sums_have_made_negative_counts_as_none():
    """That of a channel which is always the same."""
    x, weight = correlated(6, inputs=24), weights_of(7, 24)
    x[:, 3] = 5.0
    found = gathered(x)
    power = found.covariance.diagonal().copy()
    found.covariance[3, 3] = -0.005 * power.mean()
    rounded, scales = round_weight(weight, found, 0.0)
    np.testing.assert_array_equal(rounded[3], np.rint(weight[3] / scales).clip(-127, 127))


def test_where_no_input_varies_weights_are_the_nearest():
    weight, nothing = weights_of(7, 24), np.zeros((24, 24))
    found = Statistics(np.ones(24), np.ones(24), np.ones(24), nothing, 999)
    for ours, nearest in zip(round_weight(weight, found, 0.0), quantize_weight(weight, 1), strict=True):
        np.testing.assert_array_equal(ours, nearest)
    rounded, scales = round_weight(np.zeros((24, 2), np.float32), found, 0.0)
    assert not rounded.any() and (scales > 0).all()


def one_linear(weight, bias=None):
    b = Builder()
    b.constant(weight, "w")
    y = b.op("MatMul", "x", "w", name="fc/MatMul")
    if bias is not None:
        y = b.op("Add", y, b.constant(bias, "b"), name="fc/Add")
    [linear] = find_linears(b.model({"x": ["batch", 5, len(weight)]}, y))
    return linear


@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_is_rounded_for_uint8_inputs_and_keeps_the_mean_of_its_outputs(biased):
    """The rounding errors of x, uniform within a step of a 255th of its range, are a part of the Hessian."""
    x, weight = correlated(8, inputs=48), weights_of(9, 48, 32)
    x[:, :4] *= 60  # a step as large as other channels
    found, bias = gathered(x), np.linspace(-1, 1, 32).astype(np.float32) if biased else None
    (rounded, scales), moved = round_linear(one_linear(weight, bias), found)
    step = (x.max() - x.min()) / 255
    hessian = found.covariance + step**2 / 12 * np.eye(48)
    np.testing.assert_allclose(scales, whole_scales(weight), rtol=1e-6)
    np.testing.assert_array_equal(rounded, gptq(weight, hessian, scales))
    expected = (x @ weight).mean(axis=0) + (bias if biased else 0)
    np.testing.assert_allclose(found.mean @ (rounded * scales) + moved, expected, atol=1e-5)


def test_each_group_and_position_of_a_convolution_is_rounded_by_its_own_channels():
    generator = np.random.default_rng(10)
    weight = generator.standard_normal((6, 4, 2, 2)).astype(np.float32)
    b = Builder()
    inputs = ["x", b.constant(weight, "w")]
    y = b.op("Conv", *inputs, name="conv/Conv", group=2, kernel_shape=[2, 2])
    [linear] = find_linears(b.model({"x": ["batch", 8, 5, 5]}, y))
    x = correlated(11, inputs=8)
    found = gathered(x)
    (rounded, scales), bias = round_linear(linear, found, bits=7)
    assert (rounded.shape, rounded.dtype, scales.dtype) == (weight.shape, np.int8, np.float32)
    np.testing.assert_allclose(scales, np.abs(weight).max(axis=(1, 2, 3)) / 63, rtol=1e-6)
    noise = ((x.max() - min(x.min(), 0)) / 255) ** 2 / 12
    for group, channels in enumerate((slice(0, 4), slice(4, 8))):
        hessian = found.covariance[channels, channels] + noise * np.eye(4)
        out = slice(3 * group, 3 * group + 3)
        for row, column in np.ndindex(2, 2):
            expected = gptq(weight[out, :, row, column].T, hessian, scales[out], 63)
            np.testing.assert_array_equal(rounded[out, :, row, column].T, expected)
    lost = (weight - rounded * scales[:, None, None, None]).sum(axis=(2, 3)).reshape(2, 3, 4)
    np.testing.assert_allclose(bias, np.einsum("goi,gi->go", lost, found.mean.reshape(2, 4)).ravel(), atol=1e-5)


def test_what_was_rounded_lately_is_not_rounded_again(monkeypatch):
    """Unless anything that it depends on differs, or more was rounded since than is kept."""
    b = Builder()
    first, second = (find_linears(b.model({"x": ["batch", 16]}, b.linear("x", 16, 8, name)))[0] for name in "ab")
    found, calls, new = gathered(correlated(0, 200, 16)), [], rounding.round_new
    monkeypatch.setattr(rounding, "_RECENT", rounding._Recent())
    monkeypatch.setattr(rounding, "round_new", lambda *given: calls.append(given) or new(*given))
    for linear, step in ((first, None), (first, None), (first, 0.0), (second, None), (first, None)):
        (codes, scales), bias = round_linear(linear, found, 8, step)
        (wanted_codes, wanted_scales), wanted_bias = new(linear, found, 8, step)
        np.testing.assert_array_equal(codes, wanted_codes)
        np.testing.assert_array_equal(scales, wanted_scales)
        np.testing.assert_array_equal(bias, wanted_bias)
    assert len(calls) == 2 + (not np.array_equal(first.weight, second.weight))
    monkeypatch.setattr(rounding._Recent, "MOST_BYTES", codes.nbytes)
    for step in (0.5, None, 0.5):
        before = len(calls)
        round_linear(first, found, 8, step)
        assert len(calls) == before + 1
    round_linear(first, found, 8, 0.5)
    assert len(calls) == before + 1

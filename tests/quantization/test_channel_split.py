"""Which hidden channels are scaled and copied: against searches in plain numpy, and what copies do in uint8."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import Builder, difference, random_feeds, run_in_double
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.quantization.folds import FoldRequest, GainThreshold, _copies, best_split, smooth_hidden
from vitdeploy.quantization.ranges import Statistics, activation_scale, range_of

NEVER = float("inf")
# Four channels may come in addition; of a multiple of 16, only from 256 on.
HIDDEN = 72


def hidden_model(activation="Gelu", *, bias=True, width=HIDDEN):
    b = Builder(0)
    hidden = b.op(activation, b.linear("x", 8, width, "fc1", bias=bias), name="act")
    return b.model({"x": ["batch", 5, 8]}, b.linear(hidden, width, 6, "fc2"))


def second_of(model):
    return next(linear for linear in find_linears(model) if linear.name == "fc2")


def statistics(seed, width=HIDDEN, outliers=((5, 9.0), (11, 4.0)), spread=0.2, lowest=-0.17):
    """Of a GELU: from a little below zero to some size that differs, in two channels by far."""
    generator = np.random.default_rng(seed)
    high = np.exp(generator.normal(0, spread, width))
    for channel, times in outliers:
        high[channel] *= times
    return Statistics(np.full(width, lowest), high, high / 9, generator.uniform(0.02, 0.06, width) * high**2, 999)


def error_of(found, weight, scale, copies, largest):
    """Noise of uint8 inputs, whose range copies make smaller, through the weights; and of INT8 weights."""
    scaled = scale[:, None] * weight
    step = (max((found.high / scale / copies).max(), 0) - min((found.low / scale / copies).min(), 0)) / 255
    columns = np.abs(scaled).max(axis=0) / largest
    power = (np.diag(np.diag(found.variance)) / scale**2).sum()
    return (step**2 * (scaled**2).sum() + power * (columns**2).sum()) / 12


def exponents(found, weight, largest):
    """(error, exponent, scale) of the best of the exponents 0 to 0.8, as SmoothQuant's equation 4 has them."""
    tried = []
    reach, strongest = np.maximum(-found.low, found.high), np.abs(weight).max(axis=1)
    for alpha in [tenth / 10 for tenth in range(9)]:
        scale = reach**alpha / strongest ** (1 - alpha)
        scale /= np.prod(scale ** (1 / len(scale)))
        tried.append((error_of(found, weight, scale, 1, largest), alpha, scale))
    return min(tried, key=lambda each: each[0])


@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize("seed", range(5))
def test_the_scale_is_the_one_of_the_least_expected_error(seed, bits):
    second, found = second_of(hidden_model()), statistics(seed, spread=(0.1, 0.5, 1.0, 2.0, 3.0)[seed])
    weight, largest = second.weight.astype(float), 2 ** (bits - 1) - 1
    split = best_split(found, second, GainThreshold(1.0, NEVER), bits)
    error, alpha, scale = exponents(found, weight, largest)
    assert (split.alpha, split.copies) == (alpha, {})
    np.testing.assert_allclose(split.scale, scale)
    assert split.gain == pytest.approx(error_of(found, weight, np.ones(HIDDEN), 1, largest) / error)
    np.testing.assert_allclose(split.factor, 1 / scale)
    assert not split.offsets.any()
    np.testing.assert_allclose(split.weight(weight), scale[:, None] * weight)
    np.testing.assert_allclose(split.found.high, found.high / scale)


@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize("seed", range(3))
def test_the_gain_of_copies_is_that_of_the_smaller_range(seed, bits):
    second, found = second_of(hidden_model()), statistics(seed)
    weight, largest, ones = second.weight.astype(float), 2 ** (bits - 1) - 1, np.ones(HIDDEN)
    split = best_split(found, second, GainThreshold(NEVER, 1.0), bits)
    copies = np.bincount(split.source)
    assert split.copies == {j: m for j, m in enumerate(copies) if m > 1}
    assert max(split.copies, key=split.copies.get) == 5
    before = error_of(found, weight, ones, 1, largest)
    assert split.gain == pytest.approx(before / error_of(found, weight, split.scale, copies, largest))
    # Copies with the best scale are the other candidate, whichever exponent that has.
    _, alpha, scale = exponents(found, weight, largest)
    assert (split.alpha is None and (split.scale == 1).all()) or split.alpha == alpha
    if split.alpha is not None:
        np.testing.assert_allclose(split.scale, scale)
    assert split.gain >= before / error_of(found, weight, ones, _copies(found.high), largest) * (1 - 1e-6)
    assert split.gain >= before / error_of(found, weight, scale, _copies(found.high / scale), largest) * (1 - 1e-6)


def test_an_operator_is_paid_for_by_the_gain_that_the_target_asks_for():
    """Of nothing, a scale, and copies, the one with the most gain over what it must have, if that is above one."""
    second, found = second_of(hidden_model()), statistics(0)
    scaled = best_split(found, second, GainThreshold(1.0, NEVER))
    copied = best_split(found, second, GainThreshold(NEVER, 1.0))
    assert 1 < scaled.gain < copied.gain
    for scale, copies in ((0.99, NEVER), (1.01, NEVER), (NEVER, 0.99), (NEVER, 1.01)):
        split = best_split(found, second, GainThreshold(scale * scaled.gain, copies * copied.gain))
        assert (split is None) == (1.01 in (scale, copies))
    for share, expected in ((0.99, scaled), (1.01, copied)):
        split = best_split(found, second, GainThreshold(share * scaled.gain / copied.gain, 1.0))
        assert (split.gain, split.copies) == (expected.gain, expected.copies)


@pytest.mark.parametrize(("width", "count"), [(72, 4), (256, 17)])
def test_codes_of_copies_add_up_to_the_code_of_the_whole_channel(width, count):
    """Of what the second layer reads, quantized to uint8 by its own range: no copy is clipped, and the sum of a
    channel's copies is off by half a common step, as if one copy held it all."""
    second, found = second_of(hidden_model(width=width)), statistics(0, width, ((5, 40.0),))
    split = best_split(found, second, GainThreshold(NEVER, 1.0))
    assert split.copies == {5: count}
    assert (np.diff(split.source) >= 0).all()
    whole, step = range_of(split.found), activation_scale(range_of(split.found))
    scale, mine = split.scale[5], split.source == 5
    x = np.linspace(found.low[5], found.high[5], 4001)[:, None]
    values = x * split.factor[mine] + split.offsets[mine]
    assert whole.low - 1e-9 <= values.min() and values.max() <= whole.high + 1e-9
    codes = np.clip(np.rint(values / step[0]) + step[1], 0, 255) - float(step[1])
    sums, half = codes.sum(axis=1) * float(step[0]) * scale, 0.5 * float(step[0]) * scale
    assert np.abs(sums - x[:, 0]).max() <= 1.25 * half  # the offsets are of the range without them
    alike = count * np.rint(x[:, 0] / scale / count / step[0]) * step[0] * scale
    assert np.abs(alike - x[:, 0]).max() > 0.9 * count * half
    np.testing.assert_allclose(split.offsets[mine].sum(), 0, atol=1e-12)
    np.testing.assert_allclose(split.found.low[mine], values[0])
    np.testing.assert_allclose(split.found.high[mine], values[-1])


def test_a_channel_that_reaches_far_below_zero_is_copied_too():
    found = statistics(3, outliers=())
    found.low[7] = -40
    split = best_split(found, second_of(hidden_model()), GainThreshold(NEVER, 1.0))
    assert split.copies[7] > 2


@given(
    width=st.sampled_from([5, 16, 24, 32, 48, 100, 256]),
    seed=st.integers(0, 999),
    times=st.sampled_from([1.0, 1.5, 4.0, 12.0, 100.0]),
)
@settings(max_examples=40, deadline=None)
def test_copies_make_the_range_as_small_as_a_sixteenth_more_channels_can(width, seed, times):
    """Within the tenth by which the search goes down; and the number stays a multiple of 16 where it was."""
    generator = np.random.default_rng(seed)
    reach = generator.uniform(0.1, 1, width)
    reach[seed % width] *= times
    reach[(seed + 1) % width] = 0
    copies = _copies(reach)
    assert copies.dtype == _copies(np.ones(16)).dtype == np.int64
    most = width + max(width // 16, 1)
    if width % 16 == 0:
        most -= most % 16
        assert copies.sum() % 16 == 0
    assert copies.min() == 1 and copies.sum() <= most

    def needed(ceiling):
        return sum(max(1, int(np.ceil(each / ceiling))) for each in reach)

    low, high = 1e-3 * reach.max(), float(reach.max())
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= most else (middle, high)
    assert (reach / copies).max() <= 1.1 * high * (1 + 1e-9)


def test_channels_that_are_all_zero_or_alike_are_not_copied():
    assert _copies(np.zeros(16)).tolist() == [1] * 16
    assert _copies(np.ones(32)).tolist() == [1] * 32


@pytest.mark.parametrize("activation", ["Elu", "Gelu", "HardSwish", "Mish", "Relu", "Sigmoid", "Softplus", "Tanh"])
def test_copies_stand_in_front_of_any_activation(activation):
    """And the graph computes what it did."""
    model = hidden_model(activation, bias=activation != "Relu", width=72)
    before, name = ir.to_proto(model), str(second_of(model).input.name)
    known, [done] = smooth_hidden(model, {name: statistics(1)}, FoldRequest(["fc2"], GainThreshold(NEVER, 1.0)))
    added = sum(done.copies.values()) - len(done.copies)
    assert done.layer == "fc2" and 0 < added <= 4
    assert list(known) == [str(second_of(model).input.name)]
    assert list(second_of(model).input.shape)[1:] == [5, 72 + added]
    assert [node.op_type for node in model.graph][-4:-2] == ["Mul", "Add"]
    feeds = random_feeds(before, 2, 0)
    assert difference(run_in_double(ir.to_proto(model), feeds)[0], run_in_double(before, feeds)[0]) <= 2e-6


def test_a_scale_alone_is_one_mul_and_changes_no_layer_in_front():
    model = hidden_model()
    first = next(linear for linear in find_linears(model) if linear.name == "fc1").weight.copy()
    name = str(second_of(model).input.name)
    done = smooth_hidden(model, {name: statistics(1)}, FoldRequest(["fc2"], GainThreshold(1.0, NEVER)))[1][0]
    assert (done.copies, done.alpha is None) == ({}, False)
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "Gelu", "Mul", "MatMul", "Add"]
    np.testing.assert_array_equal(next(each for each in find_linears(model) if each.name == "fc1").weight, first)


def test_any_gain_is_enough_where_that_is_asked_for():
    found, never = statistics(1), GainThreshold(NEVER, NEVER)
    for any_gain in ([], ["fc2"]):
        model = hidden_model()
        known = {str(second_of(model).input.name): found}
        done = smooth_hidden(model, known, FoldRequest(["fc2"], never, any_gain))[1]
        assert [each.layer for each in done] == any_gain
    for found in (statistics(1), statistics(1, outliers=()), statistics(3, spread=2.0)):
        model = hidden_model()
        known = {str(second_of(model).input.name): found}
        [done] = smooth_hidden(model, known, FoldRequest(["fc2"], never, ["fc2"]))[1]
        best = best_split(found, second_of(hidden_model()), GainThreshold(1.0, 1.0))
        assert (done.gain, done.copies, done.alpha) == (best.gain, best.copies, best.alpha)


def test_seven_bits_are_asked_about_as_seven():
    model, found = hidden_model(), statistics(2)
    expected = best_split(found, second_of(model), GainThreshold(1.0, NEVER), 7).gain
    assert expected != best_split(found, second_of(model), GainThreshold(1.0, NEVER)).gain
    known = {str(second_of(model).input.name): found}
    [done] = smooth_hidden(model, known, FoldRequest(["fc2"], GainThreshold(1.0, NEVER), bits=7))[1]
    assert done.gain == expected


@pytest.mark.parametrize(
    "reader", ["sum", "activation's input", "no activation", "other activation", "float", "unknown"]
)
def test_hidden_channels_that_something_else_reads_stay(reader):
    b = Builder(0)
    first = b.linear("x", 8, HIDDEN, "fc1")
    operator = {"no activation": "Identity", "other activation": "Sin"}.get(reader, "Gelu")
    hidden = b.op(operator, first, name="act")
    outputs = [b.linear(hidden, HIDDEN, 6, "fc2")]
    outputs += {"sum": [b.op("Neg", hidden)], "activation's input": [b.op("Neg", first)]}.get(reader, [])
    model = b.model({"x": ["batch", 5, 8]}, *outputs)
    before = ir.to_proto(model)
    known = {} if reader == "unknown" else {str(second_of(model).input.name): statistics(0)}
    asked = ["fc1"] if reader == "float" else ["fc1", "fc2"]
    assert smooth_hidden(model, known, FoldRequest(asked, GainThreshold(1.0, 1.0))) == (known, [])
    assert ir.to_proto(model) == before

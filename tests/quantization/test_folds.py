"""Folds before quantization: the function stays the same, the statistics follow, and the error falls."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import (
    FORMS,
    WIDTH,
    Builder,
    block,
    difference,
    random_feeds,
    run,
    run_in_double,
    with_outputs,
)
from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.quantization.folds import (
    FoldRequest,
    GainThreshold,
    smooth_hidden,
    smooth_norms,
    smooth_scores,
    smooth_values,
)
from vitdeploy.quantization.observer import Observer
from vitdeploy.quantization.placement import LayerPrecision, Placement
from vitdeploy.quantization.prepare import FOLDS, prepare
from vitdeploy.quantization.ranges import (
    FIELDS,
    Statistics,
    activation_scale,
    find_scores,
    quantize_weight,
    range_of,
    score_tensors,
    separate_scores,
)
from vitdeploy.quantization.rounding import expected_error, round_weight

TOKENS = 5
BATCH = 64
GAIN_THRESHOLD, TARGET = GainThreshold(2.0, 3.0), "onnxruntime-cpu"


def in_int8(layers):
    return Placement(TARGET, tuple(LayerPrecision(layer, "int8") for layer in layers))


def layers(model):
    return [linear.name for linear in find_linears(model)]


def observed(model):
    """Statistics of the input of every linear, on seeded random rows."""
    outputs_of = score_tensors(model)
    names = sorted({str(linear.input.name) for linear in find_linears(model)} | set(outputs_of))
    feeds = random_feeds(ir.to_proto(model), BATCH, 3)
    proto = with_outputs(model, [name for name in names if name not in feeds])
    outputs = dict(zip([value.name for value in proto.graph.output], run(proto, feeds), strict=True)) | feeds
    found = {}
    for name in names:
        observer = Observer(-1)
        observer.update(outputs[name])
        found[outputs_of.get(name, name)] = observer.statistics()
    return found


def assert_folded(model, fold, tolerance=2e-6):
    """`fold` keeps the function, and gives the statistics that observing again gives. Returns its record."""
    before, known = ir.to_proto(model), observed(model)
    moved, record = fold(model, known, FoldRequest(layers(model), GAIN_THRESHOLD))
    after = ir.to_proto(model)
    onnx.checker.check_model(after)
    onnx.shape_inference.infer_shapes(after, check_type=True, strict_mode=True)
    feeds = random_feeds(before, 4, 5)
    for ours, theirs in zip(run_in_double(after, feeds), run_in_double(before, feeds), strict=True):
        assert difference(ours, theirs) <= tolerance  # the folded constants are float32
    anew = observed(model)
    assert set(anew) == set(moved)
    for name, found in anew.items():
        for field in FIELDS[:-1]:
            ours, theirs = getattr(moved[name], field), getattr(found, field)
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max(), err_msg=name + field)
    return record


def scaled(model, name, factors):
    """The graph with one constant times `factors`."""
    value = model.graph.initializers[name]
    value.const_value = ir.tensor((value.const_value.numpy() * factors).astype(np.float32), name=name)
    return model


def block_model(form="slices", seed=0, **options):
    """A block whose norms reach differently far in each channel, as those of trained models do."""
    b = Builder(seed)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, block(b, "x", TOKENS, form, **options))
    for norm in ("norm1", "norm2"):
        for part in ("weight", "bias"):
            scaled(model, f"{norm}.{part}", 4.0 ** np.random.default_rng(seed).integers(-2, 3, WIDTH))
    return model


@given(form=st.sampled_from(FORMS), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_norms_are_smoothed_and_the_function_stays(form, seed):
    folds = assert_folded(block_model(form, seed), smooth_norms)
    assert folds[-1].layers == ("mlp.fc1",)
    assert all(fold.gain > 1 for fold in folds)


@given(form=st.sampled_from(FORMS), seed=st.integers(0, 99), bias=st.booleans())
@settings(max_examples=10, deadline=None)
def test_values_are_smoothed_and_the_function_stays(form, seed, bias):
    folds = assert_folded(block_model(form, seed, bias=bias), smooth_values)
    assert [fold.layers for fold in folds] in ([], [("attn.proj",)])


@given(
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 99),
    bias=st.booleans(),
    masked=st.booleans(),
    wide=st.sampled_from([1, 8, 64]),
)
@settings(max_examples=16, deadline=None)
def test_scores_are_balanced_and_the_function_stays(form, seed, bias, masked, wide):
    mask = np.random.default_rng(seed).normal(size=(TOKENS, TOKENS)).astype(np.float32) if masked else None
    model = block_model(form, seed, bias=bias, scale=None, mask=mask)
    separate_scores(model)
    [found] = find_scores(Editor(model), find_attentions(model))
    factors = float(wide) ** np.random.default_rng(seed).integers(-1, 2, WIDTH)  # keys reach where queries do not
    factors[seed % WIDTH] = 0  # and one channel is dead
    scaled(model, found.key.node.inputs[1].name, factors)
    folds = assert_folded(model, smooth_scores, 2e-5)  # scores of some hundreds: softmax multiplies rounding by as much
    assert folds or wide < 8
    assert all(fold.layers == (found.query.name, found.key.name) and fold.gain > 1 for fold in folds)


@pytest.mark.parametrize("wide", [8, 64])
def test_balanced_scores_lose_less_in_int8(wide):
    model = block_model("separate", 3, scale=None)
    scaled(model, "attn.k.weight_t", float(wide) ** np.random.default_rng(1).integers(-1, 2, WIDTH))
    before = rounded_scores(model)
    smooth_scores(model, observed(model), FoldRequest(layers(model), GAIN_THRESHOLD))
    assert rounded_scores(model) < before / 2


def rounded_scores(model):
    """The squared error of Q K^T with both rounded to int8 by one scale each, on seeded random rows."""
    feeds, (found,) = random_feeds(ir.to_proto(model), 16, 7), find_scores(Editor(model), find_attentions(model))
    proto = with_outputs(model, [found.attention.query.name, found.attention.key.name])
    *_, query, key = run(proto, feeds)
    rounded = [np.rint(x / (step := np.abs(x).max() / 127)) * step for x in (query, key)]
    exact = query.astype(np.float64) @ key
    exact -= exact.mean(axis=-1, keepdims=True)  # what softmax sees
    error = rounded[0] @ rounded[1]
    return ((error - error.mean(axis=-1, keepdims=True) - exact) ** 2).mean()


@pytest.mark.parametrize(
    "options", [{"scale": "scores"}, {"scale": None, "mask": np.ones((TOKENS, TOKENS), bool)}, {"qk_norm": True}]
)
def test_scores_with_more_than_layout_around_them_stay_in_float(options):
    model = block_model("separate", **options)
    assert find_scores(Editor(model), find_attentions(model)) == []
    assert score_tensors(model) == {}


def test_a_linear_without_bias_that_ends_the_graph_is_scaled_and_not_shifted():
    b = Builder(0)
    result = b.linear(b.norm("x", "norm"), WIDTH, WIDTH, "head", bias=False)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, result)
    scaled(scaled(model, "norm.weight", 4.0 ** np.arange(-4, 4)), "norm.bias", 50)  # a shift would help
    [fold] = assert_folded(model, smooth_norms)
    assert (fold.layers, fold.shifted) == (("head",), False)
    assert prepare(model, observed(model), in_int8(["head"])).weights.keys() == {"head"}


def outlier_model(seed, reach, **options):
    """A block in which one hidden channel is `reach` times as large as it was."""
    model = block_model(seed=seed, **options)
    factors = np.ones(2 * WIDTH)
    factors[3] = reach
    for name in ("mlp.fc1.weight_t", "mlp.fc1.bias"):
        scaled(model, name, factors)
    return model


@given(seed=st.integers(0, 99), reach=st.sampled_from([1, 10, 100, 1000]))
@settings(max_examples=12, deadline=None)
def test_hidden_channels_are_scaled_or_copied_and_the_function_stays(seed, reach):
    model = outlier_model(seed, reach)
    [hidden] = [each for each in observed(model).values() if len(each.high) == 2 * WIDTH]
    stands_out = hidden.high[3] > 10 * np.delete(hidden.high, 3).max()  # not where GELU lets nothing of it through
    done = assert_folded(model, smooth_hidden)
    assert all(each.layer == "mlp.fc2" and each.gain >= 2 for each in done)
    assert done or not stands_out


def wide_mlp(seed, reach, activation="Gelu"):
    """Linear, activation, linear with 256 hidden channels, one of which reaches much further than the others."""
    b = Builder(seed)
    hidden = b.op(activation, b.linear("x", WIDTH, 256, "fc1"), name="act")
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.linear(hidden, 256, WIDTH, "fc2"))
    factors = np.ones(256)
    factors[17] = reach
    return scaled(scaled(model, "fc1.weight_t", factors), "fc1.bias", factors)


@pytest.mark.parametrize("activation", ["Gelu", "Relu"])
@pytest.mark.parametrize("reach", [8, 12])
def test_an_outlier_becomes_copies_and_the_function_stays(activation, reach):
    model = wide_mlp(0, reach, activation)
    [done] = assert_folded(model, smooth_hidden)
    assert done.copies[17] == max(done.copies.values()) >= 4
    added = sum(done.copies.values()) - len(done.copies)
    assert added <= 256 / 16
    assert (256 + added) % 16 == 0
    shapes = {linear.name: linear.weight.shape for linear in find_linears(model)}
    assert shapes == {"fc1": (WIDTH, 256 + added), "fc2": (256 + added, WIDTH)}


def test_an_outlier_as_copies_costs_no_accuracy_in_int8():
    errors = []
    for reach in (1, 12):
        model = wide_mlp(0, reach)
        feeds = random_feeds(ir.to_proto(model), BATCH, 3)
        [expected] = run(ir.to_proto(model), feeds)
        known = observed(model)
        plain = fake_quantized(model, {name: range_of(found) for name, found in known.items()}, {}, feeds)
        prepared = prepare(model, known, in_int8(layers(model)))
        ours = fake_quantized(model, prepared.ranges, prepared.weights, feeds)
        errors.append([np.square(each - expected).mean() for each in (plain, ours)])
    (_, alone), (plain, beside) = errors
    assert beside < 3 * alone
    assert beside < 0.1 * plain


def test_what_is_not_quantized_is_not_touched():
    for fold in FOLDS:
        model = outlier_model(0, 100, form="separate", scale=None)
        before = ir.to_proto(model)
        known = observed(model)
        moved, record = fold(model, known, FoldRequest([], GAIN_THRESHOLD))
        assert (moved, record) == (known, [])
        assert ir.to_proto(model) == before


@pytest.mark.parametrize("copies", [1, 2, 3, 7, 28])
def test_copies_with_offsets_are_quantized_as_the_whole_on_the_common_step(copies):
    """Hermite's identity: the sum of the codes of the copies is the code of the channel itself."""
    step = 0.03
    x = np.linspace(-0.9 * copies, 0.9 * copies, 2001) + 1e-4
    offsets = (np.arange(copies) / copies - 0.5 + 0.5 / copies) * step
    assert abs(offsets.sum()) < 1e-12
    total = sum(np.rint((x / copies + offset) / step) for offset in offsets) * step
    assert np.abs(total - x).max() <= step / 2 + 1e-9


# --- rounding ---------------------------------------------------------------------------------------------------------


def correlated(seed, rows=2000, inside=24):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, 6)) @ generator.standard_normal((6, inside))
    return (x + 0.1 * generator.standard_normal((rows, inside)) + 2).astype(np.float32)


def statistics_of(x):
    observer = Observer(-1)
    observer.update(x)
    return observer.statistics()


@pytest.mark.parametrize("seed", range(4))
def test_rounded_weights_give_better_outputs_than_the_nearest_ones(seed):
    x = correlated(seed)
    weight = np.random.default_rng(seed + 9).standard_normal((24, 10)).astype(np.float32)
    centred = x - x.mean(axis=0)

    def error(rounded, scales):
        assert rounded.dtype == np.int8
        assert np.abs(rounded.astype(int)).max() <= 127
        return np.square(centred @ (rounded * scales - weight)).mean()

    assert error(*round_weight(weight, statistics_of(x), 0.0)) < 0.5 * error(*quantize_weight(weight, 1))


def test_few_rows_say_nothing_of_a_covariance():
    x = correlated(0, rows=100)
    weight = np.ones((24, 10), np.float32) * np.linspace(-1, 1, 10, dtype=np.float32)
    for ours, nearest in zip(round_weight(weight, statistics_of(x), 0.0), quantize_weight(weight, 1), strict=True):
        np.testing.assert_array_equal(ours, nearest)


def test_weights_and_inputs_of_zero_are_rounded_too():
    rounded, scales = round_weight(np.zeros((4, 3), np.float32), statistics_of(np.zeros((100, 4), np.float32)), 0.0)
    assert not rounded.any()
    assert (scales > 0).all()


# --- all of it --------------------------------------------------------------------------------------------------------


def test_the_expected_error_is_about_the_one_that_is_made():
    x, generator = correlated(5, rows=20000), np.random.default_rng(1)
    weight = generator.standard_normal((24, 16)).astype(np.float32)
    found = statistics_of(x)
    parameters = activation_scale(range_of(found))
    scale, zero = float(parameters[0]), int(parameters[1])
    rounded = (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale
    quantized, scales = quantize_weight(weight, 1)
    error = rounded @ (quantized * scales) - x @ weight
    made = np.square(error - error.mean(axis=0)).sum(axis=1).mean()
    assert 0.5 < expected_error(found, [weight]) / made < 2


def test_ranges_leave_a_tenth_of_room_for_other_images():
    """On the input of a graph, which nothing folds: an image that reaches a little further is not clipped."""
    b = Builder(0)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.linear("x", WIDTH, WIDTH, "fc"))
    x = np.random.default_rng(0).uniform(-3, 1, (BATCH, TOKENS, WIDTH)).astype(np.float32)
    observer = Observer(-1)
    observer.update(x)
    found = prepare(model, {"x": observer.statistics()}, in_int8(["fc"])).ranges["x"]
    room = 0.1 * (x.max() - x.min())
    assert (x.min() - found.low, found.high - x.max()) == pytest.approx((room, 0.2 * x.max()), rel=0.05)


def test_prepared_graphs_lose_less_in_int8():
    """The whole preparation against none, in fake quantization by numpy of one MLP with an outlier."""
    model = outlier_model(0, 100)
    feeds = random_feeds(ir.to_proto(model), BATCH, 3)
    [expected] = run(ir.to_proto(model), feeds)
    known, names = observed(model), layers(model)
    plain = fake_quantized(model, {name: range_of(found) for name, found in known.items()}, {}, feeds)
    prepared = prepare(model, known, in_int8(names))
    ours = fake_quantized(model, prepared.ranges, prepared.weights, feeds)
    assert prepared.hidden[0].layer == "mlp.fc2"
    assert np.square(ours - expected).mean() < 0.2 * np.square(plain - expected).mean()


def fake_quantized(model, ranges, weights, feeds):
    """The output with every linear's input and weight rounded to what INT8 can hold, in float on ONNX Runtime."""
    copy = ir.from_proto(ir.to_proto(model))
    for linear in find_linears(copy):
        parameters = activation_scale(ranges[str(linear.input.name)])
        constants = {"scale": np.asarray(parameters[0]), "zero": np.asarray(parameters[1])}
        rounded, scales = weights.get(linear.name) or quantize_weight(linear.weight, 1)
        constants["weight"] = (rounded * scales).astype(np.float32)
        values = {}
        for key, array in constants.items():
            tensor = ir.tensor(array, name=f"{linear.name}.{key}.fake")
            values[key] = ir.Value(name=tensor.name, const_value=tensor)
            copy.graph.register_initializer(values[key])
        down = ir.node("QuantizeLinear", [linear.input, values["scale"], values["zero"]])
        up = ir.node("DequantizeLinear", [down.outputs[0], values["scale"], values["zero"]])
        for i, node in enumerate((down, up)):
            node.outputs[0].name = f"{linear.name}.fake{i}"
            copy.graph.insert_before(linear.node, node)
        linear.node.replace_input_with(0, up.outputs[0])
        linear.node.replace_input_with(1, values["weight"])
    drop_unused(copy)
    return run(ir.to_proto(copy), feeds)[0]


def test_widened_bounds_leave_room_but_not_where_a_function_ends():
    found = Statistics(np.array([-0.17, -4.0, 5.0]), np.array([7.0, 4.0, 6.0]), np.zeros(3), np.eye(3), 9)
    wide = found.widened(0.1)
    np.testing.assert_allclose(wide.low, [-0.17 - 0.034, -4.8, 4.9])
    np.testing.assert_allclose(wide.high, [7.717, 4.8, 6.1])

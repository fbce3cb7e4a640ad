"""Which shift and scale a LayerNorm or an attention's values get: against a search of all of them in plain numpy."""

import numpy as np
import onnx_ir as ir
import pytest

from tests.graph.small_graphs import WIDTH, Builder, attention_model, weights
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.quantization.folds import FoldRequest, GainThreshold, balanced, smooth_norms, smooth_values
from vitdeploy.quantization.ranges import Statistics

TOKENS = 5
GAIN = GainThreshold(1.0, 1.0)


def statistics(seed, spread=1.5, lean=1.0):
    """Of channels that reach differently far, most of them further to one side."""
    generator = np.random.default_rng(seed)
    size = np.exp(generator.normal(0, spread, WIDTH))
    centre = lean * generator.normal(0, 1, WIDTH) * size
    low, high = centre - size * generator.uniform(1, 3, WIDTH), centre + size * generator.uniform(1, 3, WIDTH)
    return Statistics(low, high, centre, size**2 / 4, 100)


def smoothquant(reach, layers, alpha):
    """arXiv 2211.10438, equation 4, channel by channel, with the product of all scales 1."""
    strongest = [max(abs(value) for weight in layers for value in weight[j]) for j in range(len(reach))]
    live = [j for j in range(len(reach)) if reach[j] and strongest[j]]
    scale = np.ones(len(reach))
    for j in live:
        scale[j] = reach[j] ** alpha / strongest[j] ** (1 - alpha)
    scale[live] /= np.prod(scale[live]) ** (1 / len(live))
    return scale


def error_of(found, layers, shift, scale, largest):
    """Noise of uint8 inputs through the weights, and of INT8 weights under the inputs: step^2 / 12 each."""
    low, high = ((found.low - shift) / scale).min(), ((found.high - shift) / scale).max()
    step = (max(high, 0) - min(low, 0)) / 255
    power = (found.variance / scale**2).sum()
    total = 0.0
    for weight in layers:
        scaled = scale[:, None] * weight
        total += (step**2 * (scaled**2).sum() + power * ((np.abs(scaled).max(axis=0) / largest) ** 2).sum()) / 12
    return total


def searched(tensors, bits=8, shifts=(False, True)):
    """(exponent, shifted, gain, shift, scale) of the least error, for (statistics, weights of its readers) each."""
    low = np.min([found.low for found, _ in tensors], axis=0)
    high = np.max([found.high for found, _ in tensors], axis=0)
    every = [weight for _, layers in tensors for weight in layers]
    tried = []
    for shifted in shifts:
        shift = (low + high) / 2 if shifted else np.zeros(len(low))
        reach = np.maximum(abs(low - shift), abs(high - shift))
        for alpha in [None] + [tenth / 10 for tenth in range(11)]:
            scale = np.ones(len(low)) if alpha is None else smoothquant(reach, every, alpha)
            error = sum(error_of(found, layers, shift, scale, 2 ** (bits - 1) - 1) for found, layers in tensors)
            tried.append((error, alpha, shifted, shift, scale))
    least = min(tried, key=lambda each: each[0])
    return least[1], least[2], tried[0][0] / least[0], least[3], least[4]


def test_a_scale_is_smoothquants_of_all_readers_and_dead_channels_keep_theirs():
    found = statistics(0)
    found.low[2] = found.high[2] = 0
    generator = np.random.default_rng(1)
    first, second = (np.exp(generator.normal(0, 1, (WIDTH, n))) * generator.choice([-1, 1], (WIDTH, n)) for n in (3, 5))
    first[:, 0], found.low[1], found.high[3] = -9, -50, 40
    first[5], second[5] = 0, 0
    for alpha in (0.0, 0.3, 0.5, 1.0):
        scale = balanced(found, [first, second], alpha)
        reach = [max(abs(low), abs(high)) for low, high in zip(found.low, found.high, strict=True)]
        np.testing.assert_allclose(scale, smoothquant(reach, [first, second], alpha))
        assert scale[2] == scale[5] == 1
    np.testing.assert_array_equal(balanced(found, [np.zeros((WIDTH, 2))], 0.5), np.ones(WIDTH))


def norm_model(seed, *, slices=False, bias=True, last=False):
    """LayerNorm -> "one" and "two" (from a part of the tokens with `slices`), of other widths than the norm's."""
    b = Builder(seed)
    x = b.norm("x", "norm")
    y = b.op("Slice", x, b.ints(0), b.ints(1), b.ints(1), name="first token") if slices else x
    one = b.linear(x, WIDTH, 12, "one", bias=bias)
    two = b.linear(y, WIDTH, 3, "two")
    return b.model({"x": ["batch", TOKENS, WIDTH]}, *([one, two] if last else [b.op("Neg", one), b.op("Neg", two)]))


def uneven(model, seed, *names):
    generator = np.random.default_rng(seed)
    for name in names:
        value = model.graph.initializers[name]
        array = value.const_value.numpy()
        factors = np.exp(generator.normal(0, 1.5, WIDTH))
        value.const_value = ir.tensor((factors[:, None] * array).astype(np.float32), name=name)
    return model


def moved(before, after, prefix=""):
    """(shift, scale) that a norm's two vectors were folded with."""
    scale = before[f"{prefix}weight"].astype(float) / after[f"{prefix}weight"]
    return before[f"{prefix}bias"] - after[f"{prefix}bias"] * scale, scale


def same(ours, expected):
    """Constants are float32: to a few of its steps of the largest one."""
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6 * max(0.5, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("seed", "spread", "lean", "bits"),
    [(0, 1.5, 1.0, 8), (1, 0.2, 3.0, 8), (2, 2.0, 0.0, 7), (3, 0.1, 0.0, 7), (4, 1.0, 0.3, 8), (5, 3.0, 0.1, 8)],
)
@pytest.mark.parametrize("slices", [False, True])
def test_a_norm_gets_the_shift_and_the_scale_of_the_least_expected_error(seed, spread, lean, bits, slices):
    model = uneven(norm_model(seed, slices=slices, bias=seed % 2 == 0), seed, "one.weight_t", "two.weight_t")
    before, layers = weights(model), {linear.name: linear for linear in find_linears(model)}
    inputs = {name: str(linear.input.name) for name, linear in layers.items()}
    known = {inputs[name]: statistics(10 * seed + i, spread, lean) for i, name in enumerate(layers)}
    known["of another"] = statistics(99)
    by_tensor = [
        (found, [linear.weight.astype(float) for linear in layers.values() if str(linear.input.name) == name])
        for name, found in known.items()
    ]
    alpha, shifted, gain, shift, scale = searched(by_tensor[:-1], bits)
    found, [fold] = smooth_norms(model, known, FoldRequest(["one"], GAIN, bits=bits))
    assert ({*fold.layers}, fold.alpha, fold.shifted) == ({"one", "two"}, alpha, shifted)
    assert fold.gain == pytest.approx(gain)
    after = weights(model)
    for ours, expected in zip(moved(before, after, "norm."), (shift, scale), strict=True):
        same(ours, expected)
    for linear in find_linears(model):
        old = layers[linear.name]
        same(linear.weight, scale[:, None] * old.weight)
        if shifted or old.bias is not None:
            bias = 0 if before.get(f"{linear.name}.bias") is None else before[f"{linear.name}.bias"]
            same(linear.bias, bias + shift @ before[f"{linear.name}.weight_t"])
        old_found, new = known[inputs[linear.name]], found[inputs[linear.name]]
        same(new.low, (old_found.low - shift) / scale)
        same(new.variance, old_found.variance / scale**2)
    assert found["of another"] is known["of another"]


def test_what_is_the_same_of_all_images_gains_a_million_and_no_more():
    model = norm_model(1, slices=True)
    value = np.linspace(1, 2, WIDTH)
    known = {str(linear.input.name): Statistics(value, value, value, 0 * value, 9) for linear in find_linears(model)}
    [fold] = smooth_norms(model, known, FoldRequest(["one"], GAIN))[1]
    assert (fold.alpha, fold.shifted, fold.gain) == (None, True, pytest.approx(1e6))


def read_by_another(name):
    """LayerNorm -> "one", and something that is no linear or reads its channels otherwise."""
    b = Builder(0)
    x = b.norm("x", "norm")
    outputs = [b.op("Neg", b.linear(x, WIDTH, 12, "one"))]
    if name == "sum":
        outputs.append(b.op("Add", x, "x"))
    elif name == "graph output":
        outputs.append(x)
    elif name == "second operand":
        outputs.append(b.op("MatMul", b.constant(b.random(4, TOKENS)), x))
    elif name == "part of the channels":
        half = b.op("Slice", x, b.ints(0), b.ints(4), b.ints(2))
        outputs.append(b.op("Neg", b.linear(half, 4, 3, "two")))
    elif name == "channels turned around":
        turned = b.op("Gather", x, b.ints(*range(WIDTH)[::-1]), axis=2)
        outputs.append(b.op("Neg", b.linear(turned, WIDTH, 3, "two")))
    elif name == "two channels swapped":
        turned = b.op("Gather", x, b.ints(1, 0, *range(2, WIDTH)), axis=2)
        outputs.append(b.op("Neg", b.linear(turned, WIDTH, 3, "two")))
    elif name == "channels as rows":
        outputs.append(b.op("Neg", b.linear(b.op("Transpose", x, perm=[0, 2, 1]), TOKENS, 3, "two")))
    elif name == "no bias in the norm":
        b.nodes[0].input.pop()
    elif name == "weights that are no constants":
        b.nodes[0].input[1] = "gamma"
    return b.model({"x": ["batch", TOKENS, WIDTH], "gamma": [WIDTH]}, *outputs)


@pytest.mark.parametrize(
    "name",
    [
        *("sum", "graph output", "second operand", "part of the channels", "channels turned around"),
        *("two channels swapped", "channels as rows", "no bias in the norm", "weights that are no constants"),
    ],
)
def test_a_norm_that_anything_but_linears_reads_stays(name):
    model = read_by_another(name)
    before = ir.to_proto(model)
    known = {str(linear.input.name): statistics(3) for linear in find_linears(model)}
    found, folds = smooth_norms(model, known, FoldRequest([each.name for each in find_linears(model)], GAIN))
    assert folds == []
    assert found == known
    assert ir.to_proto(model) == before


@pytest.mark.parametrize("slices", [False, True])
def test_a_norm_of_layers_that_are_not_observed_or_stay_in_float_stays(slices):
    model = norm_model(0, slices=slices)
    before = ir.to_proto(model)
    names = [str(linear.input.name) for linear in find_linears(model)]
    known = {name: statistics(4) for name in names}
    assert smooth_norms(model, known, FoldRequest([], GAIN)) == (known, [])
    known.pop(names[-1])
    assert smooth_norms(model, known, FoldRequest(["one", "two"], GAIN)) == (known, [])
    assert ir.to_proto(model) == before


def test_a_norm_that_gains_nothing_stays():
    """The channels of the weights and of the norm are all alike, around zero."""
    b = Builder(0)
    ones = b.constant(np.ones((WIDTH, 4), np.float32), "one.weight_t")
    model = b.model(
        {"x": ["batch", TOKENS, WIDTH]}, b.op("Neg", b.linear(b.norm("x", "n"), WIDTH, 4, "one", weight=ones))
    )
    before, name = ir.to_proto(model), str(find_linears(model)[0].input.name)
    alike = Statistics(-np.ones(WIDTH), np.ones(WIDTH), np.zeros(WIDTH), np.ones(WIDTH) / 4, 99)
    assert smooth_norms(model, {name: alike}, FoldRequest(["one"], GAIN)) == ({name: alike}, [])
    assert ir.to_proto(model) == before


def test_a_reader_without_bias_that_ends_the_graph_is_not_shifted():
    """Not even if another reader could be: one norm has one shift."""
    model = norm_model(2, bias=False, last=True)
    name = str(find_linears(model)[0].input.name)
    layers = [linear.weight.astype(float) for linear in find_linears(model)]
    known = statistics(5, spread=0.2, lean=3.0)
    assert searched([(known, layers)])[1]
    alpha, _, gain, _, _ = searched([(known, layers)], shifts=(False,))
    [fold] = smooth_norms(model, {name: known}, FoldRequest(["one"], GAIN))[1]
    assert (fold.alpha, fold.shifted, fold.gain) == (alpha, False, pytest.approx(gain))


@pytest.mark.parametrize(
    ("form", "bias"), [("separate", True), ("separate", False), ("slices", True), ("split", False)]
)
@pytest.mark.parametrize(("seed", "spread", "lean"), [(0, 1.5, 1.0), (1, 0.2, 3.0), (2, 0.1, 0.2)])
def test_values_get_the_shift_and_the_scale_of_the_projection_behind(form, bias, seed, spread, lean):
    """Rows of softmax sum to one: what is taken from a value is taken from the mixed one."""
    model = uneven(attention_model(TOKENS, form, seed, bias=bias), seed, "attn.proj.weight_t")
    before = weights(model)
    [projection] = [linear for linear in find_linears(model) if linear.name == "attn.proj"]
    name, found = str(projection.input.name), statistics(seed + 20, spread, lean)
    # The projection ends the graph: it has a bias, so it may be shifted.
    alpha, shifted, gain, shift, scale = searched([(found, [projection.weight.astype(float)])])
    known, [fold] = smooth_values(model, {name: found}, FoldRequest(["attn.proj"], GAIN))
    assert (fold.layers, fold.alpha, fold.shifted) == (("attn.proj",), alpha, shifted)
    assert fold.gain == pytest.approx(gain)
    linears = {linear.name: linear for linear in find_linears(model)}
    same(linears["attn.proj"].weight, scale[:, None] * before["attn.proj.weight_t"])
    same(linears["attn.proj"].bias, before["attn.proj.bias"] + shift @ before["attn.proj.weight_t"])
    source = "attn.v" if form == "separate" else "attn.qkv"
    columns = slice(0, WIDTH) if form == "separate" else slice(2 * WIDTH, 3 * WIDTH)
    weight, old = linears[source].weight, before[f"{source}.weight_t"]
    same(weight[:, columns], old[:, columns] / scale)
    np.testing.assert_array_equal(weight[:, : columns.start], old[:, : columns.start])
    old_bias = before[f"{source}.bias"][columns] if bias else 0
    if bias or shifted:
        same(linears[source].bias[columns], (old_bias - shift) / scale)
    same(known[name].high, (found.high - shift) / scale)


def test_values_that_gain_nothing_or_are_not_asked_for_stay():
    model = attention_model(TOKENS, "separate", 0)
    before = ir.to_proto(model)
    name = str(next(linear for linear in find_linears(model) if linear.name == "attn.proj").input.name)
    known = {name: statistics(1)}
    assert smooth_values(model, known, FoldRequest(["attn.v"], GAIN)) == (known, [])
    assert smooth_values(model, {}, FoldRequest(["attn.proj"], GAIN)) == ({}, [])
    weight = model.graph.initializers["attn.proj.weight_t"]
    weight.const_value = ir.tensor(np.ones((WIDTH, WIDTH), np.float32), name=weight.name)
    before = ir.to_proto(model)
    alike = Statistics(-np.ones(WIDTH), np.ones(WIDTH), np.zeros(WIDTH), np.ones(WIDTH) / 4, 99)
    assert smooth_values(model, {name: alike}, FoldRequest(["attn.proj"], GAIN)) == ({name: alike}, [])
    assert ir.to_proto(model) == before


@pytest.mark.parametrize("between", ["linear and values", "mix and projection", "values and another reader"])
def test_values_with_more_than_an_attention_around_them_stay(between):
    """An operator that is no layout, or a reader that is not this attention."""
    model = attention_model(TOKENS, "separate", 0)
    name = str(next(linear for linear in find_linears(model) if linear.name == "attn.proj").input.name)
    value = next(linear for linear in find_linears(model) if linear.name == "attn.v").output
    mixed = next(node for node in model.graph if node.name == "attn/mix").outputs[0]
    source = mixed if between == "mix and projection" else value
    readers = list(source.uses())
    added = ir.node("Neg", [source], name="added")
    added.outputs[0].name, added.outputs[0].shape, added.outputs[0].dtype = "added", source.shape, source.dtype
    model.graph.insert_after(source.producer(), added)
    if between == "values and another reader":
        model.graph.outputs.append(added.outputs[0])
    else:
        for node, index in readers:
            node.replace_input_with(index, added.outputs[0])
    before, known = ir.to_proto(model), {name: statistics(1)}
    assert smooth_values(model, known, FoldRequest(["attn.proj"], GAIN)) == (known, [])
    assert ir.to_proto(model) == before

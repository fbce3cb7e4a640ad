"""Convolutions as products, and a Mul and an Add in front of them: the function stays the same, whatever the layer."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import Builder, difference, random_feeds, run, run_in_double, with_outputs
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.passes.folds import image_bounds
from vitdeploy.quantization.folds import FoldRequest, GainThreshold, scale_channels
from vitdeploy.quantization.observer import Observer
from vitdeploy.quantization.placement import LayerPrecision, Placement
from vitdeploy.quantization.prepare import prepare
from vitdeploy.quantization.ranges import FIELDS, Statistics
from vitdeploy.quantization.rounding import products_error, products_of, round_linear, weight_of

SIZE = 9


def convolution(b, x, inside, outside, name, *, bias=True, group=1, kernel=3, **attributes):
    shape = (outside, inside // group, kernel, kernel)
    inputs = [x, b.constant(b.random(*shape), f"{name}.weight")]
    if bias:
        inputs.append(b.constant(b.random(outside), f"{name}.bias"))
    return b.op("Conv", *inputs, name=f"{name}/Conv", group=group, kernel_shape=[kernel, kernel], **attributes)


CONVOLUTIONS = st.fixed_dictionaries(
    {
        "group": st.sampled_from([1, 2, 8]),
        "kernel": st.sampled_from([1, 2, 3]),
        "strides": st.sampled_from([[1, 1], [2, 1], [3, 2]]),
        "dilations": st.sampled_from([[1, 1], [1, 2]]),
        "pads": st.sampled_from([[0, 0, 0, 0], [1, 1, 1, 1], [0, 2, 1, 0]]),
        "bias": st.booleans(),
    }
)


def one_convolution(seed, options):
    b = Builder(seed)
    return b.model({"x": ["batch", 8, SIZE, SIZE]}, convolution(b, "x", 8, 16, "conv", **options))


@given(seed=st.integers(0, 99), options=CONVOLUTIONS)
@settings(max_examples=30, deadline=None)
def test_products_say_what_a_constant_input_becomes(seed, options):
    model = one_convolution(seed, options)
    [linear] = find_linears(model)
    layer = products_of(linear)
    np.testing.assert_array_equal(weight_of(linear, layer.weights), linear.weight)
    assert (layer.taps, linear.padded) == (options["kernel"] ** 2, any(options["pads"]))
    values = np.random.default_rng(seed).standard_normal(8)
    feeds = {"x": np.broadcast_to(values[:, None, None], (1, 8, SIZE, SIZE)).astype(np.float32)}
    [output] = run_in_double(ir.to_proto(model), feeds)
    expected = output.mean(axis=(0, 2, 3)) - (0 if linear.bias is None else linear.bias)
    np.testing.assert_allclose(layer.of_constant(values.astype(np.float32)), expected, atol=1e-9)


@given(seed=st.integers(0, 99), options=CONVOLUTIONS)
@settings(max_examples=20, deadline=None)
def test_the_expected_error_is_that_of_noise_at_the_input(seed, options):
    """Independent noise of one step squared over 12 in every value gives the part that comes from the input."""
    model = one_convolution(seed, options)
    [linear] = find_linears(model)
    layer, step = products_of(linear), 0.5
    nothing = Statistics(np.zeros(8), np.zeros(8), np.zeros(8), np.zeros((8, 8)), 9)
    generator = np.random.default_rng(seed)
    noise = generator.uniform(-step / 2, step / 2, (256, 8, SIZE, SIZE)).astype(np.float32)
    [output] = run(ir.to_proto(model), {"x": noise})
    made = (output - (0 if linear.bias is None else linear.bias[:, None, None])) ** 2
    assert np.isclose(products_error(nothing, layer, step), made.mean(axis=(0, 2, 3)).sum(), rtol=0.1)


# --- the fold ---------------------------------------------------------------------------------------------------------


def observed(model, seed=3, batch=32):
    """Statistics of the input of every layer, on seeded random values."""
    axes = {str(linear.input.name): 1 if linear.kind == "conv" else -1 for linear in find_linears(model)}
    feeds = random_feeds(ir.to_proto(model), batch, seed)
    proto = with_outputs(model, [name for name in axes if name not in feeds])
    outputs = dict(zip([value.name for value in proto.graph.output], run(proto, feeds), strict=True)) | feeds
    found = {}
    for name, axis in axes.items():
        observer = Observer(axis)
        observer.update(outputs[name])
        found[name] = observer.statistics()
    return found


def request(layers):
    return FoldRequest(layers, GainThreshold(1.1, 1.2))


def uneven(model, name, seed, zeros=()):
    """One weight with output channels of very different sizes, some of them dead."""
    value = model.graph.initializers[name]
    array = value.const_value.numpy()
    factors = 4.0 ** np.random.default_rng(seed).integers(-3, 4, len(array))
    factors[list(zeros)] = 0
    value.const_value = ir.tensor((array.T * factors).T.astype(np.float32), name=name)
    return model


def assert_scaled(model):
    """The fold keeps the function, and gives the statistics that observing again gives. Returns its record."""
    before, known = ir.to_proto(model), observed(model)
    moved, folds = scale_channels(model, known, request([linear.name for linear in find_linears(model)]))
    after = ir.to_proto(model)
    onnx.checker.check_model(after)
    onnx.shape_inference.infer_shapes(after, check_type=True, strict_mode=True)
    feeds = random_feeds(before, 2, 5)
    for ours, theirs in zip(run_in_double(after, feeds), run_in_double(before, feeds), strict=True):
        assert difference(ours, theirs) <= 2e-6  # the folded constants are float32
    for name, found in observed(model).items():
        for field in FIELDS[:-1]:
            ours, theirs = getattr(moved[name], field), getattr(found, field)
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max(), err_msg=name + field)
    return folds


@given(seed=st.integers(0, 99), options=CONVOLUTIONS, activation=st.sampled_from(["Relu", "HardSwish", None]))
@settings(max_examples=30, deadline=None)
def test_channels_are_scaled_and_the_function_stays(seed, options, activation):
    b = Builder(seed)
    x = convolution(b, "x", 3, 8, "first")
    x = b.op(activation, x) if activation else x
    model = b.model({"x": ["batch", 3, SIZE + 2, SIZE + 2]}, convolution(b, x, 8, 16, "conv", **options))
    folds = assert_scaled(uneven(model, "first.weight", seed))
    assert [fold.layers for fold in folds if fold.layers == ("conv",)] == [("conv",)]
    assert not any(fold.shifted and any(options["pads"]) for fold in folds if fold.layers == ("conv",))


@pytest.mark.parametrize("dead", ["inputs", "weights", "all inputs"])
@pytest.mark.parametrize("group", [1, 8])
def test_dead_channels_change_nothing(dead, group):
    b = Builder(1)
    x = b.op("Relu", convolution(b, "x", 3, 8, "first", bias=False))
    model = b.model({"x": ["batch", 3, SIZE, SIZE]}, convolution(b, x, 8, 8, "conv", group=group))
    uneven(model, "first.weight", 1, {"inputs": [0, 5], "weights": [], "all inputs": range(8)}[dead])
    if dead == "weights":
        uneven(model, "conv.weight", 1, [2, 3])
    assert_scaled(model)
    for value in model.graph.initializers.values():
        assert np.isfinite(value.const_value.numpy()).all()


def test_layers_that_read_one_tensor_share_one_scale_and_others_read_it_as_it_was():
    b = Builder(2)
    x = b.op("Relu", convolution(b, "x", 3, 8, "first"))
    left = convolution(b, x, 8, 4, "left", pads=[1, 1, 1, 1])
    right = convolution(b, x, 8, 8, "right", kernel=1)
    model = b.model({"x": ["batch", 3, SIZE, SIZE]}, left, right, b.op("Add", x, right))
    folds = assert_scaled(uneven(model, "first.weight", 2))
    assert [fold.layers for fold in folds][-1] == ("left", "right")
    names = {linear.name: str(linear.input.name) for linear in find_linears(model)}
    assert names["left"] == names["right"] == "left.channels/Mul"
    assert [str(node.inputs[0].name) for node in model.graph if node.op_type == "Add"] == [x]


def test_a_tensor_that_linears_and_convolutions_read_stays():
    b = Builder(4)
    x = b.op("Relu", convolution(b, "x", 3, 8, "first"))
    model = b.model({"x": ["batch", 3, 10, 10]}, convolution(b, x, 8, 8, "conv"), b.linear(x, 8, 8, "linear"))
    assert not [fold for fold in assert_scaled(uneven(model, "first.weight", 4)) if fold.layers != ("first",)]


def test_only_what_is_quantized_is_touched():
    model = uneven(one_convolution(0, {}), "conv.weight", 0)
    before, known = ir.to_proto(model), observed(model)
    assert scale_channels(model, known, request([])) == (known, [])
    assert ir.to_proto(model) == before


# --- pixels -----------------------------------------------------------------------------------------------------------


def pixel_model(*, normalised=True, padded=True, half=False):
    b = Builder(5)
    x = b.op("Transpose", "pixels", perm=[0, 3, 1, 2])
    x = b.op("Cast", x, to=onnx.TensorProto.FLOAT)
    if normalised:
        x = b.op("Mul", x, b.constant(np.float32([0.01, -0.02, 0.03]).reshape(3, 1, 1)))
        x = b.op("Add", x, b.constant(np.float32([[[-1]], [[2]], [[0]]])))
    x = b.op("Relu", x) if half else x
    pads = [1, 1, 1, 1] if padded else [0, 0, 0, 0]
    result = convolution(b, x, 3, 8, "conv", pads=pads)
    return b.model({"pixels": (["batch", SIZE, SIZE, 3], onnx.TensorProto.UINT8)}, result)


def test_the_bounds_of_pixels_are_known():
    [linear] = find_linears(pixel_model())
    low, high = image_bounds(linear)
    np.testing.assert_allclose(low, [-1, 2 - 5.1, 0], rtol=1e-6)
    np.testing.assert_allclose(high, [1.55, 2, 7.65], rtol=1e-6)
    [plain] = find_linears(pixel_model(normalised=False))
    np.testing.assert_array_equal(image_bounds(plain), [[0] * 3, [255] * 3])
    assert image_bounds(find_linears(pixel_model(half=True))[0]) is None
    assert image_bounds(find_linears(one_convolution(0, {}))[0]) is None


def test_pixels_keep_their_bounds_and_get_no_operators():
    model = pixel_model()
    [linear] = find_linears(model)
    name, narrow = str(linear.input.name), Statistics(*np.zeros((3, 3)), np.eye(3), 9)
    prepared = prepare(model, {name: narrow}, Placement("openvino-cpu", (LayerPrecision("conv", "int8"),)))
    assert prepared.folds == ()
    assert (prepared.ranges[name].low, prepared.ranges[name].high) == pytest.approx((2 - 5.1, 7.65))


# --- rounding ---------------------------------------------------------------------------------------------------------


def photographs(channels, count=24):
    """Images whose channels and neighbouring pixels go together, with a mean."""
    generator = np.random.default_rng(7)
    small = generator.standard_normal((count, 4, 4, 4))
    smooth = np.kron(small, np.ones((1, 1, 4, 4)))
    mixed = np.einsum("nchw,oc->nohw", smooth, generator.standard_normal((channels, 4)))
    return (mixed + 0.2 * generator.standard_normal(mixed.shape) + 1).astype(np.float32)


@pytest.mark.parametrize("options", [{"kernel": 1}, {"pads": [1, 1, 1, 1]}, {"group": 2}, {"group": 8}])
def test_rounded_convolutions_give_better_outputs_than_the_nearest_weights(options):
    b = Builder(6)
    model = b.model({"x": ["batch", 8, 16, 16]}, convolution(b, "x", 8, 16, "conv", **options))
    uneven(model, "conv.weight", 6)
    images = photographs(8)
    observer = Observer(1)
    observer.update(images)
    [linear] = find_linears(model)
    found = observer.statistics()
    [expected] = run(ir.to_proto(model), {"x": images})

    def error(statistics):
        """(variance, squared mean) of what rounding does to the outputs."""
        (rounded, scales), bias = round_linear(linear, statistics)
        assert (rounded.dtype, rounded.shape) == (np.int8, linear.weight.shape)
        weights = {"conv.weight": (rounded * scales[:, None, None, None]).astype(np.float32)}
        weights["conv.bias"] = bias.astype(np.float32)
        other = ir.from_proto(ir.to_proto(model))
        for name, array in weights.items():
            other.graph.initializers[name].const_value = ir.tensor(array, name=name)
        made = run(ir.to_proto(other), {"x": images})[0] - expected
        made = made / scales[:, None, None]
        return made.var(), np.square(made.mean(axis=(0, 2, 3))).max()

    few = Statistics(found.low, found.high, 0 * found.mean, found.covariance, 1)
    (ours, left), (nearest, mean) = error(found), error(few)
    assert ours < (0.7 if options.get("group") != 8 else 1.01) * nearest
    assert left < 1e-3 + 0.01 * mean

"""Where INT8 stands in the graph of each target, and that it computes what numpy computes."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.targets import CPU_TARGETS
from vitdeploy.backends import TARGETS
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.errors import GraphError, TargetError
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.optimize import optimize
from vitdeploy.graph.values import floats_of
from vitdeploy.quantization.observers import observe
from vitdeploy.quantization.placement import place, shape
from vitdeploy.quantization.ranges import Range, activation_scale, range_of, separate_scores
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.spec import PreprocessSpec

DEPTH = 2
LINEARS = [f"blocks.{i}.{part}" for i in range(DEPTH) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
LAYERS = ["patch_embed.proj", *LINEARS]  # the head has one row: OpenVINO is as fast with it in float
SMALL = {"head": "the layer is small and as fast in float"}
OPENVINO, ORT = "openvino-cpu", "onnxruntime-cpu"


@pytest.fixture(scope="module")
def ranges(small_export, digits):
    preprocess = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
    samples = split(digits, "none", calibration=8, evaluation=1, seed=0).calibration
    found = observe(load_graph(small_export / "model.onnx"), batches(samples, preprocess, 4), preprocess)
    return {name: range_of(each) for name, each in found.items()}


@pytest.fixture(scope="module")
def score_ranges(small_export, digits):
    preprocess = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
    samples = split(digits, "none", calibration=8, evaluation=1, seed=0).calibration
    model = load_graph(small_export / "model.onnx")
    optimize(model)  # the factor of the scores goes into the weights of the queries
    separate_scores(model)
    return {name: range_of(each) for name, each in observe(model, batches(samples, preprocess, 4), preprocess).items()}


@pytest.fixture
def fast_model(small_export):
    model = load_graph(small_export / "model.onnx")
    optimize(model)
    return model


@pytest.fixture
def model(small_export):
    return load_graph(small_export / "model.onnx")


def operators(model):
    return Counter(node.op_type for node in model.graph)


def readers(value):
    return [use.node for use in value.uses()]


# --- OpenVINO ---------------------------------------------------------------------------------------------------------


def test_openvino_places_every_linear_and_convolution(model, ranges):
    placement = place(model, ranges, OPENVINO)
    assert (placement.target, list(placement.int8), placement.float) == (OPENVINO, LAYERS, SMALL)
    assert count_int8(model) == len(LAYERS)


def test_openvino_quantizes_the_input_of_products_and_nothing_else(model, ranges):
    place(model, ranges, OPENVINO)
    quantizers = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    assert len(quantizers) == len(LAYERS)
    for quantizer in quantizers:
        [dequantizer] = readers(quantizer.outputs[0])
        assert dequantizer.op_type == "DequantizeLinear"
        assert {node.op_type for node in readers(dequantizer.outputs[0])} <= {"MatMul", "Conv"}


def test_openvino_leaves_everything_between_the_products_in_float(model, ranges):
    before = operators(model)
    place(model, ranges, OPENVINO)
    added = operators(model) - before
    assert added == {"QuantizeLinear": len(LAYERS), "DequantizeLinear": 2 * len(LAYERS)}
    assert not before - operators(model)


def test_openvino_leaves_the_products_of_attention_in_float(model, ranges):
    place(model, ranges, OPENVINO)
    products = [node for node in model.graph if node.op_type == "MatMul" and node.name.split("/")[0].endswith("attn")]
    assert len(products) == 2 * DEPTH
    inputs = [value.producer().op_type for node in products for value in node.inputs]
    assert "DequantizeLinear" not in inputs


def test_openvino_computes_the_scores_in_int8_where_queries_and_keys_have_a_linear_each(fast_model, score_ranges):
    shape(fast_model, OPENVINO)
    placement = place(fast_model, score_ranges, OPENVINO)
    assert len(placement.scores) == DEPTH - 1  # the last block has one query
    [scores] = [node for node in fast_model.graph if node.name in placement.scores]
    for operand, role in zip(scores.inputs, ("query", "key"), strict=True):
        steps = []
        value = operand
        while value.producer().op_type != "DequantizeLinear":
            steps.append(value.producer().op_type)
            value = value.producer().inputs[0]
        assert steps == ["Transpose"] * (1 + (role == "key")) + ["Reshape"]
        quantizer = value.producer().inputs[0].producer()
        _, scale, zero_point = (each.const_value.numpy() if each.const_value else None for each in quantizer.inputs)
        expected = score_ranges[f"blocks.0.attn.qkv.{role}:output"]
        assert scale == np.float32(max(-expected.low, expected.high) / 127)
        assert (zero_point.dtype, zero_point) == (np.int8, 0)


def test_openvino_runs_the_scores_in_int8(fast_model, score_ranges, tmp_path):
    shape(fast_model, OPENVINO)
    place(fast_model, score_ranges, OPENVINO)
    save_graph(fast_model, tmp_path / "model.onnx")
    with OpenVinoRunner(tmp_path / "model.onnx", name="it", batch=1) as runner:
        operations = [node.get_rt_info() for node in runner.compiled.get_runtime_model().get_ops()]
    kinds = Counter((info["layerType"].value, info["runtimePrecision"].value) for info in operations)
    assert kinds[("Subgraph", "i8")] == DEPTH - 1


def test_a_merged_query_and_key_that_is_ignored_is_not_split(fast_model, score_ranges):
    shape(fast_model, OPENVINO, ("blocks.0.attn.qkv",))
    placement = place(fast_model, score_ranges, OPENVINO, ("blocks.0.attn.qkv",))
    assert placement.scores == ()
    assert placement.float == {"blocks.0.attn.qkv": "ignored on request", **SMALL}


def test_openvino_weights_are_int8_symmetric_and_per_output_channel(model, ranges):
    layers = [linear for linear in find_linears(model) if linear.name in LAYERS]
    place(model, ranges, OPENVINO)
    for linear in layers:
        dequantizer = linear.node.inputs[1].producer()
        assert dequantizer.op_type == "DequantizeLinear"
        assert len(dequantizer.inputs) == 2  # no zero point: symmetric
        assert dequantizer.attributes.get_int("axis") == linear.out_axis
        weight, scales = (value.const_value.numpy() for value in dequantizer.inputs)
        assert weight.dtype == np.int8
        assert (weight.shape, scales.shape) == (linear.weight.shape, (linear.weight.shape[linear.out_axis],))
        steps = scales.reshape([-1 if axis == linear.out_axis else 1 for axis in range(weight.ndim)])
        assert (np.abs(weight * steps - linear.weight) <= 0.501 * steps).all()


def test_openvino_activations_are_uint8_with_the_observed_scale(model, ranges):
    layers = [linear for linear in find_linears(model) if linear.name in LAYERS]
    place(model, ranges, OPENVINO)
    for linear in layers:
        _, scale, zero_point = linear.node.inputs[0].producer().inputs
        expected = activation_scale(ranges[linear.input.name])
        assert scale.const_value.numpy() == expected[0]
        assert zero_point.const_value.numpy() == expected[1]
        assert zero_point.const_value.numpy().dtype == np.uint8


# --- ONNX Runtime -----------------------------------------------------------------------------------------------------


def test_onnxruntime_fuses_every_linear_and_leaves_the_convolution_in_float(model, ranges):
    placement = place(model, ranges, ORT)
    assert list(placement.int8) == [*LINEARS, "head"]
    assert list(placement.float) == ["patch_embed.proj"]
    assert "conv" in placement.float["patch_embed.proj"]
    found = operators(model)
    assert (found["MatMulIntegerToFloat"], found["Conv"], found["DequantizeLinear"]) == (len(LINEARS) + 1, 1, 0)
    assert found["MatMul"] == 2 * DEPTH  # those of attention
    assert count_int8(model) == len(LINEARS) + 1
    assert model.opset_imports["com.microsoft"] == 1


def test_onnxruntime_convolution_keeps_its_float_weight_and_input(model, ranges):
    [before] = [linear for linear in find_linears(model) if linear.kind == "conv"]
    place(model, ranges, ORT)
    [after] = find_linears(model)
    np.testing.assert_array_equal(after.weight, before.weight)
    assert after.input is before.input


def test_onnxruntime_has_the_bias_inside(model, ranges):
    biases = {linear.name: linear.bias for linear in find_linears(model)}
    place(model, ranges, ORT)
    fused = [node for node in model.graph if node.op_type == "MatMulIntegerToFloat"]
    for node in fused:
        assert len(node.inputs) == 7
        np.testing.assert_array_equal(floats_of(node.inputs[6]), biases[node.name.split("/")[0]])
        assert not node.inputs[5].const_value.numpy().any()  # weights are symmetric


def test_onnxruntime_quantizers_feed_the_fused_product_only(model, ranges):
    place(model, ranges, ORT)
    quantizers = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    assert len(quantizers) == len(LINEARS) + 1
    assert {node.op_type for q in quantizers for node in readers(q.outputs[0])} == {"MatMulIntegerToFloat"}


# --- choices and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_ignored_layers_stay_in_float_and_are_recorded(model, ranges, target):
    placement = place(model, ranges, target, ("head", "blocks.*.mlp.fc2"))
    ignored = {"head", *(f"blocks.{i}.mlp.fc2" for i in range(DEPTH))}
    assert {name for name, why in placement.float.items() if why == "ignored on request"} == ignored
    assert not ignored & set(placement.int8)
    assert ignored <= {linear.name for linear in find_linears(model) if linear.weight.dtype == np.float32}


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_ignoring_everything_leaves_the_graph_as_it_was(model, ranges, target):
    before = operators(model)
    assert place(model, ranges, target, ("*",)).int8 == ()
    assert operators(model) == before


def test_a_pattern_that_matches_no_layer_is_refused(model, ranges):
    with pytest.raises(GraphError, match=r"no layer matches blocks\.9\.\*, tail") as caught:
        place(model, ranges, OPENVINO, ("blocks.9.*", "head", "tail"))
    assert caught.value.found.startswith("patch_embed.proj, blocks.0.attn.qkv")
    assert count_int8(model) == 0


def test_a_layer_that_was_not_calibrated_is_refused(model, ranges):
    [last] = [linear for linear in find_linears(model) if linear.name == LAYERS[-1]]
    few = {name: found for name, found in ranges.items() if name != last.input.name}
    with pytest.raises(GraphError, match=f"the input of {last.name} was not calibrated"):
        place(model, few, ORT)


def test_an_ignored_layer_needs_no_calibration(model, ranges):
    [head] = [linear for linear in find_linears(model) if linear.name == "head"]
    few = {name: found for name, found in ranges.items() if name != head.input.name}
    assert place(model, few, ORT, ("head",)).int8 == tuple(LINEARS)


def test_an_unknown_target_is_refused(model, ranges):
    with pytest.raises(TargetError) as caught:
        place(model, ranges, "abacus")
    assert caught.value.expected == ", ".join(TARGETS)


def test_a_graph_with_nothing_to_quantize_is_refused():
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "test", [value], [out])
    with pytest.raises(GraphError, match="nothing to quantize"):
        place(ir.from_proto(helper.make_model(graph)), {}, OPENVINO)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def one_layer(weight, bias):
    """x [3, n] @ weight, + bias where there is one."""
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["y" if bias is None else "p"], name="fc/MatMul")]
    constants = [numpy_helper.from_array(weight, "weight")]
    if bias is not None:
        nodes.append(helper.make_node("Add", ["p", "bias"], ["y"], name="fc/Add"))
        constants.append(numpy_helper.from_array(bias, "bias"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, weight.shape[0]])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, weight.shape[1]])
    graph = helper.make_graph(nodes, "one_layer", [x], [y], constants)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))


def fake_quantized(x, weight, bias, low, high):
    """The placed layer in float64, straight from the definitions."""
    scale = np.float32((max(high, 0) - min(low, 0)) / 255)
    zero_point = np.rint(-min(low, 0) / scale)
    activations = (np.clip(np.rint(x / scale) + zero_point, 0, 255) - zero_point) * np.float64(scale)
    steps = (np.abs(weight).max(axis=0) / 127).astype(np.float32)
    return activations @ (np.rint(weight / steps) * steps.astype(np.float64)) + (0 if bias is None else bias)


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("low", "high"), [(-3.0, 2.0), (0.0, 4.0), (-1.0, -0.5)], ids=str)
def test_a_placed_layer_computes_what_numpy_computes(target, biased, low, high):
    generator = np.random.default_rng(5)
    weight = (generator.normal(size=(16, 8)) * np.logspace(-2, 1, 8)).astype(np.float32)
    bias = generator.normal(size=8).astype(np.float32) if biased else None
    x = generator.uniform(low - 0.5, high + 0.5, (3, 16)).astype(np.float32)  # some of it saturates
    model = one_layer(weight, bias)
    place(model, {"x": Range(low, high)}, target)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    ours, expected = session.run(None, {"x": x})[0], fake_quantized(x, weight, bias, low, high)
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()
    exact = x @ weight + (0 if bias is None else bias)
    assert np.abs(exact - expected).max() > 1e-3 * np.abs(expected).max()  # it is INT8 that was computed


def convolution_on_pixels(weight, bias, cast_first):
    """uint8 [batch, 8, 8, 3] -> NCHW float -> 2x2 patches: what is left where all normalisation was folded."""
    steps = [("Transpose", {"perm": [0, 3, 1, 2]}), ("Cast", {"to": TensorProto.FLOAT})]
    (first, options), (second, others) = reversed(steps) if cast_first else steps
    nodes = [
        helper.make_node(first, ["image"], ["between"], **options),
        helper.make_node(second, ["between"], ["floats"], **others),
        helper.make_node("Conv", ["floats", "weight", "bias"], ["y"], name="proj/Conv", strides=[2, 2]),
    ]
    constants = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")]
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["batch", 8, 8, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", len(weight), 4, 4])
    graph = helper.make_graph(nodes, "pixels", [image], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def patches_times(pixels, weight, bias):
    """The convolution in float64."""
    cut = pixels.astype(np.float64).reshape(len(pixels), 4, 2, 4, 2, 3)
    return np.einsum("nyixjc,ocij->noyx", cut, weight.astype(np.float64)) + bias.astype(np.float64)[:, None, None]


@pytest.mark.parametrize("cast_first", [False, True])
def test_a_convolution_on_bare_pixels_keeps_every_pixel_and_runs_in_int8_on_openvino(tmp_path, cast_first):
    """A step of 1 with the zero point 0 would be exact as well, and OpenVINO would take it for no quantization."""
    pytest.importorskip(CPU_TARGETS[OPENVINO].package)
    generator = np.random.default_rng(5)
    weight = (generator.normal(size=(4, 3, 2, 2)) / 255).astype(np.float32)
    bias = generator.normal(size=4).astype(np.float32)
    pixels = generator.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    model = convolution_on_pixels(weight, bias, cast_first)
    placement = place(model, {"floats": Range(3.0, 251.0)}, OPENVINO)  # of the calibration images, not of all
    assert placement.int8 == ("proj",)
    steps = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127
    expected = patches_times(pixels, np.rint(weight / steps) * steps, bias)  # weights alone are rounded
    assert np.abs(patches_times(pixels, weight, bias) - expected).max() > 1e-3 * np.abs(expected).max()

    save_graph(model, tmp_path / "model.onnx")
    (tmp_path / "engine").mkdir()
    engine = compile_engine(
        tmp_path / "model.onnx", tmp_path / "engine", target=OPENVINO, precision="int8", batch=2, placed=1
    )
    assert engine.kernels == {"int8": 1}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options, providers=["CPUExecutionProvider"])
    with make_runner(tmp_path / "engine", engine) as runner:
        compiled = runner.infer({"image": pixels})["y"]
    for how, ours in {"node by node": session.run(None, {"image": pixels})[0], "OpenVINO": compiled}.items():
        assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max(), how

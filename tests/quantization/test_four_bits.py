"""INT4 weights against ONNX Runtime's own quantizer, against numpy, and as both runtimes execute them."""

import json

import numpy as np
import pytest
from onnx import TensorProto

from tests.graph.small_graphs import Builder
from tests.quantization.test_rounding import correlated, gathered
from tests.targets import CPU_TARGETS
from vitdeploy.compilation.backend import check_placed
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.data.folder import split
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.analysis.rows import count_int4, find_linears
from vitdeploy.graph.analysis.work import count_work
from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph
from vitdeploy.graph.values import array_of
from vitdeploy.pipeline.early import check_placed as check_available
from vitdeploy.quantization.four_bits import place_four_bits
from vitdeploy.quantization.place_onnxruntime import write_int4
from vitdeploy.quantization.rounding import group_of, nearest, round_groups
from vitdeploy.runtime.ort import open_session
from vitdeploy.spec import EngineSpec
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.compile import compile_graph
from vitdeploy.stages.place import PlaceConfig, place_graph

INPUTS, OUTPUTS = 192, 96


@pytest.fixture(scope="module")
def weight():
    return np.random.default_rng(0).standard_normal((INPUTS, OUTPUTS)).astype(np.float32)


@pytest.fixture(scope="module")
def rows():
    return correlated(1, rows=2000, inputs=INPUTS).astype(np.float32)


def one_layer(weight, *, bias=True):
    """A graph of one linear between the input and a Relu."""
    b = Builder()
    product = b.linear("x", *weight.shape, "layer", weight=b.constant(weight, "w"), bias=bias)
    return b.model({"x": ["batch", 5, len(weight)]}, b.op("Relu", product))


@pytest.mark.parametrize("group", [64, 32])
def test_rounded_to_the_nearest_it_is_what_onnx_runtimes_own_quantizer_writes(weight, group):
    from onnxruntime.capi._pybind_state import quantize_matmul_4bits

    blocks = INPUTS // group
    codes, scales = np.zeros((OUTPUTS, blocks, group // 2), np.uint8), np.zeros(OUTPUTS * blocks, np.float32)
    zeros = np.zeros(OUTPUTS * ((blocks + 1) // 2), np.uint8)
    quantize_matmul_4bits(codes, weight, scales, zeros, group, OUTPUTS, INPUTS, True)
    model = one_layer(weight)
    write_int4(model, find_linears(model), {"layer": nearest(weight, group)})
    [node] = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert (array_of(node.inputs[1]) == codes).mean() > 0.999  # a half is rounded to even here, and up there
    np.testing.assert_allclose(array_of(node.inputs[2]), scales, rtol=1e-6)


def test_rounding_is_gptqs_with_the_scales_of_groups(weight, rows):
    found = gathered(rows)
    made = round_groups(weight, found, 64)
    steps = np.repeat(made.scales, 64, axis=0)
    covariance = np.cov(rows, rowvar=False, bias=True)
    # The textbook's own has one scale a column: each column of weights is rounded in units of its groups' scales.
    scaled = weight.astype(np.float64) / steps
    for column in (0, 7, 95):
        hessian = covariance * np.outer(steps[:, column], steps[:, column])
        order = np.argsort(-np.diag(covariance))
        assert np.abs(made.codes[:, column]).max() <= 8
        damped = hessian + 0.01 * np.diag(covariance).mean() * np.diag(steps[:, column].astype(np.float64) ** 2)
        inverse, left = np.linalg.inv(damped[np.ix_(order, order)]), scaled[order, column].copy()
        for i in range(INPUTS):
            code = np.clip(np.round(left[i]), -8, 7)
            assert code == made.codes[order[i], column]
            left[i + 1 :] -= (left[i] - code) * inverse[0, 1:] / inverse[0, 0]
            inverse = inverse[1:, 1:] - np.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]


def test_rounding_moves_outputs_less_than_the_nearest_does(weight, rows):
    def error(made):
        return float(np.square((rows - rows.mean(axis=0)) @ (made.values - weight)).mean())

    found = gathered(rows)
    alone = round_groups(weight, found.without_covariance(), 64)  # only scales are chosen
    assert error(round_groups(weight, found, 64)) < 0.75 * error(alone) < 0.75 * error(nearest(weight, 64))


def test_groups_and_weights_of_nothing_but_zeros():
    assert [group_of(inputs) for inputs in (768, 96, 32, 48)] == [64, 32, 32, None]
    made = nearest(np.zeros((64, 3), np.float32), 64)
    assert not made.codes.any()
    assert np.isfinite(made.scales).all() and made.group == 64


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_an_engine_multiplies_by_the_rounded_weights_in_int4_kernels(tmp_path, weight, rows, target):
    model = one_layer(weight)
    found = {"x": gathered(rows)}
    placed = place_four_bits(model, found, target)
    assert (placed.int4, placed.group, placed.float) == (("layer",), {"layer": 64}, {})
    assert count_int4(model) == 1
    assert count_work(model, 1).flops == {"int8": 2 * 5 * INPUTS * OUTPUTS}
    save_graph(model, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < 0.16 * weight.nbytes
    (tmp_path / "out").mkdir()
    how = {"target": target, "precision": "int4", "batch": 1}
    assert compile_engine(tmp_path / "model.onnx", tmp_path / "out", placed=1, **how).kernels == {"int4": 1}

    before = one_layer(weight)
    bias = find_linears(before)[0].bias
    rounded = round_groups(weight, found["x"], 64)
    x = rows[:5][None]
    expected = x @ rounded.values + bias + rows.mean(axis=0) @ (weight - rounded.values)
    [answer] = open_session(tmp_path / "model.onnx", plain=True).run(None, {"x": x})
    # MatMulNBits quantizes the rows to INT8 wherever it runs; DequantizeLinear and MatMul are exact by themselves.
    exact = 1e-5 if target == "openvino-cpu" else 1e-2
    assert np.abs(answer - np.maximum(expected, 0)).max() < exact * np.abs(expected).max()


def test_a_placed_graph_runs_on_each_target_and_says_what_it_is(tmp_path, small_export, digits):
    samples = split(digits, "none", calibration=16, evaluation=1, seed=0).calibration
    calibrate(small_export / "model.onnx", samples, tmp_path)
    for target in CPU_TARGETS:
        folder = tmp_path / target
        (folder / "engine").mkdir(parents=True)
        config = PlaceConfig(target, "int4", ignore=("head",))
        placed = place_graph(config, small_export / "model.onnx", tmp_path / "statistics.npz", folder)
        assert json.loads((folder / "placement.json").read_text(encoding="utf-8"))["int4"] == list(placed["int4"])
        assert placed["float"]["patch_embed.proj"] == "a conv has no INT4 kernel"
        assert placed["float"]["head"] == "ignored on request"
        assert placed["float"]["blocks.0.attn.proj"] == "the layer is too small to save memory"
        engine = compile_graph(folder / "model.onnx", target, 1, folder / "engine")
        assert (engine.precision, engine.weight_bits) == ("int4", None)
        assert engine.kernels["int4"] == len(placed["int4"]) > 0
        assert get_metadata(load_graph(folder / "model.onnx"), "").precision == "int4"


def test_layers_that_gain_nothing_stay_in_float_with_the_reason(rows):
    b = Builder()
    odd = b.linear("x", 48, 128, "odd")
    scores = b.linear(odd, 128, 64, "scores")
    _, order = b.op("TopK", scores, b.ints(3), outputs=2, axis=1)
    learned = b.op("Relu", b.linear(b.constant(b.random(1, 64), "queries"), 64, 64, "learned"))
    kept = b.op("Add", b.linear(odd, 128, 64, "kept"), learned)
    flat = b.op("Relu", b.linear(b.op("Reshape", odd, b.ints(-1, 128)), 128, 64, "flat"))
    model = b.model({"x": ["batch", 5, 48]}, b.op("Cast", order, to=1), kept, flat)
    found = {str(linear.input.name): gathered(rows[:, : len(linear.weight)]) for linear in find_linears(model)}
    placed = place_four_bits(model, found, "openvino-cpu")
    assert placed.int4 == ("kept",)
    assert placed.float == {
        "odd": "its 48 inputs are not a multiple of 32",
        "scores": "its outputs are ranked",
        "learned": "its input is the same for every image, so the runtime computes it once",
        "flat": "OpenVINO runs it in float because its input is flattened to two axes",
    }


def test_without_a_linear_or_its_statistics_or_a_kernel_it_is_refused(weight):
    b = Builder()
    convolved = b.op("Conv", "x", b.constant(b.random(8, 3, 3, 3), "w"), name="conv/Conv")
    with pytest.raises(GraphError, match="there is nothing to store in 4 bits"):
        place_four_bits(b.model({"x": [1, 3, 8, 8]}, convolved), {}, "openvino-cpu")
    with pytest.raises(GraphError, match="the input of layer was not calibrated"):
        place_four_bits(one_layer(weight), {}, "onnxruntime-cpu")
    with pytest.raises(CapabilityError, match="tensorrt has no INT4"):
        place_four_bits(one_layer(weight), {}, "tensorrt")
    for target in ("tensorrt", "openvino-gpu", "onnxruntime-cuda"):
        with pytest.raises(CapabilityError, match=f"{target} does not support int4") as caught:
            check_available(target, "int4")
        assert caught.value.exit_code == 4
        assert "a target that supports int4: onnxruntime-cpu, openvino-cpu" in caught.value.fix
    engine = EngineSpec("openvino-cpu", "int4", "g", ("g",), 1, True, "CPU", (), (), kernels={"fp32": 2})
    with pytest.raises(CapabilityError, match="openvino-cpu did not run the graph in INT4") as caught:
        check_placed(engine, "int4", 2)
    assert caught.value.found == "0 of 2 placed layers in INT4 kernels: {'fp32': 2}"
    assert "--ignore LAYER" in caught.value.fix


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_large_tables_of_embeddings_are_stored_in_int8_rows(tmp_path, weight, rows, target):
    b = Builder()
    table = np.random.default_rng(2).standard_normal((300, INPUTS)).astype(np.float32)
    looked_up = b.op("Gather", b.constant(table, "table"), "tokens", name="tokens/Gather")
    places = b.op("Gather", b.constant(table[:40], "few"), "tokens", name="places/Gather")
    product = b.linear(b.op("Add", looked_up, places), *weight.shape, "layer", weight=b.constant(weight, "w"))
    model = b.model({"tokens": (["batch", 5], TensorProto.INT64)}, b.op("Relu", product))
    linear = find_linears(model)[0]
    placed = place_four_bits(model, {str(linear.input.name): gathered(rows)}, target)
    assert placed.embeddings == ("tokens",)
    save_graph(model, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < table.nbytes / 4 + weight.nbytes / 6 + table[:40].nbytes + 4000
    session = open_session(tmp_path / "model.onnx", plain=True)
    tokens = np.array([[3, 1, 39, 20, 7]])
    step = np.abs(table).max(axis=1, keepdims=True) / 127
    read = table[tokens] - (np.rint(table / step) * step)[tokens]
    assert 0 < np.abs(read).max() <= step.max() / 2
    rounded = round_groups(weight, gathered(rows), 64).values
    expected = ((np.rint(table / step) * step)[tokens] + table[tokens]) @ rounded
    expected += linear.bias + rows.mean(axis=0) @ (weight - rounded)
    exact = 1e-5 if target == "openvino-cpu" else 1e-2
    [answer] = session.run(None, {"tokens": tokens})
    assert np.abs(answer - np.maximum(expected, 0)).max() < exact * np.abs(expected).max()

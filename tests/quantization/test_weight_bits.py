"""7-bit weights: for CPUs that add two products of u8 and s8 in 16 bits, which saturates (vpmaddubsw)."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.graph.builder import Builder
from tests.targets import CPU_TARGETS
from vitdeploy.data.folder import split
from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph
from vitdeploy.graph.passes.optimize import optimize
from vitdeploy.graph.values import array_of
from vitdeploy.quantization.ranges import Statistics, load_statistics, quantize_weight
from vitdeploy.quantization.rounding import Products, expected_error, products_error, round_weight
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.frame import ReferenceOutputs
from vitdeploy.search.trials import opened
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.compile import compile_graph
from vitdeploy.stages.place import PlaceConfig, place_graph

ROOT = Path(__file__).parent.parent.parent
LARGEST = 63


def vpmaddubsw(pixels, weights):
    """Intel's instruction on vectors of u8 and s8: products of neighbours are added in saturating int16.

    Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, PMADDUBSW.
    """
    products = pixels.astype(np.int32) * weights.astype(np.int32)
    return np.clip(products[..., ::2] + products[..., 1::2], -(2**15), 2**15 - 1)


def dot_without_vnni(pixels, weights):
    """What follows it in kernels without VNNI: the pairs are added in int32 (vpmaddwd by ones, vpaddd)."""
    return vpmaddubsw(pixels, weights).sum(axis=-1)


def exact(pixels, weights):
    return (pixels.astype(np.int64) * weights).sum(axis=-1)


def dot_of_neon(pixels, weights):
    """Arm without dot products, in ONNX Runtime and in Arm's Compute Library: pixels are moved to -128..127, two
    products are added in int16, which wraps (smull, smlal), sums in int32 (sadalp), and what was moved is put back.

    Sources: as of `vitdeploy.runtime.host.saturates`. QEMU 10.0.13 with -cpu cortex-a53 and -cpu cortex-a72 gave the
    same numbers for the values below in ONNX Runtime 1.32.0 (MatMulInteger, QGemm) and OpenVINO 2026.4.1, and the exact
    ones with -cpu neoverse-n1, which has dot products.
    """
    products = (pixels.astype(np.int16) - 128) * weights.astype(np.int16)
    pairs = products[..., ::2] + products[..., 1::2]
    assert pairs.dtype == np.int16
    return pairs.sum(axis=-1, dtype=np.int32) + 128 * weights.sum(dtype=np.int32)


floats = st.floats(-4, 4, width=32)


@settings(max_examples=50, deadline=None)
@given(
    arrays.arrays(np.uint8, (4, 16), elements=st.one_of(st.just(255), st.integers(0, 255))),
    arrays.arrays(np.float32, (16, 3), elements=floats),
)
def test_7_bits_never_saturate(pixels, weight):
    rounded, _ = quantize_weight(weight, 1, 7)
    for column in rounded.T:
        assert (dot_without_vnni(pixels, column) == exact(pixels, column)).all()


@pytest.mark.parametrize(("sign", "saturated"), [(1, 32_767), (-1, -32_768)])
def test_8_bits_do(sign, saturated):
    pixels = np.array([255, 255], np.uint8)
    eight, _ = quantize_weight(np.full((2, 1), sign, np.float32), 1)
    seven, _ = quantize_weight(np.full((2, 1), sign, np.float32), 1, 7)
    assert dot_without_vnni(pixels, eight[:, 0]) == saturated
    assert exact(pixels, eight[:, 0]) == sign * 2 * 255 * 127
    assert dot_without_vnni(pixels, seven[:, 0]) == exact(pixels, seven[:, 0]) == sign * 2 * 255 * LARGEST


@settings(max_examples=50, deadline=None)
@given(
    arrays.arrays(np.uint8, (4, 16), elements=st.sampled_from((0, 1, 127, 128, 254, 255))),
    arrays.arrays(np.float32, (16, 3), elements=floats),
)
def test_8_bits_are_right_on_arm_without_dot_products(pixels, weight):
    rounded, _ = quantize_weight(weight, 1)
    for column in rounded.T:
        assert (dot_of_neon(pixels, column) == exact(pixels, column)).all()


@pytest.mark.parametrize(("value", "wrong"), [(127, 0), (-127, 0), (-128, -2_097_152)])
def test_only_a_weight_of_minus_128_would_be_too_much_for_it(value, wrong):
    """64 pixels of 0; no weight of ours is that small, and graphs that others quantized are refused."""
    pixels, weights = np.zeros(64, np.uint8), np.full(64, value, np.int8)
    assert dot_of_neon(pixels, weights) == wrong
    assert quantize_weight(np.linspace(-4, 3, 64, dtype=np.float32)[:, None], 1)[0].min() == -127


@pytest.fixture
def rows():
    """Of a correlated input: float64 [rows, 24]."""
    random = np.random.default_rng(0)
    return random.normal(size=(2000, 24)) @ random.normal(size=(24, 24))


def statistics_of(x):
    return Statistics(x.min(0), x.max(0), x.mean(0), np.cov(x.T, bias=True), len(x))


def test_rounding_by_covariance_stays_in_7_bits_and_is_nearer_than_rounding_alone(rows):
    weight = np.random.default_rng(1).normal(size=(24, 8)).astype(np.float32)

    def error(rounded, scales):
        moved = rows @ (weight - rounded * scales)
        return moved.var(axis=0).sum()

    rounded, scales = round_weight(weight, statistics_of(rows), 0.0, bits=7)
    assert np.abs(rounded.astype(int)).max() <= LARGEST
    assert error(rounded, scales) < 0.6 * error(*quantize_weight(weight, 1, 7))
    eight = error(*round_weight(weight, statistics_of(rows), 0.0))
    assert 2.5 < error(rounded, scales) / eight < 6  # steps are twice as wide


def test_the_expected_error_knows_the_bits(rows):
    weight = np.random.default_rng(1).normal(size=(24, 8)).astype(np.float32)
    found, step = statistics_of(rows), 1e-9
    for error in (
        lambda bits: expected_error(found, [weight], step, bits),
        lambda bits: products_error(found, Products.of_rows(weight), step, bits),
    ):
        assert error(7) / error(8) == pytest.approx((127 / LARGEST) ** 2, rel=1e-6)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, small_export, digits):
    """A folder with model.onnx, whose scores can be INT8, and its statistics.npz."""
    out = tmp_path_factory.mktemp("calibrated")
    model = load_graph(small_export / "model.onnx")
    optimize(model)  # the factor of the scores goes into the weights of the queries
    save_graph(model, out / "model.onnx")
    samples = split(digits, "none", calibration=16, evaluation=1, seed=0).calibration
    calibrate(out / "model.onnx", samples, out)
    return out


def int8_weights(model):
    found = {str(name): array_of(value) for name, value in model.graph.initializers.items()}
    return {name: each for name, each in found.items() if each is not None and each.dtype == np.int8 and each.ndim > 1}


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_placement_of_7_bits_has_no_larger_weight_and_float_scores(tmp_path, calibrated, target):
    files = calibrated / "model.onnx", calibrated / "statistics.npz", tmp_path
    assert bool(place_graph(PlaceConfig(target, "int8"), *files)["scores"]) is (target == "openvino-cpu")
    placed = place_graph(PlaceConfig(target, "int8", weight_bits=7), *files)
    model = load_graph(tmp_path / "model.onnx")
    weights = int8_weights(model)
    assert len(weights) == len(placed["int8"]) > 8
    assert {int(np.abs(each.astype(int)).max()) for each in weights.values()} == {LARGEST}
    assert placed["scores"] == ()
    assert get_metadata(model, "").weight_bits == 7
    (tmp_path / "engine").mkdir()
    assert compile_graph(tmp_path / "model.onnx", target, 1, tmp_path / "engine").weight_bits == 7


def test_a_float_placement_says_nothing_of_bits(tmp_path, small_export):
    place_graph(PlaceConfig("openvino-cpu", "fp32", weight_bits=7), small_export / "model.onnx", None, tmp_path)
    assert get_metadata(load_graph(tmp_path / "model.onnx"), "").weight_bits is None


def test_searches_ask_about_the_weights_that_are_placed(calibrated):
    graph = calibrated / "model.onnx"
    model = load_graph(graph)
    images = get_metadata(model, "").images
    pixels = np.zeros((1, 32, 32, 1), np.uint8)
    with OnnxRuntimeRunner(graph, name="float") as runner:
        reference_outputs = ReferenceOutputs(runner, pixels, images, "classification", batch=1)
    known = load_statistics(calibrated / "statistics.npz")
    with opened(model, known, "openvino-cpu", reference_outputs, bits=7) as trials:
        forms = [form for each in trials.runner._forms.values() for form in each]
    assert len(forms) > 8
    assert {int(np.abs(form.weight[0].astype(int)).max()) for form in forms} == {LARGEST}
    assert {form.output for form in forms} == {None}


ASK = """
import sys, numpy, json
from pathlib import Path
from vitdeploy.runtime.openvino import OpenVinoRunner
with OpenVinoRunner(Path(sys.argv[1]), name="child") as runner:
    [sums] = runner.infer({"x": numpy.full((1, 8, 64), 255, numpy.float32)}).values()
    print(json.dumps(sums[0, 0, 0].item()))
"""


def sum_of_255s(folder, weight):
    """What OpenVINO says of 64 products of 255 with one weight, told that the CPU has AVX2 and no more."""
    b = Builder()
    x = b.input("x", [1, 8, 64])
    quantized = b.add("QuantizeLinear", x, np.float32(1), np.uint8(0))
    row = b.add("DequantizeLinear", quantized, np.float32(1), np.uint8(0))
    columns = b.add("DequantizeLinear", np.full((64, 16), weight, np.int8), np.full(16, 0.5, np.float32), axis=1)
    file = folder / f"{weight}.onnx"
    file.write_bytes(b.model(b.add("MatMul", row, columns)).SerializeToString())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", ASK, str(file)]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="vpmaddubsw is an instruction of x86")
def test_openvino_without_vnni_is_wrong_with_8_bits_and_right_with_7(tmp_path):
    eight = sum_of_255s(tmp_path, 127)
    if eight == 64 * 255 * 127 * 0.5:
        pytest.skip("this build of OpenVINO does not honour ONEDNN_MAX_CPU_ISA")
    assert eight == dot_without_vnni(np.full(64, 255, np.uint8), np.full(64, 127, np.int8)) * 0.5
    assert sum_of_255s(tmp_path, LARGEST) == 64 * 255 * LARGEST * 0.5

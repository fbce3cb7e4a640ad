"""Half precision and TensorRT's INT8 and FP8: what stays in float32 and why, where Q/DQ stands, what is lost."""

import numpy as np
import onnx_ir as ir
import pytest

from tests.graph.passes.test_rotation import vit
from tests.graph.small_graphs import Builder, difference, random_feeds, run
from vitdeploy.backends import TARGETS
from vitdeploy.data.folder import split
from vitdeploy.errors import CapabilityError, DataError, GraphError
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.half.half import emulate, scale_residual, type_graph
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.pipeline.early import check_placed
from vitdeploy.quantization.half import HEADROOM, LARGEST, LIMIT, HalfPlan, plan_half
from vitdeploy.quantization.observers import Extremes, with_extremes
from vitdeploy.quantization.place_tensorrt import _grid, write
from vitdeploy.quantization.ranges import Range, quantize_weight
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.place import PlaceConfig, place_graph
from vitdeploy.stages.typed import place_typed

TYPED = [name for name, row in TARGETS.items() if row.typed]
PIXELS = PreprocessSpec(8, (8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def extremes_of(model, feeds):
    """(the largest magnitude, what rounding loses) by tensor."""
    probe, measured, rounded = with_extremes(model)
    found = run(ir.to_proto(probe), feeds)[len(model.graph.outputs) :]
    lost = found[1].tolist() if rounded else []
    return dict(zip(measured, found[0].tolist(), strict=True)), dict(zip(rounded, lost, strict=True))


# --- the range pass ---------------------------------------------------------------------------------------------------


def test_extremes_are_those_of_every_tensor():
    b = Builder()
    x = b.op("Mul", "x", b.constant(np.float32(2**-24)), name="small")
    model = b.model({"x": ["batch", 4]}, b.op("Neg", x, name="out"), b.op("Transpose", "x", name="moved"))
    feeds = {"x": np.array([[0.5, -3, 0, 0.25]], np.float32)}
    assert extremes_of(model, feeds) == ({"small": 3 * 2**-24, "out": 3 * 2**-24}, {})
    # float16 has 2^-24 and nothing smaller: half of it is rounded to zero; zero was zero before.
    type_graph(model, "fp16", {})
    largest, lost = extremes_of(emulate(model), feeds)
    assert lost["small"] == 0.5
    assert largest["small/rounded"] == 3 * 2**-24 and "small" not in largest


def test_images_are_put_together():
    model = vit()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    scale_residual(model, 18)
    type_graph(model, "fp16", {})
    emulated = emulate(model)
    alone = []
    for batch in (pixels[:1], pixels[1:3], pixels[3:]):
        with Extremes(emulated, PIXELS) as extremes:
            extremes.update(batch)
            alone.append(extremes)
    with Extremes(emulated, PIXELS) as extremes:
        for batch in (pixels[:2], pixels[2:]):
            extremes.update(batch)
    for name, size in extremes.largest().items():
        assert size == pytest.approx(max(each.largest()[name] for each in alone), rel=1e-5)
    assert 0 < max(extremes.lost().values()) < 1
    for name, share in extremes.lost().items():
        shares = [each.lost()[name] for each in alone]
        assert share == pytest.approx(np.average(shares, weights=[1, 2, 1]), abs=1e-6)


def test_what_is_not_finite_in_float32_is_named():
    b = Builder()
    model = b.model({"x": ["batch", 3, 8, 8]}, b.op("Div", "x", b.constant(np.float32(0)), name="division"))
    with Extremes(model, PIXELS) as extremes, pytest.raises(DataError) as caught:
        extremes.update(np.full((1, 8, 8, 3), 255, np.uint8))
    assert caught.value.message == "the activations are not finite in float32"
    assert "division" in caught.value.found and "image 1" in caught.value.found


# --- what stays in float32 --------------------------------------------------------------------------------------------


def typed(model, feeds, half="fp16"):
    """(the plan, the answers of the typed graph) of a float graph, which is changed."""
    plan = plan_half(model, extremes_of(model, feeds)[0], half)
    type_graph(model, half, plan.float_fallback)
    return plan, run(ir.to_proto(emulate(model)), feeds)[0]


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_a_plain_transformer_needs_nothing(half):
    model = vit()
    feeds = random_feeds(ir.to_proto(model), 4, 0)
    expected = run(ir.to_proto(model), feeds)[0]
    plan, found = typed(model, feeds, half)
    assert (plan.float_fallback, plan.exponent) == ({}, 0)
    assert difference(found, expected) < {"fp16": 5e-3, "bf16": 5e-2}[half]


@pytest.mark.parametrize("times", [2**12, 2**20])
def test_a_large_stream_is_scaled_into_the_range_as_a_whole(times):
    model = vit()
    feeds = random_feeds(ir.to_proto(model), 4, 0)
    expected = run(ir.to_proto(model), feeds)[0]
    scale_residual(model, -int(np.log2(times)))
    assert max(extremes_of(model, feeds)[0].values()) > LIMIT
    plan, found = typed(model, feeds)
    assert plan.exponent > 0 and plan.float_fallback == {}
    assert np.isfinite(found).all() and difference(found, expected) < 5e-3


def test_in_bfloat16_a_large_stream_stays():
    model = vit()
    feeds = random_feeds(ir.to_proto(model), 4, 0)
    scale_residual(model, -20)
    expected = run(ir.to_proto(model), feeds)[0]
    plan, found = typed(model, feeds, "bf16")
    assert plan.exponent == 0 and difference(found, expected) < 5e-2


def large_product(factor):
    """A product that is too large, and its sum with a bias; then a norm of it."""
    b = Builder()
    x = b.linear("x", 8, 8, "fc", weight=b.constant(b.random(8, 8) * np.float32(factor), "fc.weight_t"))
    return b.model({"x": ["batch", 5, 8]}, b.linear(b.norm(x, "norm"), 8, 3, "head"))


def test_a_large_product_is_computed_in_half_and_multiplied_in_float32():
    model = large_product(1e5)
    feeds = random_feeds(ir.to_proto(model), 4, 0)
    expected = run(ir.to_proto(model), feeds)[0]
    plan, found = typed(model, feeds)
    kinds = {node.name: node.outputs[0].dtype for node in model.graph}
    assert kinds["fc/MatMul"] == kinds["head/MatMul"] == ir.DataType.FLOAT16
    assert set(plan.float_fallback) == {"fc/unscaled", "fc/Add", "norm/LayerNormalization"}
    assert "numbers up to" in plan.float_fallback["fc/Add"]
    assert difference(found, expected) < 5e-3


def test_small_numbers_and_sums_stay_in_float32():
    b = Builder()
    x = b.op("Mul", "x", b.constant(np.float32(1e-6)), name="tiny")
    mean = b.op("ReduceMean", "x", b.ints(1), keepdims=1, name="mean")
    model = b.model({"x": ["batch", 8]}, b.op("Add", x, mean, name="out"))
    plan, _ = typed(model, random_feeds(ir.to_proto(model), 4, 0))
    assert plan.float_fallback["mean"] == "it sums many numbers"
    assert plan.float_fallback["tiny"] == "one of its constants has a largest magnitude of 1e-06"


def test_there_is_room_for_other_images():
    assert LIMIT * HEADROOM == LARGEST == np.finfo(np.float16).max


# --- Q/DQ for TensorRT ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "pixels", "movable", "shift", "step"),
    [
        (Range(-1, 1), False, True, 0, 1 / 127),
        (Range(-0.17, 5), False, True, 2.415, 2.585 / 127),
        (Range(-0.17, 5), False, False, 0, 5 / 127),
        (Range(2, 5), False, True, 2.5, 2.5 / 127),
        (Range(0, 255), True, True, 128, 1),
    ],
)
def test_ranges_are_moved_to_lie_around_zero(bounds, pixels, movable, shift, step):
    found = _grid(bounds, pixels, movable)
    assert found == pytest.approx((shift, step), rel=1e-3)
    assert [float(np.float16(each)) for each in found] == list(found)  # numbers of the type they will have
    codes = np.rint((np.array([min(bounds.low, 0), max(bounds.high, 0)]) - found[0]) / found[1])
    assert np.abs(codes).max() <= 128


def written(model, layers=None):
    linears = [each for each in find_linears(model) if layers is None or each.name in layers]
    weights = {each.name: quantize_weight(each.weight, each.out_axis) for each in linears}
    write(model, linears, {str(each.input.name): Range(-0.5, 4.0) for each in linears}, weights)


def test_a_shift_goes_into_the_norm_or_an_add_and_back_out_of_the_bias():
    model = vit()
    feeds = random_feeds(ir.to_proto(model), 4, 0)
    before = run(ir.to_proto(model), feeds)[0]
    written(model, ["blocks.0.mlp.fc1", "blocks.0.mlp.fc2"])
    behind = {}
    for name in ("blocks.0.mlp.fc1", "blocks.0.mlp.fc2"):
        [node] = [node for node in model.graph if node.name == f"{name}/MatMul"]
        behind[name] = node.inputs[0].producer().inputs[0].producer().inputs[0].producer().op_type
    assert behind == {"blocks.0.mlp.fc1": "LayerNormalization", "blocks.0.mlp.fc2": "Add"}
    # Without the rounding it is the same function, but for what the range cuts off and the weights' rounding.
    assert difference(run(ir.to_proto(model), feeds)[0], before) < 0.5


def test_every_product_has_one_zero_point_of_zero_and_weights_of_one_axis(small_export):
    model = load_graph(small_export / "model.onnx")
    written(model)
    linears = [node for node in model.graph if node.op_type in ("MatMul", "Conv") and _quantized(node)]
    assert len(linears) == len(find_linears(load_graph(small_export / "model.onnx")))
    for node in model.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert len(node.inputs) < 3 or not node.inputs[2].const_value.numpy().any()
            scales = node.inputs[1].const_value.numpy()
            assert (scales > 0).all() and (scales == scales.astype(np.float16)).all()


def _quantized(node):
    producers = [value.producer() for value in node.inputs[:2]]
    return all(each is not None and each.op_type == "DequantizeLinear" for each in producers)


# --- the stage --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(digits):
    return split(digits, "none", calibration=2, evaluation=1, seed=0).calibration


def test_layers_are_left_in_float32_on_request(small_export, samples, tmp_path):
    config = PlaceConfig("tensorrt", "fp16", ("blocks.0.mlp.*",))
    found = place_typed(config, small_export / "model.onnx", None, samples, tmp_path)
    assert set(found["half"]["float32"].values()) == {"ignored on request"}
    assert len(found["half"]["float32"]) == 2 and found["half"]["macs"]["float32"] > 0
    with pytest.raises(GraphError, match="no layer matches"):
        config = PlaceConfig("tensorrt", "fp16", ("nothing",))
        place_typed(config, small_export / "model.onnx", None, samples, tmp_path)


def test_a_placed_graph_is_not_placed_again(small_export, samples, tmp_path):
    place_graph(PlaceConfig("openvino-cpu", "fp32"), small_export / "model.onnx", None, tmp_path)
    with pytest.raises(GraphError, match="already quantized or placed"):
        place_typed(PlaceConfig("tensorrt", "fp16"), tmp_path / "model.onnx", None, samples, tmp_path)


def test_precisions_that_are_no_types_are_refused():
    with pytest.raises(CapabilityError) as caught:
        check_placed("openvino-cpu", "fp16")
    # A compilation is proposed where this CPU has such kernels only.
    there = "vitdeploy compile DIR --target openvino-cpu --precision fp16 -o OUT"
    assert caught.value.fix.startswith("choose fp32") or caught.value.fix.endswith(there)
    with pytest.raises(CapabilityError):
        check_placed("onnxruntime-cuda", "int8")
    for target in TYPED:
        check_placed(target, "fp16")


def test_overflow_in_half_names_the_node(seeded_export, samples, tmp_path, monkeypatch):
    monkeypatch.setattr("vitdeploy.stages.typed.plan_half", lambda *_: HalfPlan({}))
    model = load_graph(seeded_export / "model.onnx")
    scale_residual(model, -18)
    save_graph(model, tmp_path / "large.onnx")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DataError) as caught:
        place_typed(PlaceConfig("tensorrt", "fp16"), tmp_path / "large.onnx", None, samples, out)
    assert caught.value.message == "the activations are not finite in float16"
    assert "infinity from the node" in caught.value.found and "bf16" in caught.value.fix
    assert not list(out.iterdir())

"""Types written into a graph: one type an operation, and what they round and lose, as the emulated graph shows it."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from tests.graph.passes.test_rotation import NORMS, READS, by_convolution, by_linear, vit, without_norm
from tests.graph.small_graphs import Builder, difference, random_feeds, run, run_in_double, weights
from vitdeploy.errors import GraphError
from vitdeploy.graph.half.half import (
    NUMPY,
    TYPES,
    emulate,
    half_roles,
    patches_to_matmul,
    scale_residual,
    stream_tensors,
    type_graph,
)
from vitdeploy.quantization.half import lift_masks

HALVES = ("fp16", "bf16")


def full_check(model):
    """ONNX's own inference finds no operation whose inputs are of two types, and agrees with the types we wrote."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def answers(model, feeds):
    [found] = run(ir.to_proto(model), feeds)
    return found


# --- the residual stream ----------------------------------------------------------------------------------------------


@given(
    exponent=st.integers(-8, 12),
    read=st.sampled_from(list(READS)),
    embed=st.sampled_from([by_linear, by_convolution]),
    prefix=st.integers(0, 3),
    by=st.sampled_from(["Pad", "Concat"]),
)
@settings(max_examples=15, deadline=None)
def test_a_scaled_stream_is_the_same_function_to_the_last_bit(exponent, read, embed, prefix, by):
    model = vit(prefix=max(prefix, 2), embed=embed, read=READS[read], by=by)
    before = ir.to_proto(model)
    feeds = random_feeds(before, 2, 1)
    assert scale_residual(model, exponent) == NORMS
    for ours, theirs in zip(run_in_double(full_check(model), feeds), run_in_double(before, feeds), strict=True):
        assert difference(ours, theirs) < 1e-12


def test_the_stream_is_what_becomes_smaller_and_nothing_else():
    model = vit()
    names = sorted(stream_tensors(model))
    assert {"embedded", "blocks.1.mlp.fc2/MatMul", "blocks.0.attn.proj/MatMul"} <= set(names)
    others = sorted(
        {str(v.name) for node in model.graph for v in node.outputs if v.dtype == ir.DataType.FLOAT} - set(names)
    )
    before = ir.to_proto(model)
    feeds = random_feeds(before, 2, 1)

    def tensors(proto):
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in (*names, *others))
        return dict(zip(("result", *names, *others), run(proto, feeds), strict=True))

    old = tensors(before)
    scale_residual(model, 3)
    new = tensors(ir.to_proto(model))
    for name in names:
        np.testing.assert_array_equal(new[name] * 8, old[name])
    for name in others:
        np.testing.assert_allclose(new[name], old[name], rtol=1e-5, atol=1e-5)


def test_a_linear_that_reads_the_stream_itself_takes_the_scale_back():
    model = vit(read=without_norm)
    before = ir.to_proto(model)
    feeds = random_feeds(before, 2, 1)
    assert scale_residual(model, 5) == NORMS - 1
    np.testing.assert_allclose(answers(model, feeds), run(before, feeds)[0], rtol=1e-5)


def test_norms_behind_the_sum_are_no_stream_that_can_be_scaled():
    b = Builder()
    x = b.norm(b.op("Add", "x", b.linear("x", 8, 8, "fc")), "norm")
    model = b.model({"x": ["batch", 5, 8]}, b.linear(x, 8, 3, "head"))
    before = ir.to_proto(model)
    assert scale_residual(model, 3) == 0 and not stream_tensors(model)
    assert ir.to_proto(model) == before


# --- types ------------------------------------------------------------------------------------------------------------


@given(
    half=st.sampled_from(HALVES), read=st.sampled_from(list(READS)), embed=st.sampled_from([by_linear, by_convolution])
)
@settings(max_examples=10, deadline=None)
def test_every_operation_has_one_type_and_the_interface_stays(half, read, embed):
    model = vit(read=READS[read], embed=embed)
    before = ir.to_proto(model)
    type_graph(model, half, {})
    proto = full_check(model)
    assert proto.graph.input == before.graph.input
    assert [(v.name, v.type.tensor_type.elem_type) for v in proto.graph.output] == [("result", TensorProto.FLOAT)]
    floats = [n for n in model.graph if n.op_type != "Cast" and any(v.dtype == ir.DataType.FLOAT for v in n.outputs)]
    assert {n.op_type for n in floats} == ({"Conv"} if half == "bf16" and embed is by_convolution else set())
    large = [array for array in weights(model).values() if array.size > 1 and array.dtype.kind != "i"]
    assert {array.dtype for array in large if array.ndim == 2} == {np.dtype(NUMPY[half])}


def test_weights_take_half_of_the_bytes():
    model = vit()
    size = sum(array.nbytes for array in weights(model).values() if array.dtype == np.float32)
    type_graph(model, "fp16", {})
    halves = {name: array for name, array in weights(model).items() if array.dtype.kind == "f"}
    assert {array.dtype for array in halves.values()} == {np.dtype(np.float16)}
    assert sum(array.nbytes for array in halves.values()) == size / 2


def test_an_island_stays_in_float32_with_a_cast_on_either_side():
    model = vit()
    name = "blocks.0.mlp.fc1/MatMul"
    type_graph(model, "fp16", {name: "asked for"})
    full_check(model)
    node = next(node for node in model.graph if node.name == name)
    assert [value.dtype for value in (*node.inputs, *node.outputs)] == [ir.DataType.FLOAT] * 3
    assert node.inputs[0].producer().op_type == "Cast"
    [reader] = node.outputs[0].uses()
    assert reader.node.op_type == "Cast" and reader.node.outputs[0].dtype == ir.DataType.FLOAT16


def test_a_tensor_is_cast_once_however_many_read_it():
    b = Builder()
    parts = [b.linear("x", 8, 8, f"fc{i}") for i in range(3)]
    model = b.model({"x": ["batch", 8]}, b.op("Add", b.op("Add", *parts[:2]), parts[2]))
    type_graph(model, "fp16", {})
    assert [node.op_type for node in model.graph].count("Cast") == 2


def test_what_a_branch_reads_from_outside_is_float32():
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["hidden", "hidden"], ["inner"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inner", TensorProto.FLOAT, ["batch", 8])],
    )
    b = Builder()
    x = b.linear("x", 8, 8, "fc", bias=False)
    b.nodes[-1].output[0] = "hidden"
    b.nodes[-1].name = "hidden"
    assert x != "hidden"
    result = b.op("If", b.constant(np.array(True)), then_branch=body, else_branch=body)
    model = b.model({"x": ["batch", 8]}, b.op("Neg", result))
    feeds = {"x": np.ones((2, 8), np.float32)}
    before = run(ir.to_proto(model), feeds)[0]
    type_graph(model, "fp16", {})
    np.testing.assert_allclose(answers(model, feeds), before, rtol=5e-3)


def test_inputs_that_onnx_has_in_float32_alone_stay():
    b = Builder()
    grown = b.op("Resize", "x", "", b.constant(np.array([1, 1, 2, 2], np.float32)), mode="linear")
    model = b.model({"x": ["batch", 3, 4, 4]}, grown)
    type_graph(model, "fp16", {})
    full_check(model)
    [node] = [node for node in model.graph if node.op_type == "Resize"]
    assert [value.dtype for value in node.inputs if value is not None] == [ir.DataType.FLOAT16, ir.DataType.FLOAT]


def test_operations_without_half_are_known():
    b = Builder()
    model = b.model({"x": ["batch", 3, 4, 4]}, b.op("Conv", "x", b.constant(b.random(2, 3, 2, 2))))
    [node] = model.graph
    assert half_roles(node, 20, "bf16") is None and half_roles(node, 22, "bf16") is not None
    assert half_roles(node, 20, "fp16")[0] == (True, True)
    foreign = ir.node("Gelu", [model.graph.inputs[0]], domain="com.microsoft")
    assert half_roles(foreign, 20, "fp16") is None
    assert half_roles(ir.node("NoSuchThing", [model.graph.inputs[0]]), 20, "fp16") is None


def test_a_constant_beyond_the_range_is_refused():
    b = Builder()
    model = b.model({"x": ["batch", 8]}, b.op("Mul", "x", b.constant(np.float32(1e5), "large")))
    with pytest.raises(GraphError) as caught:
        type_graph(model, "fp16", {})
    assert "large" in caught.value.message and caught.value.found == "1e+05"


# --- emulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_the_emulated_graph_rounds_every_tensor_as_numpy_does(half):
    b = Builder()
    hidden = b.op("Relu", b.linear("x", 8, 16, "fc1"))
    model = b.model({"x": ["batch", 8]}, b.linear(hidden, 16, 4, "fc2"))
    array = {name: value.astype(np.float32) for name, value in weights(model).items()}
    kind = NUMPY[half]

    def r(x):
        return x.astype(kind).astype(np.float32)

    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    first = np.maximum(r(r(r(x) @ r(array["fc1.weight_t"])) + r(array["fc1.bias"])), 0)
    expected = r(r(first @ r(array["fc2.weight_t"])) + r(array["fc2.bias"]))
    type_graph(model, half, {})
    found = answers(emulate(model), {"x": x})
    assert found.dtype == np.float32
    # A sum in another order may round to the neighbour.
    assert np.mean(found == expected) > 0.95
    np.testing.assert_allclose(found, expected, rtol=2 * float(ml_dtypes.finfo(kind).eps), atol=1e-2)


@pytest.mark.parametrize("half", HALVES)
def test_it_is_near_the_float_graph_and_not_the_same(half):
    model = vit()
    before = ir.to_proto(model)
    feeds = random_feeds(before, 8, 2)
    type_graph(model, half, {})
    copy = ir.to_proto(model)
    found, expected = answers(emulate(model), feeds), run(before, feeds)[0]
    assert 0 < difference(found, expected) < {"fp16": 5e-3, "bf16": 5e-2}[half]
    assert ir.to_proto(model) == copy  # the typed graph itself is as it was


def test_emulation_agrees_with_a_runtime_that_knows_the_type():
    model = vit()
    feeds = random_feeds(ir.to_proto(model), 8, 2)
    type_graph(model, "fp16", {})
    assert difference(answers(emulate(model), feeds), answers(model, feeds)) < 5e-3


def test_a_stream_beyond_the_range_overflows_and_the_scale_saves_it():
    model = vit()
    scale_residual(model, -20)  # a million times as large, the same function
    before = ir.to_proto(model)
    feeds = random_feeds(before, 8, 2)
    expected = run(before, feeds)[0]
    bare = model.clone()
    large = {str(n.name): "" for n in bare.graph if any(np.abs(w).max() > 6e4 for w in _floats(n))}
    type_graph(bare, "fp16", large)
    assert not np.isfinite(answers(emulate(bare), feeds)).all()
    scale_residual(model, 20)
    type_graph(model, "fp16", {})
    assert difference(answers(emulate(model), feeds), expected) < 5e-3


def _floats(node):
    values = [value for value in node.inputs if value is not None and value.const_value is not None]
    return [value.const_value.numpy() for value in values if value.dtype == ir.DataType.FLOAT]


def test_an_infinity_of_half_stays_one_through_the_optimiser():
    b = Builder()
    model = b.model(
        {"x": ["batch", 8]}, b.op("Mul", b.op("Mul", "x", b.constant(np.float32(300))), b.constant(np.float32(0.001)))
    )
    type_graph(model, "fp16", {})
    found = answers(emulate(model), {"x": np.array([[1.0, 250.0, -250.0] + [0.0] * 5], np.float32)})
    assert found[0, 0] == pytest.approx(0.3, rel=2e-3) and found[0, 1] == np.inf and found[0, 2] == -np.inf


def test_products_of_integers_are_not_rounded_before_their_sum():
    b = Builder()
    scale, zero = b.constant(np.float32(1 / 3)), b.constant(np.int8(0))
    x = b.op("DequantizeLinear", b.op("QuantizeLinear", "x", scale, zero), scale, zero)
    codes = b.constant(np.arange(-16, 16, dtype=np.int8).reshape(8, 4))
    weight = b.op("DequantizeLinear", codes, b.constant(np.full(4, 1 / 7, np.float32)), axis=1)
    model = b.model({"x": ["batch", 8]}, b.op("MatMul", x, weight))
    type_graph(model, "fp16", {})
    full_check(model)
    scales = {str(v.name): v.dtype for v in model.graph.initializers.values() if v.dtype != ir.DataType.INT8}
    assert set(scales.values()) == {TYPES["fp16"]}
    feeds = {"x": np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)}
    a, w = np.float32(np.float16(1 / 3)), np.float32(np.float16(1 / 7))
    integers = np.clip(np.rint(feeds["x"].astype(np.float16).astype(np.float32) / a), -128, 127)
    expected = (integers @ np.arange(-16, 16).reshape(8, 4) * (a * w)).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(answers(emulate(model), feeds), expected)


# --- what makes a graph ready -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_patch_embedding_becomes_a_product(channels, bias):
    b = Builder()
    inputs = ["x", b.constant(b.random(8, channels, 4, 2)), *([b.constant(b.random(8))] if bias else [])]
    conv = b.op("Conv", *inputs, strides=[4, 2], kernel_shape=[4, 2], name="embed/Conv")
    model = b.model({"x": ["batch", channels, 12, 8]}, b.op("Relu", conv))
    before = ir.to_proto(model)
    feeds = random_feeds(before, 3, 0)
    assert patches_to_matmul(model) == 1
    proto = full_check(model)
    np.testing.assert_allclose(run(proto, feeds)[0], run(before, feeds)[0], rtol=1e-5, atol=1e-5)
    assert patches_to_matmul(model) == 0
    type_graph(model, "bf16", {})
    assert all(node.op_type == "Cast" or node.outputs[0].dtype != ir.DataType.FLOAT for node in model.graph)


@pytest.mark.parametrize(
    "attributes",
    [{"strides": [2, 2]}, {"strides": [4, 4], "pads": [1, 1, 1, 1]}, {"strides": [4, 4], "dilations": [2, 2]}],
)
def test_other_convolutions_stay(attributes):
    b = Builder()
    model = b.model({"x": ["batch", 3, 16, 16]}, b.op("Conv", "x", b.constant(b.random(8, 3, 4, 4)), **attributes))
    assert patches_to_matmul(model) == 0 and [node.op_type for node in model.graph] == ["Conv"]


@pytest.mark.parametrize("low", [-np.inf, -1e9, np.finfo(np.float32).min])
def test_masks_fit_and_mask_as_before(low):
    b = Builder()
    mask = np.where(np.tri(5, dtype=bool), 0, low).astype(np.float32)
    model = b.model({"x": ["batch", 5, 5]}, b.op("Softmax", b.op("Add", "x", b.constant(mask, "mask")), axis=-1))
    before = ir.to_proto(model)
    feeds = random_feeds(before, 3, 0)
    assert lift_masks(model) == 1 and lift_masks(model) == 0
    np.testing.assert_array_equal(answers(model, feeds), run(before, feeds)[0])
    type_graph(model, "fp16", {})
    assert np.isfinite(answers(emulate(model), feeds)).all()


def test_what_is_no_mask_is_not_lifted():
    b = Builder()
    x = b.op("Add", "x", b.constant(np.float32(-1e9)))
    model = b.model({"x": ["batch", 5]}, b.op("Exp", x), b.op("Softmax", x))
    assert lift_masks(model) == 0

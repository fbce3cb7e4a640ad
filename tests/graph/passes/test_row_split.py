"""Rows in parts: the same function, float and placed, and linears that compute each part."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import openvino
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.passes.test_row_alignment import READS, checked
from tests.graph.passes.test_token_merging import PATCHES, vit
from tests.graph.small_graphs import FORMS, WIDTH, Builder, random_feeds
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.passes.rows import align_rows, complete_shapes, layers_by_tokens, parts_of, split_rows
from vitdeploy.graph.values import dim
from vitdeploy.quantization.placement import place, shape
from vitdeploy.quantization.ranges import Range, score_tensors

TOKENS = PATCHES + 1


def as_written(proto, feeds):
    """What ONNX Runtime computes node by node; nothing is fused."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def on_openvino(proto, feeds):
    core = openvino.Core()
    model = core.read_model(proto.SerializeToString())
    model.reshape({port: list(feeds[port.get_any_name()].shape) for port in model.inputs})
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(feeds)[0]


def placed(model, ignore=()):
    """INT8 for OpenVINO, of ranges that are made up: asymmetric, as activations are."""
    shape(model, "openvino-cpu")
    names = [str(linear.input.name) for linear in find_linears(model)]
    place(model, dict.fromkeys([*names, *score_tensors(model).values()], Range(-3.0, 5.0)), "openvino-cpu", ignore)
    drop_unused(model)
    return model


@given(
    form=st.sampled_from(FORMS),
    read=st.sampled_from(list(READS)),
    parts=st.sampled_from([(8, 6), (13, 1), (1, 13), (4, 4, 6), (1,) * 14]),
    batch=st.sampled_from([1, 3]),
    int8=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_the_function_is_the_same(form, read, parts, batch, int8, seed):
    model = vit(form, seed, blocks=2, read=READS[read])
    if int8:
        placed(model)
    before, integers = ir.to_proto(model), count_int8(model)
    linears = split_rows(model, parts)
    assert linears >= 2 * 4  # of each block those behind attention, of the MLP, and query, key and value, however many
    after, feeds = checked(model), random_feeds(before, batch, seed)
    apart = np.abs(as_written(after, feeds) - as_written(before, feeds))
    # Float products of other shapes are summed in another order, and so may round to the next integer, but rarely.
    assert apart.max() <= (5e-2 if int8 else 1e-5)
    assert apart.mean() <= (2e-3 if int8 else 1e-6)
    if int8:
        assert count_int8(model) == integers + linears * (len(parts) - 1)


@pytest.mark.parametrize("form", FORMS)
def test_a_placed_graph_takes_more_rows_than_tokens(form):
    model = placed(vit(form, blocks=2))
    before, integers = ir.to_proto(model), count_int8(model)
    complete_shapes(model)
    assert align_rows(model, 16) >= 2 * 4
    after, feeds = checked(model), random_feeds(before, 2, 0)
    np.testing.assert_allclose(as_written(after, feeds), as_written(before, feeds), rtol=0, atol=1e-5)
    assert count_int8(model) == integers
    norms = [dim(node.outputs[0], 1) for node in model.graph if node.op_type == "LayerNormalization"]
    assert norms.count(16) >= 4


@pytest.mark.parametrize("parts", [(8, 6), (13, 1), (16,)])
def test_openvino_answers_the_same(parts):
    """Its products are of integers, so that nothing is left to the order of sums but in attention."""
    model = placed(vit("separate"))
    before = ir.to_proto(model)
    if len(parts) > 1:
        split_rows(model, parts)
    else:
        complete_shapes(model)
        align_rows(model, *parts)
    feeds = random_feeds(before, 1, 0)
    one, other = (on_openvino(proto, feeds) for proto in (before, checked(model)))
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


def test_linears_and_all_between_them_have_the_rows_of_a_part():
    model = placed(vit("separate", blocks=2))
    split_rows(model, (8, 6))
    rows = [dim(node.outputs[0], 1) for node in model.graph if node.op_type == "MatMul" and dim(node.inputs[1], 0)]
    assert {8, 6} <= set(rows)
    norms = [dim(node.outputs[0], 1) for node in model.graph if node.op_type == "LayerNormalization"]
    assert sorted(norms) == [6] * 5 + [8] * 5
    attention = [dim(node.outputs[0], -1) for node in model.graph if node.op_type == "Softmax"]
    assert attention == [TOKENS, TOKENS]


def test_no_joined_part_is_quantized_around_another_zero():
    """But around 0: OpenVINO 2026.4 gave each row of the joined tensor a zero point, and could not go on."""
    model = placed(vit("separate", blocks=2), ignore=["blocks.1.*"])
    split_rows(model, (8, 6))
    joined = [node.inputs[0].producer() for node in model.graph if node.op_type == "Concat"]
    assert joined
    for node in joined:
        if node is not None and node.op_type == "DequantizeLinear":
            assert not node.inputs[2].const_value.numpy().any()


def without_tokens():
    b = Builder()
    return b.model({"x": ["batch", WIDTH]}, b.linear("x", WIDTH, 4, "head"))


@pytest.mark.parametrize(
    ("make", "parts", "found"),
    [
        (vit, (14,), "14"),
        (vit, (), "no parts"),
        (vit, (15, -1), "15, -1"),
        (vit, (8, 8), "linears over 14 tokens"),
        (without_tokens, (8, 6), "no linear over tokens"),
    ],
)
def test_parts_of_other_graphs_are_refused_and_the_graph_is_left_alone(make, parts, found):
    model = make()
    before = ir.to_proto(model)
    with pytest.raises(GraphError) as caught:
        split_rows(model, parts)
    assert found in caught.value.found
    assert onnx.load_from_string(ir.to_proto(model).SerializeToString()) == before


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (197, [(192, 5)]),
        (257, [(256, 1)]),
        (577, [(576, 1)]),
        (1025, [(1024, 1)]),
        (50, [(32, 18), (48, 2)]),
        (192, []),
        (15, []),
        (1, []),
    ],
)
def test_parts_are_whole_tiles_and_the_rest(tokens, parts):
    assert parts_of(tokens) == parts


def test_layers_are_found_for_each_number_of_tokens():
    """Four blocks: query, key, value and projection, and an MLP of twice the width."""
    model = vit("separate")
    expected = [linear.weight.shape for linear in find_linears(model) if linear.kind == "matmul"]
    for found in (layers_by_tokens(model), layers_by_tokens(placed(vit("separate")))):
        assert list(found) == [TOKENS]
        assert sorted(found[TOKENS]) == sorted(expected)

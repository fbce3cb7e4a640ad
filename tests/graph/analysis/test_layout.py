"""Element numbers through layout operations say where every operand of attention comes from, in every form."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import CHANNELS, HEADS, MERGED, WIDTH, Builder, attention_model, node_named, run
from vitdeploy.graph.analysis.rows import exclusive, leaves, origin, scaled_input, static_shape

BATCH, TOKENS = 2, 5


def qkv_of(model):
    return node_named(model, "attn.qkv/Add").outputs[0]


@pytest.mark.parametrize("form", MERGED)
def test_columns_of_query_key_and_value_are_the_three_thirds_by_heads(form):
    found = leaves(qkv_of(attention_model(TOKENS, form, scale=None)))
    thirds = np.arange(3 * WIDTH).reshape(3, HEADS, 1, CHANNELS)
    assert len(found) == 3
    for leaf, columns in zip(found, thirds, strict=True):
        source = leaf.source if leaf.source.shape[-1] == CHANNELS else leaf.source.swapaxes(-1, -2)
        rows = np.arange(BATCH * TOKENS).reshape(BATCH, 1, TOKENS, 1)
        np.testing.assert_array_equal(source, rows * 3 * WIDTH + columns)


FEED = {"x": np.arange(48, dtype=np.float32).reshape(2, 4, 6)}


def moved(b, x):
    """The model so far, and what it makes of FEED on ONNX Runtime."""
    model = b.model({"x": [2, 4, 6]}, x)
    return model, run(ir.to_proto(model), FEED)[0]


def random_move(b, draw, x, shape):
    """One layout operation on `x` of that shape."""
    axis = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["Transpose", "Reshape", "Slice", "Gather", "Unsqueeze", "Split"]))
    if kind == "Transpose":
        return b.op("Transpose", x, perm=draw(st.permutations(range(len(shape)))))
    if kind == "Reshape":
        return b.op("Reshape", x, b.ints(*(-1 if i == axis else 0 for i in range(len(shape))), 1))
    if kind == "Slice":
        bounds = draw(st.integers(-9, 3)), draw(st.integers(4, 99)), axis, draw(st.integers(1, 2))
        return b.op("Slice", x, *map(b.ints, bounds))
    if kind == "Gather":
        return b.op("Gather", x, b.constant(np.array(draw(st.sampled_from([0, [0, -1]])), np.int64)), axis=axis)
    if kind == "Unsqueeze":
        return b.op("Unsqueeze", x, b.ints(axis))
    return b.op("Split", x, outputs=2, axis=axis, num_outputs=2)[draw(st.integers(0, 1))]


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_numbers_go_where_the_runtime_moves_the_elements(data):
    b, result = Builder(), "x"
    shape = FEED["x"].shape
    for _ in range(data.draw(st.integers(1, 4))):
        if shape and shape[0] and min(shape) > 1:
            result = random_move(b, data.draw, result, shape)
            shape = moved(b, result)[1].shape
    model, expected = moved(b, result)
    if expected.size and result != "x":
        [ours] = [leaf.source for leaf in leaves(model.graph.inputs[0]) if leaf.value.is_graph_output()]
        np.testing.assert_array_equal(ours, expected)


def test_dynamic_sizes_have_stand_ins_and_an_unknown_shape_has_none():
    b = Builder()
    model = b.model({"x": ["batch", 4, "tokens"]}, b.op("Relu", "x"))
    [x] = model.graph.inputs
    assert static_shape(x) == (2, 4, 3)
    [leaf] = leaves(x)
    np.testing.assert_array_equal(leaf.source, np.arange(24).reshape(2, 4, 3))
    assert [leaf.source.shape for leaf in leaves(x, (1, 4, 6))] == [(1, 4, 6)]
    for shape in (None, ir.Shape(["a", "b", "c", "d", "e"])):
        x.shape = shape
        assert static_shape(x) is None
        assert leaves(x) is None


def test_origin_goes_up_through_layout_and_where_asked_through_factors():
    b = Builder()
    moved = b.op("Transpose", b.op("Relu", "x"), perm=[1, 0])
    scaled = b.op("Mul", b.constant(np.float32(2)), moved)
    model = b.model({"x": [2, 3]}, b.op("Reshape", scaled, b.ints(6)))
    [last] = model.graph.outputs
    assert origin(last).name == scaled
    assert origin(last, through_scales=True).producer().op_type == "Relu"


@pytest.mark.parametrize(
    ("operator", "order", "factor"),
    [("Mul", "xc", 4.0), ("Mul", "cx", 4.0), ("Div", "xc", 0.25), ("Div", "cx", None), ("Add", "xc", None)],
)
def test_scaled_input_is_a_product_or_quotient_with_one_number(operator, order, factor):
    b = Builder()
    number = b.constant(np.float32([4]))
    model = b.model({"x": [3]}, b.op(operator, *(number if one == "c" else "x" for one in order)))
    found = scaled_input(next(iter(model.graph)))
    assert (found is None) if factor is None else found == (model.graph.inputs[0], factor)


def test_a_factor_of_zero_or_a_vector_is_no_scale():
    b = Builder()
    zero = b.op("Mul", "x", b.constant(np.float32(0)))
    vector = b.op("Mul", zero, b.constant(np.ones(3, np.float32)))
    assert [scaled_input(node) for node in b.model({"x": [3]}, vector).graph] == [None, None]


def halves(*extra):
    """x [2, 6] -> Split in two -> Relu of each, and what `extra` adds on the first half."""
    b = Builder()
    left, right = b.op("Split", "x", outputs=2, axis=1, num_outputs=2, name="split")
    results = [b.op("Relu", left, name="left"), b.op("Relu", right, name="right")]
    results += [b.op(operator, left) for operator in extra]
    return b.model({"x": [2, 6]}, *results)


def columns_of_left(model):
    node = node_named(model, "left")
    return exclusive(leaves(model.graph.inputs[0]), node.inputs[0], node, 6)


def test_columns_that_one_node_alone_reads_are_exclusive():
    np.testing.assert_array_equal(columns_of_left(halves()), [[0, 1, 2]] * 2)


@pytest.mark.parametrize("extra", ["Exp", "Transpose"])
def test_columns_with_a_second_reader_are_not_exclusive(extra):
    assert columns_of_left(halves(extra)) is None


def test_columns_that_leave_the_graph_are_not_exclusive():
    b = Builder()
    left, right = b.op("Split", "x", outputs=2, axis=1, num_outputs=2, name="split")
    model = b.model({"x": [2, 6]}, b.op("Relu", left, name="left"), left, b.op("Relu", right))
    assert columns_of_left(model) is None

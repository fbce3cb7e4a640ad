"""Views and normalisations as Keras and the converters of TensorFlow and PaddlePaddle write them."""

import numpy as np
import onnx_ir as ir
import pytest

from tests.graph.builder import Builder, census, checked, difference, run, values
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.canonical.normalise import normalise

WIDTH, TOKENS, HEADS = 8, 6, 2


def normalised(b, *outputs, rank=3):
    """(before, after) of the canonical form, with the same numbers."""
    before = b.model(*outputs, rank=rank)
    model = ir.from_proto(before)
    normalise(model, opset=20)
    after = checked(model)
    x = {
        value.name: values(2, *[dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]])
        for value in before.graph.input
    }
    for ours, expected in zip(run(after, **x), run(before, **x), strict=True):
        assert difference(ours, expected) <= 1e-5
    return before, after, model


def moments(b, x, *, pooled=False):
    """(mean, 1 / root) of the last axis."""

    def mean(value):
        return b.add("GlobalAveragePool", value) if pooled else b.add("ReduceMean", value, axes=[2], keepdims=1)

    centre = mean(x)
    deviation = b.add("Sub", x, centre)
    root = b.add("Sqrt", b.add("Add", mean(b.add("Mul", deviation, deviation)), np.float32(1e-6)))
    return centre, b.add("Reciprocal", root)


@pytest.mark.parametrize("form", ["negated", "subtracted", "swapped", "pooled", "without gamma", "without beta"])
def test_a_norm_by_moments_is_one_node(form):
    b = Builder(17)
    x = b.input("x", ["batch", TOKENS, WIDTH])
    mean, scale = moments(b, x, pooled=form == "pooled")
    gamma, beta = values(1, 1, WIDTH, seed=1), values(1, 1, WIDTH, seed=2)
    if form != "without gamma":
        scale = b.add("Mul", scale, gamma)
    first = b.add("Mul", x, scale)
    if form == "subtracted":
        y = b.add("Add", first, b.add("Sub", beta, b.add("Mul", mean, scale)))
    elif form == "without beta":
        y = b.add("Sub", first, b.add("Mul", mean, scale))
    else:
        shift = b.add("Mul", b.add("Neg", mean), scale)
        shift = b.add("Add", beta, shift) if form == "swapped" else b.add("Add", shift, beta)
        y = b.add("Add", shift, first) if form == "swapped" else b.add("Add", first, shift)
    _, after, _ = normalised(b, y)
    assert census(after) == {"LayerNormalization": 1}


@pytest.mark.parametrize("broken", ["another mean", "a mean of tokens", "added", "a scale of another root"])
def test_what_is_no_such_norm_stays(broken):
    b = Builder(17)
    x, other = b.input("x", ["batch", TOKENS, WIDTH]), b.input("other", ["batch", TOKENS, WIDTH])
    mean, root = moments(b, x)
    scale = b.add("Mul", root, values(1, 1, WIDTH, seed=1))
    if broken == "another mean":
        mean = b.add("ReduceMean", other, axes=[2], keepdims=1)
    if broken == "a mean of tokens":
        mean = b.add("ReduceMean", x, axes=[1], keepdims=1)
    second = moments(b, other)[1] if broken == "a scale of another root" else scale
    shift = b.add("Mul", mean if broken == "added" else b.add("Neg", mean), second)
    _, after, _ = normalised(b, b.add("Add", b.add("Mul", x, scale), shift))
    assert "LayerNormalization" not in census(after)


def test_a_product_on_rows_of_a_matrix_is_a_linear_with_its_bias():
    b = Builder(17)
    x = b.input("x", ["batch", TOKENS, WIDTH])
    rows = b.add("MatMul", b.add("Reshape", x, np.array([-1, WIDTH])), values(WIDTH, 5))
    y = b.add("Add", b.add("Reshape", rows, np.array([-1, TOKENS, 5])), values(5, seed=1))
    _, after, model = normalised(b, y)
    assert census(after) == {"MatMul": 1, "Add": 1}
    [linear] = find_linears(model)
    np.testing.assert_array_equal(linear.bias, values(5, seed=1))


@pytest.mark.parametrize("shape", [(HEADS, 4), (1, 4), (HEADS, 1), (1, 1, HEADS, 4), ()])
def test_a_bias_of_heads_is_that_of_the_linear(shape):
    b = Builder(17)
    x = b.input("x", ["batch", TOKENS, WIDTH])
    heads = b.add("Reshape", b.add("MatMul", x, values(WIDTH, WIDTH)), np.array([-1, TOKENS, HEADS, 4]))
    _, after, model = normalised(b, b.add("Add", values(*shape, seed=1), heads), rank=4)
    [linear] = find_linears(model)
    assert linear.bias is not None and census(after) == {"MatMul": 1, "Add": 1, "Reshape": 1}


@pytest.mark.parametrize("shape", [(TOKENS, 1, 1), (TOKENS, HEADS, 4)])
def test_what_is_added_to_tokens_is_no_bias(shape):
    b = Builder(17)
    x = b.input("x", ["batch", TOKENS, WIDTH])
    heads = b.add("Reshape", b.add("MatMul", x, values(WIDTH, WIDTH)), np.array([-1, TOKENS, HEADS, 4]))
    _, _, model = normalised(b, b.add("Add", heads, values(*shape, seed=1)), rank=4)
    assert find_linears(model)[0].bias is None


@pytest.mark.parametrize("unit", [True, False])
def test_a_product_of_heads_on_one_batch_axis_gets_both(unit):
    b = Builder(17)
    query, key = (b.input(name, ["batch", TOKENS, HEADS, 4]) for name in ("query", "key"))
    left, right = b.add("Transpose", query, perm=[0, 2, 1, 3]), b.add("Transpose", key, perm=[0, 2, 1, 3])
    if unit:  # as tf2onnx writes an Einsum
        left = b.add("Transpose", b.add("Unsqueeze", query, np.array([3])), perm=[0, 2, 1, 3, 4])
        right = b.add("Transpose", b.add("Unsqueeze", key, np.array([1])), perm=[0, 3, 1, 2, 4])
    left = b.add("Reshape", left, np.array([-1, TOKENS, 4]))
    right = b.add("Transpose", b.add("Reshape", right, np.array([-1, TOKENS, 4])), perm=[0, 2, 1])
    product = b.add("MatMul", left, right)
    if unit:
        y = b.add("Squeeze", b.add("Reshape", product, np.array([-1, HEADS, TOKENS, TOKENS, 1])), np.array([4]))
    else:
        y = b.add("Reshape", product, np.array([-1, HEADS, TOKENS, TOKENS]))
    _, after, _ = normalised(b, y, rank=4)
    assert census(after) == {"Transpose": 2, "MatMul": 1}


def test_heads_that_lie_otherwise_behind_a_product_stay():
    b = Builder(17)
    query, key = (b.input(name, ["batch", TOKENS, HEADS, 4]) for name in ("query", "key"))
    left, right = (
        b.add("Reshape", b.add("Transpose", x, perm=[0, 2, 1, 3]), np.array([-1, TOKENS, 4])) for x in (query, key)
    )
    product = b.add("MatMul", left, b.add("Transpose", right, perm=[0, 2, 1]))
    _, after, _ = normalised(b, b.add("Reshape", product, np.array([-1, 1, HEADS * TOKENS, TOKENS])), rank=4)
    assert census(after)["Reshape"] == 3

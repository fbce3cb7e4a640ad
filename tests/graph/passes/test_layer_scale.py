"""LayerScale goes into the linear in front of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import Builder, assert_rewritten, operators, weights
from vitdeploy.graph.passes.folds import fold_layer_scale


def scaled_linear(gamma, *, inside=3, bias=True, order="xg", seed=0, outputs=(), second=None):
    b = Builder(seed)
    linear = b.linear("x", inside, 4, "proj", bias=bias)
    constant = b.constant(gamma, "gamma")
    results = [b.op("Mul", *((linear, constant) if order == "xg" else (constant, linear)))]
    results += [b.op(second, linear)] if second else []
    return b.model({"x": ["batch", 2, inside]}, *results, *outputs)


def gamma(*shape, seed=0):
    return (np.random.default_rng(seed).integers(1, 32, shape) / 64).astype(np.float32)


# --- what is folded: the product of the linear is not the output of the graph, so a residual sum follows -------------


def residual(shape, *, bias, order, seed):
    b = Builder(seed)
    linear, constant = b.linear("x", 4, 4, "proj", bias=bias), b.constant(gamma(*shape, seed=seed), "gamma")
    product = b.op("Mul", *((linear, constant) if order == "xg" else (constant, linear)))
    return b.model({"x": ["batch", 2, 4]}, b.op("Add", "x", product))


@given(
    shape=st.sampled_from([(4,), (1, 4), (1, 1, 4)]),
    bias=st.booleans(),
    order=st.sampled_from(["xg", "gx"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_a_factor_for_each_channel_goes_into_the_weights(shape, bias, order, seed):
    model = residual(shape, bias=bias, order=order, seed=seed)
    before = weights(model)
    assert_rewritten(model, fold_layer_scale, 1)
    after = weights(model)
    assert operators(model)["Mul"] == 0
    np.testing.assert_array_equal(after["proj.weight_t"], before["proj.weight_t"] * before["gamma"].ravel())
    assert "gamma" not in after


def test_a_bias_of_zeros_goes_with_its_add():
    b = Builder()
    product = b.op("MatMul", "x", b.constant(b.random(4, 4)), name="proj/MatMul")
    linear = b.op("Add", product, b.constant(np.zeros(4, np.float32)), name="proj/Add")
    model = b.model({"x": ["batch", 2, 4]}, b.op("Add", "x", b.op("Mul", linear, b.constant(gamma(4)))))
    assert_rewritten(model, fold_layer_scale, 1)
    assert operators(model) == {"MatMul": 1, "Add": 1}


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (2, 4), (1, 2, 4)], ids=str)
def test_a_factor_that_is_not_per_channel_is_left_alone(shape):
    b = Builder()
    product = b.op("Mul", b.linear("x", 4, 4, "proj"), b.constant(gamma(*shape)))
    assert_rewritten(b.model({"x": ["batch", 2, 4]}, b.op("Add", "x", product)), fold_layer_scale, 0)


@pytest.mark.parametrize("options", [{"second": "Relu"}, {"outputs": ["proj/Add"]}], ids=["read twice", "an output"])
def test_a_linear_whose_output_is_read_elsewhere_is_left_alone(options):
    assert_rewritten(scaled_linear(gamma(4), **options), fold_layer_scale, 0)


def test_a_product_that_is_an_output_keeps_its_name_and_stays():
    assert_rewritten(scaled_linear(gamma(4)), fold_layer_scale, 0)


def test_a_computed_factor_is_left_alone():
    b = Builder()
    gate = b.op("Mul", b.linear("x", 4, 4, "proj"), b.op("Sigmoid", "x"))
    assert_rewritten(b.model({"x": ["batch", 2, 4]}, b.op("Add", "x", gate)), fold_layer_scale, 0)


def test_a_weight_that_another_linear_reads_is_copied():
    b = Builder()
    shared = b.constant(b.random(4, 4), "shared")
    first = b.op("Mul", b.linear("x", 4, 4, "one", weight=shared), b.constant(gamma(4)))
    model = b.model({"x": ["batch", 2, 4]}, b.op("Add", first, b.linear("x", 4, 4, "two", weight=shared)))
    assert_rewritten(model, fold_layer_scale, 1)
    assert {"shared", "shared_2"} <= weights(model).keys()

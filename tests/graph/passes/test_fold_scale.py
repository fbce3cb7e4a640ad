"""The factor of attention goes into weights, wherever the exporter wrote it, and the function stays the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import (
    FORMS,
    MERGED,
    WIDTH,
    Builder,
    any_length,
    assert_rewritten,
    attention,
    attention_model,
    operators,
    query_key_value,
    sequence_first,
    weights,
)
from vitdeploy.graph.passes.folds import fold_attention_scale

TOKENS = 5


@given(
    tokens=st.integers(1, 6),
    form=st.sampled_from(FORMS),
    scale=st.sampled_from(["query", "key", "scores", "divisor"]),
    factor=st.sampled_from([0.25, 0.5, 0.75, 2.0]),
    masked=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_the_factor_goes_and_the_function_stays(tokens, form, scale, factor, masked, bias, seed):
    mask = np.float32([0, -1e9])[np.arange(tokens) % 2] if masked else None
    # 1 / 0.75 is not exact in float32: a graph that divides by it rounds before any fold.
    factor = 0.5 if scale == "divisor" else factor
    model = attention_model(tokens, form, seed, scale=scale, factor=factor, mask=mask, bias=bias)
    assert_rewritten(model, fold_attention_scale, 1)
    assert not operators(model) & {"Mul": 1, "Div": 1}.keys()


@pytest.mark.parametrize("scale", ["query", "key", "scores", "divisor"])
def test_a_power_of_two_changes_no_bit(scale):
    assert_rewritten(attention_model(TOKENS, scale=scale, factor=0.125), fold_attention_scale, 1, bit_exact=True)


def test_the_usual_factor_of_head_width_8_agrees_to_rounding():
    assert_rewritten(attention_model(TOKENS, factor=8**-0.5), fold_attention_scale, 1, tolerance=1e-6)


@pytest.mark.parametrize("form", MERGED)
def test_only_the_columns_of_the_query_change(form):
    model = attention_model(TOKENS, form, factor=0.5)
    before = weights(model)
    fold_attention_scale(model)
    after = weights(model)
    for name in ("attn.qkv.weight_t", "attn.qkv.bias"):
        np.testing.assert_array_equal(after[name][..., :WIDTH], before[name][..., :WIDTH] / 2)
        np.testing.assert_array_equal(after[name][..., WIDTH:], before[name][..., WIDTH:])


def test_factors_of_query_and_key_both_go():
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "slices")
    query = b.op("Mul", b.op("Mul", query, b.constant(np.float32(0.5))), b.constant(np.float32(0.25)))
    key = b.op("Mul", b.op("Transpose", key, perm=[0, 1, 3, 2]), b.constant(np.float32(4)))
    mixed = b.op("MatMul", b.op("Softmax", b.op("MatMul", query, key), axis=-1), value)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, mixed)
    assert_rewritten(model, fold_attention_scale, 3, bit_exact=True)
    assert operators(model)["Mul"] == 0


@pytest.mark.parametrize("scale", ["query", "scores"])
def test_with_a_norm_of_the_query_its_gain_and_bias_take_the_factor(scale):
    model = attention_model(TOKENS, scale=scale, factor=0.5, qk_norm=True)
    before = weights(model)
    assert_rewritten(model, fold_attention_scale, 1)
    after = weights(model)
    for name in ("attn.q_norm.weight", "attn.q_norm.bias"):
        np.testing.assert_array_equal(after[name], before[name] / 2)
    np.testing.assert_array_equal(after["attn.qkv.weight_t"], before["attn.qkv.weight_t"])


def test_weights_that_another_layer_reads_are_copied():
    b = Builder()
    shared = b.constant(b.random(WIDTH, WIDTH), "shared")
    query = b.linear("x", WIDTH, WIDTH, "q", weight=shared)
    key = b.linear("x", WIDTH, WIDTH, "k", weight=shared)
    scores = b.op("MatMul", b.op("Mul", query, b.constant(np.float32(0.5))), b.op("Transpose", key, perm=[0, 2, 1]))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("MatMul", b.op("Softmax", scores, axis=-1), "x"))
    assert_rewritten(model, fold_attention_scale, 1, bit_exact=True)
    assert {"shared", "shared_2"} <= weights(model).keys()


def rotary(b, query):
    """Positions turned into the query: each pair of channels by an angle."""
    half = [b.op("Slice", query, b.ints(i), b.ints(i + 2), b.ints(3)) for i in (0, 2)]
    turned = b.op("Concat", b.op("Neg", half[1]), half[0], axis=3)
    cosine, sine = b.constant(b.random(TOKENS, 4)), b.constant(b.random(TOKENS, 4))
    return b.op("Add", b.op("Mul", query, cosine), b.op("Mul", turned, sine))


def changed_query(change, *, outputs=()):
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "slices")
    query = change(b, query)
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
    return b.model({"x": ["batch", TOKENS, WIDTH]}, mixed, *outputs)


def half(b, query, name=None):
    return b.op("Mul", query, b.constant(np.float32(0.5)), name=name)


@pytest.mark.parametrize(
    "change",
    [
        lambda b, query: half(b, rotary(b, query)),
        lambda b, query: half(b, b.op("Relu", query)),
        lambda b, query: b.op("Mul", query, b.constant(b.random(4))),
        lambda b, query: b.op("Mul", query, b.op("ReduceMax", query, keepdims=0)),
        lambda b, query: b.op("Add", half(b, query), query),
        lambda b, query: b.op("Div", b.constant(np.float32(2)), query),
    ],
    ids=["rotary", "relu", "vector", "computed", "read twice", "divisor"],
)
def test_other_queries_are_left_alone(change):
    assert_rewritten(changed_query(change), fold_attention_scale, 0, tolerance=None)


@pytest.mark.parametrize("name", ["query", "scaled"])
def test_a_query_that_leaves_the_graph_is_left_alone(name):
    def named(b, query):
        return half(b, b.op("Transpose", query, perm=[0, 1, 2, 3], name="query"), "scaled")

    assert_rewritten(changed_query(named), fold_attention_scale, 1)
    assert_rewritten(changed_query(named, outputs=[name]), fold_attention_scale, 0)


def test_a_factor_behind_the_mask_is_left_alone():
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "slices")
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = half(b, b.op("Add", scores, b.constant(b.random(TOKENS, TOKENS))))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("MatMul", b.op("Softmax", scores, axis=-1), value))
    assert_rewritten(model, fold_attention_scale, 0)


def test_a_factor_in_front_of_no_softmax_is_left_alone():
    assert_rewritten(attention_model(TOKENS, axis=1), fold_attention_scale, 0)


@pytest.mark.parametrize("write", [lambda b: sequence_first(b, TOKENS), any_length], ids=["TBC", "any length"])
def test_sequences_that_come_first_or_have_any_length_are_folded(write):
    assert_rewritten(write(Builder()), fold_attention_scale, 1, batch=3, bit_exact=True)


def test_each_of_two_attentions_is_folded():
    b = Builder()
    first = attention(b, "x", TOKENS, "columns")
    merged = b.linear(first, WIDTH, 3 * WIDTH, "second.qkv")
    query, key, value = b.op("Split", merged, outputs=3, axis=-1, num_outputs=3)
    scores = b.op("MatMul", half(b, query), b.op("Transpose", key, perm=[0, 2, 1]))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("MatMul", b.op("Softmax", scores, axis=-1), value))
    assert_rewritten(model, fold_attention_scale, 2)

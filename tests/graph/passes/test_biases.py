"""Key biases go, value biases move into the projection, and the function stays the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import (
    CHANNELS,
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
from vitdeploy.graph.passes.folds import drop_key_bias, fold_value_bias

TOKENS = 5

graphs = {
    "tokens": st.integers(1, 6),
    "form": st.sampled_from(FORMS),
    "scale": st.sampled_from(["query", "key", "scores", "divisor", None]),
    "masked": st.booleans(),
    "seed": st.integers(0, 99),
}


def masked_model(tokens, form, scale, masked, seed, **options):
    mask = np.random.default_rng(seed).integers(-31, 32, (2, tokens, tokens)).astype(np.float32) if masked else None
    return attention_model(tokens, form, seed, scale=scale, mask=mask, **options)


@pytest.mark.parametrize("rewrite", [drop_key_bias, fold_value_bias])
def test_a_mask_of_truth_values_makes_no_difference(rewrite):
    mask = np.tril(np.ones((TOKENS, TOKENS), bool))
    assert_rewritten(attention_model(TOKENS, mask=mask), rewrite, 1)


@given(**graphs)
@settings(max_examples=12, deadline=None)
def test_the_key_bias_goes_and_the_function_stays(tokens, form, scale, masked, seed):
    model = masked_model(tokens, form, scale, masked, seed)
    assert_rewritten(model, drop_key_bias, 1)
    bias = weights(model)
    if form in MERGED:
        assert not bias["attn.qkv.bias"][WIDTH : 2 * WIDTH].any()
        assert bias["attn.qkv.bias"][:WIDTH].any()
        assert bias["attn.qkv.bias"][2 * WIDTH :].any()
    else:
        assert "attn.k.bias" not in bias
        assert {"attn.q.bias", "attn.v.bias"} <= bias.keys()


@given(**graphs)
@settings(max_examples=12, deadline=None)
def test_the_value_bias_moves_and_the_function_stays(tokens, form, scale, masked, seed):
    model = masked_model(tokens, form, scale, masked, seed)
    before = weights(model)
    assert_rewritten(model, fold_value_bias, 1)
    after = weights(model)
    name = "attn.qkv.bias" if form in MERGED else "attn.v.bias"
    moved = before[name][-WIDTH:] @ before["attn.proj.weight_t"]
    np.testing.assert_array_equal(after["attn.proj.bias"], before["attn.proj.bias"] + moved)
    if form in MERGED:
        assert not after[name][-WIDTH:].any()
        np.testing.assert_array_equal(after[name][:-WIDTH], before[name][:-WIDTH])
    else:
        assert name not in after


def test_both_together_leave_the_bias_of_the_query():
    model = attention_model(TOKENS, "separate")

    def both(model):
        return drop_key_bias(model) + fold_value_bias(model)

    assert_rewritten(model, both, 2)
    assert {name for name in weights(model) if name.endswith(".bias")} == {"attn.q.bias", "attn.proj.bias"}


@pytest.mark.parametrize("rewrite", [drop_key_bias, fold_value_bias])
def test_an_attention_without_biases_has_nothing_to_change(rewrite):
    assert_rewritten(attention_model(TOKENS, bias=False), rewrite, 0)


@pytest.mark.parametrize("rewrite", [drop_key_bias, fold_value_bias])
@pytest.mark.parametrize("axis", [-2, 1])
def test_a_softmax_over_another_axis_is_left_alone(rewrite, axis):
    assert_rewritten(attention_model(TOKENS, axis=axis), rewrite, 0)


def changed(operand, change, *, outputs=()):
    """Attention with one operand [batch, heads, tokens, channels] changed, and its projection."""
    b = Builder()
    parts = dict(zip(("query", "key", "value"), query_key_value(b, "x", TOKENS, "slices"), strict=True))
    parts[operand] = change(b, parts[operand])
    scores = b.op("MatMul", parts["query"], b.op("Transpose", parts["key"], perm=[0, 1, 3, 2]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), parts["value"], name="mixed")
    joined = b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.ints(-1, TOKENS, WIDTH), name="joined")
    return b.model({"x": ["batch", TOKENS, WIDTH]}, b.linear(joined, WIDTH, WIDTH, "proj"), *outputs)


@pytest.mark.parametrize("rewrite", [drop_key_bias, fold_value_bias])
@pytest.mark.parametrize("write", [lambda b: sequence_first(b, TOKENS), any_length], ids=["TBC", "any length"])
def test_sequences_that_come_first_or_have_any_length_lose_their_biases(rewrite, write):
    assert_rewritten(write(Builder()), rewrite, 1, batch=3)


def test_a_norm_of_the_key_keeps_its_bias():
    assert_rewritten(attention_model(TOKENS, qk_norm=True), drop_key_bias, 0)


def rotary(b, key):
    turned = b.op("Concat", *(b.op("Slice", key, b.ints(i), b.ints(i + 2), b.ints(3)) for i in (2, 0)), axis=3)
    left = b.op("Mul", key, b.constant(b.random(TOKENS, CHANNELS)))
    return b.op("Add", left, b.op("Mul", turned, b.constant(b.random(TOKENS, CHANNELS))))


def mixed_axes(b, operand):
    """Tokens and channels in each other's place: an element's token depends on its channel."""
    return b.op("Reshape", b.op("Transpose", operand, perm=[0, 1, 3, 2]), b.ints(-1, 2, TOKENS, CHANNELS))


@pytest.mark.parametrize(
    "change",
    [
        rotary,
        mixed_axes,
        lambda b, key: b.op("Relu", key),
        lambda b, key: b.op("Mul", key, b.constant(b.random(TOKENS, 1))),
    ],
    ids=["rotary", "keys and channels mixed", "relu", "factor for each key"],
)
def test_other_keys_keep_their_bias(change):
    assert_rewritten(changed("key", change), drop_key_bias, 0)


def test_a_key_that_is_read_elsewhere_keeps_its_bias():
    model = changed("key", lambda b, key: b.op("Transpose", key, perm=[0, 1, 2, 3], name="key"), outputs=["key"])
    assert_rewritten(model, drop_key_bias, 0)


def test_a_query_that_is_the_key_too_keeps_its_bias():
    b = Builder()
    shared = b.linear("x", WIDTH, WIDTH, "qk")
    scores = b.op("MatMul", shared, b.op("Transpose", shared, perm=[0, 2, 1]))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("MatMul", b.op("Softmax", scores, axis=-1), "x"))
    assert_rewritten(model, drop_key_bias, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda b, value: b.op("Mul", value, b.constant(np.float32(0.5))),
        lambda b, value: b.op("Relu", value),
        mixed_axes,
    ],
    ids=["factor", "relu", "keys and channels mixed"],
)
def test_other_values_keep_their_bias(change):
    assert_rewritten(changed("value", change), fold_value_bias, 0)


def unchanged(b, operand):
    return operand


@pytest.mark.parametrize("name", ["mixed", "joined"])
def test_mixed_values_that_are_read_elsewhere_keep_their_bias(name):
    assert_rewritten(changed("value", unchanged), fold_value_bias, 1)
    assert_rewritten(changed("value", unchanged, outputs=[name]), fold_value_bias, 0)


def test_heads_that_are_joined_with_tokens_keep_the_bias_of_their_value():
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "slices")
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
    # [heads, tokens, channels] read as [tokens, heads * channels]: a channel has another value column in each row.
    joined = b.op("Reshape", mixed, b.ints(-1, TOKENS, WIDTH))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.linear(joined, WIDTH, WIDTH, "proj"))
    assert_rewritten(model, fold_value_bias, 0)


def test_a_projection_without_bias_gets_one():
    b = Builder()
    query, key, value = (b.linear("x", WIDTH, WIDTH, name) for name in "qkv")
    softmax = b.op("Softmax", b.op("MatMul", query, b.op("Transpose", key, perm=[0, 2, 1])), axis=-1)
    projected = b.linear(b.op("MatMul", softmax, value), WIDTH, WIDTH, "proj", bias=False)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("Add", "x", projected))
    assert_rewritten(model, fold_value_bias, 1)
    assert "proj.bias" in weights(model)
    assert operators(model)["Add"] == 4  # query, key, projection, residual


@pytest.mark.parametrize(
    "after",
    [
        lambda b, mixed: b.linear(b.norm(mixed, "norm"), WIDTH, WIDTH, "proj"),
        lambda b, mixed: b.op("Add", "x", mixed),
        lambda b, mixed: b.op("Add", *(b.linear(mixed, WIDTH, WIDTH, name) for name in ("one", "two"))),
        lambda b, mixed: b.linear(mixed, WIDTH, WIDTH, "proj", bias=False),
    ],
    ids=["norm", "no projection", "two projections", "no bias and an output"],
)
def test_without_one_projection_right_behind_the_value_keeps_its_bias(after):
    b = Builder()
    query, key, value = (b.linear("x", WIDTH, WIDTH, name) for name in "qkv")
    softmax = b.op("Softmax", b.op("MatMul", query, b.op("Transpose", key, perm=[0, 2, 1])), axis=-1)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, after(b, b.op("MatMul", softmax, value)))
    assert_rewritten(model, fold_value_bias, 0)


def test_a_bias_that_another_layer_reads_is_copied():
    b = Builder()
    x = attention(b, "x", TOKENS, "columns")
    second = b.op("MatMul", x, b.constant(b.random(WIDTH, 3 * WIDTH)), name="other/MatMul")
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("Add", second, "attn.qkv.bias", name="other/Add"))
    before = weights(model)["attn.qkv.bias"].copy()
    assert_rewritten(model, drop_key_bias, 1)
    np.testing.assert_array_equal(weights(model)["attn.qkv.bias"], before)

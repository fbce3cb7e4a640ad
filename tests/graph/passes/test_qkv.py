"""Query, key and value merged into one linear, and taken apart again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import (
    CHANNELS,
    FORMS,
    HEADS,
    MERGED,
    WIDTH,
    Builder,
    any_length,
    assert_rewritten,
    attention_model,
    operators,
    query_key_value,
    sequence_first,
    weights,
)
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.passes.folds import drop_key_bias
from vitdeploy.graph.passes.qkv import merge_qkv, split_qkv

TOKENS = 5
SEPARATE = [form for form in FORMS if form not in MERGED]


def names(model):
    return [linear.name for linear in find_linears(model)]


@given(
    form=st.sampled_from(SEPARATE),
    tokens=st.integers(1, 6),
    bias=st.booleans(),
    scale=st.sampled_from(["query", "key", "scores", None]),
    qk_norm=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_three_linears_become_one_and_a_split(form, tokens, bias, scale, qk_norm, seed):
    model = attention_model(tokens, form, seed, bias=bias, scale=scale, qk_norm=qk_norm)
    before = weights(model)
    assert_rewritten(model, merge_qkv, 1)
    assert names(model) == ["attn.q_k_v", "attn.proj"]
    assert operators(model)["Split"] == 1
    merged = np.concatenate([before[f"attn.{one}.weight_t"] for one in "qkv"], axis=1)
    np.testing.assert_array_equal(weights(model)["attn.q_k_v.weight_t"], merged)


@given(
    form=st.sampled_from(MERGED),
    tokens=st.integers(1, 6),
    bias=st.booleans(),
    scale=st.sampled_from(["query", "key", "scores", None]),
    qk_norm=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_one_linear_becomes_three(form, tokens, bias, scale, qk_norm, seed):
    model = attention_model(tokens, form, seed, bias=bias, scale=scale, qk_norm=qk_norm)
    before = weights(model)["attn.qkv.weight_t"]
    assert_rewritten(model, split_qkv, 1)
    roles = ("query", "key", "value")
    assert sorted(names(model)) == sorted([*(f"attn.qkv.{role}" for role in roles), "attn.proj"])
    assert not operators(model).keys() & {"Split", "Slice", "Gather", "Squeeze"}
    for i, role in enumerate(roles):
        third = before[:, i * WIDTH : (i + 1) * WIDTH]
        np.testing.assert_array_equal(weights(model)[f"attn.qkv.{role}.weight_t"], third)


@pytest.mark.parametrize("form", MERGED)
def test_the_key_is_transposed_once(form):
    model = attention_model(TOKENS, form, scale=None)
    split_qkv(model)
    perms = sorted(list(node.attributes.get_ints("perm")) for node in model.graph if node.op_type == "Transpose")
    assert perms == [[0, 2, 1, 3], [0, 2, 1, 3], [0, 2, 1, 3], [0, 2, 3, 1]]


def test_a_part_without_bias_gets_no_add():
    model = attention_model(TOKENS, "slices")
    drop_key_bias(model)
    assert_rewritten(model, split_qkv, 1)
    assert {name for name in weights(model) if name.endswith("bias")} == {
        "attn.qkv.query.bias",
        "attn.qkv.value.bias",
        "attn.proj.bias",
    }


def test_there_and_back_has_the_same_columns():
    model = attention_model(TOKENS, "slices")
    before = weights(model)["attn.qkv.weight_t"]
    assert split_qkv(model) == 1
    assert merge_qkv(model) == 1
    [merged] = [array for array in weights(model).values() if array.shape == before.shape]
    assert sorted(map(tuple, merged.T)) == sorted(map(tuple, before.T))


@pytest.mark.parametrize(("rewrite", "form"), [(merge_qkv, "slices"), (split_qkv, "separate")])
def test_what_is_in_the_wanted_form_is_left_alone(rewrite, form):
    assert_rewritten(attention_model(TOKENS, form), rewrite, 0)


@pytest.mark.parametrize("rewrite", [merge_qkv, split_qkv])
def test_without_attention_nothing_is_merged_or_split(rewrite):
    for form in ("slices", "separate"):
        assert_rewritten(attention_model(TOKENS, form, axis=1), rewrite, 0)


def test_key_and_value_of_cross_attention_are_merged():
    b = Builder()
    query, key, value = (
        b.linear(x, WIDTH, WIDTH, f"attn.{name}") for x, name in (("x", "q"), ("memory", "k"), ("memory", "v"))
    )
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 2, 1]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
    model = b.model({"x": ["batch", TOKENS, WIDTH], "memory": ["batch", 7, WIDTH]}, mixed)
    assert_rewritten(model, merge_qkv, 1)
    assert names(model) == ["attn.q", "attn.k_v"]


def test_other_linears_of_the_same_input_are_not_merged():
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "separate")
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
    joined = b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.ints(-1, TOKENS, WIDTH))
    mlp = b.op("Gelu", b.linear("x", WIDTH, WIDTH, "mlp.fc1"))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("Add", joined, mlp))
    assert_rewritten(model, merge_qkv, 1)
    assert sorted(names(model)) == ["attn.q_k_v", "mlp.fc1"]


def test_query_and_key_with_positions_are_merged():
    b = Builder()
    placed = b.op("Add", "x", b.constant(b.random(TOKENS, WIDTH)))
    query, key, value = (b.linear(x, WIDTH, WIDTH, name) for x, name in ((placed, "q"), (placed, "k"), ("x", "v")))
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 2, 1]))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("MatMul", b.op("Softmax", scores, axis=-1), value))
    assert_rewritten(model, merge_qkv, 1)
    assert sorted(names(model)) == ["q_k", "v"]


def test_a_linear_that_leaves_the_graph_is_not_merged():
    b = Builder()
    query, key, value = (b.linear("x", WIDTH, WIDTH, name) for name in "qkv")
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 2, 1]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
    assert_rewritten(b.model({"x": ["batch", TOKENS, WIDTH]}, mixed, key, value), merge_qkv, 0)


@pytest.mark.parametrize("reader", ["Relu", None], ids=["read twice", "an output"])
def test_a_part_that_is_read_elsewhere_is_not_split(reader):
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "slices")
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, mixed, b.op(reader, key) if reader else key)
    assert_rewritten(model, split_qkv, 0)


def test_a_query_that_leaves_the_graph_is_not_split():
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "slices")
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
    assert_rewritten(b.model({"x": ["batch", TOKENS, WIDTH]}, mixed, query), split_qkv, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda b, query, key: b.op("Transpose", key, perm=[0, 1, 2, 3]),
        lambda b, query, key: b.op(
            "Reshape", b.op("Transpose", query, perm=[0, 1, 3, 2]), b.ints(-1, HEADS, TOKENS, CHANNELS)
        ),
        lambda b, query, key: b.op("Gather", query, b.ints(0, 2, 1, 3, 4), axis=2),
    ],
    ids=["columns of the key", "tokens and channels mixed", "tokens in another order"],
)
def test_a_query_in_another_form_is_not_split(change):
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "columns")
    scores = b.op("MatMul", change(b, query, key), b.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
    assert_rewritten(b.model({"x": ["batch", TOKENS, WIDTH]}, mixed), split_qkv, 0)


def test_a_merged_linear_of_sequences_of_any_length_is_split():
    assert_rewritten(any_length(Builder()), split_qkv, 1, batch=3)


def test_three_linears_of_a_sequence_that_comes_first_are_merged():
    assert_rewritten(sequence_first(Builder(), TOKENS), merge_qkv, 1, batch=3)


def test_heads_with_their_own_query_key_and_value_are_split():
    """[heads, 3, channels] instead of [3, heads, channels]: the columns of a part lie apart."""
    b = Builder()
    merged = b.linear("x", WIDTH, 3 * WIDTH, "attn.qkv")
    split = b.op("Reshape", merged, b.ints(-1, TOKENS, HEADS, 3, CHANNELS))
    split = b.op("Transpose", split, perm=[3, 0, 2, 1, 4])
    query, key, value = (b.op("Gather", split, b.constant(np.array(i, np.int64)), axis=0) for i in range(3))
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("MatMul", b.op("Softmax", scores, axis=-1), value))
    before = weights(model)["attn.qkv.weight_t"].reshape(WIDTH, HEADS, 3, CHANNELS)
    assert_rewritten(model, split_qkv, 1)
    np.testing.assert_array_equal(weights(model)["attn.qkv.key.weight_t"], before[:, :, 1].reshape(WIDTH, WIDTH))

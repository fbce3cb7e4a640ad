"""Attention as one operator: the same function, and only where it is the same function."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import (
    FORMS,
    Builder,
    attention_model,
    difference,
    operators,
    random_feeds,
    run,
    sequence_first,
)
from vitdeploy.quantization.place_onnxruntime import fuse_attention
from vitdeploy.quantization.ranges import separate_scores

TOKENS = 5


@given(form=st.sampled_from(FORMS), seed=st.integers(0, 99), bias=st.booleans(), batch=st.integers(1, 3))
@settings(max_examples=16, deadline=None)
def test_one_operator_computes_what_the_nodes_did(form, seed, bias, batch):
    model = attention_model(TOKENS, form, seed, scale=None, bias=bias)
    feeds = random_feeds(ir.to_proto(model), batch, seed)
    [expected] = run(ir.to_proto(model), feeds)
    separate_scores(model)
    assert fuse_attention(model) == 1
    found = operators(model)
    assert (found["MultiHeadAttention"], found["Softmax"], found["Transpose"], found["MatMul"]) == (1, 0, 0, 4)
    [ours] = run(ir.to_proto(model), feeds)
    assert difference(ours, expected) <= 1e-5
    assert fuse_attention(model) == 0


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, TOKENS), (1, TOKENS, 1), (2, 1, TOKENS), (2, TOKENS, TOKENS)])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_added_to_the_scores_goes_in(shape, batch):
    bias = np.random.default_rng(0).normal(size=(1, *shape)).astype(np.float32)
    model = attention_model(TOKENS, "separate", scale=None, mask=bias)
    feeds = random_feeds(ir.to_proto(model), batch, 0)
    [expected] = run(ir.to_proto(model), feeds)
    whole = shape[-1] == TOKENS
    assert fuse_attention(model) == whole
    found = operators(model)
    assert found["MultiHeadAttention"] == whole
    assert found["Expand"] == (whole and shape[1] == 1)
    [ours] = run(ir.to_proto(model), feeds)
    assert difference(ours, expected) <= 1e-5


def test_attention_with_more_in_it_stays():
    model = attention_model(TOKENS, "separate", scale="query")
    before = ir.to_proto(model)
    assert fuse_attention(model) == 0
    assert ir.to_proto(model) == before


def test_a_merged_linear_and_heads_joined_with_the_batch_stay():
    for model in (attention_model(TOKENS, "slices", scale=None), sequence_first(Builder(0), TOKENS)):
        assert fuse_attention(model) == 0


def test_columns_in_another_order_stay():
    """A permutation of the value's channels would need one in front of the projection."""
    model = attention_model(TOKENS, "columns", 1, scale=None)
    assert fuse_attention(model) == 0

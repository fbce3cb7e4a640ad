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
from vitdeploy.quantize.attention_onnxruntime import fuse_attention
from vitdeploy.quantize.scores import separate_scores

TOKENS = 5


@given(form=st.sampled_from(FORMS), seed=st.integers(0, 99), bias=st.booleans(), batch=st.integers(1, 3))
@settings(max_examples=16, deadline=None)
def test_one_operator_computes_what_the_nodes_did(form, seed, bias, batch):
    model = attention_model(TOKENS, form, seed, scale=None, bias=bias)
    feeds = random_feeds(ir.to_proto(model), batch, seed)
    [wanted] = run(ir.to_proto(model), feeds)
    separate_scores(model)
    assert fuse_attention(model) == 1
    found = operators(model)
    assert (found["MultiHeadAttention"], found["Softmax"], found["Transpose"], found["MatMul"]) == (1, 0, 0, 4)
    [ours] = run(ir.to_proto(model), feeds)
    assert difference(ours, wanted) <= 1e-5
    assert fuse_attention(model) == 0


MASK = np.zeros((TOKENS, TOKENS), np.float32)


@pytest.mark.parametrize("options", [{"scale": "query"}, {"scale": None, "mask": MASK}])
def test_attention_with_more_in_it_stays(options):
    model = attention_model(TOKENS, "separate", **options)
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

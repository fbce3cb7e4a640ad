"""Rollout against sums over all paths, and what becomes of rows and prefixes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.attention import read_by, rollout, to_grid


def random_weights(seed, *shape):
    weights = np.random.default_rng(seed).exponential(size=shape)
    return weights / weights.sum(axis=-1, keepdims=True)


def over_paths(blocks, start, end):
    """The attention that flows from token `end` of the input to row `start` of the last block: the sum over all ways
    through the blocks of the product of their edges, each edge half attention and half, where it stays, residual."""
    total = 0.0
    tokens = range(blocks[0].shape[1])
    for way in itertools.product(tokens, repeat=len(blocks) - 1):
        product, at = 1.0, start
        for weights, towards in zip(reversed(blocks), [*way, end], strict=True):
            product *= (weights[at, towards] + (at == towards)) / 2
            at = towards
        total += product
    return total


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.data())
def test_rollout_is_the_sum_over_all_paths(depth, tokens, data):
    rows = data.draw(st.integers(1, tokens))
    blocks = [random_weights(data.draw(st.integers(0, 99)), tokens, tokens) for _ in range(depth)]
    blocks[-1] = blocks[-1][:rows]
    flow = rollout(blocks)
    assert flow.shape == (rows, tokens)
    np.testing.assert_allclose(flow.sum(axis=1), 1, atol=1e-12)
    for row, token in itertools.product(range(rows), range(tokens)):
        assert flow[row, token] == pytest.approx(over_paths(blocks, row, token), abs=1e-12)


def test_a_pooling_query_is_no_token_so_nothing_goes_on_beside_it():
    block, pool = random_weights(0, 5, 5), random_weights(1, 1, 5)
    np.testing.assert_allclose(rollout([block, pool], pooled=True), pool @ (block + np.eye(5)) / 2, atol=1e-12)


def test_a_map_is_the_mean_of_the_rows_without_the_tokens_before_the_patches():
    weights = random_weights(2, 3, 7, 2 + 6)
    maps = to_grid(read_by(weights, (0, 4)), (2, 3))
    assert maps.shape == (3, 2, 3)
    assert maps[1, 1, 2] == pytest.approx((weights[1, 0, 7] + weights[1, 4, 7]) / 2)
    assert maps[0, 0, 0] == pytest.approx((weights[0, 0, 2] + weights[0, 4, 2]) / 2)

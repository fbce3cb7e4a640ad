"""Facts of a tensor that comes in batches are those that numpy computes of all of it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.search.graphs import facts_of


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), st.sampled_from([(30, 8), (8, 5, 5)]), st.integers(0, 1000))
def test_facts_are_those_of_the_whole_tensor(images, batch, shape, seed):
    axis = 1 if len(shape) == 3 else -1
    values = np.random.default_rng(seed).standard_t(2, (images, *shape)).astype(np.float32)
    found = facts_of((values[i : i + batch] for i in range(0, images, batch)), images, axis)
    assert (found.low, found.high, found.finite) == (values.min(), values.max(), 1)
    assert found.percentile == np.sort(np.abs(values), axis=None)[math.ceil(values.size * 999 / 1000) - 1]
    reach = np.abs(values).max(axis=tuple(i for i in range(values.ndim) if i != axis % values.ndim))
    assert found.median_channel == pytest.approx(np.median(reach))
    assert set(found.outliers) <= set(np.flatnonzero(reach > 10 * np.median(reach)))


def test_channels_far_beyond_all_others_are_named_and_what_is_not_finite_is_counted():
    values = np.ones((4, 10, 16), np.float32)
    values[2, 3, 5], values[1, 1, 7], values[0, 0, 0] = -200, 50, np.nan
    found = facts_of(iter([values[:3], values[3:]]), 4, -1)
    assert list(found.outliers.items()) == [(5, 200), (7, 50)]
    assert (found.low, found.high, found.median_channel) == (-200, 50, 1)
    assert found.finite == 1 - 1 / 640

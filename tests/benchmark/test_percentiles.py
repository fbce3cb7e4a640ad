"""Percentiles and what so many queries allow to be said of them, against SciPy's binomial distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitdeploy.benchmark.results import least_rank, nearest_rank, over_latency, percentiles, queries_needed


@pytest.mark.parametrize(("percent", "needed"), [(50, 11), (90, 64), (95, 130), (99, 662), (99.9, 6636)])
def test_as_many_queries_are_needed_as_mlperf_says(percent, needed):
    assert queries_needed(percent) == needed
    above = 1 - percent / 100
    assert stats.binom.cdf(1, needed, above) <= 0.01 < stats.binom.cdf(1, needed - 1, above)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.sampled_from([1.0, 25.0, 50.0, 90.0, 95.0, 99.0, 99.9]))
def test_ranks_are_the_binomial_ones(count, percent):
    above = 1 - percent / 100
    over = over_latency(count, percent)
    assert over == 0 or stats.binom.cdf(over, count, above) <= 0.01 + 1e-12
    assert stats.binom.cdf(over + 1, count, above) > 0.01 - 1e-12
    rank = least_rank(count, percent)
    assert rank == 0 or stats.binom.cdf(count - rank, count, above) >= 0.99 - 1e-12
    assert rank == count or stats.binom.cdf(count - rank - 1, count, above) < 0.99 + 1e-12


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=300), st.integers(0, 100))
def test_nearest_rank_is_numpys_inverted_cdf(values, percent):
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert nearest_rank(np.array(values), percent) == expected


def test_nearest_rank_takes_percents_as_they_are_written():
    values = np.arange(1.0, 1001.0)
    assert [nearest_rank(values, percent) for percent in (25, 99.9, 99.95, 100)] == [250, 999, 1000, 1000]


def test_enough_queries_give_the_percentile_and_its_upper_bound():
    (p99,) = percentiles(np.random.default_rng(0).permutation(np.arange(1.0, 1001.0)), [99.0])
    assert (p99.percent, p99.value, p99.at_least, p99.queries, p99.needed) == (99, 990, False, 1000, 662)
    # At most 2 of 1,000 queries are above p99 in one run of a hundred: the estimate is the second largest.
    assert stats.binom.cdf(2, 1000, 0.01) <= 0.01 < stats.binom.cdf(3, 1000, 0.01)
    assert p99.upper == 999


def test_too_few_queries_give_what_the_percentile_surely_reaches():
    p50, p99, p999 = percentiles(np.arange(1.0, 101.0), [50.0, 99.0, 99.9])
    assert (p50.value, p50.at_least) == (50, False)
    assert (p99.percent, p99.value, p99.at_least, p99.upper, p99.needed) == (99, 96, True, None, 662)
    assert (p999.percent, p999.value, p999.at_least) == (99.9, 99, True)


@pytest.mark.parametrize(("values", "p50", "p99"), [([], None, None), ([7.0], None, 7.0)])
def test_none_or_one_query_claims_no_more_than_it_can(values, p50, p99):
    found = percentiles(np.array(values), [50.0, 99.0])
    assert [(each.value, each.at_least) for each in found] == [(p50, True), (p99, True)]


def test_claims_of_short_runs_are_true_as_often_as_they_say():
    """99 % confidence: of 400 runs of 100 queries, about 4 may claim more than the true p99."""
    generator = np.random.default_rng(0)
    true = stats.gamma(2).ppf(0.99)
    runs = generator.gamma(2, size=(400, 100))
    assert np.mean([percentiles(run, [99.0])[0].value <= true for run in runs]) >= 0.98
    long = generator.gamma(2, size=(200, 700))
    assert np.mean([percentiles(run, [99.0])[0].upper >= true for run in long]) >= 0.98

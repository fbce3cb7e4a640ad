"""The intervals against published values, their properties, and their coverage in simulations with a fixed seed."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitdeploy.verification.intervals import (
    least_of_difference,
    least_of_share,
    paired_difference,
    percentile_interval,
    unpaired_difference,
    unpaired_log_ratio,
    wilson,
)

# Newcombe 1998, Statistics in Medicine 17:2635-2650, Table III, method 10, 95 %: (both, only a, only b, neither).
NEWCOMBE_TABLE_3 = [
    ((36, 12, 2, 0), (0.0569, 0.3404)),
    ((20, 12, 2, 16), (0.0562, 0.3292)),
    ((18, 12, 2, 18), (0.0562, 0.3290)),
    ((36, 14, 0, 0), (0.1528, 0.4167)),
    ((35, 14, 0, 1), (0.1461, 0.4175)),
    ((18, 14, 0, 18), (0.1441, 0.3963)),
    ((2, 97, 1, 0), (0.8721, 0.9854)),
    ((1, 97, 1, 1), (0.8736, 0.9850)),
    ((0, 29, 1, 0), (0.6666, 0.9882)),
    ((2, 98, 0, 0), (0.9178, 0.9945)),
    ((1, 98, 0, 1), (0.9171, 0.9916)),
    ((0, 30, 0, 0), (0.8395, 1.0000)),
    ((54, 0, 0, 0), (-0.0664, 0.0664)),
    ((53, 0, 0, 1), (-0.0729, 0.0729)),
    ((30, 0, 0, 24), (-0.0358, 0.0358)),
    ((27, 0, 0, 27), (-0.0351, 0.0351)),
]
# Fagerland, Lydersen, Laake 2017, "Statistical Analysis of Contingency Tables", chapter 8 (data of Cavo et al. 2012).
FAGERLAND = [((59, 6, 16, 80), (-0.1186, -0.0046))]

# Newcombe 1998, Statistics in Medicine 17:873-890, Table II, method 10, 95 %: (a, n_a, b, n_b).
NEWCOMBE_TABLE_2 = [
    ((56, 70, 48, 80), (0.0524, 0.3339)),
    ((9, 10, 3, 10), (0.1705, 0.8090)),
    ((6, 7, 2, 7), (0.0582, 0.8062)),
    ((5, 56, 0, 29), (-0.0381, 0.1926)),
    ((0, 10, 0, 20), (-0.1611, 0.2775)),
    ((0, 10, 0, 10), (-0.2775, 0.2775)),
    ((10, 10, 0, 20), (0.6791, 1.0000)),
    ((10, 10, 0, 10), (0.6075, 1.0000)),
]

counts = st.integers(0, 3000)
tables = st.tuples(counts, counts, counts, counts).filter(any)


@pytest.mark.parametrize(("table", "published"), NEWCOMBE_TABLE_3 + FAGERLAND)
def test_paired_difference_matches_published_values(table, published):
    # One unit of the last printed place: one limit of the table is printed 0.00007 below the formula's value.
    assert paired_difference(*table) == pytest.approx(published, abs=0.0001)


# Newcombe 1998, Statistics in Medicine 17:857-872, Table I, method 3 (score without continuity correction).
@pytest.mark.parametrize(
    ("successes", "n", "published"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_wilson_matches_published_values(successes, n, published):
    assert wilson(successes, n) == pytest.approx(published, abs=0.000051)


@pytest.mark.parametrize(("table", "published"), NEWCOMBE_TABLE_2)
def test_unpaired_difference_matches_published_values(table, published):
    assert unpaired_difference(*table) == pytest.approx(published, abs=0.000051)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95, 0.99])
def test_wilson_ends_where_the_score_test_rejects(level):
    """Both ends p solve |successes/n - p| = z sqrt(p (1 - p) / n)."""
    z = stats.norm.ppf((1 + level) / 2)
    for end in wilson(7, 25, level):
        assert abs(7 / 25 - end) == pytest.approx(z * math.sqrt(end * (1 - end) / 25), rel=1e-9)


@pytest.mark.parametrize("level", [0.8, 0.99])
def test_differences_are_of_their_level(level):
    """For large numbers all methods agree with Wald's; of independent items the paired one is the unpaired one."""
    wald = stats.norm.ppf((1 + level) / 2) * math.sqrt(0.8 * 0.2 / 40_000 + 0.7 * 0.3 / 40_000)
    expected = pytest.approx((0.1 - wald, 0.1 + wald), abs=0.01 * wald)
    assert unpaired_difference(32_000, 40_000, 28_000, 40_000, level) == expected
    assert paired_difference(22_400, 9_600, 5_600, 2_400, level) == expected


@pytest.mark.parametrize("table", [(0, 0, 1, 2), (1, 2, 0, 0), (1, 2, 3, 2)])
def test_differences_of_impossible_proportions_are_refused(table):
    with pytest.raises(ValueError):
        unpaired_difference(*table)


@settings(deadline=None, max_examples=50)
@given(tables)
def test_paired_difference_contains_the_estimate_and_stays_in_bounds(table):
    _, only_a, only_b, _ = table
    low, high = paired_difference(*table)
    assert -1 <= low <= high <= 1
    assert low - 1e-12 <= (only_a - only_b) / sum(table) <= high + 1e-12


@settings(deadline=None, max_examples=50)
@given(tables)
def test_paired_difference_mirrors_when_a_and_b_swap(table):
    both, only_a, only_b, neither = table
    low, high = paired_difference(*table)
    assert paired_difference(both, only_b, only_a, neither) == pytest.approx((-high, -low), abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(tables)
def test_a_higher_level_gives_a_wider_interval(table):
    low, high = paired_difference(*table, level=0.9)
    wider_low, wider_high = paired_difference(*table, level=0.99)
    assert wider_low <= low
    assert high <= wider_high


def test_agreement_narrows_the_interval():
    # The same two accuracies, 90 % and 88 % of 1,000, once on mostly the same images and once on different ones.
    low, high = paired_difference(870, 30, 10, 90)
    apart_low, apart_high = paired_difference(790, 110, 90, 10)
    assert high - low < (apart_high - apart_low) / 2


def test_counts_of_numpy_do_not_overflow():
    table = (700_000, 3_000, 2_000, 900_000)
    assert paired_difference(*np.array(table, np.int64)) == paired_difference(*table)


@pytest.mark.parametrize("table", [(0, 0, 0, 0), (3, -1, 2, 4)])
def test_impossible_counts_are_refused(table):
    with pytest.raises(ValueError, match="counts"):
        paired_difference(*table)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_impossible_proportions_are_refused(successes, n):
    with pytest.raises(ValueError):
        wilson(successes, n)


@pytest.mark.parametrize("cells", [(0.70, 0.06, 0.04, 0.20), (0.965, 0.015, 0.010, 0.010)])
def test_paired_difference_covers_the_truth(cells):
    truth = cells[1] - cells[2]
    draws = np.random.default_rng(0).multinomial(200, cells, size=1000)
    different, times = np.unique(draws, axis=0, return_counts=True)
    covered = [low <= truth <= high for low, high in (paired_difference(*draw) for draw in different)]
    assert np.average(covered, weights=times) >= 0.93


LEVELS = pytest.mark.parametrize("options", [{}, {"level": 0.8}])


@LEVELS
def test_unpaired_log_ratio_is_welchs_interval(options):
    """Of two samples of different sizes and spreads; the error and the degrees of freedom by Welch's formulas."""
    generator = np.random.default_rng(2)
    a, b = generator.lognormal(0.5, 0.5, 7), generator.lognormal(0, 0.1, 15)
    parts = [np.var(np.log(each), ddof=1) / len(each) for each in (a, b)]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 6 + parts[1] ** 2 / 14)
    reach = stats.t.ppf((1 + options.get("level", 0.95)) / 2, freedom) * math.sqrt(sum(parts))
    ratio = stats.gmean(a) / stats.gmean(b)
    expected = (ratio, ratio * math.exp(-reach), ratio * math.exp(reach))
    assert unpaired_log_ratio(a, b, **options) == pytest.approx(expected)


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0, 3.0]), ([], []), ([1.0, 2.0], [1.0])])
def test_unpaired_log_ratio_needs_two_values_of_each(a, b):
    with pytest.raises(ValueError, match="two values are required"):
        unpaired_log_ratio(a, b)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_unpaired_log_ratio_needs_positive_values(bad):
    with pytest.raises(ValueError, match="positive"):
        unpaired_log_ratio([1.0, bad], [1.0, 1.0])


def test_a_bootstrap_is_no_narrower_than_the_interval_of_as_many_trials():
    low, high = wilson(3, 10)
    assert least_of_share(0.31, 10) == pytest.approx((30 - 100 * low, 100 * high - 30))
    a, b = np.array([True] * 6 + [False] * 2), np.array([True] * 3 + [False] * 3 + [True, False])
    low, high = paired_difference(3, 3, 1, 1)
    assert least_of_difference(a, b) == pytest.approx((25 - 100 * low, 100 * high - 25))
    assert least_of_share(0.5, 0) == least_of_difference(a[:0], b[:0]) == (100, 100)


def test_a_percentile_interval_is_widened_within_its_limits():
    values = np.append(np.arange(1001) / 10, np.nan)
    assert percentile_interval(50, values, (1, 1), (0, 100)) == pytest.approx((2.5, 97.5))
    assert percentile_interval(50, values, (49, 48), (0, 100)) == pytest.approx((1, 98))
    assert percentile_interval(50, values, (60, 60), (0, 100)) == (0, 100)
    assert percentile_interval(50, values[-1:], (2, 3), (0, 100)) == (48, 53)

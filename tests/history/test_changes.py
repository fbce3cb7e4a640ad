"""Where a series changed: found where it was planted, and nowhere else, in noise as machines have it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.made import latencies
from vitdeploy.history.changes import LEAST_OF_LEVEL, LEAST_RESULTS, find_changes, noise_of, without_outliers

SIZE, AT = 320, 200
# (deviation of single results, correlation that decays by, and its share of the variance)
NOISES = [(0.02, 0.0, 0.0), (0.03, 0.5, 0.5), (0.04, 0.0, 0.0), (0.04, 0.5, 1.0)]


@pytest.mark.parametrize("seed", range(20))
def test_no_change_is_found_where_there_is_none(seed):
    assert find_changes(latencies(seed, SIZE, *NOISES[seed % 4]))[0] == []


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05], ids=["slower", "faster"])
def test_five_percent_are_found_at_the_right_result(factor):
    """Right to one result in most series. In the others some results right beside the change are nearer to the other
    level, as noise of 2 % has it."""
    beside = []
    for seed in range(30):
        (found,), noise = find_changes(latencies(seed, SIZE, 0.02, 0.3, 0.3, at=AT, factor=factor))
        beside.append(abs(found.first - AT))
        assert (found.ratio > 1) == (factor > 1) and found.ratio == pytest.approx(factor, abs=0.02)
        assert found.ci95[0] < found.ratio < found.ci95[1] and not found.ci95[0] <= 1 <= found.ci95[1]
        assert noise.deviation == pytest.approx(0.02, rel=0.35)
    assert np.mean(np.array(beside) <= 1) >= 0.8 and max(beside) <= 6


def test_five_percent_in_noise_of_four_percent_are_found_nearby_most_often():
    found = [find_changes(latencies(seed, SIZE, 0.04, 0.3, 0.3, at=AT, factor=1.05))[0] for seed in range(20)]
    near = [changes for changes in found if any(abs(each.first - AT) <= 10 for each in changes)]
    assert len(near) >= 14


def test_there_and_back_again():
    values = latencies(1, SIZE, 0.02, 0.3, 0.3, at=100, factor=1.1)
    values[220:] /= 1.1
    found, _ = find_changes(values)
    assert [(each.ratio > 1) for each in found] == [True, False]
    assert abs(found[0].first - 100) <= 1 and abs(found[1].first - 220) <= 1


def test_the_latest_results_are_a_level_as_soon_as_they_are_enough():
    values = latencies(2, 100, 0.01, 0.0, 0.0)
    for size in (1, 2, LEAST_OF_LEVEL, LEAST_OF_LEVEL + 1):
        slower = values.copy()
        slower[-size:] *= 1.2
        found = [each.first for each in find_changes(slower)[0]]
        assert found == ([] if size < LEAST_OF_LEVEL else [100 - size])


def test_an_outlier_right_before_a_change_is_no_change_of_its_own():
    values = latencies(0, 50, 0.01, 0.0, 0.0, at=20, factor=1.3)
    values[18] = 1.13 * values[17]
    assert [each.first for each in find_changes(values)[0]] == [20]


def test_single_results_that_are_far_off_are_no_change():
    values = latencies(3, 60, 0.01, 0.0, 0.0)
    values[[10, 30, 31, 50]] *= 3
    assert find_changes(values)[0] == []


@pytest.mark.parametrize("values", [[1.0] * LEAST_RESULTS, [2.5] * 300])
def test_what_never_moves_has_no_change(values):
    changes, noise = find_changes(values)
    assert changes == [] and 0 < noise.long_run < 0.01


def test_a_clean_step_is_found_in_few_results():
    changes, _ = find_changes([*[1.0, 1.001, 0.999, 1.0, 1.002, 0.998, 1.0, 1.001], *[1.5, 1.501, 1.499, 1.5, 1.502]])
    assert [each.first for each in changes] == [8]
    assert changes[0].ratio == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("values", [[1.0] * (LEAST_RESULTS - 1), [1.0] * 20 + [0.0], [1.0] * 20 + [np.nan]])
def test_what_is_no_series_is_refused(values):
    with pytest.raises(ValueError, match="at least 10 numbers above 0"):
        find_changes(values)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3), st.integers(LEAST_RESULTS, 120))
def test_the_unit_does_not_matter_and_slower_mirrored_is_faster(seed, unit, size):
    values = latencies(seed, size, 0.02, at=size // 2, factor=1.3)
    found = find_changes(values)[0]
    scaled = find_changes(unit * values)[0]
    assert [each.first for each in scaled] == [each.first for each in found]
    assert [each.ratio for each in scaled] == pytest.approx([each.ratio for each in found])
    inverse = find_changes(1 / values)[0]
    assert [each.first for each in inverse] == [each.first for each in found]
    assert [1 / each.ratio for each in inverse] == pytest.approx([each.ratio for each in found])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=LEAST_RESULTS, max_size=60))
def test_outliers_are_moved_and_nothing_else(logs):
    logs = np.array(logs)
    found = without_outliers(logs)
    assert found.shape == logs.shape and found.min() >= logs.min() and found.max() <= logs.max()


def test_the_noise_of_a_level_that_changes_is_that_of_the_level():
    level = np.log(latencies(5, 400, 0.03, 0.6, 0.7))
    stepped = level + np.where(np.arange(400) < 200, 0, 0.3)
    found, expected = (vars(noise_of(each, [200])) for each in (stepped, level))
    assert found == pytest.approx(expected, rel=1e-6)
    assert noise_of(level).long_run > 1.2 * noise_of(level).deviation

"""The ratio of two artifacts by paired rounds: against SciPy, and against what is true."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.ratios import log_ratio, paired_ratio, student
from vitdeploy.benchmark.evidence import (
    PairedRatio,
    clustered,
    quantile,
    ratio_of_medians,
    ratio_of_rounds,
)
from vitdeploy.benchmark.results import BlockMachine, Round


def rounds(medians):
    """Rounds of one query each, seven of each process."""
    return [Round(1, np.array([each]), 0.5, number // 7) for number, each in enumerate(medians)]


def interval(a, b):
    found = paired_ratio(a, b)
    return student(found.log, found.error, found.freedom)


def test_the_interval_of_a_logarithm_by_hand():
    # Logs 0 and ln 4 have the mean ln 2 and the standard error ln 2; t(0.975, 1 degree of freedom) = 12.7062.
    ratio, low, high = student(math.log(2), math.log(2), 1)
    assert ratio == pytest.approx(2)
    assert math.log(high / ratio) == pytest.approx(12.7062 * math.log(2), rel=1e-5)
    assert math.log(ratio / low) == pytest.approx(12.7062 * math.log(2), rel=1e-5)


def test_the_interval_of_a_mean_of_logarithms_is_scipys():
    a, b = np.random.default_rng(1).lognormal(0.2, 0.4, (2, 9))
    found = stats.ttest_rel(np.log(a), np.log(b)).confidence_interval(0.95)
    assert log_ratio(a, b) == pytest.approx((stats.gmean(a / b), math.exp(found.low), math.exp(found.high)))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_paired_ratio_is_scipys_interval_of_a_trimmed_mean(fives, seed):
    """Of counts of which 20 % is a whole number: SciPy takes the share, not what was really left out."""
    a, b = np.random.default_rng(seed).lognormal(0, 0.3, (2, 5 * fives))
    ratio, low, high = interval(a, b)
    expected = stats.mstats.trimmed_mean_ci(np.log(a / b), limits=(0.2, 0.2), alpha=0.05)
    assert (low, high) == pytest.approx(tuple(np.exp(expected)))
    assert ratio == pytest.approx(math.exp(stats.trim_mean(np.log(a / b), 0.2)))


def test_paired_ratio_covers_the_truth_and_sees_it_through_disturbances():
    """A machine that is 1.6 times slower for seconds: every twelfth block, and rarely both of a pair."""
    generator = np.random.default_rng(0)
    slow = np.where(generator.random((2, 1000, 21)) < 0.08, 1.6, 1.0)
    a, b = 1.05 * slow[0] * generator.lognormal(0, 0.01, (1000, 21)), slow[1] * generator.lognormal(0, 0.01, (1000, 21))
    found = [interval(*pair) for pair in zip(a, b, strict=True)]
    assert np.mean([low <= 1.05 <= high for _, low, high in found]) >= 0.93
    assert np.mean([low > 1 for _, low, _ in found]) >= 0.9
    assert np.mean([log_ratio(*pair)[1] > 1 for pair in zip(a, b, strict=True)]) < 0.5


def expected_error(processes, seen, noise=0.0, several=True):
    """The docstring's shrinkage: the squared error of a process by experience, 2 % and the noise of its rounds, counts
    as three processes, and the one that was seen as one less than there were."""
    both = (3 * (0.02**2 + noise) + (processes - 1) * seen) / (3 + processes - 1)
    return math.sqrt(both / processes)


@pytest.mark.parametrize(("processes", "each"), [(1, 4), (2, 1), (3, 7), (6, 5)])
def test_equal_rounds_leave_the_2_percent_that_processes_are_known_to_differ_by(processes, each):
    found = clustered(np.full(processes * each, 0.3), np.repeat(np.arange(processes), each).tolist())
    assert found.log == pytest.approx(0.3)
    assert found.freedom == 3 + processes - 1
    assert found.error == found.between == pytest.approx(expected_error(processes, 0.0))
    assert found.spread == pytest.approx(0)
    assert clustered(np.array([0.3]), [0]) == PairedRatio(0.3, pytest.approx(0.02), 3, 0.0, pytest.approx(0.02))
    pairs = paired_ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert pairs == PairedRatio(pytest.approx(math.log(2)), 0.0, 2, 0.0, between=0.0, bias=0.0)


def test_processes_that_differ_and_rounds_that_do_not():
    """Too few to trim: the variance of a process's mean is that of the means."""
    means = np.array([-0.05, 0.02, 0.06])
    found = clustered(np.repeat(means[:2], 2), [7, 7, 4, 4])
    assert found.log == pytest.approx(means[:2].mean())
    assert found.error == found.between == pytest.approx(expected_error(2, means[:2].var(ddof=1)))
    apart = clustered(means, [0, 1, 2])  # one round each: noise of rounds and differences of processes are one
    variance = means.var(ddof=1)
    assert apart.error == pytest.approx(expected_error(3, variance, variance))
    assert apart.between == pytest.approx(expected_error(3, 0.0))
    assert apart.spread == pytest.approx(means.std(ddof=1))


def autocorrelated(x):
    """Marriott and Pope's correction of r_1 about the mean, which is short by (1 + 3 rho) / n; from 0 to 0.8."""
    x, n = x - x.mean(), len(x)
    r = max(0.0, (x[1:] * x[:-1]).sum() / (x**2).sum() * n / (n - 1))
    plain = (x[1:] * x[:-1]).sum() / (x**2).sum() * n / (n - 1)
    return min(max(0.0, plain + (1 + 3 * r) / n), 0.8)


@pytest.mark.parametrize(
    "x",
    [
        np.array([0.04, -0.04, 0.04, -0.04]),
        np.array([0.01, 0.02, -0.05, 0.02]),
        np.array([0.05, 0.03, -0.02, -0.06]),
        np.array([0.05, 0.03, -0.02, 0.01]),
        np.array([0.04, 0.02, 0.0, 0.01]),
        np.array([0.04, 0.05]),
    ],
)
def test_rounds_of_one_process_that_follow_each_other_say_less(x):
    """The error of a mean of n values, var / n, times (1 + rho) / (1 - rho); too few to trim."""
    rho = autocorrelated(x)
    noise = x.var(ddof=1) / len(x) * (1 + rho) / (1 - rho)
    found = clustered(x, [0] * len(x))
    assert found.error == pytest.approx(expected_error(1, 0.0, noise))
    assert found.between == pytest.approx(expected_error(1, 0.0))
    twice = clustered(np.concatenate([x, x]), [0] * len(x) + [1] * len(x)) if len(x) < 3 else None
    if twice:  # two processes that agree: neighbours are those of one process
        pooled = (x.var(ddof=1) * (len(x) - 1) * 2) / (2 * len(x) - 2) / len(x) * (1 + rho) / (1 - rho)
        assert twice.error == pytest.approx(expected_error(2, 0.0, pooled))
        assert twice.between == pytest.approx(expected_error(2, 0.0))


def test_influences_of_rounds_are_those_on_the_trimmed_mean():
    """By moving one round after the other a little: what the mean then moves by, summed for each process."""
    generator = np.random.default_rng(4)
    logs = generator.normal(0, 0.05, 15) + np.repeat([-0.05, 0.0, 0.06], 5)
    of, winsorised = np.repeat([0, 1, 2], 5), stats.mstats.winsorize(logs, limits=(0.2, 0.2)).data
    influence = (winsorised - winsorised.mean()) / 0.6
    seen = 3 / 2 * sum(influence[of == each].sum() ** 2 for each in range(3)) / 15**2
    centred = [influence[of == each] - influence[of == each].mean() for each in range(3)]
    squares = sum((each**2).sum() for each in centred)
    r = sum((each[1:] * each[:-1]).sum() for each in centred) / squares * 5 / 4
    rho = min(max(0.0, r + (1 + 3 * max(0.0, r)) / 5), 0.8)
    noise = squares / 12 / 5 * (1 + rho) / (1 - rho)
    found = clustered(logs, of.tolist())
    assert found.log == pytest.approx(stats.trim_mean(logs, 0.2))
    assert found.error == pytest.approx(expected_error(3, 3 * seen, noise))
    assert found.between == pytest.approx(expected_error(3, max(0.0, 3 * seen - noise)))
    assert found.spread == pytest.approx(winsorised.std(ddof=1))


def test_what_others_used_is_a_bias_of_the_artifact_that_lost_more():
    def disturbed(waited):
        machine = BlockMachine(0.2, 0.4, 0.0, None, None, None, None, 0.0, waited)
        return [Round(1, np.array([ms, ms, 90.0]), 0.5, 0, machine=machine) for ms in (1.0, 1.1, 0.9, 1.0)]

    first, second = disturbed(0.01), disturbed(0.02)
    for a, b in ((first, second), (second, first)):
        found = ratio_of_rounds(a, b)
        assert found.bias == pytest.approx(0.04)
        assert found.reach == pytest.approx(quantile(found.freedom) * found.error + 0.04)
        assert found.interval == pytest.approx((1.0, math.exp(-found.reach), math.exp(found.reach)))
    alone = ratio_of_medians([1.0, 1.1, 0.9, 1.0], [2.0] * 4)
    assert alone.interval[0] == pytest.approx(0.5, rel=0.01)
    assert alone == clustered(np.log(np.array([1.0, 1.1, 0.9, 1.0])) - np.log(2.0), [0] * 4)


def test_quantiles_are_students():
    for freedom in range(1, 31):
        assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=5.1e-4)
    for freedom in (1, 2, 5, 30, 31, 60, 500):
        assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)


def blocks(generator, rounds, noise, alike):
    """The logs of two artifacts' blocks, 8 % of which are 1.6 times slower; `alike`: the autocorrelation."""
    steps = generator.normal(0, 1, (rounds, 2))
    values = [steps[0]]
    for step in steps[1:]:
        values.append(alike * values[-1] + math.sqrt(1 - alike**2) * step)
    slow = np.where(generator.random((rounds, 2)) < 0.08, math.log(1.6), 0.0)
    return noise * np.array(values) + slow


def bench_run(generator, spread, noise, alike, truth):
    """The ratio as a bench finds it: three processes of 7, 7 and 6 rounds, up to three times, until it is narrow."""
    logs, processes = [], []
    for process in range(9):
        a, b = blocks(generator, 7 - (process % 3 == 2), noise, alike).T
        logs += list(truth + generator.normal(0, spread) + a - b)
        processes += [process] * len(a)
        if process % 3 == 2 and (found := clustered(np.array(logs), processes)).narrow:
            break
    return found, process // 3 + 1


@pytest.mark.parametrize(
    ("spread", "alike"), [(0.0, 0.0), (0.008, 0.0), (0.016, 0.0), (0.025, 0.0), (0.008, 0.5), (0.016, 0.5)]
)
def test_intervals_cover_whatever_processes_and_neighbours_have_in_common(spread, alike):
    """A ratio of 1.05, on machines whose rounds vary by 0.5 to 5 %; all are seeded."""
    generator, truth = np.random.default_rng(0), math.log(1.05)
    found = [bench_run(generator, spread, noise, alike, truth) for noise in generator.uniform(0.005, 0.05, 600)]
    covered = np.mean([abs(each.log - truth) <= each.reach for each, _ in found])
    assert covered >= 0.93
    if (spread, alike) == (0.008, 0.0):  # and what was planted is found, in 40 rounds on average
        assert np.mean([each.log > each.reach for each, _ in found]) >= 0.9
        assert np.mean([sessions for _, sessions in found]) <= 2.2


def test_rounds_of_one_process_are_one_voice():
    """Three pairs of processes with an offset each: the rounds alone would make the interval too narrow."""
    generator = np.random.default_rng(0)
    offsets = np.repeat(generator.normal(0, 0.02, (600, 3)), 7, axis=1)
    a = np.exp(offsets + generator.normal(0, 0.01, offsets.shape))
    ones = np.ones(21)
    bare = [interval(each, ones) for each in a]
    found = [ratio_of_rounds(rounds(each), rounds(ones)) for each in a]
    assert np.mean([low <= 1 <= high for _, low, high in bare]) < 0.6
    assert 0.93 <= np.mean([abs(each.log) <= each.reach for each in found]) <= 0.99
    for each in found[:3]:
        _, low, high = student(each.log, each.error, each.freedom)
        assert each.reach == pytest.approx(math.log(high / low) / 2, rel=1e-3)


def test_what_differs_between_processes_is_seen():
    """More than was expected of them; and equal ones are not taken for a proof that all are."""
    generator = np.random.default_rng(5)
    processes = np.repeat(np.arange(6), 5)
    noise = generator.normal(0, 0.001, 30)
    apart = clustered(noise + np.array([-0.1, 0.1] * 3)[processes], processes.tolist())
    equal = clustered(noise, processes.tolist())
    assert apart.error > 2 * equal.error and apart.between == pytest.approx(apart.error, rel=0.05)
    assert equal.error > 5 * noise.std() / math.sqrt(30)


def test_what_slows_both_down_is_no_spread_of_their_ratio():
    generator = np.random.default_rng(3)
    drift = np.exp(generator.normal(0, 0.3, 20))
    noise = generator.normal(0, 0.02, 20)
    spread = paired_ratio(drift * np.exp(noise), drift).spread
    assert spread == pytest.approx(np.std(stats.mstats.winsorize(noise, limits=(0.2, 0.2)), ddof=1))
    disturbed = noise.copy()
    disturbed[:3] = 0.5
    assert paired_ratio(drift * np.exp(disturbed), drift).spread < 0.05


@pytest.mark.parametrize(
    ("log", "error", "narrow"),
    [(0.0, 0.0136, True), (0.0, 0.0137, False), (0.05, 0.0137, False), (-0.5, 0.0283, True), (0.5, 0.0285, False)],
)
def test_a_narrow_ratio_reaches_3_percent_or_an_eighth(log, error, narrow):
    assert PairedRatio(log, error, 11, 0.1).narrow == narrow


@pytest.mark.parametrize("truth", [1.0, 1.05])
def test_going_on_until_the_ratio_is_narrow_neither_finds_nor_hides_anything(truth):
    """Up to three times seven rounds in each of three processes, of a machine that is rarely calm."""
    generator = np.random.default_rng(1)
    verdicts, sessions = [], []
    for noise in generator.uniform(0.01, 0.06, 400):
        a, b = [], []
        for session in range(3):
            for process in range(3):
                offset = truth * math.exp(generator.normal(0, 0.008))
                for column, level in ((a, offset), (b, 1.0)):
                    slow = np.where(generator.random(7) < 0.08, 1.6, 1.0)
                    values = level * slow * generator.lognormal(0, noise, 7)
                    column += [Round(1, np.array([each]), 0.5, 3 * session + process) for each in values]
            found = ratio_of_rounds(a, b)
            if found.narrow:
                break
        _, low, high = student(found.log, found.error, found.freedom)
        verdicts.append((low <= truth <= high, low > 1))
        sessions.append(len(a) // 21)
    covered, slower = np.mean(verdicts, axis=0)
    assert covered >= 0.94
    assert slower <= 0.03 if truth == 1 else slower >= 0.9
    assert {1, 2, 3} == set(sessions)


def test_paired_ratio_needs_two_positive_pairs():
    with pytest.raises(ValueError, match="two pairs"):
        interval([1.0], [2.0])
    with pytest.raises(ValueError, match="positive"):
        interval([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="found 3 and 2"):
        paired_ratio([1.0, 1.0, 1.0], [1.0, 1.0])

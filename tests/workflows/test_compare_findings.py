"""What `compare` judges: outcomes made up for every combination of metric, direction, flags and limits."""

import dataclasses
import itertools

import pytest

from vitdeploy.document.comparison import AccuracyChange, ComparisonLimits, TimeRatio
from vitdeploy.verification.comparison import Control
from vitdeploy.workflows.regression import judge, unjudged

LIMITS = ComparisonLimits(max_drop=1.0, max_slowdown=5.0)
BUSY = "somebody else was busy"


def ratio(metric, slower, spread=0.01, decided=True):
    """The candidate takes `slower` times as long: its latency is that much of the baseline's, its throughput the
    inverse."""
    value = slower if metric == "latency" else 1 / slower
    bounds = value * (1 - spread), value * (1 + spread)
    reason = "" if decided else BUSY
    return TimeRatio(metric, value, bounds, decided, reason)


def accuracy(low, high):
    interval, control = (low, high), Control(10.0, 10.0, 1.0)
    drop, agreement = (low + high) / 2, (98.0, 99.5)
    return AccuracyChange("measured", 1000, "top-1", 98.0, 97.0, drop, interval, 99.0, agreement, control)


def checks(found, limits=LIMITS):
    """The statuses of all checks by name, and that of the gate."""
    facts, gate = judge(found, limits)
    return {check.name: check.status for check in facts.checks}, gate.status


@pytest.mark.parametrize("metric", ["latency", "throughput"])
@pytest.mark.parametrize(
    ("slower", "spread", "status", "said"),
    [
        (0.5, 0.01, "pass", "faster"),
        (1.0, 0.01, "pass", "no difference"),
        (1.03, 0.01, "pass", "slower"),
        (1.05, 0.04, "undecided", None),
        (1.08, 0.01, "fail", "slower"),
        (2.0, 0.01, "fail", "slower"),
    ],
)
def test_a_time_is_judged_by_its_interval_and_throughput_as_the_time_of_an_image(metric, slower, spread, status, said):
    found = unjudged("engine", None, [ratio(metric, slower, spread)])
    statuses, gate = checks(found, ComparisonLimits(None, 5.0))
    assert (statuses[metric], gate) == (status, status)
    facts, _ = judge(found, ComparisonLimits(None, 5.0))
    if said is not None:
        assert facts.ratios[0].difference == said
    # The very growth in percent, with the sign of a slowdown, is in the reason of what does not pass.
    for reason in facts.checks[-1].reasons:
        assert f"{100 * (slower - 1):+.0f}"[:2] in reason


@pytest.mark.parametrize("times", [*itertools.product((0.9, 1.05, 1.2), repeat=2)])
def test_the_worst_of_latency_and_throughput_decides(times):
    ranks = {0.9: "pass", 1.05: "undecided", 1.2: "fail"}
    found = unjudged("engine", None, [ratio("latency", times[0], 0.02), ratio("throughput", times[1], 0.02)])
    statuses, gate = checks(found, ComparisonLimits(None, 5.0))
    assert (statuses["latency"], statuses["throughput"]) == (ranks[times[0]], ranks[times[1]])
    assert gate == next(each for each in ("fail", "undecided", "pass") if each in statuses.values())


@pytest.mark.parametrize(
    ("interval", "status"),
    [((-0.5, 0.5), "pass"), ((-2.0, -1.0), "pass"), ((0.5, 1.5), "undecided"), ((1.1, 3.0), "fail")],
)
def test_accuracy_is_judged_by_its_interval(interval, status):
    statuses, gate = checks(unjudged("engine", accuracy(*interval), ()), ComparisonLimits(1.0, None))
    assert (statuses["accuracy"], gate) == (status, status)


@pytest.mark.parametrize("times", [0.5, 1.0, 1.2])
def test_what_hinders_the_times_neither_passes_nor_fails_and_claims_no_difference(times):
    found = unjudged("engine", None, [ratio("latency", times, decided=False)])
    assert checks(found, ComparisonLimits(None, 5.0)) == ({"accuracy": "none", "latency": "undecided"}, "undecided")
    facts, _ = judge(found, ComparisonLimits(None, 5.0))
    assert facts.ratios[0].difference == "not decided"
    assert facts.checks[-1].reasons == (f"latency not decided: {BUSY}",)


def test_one_time_that_is_not_decided_undoes_no_other():
    found = unjudged("engine", None, [ratio("latency", 1.4), ratio("throughput", 1.0, decided=False)])
    assert checks(found, ComparisonLimits(None, 5.0))[0] == {
        "accuracy": "none",
        "latency": "fail",
        "throughput": "undecided",
    }


def test_a_flag_lets_nothing_pass():
    assert checks(unjudged("engine", None, [ratio("latency", 0.5)], ["throttled"]), LIMITS)[0]["latency"] == "undecided"


def test_the_same_files_pass_without_times_and_whatever_a_recorded_ratio_said():
    certain = dataclasses.replace(accuracy(0.0, 0.0), how="same files")
    assert checks(unjudged("engine", certain, same_engine=True)) == (
        {"accuracy": "pass", "latency": "pass"},
        "pass",
    )


def test_what_was_not_measured_is_undecided_where_it_has_a_limit_and_nothing_where_it_has_none():
    nothing = unjudged("engine", None, ())
    assert checks(nothing) == ({"accuracy": "undecided", "latency": "undecided"}, "undecided")
    assert checks(nothing, ComparisonLimits(None, None)) == ({"accuracy": "none"}, "none")
    everything = unjudged("engine", accuracy(5.0, 9.0), [ratio("latency", 3.0), ratio("throughput", 3.0)])
    assert checks(everything, ComparisonLimits(None, None))[1] == "none"

"""From measurements to reported numbers, on contests built by hand."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.bench import summary
from vitdeploy.bench.contest import Contest, Entry, Protocol, Round

SINGLE = [np.arange(1.0, 61.0), np.arange(61.0, 101.0)]
OFFLINE = [np.full(10, 50.0), np.full(10, 150.0)]


def make_round(batch, latencies):
    values = np.asarray(latencies, np.float64)
    return Round(batch, values, float(values.sum()) / 1e3)


def make_contest(rounds, load_average=0.5, cpus=2):
    """A contest of one artifact; `rounds` has lists of latencies in ms per scenario."""
    protocol = Protocol(scenarios=tuple(rounds), batch=(1, 8))
    measured = {
        scenario: [make_round(protocol.batch_of(scenario), latencies) for latencies in blocks]
        for scenario, blocks in rounds.items()
    }
    entry = Entry("openvino-cpu-int8", "openvino-cpu", "int8", "CPU", 1.5, 20.0, measured)
    return Contest(protocol, (entry,), load_average, cpus)


def test_row_has_latency_of_single_and_throughput_of_offline():
    row = summary.rows(make_contest({"single": SINGLE, "offline": OFFLINE}))[0]
    assert row == {
        "artifact": "openvino-cpu-int8",
        "target": "openvino-cpu",
        "precision": "int8",
        "provider": "CPU",
        "batch": {"single": 1, "offline": 8},
        "latency_ms": {"p50": 50.0, "p90": 90.0, "p99": 99.0, "mean": 50.5},
        "throughput": pytest.approx(8 * 20 / 2.0),
        "flags": ["unstable", "short"],
        "samples": 100,
        "load_seconds": 1.5,
        "first_inference_ms": 20.0,
    }


@pytest.mark.parametrize(("scenario", "batch"), [("single", 1), ("offline", 8)])
def test_one_scenario_gives_both_numbers(scenario, batch):
    row = summary.rows(make_contest({scenario: OFFLINE}))[0]
    assert row["batch"] == {"single": batch, "offline": batch}
    assert row["latency_ms"]["p50"] == 50.0
    assert row["throughput"] == pytest.approx(batch * 20 / 2.0)


def test_all_values_are_plain():
    contest = make_contest({"single": SINGLE, "offline": OFFLINE})
    for value in (summary.rows(contest), summary.block_medians(contest), summary.samples(contest)):
        assert json.loads(json.dumps(value)) == value
    row = summary.rows(contest)[0]
    assert type(row["samples"]) is int
    assert {type(row[key]) for key in ("throughput", "load_seconds", "first_inference_ms")} == {float}
    assert {type(value) for value in row["latency_ms"].values()} == {float}


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=300), st.integers(0, 100))
def test_percentile_is_nearest_rank(values, percent):
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert summary.percentile(np.array(values), percent) == expected


def test_percentile_does_not_interpolate():
    values = np.array([4.0, 1.0, 3.0, 2.0])
    assert [summary.percentile(values, percent) for percent in (25, 50, 51, 90, 99, 100)] == [1, 2, 3, 4, 4, 4]


@pytest.mark.parametrize(
    ("rounds", "flags"),
    [
        ([np.full(400, 10.0), np.full(400, 10.1)], []),
        ([np.full(400, 10.0), np.full(400, 12.0)], ["unstable"]),
        ([np.full(331, 10.0), np.full(331, 10.0)], []),
        ([np.full(331, 10.0), np.full(330, 10.0)], ["short"]),
        ([np.full(700, 10.0)], []),
    ],
)
def test_flags_of_the_measurements(rounds, flags):
    assert summary.rows(make_contest({"single": rounds}))[0]["flags"] == flags


@pytest.mark.parametrize(("load_average", "contended"), [(None, False), (2.5, False), (2.51, True)])
def test_flag_of_the_machine(load_average, contended):
    contest = make_contest({"single": [np.full(700, 10.0)]}, load_average, cpus=2)
    assert ("contended" in summary.rows(contest)[0]["flags"]) is contended


def test_block_medians_are_in_the_order_of_time():
    contest = make_contest({"single": SINGLE, "offline": OFFLINE})
    assert summary.block_medians(contest) == {"openvino-cpu-int8": [30.5, 80.5]}


def test_samples_are_all_values_or_evenly_picked_ones():
    contest = make_contest({"single": SINGLE, "offline": OFFLINE})
    assert summary.samples(contest)["openvino-cpu-int8"] == np.arange(1.0, 101.0).tolist()
    picked = summary.samples(contest, limit=12)["openvino-cpu-int8"]
    assert picked == [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]

"""From measurements to reported numbers and flags, on benchmark runs built by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest

from vitdeploy.benchmark import summary
from vitdeploy.benchmark.evidence import percentile_interval
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun, BlockMachine, Measurements, Round
from vitdeploy.spec import encode

SINGLE = [np.arange(1.0, 61.0), np.arange(61.0, 101.0)]
OFFLINE = [np.full(10, 50.0), np.full(10, 150.0)]
CALM = BlockMachine(1.0, 0.0, 0.0, None, None, None, None, 0.0)
LONG = [np.full(400, 10.0), np.full(400, 10.1)]


def make_round(batch, latencies, **fields):
    values = np.asarray(latencies, np.float64)
    return Round(batch, values, float(values.sum()) / 1e3, **fields)


def make_run(rounds, load_average=0.5, cpus=2, **fields):
    """A benchmark run of one artifact; `rounds` has lists of rounds, or of latencies in ms, per scenario."""
    protocol = Protocol(scenarios=tuple(rounds), batch=(1, 8))
    measured = {
        name: [each if isinstance(each, Round) else make_round(protocol.batch_of(name), each) for each in blocks]
        for name, blocks in rounds.items()
    }
    entry = Measurements("openvino-cpu-int8", "openvino-cpu", "int8", "CPU", 1.5, 20.0, measured, **fields)
    return BenchRun(protocol, (entry,), load_average, cpus)


def row_of(rounds, percents=(50.0, 90.0, 99.0), **fields):
    """The row as a report has it."""
    return encode(summary.rows(make_run(rounds, **fields), percents)[0])


def test_row_has_latency_of_single_and_throughput_of_offline():
    row = row_of({"single": SINGLE, "offline": OFFLINE})
    expected = {
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
        "warm_load_seconds": None,
        "first_inference_ms": 20.0,
        "peak_memory_bytes": None,
        "stages_ms": None,
        "energy": {"source": "", "joules_per_image": None},
    }
    assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize(("scenario", "batch"), [("single", 1), ("offline", 8)])
def test_one_scenario_gives_both_numbers(scenario, batch):
    row = row_of({scenario: OFFLINE})
    assert row["batch"] == {"single": batch, "offline": batch}
    assert row["latency_ms"]["p50"] == 50.0
    assert row["throughput"] == pytest.approx(batch * 20 / 2.0)


def test_all_values_are_plain():
    bench_run = make_run({"single": SINGLE, "offline": OFFLINE, "server:5": SINGLE, "sustain:3": SINGLE})
    values = map(encode, (summary.rows(bench_run), summary.block_medians(bench_run), summary.samples(bench_run)))
    for value in values:
        assert json.loads(json.dumps(value, allow_nan=False)) == value
    row = encode(summary.rows(bench_run)[0])
    assert type(row["samples"]) is int
    assert {type(row[key]) for key in ("throughput", "load_seconds", "first_inference_ms")} == {float}
    assert {type(value) for value in row["latency_ms"].values()} == {float}


def test_a_scenario_says_what_may_be_claimed():
    found = row_of({"single": SINGLE}, percents=(50.0, 99.9))["scenarios"]["single"]
    assert (found["batch"], found["queries"]) == (1, 100)
    assert [(each["name"], each["value"], each["at_least"]) for each in found["percentiles"]] == [
        ("p50", 50.0, False),
        ("p99.9", 99.0, True),
    ]


def test_blocks_are_told_with_their_times_and_processes():
    blocks = [make_round(1, [10.0, 20.0], begun_seconds=1.23456), make_round(1, [30.0], process=1, begun_seconds=9.0)]
    found = row_of({"single": blocks, "server:50": [*blocks, make_round(1, [], begun_seconds=12.0)]})["scenarios"]
    expected = {"begun_seconds": [1.235, 9.0], "process": [0, 1], "median_ms": [15.0, 30.0], "quiet": [True, True]}
    assert found["single"]["blocks"] == expected
    assert found["server:50"]["blocks"]["median_ms"] == [15.0, 30.0, None]


def test_queries_that_a_server_did_not_answer_count_with_what_they_had_waited():
    first = make_round(1, [10.0, 20.0], busy_seconds=0.03, waiting_ms=(5.0,))
    blocks = [first, make_round(1, [30.0], busy_seconds=0.03)]
    found = row_of({"server:50": blocks})["scenarios"]["server:50"]
    assert (found["queries"], found["offered"], found["unanswered"]) == (3, 50.0, 0)
    assert found["busy"] == pytest.approx(1.0)
    blocks[-1] = dataclasses.replace(blocks[-1], waiting_ms=(70.0, 90.0))
    row = row_of({"server:50": blocks})
    assert (row["scenarios"]["server:50"]["unanswered"], row["latency_ms"]["p99"]) == (2, 90.0)
    assert "overloaded" in row["flags"]


def test_a_sustained_run_compares_its_first_minute_with_its_last():
    bins = [make_round(1, np.full(round(1000 / ms), ms)) for ms in [10.0] * 60 + [11.0] * 60 + [12.5] * 60]
    row = row_of({"sustain:3m": bins})
    found = row["scenarios"]["sustain:3m"]
    assert (found["first"], found["last"]) == (pytest.approx(100, rel=0.01), pytest.approx(80, rel=0.01))
    assert found["last_over_first"] == pytest.approx(0.8, rel=0.01)
    assert len(found["bins"]) == 180
    assert "throttled" in row["flags"]
    assert "throttled" not in row_of({"sustain:3m": bins[:60]})["flags"]


def test_stages_are_medians():
    row = row_of({"single": LONG}, stages_ms={"decode": [1.0, 2.0, 9.0], "end_to_end": [5.0, 6.0, 7.0]})
    assert row["stages_ms"] == {
        "decode": 2.0,
        "end_to_end": 6.0,
        "end_to_end_p90": 7.0,
        "copies": "not timed separately by this back end",
        "images": 3,
    }


def test_copies_are_apart_where_the_back_end_tells_them():
    stages = {"copy_in": [0.1], "execute": [2.0], "copy_out": [0.2], "end_to_end": [9.0]}
    row = row_of({"single": LONG}, stages_ms=stages)
    assert (row["stages_ms"]["copies"], row["stages_ms"]["copy_in"]) == ("apart", 0.1)


def test_energy_is_an_images_where_every_block_says_it():
    def row(*joules):
        blocks = [make_round(1, np.full(10, 1.0), machine=dataclasses.replace(CALM, joules=each)) for each in joules]
        return row_of({"single": blocks}, energy="RAPL")["energy"]

    assert row(2.0, 4.0) == {"source": "RAPL", "joules_per_image": pytest.approx(0.3)}
    assert row(2.0, None) == {"source": "RAPL", "joules_per_image": None}


def test_latencies_and_throughput_have_their_intervals():
    """Of 20 blocks in five processes, each with queries around a level of its own."""
    generator = np.random.default_rng(0)
    levels = 10 * generator.lognormal(0, 0.05, 20)
    blocks = [make_round(1, level * generator.lognormal(0, 0.1, 100), process=i // 4) for i, level in enumerate(levels)]
    row = row_of({"single": blocks})
    for name, (low, high) in row["latency_ms_ci95"].items():
        assert low < row["latency_ms"][name] < high
    assert row["latency_ms_ci95"]["p50"] == pytest.approx([9.5, 10.3], rel=0.05)
    low, high = row["throughput_ci95"]
    assert low < row["throughput"] < high < 1.1 * low
    [found] = [each for each in row["scenarios"]["single"]["percentiles"] if each["name"] == "p99"]
    assert found["ci95"] == row["latency_ms_ci95"]["p99"]
    few = row_of({"single": blocks[:2]})
    assert few["latency_ms_ci95"]["p99"][1] is None  # so few queries do not bound it
    assert row_of({"single": blocks[:1]})["throughput_ci95"] == [None, None]


def test_the_interval_of_a_percentile_covers_it():
    """Blocks and processes that differ, in 300 benches; what is asked is the percentile of all there will ever be."""
    generator = np.random.default_rng(1)
    hits = {50: 0, 90: 0}
    for _ in range(300):
        process, level = generator.normal(0, 0.008, 3), generator.normal(0, 0.03, 12)
        logs = (level + np.repeat(process, 4))[:, None] + generator.normal(0, 0.05, (12, 40))
        blocks = [make_round(1, np.exp(each), process=number // 4) for number, each in enumerate(logs)]
        for percent, normal in ((50, 0.0), (90, 1.2816)):
            low, high = percentile_interval(blocks, percent)
            truth = math.exp(normal * math.hypot(0.05, 0.03, 0.008))
            hits[percent] += (low or 0.0) <= truth <= (high or math.inf)
    assert min(hits.values()) >= 0.93 * 300


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "flags"),
    [
        (LONG, []),
        ([np.full(400, 10.0), np.full(400, 12.0)], ["unstable"]),
        ([np.full(331, 10.0), np.full(331, 10.0)], []),
        ([np.full(331, 10.0), np.full(330, 10.0)], ["short"]),
        ([np.full(700, 10.0)], []),
    ],
)
def test_flags_of_the_measurements(rounds, flags):
    assert row_of({"single": rounds})["flags"] == flags


def test_short_means_short_for_the_percentiles_that_were_asked():
    rounds = {"single": [np.full(100, 10.0)]}
    assert row_of(rounds, percents=(50.0, 90.0))["flags"] == []
    assert row_of(rounds, percents=(50.0, 95.0))["flags"] == ["short"]


def test_a_latency_that_is_not_known_to_a_tenth_is_unstable():
    """Blocks that vary much are none where they are many: their median is known."""
    blocks = [make_round(1, np.full(400, ms), process=index) for index, ms in enumerate((10.0, 10.0, 12.5))]
    assert row_of({"single": blocks})["flags"] == ["unstable"]
    calm = [make_round(1, np.full(400, ms), process=index) for index, ms in enumerate((10.0, 10.0, 10.7))]
    assert row_of({"single": calm})["flags"] == []
    noisy = np.random.default_rng(0).lognormal(0, 0.12, 60)
    many = [make_round(1, np.full(400, 10 * each), process=index // 10) for index, each in enumerate(noisy)]
    assert row_of({"single": many})["flags"] == []
    assert row_of({"single": many[:3]})["flags"] == ["unstable"]


@pytest.mark.parametrize(("load_average", "contended"), [(None, False), (2.5, False), (2.51, True)])
def test_a_machine_that_does_not_say_who_computes_is_judged_by_its_load(load_average, contended):
    row = row_of({"single": LONG}, load_average=load_average, cpus=2)
    assert ("contended" in row["flags"]) is contended


def planted(**fields):
    """Eight rounds of 4 s on two CPUs; `fields` has lists of eight values of the machine."""
    busy = dataclasses.replace(CALM, own_seconds=7.0)
    machines = [dataclasses.replace(busy, **{k: v[i] for k, v in fields.items()}) for i in range(8)]
    return {"single": [make_round(1, np.full(400, 10.0), machine=machine) for machine in machines]}


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"other_seconds": [0.3] * 8}, []),
        ({"other_seconds": [0.3] * 4 + [0.6] * 4}, []),  # half of them are left
        ({"other_seconds": [0.3] * 3 + [0.6] * 5}, ["contended"]),
        ({"waited_seconds": [0.3] * 8}, []),
        ({"waited_seconds": [0.3] * 8, "other_seconds": [0.3] * 8}, ["contended"]),
        ({"other_seconds": [0.3] * 8, "stolen_seconds": [0.2] * 8}, ["contended"]),
        ({"mhz": [3000.0] * 2 + [2900.0] * 6}, []),
        ({"mhz": [3000.0] * 2 + [2800.0] * 6}, ["throttled"]),
        ({"throttles": [7] * 8}, []),
        ({"throttles": [7] * 5 + [8] * 3}, ["throttled"]),
        ({"suspended_seconds": [0.0] * 7 + [3.0]}, []),  # that block does not count
        ({"suspended_seconds": [3.0] * 8}, ["contended", "suspended"]),
    ],
)
def test_flags_of_what_the_machine_did(fields, flags):
    assert row_of(planted(**fields), load_average=99.0, affinity=(0, 1))["flags"] == flags


def test_another_provider_than_the_engine_was_made_for_is_a_fallback():
    assert row_of({"single": LONG}, made_for="GPU")["flags"] == ["fallback"]
    assert row_of({"single": LONG}, made_for="CPU")["flags"] == []


# --- series -----------------------------------------------------------------------------------------------------------


def test_block_medians_are_in_the_order_of_time():
    bench_run = make_run({"single": SINGLE, "offline": OFFLINE})
    assert summary.block_medians(bench_run) == {"openvino-cpu-int8": (30.5, 80.5)}


def test_samples_are_all_values_or_evenly_picked_ones():
    bench_run = make_run({"single": SINGLE, "offline": OFFLINE})
    assert summary.samples(bench_run)["openvino-cpu-int8"] == tuple(np.arange(1.0, 101.0).tolist())
    picked = summary.samples(bench_run, limit=12)["openvino-cpu-int8"]
    assert picked == (1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100)

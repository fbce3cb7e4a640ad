"""Devices of one kind: how far they are apart, and which of them are not counted."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.devices.documents import _bench_run, _engine, _result
from vitdeploy.api.bench import Benchmark
from vitdeploy.api.values import printed
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun
from vitdeploy.devices.api import spread_of
from vitdeploy.devices.on_devices import DeviceOutcome
from vitdeploy.devices.registry import Device
from vitdeploy.devices.spread import kinds_of
from vitdeploy.document.bench import DeviceBench
from vitdeploy.pipeline.measure import summarise
from vitdeploy.spec import EngineSpec, decode

PROTOCOL = Protocol(("single",), (1,), 0.06, 0.02, 10, 0.0, processes=1, max_extension=1)


def bench(milliseconds=1.0, host=None, throttled=0, kernels=None):
    """What a device measured of one artifact; in the first blocks it was throttled."""
    run = copy.deepcopy(_bench_run("small", PROTOCOL))
    run["context"] = None
    for number, block in enumerate(run["entries"][0]["rounds"]["single"]):
        block |= {"latencies_ms": [milliseconds] * 3, "seconds": milliseconds * 0.0031}
        block["machine"] = {**block["machine"], "throttled": ["under-voltage"] if number < throttled else []}
    found = summarise(decode(BenchRun, run), [], (50.0,))
    engine = decode(EngineSpec, {**_engine(), "kernels": kernels or {"int8": 9}})
    host = {**_result()["host"], **(host or {})}
    return DeviceBench(**vars(found), host=host, engines={"small": engine}, left_out=(), remarks=())


def kind_of(*benches):
    [kind] = kinds_of({f"pi-{number}": each for number, each in enumerate(benches)})
    return kind


def test_the_spread_is_that_of_the_devices_that_count():
    kind = kind_of(bench(1.0), bench(1.02), bench(1.04), bench(1.5))
    [apart] = kind.artifacts
    assert kind.devices == ("pi-0", "pi-1", "pi-2")
    assert [(each.device, each.reason) for each in kind.quarantined] == [
        ("pi-3", "small takes 1.5 ms, 1.46 times the median of its kind")
    ]
    assert (apart.median_ms, apart.least_ms, apart.most_ms, apart.devices) == (1.02, 1.0, 1.04, 3)
    assert (apart.fastest, apart.slowest, apart.spread) == ("pi-0", "pi-2", pytest.approx(0.04))


def test_one_that_throttles_is_not_counted_and_one_block_of_many_is_none():
    kind = kind_of(bench(1.0), bench(1.01, throttled=1), bench(1.3, throttled=5), bench(1.02))
    assert kind.devices == ("pi-0", "pi-1", "pi-3")
    [quarantined] = kind.quarantined
    assert quarantined.device == "pi-2" and "small, single: throttled: 5 of 10 blocks" in quarantined.reason


def test_one_whose_engine_runs_other_kernels_is_not_counted():
    kind = kind_of(bench(), bench(kernels={"fp32": 9}), bench())
    [quarantined] = kind.quarantined
    assert quarantined.reason == "small runs 9 fp32, but 9 int8 on the other devices" and kind.devices == (
        "pi-0",
        "pi-2",
    )
    assert not kind_of(bench(), bench(kernels={"fp32": 9})).quarantined  # of two nobody can say which is odd


def test_of_two_devices_neither_is_odd_and_other_kinds_are_apart():
    kind = kind_of(bench(1.0), bench(3.0))
    assert not kind.quarantined and kind.artifacts[0].spread == pytest.approx(2.0)
    assert kinds_of({"pi": bench(), "orin": bench(host={"cpu": "another"})}) == []
    assert len(kinds_of({"a": bench(), "b": bench(host={"python": "3.13.1", "system": "Linux 6.12"})})) == 1


@given(st.lists(st.floats(0.95, 1.04), min_size=3, max_size=6), st.floats(2.0, 9.0))
def test_whatever_the_others_are_one_far_away_is_found_and_they_are_not(near, far):
    from vitdeploy.devices.spread import _far

    times = {f"pi-{number}": each for number, each in enumerate(near)}
    assert _far("small", times) == {}
    assert list(_far("small", {**times, "odd": far})) == ["odd"]


def test_it_is_printed_and_in_the_document():
    benches = [bench(1.0), bench(1.02), bench(1.04), bench(1.5)]
    outcomes = [DeviceOutcome(Device(f"pi-{n}"), Benchmark(each, f"pi-{n}")) for n, each in enumerate(benches)]
    document, lines = spread_of([*outcomes, DeviceOutcome(Device("off"))])
    assert [each["device"] for each in document["kinds"][0]["quarantined"]] == ["pi-3"]
    text = "\n".join(printed(lines, None))
    assert "3 of 4 devices of the kind a CPU:" in text and "4.0 %" in text
    assert "quarantined: pi-3: small takes 1.5 ms" in text
    assert spread_of(outcomes[:1]) == ({"kinds": []}, [])

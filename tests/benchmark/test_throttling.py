"""Whether a machine throttles, from files and answers as boards give them, and what becomes of such blocks."""

import dataclasses

import pytest

from tests.benchmark.test_probes import plant
from tests.benchmark.test_quiet import bench_run, block, entry
from vitdeploy.benchmark.evidence import quiet, undisturbed
from vitdeploy.benchmark.machine import Reading, Throttle, clock_limit_mhz, firmware_bits, slowed_between
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BlockMachine, Round, mostly_slowed
from vitdeploy.benchmark.summary import judged, rows

# Paths of Raspberry Pi OS: on a Raspberry Pi 4, and on a 5.
PI_4 = "sys/devices/platform/soc/soc:firmware/get_throttled"
PI_5 = "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled"


def cooler(number, kind, state):
    folder = f"sys/class/thermal/cooling_device{number}"
    return {f"{folder}/type": f"{kind}\n", f"{folder}/cur_state": f"{state}\n"}


def program(tmp_path, lines):
    path = tmp_path / "vcgencmd"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("throttled=0x50005\n", 0x50005),  # Raspberry Pi documentation, "vcgencmd"
        ("throttled=0x0\n", 0),
        ("50005\n", 0x50005),  # the kernel's file
        ("VCHI initialization failed\n", None),  # without the group `video`
        ("", None),
        (None, None),
    ],
)
def test_what_the_firmware_of_a_raspberry_pi_says(text, bits):
    assert firmware_bits(text) == (bits is not None, bits)


@pytest.mark.parametrize("path", [PI_4, PI_5])
def test_the_firmwares_file_is_read_where_the_kernel_has_it(tmp_path, path):
    plant(tmp_path, {path: "50005\n"})
    throttle = Throttle(tmp_path, program(tmp_path, "echo never asked; exit 1"))
    assert (throttle.read(), throttle.sources) == (Reading(0x50005), ["get_throttled"])


def test_vcgencmd_is_asked_where_there_is_no_file(tmp_path):
    throttle = Throttle(tmp_path, program(tmp_path, '[ "$1" = get_throttled ] && echo "throttled=0x20002"'))
    assert throttle.read().bits == 0x20002
    denied = Throttle(tmp_path, program(tmp_path, "echo VCHI initialization failed; exit 255"))
    assert (denied.sources, denied.read()) == ([], Reading())


def test_a_jetson_shows_its_alerts_and_its_counts_and_no_fan(tmp_path):
    hwmon = "sys/class/hwmon/hwmon3"  # soctherm_oc
    plant(tmp_path, cooler(0, "pwm-fan", 2) | cooler(1, "cpu-throttle-alert", 0) | cooler(2, "hot-surface-alert", 1))
    plant(tmp_path, {f"{hwmon}/oc{number}_event_cnt": f"{count}\n" for number, count in ((1, 0), (2, 15), (3, 37))})
    throttle = Throttle(tmp_path, "")
    before = throttle.read()
    assert before == Reading(None, {"cpu-throttle-alert": 0}, {"over-current or under-voltage": 52})
    assert slowed_between(before, before) == ()
    plant(tmp_path, {f"{hwmon}/oc3_event_cnt": "38\n"} | cooler(1, "cpu-throttle-alert", 1))
    expected = ("cpu-throttle-alert was active", "the count of over-current or under-voltage rose")
    assert slowed_between(before, throttle.read()) == expected


def test_several_cooling_devices_of_one_type_show_the_highest_state(tmp_path):
    plant(tmp_path, cooler(0, "Processor", 3) | cooler(1, "Processor", 0))
    assert Throttle(tmp_path, "").read().cooling == {"Processor": 3}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (0x0, 0x0, ()),
        (0x50000, 0x50000, ()),  # long ago
        (0x50000, 0x50004, ("the firmware throttled the CPU",)),
        (0x2, 0x0, ("the firmware capped the CPU's clock",)),
        (0x50000, 0xD0000, ("the soft temperature limit was reached",)),  # in between, and not any more
        (None, 0x1, ("under-voltage",)),
    ],
)
def test_bits_of_now_and_those_that_came_in_between_count(before, after, found):
    assert slowed_between(Reading(before), Reading(after)) == found


def test_a_machine_without_any_of_it_says_nothing(tmp_path):
    throttle = Throttle(tmp_path, "")
    assert (throttle.sources, throttle.read(), slowed_between(throttle.read(), throttle.read())) == ([], Reading(), ())
    assert clock_limit_mhz([0, 1], tmp_path) is None
    names = {cpu: f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_max_freq" for cpu in range(3)}
    plant(tmp_path, {names[0]: "1800000\n", names[1]: "1500000\n", names[2]: "3000000\n"})
    assert clock_limit_mhz([0, 1], tmp_path) == 1800


# --- blocks -----------------------------------------------------------------------------------------------------------


def hot(**fields):
    calm = {"own_seconds": 0.95, "other_seconds": 0.0, "stolen_seconds": 0.0, "joules": None, "mhz": None}
    rest = {"celsius": None, "throttles": None, "suspended_seconds": 0.0, "waited_seconds": 0.0}
    return BlockMachine(**{**calm, **rest, **fields})


def measured(machines, ms=10.0):
    each = block(ms)
    return [
        Round(1, each.latencies_ms, each.seconds, number * 3 // len(machines), machine=machine)
        for number, machine in enumerate(machines)
    ]


def test_three_of_twenty_throttled_blocks_are_left_out_and_told():
    machines = [hot(throttled=("under-voltage",)) if number in (4, 5, 11) else hot() for number in range(20)]
    blocks = [
        dataclasses.replace(each, latencies_ms=2 * each.latencies_ms) if each.machine.throttled else each
        for each in measured(machines)
    ]
    found = bench_run(entry("a", blocks), entry("b", [block(20.0, process=n * 3 // 20) for n in range(20)]))
    row, other = rows(found)
    assert row.latency_ms.p90 == 10 and "throttled" not in row.flags
    told = row.scenarios["single"].throttled
    assert str(told) == "throttled: 3 of 20 blocks, left out (under-voltage)"
    assert other.scenarios["single"].throttled is None
    assert judged(found, "a", "b", "single").decided


def test_a_board_that_throttles_most_of_the_time_decides_nothing_and_says_why():
    hot_ones = measured(
        [hot(throttled=("the firmware capped the CPU's clock",)) if n % 8 else hot() for n in range(16)]
    )
    found = bench_run(entry("a", hot_ones), entry("b", [block(20.0, process=n * 3 // 16) for n in range(16)]))
    reason = judged(found, "a", "b", "single").reason
    assert reason.startswith("only 2 of 16 single rounds count, throttled: 14 of 16 blocks")
    assert "the firmware capped the CPU's clock" in reason and "let it cool down" in reason
    row = rows(found)[0]
    assert row.flags == ("throttled", "short")  # and not contended: nobody else was there
    assert row.scenarios["single"].throttled.left_out is False
    assert mostly_slowed(found.entries, "single") and not mostly_slowed(found.entries[1:], "single")


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ([{"limit_mhz": 1800.0}] * 6 + [{"limit_mhz": 1500.0}] * 2, 6),
        ([{"mhz": 3700.0}] * 4 + [{"mhz": 3300.0}] * 4, 8),  # steps of a turbo clock
        ([{"mhz": 1800.0}] * 6 + [{"mhz": 1000.0}] * 2, 6),
        ([{"mhz": 1000.0}] * 2 + [{"mhz": 1800.0}] * 6, 6),
        ([{}] * 8, 8),
    ],
)
def test_a_block_whose_clock_fell_does_not_count(fields, counts):
    blocks = measured([hot(**each) for each in fields])
    assert (sum(quiet(blocks, 2)), sum(undisturbed(blocks, 2))) == (counts, 8)


def test_a_long_run_keeps_its_blocks_and_is_flagged():
    machines = [hot(mhz=600.0 if n % 2 else 1800.0, throttled=("under-voltage",) if n == 7 else ()) for n in range(12)]
    served = dataclasses.replace(entry("a", []), rounds={"server:50": measured(machines)})
    found = bench_run(served, protocol=Protocol(("server:50",)))
    row = rows(found)[0]
    assert "throttled" in row.flags
    # An idle server's clock falls by its governor: that is no evidence.
    assert str(row.scenarios["server:50"].throttled) == "throttled: 1 of 12 blocks (under-voltage)"

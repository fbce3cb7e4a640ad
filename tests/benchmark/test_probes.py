"""What is read of a machine, from files as the kernel writes them."""

import os

import pytest

from vitdeploy.benchmark import machine as probes
from vitdeploy.benchmark.machine import EnergyMeter

STAT = """cpu  100 0 0 900 0 0 0 0 0 0
cpu0 60 1 20 800 30 2 3 40 5 0
cpu1 40 0 10 900 0 0 0 7 0 0
cpu2 1000 0 0 0 0 0 0 0 0 0
intr 12345
"""


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_times_are_those_of_the_cpus_that_may_be_used(tmp_path):
    plant(tmp_path, {"proc/stat": STAT})
    tick = os.sysconf("SC_CLK_TCK")
    assert probes.cpu_times([0, 1], tmp_path) == probes.CpuTimes((86 + 50) / tick, 47 / tick)
    assert probes.cpu_times([0, 7], tmp_path) is None
    assert probes.cpu_times([0], tmp_path / "nowhere") is None
    zeros = "".join(f"cpu{number} 0 0 0 0 0 0 0 0 0 0\n" for number in range(2))
    plant(tmp_path, {"proc/stat": zeros})  # of a sandbox; a CPU is busy or idle
    assert probes.cpu_times([0, 1], tmp_path) is None


def test_waiting_is_that_of_the_thread_which_waited_longest(tmp_path):
    assert probes.run_delays(tmp_path) == {} and probes.longest_wait({}, {}) is None
    pressure = {
        "proc/self/cgroup": "1:cpu:/old\n0::/jobs/one\n",
        "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=7000000\nfull avg10=0.00 total=0\n",
    }
    plant(tmp_path, pressure)
    assert probes.run_delays(tmp_path) == {"group": 7.0}
    plant(tmp_path, {"sys/fs/cgroup/jobs/one/cpu.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n"})
    assert probes.run_delays(tmp_path) == {"group": 0.25}
    plant(tmp_path, {"proc/self/task/1/schedstat": "0 0 0\n"})  # of a kernel that does not count
    assert probes.run_delays(tmp_path) == {"group": 0.25}
    plant(tmp_path, {f"proc/self/task/{thread}/schedstat": f"9 {1000000000 * thread} 3\n" for thread in (1, 2)})
    before = probes.run_delays(tmp_path)
    assert before == {"1": 1.0, "2": 2.0}
    assert probes.longest_wait(before, {"1": 1.5, "2": 2.1, "3": 0.2}) == 0.5


def test_every_process_is_seen_with_its_time(tmp_path):
    tick = os.sysconf("SC_CLK_TCK")
    plant(tmp_path, {"proc/7/stat": "7 (a (b) c) R 1 7 7 0 -1 4 0 0 0 0 30 20 0 0 20 0\n", "proc/8/stat": ""})
    assert probes.process_seconds(tmp_path) == {7: ("a (b) c", 50 / tick)}


def test_the_clock_is_the_fastest_of_the_cpus_that_may_be_used(tmp_path):
    assert probes.clock_mhz([0], tmp_path) is None
    plant(tmp_path, {"proc/cpuinfo": "processor: 0\ncpu MHz\t\t: 2499.998\nprocessor: 1\ncpu MHz\t\t: 1200.5\n"})
    assert probes.clock_mhz([0, 1], tmp_path) == 2499.998
    names = {cpu: f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in range(3)}
    plant(tmp_path, {names[0]: "1800000\n", names[1]: "800000\n", names[2]: "3000000\n"})
    assert probes.clock_mhz([0, 1], tmp_path) == 1800


def test_temperature_is_that_of_the_hottest_sensor_that_makes_sense(tmp_path):
    assert probes.temperature(tmp_path) is None
    plant(
        tmp_path,
        {
            "sys/class/thermal/thermal_zone0/temp": "45123\n",
            "sys/class/thermal/thermal_zone1/temp": "-273000\n",
            "sys/class/hwmon/hwmon0/temp1_input": "61000\n",
            "sys/class/hwmon/hwmon0/temp2_input": "not a number\n",
        },
    )
    assert probes.temperature(tmp_path) == 61


def test_throttle_counts_are_added(tmp_path):
    assert probes.throttle_count(tmp_path) is None
    folder = "sys/devices/system/cpu/cpu0/thermal_throttle"
    plant(tmp_path, {f"{folder}/core_throttle_count": "3\n", f"{folder}/package_throttle_count": "4\n"})
    assert probes.throttle_count(tmp_path) == 7


def test_memory_and_threads_are_those_of_the_process(tmp_path):
    plant(tmp_path, {"proc/self/status": "Name:\tpython\nVmHWM:\t  204800 kB\nThreads:\t5\n"})
    assert (probes.peak_memory(tmp_path), probes.thread_count(tmp_path)) == (204800 * 1024, 5)
    assert (probes.peak_memory(tmp_path / "nowhere"), probes.thread_count(tmp_path / "nowhere")) == (None, None)


def test_this_machine_did_not_sleep_meanwhile():
    before = probes.suspended_seconds()
    assert probes.suspended_seconds() - before == pytest.approx(0, abs=0.01)


def test_energy_of_packages_is_added_and_wraps(tmp_path):
    folders = [f"sys/class/powercap/intel-rapl:{index}" for index in (0, 1)]
    plant(tmp_path, {f"{folder}/max_energy_range_uj": "10000000\n" for folder in folders})
    # A part of a package, which its counter includes.
    plant(tmp_path, {f"{folders[0]}:0/energy_uj": "77\n"})
    plant(tmp_path, {f"{folders[0]}/energy_uj": "1000000\n", f"{folders[1]}/energy_uj": "9000000\n"})
    meter = EnergyMeter(tmp_path)
    before = meter.read()
    plant(tmp_path, {f"{folders[0]}/energy_uj": "3500000\n", f"{folders[1]}/energy_uj": "500000\n"})
    assert meter.source == "RAPL"
    assert meter.joules(before, meter.read(), 0.5) == pytest.approx(2.5 + 1.5)


def test_power_sensors_are_taken_times_the_seconds(tmp_path):
    folder = "sys/class/hwmon/hwmon3"
    plant(tmp_path, {f"{folder}/in1_input": "5000\n", f"{folder}/curr1_input": "2000\n"})
    plant(tmp_path, {f"{folder}/power2_input": "4000000\n", f"{folder}/curr3_input": "100\n"})
    meter = EnergyMeter(tmp_path)
    assert meter.source == "power sensor"
    assert meter.joules([], meter.read(), 0.5) == pytest.approx(5.0)  # the 10 W of the rail that feeds the others


def test_energy_that_cannot_be_read_is_never_0(tmp_path):
    meter = EnergyMeter(tmp_path)
    assert (meter.source, meter.joules(meter.read(), meter.read(), 1.0)) == ("not there", None)
    # A folder in the place of the file: it is there and cannot be read, also by root.
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").mkdir(parents=True)
    meter = EnergyMeter(tmp_path)
    assert (meter.source, meter.joules(meter.read(), meter.read(), 1.0)) == ("not permitted", None)

"""What the doctor says of a device, from what it said of itself."""

import dataclasses
import time

import pytest

from tests.runtime.boards import plant, write
from vitdeploy.benchmark.machine import Reading
from vitdeploy.compilation.backend import TargetState
from vitdeploy.devices.advice import Seen, advice_lines, advise, described, diagnose, fastest_mode
from vitdeploy.devices.agent.probe import (
    BoardState,
    DeviceProbe,
    debian_versions,
    power_mode,
    power_modes,
    read_board,
    tegra_release,
)
from vitdeploy.devices.registry import Device
from vitdeploy.runtime.host import describe_host

WITHOUT = TargetState(False, None, (), "no module tensorrt", "pip install tensorrt")
NO_RUNTIME = TargetState(False, None, (), "not installed", "pip install onnxruntime")
DEVICE = Device("orin", "10.0.0.7")

# As `nvpmodel -q` prints it: on JetPack 6 (Orin), and on JetPack 4 and 5, which name the fan first or warn of it.
ORIN_MODE = "NV Power Mode: 25W\n1\n"
XAVIER_MODE = "NVPM WARN: fan mode is not set!\nNV Fan Mode:quiet\nNV Power Mode: MODE_15W_6CORE\n2\n"
# Of /etc/nvpmodel.conf of an Orin Nano with the Super modes, and of an AGX Orin: MAXN is another number on each.
ORIN_NANO_MODES = """\
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
< POWER_MODEL ID=3 NAME=7W >
< PM_CONFIG DEFAULT=1 >
"""
AGX_MODES = "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=MODE_15W >\n< POWER_MODEL ID=3 NAME=MODE_50W >\n"
# /etc/nv_tegra_release (NVIDIA Jetson Linux Developer Guide, "Quick Start").
R36 = (
    "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, "
    "DATE: Wed Jan  8 01:49:37 UTC 2025\n"
)
DPKG = "nvidia-jetpack 6.2.1+b38 installed\npython3-libnvinfer 10.3.0.30-1+cuda12.5 not-installed\n"
MEMINFO = "MemTotal: {0} kB\nMemFree: 100000 kB\nMemAvailable: {1} kB\nSwapTotal: {2} kB\nSwapFree: {3} kB\n"
MB = 1 << 20


def probe_of(root, name, *, glibc="2.35", targets=(("tensorrt", WITHOUT),), packages=("numpy", "pillow"), **board):
    host = describe_host(root, "aarch64", range(plant(root, name)))
    state = BoardState(**{"throttle": Reading(0), **board})
    versions = dict.fromkeys(packages, "2.0")
    return DeviceProbe(host, "/usr/bin/python3", glibc, versions, dict(targets), 10**9, 8 * 10**9, {}, "", (), state)


def said_of(root, name, **more):
    return diagnose(DEVICE, probe_of(root, name, **more))[1]


def advice_of(device=DEVICE, host=(), memory_bytes=8 * 10**9, **board):
    return advise(Seen(device, dict(host), BoardState(**board), memory_bytes))


@pytest.mark.parametrize(
    ("name", "head", "int8"),
    [
        (
            "jetson-orin-nano",
            "orin: NVIDIA Orin Nano Developer Kit, 6x Cortex-A78AE, asimd asimdhp asimddp, 6 cores, aarch64",
            "works    dot products: INT8 weights use 8 bits",
        ),
        (
            "raspberry-pi-4b",
            "orin: Raspberry Pi 4 Model B Rev 1.1, 4x Cortex-A72, asimd, 4 cores, aarch64",
            "missing  dot products: INT8 with 8 bits is correct but slower; run bench to compare it with float",
        ),
    ],
)
def test_a_device_is_its_board_with_its_cores_and_what_they_have_for_int8(tmp_path, name, head, int8):
    lines = said_of(tmp_path, name)
    assert lines[0].startswith(head)
    assert int8 in lines


# --- what is missing --------------------------------------------------------------------------------------------------


def fix_of(lines):
    [fix] = [line.strip() for line in lines if "fix:" in line]
    return fix.removeprefix("fix: ")


def test_a_jetson_gets_the_python_that_sees_its_tensorrt_and_no_other_board_does(tmp_path):
    for name in ("jetson-orin-nano", "jetson-nano", "jetson-xavier-nx", "jetson-agx-orin"):
        fix = fix_of(said_of(tmp_path / name, name))
        assert "python3 -m venv --system-site-packages ~/venv" in fix
        assert "pip install tensorrt" not in fix
    assert "pip install tensorrt" in fix_of(said_of(tmp_path / "pi", "raspberry-pi-5"))


def test_jetpack_6_is_named_and_its_tensorrt_comes_by_one_command(tmp_path):
    state = {"tegra_release": tegra_release(R36), "debian": debian_versions(DPKG), "venv": False}
    lines = said_of(tmp_path, "jetson-orin-nano", **state)
    assert "JetPack 6 (6.2.1+b38), Jetson Linux 36.4.3" in lines
    assert fix_of(lines) == (
        "ssh -t 10.0.0.7 'sudo apt-get install -y python3-libnvinfer python3-venv && python3.10 -m venv "
        "--system-site-packages ~/venv && ~/venv/bin/python -m pip install numpy pillow', then: "
        "vitdeploy devices add orin ssh://10.0.0.7 --python '~/venv/bin/python'"
    )
    installed = {**state, "debian": {"python3-libnvinfer": "10.3.0"}, "venv": True}
    assert "apt-get" not in fix_of(said_of(tmp_path, "jetson-orin-nano", **installed))
    gpu = {"targets": (("onnxruntime-cuda", WITHOUT),), **state}
    assert fix_of(said_of(tmp_path, "jetson-orin-nano", **gpu)).endswith(
        "onnxruntime-gpu --index-url https://pypi.jetson-ai-lab.io/jp6/cu126"
    )


@pytest.mark.parametrize(("release", "python"), [("35.4.1", "3.8"), ("32.7.4", "3.6")])
def test_a_jetpack_whose_python_is_too_old_is_refused_by_name(tmp_path, release, python):
    fix = fix_of(said_of(tmp_path, "jetson-xavier-nx", tegra_release=release))
    assert f"has TensorRT only for Python {python}, and vitdeploy needs 3.10" in fix


def test_an_unknown_release_is_told_as_it_stands():
    assert described(BoardState(tegra_release="99.1")) == "Jetson Linux 99.1"
    assert (described(BoardState()), tegra_release("# nothing\n")) == ("", "")


def test_where_the_system_does_not_let_pip_install_there_is_an_environment(tmp_path):
    runtime = {"targets": (("onnxruntime-cpu", NO_RUNTIME),), "managed": True}
    fix = fix_of(said_of(tmp_path, "raspberry-pi-5", **runtime))
    assert "'python3 -m venv ~/venv && ~/venv/bin/python -m pip install numpy pillow onnxruntime'" in fix
    assert "then: vitdeploy devices add orin ssh://10.0.0.7 --python '~/venv/bin/python'" in fix
    assert "sudo apt-get install -y python3-venv && " in fix_of(
        said_of(tmp_path, "raspberry-pi-5", venv=False, **runtime)
    )


def test_a_32_bit_python_on_a_64_bit_kernel_is_refused_and_no_pip_line_is_given(tmp_path):
    """Raspberry Pi OS (32-bit) on a Raspberry Pi 4: `uname -m` is aarch64, `dpkg --print-architecture` armhf."""
    system = "Raspbian GNU/Linux 12 (bookworm)"
    probe = probe_of(tmp_path, "raspberry-pi-4b", targets=(("onnxruntime-cpu", NO_RUNTIME),), bits=32, system=system)
    works, lines, (advice,) = diagnose(DEVICE, probe)
    assert not works and advice.blocks and lines[-1] == "orin cannot run anything yet"
    assert "Raspbian GNU/Linux 12 (bookworm) has a 32-bit Python" in advice.found
    assert "on a 64-bit kernel (aarch64)" in advice.found
    assert "piwheels" in advice.why and "64-bit" in advice.fix
    assert not any("pip install" in line for line in lines)


@pytest.mark.parametrize(
    ("machine", "glibc", "says"),
    [
        ("aarch64", "2.17", "no known version of onnxruntime runs with Python"),
        ("riscv64", "2.41", "and riscv64"),
        ("aarch64", "2.27", "the newest for Python 3.11.2, glibc 2.27 and aarch64 is 1.23.2"),
    ],
)
def test_a_wheel_that_is_missing_for_the_system_is_told(tmp_path, machine, glibc, says):
    probe = probe_of(tmp_path, "raspberry-pi-5", targets=(("onnxruntime-cpu", NO_RUNTIME),), glibc=glibc)
    probe = dataclasses.replace(probe, host={**probe.host, "machine": machine, "python": "3.11.2"})
    assert says in fix_of(diagnose(DEVICE, probe)[1])


# --- what is measured there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "mode"), [(ORIN_MODE, "25W"), (XAVIER_MODE, "MODE_15W_6CORE"), ("", "")])
def test_the_power_mode_is_read_below_lines_about_fans(text, mode):
    assert power_mode(text) == mode


def test_a_power_mode_below_the_fastest_is_told_with_the_number_that_it_has_on_this_board():
    [advice] = advice_of(power_mode=power_mode(ORIN_MODE), power_modes=power_modes(ORIN_NANO_MODES))
    assert advice.found == "25W; this board also has MAXN_SUPER"
    assert advice.fix.startswith("ssh -t 10.0.0.7 'sudo nvpmodel -m 2'")
    assert fastest_mode(power_modes(AGX_MODES)) == "MAXN" and power_modes(AGX_MODES)["MAXN"] == 0
    assert fastest_mode({"15W": 0, "7W": 1}) == "15W"
    assert advice_of(power_mode="MAXN", power_modes=power_modes(AGX_MODES)) == []


@pytest.mark.parametrize(
    ("state", "found", "fix"),
    [
        ({"governors": {"powersave": 4}}, "powersave on 4 CPUs", "echo performance | sudo tee"),
        ({"governors": {"ondemand": 4}}, "ondemand on 4 CPUs", "echo performance | sudo tee"),
        ({"governors": {"schedutil": 6}, "tegra_release": "36.4.3"}, "schedutil on 6 CPUs", "sudo jetson_clocks"),
        ({"throttle": Reading(0x50005)}, "under-voltage; the firmware throttled the CPU", "stronger power supply"),
        ({"throttle": Reading(0x8)}, "the soft temperature limit was reached", "add a fan or a heat sink"),
        ({"throttle": Reading(0x50000)}, "under-voltage; the firmware throttled the CPU", "stronger power supply"),
        ({"throttle": Reading(None, {"cpu-throttle-alert": 1})}, "cpu-throttle-alert is in state 1", "add a fan"),
        (
            {"throttle": Reading(None, {}, {"over-current or under-voltage": 52}), "tegra_release": "36.4.3"},
            "52 times over-current or under-voltage",
            "use a lower power mode",
        ),
        (
            {"margin": 3.0, "zone": "cpu-thermal"},
            "cpu-thermal is 3 degrees below the throttling temperature",
            "add a fan",
        ),
        ({"available_bytes": 300 * MB, "swap_bytes": 0, "swap_free_bytes": 0}, "315 MB available", "ps -eo rss"),
        (
            {"available_bytes": 2000 * MB, "swap_bytes": 1000 * MB, "swap_free_bytes": 500 * MB},
            "524 MB in use",
            "sudo swapoff -a && sudo swapon -a",
        ),
    ],
)
def test_each_thing_is_found_and_mended_by_its_command(state, found, fix):
    [advice] = advice_of(**state)
    assert found in advice.found and fix in advice.fix and advice.why
    assert len(advice_lines([advice])) == 3


def test_a_raspberry_pi_whose_firmware_cannot_be_asked_is_told_so():
    [advice] = advice_of(host={"board": "Raspberry Pi 5 Model B Rev 1.0"})
    assert advice.fix.startswith("ssh -t 10.0.0.7 'sudo usermod -aG video $USER'")
    assert advice_of(host={"board": "Radxa ROCK 5B"}) == []


def test_no_swap_matters_on_a_small_board_only():
    state = {"available_bytes": 2000 * MB, "swap_bytes": 0, "swap_free_bytes": 0}
    [advice] = advice_of(memory_bytes=4 * 10**9 - 1, **state)
    assert "sudo swapon /swapfile" in advice.fix
    assert advice_of(memory_bytes=8 * 10**9, **state) == []


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"governors": {"performance": 4}},
        {"governors": {"powersave": 8}, "driver": "intel_pstate"},  # the CPU's own choice
        {"throttle": Reading(0, {"cpu-throttle-alert": 0}, {"heat": 0})},
        {"margin": 40.0, "zone": "cpu-thermal"},
        {"available_bytes": 2000 * MB, "swap_bytes": 1000 * MB, "swap_free_bytes": 1000 * MB},
    ],
)
def test_a_machine_that_is_well_or_says_nothing_gets_no_advice(state):
    assert advice_of(**state) == []


def test_a_clock_of_1970_is_told_and_set_by_the_clock_of_here():
    [advice] = advice_of(clock=3600.0)
    assert advice.found.startswith("the date is 1970-01-01, ") and advice.found.endswith("days behind")
    assert advice.fix == 'ssh -t 10.0.0.7 "sudo date -s @$(date +%s)"'
    assert not advice.blocks
    [local] = advice_of(Device("local"), clock=time.time() + 400 * 86400)
    assert "400 days ahead" in local.found and local.fix == "sudo timedatectl set-ntp true"
    assert advice_of(clock=float("inf")) == []  # a device may say what it likes


def test_a_board_is_read_from_its_files(tmp_path):
    zone, cpu = "sys/class/thermal/thermal_zone0", "sys/devices/system/cpu/cpu{}/cpufreq"
    files = {
        "etc/nv_tegra_release": R36,
        "etc/nvpmodel.conf": ORIN_NANO_MODES,
        "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet\n",
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
        "proc/meminfo": MEMINFO.format(7802492, 5977804, 3901244, 3901244),
        f"{zone}/type": "cpu-thermal\n",
        f"{zone}/temp": "51500\n",
        f"{zone}/trip_point_0_type": "critical\n",
        f"{zone}/trip_point_0_temp": "104500\n",
        f"{zone}/trip_point_1_type": "passive\n",
        f"{zone}/trip_point_1_temp": "99000\n",
        "sys/class/thermal/thermal_zone1/temp": "33000\n",  # of a notebook's Wi-Fi, which has none
        "sys/class/thermal/thermal_zone1/trip_point_0_type": "passive\n",
        "sys/class/thermal/thermal_zone1/trip_point_0_temp": "-274000\n",
    }
    for number in range(2):
        folder = cpu.format(number)
        files |= {f"{folder}/scaling_governor": "schedutil\n", f"{folder}/scaling_driver": "tegra194\n"}
    write(tmp_path, files)
    state = read_board(tmp_path, range(4))
    assert (state.tegra_release, state.power_mode, state.system) == ("36.4.3", "MAXN_SUPER", "Ubuntu 22.04.5 LTS")
    assert (state.governors, state.driver) == ({"schedutil": 2}, "tegra194")
    assert (state.margin, state.zone) == (47.5, "cpu-thermal")
    assert (state.available_bytes, state.swap_bytes) == (5977804 * 1024, 3901244 * 1024)
    nothing = read_board(tmp_path / "nowhere", [0])
    assert (nothing.governors, nothing.margin, nothing.available_bytes, nothing.power_mode) == ({}, None, None, "")

"""Diagnose devices, and suggest fixes."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.machine import FIRMWARE, OCCURRED
from vitdeploy.devices.agent.probe import BoardState, DeviceProbe, read_board, read_memory
from vitdeploy.devices.call import shell, typed
from vitdeploy.devices.registry import Device, this_machine
from vitdeploy.runtime.host import name_host
from vitdeploy.runtime.values import int8_instructions

# --- Checks of a machine's state, with a fix for each problem ---------------------------------------------------------
# One function per check: it returns an `Advice`, or None if all is well.


DAY = 24 * 3600.0
# Governors that raise the clock with a delay when the load rises.
FOLLOW = ("ondemand", "conservative", "schedutil", "interactive")
# Drivers whose "powersave" also follows the load, because the CPU decides.
AUTONOMOUS = ("intel_pstate", "amd-pstate-epp")
NEAR_LIMIT = 5.0  # degrees Celsius
LEAST_AVAILABLE = 512 << 20
SMALL_MEMORY = 4e9
SWAPPED = 64 << 20


@dataclass(frozen=True)
class Advice:
    """A problem: what was `found`, `why` it matters, and the `fix`, a command if possible. `blocks`: nothing can run
    until it is fixed."""

    name: str
    found: str
    why: str
    fix: str
    blocks: bool = False


@dataclass(frozen=True)
class Seen:
    """A machine: the result of `describe_host`, the state of the board, and its memory in bytes."""

    device: Device
    host: Mapping[str, str]
    board: BoardState
    memory_bytes: int = 0

    def on(self, line: str) -> str:
        return typed(self.device, line)

    @property
    def jetson(self) -> bool:
        # The device trees of Jetsons name them "NVIDIA Orin Nano Developer Kit", "Jetson-AGX".
        words = set(self.host.get("board", "").replace("-", " ").split())
        return bool(self.board.tegra_release) or bool({"Jetson", "Orin"} & words)


def advise(seen: Seen) -> list[Advice]:
    """Return all problems of a machine, blocking ones first."""
    found = [advice for row in ROWS if (advice := row(seen)) is not None]
    return sorted(found, key=lambda advice: not advice.blocks)


def advice_lines(found: Sequence[Advice]) -> list[str]:
    """Return the lines on each problem: finding, reason, fix."""
    return [
        line
        for advice in found
        for line in (
            f"{'blocked' if advice.blocks else 'check':<7}  {advice.name}: {advice.found}",
            f"         why: {advice.why}",
            f"         fix: {advice.fix}",
        )
    ]


def of_this_machine(host: Mapping[str, str]) -> tuple[list[Advice], list[str]]:
    """Return the problems of this machine's power, heat and memory, as `devices doctor` does, and their lines."""
    problems = advise(Seen(this_machine(), host, read_board(), read_memory().get("MemTotal", 0)))
    return problems, advice_lines(problems)


def _bits(seen: Seen) -> Advice | None:
    """Raspberry Pi OS (32-bit) boots a 64-bit kernel on a Raspberry Pi 4 and 5 by default, whose machine is "aarch64".

    Sources: Raspberry Pi documentation, "config.txt", arm_64bit; piwheels/packages#119 (no aarch64).
    """
    if seen.board.bits == 64:
        return None
    machine, on = seen.host.get("machine", ""), seen.board.system or "a system"
    kernel = f" on a 64-bit kernel ({machine})" if machine in ("aarch64", "x86_64") else f" ({machine})"
    return Advice(
        "32-bit Python",
        f"{on} has a 32-bit Python {seen.host.get('python', '')}{kernel}",
        "no runtime has wheels for 32 bits, neither on PyPI nor on piwheels, which only builds source packages",
        "install a 64-bit system, such as Raspberry Pi OS (64-bit), whose Python can use wheels from PyPI",
        blocks=True,
    )


def _clock(seen: Seen) -> Advice | None:
    if seen.board.clock is None or not math.isfinite(seen.board.clock):
        return None
    behind = time.time() - seen.board.clock
    if abs(behind) <= DAY:
        return None
    day = time.strftime("%Y-%m-%d", time.gmtime(min(max(seen.board.clock, 0.0), 1e11)))
    fix = "sudo timedatectl set-ntp true"
    if seen.device.host is not None:  # this machine's clock, expanded by the user's shell
        fix = typed(seen.device, "sudo date -s @$(date +%s)", expand=True)
    return Advice(
        "clock",
        f"the date is {day}, {abs(behind) / DAY:,.0f} days {'behind' if behind > 0 else 'ahead'}",
        "jobs still work, but pip and apt reject certificates that are not valid on that date",
        fix,
    )


def _power_mode(seen: Seen) -> Advice | None:
    best = fastest_mode(seen.board.power_modes)
    if not seen.board.power_mode or best in ("", seen.board.power_mode):
        return None
    return Advice(
        "power mode",
        f"{seen.board.power_mode}; this board also has {best}",
        "clocks are capped and CPUs may be off: all times apply to this mode only",
        f"{seen.on(f'sudo nvpmodel -m {seen.board.power_modes[best]}')}  (if the product will run in that mode)",
    )


def fastest_mode(modes: Mapping[str, int]) -> str:
    """Return the mode without a limit (MAXN, MAXN_SUPER), or else the one with most watts; "" without modes."""

    def watts(name: str) -> float:
        found = re.search(r"(\d+)W", name)
        return float("inf") if name.startswith("MAXN") else float(found[1]) if found else 0.0

    return max(modes, key=lambda name: (watts(name), name), default="")


def _governor(seen: Seen) -> Advice | None:
    autonomous = seen.board.driver in AUTONOMOUS
    slow = [name for name in seen.board.governors if name == "powersave" and not autonomous]
    late = [name for name in seen.board.governors if name in FOLLOW]
    if not slow and not late:
        return None
    name = (slow or late)[0]
    pin = "sudo jetson_clocks" if seen.jetson else "echo performance | sudo tee " + GOVERNORS
    return Advice(
        "governor",
        f"{name} on {seen.board.governors[name]} CPUs",
        "the clock stays at its minimum"
        if slow
        else "the clock rises with a delay: the first query after a pause is slow",
        seen.on(pin),
    )


GOVERNORS = "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"


def _throttled(seen: Seen) -> Advice | None:
    """Current throttling, from a Raspberry Pi's bits and from cooling devices."""
    throttle, bits = seen.board.throttle, seen.board.throttle.bits or 0
    now = [text for bit, text in FIRMWARE.items() if bits >> bit & 1]
    now += [f"{name} is in state {state}" for name, state in throttle.cooling.items() if state > 0]
    if not now:
        return None
    return Advice(
        "throttling now",
        "; ".join(now),
        "the board runs below full speed: bench discards such blocks, and results stay undecided if too few are left",
        POWER if bits & 1 else HEAT,
    )


def _unseen(seen: Seen) -> Advice | None:
    """Without a kernel file, vcgencmd reads the firmware's state through a device file of the group `video`."""
    if not seen.host.get("board", "").startswith("Raspberry Pi") or seen.board.throttle.bits is not None:
        return None
    return Advice(
        "throttling",
        "the firmware's state cannot be read: vcgencmd is missing or not permitted",
        "a benchmark cannot detect throttling",
        f"{seen.on('sudo usermod -aG video $USER')}, then log in again  (vcgencmd is part of Raspberry Pi OS)",
    )


POWER = "use a stronger power supply or a shorter cable: 5.1 V and 3 A for a Raspberry Pi 4, 5 A for a Raspberry Pi 5"
HEAT = "let it cool down; add a fan or a heat sink"


def _has_throttled(seen: Seen) -> Advice | None:
    bits, counts = seen.board.throttle.bits or 0, seen.board.throttle.counts
    since = [text for bit, text in FIRMWARE.items() if bits >> (bit + OCCURRED) & 1 and not bits >> bit & 1]
    since += [f"{count:,} times {name}" for name, count in counts.items() if count > 0]
    if not since:
        return None
    power = bits >> OCCURRED & 1 or any("current" in name for name, count in counts.items() if count)
    lower = "use a lower power mode (`nvpmodel -m`), or a stronger power supply" if seen.jetson else POWER
    return Advice(
        "throttled since boot",
        "; ".join(since),
        "it will throttle again under load, and earlier results may be too slow",
        lower if power else HEAT,
    )


def _near_limit(seen: Seen) -> Advice | None:
    margin = seen.board.margin
    if margin is None or margin > NEAR_LIMIT:
        return None
    words = f"{margin:.0f} degrees below" if margin > 0 else "at"
    return Advice(
        "heat",
        f"{seen.board.zone} is {words} the throttling temperature",
        "a benchmark heats it further, and blocks will be discarded",
        HEAT,
    )


def _memory(seen: Seen) -> Advice | None:
    board = seen.board
    if board.available_bytes is None:
        return None
    swapped = (board.swap_bytes or 0) - (board.swap_free_bytes or 0)
    words = (
        f"{board.available_bytes / 1e6:,.0f} MB available, {(board.swap_free_bytes or 0) / 1e6:,.0f} MB of swap free"
    )
    if board.available_bytes < LEAST_AVAILABLE:
        why = "the kernel kills a compiler or an engine that needs more"
        return Advice(
            "memory", words, why, f"{seen.on('ps -eo rss,args --sort=-rss | head')}  (then stop what is not needed)"
        )
    if swapped > SWAPPED:
        why = "swapped-out memory is read back during measurements"
        return Advice(
            "memory", f"{words}, {swapped / 1e6:,.0f} MB in use", why, seen.on("sudo swapoff -a && sudo swapon -a")
        )
    if not board.swap_bytes and 0 < seen.memory_bytes < SMALL_MEMORY:
        why = "a compiler may briefly need several times a model's size, and without swap the kernel kills it"
        return Advice("memory", words, why, seen.on(SWAP))
    return None


SWAP = "sudo fallocate -l 2G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && sudo swapon /swapfile"

Row = Callable[[Seen], Advice | None]
ROWS: tuple[Row, ...] = (
    _bits,
    _clock,
    _power_mode,
    _governor,
    _throttled,
    _has_throttled,
    _unseen,
    _near_limit,
    _memory,
)


# --- JetPack releases of Jetsons, and how to make their TensorRT available to the agent's Python ----------------------
# JetPack provides TensorRT as Debian packages; `python3-libnvinfer` works only with the system's Python, and PyPI's
# TensorRT wheels do not support a Jetson's driver. Sources: NVIDIA's release notes of Jetson Linux R32 to R39 (with the
# base system of each), NVIDIA TensorRT documentation, "Installing TensorRT", Debian packages.


LEAST_PYTHON = (3, 10)


@dataclass(frozen=True)
class JetPack:
    """A JetPack release. `python`: of its system; `boards`: that support no newer release; `index`: of wheels built for
    its CUDA (Jetson AI Lab), if known."""

    major: int
    python: str
    boards: str = ""
    index: str = ""


# By the major release of Jetson Linux.
BY_RELEASE = {
    32: JetPack(4, "3.6", boards="Nano and TX2"),
    34: JetPack(5, "3.8", boards="Xavier"),
    35: JetPack(5, "3.8", boards="Xavier"),
    36: JetPack(6, "3.10", index="https://pypi.jetson-ai-lab.io/jp6/cu126"),
    38: JetPack(7, "3.12"),
    39: JetPack(7, "3.12"),
}


def jetpack(board: BoardState) -> JetPack | None:
    """Return the JetPack of a board; None if it is not a Jetson, or for an unknown release."""
    return BY_RELEASE.get(pair(board.tegra_release)[0])


def described(board: BoardState) -> str:
    """Return text such as "JetPack 6 (6.2.1+b38), Jetson Linux 36.4.3"; "" for other machines."""
    if not board.tegra_release:
        return ""
    known = jetpack(board)
    exact = f" ({board.debian['nvidia-jetpack']})" if "nvidia-jetpack" in board.debian else ""
    return f"{f'JetPack {known.major}{exact}, ' if known else ''}Jetson Linux {board.tegra_release}"


def too_old(board: BoardState) -> str:
    """Return why this JetPack's TensorRT does not work with a Python that vitdeploy supports; "" if it does."""
    known = jetpack(board)
    if known is None or pair(known.python) >= LEAST_PYTHON:
        return ""
    return (
        f"JetPack {known.major} has TensorRT only for Python {known.python}, and vitdeploy needs 3.10: flash JetPack 6 "
        f"if the board supports it (Jetson {known.boards} does not), or use a CPU target"
    )


def environment_line(board: BoardState) -> str:
    """Return the shell command that creates ~/venv with the board's TensorRT."""
    known = jetpack(board)
    python = f"python{known.python}" if known else "python3"
    needed = [] if "python3-libnvinfer" in board.debian or known is None else ["python3-libnvinfer"]
    needed += [] if board.venv else ["python3-venv"]
    install = f"sudo apt-get install -y {' '.join(needed)} && " if needed else ""
    return f"{install}{python} -m venv --system-site-packages ~/venv && ~/venv/bin/python -m pip install numpy pillow"


# --- The newest runtime versions on PyPI for older Linux systems ------------------------------------------------------
# Found with `pip download --python-version P --platform manylinux_2_G_ARCH` on 2026-11-23. `pip install` selects the
# right version automatically; this table predicts which one.


NEWEST = 99
# A package, its newest version for Python 3.x to 3.y, and the least glibc 2.z by machine.
WHEELS: tuple[tuple[str, str, int, int, dict[str, int]], ...] = (
    ("onnxruntime", "1.32.0", 11, NEWEST, {"x86_64": 28, "aarch64": 28}),
    ("onnxruntime", "1.23.2", 10, 13, {"x86_64": 27, "aarch64": 27}),
    ("openvino", "2026.4.1", 10, NEWEST, {"x86_64": 28, "aarch64": 35}),
    ("openvino", "2025.4.1", 10, 13, {"x86_64": 17}),
    ("openvino", "2025.2.0", 10, 13, {"aarch64": 31}),
)


def newest(package: str, python: tuple[int, int], glibc: tuple[int, int], machine: str) -> str | None:
    """Return the newest version of a runtime that works with vitdeploy and the system; None without one."""
    for name, version, first, last, least in WHEELS:
        fits = name == package and first <= python[1] <= last and python[0] == 3
        if fits and machine in least and glibc >= (2, least[machine]):
            return version
    return None


def pair(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it is not a version."""
    numbers = [int(part) for part in version.split(".") if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) >= 2 else (0, 0)


# --- A probe's result as text: what works on a device, and what to install --------------------------------------------


BASE = ("numpy", "pillow")


def diagnose(device: Device, probe: DeviceProbe) -> tuple[bool, list[str], list[Advice]]:
    """Return whether any target works on the device, the lines of the doctor, and the problems of the machine."""
    host, seen = probe.host, Seen(device, probe.host, probe.board, probe.memory_bytes)
    advice = advise(seen)
    blocked = any(each.blocks for each in advice)
    words = [*name_host(host), host.get("isa", "")]
    words.append(f"{host['cores']} cores" if "cores" in host else "")
    lines = [
        f"{device.name}: {', '.join(word for word in (*words, host.get('machine'), host.get('system')) if word)}",
        f"Python {host.get('python')} at {probe.executable}, glibc {probe.glibc or 'unknown'}, "
        f"{probe.memory_bytes / 1e9:.1f} GB of memory, {probe.free_bytes / 1e9:.1f} GB free",
    ]
    lines += [word for word in (described(probe.board), probe.board.system) if word]
    lines += [f"caches: {host['caches']}"] if host.get("caches") else []
    lines += [line] if (line := int8_instructions(host.get("isa", ""))) else []
    missing = [package for package in BASE if package not in probe.packages]
    if missing:
        lines += [f"missing  {', '.join(missing)}"]
        lines += [] if blocked else [f"         fix: {_pip(seen, ' '.join(missing))}"]
    for name, state in probe.targets.items():
        lines.append(
            f"{'works' if state.works else 'missing' if state.fix else 'absent':<7}  {name:<20} {state.detail}"
        )
        if state.fix and not blocked:
            lines.append(f"         fix: {_mend(seen, probe, name)}")
    lines += [f"{name:<15}  {value}" for name, value in probe.sensors.items()]
    if probe.power_mode:
        lines.append(f"{'power mode':<15}  {probe.power_mode}")
    lines += [f"busy     {job}" for job in probe.jobs]
    lines += advice_lines(advice)
    works = not missing and not blocked and any(state.works for state in probe.targets.values())
    return works, [*lines, f"{device.name} {'is ready' if works else 'cannot run anything yet'}"], advice


def _mend(seen: Seen, probe: DeviceProbe, target: str) -> str:
    """Return how to install a target's runtime, with the newest version that the system supports."""
    if target not in TARGETS:
        return "use a newer vitdeploy: this one does not know the target"
    package = TARGETS[target].package
    if package == "tensorrt" and seen.jetson:
        line = seen.on(environment_line(seen.board))
        return too_old(seen.board) or f"{line}, then: {_use_environment(seen.device)}"
    known = jetpack(seen.board)
    if package == "onnxruntime-gpu" and known is not None and known.index:
        return _pip(seen, f"{package} --index-url {known.index}")
    if package not in {name for name, *_ in WHEELS}:
        return f"{_pip(seen, package)}, unless the device's system provides it"
    python, glibc, machine = probe.host.get("python", ""), probe.glibc, probe.host.get("machine", "")
    version = newest(package, pair(python), pair(glibc), machine)
    system = f"Python {python}, glibc {glibc or 'unknown'} and {machine}"
    if version is None:
        return f"install a newer system, or use a container: no known version of {package} runs with {system}"
    return f"{_pip(seen, package)}  (the newest for {system} is {version})"


def _pip(seen: Seen, packages: str) -> str:
    """Return the command that installs packages, in a virtual environment if the system's Python is managed."""
    if not seen.board.managed:
        return f"{shell(seen.device)} -m pip install {packages}"
    needed = " ".join(dict.fromkeys([*BASE, *packages.split()]))
    first = "" if seen.board.venv else "sudo apt-get install -y python3-venv && "
    line = f"{first}{seen.device.python} -m venv ~/venv && ~/venv/bin/python -m pip install {needed}"
    return f"{seen.on(line)}, then: {_use_environment(seen.device)}"


def _use_environment(device: Device) -> str:
    if device.host is None:
        return "install vitdeploy into ~/venv and run it from there"
    return f"vitdeploy devices add {device.name} {device.address} --python '~/venv/bin/python'"

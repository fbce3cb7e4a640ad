"""Whether the machine slows itself down: for heat, for want of power, or because its clock was limited.

`Throttle` finds once what a machine has of these sources, and reads only those:

- Raspberry Pi: the bits of `get_throttled`, from the firmware's file where the kernel has it, else by `vcgencmd`. Bits
  0-3 are of now, bits 16-19 say that the same has occurred since boot. Source: Raspberry Pi documentation, "vcgencmd",
  get_throttled; the file: its kernel's drivers/firmware/raspberrypi.c (hexadecimal without a prefix).
- Cooling devices that slow something down (not fans), with a state above 0: Linux,
  Documentation/driver-api/thermal/sysfs-api.rst. Jetsons have "cpu-throttle-alert" and its like among them.
- Counts of heat on x86 (arch/x86 thermal_throttle), and of over-current and under-voltage on a Jetson: oc*_event_cnt of
  the hwmon device soctherm_oc (NVIDIA Jetson Linux Developer Guide, "Platform Power and Performance").
- The upper limit of the CPUs' clocks (Linux, Documentation/admin-guide/pm/cpufreq.rst, scaling_max_freq).

Everything is read from the kernel's files under `root`, "/" except in tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitdeploy.benchmark.probes import ROOT, read_number, read_text

# By bit of now; 16 higher is the bit that says that it has occurred since boot.
FIRMWARE = {
    0: "under-voltage",
    1: "the firmware capped the CPU's clock",
    2: "the firmware throttled the CPU",
    3: "the soft temperature limit was reached",
}
OCCURRED = 16
# The path differs between Raspberry Pi 3 and 4, and 5.
FIRMWARE_FILES = (
    "sys/devices/platform/soc/*firmware/get_throttled",
    "sys/devices/platform/soc@*/*firmware/get_throttled",
    "sys/devices/platform/*firmware/get_throttled",
)
COOLING = "sys/class/thermal/cooling_device[0-9]*"
# Types of cooling devices that take speed: "cpufreq-cpu0", "thermal-cpufreq-0", "devfreq-17000000.gpu", "Processor"
# (ACPI), "cpu-throttle-alert". "pwm-fan" and "hot-surface-alert" take none.
TAKES_SPEED = re.compile(r"cpufreq|devfreq|throttle|^Processor$|powerclamp")
COUNTERS = {
    "heat": "sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count",
    "over-current or under-voltage": "sys/class/hwmon/hwmon*/oc[0-9]*_event_cnt",
}
PROGRAM_SECONDS = 2.0


@dataclass(frozen=True)
class Reading:
    """One moment. `bits` of get_throttled, `cooling` the states of cooling devices by their type (the highest, where
    several have one), `counts` of events since boot; empty for what the machine has not."""

    bits: int | None = None
    cooling: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Throttle:
    """The sources of this machine, found once. Reading costs nothing where there is none.

    Args:
        program: vcgencmd; None to look for it, as a machine without the firmware's file may have it.
    """

    def __init__(self, root: Path = ROOT, program: str | None = None) -> None:
        self._file = next((file for file in _files(root, FIRMWARE_FILES) if firmware_bits(read_text(file))[0]), None)
        self._program = ""
        if self._file is None:
            self._program = self._working(program if program is not None else shutil.which("vcgencmd") or "")
        named = [((read_text(each / "type") or "").strip(), each / "cur_state") for each in sorted(root.glob(COOLING))]
        self._cooling = [(name[:40], file) for name, file in named if TAKES_SPEED.search(name)]
        self._counters = {name: _files(root, (pattern,)) for name, pattern in COUNTERS.items()}

    @property
    def sources(self) -> list[str]:
        """What is read, in words; none where nothing is."""
        firmware = ["get_throttled"] if self._file or self._program else []
        return [
            *firmware,
            *dict(self._cooling),
            *(f"count of {name}" for name, files in self._counters.items() if files),
        ]

    def read(self) -> Reading:
        cooling: dict[str, int] = {}
        for name, file in self._cooling:
            state = read_number(file)
            if state is not None and state >= cooling.get(name, 0):
                cooling[name] = int(state)
        counts = {name: sum(int(read_number(file) or 0) for file in files) for name, files in self._counters.items()}
        return Reading(self._bits(), cooling, {name: count for name, count in counts.items() if self._counters[name]})

    def _bits(self) -> int | None:
        if self._file is not None:
            return firmware_bits(read_text(self._file))[1]
        return firmware_bits(_output(self._program))[1] if self._program else None

    @staticmethod
    def _working(program: str) -> str:
        """The program, if it answers: it needs a device file that only the group `video` may read."""
        return program if program and firmware_bits(_output(program))[0] else ""


def firmware_bits(text: str | None) -> tuple[bool, int | None]:
    """Whether a text is the answer to get_throttled, and its bits: "throttled=0x50005" of vcgencmd, "50005" of the
    file."""
    match = re.fullmatch(r"(?:throttled=)?(?:0x)?([0-9a-fA-F]{1,8})", (text or "").strip())
    return (True, int(match[1], 16)) if match else (False, None)


def slowed_between(before: Reading, after: Reading) -> tuple[str, ...]:
    """Why the machine was slower between two readings, none where it was not: what either of them shows, and what
    occurred in between."""
    bits = (before.bits or 0, after.bits or 0)
    found = []
    for bit, text in FIRMWARE.items():
        now = (bits[0] | bits[1]) >> bit & 1
        occurred = (bits[1] & ~bits[0]) >> (bit + OCCURRED) & 1
        found += [text] if now or occurred else []
    for name, state in {**before.cooling, **after.cooling}.items():
        found += [f"{name} was active"] if max(state, before.cooling.get(name, 0)) > 0 else []
    for name, count in after.counts.items():
        found += [f"the count of {name} rose"] if count > before.counts.get(name, count) else []
    return tuple(found)


def clock_limit_mhz(cpus: Sequence[int], root: Path = ROOT) -> float | None:
    """The highest clock that any of `cpus` may have now; None where the kernel shows none. Heat lowers it, and so does
    another power mode."""
    files = (root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_max_freq" for cpu in cpus)
    return max((value / 1e3 for value in map(read_number, files) if value is not None), default=None)


def _files(root: Path, patterns: Sequence[str]) -> list[Path]:
    return [file for pattern in patterns for file in sorted(root.glob(pattern))]


def _output(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "get_throttled"],
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""

"""What the machine did while a block was measured: clocks, temperature, other processes, waiting, suspension, memory.

Everything is read from the kernel's files under `root`, "/" except in tests; what is missing or not permitted is None.
Sources: Linux, Documentation/filesystems/proc.rst (stat, status, cpuinfo), Documentation/admin-guide/pm/cpufreq.rst
(kHz), Documentation/ABI/testing/sysfs-class-thermal and Documentation/hwmon/sysfs-interface.rst (millidegrees),
arch/x86 thermal_throttle (counts), Documentation/scheduler/sched-stats.rst (ns), Documentation/accounting/psi.rst (us).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since boot that the CPUs of this process's affinity were busy, and that the hypervisor gave to others."""

    busy: float
    stolen: float


def affinity() -> list[int]:
    """The CPUs that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_times(cpus: Sequence[int], root: Path = ROOT) -> CpuTimes | None:
    """The times of `cpus` together. Fields of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal."""
    text = read_text(root / "proc/stat")
    wanted, found = {f"cpu{cpu}" for cpu in cpus}, []
    for line in (text or "").splitlines():
        name, *fields = line.split()
        if name in wanted and len(fields) >= 8:
            found.append([int(field) for field in fields[:8]])
    # A sandbox may report all zeros, which mean nothing: a CPU is always busy or idle.
    if len(found) < len(wanted) or not all(any(times) for times in found):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    busy = sum(times[i] for times in found for i in (0, 1, 2, 5, 6))
    return CpuTimes(busy / tick, sum(times[7] for times in found) / tick)


def run_delays(root: Path = ROOT) -> dict[str, float]:
    """The seconds so far that each thread of this process was ready to run but waited for a CPU, by thread number. If
    the
    kernel does not report that, one entry: those in which some thread of its control group waited. Empty if it reports
    neither."""
    found = {}
    for file in root.glob("proc/self/task/*/schedstat"):
        fields = (read_text(file) or "").split()
        if len(fields) >= 2 and any(map(int, fields[:2])):  # all zeros if the kernel does not count
            found[file.parent.name] = int(fields[1]) / 1e9
    if found:
        return found
    pressed = _pressed_seconds(root)
    return {} if pressed is None else {"group": pressed}


def _pressed_seconds(root: Path) -> float | None:
    """The waiting seconds from the pressure file of this process's control group, or else of the whole machine."""
    group = re.search(r"^0::/?(.*)$", read_text(root / "proc/self/cgroup") or "", re.MULTILINE)
    files = [root / "sys/fs/cgroup" / group[1] / "cpu.pressure"] if group and group[1] else []
    for file in (*files, root / "proc/pressure/cpu"):
        match = re.search(r"^some .*total=(\d+)", read_text(file) or "", re.MULTILINE)
        if match:
            return int(match[1]) / 1e6
    return None


def longest_wait(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """The longest wait of a thread between two readings of `run_delays`, in seconds; None if unknown. The slowest of
    the threads that compute a query together decides."""
    waits = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return max(0.0, *waits) if waits else None


def process_seconds(root: Path = ROOT) -> dict[int, tuple[str, float]]:
    """The name and the CPU seconds so far of every visible process."""
    found = {}
    for file in root.glob("proc/[0-9]*/stat"):
        head, _, tail = (read_text(file) or "").rpartition(")")
        fields = tail.split()
        if len(fields) > 12:
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            found[int(file.parent.name)] = (head.partition("(")[2], seconds)
    return found


def clock_mhz(cpus: Sequence[int], root: Path = ROOT) -> float | None:
    """The fastest clock of `cpus`: that of a busy CPU, not of an idle one."""
    files = (root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in cpus)
    clocks = [value / 1e3 for value in map(read_number, files) if value is not None]
    if not clocks:
        text = read_text(root / "proc/cpuinfo") or ""
        clocks = [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([0-9.]+)$", text, re.MULTILINE)]
    return max(clocks, default=None)


def temperature(root: Path = ROOT) -> float | None:
    """The hottest sensor in degrees Celsius, among those with a plausible reading."""
    files = [*root.glob("sys/class/thermal/thermal_zone*/temp"), *root.glob("sys/class/hwmon/hwmon*/temp*_input")]
    degrees = [value / 1e3 for value in map(read_number, files) if value is not None]
    return max((value for value in degrees if 0 < value < 150), default=None)


def throttle_count(root: Path = ROOT) -> int | None:
    """How often the CPUs were slowed down by heat since boot."""
    files = root.glob("sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count")
    counts = [int(value) for value in map(read_number, files) if value is not None]
    return sum(counts) if counts else None


def suspended_seconds() -> float:
    """How long the machine has slept since boot; 0 if the system has no such clock."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def peak_memory(root: Path = ROOT) -> int | None:
    """The largest resident set of this process so far, in bytes."""
    match = re.search(r"^VmHWM:\s*(\d+) kB$", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def thread_count(root: Path = ROOT) -> int | None:
    """How many threads this process has."""
    match = re.search(r"^Threads:\s*(\d+)$", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return int(match[1]) if match else None


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

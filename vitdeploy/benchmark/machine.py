"""Probes of the machine: load, clocks, throttling, energy, and the lock for measurements."""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.errors import CapabilityError
from vitdeploy.extensions import lazy

if TYPE_CHECKING:
    import fcntl
else:
    fcntl = lazy("fcntl")  # missing on Windows

# --- Clocks, temperature, other processes, waiting, suspension and memory during a block ------------------------------
# Everything is read from the kernel's files under `root`, "/" except in tests; missing or forbidden values are None.
# Sources: Linux, Documentation/filesystems/proc.rst (stat, status, cpuinfo),
# Documentation/admin-guide/pm/cpufreq.rst (kHz), Documentation/ABI/testing/sysfs-class-thermal and
# Documentation/hwmon/sysfs-interface.rst (millidegrees), arch/x86 thermal_throttle (counts),
# Documentation/scheduler/sched-stats.rst (ns), Documentation/accounting/psi.rst (us).


ROOT = Path("/")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since boot in which the CPUs of this process were busy, and in which the hypervisor gave them to other
    virtual machines."""

    busy: float
    stolen: float


def affinity() -> list[int]:
    """The CPUs that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_times(cpus: Sequence[int], root: Path = ROOT) -> CpuTimes | None:
    """The total times of `cpus`. Fields of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal."""
    text = read_text(root / "proc/stat")
    expected, found = {f"cpu{cpu}" for cpu in cpus}, []
    for line in (text or "").splitlines():
        name, *fields = line.split()
        if name in expected and len(fields) >= 8:
            found.append([int(field) for field in fields[:8]])
    # A sandbox may report zeros only, which are invalid: a CPU is always busy or idle.
    if len(found) < len(expected) or not all(any(times) for times in found):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    busy = sum(times[i] for times in found for i in (0, 1, 2, 5, 6))
    return CpuTimes(busy / tick, sum(times[7] for times in found) / tick)


def run_delays(root: Path = ROOT) -> dict[str, float]:
    """The seconds so far in which each thread of this process was ready but waited for a CPU, by thread ID. If the
    kernel does not report that, one entry: the seconds in which any thread of the control group waited. Empty if it
    reports neither."""
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
    """The waiting seconds from the pressure file of this process's control group, or of the whole machine."""
    group = re.search(r"^0::/?(.*)$", read_text(root / "proc/self/cgroup") or "", re.MULTILINE)
    files = [root / "sys/fs/cgroup" / group[1] / "cpu.pressure"] if group and group[1] else []
    for file in (*files, root / "proc/pressure/cpu"):
        match = re.search(r"^some .*total=(\d+)", read_text(file) or "", re.MULTILINE)
        if match:
            return int(match[1]) / 1e6
    return None


def longest_wait(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """The longest wait of a thread between two readings of `run_delays`, in seconds; None if unknown. The threads of a
    query wait for the slowest one."""
    waits = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return max(0.0, *waits) if waits else None


def process_seconds(root: Path = ROOT) -> dict[int, tuple[str, float]]:
    """The name and the CPU seconds so far of every visible process, by PID."""
    found = {}
    for file in root.glob("proc/[0-9]*/stat"):
        head, _, tail = (read_text(file) or "").rpartition(")")
        fields = tail.split()
        if len(fields) > 12:
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            found[int(file.parent.name)] = (head.partition("(")[2], seconds)
    return found


def clock_mhz(cpus: Sequence[int], root: Path = ROOT) -> float | None:
    """The fastest clock of `cpus` in MHz, which is that of a busy CPU; None if unknown."""
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
    """The number of thermal throttle events of the CPUs since boot."""
    files = root.glob("sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count")
    counts = [int(value) for value in map(read_number, files) if value is not None]
    return sum(counts) if counts else None


def suspended_seconds() -> float:
    """The seconds that the machine has slept since boot; 0 if the system has no such clock."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def peak_memory(root: Path = ROOT) -> int | None:
    """The largest resident set of this process so far, in bytes."""
    match = re.search(r"^VmHWM:\s*(\d+) kB$", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def thread_count(root: Path = ROOT) -> int | None:
    """The number of threads of this process."""
    match = re.search(r"^Threads:\s*(\d+)$", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return int(match[1]) if match else None


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def read_number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


# --- The machine lock: one measurement at once, across users ----------------------------------------------------------
# The lock is a kernel lock (flock) on an empty file in the machine's temporary folder, so it is released when its
# process ends for any reason. The kernel also reports the owner, so that no file contents can be forged by another
# user. Without such a lock (Windows), or if the file cannot be opened, processes do not wait; the load shows other
# activity, where the system reports it. Each waiting process locks one byte of a second file, after the bytes of all
# earlier ones: the order of arrival.


LOCK_NAME, QUEUE_NAME = "vitdeploy-device.lock", "vitdeploy-device.queue"
LOOK_SECONDS = 0.25
# After this many looks at a free lock, a process takes it before earlier ones, which may be stopped.
PATIENT_LOOKS = 8
LONGEST_COMMAND = 100


class _MachineLock:
    """The lock in this process. It is reentrant for the thread that holds it, because a bench may contain others.

    `waited`: the seconds that this process has waited for it so far; `max_wait`: their limit, None for no limit.
    """

    def __init__(self) -> None:
        self.waited, self.max_wait = 0.0, None  # type: float, float | None
        self._threads = threading.RLock()
        self._depth = 0
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Try to take the lock; returns whether this thread holds it now. Release it once per successful call."""
        if not self._threads.acquire(blocking=False):
            return False
        if not self._depth:
            held, self._descriptor = _locked()
            if not held and not _is_ancestors(holder()):
                self._threads.release()
                return False
        self._depth += 1
        return True

    def give_back(self) -> None:
        self._depth -= 1
        if not self._depth and self._descriptor is not None:
            # Closing alone would not unlock it: a forked process may have the file open too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
        self._threads.release()


MACHINE = _MachineLock()


@contextlib.contextmanager
def machine_lock(waits_for: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process measures on this machine, and hold the lock. `waits_for` is called once per awaited
    process, with its description, its start time, and the number of processes that wait before this one.

    Raises:
        CapabilityError: this process has waited longer than `MACHINE.max_wait`.
    """
    if (_queue() and holder() is None) or not MACHINE.take():
        with _ticket() as count_before:
            _wait(waits_for, count_before)
    try:
        yield
    finally:
        MACHINE.give_back()


def _wait(waits_for: Callable[[str], None], count_before: Callable[[], int]) -> None:
    """Take the lock when it is this process's turn."""
    reported, free_looks = "", 0
    while True:
        begun, before, pid = time.monotonic(), count_before(), holder()
        free_looks = free_looks + 1 if pid is None else 0
        if (not before or free_looks > PATIENT_LOOKS) and MACHINE.take():
            return
        text = described(pid) + _started(pid)
        if before:
            text += f"; {before} more command{'s wait' if before > 1 else ' waits'} before this one"
        if text != reported:
            reported = text
            waits_for(text)
        if MACHINE.max_wait is not None and MACHINE.waited >= MACHINE.max_wait:
            raise CapabilityError(
                "another vitdeploy benchmark is running on this machine",
                found=f"{text}; waited {MACHINE.waited:.0f} s",
                expected=f"its end within --max-wait {MACHINE.max_wait:g} s",
                fix="run the command again when it has ended, or with a longer --max-wait",
            )
        time.sleep(LOOK_SECONDS)
        MACHINE.waited += time.monotonic() - begun


@contextlib.contextmanager
def _ticket() -> Iterator[Callable[[], int]]:
    """A place in the queue; yields a function that counts the places before it, 0 if the kernel shows none."""
    descriptor = open_lock(lock_file().with_name(QUEUE_NAME)) if os.name == "posix" else None
    if descriptor is None:
        yield lambda: 0
        return
    place = max((start for start, _ in _queue()), default=0) + 1, os.getpid()
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, place[0])
        yield lambda: sum(other < place for other in _queue())
    finally:
        os.close(descriptor)


def _queue(root: Path = ROOT) -> list[tuple[int, int]]:
    """The processes that wait for the lock, in the order of arrival: the number of the place, and the PID."""
    try:
        inode = lock_file().with_name(QUEUE_NAME).stat().st_ino
    except OSError:
        return []
    pattern = rf"^\d+: POSIX +\w+ +READ +(\d+) [0-9a-f]+:[0-9a-f]+:{inode} (\d+) "
    entries = re.findall(pattern, read_text(root / "proc/locks") or "", re.MULTILINE)
    return sorted((int(start), int(pid)) for pid, start in entries)


def _started(pid: int | None, root: Path = ROOT) -> str:
    """The start time of a process, as ", since 14:03:22"; "" if unknown."""
    fields = (read_text(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()
    uptime = (read_text(root / "proc/uptime") or "").split()
    if pid is None or len(fields) < 20 or not uptime:
        return ""
    age = float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.strftime(", since %H:%M:%S", time.localtime(time.time() - age))


def lock_file() -> Path:
    return Path(tempfile.gettempdir()) / LOCK_NAME


def _locked() -> tuple[bool, int | None]:
    """Whether this process has the lock, and its descriptor; (True, None) if the system has no such lock."""
    descriptor = open_lock(lock_file()) if os.name == "posix" else None
    if descriptor is None:
        return True, None
    try:
        take_lock(descriptor, wait=False)
    except BlockingIOError:
        os.close(descriptor)
        return False, None
    except OSError:  # a file system without such locks: other holders are invisible, so waiting is impossible
        os.close(descriptor)
        return True, None
    return True, descriptor


def take_lock(descriptor: int, *, wait: bool = True) -> None:
    """Take the kernel's exclusive lock on an open file, which closing it releases.

    Raises:
        BlockingIOError: another process has it, and `wait` is False. OSError: the file system has no locks.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def open_lock(path: Path) -> int | None:
    """Open a lock file, creating it if missing. Another user may have replaced it, so links are not followed, and a
    pipe does not block."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = None
    # Another user's file in a sticky folder may be opened, but not with O_CREAT (fs.protected_regular).
    for more in (os.O_CREAT, 0):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, flags | more, 0o644)
            break
    if descriptor is None:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        return None
    # The umask may have hidden it from other users.
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o644:
        os.fchmod(descriptor, 0o644)
    return descriptor


def holder(root: Path = ROOT) -> int | None:
    """The PID of the process that holds the lock, if the kernel shows it."""
    try:
        inode = lock_file().stat().st_ino
    except OSError:
        return None
    pattern = rf"^\d+: FLOCK +\w+ +WRITE +(\d+) [0-9a-f]+:[0-9a-f]+:{inode} "
    match = re.search(pattern, read_text(root / "proc/locks") or "", re.MULTILINE)
    return int(match[1]) if match and int(match[1]) > 0 else None


def described(pid: int | None, root: Path = ROOT) -> str:
    """A process in words: its PID and command."""
    if pid is None:
        return "another process"
    if pid == os.getpid():
        return "another thread of this process"
    command = printable((read_text(root / f"proc/{pid}/cmdline") or "").replace("\0", " ").strip())
    if len(command) > LONGEST_COMMAND:
        command = command[: LONGEST_COMMAND - 3] + "..."
    return f"process {pid}" + (f" ({command})" if command else "")


def _is_ancestors(pid: int | None, root: Path = ROOT) -> bool:
    """Whether the lock's holder is an ancestor of this process, and so waits for it."""
    if pid is None:
        return False
    own = os.getppid()
    while own > 1 and own != pid:
        fields = (read_text(root / f"proc/{own}/stat") or "").rpartition(")")[2].split()
        own = int(fields[1]) if len(fields) > 1 else 0
    return own == pid


# --- Throttling: because of heat, lack of power, or a limited clock ---------------------------------------------------
# `Throttle` finds the sources of a machine once, and reads only those:
#
# - Raspberry Pi: the bits of `get_throttled`, from the firmware's file if the kernel has it, otherwise by `vcgencmd`.
#   Bits 0-3 are current, bits 16-19 mean that the same has occurred since boot. Source: Raspberry Pi documentation,
#   "vcgencmd", get_throttled; the file: its kernel's drivers/firmware/raspberrypi.c (hexadecimal without a prefix).
# - Cooling devices that slow something down (not fans), with a state above 0: Linux,
#   Documentation/driver-api/thermal/sysfs-api.rst. Jetsons have "cpu-throttle-alert" and similar devices.
# - Counts of thermal events on x86 (arch/x86 thermal_throttle), and of over-current and under-voltage on a Jetson:
#   oc*_event_cnt of the hwmon device soctherm_oc (NVIDIA Jetson Linux Developer Guide, "Platform Power and
#   Performance").
# - The upper limit of the CPUs' clocks (Linux, Documentation/admin-guide/pm/cpufreq.rst, scaling_max_freq).
#
# Everything is read from the kernel's files under `root`, "/" except in tests.


# By current bit; the bit 16 higher means that it has occurred since boot.
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
# Types of cooling devices that reduce speed: "cpufreq-cpu0", "thermal-cpufreq-0", "devfreq-17000000.gpu", "Processor"
# (ACPI), "cpu-throttle-alert". "pwm-fan" and "hot-surface-alert" do not.
TAKES_SPEED = re.compile(r"cpufreq|devfreq|throttle|^Processor$|powerclamp")
COUNTERS = {
    "heat": "sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count",
    "over-current or under-voltage": "sys/class/hwmon/hwmon*/oc[0-9]*_event_cnt",
}
PROGRAM_SECONDS = 2.0


@dataclass(frozen=True)
class Reading:
    """One reading. `bits` of get_throttled, `cooling`: the states of cooling devices by type (the highest if several
    have the same type), `counts` of events since boot; empty for missing sources."""

    bits: int | None = None
    cooling: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Throttle:
    """The throttling sources of this machine, found once. Without sources, reading costs nothing.

    Args:
        program: the path of vcgencmd; None to search for it.
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
        """The names of the sources; empty without any."""
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
        return (
            firmware_bits(program_output((self._program, "get_throttled"), PROGRAM_SECONDS))[1]
            if self._program
            else None
        )

    @staticmethod
    def _working(program: str) -> str:
        """The program if it answers, otherwise "": it needs a device file that only the group `video` may read."""
        return (
            program if program and firmware_bits(program_output((program, "get_throttled"), PROGRAM_SECONDS))[0] else ""
        )


def firmware_bits(text: str | None) -> tuple[bool, int | None]:
    """Whether a text is an answer to get_throttled, and its bits: "throttled=0x50005" from vcgencmd, "50005" from the
    file."""
    match = re.fullmatch(r"(?:throttled=)?(?:0x)?([0-9a-fA-F]{1,8})", (text or "").strip())
    return (True, int(match[1], 16)) if match else (False, None)


def slowed_between(before: Reading, after: Reading) -> tuple[str, ...]:
    """The reasons for throttling between two readings: states in either reading, and events in between; empty without
    throttling."""
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
    """The highest clock that any of `cpus` is currently allowed, in MHz; None if unknown. Heat or another power mode
    lowers it."""
    files = (root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_max_freq" for cpu in cpus)
    return max((value / 1e3 for value in map(read_number, files) if value is not None), default=None)


def _files(root: Path, patterns: Sequence[str]) -> list[Path]:
    return [file for pattern in patterns for file in sorted(root.glob(pattern))]


def program_output(command: Sequence[str], seconds: float, *, failing: bool = False) -> str:
    """The standard output of a program; "" if it is missing, takes longer than `seconds`, or fails (unless
    `failing`)."""
    program = shutil.which(command[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        return ""
    argv, environment = [program, *command[1:]], {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=not failing, env=environment)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout


# --- Energy, if the machine measures it; otherwise None, never 0 ------------------------------------------------------
# Counters of CPU packages (RAPL, through powercap) are read before and after a block. Boards such as NVIDIA's Jetson
# have sensors of instantaneous power instead (INA chips, through hwmon), which are read right after the block's last
# query; the largest counts, because the rail at the board's input feeds the others. Both include everything that runs
# there, and idle power, but not the losses of the power supply. For an engine on a GPU, only the GPU's energy counts
# (`runtime.nvidia.GpuEnergy`, which is read in the same way).
#
# Sources: Linux, Documentation/power/powercap/powercap.rst (energy_uj, max_energy_range_uj; microjoules, for root only
# since CVE-2020-8694) and Documentation/hwmon/sysfs-interface.rst (power*_input in microwatts, in*_input in millivolts,
# curr*_input in milliamperes).


NOT_THERE, NOT_PERMITTED = "not there", "not permitted"
# "intel-rapl:0" is a package; "intel-rapl:0:0" is a part of one, which the package's counter includes.
PACKAGES = "sys/class/powercap/intel-rapl:[0-9]*"
POWER, CURRENT = "sys/class/hwmon/hwmon*/power*_input", "sys/class/hwmon/hwmon*/curr*_input"


class EnergyMeter:
    """The energy meter of the CPU, or of the board. `source` is "RAPL" or "power sensor", or the reason why it is
    missing."""

    def __init__(self, root: Path = ROOT) -> None:
        packages = [path / "energy_uj" for path in sorted(root.glob(PACKAGES)) if path.name.count(":") == 1]
        sensors = [*sorted(root.glob(POWER)), *sorted(root.glob(CURRENT))]
        self._counters = [file for file in packages if read_number(file) is not None]
        self._sensors = [] if self._counters else [file for file in sensors if _watts(file) is not None]
        if self._counters:
            self.source = "RAPL"
        elif self._sensors:
            self.source = "power sensor"
        else:
            self.source = NOT_PERMITTED if packages or sensors else NOT_THERE

    def read(self) -> list[float | None]:
        """Microjoules of every package so far, or watts of every sensor."""
        return [read_number(file) for file in self._counters] or [_watts(file) for file in self._sensors]

    def joules(self, before: list[float | None], after: list[float | None], seconds: float) -> float | None:
        """The energy of a block of `seconds` between two readings; None if the source can no longer be read."""
        if not self._counters:
            watts = [value for value in after if value is not None]
            return max(watts) * seconds if watts else None
        total = 0.0
        for file, start, end in zip(self._counters, before, after, strict=True):
            if start is None or end is None:
                return None
            # A counter wraps to 0 at the end of its range.
            wrapped = read_number(file.parent / "max_energy_range_uj") or 0.0 if end < start else 0.0
            total += end - start + wrapped
        return total / 1e6


def _watts(file: Path) -> float | None:
    """A sensor's reading: power, or current times voltage of the same channel."""
    value = read_number(file)
    if value is None or file.name.startswith("power"):
        return None if value is None else value / 1e6
    volts = read_number(file.with_name(file.name.replace("curr", "in", 1)))
    return None if volts is None else value / 1e3 * volts / 1e3

"""Describe a device for `vitdeploy devices doctor`: hardware, working targets, power, heat, memory, clock and Python.

The state of the board is read from files under `root` ("/" except in tests) and from `nvpmodel` and `dpkg-query`, if
available; missing sources are skipped. No root rights are needed. Sources:

- nvpmodel -q, /etc/nvpmodel.conf, /etc/nv_tegra_release: NVIDIA Jetson Linux Developer Guide, "Platform Power and
  Performance" and "Quick Start".
- governors and drivers: Linux, Documentation/admin-guide/pm/cpufreq.rst.
- trip points: Linux, Documentation/driver-api/thermal/sysfs-api.rst (millidegrees; negative ones are off).
- memory: Linux, Documentation/filesystems/proc.rst, "meminfo" (kB).
- EXTERNALLY-MANAGED: PEP 668. Debian has ensurepip in the package python3-venv.
"""

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import machine
from vitdeploy.benchmark.machine import ROOT, Throttle, affinity, program_output, read_text
from vitdeploy.compilation.backend import TargetState
from vitdeploy.devices.agent.state import tickets
from vitdeploy.errors import VitdeployError
from vitdeploy.extensions import installed_version

LONGEST = 80
PROGRAM_SECONDS = 10
# JetPack packages that TensorRT for the system's Python needs.
DEBIAN_PACKAGES = ("nvidia-jetpack", "python3-libnvinfer")
GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
UNREADABLE = "cannot be read"


@dataclass(frozen=True)
class BoardState:
    """The state of a machine; empty or None for unknown facts.

    bits: of this Python's addresses. managed: pip may not install into this Python (PEP 668). venv: it can create
        virtual environments. clock: seconds since 1970 by the machine's clock.
    power_mode: the name of the active one; power_modes: the identifiers of all by name.
    governors: how many CPUs have each; driver: of their clocks.
    throttle: throttling now and since boot. margin: the smallest distance in degrees Celsius of a zone to the
        temperature at which its passive cooling starts; zone: the name of that zone.
    available_bytes, swap_bytes, swap_free_bytes: memory for new processes, and swap.
    tegra_release: Jetson Linux, as "36.4.3"; debian: versions of `DEBIAN_PACKAGES`; system: the name of the system.
    """

    bits: int = 64
    managed: bool = False
    venv: bool = True
    clock: float | None = None
    power_mode: str = ""
    power_modes: dict[str, int] = field(default_factory=dict)
    governors: dict[str, int] = field(default_factory=dict)
    driver: str = ""
    throttle: machine.Reading = field(default_factory=machine.Reading)
    margin: float | None = None
    zone: str = ""
    available_bytes: int | None = None
    swap_bytes: int | None = None
    swap_free_bytes: int | None = None
    tegra_release: str = ""
    debian: dict[str, str] = field(default_factory=dict)
    system: str = ""


@dataclass(frozen=True)
class DeviceProbe:
    """A description of a device. `sensors`: the readings available during measurements; `jobs`: running and waiting
    ones; `board`: power, heat, memory and Python; `runtimes`: for each working target, the release of its package and
    facts on its device."""

    host: dict[str, str]
    executable: str
    glibc: str
    packages: dict[str, str]
    targets: dict[str, TargetState]
    free_bytes: int
    memory_bytes: int
    sensors: dict[str, str]
    power_mode: str
    jobs: tuple[str, ...]
    board: BoardState = field(default_factory=BoardState)
    runtimes: dict[str, dict[str, str]] = field(default_factory=dict)


def probe(root: Path = Path("/")) -> DeviceProbe:
    (host, targets, runtimes), board = _zone(), read_board(root)
    # Not at import: targets of other packages are found by searching all installed packages.
    packages = ("numpy", "pillow", *dict.fromkeys(row.package for row in TARGETS.values()), "cuda-python")
    return DeviceProbe(
        host=host,
        executable=sys.executable,
        glibc=platform.libc_ver()[1],
        packages={name: version for name in packages if (version := installed_version(name))},
        targets=targets,
        free_bytes=shutil.disk_usage(Path.home()).free,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        sensors=_sensors(root),
        power_mode=board.power_mode,
        jobs=tuple(str(ticket["what"]) for _, ticket in tickets()),
        board=board,
        runtimes=runtimes,
    )


def _zone() -> tuple[dict[str, str], dict[str, TargetState], dict[str, dict[str, str]]]:
    """Return the host, its targets and their runtimes, as the device zone describes them; without numpy, which the zone
    needs, only a few facts."""
    try:
        from vitdeploy.compilation.engine import probe_target
        from vitdeploy.runtime.host import describe_host
    except ModuleNotFoundError:
        return {"machine": platform.machine(), "system": platform.system(), "python": platform.python_version()}, {}, {}
    targets = {name: probe_target(name) for name in TARGETS}
    return describe_host(), targets, {name: _runtime(name, each) for name, each in targets.items() if each.works}


def _runtime(target: str, state: TargetState) -> dict[str, str]:
    from vitdeploy.runtime.backend import RUNTIME

    facts: dict[str, str] = {TARGETS[target].package: state.version} if state.version else {}
    with contextlib.suppress(VitdeployError):
        facts |= RUNTIME[target].describe_device()
    return facts


def _sensors(root: Path) -> dict[str, str]:
    """Return the sensors that `bench` can read on this machine, with their current values."""
    mhz, celsius = machine.clock_mhz(affinity(), root), machine.temperature(root)
    throttles = machine.throttle_count(root)
    return {
        "clock": UNREADABLE if mhz is None else f"{mhz:.0f} MHz",
        "governor": (read_text(root / GOVERNOR) or UNREADABLE).strip()[:40],
        "temperature": UNREADABLE if celsius is None else f"{celsius:.1f} degrees Celsius",
        "heat throttling": UNREADABLE if throttles is None else f"{throttles} times since boot",
        "throttling by": ", ".join(Throttle(root).sources)[:200] or UNREADABLE,
        "energy": machine.EnergyMeter(root).source,
    }


def read_board(root: Path = ROOT, cpus: Sequence[int] | None = None) -> BoardState:
    mode = power_mode(program_output(["nvpmodel", "-q"], PROGRAM_SECONDS, failing=True))
    modes = power_modes(read_text(root / "etc/nvpmodel.conf") or "")
    governors, driver = _governors(root, affinity() if cpus is None else cpus)
    margin, zone = _margin(root)
    memory = read_memory(root)
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)', read_text(root / "etc/os-release") or "", re.MULTILINE)
    return BoardState(
        bits=64 if sys.maxsize > 2**32 else 32,
        managed=externally_managed(),
        venv=importlib.util.find_spec("ensurepip") is not None,
        clock=time.time(),
        power_mode=mode or _mode_of_status(read_text(root / "var/lib/nvpmodel/status") or "", modes),
        power_modes=modes,
        governors=governors,
        driver=driver,
        throttle=Throttle(root).read(),
        margin=margin,
        zone=zone,
        available_bytes=memory.get("MemAvailable"),
        swap_bytes=memory.get("SwapTotal"),
        swap_free_bytes=memory.get("SwapFree"),
        tegra_release=tegra_release(read_text(root / "etc/nv_tegra_release") or ""),
        debian=debian_versions(_debian_packages()),
        system=release[1][:LONGEST] if release else "",
    )


def _debian_packages() -> str:
    query = ["dpkg-query", "-W", "-f", DEBIAN_FORMAT, *DEBIAN_PACKAGES]
    return program_output(query, PROGRAM_SECONDS, failing=True)  # dpkg-query fails if one of the packages is unknown


DEBIAN_FORMAT = "${Package} ${Version} ${db:Status-Status}\n"


def debian_versions(text: str) -> dict[str, str]:
    """Return the versions of installed packages, from lines in `DEBIAN_FORMAT`."""
    fields = [line.split() for line in text.splitlines()]
    return {each[0]: each[1][:LONGEST] for each in fields if len(each) == 3 and each[2] == "installed"}


def power_mode(text: str) -> str:
    """Return the mode in the output of `nvpmodel -q`, which may contain other lines."""
    match = re.search(r"^NV Power Mode:\s*(\S+)", text, re.MULTILINE)
    return match[1][:LONGEST] if match else ""


def power_modes(conf: str) -> dict[str, int]:
    """Return the modes of /etc/nvpmodel.conf with their identifiers, which differ between boards."""
    return {name: int(number) for number, name in re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", conf)}


def _mode_of_status(text: str, modes: dict[str, int]) -> str:
    """Return the name of the mode in nvpmodel's status file, such as "pmode:0002"."""
    match = re.search(r"pmode:(\d+)", text)
    return next((name for name, number in modes.items() if match and number == int(match[1])), "")


def tegra_release(text: str) -> str:
    """Return "36.4.3" from "# R36 (release), REVISION: 4.3, GCID: ..."; "" from other texts."""
    match = re.search(r"R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)", text)
    return f"{match[1]}.{match[2]}" if match else ""


def read_memory(root: Path = ROOT) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    fields = re.findall(r"^(\w+):\s+(\d+) kB$", read_text(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: 1024 * int(value) for name, value in fields}


def externally_managed() -> bool:
    """Whether pip refuses to install here: outside a virtual environment, in an externally managed Python."""
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    return sys.prefix == sys.base_prefix and marker.is_file()


def _governors(root: Path, cpus: Sequence[int]) -> tuple[dict[str, int], str]:
    folders = [root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq" for cpu in cpus]
    counter = Counter(text.strip()[:LONGEST] for each in folders if (text := read_text(each / "scaling_governor")))
    drivers = [text.strip()[:LONGEST] for folder in folders if (text := read_text(folder / "scaling_driver"))]
    return dict(counter), drivers[0] if drivers else ""


def _margin(root: Path) -> tuple[float | None, str]:
    found = []
    for zone in root.glob("sys/class/thermal/thermal_zone[0-9]*"):
        degrees = machine.read_number(zone / "temp")
        for kind in zone.glob("trip_point_*_type"):
            limit = machine.read_number(kind.with_name(kind.name.replace("_type", "_temp")))
            passive = (read_text(kind) or "").strip() == "passive"
            if passive and degrees is not None and degrees > 0 and limit is not None and limit > 0:
                found.append(((limit - degrees) / 1e3, (read_text(zone / "type") or zone.name).strip()[:LONGEST]))
    return min(found) if found else (None, "")

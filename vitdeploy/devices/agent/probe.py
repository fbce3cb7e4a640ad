"""What a device is and what works there, for `vitdeploy devices doctor`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.energy import EnergyMeter
from vitdeploy.benchmark.machine import Throttle, affinity, clock_mhz, read_text, temperature, throttle_count
from vitdeploy.compilation.backend import TargetState
from vitdeploy.devices.agent.board import read_board
from vitdeploy.devices.agent.documents import DeviceProbe
from vitdeploy.devices.agent.state import tickets
from vitdeploy.errors import VitdeployError

PACKAGES = ("numpy", "pillow", *dict.fromkeys(row.package for row in TARGETS.values()), "cuda-python")
GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
UNREADABLE = "cannot be read"


def probe(root: Path = Path("/")) -> DeviceProbe:
    (host, targets, runtimes), board = _zone(), read_board(root)
    return DeviceProbe(
        host=host,
        executable=sys.executable,
        glibc=platform.libc_ver()[1],
        packages={name: version for name in PACKAGES if (version := _version(name))},
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
    """The host, its targets and their runtimes in the words of the device zone; without numpy, which that zone imports,
    a few words."""
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sensors(root: Path) -> dict[str, str]:
    """The sensors that `bench` can read on this machine, with their current state."""
    mhz, celsius, throttles = clock_mhz(affinity(), root), temperature(root), throttle_count(root)
    return {
        "clock": UNREADABLE if mhz is None else f"{mhz:.0f} MHz",
        "governor": (read_text(root / GOVERNOR) or UNREADABLE).strip()[:40],
        "temperature": UNREADABLE if celsius is None else f"{celsius:.1f} degrees Celsius",
        "heat throttling": UNREADABLE if throttles is None else f"{throttles} times since boot",
        "throttling by": ", ".join(Throttle(root).sources)[:200] or UNREADABLE,
        "energy": EnergyMeter(root).source,
    }

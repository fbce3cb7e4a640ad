"""What a device is and what works there, for `vitdeploy devices doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from vitdeploy.devices.agent.documents import Probe, TargetState
from vitdeploy.devices.agent.turn import tickets
from vitdeploy.spec import TARGETS, decode

PACKAGES = ("numpy", "pillow", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "cuda-python")
NOT_THERE, NOT_PERMITTED = "not there", "not permitted"
SENSORS = {
    "clock": "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq",
    "governor": "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor",
    "temperature": "sys/class/thermal/thermal_zone*/temp",
    "energy (RAPL)": "sys/class/powercap/intel-rapl:[0-9]*/energy_uj",
    "power (INA)": "sys/class/hwmon/hwmon*/curr*_input",
}


def probe(root: Path = Path("/")) -> Probe:
    host, targets = _zone()
    return Probe(
        host=host,
        executable=sys.executable,
        glibc=platform.libc_ver()[1],
        packages={name: version for name in PACKAGES if (version := _version(name))},
        targets=targets,
        free_bytes=shutil.disk_usage(Path.home()).free,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        sensors={name: _first(root, pattern) for name, pattern in SENSORS.items()},
        power_mode=_power_mode(),
        jobs=tuple(str(ticket["what"]) for _, ticket in tickets()),
    )


def _zone() -> tuple[dict[str, str], dict[str, TargetState]]:
    """The host and its targets in the words of the device zone; without numpy, which that zone imports, a few words."""
    try:
        from vitdeploy.compile.probe import probe_target
        from vitdeploy.runtime.host import describe_host
    except ModuleNotFoundError:
        return {"machine": platform.machine(), "system": platform.system(), "python": platform.python_version()}, {}
    return describe_host(), {name: decode(TargetState, probe_target(name)) for name in TARGETS}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first(root: Path, pattern: str) -> str:
    """What the first readable file says; else whether there are such files at all."""
    found = NOT_THERE
    for path in sorted(root.glob(pattern)):
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip()[:40]
        except OSError:
            found = NOT_PERMITTED
    return found


def _power_mode() -> str:
    """The active mode of a Jetson's nvpmodel, "" elsewhere."""
    program = shutil.which("nvpmodel", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, "-q"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0][:80] if done.returncode == 0 and done.stdout else ""

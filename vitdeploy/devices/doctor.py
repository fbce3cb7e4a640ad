"""A probe's result for a person: what works on a device, and what to install if something does not."""

from __future__ import annotations

from vitdeploy.backends import TARGETS
from vitdeploy.devices.agent.documents import Probe
from vitdeploy.devices.registry import Device
from vitdeploy.devices.transport import shell
from vitdeploy.devices.wheels import RUNTIMES, newest, pair

BASE = ("numpy", "pillow")


def diagnose(device: Device, probe: Probe) -> tuple[bool, list[str]]:
    """Whether any target works there, and the lines of the doctor."""
    host = probe.host
    words = [host[key] for key in ("cpu", "isa") if host.get(key)]
    words.append(f"emulated: {host['emulated']}" if host.get("emulated") else "")
    words.append(f"{host['cores']} cores" if "cores" in host else "")
    lines = [
        f"{device.name}: {', '.join(word for word in (*words, host.get('machine'), host.get('system')) if word)}",
        f"Python {host.get('python')} at {probe.executable}, glibc {probe.glibc or 'unknown'}, "
        f"{probe.memory_bytes / 1e9:.1f} GB of memory, {probe.free_bytes / 1e9:.1f} GB free",
    ]
    missing = [package for package in BASE if package not in probe.packages]
    if missing:
        lines += [f"missing  {', '.join(missing)}", f"         fix: {_pip(device, ' '.join(missing))}"]
    for name, state in probe.targets.items():
        lines.append(
            f"{'works' if state.works else 'missing' if state.fix else 'absent':<7}  {name:<20} {state.detail}"
        )
        if state.fix:
            lines.append(f"         fix: {_mend(device, probe, name)}")
    lines += [f"{name:<15}  {value}" for name, value in probe.sensors.items()]
    if probe.power_mode:
        lines.append(f"{'power mode':<15}  {probe.power_mode}")
    lines += [f"busy     {job}" for job in probe.jobs]
    works = not missing and any(state.works for state in probe.targets.values())
    return works, [*lines, f"{device.name} {'is ready' if works else 'cannot run anything yet'}"]


def _mend(device: Device, probe: Probe, target: str) -> str:
    """The pip line of a target's runtime, with the version that this system still takes."""
    package = TARGETS[target].package
    if package not in RUNTIMES:
        return f"{_pip(device, package)}, where the device's own system does not bring it"
    python, glibc, machine = probe.host.get("python", ""), probe.glibc, probe.host.get("machine", "")
    version = newest(package, pair(python), pair(glibc), machine)
    system = f"Python {python}, glibc {glibc or 'unknown'} and {machine}"
    if version is None:
        return f"no version of {package} is known to run with {system}: a newer system there, or a container with one"
    return f"{_pip(device, package)}  (the newest for {system} is {version})"


def _pip(device: Device, packages: str) -> str:
    return f"{shell(device)} -m pip install {packages}"

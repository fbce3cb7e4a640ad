"""A probe's result for a person: what works on a device, and what to install if something does not."""

from __future__ import annotations

from vitdeploy.backends import TARGETS
from vitdeploy.devices.advice import Advice, Seen, advice_lines, advise
from vitdeploy.devices.agent.documents import Probe
from vitdeploy.devices.jetpack import described, environment_line, jetpack, too_old
from vitdeploy.devices.registry import Device
from vitdeploy.devices.transport import shell
from vitdeploy.devices.wheels import RUNTIMES, newest, pair
from vitdeploy.runtime.host import name_host
from vitdeploy.runtime.weight_bits import int8_instructions

BASE = ("numpy", "pillow")


def diagnose(device: Device, probe: Probe) -> tuple[bool, list[str], list[Advice]]:
    """Whether any target works there, the lines of the doctor, and what it has to say of the machine."""
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


def _mend(seen: Seen, probe: Probe, target: str) -> str:
    """What brings a target's runtime there, with the version that this system still takes."""
    if target not in TARGETS:
        return "this vitdeploy does not know the target"
    package = TARGETS[target].package
    if package == "tensorrt" and seen.jetson:
        line = seen.on(environment_line(seen.board))
        return too_old(seen.board) or f"{line}, then: {_use_environment(seen.device)}"
    known = jetpack(seen.board)
    if package == "onnxruntime-gpu" and known is not None and known.index:
        return _pip(seen, f"{package} --index-url {known.index}")
    if package not in RUNTIMES:
        return f"{_pip(seen, package)}, where the device's own system does not bring it"
    python, glibc, machine = probe.host.get("python", ""), probe.glibc, probe.host.get("machine", "")
    version = newest(package, pair(python), pair(glibc), machine)
    system = f"Python {python}, glibc {glibc or 'unknown'} and {machine}"
    if version is None:
        return f"no version of {package} is known to run with {system}: a newer system there, or a container with one"
    return f"{_pip(seen, package)}  (the newest for {system} is {version})"


def _pip(seen: Seen, packages: str) -> str:
    """The line that installs packages; in an environment of its own where the system does not let pip install."""
    if not seen.board.managed:
        return f"{shell(seen.device)} -m pip install {packages}"
    needed = " ".join(dict.fromkeys([*BASE, *packages.split()]))
    first = "" if seen.board.venv else "sudo apt-get install -y python3-venv && "
    line = f"{first}{seen.device.python} -m venv ~/venv && ~/venv/bin/python -m pip install {needed}"
    return f"{seen.on(line)}, then: {_use_environment(seen.device)}"


def _use_environment(device: Device) -> str:
    if device.host is None:
        return "install vitdeploy into ~/venv and run it from there"
    return f"vitdeploy devices add {device.name} {device.address} --python ~/venv/bin/python"

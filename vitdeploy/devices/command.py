"""`vitdeploy devices add|list|remove|doctor|deploy|status|rollback`, and output for several devices."""

# Annotations of options are evaluated: no future import.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.api.option import Options, option, required
from vitdeploy.api.options import DURATION, FIRST_ENGINE, ON, TRUST, Pinned
from vitdeploy.api.values import Line, require_pinned
from vitdeploy.cli.options import Console, command_line, command_of
from vitdeploy.devices import registry
from vitdeploy.devices.advice import diagnose
from vitdeploy.errors import HostError, UnknownDeviceError, VitdeployError
from vitdeploy.extensions import wing
from vitdeploy.spec import encode

if TYPE_CHECKING:
    from vitdeploy.devices.on_devices import DeviceOutcome

NAMES = "Device names or labels."
AS_ASKED = "The engine that the app loads, by target or name."


@click.group("devices", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Manage boards and other machines for --on of `bench`, `verify` and `compile`, and deploy bundles to them.

    vitdeploy connects with your ssh, its keys, configuration and known hosts. On a device it writes
    `~/.cache/vitdeploy-agent/` and, for deployments, `~/.local/share/vitdeploy/deployed/`. A device needs Python 3.10
    with numpy, Pillow and one runtime.
    """


@dataclass(frozen=True)
class DeployOptions(Options):
    bundle: Path = field(metadata=required(place="one", complete="models"))
    on: str = field(metadata=required(ON, help=NAMES))
    stages: str = option(
        "1,10%,all",
        "Stages: the number of devices with the release after each.",
        flag="--canary",
        metavar="N|N%|all,...",
    )
    name: str | None = option(None, "Name of the deployment (default: the name of the bundle).")
    target: str = option("auto", FIRST_ENGINE, help=AS_ASKED)
    worse: float = option(10.0, "Percent by which p99 may exceed that of the current release.", min=0, max=1000)
    duration: float = option(10.0, DURATION, help="Seconds to measure each release, before and after the switch.")
    trust: Path | None = option(None, TRUST)


@command_of(DeployOptions, Pinned, name="deploy", parent=command)
def deploy(console: Console, options: DeployOptions, pinned: Pinned) -> None:
    """Deploy a BUNDLE to devices in stages, and stop at the first failure.

    Each device of a stage checks the digests of all files and the golden answers, and measures p99 against the current
    release. Then it moves the link `current` atomically, and repeats the checks through the link. After a failure, all
    devices of the stage return to their old release, no further device is changed, and the exit code is 5. Devices that
    are off are listed; run the same command again to serve them.

    On the device, apps load ~/.local/share/vitdeploy/deployed/NAME/current.

    \b
    Example:
      vitdeploy devices deploy out/digits --on pi
    """
    require_pinned(pinned.expect_digest, [options.bundle])
    _finish(console, wing("devices.api").roll_out(options, console))


@dataclass(frozen=True)
class _RollBack(Options):
    name: str = field(metadata=required(place="one"))
    on: str = field(metadata=required(ON, help=NAMES))
    target: str = option("auto", FIRST_ENGINE, help=AS_ASKED)


@command_of(_RollBack, name="rollback", parent=command)
def rollback(console: Console, options: _RollBack) -> None:
    """Return devices to the previous release of the deployment NAME.

    The devices still have it, so nothing is sent. It must still give its golden answers.

    \b
    Example:
      vitdeploy devices rollback digits --on pi
    """
    _finish(console, wing("devices.api").roll_back(options.name, options.on, options.target, console))


def _finish(console: Console, found: Any) -> None:
    console.finish(found.document, found.lines(), None, command_line("vitdeploy", "devices", "status"))
    for error in found.errors:
        click.echo(str(error), err=True)
    if found.error is not None:
        click.get_current_context().exit(found.error.exit_code)


@dataclass(frozen=True)
class _Status(Options):
    name: str | None = option(None, "", place="optional")
    on: str | None = option(None, ON, help="Device names or labels (default: all devices).")


@command_of(_Status, name="status", parent=command)
def status(console: Console, options: _Status) -> None:
    """Show the releases of all deployments, or of NAME, on the devices.

    For devices that are off, the last known state is shown.

    \b
    Example:
      vitdeploy devices status
    """
    found = wing("devices.api").standing(options.name, options.on, console)
    console.finish(found.document, found.lines(), None)


@dataclass(frozen=True)
class _Add(Options):
    name: str = field(metadata=required(place="one"))
    address: str = field(metadata=required(place="one", metavar="ssh://[USER@]HOST[:PORT]"))
    python: str = option("python3", "Python on the device, such as ~/venv/bin/python.")
    labels: Sequence[str] = option((), "Label that several devices may share; repeatable.", flag="--label")
    ssh_config: Path | None = option(None, "ssh configuration instead of ~/.ssh/config, as `ssh -F`.", metavar="FILE")


@command_of(_Add, name="add", parent=command)
def add(console: Console, options: _Add) -> None:
    """Register a device under NAME, or change it. This does not contact the device.

    \b
    Example:
      vitdeploy devices add pi ssh://me@10.0.0.7 --python '~/venv/bin/python'
    """
    name = options.name
    device = registry.new_device(name, options.address, options.python, tuple(options.labels), options.ssh_config)
    known = registry.read_devices()
    registry.write_devices({**known, name: device})
    verb = "changed" if name in known else "added"
    lines = [f"{verb} {name}: {device.address}, {options.python}, in {registry.registry_file()}"]
    console.finish(
        {"device": encode(device), "changed": name in known},
        lines,
        None,
        command_line("vitdeploy", "devices", "doctor", name),
    )


@command_of(Options, name="list", parent=command)
def list_devices(console: Console, options: Options) -> None:
    """List the registered devices, and local.

    \b
    Example:
      vitdeploy devices list
    """
    devices = [registry.this_machine(), *registry.read_devices().values()]
    wide = max(len(device.name) for device in devices) + 2
    far = max(len(device.address) for device in devices) + 2
    lines = [
        f"{device.name:<{wide}}{device.address:<{far}}{device.python}  {' '.join(device.labels)}".rstrip()
        for device in devices
    ]
    console.finish({"devices": [encode(device) for device in devices]}, lines, None)


@dataclass(frozen=True)
class _Remove(Options):
    name: str = field(metadata=required(place="one", complete="known devices"))


@command_of(_Remove, name="remove", parent=command)
def remove(console: Console, options: _Remove) -> None:
    """Unregister a device. Files on the device, in ~/.cache/vitdeploy-agent, are kept.

    \b
    Example:
      vitdeploy devices remove pi
    """
    known, name = registry.read_devices(), options.name
    if name not in known:
        there = ", ".join(known) or "no device is registered"
        raise UnknownDeviceError(f"unknown device {name!r}", expected=there, fix="vitdeploy devices list")
    registry.write_devices({other: device for other, device in known.items() if other != name})
    console.finish({"removed": name}, [f"removed {name}"], None)


@dataclass(frozen=True)
class _Doctor(Options):
    name: str = field(metadata=required(place="one", complete="devices"))


@command_of(_Doctor, name="doctor", parent=command)
def doctor(console: Console, options: _Doctor) -> None:
    """Check a device: its hardware, system and working targets. The exit code is 4 if no target works.

    \b
    Example:
      vitdeploy devices doctor pi
    """
    from vitdeploy.devices.client import Client

    devices = registry.find_devices(options.name)
    if len(devices) > 1:
        several = " or ".join(device.name for device in devices)
        raise UnknownDeviceError(f"several devices have the label {options.name}", expected=several)
    (device,) = devices
    with console:
        console.progress(f"checking {device.name}", 0, 1)
        probe = Client(device, tell=console.progress).probe()
    works, lines, advice = diagnose(device, probe)
    document = {"device": encode(device), "works": works, **encode(probe), "advice": encode(advice)}
    console.finish(document, lines, None)
    if not works:
        click.get_current_context().exit(HostError.exit_code)


def finish_devices(
    console: Console,
    outcomes: "Sequence[DeviceOutcome[Any]]",
    document_of: Callable[[Any], dict[str, Any]],
    lines_of: Callable[[Any], Sequence[Line]],
    unmet: Callable[[Any], VitdeployError | None] = lambda found: None,
    together: tuple[dict[str, Any], Sequence[Line]] = ({}, ()),
) -> None:
    """Print the outcome of each device, and exit with the worst error, if any. `unmet`: returns the error of a result
    that misses a gate. `together`: a document and lines on all devices."""
    from vitdeploy.devices.on_devices import worst

    documents: list[dict[str, Any]] = []
    lines: list[Line] = []
    for outcome in outcomes:
        name = outcome.device.name
        if outcome.error is not None:
            documents.append({"device": name, "error": outcome.error.to_dict()})
            continue
        documents.append({"device": name, **document_of(outcome.found)})
        lines += [f"on {name}:" if len(outcomes) > 1 else "", *lines_of(outcome.found)]
    lines += together[1]
    console.finish({"devices": documents, **together[0]}, [line for line in lines if line], None)
    failures = (each.error or unmet(each.found) for each in outcomes)
    errors = [error for error in failures if error is not None]
    for error in errors:
        click.echo(str(error), err=True)
    if errors:
        click.get_current_context().exit(worst(errors).exit_code)

"""`vitdeploy devices add|list|remove|doctor|deploy|status|rollback`, and what is printed of many devices."""

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

NAMES = "Names, labels."
AS_ASKED = "Which engine, by target or name, as the app there asks for it."


@click.group("devices", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Manage boards and other machines that `bench`, `verify` and `compile` use with --on, and deploy bundles there.

    Your own ssh reaches them, with its keys, configuration and known hosts. One folder is written there,
    `~/.cache/vitdeploy-agent/`, and one for deployments, `~/.local/share/vitdeploy/deployed/`. They need Python 3.10
    with numpy, Pillow and one runtime.
    """


@dataclass(frozen=True)
class DeployOptions(Options):
    bundle: Path = field(metadata=required(place="one", complete="models"))
    on: str = field(metadata=required(ON, help=NAMES))
    stages: str = option(
        "1,10%,all",
        "The stages: how many devices have it once each is over.",
        flag="--canary",
        metavar="N|N%|all,...",
    )
    name: str | None = option(None, "What the deployment is called there; by default as the bundle.")
    target: str = option("auto", FIRST_ENGINE, help=AS_ASKED)
    worse: float = option(10.0, "Percent by which p99 may be above that of the current release.", min=0, max=1000)
    duration: float = option(
        10.0, DURATION, help="Seconds that each release is measured for, before and after the switch."
    )
    trust: Path | None = option(None, TRUST)


@command_of(DeployOptions, Pinned, name="deploy", parent=command)
def deploy(console: Console, options: DeployOptions, pinned: Pinned) -> None:
    """Bring a BUNDLE to devices in stages, and stop where it fails.

    On each device of a stage its files are checked by their digests, its golden answers compared, and its p99 measured
    against that of the current release. Only then the link `current` is moved, in one step, and the same is done again
    through it. Where anything fails, the device has its old release back, so have the others of its stage, no further
    device is touched, and the exit code is 5. A device that is off is told; the same command serves it later.

    Apps load ~/.local/share/vitdeploy/deployed/NAME/current there.

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
    """Let devices run the release of the deployment NAME again that they ran before.

    It is kept there, so nothing is sent; it must still give its golden answers.

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
    on: str | None = option(None, ON, help="Names, labels; by default all devices.")


@command_of(_Status, name="status", parent=command)
def status(console: Console, options: _Status) -> None:
    """What runs where: the releases of all deployments, or of NAME, as the devices say now.

    Of devices that are off, the last that was known is shown.

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
    python: str = option("python3", "The Python to use there, as ~/venv/bin/python.")
    labels: Sequence[str] = option((), "A further name, which several devices may have; repeatable.", flag="--label")
    ssh_config: Path | None = option(None, "Instead of ~/.ssh/config, as `ssh -F`.", metavar="FILE")


@command_of(_Add, name="add", parent=command)
def add(console: Console, options: _Add) -> None:
    """Name a device, or change what NAME stands for. Nothing is sent yet.

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
    """The devices that were added, and local.

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
    """Forget a device. What was copied there stays, in ~/.cache/vitdeploy-agent.

    \b
    Example:
      vitdeploy devices remove pi
    """
    known, name = registry.read_devices(), options.name
    if name not in known:
        there = ", ".join(known) or "none was added"
        raise UnknownDeviceError(f"no device is called {name!r}", expected=there, fix="vitdeploy devices list")
    registry.write_devices({other: device for other, device in known.items() if other != name})
    console.finish({"removed": name}, [f"removed {name}"], None)


@dataclass(frozen=True)
class _Doctor(Options):
    name: str = field(metadata=required(place="one", complete="devices"))


@command_of(_Doctor, name="doctor", parent=command)
def doctor(console: Console, options: _Doctor) -> None:
    """What a device is and what works there; exit code 4 where nothing does.

    \b
    Example:
      vitdeploy devices doctor pi
    """
    from vitdeploy.devices.client import Client

    devices = registry.find_devices(options.name)
    if len(devices) > 1:
        several = " or ".join(device.name for device in devices)
        raise UnknownDeviceError(f"{options.name} is the label of several devices", expected=several)
    (device,) = devices
    with console:
        console.progress(f"ask {device.name}", 0, 1)
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
    """Print what came of each device, its errors too, and leave with the worst of these, if there is one; `unmet` says
    of what was found whether a gate is not met. `together`: what is said of all of them."""
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
    told = (each.error or unmet(each.found) for each in outcomes)
    errors = [error for error in told if error is not None]
    for error in errors:
        click.echo(str(error), err=True)
    if errors:
        click.get_current_context().exit(worst(errors).exit_code)

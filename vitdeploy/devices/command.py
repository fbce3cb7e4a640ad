"""Commands about devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from vitdeploy.api.values import Line, require_pinned
from vitdeploy.cli.complete import complete_devices, complete_models, complete_targets
from vitdeploy.cli.options import Console, Number, command_line, expect_option, output_options, trust_option
from vitdeploy.devices.advice import diagnose
from vitdeploy.devices.registry import (
    LOCAL,
    find_devices,
    new_device,
    read_devices,
    registry_file,
    this_machine,
    write_devices,
)
from vitdeploy.errors import HostError, UnknownDeviceError, VitdeployError
from vitdeploy.spec import encode

if TYPE_CHECKING:
    from vitdeploy.devices.on_devices import DeviceOutcome
    from vitdeploy.devices.rollout import RollOut


# --- `vitdeploy devices deploy|status|rollback`: a bundle on many devices ---------------------------------------------


target_option = click.option(
    "--target",
    shell_complete=complete_targets,
    default="auto",
    show_default=True,
    help="Which engine, by target or name, as the app there asks for it.",
)


@click.command("deploy")
@click.argument("bundle", type=click.Path(path_type=Path), shell_complete=complete_models)
@click.option("--on", required=True, shell_complete=complete_devices, metavar="DEVICE[,DEVICE]", help="Names, labels.")
@click.option(
    "--canary",
    "stages",
    default="1,10%,all",
    show_default=True,
    metavar="N|N%|all,...",
    help="The stages: how many devices have it once each is over.",
)
@click.option("--name", help="What the deployment is called there; by default as the bundle.")
@target_option
@click.option(
    "--worse",
    type=Number(min=0, max=1000),
    default=10.0,
    show_default=True,
    help="Percent by which p99 may be above that of the current release.",
)
@click.option(
    "--duration",
    type=Number(min=0, min_open=True, max=3600),
    default=10.0,
    show_default=True,
    help="Seconds that each release is measured for, before and after the switch.",
)
@trust_option
@expect_option
@output_options
def deploy(
    console: Console,
    bundle: Path,
    on: str,
    stages: str,
    name: str | None,
    target: str,
    worse: float,
    duration: float,
    trust: Path | None,
    expect_digest: str | None,
) -> None:
    """Bring a BUNDLE to devices in stages, and stop where it fails.

    On each device of a stage its files are checked by their digests, its golden answers compared, and its p99 measured
    against that of the current release. Only then the link `current` is moved, in one step, and the same is done again
    through it. Where anything fails, the device has its old release back, so have the others of its stage, no further
    device is touched, and the exit code is 5. A device that is off is told; the same command serves it later.

    Apps load ~/.local/share/vitdeploy/deployed/NAME/current there.
    """
    from vitdeploy.devices.api import roll_out

    require_pinned(expect_digest, [bundle])
    how = {"name": name, "stages": stages, "target": target, "worse": worse, "duration": duration, "trust": trust}
    found = roll_out(bundle, on, **how, progress=console)  # type: ignore[arg-type]
    _finish(console, found)


@click.command("rollback")
@click.argument("name")
@click.option("--on", required=True, shell_complete=complete_devices, metavar="DEVICE[,DEVICE]", help="Names, labels.")
@target_option
@output_options
def rollback(console: Console, name: str, on: str, target: str) -> None:
    """Let devices run the release of the deployment NAME again that they ran before.

    It is kept there, so nothing is sent; it must still give its golden answers.
    """
    from vitdeploy.devices.api import roll_back

    _finish(console, roll_back(name, on, target=target, progress=console))


def _finish(console: Console, found: RollOut) -> None:
    console.finish(found.document, found.lines(), None, command_line("vitdeploy", "devices", "status"))
    for error in found.errors:
        click.echo(str(error), err=True)
    if found.error is not None:
        click.get_current_context().exit(found.error.exit_code)


@click.command("status")
@click.argument("name", required=False)
@click.option(
    "--on", shell_complete=complete_devices, metavar="DEVICE[,DEVICE]", help="Names, labels; by default all devices."
)
@output_options
def status(console: Console, name: str | None, on: str | None) -> None:
    """What runs where: the releases of all deployments, or of NAME, as the devices say now.

    Of devices that are off, the last that was known is shown.
    """
    from vitdeploy.devices.api import standing

    found = standing(name, on, progress=console)
    console.finish(found.document, found.lines(), None)


# --- `vitdeploy devices add|list|remove|doctor|deploy|status|rollback`: the machines that `--on` runs on --------------


@click.group("devices", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Manage boards and other machines that `bench`, `verify` and `compile` use with --on, and deploy bundles there.

    Your own ssh reaches them, with its keys, configuration and known hosts. One folder is written there,
    `~/.cache/vitdeploy-agent/`, and one for deployments, `~/.local/share/vitdeploy/deployed/`. They need Python 3.10
    with numpy, Pillow and one runtime.
    """


for each in (deploy, status, rollback):
    command.add_command(each)


@command.command("add")
@click.argument("name")
@click.argument("address", metavar="ssh://[USER@]HOST[:PORT]")
@click.option("--python", default="python3", show_default=True, help="The Python to use there, as ~/venv/bin/python.")
@click.option("--label", "labels", multiple=True, help="A further name, which several devices may have; repeatable.")
@click.option(
    "--ssh-config", type=click.Path(path_type=Path), metavar="FILE", help="Instead of ~/.ssh/config, as `ssh -F`."
)
@output_options
def add(
    console: Console, name: str, address: str, python: str, labels: tuple[str, ...], ssh_config: Path | None
) -> None:
    """Name a device, or change what NAME stands for. Nothing is sent yet."""
    device = new_device(name, address, python, labels, ssh_config)
    known = read_devices()
    write_devices({**known, name: device})
    verb = "changed" if name in known else "added"
    lines = [f"{verb} {name}: {device.address}, {python}, in {registry_file()}"]
    console.finish(
        {"device": encode(device), "changed": name in known},
        lines,
        None,
        command_line("vitdeploy", "devices", "doctor", name),
    )


@command.command("list")
@output_options
def list_devices(console: Console) -> None:
    """The devices that were added, and local."""
    devices = [this_machine(), *read_devices().values()]
    wide = max(len(device.name) for device in devices) + 2
    far = max(len(device.address) for device in devices) + 2
    lines = [
        f"{device.name:<{wide}}{device.address:<{far}}{device.python}  {' '.join(device.labels)}".rstrip()
        for device in devices
    ]
    console.finish({"devices": [encode(device) for device in devices]}, lines, None)


def complete_known_devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Like `complete_devices`, without this machine."""
    return [each for each in complete_devices(ctx, param, incomplete) if each.value != LOCAL]


@command.command("remove")
@click.argument("name", shell_complete=complete_known_devices)
@output_options
def remove(console: Console, name: str) -> None:
    """Forget a device. What was copied there stays, in ~/.cache/vitdeploy-agent."""
    known = read_devices()
    if name not in known:
        there = ", ".join(known) or "none was added"
        raise UnknownDeviceError(f"no device is called {name!r}", wanted=there, fix="vitdeploy devices list")
    write_devices({other: device for other, device in known.items() if other != name})
    console.finish({"removed": name}, [f"removed {name}"], None)


@command.command("doctor")
@click.argument("name", shell_complete=complete_devices)
@output_options
def doctor(console: Console, name: str) -> None:
    """What a device is and what works there; exit code 4 where nothing does."""
    from vitdeploy.devices.client import Client

    devices = find_devices(name)
    if len(devices) > 1:
        raise UnknownDeviceError(f"{name} is the label of several devices", wanted=" or ".join(d.name for d in devices))
    (device,) = devices
    with console:
        console.progress(f"ask {device.name}", 0, 1)
        probe = Client(device, tell=console.progress).probe()
    works, lines, advice = diagnose(device, probe)
    document = {"device": encode(device), "works": works, **encode(probe), "advice": encode(advice)}
    console.finish(document, lines, None)
    if not works:
        click.get_current_context().exit(HostError.exit_code)


# --- What `--on DEVICE[,DEVICE]` of bench and verify prints of many devices -------------------------------------------


def finish_devices(
    console: Console,
    outcomes: Sequence[DeviceOutcome[Any]],
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

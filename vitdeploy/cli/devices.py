"""`vitdeploy devices add|list|remove|doctor|deploy|status|rollback`: the machines that `--on` runs on."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.complete import complete_devices, complete_known_devices
from vitdeploy.cli.console import Console, command_line, output_options
from vitdeploy.cli.fleet import deploy, rollback, status


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
    from vitdeploy.devices.registry import new_device, read_devices, registry_file, write_devices
    from vitdeploy.spec import encode

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
    from vitdeploy.devices.registry import read_devices, this_machine
    from vitdeploy.spec import encode

    devices = [this_machine(), *read_devices().values()]
    wide = max(len(device.name) for device in devices) + 2
    far = max(len(device.address) for device in devices) + 2
    lines = [
        f"{device.name:<{wide}}{device.address:<{far}}{device.python}  {' '.join(device.labels)}".rstrip()
        for device in devices
    ]
    console.finish({"devices": [encode(device) for device in devices]}, lines, None)


@command.command("remove")
@click.argument("name", shell_complete=complete_known_devices)
@output_options
def remove(console: Console, name: str) -> None:
    """Forget a device. What was copied there stays, in ~/.cache/vitdeploy-agent."""
    from vitdeploy.devices.registry import read_devices, write_devices
    from vitdeploy.errors import UnknownDeviceError

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
    from vitdeploy.devices.doctor import diagnose
    from vitdeploy.devices.registry import find_devices
    from vitdeploy.errors import HostError, UnknownDeviceError
    from vitdeploy.spec import encode

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

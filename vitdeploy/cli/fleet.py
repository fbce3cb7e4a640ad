"""`vitdeploy devices deploy|status|rollback`: a bundle on many devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitdeploy.cli.complete import complete_devices, complete_models, complete_targets
from vitdeploy.cli.console import Console, Number, command_line, output_options
from vitdeploy.cli.options import expect_option, trust_option

if TYPE_CHECKING:
    from vitdeploy.api.fleet import Deployed

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
    from vitdeploy.api.fleet import roll_out
    from vitdeploy.api.pinned import require_pinned

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
    from vitdeploy.api.fleet import roll_back

    _finish(console, roll_back(name, on, target=target, progress=console))


def _finish(console: Console, found: Deployed) -> None:
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
    from vitdeploy.api.fleet import standing

    found = standing(name, on, progress=console)
    console.finish(found.document, found.lines(), None)

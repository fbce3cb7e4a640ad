"""`vitdeploy doctor`: what is installed here, which targets work, and what to install for the others.

`vitdeploy doctor --target T` says of one target on a GPU, piece by piece, what is here and what is missing.
"""

from __future__ import annotations

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.options import Console, output_options


@click.command("doctor")
@click.option(
    "--target",
    shell_complete=complete_targets,
    help="Everything that this one target needs; exit code 4 where it does not work here.",
)
@output_options
def command(console: Console, target: str | None) -> None:
    """Show what is installed here and which targets work."""
    from vitdeploy.api.inspect import diagnose, diagnose_target
    from vitdeploy.errors import HostError

    document, lines = diagnose() if target is None else diagnose_target(target)
    console.finish(document, lines, None)
    if target is not None and not document["works"]:
        click.get_current_context().exit(HostError.exit_code)

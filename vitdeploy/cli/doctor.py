"""`vitdeploy doctor`: what is installed here, which targets work, and what to install for the others.

`vitdeploy doctor --target T` says of one target on a GPU, piece by piece, what is here and what is missing.
"""

# Annotations of options are evaluated: no future import.

from dataclasses import dataclass

import click

from vitdeploy.api.options import Options, option
from vitdeploy.cli.options import Console, api, command_of
from vitdeploy.errors import HostError


@dataclass(frozen=True)
class Doctor(Options):
    target: str | None = option(
        None, "Everything that this one target needs; exit code 4 where it does not work here.", complete="targets"
    )


@command_of(Doctor)
def command(console: Console, options: Doctor) -> None:
    """Show what is installed here and which targets work."""
    module, target = api("inspect"), options.target
    document, lines = module.diagnose() if target is None else module.diagnose_target(target)
    console.finish(document, lines, None)
    if target is not None and not document["works"]:
        click.get_current_context().exit(HostError.exit_code)

"""The options of commands that load the engines of a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.complete import complete_targets

engine_option = click.option(
    "--target",
    shell_complete=complete_targets,
    default="auto",
    show_default=True,
    help="Which engine, by target or name; auto takes the first that works here.",
)

# A bundle may be somebody else's.
trust_option = click.option(
    "--trust",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take bundles only if signed by this public key or certificate (PEM), as `vitdeploy bundle sign` does.",
)

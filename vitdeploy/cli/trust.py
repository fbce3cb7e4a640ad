"""The option of every command that loads the engines of a bundle that somebody else may have made."""

from __future__ import annotations

from pathlib import Path

import click

trust_option = click.option(
    "--trust",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take bundles only if signed by this public key or certificate (PEM), as `vitdeploy bundle sign` does.",
)

"""`vitdeploy versions BUNDLE --runtime 'openvino==2025.2..2026.4'`: answers and times on a series of releases."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.options import Console, Number, output_options


@click.command("versions")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--runtime",
    required=True,
    metavar="RELEASES",
    help="openvino==2025.2..2026.4, or a requirement such as 'onnxruntime>=1.20,<1.32'.",
)
@click.option("--rebuild", is_flag=True, help="Compile the engine's graph with each release. Default: load the engine.")
@click.option(
    "--duration",
    type=Number(min=0, min_open=True, max=3600),
    default=3.0,
    show_default=True,
    help="Seconds in which each release is measured.",
)
@output_options
def command(console: Console, bundle: Path, runtime: str, rebuild: bool, duration: float) -> None:
    """Run a bundle on a series of a runtime's releases, and show where its answers or its times change.

    Each release is installed with pip into an environment of its own, in the user's cache folder, where the next call
    finds it. There every engine of the bundle answers the golden inputs, and one that answers right is measured beside
    the same engine on the release that the bundle was made with. Releases that do not install here are named. The exit
    code is 0 whatever the engines answer.
    """
    from vitdeploy.runtime_releases.api import versions

    found = versions(bundle, runtime, rebuild=rebuild, duration=duration, progress=console)
    console.finish(found.document, found.lines(), None)

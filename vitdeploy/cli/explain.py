"""`vitdeploy explain BUNDLE IMAGE -o out.png`: attention maps over an image."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.options import Console, output_options
from vitdeploy.paths import is_file


@click.command("explain")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("image", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The .png file to write.")
@output_options
def command(console: Console, bundle: Path, image: Path, output: Path) -> None:
    """Show where a model looks: attention maps over an image.

    For a ViT: every head of the last attention, their mean, and attention rollout over all blocks. For a DETR: the
    decoder's last cross-attention, for the best three objects. The maps come from the bundle's float graph on ONNX
    Runtime; shipped engines do not have them.
    """
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.errors import MissingFileError

    read_bundle(bundle)  # and the image, before what reads graphs is imported
    if not is_file(image):
        raise MissingFileError(f"no image at {image}", fix="check the path")

    from vitdeploy.workflows.explain import explain

    with console:
        console.progress("attention maps", 0, 1)
        facts = explain(bundle, image, output)
        console.progress("attention maps", 1, 1)
    rows, columns = facts.grid
    lines = [
        f"{facts.read}: {rows}x{columns} patches after {facts.prefix_tokens} other tokens, "
        f"{facts.heads} heads, {facts.blocks} attentions"
    ]
    console.finish(facts, lines, output)

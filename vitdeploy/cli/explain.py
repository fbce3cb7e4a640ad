"""`vitdeploy explain BUNDLE IMAGE -o out.png`: attention maps over an image."""

# Annotations of options are evaluated: no future import.

from dataclasses import dataclass, field
from pathlib import Path

from vitdeploy.api.options import OUTPUT, Options, required
from vitdeploy.cli.options import Console, command_of
from vitdeploy.errors import MissingFileError
from vitdeploy.paths import is_file


@dataclass(frozen=True)
class Explain(Options):
    bundle: Path = field(metadata=required(place="one"))
    image: Path = field(metadata=required(place="one"))
    folder: Path = field(metadata=required(OUTPUT, help="The .png file to write."))


@command_of(Explain)
def command(console: Console, options: Explain) -> None:
    """Show where a model looks: attention maps over an image.

    For a ViT: every head of the last attention, their mean, and attention rollout over all blocks. For a DETR: the
    decoder's last cross-attention, for the best three objects. The maps come from the bundle's float graph on ONNX
    Runtime; shipped engines do not have them.
    """
    from vitdeploy.bundle.read import read_bundle

    read_bundle(options.bundle)  # and the image, before what reads graphs is imported
    if not is_file(options.image):
        raise MissingFileError(f"no image at {options.image}", fix="check the path")

    from vitdeploy.workflows.explain import explain

    with console:
        console.progress("attention maps", 0, 1)
        facts = explain(options.bundle, options.image, options.folder)
        console.progress("attention maps", 1, 1)
    rows, columns = facts.grid
    lines = [
        f"{facts.read}: {rows}x{columns} patches after {facts.prefix_tokens} other tokens, "
        f"{facts.heads} heads, {facts.blocks} attentions"
    ]
    console.finish(facts, lines, options.folder)

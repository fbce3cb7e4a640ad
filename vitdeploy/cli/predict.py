"""`vitdeploy predict BUNDLE IMAGE...`: answers for images."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitdeploy.api.predict import Input, Point, predict
from vitdeploy.cli.inputs import find_inputs
from vitdeploy.cli.options import Console, engine_option, expect_option, output_options, trust_option
from vitdeploy.errors import InputError

if TYPE_CHECKING:
    from vitdeploy.runtime.topdown import Box


@click.command("predict")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1, required=True, type=click.Path(allow_dash=True))
@engine_option
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="How many classes to show.")
@click.option("--text", "texts", multiple=True, help="Compare the images with this text; as often as needed.")
@click.option("--beams", type=int, help="Beams of a search for texts; 1: the likeliest token at each step.")
@click.option("--prompt", help="What a text begins with, such as the task of a Donut.")
@click.option(
    "--box",
    "boxes",
    multiple=True,
    metavar="L,T,R,B",
    help="Key points of what is in this box of each image (pixels), or the mask of the object in it.",
)
@click.option(
    "--point",
    "points",
    multiple=True,
    metavar="X,Y[,0|1]",
    help="The mask of the object at this point (pixels); 0: it is not part of the object. All points mean one object.",
)
@click.option(
    "--draw",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write a picture of each answer there: boxes, segments, classes, depth or masks.",
)
@expect_option
@trust_option
@output_options
def command(
    console: Console,
    bundle: Path,
    inputs: tuple[str, ...],
    target: str,
    top: int,
    texts: tuple[str, ...],
    boxes: tuple[str, ...],
    points: tuple[str, ...],
    beams: int | None,
    prompt: str | None,
    draw: Path | None,
    expect_digest: str | None,
    trust: Path | None,
) -> None:
    """Run a bundle on images, or on the token arrays of .npz files.

    INPUTS are files, folders (every image below them), quoted patterns such as 'shots/**/*.png', and - for an image on
    standard input. JPEG, PNG, WebP, BMP, TIFF, GIF and PPM are read, and the first of several frames. Inputs that
    cannot be read are named, the others are answered, and the exit code is 2.

    A bundle of two towers, such as CLIP's, says which --text fits best; without any, the texts are its labels. One of
    promptable segmentation, such as SAM's, needs --point or --box. One that reads writing, such as TrOCR's, searches
    with --beams as transformers' generate does; without, as its own files say.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = predict(
            bundle,
            lambda tokens: find_inputs(inputs, console.note, tokens=tokens),
            target,
            top=top,
            texts=texts,
            boxes=[_box(text) for text in boxes],
            points=[_point(text) for text in points],
            beams=beams,
            prompt=prompt,
            trust=trust,
            expect_digest=expect_digest,
            draw=draw,
            reporter=console,
        )
    answered, failed = found.answered, found.failed
    if failed and len(found.found) == 1:
        raise failed[0][1]
    warned = list(dict.fromkeys(str(each.message) for each in heard))
    lines = [f"{given.name}{line}" for given, _, texts in answered for line in texts]
    lines += [_failure(given, error) for given, error in failed]
    if failed:
        lines.append(f"{len(answered)} of {len(found.found)} inputs are answered")
    document = {
        "engine": found.engine,
        "why": found.why,
        "predictions": [prediction for _, predictions, _ in answered for prediction in predictions],
        "errors": [{"input": given.name, **error.to_dict()} for given, error in failed],
        "warnings": warned,
    }
    console.finish(document, [*lines, *(f"warning: {text}" for text in warned)], None)
    if failed:
        click.get_current_context().exit(InputError.exit_code)


def _box(text: str) -> Box:
    try:
        left, top, right, bottom = (float(side) for side in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not left,top,right,bottom in pixels", param_hint="--box") from None
    return left, top, right, bottom


def _point(text: str) -> Point:
    parts = text.split(",")
    try:
        x, y = float(parts[0]), float(parts[1])
        inside = {"": True, "1": True, "0": False}[",".join(parts[2:]).strip()]
    except (ValueError, IndexError, KeyError):
        raise click.BadParameter(f"{text!r} is not x,y or x,y,0 or x,y,1", param_hint="--point") from None
    return Point(x, y, inside)


def _failure(given: Input, error: InputError) -> str:
    """One line: several inputs may be wrong."""
    found = f" ({error.found})" if error.found else ""
    message = error.message if given.name in error.message else f"{given.name}: {error.message}"
    return f"{error.code}  {message}{found}"

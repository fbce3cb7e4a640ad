"""`vitdeploy predict BUNDLE IMAGE...`: answers for images: files, folders, patterns and standard input."""

# Annotations of options are evaluated: no future import.

import glob
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from vitdeploy.api.predict import Input, Predict
from vitdeploy.api.predict import predict as answers_of
from vitdeploy.cli.options import Console, command_of
from vitdeploy.data.folder import other_files, scan
from vitdeploy.errors import DataError, InputError
from vitdeploy.paths import exists, is_dir
from vitdeploy.runtime.preprocess import SUFFIXES


@command_of(Predict)
def predict(console: Console, options: Predict) -> None:
    """Run a bundle on images, or on the token arrays of .npz files.

    INPUTS are files, folders (every image below them), quoted patterns such as 'shots/**/*.png', and - for an image on
    standard input. JPEG, PNG, WebP, BMP, TIFF, GIF and PPM are read; of several frames, only the first. If some inputs
    are unreadable, they are listed, the others are answered, and the exit code is 2.

    Image-text models such as CLIP find the best --text (default: the bundle's labels). Promptable segmentation such as
    SAM needs --point or --box. Embedding models search a --gallery. Text readers such as TrOCR search with --beams,
    like transformers' generate (default: the settings of the model's own files).

    \b
    Example:
      vitdeploy predict out/digits calibration/digits/evaluation/7
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", RuntimeWarning)
        predicted = answers_of(
            options, lambda tokens: find_inputs(options.inputs, console.note, tokens=tokens), console
        )
    answered, failed = predicted.answered, predicted.failed
    count = len(answered) + len(failed)
    if failed and count == 1:
        raise failed[0][1]
    warned = list(dict.fromkeys(str(each.message) for each in heard))
    lines = [f"{given.name}{line}" for given, _, texts in answered for line in texts]
    lines += [_failure(given, error) for given, error in failed]
    if failed:
        lines.append(f"{len(answered)} of {count} inputs answered")
    document = {
        "engine": predicted.engine,
        "why": predicted.why,
        "predictions": [prediction for _, predictions, _ in answered for prediction in predictions],
        "errors": [{"input": given.name, **error.to_dict()} for given, error in failed],
        "warnings": warned,
    }
    console.finish(document, [*lines, *(f"warning: {text}" for text in warned)], None)
    if failed:
        click.get_current_context().exit(InputError.exit_code)


def _failure(given: Input, error: InputError) -> str:
    """One line: several inputs may be wrong."""
    found = f" ({error.found})" if error.found else ""
    message = error.message if given.name in error.message else f"{given.name}: {error.message}"
    return f"{error.code}  {message}{found}"


# --- The inputs named by the arguments, as one list -------------------------------------------------------------------


STDIN = "-"
TOKENS = {".npz"}


def find_inputs(texts: Iterable[str], note: Callable[[str], None], *, tokens: bool = False) -> list[Input]:
    """Return all inputs named by the arguments, in order; those of a folder or pattern are sorted. A pattern without a
    match is an input that cannot be read.

    Args:
        note: called with a line on skipped files of a folder.
        tokens: take .npz files instead of images.

    Raises:
        DataError: a folder holds no usable input.
    """
    return [each for text in texts for each in _inputs(text, note, tokens)]


def _inputs(text: str, note: Callable[[str], None], tokens: bool) -> Iterator[Input]:
    path = Path(text)
    if text == STDIN:
        if tokens:
            raise click.UsageError("standard input takes only an image; pass the path of the .npz file")
        yield Input(text, _standard_input())
    elif is_dir(path):
        yield from _in_folder(path, note, tokens)
    elif not exists(path) and (matches := sorted(glob.glob(text, recursive=True))):  # noqa: PTH207 - may be absolute
        files = [match for match in matches if not Path(match).is_dir()]
        yield from (Input(match) for match in files)
        for folder in matches if not files else []:  # the pattern matches only folders, as a shell would expand it
            yield from _in_folder(Path(folder), note, tokens)
    else:
        yield Input(text)


def _in_folder(folder: Path, note: Callable[[str], None], tokens: bool) -> Iterator[Input]:
    """Every file below a folder with a readable suffix; the others are noted."""
    endings = TOKENS if tokens else SUFFIXES
    if tokens:
        paths = sorted(path for path in folder.rglob("*.npz") if path.is_file())
        if not paths:
            raise DataError(f"{folder} has no token files", found=other_files(folder), expected="files ending in .npz")
    else:
        paths = [sample.path for sample in scan(folder, "none")[0]]
    others = other_files(folder, endings)
    if others:
        note(f"{folder}: skipped {others}")
    yield from (Input(str(path)) for path in paths)


def _standard_input() -> bytes:
    from vitdeploy.runtime.preprocess import MAX_FILE_BYTES

    if sys.stdin.isatty():
        raise click.UsageError("- reads an image from standard input: vitdeploy predict BUNDLE - < IMAGE")
    return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)

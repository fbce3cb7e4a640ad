"""The inputs of `vitdeploy predict`: files, folders, patterns and standard input, as one list."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from vitdeploy.api.predict import Input
from vitdeploy.data.folder import other_files, scan
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import exists, is_dir
from vitdeploy.runtime.preprocess import SUFFIXES

STDIN = "-"
TOKENS = {".npz"}


def find_inputs(texts: Iterable[str], note: Callable[[str], None], *, tokens: bool = False) -> list[Input]:
    """All inputs that the arguments name, in their order; those of a folder or pattern are sorted.

    Args:
        note: called with the files of a folder that are left out.
        tokens: take .npz files instead of images.

    Raises:
        MissingFileError: nothing matches a pattern.
        DataError: a folder holds no usable input.
    """
    return [each for text in texts for each in _inputs(text, note, tokens)]


def _inputs(text: str, note: Callable[[str], None], tokens: bool) -> Iterator[Input]:
    path = Path(text)
    if text == STDIN:
        if tokens:
            raise click.UsageError("standard input is for an image; name the .npz file")
        yield Input(text, _standard_input())
    elif is_dir(path):
        yield from _in_folder(path, note, tokens)
    elif not exists(path) and any(character in text for character in "*?["):
        matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - a pattern may be absolute
        if not matches:
            raise MissingFileError(
                f"nothing matches {text!r}", wanted="files or folders", fix="check the pattern: ls with it shows them"
            )
        files = [match for match in matches if not Path(match).is_dir()]
        yield from (Input(match) for match in files)
        for folder in matches if not files else []:  # of a pattern for folders, as a shell would give them
            yield from _in_folder(Path(folder), note, tokens)
    else:
        yield Input(text)


def _in_folder(folder: Path, note: Callable[[str], None], tokens: bool) -> Iterator[Input]:
    """Every file below a folder that ends as one that can be read; the others are named."""
    endings = TOKENS if tokens else SUFFIXES
    if tokens:
        paths = sorted(path for path in folder.rglob("*.npz") if path.is_file())
        if not paths:
            raise DataError(f"{folder} holds no token files", found=other_files(folder), wanted="files ending in .npz")
    else:
        paths = [sample.path for sample in scan(folder, "none")[0]]
    others = other_files(folder, endings)
    if others:
        note(f"{folder}: left out {others}")
    yield from (Input(str(path)) for path in paths)


def _standard_input() -> bytes:
    from vitdeploy.runtime.preprocess import MAX_FILE_BYTES

    if sys.stdin.isatty():
        raise click.UsageError("- reads an image from standard input: vitdeploy predict BUNDLE - < IMAGE")
    return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)

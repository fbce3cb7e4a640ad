"""Texts of images: a JSON file that lists, for each image, its `file_name` and the `text` that is written in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitdeploy.data.annotations import AnnotatedSet, folder_images, located, other_names
from vitdeploy.data.folder import Sample
from vitdeploy.data.label_file import Repairs
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import is_file, name_bytes

EXAMPLE = '[{"file_name": "line.png", "text": "what is written in it"}, ...]'


@dataclass(frozen=True)
class WrittenText:
    """What is written in one image."""

    text: str

    def content(self) -> bytes:
        """Bytes that differ where two texts differ."""
        return name_bytes(self.text)


TextSet = AnnotatedSet[WrittenText]


def read_written(images: Path, file: Path) -> TextSet:
    """The images below `images` whose text the file says, by their path below that folder, or by file name where that
    is unique.

    Raises:
        MissingFileError: no such folder or file.
        DataError: no list of file names and texts; an image that stands there twice; none of the folder's images.
    """
    paths, repairs = folder_images(images), Repairs()
    entries = _entries(file, repairs)
    named: dict[Path, str] = {}
    for name, path in located(images, paths, [*entries], repairs).items():
        if named.setdefault(path, entries[name]) != entries[name]:
            raise DataError(f"{file} says two texts of one image", found=str(path), wanted="one row an image")
    if not named:
        raise other_names(images, file, paths, [*entries])
    found = {path: WrittenText(named[path]) for path in sorted(named)}
    samples = tuple(Sample(path, None) for path in found)
    return AnnotatedSet(images, samples, found, (), len(set(paths.values())) - len(found), repairs.notes)


def _entries(file: Path, repairs: Repairs) -> dict[str, str]:
    """The texts by file name."""
    if not is_file(file):
        raise MissingFileError(f"no file of texts at {file}", wanted=EXAMPLE, fix="check the path of --annotations")
    try:
        document: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise DataError(f"{file} is not a JSON file", found=str(error)[:200], wanted=EXAMPLE) from None
    rows = document if isinstance(document, list) else [document]
    wrong = next((row for row in rows if not _is_entry(row)), None)
    if wrong is not None or not rows:
        found = "an empty list" if not rows else repr(wrong)[:80]
        raise DataError(f"{file} is no list of images and their texts", found=found, wanted=EXAMPLE)
    texts: dict[str, str] = {}
    for row in rows:
        name = row["file_name"]
        if texts.setdefault(name, row["text"]) != row["text"]:
            raise DataError(f"{file} says two texts of one image", found=name, wanted="one row an image")
    if len(texts) < len(rows):
        repairs.add("repeated rows, counted once", rows[-1]["file_name"], len(rows) - len(texts))
    return texts


def _is_entry(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("file_name", "text"))

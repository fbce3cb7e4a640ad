"""Detects the kind of data at a path: tars, tables, a list of URIs, or image files in folders."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.data.containers import tables, tars, uris
from vitdeploy.data.containers.listing import ARROW, PARQUET, Listing
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import is_dir, is_file

KNOWN = (tars.SUFFIX, PARQUET, ARROW, *uris.SUFFIXES)
EXPECTED = (
    "a folder of images, of WebDataset tars or of Parquet files, one of these files, a data set saved with "
    "save_to_disk of Hugging Face's datasets, or a list of URIs (.txt, .csv, .tsv, .jsonl)"
)
# Files that Hugging Face's datasets reads next to image files.
METADATA = "metadata.parquet"
PATTERN = re.compile(r"[*?\[]")
# How `datasets` numbers the files of one part.
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
PART_WORDS = frozenset(
    {"train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval", "calibration", "evaluation"}
)


@dataclass(frozen=True)
class DataFiles:
    """Files of one kind that contain images, sorted. `root`: the folder that image names are relative to. `beside`: the
    images are files there, labelled by a list next to them."""

    files: tuple[Path, ...]
    root: Path
    beside: bool = False

    def listed(self, labelled: bool) -> Listing:
        """Return their images; `labelled`: with labels. Errors as `list_tars`, `list_tables` and `list_uris`."""
        kind = self.files[0].suffix.lower()
        if kind in uris.SUFFIXES:
            return uris.list_uris(self.files[0], self.root, labelled)
        listing = tars.list_tars if kind == tars.SUFFIX else tables.list_tables
        return listing(self.files, self.root, labelled)

    @property
    def has_labels(self) -> bool:
        """Whether the first image has a label; errors as `listed`."""
        first, kind = self.files[0], self.files[0].suffix.lower()
        if kind in uris.SUFFIXES:
            return uris.has_labels(first)
        return tars.has_labels(first) if kind == tars.SUFFIX else tables.has_labels(first)


def find_containers(path: Path, images: frozenset[str] | set[str]) -> DataFiles | None:
    """Return the files at a path that contain images, or the list next to them; None for a folder of image files, or if
    nothing is there.

    Args:
        path: a file, a folder, or a pattern for files such as val-*.tar.
        images: the suffixes of image files.

    Raises:
        MissingFileError: nothing matches a pattern.
        DataError: a compressed tar; files of several kinds, or of several parts of a data set; a missing file.
    """
    if is_file(path):
        _check_kind(path)
        return DataFiles((path,), path.parent)
    if not is_dir(path):
        _refuse_uri(path)
        return _by_pattern(path) if PATTERN.search(path.name) else None
    if is_file(path / tables.PARTS_FILE):
        parts = sorted(each.name for each in path.iterdir() if is_dir(each))
        raise _parts(path, parts, path / next((part for part in parts if part != "train"), "PART"))
    if is_file(path / tables.STATE):
        return DataFiles(_saved(path), path)
    files = _below(path, images)
    if not files:
        listed = uris.beside(path)
        return None if listed is None else DataFiles((listed,), path, beside=True)
    _check_parts(path, files)
    _check_all_there(files)
    return DataFiles(tuple(files), path)


def root_of(path: Path) -> Path:
    """Return the folder that the image names at a path are relative to."""
    return path if is_dir(path) else path.parent


def _check_kind(path: Path) -> None:
    if path.name.lower().endswith(tars.COMPRESSED_SUFFIXES):
        raise tars.compressed(path)
    if path.suffix.lower() not in KNOWN:
        raise DataError(
            f"{path} is not a data set", found=f"a file that ends in {path.suffix or 'nothing'}", expected=EXPECTED
        )


def _refuse_uri(path: Path) -> None:
    scheme = re.match(r"([a-z][a-z0-9+]+):/", str(path))
    if scheme is not None:
        raise DataError(
            f"cannot read images from a folder at {scheme[1]}://",
            found="a URI instead of a path",
            expected="a local file that lists image URIs, one per line",
            fix="write the list with the service's tool (aws s3 ls, gcloud storage ls), and pass that file",
        )


def _by_pattern(path: Path) -> DataFiles:
    files = sorted(each for each in path.parent.glob(path.name) if is_file(each))
    if not files:
        raise MissingFileError(f"no file matches {path}", expected="files", fix="check the pattern with ls")
    for file in files:
        _check_kind(file)
    _check_one_kind(path, files)
    return DataFiles(tuple(files), path.parent)


def _below(folder: Path, images: frozenset[str] | set[str]) -> list[Path]:
    """Return the tars or tables below a folder, in the order of their names. None if the first recognised file, in the
    order of names, is an image.

    Raises:
        DataError: both kinds, or mixed with images.
    """
    found: list[Path] = []
    packed: Path | None = None
    for file in _files(folder):
        suffix = file.suffix.lower()
        if suffix in images:
            if not found:
                return []
            raise _mixed(folder, found[0], file)
        if suffix in (tars.SUFFIX, PARQUET) and file.name != METADATA:
            found.append(file)
        elif file.name.lower().endswith(tars.COMPRESSED_SUFFIXES):
            packed = packed or file
    if packed is not None:
        raise tars.compressed(packed)
    _check_one_kind(folder, found)
    return sorted(found)


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder that are not hidden, each folder's own files first."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))


def _check_one_kind(path: Path, files: Sequence[Path]) -> None:
    other = next((file for file in files if file.suffix.lower() != files[0].suffix.lower()), None)
    if other is not None or (files and files[0].suffix.lower() in uris.SUFFIXES and len(files) > 1):
        raise _mixed(path, files[0], other or files[1])


def _mixed(path: Path, one: Path, other: Path) -> DataError:
    return DataError(
        f"{path} contains several data sets",
        found=f"{one.name} and {other.name}",
        expected="only images, only tars or only Parquet files",
        fix="pass one file, a pattern such as val-*.tar, or a separate folder",
    )


def _check_parts(path: Path, files: Sequence[Path]) -> None:
    """Raise DataError if the file names belong to several parts of a data set."""
    by_part: dict[frozenset[str], Path] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(path)).lower())
        by_part.setdefault(PART_WORDS & frozenset(words), file)
    if len(by_part) > 1:
        others = (each for words, each in by_part.items() if words and not words & {"train", "training"})
        chosen = next(others, files[0])
        pattern = re.sub(r"\d+", "*", chosen.name, count=1)
        raise _parts(path, [" ".join(sorted(words)) or "neither" for words in by_part], chosen.with_name(pattern))


def _parts(path: Path, names: Sequence[str], example: Path) -> DataError:
    return DataError(
        f"{path} contains several parts of a data set",
        found=", ".join(names)[:200],
        expected="one part; or two folders `calibration` and `evaluation`",
        fix=f"pass one: {example}",
    )


def _check_all_there(files: Sequence[Path]) -> None:
    """Raise DataError if files are numbered "of N" and one of the N is missing."""
    there: dict[tuple[Path, str, int], set[int]] = {}
    for file in files:
        if match := NUMBERED.fullmatch(file.stem):
            there.setdefault((file.parent, match[1], int(match[3])), set()).add(int(match[2]))
    for (folder, name, count), numbers in there.items():
        missing = sorted(set(range(count)) - numbers)
        if missing:
            raise DataError(
                f"{folder} is missing files of the data set",
                found=f"{len(numbers)} of {count} files; missing: {name}-{missing[0]:05}-of-{count:05}",
                expected="all files",
                fix="fetch the missing files; or pass a pattern for the files to use",
            )


def _saved(folder: Path) -> tuple[Path, ...]:
    """Return the files of a data set that `datasets` saved to disk, in its order."""
    state = folder / tables.STATE
    try:
        listed = [each["filename"] for each in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        listed = []
    plain = [name for name in listed if isinstance(name, str) and re.fullmatch(r"[\w.-]+\.arrow", name)]
    missing = [name for name in plain if not is_file(folder / name)]
    if not plain or len(plain) != len(listed) or missing:
        raise DataError(
            f"{folder} is not a complete data set of Hugging Face's datasets",
            found=f"{missing[0]} is missing" if missing else f"{state.name} names no data files",
            expected="a folder written by save_to_disk",
            fix="save it again",
        )
    return tuple(folder / name for name in plain)

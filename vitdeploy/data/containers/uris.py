"""A list of images by URI or local path, in a text file, a delimited table or JSON lines; the images are read in place
through fsspec."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from vitdeploy.data.containers import listing
from vitdeploy.data.containers.held import Container, FilePart, HeldImage, too_large
from vitdeploy.data.label_file import Repairs, read_text
from vitdeploy.errors import DataError, ImageError, StorageError
from vitdeploy.limits import bounded
from vitdeploy.paths import is_dir, is_file
from vitdeploy.publish import storage_errors
from vitdeploy.remote import Remote, shown_uri
from vitdeploy.runtime.preprocess import MAX_FILE_BYTES, Pixels, load_image
from vitdeploy.runtime.preprocess import SUFFIXES as IMAGES
from vitdeploy.runtime.topdown import Box
from vitdeploy.spec import PreprocessSpec

if TYPE_CHECKING:
    import fsspec

SUFFIXES = (".txt", ".csv", ".tsv", ".jsonl")
# Such a list next to image files has their labels: Hugging Face's datasets writes the first, Roboflow the last.
BESIDE = tuple(
    f"{stem}{suffix}" for stem in ("metadata", "labels", "_classes") for suffix in (".csv", ".tsv", ".jsonl")
)
Size = tuple[int, int]
KIND = "data set"
# A million long URIs.
MAX_BYTES = 1 << 30
# As `LABEL_COLUMNS`.
URI_COLUMNS = (
    *("uri", "url", "path", "image", "file", "filename", "filepath", "imagepath", "imgpath", "imagefile", "imagename"),
    *("img", "imageurl", "imageuri", "images", "files", "paths", "filenames", "fname", "name", "imageid", "id"),
)
SEPARATORS = {".csv": ",;\t|", ".tsv": "\t,;|", ".txt": "\t,;|"}
NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
IMAGE = re.compile(f".*(?:{'|'.join(map(re.escape, sorted(IMAGES)))})", re.IGNORECASE)
# A label after an image name, without a tab.
BEHIND = re.compile(rf"({IMAGE.pattern})(?:\s*[,;|]\s*|\s+)(\S.*)", re.IGNORECASE)
JSON_LINE = 'one object per line, such as {"file_name": "a.png", "label": "cat"}'
# Attempts for an interrupted read, and the wait in seconds before the second one; it doubles each time.
ATTEMPTS, WAIT_SECONDS = 3, 0.25


@dataclass(frozen=True)
class Uri(HeldImage):
    """An image at a URI, opened by fsspec."""

    address: str

    def read(self, name: str) -> bytes:
        service = _service(self.address)
        for attempt in range(ATTEMPTS):
            try:
                found = service.ask(lambda files, at: _content(files, at, name), done="read")
                break
            except StorageError:
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(WAIT_SECONDS * 2**attempt)
        return found

    @property
    def uri(self) -> str:
        return self.address


@lru_cache(1024)
def _service(address: str) -> Remote:
    return Remote(address, KIND, DataError)


def _content(files: fsspec.AbstractFileSystem, at: str, name: str) -> bytes:
    """Return all bytes at a path, if they do not exceed the limit of an image."""
    try:
        if "http" in files.protocol or "https" in files.protocol:
            return _streamed(files, at, name)
        size = files.size(at)
        if size is not None and size > MAX_FILE_BYTES:
            raise too_large(name, size)
        return bytes(files.cat_file(at))
    except (FileNotFoundError, IsADirectoryError):
        raise ImageError(
            f"{name} does not exist",
            found="no file at this address",
            expected="an image",
            fix="correct the list, or remove the line",
        ) from None


def _streamed(files: fsspec.AbstractFileSystem, at: str, name: str) -> bytes:
    """As `_content`, for a server whose reported size is not trusted."""
    parts, total = [], 0
    # Given a size, fsspec does not request it first, which it would report as a missing file on any failure.
    with files.open(at, "rb", block_size=0, size=1) as file:
        while part := file.read(1 << 20):
            parts.append(part)
            total += len(part)
            if total > MAX_FILE_BYTES:
                raise too_large(name, total)
    return b"".join(parts)


def mark_of(address: str) -> tuple[int, str] | None:
    """Return the size in bytes at a URI (-1: unknown), and a text that changes with the content: an entity tag, a
    digest, or a time. None if the service provides none of these."""
    try:
        info = _service(address).ask(lambda files, at: dict(files.info(at)))
    except (StorageError, DataError):
        return None
    known = {str(key).lower(): value for key, value in info.items()}
    size = known.get("size")
    tag = _first(known, "etag", "generation", "md5hash", "content-md5", "crc32c")
    if tag is not None and not str(tag).startswith("W/"):  # weak: shared by equivalent but different contents
        return (size if isinstance(size, int) else -1), str(tag)
    changed = _first(known, "mtime", "lastmodified", "last_modified", "updated")
    return (size, str(changed)) if isinstance(size, int) and changed is not None else None


def _first(known: dict[str, Any], *keys: str) -> object:
    return next((known[key] for key in keys if known.get(key)), None)


class UriHolder:
    """The URI of each image: its name, except if that would reveal a secret, or is a local path."""

    def __init__(self, hidden: dict[int, str]) -> None:
        self._hidden = hidden

    def at(self, index: int, name: str) -> Uri | None:
        address = self._hidden.get(index, name)
        return Uri(address) if is_uri(address) else None

    def picked(self, places: npt.NDArray[np.int64]) -> UriHolder:
        there = {int(place): index for index, place in enumerate(places)} if self._hidden else {}
        return UriHolder({there[place]: uri for place, uri in self._hidden.items() if place in there})


def read_written(document: Any) -> HeldImage | None:
    """Return the location from the result of `HeldImage.written`; None for None."""
    if document is None:
        return None
    kind, *facts = document
    made: dict[str, Any] = {each.__name__: each for each in (FilePart, listing.TableRow, Uri)}
    held: HeldImage = made[kind](*(Container(*fact) if isinstance(fact, list) else fact for fact in facts))
    return held


def load_held(
    path: Path, held: HeldImage | None, spec: PreprocessSpec, box: Box | None, name: str
) -> tuple[Pixels, Size]:
    """As `load_image`, for the file at `path`, or for an image `held` elsewhere and named `name`; errors of both."""
    return load_image(path, spec, box) if held is None else load_image(held.read(name), spec, box, name)


def is_uri(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", text) is not None


def list_uris(path: Path, root: Path, labelled: bool) -> listing.Listing:
    """Return the images that a file lists, in its order: one URI or path per line, followed by an optional label: as
    columns, with or without a header; in a .txt file after a tab. Repeated lines count once.

    Args:
        root: the folder of the file, which local paths are relative to. labelled: each line must have a label.

    Raises:
        DataError: not UTF-8; an invalid line; a header with unknown columns; an image with two labels.
        LimitError: the file is too large.
    """
    with storage_errors(path), bounded(f"read {path.name}", path.stat().st_size):
        names, labels, hidden = _read(path, labelled, None)
        keys = (
            hidden[i].encode("utf-8", "surrogateescape") if i in hidden else names.encoded(i) for i in range(len(names))
        )
        if listing.first_repeated(keys) is not None:
            names, labels, hidden = _read(path, labelled, {})
    return listing.Listing(root, names, *labels.finish(lambda: listing.listed_names(root)), UriHolder(hidden))


def _read(
    path: Path, labelled: bool, seen: dict[str, str | None] | None
) -> tuple[listing.NameColumn, listing.LabelColumn, dict[int, str]]:
    """Return the names, the labels, and the addresses that differ from names. With `seen`, repeated lines are dropped.

    Raises:
        DataError: as `list_uris`.
    """
    names, labels, hidden = listing.NameColumn(), listing.LabelColumn(path), dict[int, str]()
    for line, address, label in _lines(path, labels.repairs, labelled):
        if labelled and not label:
            raise _unlabelled(path, line)
        name, real = _named(address, line, path, labels.repairs)
        if seen is not None and real in seen:
            if seen[real] != label:
                raise DataError(
                    f"{path} lists an image twice with different labels",
                    found=f"{name}: {seen[real]} and {label}",
                    expected="one label per image",
                    fix="remove one line",
                )
            labels.repairs.add("repeated lines, counted once", f"line {line}")
            continue
        if seen is not None:
            seen[real] = label
        if labelled and label:
            labels.add(listing.read_label(label), f"line {line}")
        if name != real:
            hidden[len(names)] = real
        names.add(name)
    return names, labels, hidden


def has_labels(path: Path) -> bool:
    """Whether an image of a list has a label; errors as `list_uris`."""
    with storage_errors(path):
        return any(label for _, _, label in _lines(path, Repairs(), labelled=True))


def beside(folder: Path) -> Path | None:
    """Return the list in a folder of image files that has their labels."""
    for path in (folder / name for name in BESIDE):
        if is_file(path):
            with storage_errors(path):
                rows = _Table.of(path, Repairs()).rows()
                header, cells = (next(rows, (0, list[str]()))[1] for _ in range(2))
            image, label = (listing.column_of(header, names) for names in (URI_COLUMNS, listing.LABEL_COLUMNS))
            if image is None:
                continue
            # Unknown columns next to an image column are an error, not ignored, except if folders are classes: captions
            # and the like do not matter then.
            unclear = len(header) > 1 and image < len(cells) and _is_image(cells[image])
            if label is not None or (unclear and not any(is_dir(entry) for entry in folder.iterdir())):
                return path
    return None


def _named(address: str, line: int, path: Path, repairs: Repairs) -> tuple[str, str]:
    """Return the name of an image, and its URI or path. The part after a question mark may be secret, and may be all
    that distinguishes two images: the name has the line number instead."""
    if address.startswith("file://"):
        local = unquote(urlsplit(address).path)
        return local, local
    if not is_uri(address):
        plain = address.replace("\\", "/") if not is_file(path.parent / address) else address
        plain = re.sub(r"^(\./+)+", "", plain)
        if plain != address:
            repairs.add("names with ./ or backslashes", address)
        return plain, plain
    name = shown_uri(address)
    return (name if len(re.split(r"[?#]", address)) == 1 else f"{name}#line-{line}"), address


@dataclass(frozen=True)
class _Table:
    """The text of a list. `separator`: between columns; None for plain lines and JSON lines."""

    path: Path
    text: str
    separator: str | None
    repairs: Repairs

    @classmethod
    def of(cls, path: Path, repairs: Repairs) -> _Table:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{path} is too large for a list",
                found=f"{path.stat().st_size:,} bytes",
                expected=f"at most {MAX_BYTES:,}",
            )
        text, suffix = read_text(path), path.suffix.lower()
        first = next((line for line in io.StringIO(text) if line.strip() and not line.startswith("#")), "")
        separator = _separator(first, suffix) if suffix in SEPARATORS else None
        if separator is not None and separator != SEPARATORS[suffix][0]:
            repairs.add(f"{NAMES[separator]} between columns", path.name)
        return cls(path, text, separator, repairs)

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the cells of each non-empty line; for JSON, the keys first."""
        if self.path.suffix.lower() == ".jsonl":
            yield from self._json_rows()
        elif self.separator is None:
            yield from self._plain_rows()
        else:
            yield from self._csv_rows(self.separator)

    def _csv_rows(self, separator: str) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(io.StringIO(self.text, newline=""), strict=True, delimiter=separator)
        try:
            for cells in reader:
                row = [cell.strip() for cell in cells]
                if any(row):
                    yield reader.line_num, row
        except csv.Error as error:
            message = f"line {reader.line_num} of {self.path} is not valid CSV"
            raise DataError(message, found=str(error), expected="a URI and a label") from None

    def _plain_rows(self) -> Iterator[tuple[int, list[str]]]:
        for line, row in enumerate(io.StringIO(self.text), 1):
            if not row.strip() or row.startswith("#"):
                continue
            cells = [cell.strip() for cell in row.rstrip("\n").split("\t")]
            match = BEHIND.fullmatch(cells[0])
            if len(cells) == 1 and match is not None and not _is_image(cells[0]):
                self.repairs.add("labels after a space or a comma instead of a tab", f"line {line}")
                cells = [match[1], match[2]]
            yield line, cells

    def _json_rows(self) -> Iterator[tuple[int, list[str]]]:
        keys: list[str] | None = None
        for line, row in enumerate(io.StringIO(self.text), 1):
            if not row.strip():
                continue
            try:
                document = json.loads(row)
            except (ValueError, RecursionError):
                document = None
            if not isinstance(document, dict):
                raise DataError(f"line {line} of {self.path} is not a JSON object", found=row[:80], expected=JSON_LINE)
            if keys is None:
                keys = [*document]
                yield 0, keys
            yield line, ["" if document.get(key) is None else str(document[key]) for key in keys]

    def unknown(self, row: Sequence[str], what: str, names: Sequence[str], fix: str) -> DataError:
        between = "" if self.separator is None else f", separated by {NAMES[self.separator]}"
        return DataError(
            f"no column of {self.path} is recognised as {what}",
            found=f"columns {', '.join(map(repr, row))}"[:200] + between,
            expected=f"one of {', '.join(names[:8])}",
            fix=fix,
        )


def _lines(path: Path, repairs: Repairs, labelled: bool) -> Iterator[tuple[int, str, str | None]]:
    """Yield the line, address and label of each image; None without a label."""
    table = _Table.of(path, repairs)
    order: tuple[int, ...] | None = None
    width = 0
    for line, cells in table.rows():
        if order is None:
            width, order = len(cells), _header(table, cells, labelled)
            if order:
                continue
            if len(cells) == 2 and _is_image(cells[1]) and not _is_image(cells[0]):
                order = (1, 0)
        row = cells
        if order:
            row = cells + [""] * (width - len(cells))
            if any(row[width:]):
                raise DataError(
                    f"line {line} of {path} has more columns than the first line",
                    found=f"{len(cells)}: {str(cells)[:100]}",
                    expected=f"{width}",
                    fix='quote cells that contain the separator: "tench, Tinca tinca"',
                )
            row = [row[i] for i in order]
        if not 1 <= len(row) <= 2 or not row[0] or any(ord(each) < 32 for each in row[0]):
            raise DataError(
                f"line {line} of {path} does not name an image",
                found=str(row)[:120],
                expected="a URI or a path, and optionally a label, "
                + ("separated by a tab" if path.suffix.lower() == ".txt" else "as columns"),
                fix="correct the line",
            )
        yield line, row[0], (row[1] or None) if len(row) == 2 else None


def _header(table: _Table, row: list[str], labelled: bool) -> tuple[int, ...]:
    """Return the indices of the image and label columns; () if the first line is not a header.

    Raises:
        DataError: a header in which one of them is not recognised.
    """
    image, label = listing.column_of(row, URI_COLUMNS), listing.column_of(row, listing.LABEL_COLUMNS)
    if image is None or any(map(_is_image, row)):
        later = next((cells for _, cells in itertools.islice(table.rows(), 1, 2)), [])
        if not any(map(_is_image, row)) and any(map(_is_image, later)):
            raise table.unknown(row, "the image column", URI_COLUMNS, "rename the image column to path")
        return ()
    others = [name for i, name in enumerate(row) if name and i not in (image, label)]
    if not labelled or (label is None and not others):
        return (image,)
    if label is None:
        fix = f"rename the label column to label; or {listing.NO_LABELS}"
        raise table.unknown(row, "the label column", listing.LABEL_COLUMNS, fix)
    if others:
        table.repairs.add(f"columns other than {row[image]!r} and {row[label]!r}, ignored", others[0], len(others))
    return image, label


def _separator(first: str, suffix: str) -> str | None:
    """Return the column separator of a table, from its first line; None for plain lines of text."""
    there = [separator for separator in SEPARATORS[suffix] if separator in first]
    cells = {separator: [cell.strip().strip('"') for cell in first.split(separator)] for separator in there}
    header = next(
        (separator for separator in there if listing.column_of(cells[separator], URI_COLUMNS) is not None), None
    )
    if header is not None or suffix == ".txt":
        return header
    shown = [separator for separator in there if any(map(_is_image, cells[separator]))]
    return (shown or there or SEPARATORS[suffix])[0]


def _is_image(cell: str) -> bool:
    return is_uri(cell) or IMAGE.fullmatch(cell) is not None


def _unlabelled(path: Path, line: int) -> DataError:
    return DataError(
        f"line {line} of {path} has no label",
        found="only a URI",
        expected="a label on every line",
        fix=f"add a label to the line; or {listing.NO_LABELS}",
    )

"""A list of images by URI, local path or both, in a text file, a table as text or lines of JSON, read through fsspec
where they are."""

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
# Such a list beside image files has their labels: Hugging Face's datasets writes the first, Roboflow the last.
BESIDE = tuple(
    f"{stem}{suffix}" for stem in ("metadata", "labels", "_classes") for suffix in (".csv", ".tsv", ".jsonl")
)
Size = tuple[int, int]
KIND, EXTRA = "data set", "datasets"
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
# A label behind the name of an image, without a tab.
BEHIND = re.compile(rf"({IMAGE.pattern})(?:\s*[,;|]\s*|\s+)(\S.*)", re.IGNORECASE)
JSON_LINE = 'an object a line, such as {"file_name": "a.png", "label": "cat"}'
# A read that broke off is tried again so often, after so many seconds, and twice as many.
ATTEMPTS, WAIT_SECONDS = 3, 0.25


@dataclass(frozen=True)
class Uri(HeldImage):
    """What fsspec opens at a URI."""

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
    return Remote(address, KIND, EXTRA, DataError)


def _content(files: fsspec.AbstractFileSystem, at: str, name: str) -> bytes:
    """All bytes at a path, if they are no more than an image may have."""
    try:
        if "http" in files.protocol or "https" in files.protocol:
            return _streamed(files, at, name)
        size = files.size(at)
        if size is not None and size > MAX_FILE_BYTES:
            raise too_large(name, size)
        return bytes(files.cat_file(at))
    except (FileNotFoundError, IsADirectoryError):
        raise ImageError(
            f"{name} is not there",
            found="nothing at this address",
            expected="an image",
            fix="mend the list, or take the line out of it",
        ) from None


def _streamed(files: fsspec.AbstractFileSystem, at: str, name: str) -> bytes:
    """As `_content`, of a server whose word on the size is not taken."""
    parts, total = [], 0
    # With a size, fsspec does not ask for one first: whatever that meets, it takes for a file that is not there.
    with files.open(at, "rb", block_size=0, size=1) as file:
        while part := file.read(1 << 20):
            parts.append(part)
            total += len(part)
            if total > MAX_FILE_BYTES:
                raise too_large(name, total)
    return b"".join(parts)


def mark_of(address: str) -> tuple[int, str] | None:
    """The size in bytes of what is at a URI (-1: not known), and what is another text when it is another content: an
    entity tag, a digest, or a time. None where the service says nothing of the kind, or nothing at all."""
    try:
        info = _service(address).ask(lambda files, at: dict(files.info(at)))
    except (StorageError, DataError):
        return None
    known = {str(key).lower(): value for key, value in info.items()}
    size = known.get("size")
    tag = _first(known, "etag", "generation", "md5hash", "content-md5", "crc32c")
    if tag is not None and not str(tag).startswith("W/"):  # weak: of another content that means the same
        return (size if isinstance(size, int) else -1), str(tag)
    changed = _first(known, "mtime", "lastmodified", "last_modified", "updated")
    return (size, str(changed)) if isinstance(size, int) and changed is not None else None


def _first(known: dict[str, Any], *keys: str) -> object:
    return next((known[key] for key in keys if known.get(key)), None)


class UriHolder:
    """Of each image its URI, which is its name but where that would show a secret, or is a local path."""

    def __init__(self, hidden: dict[int, str]) -> None:
        self._hidden = hidden

    def at(self, index: int, name: str) -> Uri | None:
        address = self._hidden.get(index, name)
        return Uri(address) if is_uri(address) else None

    def picked(self, places: npt.NDArray[np.int64]) -> UriHolder:
        there = {int(place): index for index, place in enumerate(places)} if self._hidden else {}
        return UriHolder({there[place]: uri for place, uri in self._hidden.items() if place in there})


def read_written(document: Any) -> HeldImage | None:
    """What `HeldImage.written` gave; None of None."""
    if document is None:
        return None
    kind, *facts = document
    made: dict[str, Any] = {each.__name__: each for each in (FilePart, listing.TableRow, Uri)}
    held: HeldImage = made[kind](*(Container(*fact) if isinstance(fact, list) else fact for fact in facts))
    return held


def load_held(
    path: Path, held: HeldImage | None, spec: PreprocessSpec, box: Box | None, name: str
) -> tuple[Pixels, Size]:
    """As `load_image`, of the file at `path`, or of what is `held` elsewhere and called `name`; errors of both."""
    return load_image(path, spec, box) if held is None else load_image(held.read(name), spec, box, name)


def is_uri(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", text) is not None


def list_uris(path: Path, root: Path, labelled: bool) -> listing.Listing:
    """The images that a file names, in its order: a URI or a path a line, and behind it, if there is one, the label: as
    columns, with or without a header; in a .txt file behind a tab. A line that is there again counts once.

    Args:
        root: the folder of the file, which local paths are below.
        labelled: each line has to have a label.

    Raises:
        DataError: no UTF-8; a line of another form; a header of unknown columns; an image with two labels.
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
    """The names, the labels, and the addresses that are no names. With `seen`, what is there again is left out.

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
                    f"{path} names an image twice, with other labels",
                    found=f"{name}: {seen[real]} and {label}",
                    expected="one label for each image",
                    fix="take one line out",
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
    """The list in a folder of image files that has their labels."""
    for path in (folder / name for name in BESIDE):
        if is_file(path):
            with storage_errors(path):
                rows = _Table.of(path, Repairs()).rows()
                header, cells = (next(rows, (0, list[str]()))[1] for _ in range(2))
            image, label = (listing.column_of(header, names) for names in (URI_COLUMNS, listing.LABEL_COLUMNS))
            if image is None:
                continue
            # Columns of an image that are not understood are refused, not left out. Captions and the like are none of
            # its business where the folders are classes.
            unclear = len(header) > 1 and image < len(cells) and _is_image(cells[image])
            if label is not None or (unclear and not any(is_dir(entry) for entry in folder.iterdir())):
                return path
    return None


def _named(address: str, line: int, path: Path, repairs: Repairs) -> tuple[str, str]:
    """The name of an image, and its URI or path. What is after a question mark may be a secret and all that tells two
    images apart: the name has the number of the line instead."""
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
    """The text of a list. `separator`: what is between its columns; None of plain lines, and of lines of JSON."""

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
        """The cells of each line that has any; of JSON, that of the keys first."""
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
            told = f"line {reader.line_num} of {self.path} is no CSV"
            raise DataError(told, found=str(error), expected="a URI and a label") from None

    def _plain_rows(self) -> Iterator[tuple[int, list[str]]]:
        for line, row in enumerate(io.StringIO(self.text), 1):
            if not row.strip() or row.startswith("#"):
                continue
            cells = [cell.strip() for cell in row.rstrip("\n").split("\t")]
            match = BEHIND.fullmatch(cells[0])
            if len(cells) == 1 and match is not None and not _is_image(cells[0]):
                self.repairs.add("labels behind a space or a comma, where a tab is usual", f"line {line}")
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
                raise DataError(f"line {line} of {self.path} is no JSON object", found=row[:80], expected=JSON_LINE)
            if keys is None:
                keys = [*document]
                yield 0, keys
            yield line, ["" if document.get(key) is None else str(document[key]) for key in keys]

    def unknown(self, row: Sequence[str], what: str, names: Sequence[str], fix: str) -> DataError:
        between = "" if self.separator is None else f", separated by {NAMES[self.separator]}"
        return DataError(
            f"no column of {self.path} is known as that of {what}",
            found=f"columns {', '.join(map(repr, row))}"[:200] + between,
            expected=f"one of {', '.join(names[:8])}",
            fix=fix,
        )


def _lines(path: Path, repairs: Repairs, labelled: bool) -> Iterator[tuple[int, str, str | None]]:
    """Of each image its line, its address and its label, None where none is written."""
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
                    f"line {line} of {path} has more columns than its first line",
                    found=f"{len(cells)}: {str(cells)[:100]}",
                    expected=f"{width}",
                    fix='put what has the separator inside into quotes: "tench, Tinca tinca"',
                )
            row = [row[i] for i in order]
        if not 1 <= len(row) <= 2 or not row[0] or any(ord(each) < 32 for each in row[0]):
            raise DataError(
                f"line {line} of {path} names no image",
                found=str(row)[:120],
                expected="a URI or a path, and a label or none, "
                + ("with a tab between them" if path.suffix.lower() == ".txt" else "as columns"),
                fix="mend the line",
            )
        yield line, row[0], (row[1] or None) if len(row) == 2 else None


def _header(table: _Table, row: list[str], labelled: bool) -> tuple[int, ...]:
    """Which columns are those of images and labels; () of a first line that is no header.

    Raises:
        DataError: a header in which one of them is not known.
    """
    image, label = listing.column_of(row, URI_COLUMNS), listing.column_of(row, listing.LABEL_COLUMNS)
    if image is None or any(map(_is_image, row)):
        later = next((cells for _, cells in itertools.islice(table.rows(), 1, 2)), [])
        if not any(map(_is_image, row)) and any(map(_is_image, later)):
            raise table.unknown(row, "the images", URI_COLUMNS, "rename it")
        return ()
    others = [name for i, name in enumerate(row) if name and i not in (image, label)]
    if not labelled or (label is None and not others):
        return (image,)
    if label is None:
        raise table.unknown(row, "the labels", listing.LABEL_COLUMNS, f"rename it to label; or {listing.NO_LABELS}")
    if others:
        table.repairs.add(f"columns beside {row[image]!r} and {row[label]!r}, not read", others[0], len(others))
    return image, label


def _separator(first: str, suffix: str) -> str | None:
    """What is between the columns of a table, by its first line; None of plain lines of text."""
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
        found="a URI alone",
        expected="a label on each line",
        fix=f"write one behind it; or {listing.NO_LABELS}",
    )

"""A list of images by URI, local path or both, in a text file or a CSV file, read through fsspec where they are."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from vitdeploy.data.containers.held import Held, Written, too_large
from vitdeploy.data.containers.listing import NO_LABELS, Classes, LabelColumn, Listing, Names, listed_names, read_label
from vitdeploy.data.containers.repeated import first_repeated
from vitdeploy.data.label_file import read_text
from vitdeploy.errors import DataError, ImageError, StorageError
from vitdeploy.limits import bounded
from vitdeploy.publish import storage_errors
from vitdeploy.remote import Remote, shown_uri

if TYPE_CHECKING:
    import fsspec

SUFFIXES = (".txt", ".csv")
KIND, EXTRA = "data set", "datasets"
# A million long URIs.
MAX_BYTES = 1 << 30
URI_COLUMNS, LABEL_COLUMNS = ("uri", "url", "path", "image", "file"), ("label", "class", "cls")
# A read that broke off is tried again so often, after so many seconds, and twice as many.
ATTEMPTS, WAIT_SECONDS = 3, 0.25


@dataclass(frozen=True)
class Uri(Held):
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

    def written(self) -> Written:
        return ["uri", self.address]

    @property
    def uri(self) -> str:
        return self.address


@lru_cache(1024)
def _service(address: str) -> Remote:
    return Remote(address, KIND, EXTRA, DataError)


def _content(files: fsspec.AbstractFileSystem, at: str, name: str) -> bytes:
    """All bytes at a path, if they are no more than an image may have."""
    from vitdeploy.runtime.preprocess import MAX_FILE_BYTES

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
            wanted="an image",
            fix="mend the list, or take the line out of it",
        ) from None


def _streamed(files: fsspec.AbstractFileSystem, at: str, name: str) -> bytes:
    """As `_content`, of a server whose word on the size is not taken."""
    from vitdeploy.runtime.preprocess import MAX_FILE_BYTES

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


def is_uri(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", text) is not None


def list_uris(path: Path, root: Path, labelled: bool) -> Listing:
    """The images that a file names, in its order: a URI or a path a line, and behind it, if there is one, the label: in
    a .csv file as its second column, in a .txt file behind a tab.

    Args:
        root: the folder of the file, which local paths are below.
        labelled: each line has to have a label.

    Raises:
        DataError: no UTF-8; a line of another form; an image twice. LimitError: the file is too large.
    """
    names, labels, hidden = Names(), LabelColumn(path), {}
    with storage_errors(path), bounded(f"read {path.name}", path.stat().st_size):
        for line, address, label in _lines(path):
            if labelled:
                if not label:
                    raise _unlabelled(path, line)
                labels.add(read_label(label), f"line {line}")
            name, real = _named(address, line)
            if name != real:
                hidden[len(names)] = real
            names.add(name)
        ends = names.ends.tolist()
        keys = (
            hidden[i].encode("utf-8", "surrogateescape") if i in hidden else bytes(names.packed[ends[i] : ends[i + 1]])
            for i in range(len(names))
        )
        twice = first_repeated(keys)
    if twice is not None:
        found = bytes(names.packed[ends[twice] : ends[twice + 1]]).decode("utf-8", "backslashreplace")
        raise DataError(f"{path} names an image twice", found=found, wanted="each once", fix="take one line out")
    numbers, classes = labels.finish(listed_names(root)) if labelled and len(labels) else (None, Classes())
    return Listing(root, names, numbers, classes, UriHolder(hidden))


def has_labels(path: Path) -> bool:
    """Whether the first image of a list has a label; errors as `list_uris`."""
    with storage_errors(path):
        return next((bool(label) for _, _, label in _lines(path)), False)


def _named(address: str, line: int) -> tuple[str, str]:
    """The name of an image, and its URI or path. What is after a question mark may be a secret and all that tells two
    images apart: the name has the number of the line instead."""
    if address.startswith("file://"):
        path = unquote(urlsplit(address).path)
        return path, path
    if not is_uri(address):
        return address, address
    name = shown_uri(address)
    return (name if len(re.split(r"[?#]", address)) == 1 else f"{name}#line-{line}"), address


def _lines(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Of each image its line, its address and its label, None where none is written."""
    if path.stat().st_size > MAX_BYTES:
        raise DataError(
            f"{path} is too large for a list", found=f"{path.stat().st_size:,} bytes", wanted=f"at most {MAX_BYTES:,}"
        )
    text = read_text(path)
    rows = _csv_rows(text, path) if path.suffix.lower() == ".csv" else _text_rows(text)
    for line, cells in rows:
        if not 1 <= len(cells) <= 2 or not cells[0] or any(ord(each) < 32 for each in cells[0]):
            raise DataError(
                f"line {line} of {path} names no image",
                found=str(cells)[:120],
                wanted="a URI or a path, and a label or none, "
                + ("as columns" if path.suffix.lower() == ".csv" else "with a tab between them"),
                fix="mend the line",
            )
        yield line, cells[0], (cells[1] or None) if len(cells) == 2 else None


def _text_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for line, row in enumerate(io.StringIO(text), 1):
        if row.strip() and not row.startswith("#"):
            yield line, [cell.strip() for cell in row.rstrip("\n").split("\t")]


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    order: list[int] | None = None
    try:
        for cells in reader:
            row = [cell.strip() for cell in cells]
            if not any(row):
                continue
            if order is None:
                order = _header(row)
                if order:
                    continue
            yield reader.line_num, [row[i] for i in order] if order and max(order) < len(row) else row
    except csv.Error as error:
        told = f"line {reader.line_num} of {path} is no CSV"
        raise DataError(told, found=str(error), wanted="a URI and a label") from None


def _header(row: list[str]) -> list[int]:
    """Which columns of a CSV file are those of URIs and labels; [] of a first line that names none."""
    low = [cell.lower() for cell in row]
    uri = next((low.index(name) for name in URI_COLUMNS if name in low), None)
    label = next((low.index(name) for name in LABEL_COLUMNS if name in low), None)
    return [] if uri is None else [uri] if label is None else [uri, label]


def _unlabelled(path: Path, line: int) -> DataError:
    return DataError(
        f"line {line} of {path} has no label",
        found="a URI alone",
        wanted="a label on each line",
        fix=f"write one behind it; or {NO_LABELS}",
    )

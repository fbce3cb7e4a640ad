"""One message over a pipe: a line of JSON, then the raw bytes of the files that it lists, in their order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vitdeploy.spec import FileEntry

BLOCK = 1 << 20


class StreamError(Exception):
    """The message does not match its header."""


class BrokenOff(StreamError):
    """The message ends too early, as when a connection breaks."""


def message(document: Any, files: Iterable[Path] = ()) -> Iterator[bytes]:
    """The bytes of a message, block by block."""
    yield json.dumps(document, allow_nan=False).encode() + b"\n"
    for path in files:
        yield from blocks_of(path)


def blocks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(BLOCK), b"")


def read_line(stream: BinaryIO, limit: int) -> bytes:
    """The next line, without its end; b"" at the end of the stream.

    Raises:
        StreamError: it is longer than `limit` bytes; BrokenOff where it is not ended.
    """
    line = stream.readline(limit + 1)
    if len(line) > limit:
        raise StreamError(f"a line of more than {limit:,} bytes")
    if line and not line.endswith(b"\n"):
        raise BrokenOff("broken off in a line")
    return line[:-1]


def read_json(line: bytes) -> Any:
    """The document of a line: JSON, finite numbers only, no key twice.

    Raises:
        StreamError: something else.
    """
    try:
        return json.loads(line, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"not JSON: {str(error)[:100]}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def read_file(stream: BinaryIO, entry: FileEntry, path: Path) -> None:
    """Write the next `entry.bytes` of the stream to the new file `path`.

    Raises:
        StreamError: they have another SHA-256; BrokenOff where fewer come.
        OSError: the disk is full or not writable.
    """
    digest, left = hashlib.sha256(), entry.bytes
    with path.open("xb") as file:
        while left:
            block = stream.read(min(BLOCK, left))
            if not block:
                raise BrokenOff(f"broken off in {entry.path}, {left:,} bytes before its end")
            digest.update(block)
            file.write(block)
            left -= len(block)
    if digest.hexdigest() != entry.sha256:
        raise StreamError(f"{entry.path} has another SHA-256 than its message says")

"""One file, all or nothing: written under a unique temporary name, flushed to disk, and renamed into place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vitdeploy.publish import flush, remove_abandoned, temporary_name


@contextlib.contextmanager
def open_atomic(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A new file to write to, which replaces the file `path` when the block ends without an error. A reader, and a
    crash at any moment, sees the old file or the new one.

    Raises:
        OSError: the disk is full or not writable; `path` is then what it was.
    """
    remove_abandoned(path.parent)
    temporary = path.with_name(temporary_name())
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)  # the new name itself lies in the folder


def write_atomic(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replace the file `path` by `data`; as `open_atomic`."""
    with open_atomic(path, mode) as file:
        file.write(data)

"""One file, all or nothing: written under a unique temporary name, flushed to disk, and renamed into place."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from vitdeploy.publish import flush


def write_atomic(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replace the file `path` by `data`. A reader, and a crash at any moment, sees the old file or the new one.

    Raises:
        OSError: the disk is full or not writable; `path` is then what it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)  # the new name itself lies in the folder

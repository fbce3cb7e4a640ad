"""A disk that is full or fails at the Nth of the calls that write: of Python code, below one folder."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitdeploy.publish as publish

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
WRITING = frozenset("wxa+")


class BrokenDisk:
    """While it is entered, the call number `fails` (from 1) ends in the error `number`; all later ones too where it is
    `lasting`, as on a disk that is full. `calls` counts them: what opens to write, writes, cuts, closes, flushes,
    makes, links or renames anything below `root`. A write that fails for want of space has written a part."""

    def __init__(self, root: Path, fails: int = 0, number: int = errno.ENOSPC, lasting: bool = False) -> None:
        self.root, self.fails, self.number, self.lasting = os.path.realpath(root), fails, number, lasting
        self.calls, self.failed = 0, ""
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> BrokenDisk:
        self._patch.setattr(builtins, "open", self._open)
        self._patch.setattr(io, "open", self._open)
        for name in ("mkdir", "rename", "replace", "link", "truncate"):
            self._watch(os, name, lambda arguments: arguments[0])
        for name in ("fsync", "fdatasync", "write", "ftruncate", "sendfile"):
            self._watch(os, name, lambda arguments: _path_of(arguments[0]))
        self._watch(publish, "exchange", lambda arguments: arguments[0])
        creating = os.O_CREAT | os.O_TRUNC
        self._watch(os, "open", lambda arguments: arguments[0] if arguments[1] & creating else None)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()

    def strike(self, what: str, path: Any) -> None:
        """Count a call, and fail it if it is its turn."""
        if path is None or not Path(os.path.realpath(path)).is_relative_to(self.root):
            return
        self.calls += 1
        if self.fails and (self.calls == self.fails or (self.lasting and self.calls > self.fails)):
            self.failed = self.failed or f"{what} {Path(path).name}"
            raise OSError(self.number, os.strerror(self.number))

    def _watch(self, home: Any, name: str, path: Callable[[tuple[Any, ...]], Any]) -> None:
        real = getattr(home, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            self.strike(name, path(arguments))
            return real(*arguments, **options)

        self._patch.setattr(home, name, watched)

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
        path = _path_of(file) if isinstance(file, int) else file
        if not WRITING & set(mode) or not Path(os.path.realpath(path)).is_relative_to(self.root):
            return _REAL_OPEN(file, mode, buffering, *text, **options)
        if not isinstance(file, int):
            self.strike("open", path)
        closefd, opener = options.pop("closefd", True), options.pop("opener", None)
        raw = _Failing(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.disk, raw.path = self, path
        if buffering == 0:
            return raw
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **options)


_REAL_OPEN = io.open


class _Failing(io.FileIO):
    disk: BrokenDisk
    path: Any

    def write(self, data: Any) -> int:
        try:
            self.disk.strike("write", self.path)
        except OSError as error:
            if error.errno != errno.EIO:
                super().write(memoryview(data)[: len(data) // 2])
            raise
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self.disk.strike("truncate", self.path)
        return super().truncate(size)

    def close(self) -> None:
        """A disk over a network may say only now that there was no room."""
        if self.closed:
            return
        try:
            self.disk.strike("close", self.path)
        finally:
            super().close()


def _path_of(descriptor: Any) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{int(descriptor)}")  # noqa: PTH115
    except (OSError, ValueError, TypeError):
        return None

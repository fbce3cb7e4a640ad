"""Folders for results: without a name given, a temporary one that is removed when Python ends."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vitdeploy.publish import check_replaceable, replacing


@functools.cache
def _session() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vitdeploy-", ignore_cleanup_errors=True)


def unnamed_folder(name: str) -> Path:
    """A new empty folder, which lasts as long as this process."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_session().name))


def is_unnamed(folder: Path) -> bool:
    """Whether a folder is removed when this process ends."""
    return folder.is_relative_to(_session().name)


def home_of(folder: str | Path | None, name: str, names: tuple[str, ...]) -> Path:
    """The folder of a result: the requested one, or a new one.

    Raises:
        OutputError: it holds something other than `names`.
    """
    home = Path(folder) if folder is not None else unnamed_folder(name) / name
    check_replaceable(home, names)
    return home


@contextlib.contextmanager
def filling(home: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """The folder to write a result to, which becomes `home` when all is there: interrupted work leaves nothing."""
    with replacing(home, names) as work:
        yield work

"""Folders private to this user, for files that are code once loaded: engines that a runtime caches.

They lie in the user's cache, never inside a bundle, so that nobody who hands over a bundle can put an engine there.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from vitdeploy.errors import StorageError, UnsafeError, quoted


def private_folder(*names: str) -> Path:
    """A folder below the user's cache of vitdeploy, each of `names` made with mode 0700 where it is missing.

    Raises:
        UnsafeError: it is a link, belongs to another user, or others can write to it or read it.
        StorageError: it cannot be made.
    """
    path = user_cache()
    for name in names:
        path = path / name
        _own(path)
    return path


def _own(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written",
            found=error.strerror or str(error),
            wanted="a folder of this user",
            fix="set XDG_CACHE_HOME to a folder that you can write to",
        ) from None
    if not _is_own(found):
        mode = stat.S_IMODE(found.st_mode)
        kind = f"mode {mode:04o}, user {found.st_uid}" if stat.S_ISDIR(found.st_mode) else "a link"
        raise UnsafeError(
            f"{path} is not private, and what it holds decides which code runs",
            found=kind,
            wanted=f"a folder of user {os.getuid()} with mode 0700",
            fix=f"look at what is in it; then remove it, or chmod 700 {quoted(path)}",
        )


def is_private(folder: Path) -> bool:
    """Whether it is there, a folder and no link to one, of this user, and nobody else can enter or write it."""
    try:
        return _is_own(folder.lstat())
    except OSError:
        return False


def _is_own(found: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(found.st_mode)  # Windows: the profile's own rights hold
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def user_cache() -> Path:
    """This user's cache folder of vitdeploy, where the platform has such folders, whether it is there or not."""
    return _cache() / "vitdeploy"


def _cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    place = os.environ.get("XDG_CACHE_HOME", "")
    return Path(place) if place.startswith("/") else Path.home() / ".cache"

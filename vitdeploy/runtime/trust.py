"""Whom a bundle is trusted from, and files of this user alone."""

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from vitdeploy.errors import MissingFileError, StorageError, UnsafeError, UntrustedEngineError, quoted
from vitdeploy.publish import flush, remove_abandoned, temporary_name

# --- Folders private to this user, for files that are code once loaded: engines that a runtime caches -----------------
# They lie in the user's cache, never inside a bundle, so that nobody who hands over a bundle can put an engine there.


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
            expected="a folder of this user",
            fix="set XDG_CACHE_HOME to a folder that you can write to",
        ) from None
    if not _is_own(found):
        mode = stat.S_IMODE(found.st_mode)
        kind = f"mode {mode:04o}, user {found.st_uid}" if stat.S_ISDIR(found.st_mode) else "a link"
        raise UnsafeError(
            f"{path} is not private, and what it holds decides which code runs",
            found=kind,
            expected=f"a folder of user {os.getuid()} with mode 0700",
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


# --- One file, all or nothing: written under a unique temporary name, flushed to disk, and renamed into place ---------


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


# --- Decides which TensorRT plans may be loaded. A plan is code -------------------------------------------------------
# deserialising one runs what its maker put into it.
#
# Source: NVIDIA, "Security" of the TensorRT 11.4 documentation: only engines of one's own or signed ones; TensorRT's
# own validity check is no detection of tampering. So a plan is loaded only if its SHA-256 stands in a registry of this
# user on this machine: a folder that only the user can enter, outside of any bundle, with a file for each digest, which
# `compile` writes; or if a caller that has verified the signature of a bundle says so (`trusted` of `read_trusted`). A
# digest inside a bundle proves that the file is intact, never who made it.


REGISTRY = "trusted-engines"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def rebuild(plan: Path) -> str:
    """The command that makes the plan of a bundle again."""
    return f"vitdeploy compile {quoted(plan.parent / 'graph.onnx')} --target tensorrt -o DIR"


def registry() -> Path:
    """The folder of trusted digests, whether it is there or not."""
    return user_cache() / REGISTRY


def is_trusted(digest: str) -> bool:
    """Whether the plan with this SHA-256 (lower-case hex) may be loaded by this user on this machine."""
    entry = registry() / f"{digest}.json"
    return bool(_DIGEST.fullmatch(digest)) and is_private(registry()) and _own_file(entry)


def register(digest: str, facts: Mapping[str, str]) -> None:
    """Trust the plan with this SHA-256 from now on. `facts` say why, for people: by whom and for what it was built.

    Raises:
        ValueError: no SHA-256 in lower-case hex.
        UnsafeError: others could write the registry.
        StorageError: it cannot be written.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"not a SHA-256: {digest!r}")
    folder = private_folder(REGISTRY)
    try:
        text = json.dumps(dict(facts), indent=1, sort_keys=True) + "\n"
        write_atomic(folder / f"{digest}.json", text.encode(), 0o600)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written",
            found=error.strerror or str(error),
            expected="a writable folder",
            fix="set XDG_CACHE_HOME to one",
        ) from error


def read_trusted(plan: Path, trusted: Callable[[str], bool] = is_trusted) -> bytes:
    """The bytes of a plan that may be loaded: those that were hashed, whatever becomes of the file.

    Raises:
        MissingFileError: there is no such file.
        UntrustedEngineError: its digest is not trusted.
    """
    try:
        data = plan.read_bytes()
    except OSError as error:
        raise MissingFileError(f"{plan} cannot be read", found=error.strerror or str(error)) from None
    digest = hashlib.sha256(data).hexdigest()
    if not trusted(digest):
        raise UntrustedEngineError(
            f"{plan} is not loaded: an engine is code, and this one was not built by this user on this machine",
            found=f"sha256 {digest[:16]}..., {len(data):,} bytes, not in {registry()}",
            expected="an engine built here, unchanged since, or one signed by an identity that you name",
            fix=f"rebuild it: {rebuild(plan)}",
        )
    return data


def _own_file(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and (os.name != "posix" or facts.st_uid == os.geteuid())

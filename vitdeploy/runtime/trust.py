"""Private folders of this user, atomic file writes, and the registry of trusted engines."""

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

# --- Folders private to this user, for engines that a runtime caches: loading one runs code ---------------------------
# They are in the user's cache, never inside a bundle, so that a bundle cannot add an engine.


def private_folder(*names: str) -> Path:
    """Return a folder in vitdeploy's user cache; missing folders of the path `names` are created with mode 0700.

    Raises:
        UnsafeError: it is a link, belongs to another user, or other users can read or write it.
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
            f"{path} must be private: its contents decide which code runs",
            found=kind,
            expected=f"a folder of user {os.getuid()} with mode 0700",
            fix=f"check its contents; then remove it, or chmod 700 {quoted(path)}",
        )


def is_private(folder: Path) -> bool:
    """Return whether `folder` exists, is not a link, belongs to this user, and is not accessible to other users."""
    try:
        return _is_own(folder.lstat())
    except OSError:
        return False


def _is_own(found: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(found.st_mode)  # Windows: protected by the profile's permissions
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def user_cache() -> Path:
    """Return vitdeploy's cache folder of this user, at the platform's usual place; it may not exist."""
    return _cache() / "vitdeploy"


def _cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    place = os.environ.get("XDG_CACHE_HOME", "")
    return Path(place) if place.startswith("/") else Path.home() / ".cache"


# --- Atomic file writes: written under a unique temporary name, flushed to disk, and renamed into place ---------------


@contextlib.contextmanager
def open_atomic(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` when the block ends without an error. A reader sees the old file or the new
    one, even after a crash.

    Raises:
        OSError: the disk is full or not writable; `path` is then unchanged.
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
    flush(path.parent)  # persist the renamed entry


def write_atomic(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replace the contents of the file `path` by `data`, as `open_atomic`."""
    with open_atomic(path, mode) as file:
        file.write(data)


# --- The TensorRT plans that may be loaded ----------------------------------------------------------------------------
# A plan is code: deserialising it runs code of its maker.
#
# Source: NVIDIA, "Security" in the TensorRT 11.4 documentation: load only own or signed engines; TensorRT's validity
# check does not detect tampering. So a plan is loaded only if its SHA-256 is in this user's registry on this machine (a
# private folder outside any bundle, with one file per digest, written by `compile`), or if a caller that has verified a
# bundle's signature allows it (`trusted` of `read_trusted`). A digest inside a bundle proves that a file is intact, not
# who made it.


REGISTRY = "trusted-engines"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def rebuild(plan: Path) -> str:
    """Return the command that rebuilds the plan of a bundle."""
    return f"vitdeploy compile {quoted(plan.parent / 'graph.onnx')} --target tensorrt -o DIR"


def registry() -> Path:
    """Return the folder of trusted digests; it may not exist."""
    return user_cache() / REGISTRY


def is_trusted(digest: str) -> bool:
    """Return whether this user may load the plan with this SHA-256 (lower-case hex) on this machine."""
    entry = registry() / f"{digest}.json"
    return bool(_DIGEST.fullmatch(digest)) and is_private(registry()) and _own_file(entry)


def register(digest: str, facts: Mapping[str, str]) -> None:
    """Trust the plan with this SHA-256 from now on. `facts` record its origin for people: who built it, and for what.

    Raises:
        ValueError: not a SHA-256 in lower-case hex.
        UnsafeError: other users could write to the registry.
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
    """Return the bytes of a trusted plan: the same bytes that were hashed, even if the file changes.

    Raises:
        MissingFileError: the file cannot be read.
        UntrustedEngineError: its digest is not trusted.
    """
    try:
        data = plan.read_bytes()
    except OSError as error:
        raise MissingFileError(f"{plan} cannot be read", found=error.strerror or str(error)) from None
    digest = hashlib.sha256(data).hexdigest()
    if not trusted(digest):
        raise UntrustedEngineError(
            f"refused to load {plan}: it is native code that this user did not build on this machine",
            found=f"sha256 {digest[:16]}..., {len(data):,} bytes, not in {registry()}",
            expected="an unchanged engine built here, or one signed by an identity that you trust",
            fix=f"rebuild it: {rebuild(plan)}",
        )
    return data


def _own_file(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and (os.name != "posix" or facts.st_uid == os.geteuid())

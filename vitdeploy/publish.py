"""All or nothing: a folder or file is written under a unique temporary name, flushed to disk, and given its own."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from vitdeploy.errors import OutputError, StorageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
# Exactly the names that temporary_folder gives: another program's folder is never removed.
_TEMPORARY = re.compile(r"\.tmp-([0-9]{1,9})-[0-9a-f]{12}")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a StorageError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL or _numpy_short_write(error):
            raise StorageError(
                f"no space left to write {path}",
                found=_free_space(path),
                wanted="more free space",
                fix="free some, or set another place with -o or VITDEPLOY_STORE",
            ) from error
        if error.errno in _REFUSED:
            raise StorageError(
                f"{path} cannot be written",
                found=error.strerror or str(error),
                wanted="a writable folder",
                fix="choose another place with -o or VITDEPLOY_STORE",
            ) from error
        raise


def _numpy_short_write(error: OSError) -> bool:
    """numpy reports a write that the disk had no room for without an errno."""
    return error.errno is None and re.fullmatch(r"\d+ requested and \d+ written", str(error)) is not None


def _free_space(path: Path) -> str:
    with contextlib.suppress(OSError):
        existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        return f"{shutil.disk_usage(existing).free:,} bytes free"
    return "no space"


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder inside `parent`, with this process's number in its name; removed at the end if still there."""
    with storage_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent / f".tmp-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders of processes that are no longer alive."""
    for folder in parent.glob(".tmp-*-*"):
        match = _TEMPORARY.fullmatch(folder.name)
        if match and not _alive(int(match[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(process: int) -> bool:
    if os.name != "posix":  # there, os.kill is no question
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def sync_folder(folder: Path) -> None:
    """Flush every file below `folder`, then the folders themselves, to disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened, nor a file be flushed that is open to be read
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, final: Path) -> bool:
    """Move a finished temporary folder to a name that is free. False where another process got there first."""
    with storage_errors(final):
        sync_folder(folder)
        try:
            folder.rename(final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        _sync(final.parent)
    return True


@contextlib.contextmanager
def replacing(final: Path, ours: tuple[str, ...]) -> Iterator[Path]:
    """A temporary folder that takes the place of `final` when the block ends without an error.

    An existing `final` is replaced only if every name in it is one of `ours`, the names that vitdeploy writes.

    Raises:
        OutputError: `final` is a file, a link, or a folder with other things in it.
        StorageError: the disk is full or not writable.
    """
    check_replaceable(final, ours)
    with storage_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(final.parent)
    with temporary_folder(final.parent) as work, storage_errors(final):
        yield work
        check_replaceable(final, ours)  # again: the block may have taken long
        if final.exists():
            old = final.parent / f".tmp-{os.getpid()}-{uuid.uuid4().hex[:12]}"
            sync_folder(work)
            final.rename(old)
            try:
                work.rename(final)
            except OSError:
                old.rename(final)
                raise
            _sync(final.parent)
            shutil.rmtree(old, ignore_errors=True)
        elif not publish(work, final):
            raise OutputError(f"{final} was made by another process meanwhile", fix="choose another place (-o)")


@contextlib.contextmanager
def replacing_file(final: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """The path of a new file that takes the place of `final` when the block ends without an error.

    Raises:
        OutputError: `final` is there and no file of ours, as `is_ours` judges.
        StorageError: the disk is full or not writable.
    """
    if final.is_symlink() or (final.exists() and not is_ours(final)):
        raise OutputError(
            f"{final} is not replaced",
            found="a link" if final.is_symlink() else "a folder" if final.is_dir() else "another file",
            wanted="a new file, or one that this command made",
            fix="choose another place (-o)",
        )
    with storage_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(final.parent)
    with temporary_folder(final.parent) as work, storage_errors(final):
        yield work / final.name
        _sync(work / final.name)
        (work / final.name).replace(final)
        _sync(final.parent)


def check_replaceable(final: Path, ours: tuple[str, ...]) -> None:
    """Raise OutputError unless `final` is absent, empty, or a folder that vitdeploy made: of the names `ours` alone."""
    or_ours = ", or one that vitdeploy made" if ours else ""
    if not final.exists() and not final.is_symlink():
        return
    if final.is_symlink() or not final.is_dir():
        raise OutputError(
            f"{final} is not a folder of ours",
            found="a link" if final.is_symlink() else "a file",
            wanted=f"a new folder{or_ours}",
            fix="choose another place (-o)",
        )
    foreign = sorted({entry.name for entry in final.iterdir()} - set(ours))
    if foreign:
        raise OutputError(
            f"{final} holds other files, so it is not replaced",
            found=", ".join(foreign[:5]),
            wanted="a new folder" + (f", an empty one{or_ours}" if ours else " or an empty one"),
            fix="choose another place (-o)",
        )

"""Atomic writes: a folder or file is written under a unique temporary name, flushed to disk, and renamed.

.tmp-PROCESS-ID   a folder or file being written, or replaced content: removed once its process has ended, by the next
                  process that makes a temporary folder or file in the same place
.old-PROCESS-ID/  the content being replaced, under its own name, if two folders cannot be exchanged in one step
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import locale
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from vitdeploy.errors import OutputError, StorageError, quoted

# Exactly the names from temporary_name: another program's folder is never touched.
_TEMPORARY = re.compile(r"\.(tmp|old)-([0-9]{1,9})-([0-9a-f]{6})[0-9a-f]{6}")
# Process numbers of another machine or container mean nothing here, so age decides. No stage writes for longer than the
# first value; the second is for the milliseconds between two renames.
_ELSEWHERE_SECONDS = {"tmp": 7 * 86400.0, "old": 60.0}
# Errors of a file system that cannot flush folders, or not without permission to list them.
_NO_FLUSH = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EACCES}
_NO_PATH = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}
_PROBE_BYTES = 1 << 16


class _Cause(NamedTuple):
    """System errors that mean the same to a user."""

    numbers: frozenset[int]
    message: str
    expected: str
    fix: str


_PLACES = "with -o, VITDEPLOY_STORE or TMPDIR"
_CAUSES = (
    _Cause(
        frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG}),
        "no space left to write {path}",
        "more free space",
        f"free some space, or choose another place {_PLACES}",
    ),
    _Cause(
        frozenset({errno.EROFS, errno.EACCES, errno.EPERM}),
        "{path} cannot be {written}",
        "a writable folder",
        f"choose another place {_PLACES}",
    ),
    _Cause(
        frozenset({errno.EIO, errno.ESTALE}),
        "the disk failed when {path} was {written}",
        "a disk without errors",
        f"check the system log (dmesg), or choose another place {_PLACES}",
    ),
    _Cause(
        frozenset({errno.EBUSY, errno.EXDEV}),
        "{path} cannot be replaced",
        "a folder that is not a mount point and not part of a container's image",
        "choose a new folder (-o)",
    ),
)
_FULL, _REFUSED = _CAUSES[:2]


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of a full, failing, read-only or forbidden disk into a StorageError."""
    try:
        yield
    except OSError as error:
        found = storage_error(error, path)
        if found is None:
            raise
        raise found from error


def storage_error(error: OSError, path: Path | None = None) -> StorageError | None:
    """The StorageError for a system error; None if it does not concern a disk.

    Args:
        path: the path being written; None: unknown.
    """
    numbered = errno.ENOSPC if _numpy_short_write(error) else error.errno
    cause = next((cause for cause in _CAUSES if numbered in cause.numbers), None)
    if cause is None:
        return None
    place, written = _named(error, path)
    refused = cause is _REFUSED and written != "written"
    return StorageError(
        cause.message.format(path=place or "a file or the output of this command", written=written),
        found=_free_space(place) if cause is _FULL and place else error.strerror or str(error),
        expected="permission to read or write it" if refused else cause.expected,
        fix="change its permissions, or choose another one" if refused else cause.fix,
    )


def _named(error: OSError, path: Path | None) -> tuple[Path | None, str]:
    """The path of an error, and the failed operation. Files elsewhere, such as images, are read too."""
    if not isinstance(error.filename, str):
        return path, "written"
    found = Path(error.filename)
    return (path, "written") if path is not None and _is_part(found, path) else (found, "read or written")


def _is_part(found: Path, path: Path) -> bool:
    """Whether a path belongs to the writing of `path`: below it, above it, or temporary."""
    found, path = found.absolute(), path.absolute()
    temporary = any(map(_TEMPORARY.fullmatch, found.parts))
    return temporary or found.is_relative_to(path) or path.is_relative_to(found)


def _numpy_short_write(error: OSError) -> bool:
    """Whether numpy reports a short write (disk full), which has no errno."""
    return error.errno is None and re.fullmatch(r"\d+ requested and \d+ written", str(error)) is not None


def _free_space(path: Path) -> str:
    with contextlib.suppress(OSError):
        existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        return f"{shutil.disk_usage(existing).free:,} bytes free"
    return "no space"


@contextlib.contextmanager
def native_writes(folder: Path, size: int) -> Iterator[None]:
    """Context for a native library that writes about `size` bytes in `folder`. Such a library may not report a full
    disk, or fail without a reason and remove its files. So a probe tests the disk: after a failure for as many bytes,
    else for a few. Numbers in texts get a decimal point, whatever the locale of this process."""
    try:
        with _decimal_points():
            yield
    except Exception:
        with contextlib.suppress(OSError):  # some file systems do not report their free space
            _ask_disk(folder, size)
        raise
    _ask_disk(folder, 0)


@contextlib.contextmanager
def _decimal_points() -> Iterator[None]:
    """Write numbers as in the C locale, only in this thread if the system has thread locales (POSIX `uselocale`).
    Desktop toolkits and plotting libraries set the user's locale for the process, and native code writes with it."""
    if locale.localeconv()["decimal_point"] == ".":
        yield
    elif os.name != "posix":  # Windows: for the whole process, during the block
        before = locale.setlocale(locale.LC_NUMERIC, "C")
        try:
            yield
        finally:
            locale.setlocale(locale.LC_NUMERIC, before)
    else:
        system = ctypes.CDLL(None)
        for name in ("newlocale", "duplocale", "uselocale"):
            getattr(system, name).restype = ctypes.c_void_p
        now = ctypes.c_void_p(system.duplocale(ctypes.c_void_p(system.uselocale(None))))
        mask = 1 << (4 if sys.platform == "darwin" else locale.LC_NUMERIC)  # LC_NUMERIC_MASK of <locale.h>
        plain = ctypes.c_void_p(system.newlocale(mask, b"C", now))
        before_here = ctypes.c_void_p(system.uselocale(plain))
        try:
            yield
        finally:
            system.uselocale(before_here)
            system.freelocale(plain)


def _ask_disk(folder: Path, size: int) -> None:
    """Raise StorageError without space for `size` bytes and a few more: a file of this size is made and removed."""
    probe = folder / temporary_name()
    with storage_errors(folder):
        try:
            with probe.open("wb") as file:
                if size and hasattr(os, "posix_fallocate"):  # not on macOS and Windows
                    os.posix_fallocate(file.fileno(), 0, size)
                    file.seek(size)
                file.write(bytes(_PROBE_BYTES))
            flush(probe)  # a network disk may report it only now
        finally:
            probe.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder inside `parent`, with this process's number in its name; removed at the end if it still exists.
    First removes the remains of ended processes in `parent`."""
    with storage_errors(parent):
        make_folder(parent)
        remove_abandoned(parent)
        folder = parent / temporary_name()
        try:
            folder.mkdir()
        except FileNotFoundError as error:
            raise OSError(errno.EROFS, "no folder can be made there", str(folder)) from error  # such as /proc
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_name(kind: str = "tmp") -> str:
    """A unique name from which `remove_abandoned` recognises its process."""
    return f".{kind}-{os.getpid()}-{_here()}{uuid.uuid4().hex[:6]}"


@functools.cache
def _here() -> str:
    """A digest of the scope of process numbers: this machine, or this container."""
    questions: tuple[Callable[[], str], ...] = (
        lambda: Path("/etc/machine-id").read_bytes().hex(),
        lambda: str(Path("/proc/self/ns/pid").stat().st_ino),
        lambda: os.uname().nodename,
    )
    known = []
    for question in questions:
        with contextlib.suppress(OSError, AttributeError):
            known.append(question())
    return hashlib.sha256(" ".join(known).encode()).hexdigest()[:6]


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders and files of processes that are no longer alive. Content that such a process had
    moved aside without a replacement gets its name back."""
    for path in parent.glob(".???-*-*"):
        kind = _abandoned(path)
        if kind == "old":
            _bring_back(path)
        elif kind == "tmp" and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif kind == "tmp":
            with contextlib.suppress(OSError):
                path.unlink()


def restore(final: Path) -> bool:
    """Whether the missing `final` was moved aside by a process that ended before replacing it; it then gets its name
    back."""
    if os.path.lexists(final):
        return False
    with contextlib.suppress(OSError, ValueError):  # a forbidden or impossible parent
        for aside in final.parent.glob(".old-*-*"):
            if _abandoned(aside) and (aside / final.name).exists():
                _bring_back(aside)
    return os.path.lexists(final)


def _abandoned(path: Path) -> str | None:
    """The kind of a temporary folder or file whose process has ended; None for any other path."""
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return None
    kind, process, where = match.groups()
    if where == _here() and os.name == "posix":
        gone = not alive(int(process))
    else:
        try:
            gone = time.time() - path.stat().st_mtime > _ELSEWHERE_SECONDS[kind]
        except OSError:  # its process has just removed it
            gone = False
    return kind if gone else None


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _bring_back(aside: Path) -> None:
    """Give the content of `aside` its own name if that is free, and remove the rest."""
    with contextlib.suppress(OSError):  # it stays for the next process
        for kept in aside.iterdir():
            if not os.path.lexists(aside.parent / kept.name):
                kept.rename(aside.parent / kept.name)
                flush(aside.parent)
        shutil.rmtree(aside)


def discard(folder: Path) -> None:
    """Remove a folder that may be absent; its name disappears at once, so that it is never incomplete."""
    gone = folder.parent / temporary_name()
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return
    try:
        flush(folder.parent)  # before its content is removed
    finally:
        shutil.rmtree(gone, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and flush the new names to disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush(each.parent)


def sync_folder(folder: Path) -> None:
    """Flush every file below `folder`, then the folders themselves, to disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk; a folder only if its file system supports that."""
    if os.name != "posix":  # elsewhere a folder cannot be opened, nor a file be flushed that is open to be read
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH or not path.is_dir():
            raise


def publish(folder: Path, final: Path) -> bool:
    """Move a finished temporary folder to a free name. Return False if another process was first."""
    with storage_errors(final):
        sync_folder(folder)
        if not _renamed(folder, final):
            return False
        flush(final.parent)
    return True


def point(link: Path, target: Path) -> None:
    """Let the symbolic link `link` point to `target`, relative to its folder, in one step that is on disk when this
    returns. The link always leads to the old or the new target, even after a crash.

    Raises:
        OutputError: `link` exists, and is not a link.
        StorageError: the disk is full or not writable.
    """
    with storage_errors(link):
        if os.path.lexists(link) and not link.is_symlink():
            raise OutputError(
                f"{link} exists and is not a link; it is not replaced",
                found=_kind(link),
                expected="a free name, or a link made by vitdeploy",
                fix="move it away",
            )
        remove_abandoned(link.parent)
        temporary = link.with_name(temporary_name())
        temporary.symlink_to(target)
        try:
            temporary.replace(link)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush(link.parent)


def _renamed(folder: Path, final: Path) -> bool:
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


@contextlib.contextmanager
def replacing(final: Path, ours: tuple[str, ...]) -> Iterator[Path]:
    """A temporary folder that replaces `final` when the block ends without an error.

    An existing `final` is replaced only if every name in it is one of `ours`, the names that vitdeploy writes. Readers
    always see the whole old or the whole new folder, even after a crash. Only on a file system that cannot exchange two
    folders (`exchange`), `final` is missing between two renames; after a crash there, the next command that writes in
    the same place, or `restore`, brings it back.

    Raises:
        OutputError: `final` is a file, a link, or a folder with other things in it.
        StorageError: the disk is full or not writable.
    """
    check_replaceable(final, ours)
    _make_parent(final)
    with temporary_folder(final.parent) as work, storage_errors(final):
        yield work
        check_replaceable(final, ours)  # again: the block may have taken long
        if not _replace(work, final):
            raise OutputError(
                f"another process created {final} in the meantime",
                found=_kind(final) or "a name in use",
                expected="a free name",
                fix="choose another place (-o)",
            )


def _make_parent(final: Path) -> None:
    """Make the parent folder of `final`."""
    with storage_errors(final.parent), _paths(final):
        make_folder(final.parent)


def _replace(work: Path, final: Path) -> bool:
    """Replace `final`, which vitdeploy made if it exists, by `work`. Return False if another process was first."""
    if not final.exists():
        return publish(work, final)
    sync_folder(work)
    # `work` is now the old folder, and removed like a temporary folder.
    return swap(work, final) or _replace_in_two_steps(work, final)


def swap(folder: Path, other: Path) -> bool:
    """Exchange a folder with another one, in one step that is on disk when this returns. Return False if the file
    system cannot do that, or the other folder is gone."""
    try:
        done = exchange(folder, other)
    except FileNotFoundError:
        return False
    if done:
        flush(other.parent)
    return done


def _replace_in_two_steps(work: Path, final: Path) -> bool:
    """Move `final` aside, and `work` to its name. Each step is on disk before the next one starts."""
    aside = final.parent / temporary_name("old")
    aside.mkdir()
    try:
        flush(final.parent)
        final.rename(aside / final.name)
        flush(aside)
        flush(final.parent)
        ours = _renamed(work, final)
        flush(final.parent)
    except FileNotFoundError:  # another process has moved it
        ours = publish(work, final)
    except BaseException:
        _bring_back(aside)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return ours


@contextlib.contextmanager
def replacing_file(final: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """The path of a new file that replaces `final` when the block ends without an error.

    Raises:
        OutputError: `final` exists, and `is_ours` rejects it.
        StorageError: the disk is full or not writable.
    """
    with storage_errors(final), _paths(final):
        foreign = final.is_symlink() or (final.exists() and not is_ours(final))
    if foreign:
        raise OutputError(
            f"{final} exists and is not replaced",
            found="a link" if final.is_symlink() else "a folder" if final.is_dir() else "another file",
            expected="a new file, or one made by this command",
            fix="choose another place (-o)",
        )
    _make_parent(final)
    with temporary_folder(final.parent) as work, storage_errors(final):
        yield work / final.name
        flush(work / final.name)
        (work / final.name).replace(final)
        flush(final.parent)


@contextlib.contextmanager
def _paths(final: Path) -> Iterator[None]:
    """Turn an impossible path into an OutputError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_PATH:
            raise
        raise OutputError(
            f"{str(final)[:200]} cannot be created",
            found=error.strerror or str(error),
            expected="a path whose parents are folders, with names that the file system accepts",
            fix="choose another place (-o)",
        ) from error


def check_replaceable(final: Path, ours: tuple[str, ...]) -> None:
    """Raise OutputError unless `final` is absent, empty, or a folder made by vitdeploy: with only the names `ours`."""
    or_ours = ", or one made by vitdeploy" if ours else ""
    with storage_errors(final), _paths(final):
        kind = _kind(final)
        if kind == "":
            _check_parents(final)
            return
    if kind != "a folder":
        raise OutputError(
            f"{final} is not a folder",
            found=kind,
            expected=f"a new folder{or_ours}",
            fix="choose another place (-o)",
        )
    if final.name in ("", "..") or os.path.ismount(final):
        raise OutputError(
            f"{final} cannot be replaced",
            found="a mount point" if os.path.ismount(final) else "the working folder, or one above it",
            expected="a folder that can be replaced",
            fix=f"choose a folder inside it: -o {quoted(final / 'bundle')}",
        )
    with storage_errors(final):
        try:
            foreign = sorted({entry.name for entry in final.iterdir()} - set(ours))
        except FileNotFoundError:  # removed in the meantime
            return
    if foreign:
        raise OutputError(
            f"{final} contains other files; it is not replaced",
            found=", ".join(foreign[:5]),
            expected="a new folder" + (f", an empty one{or_ours}" if ours else " or an empty one"),
            fix="choose another place (-o)",
        )


def _kind(path: Path) -> str:
    """The kind of a path, in words; "" if it does not exist."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a file"


def _check_parents(final: Path) -> None:
    """Check that the closest existing parent of an absent path is a folder."""
    above = next((parent for parent in final.parents if os.path.lexists(parent)), None)
    if above is not None and not above.is_dir():
        raise OSError(errno.ENOTDIR, f"{above} is not a folder")


# --- Exchange two paths in one step, if the system and the file system support it -------------------------------------
# Linux has renameat2(2) with RENAME_EXCHANGE since 3.15 (glibc 2.28), macOS renamex_np(2) with RENAME_SWAP. ext4, XFS,
# Btrfs, F2FS, tmpfs and overlayfs can exchange; NFS, CIFS and most file systems in user space cannot. Windows has no
# such call.


AT_FDCWD = -100
RENAME_EXCHANGE = RENAME_SWAP = 2
# Errors of a kernel, a file system or a sandbox without it. If it is really forbidden, the plain rename fails too.
_CANNOT = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def exchange(first: Path, second: Path) -> bool:
    """Exchange two files or folders of one file system. Return False, with nothing done, if that is not supported.

    Raises:
        OSError: one of them is missing, is on another file system, or may not be moved.
    """
    call = _system_call()
    number = errno.ENOSYS if call is None else call(os.fsencode(first), os.fsencode(second))
    if number and number not in _CANNOT:
        raise OSError(number, os.strerror(number), str(first), None, str(second))
    return not number


def identity(folder: Path) -> tuple[int, int] | None:
    """The identity of a folder, which tells it from a later one with the same name; None if it does not exist."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


@functools.cache
def _system_call() -> Callable[[bytes, bytes], int] | None:
    """The function that exchanges two paths and returns 0 or an errno; None if the system library has none."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):  # Windows
        return None
    path, flags = ctypes.c_char_p, ctypes.c_uint
    if hasattr(library, "renameat2"):
        linux = library.renameat2
        linux.argtypes = (ctypes.c_int, path, ctypes.c_int, path, flags)
        return lambda one, other: linux(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) and ctypes.get_errno()
    if hasattr(library, "renamex_np"):
        macos = library.renamex_np
        macos.argtypes = (path, path, flags)
        return lambda one, other: macos(one, other, RENAME_SWAP) and ctypes.get_errno()
    return None

"""All or nothing: a folder or file is written under a unique temporary name, flushed to disk, and given its own.

.tmp-PROCESS-ID   a folder or file that is being written, or what was replaced: removed when its process is gone, by
                  the next one that makes a temporary folder or file beside it
.old-PROCESS-ID/  what is being replaced, under its own name, where two folders cannot change places in one step
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

# Exactly the names that temporary_name gives: another program's folder is never touched.
_TEMPORARY = re.compile(r"\.(tmp|old)-([0-9]{1,9})-([0-9a-f]{6})[0-9a-f]{6}")
# The numbers of another machine's processes, or another container's, say nothing here. A stage that writes for longer
# than the first is none of ours; between the two renames that the second is for lie milliseconds.
_ELSEWHERE_SECONDS = {"tmp": 7 * 86400.0, "old": 60.0}
# The answers of a file system whose folders cannot be flushed, or not by who may not list them.
_NO_FLUSH = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EACCES}
_NO_PATH = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}
_PROBE_BYTES = 1 << 16


class _Cause(NamedTuple):
    """Errors of the system that mean the same to a user."""

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
        f"free some, or set another place {_PLACES}",
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
        "a disk that reads and writes",
        f"look at the system's log (dmesg), or choose another place {_PLACES}",
    ),
    _Cause(
        frozenset({errno.EBUSY, errno.EXDEV}),
        "{path} cannot be replaced",
        "a folder that is no mount point, and no part of a container's image",
        "choose a new folder (-o)",
    ),
)
_FULL, _REFUSED = _CAUSES[:2]


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full, failing, read-only or forbidden disk into a StorageError that says so."""
    try:
        yield
    except OSError as error:
        found = storage_error(error, path)
        if found is None:
            raise
        raise found from error


def storage_error(error: OSError, path: Path | None = None) -> StorageError | None:
    """What a StorageError says of an error of the system; None if it is about something else than a disk.

    Args:
        path: what was being written; None: that is not known.
    """
    numbered = errno.ENOSPC if _numpy_short_write(error) else error.errno
    cause = next((cause for cause in _CAUSES if numbered in cause.numbers), None)
    if cause is None:
        return None
    place, written = _named(error, path)
    refused = cause is _REFUSED and written != "written"
    return StorageError(
        cause.message.format(path=place or "a file or what this command prints", written=written),
        found=_free_space(place) if cause is _FULL and place else error.strerror or str(error),
        expected="permission to read or write it" if refused else cause.expected,
        fix="change its permissions, or name another one" if refused else cause.fix,
    )


def _named(error: OSError, path: Path | None) -> tuple[Path | None, str]:
    """The path that an error is about, and what was done with it. Files elsewhere, such as images, are read too."""
    if not isinstance(error.filename, str):
        return path, "written"
    found = Path(error.filename)
    return (path, "written") if path is not None and _is_part(found, path) else (found, "read or written")


def _is_part(found: Path, path: Path) -> bool:
    """Whether a path is one that is written for `path`: below it, above it, or a temporary one."""
    found, path = found.absolute(), path.absolute()
    temporary = any(map(_TEMPORARY.fullmatch, found.parts))
    return temporary or found.is_relative_to(path) or path.is_relative_to(found)


def _numpy_short_write(error: OSError) -> bool:
    """numpy reports a write that the disk had no room for without an errno."""
    return error.errno is None and re.fullmatch(r"\d+ requested and \d+ written", str(error)) is not None


def _free_space(path: Path) -> str:
    with contextlib.suppress(OSError):
        existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        return f"{shutil.disk_usage(existing).free:,} bytes free"
    return "no space"


@contextlib.contextmanager
def native_writes(folder: Path, size: int) -> Iterator[None]:
    """Around a native library that writes some `size` bytes in `folder`: whether the disk let it, such a library does
    not say, or says it without a reason and removes what it had written. So the disk is asked: after a failure for as
    much, else for a little. Numbers in texts have a decimal point, whatever the locale of this process."""
    try:
        with _decimal_points():
            yield
    except Exception:
        with contextlib.suppress(OSError):  # not of its space: some file systems do not say what they have room for
            _ask_disk(folder, size)
        raise
    _ask_disk(folder, 0)


@contextlib.contextmanager
def _decimal_points() -> Iterator[None]:
    """Numbers as the C locale writes them, in this thread alone where the system has locales of threads (`uselocale` of
    POSIX). Desktop toolkits and plotting libraries set the user's locale for the process, and native code writes with
    it."""
    if locale.localeconv()["decimal_point"] == ".":
        yield
    elif os.name != "posix":  # Windows: of the whole process, for so long
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
    """Raise StorageError if there is no room for so many bytes and a few more: a file of them is made and removed."""
    probe = folder / temporary_name()
    with storage_errors(folder):
        try:
            with probe.open("wb") as file:
                if size and hasattr(os, "posix_fallocate"):  # not on macOS and Windows
                    os.posix_fallocate(file.fileno(), 0, size)
                    file.seek(size)
                file.write(bytes(_PROBE_BYTES))
            flush(probe)  # a disk over a network may say it only now
        finally:
            probe.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder inside `parent`, with this process's number in its name; removed at the end if still there. What
    ended processes left in `parent` goes first."""
    with storage_errors(parent):
        make_folder(parent)
        remove_abandoned(parent)
        folder = parent / temporary_name()
        try:
            folder.mkdir()
        except FileNotFoundError as error:
            raise OSError(errno.EROFS, "nothing can be made in there", str(folder)) from error  # such as /proc
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_name(kind: str = "tmp") -> str:
    """A name that no other file has, by which `remove_abandoned` knows the process that gave it."""
    return f".{kind}-{os.getpid()}-{_here()}{uuid.uuid4().hex[:6]}"


@functools.cache
def _here() -> str:
    """A digest of where the number of this process means something: this machine, or this container of it."""
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
    """Remove the temporary folders and files of processes that are no longer alive. What such a process had moved
    aside, and put nothing in its place, gets its name back."""
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
    """Whether `final`, which is not there, was moved aside by a process that ended before it put anything in its place;
    it has its name again then."""
    if os.path.lexists(final):
        return False
    with contextlib.suppress(OSError, ValueError):  # a parent that nobody may look into, or that no folder can be
        for aside in final.parent.glob(".old-*-*"):
            if _abandoned(aside) and (aside / final.name).exists():
                _bring_back(aside)
    return os.path.lexists(final)


def _abandoned(path: Path) -> str | None:
    """The kind of a temporary folder or file whose process is gone; None of any other path."""
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return None
    kind, process, where = match.groups()
    if where == _here() and os.name == "posix":
        gone = not _alive(int(process))
    else:
        try:
            gone = time.time() - path.stat().st_mtime > _ELSEWHERE_SECONDS[kind]
        except OSError:  # its process has just removed it
            gone = False
    return kind if gone else None


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _bring_back(aside: Path) -> None:
    """Give what lies in `aside` its own name if nothing else has that now, and remove the rest."""
    with contextlib.suppress(OSError):  # it stays for the next one
        for kept in aside.iterdir():
            if not os.path.lexists(aside.parent / kept.name):
                kept.rename(aside.parent / kept.name)
                flush(aside.parent)
        shutil.rmtree(aside)


def discard(folder: Path) -> None:
    """Remove a folder that may be absent: it is gone from its name at once, and never there in part."""
    gone = folder.parent / temporary_name()
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return
    try:
        flush(folder.parent)  # before anything in it goes
    finally:
        shutil.rmtree(gone, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents where they are missing, and flush the names of the new ones to disk."""
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
    """Flush a file, or the names in a folder, to disk; a folder only where its file system can."""
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
    """Move a finished temporary folder to a name that is free. False where another process got there first."""
    with storage_errors(final):
        sync_folder(folder)
        if not _renamed(folder, final):
            return False
        flush(final.parent)
    return True


def point(link: Path, target: Path) -> None:
    """Let the symbolic link `link` point to `target`, which is relative to its folder, in one step that is on disk when
    this returns. Whoever follows it gets the old place or the new one, and so it is after a crash at any moment.

    Raises:
        OutputError: `link` is there, and no link.
        StorageError: the disk is full or not writable.
    """
    with storage_errors(link):
        if os.path.lexists(link) and not link.is_symlink():
            raise OutputError(
                f"{link} is no link, so it is not replaced",
                found=_kind(link),
                expected="nothing, or a link that vitdeploy made",
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
    """A temporary folder that takes the place of `final` when the block ends without an error.

    An existing `final` is replaced only if every name in it is one of `ours`, the names that vitdeploy writes. Whoever
    looks sees the old folder or the new one, whole, and so it is after a crash at any moment. Only on a file system
    where two folders cannot change places (`exchange`) there is none for the time between two renames; a crash there is
    mended by the next command that writes beside it, or `restore`.

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
            raise OutputError(f"{final} was made by another process meanwhile", fix="choose another place (-o)")


def _make_parent(final: Path) -> None:
    """Make the folder that `final` is to lie in."""
    with storage_errors(final.parent), _paths(final):
        make_folder(final.parent)


def _replace(work: Path, final: Path) -> bool:
    """Let `work` take the place of `final`, which is ours if it is there. False where another process was faster."""
    if not final.exists():
        return publish(work, final)
    sync_folder(work)
    # `work` is the old one then, and removed as a temporary folder is.
    return swap(work, final) or _replace_in_two_steps(work, final)


def swap(folder: Path, other: Path) -> bool:
    """Let a folder that is on disk change places with another one, in one step that is on disk when this returns. False
    where the file system cannot do that, or the other one is gone."""
    try:
        done = exchange(folder, other)
    except FileNotFoundError:
        return False
    if done:
        flush(other.parent)
    return done


def _replace_in_two_steps(work: Path, final: Path) -> bool:
    """Move what is there aside, and `work` to its place. Each step is on disk before the next one begins."""
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
    """The path of a new file that takes the place of `final` when the block ends without an error.

    Raises:
        OutputError: `final` is there and no file of ours, as `is_ours` judges.
        StorageError: the disk is full or not writable.
    """
    with storage_errors(final), _paths(final):
        foreign = final.is_symlink() or (final.exists() and not is_ours(final))
    if foreign:
        raise OutputError(
            f"{final} is not replaced",
            found="a link" if final.is_symlink() else "a folder" if final.is_dir() else "another file",
            expected="a new file, or one that this command made",
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
    """Turn a path that no file can have into an OutputError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_PATH:
            raise
        raise OutputError(
            f"{str(final)[:200]} cannot be made",
            found=error.strerror or str(error),
            expected="a path through folders alone, of names that the file system takes",
            fix="choose another place (-o)",
        ) from error


def check_replaceable(final: Path, ours: tuple[str, ...]) -> None:
    """Raise OutputError unless `final` is absent, empty, or a folder that vitdeploy made: of the names `ours` alone."""
    or_ours = ", or one that vitdeploy made" if ours else ""
    with storage_errors(final), _paths(final):
        kind = _kind(final)
        if kind == "":
            _check_parents(final)
            return
    if kind != "a folder":
        raise OutputError(
            f"{final} is not a folder of ours",
            found=kind,
            expected=f"a new folder{or_ours}",
            fix="choose another place (-o)",
        )
    if final.name in ("", "..") or os.path.ismount(final):
        raise OutputError(
            f"{final} cannot be replaced",
            found="a mount point" if os.path.ismount(final) else "the working folder, or one above it",
            expected="a folder that another one can take the place of",
            fix=f"choose a folder inside of it: -o {quoted(final / 'bundle')}",
        )
    with storage_errors(final):
        try:
            foreign = sorted({entry.name for entry in final.iterdir()} - set(ours))
        except FileNotFoundError:  # it has just gone
            return
    if foreign:
        raise OutputError(
            f"{final} holds other files, so it is not replaced",
            found=", ".join(foreign[:5]),
            expected="a new folder" + (f", an empty one{or_ours}" if ours else " or an empty one"),
            fix="choose another place (-o)",
        )


def _kind(path: Path) -> str:
    """What is at a path, in words; "" for nothing."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a file"


def _check_parents(final: Path) -> None:
    """The nearest thing above an absent path that is there must be a folder."""
    above = next((each for each in final.parents if os.path.lexists(each)), None)
    if above is not None and not above.is_dir():
        raise OSError(errno.ENOTDIR, f"{above} is not a folder")


# --- Two paths change places in one step, where the system and the file system can do that ----------------------------
# Linux has renameat2(2) with RENAME_EXCHANGE since 3.15 (glibc 2.28), macOS renamex_np(2) with RENAME_SWAP. ext4, XFS,
# Btrfs, F2FS, tmpfs and overlayfs can exchange; NFS, CIFS and most file systems in user space cannot. Windows has no
# such call.


AT_FDCWD = -100
RENAME_EXCHANGE = RENAME_SWAP = 2
# The answers of a kernel, a file system or a sandbox without it. What is really forbidden the plain rename says again.
_CANNOT = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def exchange(first: Path, second: Path) -> bool:
    """Let two files or folders of one file system change places. False, with nothing done, where that cannot be.

    Raises:
        OSError: one of them is not there, lies on another file system, or may not be moved.
    """
    call = _system_call()
    number = errno.ENOSYS if call is None else call(os.fsencode(first), os.fsencode(second))
    if number and number not in _CANNOT:
        raise OSError(number, os.strerror(number), str(first), None, str(second))
    return not number


def identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another one that gets its name later; None if there is none."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


@functools.cache
def _system_call() -> Callable[[bytes, bytes], int] | None:
    """What exchanges two paths and returns 0 or an errno; None where the system's library has none."""
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

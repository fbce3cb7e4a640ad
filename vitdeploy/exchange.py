"""Two paths change places in one step, where the system and the file system can do that; and which of them is where.

Linux has renameat2(2) with RENAME_EXCHANGE since 3.15 (glibc 2.28), macOS renamex_np(2) with RENAME_SWAP. ext4, XFS,
Btrfs, F2FS, tmpfs and overlayfs can exchange; NFS, CIFS and most file systems in user space cannot. Windows has no such
call.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

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
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError, TypeError):  # a Python without ctypes; Windows
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

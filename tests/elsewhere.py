"""vitdeploy as on another system: `environment("win32", folder)` makes every Python below it look like one there.

vitdeploy's modules get a `sys`, `os`, `signal` and so on that lack what macOS or Windows lacks, and nobody can open
/proc and /sys. Other packages see Linux, so their wheels work. What differs in the system itself stays unchecked: the
calls of macOS and Windows, how Windows renames open files and reads `C:\\`, and `spawn` on either.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "VITDEPLOY_TESTS_PRETEND"
ROOT = Path(__file__).parent.parent
# By module, what Python's documentation does not list for the system ("Availability").
LINUX_ALONE = {
    "os": "sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise fdatasync copy_file_range memfd_create "
    "pidfd_open getxattr setxattr splice eventfd O_PATH O_TMPFILE O_DIRECT",
    "signal": "sigtimedwait sigwaitinfo SIGPWR SIGSTKFLT SIGPOLL",
    "time": "CLOCK_BOOTTIME",
    "select": "epoll",
}
POSIX_ALONE = {
    "os": "fork forkpty register_at_fork getuid geteuid getgid getegid getgroups getpgid getpgrp setpgid setsid killpg "
    "getloadavg sysconf uname nice getpriority statvfs pread pwrite mkfifo fchmod chown lchown posix_spawn wait "
    "WNOHANG WIFSIGNALED WTERMSIG WIFEXITED WEXITSTATUS O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_CLOEXEC",
    "signal": "pthread_sigmask pthread_kill sigwait SIGKILL SIGSTOP SIGHUP SIGCHLD SIGALRM SIGQUIT SIGPIPE SIGCONT "
    "SIGUSR1 SIGUSR2 setitimer alarm siginterrupt",
    "time": "clock_gettime CLOCK_MONOTONIC",
    "select": "poll",
    "socket": "AF_UNIX",
}
NAMES = {"darwin": ("Darwin", "posix"), "win32": ("Windows", "nt")}
POSIX_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix")
HIDDEN = ("/proc", "/sys")


class Instead(ModuleType):
    """A module that lacks `missing`, has `changed`, and is the original in all else."""

    def __init__(self, original: ModuleType, missing: set[str], changed: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        vars(self).update(_original=original, _missing=missing, **changed)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_missing"]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(vars(self)["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_original"], name, value)


def pretend(platform: str) -> None:
    system, name = NAMES[platform]
    changed: dict[str, dict[str, Any]] = {
        "sys": {"platform": platform},
        "os": {"name": name, "supports_dir_fd": set()},
        "platform": {"system": lambda: system},
        "ctypes": {"CDLL": Library},
        "subprocess": {"Popen": Popen},
    }
    names = {*changed, *LINUX_ALONE, *POSIX_ALONE}
    missing = {each: set(LINUX_ALONE.get(each, "").split()) for each in names}
    if platform == "win32":
        missing = {each: missing[each] | set(POSIX_ALONE.get(each, "").split()) for each in names}
    instead = {each: Instead(importlib.import_module(each), missing[each], changed.get(each, {})) for each in names}
    gone = POSIX_MODULES if platform == "win32" else ()
    plain = builtins.__import__

    def imported(what: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        ours = globals is not None and str(globals.get("__name__")).partition(".")[0] in ("vitdeploy", "__main__")
        if ours and what in gone:
            raise ModuleNotFoundError(f"No module named {what!r}", name=what)
        return instead[what] if ours and what in instead else plain(what, globals, locals, fromlist, level)

    by_name = importlib.import_module

    def imported_by_name(what: str, package: str | None = None) -> Any:
        if what in gone and str(sys._getframe(1).f_globals.get("__name__")).startswith("vitdeploy"):
            raise ModuleNotFoundError(f"No module named {what!r}", name=what)
        return by_name(what, package)

    builtins.__import__ = imported
    importlib.import_module = imported_by_name
    for module in (os, io, builtins):
        for call in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
            if hasattr(module, call):
                setattr(module, call, _hiding(getattr(module, call)))


def _hiding(call: Callable[..., Any]) -> Callable[..., Any]:
    def hidden(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return call(path, *arguments, **named)

    return hidden


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Takes the flags of Windows, which this system's Popen refuses."""

    def __init__(self, *arguments: Any, creationflags: int = 0, **named: Any) -> None:
        super().__init__(*arguments, **named)


class Library(ctypes.CDLL):
    """Without the calls of Linux; on Windows, without a library of the process itself."""

    def __init__(self, name: str | None, *arguments: Any, **named: Any) -> None:
        if name is None and os.environ[VARIABLE] == "win32":
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *arguments, **named)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("renameat2", "prctl"):
            raise AttributeError(name)
        return super().__getattr__(name)


def environment(platform: str, folder: Path) -> dict[str, str]:
    """Of a process that is on `platform`, as its children are. `folder` is new."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import tests.elsewhere as e\ne.pretend(e.os.environ[e.VARIABLE])\n")
    return {**os.environ, VARIABLE: platform, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}

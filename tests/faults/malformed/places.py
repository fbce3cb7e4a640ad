"""What may lie at a path in the place of a file: links, pipes, folders, devices; and names that no system takes."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

# Names as attackers and other systems write them. Each is refused, or is a name of a file that is not there.
ODD_NAMES = (
    "",
    ".",
    "..",
    "/",
    "nul\0byte",
    "line\nbreak",
    "\x1b[2J\x1b[31mgone",
    "right\u202eleft",
    "x" * 255,
    "y" * 300,
    "z" * 5000,
    "a/" * 3000 + "b",
    "C:\\Windows\\win.ini",
    "\\\\server\\share\\x",
    "..\\x",
    "~root/x",
    "$HOME/x",
    "/dev/zero",
    "/proc/self/mem",
    "/dev/stdin",
    "a//b",
    "./a",
    " lead",
    "trail ",
    "trail.",
    "CON",
    "\ud800",
    "\u0130\u0308",
    "%2e%2e%2fx",
    "-rf",
)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def sparse(path: Path) -> None:
    """Ten gigabytes that take no disk."""
    with path.open("wb") as file:
        file.truncate(10 << 30)


KINDS: dict[str, Callable[[Path], None]] = {
    "a link to nothing": link_to_nothing,
    "a link to itself": link_to_itself,
    "a folder": folder,
    "a pipe": pipe,
    "a socket": unix_socket,
    "an endless device": endless,
    "an empty file": empty,
    "ten gigabytes of zeros": sparse,
}


def another(chance: random.Random, path: Path) -> None:
    """Something else in the place of the file that may be at `path`."""
    path.unlink(missing_ok=True)
    chance.choice(list(KINDS.values()))(path)

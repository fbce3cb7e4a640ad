"""Paths that people and files name: what no file system takes as a name is no file, and not an error; and what a file
system takes as a name need be no UTF-8.

Python before 3.14 raises OSError for a name that is too long. Bytes that are no UTF-8 are lone surrogates in it (PEP
383), which nothing else takes.
"""

from pathlib import Path


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def name_bytes(text: str) -> bytes:
    """The bytes of a name, for digests."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # of Windows, whose names are any numbers of 16 bits
        return text.encode("utf-8", "surrogatepass")


def shown_name(text: str) -> str:
    """A name as messages and documents have it: bytes that are no UTF-8 as \\xff."""
    return name_bytes(text).decode("utf-8", "backslashreplace")


def not_utf8(path: str) -> str:
    """What is wrong with a path for libraries that take UTF-8 alone; "" if nothing is."""
    return "" if shown_name(path) == path else "a path that is no UTF-8, which this library does not take: rename it"

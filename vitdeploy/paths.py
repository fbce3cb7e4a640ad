"""Paths from users and files: a name that no file system accepts counts as a missing file, not as an error; and a name
that a file system accepts need not be UTF-8.

Python before 3.14 raises OSError for a name that is too long. Bytes that are not UTF-8 become lone surrogates (PEP
383), which most other code does not accept.
"""

from pathlib import Path

from vitdeploy.errors import MissingFileError


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


def require_recipe(path: Path) -> None:
    """Raise MissingFileError without a file; it is here because the modules of recipes take long to import."""
    if not is_file(path):
        message = f"no recipe at {str(path)[:1000]}"
        raise MissingFileError(message, fix="check the path; `vitdeploy run --help` shows a recipe")


def name_bytes(text: str) -> bytes:
    """The bytes of a name, for digests."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # on Windows, names are any sequences of 16-bit units
        return text.encode("utf-8", "surrogatepass")


def shown_name(text: str) -> str:
    """A name for messages and documents: bytes that are not UTF-8 become \\xff."""
    return name_bytes(text).decode("utf-8", "backslashreplace")


def not_utf8(path: str) -> str:
    """The problem of a path for libraries that take only UTF-8; "" if it has none."""
    return "" if shown_name(path) == path else "a path that is not UTF-8, which this library does not accept: rename it"

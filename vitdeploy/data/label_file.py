"""Files of class names, one per line, as text editors write them; and what readers of labels repair."""

import codecs
import io
from pathlib import Path

from vitdeploy.errors import DataError, MissingFileError, quoted
from vitdeploy.paths import is_file

DECIMAL = "whole numbers written with a decimal point, read as whole"


class Repairs:
    """Entries of labels that are read in another way than they are written, or left out: how many of each kind, and
    the first of them."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, entry: str, count: int = 1) -> None:
        """`kind`: which entries, and what becomes of them; `entry`: where one is, or what it says."""
        before, first = self._kinds.get(kind, (0, entry))
        self._kinds[kind] = before + count, first

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each kind."""
        return tuple(f"labels: {kind}: {count:,} (first: {first})" for kind, (count, first) in self._kinds.items())


def read_labels(file: Path) -> tuple[str, ...]:
    """The names in a file, one per line, in its order.

    Raises:
        DataError: it is not UTF-8.
    """
    # Not splitlines(): a label may hold other characters that it takes for the end of a line.
    return tuple(read_text(file).removesuffix("\n").split("\n"))


def read_texts(file: Path) -> tuple[str, ...]:
    """The texts in a file, one per line; empty lines are none.

    Raises:
        MissingFileError: no such file.
        DataError: it is not UTF-8, or has no text.
    """
    if not is_file(file):
        raise MissingFileError(f"no texts at {file}", expected="a text file with one text a line", fix="check the path")
    found = tuple(line for line in read_labels(file) if line.strip())
    if not found:
        raise DataError(f"{file} has no text", expected="one text a line")
    return found


def read_text(file: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark, and any line endings. Raises as `read_labels`."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        above = error.object[: error.start].count(b"\n")
        line = error.object.split(b"\n")[above].strip()
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        name = "UTF-16" if wide else "CP1252"
        raise DataError(
            f"{file} is not UTF-8",
            found=f"line {above + 1}: {line[:80]!r}",
            expected="one class name a line, in UTF-8",
            fix=f"write it in UTF-8; where it is {name}: "
            f"iconv -f {name} -t UTF-8 {quoted(file)} > utf8.txt && mv utf8.txt {quoted(file)}",
        ) from None
    return io.StringIO(text, newline=None).read()

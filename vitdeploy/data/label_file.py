"""Files of class names, one per line, as text editors write them; and the repairs that readers of labels make."""

import codecs
import io
from pathlib import Path

from vitdeploy.errors import DataError, MissingFileError, quoted
from vitdeploy.paths import is_file

DECIMAL = "integers written with a decimal point, read as integers"


class Repairs:
    """Label entries that were repaired or ignored: the number of each kind, and its first entry."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, entry: str, count: int = 1) -> None:
        """`kind`: which entries, and how they are handled; `entry`: the location or content of one."""
        before, first = self._kinds.get(kind, (0, entry))
        self._kinds[kind] = before + count, first

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each kind."""
        return tuple(f"labels: {kind}: {count:,} (first: {first})" for kind, (count, first) in self._kinds.items())


def read_labels(file: Path) -> tuple[str, ...]:
    """Return the names in a file, one per line, in order.

    Raises:
        DataError: it is not UTF-8.
    """
    # Not splitlines(): a label may contain other characters that it treats as line ends.
    return tuple(read_text(file).removesuffix("\n").split("\n"))


def read_texts(file: Path) -> tuple[str, ...]:
    """Return the texts in a file, one per line, without empty lines.

    Raises:
        MissingFileError: no such file.
        DataError: it is not UTF-8, or has no text.
    """
    if not is_file(file):
        raise MissingFileError(f"no text file at {file}", expected="one text per line", fix="check the path")
    found = tuple(line for line in read_labels(file) if line.strip())
    if not found:
        raise DataError(f"{file} contains no text", expected="one text per line")
    return found


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark, and with any line endings. Raises as
    `read_labels`."""
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
            expected="one class name per line, in UTF-8",
            fix=f"save it as UTF-8; if it is {name}: "
            f"iconv -f {name} -t UTF-8 {quoted(file)} > utf8.txt && mv utf8.txt {quoted(file)}",
        ) from None
    return io.StringIO(text, newline=None).read()

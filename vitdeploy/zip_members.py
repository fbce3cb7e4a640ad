"""The members of a zip archive of arrays, from anybody: looked at before one of them is read.

NumPy's .npz and PyTorch's .pt are such archives. Only what these two write is taken: members that are stored or
deflated, each name once. Other methods (LZMA) let a member say how much memory unpacking it takes.
"""

import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

# The list of members, of about 130 bytes each where PyTorch wrote it. Python takes 20 times as much for it.
MAX_DIRECTORY, MAX_MEMBERS = 4 << 20, 20_000
# How often their packed size weights may unpack to: they hardly compress, and deflate can expand a thousandfold.
MAX_EXPANSION = 100
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OTHERS = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
ENCRYPTED = 1  # a bit of a member's flags
# What zipfile and numpy raise of a damaged archive, of a damaged stream in it, and of a damaged header in that.
DAMAGED: tuple[type[Exception], ...] = (
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, SyntaxError, OSError, EOFError),
    *(ValueError, TypeError, LookupError, ArithmeticError, RuntimeError),
)
_SIZE = 5  # of the directory, in what zipfile reads at the end of an archive


def members(path: Path) -> list[zipfile.ZipInfo]:
    """The directory of an archive; raises as `members_of`."""
    with path.open("rb") as file:
        return members_of(file)


def members_of(file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """The directory of an archive that is open, or in memory.

    Raises:
        zipfile.BadZipFile: no whole archive, or one that is not as NumPy and PyTorch write it; says what.
        OSError: it cannot be read.
    """
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end is not None and end[_SIZE] > MAX_DIRECTORY:
        raise zipfile.BadZipFile(f"a list of members of {end[_SIZE]:,} bytes, at most {MAX_DIRECTORY:,} are read")
    try:
        with zipfile.ZipFile(file) as archive:
            found = archive.infolist()
    except UnicodeDecodeError as error:
        raise zipfile.BadZipFile("a member whose name is not UTF-8") from error
    except (NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise zipfile.BadZipFile(str(error)) from error
    size = file.seek(0, 2)
    for member in found:
        if member.flag_bits & ENCRYPTED:
            raise zipfile.BadZipFile(f"an encrypted member, {member.filename!r}")
        if member.compress_type not in METHODS:
            kind = OTHERS.get(member.compress_type, f"method {member.compress_type}")
            raise zipfile.BadZipFile(f"the member {member.filename!r} is packed by {kind}, not stored or deflated")
    if len(found) > MAX_MEMBERS:
        raise zipfile.BadZipFile(f"{len(found):,} members, at most {MAX_MEMBERS:,} are read")
    names = [member.filename for member in found]
    if len(set(names)) < len(names):
        raise zipfile.BadZipFile("two members of one name")
    if sum(member.compress_size for member in found) > size:
        raise zipfile.BadZipFile(f"members of more than the {size:,} bytes of the file")
    return found

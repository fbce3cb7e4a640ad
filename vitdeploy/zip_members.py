"""The members of an untrusted zip archive of arrays, checked before any of them is read.

NumPy's .npz and PyTorch's .pt are such archives. Only the forms that these two write are accepted: members that are
stored or deflated, with unique names. With other methods (LZMA) a member determines the memory for unpacking it.
"""

import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

# Maximum bytes of the directory, about 130 per member from PyTorch. Python needs 20 times as much memory for it.
MAX_DIRECTORY, MAX_MEMBERS = 4 << 20, 20_000
# Maximum ratio of unpacked to packed size: weights hardly compress, and deflate can expand a thousandfold.
MAX_EXPANSION = 100
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OTHERS = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
ENCRYPTED = 1  # a bit of a member's flags
# Errors of zipfile and numpy for a damaged archive, a damaged stream in it, and a damaged header in that.
DAMAGED: tuple[type[Exception], ...] = (
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, SyntaxError, OSError, EOFError),
    *(ValueError, TypeError, LookupError, ArithmeticError, RuntimeError),
)
_SIZE = 5  # index of the directory size in zipfile's end-of-archive record


def members(path: Path) -> list[zipfile.ZipInfo]:
    """The directory of an archive; errors as in `members_of`."""
    with path.open("rb") as file:
        return members_of(file)


def members_of(file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """The directory of an open archive, or one in memory.

    Raises:
        zipfile.BadZipFile: an incomplete archive, or one that NumPy and PyTorch would not write; the message says why.
        OSError: it cannot be read.
    """
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end is not None and end[_SIZE] > MAX_DIRECTORY:
        raise zipfile.BadZipFile(f"a directory of {end[_SIZE]:,} bytes, expected at most {MAX_DIRECTORY:,}")
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
            raise zipfile.BadZipFile(f"the member {member.filename!r} uses {kind}, expected stored or deflated")
    if len(found) > MAX_MEMBERS:
        raise zipfile.BadZipFile(f"{len(found):,} members, expected at most {MAX_MEMBERS:,}")
    names = [member.filename for member in found]
    if len(set(names)) < len(names):
        raise zipfile.BadZipFile("two members with the same name")
    if sum(member.compress_size for member in found) > size:
        raise zipfile.BadZipFile(f"members that are larger than the {size:,} bytes of the file")
    return found

"""The bytes of a packed bundle that are no file's content: a stored-only zip of exactly one form.

They follow from the names, sizes and CRC-32 of the files in their order, so that a writer emits them and a reader
compares them. There is nothing in between to interpret: no flags, compression, comments, times, attributes or extra
fields but these.

- For each file: its local header, then its bytes. Then the central directory, then the end of it, and nothing more.
- `manifest.json` comes first, then the signature if there is one, then what the manifest lists, sorted by name.
- Times are 1980-01-01 00:00:00, attributes those of a regular file of mode 0644, names ASCII.
- The zip64 fields stand where a size or an offset does not fit 32 bits, and only there.

Source: PKWARE, APPNOTE.TXT 6.3.10, sections 4.3 (records), 4.4 (fields) and 4.5.3 (the zip64 extra field).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

_LOCAL = struct.Struct("<4s5H3I2H")
_LOCAL_FIELDS = (
    *("signature", "version needed", "flags", "compression method", "time", "date", "CRC-32", "packed size", "size"),
    *("length of the name", "length of the extra fields"),
)
_LOCAL_SIGNATURE = b"PK\x03\x04"
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_NOT_HERE = 0xFFFFFFFF  # "see the zip64 field"
_ZIP64_FIELD = 1
_STORED, _ZIP64 = 10, 45  # the version of the format that is needed, times ten
_UNIX = 3
_FIRST_DATE = 1 << 5 | 1  # 1980-01-01
_REGULAR_FILE = 0o100644 << 16


@dataclass(frozen=True)
class Member:
    """One file: its name, its size in bytes, the CRC-32 of its bytes, and where its header starts in the archive."""

    name: str
    bytes: int
    crc: int = 0
    offset: int = 0


def local_header(member: Member) -> bytes:
    """The header before the bytes of a file."""
    name, extra = member.name.encode("ascii"), b""
    size, version = member.bytes, _STORED
    if size >= _NOT_HERE:
        extra, size, version = struct.pack("<2H2Q", _ZIP64_FIELD, 16, member.bytes, member.bytes), _NOT_HERE, _ZIP64
    fields = (version, 0, 0, 0, _FIRST_DATE, member.crc, size, size, len(name), len(extra))
    return _LOCAL.pack(_LOCAL_SIGNATURE, *fields) + name + extra


def begins_with(data: bytes, name: str) -> bool:
    """Whether `data` begins as the local header of a file of that name does."""
    if len(data) < _LOCAL.size + len(name):
        return False
    fields = _LOCAL.unpack_from(data)
    return fields[0] == _LOCAL_SIGNATURE and fields[9] == len(name) and data[_LOCAL.size :].startswith(name.encode())


def read_local_header(data: bytes, name: str, size: int | None, offset: int) -> tuple[Member, str]:
    """The file that a local header at `offset` says, and "" or how it differs from the one header that is allowed.

    Args:
        data: as many bytes as the header of a file with this name and size takes.
        size: in bytes, below 4 GiB where it is None, as the header says.
    """
    fields = _LOCAL.unpack_from(data)
    member = Member(name, fields[8] if size is None else size, fields[6], offset)
    wanted = local_header(member)
    if data == wanted:
        return member, ""
    for field, is_now, should_be in zip(_LOCAL_FIELDS, fields, _LOCAL.unpack_from(wanted), strict=True):
        if is_now != should_be:
            return member, f"{field} {is_now!r} instead of {should_be!r}"
    return member, "another name or other extra fields"


def directory(members: Sequence[Member]) -> bytes:
    """What stands behind the bytes of the last file: the central directory and its end."""
    last = members[-1]
    start = last.offset + len(local_header(last)) + last.bytes
    entries = b"".join(_central_header(member) for member in members)
    count, size, end = len(members), len(entries), b""
    if start >= _NOT_HERE:
        end += _END64.pack(
            b"PK\x06\x06", _END64.size - 12, _UNIX << 8 | _ZIP64, _ZIP64, 0, 0, count, count, size, start
        )
        end += _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
    end += _END.pack(b"PK\x05\x06", 0, 0, count, count, size, min(start, _NOT_HERE), 0)
    return entries + end


def _central_header(member: Member) -> bytes:
    name = member.name.encode("ascii")
    wide = [member.bytes] * 2 if member.bytes >= _NOT_HERE else []
    wide += [member.offset] if member.offset >= _NOT_HERE else []
    extra = struct.pack(f"<2H{len(wide)}Q", _ZIP64_FIELD, 8 * len(wide), *wide) if wide else b""
    version, size = _ZIP64 if wide else _STORED, min(member.bytes, _NOT_HERE)
    times = (0, _FIRST_DATE)
    fields = (_UNIX << 8 | version, version, 0, 0, *times, member.crc, size, size, len(name), len(extra))
    return _CENTRAL.pack(b"PK\x01\x02", *fields, 0, 0, 0, _REGULAR_FILE, min(member.offset, _NOT_HERE)) + name + extra

"""Damage that knows nothing of a format: what broken disks, broken downloads and attackers do to bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

Mutation = Callable[[random.Random, bytes], bytes]
# Where sizes and counts break: around zero and around the widths of integers.
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 62, (1 << 63) - 1, 1 << 63)
OTHER_FILES = (
    b"",
    b"\n",
    b"\0",
    b"<!DOCTYPE html><html><body>404</body></html>\n",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    b"PK\x05\x06" + bytes(18),
    b"PK\x03\x04" + bytes(26),
    b"\x1f\x8b\x08\x00" + bytes(16),
    b"\x7fELF\x02\x01\x01" + bytes(57),
    b"%PDF-1.7\n",
    b"#!/bin/sh\n",
    b"\xff\xfe" + "{}".encode("utf-16-le"),
    b"{}",
    b"[" * 5000,
    bytes(4096),
    b"\xff" * 4096,
    b"\x80" * 4096,
    bytes(range(256)) * 16,
)


def truncated(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def truncated_early(chance: random.Random, data: bytes) -> bytes:
    return data[: min(len(data) - 1, 1 << chance.randrange(1, 12))]


def one_bit(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(8 * len(data))
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def some_bytes(chance: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randrange(2, 12)):
        found[chance.randrange(len(found))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    return bytes(found)


def head_bytes(chance: random.Random, data: bytes) -> bytes:
    """Where headers are."""
    head = data[:256]
    return some_bytes(chance, head) + data[256:]


def edge_number(chance: random.Random, data: bytes) -> bytes:
    """A number of 2, 4 or 8 bytes at which sizes break, in either order, somewhere."""
    order, (kind, size) = chance.choice("<>"), chance.choice((("H", 2), ("I", 4), ("Q", 8)))
    number = struct.pack(order + kind, chance.choice(EDGES) % (1 << 8 * size))
    at = chance.randrange(max(1, len(data) - size))
    return data[:at] + number + data[at + size :]


def cut_out(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start + chance.randrange(1, 65) :]


def put_in(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + chance.randbytes(chance.randrange(1, 65)) + data[start:]


def repeated(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data))
    part = data[start : start + chance.randrange(1, 257)]
    return data[:start] + part * chance.randrange(2, 9) + data[start:]


def swapped(chance: random.Random, data: bytes) -> bytes:
    size = chance.randrange(1, 129)
    one, other = sorted(chance.randrange(max(1, len(data) - size)) for _ in range(2))
    if other < one + size:
        return data[:one] + data[one : one + size][::-1] + data[one + size :]
    middle = data[one + size : other]
    return data[:one] + data[other : other + size] + middle + data[one : one + size] + data[other + size :]


def blanked(chance: random.Random, data: bytes) -> bytes:
    start, size = chance.randrange(len(data)), chance.choice((16, 64, 512, 4096))
    return data[:start] + bytes(min(size, len(data) - start)) + data[start + size :]


def twice(chance: random.Random, data: bytes) -> bytes:
    return data + data


def trailing(chance: random.Random, data: bytes) -> bytes:
    return data + chance.randbytes(chance.choice((1, 7, 4096)))


def preceded(chance: random.Random, data: bytes) -> bytes:
    return chance.choice((b"\0", b"\xef\xbb\xbf", b"\n", chance.randbytes(8))) + data


def another_file(chance: random.Random, data: bytes) -> bytes:
    return chance.choice(OTHER_FILES)


MUTATIONS: dict[str, Mutation] = {
    "cut short": truncated,
    "cut short in its head": truncated_early,
    "one bit": one_bit,
    "some bytes": some_bytes,
    "some bytes of its head": head_bytes,
    "a number at an edge": edge_number,
    "a piece cut out": cut_out,
    "a piece put in": put_in,
    "a piece repeated": repeated,
    "two pieces swapped": swapped,
    "a piece blanked": blanked,
    "twice": twice,
    "bytes behind it": trailing,
    "bytes before it": preceded,
    "another kind of file": another_file,
}

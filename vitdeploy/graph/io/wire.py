"""Walk the bytes of an ONNX file without building anything of it: how many fields, how deep, whether it is whole.

A parser allocates for every message that it meets: two bytes of a file can cost a hundred of memory, so a file within
its size limit can still exhaust the machine. This walk allocates nothing and follows lengths only where they fit.
Source: Protocol Buffers encoding, protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

from vitdeploy.errors import GraphError, UnsafeGraphError

# Swin-L as TorchScript exports it, the largest graph known to us, has 150,000 fields and nests 7 deep.
MAX_FIELDS = 1_000_000
MAX_DEPTH = 24
# Numbers packed as variable-length integers take up to 8 times their bytes in memory. Weights are not stored so.
MAX_PACKED_BYTES = 1 << 26

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
# Field types whose bytes are not integers packed one after the other: double, float, string, message, bytes.
_NOT_PACKED = frozenset({1, 2, 9, 11, 12})


def survey(content: bytes, name: str) -> None:
    """Check the frame of a serialised ModelProto.

    Raises:
        GraphError: not the encoding of a model, or not whole.
        UnsafeGraphError: more messages, or deeper ones, than any real model has.
    """
    fields = packed = 0
    stack: list[tuple[int, int, Any, int]] = [(0, len(content), onnx.ModelProto.DESCRIPTOR, 0)]
    while stack:
        position, end, message, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise UnsafeGraphError(f"{name} is nested too deeply", wanted=f"at most {MAX_DEPTH} levels of messages")
        known = message.fields_by_number
        for number, kind, first, behind in _fields(content, position, end, name):
            fields += 1
            if fields > MAX_FIELDS:
                raise _too_many(name)
            field = known.get(number) if kind == _LENGTH else None
            if field is not None and field.message_type is not None:
                stack.append((first, behind, field.message_type, depth + 1))
            elif field is not None and field.type not in _NOT_PACKED:
                packed += behind - first
                if packed > MAX_PACKED_BYTES:
                    raise UnsafeGraphError(
                        f"{name} holds too many packed numbers", wanted=f"at most {MAX_PACKED_BYTES:,} bytes of them"
                    )


def top_level(content: bytes, field: int, name: str) -> Iterator[bytes]:
    """The bytes of each text or message of one number in a serialised ModelProto; errors as `survey`."""
    for count, (number, kind, first, behind) in enumerate(_fields(content, 0, len(content), name), 1):
        if count > MAX_FIELDS:
            raise _too_many(name)
        if kind == _LENGTH and number == field:
            yield content[first:behind]


def _fields(content: bytes, position: int, end: int, name: str) -> Iterator[tuple[int, int, int, int]]:
    """(number, kind, first byte, byte behind the last) of each field of the message between two bytes.

    Raises:
        GraphError: of an unknown kind, or longer than the message.
    """
    while position < end:
        tag, first = _varint(content, position, end, name)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(content, first, end, name)
        elif kind == _LENGTH:
            size, first = _varint(content, first, end, name)
            position = first + size
        elif kind in (_FIXED64, _FIXED32):
            position = first + (8 if kind == _FIXED64 else 4)
        else:
            raise _broken(name, f"a field of unknown kind {kind} at byte {first:,}")
        if position > end:
            found = f"{position - first:,} bytes announced at byte {first:,} where {end - first:,} are left"
            raise _broken(name, found)
        yield tag >> 3, kind, first, position


def _varint(content: bytes, position: int, end: int, name: str) -> tuple[int, int]:
    """(value, position behind it) of a variable-length integer of at most 10 bytes."""
    value = shift = 0
    while position < end and shift < 70:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _broken(name, f"a number without an end at byte {position:,}")


def _too_many(name: str) -> UnsafeGraphError:
    return UnsafeGraphError(f"{name} has too many parts", wanted=f"at most {MAX_FIELDS:,} fields")


def _broken(name: str, found: str) -> GraphError:
    return GraphError(f"{name} is not a valid ONNX file", found=found, wanted="a whole ONNX model", fix="get it again")

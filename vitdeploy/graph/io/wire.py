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
        while position < end:
            fields += 1
            if fields > MAX_FIELDS:
                raise UnsafeGraphError(f"{name} has too many parts", wanted=f"at most {MAX_FIELDS:,} fields")
            tag, position = _varint(content, position, end, name)
            kind = tag & 7
            if kind == _VARINT:
                _, position = _varint(content, position, end, name)
                continue
            size = 8 if kind == _FIXED64 else 4
            if kind == _LENGTH:
                size, position = _varint(content, position, end, name)
            elif kind not in (_FIXED64, _FIXED32):
                raise _broken(name, f"a field of unknown kind {kind} at byte {position:,}")
            if size > end - position:
                raise _broken(name, f"{size:,} bytes announced at byte {position:,} where {end - position:,} are left")
            field = known.get(tag >> 3) if kind == _LENGTH else None
            if field is not None and field.message_type is not None:
                stack.append((position, position + size, field.message_type, depth + 1))
            elif field is not None and field.type not in _NOT_PACKED:
                packed += size
                if packed > MAX_PACKED_BYTES:
                    raise UnsafeGraphError(
                        f"{name} holds too many packed numbers", wanted=f"at most {MAX_PACKED_BYTES:,} bytes of them"
                    )
            position += size


def top_level(content: bytes, name: str) -> Iterator[tuple[int, bytes]]:
    """The number and the bytes of each text or message of a serialised ModelProto, but for its graph; errors as
    `survey`."""
    position, fields, end = 0, 0, len(content)
    while position < end:
        fields += 1
        if fields > MAX_FIELDS:
            raise UnsafeGraphError(f"{name} has too many parts", wanted=f"at most {MAX_FIELDS:,} fields")
        tag, position = _varint(content, position, end, name)
        kind, size = tag & 7, 8 if tag & 7 == _FIXED64 else 4
        if kind == _VARINT:
            _, position = _varint(content, position, end, name)
            continue
        if kind == _LENGTH:
            size, position = _varint(content, position, end, name)
        elif kind not in (_FIXED64, _FIXED32):
            raise _broken(name, f"a field of unknown kind {kind} at byte {position:,}")
        if size > end - position:
            raise _broken(name, f"{size:,} bytes announced at byte {position:,} where {end - position:,} are left")
        if kind == _LENGTH and tag >> 3 != onnx.ModelProto.GRAPH_FIELD_NUMBER:
            yield tag >> 3, content[position : position + size]
        position += size


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


def _broken(name: str, found: str) -> GraphError:
    return GraphError(f"{name} is not a valid ONNX file", found=found, wanted="a whole ONNX model", fix="get it again")

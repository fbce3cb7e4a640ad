"""ONNX files whose bytes are no serialised model, or one that no writer makes.

Source: Protocol Buffers encoding, protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.faults.malformed import bytewise, places
from tests.faults.malformed.kinds import Attempt, Damage, Table

VARINT, FIXED64, LENGTH, START_GROUP, END_GROUP, FIXED32 = range(6)
# Fields of ModelProto, GraphProto, NodeProto, AttributeProto and TensorProto (onnx.proto3).
IR_VERSION, GRAPH, OPSET_IMPORT, METADATA = 1, 7, 8, 14
NODE, INITIALIZER, DOC_STRING, INPUT, VALUE_INFO = 1, 5, 10, 11, 13
ATTRIBUTE, ATTRIBUTE_GRAPH = 5, 6
DIMS, RAW_DATA = 1, 9
# Messages inside messages of the file, as far as lengths are looked for: graph, nodes, weights, attributes.
INNER = {(GRAPH,), (GRAPH, NODE), (GRAPH, INITIALIZER), (GRAPH, NODE, ATTRIBUTE), (GRAPH, INPUT)}


def varint(value: int, least: int = 1) -> bytes:
    """At least `least` bytes long, which is longer than it must be."""
    found = []
    while value > 0x7F or len(found) < least - 1:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def field(number: int, payload: bytes | int) -> bytes:
    if isinstance(payload, int):
        return varint(number << 3 | VARINT) + varint(payload)
    return varint(number << 3 | LENGTH) + varint(len(payload)) + payload


def fields(data: bytes, start: int = 0, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    """(numbers from the top, where its tag begins, where its payload begins, where it ends) of each field with a
    length."""
    at = 0
    while at < len(data):
        begin = at
        tag, at = _read(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            _, at = _read(data, at)
        elif kind == LENGTH:
            size, at = _read(data, at)
            yield (*path, number), start + begin, start + at, start + at + size
            if (*path, number) in INNER:
                yield from fields(data[at : at + size], start + at, (*path, number))
            at += size
        else:
            at += 8 if kind == FIXED64 else 4


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7


WIRE = Table()


def _of(change: Callable[[random.Random, bytes], bytes]) -> Callable[[Attempt], None]:
    def make(attempt: Attempt) -> None:
        attempt.write("model.onnx", change(attempt.random, attempt.seeds.graph.read_bytes()))

    return make


def _weights(data: bytes) -> list[tuple[int, int]]:
    return [(start, end) for path, _, start, end in fields(data) if path == (GRAPH, INITIALIZER, RAW_DATA)]


def _structure(chance: random.Random, data: bytes) -> bytes:
    """Bits outside of the weights."""
    inside = {at for start, end in _weights(data) for at in range(start, end)}
    free, found = [at for at in range(len(data)) if at not in inside], bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        found[chance.choice(free)] ^= 1 << chance.randrange(8)
    return bytes(found)


def _length(chance: random.Random, data: bytes) -> bytes:
    """A length that is not what follows."""
    _, begin, start, end = chance.choice(list(fields(data)))
    tag = _read(data, begin)[1]
    size = end - start
    lie = chance.choice((0, size + 1, max(0, size - 1), size + 4096, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1))
    return data[:tag] + varint(lie) + data[start:]


def _long_varint(chance: random.Random, data: bytes) -> bytes:
    """A length in more bytes than it needs: allowed up to ten."""
    _, begin, start, end = chance.choice(list(fields(data)))
    tag = _read(data, begin)[1]
    return data[:tag] + varint(end - start, chance.randrange(2, 13)) + data[start:]


def _endless_varint(chance: random.Random, data: bytes) -> bytes:
    at = chance.choice([begin for _, begin, _, _ in fields(data)])
    return data[:at] + b"\xff" * chance.choice((9, 10, 11, 200)) + data[at:]


def _unknown(chance: random.Random, data: bytes) -> bytes:
    """Fields that ONNX does not define, of every kind."""
    number = chance.choice((0, 25, 5000, (1 << 29) - 1, 1 << 29))
    tags = {
        VARINT: varint(1 << 63),
        FIXED64: bytes(8),
        LENGTH: varint(3) + b"abc",
        START_GROUP: b"",
        END_GROUP: b"",
        FIXED32: bytes(4),
        6: b"",
        7: b"",
    }
    kind = chance.choice(list(tags))
    return data + (varint(number << 3 | kind) + tags[kind]) * chance.choice((1, 1000, 200_000))


def _again(chance: random.Random, data: bytes) -> bytes:
    """A field a second time: a parser takes the last number, and merges messages."""
    _, begin, _, end = chance.choice([each for each in fields(data) if len(each[0]) == 1])
    return data + data[begin:end] * chance.choice((1, 2, 100))


def _again_inside(chance: random.Random, data: bytes) -> bytes:
    """A second graph, which is merged with the first."""
    part = chance.choice([data[begin:end] for path, begin, _, end in fields(data) if len(path) == 2])
    return data + field(GRAPH, part * chance.choice((1, 3, 500)))


def _other_kind(chance: random.Random, data: bytes) -> bytes:
    """A known field of another wire type."""
    number = chance.choice((IR_VERSION, 2, 3, 4, 5, 6, GRAPH, OPSET_IMPORT, METADATA, 20, 25))
    kind = chance.choice((VARINT, FIXED64, LENGTH, FIXED32))
    payload = {VARINT: varint(7), FIXED64: bytes(8), LENGTH: varint(2) + b"\x08\x01", FIXED32: bytes(4)}[kind]
    return varint(number << 3 | kind) + payload + data


def _groups(chance: random.Random, data: bytes) -> bytes:
    depth = chance.choice((1, 30, 3000, 100_000))
    return data + varint(9 << 3 | START_GROUP) * depth + varint(9 << 3 | END_GROUP) * (depth - chance.randrange(2))


def _nested(chance: random.Random, data: bytes) -> bytes:
    """A graph in an attribute of a node of a graph ..."""
    content = b""
    for _ in range(chance.choice((3, 7, 30, 300, 3000))):
        content = field(NODE, field(ATTRIBUTE, field(ATTRIBUTE_GRAPH, content)))
    return data + field(GRAPH, content)


def _nested_types(chance: random.Random, data: bytes) -> bytes:
    """A sequence of a sequence of ..., as the type of a value."""
    content = b""
    for _ in range(chance.choice((5, 50, 500, 5000))):
        content = field(4, field(1, content))
    value = field(1, b"v") + field(2, content)
    return data + field(GRAPH, field(chance.choice((INPUT, 12, VALUE_INFO)), value))


def _many(chance: random.Random, data: bytes) -> bytes:
    """Two bytes each, and an object each where they are parsed."""
    number = chance.choice((NODE, INITIALIZER, INPUT, VALUE_INFO))
    return data + field(GRAPH, field(number, b"") * chance.choice((10_000, 100_000, 3_000_000)))


def _packed(chance: random.Random, data: bytes) -> bytes:
    """Packed numbers, each of which takes eight bytes in memory."""
    size = chance.choice((1000, 1_000_000, 80_000_000))
    number = chance.choice((DIMS, 4, 5, 7, 10, 11))
    return data + field(GRAPH, field(INITIALIZER, field(8, b"p") + field(number, bytes(size))))


def _text(chance: random.Random, data: bytes) -> bytes:
    """Text that is not UTF-8, or no text for a terminal."""
    text = chance.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\x1b]0;gone\x07", b"a\0b", b"n" * 5_000_000))
    node = field(chance.choice((1, 2, 3, 4, 6, 7)), text)
    holder = chance.choice(
        (field(GRAPH, field(NODE, node)), field(GRAPH, field(2, text)), field(2, text), field(4, text))
    )
    return data + holder


def _metadata(chance: random.Random, data: bytes) -> bytes:
    """What vitdeploy writes into its own files, in the hand of a stranger."""
    value = chance.choice(
        (
            b"",
            b"null",
            b"{}",
            b"[" * 100_000,
            b"9" * 50_000,
            b'{"task": 1}',
            b'{"name": "\\ud800"}',
            b"\xff",
            b"{" * 900,
        )
    )
    entry = field(1, b"vitdeploy") + field(2, value)
    return data + field(METADATA, entry) * chance.choice((1, 2))


def _weight_size(chance: random.Random, data: bytes) -> bytes:
    """A weight that holds less, more, or nothing of what it declares: the lengths around it are right."""
    declared = field(DIMS, 2) + field(DIMS, 2) + field(2, 1) + field(8, b"w")
    held = chance.choice((0, 15, 17, 1 << 20))
    return data + field(GRAPH, field(INITIALIZER, declared + field(RAW_DATA, bytes(held))))


def _negative(chance: random.Random, data: bytes) -> bytes:
    """Numbers of ten bytes, which are below zero."""
    minus = (1 << 64) - chance.choice((1, 2, 1 << 31, 1 << 63))
    return data + chance.choice(
        (
            field(IR_VERSION, minus),
            field(OPSET_IMPORT, field(1, b"") + field(2, minus)),
            field(GRAPH, field(INITIALIZER, field(DIMS, minus) + field(2, 1) + field(8, b"w"))),
            field(GRAPH, field(INITIALIZER, field(DIMS, 1) + field(2, minus) + field(8, b"w"))),
        )
    )


def _empty_model(chance: random.Random, data: bytes) -> bytes:
    """A header, and nothing or little in it."""
    header = field(IR_VERSION, 8) + field(OPSET_IMPORT, field(1, b"") + field(2, 17))
    return chance.choice((header, header + field(GRAPH, b""), field(GRAPH, b""), header + field(GRAPH, field(2, b"g"))))


_CHANGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "a length that lies": _length,
    "a length longer than it must be": _long_varint,
    "a number without an end": _endless_varint,
    "unknown fields": _unknown,
    "a field again": _again,
    "a part of the graph again": _again_inside,
    "a field of another wire type": _other_kind,
    "groups": _groups,
    "graphs in graphs": _nested,
    "types in types": _nested_types,
    "millions of empty messages": _many,
    "packed numbers": _packed,
    "text that is none": _text,
    "metadata of vitdeploy": _metadata,
    "a weight of another size": _weight_size,
    "numbers below zero": _negative,
    "an empty model": _empty_model,
    "bits of its structure": _structure,
}
WIRE += [Damage(name, _of(change)) for name, change in {**bytewise.MUTATIONS, **_CHANGES}.items()]


@WIRE.add("something else in its place")
def _place(attempt: Attempt) -> None:
    places.another(attempt.random, attempt.given / "model.onnx")

"""Layout of packed bundles, SHA-256 texts, and the checks that the graphs of a flow fit together."""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.errors import DigestError, InputError
from vitdeploy.spec import EngineSpec, FlowPart, FlowSpec, TensorSpec

# --- The bytes of a packed bundle around the files' contents: a stored-only zip of exactly one form -------------------
# They follow from the names, sizes and CRC-32 of the files in their order, so a writer emits them and a reader compares
# them. Nothing is left to interpret: no other flags, compression, comments, times, attributes or extra fields are
# allowed.
#
# - For each file: its local header, then its bytes. Then the central directory, then the end of it, and nothing more.
# - `manifest.json` comes first, then the signature if there is one, then what the manifest lists, sorted by name.
# - Times are 1980-01-01 00:00:00, attributes those of a regular file of mode 0644, names ASCII.
# - The zip64 fields stand where a size or an offset does not fit 32 bits, and only there.
#
# Source: PKWARE, APPNOTE.TXT 6.3.10, sections 4.3 (records), 4.4 (fields) and 4.5.3 (the zip64 extra field).


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
class PackedMember:
    """One file: its name, its size in bytes, the CRC-32 of its bytes, and where its header starts in the archive."""

    name: str
    bytes: int
    crc: int = 0
    offset: int = 0


def local_header(member: PackedMember) -> bytes:
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


def read_local_header(data: bytes, name: str, size: int | None, offset: int) -> tuple[PackedMember, str]:
    """Return the member described by the local header at `offset`, and "" or how the header differs from the only one
    allowed.

    Args:
        data: the header's bytes, as long as the header of a file with this name and size.
        size: in bytes; None takes the size from the header, which is then below 4 GiB.
    """
    fields = _LOCAL.unpack_from(data)
    member = PackedMember(name, fields[8] if size is None else size, fields[6], offset)
    expected = local_header(member)
    if data == expected:
        return member, ""
    for field, is_now, should_be in zip(_LOCAL_FIELDS, fields, _LOCAL.unpack_from(expected), strict=True):
        if is_now != should_be:
            return member, f"{field} {is_now!r} instead of {should_be!r}"
    return member, "a different name or extra fields"


def directory(members: Sequence[PackedMember]) -> bytes:
    """Return the bytes after the last file: the central directory and its end record."""
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


def _central_header(member: PackedMember) -> bytes:
    name = member.name.encode("ascii")
    wide = [member.bytes] * 2 if member.bytes >= _NOT_HERE else []
    wide += [member.offset] if member.offset >= _NOT_HERE else []
    extra = struct.pack(f"<2H{len(wide)}Q", _ZIP64_FIELD, 8 * len(wide), *wide) if wide else b""
    version, size = _ZIP64 if wide else _STORED, min(member.bytes, _NOT_HERE)
    times = (0, _FIRST_DATE)
    fields = (_UNIX << 8 | version, version, 0, 0, *times, member.crc, size, size, len(name), len(extra))
    return _CENTRAL.pack(b"PK\x01\x02", *fields, 0, 0, 0, _REGULAR_FILE, min(member.offset, _NOT_HERE)) + name + extra


# --- SHA-256 in text form: "sha256:HEX" -------------------------------------------------------------------------------


def digest_hex(text: object) -> str:
    """Return the lower-case hex digits of a SHA-256 written as "sha256:HEX" or "HEX".

    Raises:
        InputError: not a SHA-256.
    """
    found = text.removeprefix("sha256:").lower() if isinstance(text, str) else ""
    if not re.fullmatch(r"[0-9a-f]{64}", found):
        raise InputError(f"{str(text)[:80]!r} is not a SHA-256", expected="sha256: and 64 hexadecimal digits")
    return found


def check_digest(path: Path, found: str, expected: str, of: str) -> None:
    """Raise DigestError unless `found`, the SHA-256 of the part named by `of`, is the one that the user expects."""
    if found != expected:
        raise DigestError(
            f"{path} is not the expected bundle",
            found=f"sha256:{found} of the {of}",
            expected=f"sha256:{expected}",
            fix="get the bundle again from the source of the digest",
        )


# --- Checks that the graphs of a flow fit together; all problems are reported at once ---------------------------------


@dataclass(frozen=True)
class PartTensors:
    """The inputs and outputs of one graph."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def tensors_of(parts: Sequence[EngineSpec]) -> dict[str, PartTensors]:
    """Return the inputs and outputs of an engine's parts by name."""
    return {part.part: PartTensors(part.inputs, part.outputs) for part in parts}


def link(flow: FlowSpec, source: str) -> tuple[str, str] | None:
    """Return the (part, output) that a source names; None for an input of the flow."""
    part, dot, output = source.partition(".")
    return (part, output) if dot and part in {each.name for each in flow.parts} else None


def mismatches(flow: FlowSpec, graphs: Mapping[str, PartTensors]) -> list[str]:
    """Return every mismatch between these graphs and the flow, one line each: names, types, ranks, fixed sizes.

    The leading axes are not compared: each graph has its own batch size.
    """
    if not flow.parts:
        return ["the flow has no part"]
    found = [f"{part.name}: no such graph" for part in flow.parts if part.name not in graphs]
    names = [part.name for part in flow.parts]
    found += [f"{name}: not part of the flow" for name in graphs if name not in names]
    found += [f"{name}: runs twice" for name in sorted({name for name in names if names.count(name) > 1})]
    found += [f"{part.name}: repeats, but is not the last part" for part in flow.parts[:-1] if part.repeats]
    if found:
        return found
    given: dict[str, tuple[str, TensorSpec]] = {}
    before: list[FlowPart] = []
    for part in flow.parts:
        found += _of_part(flow, part, before, graphs, given)
        before.append(part)
    found += _repeated(flow, graphs)
    for name, source in flow.outputs.items():
        linked = link(flow, source)
        if linked is None or _named(graphs[linked[0]].outputs, linked[1]) is None:
            found.append(f"output {name}: {source} does not exist")
    return found


def _repeated(flow: FlowSpec, graphs: Mapping[str, PartTensors]) -> Iterator[str]:
    """The mismatches of a repeated last part: it needs logits to choose tokens, and caches that can start empty."""
    last = flow.parts[-1]
    if not last.repeats:
        return
    if flow.outputs.get("logits", "").partition(".")[0] != last.name:
        yield f"{last.name}: repeats, but has no logits"
    for tensor in graphs[last.name].inputs:
        sizes = tensor.shape[1:2] + tensor.shape[3:]
        if tensor.name in last.carries and (len(tensor.shape) != 4 or not all(isinstance(s, int) for s in sizes)):
            yield f"{last.name}.{tensor.name}: takes {_shown(tensor)}, expected [batch, heads, length, width]"


def _of_part(
    flow: FlowSpec,
    part: FlowPart,
    before: Sequence[FlowPart],
    graphs: Mapping[str, PartTensors],
    given: dict[str, tuple[str, TensorSpec]],
) -> Iterator[str]:
    """The mismatches of one part. `given`: the inputs of the flow so far, and where each was used first."""
    graph = graphs[part.name]
    fed = [*part.feeds, *part.carries, *([part.token] if part.token is not None else [])]
    own = [tensor.name for tensor in graph.inputs]
    yield from (f"{part.name}.{name}: nothing feeds this input" for name in own if name not in fed)
    yield from (f"{part.name}.{name}: the graph has no such input" for name in fed if name not in own)
    yield from (f"{part.name}.{name}: fed twice" for name in sorted({name for name in fed if fed.count(name) > 1}))
    earlier = {each.name: each for each in before}
    for name, source in part.feeds.items():
        expected, linked = _named(graph.inputs, name), link(flow, source)
        if expected is None:
            continue
        if linked is None:
            first, seen = given.setdefault(source, (f"{part.name}.{name}", expected))
            yield from _unlike(f"{part.name}.{name}", expected, f"{first} takes {source},", seen)
        elif linked[0] not in earlier:
            yield f"{part.name}.{name}: {source} comes from a later part"
        elif earlier[linked[0]].batch != part.batch:
            yield f"{part.name}.{name}: {source} has the leading axis {earlier[linked[0]].batch}, expected {part.batch}"
        else:
            yield from _linked(f"{part.name}.{name}", expected, source, _named(graphs[linked[0]].outputs, linked[1]))
    for name, output in part.carries.items():
        expected, tensor = _named(graph.inputs, name), _named(graph.outputs, output)
        if expected is not None:
            source = f"{part.name}.{output}"
            yield from _linked(f"{part.name}.{name}", expected, source, tensor)


def _linked(where: str, expected: TensorSpec, source: str, tensor: TensorSpec | None) -> Iterator[str]:
    if tensor is None:
        yield f"{where}: {source} does not exist"
    else:
        yield from _unlike(where, expected, f"{source} is", tensor)


def _unlike(where: str, expected: TensorSpec, said: str, tensor: TensorSpec) -> Iterator[str]:
    """A line if the tensor does not match: a different type, rank, or fixed size after the first axis."""
    sizes = zip(expected.shape[1:], tensor.shape[1:], strict=False)
    other = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
    if tensor.dtype != expected.dtype or len(tensor.shape) != len(expected.shape) or other:
        yield f"{where}: takes {_shown(expected)}, {said} {_shown(tensor)}"


def _shown(tensor: TensorSpec) -> str:
    return str(tensor).partition(": ")[2]


def _named(tensors: Sequence[TensorSpec], name: str) -> TensorSpec | None:
    return next((tensor for tensor in tensors if tensor.name == name), None)

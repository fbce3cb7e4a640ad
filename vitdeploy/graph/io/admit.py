"""Check ONNX files of unknown origin before they are read: size, structure and tensors."""

import contextlib
import copy
import hashlib
import heapq
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from vitdeploy.errors import GraphError, MissingFileError, UnsafeGraphError, VitdeployError
from vitdeploy.graph.analysis import demand, work
from vitdeploy.graph.io.stored import check_tensors, graphs, plausible, shown, subgraphs
from vitdeploy.limits import bounded, size_of
from vitdeploy.runtime.trust import is_private, private_folder, user_cache, write_atomic

# --- Walk the bytes of an ONNX file without building objects ----------------------------------------------------------
# Checks the number of fields, the nesting depth and that the file is complete.
#
# A parser allocates memory for every message: two bytes of a file can cost a hundred bytes of memory, so a file within
# the size limit can still exhaust the machine. This walk allocates nothing and follows lengths only where they fit.
# Source: Protocol Buffers encoding, protobuf.dev/programming-guides/encoding.


# Swin-L as TorchScript exports it, the largest graph known to us, has 150,000 fields and nests 7 deep.
MAX_FIELDS = 1_000_000
MAX_DEPTH = 24
# Numbers packed as variable-length integers take up to 8 times their bytes in memory. Weights are not stored that way.
MAX_PACKED_BYTES = 1 << 26

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
# Field types whose bytes are not integers packed one after the other: double, float, string, message, bytes.
_NOT_PACKED = frozenset({1, 2, 9, 11, 12})


def survey(content: bytes, name: str) -> None:
    """Check the frame of a serialised ModelProto.

    Raises:
        GraphError: the bytes are not an encoded model, or are incomplete.
        UnsafeGraphError: more messages, or deeper nesting, than any real model has.
    """
    fields = packed = 0
    stack: list[tuple[int, int, Any, int]] = [(0, len(content), onnx.ModelProto.DESCRIPTOR, 0)]
    while stack:
        position, end, message, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise UnsafeGraphError(f"{name} is nested too deeply", expected=f"at most {MAX_DEPTH} levels of messages")
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
                        f"{name} has too many packed numbers", expected=f"at most {MAX_PACKED_BYTES:,} bytes of them"
                    )


def top_level(content: bytes, field: int, name: str) -> Iterator[bytes]:
    """Yield the bytes of each occurrence of a length-delimited field of a serialised ModelProto; raises as `survey`."""
    for count, (number, kind, first, behind) in enumerate(_fields(content, 0, len(content), name), 1):
        if count > MAX_FIELDS:
            raise _too_many(name)
        if kind == _LENGTH and number == field:
            yield content[first:behind]


def _fields(content: bytes, position: int, end: int, name: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, kind, start, end) of each field of the message between two bytes; `end` is exclusive.

    Raises:
        GraphError: a field has an unknown kind, or is longer than the message.
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
            raise _broken(name, f"unknown field type {kind} at byte {first:,}")
        if position > end:
            found = f"a field of {position - first:,} bytes at byte {first:,}, with {end - first:,} bytes left"
            raise _broken(name, found)
        yield tag >> 3, kind, first, position


def _varint(content: bytes, position: int, end: int, name: str) -> tuple[int, int]:
    """Return (value, next position) of a variable-length integer of at most 10 bytes."""
    value = shift = 0
    while position < end and shift < 70:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _broken(name, f"an unterminated integer at byte {position:,}")


def _too_many(name: str) -> UnsafeGraphError:
    return UnsafeGraphError(f"{name} has too many protobuf fields", expected=f"at most {MAX_FIELDS:,}")


def _broken(name: str, found: str) -> GraphError:
    return GraphError(
        f"{name} is not a valid ONNX file",
        found=found,
        expected="a complete ONNX model",
        fix="download or copy it again",
    )


# --- The gate for ONNX files: those that pass can be read, rewritten and run safely -----------------------------------
# Every file has an unknown origin, whatever it claims: metadata that name vitdeploy can be copied. Only a digest that
# this user's vitdeploy recorded when it wrote the graph proves that the graph is ours.
#
# Everything that costs memory or time is bounded before it happens: the size of the file, then its frame (`survey`),
# then what its tensors declare (`stored`). Only then is it parsed into a graph, and the memory and work of a run are
# counted (`analysis.demand`) before any node is computed. Declared shapes of inner tensors are dropped: they can be
# wrong, and `normalise` infers them.


MAX_BYTES = 2**31 - 1
# Swin-L as TorchScript exports it, the largest graph known to us, has 15,000.
MAX_NODES = 50_000
MAX_SUBGRAPHS = 4
MAX_NAME = 1024
_TERM = r"[A-Za-z ]*(?:\.\.\.[A-Za-z ]*)?"
_EQUATION = re.compile(rf"{_TERM}(?:,{_TERM})*(?:->{_TERM})?")
OPSETS = range(11, 24)
IR_VERSIONS = range(4, onnx.IR_VERSION + 1)
IMAGE_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.UINT8)
TOKEN_TYPES = (ir.DataType.INT32, ir.DataType.INT64)
# The attribute types that models use. Without a type, an ONNX reader has to guess.
ATTRIBUTES = frozenset(onnx.AttributeProto.AttributeType.values()) - {
    onnx.AttributeProto.UNDEFINED,
    onnx.AttributeProto.SPARSE_TENSOR,
    onnx.AttributeProto.SPARSE_TENSORS,
}
# Digests of the graphs already counted in this process: most graphs are read more than once.
COUNTED = set[bytes]()
MAX_COUNTED = 256
# Digests of graphs that this user's vitdeploy wrote, one per line, in a folder that only the user can enter: they were
# derived from an admitted file. Beyond this many bytes, the older half is dropped.
WRITTEN_FOLDER, WRITTEN_FILE = "written-graphs", "sha256"
MAX_WRITTEN_BYTES = 1 << 20
# Larger initializers are kept from the ONNX checker, which would copy them.
CHECKED_ELEMENTS = 1024


def admit(path: Path, image_size: tuple[int, int] | None = None) -> ir.Model:
    """Read an ONNX file of any origin for rewriting. External weights stay on disk, memory-mapped.

    `image_size`: the (height, width) that the graph will run at, if the file leaves it open.

    Raises:
        MissingFileError: the file or one of its weight files does not exist.
        GraphError: not an ONNX file, or no target can run its opset, operators or inputs.
        UnsafeGraphError: sizes or file names that only an attack or heavy damage explains, or a graph that needs more
            memory or work than `analysis.work` allows.
        LimitError: in a command, reading needs more memory than `limits` allow.
    """
    with bounded(f"read {shown(path.name)}", size_of(path)):
        proto = _safe(path)
        _check_header(proto)
        _check_inputs(proto)
        return _parsed(proto, path, image_size, shapes=False)


def admit_graph(path: Path) -> ir.Model:
    """Read an ONNX file unchanged for running or compiling: any operators and inputs, with its declared shapes.

    Raises:
        MissingFileError, UnsafeGraphError: as `admit`.
        GraphError: not an ONNX file, or one that the ONNX checker rejects.
    """
    with bounded(f"read {shown(path.name)}", size_of(path)):
        return _parsed(_safe(path), path, None, shapes=True)


def metadata_keys(path: Path) -> set[str]:
    """Return the metadata keys of an ONNX file without reading the rest of it.

    Raises:
        MissingFileError, GraphError, UnsafeGraphError: as `admit`.
    """
    name, number = shown(path.name), onnx.ModelProto.METADATA_PROPS_FIELD_NUMBER
    try:
        entries = top_level(_read(path), number, name)
        return {onnx.StringStringEntryProto.FromString(entry).key for entry in entries}
    except VitdeployError:
        raise
    except Exception as error:  # as in `_safe`
        raise invalid(name, str(error)) from None


def _safe(path: Path) -> onnx.ModelProto:
    """Return the parsed file after checking its sizes, names, attributes and tensors."""
    content = _read(path)
    name = shown(path.name)
    if not content:
        raise GraphError(
            f"{name} is an empty file", found="0 bytes", expected="an ONNX model", fix="download or copy it again"
        )
    survey(content, name)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except Exception as error:  # protobuf's DecodeError has no types; text that is not UTF-8 is a UnicodeDecodeError
        raise invalid(name, str(error)) from None
    del content
    _check_limits(proto, name)
    _check_names(proto)
    _check_attributes(proto)
    check_tensors(proto, path.parent)
    return proto


def _parsed(proto: onnx.ModelProto, path: Path, image_size: tuple[int, int] | None, *, shapes: bool) -> ir.Model:
    if not shapes:
        _sort(proto.graph)
    try:
        bare = _without_weights(proto)
        onnx.checker.check_model(bare)
        _count(bare, {tensor.name for tensor in proto.graph.initializer}, shown(path.name), image_size)
        if not shapes:
            drop_shapes(proto)
        model = ir.from_proto(proto)
    except VitdeployError:
        raise
    except Exception as error:  # checker and reader have no common base
        raise invalid(path.name, str(error) or type(error).__name__) from None
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def drop_shapes(proto: onnx.ModelProto) -> None:
    """Drop the declared shapes of inner tensors, in place."""
    for graph in graphs(proto.graph):
        del graph.value_info[:]


def _count(bare: onnx.ModelProto, weights: set[str], name: str, image_size: tuple[int, int] | None) -> None:
    """Refuse a graph that needs too much memory or work; graphs that differ only in large weights are counted once."""
    graph = _digest(bare)
    key = hashlib.sha256(f"{graph} {image_size} {work.factor()} {sorted(weights)}".encode()).digest()
    if key in COUNTED:
        return
    try:
        demand.check_demand(ir.from_proto(bare), weights, name, image_size)
    except UnsafeGraphError:
        if not _is_written(graph):
            raise
    if len(COUNTED) >= MAX_COUNTED:
        COUNTED.clear()
    COUNTED.add(key)


def _digest(bare: onnx.ModelProto) -> str:
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()


def note_written(proto: onnx.ModelProto) -> None:
    """Record that vitdeploy wrote this graph: its digest, without large weights. Does nothing if this user has no
    private cache."""
    with contextlib.suppress(OSError, VitdeployError):
        file = private_folder(WRITTEN_FOLDER) / WRITTEN_FILE
        with file.open("a", encoding="ascii") as lines:
            lines.write(f"{_digest(_without_weights(proto))}\n")
        if file.stat().st_size > MAX_WRITTEN_BYTES:
            newer = file.read_text("ascii").splitlines()[-MAX_WRITTEN_BYTES // 130 :]
            write_atomic(file, "".join(f"{line}\n" for line in newer).encode(), 0o600)


def _is_written(digest: str) -> bool:
    folder = user_cache() / WRITTEN_FOLDER
    with contextlib.suppress(OSError, ValueError):
        return is_private(folder) and digest in (folder / WRITTEN_FILE).read_text("ascii").split()
    return False


def _sort(graph: onnx.GraphProto) -> None:
    """Sort the nodes of the main graph topologically, in place. A sorted graph stays unchanged, and so does a cyclic
    one. The runtimes accept any order, ONNX's checker does not, and some float16 converters write unsorted graphs."""
    nodes = list(graph.node)
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    missing, readers = [0] * len(nodes), [list[int]() for _ in nodes]
    for index, node in enumerate(nodes):
        for maker in {makers[name] for name in _outer_reads(node) if name in makers}:
            missing[index] += 1
            readers[maker].append(index)
    ready, order = [index for index, count in enumerate(missing) if not count], list[int]()
    while ready:  # among the ready nodes, take the first in the file
        order.append(heapq.heappop(ready))
        for index in readers[order[-1]]:
            missing[index] -= 1
            if not missing[index]:
                heapq.heappush(ready, index)
    if len(order) == len(nodes) and order != sorted(order):
        copies = [copy.deepcopy(nodes[index]) for index in order]
        del graph.node[:]
        graph.node.extend(copies)


def _outer_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node and the graphs inside it read."""
    yield from node.input
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs):
            for each in inner.node:
                yield from _outer_reads(each)


def _read(path: Path) -> bytes:
    """Return the bytes of a regular file, opened once: the bytes checked are the bytes used. Never blocks on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError):
        raise no_file(path) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise MissingFileError(f"{shown(str(path), MAX_NAME)} is not a file", expected="a .onnx file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > MAX_BYTES:
            raise UnsafeGraphError(
                f"{shown(path.name)} is too large for an ONNX file",
                found=f"{status.st_size:,} bytes",
                expected=f"at most {MAX_BYTES:,}; larger models keep their weights in an external data file",
            )
        return file.read(status.st_size)


def _check_limits(proto: onnx.ModelProto, name: str) -> None:
    if proto.functions:
        raise GraphError(
            f"{name} defines local functions",
            found=", ".join(shown(function.name) for function in proto.functions[:5]),
            fix="inline them with onnx.inliner.inline_local_functions",
        )
    if not proto.graph.node:
        raise GraphError(
            f"{name} has no nodes", found="an empty graph", expected="a model", fix="export the model again"
        )
    for value in (*proto.graph.input, *proto.graph.output):
        _check_shape(value)
    nodes, level = 0, [proto.graph]
    for depth in range(MAX_SUBGRAPHS + 2):
        nodes += sum(len(graph.node) for graph in level)
        level = [inner for graph in level for inner in subgraphs(graph)]
        if not level:
            break
        if depth == MAX_SUBGRAPHS:
            raise UnsafeGraphError(
                f"{name} nests branches and loops too deeply", expected=f"at most {MAX_SUBGRAPHS} levels"
            )
    if nodes > MAX_NODES:
        raise UnsafeGraphError(f"{name} has too many nodes", found=f"{nodes:,}", expected=f"at most {MAX_NODES:,}")


def _check_shape(value: onnx.ValueInfoProto) -> None:
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
    name, found = shown(value.name), shown(" x ".join(map(str, sizes)))
    if not plausible(sizes):
        raise UnsafeGraphError(f"the input or output {name} declares an implausible shape", found=found)
    if 0 in sizes:
        raise GraphError(f"the input or output {name} has no elements", found=found, fix="export the model again")


def _check_attributes(proto: onnx.ModelProto) -> None:
    for graph in graphs(proto.graph):
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type not in ATTRIBUTES or attribute.ref_attr_name:
                    kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
                    where = f"{shown(node.op_type)} {shown(node.name)}".strip()
                    raise GraphError(
                        f"the attribute {shown(attribute.name)} of {where} has no supported value",
                        found="a reference" if attribute.ref_attr_name else f"the type {kind}",
                        expected="a number, text, tensor or graph, or a list of these",
                        fix="export the model again",
                    )
            if node.op_type == "Einsum":
                _check_equation(node)


def _check_equation(node: onnx.NodeProto) -> None:
    """Raise GraphError for an equation that no runtime accepts: ONNX's shape inference does not terminate on "....".

    By the specification an equation has letters, "...", "," and "->".
    """
    for attribute in node.attribute:
        text = attribute.s.decode("utf-8", "replace")
        if attribute.name == "equation" and (len(text) > MAX_NAME or not _EQUATION.fullmatch(text)):
            raise GraphError(
                f"the equation of Einsum {shown(node.name)} is invalid",
                found=shown(text) or "an empty string",
                expected='letters and at most one "..." per operand, such as "bhid,bhjd->bhij"',
                fix="export the model again",
            )


def _check_names(proto: onnx.ModelProto) -> None:
    for text in _names(proto):
        # protobuf gives the bytes where they are not UTF-8.
        if isinstance(text, bytes) or len(text) > MAX_NAME or not text.isprintable():
            raise UnsafeGraphError(
                "the file has a name with unprintable characters, or one that is too long",
                found=shown(text),
                expected=f"at most {MAX_NAME:,} printable characters",
            )
    names = [tensor.name for tensor in proto.graph.initializer]
    if len(set(names)) != len(names):
        raise GraphError("two weights of the graph have the same name")


def _names(proto: onnx.ModelProto) -> Iterator[str | bytes]:
    for entry in proto.opset_import:
        yield entry.domain
    for graph in graphs(proto.graph):
        yield graph.name
        for tensor in graph.initializer:
            yield tensor.name
        for value in (*graph.input, *graph.output):
            yield value.name
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
        for node in graph.node:
            yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
            yield from (attribute.name for attribute in node.attribute)


def _check_header(proto: onnx.ModelProto) -> None:
    if proto.ir_version not in IR_VERSIONS:
        raise GraphError(
            "the ONNX IR version of the file is not supported",
            found=f"IR version {proto.ir_version}",
            expected=f"{IR_VERSIONS.start} to {IR_VERSIONS.stop - 1}",
        )
    versions = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    opset = versions.get("ai.onnx")
    if opset not in OPSETS:
        raise GraphError(
            "the opset of the file is not supported",
            found="no opset" if opset is None else f"opset {opset}",
            expected=f"opset {OPSETS.start} to {OPSETS.stop - 1}",
            fix="export the model again with opset_version=18",
        )
    foreign = sorted(
        {
            f"{shown(node.domain or 'ai.onnx')}.{shown(node.op_type)}"
            for graph in graphs(proto.graph)
            for node in graph.node
            if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type)
        }
    )
    if foreign:
        raise GraphError(
            "the graph has operators that no target supports",
            found=", ".join(foreign[:8]) + (f" and {len(foreign) - 8} more" if len(foreign) > 8 else ""),
            expected="operators of the domain ai.onnx",
            fix="use the file from before a runtime's optimizer rewrote it, or export without the custom operator",
        )


def _check_inputs(proto: onnx.ModelProto) -> None:
    weights = {tensor.name for tensor in proto.graph.initializer}
    readable = 0
    for value in proto.graph.input:
        if value.name in weights:
            continue
        tensor, name = value.type.tensor_type, shown(value.name)
        if not value.type.HasField("tensor_type") or not tensor.HasField("shape") or not tensor.elem_type:
            raise GraphError(f"the input {name} has no declared type and shape", expected="a tensor of known rank")
        rank = len(tensor.shape.dim)
        readable += (rank == 4 and tensor.elem_type in IMAGE_TYPES) or (rank == 2 and tensor.elem_type in TOKEN_TYPES)
    if not readable:
        raise GraphError(
            "the graph has no image or token input",
            found=", ".join(shown(value.name) for value in proto.graph.input if value.name not in weights)
            or "no input",
            expected="a float32, float16 or uint8 input with 4 axes, or an int32 or int64 input [batch, tokens]",
        )


def _without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model for the ONNX checker: large and external initializers become inputs of the same type and shape."""
    bare = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    graph = bare.graph
    graph.name = proto.graph.name
    graph.node.extend(proto.graph.node)
    graph.input.extend(proto.graph.input)
    graph.output.extend(proto.graph.output)
    declared = {value.name for value in proto.graph.input}
    for tensor in proto.graph.initializer:
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if not external and math.prod(tensor.dims) <= CHECKED_ELEMENTS:
            graph.initializer.append(tensor)
        elif tensor.name not in declared:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return bare


def no_file(path: Path) -> MissingFileError:
    return MissingFileError(f"no ONNX file at {shown(str(path), MAX_NAME)}", expected="a readable .onnx file")


def invalid(name: str, found: str) -> GraphError:
    lines = found.strip().splitlines()
    return GraphError(
        f"{shown(name)} is not a valid ONNX file",
        found=shown(lines[0]) if lines else "",
        expected="an ONNX model",
        fix="export the model again",
    )

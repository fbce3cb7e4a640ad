"""Check the tensors stored in an ONNX file or in external files: consistent sizes and allowed paths.

Nothing is allocated or opened here: declared sizes are compared with the actual bytes. The rules for external data
follow docs/ExternalDataSecurity.md of ONNX and cover known bypasses of earlier checks (CVE-2022-25882, CVE-2024-27318,
CVE-2026-27489, CVE-2026-34446, CVE-2026-34445).
"""

import math
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import onnx_ir as ir

from vitdeploy.errors import GraphError, MissingFileError, UnsafeGraphError

MAX_ELEMENTS = 1 << 33
MAX_RANK = 32
KEYS = frozenset({"location", "offset", "length", "checksum"})
SHOWN_CHARACTERS = 80


def shown(text: str | bytes, most: int = SHOWN_CHARACTERS) -> str:
    """Return a name from an untrusted file, safe to print: escaped, and cut after `most` characters."""
    raw = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in raw[: most + 1])
    return safe if len(raw) <= most else f"{safe[:most]}..."


def plausible(dims: Sequence[int]) -> bool:
    """Whether sizes are plausible for a tensor: not negative, and no more elements than a machine can hold, with axes
    of 0 not counted."""
    return len(dims) <= MAX_RANK and all(size >= 0 for size in dims) and math.prod(filter(None, dims)) <= MAX_ELEMENTS


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all graphs in its nodes' attributes."""
    stack = [graph]
    while stack:
        current = stack.pop()
        yield current
        stack += subgraphs(current)


def subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graphs in the attributes of a graph's nodes: one level of branches and loops."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def check_tensors(proto: onnx.ModelProto, folder: Path) -> None:
    """Check every tensor of a model whose file lies in `folder`.

    Raises:
        GraphError: an unknown type, a sparse tensor, or external data for anything except a weight.
        MissingFileError: the file of a tensor does not exist.
        UnsafeGraphError: a size that does not match the stored data, or a file outside the folder.
    """
    for graph in graphs(proto.graph):
        if graph.sparse_initializer:
            raise GraphError("the graph has sparse tensors, which no target supports", expected="dense tensors")
        for tensor in graph.initializer:
            _check(tensor, folder if graph is proto.graph else None)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    _check(attribute.t, None)
                for tensor in attribute.tensors:
                    _check(tensor, None)


def _check(tensor: onnx.TensorProto, folder: Path | None) -> None:
    """Check one tensor; `folder` may hold its external data, None for a tensor that must not have any."""
    name = shown(tensor.name)
    if tensor.data_type not in ir.DataType.__members__.values() or tensor.data_type == ir.DataType.UNDEFINED:
        raise GraphError(f"the tensor {name} has an unknown type", found=f"type {tensor.data_type}")
    if tensor.HasField("segment"):
        raise GraphError(f"the tensor {name} is stored in segments", expected="a tensor without segments")
    if not plausible(tensor.dims):
        raise UnsafeGraphError(
            f"the tensor {name} declares an implausible shape",
            found=shown(" x ".join(map(str, tensor.dims[: MAX_RANK + 1]))),
            expected=f"at most {MAX_ELEMENTS:,} elements",
        )
    elements, dtype = math.prod(tensor.dims), ir.DataType(tensor.data_type)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if dtype.is_string() or folder is None:
            raise GraphError(
                f"the tensor {name} has external data",
                found="a tensor of strings" if dtype.is_string() else "a tensor inside a node",
                expected="external data for the weights of the main graph only",
                fix="save the model with convert_attribute=False",
            )
        _check_external(tensor, folder, -(-elements * dtype.bitwidth // 8))
        return
    if tensor.external_data:
        raise UnsafeGraphError(f"the tensor {name} names an external file but declares that its data is in the model")
    if tensor.HasField("raw_data"):
        stored, expected = len(tensor.raw_data), -(-elements * (0 if dtype.is_string() else dtype.bitwidth) // 8)
    else:
        stored, expected = _entries(tensor, dtype, elements)
    if stored != expected:
        raise UnsafeGraphError(
            f"the data of the tensor {name} does not match its shape",
            found=f"{stored:,} stored",
            expected=f"{expected:,}",
        )


def _entries(tensor: onnx.TensorProto, dtype: ir.DataType, elements: int) -> tuple[int, int]:
    """(entries stored, entries that the shape needs) of a tensor in one of the typed fields."""
    field = onnx.helper.tensor_dtype_to_field(int(dtype))
    stored = len(getattr(tensor, field))
    if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        return stored, 2 * elements
    if not dtype.is_string() and dtype.bitwidth < 8:  # packed: several elements in an entry of one byte
        return stored, -(-elements * dtype.bitwidth // 8)
    return stored, elements


def _check_external(tensor: onnx.TensorProto, folder: Path, size: int) -> None:
    name, entries = shown(tensor.name), {entry.key: entry.value for entry in tensor.external_data}
    if len(entries) != len(tensor.external_data) or not entries.keys() <= KEYS:
        unknown = ", ".join(sorted(shown(key) for key in entries.keys() - KEYS))
        raise UnsafeGraphError(
            f"the external data of the tensor {name} has invalid keys",
            found=unknown or "a key given twice",
            expected=", ".join(sorted(KEYS)),
        )
    if any(isinstance(text, bytes) for pair in entries.items() for text in pair):  # protobuf's type if it is not UTF-8
        raise UnsafeGraphError(f"the external data entries of the tensor {name} are not text", expected="UTF-8")
    location = entries.get("location", "")
    length = _file_size(name, location, folder)
    offset = _number(name, entries, "offset", 0)
    held = _number(name, entries, "length", size)
    if offset + held > length or held != size:
        raise UnsafeGraphError(
            f"the data of the tensor {name} does not fit its external file",
            found=f"bytes {offset:,} to {offset + held:,} of {length:,} in {shown(location)}",
            expected=f"{size:,} bytes",
        )


def _number(name: str, entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UnsafeGraphError(
            f"the {key} of the tensor {name} is not a size", found=shown(text), expected="a non-negative integer"
        )
    return int(text)


def _file_size(name: str, location: str, folder: Path) -> int:
    """The size of a regular file inside `folder`, without symbolic or hard links."""
    windows = PureWindowsPath(location)
    parts = PurePosixPath(location).parts
    outside = bool(windows.drive or windows.root or ".." in windows.parts or "\\" in location)
    outside |= location.endswith(("/", "/."))  # a folder, as the reader of the data would resolve it
    if not parts or outside or not location.isprintable():
        raise UnsafeGraphError(
            f"the tensor {name} names a file outside the folder of the model",
            found=shown(location) or "no file name",
            expected="a plain path relative to the model",
        )
    path, status = folder, None
    for part in parts:
        path = path / part
        try:
            status = os.lstat(path)
        except OSError:
            raise MissingFileError(
                f"the external data file of the tensor {name} does not exist",
                found=f"no {shown('/'.join(parts))} in the model's folder",
                fix="copy the file into the model's folder",
            ) from None
        if stat.S_ISLNK(status.st_mode):
            raise UnsafeGraphError(
                f"the external data of the tensor {name} is a symbolic link",
                found=shown(str(path)),
                fix="copy the model and its data into one folder (cp -L)",
            )
    assert status is not None
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise UnsafeGraphError(
            f"the external data of the tensor {name} is not a regular file without hard links",
            found=f"{shown(str(path))}: {'a hard link' if stat.S_ISREG(status.st_mode) else 'not a regular file'}",
            fix="copy the model and its data into one folder (cp -L)",
        )
    return status.st_size

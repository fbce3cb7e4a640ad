"""An ONNX file of a few nodes, as bytes: devices have no onnx package, and a probe of ONNX Runtime needs a graph.

It covers only what the probes need of the format: messages of varints and length-delimited fields (Protocol Buffers,
"Encoding"), with the field numbers of onnx/onnx.proto3. The tests read it with the onnx package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.runtime.runner import Array

# TensorProto.DataType.
TYPES = {"float32": 1, "uint8": 2, "int8": 3}
# Every ONNX Runtime from 1.14 on reads it and supports the opset.
IR_VERSION, OPSET = 8, 17


@dataclass(frozen=True)
class Node:
    """One operator of the default domain, without attributes, named like its output."""

    operator: str
    inputs: tuple[str, ...]
    output: str


def onnx_model(
    nodes: Sequence[Node], inputs: Mapping[str, Array], output: str, constants: Mapping[str, Array]
) -> bytes:
    """A model whose inputs have the dtypes and shapes of `inputs`; the output's type is left to the runtime."""
    graph = b"".join(
        [
            *(_message(1, _node(node)) for node in nodes),
            _text(2, "probe"),
            *(_message(5, _tensor(name, array)) for name, array in constants.items()),
            *(_message(11, _text(1, name) + _message(2, _tensor_type(array))) for name, array in inputs.items()),
            _message(12, _text(1, output)),
        ]
    )
    return _number(1, IR_VERSION) + _message(7, graph) + _message(8, _number(2, OPSET))


def _node(node: Node) -> bytes:
    inputs = b"".join(_text(1, name) for name in node.inputs)
    return inputs + _text(2, node.output) + _text(3, node.output) + _text(4, node.operator)


def _tensor(name: str, array: Array) -> bytes:
    dims = b"".join(_number(1, size) for size in array.shape)
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    return dims + _number(2, TYPES[array.dtype.name]) + _text(8, name) + _message(9, little.tobytes())


def _tensor_type(array: Array) -> bytes:
    shape = b"".join(_message(1, _number(1, size)) for size in array.shape)
    return _message(1, _number(1, TYPES[array.dtype.name]) + _message(2, shape))


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])

"""Tensors of the Open Inference Protocol v2: data types, JSON data and binary data.

Data types and JSON data are those of the protocol's "Tensor Data" section, binary data is Triton's "binary tensor data"
extension, which KServe took over: little-endian, row-major, without padding. BF16, which numpy lacks, and BYTES, which
no engine of a bundle takes or gives, are not supported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.serve.refusal import Refusal

Array = npt.NDArray[Any]

# The protocol's names of numpy's data types.
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}


def from_binary(data: bytes | memoryview, dtype: str, shape: Sequence[int], name: str) -> Array:
    """An array of the caller's `dtype` (a numpy name) and `shape` from its bytes.

    Raises:
        Refusal: not as many bytes as the shape needs, or numbers that are none.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    wanted = math.prod(shape) * kind.itemsize
    if len(data) != wanted:
        raise Refusal(400, f"input {name!r}: {len(data)} bytes, but {dtype} {list(shape)} has {wanted}")
    if dtype == "bool" and max(data, default=0) > 1:
        raise Refusal(400, f"input {name!r}: a byte of BOOL is 0 or 1")
    array = np.frombuffer(data, kind).reshape(shape)
    return _finite(array.astype(dtype), name)  # a copy: what follows a JSON part is not aligned


def from_json(data: Any, dtype: str, shape: Sequence[int], name: str) -> Array:
    """An array from JSON data, flat in row-major order or nested as `shape` is.

    Raises:
        Refusal: not numbers of that data type, or not as many as the shape needs.
    """
    if not isinstance(data, list):
        raise Refusal(400, f"input {name!r}: data is no list")
    kinds = {"b": "b", "f": "iuf"}.get(np.dtype(dtype).kind, "iu")
    try:
        found = np.asarray(data)
        if dtype == "uint64" and found.dtype.kind == "f":  # numpy's choice for integers on both sides of 2^63
            exact = np.array(data, object)
            found = exact.astype(dtype) if all(type(item) is int and item >= 0 for item in exact.flat) else found
    except (ValueError, OverflowError):  # ragged, or an integer beyond 64 bits
        found = np.empty(0, object)
    if found.dtype.kind not in kinds:
        raise Refusal(400, f"input {name!r}: data holds something else than {DATATYPES[dtype]} numbers")
    if found.shape not in (tuple(shape), (math.prod(shape),)):
        raise Refusal(400, f"input {name!r}: data of shape {list(found.shape)}, but the shape is {list(shape)}")
    if np.dtype(dtype).kind in "iu":
        bounds = np.iinfo(dtype)
        if int(found.min()) < bounds.min or int(found.max()) > bounds.max:
            raise Refusal(400, f"input {name!r}: data beyond {DATATYPES[dtype]}, {bounds.min} to {bounds.max}")
    with np.errstate(over="ignore"):
        return _finite(found.astype(dtype).reshape(shape), name)


def to_binary(array: Array) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def to_json(array: Array, name: str) -> list[Any]:
    """The flat data, in row-major order.

    Raises:
        Refusal: NaN or infinity, which JSON does not have.
    """
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Refusal(500, f"output {name!r} holds NaN or infinity, which JSON does not have; ask for binary data")
    flat: list[Any] = array.ravel().tolist()
    return flat


def _finite(array: Array, name: str) -> Array:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Refusal(400, f"input {name!r}: NaN, infinity, or a number beyond {DATATYPES[array.dtype.name]}")
    return array

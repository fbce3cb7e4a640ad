"""The Open Inference Protocol v2: tensors and messages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from vitdeploy import __version__
from vitdeploy.spec import TensorSpec

# --- Tensors of the Open Inference Protocol v2: data types, JSON data and binary data ---------------------------------
# Data types and JSON data are those of the protocol's "Tensor Data" section, binary data is Triton's "binary tensor
# data" extension, also used by KServe: little-endian, row-major, without padding. BF16, which numpy lacks, and BYTES,
# which engines of bundles do not use, are not supported.


Array = npt.NDArray[Any]

# numpy's data types -> the protocol's names.
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
    """Return an array of `dtype` (a numpy name) and `shape` from its bytes.

    Raises:
        Refusal: the number of bytes does not match the shape, or a value is NaN or infinite.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    expected = math.prod(shape) * kind.itemsize
    if len(data) != expected:
        raise Refusal(400, f"input {name!r}: {len(data)} bytes, but {dtype} {list(shape)} needs {expected}")
    if dtype == "bool" and max(data, default=0) > 1:
        raise Refusal(400, f"input {name!r}: BOOL values must be 0 or 1")
    array = np.frombuffer(data, kind).reshape(shape)
    return _finite(array.astype(dtype), name)  # a copy: data after the JSON part is not aligned


def from_json(data: Any, dtype: str, shape: Sequence[int], name: str) -> Array:
    """Return an array from JSON data, flat in row-major order or nested like `shape`.

    Raises:
        Refusal: the values do not match the data type, or their number does not match the shape.
    """
    if not isinstance(data, list):
        raise Refusal(400, f"input {name!r}: data must be a list")
    kinds = {"b": "b", "f": "iuf"}.get(np.dtype(dtype).kind, "iu")
    try:
        found = np.asarray(data)
        if dtype == "uint64" and found.dtype.kind == "f":  # numpy's choice for integers on both sides of 2^63
            exact = np.array(data, object)
            found = exact.astype(dtype) if all(type(item) is int and item >= 0 for item in exact.flat) else found
    except (ValueError, OverflowError):  # ragged, or an integer beyond 64 bits
        found = np.empty(0, object)
    if found.dtype.kind not in kinds:
        raise Refusal(400, f"input {name!r}: data must contain only {DATATYPES[dtype]} numbers")
    if found.shape not in (tuple(shape), (math.prod(shape),)):
        raise Refusal(400, f"input {name!r}: data of shape {list(found.shape)}, but the shape is {list(shape)}")
    if np.dtype(dtype).kind in "iu":
        bounds = np.iinfo(dtype)
        if int(found.min()) < bounds.min or int(found.max()) > bounds.max:
            limits = f"{bounds.min} to {bounds.max}"
            raise Refusal(400, f"input {name!r}: data out of range for {DATATYPES[dtype]}, {limits}")
    with np.errstate(over="ignore"):
        return _finite(found.astype(dtype).reshape(shape), name)


def to_binary(array: Array) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def to_json(array: Array, name: str) -> list[Any]:
    """Return the flat data, in row-major order.

    Raises:
        Refusal: NaN or infinity, which JSON cannot represent.
    """
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Refusal(500, f"output {name!r} has NaN or infinity, which JSON cannot represent; request binary data")
    flat: list[Any] = array.ravel().tolist()
    return flat


def _finite(array: Array, name: str) -> Array:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Refusal(400, f"input {name!r}: NaN, infinity, or a number out of range for {DATATYPES[array.dtype.name]}")
    return array


# --- Messages ---------------------------------------------------------------------------------------------------------
# Those of the Open Inference Protocol v2 (KServe "V2 Inference Protocol", HTTP/REST), with Triton's binary data.
#
# A message starts with its JSON part, whose length is in the header Inference-Header-Content-Length. The binary data of
# its tensors follows in their order.


VERSION = "1"
HEADER_LENGTH = "inference-header-content-length"
# Parameters of unsupported extensions that change the meaning of a tensor.
UNSUPPORTED = ("classification", "shared_memory_region")


@dataclass(frozen=True)
class InferRequest:
    """Arrays [n, ...] by input name, n the same in all. `outputs`: the requested ones, and whether as binary data."""

    id: str
    inputs: dict[str, Array]
    outputs: dict[str, bool]


@dataclass(frozen=True)
class ServedModel:
    """The metadata of a model for clients. Each tensor's leading axis is the batch, of 1 to `max_batch`."""

    name: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int


def server_metadata() -> dict[str, Any]:
    return {"name": "vitdeploy", "version": __version__, "extensions": ["binary_tensor_data"]}


def model_metadata(model: ServedModel) -> dict[str, Any]:
    def described(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": tensor.name,
                "datatype": DATATYPES[tensor.dtype],
                "shape": [-1, *(size if isinstance(size, int) else -1 for size in tensor.shape[1:])],
            }
            for tensor in tensors
        ]

    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": model.platform,
        "inputs": described(model.inputs),
        "outputs": described(model.outputs),
    }


def parse_infer(body: bytes, header_length: int | None, model: ServedModel) -> InferRequest:
    """Parse a request for `model`; `header_length`: the bytes of its JSON part, None without binary data.

    Raises:
        Refusal: 400, with the problem.
    """
    if header_length is not None and not 0 < header_length <= len(body):
        raise Refusal(400, f"{HEADER_LENGTH} {header_length}, but the body has {len(body)} bytes")
    message = load_json(body if header_length is None else body[:header_length])
    binary = memoryview(body)[len(body) if header_length is None else header_length :]
    given = message.get("inputs")
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise Refusal(400, "inputs must be a list of objects")
    if (names := [item.get("name") for item in given]) != (expected := [tensor.name for tensor in model.inputs]):
        raise Refusal(400, f"inputs {names}, but the model takes {expected}")
    inputs = {}
    for item, tensor in zip(given, model.inputs, strict=True):
        size = _parameters(item, f"input {tensor.name!r}").get("binary_data_size")
        if size is not None and (type(size) is not int or not 0 <= size <= len(binary)):
            raise Refusal(400, f"input {tensor.name!r}: binary_data_size {size!r}, but {len(binary)} bytes are left")
        inputs[tensor.name] = _input(item, tensor, model.max_batch, None if size is None else binary[:size])
        binary = binary[size or 0 :]
    if len({len(array) for array in inputs.values()}) > 1:
        counts = ", ".join(f"{name} {len(array)}" for name, array in inputs.items())
        raise Refusal(400, f"inputs with different batch sizes: {counts}")
    if len(binary):
        raise Refusal(400, f"{len(binary)} extra bytes after the inputs")
    request_id = message.get("id", "")
    if not isinstance(request_id, str):
        raise Refusal(400, "id must be a string")
    return InferRequest(request_id, inputs, _outputs(message, model))


def load_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8, without NaN or infinity.

    Raises:
        Refusal: the data is not such an object.
    """
    try:
        message = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(message, dict):
        raise Refusal(400, "the body is not a JSON object")
    return message


def encode_infer(model: ServedModel, request: InferRequest, outputs: Mapping[str, Array]) -> tuple[bytes, int | None]:
    """Return the body of the answer, and the bytes of its JSON part if binary data follows.

    Raises:
        Refusal: an output that JSON cannot represent.
    """
    described, chunks = [], []
    for name, binary in request.outputs.items():
        array = outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)}
        if binary:
            chunks.append(to_binary(array))
            entry["parameters"] = {"binary_data_size": len(chunks[-1])}
        else:
            entry["data"] = to_json(array, name)
        described.append(entry)
    message: dict[str, Any] = {"model_name": model.name, "model_version": VERSION}
    if request.id:
        message["id"] = request.id
    head = orjson.dumps({**message, "outputs": described})  # `to_json` has refused values that it would write as null
    return b"".join([head, *chunks]), len(head) if chunks else None


def _input(item: Mapping[str, Any], tensor: TensorSpec, max_batch: int, binary: memoryview | None) -> Array:
    name, datatype, shape = tensor.name, DATATYPES[tensor.dtype], item.get("shape")
    if item.get("datatype") != datatype:
        raise Refusal(400, f"input {name!r}: datatype {item.get('datatype')!r}, but the model takes {datatype}")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise Refusal(400, f"input {name!r}: shape must be a list of positive integers")
    fits = len(shape) == len(tensor.shape) and all(
        isinstance(size, str) or size == found for size, found in zip(tensor.shape[1:], shape[1:], strict=True)
    )
    if not fits:
        raise Refusal(400, f"input {name!r}: shape {shape}, but the model takes {['n', *tensor.shape[1:]]}")
    if shape[0] > max_batch:
        raise Refusal(400, f"input {name!r}: {shape[0]} images, but a request may have at most {max_batch}")
    if binary is not None:
        if "data" in item:
            raise Refusal(400, f"input {name!r}: both data and binary_data_size")
        return from_binary(binary, tensor.dtype, shape, name)
    if "data" not in item:
        raise Refusal(400, f"input {name!r}: neither data nor binary_data_size")
    return from_json(item["data"], tensor.dtype, shape, name)


def _outputs(message: Mapping[str, Any], model: ServedModel) -> dict[str, bool]:
    default = _flag(_parameters(message, "the request"), "binary_data_output", False)
    given = message.get("outputs")
    known = [tensor.name for tensor in model.outputs]
    if given is None or given == []:
        return dict.fromkeys(known, default)
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise Refusal(400, "outputs must be a list of objects")
    names = [item.get("name") for item in given]
    if any(name not in known for name in names) or len(set(names)) < len(names):
        raise Refusal(400, f"outputs {names}, but the model has {known}")
    return {
        item["name"]: _flag(_parameters(item, f"output {item['name']!r}"), "binary_data", default) for item in given
    }


def _parameters(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    parameters = item.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Refusal(400, f"{where}: parameters must be an object")
    for name in UNSUPPORTED:
        if name in parameters:
            raise Refusal(400, f"{where}: the parameter {name} belongs to an unsupported extension")
    return parameters


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise Refusal(400, f"{name} must be true or false")
    return value


# --- Refusals of requests ---------------------------------------------------------------------------------------------


class Refusal(Exception):
    """Ends a request with the HTTP status `status`; `message` is sent to the client."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or {}


def busy(message: str) -> Refusal:
    """Return the refusal of a busy server: the same request may succeed in a second."""
    return Refusal(429, message, {"retry-after": "1"})


def stopping() -> Refusal:
    return Refusal(503, "the server is stopping", {"retry-after": "1"})


class ClientGone(Exception):
    """The client has disconnected."""

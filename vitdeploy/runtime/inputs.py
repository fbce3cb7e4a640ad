"""Extra inputs of a model for each image, besides its pixels: a mask, a size, features of a text.

They are the engine's inputs after the first, which takes the images. Tasks with their own inputs, such as texts or
prompts, have none.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import CapabilityError, InputError, MissingFileError, TensorError
from vitdeploy.paths import is_file
from vitdeploy.runtime import preprocess, runner
from vitdeploy.runtime.tasks.registry import TASKS
from vitdeploy.spec import Task, TensorSpec
from vitdeploy.zip_members import DAMAGED

# Supported types of extra inputs.
DTYPES = ("float32", "uint8", "int32", "int64", "bool")
SUFFIXES = (".npy", ".png")
WHITE = 255
NPY = b"\x93NUMPY"
# The value of one input: the path of a .npy or .png, the bytes of such a file, or an array.
InputValue = Any
Inputs = Mapping[str, InputValue]
Further = Mapping[str, npt.NDArray[Any]]


def further_inputs(task: Task, inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the extra inputs among the `inputs` of an engine or graph, with their batch axis."""
    row = TASKS[task]
    return tuple(inputs[1:]) if row.takes == "images" and row.bind is None and row.flow is None else ()


def require_image_alone(name: str, further: Sequence[TensorSpec], what: str) -> None:
    """Raise CapabilityError if a model has extra inputs, which `what` does not support."""
    if further:
        raise CapabilityError(
            f"{what} supports only models whose single input is an image",
            found=f"{name} also takes {', '.join(map(str, further))}",
            expected="a model without further inputs",
            fix=f"bind the input to one value for all images: --bind {further[0].name}=VALUE, or source.bind in "
            "a recipe; run, verify, bench and predict take a value for each image",
        )


def read_further(inputs: Inputs | None, expected: Sequence[TensorSpec]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of one image's extra inputs, without a batch axis, from the caller's values by name.

    Raises:
        InputError: an input is missing or unknown.
        MissingFileError, ImageError, TensorError: as `read_input`.
    """
    names, found = [tensor.name for tensor in expected], list(inputs or {})
    if set(names) != set(found):
        missing = [name for name in names if name not in found]
        raise InputError(
            f"the inputs do not match the model, which takes {', '.join(['an image', *names])}",
            found=", ".join(["an image", *map(str, found)]),
            expected=", ".join(map(str, expected)) or "only an image",
            fix=f"--input {missing[0]}=FILE, or predict_with(image, {{{missing[0]!r}: ...}}) in Python"
            if missing
            else "remove the extra inputs",
        )
    return {tensor.name: read_input((inputs or {})[tensor.name], tensor) for tensor in expected}


def read_input(value: InputValue, tensor: TensorSpec) -> npt.NDArray[Any]:
    """Return the array of one input of one image, with the type and shape of `tensor` without its batch axis.

    Args:
        value: an array; or the path or bytes of a .npy or an 8-bit grey PNG. A PNG becomes 0 to 1 for float32, its
            values for uint8, and "is white" for bool, if every pixel is black or white.

    Raises:
        MissingFileError, ImageError: the file is missing or cannot be read.
        TensorError: wrong type or shape, numbers that are not finite, or not an array.
    """
    if isinstance(value, bytes):
        return _of_bytes(value, tensor, f"the input {tensor.name}")
    if not isinstance(value, str | Path):
        runner.require_array(value, tensor, f"the input {tensor.name}")
        return _fitted(value, tensor, f"the input {tensor.name}")
    path = Path(value)
    if path.suffix.lower() not in SUFFIXES:
        raise TensorError(
            f"unsupported file type for the input {tensor.name}: {path}",
            found=path.suffix or "no suffix",
            expected=".npy or .png",
        )
    if not is_file(path):
        raise MissingFileError(
            f"no file at {path} for the input {tensor.name}",
            expected=_expected(tensor),
            fix="check the path",
        )
    read = _map(path, tensor, str(path)) if path.suffix.lower() == ".png" else _numbers(path, tensor)
    return _fitted(read, tensor, str(path))


def _of_bytes(content: bytes, tensor: TensorSpec, what: str) -> npt.NDArray[Any]:
    if content.startswith(preprocess.PNG):
        return _fitted(_map(content, tensor, what), tensor, what)
    if not content.startswith(NPY):
        raise TensorError(
            f"{what} is neither a .npy nor a .png file", found=f"{len(content):,} bytes", expected="a .npy or .png"
        )
    try:
        file = io.BytesIO(content)
        # Check the header before allocating memory for the array.
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = read[np.lib.format.read_magic(file)](file)
        if shape != tensor.shape[1:] or dtype != np.dtype(tensor.dtype):
            raise _misfit(dtype, shape, tensor, what)
        return _fitted(np.load(io.BytesIO(content), allow_pickle=False), tensor, what)
    except DAMAGED as error:
        raise TensorError(
            f"{what} cannot be read", found=str(error)[:200], expected=f"a .npy, {_expected(tensor)}"
        ) from None


def _expected(tensor: TensorSpec) -> str:
    return f"{tensor.dtype} {list(tensor.shape[1:])}"


def _fitted(array: npt.NDArray[Any], tensor: TensorSpec, what: str) -> npt.NDArray[Any]:
    if array.dtype != np.dtype(tensor.dtype) or array.shape != tensor.shape[1:] or not array.dtype.isnative:
        raise _misfit(array.dtype, array.shape, tensor, what)
    value = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray turns a scalar into an array of one
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise TensorError(
            f"{what} has numbers that are not finite",
            found="NaN or infinity",
            expected=f"finite numbers, {tensor.dtype}",
        )
    return value


def _misfit(dtype: np.dtype[Any], shape: tuple[int, ...], tensor: TensorSpec, what: str) -> TensorError:
    other = shape == tensor.shape[1:] and dtype.kind in "fiub"
    return TensorError(
        f"{what} does not fit the input {tensor.name}",
        found=f"{dtype.name if dtype.isnative else dtype.str} {list(shape)}",
        expected=f"{_expected(tensor)} for one image, without the batch axis",
        fix=f"array.astype({tensor.dtype!r}), if that keeps its values"
        if other
        else "resize and crop it like the image",
    )


def _numbers(path: Path, tensor: TensorSpec) -> npt.NDArray[Any]:
    try:
        # Memory-mapped: a header that claims more than the file holds fails before memory is allocated.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        raise TensorError(
            f"{path} cannot be read", found=str(error)[:200], expected=f"a .npy, {_expected(tensor)}"
        ) from None
    if not isinstance(array, np.ndarray):
        raise TensorError(f"{path} cannot be read", found="an .npz archive", expected=f"a .npy, {_expected(tensor)}")
    return array


def _map(source: Path | bytes, tensor: TensorSpec, what: str) -> npt.NDArray[Any]:
    """The pixels of a PNG in the input's type, reshaped to its shape if they differ only in axes of size 1."""
    image = preprocess.decode(source, None, what)
    if image.mode not in ("1", "L") or tensor.dtype not in ("float32", "uint8", "bool"):
        raise TensorError(
            f"{what} does not fit the input {tensor.name}",
            found=f"a PNG with mode {image.mode}, for {tensor.dtype}",
            expected="an 8-bit grey PNG, for float32 (scaled to 0..1), uint8 (unchanged) or bool (black or white)",
            fix=f"use a .npy file with {_expected(tensor)}",
        )
    pixels = np.asarray(image.convert("L"))
    if tensor.dtype == "bool" and not np.isin(pixels, (0, WHITE)).all():
        raise TensorError(
            f"{what} has pixels that are neither black nor white",
            found="grey pixels",
            expected="0 or 255 for each pixel",
        )
    found: npt.NDArray[Any] = pixels
    if tensor.dtype == "float32":
        found = pixels.astype(np.float32) / np.float32(WHITE)
    elif tensor.dtype == "bool":
        found = pixels == WHITE
    plain = [size for size in tensor.shape[1:] if size != 1]
    return found.reshape(tensor.shape[1:]) if plain == [size for size in found.shape if size != 1] else found


def random_inputs(tensors: Sequence[TensorSpec], batch: int, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return seeded values of extra inputs, [batch, ...] by name, valid for every model: float32 between 0 and 1,
    integers 1 or 2. An odd seed gives the complements (to 1 and 3) of the previous seed's values, so that every value
    differs.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for number, tensor in enumerate(tensors):
        generator, odd = np.random.default_rng([number, seed // 2]), bool(seed % 2)
        shape = [batch, *(size for size in tensor.shape[1:] if isinstance(size, int))]
        if tensor.dtype == "float32":
            drawn = generator.uniform(0.01, 0.99, shape).astype(np.float32)
            found[tensor.name] = np.float32(1) - drawn if odd else drawn
        else:
            whole = generator.integers(1, 3, shape)
            found[tensor.name] = ((3 - whole if odd else whole) - (tensor.dtype == "bool")).astype(tensor.dtype)
    return found


def stacked(rows: Sequence[Further]) -> dict[str, npt.NDArray[Any]]:
    """Return the extra inputs of several images stacked for an engine, [n, ...] each; {} without any."""
    return {name: np.stack([row[name] for row in rows]) for name in (rows[0] if rows else ())}

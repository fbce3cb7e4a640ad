"""Inputs of a model that each image brings besides its pixels: a mask, a size, features of a text.

They are those of its engines behind the first, which holds the images; of a task with inputs of its own, such as texts
or prompts, there are none.
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

# What such an input may hold.
DTYPES = ("float32", "uint8", "int32", "int64", "bool")
SUFFIXES = (".npy", ".png")
WHITE = 255
NPY = b"\x93NUMPY"
# Of one input: a path of a .npy or .png, the bytes of such a file, or its array.
InputValue = Any
Inputs = Mapping[str, InputValue]
Further = Mapping[str, npt.NDArray[Any]]


def further_inputs(task: Task, inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Those of an engine's or a graph's `inputs` that each image brings, with their batch axis."""
    row = TASKS[task]
    return tuple(inputs[1:]) if row.takes == "images" and row.bind is None and row.flow is None else ()


def require_image_alone(name: str, further: Sequence[TensorSpec], what: str) -> None:
    """Raise CapabilityError where a model takes more than an image, and `what` can give it nothing else."""
    if further:
        raise CapabilityError(
            f"{what} takes models of images alone",
            found=f"{name}, for which each image brings {', '.join(map(str, further))}",
            expected="a model whose further inputs are constants",
            fix=f"bind the input to a value, which all images share: --bind {further[0].name}=VALUE, or source.bind of "
            "a recipe; run, verify, bench and predict take one for each image",
        )


def read_further(given: Inputs | None, expected: Sequence[TensorSpec]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one image's further inputs, without a batch axis, of what a caller gives by name.

    Raises:
        InputError: an input is missing, or one is given that the model does not have.
        MissingFileError, ImageError, TensorError: as `read_input`.
    """
    names, found = [tensor.name for tensor in expected], list(given or {})
    if set(names) != set(found):
        missing = [name for name in names if name not in found]
        raise InputError(
            f"the model takes {', '.join(['an image', *names])}",
            found=", ".join(["an image", *map(str, found)]),
            expected=", ".join(map(str, expected)) or "an image alone",
            fix=f"--input {missing[0]}=FILE, or predict_with(image, {{{missing[0]!r}: ...}}) in Python"
            if missing
            else "leave the others out",
        )
    return {tensor.name: read_input((given or {})[tensor.name], tensor) for tensor in expected}


def read_input(value: InputValue, tensor: TensorSpec) -> npt.NDArray[Any]:
    """The array of one input of one image, of the type and shape of `tensor` without its batch axis.

    Args:
        value: an array; or the path or the bytes of a .npy, or of a grey PNG of 8 bits. Of a PNG float32 gets 0 to 1,
            uint8 the numbers as they are, and bool whether a pixel is white, where all are black or white.

    Raises:
        MissingFileError, ImageError: no such file, or one that cannot be read.
        TensorError: another type or shape, a number that is not finite, or nothing of the kind.
    """
    if isinstance(value, bytes):
        return _of_bytes(value, tensor, f"the input {tensor.name}")
    if not isinstance(value, str | Path):
        runner.require_array(value, tensor, f"the input {tensor.name}")
        return _fitted(value, tensor, f"the input {tensor.name}")
    path = Path(value)
    if path.suffix.lower() not in SUFFIXES:
        raise TensorError(
            f"{path} is no file of the input {tensor.name}", found=path.suffix or "no suffix", expected=".npy or .png"
        )
    if not is_file(path):
        raise MissingFileError(
            f"no file at {path}, which is to be the input {tensor.name} of an image",
            expected=_expected(tensor),
            fix="check the path",
        )
    read = _map(path, tensor, str(path)) if path.suffix.lower() == ".png" else _numbers(path, tensor)
    return _fitted(read, tensor, str(path))


def _of_bytes(content: bytes, tensor: TensorSpec, what: str) -> npt.NDArray[Any]:
    if content.startswith(preprocess.PNG):
        return _fitted(_map(content, tensor, what), tensor, what)
    if not content.startswith(NPY):
        raise TensorError(f"{what} is no file of it", found=f"{len(content):,} bytes", expected="a .npy or .png")
    try:
        file = io.BytesIO(content)
        # The header alone, before memory is taken for what it promises.
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
    found = np.ascontiguousarray(array).reshape(array.shape)  # which makes a number an array of one
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise TensorError(
            f"{what} has numbers that are not finite", found="NaN or infinity", expected=f"finite numbers, {tensor.dtype}"
        )
    return found


def _misfit(dtype: np.dtype[Any], shape: tuple[int, ...], tensor: TensorSpec, what: str) -> TensorError:
    other = shape == tensor.shape[1:] and dtype.kind in "fiub"
    return TensorError(
        f"{what} does not fit the input {tensor.name}",
        found=f"{dtype.name if dtype.isnative else dtype.str} {list(shape)}",
        expected=f"{_expected(tensor)}: what one image brings, without the batch axis",
        fix=f"array.astype({tensor.dtype!r}), where that keeps its numbers" if other else "prepare it as the image is",
    )


def _numbers(path: Path, tensor: TensorSpec) -> npt.NDArray[Any]:
    try:
        # Mapped: a header that promises more than the file has is found before memory is taken for it.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        raise TensorError(
            f"{path} cannot be read", found=str(error)[:200], expected=f"a .npy, {_expected(tensor)}"
        ) from None
    if not isinstance(array, np.ndarray):
        raise TensorError(f"{path} cannot be read", found="an .npz archive", expected=f"a .npy, {_expected(tensor)}")
    return array


def _map(source: Path | bytes, tensor: TensorSpec, what: str) -> npt.NDArray[Any]:
    """The pixels of a PNG in the type of the input, in its shape where only axes of 1 differ."""
    image = preprocess.decode(source, None, what)
    if image.mode not in ("1", "L") or tensor.dtype not in ("float32", "uint8", "bool"):
        raise TensorError(
            f"{what} is no map for the input {tensor.name}",
            found=f"a PNG of the mode {image.mode}, for {tensor.dtype}",
            expected="a grey PNG of 8 bits, for float32 (0 to 1), uint8 (as it is) or bool (black or white)",
            fix=f"a .npy, {_expected(tensor)}",
        )
    pixels = np.asarray(image.convert("L"))
    if tensor.dtype == "bool" and not np.isin(pixels, (0, WHITE)).all():
        raise TensorError(f"{what} is no map of black and white", found="grey pixels", expected="0 or 255 for each pixel")
    found: npt.NDArray[Any] = pixels
    if tensor.dtype == "float32":
        found = pixels.astype(np.float32) / np.float32(WHITE)
    elif tensor.dtype == "bool":
        found = pixels == WHITE
    plain = [size for size in tensor.shape[1:] if size != 1]
    return found.reshape(tensor.shape[1:]) if plain == [size for size in found.shape if size != 1] else found


def random_inputs(tensors: Sequence[TensorSpec], batch: int, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Seeded values of such inputs, [batch, ...] by name, that every model takes: float32 between 0 and 1, whole
    numbers 1 or 2; with an odd seed what is left to 1 or 3 of those with the seed before, so that nothing is the same.
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
    """The inputs of several images as an engine takes them, [n, ...] each; {} without any."""
    return {name: np.stack([row[name] for row in rows]) for name in (rows[0] if rows else ())}

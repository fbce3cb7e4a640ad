"""Parse bindings of the non-image inputs of a graph or module: "NAME=1", "NAME=640,480", "NAME=mask.npy" or
"NAME=arrays.npz". "NAME=input" keeps the input, with a value per image; a module declares no types, so
"NAME=input:float32:1x64x64" gives type and shape, without the batch axis. Needs no ONNX.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError, MissingFileError
from vitdeploy.paths import is_file
from vitdeploy.runtime.inputs import DTYPES
from vitdeploy.spec import TensorSpec
from vitdeploy.zip_members import DAMAGED, members

FILES = (".npy", ".npz")
INPUT, BATCH = "input", "batch"
_SIDE = 1 << 16


def named(text: str) -> tuple[str, str]:
    """Return NAME and VALUE. Raises InputError if there is no =, or if one side of it is empty."""
    name, _, value = text.partition("=")
    if not name.strip() or not value.strip():
        raise InputError(
            f"{text!r} is not a binding of an input",
            found=text,
            expected="NAME=VALUE; VALUE is a number, comma-separated numbers, a .npy or .npz file, or the word input",
            fix="for example --bind mask=1, or source.bind: {mask: 1} in a recipe",
        )
    return name.strip(), value.strip()


def bindings(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return "NAME=VALUE" for each name; a value is a number, a sequence of numbers, or a path."""
    lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple | list)}
    return tuple(f"{name}={lists.get(name, value)}" for name, value in values.items())


def file_of(text: str) -> Path | None:
    """The file of one binding; None if it has numbers."""
    value = named(text)[1]
    return Path(value) if value.endswith(FILES) else None


def anywhere(bind: Iterable[str]) -> tuple[str, ...]:
    """The same bindings with absolute paths, for a process in another folder."""
    return tuple(text if (file := file_of(text)) is None else f"{named(text)[0]}={file.resolve()}" for text in bind)


def without_folders(bind: Iterable[str]) -> list[str]:
    """The same bindings with bare file names: digests identify the contents."""
    return [text if (file := file_of(text)) is None else f"{named(text)[0]}={file.name}" for text in bind]


def bound_notes(bind: Iterable[str]) -> list[str]:
    return ["the input {} is bound to {}".format(*named(text)) for text in without_folders(bind)]


def further_note(inputs: Iterable[TensorSpec]) -> list[str]:
    return [f"each image brings the input {tensor}" for tensor in inputs]


def is_input(text: str) -> bool:
    """Whether the binding keeps the input as an input of the model."""
    return named(text)[1].partition(":")[0] == INPUT


def constants(bind: Iterable[str]) -> tuple[str, ...]:
    """The bindings to constant values."""
    return tuple(text for text in bind if not is_input(text))


def asked_inputs(bind: Iterable[str]) -> dict[str, TensorSpec | None]:
    """The inputs that take a value per image, by name; None if the binding gives no type and shape.

    Raises:
        InputError: an unsupported type, or invalid sizes.
    """
    return {named(text)[0]: _input_spec(text) for text in bind if is_input(text)}


def _input_spec(text: str) -> TensorSpec | None:
    (name, value) = named(text)
    _, *parts = value.split(":")
    dtype, sizes = parts[0] if parts else "", parts[1].split("x") if len(parts) > 1 else []
    if not parts:
        return None
    if len(parts) > 2 or dtype not in DTYPES or not all(_is_side(size) for size in sizes):
        raise InputError(
            f"invalid type or shape of the input {name}",
            found=value,
            expected=f"input:TYPE (one number) or input:TYPE:SIZES (without the batch axis); {', '.join(DTYPES)}",
            fix=f"for example {name}=input:float32:1x64x64",
        )
    return TensorSpec(name, dtype, (BATCH, *map(int, sizes)))


def _is_side(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(_SIDE)) and 0 < int(text) <= _SIDE


def value_of(text: str) -> npt.NDArray[Any]:
    """The numbers of a binding.

    Raises:
        MissingFileError: the file does not exist.
        InputError: the file is not a NumPy file or lacks the array, or the text holds no numbers.
    """
    (name, value), file = named(text), file_of(text)
    if file is not None:
        return _array(file, name)
    try:
        numbers = [float(part) for part in value.strip("[]()").split(",")]
    except ValueError:
        raise InputError(
            f"invalid value for the input {name}",
            found=value,
            expected="a number, comma-separated numbers, or a .npy or .npz file",
            fix=f"for example {name}=1, {name}=640,480 or {name}=mask.npy",
        ) from None
    return np.array(numbers if len(numbers) > 1 or value[0] in "[(" else numbers[0])


def _array(file: Path, name: str) -> npt.NDArray[Any]:
    if not is_file(file):
        raise MissingFileError(f"no file at {file}, the value of the input {name}", fix="check the path")
    try:
        if file.suffix == ".npz":
            members(file)
            with np.load(file, allow_pickle=False) as arrays:
                if name not in arrays and len(arrays.files) != 1:
                    raise InputError(
                        f"{file} has no array for the input {name}",
                        found=", ".join(arrays.files) or "nothing",
                        expected=f"an array named {name}, or a single array",
                    )
                return np.asarray(arrays[name if name in arrays else arrays.files[0]])
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except DAMAGED as error:
        raise InputError(
            f"{file} is not a NumPy file of numbers",
            found=(str(error).splitlines() or [""])[0][:200],
            expected="a file written by np.save or np.savez",
        ) from None

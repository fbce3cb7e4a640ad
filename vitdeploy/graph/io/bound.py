"""Values for inputs of a graph or module that are no image, as a user writes them: "NAME=1", "NAME=640,480",
"NAME=mask.npy" or, of an archive, "NAME=arrays.npz". Needs no ONNX.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError, MissingFileError
from vitdeploy.paths import is_file
from vitdeploy.zip_members import DAMAGED, members

FILES = (".npy", ".npz")


def named(text: str) -> tuple[str, str]:
    """NAME and VALUE. Raises InputError where there is no =, or nothing on one side of it."""
    name, _, value = text.partition("=")
    if not name.strip() or not value.strip():
        raise InputError(
            f"{text!r} binds no input",
            found=text,
            wanted="NAME=VALUE, the value a number, numbers with commas, or a .npy or .npz file",
            fix="for example --bind mask=1, or source.bind: {mask: 1} in a recipe",
        )
    return name.strip(), value.strip()


def bindings(values: Mapping[str, Any]) -> tuple[str, ...]:
    """ "NAME=VALUE" of a number, a sequence of numbers, or a path by name."""
    lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple | list)}
    return tuple(f"{name}={lists.get(name, value)}" for name, value in values.items())


def file_of(text: str) -> Path | None:
    """The file of one binding; None where it has numbers."""
    value = named(text)[1]
    return Path(value) if value.endswith(FILES) else None


def anywhere(bind: Iterable[str]) -> tuple[str, ...]:
    """The same bindings for a process in another folder."""
    return tuple(text if (file := file_of(text)) is None else f"{named(text)[0]}={file.resolve()}" for text in bind)


def without_folders(bind: Iterable[str]) -> list[str]:
    """The same bindings, with the names of files alone: their digests say what is in them."""
    return [text if (file := file_of(text)) is None else f"{named(text)[0]}={file.name}" for text in bind]


def bound_notes(bind: Iterable[str]) -> list[str]:
    return ["the input {} is bound to {}".format(*named(text)) for text in without_folders(bind)]


def value_of(text: str) -> npt.NDArray[Any]:
    """The numbers of a binding.

    Raises:
        MissingFileError, InputError: there is no such file, it is not NumPy's, or it has no such array; or no numbers.
    """
    (name, value), file = named(text), file_of(text)
    if file is not None:
        return _array(file, name)
    if value == "input":
        raise InputError(
            f"{name} cannot stay an input of the model",
            found=text,
            wanted="a value, which becomes a constant: predict takes images alone",
            fix=f"for example {name}=1, {name}=640,480 or {name}=mask.npy, and a bundle for each value",
        )
    try:
        numbers = [float(part) for part in value.strip("[]()").split(",")]
    except ValueError:
        raise InputError(
            f"the value of the input {name} cannot be read",
            found=value,
            wanted="a number, numbers with commas, or a .npy or .npz file",
            fix=f"for example {name}=1, {name}=640,480 or {name}=mask.npy",
        ) from None
    return np.array(numbers if len(numbers) > 1 or value[0] in "[(" else numbers[0])


def _array(file: Path, name: str) -> npt.NDArray[Any]:
    if not is_file(file):
        raise MissingFileError(f"no file at {file}, which is to be the input {name}", fix="check the path")
    try:
        if file.suffix == ".npz":
            members(file)
            with np.load(file, allow_pickle=False) as arrays:
                if name not in arrays and len(arrays.files) != 1:
                    raise InputError(
                        f"{file} has no array for the input {name}",
                        found=", ".join(arrays.files) or "nothing",
                        wanted=f"an array {name}, or one array alone",
                    )
                return np.asarray(arrays[name if name in arrays else arrays.files[0]])
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except DAMAGED as error:
        raise InputError(
            f"{file} is no file of numbers of NumPy",
            found=(str(error).splitlines() or [""])[0][:200],
            wanted="what np.save or np.savez writes",
        ) from None

"""Read NumPy's `.npz` as a state dict, without ever unpickling and without taking a file's word for its size."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from vitdeploy.errors import CheckpointError, PickleError
from vitdeploy.zip_members import DAMAGED, MAX_EXPANSION, members

# ViT-e, the largest published ViT, has 15.6 GB in float32 (arXiv 2209.06794, table 1).
MAX_BYTES = 32 << 30
SUFFIX, SUFFIX_OF_ARCHIVE = ".npy", ".npz"


def is_npz(path: Path) -> bool:
    """Whether a file is a zip archive of `.npy` members only, at least one."""
    try:
        names = [member.filename for member in members(path)]
    except (zipfile.BadZipFile, OSError):
        return path.suffix == SUFFIX_OF_ARCHIVE  # whose reader says what is wrong
    return bool(names) and all(name.endswith(SUFFIX) for name in names)


def read_npz(path: Path) -> dict[str, Tensor]:
    """The arrays of a `.npz` under their names, bfloat16 (saved by JAX as two raw bytes) as float32.

    Raises:
        CheckpointError: not a `.npz`, damaged, or larger than any ViT.
        PickleError: an array of Python objects, which only a pickle can hold.
    """
    try:
        members(path)
        with zipfile.ZipFile(path) as archive:
            _check_sizes(path, archive)
            return {member.filename.removesuffix(SUFFIX): _read(path, archive, member) for member in archive.infolist()}
    except DAMAGED as error:
        raise CheckpointError(
            f"{path} is not a whole .npz file",
            found=(str(error).splitlines() or [type(error).__name__])[0][:200],
            wanted="a zip archive of .npy arrays",
            fix="download it again",
        ) from None


def _check_sizes(path: Path, archive: zipfile.ZipFile) -> None:
    found = archive.infolist()
    others = [member.filename for member in found if not member.filename.endswith(SUFFIX)]
    if others or not found:
        raise ValueError(f"holds {others[0]!r}" if others else "an empty archive")
    # zipfile never gives more bytes of a member than the directory declares, so these bound what reading can take.
    expanded, packed = sum(member.file_size for member in found), sum(member.compress_size for member in found)
    if expanded > MAX_BYTES or expanded > MAX_EXPANSION * max(packed, 1):
        raise CheckpointError(
            f"{path} would expand to an absurd size",
            found=f"{expanded:,} bytes from {packed:,}",
            wanted=f"at most {MAX_BYTES:,} bytes and {MAX_EXPANSION} times the packed size",
            fix="download it again, from a source that you trust",
        )


def _read(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Tensor:
    with archive.open(member) as file:
        shape, column_major, dtype = _header(file)
        if dtype.hasobject:
            raise PickleError(
                f"{path} holds Python objects, so it is not loaded",
                found=f"{member.filename} of dtype {dtype}",
                wanted="arrays of numbers",
                fix="save plain arrays: np.savez(path, **arrays)",
            )
        size = math.prod(shape) * dtype.itemsize
        if size != member.file_size - file.tell():
            raise ValueError(f"{member.filename} declares {size:,} bytes and has {member.file_size - file.tell():,}")
        array = np.frombuffer(bytearray(file.read(size)), dtype=dtype).reshape(
            shape, order="F" if column_major else "C"
        )
    if dtype == np.dtype("V2"):
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16).float()
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise ValueError(f"{member.filename} has dtype {dtype}")
    return torch.from_numpy(np.ascontiguousarray(array.astype(dtype.newbyteorder("="))).reshape(shape))


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(file)
    if version == (1, 0):
        return npy.read_array_header_1_0(file)
    if version == (2, 0):
        return npy.read_array_header_2_0(file)
    raise ValueError(f".npy version {version[0]}.{version[1]}")

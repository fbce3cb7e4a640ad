"""Token arrays from a `.npz` file, and their split into calibration and evaluation sequences.

    source   int64 [n, source_length], what the encoder reads: tokens, then padding
    target int64 [n, target_length], the expected output: tokens with an end token but no start token, then padding;
    optional

Written with `numpy.savez(path, source=..., target=...)`, compressed or not. The file is untrusted: sizes are read from
its directory and array headers before anything is allocated, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import tokenize
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.data.folder import usual_calibration
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import is_file
from vitdeploy.zip_members import DAMAGED, members

MAX_BYTES = 1 << 28  # per array: 33 million tokens
MAX_HEADER = 10_000
MEMBERS = ("source", "target")

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenArrays:
    """int64 [n, source_length], and [n, target_length] or None."""

    source: Array
    target: Array | None

    def __len__(self) -> int:
        return len(self.source)

    def take(self, chosen: npt.NDArray[np.intp]) -> TokenArrays:
        return TokenArrays(self.source[chosen], None if self.target is None else self.target[chosen])


def read_tokens(path: Path) -> TokenArrays:
    """Return the arrays of a `.npz`.

    Raises:
        MissingFileError: no such file.
        DataError: not an .npz; no `source`; members with other names; an array that is empty, over 256 MiB, contains
            negative tokens, or has the wrong dtype or number of axes; different numbers of targets and sources.
    """
    if not is_file(path):
        raise MissingFileError(f"no token file at {path}", fix="check the path of the tokens")
    try:
        listed = members(path)
        _check_names(path, [info.filename.removesuffix(".npy") for info in listed])
        found = {info.filename.removesuffix(".npy"): info for info in listed}
        with zipfile.ZipFile(path) as archive:
            arrays = {name: _read(path, archive, info) for name, info in found.items()}
    except DAMAGED as error:
        raise DataError(
            f"{path} is not a complete .npz file",
            found=str(error)[:200] or type(error).__name__,
            expected="a file written by numpy.savez(path, source=..., target=...)",
        ) from None
    tokens = TokenArrays(arrays["source"], arrays.get("target"))
    if tokens.target is not None and len(tokens.target) != len(tokens.source):
        raise DataError(
            f"{path} has different numbers of sources and targets",
            found=f"{len(tokens.target)} targets",
            expected=f"{len(tokens.source)}",
        )
    return tokens


def _check_names(path: Path, names: list[str]) -> None:
    if "source" not in names or len(set(names)) != len(names) or not set(names) <= set(MEMBERS):
        raise DataError(
            f"{path} does not contain tokens",
            found=f"arrays {', '.join(names[:10]) or 'none'}",
            expected="source, and optionally target",
        )


def _read(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    """Return one member, after checking that directory entry and header agree on an acceptable size."""
    expected = f"int64 [n, length] of at most {MAX_BYTES >> 20} MiB"
    if info.file_size > MAX_BYTES:
        raise DataError(f"{path}: {info.filename} is too large", found=f"{info.file_size:,} bytes", expected=expected)
    with archive.open(info) as file:
        shape, fortran, dtype = _header(path, file)
        size = info.file_size - file.tell()
        fits = dtype == np.dtype("<i8") and len(shape) == 2 and min(shape) > 0 and 8 * shape[0] * shape[1] == size
        if not fits:
            raise DataError(
                f"{path}: {info.filename} is not an array of tokens",
                found=f"{dtype} {list(shape)} in {size:,} bytes",
                expected=expected,
                fix="np.savez(path, source=source.astype(np.int64), ...)",
            )
        array = np.frombuffer(bytearray(file.read()), "<i8").reshape(shape, order="F" if fortran else "C")
    if (array < 0).any():
        raise DataError(
            f"{path}: {info.filename} has negative tokens", found=str(int(array.min())), expected="0 or more"
        )
    return np.ascontiguousarray(array, np.int64)


def _header(path: Path, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file, max_header_size=MAX_HEADER)
    except (ValueError, KeyError, SyntaxError, TypeError, OverflowError, tokenize.TokenError) as error:
        raise DataError(
            f"{path} contains members that are not arrays",
            found=str(error).splitlines()[0][:200],
            expected="int64 arrays",
        ) from None
    return shape, fortran, dtype


def split(
    tokens: TokenArrays,
    *,
    calibration: int | None,
    evaluation: int | Literal["all"],
    seed: int,
    source: str = "the token file",
) -> tuple[TokenArrays, TokenArrays]:
    """Split into disjoint calibration and evaluation sequences.

    As for images (`data.folder.split`): rows are permuted by `numpy.random.RandomState(seed)`, the first `calibration`
    of them calibrate, the next `evaluation` (or all others) evaluate. `source` names the file in errors.

    Raises:
        DataError: fewer sequences than requested.
    """
    order = np.random.RandomState(seed).permutation(len(tokens))
    calibration = usual_calibration(len(tokens)) if calibration is None else calibration
    requested = calibration + (1 if evaluation == "all" else evaluation)
    if len(tokens) < requested:
        others = "at least one" if evaluation == "all" else str(evaluation)
        raise DataError(
            f"{source} has too few sequences",
            found=f"{len(tokens)} sequences",
            expected=f"{calibration} to calibrate and {others} to evaluate",
            fix="add sequences, or request fewer",
        )
    rest = order[calibration:] if evaluation == "all" else order[calibration:requested]
    return tokens.take(order[:calibration]), tokens.take(rest)


def shuffled(tokens: TokenArrays, count: int | None, seed: int, *, source: str = "the token file") -> TokenArrays:
    """Return `count` sequences (None: all) in the order of `split`; `source` names the file in errors.

    Raises:
        DataError: fewer sequences than requested.
    """
    if count is not None and count > len(tokens):
        raise DataError(
            f"{source} has too few sequences",
            found=f"{len(tokens)} sequences",
            expected=f"{count} to calibrate",
            fix="add sequences, or request fewer (--num-samples)",
        )
    return tokens.take(np.random.RandomState(seed).permutation(len(tokens))[:count])


def digest(tokens: TokenArrays) -> str:
    """Return the SHA-256 over shapes and values, in order; independent of the file's compression."""
    total = hashlib.sha256()
    for name, array in zip(MEMBERS, (tokens.source, tokens.target), strict=True):
        if array is not None:
            total.update(f"{name} {array.shape}\n".encode())
            total.update(array.astype("<i8").tobytes())
    return total.hexdigest()

"""Read checkpoint files: safetensors, pickles, npz, shards."""

import argparse
import contextlib
import io
import json
import math
import pathlib
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from vitdeploy.errors import CheckpointError, MissingFileError, PickleError, quoted
from vitdeploy.limits import bounded, size_of
from vitdeploy.models.checkpoints import fit, mismatch
from vitdeploy.models.checkpoints.mismatch import ALONE, FLOAT_FIX, listed
from vitdeploy.models.json_file import files_of, require_checkpoint
from vitdeploy.paths import is_dir, is_file, not_utf8
from vitdeploy.zip_members import DAMAGED, MAX_EXPANSION, members

# --- Read NumPy's `.npz` as a state dict, without unpickling and without trusting the sizes that it declares ----------


# ViT-e, the largest published ViT, has 15.6 GB in float32 (arXiv 2209.06794, table 1).
MAX_BYTES = 32 << 30
SUFFIX, SUFFIX_OF_ARCHIVE = ".npy", ".npz"


def is_npz(path: Path) -> bool:
    """Whether a file is a zip archive of `.npy` members only, at least one."""
    try:
        names = [member.filename for member in members(path)]
    except (zipfile.BadZipFile, OSError):
        return path.suffix == SUFFIX_OF_ARCHIVE  # its reader reports the error
    return bool(names) and all(name.endswith(SUFFIX) for name in names)


def read_npz(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a `.npz` by name, bfloat16 (saved by JAX as two raw bytes) as float32.

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
            f"{path} is not a complete .npz file",
            found=(str(error).splitlines() or [type(error).__name__])[0][:200],
            expected="a zip archive of .npy arrays",
            fix="download it again",
        ) from None


def _check_sizes(path: Path, archive: zipfile.ZipFile) -> None:
    found = archive.infolist()
    others = [member.filename for member in found if not member.filename.endswith(SUFFIX)]
    if others or not found:
        raise ValueError(f"holds {others[0]!r}" if others else "an empty archive")
    # zipfile never returns more bytes of a member than the directory declares, so these sizes bound the memory.
    expanded, packed = sum(member.file_size for member in found), sum(member.compress_size for member in found)
    if expanded > MAX_BYTES or expanded > MAX_EXPANSION * max(packed, 1):
        raise CheckpointError(
            f"{path} expands to an implausible size",
            found=f"{expanded:,} bytes from {packed:,}",
            expected=f"at most {MAX_BYTES:,} bytes and {MAX_EXPANSION} times the packed size",
            fix="download it again from a trusted source",
        )


def _read(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Tensor:
    with archive.open(member) as file:
        shape, column_major, dtype = _header(file)
        if dtype.hasobject:
            raise PickleError(
                f"{path} holds Python objects, so it is not loaded",
                found=f"{member.filename} of dtype {dtype}",
                expected="arrays of numbers",
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


# --- PyTorch's pickles ------------------------------------------------------------------------------------------------
# Only PyTorch's restricted unpickler reads them. A refused pickle is described with a fix that does not load it: a
# pickle of unknown origin must not be run.


MAX_PICKLE = 64 << 20  # bytes searched for names
MAX_PICKLES = 5  # in a file of the old format: magic number, version, system, the object, the keys of its storages
TAR_BLOCK = 512  # members of a tar archive begin at multiples of it
_MODULE = {"_parameters", "_modules"}
# Callables that take commands, code or attribute names; other built-ins (range, slice, int) create values.
_RUNS = re.compile(
    r"(posix|nt|os|subprocess|sys|runpy|importlib|shutil|pty|ctypes|_?pickle|marshal|code|timeit|types|socket)\..*|"
    r"(builtins|__builtin__|_?io)\.(__\w+|eval|exec\w*|compile|open|file|[gsd][a-z]+attr|(raw_)?input|breakpoint|apply)(\..*)?"
)
# Names that occur in plain weights.
_PLAIN = re.compile(
    r"collections\.\w+|_codecs\.encode|(builtins|__builtin__)\.(set|bytearray|complex)|"
    r"torch\.(_utils\._rebuild\w+|Size|\w+Storage|\w+\d+|bool)"
)
_SHARDED = ("deepspeed.", "torch.distributed.")


def inert() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return classes that training scripts save with the weights: value holders that run no code when they are read.

    Paths are read as pure paths, which exist on every system; numpy's names changed in version 2.
    """
    core = np.asarray(0).__reduce__()[0]  # the function itself, whatever its module in this numpy
    scalar = np.float64(0).__reduce__()[0]
    assert callable(core) and callable(scalar)
    moved = [
        (function, f"numpy.{package}.multiarray.{name}")
        for package in ("core", "_core")
        for name, function in (("scalar", scalar), ("_reconstruct", core))
    ]
    paths = [
        (pathlib.PureWindowsPath if kind == "WindowsPath" else pathlib.PurePosixPath, f"{module}.{kind}")
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath")
    ]
    dtypes = [getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")]
    return [argparse.Namespace, np.ndarray, np.dtype, *moved, *paths, *dtypes]


def read_pickle(path: Path) -> object:
    """Return the content of a `torch.save` file, if it is plain data.

    Raises:
        PickleError: it holds more; the error names it.
        CheckpointError: the file is incomplete.
    """
    try:
        # Given a path, PyTorch would choose the reader by its suffix.
        with path.open("rb") as file, torch.serialization.safe_globals(inert()):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal(path, str(error)) from None
    except Exception as error:  # truncated archives raise RuntimeError, EOFError, zipfile errors ...
        if any(map(_RUNS.fullmatch, _content(path)[0])):
            raise refusal(path, str(error)) from None
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path} is not a complete PyTorch checkpoint", found=lines[0].split(". ")[0][:200], fix="download it again"
        ) from None


def refusal(path: Path, text: str) -> PickleError:
    """Return the error for a pickle that the restricted unpickler refused with the message `text`."""
    names, strings = _content(path)
    refused = re.search(r"GLOBAL (\S+)", text)
    lines = text.split("WeightsUnpickler error:")[-1].strip().splitlines() or ["refused by the restricted unpickler"]
    shown = [name for name in names if not _PLAIN.fullmatch(name)] or [refused[1] if refused else lines[0][:200]]
    message, expected, fix = "is a pickle that holds more than plain weights", "a state dict of tensors", ALONE
    if runs := [name for name in (*names, *shown) if _RUNS.fullmatch(name)]:
        shown = [*dict.fromkeys(runs), *(name for name in shown if name not in runs)]
        message = "is a pickle that runs commands when it is read"
        fix = "do not open it; get the weights from a trusted source, as .safetensors"
    elif strings >= _MODULE:
        message = "is a whole pickled module, which only its own code can read"
        expected = "a state dict of tensors, or a function that builds the module"
        fix = f"{ALONE}; write a function build() in my_model.py that builds the module and loads them: "
        fix += "vitdeploy export --model my_model:build -o exported"
    elif any(name.startswith(_SHARDED) for name in names):
        message, expected = "is one part of a sharded training checkpoint", "one state dict of whole tensors"
        fix = "merge the parts where they were written: with DeepSpeed's zero_to_fp32.py next to them, or "
        fix += "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pt"
    return PickleError(f"{path} {message}, so it is not loaded", found=listed(shown), expected=expected, fix=fix)


def is_tar(start: bytes) -> bool:
    return start[257:262] == b"ustar"


def refuse_tar(path: Path) -> None:
    """Raise PickleError for a tar archive of pickles (PyTorch before 0.2), which no restricted unpickler reads."""
    if _content(path)[0]:
        raise refusal(path, "a tar archive of pickles")


def _content(path: Path) -> tuple[list[str], set[str]]:
    """Return the full names that a file's pickles refer to, in any of PyTorch's three formats, and all text in them.
    Nothing is executed; a truncated or invalid pickle is read up to the error."""
    names, strings = set[str](), set[str]()
    with contextlib.suppress(Exception):
        for data in _pickles(path):
            stream = io.BytesIO(data)
            with contextlib.suppress(ValueError):
                for _ in range(MAX_PICKLES):
                    for name, text in _named(stream):
                        names.update([name] if name else [])
                        strings.update([text] if text else [])
    allowed = {each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__name__}" for each in inert()}
    return sorted(names - allowed), strings


def _pickles(path: Path) -> Iterator[bytes]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as inner:
                        yield inner.read(MAX_PICKLE)
        return
    with path.open("rb") as file:
        data = file.read(MAX_PICKLE)
    starts = range(0, len(data), TAR_BLOCK) if is_tar(data) else [0]
    yield from (data[at:] for at in starts if at == 0 or data[at : at + 1] == b"\x80")


def _named(stream: io.BytesIO) -> Iterator[tuple[str, str]]:
    """Yield (full name, "") for each object that the next pickle refers to, and ("", text) for each text, in order: an
    unpickler's stack operations without creating objects. Raises ValueError at an invalid end."""
    stack: list[object] = []
    memo: dict[object, object] = {}
    mark = pickletools.markobject
    for operation, argument, _ in pickletools.genops(stream):
        kind, before = operation.name, operation.stack_before
        top = stack[-1] if stack else None
        if kind in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if kind == "MEMOIZE" else argument] = top
            continue
        if mark in before:
            at = max((i for i, each in enumerate(stack) if each is mark), default=0)
            taken, stack[at:] = stack[at:], []
            del stack[len(stack) - before.index(mark) :]
        else:
            taken = stack[len(stack) - len(before) :]
            del stack[len(stack) - len(before) :]
        pushed: list[object] = [mark if each is mark else None for each in operation.stack_after]
        if kind in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", "."), ""
        elif kind == "STACK_GLOBAL":
            yield ".".join(each if isinstance(each, str) else "?" for each in taken), ""
        elif kind in ("GET", "BINGET", "LONG_BINGET"):
            pushed = [memo.get(argument)]
        elif kind == "DUP":
            pushed = [top, top]
        elif isinstance(argument, str):
            pushed = [argument]
            yield "", argument
        stack += pushed


# --- Read a checkpoint file into a state dict -------------------------------------------------------------------------
# A file's first bytes determine its format, never its name. A `.pt`/`.pth` is a pickle: it is read only with PyTorch's
# restricted unpickler (`weights_only=True`), with no fallback.


_ZIP, _PICKLE, _LFS = b"PK\x03\x04", b"\x80", b"version https://git-lfs"
MAX_HEADER = 100 << 20  # bytes, the safetensors library's own limit
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".ckpt")
FORMATS = "a .safetensors file, a .pt/.pth with a state dict, or JAX's .npz"


def read_checkpoint(path: Path, *shards: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Read the state dict in a safetensors file, a `.pt`/`.pth` of plain weights, or a JAX `.npz`, in float32.

    With `shards`, which hold the rest of the state dict, all files are read together, so that prefixes are shared.
    Also returns notes on what was chosen, dropped or converted (see `unwrap`).

    Raises:
        MissingFileError: no such file.
        PickleError: a pickle that holds more than plain weights.
        CheckpointError: not a checkpoint, truncated, without a unique state dict, or not from a whole float model.
    """
    state, notes = read_tensors(path, *shards)
    mismatch.refuse_state(str(path), state)
    return state, notes


def read_tensors(path: Path, *shards: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Like `read_checkpoint` without `refuse_state`: a user's own module may have such tensors."""
    if not shards:
        path, *shards = files_of(path)  # type: ignore[assignment]
    with bounded(f"read {path.name}", size_of(path, *shards)):
        loaded = _loaded(path)
        if shards:
            parts = [loaded, *map(_loaded, shards)]
            loaded = {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}
        try:
            return fit.unwrap(loaded, str(path))
        except CheckpointError as error:
            message = f"{path}: {error.message}"
            raise CheckpointError(message, found=error.found, expected=error.expected, fix=error.fix) from None


def class_names(path: Path) -> tuple[str, ...]:
    """Return the class names among the training arguments next to the weights (`args.class_names`); () if none."""
    loaded = _loaded(path)
    arguments = loaded.get("args") if isinstance(loaded, Mapping) else None
    named = arguments if isinstance(arguments, Mapping) else getattr(arguments, "__dict__", {})
    names = named.get("class_names")
    return tuple(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def _loaded(path: Path) -> object:
    if is_dir(path):
        mismatch.refuse_folder(path)
        raise MissingFileError(
            f"no checkpoint at {path}", found="a folder", expected="a file with weights", fix=_of_folder(path)
        )
    require_checkpoint(path)
    with path.open("rb") as file:
        start = file.read(512)
    if not start:
        raise CheckpointError(f"{path} is an empty file", expected=FORMATS, fix="download it again")
    if start.startswith(_LFS):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the weights", fix="git lfs pull")
    if _is_safetensors(start):
        return _read_safetensors(path)
    if start.startswith(_ZIP) and is_npz(path):
        return read_npz(path)
    if start.startswith(_ZIP):
        mismatch.refuse_archive(path)
    if start.startswith((_ZIP, _PICKLE)):
        return read_pickle(path)
    if is_tar(start):
        refuse_tar(path)
    mismatch.refuse_beginning(path, start)
    raise CheckpointError(
        f"{path} is not a checkpoint that vitdeploy can read",
        found=f"a file that begins with {start[:24]!r}",
        expected=FORMATS,
        fix="check the file: it may be a web page that was downloaded instead",
    )


def _of_folder(path: Path) -> str:
    if is_file(path / "config.json"):
        return f"use it as the model: {quoted(f'hf:{path}')}"
    files = sorted(entry.name for entry in path.iterdir() if entry.suffix in SUFFIXES)
    return f"name one of its files, such as {quoted(path / files[0])}" if files else "check --checkpoint"


def _is_safetensors(start: bytes) -> bool:
    """Whether a file begins with an 8-byte header length and JSON; the first byte alone could also start a pickle."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    check_header(path)
    try:
        # The library accepts only UTF-8 paths.
        return load(path.read_bytes()) if not_utf8(str(path)) else load_file(path)
    except (SafetensorError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file",
            found=str(error)[:200],
            expected=FORMATS,
            fix="download it again",
        ) from None


def save_part(path: str, prefix: str, out: str) -> None:
    """Write the tensors below a prefix of a checkpoint to a separate .safetensors file, without the prefix.

    It selects the model in a checkpoint that holds several models, or a model among other tensors.
    """
    part = fit.below(read_checkpoint(Path(path))[0], prefix)
    if not part:
        raise CheckpointError(f"{path} has no tensors below {prefix!r}", fix="check the prefix")
    save_file({key: tensor.clone().contiguous() for key, tensor in part.items()}, out)


# --- Check the header of a safetensors file before the library creates a tensor for each entry ------------------------
# Source: README of safetensors, "Format": 8 bytes of length, that much JSON, then the data.


# The largest models known to us have 2,000 tensors and a header of 300 kB in a file.
MAX_HEADER_READ, MAX_TENSORS = 4 << 20, 20_000
HEADER_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64"}
)


def check_header(path: Path) -> None:
    """Refuse a file with too many tensors or an unsupported data type. An invalid header is left to the library, which
    reports it.

    Raises:
        CheckpointError: such a file.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_READ:
            raise _too_much(path, f"a header of {size:,} bytes", f"at most {MAX_HEADER_READ:,}")
        text = file.read(size)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(header, dict):
        return
    if len(header) > MAX_TENSORS:
        raise _too_much(path, f"{len(header):,} tensors", f"at most {MAX_TENSORS:,}")
    kinds = {name: entry.get("dtype") for name, entry in header.items() if isinstance(entry, dict)}
    kinds.pop("__metadata__", None)
    foreign = [
        f"{name[:80]} {kind}" for name, kind in kinds.items() if isinstance(kind, str) and kind not in HEADER_DTYPES
    ]
    if foreign:
        raise CheckpointError(
            f"{path} has tensors of an unsupported type",
            found=listed(foreign)[:500],
            expected=", ".join(sorted(HEADER_DTYPES)),
            fix=FLOAT_FIX,
        )


def _too_much(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path} lists an implausible number of tensors",
        found=found,
        expected=expected,
        fix="save only the model's tensors, or download the file again",
    )

"""Checkpoint files: safetensors, pickles, npz, shards."""

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

# --- Read NumPy's `.npz` as a state dict, without ever unpickling and without taking a file's word for its size -------


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
            expected="a zip archive of .npy arrays",
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
            expected=f"at most {MAX_BYTES:,} bytes and {MAX_EXPANSION} times the packed size",
            fix="download it again, from a source that you trust",
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
# read by its restricted unpickler alone; what that refuses is named, with a way out that does not. read the file:
# whoever proposes to run a pickle of unknown origin has run it.


MAX_PICKLE = 64 << 20  # bytes that are searched for names
MAX_PICKLES = 5  # in a file of the old format: magic number, version, system, the object, the keys of its storages
TAR_BLOCK = 512  # members of a tar archive begin at multiples of it
_MODULE = {"_parameters", "_modules"}
# What takes commands, code or names of attributes; other built-ins (range, slice, int) make values.
_RUNS = re.compile(
    r"(posix|nt|os|subprocess|sys|runpy|importlib|shutil|pty|ctypes|_?pickle|marshal|code|timeit|types|socket)\..*|"
    r"(builtins|__builtin__|_?io)\.(__\w+|eval|exec\w*|compile|open|file|[gsd][a-z]+attr|(raw_)?input|breakpoint|apply)(\..*)?"
)
# What stands in plain weights.
_PLAIN = re.compile(
    r"collections\.\w+|_codecs\.encode|(builtins|__builtin__)\.(set|bytearray|complex)|"
    r"torch\.(_utils\._rebuild\w+|Size|\w+Storage|\w+\d+|bool)"
)
_SHARDED = ("deepspeed.", "torch.distributed.")


def inert() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Classes that training scripts save with the weights: holders of values, which run nothing when they are read.

    Paths are read as pure ones, which exist on every system; numpy's names changed in version 2.
    """
    core = np.asarray(0).__reduce__()[0]  # the function itself, wherever this numpy keeps it
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
    """Whatever a file of `torch.save` holds, if that is plain data.

    Raises:
        PickleError: it holds more; names what.
        CheckpointError: not whole.
    """
    try:
        # A path would let PyTorch choose the reader by its suffix.
        with path.open("rb") as file, torch.serialization.safe_globals(inert()):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal(path, str(error)) from None
    except Exception as error:  # truncated archives raise RuntimeError, EOFError, zipfile errors ...
        if any(map(_RUNS.fullmatch, _content(path)[0])):
            raise refusal(path, str(error)) from None
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path} is not a whole PyTorch checkpoint", found=lines[0].split(". ")[0][:200], fix="download it again"
        ) from None


def refusal(path: Path, text: str) -> PickleError:
    """The error of a pickle that the restricted unpickler refused, saying `text`: what is in it, and what to do."""
    names, strings = _content(path)
    refused = re.search(r"GLOBAL (\S+)", text)
    lines = text.split("WeightsUnpickler error:")[-1].strip().splitlines() or ["not readable by that"]
    shown = [name for name in names if not _PLAIN.fullmatch(name)] or [refused[1] if refused else lines[0][:200]]
    message, expected, fix = "is a pickle that holds more than plain weights", "a state dict of tensors", ALONE
    if runs := [name for name in (*names, *shown) if _RUNS.fullmatch(name)]:
        shown = [*dict.fromkeys(runs), *(name for name in shown if name not in runs)]
        message = "is a pickle that runs commands when it is read"
        fix = "do not open it; get the weights from where you trust them, as .safetensors"
    elif strings >= _MODULE:
        message = "is a whole pickled module, which only its own code can read"
        expected = "a state dict of tensors, or the module as a function of yours"
        fix = f"{ALONE}; a function build() of yours in my_model.py makes the module and loads them: vitdeploy export "
        fix += "--model my_model:build -o exported"
    elif any(name.startswith(_SHARDED) for name in names):
        message, expected = "is one part of a checkpoint that several processes wrote", "one state dict of whole tensors"
        fix = "join the parts where they were written: DeepSpeed's zero_to_fp32.py beside them, or "
        fix += "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pt"
    return PickleError(f"{path} {message}, so it is not loaded", found=listed(shown), expected=expected, fix=fix)


def is_tar(start: bytes) -> bool:
    return start[257:262] == b"ustar"


def refuse_tar(path: Path) -> None:
    """Raise PickleError for a tar archive of pickles, as PyTorch wrote before 0.2: nothing restricted reads it."""
    if _content(path)[0]:
        raise refusal(path, "a tar archive of pickles")


def _content(path: Path) -> tuple[list[str], set[str]]:
    """The full names that the pickles of a file refer to, in any of PyTorch's three formats, and all text in them.
    Nothing of it is run; of what is cut short, or no pickle, what stands before that."""
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
    """(full name, "") of each thing that the next pickle refers to, and ("", text) of each text, in their order: what
    an unpickler does to its stack, but for making anything. Raises ValueError where it ends."""
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
# The first bytes of a file determine its format, never its name. A `.pt`/`.pth` is a pickle: it is read only with
# PyTorch's restricted unpickler (`weights_only=True`), with no fallback.


_ZIP, _PICKLE, _LFS = b"PK\x03\x04", b"\x80", b"version https://git-lfs"
MAX_HEADER = 100 << 20  # bytes, the safetensors library's own limit: what is longer is no such file
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".ckpt")
FORMATS = "a .safetensors file, a .pt/.pth with a state dict, or JAX's .npz"


def read_checkpoint(path: Path, *shards: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict in a safetensors file, a `.pt`/`.pth` of plain weights, or a `.npz` of JAX, in float32.

    With `shards`, which hold the rest of one state dict: of all of them together, so that prefixes are seen as a whole.
    Also returns what was chosen, dropped or converted on the way (see `unwrap`), one per line.

    Raises:
        MissingFileError: no such file.
        PickleError: a pickle that holds more than plain weights.
        CheckpointError: not a checkpoint, truncated, without one state dict, or not of a whole float model.
    """
    state, notes = read_tensors(path, *shards)
    mismatch.refuse_state(str(path), state)
    return state, notes


def read_tensors(path: Path, *shards: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """`read_checkpoint` without a look at what the tensors are of: a module of the user's own may be of that kind."""
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
            said = f"{path}: {error.message}"
            raise CheckpointError(said, found=error.found, expected=error.expected, fix=error.fix) from None


def class_names(path: Path) -> tuple[str, ...]:
    """The names of classes in the arguments of training beside the weights (`args.class_names`); () where none are."""
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
        raise CheckpointError(f"{path} is an empty file", expected=FORMATS, fix="get it again")
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
        f"{path} is no checkpoint that vitdeploy can read",
        found=f"a file that begins with {start[:24]!r}",
        expected=FORMATS,
        fix="look at the file: a download may have been answered with a web page",
    )


def _of_folder(path: Path) -> str:
    if is_file(path / "config.json"):
        return f"give it as the model: {quoted(f'hf:{path}')}"
    files = sorted(entry.name for entry in path.iterdir() if entry.suffix in SUFFIXES)
    return f"name one of its files, such as {quoted(path / files[0])}" if files else "check --checkpoint"


def _is_safetensors(start: bytes) -> bool:
    """Eight bytes of the length of a header, which is JSON: by the first alone it may be taken for a pickle."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    check_header(path)
    try:
        # The library takes no path that is not UTF-8.
        return load(path.read_bytes()) if not_utf8(str(path)) else load_file(path)
    except (SafetensorError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file",
            found=str(error)[:200],
            expected=FORMATS,
            fix="download it again",
        ) from None


def save_part(path: str, prefix: str, out: str) -> None:
    """Write what is below a prefix in a checkpoint as a .safetensors file of its own, the prefix dropped.

    For a checkpoint that holds several models, or a model among other tensors: the way to say which is meant.
    """
    part = fit.below(read_checkpoint(Path(path))[0], prefix)
    if not part:
        raise CheckpointError(f"{path} has nothing below {prefix!r}", fix="check the prefix")
    save_file({key: tensor.clone().contiguous() for key, tensor in part.items()}, out)


# --- The header of a safetensors file, looked at before the library builds a tensor for each of its entries -----------
# Source: README of safetensors, "Format": 8 bytes of length, that much JSON, then the data.


# The largest models known to us have 2,000 tensors in a file, and 300 kB of header.
MAX_HEADER_READ, MAX_TENSORS = 4 << 20, 20_000
HEADER_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64"}
)


def check_header(path: Path) -> None:
    """Refuse a file with too many tensors, or with numbers of a type that no model here is made of. What is no header
    is left to the library, which says so.

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
            f"{path} has numbers of a type that vitdeploy does not read",
            found=listed(foreign)[:500],
            expected=", ".join(sorted(HEADER_DTYPES)),
            fix=FLOAT_FIX,
        )


def _too_much(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path} lists more tensors than any model has",
        found=found,
        expected=expected,
        fix="save the model's tensors alone; download it again if it is not yours",
    )

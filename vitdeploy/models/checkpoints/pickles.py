"""PyTorch's pickles: read by its restricted unpickler alone; what that refuses is named, with a way out that does not
read the file: whoever proposes to run a pickle of unknown origin has run it."""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitdeploy.errors import CheckpointError, PickleError
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.checkpoints.unsupported import ALONE

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
    message, wanted, fix = "is a pickle that holds more than plain weights", "a state dict of tensors", ALONE
    if runs := [name for name in (*names, *shown) if _RUNS.fullmatch(name)]:
        shown = [*dict.fromkeys(runs), *(name for name in shown if name not in runs)]
        message = "is a pickle that runs commands when it is read"
        fix = "do not open it; get the weights from where you trust them, as .safetensors"
    elif strings >= _MODULE:
        message = "is a whole pickled module, which only its own code can read"
        wanted = "a state dict of tensors, or the module as a function of yours"
        fix = f"{ALONE}; a function build() of yours in my_model.py makes the module and loads them: vitdeploy export "
        fix += "--model my_model:build -o exported"
    elif any(name.startswith(_SHARDED) for name in names):
        message, wanted = "is one part of a checkpoint that several processes wrote", "one state dict of whole tensors"
        fix = "join the parts where they were written: DeepSpeed's zero_to_fp32.py beside them, or "
        fix += "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pt"
    return PickleError(f"{path} {message}, so it is not loaded", found=listed(shown), wanted=wanted, fix=fix)


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

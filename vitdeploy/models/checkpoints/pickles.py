"""PyTorch's pickles: read by its restricted unpickler alone; what that refuses is named, with the way out."""

from __future__ import annotations

import argparse
import pathlib
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitdeploy.errors import CheckpointError, PickleError
from vitdeploy.models.checkpoints.mismatch import listed

MAX_PICKLE = 64 << 20  # bytes that are searched for names
_MODULE = {"_parameters", "_modules"}
# What takes commands, code or names of attributes; other built-ins (range, slice, int) make values.
_RUNS = re.compile(
    r"(posix|nt|os|subprocess|sys|runpy|importlib|shutil)\..*|"
    r"(builtins|__builtin__|_?io)\.(__\w+|eval|exec\w*|compile|open|file|[gsd][a-z]+attr|(raw_)?input|breakpoint|apply)(\..*)?"
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
        raise _refusal(path, str(error)) from None
    except Exception as error:  # truncated archives raise RuntimeError, EOFError, zipfile errors ...
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path} is not a whole PyTorch checkpoint", found=lines[0].split(". ")[0][:200], fix="download it again"
        ) from None


def _refusal(path: Path, text: str) -> PickleError:
    """The error of a pickle that the restricted unpickler refused: what is in it, and how its weights are saved."""
    names, strings = _names(path, text), _strings(path)
    found = listed(names)
    if any(map(_RUNS.fullmatch, names)):
        return PickleError(
            f"{path} is a pickle that runs commands when it is read, so it is not loaded",
            found=found,
            wanted="a state dict of tensors",
            fix="do not open it; get the weights from where you trust them, as .safetensors",
        )
    if strings >= _MODULE:
        return PickleError(
            f"{path} is a whole pickled module, which only its own code can read, so it is not loaded",
            found=found,
            wanted="a state dict of tensors, or the module as a function of yours",
            fix="where you trust it: write my_model.py of the lines `import torch` and `def build(): return "
            f"torch.load({str(path)!r}, map_location='cpu', weights_only=False)`; then "
            "vitdeploy export --model my_model:build -o exported",
        )
    if any(name.startswith(_SHARDED) for name in names):
        return PickleError(
            f"{path} is one part of a checkpoint that several processes wrote, so it is not loaded",
            found=found,
            wanted="one state dict of whole tensors",
            fix="join the parts where they were written: DeepSpeed's zero_to_fp32.py beside them, or "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pt",
        )
    return PickleError(
        f"{path} is a pickle that holds more than plain weights, so it is not loaded",
        found=found,
        wanted="a state dict of tensors",
        fix=f"where you trust it, as this runs what is in it: {_conversion(path)}",
    )


def _conversion(path: Path) -> str:
    """A command that keeps the tensors of a file alone, each where it is: which of them are meant, `unwrap` finds."""
    load = f"torch.load({str(path)!r}, map_location='cpu', weights_only=False)"
    kept = "isinstance(k, str) and isinstance(v, (dict, torch.Tensor))"
    keep = f"{{k: keep(v) if isinstance(v, dict) else v for k, v in d.items() if {kept}}}"
    return f"python -c \"import torch; keep = lambda d: {keep}; torch.save(keep({load}), 'weights.pt')\""


def _names(path: Path, text: str) -> list[str]:
    """The full names that the restricted unpickler refuses; complete if the file has the current format."""
    try:
        with torch.serialization.safe_globals(inert()):
            names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a file of the old format
        names = []
    named = re.search(r"GLOBAL (\S+)", text)
    if names or named:
        return names or [named[1] if named else ""]
    lines = text.split("WeightsUnpickler error:")[-1].strip().splitlines()
    return [lines[0][:200] if lines else "not readable by the restricted unpickler"]


def _strings(path: Path) -> set[str]:
    """All text in a pickle: names of attributes and keys among it. Nothing of it is run."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                with archive.open(name) as inner:
                    return _texts(inner.read(MAX_PICKLE))
        with path.open("rb") as file:
            return _texts(file.read(MAX_PICKLE))
    except Exception:  # cut short, or no pickle: then nothing more is known of it
        return set()


def _texts(data: bytes) -> set[str]:
    """The old format is several pickles, one behind the other: magic number, version, system, then the object."""
    import io

    stream, found = io.BytesIO(data), set()
    for _ in range(4):
        try:
            found |= {argument for _, argument, _ in pickletools.genops(stream) if isinstance(argument, str)}
        except ValueError:
            break
    return found

"""Read a checkpoint file into a state dict, and load it into a model, refusing whatever does not fit.

What a file is, is told by its first bytes, never by its name. A `.pt`/`.pth` is a pickle: it is read with PyTorch's
restricted unpickler only (`weights_only=True`), with no fallback.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingFileError, NonFiniteWeightsError, PickleError
from vitdeploy.models.keys.npz import is_npz, read_npz
from vitdeploy.models.names import require_checkpoint
from vitdeploy.models.unwrap import unwrap

_ZIP, _PICKLE, _LFS = b"PK\x03\x04", b"\x80", b"version https://git-lfs"
MAX_HEADER = 100 << 20  # bytes, the safetensors library's own limit
SHOWN = 5
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".ckpt")
FORMATS = "a .safetensors file, a .pt/.pth with a state dict, or JAX's .npz"


def read_checkpoint(path: Path, *shards: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict in a safetensors file, a `.pt`/`.pth` of plain weights, or a `.npz` of JAX, in float32.

    With `shards`, which hold the rest of one state dict: of all of them together, so that prefixes are seen as a whole.
    Also returns what was chosen, dropped or converted on the way (see `unwrap`), a line each.

    Raises:
        MissingFileError: no such file.
        PickleError: a pickle that holds more than plain weights.
        CheckpointError: not a checkpoint, truncated, or without one state dict.
    """
    loaded = _loaded(path)
    if shards:
        parts = [loaded, *map(_loaded, shards)]
        loaded = {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}
    try:
        return unwrap(loaded)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: {error.message}", found=error.found, wanted=error.wanted, fix=error.fix
        ) from None


def _loaded(path: Path) -> object:
    if path.is_dir():
        raise MissingFileError(
            f"no checkpoint at {path}", found="a folder", wanted="a file with weights", fix=_of_folder(path)
        )
    require_checkpoint(path)
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise CheckpointError(f"{path} is an empty file", wanted=FORMATS, fix="get it again")
    if start.startswith(_LFS):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the weights", fix="git lfs pull")
    if _is_safetensors(start):
        return _read_safetensors(path)
    if start.startswith(_ZIP) and is_npz(path):
        return read_npz(path)
    if start.startswith((_ZIP, _PICKLE)):
        return _read_torch(path)
    raise CheckpointError(
        f"{path} is no checkpoint that vitdeploy can read",
        found=f"a file that begins with {start[:24]!r}",
        wanted=FORMATS,
        fix="look at the file: a download may have been answered with a web page",
    )


def _of_folder(path: Path) -> str:
    if (path / "config.json").is_file():
        return f"give it as the model: hf:{path}"
    files = sorted(entry.name for entry in path.iterdir() if entry.suffix in SUFFIXES)
    return f"name one of its files, such as {path / files[0]}" if files else "check --checkpoint"


def _is_safetensors(start: bytes) -> bool:
    """Eight bytes of the length of a header, which is JSON: by the first alone it may be taken for a pickle."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file",
            found=str(error)[:200],
            wanted=FORMATS,
            fix="download it again",
        ) from None


def _read_torch(path: Path) -> object:
    import pickle

    try:
        # A path would let PyTorch choose the reader by its suffix. Training scripts save their arguments beside the
        # weights: a Namespace is a plain holder of values, which runs nothing when it is read.
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise PickleError(
            f"{path} is a pickle that holds more than plain weights, so it is not loaded",
            found=_refused(str(error)),
            wanted="a state dict of tensors",
            fix="where you trust it: safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')",
        ) from None
    except Exception as error:  # truncated archives raise RuntimeError, EOFError, zipfile errors ...
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path} is not a whole PyTorch checkpoint", found=lines[0].split(". ")[0][:200], fix="download it again"
        ) from None
    return loaded


def _refused(text: str) -> str:
    """What the restricted unpickler refused, without PyTorch's advice on how to run it all the same."""
    named = re.search(r"GLOBAL (\S+)", text)
    if named is not None:
        return named[1]
    lines = text.split("WeightsUnpickler error:")[-1].strip().splitlines()
    return lines[0][:200] if lines else "not readable by the restricted unpickler"


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load `state` into `model`, strictly.

    Raises:
        CheckpointError: missing, unexpected or differently shaped tensors; lists the first few and the counts.
        NonFiniteWeightsError: NaN or infinity in a tensor.
    """
    own = model.state_dict()
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    misshapen = [key for key in own if key in state and own[key].shape != state[key].shape]
    if missing or unexpected or misshapen:
        raise CheckpointError(
            f"{source} does not fit the architecture",
            found="; ".join(
                [
                    *_listed("missing", [_with_nearest(key, unexpected) for key in missing]),
                    *_listed("unexpected", unexpected),
                    *_listed(
                        "other shape",
                        [f"{k} {list(state[k].shape)} (the model: {list(own[k].shape)})" for k in misshapen],
                    ),
                ]
            ),
            wanted=f"{len(own)} tensors named and shaped as the model's",
            fix="choose the model that the checkpoint was made for (size, patch, image size)"
            if missing or misshapen
            else "save the state dict without the unexpected tensors, or bring the module that has them (--model)",
        )
    for key, tensor in state.items():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise NonFiniteWeightsError(
                f"{source}: {key} has values that are not finite",
                found=f"{bad} of {tensor.numel()} are NaN or infinite",
                fix="use another checkpoint: no step can mend this one",
            )
    model.load_state_dict(dict(state), strict=True)


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return [f"{len(items)} {what}: {', '.join(items[:SHOWN])}{more}"]


def _with_nearest(key: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.8)
    return f"{key} (the checkpoint has {near[0]})" if near else key

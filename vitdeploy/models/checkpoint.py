"""Read a checkpoint file into a state dict, and load it into a model, refusing whatever does not fit.

What a file is, is told by its first bytes, never by its name. A `.pt`/`.pth` is a pickle: it is read with PyTorch's
restricted unpickler only (`weights_only=True`), with no fallback.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingFileError, NonFiniteWeightsError
from vitdeploy.models import misfits, other_kinds, prefixes
from vitdeploy.models.hub import files_of
from vitdeploy.models.keys.npz import is_npz, read_npz
from vitdeploy.models.names import require_checkpoint
from vitdeploy.models.pickles import read_pickle
from vitdeploy.models.unwrap import FILE, unwrap

_ZIP, _PICKLE, _LFS = b"PK\x03\x04", b"\x80", b"version https://git-lfs"
MAX_HEADER = 100 << 20  # bytes, the safetensors library's own limit
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
    other_kinds.refuse_state(str(path), state)
    return state, notes


def read_tensors(path: Path, *shards: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """`read_checkpoint` without a look at what the tensors are of: a module of the user's own may be of that kind."""
    if not shards:
        path, *shards = files_of(path)  # type: ignore[assignment]
    loaded = _loaded(path)
    if shards:
        parts = [loaded, *map(_loaded, shards)]
        loaded = {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}
    try:
        state, notes = unwrap(loaded)
    except CheckpointError as error:
        fix = error.fix.replace(FILE, str(path))
        raise CheckpointError(f"{path}: {error.message}", found=error.found, wanted=error.wanted, fix=fix) from None
    return state, notes


def _loaded(path: Path) -> object:
    if path.is_dir():
        other_kinds.refuse_folder(path)
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
    if start.startswith(_ZIP):
        other_kinds.refuse_archive(path)
    if start.startswith((_ZIP, _PICKLE)):
        return read_pickle(path)
    other_kinds.refuse_beginning(path, start)
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


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str, file: str = "") -> tuple[str, ...]:
    """Load `state` into `model`, strictly; returns what was told apart on the way, one per line.

    A prefix that the model's names do not have is found and dropped. What a module computes may be in either without
    the other; so may one of the names of a tensor that the model has under several; what the training alone needs may
    be in the state. Nothing else may. `file` is where the state was read from, `source` what an error calls it.

    Raises:
        CheckpointError: missing, unexpected or differently shaped tensors; all of them, by what they have in common.
        NonFiniteWeightsError: NaN or infinity in a tensor.
    """
    own = model.state_dict(keep_vars=True)
    state, notes = prefixes.towards(state, own.keys(), file or source)
    state, remarks = _reconciled(own, state, source)
    found = misfits.compare(own, state)
    if found:
        raise CheckpointError(
            f"{source} does not fit the architecture",
            found=found.told(own, state),
            wanted=f"{len(own)} tensors named and shaped as the model's",
            fix=_mend(found),
        )
    for key, tensor in state.items():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise NonFiniteWeightsError(
                f"{source}: {key} has values that are not finite",
                found=f"{bad} of {tensor.numel()} are NaN or infinite",
                fix="use another checkpoint: no step can fix this one",
            )
    model.load_state_dict(state, strict=True)
    return (*notes, *remarks)


def _mend(found: misfits.Misfits) -> str:
    if found.kinds:
        return "save the float weights: integers without their scales are other numbers"
    if found.missing or found.shapes:
        return "choose the model that the checkpoint was made for (size, patch, image size)"
    return "save the state dict without the unexpected tensors, or bring the module that has them (--model)"


def _reconciled(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state with the names of the model's tensors, where what is more or less of them makes no difference."""
    whole, notes = dict(state), []
    groups: dict[int, list[str]] = {}
    for key, tensor in own.items():
        groups.setdefault(id(tensor), []).append(key)
    for names in groups.values():
        there = [name for name in names if name in state]
        if any(not torch.equal(state[name], state[there[0]]) for name in there[1:]):
            raise CheckpointError(
                f"{source} has different numbers for what is one tensor in the model",
                found=" and ".join(there),
                wanted="the same numbers under all names of a shared tensor",
                fix="save the state dict of the model as it is built now",
            )
        if there and len(there) < len(names):
            whole |= dict.fromkeys(names, state[there[0]])
            notes.append(f"shared with {there[0]}: {misfits.listed([name for name in names if name not in there])}")
    # What was learned under such a name is missing like any other.
    buffers = [key for key in own if key not in whole and not isinstance(own[key], nn.Parameter)]
    absent = [key for key in buffers if misfits.COMPUTED.fullmatch(key)]
    whole |= {key: own[key].detach() for key in absent}
    if absent:
        told = misfits.listed(misfits.patterns(absent, own))
        notes.append(f"not in the checkpoint, computed by the model itself: {told}")
    extra = [key for key in whole if key not in own]
    computed = [key for key in extra if misfits.COMPUTED.fullmatch(key)]
    training = [key for key in extra if key not in computed and misfits.of_training(key)]
    for keys, why in ((computed, "computed by the model itself"), (training, "used in training only")):
        if keys:
            notes.append(f"left out, {why}: {misfits.listed(misfits.patterns(keys, state))}")
    return {key: tensor for key, tensor in whole.items() if key not in {*computed, *training}}, tuple(notes)


def save_part(path: str, prefix: str, out: str) -> None:
    """Write what is below a prefix in a checkpoint as a .safetensors file of its own, the prefix dropped.

    For a checkpoint that holds several models, or a model among other tensors: the way to say which is meant.
    """
    from safetensors.torch import save_file

    part = prefixes.below(read_checkpoint(Path(path))[0], prefix)
    if not part:
        raise CheckpointError(f"{path} has nothing below {prefix!r}", fix="check the prefix")
    save_file({key: tensor.clone().contiguous() for key, tensor in part.items()}, out)

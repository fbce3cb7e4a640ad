"""Turn the content of a checkpoint file into one flat state dict: no containers, no wrapper prefixes, float32.

Training scripts save their state dict inside a dict, with the optimizer, the epoch and the arguments:

    timm            state_dict, state_dict_ema, optimizer, epoch, args ...
    DeiT, MAE       model, model_ema, optimizer, lr_scheduler, epoch, args ...
    DINO, DINOv2    teacher, student, optimizer, epoch ...; keys `backbone.*` and the projection heads of the training
    RT-DETR, YOLO   ema: {module: ..., updates: ...}

Exponential moving averages (a teacher is one) are preferred: they are what such scripts evaluate and publish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError, python_command
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.checkpoints.unsupported import FLOAT_FIX

AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher")
PLAIN = ("state_dict", "model_state_dict", "model", "module", "student")
# DistributedDataParallel, torch.compile, Lightning modules, self-supervised trainers, I-JEPA.
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "encoder.")
# Projection heads of DINO (arXiv 2104.14294) and DINOv2 (arXiv 2304.07193), used in training only.
FOREIGN_HEADS = ("head.mlp", "head.last_layer.", "dino_head.", "ibot_head.")
# What wraps a module anywhere inside another: torch.compile, FSDP, activation checkpointing, Lightning's strategies.
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
_DEEPEST = 4


def unwrap(loaded: object, file: str = "FILE") -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The flat state dict in `loaded`, and what was chosen, dropped or converted on the way, one per line.

    A prefix is dropped only if all keys share it; for `backbone.` the known projection heads are left out first.
    Tensors in float16 or bfloat16 become float32; any other tensor is passed on unchanged.

    Raises:
        CheckpointError: no tensors anywhere, keys that are not text, or two state dicts of equal standing.
    """
    notes: list[str] = []
    state = _tensors(_innermost(loaded, notes, file), notes)
    return _in_float32(_unwrapped(_without_prefixes(state, notes), notes), notes), tuple(notes)


def _innermost(loaded: object, notes: list[str], file: str) -> Mapping[Any, Any]:
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            "the checkpoint is not a state dict",
            found=type(loaded).__name__,
            wanted="parameter names mapped to tensors, or a dict that holds such a mapping",
            fix="save model.state_dict()",
        )
    container = loaded
    opened = ""
    for _ in range(_DEEPEST):
        name = _chosen(container, opened, file)
        if name is None:
            return container
        beside = [str(other) for other in container if other != name]
        notes.append(f"weights taken from {name!r}{f', ignored beside it: {listed(beside)}' if beside else ''}")
        container, opened = container[name], f"{opened}[{name!r}]"
    raise CheckpointError(f"more than {_DEEPEST} dicts inside each other", fix="save model.state_dict() alone")


def _chosen(container: Mapping[Any, Any], opened: str, file: str) -> str | None:
    """The entry that holds the weights, None if `container` is the state dict itself. `opened` led to it."""
    for names in (AVERAGED, PLAIN):
        found = [name for name in names if _holds_tensors(container.get(name))]
        if len(found) == 1:
            return found[0]
        if found:
            raise _undecided(found, opened, file)
    if any(isinstance(value, Tensor) for value in container.values()):
        return None
    unnamed = [key for key, value in container.items() if isinstance(key, str) and _is_flat(value)]
    if len(unnamed) > 1:
        raise _undecided(unnamed, opened, file)
    return unnamed[0] if unnamed else None


def _undecided(names: list[str], opened: str, file: str) -> CheckpointError:
    state = f"torch.load({file!r}, map_location='cpu', weights_only=True){opened}[{names[0]!r}]"
    return CheckpointError(
        "the checkpoint holds several state dicts of equal standing",
        found=", ".join(repr(name) for name in names),
        wanted="one of them",
        fix="save the one you mean alone: " + python_command(f"import torch; torch.save({state}, 'weights.pt')"),
    )


def _holds_tensors(value: object, depth: int = _DEEPEST) -> bool:
    if not isinstance(value, Mapping) or depth == 0:
        return False
    return any(isinstance(item, Tensor) or _holds_tensors(item, depth - 1) for item in value.values())


def _is_flat(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, Tensor) for item in value.values())


def _tensors(container: Mapping[Any, Any], notes: list[str]) -> dict[str, Tensor]:
    state = {key: value.detach() for key, value in container.items() if isinstance(value, Tensor)}
    others = [f"{key} ({type(value).__name__})" for key, value in container.items() if not isinstance(value, Tensor)]
    if not state:
        raise CheckpointError(
            "the checkpoint holds no tensors",
            found=listed(others) or "an empty dict",
            wanted="parameter names mapped to tensors",
            fix="save model.state_dict()",
        )
    wrong = [repr(key) for key in state if not isinstance(key, str)]
    if wrong:
        raise CheckpointError(
            "the checkpoint's keys are not parameter names", found=listed(wrong), fix="save model.state_dict()"
        )
    refuse_unreadable(state)
    if others:
        notes.append(f"ignored, not tensors: {listed(others)}")
    return state


def _without_prefixes(state: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    dropped = ""
    while True:
        heads = [key for key in state if key.startswith(FOREIGN_HEADS)]
        backbone = {key: tensor for key, tensor in state.items() if key.startswith("backbone.")}
        if heads and backbone and len(heads) + len(backbone) == len(state):
            notes.append(f"left out, used in training only: {listed(heads)}")
            state = backbone
        prefix = next((prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in state)), None)
        if prefix is None:
            break
        dropped += prefix
        state = {key[len(prefix) :]: tensor for key, tensor in state.items()}
    if dropped:
        notes.append(f"prefix {dropped!r} dropped from all keys")
    return state


def _unwrapped(state: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """The state without the names of wrappers inside its keys, where that leaves all keys different."""
    renamed = {WRAPPERS.sub("", key): tensor for key, tensor in state.items()}
    if renamed.keys() == state.keys() or len(renamed) < len(state):
        return state
    names = sorted({found.rstrip(".") for key in state for found in WRAPPERS.findall(key)})
    notes.append(f"wrappers' names dropped from keys: {', '.join(names)}")
    return _without_prefixes(renamed, notes)


def _in_float32(state: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    half = [tensor.dtype for tensor in state.values() if tensor.dtype in (torch.float16, torch.bfloat16)]
    if not half:
        return state
    kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in half}))
    notes.append(f"{len(half)} of {len(state)} tensors converted from {kinds} to float32")
    return {
        key: tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        for key, tensor in state.items()
    }


# --- Whether the tensors of a checkpoint are plain numbers, and as many as the file holds -----------------------------


DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)
# A pickle may show one number as a tensor of 10^12. Parts of one storage under several names are a few times its size.
MAX_REPEATED, SMALL_BYTES = 16, 64 << 20


def refuse_unreadable(state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for tensors that are not dense, of another type, or larger than what is stored of them."""
    foreign = [f"{key} {kind}" for key, tensor in state.items() if (kind := _kind(tensor))]
    if foreign:
        raise CheckpointError(
            "the checkpoint has tensors of a type that vitdeploy does not read",
            found=listed(foreign)[:500],
            wanted="dense tensors of float32, float16, bfloat16, float64, or integers",
            fix=FLOAT_FIX,
        )
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.values()}
    shown, held = sum(tensor.nbytes for tensor in state.values()), sum(storages.values())
    if shown > MAX_REPEATED * held + SMALL_BYTES:
        raise CheckpointError(
            "the checkpoint shows more numbers than it holds",
            found=f"{shown:,} bytes of tensors, {held:,} stored",
            wanted="tensors with numbers of their own",
            fix="save each tensor as tensor.clone()",
        )


def _kind(tensor: Tensor) -> str:
    """What is not readable about a tensor; "" for a plain one."""
    if tensor.is_nested or tensor.is_quantized:  # asked first: what else they are is an error of theirs
        return "nested" if tensor.is_nested else "quantized"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.device.type == "meta":
        return "without numbers (meta)"
    return "" if tensor.dtype in DTYPES else str(tensor.dtype).removeprefix("torch.")

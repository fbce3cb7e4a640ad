"""Whether the tensors of a checkpoint are plain numbers, and as many as the file holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.checkpoints.safetensors_header import FLOAT_FIX

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

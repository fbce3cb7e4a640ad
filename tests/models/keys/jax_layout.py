"""A state dict under timm's names, written as the JAX code bases write theirs: the published layout, the other way."""

from __future__ import annotations

import re

import numpy as np
from torch import Tensor

ORIGINAL, BIG_VISION = (1, 2, 3), (0, 1, 0)  # numbers of the attention, the second norm and the MLP within a block
OUTER = {"patch_embed.proj": "embedding", "norm": "Transformer/encoder_norm", "head": "head"}
PREFIX_OF_POOL = "MAPHead_0/"


def as_jax(state: dict[str, Tensor], heads: int, numbers: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Arrays by Flax path; `numbers` says whose code, ORIGINAL or BIG_VISION."""
    arrays: dict[str, np.ndarray] = {}
    for key, tensor in state.items():
        array = tensor.float().numpy()
        layer, _, kind = key.rpartition(".")
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
        if key == "cls_token":
            arrays["cls"] = array
        elif key == "pos_embed":
            arrays["Transformer/posembed_input/pos_embedding" if numbers == ORIGINAL else "pos_embedding"] = array
        elif key == "attn_pool.latent":
            arrays[PREFIX_OF_POOL + "probe"] = array
        elif block:
            _layer(arrays, f"Transformer/encoderblock_{block[1]}/", block[2], kind, array, heads, numbers)
        elif layer.startswith("attn_pool."):
            part = layer.removeprefix("attn_pool.")
            _layer(arrays, PREFIX_OF_POOL, "norm1" if part == "norm" else part, kind, array, heads, BIG_VISION)
        elif array.ndim == 4:
            arrays[f"{OUTER[layer]}/kernel"] = array.transpose(2, 3, 1, 0)
        else:
            _linear_or_norm(arrays, OUTER[layer], kind, array)
    return arrays


def _linear_or_norm(arrays, path, kind, array):
    name = "bias" if kind == "bias" else "kernel" if array.ndim == 2 else "scale"
    arrays[f"{path}/{name}"] = array.T if array.ndim == 2 else array


def _layer(arrays, prefix, part, kind, array, heads, numbers):
    attention, norm, mlp = numbers
    if part in ("norm1", "norm2"):
        _linear_or_norm(arrays, f"{prefix}LayerNorm_{0 if part == 'norm1' else norm}", kind, array)
        return
    if part.startswith("mlp."):
        _linear_or_norm(arrays, f"{prefix}MlpBlock_{mlp}/Dense_{int(part[-1]) - 1}", kind, array)
        return
    prefix = f"{prefix}MultiHeadDotProductAttention_{attention}/"
    names = {"attn.qkv": ("query", "key", "value"), "q": ("query",), "kv": ("key", "value")}.get(part)
    if names is None:  # the output: heads and their widths come in
        each = len(array) // heads
        arrays[f"{prefix}out/{'bias' if kind == 'bias' else 'kernel'}"] = (
            array if kind == "bias" else array.T.reshape(heads, each, -1)
        )
        return
    for name, rows in zip(names, np.split(array, len(names)), strict=True):
        each = len(rows) // heads
        if kind == "bias":
            arrays[f"{prefix}{name}/bias"] = rows.reshape(heads, each)
        else:
            arrays[f"{prefix}{name}/kernel"] = rows.T.reshape(-1, heads, each)


def stacked(arrays: dict[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """Blocks on a first axis, as a scan over them keeps them."""
    first = "Transformer/encoderblock_0/"
    out = {key: array for key, array in arrays.items() if not key.startswith("Transformer/encoderblock_")}
    for part in [key.removeprefix(first) for key in arrays if key.startswith(first)]:
        blocks = [arrays[f"Transformer/encoderblock_{i}/{part}"] for i in range(depth)]
        out[f"Transformer/encoderblock/{part}"] = np.stack(blocks)
    return out

"""Swin Transformer checkpoints of other libraries, renamed to the keys of `architectures.swin`.

timm            layers.1.downsample, head.fc: from timm 0.9 on, and ours
original        layers.0.downsample, head: Microsoft's release and timm before 0.9, which merge patches at the end of
                a stage; they also store relative_position_index and attn_mask
torchvision     features.1.0.attn, features.2.reduction: stages and mergings alternate in one list
transformers    encoder.layers.0.blocks.0.attention: query, key and value apart; named `attention.self.query` in
                files, and `attention.q_proj` in the modules of transformers 5
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_TABLE = r"\.relative_position_bias_table"
_TIMM = re.compile(r"layers\.\d+\.blocks\.\d+\.attn" + _TABLE)
_TORCHVISION = re.compile(r"features\.\d+\.\d+\.attn" + _TABLE)
_TRANSFORMERS = re.compile(
    r"(swin\.)?encoder\.layers\.\d+\.blocks\.\d+\.attention\.(self|relative_position_bias)" + _TABLE
)
_COMPUTED = (".relative_position_index", ".attn_mask")
_PRETRAINING = re.compile(r"(swin\.)?embeddings\.mask_token|decoder\.\d+\.(weight|bias)")

# Applied in this order, each to the result of those before.
_FROM_TRANSFORMERS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^swin\.", ""),
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.norm\.", "patch_embed.norm."),
        (r"^encoder\.layers\.", "layers."),
        (r"^layernorm\.", "norm."),
        (r"^classifier\.", "head.fc."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.attention\.(self|relative_position_bias)\.relative_", ".attn.relative_"),
        (r"\.attention\.self\.(query|key|value)\.", r".attn.\1."),
        (r"\.attention\.q_proj\.", ".attn.query."),
        (r"\.attention\.k_proj\.", ".attn.key."),
        (r"\.attention\.v_proj\.", ".attn.value."),
        (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    )
)


def read(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor], list[str]] | None:
    """Style of the keys, the tensors under our names, and what was done, one per line; None if no style fits.

    Keys that the style does not have are passed on as they are: loading then names them as unexpected.
    """
    if any(_TIMM.fullmatch(key) for key in state):
        old = "layers.0.downsample.reduction.weight" in state or "head.weight" in state
        style, rename = ("original", _original) if old else ("timm", str)
    elif any(_TORCHVISION.fullmatch(key) for key in state):
        style, rename = "torchvision", _torchvision
    elif any(_TRANSFORMERS.fullmatch(key) for key in state):
        style, rename = "transformers", _transformers
    else:
        return None
    notes = []
    computed = [key for key in state if key.endswith(_COMPUTED)]
    if computed:
        notes.append(f"{len(computed)} stored indices and masks left out: they are computed")
    pretraining = [key for key in state if style == "transformers" and _PRETRAINING.fullmatch(key)]
    if pretraining:
        notes.append(f"{', '.join(pretraining)} left out: used in masked pre-training only")
    renamed = {rename(key): tensor for key, tensor in state.items() if key not in {*computed, *pretraining}}
    if style == "transformers":
        renamed, joined = _join_qkv(renamed)
        notes.append(f"query, key and value joined into one linear in {joined} blocks")
    return style, renamed, notes


def _merging_of_next(key: str) -> str:
    """Patch merging at the end of stage i is ours at the start of stage i + 1."""
    return re.sub(r"^layers\.(\d+)\.downsample\.", lambda found: f"layers.{int(found[1]) + 1}.downsample.", key)


def _original(key: str) -> str:
    return re.sub(r"^head\.(?=weight$|bias$)", "head.fc.", _merging_of_next(key))


def _torchvision(key: str) -> str:
    key = re.sub(r"^features\.0\.0\.", "patch_embed.proj.", key)
    key = re.sub(r"^features\.0\.2\.", "patch_embed.norm.", key)
    key = re.sub(
        r"^features\.(\d+)\.(?=reduction|norm\.)", lambda found: f"layers.{int(found[1]) // 2}.downsample.", key
    )
    key = re.sub(r"^features\.(\d+)\.(?=\d)", lambda found: f"layers.{int(found[1]) // 2}.blocks.", key)
    key = key.replace(".mlp.0.", ".mlp.fc1.").replace(".mlp.3.", ".mlp.fc2.")
    return re.sub(r"^head\.", "head.fc.", key)


def _transformers(key: str) -> str:
    for pattern, name in _FROM_TRANSFORMERS:
        key = pattern.sub(name, key)
    return _merging_of_next(key)


def _join_qkv(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Weights and biases of three linears, one below the other; three that are not alike are left as they are."""
    joined = dict(state)
    count = 0
    for key in state:
        stem, found, kind = key.partition(".attn.query.")
        names = [f"{stem}.attn.{part}.{kind}" for part in ("query", "key", "value")]
        shapes = {state[name].shape if name in state else None for name in names} if found else set()
        if len(shapes) == 1 and shapes != {torch.Size([])}:
            joined[f"{stem}.attn.qkv.{kind}"] = torch.cat([joined.pop(name) for name in names])
            count += kind == "weight"
    return joined, count

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

from vitdeploy.models.keys.rules import Rule, renamed, rules

_TABLE = r"\.relative_position_bias_table"
_TIMM = re.compile(r"layers\.\d+\.blocks\.\d+\.attn" + _TABLE)
_TORCHVISION = re.compile(r"features\.\d+\.\d+\.attn" + _TABLE)
_TRANSFORMERS = re.compile(
    r"(swin\.)?encoder\.layers\.\d+\.blocks\.\d+\.attention\.(self|relative_position_bias)" + _TABLE
)
_COMPUTED = (".relative_position_index", ".attn_mask")
_PRETRAINING = re.compile(r"(swin\.)?embeddings\.mask_token|decoder\.\d+\.(weight|bias)")
# What no rule takes keeps its name. Patch merging at the end of a stage is ours at the start of the next.
_RULES: Mapping[str, tuple[Rule, ...]] = {
    "timm": (),
    "original": rules("""
        layers.{0,1,2,3,4,5,6,7}.downsample.        layers.{1,2,3,4,5,6,7,8}.downsample.
        head.{weight,bias}                          head.fc.{weight,bias}
    """),
    "torchvision": rules("""
        features.0.{0,2}.                           patch_embed.{proj,norm}.
        features.{2,4,6,8,10,12,14}.{reduction,norm}.   layers.{1,2,3,4,5,6,7}.downsample.{reduction,norm}.
        features.{1,3,5,7,9,11,13,15}.*.mlp.{0,3}.  layers.{0,1,2,3,4,5,6,7}.blocks.*.mlp.{fc1,fc2}.
        features.{1,3,5,7,9,11,13,15}.*.            layers.{0,1,2,3,4,5,6,7}.blocks.*.
        head.                                       head.fc.
    """),
    "transformers": rules(
        """
        $OWNembeddings.patch_embeddings.projection. patch_embed.proj.
        $OWNembeddings.norm.                        patch_embed.norm.
        $OWNencoder.layers.{0,1,2,3,4,5,6,7}.downsample.    layers.{1,2,3,4,5,6,7,8}.downsample.
        $BLOCK.layernorm_{before,after}.            layers.*.blocks.*.norm{1,2}.
        $BLOCK.attention.(self|relative_position_bias).relative_    layers.*.blocks.*.attn.relative_
        $BLOCK.attention.self.{query,key,value}.    layers.*.blocks.*.attn.{query,key,value}.
        $BLOCK.attention.{q,k,v}_proj.              layers.*.blocks.*.attn.{query,key,value}.
        $BLOCK.attention.(output.dense|o_proj).     layers.*.blocks.*.attn.proj.
        $BLOCK.{intermediate,output}.dense.         layers.*.blocks.*.mlp.{fc1,fc2}.
        $OWNencoder.layers.                         layers.
        $OWNlayernorm.                              norm.
        $OWNclassifier.                             head.fc.
        """,
        BLOCK="$OWNencoder.layers.*.blocks.*",
        OWN="(swin.)?",
    ),
}


def read(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor], list[str]] | None:
    """Style of the keys, the tensors under our names, and what was done, one per line; None if no style fits.

    Keys that the style does not have are passed on as they are: loading then names them as unexpected.
    """
    if any(_TIMM.fullmatch(key) for key in state):
        old = "layers.0.downsample.reduction.weight" in state or "head.weight" in state
        style = "original" if old else "timm"
    elif any(_TORCHVISION.fullmatch(key) for key in state):
        style = "torchvision"
    elif any(_TRANSFORMERS.fullmatch(key) for key in state):
        style = "transformers"
    else:
        return None
    notes = []
    computed = [key for key in state if key.endswith(_COMPUTED)]
    if computed:
        notes.append(f"{len(computed)} stored indices and masks left out: they are computed")
    pretraining = [key for key in state if style == "transformers" and _PRETRAINING.fullmatch(key)]
    if pretraining:
        notes.append(f"{', '.join(pretraining)} left out: used in masked pre-training only")
    kept = {key: tensor for key, tensor in state.items() if key not in {*computed, *pretraining}}
    tensors, _, unknown = renamed(_RULES[style], kept)
    tensors |= {key: kept[key] for key in unknown}
    if style == "transformers":
        tensors, joined = _join_qkv(tensors)
        notes.append(f"query, key and value joined into one linear in {joined} blocks")
    return style, tensors, notes


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

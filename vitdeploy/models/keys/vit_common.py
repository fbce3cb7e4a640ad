"""Shared code of the key readers for ViTs: checking, merging and measuring a renamed state dict.

Every reader turns its library's tensors into timm's names (`blocks.0.attn.qkv.weight`, `patch_embed.proj.weight` ...),
which are also those of `VisionTransformer`. What follows from names and shapes is measured here; what does not
(epsilon, activation, pooling) the reader says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.deit import DeiTConfig
from vitdeploy.models.architectures.vit import ViTConfig
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.family import Hints, Recognised

# Published models: DeiT (192, 384), ViT (768, 1024, 1280: table 1 of arXiv 2010.11929), "Scaling ViT" (512, 1408, 1664:
# table 2 of arXiv 2106.04560), SoViT-400m (1152: arXiv 2305.13035), DINOv2 ViT-g (1536: arXiv 2304.07193).
HEADS_OF_WIDTH = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}
TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent")
_SPLIT = re.compile(r"blocks\.\d+\.attn\.[qkv]\.")
BLOCK_PARTS = ("norm1", "attn.q", "attn.k", "attn.v", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


def measured(state: Mapping[str, Tensor], heads: int, image_size: tuple[int, int], **conventions: Any) -> ViTConfig:
    """The configuration of a whole state dict under timm's names.

    conventions: fields of ViTConfig that names and shapes leave open.

    Raises:
        CheckpointError: sizes that make no ViT.
    """
    patches, positions = state["patch_embed.proj.weight"], state["pos_embed"]
    patch = int(patches.shape[2])
    rows, read = state["blocks.0.mlp.fc1.weight"].shape[0], state["blocks.0.mlp.fc2.weight"].shape[1]
    grid = (image_size[0] // patch) * (image_size[1] // patch)
    config = DeiTConfig if "dist_token" in state else ViTConfig
    try:
        return config(
            image_size=image_size,
            patch_size=patch,
            in_channels=int(patches.shape[1]),
            width=int(patches.shape[0]),
            depth=depth_of(state),
            heads=heads,
            mlp_ratio=int(rows) / int(patches.shape[0]),
            num_classes=_first_axis(state, "head.weight", 0),
            drop_remainder=bool(image_size[0] % patch or image_size[1] % patch),
            class_token="cls_token" in state,
            registers=_first_axis(state, "reg_token", 1),
            prefix_positions=int(positions.shape[1]) > grid or "cls_token" not in state,
            stem_norm="norm_pre.weight" in state,
            qkv_bias="blocks.0.attn.qkv.bias" in state,
            mlp="swiglu_packed" if rows == 2 * read else "mlp",
            layer_scale="blocks.0.ls1.gamma" in state,
            pre_logits=_first_axis(state, "pre_logits.fc.weight", 0),
            head="projection" if "head.weight" in state and "head.bias" not in state else "linear",
            **conventions,
        )
    except ValueError as error:
        raise CheckpointError("the tensors make no Vision Transformer", found=str(error)) from None


def recognised(style: str, state: dict[str, Tensor], config: ViTConfig, notes: list[str]) -> Recognised:
    return Recognised("deit" if isinstance(config, DeiTConfig) else "vit", style, config, state, tuple(notes))


def _first_axis(state: Mapping[str, Tensor], key: str, axis: int) -> int:
    return int(state[key].shape[axis]) if key in state else 0


def depth_of(state: Iterable[str]) -> int:
    """One more than the largest block number; 0 without blocks."""
    return 1 + max((int(found[1]) for key in state if (found := re.match(r"blocks\.(\d+)\.", key))), default=-1)


def require(state: Mapping[str, Tensor], style: str, stem: Iterable[str] = ()) -> None:
    """Check that every tensor that each ViT has is there, as readers need it to merge query, key and value.

    Raises:
        CheckpointError: lists what is missing, under timm's names, or says what has another shape.
    """
    wanted = {"patch_embed.proj.weight": 4, "pos_embed": 0, **dict.fromkeys(stem, 0)}
    for block in range(max(1, depth_of(state))):
        for part in BLOCK_PARTS:
            wanted[f"blocks.{block}.{part}.weight"] = 1 if part.startswith("norm") else 2
    missing = [key for key in wanted if key not in state]
    if missing:
        raise CheckpointError(
            f"the state dict has the names of {style}, but is not whole",
            found=f"{len(missing)} missing: {listed(missing)}",
            wanted="every tensor of the model",
            fix="save model.state_dict() of the whole model",
        )
    width, _, height, across = _with_axes(state, "patch_embed.proj.weight", 4, style)
    if 0 in state["patch_embed.proj.weight"].shape:
        raise _misshapen(state, "patch_embed.proj.weight", "no axis of size 0", style)
    if height != across:
        raise CheckpointError("the patches are not square", found=f"{height}x{across}", wanted="square patches")
    for key, axes in wanted.items():
        if axes:
            _with_axes(state, key, axes, style)
    for key in ("head.weight", "pre_logits.fc.weight"):
        if key in state:
            _with_axes(state, key, 2, style)
    for key in TOKENS:
        if key in state and (state[key].ndim == 0 or state[key].shape[-1] != width):
            raise _misshapen(state, key, f"rows of {width}", style)


def _with_axes(state: Mapping[str, Tensor], key: str, axes: int, style: str) -> tuple[int, ...]:
    if state[key].ndim != axes:
        raise _misshapen(state, key, f"{axes} axes", style)
    return tuple(state[key].shape)


def _misshapen(state: Mapping[str, Tensor], key: str, wanted: str, style: str) -> CheckpointError:
    return CheckpointError(
        f"the state dict has the names of {style}, but not its shapes",
        found=f"{key} of {list(state[key].shape)}",
        wanted=wanted,
    )


def as_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with tokens and positions as [1, n, width]."""
    return state | {key: state[key].reshape(1, -1, state[key].shape[-1]) for key in TOKENS if key in state}


def merge_attention(state: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """`attn.q`, `attn.k` and `attn.v` of every block as the rows of one `attn.qkv`, in that order.

    A bias that only some of them have is zero where it is missing.

    Raises:
        CheckpointError: the three differ in shape.
    """
    merged = {key: tensor for key, tensor in state.items() if not _SPLIT.match(key)}
    biased = any(_SPLIT.match(key) and key.endswith(".bias") for key in state)
    zeros = []
    for block in range(depth_of(state)):
        own = f"blocks.{block}.attn"
        weights = [state[f"{own}.{name}.weight"] for name in "qkv"]
        if len({weight.shape for weight in weights}) > 1:
            raise CheckpointError(
                f"block {block}: query, key and value differ in shape",
                found=", ".join(str(list(weight.shape)) for weight in weights),
                wanted="three of one shape",
            )
        merged[f"{own}.qkv.weight"] = torch.cat(weights)
        if biased:
            biases = [state.get(f"{own}.{name}.bias", torch.zeros_like(weights[0][:, 0])) for name in "qkv"]
            merged[f"{own}.qkv.bias"] = torch.cat(biases)
            zeros += [name for name in "qkv" if f"{own}.{name}.bias" not in state]
    if zeros:
        notes.append(f"{len(zeros)} biases of query, key or value are not in the file: zero")
    return merged


def heads_for(width: int, hints: Hints, configured: int | None, notes: list[str]) -> int:
    """Heads from the flag, else the config file, else what published models of that width have.

    Raises:
        CheckpointError: nothing tells, or the width is not divisible by the number.
    """
    heads = hints.heads or configured
    if heads is None:
        if width not in HEADS_OF_WIDTH:
            raise CheckpointError(
                "the number of attention heads cannot be known from the tensors",
                found=f"width {width}",
                wanted=f"a published width ({', '.join(map(str, HEADS_OF_WIDTH))}), a config.json, or the number",
                fix=f"--heads N, a divisor of {width}",
            )
        heads = HEADS_OF_WIDTH[width]
        notes.append(f"{heads} heads, as published models of width {width} have; --heads says otherwise")
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise CheckpointError(
            "the number of attention heads does not divide the width",
            found=f"{heads} heads, width {width}",
            wanted=f"a divisor of {width}",
            fix="--heads N",
        )
    return heads


def image_size_for(
    patches: int, patch: int, hints: Hints, configured: tuple[int, int] | None, notes: list[str]
) -> tuple[int, int]:
    """Image size (height, width) from `patches` positions: the flag or the config file where they fit, else a square.

    A flag that does not fit asks for another size than the checkpoint's and is not this function's to answer.

    Raises:
        CheckpointError: the patches make no square, and nothing says which rectangle they are.
    """
    for size in (hints.image_size, configured):
        if size is not None and (size[0] // patch) * (size[1] // patch) == patches:
            if size[0] % patch or size[1] % patch:
                notes.append(f"image size {size[0]}x{size[1]}: patches of {patch} leave its last rows or columns out")
            return size
    side = math.isqrt(max(patches, 0))
    if side * side != patches or side == 0:
        rectangles = [f"{h * patch}x{patches // h * patch}" for h in range(1, patches + 1) if patches % h == 0]
        raise CheckpointError(
            f"{patches} positions are not those of a square image",
            found=f"patches of {patch}x{patch}",
            wanted=f"one of {listed(rectangles)}" if rectangles else "at least one patch",
            fix="--image-size HEIGHTxWIDTH",
        )
    return side * patch, side * patch


def left_out(keys: Iterable[str], why: str) -> list[str]:
    """One note for tensors that the model has no use for, by the part that they belong to; none without keys."""
    parts: dict[str, int] = {}
    for key in keys:
        part = re.sub(r"\.(weight|bias)$", "", key) if key.count(".") < 3 else key.split(".")[0] + ".*"
        parts[part] = parts.get(part, 0) + 1
    total = sum(parts.values())
    return [f"left out, {why}: {listed(list(parts))} ({total} tensor{'s' if total > 1 else ''})"] if parts else []

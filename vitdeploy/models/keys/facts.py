"""What a renamed state dict says of its ViT, in words that no library owns, and the arithmetic that readers share.

Every reader turns its library's tensors into timm's names (`blocks.0.attn.qkv.weight`, `patch_embed.proj.weight` ...),
which are also the names of `VisionTransformer`, and says in `ViTFacts` what names and shapes leave open.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.family import Hints
from vitdeploy.models.layers import Activation

Pooling = Literal["token", "average", "attention", "token_and_average"]
FinalNorm = Literal["before_pooling", "after_pooling", "none"]

# Published models: DeiT (192, 384), ViT (768, 1024, 1280: table 1 of arXiv 2010.11929), "Scaling ViT" (512, 1408, 1664:
# table 2 of arXiv 2106.04560), SoViT-400m (1152: arXiv 2305.13035), DINOv2 ViT-g (1536: arXiv 2304.07193).
HEADS_OF_WIDTH = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}
SHOWN = 5
TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent")
BLOCK_PARTS = ("norm1", "attn.q", "attn.k", "attn.v", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True)
class ViTFacts:
    """The shape and the conventions of a ViT. Sizes in pixels, `image_size` as (height, width).

    mlp_width: inputs of the second linear of the MLP; a SwiGLU's first linear has twice as many outputs, gate first.
    classes: outputs of the head (classes, or the width of a CLIP projection); 0 where there is no head.
    registers: tokens after the class token that no head reads; they have no position of their own.
    class_position: the first rows of `pos_embed` belong to the class token and, if `distilled`, the distillation token.
    final_norm: where the last layer norm stands: `norm` on all tokens, `fc_norm` on the pooled one, or nowhere.
    pre_logits: width of the tanh layer before the head (`pre_logits.fc`), 0 where there is none.
    """

    image_size: tuple[int, int]
    patch_size: int
    channels: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    classes: int
    layer_norm_eps: float
    activation: Activation
    pooling: Pooling
    final_norm: FinalNorm = "before_pooling"
    swiglu: bool = False
    layer_scale: bool = False
    class_token: bool = True
    distilled: bool = False
    registers: int = 0
    class_position: bool = True
    pre_norm: bool = False
    pre_logits: int = 0


@dataclass(frozen=True)
class Mapped:
    """A state dict under timm's names, what is known of its model, and one line for each thing inferred or left out."""

    state: dict[str, Tensor]
    facts: ViTFacts
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Conventions:
    """What tensors cannot show."""

    layer_norm_eps: float
    activation: Activation
    pooling: Pooling
    final_norm: FinalNorm = "before_pooling"


def facts_of(state: Mapping[str, Tensor], heads: int, image_size: tuple[int, int], known: Conventions) -> ViTFacts:
    """Facts of a complete state dict under timm's names (see `require`)."""
    patches, positions = state["patch_embed.proj.weight"], state["pos_embed"]
    width, patch = int(patches.shape[0]), int(patches.shape[2])
    tokens = (image_size[0] // patch) * (image_size[1] // patch)
    registers = state.get("reg_token")
    head, pre_logits = state.get("head.weight"), state.get("pre_logits.fc.weight")
    return ViTFacts(
        image_size=image_size,
        patch_size=patch,
        channels=int(patches.shape[1]),
        width=width,
        depth=depth_of(state),
        heads=heads,
        mlp_width=int(state["blocks.0.mlp.fc2.weight"].shape[1]),
        classes=int(head.shape[0]) if head is not None else 0,
        layer_norm_eps=known.layer_norm_eps,
        activation=known.activation,
        pooling=known.pooling,
        final_norm=known.final_norm,
        swiglu=state["blocks.0.mlp.fc1.weight"].shape[0] == 2 * state["blocks.0.mlp.fc2.weight"].shape[1],
        layer_scale="blocks.0.ls1.gamma" in state,
        class_token="cls_token" in state,
        distilled="dist_token" in state,
        registers=int(registers.shape[1]) if registers is not None else 0,
        class_position=int(positions.shape[1]) > tokens,
        pre_norm="norm_pre.weight" in state,
        pre_logits=int(pre_logits.shape[0]) if pre_logits is not None else 0,
    )


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

    A bias that only some of the three have, or none, is zero where it is missing.

    Raises:
        CheckpointError: the three differ in shape.
    """
    merged = {key: tensor for key, tensor in state.items() if not re.match(r"blocks\.\d+\.attn\.[qkv]\.", key)}
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
        biases = [state.get(f"{own}.{name}.bias", torch.zeros_like(weights[0][:, 0])) for name in "qkv"]
        merged[f"{own}.qkv.bias"] = torch.cat(biases)
        zeros += [f"{own}.{name}.bias" for name in "qkv" if f"{own}.{name}.bias" not in state]
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
    if heads < 1 or width % heads:
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


def listed(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more

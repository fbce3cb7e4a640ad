"""Read the ViT keys of other libraries' checkpoints."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.vit import DeiTConfig, ViTConfig
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.family import Hints, Recognised
from vitdeploy.models.keys.rules import count_below

# --- Shared code of the ViT key readers: check, merge and measure a renamed state dict --------------------------------
# Every reader turns its library's tensors into timm's names (`blocks.0.attn.qkv.weight`, `patch_embed.proj.weight`
# ...), which are also those of `VisionTransformer`. Names and shapes are measured here; the reader adds what they do
# not show (epsilon, activation, pooling).


# Published models: DeiT (192, 384), ViT (768, 1024, 1280: table 1 of arXiv 2010.11929), "Scaling ViT" (512, 1408, 1664:
# table 2 of arXiv 2106.04560), SoViT-400m (1152: arXiv 2305.13035), DINOv2 ViT-g (1536: arXiv 2304.07193).
HEADS_OF_WIDTH = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}
TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent")
_SPLIT = re.compile(r"blocks\.\d+\.attn\.[qkv]\.")
BLOCK_PARTS = ("norm1", "attn.q", "attn.k", "attn.v", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


def shown_fields(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of ViTConfig that names and shapes under timm's names determine, whatever the image size."""
    patches, gate = state["patch_embed.proj.weight"], state.get("blocks.0.mlp.fc1_g.weight")
    rows = (state["blocks.0.mlp.fc1.weight"] if gate is None else gate).shape[0]
    packed = rows == 2 * state["blocks.0.mlp.fc2.weight"].shape[1]
    return {
        "patch_size": int(patches.shape[2]),
        "in_channels": int(patches.shape[1]),
        "width": int(patches.shape[0]),
        "depth": depth_of(state),
        "mlp_ratio": int(rows) / int(patches.shape[0]),
        "num_classes": _first_axis(state, "head.weight", 0),
        "class_token": "cls_token" in state,
        "registers": _first_axis(state, "reg_token", 1),
        "stem_norm": "norm_pre.weight" in state,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "mlp": "swiglu" if gate is not None else "swiglu_packed" if packed else "mlp",
        "layer_scale": "blocks.0.ls1.gamma" in state,
        "pre_logits": _first_axis(state, "pre_logits.fc.weight", 0),
    }


def measured(state: Mapping[str, Tensor], heads: int, image_size: tuple[int, int], **conventions: Any) -> ViTConfig:
    """Return the configuration of a whole state dict under timm's names.

    conventions: fields of ViTConfig that names and shapes leave open.

    Raises:
        CheckpointError: sizes that are not valid for a ViT.
    """
    fields = shown_fields(state)
    patch = fields["patch_size"]
    grid = (image_size[0] // patch) * (image_size[1] // patch)
    config = DeiTConfig if "dist_token" in state else ViTConfig
    try:
        return config(
            image_size=image_size,
            heads=heads,
            drop_remainder=bool(image_size[0] % patch or image_size[1] % patch),
            prefix_positions=int(state["pos_embed"].shape[1]) > grid or "cls_token" not in state,
            head="projection" if "head.weight" in state and "head.bias" not in state else "linear",
            **fields,
            **conventions,
        )
    except ValueError as error:
        raise CheckpointError("the tensors are not a valid Vision Transformer", found=str(error)) from None


def recognised(style: str, state: dict[str, Tensor], config: ViTConfig, notes: list[str]) -> Recognised:
    return Recognised("deit" if isinstance(config, DeiTConfig) else "vit", style, config, state, tuple(notes))


def _first_axis(state: Mapping[str, Tensor], key: str, axis: int) -> int:
    return int(state[key].shape[axis]) if key in state else 0


def depth_of(state: Iterable[str]) -> int:
    return count_below(state, "blocks.")


def require(state: Mapping[str, Tensor], style: str, stem: Iterable[str] = ()) -> None:
    """Check that the tensors common to all ViTs are present, as readers need them to merge query, key and value.

    Raises:
        CheckpointError: lists missing tensors, under timm's names, or names one with the wrong shape.
    """
    expected = {"patch_embed.proj.weight": 4, "pos_embed": 0, **dict.fromkeys(stem, 0)}
    for block in range(max(1, depth_of(state))):
        for part in BLOCK_PARTS:
            expected[f"blocks.{block}.{part}.weight"] = 1 if part.startswith("norm") else 2
    missing = [key for key in expected if key not in state]
    if missing:
        raise CheckpointError(
            f"the state dict has the names of {style}, but is incomplete",
            found=f"{len(missing)} missing: {listed(missing)}",
            expected="every tensor of the model",
            fix="save model.state_dict() of the whole model",
        )
    width, _, height, across = _with_axes(state, "patch_embed.proj.weight", 4, style)
    if 0 in state["patch_embed.proj.weight"].shape:
        raise _misshapen(state, "patch_embed.proj.weight", "no axis of size 0", style)
    if height != across:
        raise CheckpointError("the patches are not square", found=f"{height}x{across}", expected="square patches")
    for key, axes in expected.items():
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


def _misshapen(state: Mapping[str, Tensor], key: str, expected: str, style: str) -> CheckpointError:
    return CheckpointError(
        f"the state dict has the names of {style}, but not its shapes",
        found=f"{key} {list(state[key].shape)}",
        expected=expected,
    )


def as_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state with tokens and positions as [1, n, width]."""
    return state | {key: state[key].reshape(1, -1, state[key].shape[-1]) for key in TOKENS if key in state}


def merge_attention(state: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """Merge `attn.q`, `attn.k` and `attn.v` of every block into the rows of one `attn.qkv`, in that order.

    If only some of them have a bias, missing ones are zero.

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
                expected="the same shape",
            )
        merged[f"{own}.qkv.weight"] = torch.cat(weights)
        if biased:
            biases = [state.get(f"{own}.{name}.bias", torch.zeros_like(weights[0][:, 0])) for name in "qkv"]
            merged[f"{own}.qkv.bias"] = torch.cat(biases)
            zeros += [name for name in "qkv" if f"{own}.{name}.bias" not in state]
    if zeros:
        notes.append(f"{len(zeros)} biases of query, key or value are not in the file: using zero")
    return merged


def heads_for(width: int, hints: Hints, configured: int | None, notes: list[str]) -> int:
    """Return the heads from the flag, else the config file, else from published models of that width.

    Raises:
        CheckpointError: the number is unknown, or does not divide the width.
    """
    heads = hints.heads or configured
    if heads is None:
        if width not in HEADS_OF_WIDTH:
            raise CheckpointError(
                "the tensors do not determine the number of attention heads",
                found=f"width {width}",
                expected=f"a published width ({', '.join(map(str, HEADS_OF_WIDTH))}), a config.json, or --heads",
                fix=f"--heads N, a divisor of {width}",
            )
        heads = HEADS_OF_WIDTH[width]
        notes.append(f"assuming {heads} heads, as in published models of width {width} (override: --heads)")
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise CheckpointError(
            "the number of attention heads does not divide the width",
            found=f"{heads} heads, width {width}",
            expected=f"a divisor of {width}",
            fix="--heads N",
        )
    return heads


def image_size_for(
    patches: int, patch: int, hints: Hints, configured: tuple[int, int] | None, notes: list[str]
) -> tuple[int, int]:
    """Return the image size (height, width) for `patches` positions: from the flag or config if it fits, else a square.

    A flag that does not fit requests a size other than the checkpoint's, which this function does not handle.

    Raises:
        CheckpointError: the patches do not form a square, and the rectangle is unknown.
    """
    for size in (hints.image_size, configured):
        if size is not None and (size[0] // patch) * (size[1] // patch) == patches:
            if size[0] % patch or size[1] % patch:
                notes.append(f"image size {size[0]}x{size[1]}: patches of {patch} leave out its last rows or columns")
            return size
    side = math.isqrt(max(patches, 0))
    if side * side != patches or side == 0:
        rectangles = [f"{h * patch}x{patches // h * patch}" for h in range(1, patches + 1) if patches % h == 0]
        raise CheckpointError(
            f"{patches} positions do not match a square image",
            found=f"patches of {patch}x{patch}",
            expected=f"one of {listed(rectangles)}" if rectangles else "at least one patch",
            fix="--image-size HEIGHTxWIDTH",
        )
    return side * patch, side * patch


def left_out(keys: Iterable[str], why: str) -> list[str]:
    """Return one note on unused tensors, grouped by the part that they belong to; [] without keys."""
    parts: dict[str, int] = {}
    for key in keys:
        part = re.sub(r"\.(weight|bias)$", "", key) if key.count(".") < 3 else key.split(".")[0] + ".*"
        parts[part] = parts.get(part, 0) + 1
    total = sum(parts.values())
    return [f"left out, {why}: {listed(list(parts))} ({total} tensor{'s' if total > 1 else ''})"] if parts else []


# --- Names of Vision Transformers in timm's spelling, and their configurations ----------------------------------------
#     vit_<size>_patch<P>_<image>[.mae|.dino]              plain; the tags are self-supervised encoders (features)
#     vit_<size>_patch<P>_clip_[quickgelu_]<image>         CLIP's image encoder with its projection
#     vit_<size>_patch<P>_siglip_[gap_]<image>             SigLIP's image encoder (features); gap: average pooling
#     vit_<size>_patch<P>_[reg<R>_]dinov2                  DINOv2 at 518 (features), with R registers
#     deit_<size>_patch<P>_<image>, deit3_...              DeiT without its distillation token, DeiT-III
#     deit_<size>_distilled_patch<P>_<image>               DeiT with it
#
# <size> is one of `SIZES` or w<width>d<depth>h<heads>; <image> is a side in pixels, or <height>x<width>.


# Width, depth, heads, MLP ratio: DeiT (arXiv 2012.12877) for tiny and small; table 1 of arXiv 2010.11929 for base,
# large and huge; table 2 of arXiv 2106.04560 for giant and gigantic; arXiv 2305.13035 for so400m; SigLIP 2 (arXiv
# 2502.14786) for giantopt; timm for medium (DeiT-III).
SIZES: Mapping[str, tuple[int, int, int, float]] = {
    "tiny": (192, 12, 3, 4.0),
    "small": (384, 12, 6, 4.0),
    "medium": (512, 12, 8, 4.0),
    "base": (768, 12, 12, 4.0),
    "large": (1024, 24, 16, 4.0),
    "so400m": (1152, 27, 16, 3.7362),
    "huge": (1280, 32, 16, 4.0),
    "giant": (1408, 40, 16, 48 / 11),
    "giantopt": (1536, 40, 16, 4.0),
    "gigantic": (1664, 48, 16, 64 / 13),
}
# DINOv2's giant (arXiv 2304.07193, table 17) differs; its SwiGLU has 8192 rows, both halves together.
DINOV2_GIANT = (1536, 40, 24, 16 / 3)
DINOV2_SIDE = 518
# Dimensions shared by image and text: table 20 of arXiv 2103.00020 (base, large), OpenCLIP's for the others.
CLIP_DIMENSIONS = {"medium": 512, "base": 512, "large": 768, "huge": 1024, "giant": 1024, "gigantic": 1280}
# timm runs these (size, patch) with exact GELU (large only below 512), although SigLIP was trained with the tanh form.
SIGLIP_EXACT_GELU = {("base", 16), ("large", 16), ("so400m", 14)}
# SigLIP so400m/14 was trained at 384; its patches do not cover the last 6 rows and columns.
SIGLIP_REMAINDER = ("so400m", 14, (384, 384))

_SIZE = r"(?P<size>[a-z]+[0-9]*m?|w(?P<width>\d+)d(?P<depth>\d+)h(?P<heads>\d+))"
_PATCH = r"_patch(?P<patch>\d+)"
_IMAGE = r"_(?P<height>\d+)(?:x(?P<image_width>\d+))?"
# Maps a match to config fields besides those that every name has.
Fields = Callable[["re.Match[str]", tuple[int, int]], dict[str, Any]]


def _plain(match: re.Match[str], image: tuple[int, int]) -> dict[str, Any]:
    return {"num_classes": 0, "preset": "imagenet"} if match["tag"] else {}


def _clip(match: re.Match[str], image: tuple[int, int]) -> dict[str, Any]:
    return {
        "num_classes": CLIP_DIMENSIONS.get(match["size"], 512),
        "layer_norm_eps": 1e-5,
        "stem_norm": True,
        "activation": "quick_gelu" if match["quick"] else "gelu",
        "head": "projection",
        "preset": "clip",
    }


def _siglip(match: re.Match[str], image: tuple[int, int]) -> dict[str, Any]:
    size, patch = match["size"], int(match["patch"])
    exact = (size, patch) in SIGLIP_EXACT_GELU and (size, image) != ("large", (512, 512))
    return {
        "num_classes": 0,
        "drop_remainder": (size, patch, image) == SIGLIP_REMAINDER,
        "class_token": False,
        "activation": "gelu" if exact else "gelu_tanh",
        "pooling": "average" if match["gap"] else "attention",
        "preset": "siglip",
    }


def _dinov2(match: re.Match[str], image: tuple[int, int]) -> dict[str, Any]:
    giant = match["size"] == "giant"
    return {
        **(_sized(DINOV2_GIANT) if giant else {}),
        "num_classes": 0,
        "registers": int(match["registers"] or 0),
        "prefix_positions": match["registers"] is None,
        "mlp": "swiglu_packed" if giant else "mlp",
        "layer_scale": True,
        "preset": "imagenet",
    }


def _deit(match: re.Match[str], image: tuple[int, int]) -> dict[str, Any]:
    third = match["third"] is not None
    return {"layer_scale": third, "prefix_positions": not third, "preset": "imagenet"}


VIT_PATTERNS: tuple[tuple[re.Pattern[str], Fields], ...] = (
    (re.compile(f"vit_{_SIZE}{_PATCH}{_IMAGE}" + r"(?:\.(?P<tag>mae|dino))?"), _plain),
    (re.compile(f"vit_{_SIZE}{_PATCH}_clip(?P<quick>_quickgelu)?{_IMAGE}"), _clip),
    (re.compile(f"vit_{_SIZE}{_PATCH}_siglip(?P<gap>_gap)?{_IMAGE}"), _siglip),
    (re.compile(f"vit_{_SIZE}{_PATCH}" + r"(?:_reg(?P<registers>\d+))?_dinov2"), _dinov2),
    (re.compile(f"deit(?P<third>3)?_{_SIZE}{_PATCH}{_IMAGE}"), _deit),
)
DEIT_PATTERN = re.compile(f"deit_{_SIZE}_distilled{_PATCH}{_IMAGE}")
Config = TypeVar("Config", bound=ViTConfig)


def parse_vit(name: str) -> ViTConfig | None:
    """Return the configuration of a name of a ViT without distillation token; None for any other name.

    Raises:
        UnknownModelError: the name's sizes contradict each other.
    """
    return _parse(name, VIT_PATTERNS, ViTConfig)


def parse_deit(name: str) -> DeiTConfig | None:
    """Return the configuration of a name of a distilled DeiT; None for any other name.

    Raises:
        UnknownModelError: the name's sizes contradict each other.
    """
    return _parse(name, ((DEIT_PATTERN, lambda match, image: {}),), DeiTConfig)


def _parse(name: str, patterns: Iterable[tuple[re.Pattern[str], Fields]], config: type[Config]) -> Config | None:
    for pattern, fields in patterns:
        match = pattern.fullmatch(name)
        if match is None or (match["width"] is None and match["size"] not in SIZES):
            continue
        named = match.groupdict()
        height = int(named.get("height") or DINOV2_SIDE)
        image = height, int(named.get("image_width") or height)
        spelled = SIZES.get(match["size"]) or (*(int(named[word]) for word in ("width", "depth", "heads")), 4.0)
        base = {"patch_size": int(match["patch"]), "image_size": image, **_sized(spelled)}
        try:
            return config(**base | fields(match, image))
        except ValueError as error:
            raise UnknownModelError(
                f"{name!r} cannot be built",
                found=str(error),
                expected="an image size divisible by the patch size, and a width divisible by the heads",
                fix="change the numbers in the name; --image-size resizes a model with learned positions",
            ) from None
    return None


def _sized(size: tuple[float, ...]) -> dict[str, Any]:
    return dict(zip(("width", "depth", "heads", "mlp_ratio"), size, strict=True))

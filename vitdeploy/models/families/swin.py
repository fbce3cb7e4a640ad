"""The Swin Transformer family: names, checkpoints, and other image sizes.

    swin_<size>_patch<patch>_window<window>_<image>         size: tiny, small, base, large
    swin_w<width>d<depths>h<heads>_patch<patch>_window<window>_<image>          any other configuration

<width> is that of the first stage. <depths> and <heads> have one number per stage, joined by "-"; so may <window>.
<image> is a side in pixels, or <height>x<width>.

Checkpoints of other libraries are renamed to the keys of `architectures.swin`:

    timm            layers.1.downsample, head.fc: from timm 0.9 on, and ours
    original        layers.0.downsample, head: Microsoft's release and timm before 0.9, which merge patches at the end
                    of a stage; they also store relative_position_index and attn_mask
    torchvision     features.1.0.attn, features.2.reduction: stages and mergings alternate in one list
    transformers    encoder.layers.0.blocks.0.attention: query, key and value apart; named `attention.self.query` in
                    files, and `attention.q_proj` in the modules of transformers 5
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.swin import Border, SwinConfig, SwinTransformer
from vitdeploy.models.family import Family, Hints, Recognised, Signature, refuse_channels
from vitdeploy.models.keys.rules import Rule, renamed, rules
from vitdeploy.models.model_folder import folder, image_processor
from vitdeploy.models.names import NAMES
from vitdeploy.spec import PreprocessSpec, TensorSpec

# width, depths, heads: section 3.3 of arXiv 2103.14030 (heads have 32 channels each).
SIZES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "tiny": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "small": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "base": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "large": (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
_BORDERS: dict[str, Border] = {"torchvision": "torchvision", "transformers": "transformers"}
_NUMBERS = r"\d+(?:-\d+)*"
_NAME = re.compile(
    rf"swin_(?:(?P<size>{'|'.join(SIZES)})|w(?P<width>\d+)d(?P<depths>{_NUMBERS})h(?P<heads>{_NUMBERS}))"
    rf"_patch(?P<patch>\d+)_window(?P<windows>{_NUMBERS})_(?P<height>\d+)(?:x(?P<image_width>\d+))?"
)
_BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.attn\.relative_position_bias_table")
_TABLE = "layers.{}.blocks.{}.attn.relative_position_bias_table"
# Attributes that define the architecture, by display name.
ARCHITECTURE = {
    "patch size": "patch_size",
    "width": "width",
    "depths": "depths",
    "heads": "heads",
    "MLP ratio": "mlp_ratio",
    "norm of the patches": "patch_norm",
    "windows": "window_sizes",
}


def parse(name: str) -> SwinConfig | None:
    """Return the configuration of a name, with 1,000 classes and 3 channels; None for names of other families.

    Raises:
        UnknownModelError: the sizes contradict each other.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match["size"] is not None:
        width, depths, heads = SIZES[match["size"]]
    else:
        width, depths, heads = int(match["width"]), _numbers(match["depths"]), _numbers(match["heads"])
    windows = _numbers(match["windows"])
    height = int(match["height"])
    try:
        return SwinConfig(
            image_size=(height, int(match["image_width"] or height)),
            patch_size=int(match["patch"]),
            width=width,
            depths=depths,
            heads=heads,
            windows=windows * len(depths) if len(windows) == 1 else windows,
        )
    except ValueError as error:
        raise UnknownModelError(f"{name!r} cannot be built", found=str(error)) from None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("-"))


def describe(config: SwinConfig) -> Signature:
    """Return the signature of a classifier or, without classes, a feature extractor: "features" [batch, width] is the
    average of the patch features."""
    if config.num_classes:
        outputs: tuple[TensorSpec, ...] = (TensorSpec("logits", "float32", ("batch", config.num_classes)),)
        return Signature("classification", config.image_size, config.in_channels, outputs)
    height, width = config.stages[-1].resolution
    outputs = (
        TensorSpec("features", "float32", ("batch", config.features)),
        TensorSpec("patch_features", "float32", ("batch", height * width, config.features)),
    )
    return Signature("features", config.image_size, config.in_channels, outputs)


def preprocess(config: SwinConfig) -> PreprocessSpec:
    """Return timm's preprocessing for pretrained Swin: ImageNet's mean and std, bicubic, crop 90 % (100 % from 384).

    For grey images, mean and std are the averages over the three channels.

    Raises:
        CheckpointError: the patch embedding has neither 1 nor 3 channels.
    """
    refuse_channels(config.in_channels)
    share = 1.0 if min(config.image_size) >= 384 else 0.9
    return image_processor.timm_preprocess({"crop_pct": share}, config.in_channels, config.image_size)


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """Recognise a Swin Transformer by keys and shapes; the image size comes from hints or stored masks.

    Bias tables are resized, as in timm, if the image size implies other windows.

    Raises:
        CheckpointError: bias tables that match no window, or an unsupported variant or shape.
    """
    named = read(state)
    if named is None:
        return None
    style, weights, notes = named
    patches = weights.get("patch_embed.proj.weight")
    if patches is None or patches.ndim != 4 or not patches.numel():
        return None
    _refuse_variants(state, hints.config)
    tables = _tables(weights)
    width, channels, patch, across = patches.shape
    if patch != across:
        raise CheckpointError("the patches are not square", found=f"{patch}x{across}", expected="square patches")
    image_size = hints.image_size or folder.stated_size(hints.config) or _masked_size(state, patch)
    if image_size is None:
        # As in all published models, the last stage is one window.
        side = 2 ** (len(tables) - 1) * patch * _square_side(len(tables[-1][0]))
        image_size = (side, side)
        notes.append(
            f"image size is not in the checkpoint: assuming {side}x{side}, at which the last stage is one window "
            "(override: --image-size)"
        )
    head = weights.get("head.fc.weight")
    classes = 0 if head is None or head.ndim != 2 else len(head)
    if not classes:
        notes.append("no classification head: used as a feature extractor")
    # From the last, widest stage: other libraries round down if the ratio is not an integer.
    hidden = weights.get(f"layers.{len(tables) - 1}.blocks.0.mlp.fc2.weight")
    border = _BORDERS.get(style, "timm")
    try:
        config = SwinConfig(
            image_size=image_size,
            patch_size=patch,
            in_channels=channels,
            width=width,
            depths=tuple(len(stage) for stage in tables),
            heads=tuple(stage[0].shape[1] for stage in tables),
            windows=_windows([len(stage[0]) for stage in tables], image_size, patch, shrunk=border == "timm"),
            mlp_ratio=hidden.shape[1] / hidden.shape[0]
            if hidden is not None and hidden.ndim == 2 and hidden.numel()
            else 4.0,
            num_classes=classes,
            patch_norm="patch_embed.norm.weight" in weights,
            qkv_bias="layers.0.blocks.0.attn.qkv.bias" in weights,
            border=border,
        )
    except ValueError as error:
        raise CheckpointError(
            "the state dict is not a valid Swin Transformer",
            found=str(error),
            fix="--image-size HEIGHTxWIDTH, --heads N",
        ) from None
    _fit_tables(weights, tables, config, notes)
    return Recognised("swin", style, config, weights, tuple(notes))


def _fit_tables(weights: dict[str, Tensor], tables: list[list[Tensor]], config: SwinConfig, notes: list[str]) -> None:
    """Resize the bias tables of stages whose window differs at the config's image size."""
    for i, (stage, of_stage) in enumerate(zip(config.stages, tables, strict=True)):
        if len(of_stage[0]) != _rows(stage.window):
            side = _square_side(len(of_stage[0]))
            notes.append(
                f"stage {i}: bias tables resized from a window of {side}x{side} to {stage.window[0]}x{stage.window[1]}"
            )
            for j, table in enumerate(of_stage):
                weights[_TABLE.format(i, j)] = resize_table(table, (side, side), stage.window)


def resize(
    config: SwinConfig, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[SwinConfig, dict[str, Tensor]]:
    """Return config and state for another image size; windows stay unless the resolution is smaller.

    timm does the same for `create_model(..., img_size=...)`, and torchvision and transformers for an image of that
    size. Bias tables are resized if a window changes.

    Raises:
        CheckpointError: the size is not divisible by the patch size, or too small; the error names valid sizes.
    """
    try:
        resized = replace(config, image_size=image_size)
    except ValueError as error:
        raise CheckpointError(
            "the model cannot be built for this image size", found=str(error), fix="--image-size HEIGHTxWIDTH"
        ) from None
    weights = dict(state)
    for i, (old, new) in enumerate(zip(config.stages, resized.stages, strict=True)):
        for name in (_TABLE.format(i, j) for j in range(old.depth)):
            weights[name] = resize_table(weights[name], old.window, new.window)
    return resized, weights


def settle(own: SwinConfig, named: SwinConfig) -> tuple[SwinConfig, list[str]]:
    """Use the name's windows: the tensors of a window that shrank to the image do not show its full size."""
    return (replace(own, windows=named.windows) if own.image_size == named.image_size else own), []


def transformers_keys(values: Mapping[str, Any], config: SwinConfig) -> dict[str, Any]:
    return {
        "embed_dim": config.width,
        "depths": config.depths,
        "num_heads": config.heads,
        "patch_size": config.patch_size,
        "num_channels": config.in_channels,
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
    }


def resize_table(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resize a bias table [(2 h - 1) (2 w - 1), heads] of window `old`, (h, w) in tokens, for window `new`.

    The rows of `old` are placed at distances that grow geometrically from the centre so that the outermost rows of both
    windows coincide, then interpolated linearly at integer distances; beyond the outermost row the bias is constant.
    Source: the fine-tuning code of BEiT (arXiv 2106.08254), with linear interpolation as in timm 1.0.
    """
    if old == new:
        return table
    down, right = (_interpolation(*sides) for sides in zip(old, new, strict=True))
    values = table.double().reshape(2 * old[0] - 1, 2 * old[1] - 1, -1)
    return torch.einsum("yi,xj,ijh->yxh", down, right, values).flatten(0, 1).to(table.dtype)


def _interpolation(old: int, new: int) -> Tensor:
    """Return weights [2 new - 1, 2 old - 1] that map values at relative positions of the old window to the new one."""
    low, high, ratio = 1.01, 1.5, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (ratio ** (old - 1) - 1) / (ratio - 1) > new - 1:
            high = ratio
        else:
            low = ratio
    distances = np.cumsum(ratio ** np.arange(old - 1))
    positions = np.concatenate([-distances[::-1], [0], distances])
    expected = np.arange(1 - new, new)
    return torch.from_numpy(np.stack([np.interp(expected, positions, row) for row in np.eye(len(positions))], axis=1))


def _tables(weights: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Return the bias tables of every block, by stage."""
    found = sorted((int(match[1]), int(match[2])) for match in map(_BLOCK.fullmatch, weights) if match)
    stages = [[weights[_TABLE.format(i, j)] for stage, j in found if stage == i] for i in range(found[-1][0] + 1)]
    for i, stage in enumerate(stages):
        if not stage or any(table.ndim != 2 or table.shape != stage[0].shape or not table.numel() for table in stage):
            raise CheckpointError(
                f"stage {i} of a Swin Transformer cannot be read",
                found=f"bias tables of shapes {[list(table.shape) for table in stage]}",
                expected="one table per block, all with the same shape [(2 h - 1) (2 w - 1), heads]",
            )
    return stages


def _windows(rows: Sequence[int], image_size: tuple[int, int], patch: int, *, shrunk: bool) -> tuple[int, ...]:
    """Return the side of each stage's window from the number of rows of its bias tables.

    A window may have `shrunk` with the resolution; its original size is then unknown and assumed to be the same.
    """
    sides = []
    height, width = (size // patch for size in image_size)
    for count in rows:
        candidates = range(1, count // 2 + 2) if shrunk else ()
        fitting = (side for side in candidates if _rows((min(side, height), min(side, width))) == count)
        sides.append(next(fitting, 0) or _square_side(count))
        height, width = -(-height // 2), -(-width // 2)
    return tuple(sides)


def _rows(window: tuple[int, int]) -> int:
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def _square_side(rows: int) -> int:
    side = (math.isqrt(rows) + 1) // 2
    if _rows((side, side)) != rows:
        raise CheckpointError(
            "the tensors do not determine the window of this Swin Transformer",
            found=f"a bias table of {rows} rows, which does not match a square window",
            expected="the image size of the checkpoint, with which windows shrink",
            fix="--image-size HEIGHTxWIDTH",
        )
    return side


def _masked_size(state: Mapping[str, Tensor], patch: int) -> tuple[int, int] | None:
    """Return the image size from the stored mask [w, n, n] of the first shifted block: a square of w windows."""
    mask = state.get("layers.0.blocks.1.attn_mask")
    if mask is None or mask.ndim != 3:
        return None
    side = math.isqrt(mask.shape[0]) * math.isqrt(mask.shape[1]) * patch
    return (side, side) if math.isqrt(mask.shape[0]) ** 2 == mask.shape[0] else None


def _refuse_variants(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    arguments = config.get("model_args")
    found = {
        "absolute position embeddings": any(
            key.endswith(("absolute_pos_embed", "embeddings.position_embeddings")) for key in state
        ),
        "an activation other than GELU": config.get("hidden_act", "gelu") != "gelu",
        "a LayerNorm epsilon other than 1e-5": config.get("layer_norm_eps", 1e-5) != 1e-5,
        "always_partition": isinstance(arguments, Mapping) and bool(arguments.get("always_partition")),
    }
    if any(found.values()):
        raise CheckpointError(
            "vitdeploy does not support this variant of the Swin Transformer",
            found=", ".join(name for name, present in found.items() if present),
            expected="only relative position bias, GELU, epsilon 1e-5, windows no larger than the resolution",
            fix="load it with the library that wrote it: timm:NAME or hf:REPO",
        )


# --- The names of tensors in other libraries --------------------------------------------------------------------------


_BIASES = r"\.relative_position_bias_table"
_TIMM = re.compile(r"layers\.\d+\.blocks\.\d+\.attn" + _BIASES)
_TORCHVISION = re.compile(r"features\.\d+\.\d+\.attn" + _BIASES)
_TRANSFORMERS = re.compile(
    r"(swin\.)?encoder\.layers\.\d+\.blocks\.\d+\.attention\.(self|relative_position_bias)" + _BIASES
)
_COMPUTED = (".relative_position_index", ".attn_mask")
_PRETRAINING = re.compile(r"(swin\.)?embeddings\.mask_token|decoder\.\d+\.(weight|bias)")
# A key without a rule keeps its name. Patch merging at the end of a stage becomes the start of the next one here.
_NAMES_OF: Mapping[str, tuple[Rule, ...]] = {
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
    """Return the key style, the tensors under our names, and notes; None if no style fits.

    Unknown keys are passed on unchanged: loading then reports them as unexpected.
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
    tensors, _, unknown = renamed(_NAMES_OF[style], kept)
    tensors |= {key: kept[key] for key in unknown}
    if style == "transformers":
        tensors, joined = _join_qkv(tensors)
        notes.append(f"query, key and value joined into one linear in {joined} blocks")
    return style, tensors, notes


def _join_qkv(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Stack the weights and biases of query, key and value; those with different shapes are left unchanged."""
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


FAMILY = Family(
    name="swin",
    paper="arXiv 2103.14030",
    names={name: parse(name) for name in NAMES["swin"]},
    parse=parse,
    build=SwinTransformer,
    describe=describe,
    recognise=recognise,
    resize=resize,
    preprocess=preprocess,
    architecture=ARCHITECTURE,
    sized=frozenset({"windows"}),
    settle=settle,
    model_types=frozenset({"swin"}),
    transformers_keys=transformers_keys,
    timm_arguments={
        "embed_dim": "width",
        "depths": "depths",
        "num_heads": "heads",
        "patch_size": "patch_size",
        "in_chans": "in_channels",
        "mlp_ratio": "mlp_ratio",
        "qkv_bias": "qkv_bias",
    },
)

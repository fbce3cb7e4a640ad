"""What lies beside the weights: preprocessing and label names from timm's and transformers' config files.

timm's `config.json` has "architecture" and "pretrained_cfg"; transformers' has "model_type", with a
`preprocessor_config.json` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.spec import Interpolation, PreprocessSpec

MAX_BYTES = 16 << 20
# Pillow's numbers, which transformers' files use.
RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Old files give one number as `size`. It was the short side for these processors and both sides for all others.
SHORT_SIDE = ("CLIP", "Dinov2", "BitImage", "ConvNext", "Levit", "Detr", "Chinese")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a config file.

    Raises:
        MissingFileError, CheckpointError: no such file, or not a JSON object.
    """
    if not path.is_file():
        raise MissingFileError(f"no {path.name} in {path.parent}", fix="copy the whole folder of the model")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"a {type(data).__name__}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a config file", found=str(error)[:200], wanted="a JSON object", fix="download it again"
        ) from None
    return data


def timm_preprocess(config: Mapping[str, Any], channels: int, image_size: tuple[int, int]) -> PreprocessSpec:
    """What `timm.data.create_transform` does for a `pretrained_cfg`, at `image_size` (height, width).

    The short side (crop mode "center") or both sides ("squash") become floor(size / crop_pct).

    Raises:
        CheckpointError: a crop mode or interpolation that vitdeploy does not have.
    """
    interpolation = str(config.get("interpolation", "bicubic"))
    mode = config.get("crop_mode") or "center"
    if interpolation not in RESAMPLE.values() or mode not in ("center", "squash"):
        raise CheckpointError(
            "the checkpoint's preprocessing is not one that vitdeploy has",
            found=f"crop_mode {mode}, interpolation {interpolation}",
            wanted=f"crop_mode center or squash, interpolation {', '.join(RESAMPLE.values())}",
            fix="give preprocess: in a recipe",
        )
    share = float(config.get("crop_pct") or 0.875)
    height, width = (int(side / share) for side in image_size)
    return PreprocessSpec(
        resize=height if mode == "center" and height == width else (height, width),
        crop=image_size,
        interpolation=interpolation,  # type: ignore[arg-type]
        mean=_per_channel(config.get("mean", IMAGENET_MEAN), channels),
        std=_per_channel(config.get("std", IMAGENET_STD), channels),
    )


def transformers_preprocess(
    config: Mapping[str, Any], channels: int, image_size: tuple[int, int]
) -> tuple[PreprocessSpec, tuple[str, ...]]:
    """What the image processor of a `preprocessor_config.json` does, at `image_size`, with notes for the user.

    The processor's own sizes are scaled where `image_size` is not its output size.

    Raises:
        CheckpointError: a processor that does something vitdeploy does not have.
    """
    notes = []
    crop = config.get("crop_size") if config.get("do_center_crop") else None
    resize = _transformers_size(config)
    own = _sides(crop) if crop is not None else resize
    if isinstance(resize, int) and crop is None:
        # No crop: the processor keeps the aspect and gives images of any size (DETR). An engine has one size.
        notes.append(
            f"the processor keeps the aspect (short side {resize}); here both sides are resized to the engine's"
        )
        spec_resize: int | tuple[int, int] = image_size
    elif isinstance(resize, int):
        assert not isinstance(own, int)
        spec_resize = round(resize * min(image_size) / min(own))
    else:
        assert not isinstance(own, int)
        spec_resize = (round(resize[0] * image_size[0] / own[0]), round(resize[1] * image_size[1] / own[1]))
    scale = float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0
    if abs(scale * 255 - 1) > 1e-6:
        raise CheckpointError(
            "the checkpoint's preprocessing is not one that vitdeploy has",
            found=f"rescale_factor {scale}",
            wanted="1 / 255",
            fix="give preprocess: in a recipe",
        )
    normalised = bool(config.get("do_normalize", True))
    number = config.get("resample", 2)
    if number not in RESAMPLE:
        raise CheckpointError(
            "the checkpoint's preprocessing is not one that vitdeploy has",
            found=f"resample {number!r}",
            wanted=", ".join(f"{key} ({name})" for key, name in RESAMPLE.items()),
            fix="give preprocess: in a recipe",
        )
    return PreprocessSpec(
        resize=spec_resize,
        crop=image_size,
        interpolation=RESAMPLE[number],
        mean=_per_channel(config.get("image_mean") or (0.0,) if normalised else (0.0,), channels),
        std=_per_channel(config.get("image_std") or (1.0,) if normalised else (1.0,), channels),
    ), tuple(notes)


def _transformers_size(config: Mapping[str, Any]) -> int | tuple[int, int]:
    """`size`: an integer where it is the short side, (height, width) where it is both."""
    size = (
        config.get("size", 224) if config.get("do_resize", True) else config.get("crop_size", config.get("size", 224))
    )
    if isinstance(size, Mapping):
        if "shortest_edge" in size:
            return int(size["shortest_edge"])
        return _sides(size)
    processor = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    if isinstance(size, int) and processor.startswith(SHORT_SIDE):
        return size
    return _sides(size)


def _sides(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping) and {"height", "width"} <= set(size):
        return int(size["height"]), int(size["width"])
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    raise CheckpointError(
        "the checkpoint's preprocessing is not one that vitdeploy has",
        found=f"size {size!r}",
        wanted="a number, height and width, or shortest_edge",
        fix="give preprocess: in a recipe",
    )


def _per_channel(values: Any, channels: int) -> tuple[float, ...]:
    """One value a channel; of RGB values for a grey model, the mean."""
    numbers = tuple(float(value) for value in values)
    if len(numbers) == channels:
        return numbers
    return (sum(numbers) / len(numbers),) * channels


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names in index order, or () where the config has none that mean anything."""
    names = config.get("label_names") or config.get("pretrained_cfg", {}).get("label_names")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    mapping = config.get("id2label")
    if not isinstance(mapping, Mapping):
        return ()
    try:
        found = {int(key): str(name) for key, name in mapping.items()}
    except ValueError:
        return ()
    if sorted(found) != list(range(len(found))) or all(name == f"LABEL_{i}" for i, name in found.items()):
        return ()
    return tuple(found[i] for i in range(len(found)))

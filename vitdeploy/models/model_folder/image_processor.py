"""Preprocessing from timm's `pretrained_cfg`, or from transformers' image processor settings in
`preprocessor_config.json` or `processor_config.json`.

Deliberately ignored: flags for training labels only (do_reduce_labels, do_convert_annotations), do_convert_rgb (images
always get the model's channels), and the libraries' treatment of images when the model runs at another image size. Any
other step that `PreprocessSpec` cannot express is refused or noted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitdeploy.errors import CheckpointError
from vitdeploy.models.json_file import read_json
from vitdeploy.spec import ChannelOrder, CropRounding, Fit, Interpolation, PreprocessSpec

MAX_SIDE, MIN_SHARE = 1 << 14, 0.05
# Pillow's enum values, used in transformers' files.
RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
STRETCH: Fit = "stretch"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# A processor that pads images for a model that itself pads to its windows.
PADDING = "Swin2SR"
# A processor that crops an object's box for a top-down model; its boxes are in units of 200 pixels, like ours.
TOPDOWN, BOX_UNIT = "VitPose", 200.0
# A processor that scales the longest side of images, and pads them to a square at the right and bottom.
LONGEST = "Sam"
# A processor that pads images to a square at the right and bottom, with black, before resizing them.
SQUARED = "Owlv2"
# Processors that return images of any size, for models whose config.json has no image size.
KEEPS_ASPECT, STEP = ("Mask2Former", "MaskFormer"), 32
# A processor that shrinks images to fit and pads them; its size lists are (width, height).
THUMBNAIL = "Donut"
# A processor that reverses the channel order, unless its file says otherwise.
FLIPPED = "MobileViT"
KNOWN_FLAGS = {
    "do_resize",
    "do_center_crop",
    "do_rescale",
    "do_normalize",
    "do_pad",
    "pad_and_return_pixel_mask",
    "keep_aspect_ratio",
}
FLIP = "do_flip_channel_order"
FLAGS_OF = {TOPDOWN: {"do_affine_transform"}, THUMBNAIL: {"do_thumbnail"}, FLIPPED: {FLIP}}
IGNORED_FLAGS = {"do_convert_rgb", "do_reduce_labels", "reduce_labels", "do_convert_annotations", "use_fast"}


# The transformers classes whose settings are supported.
PROCESSORS = (
    *("ViT", "DeiT", "Beit", "CLIP", "ChineseCLIP", "Bit", "Siglip", "Blip", "ConvNext", "DINOv3ViT", "Pvt"),
    *("Segformer", "Detr", "ConditionalDetr", "DeformableDetr", "Yolos", TOPDOWN, "RfDetr", "Mask2Former"),
    *("MaskFormer", "Eomt", THUMBNAIL, "DPT", LONGEST, "Sam2", "OwlViT", SQUARED, "Sam3", FLIPPED, PADDING, "RTDetr"),
)


def _pair(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


# Defaults for missing keys that a class does not define itself; a single number as `size` means both sides if
# `default_to_square` is true, else the short side.
_SAID = ("size", "resample", "image_mean", "image_std", "crop_size")
_FLAGS = ("do_resize", "do_center_crop", "do_normalize", "do_pad", "default_to_square")
_USUAL: Mapping[str, Any] = {
    **dict.fromkeys(_SAID),
    **dict.fromkeys(_FLAGS, False),
    **dict.fromkeys(("do_resize", "do_normalize", "default_to_square"), True),
    "resample": 2,
}
_HALF = {"image_mean": HALF, "image_std": HALF}
_IMAGENET = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
_CLIP = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "crop_size": _pair(224), "do_center_crop": True}
_CLIP |= {"size": {"shortest_edge": 224}, "resample": 3, "default_to_square": False}
_DETR = {**_IMAGENET, "size": {"shortest_edge": 800, "longest_edge": 1333}, "default_to_square": False, "do_pad": True}
# The classes of models that do not need transformers, with the attributes in transformers 5.23.
COMMON: Mapping[str, Mapping[str, Any]] = {
    "ViT": {**_HALF, "size": _pair(224)},
    "DeiT": {**_HALF, "size": _pair(256), "resample": 3, "crop_size": _pair(224), "do_center_crop": True},
    "Siglip": {**_HALF, "size": _pair(224), "resample": 3, "default_to_square": False},
    **dict.fromkeys(("CLIP", "ChineseCLIP", "Bit"), _CLIP),
    **dict.fromkeys(("Detr", "ConditionalDetr", "DeformableDetr", "Yolos", "RfDetr"), _DETR),
    "RTDetr": {**_IMAGENET, "size": _pair(640), "default_to_square": False, "do_normalize": False},
}


@functools.cache
def defaults_of(name: str) -> Mapping[str, Any]:
    """Return the defaults of a class of `PROCESSORS` for keys missing from a file: the class's attributes."""
    if name in COMMON:
        return {**_USUAL, **COMMON[name]}
    for written in (f"{name}ImageProcessor", f"{name}ImageProcessorPil"):  # the first needs torchvision
        # transformers may be missing, or lack the class, or fail to import it.
        with contextlib.suppress(Exception):
            processor = getattr(importlib.import_module("transformers"), written)
            values = {key: getattr(processor, key, None) for key in (*_SAID, *_FLAGS)}
            number = values["resample"]
            resizes = values["do_resize"] or name == TOPDOWN  # which crops a box instead
            return {**values, "do_resize": resizes, "resample": 2 if number is None else int(number)}
    return _USUAL


def timm_preprocess(config: Mapping[str, Any], channels: int, image_size: tuple[int, int]) -> PreprocessSpec:
    """Return the preprocessing of `timm.data.create_transform` for a `pretrained_cfg`, at `image_size` (height, width).

    The short side (crop mode "center") or both sides ("squash") become floor(size / crop_pct). At the config's
    `test_input_size`, its `test_crop_pct` applies, as with timm's `use_test_size`. If the size is not square, "center"
    keeps the aspect ratio and covers it.

    Raises:
        CheckpointError: an unsupported crop mode, interpolation or number.
    """
    named = config.get("interpolation") or "bicubic"
    interpolation = next((name for name in RESAMPLE.values() if name == named), None)
    mode = config.get("crop_mode") or "center"
    if interpolation is None or mode not in ("center", "squash"):
        raise _unsupported(
            f"crop_mode {mode}, interpolation {named}",
            f"crop_mode center or squash, interpolation {', '.join(RESAMPLE.values())}",
        )
    sizes = [config.get("input_size"), config.get("test_input_size")]
    own, test = (tuple(size[1:]) if isinstance(size, list | tuple) else None for size in sizes)
    tested = config.get("test_crop_pct") if own != test == image_size else None
    share = _share(tested or config.get("crop_pct") or 0.875)
    height, width = (math.floor(side / share) for side in image_size)
    return PreprocessSpec(
        resize=height if mode == "center" and height == width else (height, width),
        crop=image_size,
        interpolation=interpolation,
        mean=_per_channel(config.get("mean") or IMAGENET_MEAN, channels, "mean"),
        std=_deviations(config.get("std") or IMAGENET_STD, channels, "std"),
        fit="cover" if mode == "center" and height != width else "stretch",
    )


def scaled(spec: PreprocessSpec, own: tuple[int, int], expected: tuple[int, int]) -> PreprocessSpec:
    """Return the preprocessing for another size, with the same crop share of the resized image."""
    resize, fit = spec.resize, spec.fit
    if isinstance(resize, int):
        if expected[0] == expected[1]:
            return replace(spec, resize=int(resize * expected[0] / min(own)), crop=expected)
        # The short side of an image need not be that of the input: the image is to cover both.
        resize, own, fit = (resize, resize), (min(own), min(own)), "cover"
    scaled = (int(resize[0] * expected[0] / own[0]), int(resize[1] * expected[1] / own[1]))
    return replace(spec, resize=scaled, crop=expected, fit=fit)


def transformers_processor(folder: Path) -> dict[str, Any] | None:
    """Return the image processor's settings in a model folder, None if it has none.

    `processor_config.json` with an "image_processor" takes precedence over `preprocessor_config.json`, as in
    transformers.

    Raises:
        CheckpointError: a file that is not a JSON object.
    """
    nested, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    if nested.is_file() and isinstance(found := read_json(nested).get("image_processor"), dict):
        return found
    return read_json(own) if own.is_file() else None


def processor_name(config: Mapping[str, Any]) -> str:
    """Return the class that a processor's file names, as in `PROCESSORS`, from any historical spelling; "" if none."""
    written = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    name = written.removesuffix("Fast").removesuffix("Pil")
    return name.removesuffix("ImageProcessor").removesuffix("FeatureExtractor")


def short_side(processor: Mapping[str, Any]) -> int | None:
    """Return the short side of a processor of `PROCESSORS` that keeps the aspect ratio and does not crop."""
    size = _size_of(processor)
    side = size.get("shortest_edge") if isinstance(size, Mapping) else size
    return side if type(side) is int and 0 < side <= MAX_SIDE else None


def _size_of(processor: Mapping[str, Any]) -> Any:
    name = processor_name(processor)
    return processor.get("size") or (defaults_of(name)["size"] if name in PROCESSORS else None)


def fixed_size(processor: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Return the (height, width) to which a processor resizes all images, None if it crops or keeps the aspect ratio.

    It is the size for models that accept any, so that `config.json` has none: detectors such as RT-DETR.
    """
    size = _size_of(processor or {})
    short = _snapped_side(processor or {})
    if short is not None:
        return short, short
    if not isinstance(size, Mapping) or not processor or processor.get("do_center_crop"):
        return None
    sides = size.get("height"), size.get("width")
    return sides if all(type(side) is int and 0 < side <= MAX_SIDE for side in sides) else None  # type: ignore[return-value]


def _snapped_side(processor: Mapping[str, Any]) -> int | None:
    """Return the short side of processors that keep the aspect ratio and whose models take any size, rounded to the
    nearest multiple of their backbone's stride."""
    written = str(processor.get("image_processor_type") or "")
    size = processor.get("size")
    side = size.get("shortest_edge") if isinstance(size, Mapping) else size
    if not written.startswith(KEEPS_ASPECT) or type(side) is not int or not STEP <= side <= MAX_SIDE:
        return None
    return round(side / STEP) * STEP


def transformers_preprocess(
    config: Mapping[str, Any], channels: int, image_size: tuple[int, int]
) -> tuple[PreprocessSpec, tuple[str, ...]]:
    """Return the preprocessing of a `preprocessor_config.json` at `image_size`, and notes for the user.

    Missing keys have the defaults of the processor's class. The processor's sizes are scaled if `image_size` is not its
    output size.

    Raises:
        CheckpointError: an unsupported processor or setting.
    """
    name, notes = _class_of(config)
    defaults = defaults_of(name)
    if (squares := {LONGEST: _longest, SQUARED: _squared}.get(name)) is not None:
        spec, remarks = squares(config, defaults, channels, image_size)
        return spec, (*notes, *remarks)
    if name == THUMBNAIL and isinstance(config.get("size"), list):
        config = {**config, "size": config["size"][::-1]}
    settings = _Settings(config, defaults)
    resize, crop = settings.resize, settings.crop
    if name == "ConvNext" and isinstance(resize, int):
        resize, crop = _convnext(config, resize)
    own, fit = crop or resize, STRETCH
    if name == TOPDOWN:
        fit, notes = _topdown(config), (*notes, "the processor crops a box; without a box, the whole image is used")
        resize = own = image_size
    if name == THUMBNAIL:
        fit, notes = (
            _thumbnail(config, settings),
            (*notes, "the processor resizes some images twice; vitdeploy resizes them once"),
        )
        resize = own = image_size
    _refuse_steps(name, settings, own, config.get("size_divisor"))
    if config.get("keep_aspect_ratio") and isinstance(own, tuple):
        step = config.get("ensure_multiple_of", 1)
        notes += (
            f"the processor keeps the aspect ratio (about {own[0]}x{own[1]}, sides in steps of {step}); vitdeploy "
            "resizes both sides to the engine's size: choose --image-size HEIGHTxWIDTH with your camera's aspect ratio",
        )
    if name == PADDING and settings.pad:
        notes += ("the processor pads images at the right and bottom; vitdeploy does not pad them",)
    if not settings.resizes:
        notes += ("the processor does not resize images; vitdeploy resizes them to the engine's size",)
        resize = image_size
    elif isinstance(own, int):
        # No crop: the processor keeps the aspect ratio and returns images of any size (DETR). An engine has one size.
        padding = " and pads" if settings.pad else ""
        notes += (
            f"the processor keeps the aspect ratio (short side {own}){padding}; vitdeploy resizes both sides to the "
            "engine's size",
        )
        resize = image_size
    else:
        if settings.pad and settings.pad_size not in (None, own):
            raise _unsupported(f"do_pad to {settings.pad_size}", "images of one size, without padding")
        if own != image_size:
            notes += (f"the processor's output of {own[0]}x{own[1]} pixels is scaled to the model's size",)
            resize, fit = _scaled(resize, own, image_size)
    mean, std = settings.normalisation(channels)
    if settings.scale == 255.0:
        notes += ("the processor does not divide pixel values by 255",)
    rounding: CropRounding = "down" if crop else "even"
    order: ChannelOrder = "bgr" if name == FLIPPED and config.get(FLIP) is not False else "rgb"
    return PreprocessSpec(
        resize, image_size, settings.interpolation, mean, std, fit, rounding, channel_order=order
    ), notes


def _refuse_steps(name: str, settings: _Settings, own: Any, divisor: Any) -> None:
    """Raise CheckpointError for a size that the processor pads or enlarges to a multiple of `size_divisor`."""
    step = STEP if divisor is None and name in KEEPS_ASPECT else divisor
    steps = name in KEEPS_ASPECT or (name == "DPT" and settings.pad)
    if steps and isinstance(own, tuple) and isinstance(step, int) and step > 0 and any(side % step for side in own):
        raise _unsupported(f"size {own[0]}x{own[1]} with size_divisor {step}", "a size divisible by size_divisor")


def _class_of(config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the class that a file names, and a note if it names none."""
    written, name = config.get("image_processor_type") or config.get("feature_extractor_type"), processor_name(config)
    if written and name not in PROCESSORS:
        raise _unsupported(f"the processor {written}", f"one of {', '.join(PROCESSORS)}")
    known = KNOWN_FLAGS | IGNORED_FLAGS | FLAGS_OF.get(name, set())
    unknown = sorted(key for key, value in config.items() if value is True and key not in known)
    if unknown:
        raise _unsupported(", ".join(unknown), f"only the steps {', '.join(sorted(KNOWN_FLAGS))}")
    if written:
        return name, ()
    return "ViT", ("the preprocessor's file names no class: assuming the defaults of ViTImageProcessor",)


class _Settings:
    """The validated settings of a file, with the defaults of its class."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        values = {**defaults, **{key: value for key, value in config.items() if value is not None}}
        self.resizes, crops = bool(values["do_resize"]), bool(values["do_center_crop"])
        self.crop = _sides(values["crop_size"], "crop_size") if crops else None
        self.resize: Any = _size(values["size"], defaults["default_to_square"], crops) if self.resizes else None
        if not self.resizes and crops:
            raise _unsupported("do_center_crop without do_resize", "do_resize with do_center_crop")
        pads = (config.get("do_pad"), config.get("pad_and_return_pixel_mask"), defaults["do_pad"])
        self.pad = bool(next((pad for pad in pads if pad is not None), False))
        pad_size = config.get("pad_size")
        self.pad_size = None if pad_size is None else _sides(pad_size, "pad_size")
        number = values["resample"]
        if isinstance(number, bool) or not isinstance(number, int) or number not in RESAMPLE:
            raise _unsupported(f"resample {number!r}", ", ".join(f"{key} ({name})" for key, name in RESAMPLE.items()))
        self.interpolation = RESAMPLE[number]
        rescales = values.get("do_rescale", True)
        factor = _positive(values.get("rescale_factor", 1 / 255), "rescale_factor") if rescales else 1.0
        # 1 / 255 is written with varying numbers of digits.
        self.scale = 1.0 if math.isclose(factor * 255, 1, rel_tol=1e-6) else factor * 255
        normalises = values["do_normalize"]
        self._mean: Any = values["image_mean"] if normalises else 0.0
        self._std: Any = values["image_std"] if normalises else 1.0

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and std for x / 255: with the file's factor f, f x - m is 255 f (x / 255 - m / (255 f))."""
        mean = _per_channel(self._mean, channels, "image_mean")
        std = _deviations(self._std, channels, "image_std")
        return tuple(value / self.scale for value in mean), tuple(value / self.scale for value in std)


def _longest(
    config: Mapping[str, Any], defaults: Mapping[str, Any], channels: int, image_size: tuple[int, int]
) -> tuple[PreprocessSpec, tuple[str, ...]]:
    """Return the preprocessing of SAM's processor, and notes. Raises CheckpointError if it does not scale the longest
    side and pad to a square."""
    size, pad = config.get("size") or defaults["size"], config.get("pad_size")
    side = _side(size.get("longest_edge") if isinstance(size, Mapping) else None, "size.longest_edge")
    padded = (side, side) if pad in (None, defaults["size"]) else _sides(pad, "pad_size")
    pads = config.get("do_pad") is not False
    if not pads or padded != (side, side):
        raise _unsupported(
            f"longest_edge {side}, pad_size {padded[0]}x{padded[1]}, do_pad {pads}",
            "images scaled by their longest side and padded to a square",
        )
    settings = _Settings({**config, "size": _pair(side), "pad_size": None}, defaults)
    if not settings.resizes or settings.crop is not None:
        raise _unsupported(f"do_resize {settings.resizes}, do_center_crop {settings.crop is not None}", "do_resize")
    note = f"the processor's output of {side}x{side} pixels is scaled to the model's size"
    mean, std = settings.normalisation(channels)
    spec = PreprocessSpec(image_size, image_size, settings.interpolation, mean, std, "longest-pad")
    return spec, () if padded == image_size else (note,)


def _squared(
    config: Mapping[str, Any], defaults: Mapping[str, Any], channels: int, image_size: tuple[int, int]
) -> tuple[PreprocessSpec, tuple[str, ...]]:
    """Return the preprocessing of OWLv2's processor, and notes. Raises CheckpointError if it does not pad to a square
    and then resize."""
    settings = _Settings(config, defaults)
    own = settings.resize
    square = isinstance(own, tuple) and own[0] == own[1] and image_size[0] == image_size[1]
    if not (settings.resizes and settings.pad and square) or settings.crop is not None:
        raise _unsupported(
            f"do_resize {settings.resizes}, do_pad {settings.pad}, size {own}, "
            f"do_center_crop {settings.crop is not None}",
            "do_pad, and do_resize to a square",
        )
    mean, std = settings.normalisation(channels)
    spec = PreprocessSpec(image_size, image_size, settings.interpolation, mean, std, "longest-pad", fill=0)
    note = "the processor pads images, then resizes them with its own blur; vitdeploy resizes, then pads them"
    return spec, (note,)


def _topdown(config: Mapping[str, Any]) -> Fit:
    """Raise CheckpointError for a VitPose processor that does not crop boxes in the usual way."""
    unit = config.get("normalize_factor")
    if config.get("do_affine_transform") is False or unit not in (None, BOX_UNIT):
        raise _unsupported(
            f"do_affine_transform {config.get('do_affine_transform')}, normalize_factor {unit}",
            f"do_affine_transform true, normalize_factor {BOX_UNIT:g}",
        )
    return "topdown"


def _thumbnail(config: Mapping[str, Any], settings: _Settings) -> Fit:
    """Raise CheckpointError for a Donut processor that does not produce images of one size in the usual way."""
    steps = {"do_resize": settings.resizes, "do_thumbnail": config.get("do_thumbnail") is not False}
    steps["do_pad"] = settings.pad
    if not all(steps.values()):
        off = ", ".join(f"{name} false" for name, done in steps.items() if not done)
        raise _unsupported(off, ", ".join(steps))
    return "contain"


def _convnext(config: Mapping[str, Any], side: int) -> tuple[int | tuple[int, int], tuple[int, int]]:
    """Return resize and size of ConvNeXt's processor: a crop below 384 pixels, else both sides are resized."""
    if side >= 384:
        return (side, side), (side, side)
    return int(side / _share(config.get("crop_pct") or 224 / 256)), (side, side)


def _scaled(
    resize: int | tuple[int, int], own: tuple[int, int], expected: tuple[int, int]
) -> tuple[int | tuple[int, int], Fit]:
    """Scale the sizes so that they lead to `expected` (height, width) instead of `own`."""
    fit = STRETCH
    if isinstance(resize, int):
        if own[0] * expected[1] == own[1] * expected[0]:
            return round(resize * expected[0] / own[0]), fit
        # The short side of an image need not be that of the input: the image is to cover both.
        resize, own, fit = (resize, resize), (min(own), min(own)), "cover"
    return (round(resize[0] * expected[0] / own[0]), round(resize[1] * expected[1] / own[1])), fit


def _size(size: Any, square: bool, crops: bool) -> int | tuple[int, int]:
    """Return `size` as an integer for the short side, or (height, width) for both sides."""
    if isinstance(size, Mapping) and "shortest_edge" in size:
        if crops and size.get("longest_edge") is not None:
            raise _unsupported(f"size {dict(size)} with a crop", "only shortest_edge")
        return _side(size["shortest_edge"], "size")
    if not square and not isinstance(size, Mapping | list | tuple):
        return _side(size, "size")
    return _sides(size, "size")


def _sides(size: Any, name: str) -> tuple[int, int]:
    if isinstance(size, Mapping) and {"height", "width"} <= set(size):
        return _side(size["height"], name), _side(size["width"], name)
    if isinstance(size, list | tuple) and len(size) == 2:
        return _side(size[0], name), _side(size[1], name)
    if isinstance(size, int):
        return _side(size, name), _side(size, name)
    raise _unsupported(f"{name} {size!r}", "a number, height and width, or shortest_edge")


def _side(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_SIDE:
        raise _unsupported(f"{name} {value!r}", f"an integer from 1 to {MAX_SIDE}")
    return value


def _number(value: Any, name: str) -> float:
    # math.isfinite fails on integers beyond the range of float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise _unsupported(f"{name} {value!r}", "finite numbers")
    return float(value)


def _positive(value: Any, name: str) -> float:
    number = _number(value, name)
    if number <= 0:
        raise _unsupported(f"{name} {value!r}", "a number above 0")
    return number


def _share(value: Any) -> float:
    """Return the crop's share of the resized image; above 1 if the image is padded."""
    share = _positive(value, "crop_pct")
    if not MIN_SHARE <= share <= 1 / MIN_SHARE:
        raise _unsupported(f"crop_pct {value!r}", f"a number from {MIN_SHARE} to {1 / MIN_SHARE:g}")
    return share


def _per_channel(values: Any, channels: int, name: str) -> tuple[float, ...]:
    """Return one value per channel; for a grey model, the mean of RGB values."""
    listed = values if isinstance(values, list | tuple) and values else (values,)
    numbers = tuple(_number(value, name) for value in listed)
    if len(numbers) == channels:
        return numbers
    if len(numbers) != 1 and channels != 1:
        raise _unsupported(f"{name} {values!r}", f"{channels} numbers, one per channel")
    return (sum(numbers) / len(numbers),) * channels


def _deviations(values: Any, channels: int, name: str) -> tuple[float, ...]:
    return tuple(_positive(value, name) for value in _per_channel(values, channels, name))


def _unsupported(found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "vitdeploy does not support the checkpoint's preprocessing",
        found=found[:200],
        expected=expected,
        fix="set preprocess: in a recipe (other commands take the graph that `vitdeploy export RECIPE -o DIR` makes)",
    )

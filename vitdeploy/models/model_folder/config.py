"""A model's config.json: timm's, with "architecture" and "pretrained_cfg" (old ones are that dictionary themselves), or
transformers', with "model_type".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitdeploy.errors import CheckpointError
from vitdeploy.models.json_file import read_json
from vitdeploy.models.model_folder.kinds import Wrong, wrong_value


def model_config(path: Path) -> dict[str, Any]:
    """The config.json of a model: `read_json`, with values of the types that its readers rely on.

    Raises:
        MissingFileError, CheckpointError: as `read_json`; a value that is of another type.
    """
    config = read_json(path)
    absent = [key for key in ("model_type", "architecture") if key in config and config[key] is None]
    wrong = Wrong(absent[0], "null", "text") if absent else wrong_value(config)
    if wrong is not None:
        raise CheckpointError(
            f"{path} has a value that cannot be",
            found=f"{wrong.key} {wrong.found}",
            wanted=f"{wrong.key}: {wrong.wanted}",
            fix=f"correct {wrong.key} in it, or download it again",
        )
    return config


def timm_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `pretrained_cfg` of timm's config.json, in its present or its older flat form; None in any other file."""
    own = config.get("pretrained_cfg")
    if isinstance(own, Mapping):
        return own
    return config if "architecture" in config and "input_size" in config else None


def vision_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of transformers' config that is about images: a whole one, or one of an image and a text model."""
    inner = config.get("vision_config")
    return inner if isinstance(inner, Mapping) else config


def stated_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The image size, (height, width), that a config.json of timm or transformers says; None if it says none."""
    arguments = config.get("model_args")
    of_timm = arguments.get("img_size") if isinstance(arguments, Mapping) else None
    return sides(vision_part(config).get("image_size") or of_timm or (timm_config(config) or {}).get("input_size"))


def backbone_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The image size, (height, width), that transformers' config of a backbone says, if it says one; up to the next
    whole windows, where it has them: RF-DETR's 518 pixels in windows of 56 are the 560 of its repository."""
    size, step = sides(_backbone(config).get("image_size")), window_step(config)
    return None if size is None else (-(-size[0] // step) * step, -(-size[1] // step) * step)


def size_note(config: Mapping[str, Any], size: tuple[int, int]) -> tuple[str, ...]:
    """A note where `size` is `backbone_size`, and not what the config says."""
    stated = sides(_backbone(config).get("image_size"))
    if stated is None or stated == size or backbone_size(config) != size:
        return ()
    windows = f"whole windows of {window_step(config)} pixels"
    return (f"image size {size[0]}x{size[1]}: the config's {stated[0]}x{stated[1]}, up to {windows}",)


def window_step(config: Mapping[str, Any]) -> int:
    """What a backbone's windows of patches need both sides of an image to be a multiple of; 1 without windows."""
    patch, windows = (_backbone(config).get(key) for key in ("patch_size", "num_windows"))
    whole = all(type(value) is int and value > 0 for value in (patch, windows))
    return int(patch) * int(windows) if whole else 1  # type: ignore[arg-type]


def _backbone(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("backbone_config")
    return inner if isinstance(inner, Mapping) else {}


def sides(size: Any) -> tuple[int, int] | None:
    """(height, width) of a size as libraries write it: one side, or a list that ends with both; None of all else."""
    if isinstance(size, int) and size > 0:
        return size, size
    if isinstance(size, list | tuple) and len(size) >= 2 and all(isinstance(side, int) and side > 0 for side in size):
        return int(size[-2]), int(size[-1])
    return None

"""Prompted objects: a point in each and a box around it, and the mask that is meant.

prompts.json    [{"file_name": "evaluation/000000.png", "instance": 1, "point": [x, y], "box": [x0, y0, x1, y1]}, ...]
masks/...png    beside it, of the images' relative names: a pixel of value k belongs to the image's instance k

Points are columns and rows of pixels; "point" or "box" may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.annotations import AnnotatedSet, folder_images, frame_or_skip, located, other_names, upright_notes
from vitdeploy.data.folder import Sample
from vitdeploy.data.label_file import Repairs
from vitdeploy.data.masks import read_map
from vitdeploy.data.pixels import Skipped
from vitdeploy.errors import DataError, InputError, MissingFileError
from vitdeploy.runtime.preprocess import Frame
from vitdeploy.runtime.prompts import Prompt, read_prompts

MASKS = "masks"
WANTED = 'a list of {"file_name": ..., "instance": k, "point": [x, y], "box": [x0, y0, x1, y1]}'


@dataclass(frozen=True)
class PromptedSample(Sample):
    """An image with its prompts, each for the object of `instances` at its place."""

    prompts: tuple[Prompt, ...] = ()
    instances: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptedMap:
    """The PNG of one image, which lies as `frame` says, and what is asked of it."""

    png: Path
    frame: Frame
    sample: PromptedSample

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        return repr((self.sample.prompts, self.sample.instances)).encode() + self.png.read_bytes()

    def load(self) -> npt.NDArray[np.bool_]:
        """bool [prompts, height, width]: the mask of each prompt's object.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is no map of numbers, of another size than the image, or has not one pixel of an instance.
        """
        values = read_map(self.png, "a PNG of instances", self.frame)
        masks = np.stack([values == instance for instance in self.sample.instances])
        empty = np.flatnonzero(~masks.any(axis=(1, 2)))
        if len(empty):
            raise DataError(
                f"{self.png} has not one pixel of an instance that is asked for",
                found=f"values {', '.join(map(str, np.unique(values)[:8].tolist()))}",
                wanted=f"pixels of value {self.sample.instances[empty[0]]}",
                fix="write the k-th instance of the image as k",
            )
        return masks


PromptedSet = AnnotatedSet[PromptedMap]


def read_prompted(images: Path, labels: Path, skipped: Skipped | None = None) -> PromptedSet:
    """The images below `images` that the file `labels` asks something of. Their PNGs are read by `load`.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: `images` or `labels` is not there, or an image has no PNG.
        DataError: the file is of another form, a prompt is outside of its image, or it is of other images.
        ImageError: an unreadable image and `skipped` is None.
    """
    paths, repairs = folder_images(images), Repairs()
    asked = _entries(labels, repairs)
    places = located(images, paths, [*asked], repairs)
    found: dict[Path, PromptedMap] = {}
    for name, path in sorted(places.items()):
        frame = frame_or_skip(path, skipped)
        if frame is None:
            continue
        if path in found:
            raise DataError(f"{labels} has two names of one image", found=name, wanted=f"one name for {path}")
        png = (labels.parent / MASKS / path.relative_to(images)).with_suffix(".png")
        if not png.is_file():
            raise MissingFileError(f"no masks for {name}", found=f"no {png}", wanted="a PNG of its instances")
        prompts = [_prompt(labels, index, entry, frame.size) for index, entry in asked[name]]
        kept = tuple(prompt for each in prompts for prompt in each)
        instances = tuple(
            int(entry["instance"]) for (_, entry), each in zip(asked[name], prompts, strict=True) for _ in each
        )
        found[path] = PromptedMap(png, frame, PromptedSample(path, None, prompts=kept, instances=instances))
    if not found:
        raise other_names(images, labels, paths, [*asked])
    samples = tuple(each.sample for each in found.values())
    notes = upright_notes((each.frame for each in found.values()), "map")
    return AnnotatedSet(images, samples, found, (), len(set(paths.values())) - len(found), (*notes, *repairs.notes))


def _entries(labels: Path, repairs: Repairs) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """The entries of each image by its name, each with its place in the file."""
    if not labels.is_file():
        raise MissingFileError(f"no file of prompts at {labels}", fix="check the path of --annotations")
    try:
        document = json.loads(labels.read_bytes())
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise DataError(f"{labels} is not a JSON file", found=str(error)[:200], wanted=WANTED) from None
    found: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for index, entry in enumerate(document if isinstance(document, list) else [document]):
        fits = isinstance(entry, dict) and isinstance(entry.get("file_name"), str)
        if not fits or type(entry.get("instance")) is not int or not ({"point", "box"} & set(entry)):
            raise DataError(f"{labels}: [{index}] is no prompt", found=repr(entry)[:80], wanted=WANTED)
        entries = found.setdefault(entry["file_name"], [])
        if any(entry == other for _, other in entries):
            repairs.add("repeated prompts, counted once", f"[{index}]")
            continue
        entries.append((index, entry))
    return found


def _prompt(labels: Path, index: int, entry: Mapping[str, Any], size: tuple[int, int]) -> list[Prompt]:
    """A prompt by its point, and one by its box, as far as both are there."""
    point, box = entry.get("point"), entry.get("box")
    prompts: list[Prompt] = []
    try:
        if point is not None:
            prompts += read_prompts([point], None, None, size)
        if box is not None:
            prompts += read_prompts(None, None, box, size)
    except InputError as error:
        raise DataError(
            f"{labels}: [{index}]: {error.message}", found=error.found, wanted=error.wanted, fix=error.fix
        ) from None
    return prompts

"""Prompts of promptable segmentation: points and boxes in pixels of an image, and the tensors that a decoder takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError
from vitdeploy.runtime.preprocess import crop_start, resized_size
from vitdeploy.runtime.topdown import Box
from vitdeploy.spec import OutputSpec, PreprocessSpec, TensorSpec

# Kinds of a prompt's slots, as the prompt encoder numbers them: a point outside of the object or inside, the corners of
# a box, and no point at all, for which the model has an embedding of its own.
OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT, NO_POINT = 0, 1, 2, 3, -1
# A slot that is not used: it is masked in every attention.
EMPTY = -10
MASKS, IOU_SCORES = "masks", "iou_scores"


@dataclass(frozen=True)
class PromptSpec(OutputSpec):
    """From a prompt to tensors, and from the outputs to masks (SAM, arXiv 2304.02643).

    A prompt is `slots` points in pixels of the model's input, "points" [slots, 2], each of a kind, "labels" [slots].
    `closed_box`: after the corners of a box stands a slot that is no point (SAM 2); without a box there always is one.

    "masks" [4, height, width], logits, and the IoU that the model promises of each, "iou_scores" [4]. The first is for
    prompts that mean one thing, the others for those that may mean several, such as one point. A pixel is in a mask
    above `mask_threshold`. `stability`: (delta, least): where the first mask at +delta covers less than this share of
    what it covers at -delta, the best of the others takes its place (SAM 2); None of a model without this rule.
    """

    slots: int
    closed_box: bool = False
    mask_threshold: float = 0.0
    stability: tuple[float, float] | None = None


Floats = npt.NDArray[np.float32]
Kinds = npt.NDArray[np.int64]
POINTS, LABELS = "points", "labels"
# What a user may give: nested lists or an array of numbers.
Given = Sequence[Any] | npt.NDArray[Any] | None
EXPECTED_POINTS = "points [n, 2] of one prompt, or [prompts, n, 2] of several: x, y in pixels of the image"
EXPECTED_LABELS = "one for each point: 1 inside of the object, 0 outside"
ONE_POINTS = "points [n, 2]: x, y in pixels of the image"
ONE_BOX = "box [4]: left, top, right, bottom in pixels of the image"
EXPECTED_BOXES = "boxes [4] of one prompt, or [prompts, 4] of several: left, top, right, bottom in pixels of the image"


@dataclass(frozen=True)
class Prompt:
    """What one object is meant by, in pixels of the image: `points` (x, y), each with a label, 1 inside of the object
    and 0 outside; a `box` around it (left, top, right, bottom), None without."""

    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: Box | None = None

    @property
    def ambiguous(self) -> bool:
        """Whether it may mean several things, such as a part, or the whole: one point does, and no point at all."""
        return self.box is None and len(self.points) <= 1

    def to_dict(self) -> dict[str, Any]:
        box = None if self.box is None else list(self.box)
        return {"points": [list(point) for point in self.points], "labels": list(self.labels), "box": box}


def prompt_tensors(spec: PromptSpec) -> tuple[TensorSpec, TensorSpec]:
    """What a decoder takes beside the embedding."""
    return (
        TensorSpec(POINTS, "float32", ("batch", spec.slots, 2)),
        TensorSpec(LABELS, "int64", ("batch", spec.slots)),
    )


def read_prompts(points: Given, labels: Given, boxes: Given, size: tuple[int, int]) -> list[Prompt]:
    """The prompts that a user gives for an image of `size` (width, height); points and boxes of one place are one.

    Raises:
        InputError: no prompt, other shapes, a number that is not finite, a label that is not 0 or 1, or a prompt
            outside of the image.
    """
    found_points = _numbers(points, 3, EXPECTED_POINTS, 2)
    found_boxes = _numbers(boxes, 2, EXPECTED_BOXES, 4)
    if found_points is None and found_boxes is None:
        raise InputError(
            "no prompt is given: nothing says which object is meant",
            expected=f"{EXPECTED_POINTS}; or {EXPECTED_BOXES}",
            fix="predict(image, points=[(x, y)]), or --point x,y; boxes=..., or --box left,top,right,bottom",
        )
    kinds = _kinds(labels, found_points)
    counts = [len(each) for each in (found_points, found_boxes) if each is not None]
    if len(set(counts)) > 1:
        raise InputError(
            "points and boxes are of different numbers of prompts",
            found=f"points of {counts[0]} prompts, {counts[1]} boxes",
            expected="as many of each: those of one place are one prompt",
        )
    prompts = []
    for i in range(counts[0]):
        inside = () if found_points is None else tuple((float(x), float(y)) for x, y in found_points[i])
        box = None if found_boxes is None else tuple(float(side) for side in found_boxes[i])
        told = () if kinds is None else tuple(int(kind) for kind in kinds[i])
        prompt = Prompt(inside, told, None if box is None else (box[0], box[1], box[2], box[3]))
        _require_inside(prompt, size)
        prompts.append(prompt)
    return prompts


def read_listed(entries: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> list[Prompt]:
    """One prompt for each entry, {"points": [n, 2], "labels": [n], "box": [4]} as `Prompt.to_dict` has them: what is
    left out, None or empty is not there. Their numbers of points may differ, as those of one array may not.

    Raises:
        InputError: no entry, or one as `read_prompts` refuses it, with its place.
    """
    found = []
    for place, entry in enumerate(entries):
        given = {name: None if _nothing(entry.get(name)) else entry[name] for name in ("points", "labels", "box")}
        try:
            prompts = read_prompts(given["points"], given["labels"], given["box"], size)
        except InputError as error:
            expected = error.expected.replace(EXPECTED_POINTS, ONE_POINTS).replace(EXPECTED_BOXES, ONE_BOX)
            raise InputError(f"prompts[{place}]: {error.message}", found=error.found, expected=expected) from None
        if len(prompts) > 1:
            message, expected = f"prompts[{place}]: more than one prompt", f"{ONE_POINTS}; {ONE_BOX}"
            raise InputError(message, found=f"{len(prompts)} prompts", expected=expected)
        found += prompts
    if not found:
        raise InputError("no prompt is given: nothing says which object is meant", expected=f"{ONE_POINTS}; or {ONE_BOX}")
    return found


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and not value)


def _numbers(given: Given, rank: int, expected: str, last: int) -> npt.NDArray[np.float64] | None:
    """[prompts, ..., last] of what is given for one prompt or several; raises InputError for anything else."""
    if given is None:
        return None
    found = _array(given)
    if found.ndim == rank - 1:
        found = found[None]
    if found.ndim != rank or found.shape[-1] != last or 0 in found.shape or not np.isfinite(found).all():
        raise InputError(
            "these are no prompts",
            found=_shown(given),
            expected=expected,
            fix="prompts of different numbers of points: ask for each by itself",
        )
    return found


def _array(given: Given, kinds: str = "iuf") -> npt.NDArray[np.float64]:
    """An empty array of what is no array of these kinds of numbers: text, None, prompts of different numbers of
    points."""
    try:
        found = np.asarray(given)
        return found.astype(np.float64) if found.dtype.kind in kinds else np.zeros(0)
    except (TypeError, ValueError):
        return np.zeros(0)


def _shown(given: Given) -> str:
    return " ".join(str(given).split())[:80]


def _kinds(labels: Given, points: npt.NDArray[np.float64] | None) -> Kinds | None:
    """int64 [prompts, n], of points without labels all inside."""
    if points is None:
        if labels is not None:
            raise InputError("labels are given, and no points", found=_shown(labels), expected=EXPECTED_LABELS)
        return None
    if labels is None:
        return np.full(points.shape[:2], INSIDE, np.int64)
    found = _array(labels, "biuf")
    found = found[None] if found.ndim == 1 else found
    if found.shape != points.shape[:2] or not np.isin(found, (OUTSIDE, INSIDE)).all():
        raise InputError("these are no labels of the points", found=_shown(labels), expected=EXPECTED_LABELS)
    return found.astype(np.int64)


def _require_inside(prompt: Prompt, size: tuple[int, int]) -> None:
    """Raise InputError for a prompt that is not in an image of this size."""
    width, height = size
    lost = [point for point in prompt.points if not (0 <= point[0] < width and 0 <= point[1] < height)]
    if lost:
        raise InputError(
            "a point lies outside of the image",
            found=f"x {lost[0][0]:g}, y {lost[0][1]:g} in an image of {width}x{height}",
            expected=f"x from 0 to below {width}, y from 0 to below {height}",
            fix="check that the prompt belongs to this image, and that x is given before y",
        )
    if prompt.box is None:
        return
    left, top, right, bottom = prompt.box
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise InputError(
            "a box does not lie in the image",
            found=f"{left:g},{top:g},{right:g},{bottom:g} in an image of {width}x{height}",
            expected=f"left below right, up to {width}; top below bottom, up to {height}",
            fix="check that the prompt belongs to this image: left, top, right, bottom, not width and height",
        )


def prompt_arrays(
    prompts: Sequence[Prompt], size: tuple[int, int], preprocess: PreprocessSpec, spec: PromptSpec
) -> dict[str, npt.NDArray[Any]]:
    """ "points", float32 [prompts, slots, 2], in pixels of the model's input, and "labels", int64 [prompts, slots].

    Args:
        size: (width, height) of the image that the prompts are for.

    Raises:
        InputError: a prompt of more points than there are slots.
    """
    points = np.zeros((len(prompts), spec.slots, 2), np.float32)
    labels = np.full((len(prompts), spec.slots), EMPTY, np.int64)
    for i, prompt in enumerate(prompts):
        for slot, (kind, place) in enumerate(_fitting(prompt, spec)):
            labels[i, slot] = kind
            points[i, slot] = 0 if place is None else _to_input(place, size, preprocess)
    return {POINTS: points, LABELS: labels}


def require_slots(prompts: Sequence[Prompt], spec: PromptSpec) -> None:
    """Raise InputError for a prompt of more points than there are slots."""
    for prompt in prompts:
        _fitting(prompt, spec)


def _fitting(prompt: Prompt, spec: PromptSpec) -> list[tuple[int, tuple[float, float] | None]]:
    """As `_entries`; raises InputError if there are more of them than slots."""
    entries = _entries(prompt, spec)
    if len(entries) > spec.slots:
        most = spec.slots - len(_entries(Prompt(box=prompt.box), spec))
        raise InputError(
            "a prompt of too many points",
            found=f"{len(prompt.points)} points{' and a box' if prompt.box else ''}",
            expected=f"at most {most}: the decoder was exported for {spec.slots} points and corners",
            fix="leave the oldest points out",
        )
    return entries


def _entries(prompt: Prompt, spec: PromptSpec) -> list[tuple[int, tuple[float, float] | None]]:
    """The kind and the place of each slot that a prompt needs."""
    entries: list[tuple[int, tuple[float, float] | None]] = list(zip(prompt.labels, prompt.points, strict=True))
    if prompt.box is None:
        return [*entries, (NO_POINT, None)]
    left, top, right, bottom = prompt.box
    entries += [(TOP_LEFT, (left, top)), (BOTTOM_RIGHT, (right, bottom))]
    return [*entries, (NO_POINT, None)] if spec.closed_box else entries


def _to_input(place: tuple[float, float], size: tuple[int, int], spec: PreprocessSpec) -> tuple[float, float]:
    """Where a place of the image is in the model's input, which it is scaled to, and cropped."""
    scaled = resized_size(*size, spec)
    starts = (0, 0)
    if spec.fit != "longest-pad":
        across, down = (
            crop_start(side, crop, spec.crop_rounding) for side, crop in zip(scaled, reversed(spec.crop), strict=True)
        )
        starts = (across, down)
    x, y = (at * (new / old) - start for at, new, old, start in zip(place, scaled, size, starts, strict=True))
    return x, y


def grid_prompts(size: tuple[int, int], side: int = 3) -> list[Prompt]:
    """A point in the middle of each cell of a grid over an image of `size` (width, height)."""
    width, height = size
    places = [(i + 0.5) / side for i in range(side)]
    return [Prompt(((x * width, y * height),), (INSIDE,)) for y in places for x in places]

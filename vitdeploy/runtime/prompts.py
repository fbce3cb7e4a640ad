"""Prompts of promptable segmentation: points and boxes in pixels of an image, and their tensors for the decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError
from vitdeploy.runtime.preprocess import crop_start, resized_size
from vitdeploy.runtime.topdown import Box
from vitdeploy.spec import OutputSpec, PreprocessSpec, TensorSpec

# Kinds of a prompt's slots, numbered as in the prompt encoder: a point outside or inside the object, the corners of a
# box, and "not a point", which has its own embedding.
OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT, NO_POINT = 0, 1, 2, 3, -1
# An unused slot, masked in every attention.
EMPTY = -10
MASKS, IOU_SCORES = "masks", "iou_scores"


@dataclass(frozen=True)
class PromptSpec(OutputSpec):
    """How prompts become tensors, and outputs become masks (SAM, arXiv 2304.02643).

    A prompt is `slots` points in pixels of the model's input, "points" [slots, 2], with their kinds, "labels" [slots].
    `closed_box`: a "not a point" slot follows the corners of a box (SAM 2); without a box there always is one.

    Outputs: "masks" [4, height, width], logits, and the predicted IoU of each, "iou_scores" [4]. The first mask is for
    unambiguous prompts, the others for ambiguous ones, such as a single point. A pixel is in a mask above
    `mask_threshold`. `stability`: (delta, least): if the first mask's area at +delta is less than the share `least` of
    its area at -delta, the best of the others replaces it (SAM 2); None for a model without this rule.
    """

    slots: int
    closed_box: bool = False
    mask_threshold: float = 0.0
    stability: tuple[float, float] | None = None


Floats = npt.NDArray[np.float32]
Kinds = npt.NDArray[np.int64]
POINTS, LABELS = "points", "labels"
# Prompts from a user: nested lists or an array of numbers.
Given = Sequence[Any] | npt.NDArray[Any] | None
EXPECTED_POINTS = "points [n, 2] for one prompt, [prompts, n, 2] for several: x, y in pixels of the image"
EXPECTED_LABELS = "one label per point: 1 inside the object, 0 outside"
ONE_POINTS = "points [n, 2]: x, y in pixels of the image"
ONE_BOX = "box [4]: left, top, right, bottom in pixels of the image"
EXPECTED_BOXES = "boxes [4] for one prompt, [prompts, 4] for several: left, top, right, bottom in pixels of the image"


@dataclass(frozen=True)
class Prompt:
    """The prompt for one object, in pixels of the image: `points` (x, y), each with a label, 1 inside the object and 0
    outside; a `box` around it (left, top, right, bottom), or None."""

    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: Box | None = None

    @property
    def ambiguous(self) -> bool:
        """Whether it may mean several things, such as a part or the whole: with at most one point and no box."""
        return self.box is None and len(self.points) <= 1

    def to_dict(self) -> dict[str, Any]:
        box = None if self.box is None else list(self.box)
        return {"points": [list(point) for point in self.points], "labels": list(self.labels), "box": box}


def prompt_tensors(spec: PromptSpec) -> tuple[TensorSpec, TensorSpec]:
    """Return the decoder's inputs besides the embedding."""
    return (
        TensorSpec(POINTS, "float32", ("batch", spec.slots, 2)),
        TensorSpec(LABELS, "int64", ("batch", spec.slots)),
    )


def read_prompts(points: Given, labels: Given, boxes: Given, size: tuple[int, int]) -> list[Prompt]:
    """Return a user's prompts for an image of `size` (width, height); the i-th points and the i-th box form one prompt.

    Raises:
        InputError: no prompt, other shapes, a number that is not finite, a label that is not 0 or 1, or a prompt
            outside the image.
    """
    found_points = _numbers(points, 3, EXPECTED_POINTS, 2)
    found_boxes = _numbers(boxes, 2, EXPECTED_BOXES, 4)
    if found_points is None and found_boxes is None:
        raise InputError(
            "no prompt: points or boxes are needed to select an object",
            expected=f"{EXPECTED_POINTS}; or {EXPECTED_BOXES}",
            fix="predict(image, points=[(x, y)]) or boxes=..., or --point x,y or --box left,top,right,bottom",
        )
    kinds = _kinds(labels, found_points)
    counts = [len(each) for each in (found_points, found_boxes) if each is not None]
    if len(set(counts)) > 1:
        raise InputError(
            "points and boxes have different numbers of prompts",
            found=f"points for {counts[0]} prompts, {counts[1]} boxes",
            expected="the same number of each: the i-th points and the i-th box form one prompt",
        )
    prompts = []
    for i in range(counts[0]):
        inside = () if found_points is None else tuple((float(x), float(y)) for x, y in found_points[i])
        box = None if found_boxes is None else tuple(float(side) for side in found_boxes[i])
        kinds_here = () if kinds is None else tuple(int(kind) for kind in kinds[i])
        prompt = Prompt(inside, kinds_here, None if box is None else (box[0], box[1], box[2], box[3]))
        _require_inside(prompt, size)
        prompts.append(prompt)
    return prompts


def read_listed(entries: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> list[Prompt]:
    """Return one prompt per entry, {"points": [n, 2], "labels": [n], "box": [4]} as from `Prompt.to_dict`; a missing,
    None or empty field is ignored. Unlike in one array, the numbers of points may differ.

    Raises:
        InputError: no entry, or an entry that `read_prompts` refuses, with its index.
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
            message, expected = f"prompts[{place}] has more than one prompt", f"{ONE_POINTS}; {ONE_BOX}"
            raise InputError(message, found=f"{len(prompts)} prompts", expected=expected)
        found += prompts
    if not found:
        raise InputError(
            "no prompt: points or boxes are needed to select an object", expected=f"{ONE_POINTS}; or {ONE_BOX}"
        )
    return found


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and not value)


def _numbers(given: Given, rank: int, expected: str, last: int) -> npt.NDArray[np.float64] | None:
    """The array [prompts, ..., last] of one prompt or several; InputError for anything else."""
    if given is None:
        return None
    found = _array(given)
    if found.ndim == rank - 1:
        found = found[None]
    if found.ndim != rank or found.shape[-1] != last or 0 in found.shape or not np.isfinite(found).all():
        raise InputError(
            "prompts have an unexpected shape or type",
            found=_shown(given),
            expected=expected,
            fix="if prompts have different numbers of points, call predict once per prompt",
        )
    return found


def _array(given: Given, kinds: str = "iuf") -> npt.NDArray[np.float64]:
    """The values as an array; an empty one if they are not an array of these kinds of numbers: text, None, ragged
    lists."""
    try:
        found = np.asarray(given)
        return found.astype(np.float64) if found.dtype.kind in kinds else np.zeros(0)
    except (TypeError, ValueError):
        return np.zeros(0)


def _shown(given: Given) -> str:
    return " ".join(str(given).split())[:80]


def _kinds(labels: Given, points: npt.NDArray[np.float64] | None) -> Kinds | None:
    """The labels, int64 [prompts, n]; all "inside" if none are given."""
    if points is None:
        if labels is not None:
            raise InputError("labels without points", found=_shown(labels), expected=EXPECTED_LABELS)
        return None
    if labels is None:
        return np.full(points.shape[:2], INSIDE, np.int64)
    found = _array(labels, "biuf")
    found = found[None] if found.ndim == 1 else found
    if found.shape != points.shape[:2] or not np.isin(found, (OUTSIDE, INSIDE)).all():
        raise InputError("labels do not match the points", found=_shown(labels), expected=EXPECTED_LABELS)
    return found.astype(np.int64)


def _require_inside(prompt: Prompt, size: tuple[int, int]) -> None:
    """Raise InputError for a prompt outside an image of this size."""
    width, height = size
    lost = [point for point in prompt.points if not (0 <= point[0] < width and 0 <= point[1] < height)]
    if lost:
        raise InputError(
            "a point is outside the image",
            found=f"x {lost[0][0]:g}, y {lost[0][1]:g} in an image of {width}x{height}",
            expected=f"0 <= x < {width}, 0 <= y < {height}",
            fix="check that the prompt belongs to this image, and that x comes before y",
        )
    if prompt.box is None:
        return
    left, top, right, bottom = prompt.box
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise InputError(
            "a box is not inside the image",
            found=f"{left:g},{top:g},{right:g},{bottom:g} in an image of {width}x{height}",
            expected=f"0 <= left < right <= {width}, 0 <= top < bottom <= {height}",
            fix="check that the prompt belongs to this image, and is left, top, right, bottom (not width, height)",
        )


def prompt_arrays(
    prompts: Sequence[Prompt], size: tuple[int, int], preprocess: PreprocessSpec, spec: PromptSpec
) -> dict[str, npt.NDArray[Any]]:
    """Return "points", float32 [prompts, slots, 2], in pixels of the model's input, and "labels", int64 [prompts,
    slots].

    Args:
        size: (width, height) of the prompts' image.

    Raises:
        InputError: a prompt has more points than the decoder's slots.
    """
    points = np.zeros((len(prompts), spec.slots, 2), np.float32)
    labels = np.full((len(prompts), spec.slots), EMPTY, np.int64)
    for i, prompt in enumerate(prompts):
        for slot, (kind, place) in enumerate(_fitting(prompt, spec)):
            labels[i, slot] = kind
            points[i, slot] = 0 if place is None else _to_input(place, size, preprocess)
    return {POINTS: points, LABELS: labels}


def require_slots(prompts: Sequence[Prompt], spec: PromptSpec) -> None:
    """Raise InputError for a prompt with more points than the decoder's slots."""
    for prompt in prompts:
        _fitting(prompt, spec)


def _fitting(prompt: Prompt, spec: PromptSpec) -> list[tuple[int, tuple[float, float] | None]]:
    """As `_entries`; raise InputError if there are more entries than slots."""
    entries = _entries(prompt, spec)
    if len(entries) > spec.slots:
        most = spec.slots - len(_entries(Prompt(box=prompt.box), spec))
        raise InputError(
            "a prompt has too many points",
            found=f"{len(prompt.points)} points{' and a box' if prompt.box else ''}",
            expected=f"at most {most}: the decoder was exported with {spec.slots} slots for points and corners",
            fix="remove the oldest points",
        )
    return entries


def _entries(prompt: Prompt, spec: PromptSpec) -> list[tuple[int, tuple[float, float] | None]]:
    """The kind and the position of each slot that a prompt needs."""
    entries: list[tuple[int, tuple[float, float] | None]] = list(zip(prompt.labels, prompt.points, strict=True))
    if prompt.box is None:
        return [*entries, (NO_POINT, None)]
    left, top, right, bottom = prompt.box
    entries += [(TOP_LEFT, (left, top)), (BOTTOM_RIGHT, (right, bottom))]
    return [*entries, (NO_POINT, None)] if spec.closed_box else entries


def _to_input(place: tuple[float, float], size: tuple[int, int], spec: PreprocessSpec) -> tuple[float, float]:
    """The position in the model's input of a point in the image, after resizing and cropping."""
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
    """Return one point prompt at the centre of each cell of a grid over an image of `size` (width, height)."""
    width, height = size
    places = [(i + 0.5) / side for i in range(side)]
    return [Prompt(((x * width, y * height),), (INSIDE,)) for y in places for x in places]

"""Compares two models' answers to a sample, coarsely and per task: it tells a wrong engine from a rounded one."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from vitdeploy.runtime.detection import Detection, detect
from vitdeploy.runtime.panoptic import Panoptic, segment
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import PostprocessSpec, PreprocessSpec, Task

COSINE = 0.9
OVERLAP = 0.5
# Of the objects of both detectors that have a partner, and of the pixels of two maps that have one class.
MATCHED_SHARE = 0.5


def count_same(
    task: Task,
    preprocess: PreprocessSpec | None,
    postprocess: PostprocessSpec | None,
    ours: Mapping[str, Array],
    theirs: Mapping[str, Array],
) -> int:
    """On how many of n samples the two agree; outputs [n, ...] by name, of the same names and shapes."""
    same = functools.partial(_same, task, preprocess, postprocess)
    samples = range(len(next(iter(theirs.values()))))
    return sum(same(*({name: array[i] for name, array in side.items()} for side in (ours, theirs))) for i in samples)


def _same(
    task: Task,
    preprocess: PreprocessSpec | None,
    postprocess: PostprocessSpec | None,
    ours: Mapping[str, Array],
    theirs: Mapping[str, Array],
) -> bool:
    if not all(np.isfinite(array).all() for array in ours.values() if array.dtype.kind == "f"):
        return False
    if task == "sequence":
        return np.array_equal(ours["tokens"], theirs["tokens"])
    if task == "features":
        return _cosine(ours["features"], theirs["features"]) >= COSINE
    if postprocess is None or preprocess is None:
        return bool(ours["logits"].argmax() == theirs["logits"].argmax())
    size = preprocess.crop[1], preprocess.crop[0]
    if task == "panoptic":
        a, b = (_classes(segment(side, size, preprocess, postprocess, None)) for side in (ours, theirs))
        return bool((a == b).mean() >= MATCHED_SHARE)
    found, wanted = (detect(side, size, preprocess, postprocess, None).objects for side in (ours, theirs))
    return _alike(found, wanted)


def _cosine(a: Array, b: Array) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300))


def _classes(found: Panoptic) -> Array:
    """[height, width]: the class of each pixel, -1 where there is none."""
    table = np.full(max((each.id for each in found.segments), default=0) + 1, -1, np.int64)
    for each in found.segments:
        table[each.id] = each.index
    return np.asarray(table[found.map])


def _alike(found: tuple[Detection, ...], wanted: tuple[Detection, ...]) -> bool:
    """Whether most objects of both sides have a partner: of the same class, and at the same place."""
    left, pairs = list(wanted), 0
    for each in found:
        partner = next((o for o in left if o.index == each.index and _iou(o.box, each.box) >= OVERLAP), None)
        if partner is not None:
            left.remove(partner)
            pairs += 1
    return 2 * pairs >= MATCHED_SHARE * (len(found) + len(wanted))


def _iou(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(0.0, width) * max(0.0, height)
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return common / max(areas - common, 1e-300)

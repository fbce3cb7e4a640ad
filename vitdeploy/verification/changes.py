"""Which samples an artifact answers otherwise than the original, and how bad that is: what a person wants to see first.

A severity is 0 where nothing changed. Else what became wrong is above what was wrong and is wrong in another way, and
both are above what became right; within each the surer the answer, or the larger the change, the higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.data.panoptic import PanopticMap
from vitdeploy.verification.average_precision import Objects
from vitdeploy.verification.detection import partners

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

# The share of its pixels from which an image counts as cut otherwise: borders of segments always move a little.
MOVED_PIXELS = 0.01


@dataclass(frozen=True)
class Changes:
    """changed: bool [n]. lost, gained: bool [n], what was right and is wrong, and the other way round; None where
    nobody knows what is right. severity: float64 [n]."""

    changed: Bools
    lost: Bools | None
    gained: Bools | None
    severity: Floats


def judged(changed: Bools, size: Floats, right: Bools | None = None, was_right: Bools | None = None) -> Changes:
    """Changes with their severity.

    Args:
        size: float64 [n] in 0..1, of the change, or how sure the new answer is.
        right, was_right: bool [n], the artifact's answer and the original's; None without labels.
    """
    size = np.clip(size, 0.0, 1.0)
    if right is None or was_right is None:
        return Changes(changed, None, None, np.where(changed, 1 + size, 0.0))
    lost, gained = changed & was_right & ~right, changed & right & ~was_right
    rank = np.where(lost, 2.0, np.where(gained, 0.0, 1.0))
    # The least change of all is still one.
    return Changes(changed, lost, gained, np.where(changed, np.maximum(rank + size, 1e-9), 0.0))


def object_changes(artifact: Sequence[Objects], reference: Sequence[Objects]) -> Changes:
    """An image has changed where an object that a user sees has no partner on the other side (`detection.pair`); the
    more of them, and the higher their scores, the worse."""
    lonely = np.zeros(len(reference))
    for i, (a, b) in enumerate(zip(artifact, reference, strict=True)):
        both = partners(a, b)
        lonely[i] = np.delete(a.scores, both[:, 0]).sum() + np.delete(b.scores, both[:, 1]).sum()
    return judged(lonely > 0, lonely / (1 + lonely))


def map_changes(artifact: Sequence[PanopticMap], reference: Sequence[PanopticMap]) -> Changes:
    """An image has changed where more than MOVED_PIXELS of its pixels are of another class."""
    moved = np.array([_moved(a, b) for a, b in zip(artifact, reference, strict=True)], np.float64)
    return judged(moved > MOVED_PIXELS, moved)


def _moved(a: PanopticMap, b: PanopticMap) -> float:
    return float((_classes(a) != _classes(b)).mean())


def _classes(cut: PanopticMap) -> npt.NDArray[np.int64]:
    """The class of every pixel; -1 where it has none."""
    known, at = np.unique(cut.ids, return_inverse=True)
    classes = np.array([cut.classes.get(int(each), -1) for each in known], np.int64)
    return np.asarray(classes[at.reshape(cut.ids.shape)])

"""Changed answers: which, how many and how severe."""

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vitdeploy.data.masks import PanopticMap
from vitdeploy.verification import agreement, detection
from vitdeploy.verification.records import Ints, Records

# --- The samples that an artifact answers differently from the original -----------------------------------------------
# ranked by severity for a person to look at.
#
# Severity is 0 if nothing changed. Samples that became wrong rank above those that are wrong in a different way, and
# both above those that are right now; within each group, a more confident answer or a larger change ranks higher.


Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

# Share of pixels above which an image counts as segmented differently: segment borders always move a little.
MOVED_PIXELS = 0.01


@dataclass(frozen=True)
class Changes:
    """changed: bool [n]. lost, gained: bool [n], right before and wrong now, and the reverse; None without labels.
    severity: float64 [n]. kept: bool [n], a different answer that is equally right; None without labels."""

    changed: Bools
    lost: Bools | None
    gained: Bools | None
    severity: Floats
    kept: Bools | None = None

    @property
    def otherwise(self) -> Bools | None:
        """bool [n], wrong before and wrong now in another way; None without labels."""
        if self.lost is None or self.gained is None or self.kept is None:
            return None
        return self.changed & ~(self.lost | self.gained | self.kept)


def judged(changed: Bools, size: Floats, right: Bools | None = None, was_right: Bools | None = None) -> Changes:
    """Changes with their severity.

    Args:
        size: float64 [n] in 0..1, of the change, or the confidence of the new answer.
        right, was_right: bool [n], the artifact's answer and the original's; None without labels.
    """
    size = np.clip(size, 0.0, 1.0)
    if right is None or was_right is None:
        return Changes(changed, None, None, np.where(changed, 1 + size, 0.0))
    lost, gained = changed & was_right & ~right, changed & right & ~was_right
    rank = np.where(lost, 2.0, np.where(right, 0.0, 1.0))
    # Even the smallest change counts.
    severity = np.where(changed, np.maximum(rank + size, 1e-9), 0.0)
    return Changes(changed, lost, gained, severity, changed & was_right & right)


def object_changes(artifact: Sequence[detection.Found], reference: Sequence[detection.Found]) -> Changes:
    """Return the changed images: those with a visible object that has no match on the other side (`detection.pair`).
    More such objects and higher scores are worse."""
    lonely = np.zeros(len(reference))
    for i, (a, b) in enumerate(zip(artifact, reference, strict=True)):
        both = detection.partners(a, b)
        lonely[i] = np.delete(a.scores, both[:, 0]).sum() + np.delete(b.scores, both[:, 1]).sum()
    return judged(lonely > 0, lonely / (1 + lonely))


def pixel_changes(artifact: Iterable[np.ndarray], reference: Iterable[np.ndarray]) -> Changes:
    """Return the changed images: those with more than MOVED_PIXELS of their pixels in another class, from maps or masks
    [height, width]."""
    moved = np.array([float((a != b).mean()) for a, b in zip(artifact, reference, strict=True)])
    return judged(moved > MOVED_PIXELS, moved)


def class_map(cut: PanopticMap) -> npt.NDArray[np.int64]:
    """Return int64 [height, width], the class of every pixel; -1 for no class."""
    known, at = np.unique(cut.ids, return_inverse=True)
    classes = np.array([cut.classes.get(int(each), -1) for each in known], np.int64)
    return np.asarray(classes[at.reshape(cut.ids.shape)])


# --- What is counted of some images, and the same of all of them: exact sums, or a record of each image ---------------


Counts: TypeAlias = agreement.Tally | Records


def joined(counts: Sequence[Counts], places: Sequence[Ints]) -> Counts:
    """Return the counts of all images from several pieces, independent of the order of the pieces.

    Args:
        places: int64, for each image of a piece its index among all images, or any number with the same order.
    """
    records = [count for count in counts if isinstance(count, Records)]
    if records:
        return Records.joined(records, places)
    return functools.reduce(operator.add, (each for each in counts if isinstance(each, agreement.Tally)))

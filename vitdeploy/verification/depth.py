"""Compares the depth of an artifact with the original's, and both with measured depth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import DataError
from vitdeploy.runtime.depth import ALIKE, alike_share
from vitdeploy.spec import DepthValues
from vitdeploy.verification.bootstrap import (
    Floats,
    least_of_difference,
    least_of_share,
    percentile_interval,
    replicates,
)
from vitdeploy.verification.changes import MOVED_PIXELS, Changes, judged
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.records import Records, Table

Plane = npt.NDArray[Any]
# An image counts as right for the least width of an interval if so large a share of its pixels is.
RIGHT_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class DepthComparison(Comparison):
    """A depth model against the original. The metric is delta-1 in percent: of the pixels with a known depth those
    whose depth is not off by more than a factor of 1.25 (arXiv 1406.2283, section 4.2), the mean over the images.

    Relative depth is first aligned with the labels, image by image: scale and shift of the disparity by least squares
    (arXiv 1907.01341, equation 4), then inverted; nothing is farther than the farthest label.

    agreement: percent of the pixels that are alike (within the same factor) in the artifact's map and the original's,
        without any alignment, the mean over the images. All intervals are bootstraps over the images, and none of a
        share is narrower than that of as many independent trials as there are images.
    abs_rel, reference_abs_rel: mean |depth - label| / label, the artifact's and the original's; abs_rel_ci95: of the
        artifact's minus the original's. None without labels.
    """

    abs_rel: float | None = None
    reference_abs_rel: float | None = None
    abs_rel_ci95: tuple[float, float] | None = None


@dataclass(frozen=True)
class DepthError:
    """Of one image: AbsRel, and the share of pixels that are right, 0..1."""

    abs_rel: float
    delta1: float


def compare_depth(
    artifact: Sequence[Plane],
    reference: Sequence[Plane],
    errors: Iterable[tuple[DepthError, DepthError] | None] | None,
    *,
    values: DepthValues,
    max_difference: float,
    seed: int = 0,
) -> DepthComparison:
    """Compare planes [height, width] of the same images, in the same order.

    Args:
        errors: of the artifact and of the original of each image (see `depth_error`), None of an image without a known
            pixel; None without labels.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: other lengths, or no image. DataError: not one labelled pixel in all images.
    """
    return depth_comparison(
        depth_records(artifact, reference, errors, values), max_difference=max_difference, seed=seed
    )


def depth_records(
    artifact: Sequence[Plane],
    reference: Sequence[Plane],
    errors: Iterable[tuple[DepthError, DepthError] | None] | None,
    values: DepthValues,
) -> Records:
    """What `depth_comparison` needs of each image; arguments as of `compare_depth`.

    Tables: images, with the `share` of pixels that are alike, 0..1; with labels, errors: a row for each image with a
    known pixel, `ours` and `theirs` float64 [rows, 2], AbsRel and the share of right pixels.

    Raises:
        ValueError: other lengths, or no image.
    """
    shares = np.array([alike_share(a, b, values) for a, b in zip(artifact, reference, strict=True)], np.float64)
    if not len(shares):
        raise ValueError("no image")
    tables = {"images": Table.each(share=shares)}
    if errors is None:
        return Records(len(shares), tables)
    pairs = [[] if each is None else [[(side.abs_rel, side.delta1) for side in each]] for each in errors]
    sides = [np.array(each, np.float64).reshape(-1, 2, 2) for each in pairs]
    return Records(
        len(shares), {**tables, "errors": Table.of([{"ours": each[:, 0], "theirs": each[:, 1]} for each in sides])}
    )


def depth_comparison(records: Records, *, max_difference: float, seed: int = 0) -> DepthComparison:
    """The comparison that the records of all images are of; arguments and errors as of `compare_depth`."""
    n, shares = records.n, records["images"]["share"]
    agreement = 100 * float(shares.mean())
    drawn = replicates(n, seed, lambda weights: 100 * weights @ shares / n)
    labelled = "errors" in records
    accuracy = _accuracy(records["errors"], n, seed) if labelled else {}
    return DepthComparison(
        n=n,
        metric="delta-1" if labelled else None,
        agreement=agreement,
        agreement_ci95=percentile_interval(agreement, drawn, least_of_share(agreement / 100, n), (0.0, 100.0)),
        agreement_of=f"pixels within a factor of {ALIKE:g} of the original's",
        max_difference=max_difference,
        **accuracy,
    )


def _accuracy(errors: Table, n: int, seed: int) -> dict[str, Any]:
    if not len(errors):
        raise DataError(
            "the labels hold not one pixel of known depth",
            found=f"{n} maps of zeros or of what is no number",
            fix="check the folder of labels, or verify without labels",
        )
    ours, theirs, pairs = errors["ours"], errors["theirs"], len(errors)
    lost, farther = (theirs - ours)[:, 1], (ours - theirs)[:, 0]
    drawn, relative = replicates(
        pairs, seed, lambda weights: np.stack([100 * weights @ lost / pairs, weights @ farther / pairs], axis=1)
    ).T
    drop = 100 * float((theirs - ours)[:, 1].mean())
    least = least_of_difference(theirs[:, 1] >= RIGHT_SHARE, ours[:, 1] >= RIGHT_SHARE)
    return {
        "value": 100 * float(ours[:, 1].mean()),
        "reference_value": 100 * float(theirs[:, 1].mean()),
        "drop": drop,
        "drop_ci95": percentile_interval(drop, drawn, least, (-100.0, 100.0)),
        "abs_rel": float(ours[:, 0].mean()),
        "reference_abs_rel": float(theirs[:, 0].mean()),
        "abs_rel_ci95": tuple(float(each) for each in np.percentile(relative, [2.5, 97.5])),
    }


def depth_error(found: Plane, truth: Plane, values: DepthValues) -> DepthError | None:
    """The errors of one image's map [height, width] against its measured depth, not a number where it is unknown; None
    where it is unknown everywhere."""
    known = np.isfinite(truth) & np.isfinite(found)
    if not known.any():
        return None
    a, b = found[known].astype(np.float64), truth[known].astype(np.float64)
    depth = np.maximum(a, 1e-9) if values == "metric" else aligned_depth(a, b)
    return DepthError(float((np.abs(depth - b) / b).mean()), float((np.maximum(depth / b, b / depth) < ALIKE).mean()))


def aligned_depth(disparity: Floats, truth: Floats) -> Floats:
    """The depth, float64 [n], of disparities [n] that are known up to scale and shift: s d + t with the least squared
    distance from 1 / truth (arXiv 1907.01341, equation 4), inverted; at most the largest of `truth`."""
    wanted = 1 / truth
    centred = disparity - disparity.mean()
    spread = float(centred @ centred)
    scale = float(centred @ wanted) / spread if spread > 0 else 0.0
    aligned = wanted.mean() + scale * centred
    return np.asarray(1 / np.maximum(aligned, wanted.min()))


def depth_changes(artifact: Sequence[Plane], reference: Sequence[Plane], values: DepthValues) -> Changes:
    """Changed images: those with more than MOVED_PIXELS of their pixels not alike."""
    moved = np.array([1 - alike_share(a, b, values) for a, b in zip(artifact, reference, strict=True)])
    return judged(moved > MOVED_PIXELS, moved)

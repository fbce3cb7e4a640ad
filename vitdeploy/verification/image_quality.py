"""Compares an image-to-image model's pictures with the original's, and both with target pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.ndimage import correlate1d

from vitdeploy.runtime.image_to_image import MOST, psnr
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.intervals import wilson

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

# Pictures this near differ by 2.55 of 255 grey levels (RMS), which nobody sees.
NEAR_DB = 40.0
# Of SSIM, as in its paper: the deviation and the size of the window, and the two constants.
SIGMA, WINDOW = 1.5, 11
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


@dataclass(frozen=True, kw_only=True)
class ImageComparison(Comparison):
    """Pictures against the original's. The metric is the mean SSIM with the targets, in percent (100 of equal ones).

    drop has Student's paired interval of the mean over images; so has `psnr_drop`, in decibels.
    agreement: percent of pictures of at least 40 dB with the original's, with its Wilson interval.
    psnr, reference_psnr: mean PSNR with the targets, in decibels; 100 of equal pictures.
    psnr_to_original_mean, psnr_to_original_min: between the artifact's and the original's pictures.
    max_difference: of the pictures, in shares of 255 levels.
    """

    psnr_to_original_mean: float
    psnr_to_original_min: float
    psnr: float | None = None
    reference_psnr: float | None = None
    psnr_drop: float | None = None
    psnr_drop_ci95: tuple[float, float] | None = None


def compare_pictures(
    artifact: Sequence[Pixels], reference: Sequence[Pixels], targets: Sequence[Pixels] | None
) -> ImageComparison:
    """Compare uint8 [height, width, channels] of the artifact, of the original and, where known, the targets.

    Raises:
        ValueError: no picture, or pictures of other shapes.
    """
    n = len(reference)
    sides = (artifact, reference) if targets is None else (artifact, reference, targets)
    if not n or any(len({each.shape for each in row}) > 1 for row in zip(*sides, strict=True)):
        raise ValueError(f"{n} pictures, or pictures of other shapes")
    apart = np.array([psnr(a, b) for a, b in zip(artifact, reference, strict=True)])
    same = int((apart >= NEAR_DB).sum())
    low, high = wilson(same, n)
    worst = max(int(np.abs(a.astype(np.int16) - b).max()) for a, b in zip(artifact, reference, strict=True))
    return ImageComparison(
        n=n,
        agreement=100 * same / n,
        agreement_ci95=(100 * low, 100 * high),
        agreement_of=f"pictures of {NEAR_DB:g} dB or more with the original's",
        max_difference=worst / 255,
        psnr_to_original_mean=float(apart.mean()),
        psnr_to_original_min=float(apart.min()),
        **({"metric": None} if targets is None else _accuracy(artifact, reference, targets)),
    )


def _accuracy(artifact: Sequence[Pixels], reference: Sequence[Pixels], targets: Sequence[Pixels]) -> dict[str, Any]:
    ours, theirs = (
        np.array([(100 * ssim(a, t), psnr(a, t)) for a, t in zip(side, targets, strict=True)])
        for side in (artifact, reference)
    )
    drop, drop_ci95 = mean_with_interval((theirs - ours)[:, 0], 200.0)
    psnr_drop, psnr_drop_ci95 = mean_with_interval((theirs - ours)[:, 1], MOST)
    return {
        "metric": "SSIM",
        "value": float(ours[:, 0].mean()),
        "reference_value": float(theirs[:, 0].mean()),
        "drop": drop,
        "drop_ci95": drop_ci95,
        "psnr": float(ours[:, 1].mean()),
        "reference_psnr": float(theirs[:, 1].mean()),
        "psnr_drop": psnr_drop,
        "psnr_drop_ci95": psnr_drop_ci95,
    }


def mean_with_interval(values: Floats, most: float) -> tuple[float, tuple[float, float]]:
    """The mean of values within -most..most, and its 95 % interval (Student 1908); all that can be of one value."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, (-most, most)
    reach = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return mean, (max(-most, mean - reach), min(most, mean + reach))


def ssim(a: Pixels, b: Pixels) -> float:
    """The structural similarity of two pictures of one shape, sides of 11 pixels and more: -1..1, mean over channels.

    Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", IEEE Transactions on
    Image Processing 13:600-612, equation 13 with its Gaussian window, where that lies within the picture. (For this one
    function scikit-image would be one more package.)
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    mean_x, mean_y = _window(x), _window(y)
    var_x, var_y = _window(x * x) - mean_x**2, _window(y * y) - mean_y**2
    covariance = _window(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    return float((luminance * (2 * covariance + C2) / (var_x + var_y + C2)).mean())


def _window(values: Floats) -> Floats:
    """The weighted mean of the 11x11 pixels around each that has so many."""
    reach = WINDOW // 2
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / SIGMA) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        values = correlate1d(values, weights, axis=axis)
    return values[reach : len(values) - reach, reach : values.shape[1] - reach]

"""Control limits for means over windows of images, from a sample of images that are in order.

A Shewhart chart of several means at once, its limits found by resampling: a window is out of control if any of its
means lies further from the reference's than chance takes the worst of them in all but a share `rate` of windows.

- Means are of numbers that are clipped to within 3 robust standard deviations of the median: a single image, such as
  the one in a hundred that a classifier is unsure of, says little about a window, and a reference that happens to have
  none of these would call others unusual. Source: Huber, "Robust Statistics" (1981), chapter 1: winsorizing.
- Windows of the reference's own images are drawn with replacement, and, as the reference is a sample too, so is the
  reference: both errors count. Sources: Liu and Tang, "Control Charts for Dependent and Independent Measurements Based
  on Bootstrap Methods", JASA 91 (1996), 1694-1700; Efron and Tibshirani, "An Introduction to the Bootstrap" (1993),
  chapter 16.
- Of each drawing the largest deviation in standard errors counts, over all statistics: its quantile is one threshold
  that holds for all of them together, however they depend on each other. Source: Westfall and Young, "Resampling-Based
  Multiple Testing" (1993), the maxT method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from vitdeploy.runtime.monitor_reference import Numbers

DRAWINGS, AT_A_TIME, MANY = 20_000, 500, 4096
SEED = 0
CLIP = 3.0


@dataclass(frozen=True)
class Limits:
    """Of each statistic what it is clipped to, its mean in the reference, the standard error of a window's mean about
    it, and how many of these a mean may be away, `threshold`. Means are of clipped numbers."""

    names: tuple[str, ...]
    least: Numbers
    most: Numbers
    mean: Numbers
    error: Numbers
    threshold: float

    def clipped(self, values: Numbers) -> Numbers:
        """Numbers [..., statistics] within what is believed of a single image."""
        return np.asarray(np.clip(values, self.least, self.most), np.float64)

    def outside(self, means: Numbers) -> list[int]:
        """The statistics that are out of their limits, the furthest first."""
        away = np.abs(means - self.mean) / self.error
        return [int(i) for i in np.argsort(-away) if not away[i] <= self.threshold]

    def bounds(self, index: int) -> tuple[float, float]:
        room = self.threshold * self.error[index]
        return float(self.mean[index] - room), float(self.mean[index] + room)


def control_limits(names: Sequence[str], values: Numbers, floors: Numbers, window: int, rate: float) -> Limits:
    """The limits for means over `window` images.

    Args:
        values: float64 [images, statistics] of the reference.
        floors: [statistics], the least standard deviation that is believed: a statistic that is the same in all
            images of a small reference need not be so in all others.
        rate: of windows of images like the reference's, the share that is out of some limit.
    """
    images, median = len(values), np.median(values, axis=0)
    below, above = np.quantile(values, (0.16, 0.84), axis=0)  # one standard deviation each, of a normal distribution
    room = CLIP * np.maximum((above - below) / 2, floors)
    values = np.clip(values, median - room, median + room)
    mean = values.mean(axis=0)
    deviation = np.maximum(values.std(axis=0, ddof=1), floors)
    error = deviation * np.sqrt(1 / window + 1 / images)
    generator, worst = np.random.default_rng(SEED), []
    centred = (values - mean) / error
    for _ in range(DRAWINGS // AT_A_TIME):
        drawn = _shares(generator, images, window) - _shares(generator, images, images)
        worst.append(np.abs(drawn @ centred).max(axis=1))
    # What a single normal mean would need, where the reference varies less than is believed.
    least = NormalDist().inv_cdf(1 - rate / 2)
    found = max(least, float(np.quantile(np.concatenate(worst), 1 - rate)))
    return Limits(tuple(names), median - room, median + room, mean, error, _student(found, images - 1))


def _student(quantile: float, freedom: int) -> float:
    """A normal quantile as it is where the deviation is estimated, with so many degrees of freedom. Source: Abramowitz
    and Stegun (1964), 26.7.5, the first two terms."""
    return quantile + (quantile**3 + quantile) / (4 * freedom)


def _shares(generator: np.random.Generator, images: int, count: int) -> Numbers:
    """[AT_A_TIME, images]: the share of each image among `count` drawn with replacement."""
    if count > MANY:  # takes as long for any count, which for few is longer
        return np.asarray(generator.multinomial(count, np.full(images, 1 / images), AT_A_TIME) / count, np.float64)
    drawn = generator.integers(0, images, (AT_A_TIME, count)) + images * np.arange(AT_A_TIME)[:, None]
    found = np.bincount(drawn.ravel(), minlength=AT_A_TIME * images).reshape(AT_A_TIME, images)
    return np.asarray(found / count, np.float64)

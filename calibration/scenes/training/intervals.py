"""95 % intervals of metrics: images are resampled, whole, as in vitdeploy's reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from calibration.scenes.training.loop import Metric
from vitdeploy.verification.intervals import draws, least_of_share, percentile_interval

Floats = np.ndarray


def mean_of_images(values: Sequence[Floats], of: str, *, percent: bool = False) -> Metric:
    """The mean over all samples, of an array of samples for each image; `percent` tells it 0..100 and bounds it there.

    A share of right answers gets no narrower an interval than Wilson's of that many independent trials.
    """
    sums = np.array([float(np.sum(each)) for each in values])
    counts = np.array([len(each) for each in values], np.float64)
    scale = 100.0 if percent else 1.0
    weights, value = draws(len(values), seed=0), scale * sums.sum() / counts.sum()
    replicates = scale * (weights @ sums) / (weights @ counts)
    least = least_of_share(value / 100, int(counts.sum())) if percent else (0.0, 0.0)
    low, high = percentile_interval(value, replicates, least, (0.0, 100.0 if percent else np.inf))
    return Metric(value, low, high, int(counts.sum()), of)


def precision(measure: Callable[[Floats], Floats], images: int, objects: int, of: str) -> Metric:
    """A mean average precision in percent. `measure` takes weights [draws, images] and returns shares [draws]."""
    value = 100 * float(measure(np.ones((1, images)))[0])
    least = least_of_share(value / 100, objects)
    low, high = percentile_interval(value, 100 * measure(draws(images, seed=0)), least, (0.0, 100.0))
    return Metric(value, low, high, objects, of)

"""Whether there is a seven in a picture: one logit."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import nn

from calibration.scenes import digits as scenes
from calibration.scenes.training import digits
from calibration.scenes.training.loop import Metric, Recipe, Samples
from vitdeploy.verification.intervals import least_of_share, percentile_interval
from vitdeploy.verification.ranking import auroc, auroc_of_counts, counted, stratified_draws

NAME = "seven"


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """AUROC, in percent."""
    found = digits.logits(model, [each.image for each in samples])[:, 0]
    true = np.array([each.labels[scenes.NAMES.index(NAME)] for each in samples])
    value = 100 * auroc(found, true)
    drawn = 100 * auroc_of_counts(*counted(found, true, stratified_draws(true, 0)))
    least = least_of_share(value / 100, len(samples))
    return {"AUROC": Metric(value, *percentile_interval(value, drawn, least, (0.0, 100.0)), len(samples), "images")}


KIND = dataclasses.replace(
    digits.KIND, recipe=Recipe(8000, 3000, 32, 1e-3), build=lambda: digits.vit((NAME,)), measure=measure
)

"""The cost of each quantizer: the distance on calibration images with one layer in INT8, and all others in float.

Each layer takes one run over the images, with one model that is loaded once (see `switched`). The reverse, everything
in
INT8 but one layer, would measure noise: any change early in a model changes all rounding after it, which moves the
answers of a good INT8 model by more than a layer costs. Errors of single layers are nearly independent, so their costs
nearly add up to the distance of everything in INT8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from vitdeploy.quantization.prepare import Prepared
from vitdeploy.quantization.statistics import describe
from vitdeploy.search.switched import Choice
from vitdeploy.search.trials import Layer, Trials

Progress = Callable[[str, int, int], None]
Distances = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """The cost of INT8 in one layer, or in all that match a pattern: the distance with one of them in INT8, summed over
    them; mean over the images with its 95 % t-interval. `share`: of the sum over all layers."""

    name: str
    layers: int
    distance: float
    ci95: tuple[float, float]
    share: float


@dataclass(frozen=True)
class Guilt:
    """One layer: its cost, its input tensor, and what was folded in front of it.

    `low`, `high`: range of the tensor in the float graph; `median`: of its channels' largest magnitudes; `channel`: the
    one with the largest magnitude; `upper`: about the 99.9th percentile of the magnitudes (None if unknown).
    `folds`: in words.
    """

    cost: Cost
    tensor: str
    low: float
    high: float
    median: float
    channel: int
    upper: float | None
    folds: tuple[str, ...]


@dataclass(frozen=True)
class Sensitivity:
    """`distance`: of everything in INT8, mean over the images, in `unit`; `total`: the costs of all layers added up.
    Layers and groups, the most costly first."""

    target: str
    images: int
    unit: str
    distance: float
    total: float
    layers: tuple[Guilt, ...]
    groups: tuple[Cost, ...]


def measure_sensitivity(
    trials: Trials, target: str, progress: Progress = lambda text, done, total: None
) -> Sensitivity:
    """Measure every layer in INT8, one at a time."""
    text, count = f"sensitivity on {trials.images} images", len(trials.layers)
    found: dict[str, Distances] = {}
    for done, layer in enumerate(trials.layers):
        progress(text, done, count)
        found[layer.name] = trials.only({layer.name: Choice()})
    progress(text, count, count)
    total = float(sum(each.mean() for each in found.values()))
    layers = [_guilt(each, _cost(each.name, found, (each.name,), total), trials.prepared) for each in trials.layers]
    groups = [_cost(name, found, members, total) for name, members in groups_of(list(found)).items()]
    return Sensitivity(
        target,
        trials.images,
        "KL in nats" if trials.reference_outputs.task == "classification" else "relative squared error",
        float(trials.distance({}).mean()),
        total,
        tuple(sorted(layers, key=lambda each: -each.cost.distance)),
        tuple(sorted(groups, key=lambda each: -each.distance)),
    )


def _cost(name: str, found: Mapping[str, Distances], members: Sequence[str], total: float) -> Cost:
    mean, low, high = mean_interval(np.sum([found[each] for each in members], axis=0))
    return Cost(name, len(members), mean, (low, high), mean / total if total > 0 else 0.0)


def mean_interval(values: Distances) -> tuple[float, float, float]:
    """The mean of some values with its 95 % t-interval. For one value, whose interval is unbounded, both bounds are the
    mean."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, mean, mean
    reach = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
    return mean, mean - reach, mean + reach


def groups_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Groups of layers by a pattern that `--ignore` also takes: those of one block ("blocks.3.*"), and those of one
    role in all blocks ("blocks.*.mlp.fc2"). Groups of one layer, or of all, are left out."""
    found: dict[str, list[str]] = {}
    for name in names:
        block = re.match(r"(.*?)\b(\d+)\.", name)
        if block is not None:
            found.setdefault(f"{block[1]}{block[2]}.*", []).append(name)
            found.setdefault(f"{block[1]}*.{name[block.end() :]}", []).append(name)
    return {pattern: tuple(each) for pattern, each in found.items() if 1 < len(each) < len(names)}


def _guilt(layer: Layer, cost: Cost, prepared: Prepared) -> Guilt:
    facts = describe(layer.found)
    words = [fold.what for fold in prepared.folds if layer.name in fold.layers]
    words += [hidden.what for hidden in prepared.hidden if layer.name == hidden.layer]
    upper = facts.upper if math.isfinite(facts.upper) else None
    return Guilt(cost, layer.tensor, facts.low, facts.high, facts.median, facts.channel, upper, tuple(words))

"""Mixed precision: which layers stay in float for a budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from vitdeploy.quantization.prepare import Prepared
from vitdeploy.quantization.statistics import describe
from vitdeploy.search.graphs import Choice
from vitdeploy.search.latency import LatencyTable, Shape
from vitdeploy.search.trials import FLOAT, SCALED, Layer, Mixed, PrecisionOverride, Reached, Taken, Trials, reached_by
from vitdeploy.spec import Budget

# --- The cost of each quantizer ---------------------------------------------------------------------------------------
# the distance on calibration images with one layer in INT8, and all others in float.
#
# Each layer takes one run over the images, with one model that is loaded once (see `switched`). The reverse, everything
# in INT8 but one layer, would measure noise: any change early in a model changes all rounding after it, which moves the
# answers of a good INT8 model by more than a layer costs. Errors of single layers are nearly independent, so their
# costs nearly add up to the distance of everything in INT8.


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


# --- Mixed precision --------------------------------------------------------------------------------------------------
# chooses precision overrides for layers, the most efficient first, until the answers are near enough.
#
# The search is greedy, by how much an override reduces the costs of layers (see `sensitivity`; they add up) per
# measured microsecond. The remaining costs predict the remaining distance and error power, which are measured at the
# end.


# Shares of a range that are tried for the most sensitive layers: clipped, and widened.
SHARES = (0.5, 0.7, 0.85, 1.15)
# The number of most costly layers for which other overrides than float are tried.
MOST_SENSITIVE = 8
# An override that costs nothing counts as this share of all that INT8 saves, so that gains stay comparable.
LEAST_PRICE = 1e-3


def shapes_to_time(trials: Trials) -> list[Shape]:
    """The shapes that `choose_mends` looks up in a latency table."""
    return [shape for layer in trials.layers for shape in (layer.shape, *(_fronts(layer) if layer.scaled else ()))]


def choose_mends(
    trials: Trials,
    sensitivity: Sensitivity,
    table: LatencyTable,
    budget: Budget,
    progress: Progress = lambda text, done, total: None,
) -> Mixed:
    """Choose overrides until the budget is expected to be met; without one, as long as an override removes a larger
    share
    of the costs than of the time that INT8 saves: up to the knee of the Pareto front.

    Args:
        budget: `min_agreement` and `max_drop` are bounds, for a classifier.

    Raises:
        InputError: a shape is not in the table.
    """
    search = _Search(trials, sensitivity, table, budget)
    candidates = [*search.floats(), *search.others(sensitivity, progress)]
    while not search.met():
        candidates = [each for each in candidates if search.usable(each)]
        if not candidates:
            break
        best = max(candidates, key=search.ratio)
        if not search.worth(best):
            break
        search.take(best)
    return search.result()


class _Search:
    """The state of a search."""

    def __init__(self, trials: Trials, sensitivity: Sensitivity, table: LatencyTable, budget: Budget) -> None:
        self.trials, self.table, self.budget = trials, table, budget
        self.layers = {layer.name: layer for layer in trials.layers}
        self.costs = {each.cost.name: each.cost.distance for each in sensitivity.layers}
        self.total = max(sum(self.costs.values()), 1e-300)
        self.prices = {layer.name: table.saved(layer.shape)[0] for layer in trials.layers}
        self.saved = max(sum(max(each, 0.0) for each in self.prices.values()), 1e-300)
        self.choices: dict[str, Choice] = {}
        self.taken: list[Taken] = []
        self.answers = trials.answers({})
        self.int8 = reached_by(self.answers, self.trials.whole)

    def floats(self) -> Iterator[PrecisionOverride]:
        for name in self.costs:
            yield PrecisionOverride("float", name, self.prices[name])

    def others(self, sensitivity: Sensitivity, progress: Progress) -> Iterator[PrecisionOverride]:
        """Other ranges and scaled channels for the most sensitive layers, if their gain is proven on the images."""
        most_sensitive = [self.layers[each.cost.name] for each in sensitivity.layers[:MOST_SENSITIVE]]
        for done, layer in enumerate(most_sensitive):
            progress("other overrides of the most sensitive layers", done, len(most_sensitive))
            if layer.name == layer.readers[0]:  # one tensor has one range
                plain = self.trials.only(dict.fromkeys(layer.readers, Choice()))
                for share in SHARES:
                    clipped = Choice(bounds=layer.bounds.times(share))
                    left = _left(plain, self.trials.only(dict.fromkeys(layer.readers, clipped)))
                    if left is not None:
                        yield PrecisionOverride("clipped", layer.name, 0.0, left, share)
            if layer.scaled is not None:
                plain = self.trials.only({layer.name: Choice()})
                left = _left(plain, self.trials.only({layer.name: Choice(SCALED)}))
                if left is not None:
                    yield PrecisionOverride("scaled", layer.name, self._price_of_scaling(layer), left)
        progress("other overrides of the most sensitive layers", len(most_sensitive), len(most_sensitive))

    def _touched(self, override: PrecisionOverride) -> tuple[str, ...]:
        return self.layers[override.layer].readers if override.kind == "clipped" else (override.layer,)

    def usable(self, override: PrecisionOverride) -> bool:
        """Whether an override is allowed: one per layer in addition to float, and none after float."""
        chosen = [self.choices[name] for name in self._touched(override) if name in self.choices]
        return FLOAT not in chosen if override.kind == "float" else not chosen

    def gain(self, override: PrecisionOverride) -> float:
        return sum(self.costs[name] for name in self._touched(override)) * (1 - override.left)

    def ratio(self, override: PrecisionOverride) -> float:
        return self.gain(override) / max(override.price_us, LEAST_PRICE * self.saved)

    def worth(self, override: PrecisionOverride) -> bool:
        """Whether an override pays for its price: always, if a budget requires it."""
        return self.bounded or self.gain(override) / self.total > override.price_us / self.saved

    def take(self, override: PrecisionOverride) -> None:
        for name in self._touched(override):
            self.costs[name] *= override.left
            if override.kind == "clipped":
                self.choices[name] = Choice(bounds=self.layers[name].bounds.times(override.share or 1.0))
            else:
                self.choices[name] = FLOAT if override.kind == "float" else Choice(SCALED)
        self.taken.append(Taken(override, self._foretold()))

    def _foretold(self) -> Reached:
        """The predicted distance and loss. Errors of layers are nearly independent: their powers add up, and so do
        small distances."""
        share = sum(self.costs.values()) / self.total
        return Reached(self.int8.distance * share, self.trials.whole.expected(self.answers, share))

    @property
    def bounded(self) -> bool:
        budget = self.budget
        return self.int8.expected is not None and (budget.min_agreement, budget.max_drop) != (None, None)

    def met(self) -> bool:
        """Whether the budget is met, by the prediction and then by the measurement."""
        if not self.bounded or not self._meets(self._foretold()):
            return False
        return self._meets(reached_by(self.trials.answers(self.choices), self.trials.whole))

    def _meets(self, reached: Reached) -> bool:
        assert reached.expected is not None
        return reached.expected.meets(self.budget)

    def _price_of_scaling(self, layer: Layer) -> float:
        """The cost of the operators in front of a layer, and of its additional channels."""
        assert layer.scaled is not None
        bare, moved = (self.table.timing(shape, "int8").microseconds for shape in _fronts(layer))
        wider = len(layer.scaled.source) / len(layer.scaled.scale) - 1
        return max(moved - bare, 0.0) + wider * bare

    def result(self) -> Mixed:
        reached = reached_by(self.trials.answers(self.choices), self.trials.whole)
        return Mixed(
            self.table.target,
            len(self.trials.whole.pixels),
            self.int8,
            reached,
            self.saved,
            tuple(self.taken),
            self._meets(reached) if self.bounded else None,
        )


def _left(before: np.ndarray, after: np.ndarray) -> float | None:
    """The share of a cost that remains; None if the gain is not proven (95 % t-interval over the images)."""
    _, low, _ = mean_interval(before - after)
    return float(after.mean() / before.mean()) if low > 0 else None


def _fronts(layer: Layer) -> tuple[Shape, Shape]:
    """The layer behind an activation, without and with the operators that scale its channels."""
    return replace(layer.shape, front=("Gelu",)), replace(layer.shape, front=("Gelu", "Mul", "Add"))


# --- Which input channels of a linear can go, and what the others make up for -----------------------------------------
# second-order saliency and least squares.
#
# For y = x W + b with the covariance C of x, the best y from the channels K alone has the weight and bias
#
#     V = (C_KK)^-1 C_K: W        b + m W - m_K V        m: the mean of x
#
# and the mean squared error that is left is, for the channels S that go, tr(W_S^T ((C^-1)_SS)^-1 W_S): the saliency of
# the Optimal Brain Surgeon (Hassibi and Stork 1993, equation 5) for a whole structure (Optimal BERT Surgeon, arXiv
# 2203.07259, equation 3; SlimGPT, arXiv 2412.18110; ZipLM, arXiv 2302.04089). Structures go one by one, the cheapest
# first, and C^-1 and W are brought up to date for those that are left.


Numbers = npt.NDArray[np.float64]
Weight = npt.NDArray[np.floating]

# Of the mean variance: added to each, so that channels that others determine do not take weights without bound.
DAMPING = 0.01
# Channels that go before the inverse is brought up to date as a whole.
BLOCK = 64
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Moments:
    """Moments of the input of a linear over `rows` of it: `mean` [in], `covariance` [in, in], centred."""

    mean: Numbers
    covariance: Numbers
    rows: int

    @property
    def damped(self) -> Numbers:
        power = float(np.diag(self.covariance).mean())
        return np.asarray(self.covariance + DAMPING * max(power, TINY) * np.eye(len(self.mean)))


def removal_order(moments: Moments, weight: Weight, structures: npt.NDArray[np.int64]) -> list[int]:
    """The numbers of the structures in the order in which they go, all but the last one.

    Args:
        weight: [in, out].
        structures: the input channels of each, [structures, channels of each].
    """
    inverse = np.asarray(np.linalg.inv(moments.damped), np.float64)
    single = structures.shape[1] == 1
    return _channels(inverse, weight, structures[:, 0]) if single else _blocks(inverse, weight, structures)


def compensated(
    moments: Moments, weight: Weight, bias: Weight | None, kept: npt.NDArray[np.int64]
) -> tuple[Numbers, Numbers]:
    """(weight [kept, out], bias [out]) of the linear that reads the channels `kept` alone and errs least.

    The damping pulls towards the weights as they were: where it is all, nothing changes but the bias.
    """
    damped, old = moments.damped, weight.astype(np.float64)
    new = np.asarray(np.linalg.solve(damped[np.ix_(kept, kept)], damped[kept] @ old), np.float64)
    moved = moments.mean @ old - moments.mean[kept] @ new
    return new, moved if bias is None else bias + moved


def _blocks(inverse: Numbers, weight: Weight, structures: npt.NDArray[np.int64]) -> list[int]:
    weight, left, order = weight.astype(np.float64), list(range(len(structures))), list[int]()
    while len(left) > 1:
        costs = []
        for each in left:
            own = structures[each]
            costs.append(float(np.sum(weight[own] * np.linalg.solve(inverse[np.ix_(own, own)], weight[own]))))
        gone = left.pop(int(np.argmin(costs)))
        order.append(gone)
        own = structures[gone]
        spread = np.linalg.solve(inverse[np.ix_(own, own)], inverse[own]).T
        weight = weight - spread @ weight[own]
        inverse = inverse - spread @ inverse[own]
    return order


def _channels(inverse: Numbers, weight: Weight, channels: npt.NDArray[np.int64]) -> list[int]:
    """The same of single channels, at the cost of one product of matrices for BLOCK of them.

    Within a block of removals C^-1 and W stay as they are; `spread` and `taken` hold what is to be taken off them:
    C^-1 - spread spread^T and W - spread taken.
    """
    inverse, weight = inverse[np.ix_(channels, channels)], weight[channels].astype(np.float64)
    left, order = np.arange(len(channels)), list[int]()
    while len(left) > 1:
        block = min(BLOCK, len(left) - 1)
        spread, taken = np.zeros((len(left), block)), np.zeros((block, weight.shape[1]))
        diagonal, squares = np.diag(inverse).copy(), np.einsum("ij,ij->i", weight, weight)
        alive = np.ones(len(left), bool)
        for i in range(block):
            gone = int(np.where(alive, squares / np.where(alive, diagonal, 1), np.inf).argmin())
            column = inverse[:, gone] - spread[:, :i] @ spread[gone, :i]
            row = weight[gone] - spread[gone, :i] @ taken[:i]
            root = np.sqrt(column[gone])
            spread[:, i], taken[i] = column / root, row / root
            share = column / column[gone]
            product = weight @ row - spread[:, :i] @ (taken[:i] @ row)
            squares = np.maximum(squares - 2 * share * product + share**2 * (row @ row), 0)
            diagonal = diagonal - spread[:, i] ** 2
            alive[gone] = False
            order.append(int(left[gone]))
        stays = np.flatnonzero(alive)
        inverse = inverse[np.ix_(stays, stays)] - spread[stays] @ spread[stays].T
        weight, left = weight[stays] - spread[stays] @ taken, left[stays]
    return order

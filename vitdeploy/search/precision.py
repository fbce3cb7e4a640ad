"""Choose the precision of layers: the cost of INT8 in each, and overrides for a budget or by their worth."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement import DYNAMIC, IN_FLOAT, HigherForm, LayerPrecision
from vitdeploy.quantization.prepare import Prepared
from vitdeploy.search import costs, frame, graphs
from vitdeploy.search.trials import FLOAT, SCALED, TrialLayer, Trials
from vitdeploy.spec import Budget, FloatRest

# --- The cost of each quantizer ---------------------------------------------------------------------------------------
# The distance on calibration images with one layer in INT8, and all others in float.
#
# A backward pass estimates it for all layers (see `gradients`). A layer that no gradient reaches takes a run over the
# images, with a model that is loaded once (see `graphs.SwitchedRunner`). The reverse, everything in INT8 except one
# layer, would measure noise: any change early in a model changes all later rounding, which moves the answers of a good
# INT8 model by more than the cost of a layer. Errors of single layers are nearly independent, so their costs nearly add
# up to the distance of everything in INT8.


@dataclass(frozen=True)
class Cost:
    """The cost of INT8 in one layer, or in all layers that match a pattern: the distance with one of them in INT8,
    summed over them; mean over the images with its 95 % t-interval. `share`: the share of the sum over all layers."""

    name: str
    layers: int
    distance: float
    ci95: tuple[float, float]
    share: float


@dataclass(frozen=True)
class Guilt:
    """One layer: its cost, its input tensor, and the folds before it.

    `low`, `high`: range of the tensor in the float graph; `median`: the median of its channels' largest magnitudes;
    `channel`: the one with the largest magnitude; `upper`: about the 99.9th percentile of the magnitudes (None if
    unknown). `folds`: descriptions.
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
    """`distance`: with everything in INT8, mean over the images, in `unit`; `total`: the sum of the costs of all
    layers. Layers and groups, the most costly first. `impassable`: operators that no gradient passes; the layers before
    them were measured one by one."""

    target: str
    images: int
    unit: str
    distance: float
    total: float
    layers: tuple[Guilt, ...]
    groups: tuple[Cost, ...]
    impassable: tuple[str, ...] = ()


def measure_sensitivity(trials: Trials, target: str, progress: Progress = silent) -> Sensitivity:
    """Estimate the cost of INT8 in every layer; measure layers that no gradient reaches one by one."""
    distances, impassable = trials.estimated(progress)
    others = [layer for layer in trials.layers if layer.name not in distances]
    if others:
        for layer in frame.counted(others, f"layers before {', '.join(impassable)}", progress):
            distances[layer.name] = trials.only({layer.name: graphs.LayerChoice()})
    found = {layer.name: distances[layer.name] for layer in trials.layers}
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
        impassable,
    )


def _cost(name: str, found: Mapping[str, frame.Distances], members: Sequence[str], total: float) -> Cost:
    mean, low, high = frame.mean_interval(np.sum([found[member] for member in members], axis=0))
    return Cost(name, len(members), mean, (low, high), mean / total if total > 0 else 0.0)


def groups_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Groups of layers by a pattern that `--ignore` also accepts: those of one block ("blocks.3.*"), and those of one
    role in all blocks ("blocks.*.mlp.fc2"). Groups of one layer, or of all layers, are omitted."""
    found: dict[str, list[str]] = {}
    for name in names:
        block = re.match(r"(.*?)\b(\d+)\.", name)
        if block is not None:
            found.setdefault(f"{block[1]}{block[2]}.*", []).append(name)
            found.setdefault(f"{block[1]}*.{name[block.end() :]}", []).append(name)
    return {pattern: tuple(each) for pattern, each in found.items() if 1 < len(each) < len(names)}


def _guilt(layer: TrialLayer, cost: Cost, prepared: Prepared) -> Guilt:
    found, reach = layer.found, layer.found.reach
    words = [fold.what for fold in prepared.folds if layer.name in fold.layers]
    words += [hidden.what for hidden in prepared.hidden if layer.name == hidden.layer]
    bounds, median = (float(found.low.min()), float(found.high.max())), float(np.median(reach))
    upper = found.upper if math.isfinite(found.upper) else None
    return Guilt(cost, layer.tensor, *bounds, median, int(reach.argmax()), upper, tuple(words))


# --- Mixed precision: its result --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrecisionOverride:
    """One layer's override. `share`: the share of its range, if that is clipped; `price_us`: the added latency of one
    image (negative: faster); `left`: the share of the layer's cost that remains."""

    kind: Literal["clipped", "scaled", "float"]
    layer: str
    price_us: float
    left: float = 0.0
    share: float | None = None

    def __str__(self) -> str:
        return {
            "float": f"{self.layer} in float",
            "scaled": f"{self.layer}: hidden channels scaled",
            "clipped": f"{self.layer}: {100 * (self.share or 1):.0f} % of its range",
        }[self.kind]

    @property
    def precision(self) -> LayerPrecision:
        if self.kind == "float":
            return LayerPrecision(self.layer, "float", IN_FLOAT)
        return LayerPrecision(self.layer, "int8", str(self), scaled=self.kind == "scaled", clip=self.share)


@dataclass(frozen=True)
class Taken:
    """A chosen override, and its predicted result."""

    override: PrecisionOverride
    reached: frame.Reached


@dataclass(frozen=True)
class Mixed:
    """`int8`, `reached`: measured without and with all overrides; `saved_us`: the time that INT8 saves over all layers,
    by the costs of `table`; `met`: whether the budget's bounds are expected to be met, None without bounds."""

    target: str
    images: int
    int8: frame.Reached
    reached: frame.Reached
    saved_us: float
    taken: tuple[Taken, ...]
    met: bool | None
    table: str = ""

    @property
    def precisions(self) -> tuple[LayerPrecision, ...]:
        """The precisions of layers with an override; float replaces another override."""
        every = [each.override.precision for each in self.taken]
        return tuple({each.layer: each for each in sorted(every, key=lambda each: each.precision == "float")}.values())


# --- Mixed precision: the search -------------------------------------------------------------------------------------
# Chooses precision overrides for layers, the most efficient first, until the answers are close enough.
#
# The search is greedy, by the reduction of layer costs (which add up, see above) per microsecond of an override, by a
# cost table. The remaining costs predict the remaining distance and error power, which are measured at the end.


# Shares of a range to try for the most sensitive layers: clipped, and widened.
RANGE_SHARES = (0.5, 0.7, 0.85, 1.15)
# The number of most costly layers that are tried with overrides other than float.
MOST_SENSITIVE = 8
# An override that costs nothing counts as this share of all that INT8 saves, so that gains stay comparable.
LEAST_PRICE = 1e-3


def choose_mends(
    trials: Trials,
    sensitivity: Sensitivity,
    table: costs.CostTable,
    budget: Budget,
    progress: Progress = silent,
) -> Mixed:
    """Choose overrides until the budget is expected to be met; without bounds, while an override removes a larger share
    of the costs than of the time that INT8 saves: up to the knee of the Pareto front.

    Args:
        budget: its `min_agreement` and `max_drop` are bounds, for a classifier.
    """
    search = _Search(trials, sensitivity, table, budget)
    candidates = [*search.floats(), *search.others(sensitivity, progress)]
    while not search.met():
        candidates = [candidate for candidate in candidates if search.usable(candidate)]
        if not candidates:
            break
        best = max(candidates, key=search.ratio)
        if not search.worth(best):
            break
        search.take(best)
    return search.result()


class _Search:
    """The state of a search."""

    def __init__(self, trials: Trials, sensitivity: Sensitivity, table: costs.CostTable, budget: Budget) -> None:
        self.trials, self.table, self.budget = trials, table, budget
        self.layers = {layer.name: layer for layer in trials.layers}
        self.costs = {each.cost.name: each.cost.distance for each in sensitivity.layers}
        self.total = max(sum(self.costs.values()), 1e-300)
        self.prices = {layer.name: table.saved(layer.shape) / 1e3 for layer in trials.layers}
        self.saved = max(sum(max(price, 0.0) for price in self.prices.values()), 1e-300)
        self.choices: dict[str, graphs.LayerChoice] = {}
        self.taken: list[Taken] = []
        self.answers = trials.answers({})
        self.int8 = trials.whole.reached(self.answers)

    def floats(self) -> Iterator[PrecisionOverride]:
        for name in self.costs:
            yield PrecisionOverride("float", name, self.prices[name])

    def others(self, sensitivity: Sensitivity, progress: Progress) -> Iterator[PrecisionOverride]:
        """Other ranges and scaled channels for the most sensitive layers, if the images prove a gain."""
        most_sensitive = [self.layers[each.cost.name] for each in sensitivity.layers[:MOST_SENSITIVE]]
        for layer in frame.counted(most_sensitive, "other overrides of the most sensitive layers", progress):
            if layer.name == layer.readers[0]:  # one tensor has one range
                plain = self.trials.only(dict.fromkeys(layer.readers, graphs.LayerChoice()))
                for share in RANGE_SHARES:
                    clipped = graphs.LayerChoice(bounds=layer.bounds.times(share))
                    left = _left(plain, self.trials.only(dict.fromkeys(layer.readers, clipped)))
                    if left is not None:
                        yield PrecisionOverride("clipped", layer.name, 0.0, left, share)
            if layer.scaled is not None:
                plain = self.trials.only({layer.name: graphs.LayerChoice()})
                left = _left(plain, self.trials.only({layer.name: graphs.LayerChoice(SCALED)}))
                if left is not None:
                    yield PrecisionOverride("scaled", layer.name, self._price_of_scaling(layer), left)

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
        """Whether an override is worth its price: always, if a budget requires it."""
        return self.bounded or self.gain(override) / self.total > override.price_us / self.saved

    def take(self, override: PrecisionOverride) -> None:
        for name in self._touched(override):
            self.costs[name] *= override.left
            if override.kind == "clipped":
                self.choices[name] = graphs.LayerChoice(bounds=self.layers[name].bounds.times(override.share or 1.0))
            else:
                self.choices[name] = FLOAT if override.kind == "float" else graphs.LayerChoice(SCALED)
        self.taken.append(Taken(override, self._predicted()))

    def _predicted(self) -> frame.Reached:
        """The predicted distance and loss. Errors of layers are nearly independent: their powers add up, and so do
        small distances."""
        share = sum(self.costs.values()) / self.total
        return frame.Reached(self.int8.distance * share, self.trials.whole.expected(self.answers, share))

    @property
    def bounded(self) -> bool:
        budget = self.budget
        return self.int8.expected is not None and (budget.min_agreement, budget.max_drop) != (None, None)

    def met(self) -> bool:
        """Whether the budget is met, by the prediction and then by the measurement."""
        if not self.bounded or not self._meets(self._predicted()):
            return False
        return self._meets(self.trials.whole.reached(self.trials.answers(self.choices)))

    def _meets(self, reached: frame.Reached) -> bool:
        assert reached.expected is not None
        return reached.expected.meets(self.budget)

    def _price_of_scaling(self, layer: TrialLayer) -> float:
        """The cost of the operators before a layer, and of its additional channels, in microseconds."""
        assert layer.scaled is not None
        channels, added = len(layer.scaled.source), len(layer.scaled.source) / len(layer.scaled.scale) - 1
        scaling = self.table.scaling * layer.shape.rows * channels
        return (scaling + added * self.table.layer(layer.shape, "int8")) / 1e3

    def result(self) -> Mixed:
        reached = self.trials.whole.reached(self.trials.answers(self.choices))
        return Mixed(
            self.table.target,
            len(self.trials.whole.pixels),
            self.int8,
            reached,
            self.saved,
            tuple(self.taken),
            self._meets(reached) if self.bounded else None,
            str(self.table),
        )


def _left(before: np.ndarray, after: np.ndarray) -> float | None:
    """The share of a cost that remains; None without a proven gain (95 % t-interval over the images)."""
    _, low, _ = frame.mean_interval(before - after)
    return float(after.mean() / before.mean()) if low > 0 else None


# --- Keep layers in higher precision whose INT8 costs much accuracy and saves little time ----------------------------


# The expected agreement, in percent, at which no further layer is changed.
ENOUGH = 99.5


@dataclass(frozen=True)
class HighPrecision:
    """The layers kept in higher precision, in `form`: "dynamic" (INT8 weights, and activations that the runtime
    quantizes) or "float".

    `price`: the maximum that they may add to the latency at `batch`, in percent. `int8`, `reached`: the results without
    and with them, on the calibration images. `ratio`: the latency with them divided by that of plain INT8, predicted by
    the costs of `table`. `why`: the reason for the choice.
    """

    target: str
    form: HigherForm
    price: float
    batch: int
    images: int
    table: str
    why: str
    int8: frame.Reached | None = None
    reached: frame.Reached | None = None
    ratio: float = 1.0
    layers: tuple[str, ...] = ()

    @property
    def precisions(self) -> tuple[LayerPrecision, ...]:
        return in_higher_precision(self.layers, self.form, self.why)


def in_higher_precision(layers: Sequence[str], form: HigherForm, why: str = "") -> tuple[LayerPrecision, ...]:
    """The precisions of layers kept in higher precision, with the evidence of a search."""
    reason = DYNAMIC if form == "dynamic" else IN_FLOAT
    return tuple(LayerPrecision(layer, form, reason, why) for layer in layers)


def layers_by_worth(
    sensitivity: Sensitivity, added: Mapping[str, float], most: float, enough: Callable[[float], bool]
) -> tuple[tuple[str, ...], float]:
    """The layers to keep in higher precision, and the added time: layers with the largest distance per time first,
    until the remaining distance is `enough`; no layer whose share of the distance is below its share of the time.

    Args:
        added: the time that the other form adds to a layer (negative: it is faster); layers not in it stay in INT8.
        most: the maximum added time.
        enough: whether this share of the distance may remain.
    """
    shares = {layer.cost.name: max(layer.cost.share, 0.0) for layer in sensitivity.layers if layer.cost.name in added}
    every, total = sum(max(added[name], 0.0) for name in shares), sum(shares.values())
    taken, spent, left = list[str](), 0.0, 1.0
    for name in sorted(shares, key=lambda name: (-shares[name] / max(added[name], 1e-9 * most), name)):
        if enough(left):
            break
        if shares[name] * every <= added[name] * total or spent + added[name] > most:
            continue
        taken.append(name)
        spent, left = spent + added[name], left - shares[name]
    return tuple(taken), spent


# --- The precision of an INT8 engine's float operators: fp32, or bf16 if that is faster -------------------------------


# A share of the distance of INT8. With enough images any rounding is provably farther; the layers in higher precision,
# which are chosen later, recover more than this for less time than bf16 saves.
MOST_FURTHER = 0.2
RESTS: tuple[FloatRest, FloatRest] = ("fp32", "bf16")


@dataclass(frozen=True)
class FloatRestChoice:
    """The evidence for float operators of an INT8 placement in fp32 or bf16.

    `ratio`: the latency with bf16 divided by that with fp32, predicted by the costs of `table`. `distances`: the mean
    distances of fp32 and of bf16 from the float graph's answers on the calibration images; `further`: the bounds of the
    95 % interval of their difference.
    """

    target: str
    batch: int
    table: str
    ratio: float
    distances: tuple[float, float] = (0.0, 0.0)
    further: tuple[float, float] = (0.0, 0.0)

    @property
    def best(self) -> FloatRest:
        """bf16 if it is faster and not provably farther from the float graph by more than `MOST_FURTHER`."""
        return "bf16" if self.ratio < 1 and self.further[0] <= MOST_FURTHER * self.distances[0] else "fp32"


def choose_float_rest(
    placed: ir.Model,
    table: costs.CostTable,
    batch: int,
    ratio: float,
    reference_outputs: frame.ReferenceOutputs,
    progress: Progress = silent,
) -> FloatRestChoice:
    """Run a placed INT8 graph with its float operators in fp32 and in bf16 on the images of the reference outputs.
    `ratio`: the ratio of the latencies, by the table.

    Raises:
        EngineError, CapabilityError: as `compile_engine`.
    """
    plain, half = (
        reference_outputs.distance(frame.answers_of(placed, table.target, "int8", reference_outputs, rest))
        for rest in frame.counted(RESTS, f"float operators in bf16 for {table.target}", progress)
    )
    _, *further = frame.mean_interval(half - plain)
    distances = float(plain.mean()), float(half.mean())
    return FloatRestChoice(table.target, batch, str(table), ratio, distances, (further[0], further[1]))

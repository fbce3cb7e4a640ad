"""Mixed precision: chooses precision overrides for layers, the most efficient first, until the answers are near enough.

The search is greedy, by how much an override reduces the costs of layers (see `sensitivity`; they add up) per measured
microsecond. The remaining costs predict the remaining distance and error power, which are measured at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from vitdeploy.search.latency import LatencyTable
from vitdeploy.search.layer_graph import Shape
from vitdeploy.search.overrides import Mixed, PrecisionOverride, Reached, Taken
from vitdeploy.search.sensitivity import Sensitivity, mean_interval
from vitdeploy.search.switched import Choice
from vitdeploy.search.trials import FLOAT, SCALED, Layer, Trials, reached_by
from vitdeploy.spec import Budget

# Shares of a range that are tried for the most sensitive layers: clipped, and widened.
SHARES = (0.5, 0.7, 0.85, 1.15)
# The number of most costly layers for which other overrides than float are tried.
MOST_SENSITIVE = 8
# An override that costs nothing counts as this share of all that INT8 saves, so that gains stay comparable.
LEAST_PRICE = 1e-3

Progress = Callable[[str, int, int], None]


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

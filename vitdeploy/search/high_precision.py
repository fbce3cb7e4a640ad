"""Layers and float operators of an INT8 engine in another precision, by times and errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement import DYNAMIC, IN_FLOAT, HigherForm, LayerPrecision
from vitdeploy.search.frame import GraphVariant, Measurement, VariantTiming, mean_interval, measure, measured_here
from vitdeploy.search.mixed import Sensitivity
from vitdeploy.search.reference import Expected, Reached, ReferenceOutputs
from vitdeploy.spec import FloatRest

# --- The result of a search for layers that are taken out of plain INT8, and what it measured -------------------------


@dataclass(frozen=True, kw_only=True)
class Rung(VariantTiming):
    """One set of layers out of plain INT8, and its time against that of plain INT8. `share`: of all MACs. `reached`: on
    the calibration images, by the engine itself."""

    layers: tuple[str, ...]
    share: float
    reached: Reached


@dataclass(frozen=True, kw_only=True)
class HighPrecision(Measurement):
    """What was measured of layers out of plain INT8, and which of them are: `layers`, in `form`.

    `form`: "dynamic" (INT8 weights, and activations that the runtime quantizes) or "float". `price`: the most that they
    may add to the latency, in percent. `int8`: without any, on the calibration images. `rungs`: of more and more
    layers. `why`: what decided. Of disturbed times only the first rung may be taken.
    """

    form: HigherForm
    price: float
    images: int
    why: str
    int8: Reached | None = None
    rungs: tuple[Rung, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def precisions(self) -> tuple[LayerPrecision, ...]:
        return in_higher_precision(self.layers, self.form, self.why)


def in_higher_precision(layers: Sequence[str], form: HigherForm, why: str = "") -> tuple[LayerPrecision, ...]:
    """Layers out of plain INT8, and what a search measured of them."""
    reason = DYNAMIC if form == "dynamic" else IN_FLOAT
    return tuple(LayerPrecision(layer, form, reason, why) for layer in layers)


# --- Layers whose INT8 costs much and saves little: which to take out of plain INT8, and in which form ----------------


# Of all MACs of linears and convolutions, at most this share is left out of INT8 where no latency can be measured.
MACS_SHARE = 0.1
# Shares that are tried where it can be, by the form: float takes several times as long as INT8; INT8 whose activations
# the runtime quantizes 1.2 to 1.5 times.
SHARES: dict[str, tuple[float, ...]] = {"dynamic": (0.1, 0.2, 0.35), "float": (0.03, 0.06, 0.1)}
# Where engines compute float operators in bf16: layers out of plain INT8 are then products in bf16 of INT8 weights.
HALF_SHARES = (0.1, 0.2, 0.35, 0.6, 1.0)
# A layer with operators in front that only INT8 needs (`channel_split`) is left for a part of its price: they go too.
SPLIT_PRICE = 1 / 3
# Expected agreement, in percent, from which on nothing more is bought.
ENOUGH = 99.0


def high_precision_layers(
    model: ir.Model,
    costs: Sensitivity,
    share: float = MACS_SHARE,
    *,
    cheaper: Collection[str] = (),
    allowed: Collection[str] | None = None,
) -> list[str]:
    """The layers that cost most for their MACs, up to a share of all MACs; only those whose share of the costs exceeds
    their share of the MACs.

    Args:
        model: the float graph that the costs are of.
        share: of the MACs of all linears and convolutions.
        cheaper: layers whose price is `SPLIT_PRICE` of that of their MACs.
        allowed: only these; None: any.
    """
    macs = {linear.name: layer_macs(model, linear) or 0 for linear in find_linears(model)}
    total, taken, chosen = max(sum(macs.values()), 1), 0, []
    price = {name: max(count * (SPLIT_PRICE if name in cheaper else 1), 1) for name, count in macs.items()}
    for each in sorted(costs.layers, key=lambda each: each.cost.share / price[each.cost.name], reverse=True):
        name = each.cost.name
        if each.cost.share <= price[name] / total:
            break
        if taken + macs[name] <= share * total and (allowed is None or name in allowed):
            taken += macs[name]
            chosen.append(name)
    return chosen


def ladder(
    model: ir.Model,
    costs: Sensitivity,
    form: HigherForm,
    cheaper: Collection[str] = (),
    kept: Collection[str] = (),
    shares: Sequence[float] = (),
) -> list[tuple[tuple[str, ...], float]]:
    """Sets of layers for each of the `shares`, by default the form's, and their share of the MACs; without empty and
    equal ones.

    Args:
        model, cheaper: as in `high_precision_layers`.
        kept: layers that stay in plain INT8, where the form is "dynamic".
    """
    linears = find_linears(model)
    macs = {linear.name: layer_macs(model, linear) or 0 for linear in linears}
    allowed = {linear.name for linear in linears if linear.name not in kept} if form == "dynamic" else None
    discount = cheaper if form == "dynamic" else ()
    found = [
        tuple(high_precision_layers(model, costs, share, cheaper=discount, allowed=allowed))
        for share in shares or SHARES[form]
    ]
    total = max(sum(macs.values()), 1)
    return [(layers, sum(macs[name] for name in layers) / total) for layers in dict.fromkeys(found) if layers]


def choose_rung(int8: Reached, rungs: Sequence[Rung], price: float, disturbed: str) -> tuple[tuple[str, ...], str]:
    """The layers of the rung to take, none for plain INT8, and why.

    Of those within the price it is the first that is expected to keep `ENOUGH` of the answers, else the one that is
    nearest to the float graph, if it is nearer than plain INT8. Where times are unreliable only the first may be taken.
    """
    most = 1 + price / 100
    within = [rung for rung in rungs if rung.ratio <= most]
    if disturbed:
        within = list(rungs[:1])
    nearer = [rung for rung in within if rung.reached.distance < int8.distance]
    if not nearer:
        dear = f"all add more than {price:g} % to the latency" if not within else "none brings the answers nearer"
        return (), f"of {len(rungs)} sets of layers {dear}"
    enough = [rung for rung in nearer if _agreement(rung.reached.expected) >= ENOUGH]
    best = enough[0] if enough else min(nearer, key=lambda rung: rung.reached.distance)
    distance = f"the distance falls from {int8.distance:.2g} to {best.reached.distance:.2g}"
    if disturbed:
        return best.layers, f"{distance}; the times are unreliable ({disturbed}), so only the fewest layers were taken"
    return best.layers, f"{distance} for {best.ratio:.2f} [{best.low:.2f}, {best.high:.2f}] of the latency"


def _agreement(expected: Expected | None) -> float:
    return expected.agreement if expected is not None else 0.0


# --- The precision of an INT8 engine's float operators: fp32, or bf16 where that is measured to be faster -------------


# Of the distance that INT8 has. With enough images any rounding is surely further; layers out of plain INT8, which are
# chosen after it, take back more than this for less time than bf16 saves.
MOST_FURTHER = 0.2
RESTS: tuple[FloatRest, FloatRest] = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class FloatRestTable(Measurement):
    """What was measured of an INT8 placement with its float operators in fp32 and in bf16.

    `ratio`, `low`, `high`: the latency with bf16 over that with fp32, with its 95 % interval. `distances`: mean, of the
    answers of fp32 and of bf16 from the float graph's on the calibration images; `further`: the bounds of the 95 %
    interval of how much further those of bf16 are. Without a measurement `reason` says why.
    """

    batch: int
    reason: str = ""
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    distances: tuple[float, float] = (0.0, 0.0)
    further: tuple[float, float] = (0.0, 0.0)

    @property
    def best(self) -> FloatRest:
        """bf16 if it is surely faster and not surely further from the float graph by more than `MOST_FURTHER`."""
        faster = not self.reason and not self.disturbed and self.high < 1
        return "bf16" if faster and self.further[0] <= MOST_FURTHER * self.distances[0] else "fp32"


def measure_float_rest(
    write: Callable[[Path], Path],
    target: str,
    batch: int,
    reference_outputs: ReferenceOutputs,
    progress: Progress = silent,
) -> FloatRestTable:
    """Time the placed INT8 graph that `write` puts into a folder, with its float operators in fp32 and in bf16, and run
    both on the images of the reference outputs. Raises what `measure` does."""
    variants = [GraphVariant(rest, write, rest) for rest in RESTS]
    texts = f"float operators in bf16 for {target}", "time bf16 against fp32"
    (plain, half), disturbed = measure(variants, target, batch, texts, progress, reference_outputs=reference_outputs)
    _, *further = mean_interval(half.distances - plain.distances)
    return FloatRestTable(
        **measured_here(target),
        batch=batch,
        ratio=half.timing.ratio,
        low=half.timing.low,
        high=half.timing.high,
        distances=(float(plain.distances.mean()), float(half.distances.mean())),
        further=(further[0], further[1]),
        disturbed=disturbed,
    )

"""Layers whose INT8 costs much and saves little: which to take out of plain INT8, and in which form."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from vitdeploy.graph.analysis.linears import find_linears
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.search.expected import Expected
from vitdeploy.search.overrides import Reached
from vitdeploy.search.raised import Form, Rung
from vitdeploy.search.sensitivity import Sensitivity

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
    form: Form,
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

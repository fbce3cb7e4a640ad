"""Layers whose INT8 costs much and saves little: what to leave in half precision if no latency can be measured."""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.analysis.linears import find_linears
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.search.sensitivity import Sensitivity

# Of all MACs of linears and convolutions, at most this share is left out of INT8.
MACS_SHARE = 0.1


def high_precision_layers(model: ir.Model, costs: Sensitivity) -> list[str]:
    """The layers that cost most for their MACs, up to `MACS_SHARE` of all MACs; only those whose share of the costs
    exceeds their share of the MACs.

    Args:
        model: the float graph that the costs are of.
    """
    macs = {linear.name: layer_macs(model, linear) or 0 for linear in find_linears(model)}
    total, taken, kept_float = max(sum(macs.values()), 1), 0, []
    by_price = sorted(costs.layers, key=lambda each: each.cost.share / max(macs[each.cost.name], 1), reverse=True)
    for each in by_price:
        name = each.cost.name
        if each.cost.share <= macs[name] / total:
            break
        if taken + macs[name] <= MACS_SHARE * total:
            taken += macs[name]
            kept_float.append(name)
    return kept_float

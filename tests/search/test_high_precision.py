"""Which layers are taken out of plain INT8: those that cost most for their products, and only so many."""

import re

import pytest

from tests.graph.small_graphs import Builder
from vitdeploy.search.frame import Expected, Reached
from vitdeploy.search.precision import (
    MACS_SHARE,
    Cost,
    Guilt,
    Rung,
    Sensitivity,
    choose_rung,
    high_precision_layers,
    ladder,
)

WIDTHS = {"small": 2, "sensitive": 8, "large": 100, "harmless": 20, "other": 70}


def costs(**shares):
    layers = [
        Guilt(Cost(name, 1, share, (share, share), share), "x", -1.0, 1.0, 0.5, 0, None, ())
        for name, share in shares.items()
    ]
    return Sensitivity("tensorrt", 32, "KL, nats", 1.0, 1.0, tuple(layers), ())


def model():
    b = Builder()
    outputs = [b.linear("x", 10, width, name) for name, width in WIDTHS.items()]
    return b.model({"x": ["batch", 10]}, *outputs)


def test_the_dearest_by_product_are_spared_and_no_more_than_a_tenth():
    found = high_precision_layers(model(), costs(small=0.1, sensitive=0.3, large=0.55, harmless=0.02, other=0.03))
    assert found == ["small", "sensitive"]  # the large one costs more than its share, and is half of all MACs
    assert (WIDTHS["small"] + WIDTHS["sensitive"]) / sum(WIDTHS.values()) <= MACS_SHARE


def test_where_all_cost_alike_none_is():
    total = sum(WIDTHS.values())
    assert high_precision_layers(model(), costs(**{name: width / total for name, width in WIDTHS.items()})) == []


def test_a_layer_that_gets_rid_of_operators_is_cheaper():
    shares = {"small": 0.1, "sensitive": 0.3, "large": 0.5, "harmless": 0.05, "other": 0.05}
    assert high_precision_layers(model(), costs(**shares), 0.2) == ["small", "sensitive"]
    assert high_precision_layers(model(), costs(**shares), 0.2, cheaper=["harmless"]) == [
        "small",
        "sensitive",
        "harmless",
    ]
    assert high_precision_layers(model(), costs(**shares), 0.2, allowed=["small"]) == ["small"]


def test_sets_grow_and_are_told_apart():
    found = ladder(model(), costs(small=0.1, sensitive=0.3, large=0.55, harmless=0.02, other=0.03), "dynamic")
    assert [layers for layers, _ in found] == [("small", "sensitive")]
    assert found[0][1] == pytest.approx((2 + 8) / 200)
    kept = ladder(model(), costs(small=0.1, sensitive=0.3, large=0.55), "dynamic", kept=["sensitive"])
    assert [layers for layers, _ in kept] == [("small",)]


def rung(ratio, distance, agreement=None, name="a"):
    expected = Expected(agreement, 0.0) if agreement is not None else None
    reached = Reached(distance, expected)
    return Rung((1.0,), ratio, ratio - 0.02, ratio + 0.02, layers=(name,), share=0.1, reached=reached)


INT8 = Reached(0.004, Expected(97.0, 0.1))


@pytest.mark.parametrize(
    ("rungs", "disturbed", "layers", "why"),
    [
        # The nearest of those that keep the price.
        ([rung(1.01, 0.003, 98.0), rung(1.05, 0.002, 98.5, "b"), rung(1.06, 0.001, 99.5, "c")], "", ("b",), "for 1.05"),
        # The first that is expected to be enough.
        ([rung(1.01, 0.002, 99.1), rung(1.02, 0.001, 99.5, "b")], "", ("a",), "falls from 0.004 to 0.002"),
        # Of another task nothing is expected.
        ([rung(1.01, 0.002), rung(1.02, 0.001, None, "b")], "", ("b",), "falls from 0.004 to 0.001"),
        ([rung(1.06, 0.001), rung(1.2, 0.0005)], "", (), "of 2 sets of layers all add more than 5 % to the latency"),
        ([rung(1.0, 0.005)], "", (), "none brings the answers nearer"),
        ([rung(1.3, 0.003), rung(1.0, 0.001)], "others ran", ("a",), r"the times are unreliable \(others ran\)"),
    ],
)
def test_one_set_is_taken(rungs, disturbed, layers, why):
    found, said = choose_rung(INT8, rungs, 5.0, disturbed)
    assert found == layers
    assert re.search(why, said)

"""Which layers INT8 spares for TensorRT: those that cost most for their products, and only so many."""

from tests.graph.small_graphs import Builder
from vitdeploy.search.high_precision import MACS_SHARE, high_precision_layers
from vitdeploy.search.sensitivity import Cost, Guilt, Sensitivity

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

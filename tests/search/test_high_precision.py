"""Which layers are taken out of plain INT8: those that cost most answers for the time that they add."""

import pytest

from vitdeploy.search.precision import Cost, Guilt, Sensitivity, layers_by_worth

ADDED = {"small": 2.0, "sensitive": 8.0, "large": 100.0, "harmless": 20.0, "other": 70.0}


def costs(**shares):
    layers = [
        Guilt(Cost(name, 1, share, (share, share), share), "x", -1.0, 1.0, 0.5, 0, None, ())
        for name, share in shares.items()
    ]
    return Sensitivity("tensorrt", 32, "KL, nats", 1.0, 1.0, tuple(layers), ())


def never(left):
    return False


SHARES = {"small": 0.1, "sensitive": 0.3, "large": 0.55, "harmless": 0.02, "other": 0.03}


def test_the_dearest_for_their_time_are_taken_while_it_lasts():
    assert layers_by_worth(costs(**SHARES), ADDED, 20.0, never) == (("small", "sensitive"), 10.0)
    assert layers_by_worth(costs(**SHARES), ADDED, 8.0, never) == (("small",), 2.0)
    assert layers_by_worth(costs(**SHARES), ADDED, 1.0, never) == ((), 0.0)
    # With more time the large one comes too, as its share of the distance is above its share of the time.
    assert layers_by_worth(costs(**SHARES), ADDED, 200.0, never) == (("small", "sensitive", "large"), 110.0)


def test_no_more_is_taken_than_is_needed():
    left = []
    found = layers_by_worth(costs(**SHARES), ADDED, 200.0, lambda share: left.append(share) or share <= 0.91)
    assert found == (("small",), 2.0)
    assert left == pytest.approx([1.0, 0.9])


def test_where_all_cost_alike_none_is_taken():
    total = sum(ADDED.values())
    assert layers_by_worth(costs(**{name: time / total for name, time in ADDED.items()}), ADDED, 1e9, never) == ((), 0)


def test_a_layer_that_gets_faster_comes_first_and_others_stay():
    added = {**ADDED, "harmless": -5.0}
    assert layers_by_worth(costs(**SHARES), added, 4.0, never) == (("harmless", "small"), -3.0)
    assert layers_by_worth(costs(**SHARES), {"other": 1.0, "small": 1.0}, 9.0, never) == (("small",), 1.0)

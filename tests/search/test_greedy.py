"""The search for overrides on costs that are known: layers whose distances add up, with times from a table."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.search.planted_layer import known_costs
from vitdeploy.quantization.ranges import Range
from vitdeploy.search.frame import Expected, ReferenceOutputs
from vitdeploy.search.graphs import LayerChoice
from vitdeploy.search.layers import Shape
from vitdeploy.search.precision import Cost, Guilt, PrecisionOverride, Sensitivity, choose_mends
from vitdeploy.search.trials import TrialLayer
from vitdeploy.spec import Budget

IMAGES = 10
NOISE = 1 + 0.1 * np.linspace(-1, 1, IMAGES)


class World:
    """Layers by name: (distance in INT8, microseconds in FP32 and INT8). `mends`: what is left of a layer's distance
    with a share of its range, or scaled (0.0). `agree`: points of agreement that a distance of 1 costs; None: no
    classifier. `together`: the distance of layers over the sum of their own.
    """

    def __init__(self, layers, mends=None, readers=None, scaled=(), agree=50.0, together=1.0):
        self.costs = {name: cost for name, (cost, _, _) in layers.items()}
        self.times, self.mends, self.agree, self.together = layers, mends or {}, agree, together
        split = SimpleNamespace(source=range(12), scale=range(10))
        self.layers = tuple(
            TrialLayer(
                *(name, f"x of {name}", None, self.shape(name), Range(-1.0, 3.0)),
                next((group for group in readers or () if name in group), (name,)),
                split if name in scaled else None,
            )
            for name in layers
        )
        self.whole, self.reported = self, []
        self.pixels = range(IMAGES)

    def shape(self, name):
        return Shape(17, 8, 1 + list(self.times).index(name))

    def left(self, name, choice):
        if choice.form is None:
            return 0.0
        share = 0.0 if choice.form == 1 else (choice.bounds.high / 3.0 if choice.bounds else 1.0)
        assert not choice.bounds or choice.bounds.low / -1.0 == pytest.approx(share)
        return 1.0 if share == 1 else self.mends.get((name, round(share, 3)), 2.0)

    def only(self, choices):
        return NOISE * sum(self.costs[name] * self.left(name, choice) for name, choice in choices.items())

    def answers(self, choices):
        self.reported.append(dict(choices))
        every = {name: choices.get(name, LayerChoice()) for name in self.costs}
        return {"distance": self.together * self.only(every)}

    def distance(self, answers):
        return answers["distance"]

    reached = ReferenceOutputs.reached

    def expected(self, answers, share=1.0):
        lost = float(answers["distance"].mean()) * share
        return None if self.agree is None else Expected(100 - self.agree * lost, 2 * lost)

    def table(self):
        """Operators that scale 12 channels of 17 rows take a microsecond."""
        times = {self.shape(name): {"float": slow, "int8": fast} for name, (_, slow, fast) in self.times.items()}
        return known_costs(lambda shape, form: times[shape][form], scaling=1e3 / (17 * 12))

    def search(self, budget=None, progress=lambda *told: None, known=None):
        order = sorted(known or self.costs, key=lambda name: -self.costs[name])
        guilt = [Guilt(Cost(n, 1, self.costs[n], (0, 0), 0), "x", 0, 0, 0, 0, None, ()) for n in order]
        sensitivity = Sensitivity("openvino-cpu", IMAGES, "KL in nats", 1.0, 1.0, tuple(guilt), ())
        return choose_mends(self, sensitivity, self.table(), budget or Budget(), progress)


def taken(found):
    return [str(each.override) for each in found.taken]


# In float, "cheap" removes a fourth of the distance for 1 of 16 us, "middle" an eighth for an eighth, the others less.
FOUR = {"dear": (0.5, 18.0, 9.0), "cheap": (0.25, 3.0, 2.0), "middle": (0.125, 7.0, 5.0), "small": (0.125, 9.0, 5.0)}


def test_without_a_budget_what_removes_more_of_the_cost_than_of_the_time_is_taken():
    """An eighth for an eighth is no larger share, so the search ends."""
    found = World(FOUR).search()
    assert taken(found) == ["cheap in float"]
    assert found.saved_us == 16.0
    assert (found.met, found.target, found.images) == (None, "openvino-cpu", IMAGES)
    assert (found.int8.distance, found.reached.distance) == (pytest.approx(1.0), pytest.approx(0.75))
    assert found.int8.expected == Expected(pytest.approx(50.0), pytest.approx(2.0))
    better = World({**FOUR, "middle": (0.125, 6.9, 5.0)}).search()
    assert taken(better) == ["cheap in float", "middle in float"]


@pytest.mark.parametrize(
    ("budget", "order"),
    [
        (Budget(min_agreement=49.9), []),
        (Budget(min_agreement=50.1), ["cheap"]),
        (Budget(min_agreement=66.0), ["cheap", "middle"]),
        (Budget(min_agreement=77.0), ["cheap", "middle", "dear"]),
        (Budget(min_agreement=99.0), ["cheap", "middle", "dear", "small"]),
        (Budget(max_drop=1.51), ["cheap"]),
        (Budget(min_agreement=50.1, max_drop=0.3), ["cheap", "middle", "dear"]),
    ],
)
def test_for_a_budget_layers_go_to_float_by_what_they_remove_in_a_microsecond(budget, order):
    found = World(FOUR).search(budget)
    assert taken(found) == [f"{name} in float" for name in order]
    assert found.met
    left = 1.0
    for each in found.taken:
        left -= FOUR[each.override.layer][0]
        assert each.override == PrecisionOverride("float", each.override.layer, each.override.price_us)
        assert each.override.price_us == FOUR[each.override.layer][1] - FOUR[each.override.layer][2]
        assert each.reached.distance == pytest.approx(left)
        assert each.reached.expected.agreement == pytest.approx(100 - 50 * left)


def test_a_budget_is_met_when_it_is_measured_and_not_when_it_is_foretold():
    """Of layers that together cost 1.5 times their sum: what is foretold starts from the measured whole."""
    world = World(FOUR, together=1.5)
    found = world.search(Budget(min_agreement=43.0))
    assert taken(found) == ["cheap in float"]
    assert found.met and found.int8.distance == pytest.approx(1.5)
    assert found.taken[0].reached.distance == pytest.approx(1.125)
    # And what errors do together when some are gone is in no sum of costs: so one layer more is taken.
    world.answers = lambda choices: {"distance": NOISE * (1.0 if not choices else 1.1 - 0.3 * len(choices))}
    found = world.search(Budget(min_agreement=61.0))
    assert taken(found) == ["cheap in float", "middle in float"]
    assert found.taken[0].reached.expected.agreement == pytest.approx(62.5)
    assert found.reached.expected.agreement == pytest.approx(75.0)


def test_a_budget_that_nothing_meets_and_one_of_no_classifier():
    some = World(FOUR).search(Budget(min_agreement=90.0), known=["small"])
    assert (taken(some), some.met) == (["small in float"], False)
    none = World(FOUR, agree=None).search(Budget(min_agreement=99.0))
    assert (taken(none), none.met, none.int8.expected) == (["cheap in float"], None, None)


def test_where_int8_costs_nothing_it_stays_and_where_it_saves_nothing_float_is_free():
    assert taken(World({"a": (0.0, 2.0, 1.0), "b": (0.0, 2.0, 1.0)}).search()) == []
    saved = World({"a": (0.5, 1.0, 1.0), "b": (0.5, 1.0, 2.0)}).search()
    assert sorted(taken(saved)) == ["a in float", "b in float"]


def test_a_layer_that_is_faster_in_float_goes_there_first():
    """Its price is negative, and INT8 saves nothing there; its gain is divided by the least price."""
    found = World({**FOUR, "small": (0.125, 4.0, 5.0)}).search()
    assert found.saved_us == 12.0
    assert taken(found)[0] == "small in float"
    assert found.taken[0].override.price_us == -1.0


def test_another_range_is_taken_where_its_gain_is_sure_and_float_may_still_come():
    """Clipping costs no time. Of two shares the one that leaves less; and then nothing else but float."""
    mends = {("dear", 0.85): 0.5, ("dear", 0.7): 0.25, ("small", 1.15): 0.0, ("middle", 0.5): 1.0}
    found = World(FOUR, mends).search()
    assert taken(found) == ["dear: 70 % of its range", "small: 115 % of its range", "cheap in float"]
    assert found.taken[0].override.left == pytest.approx(0.25)
    assert [each.override.price_us for each in found.taken if each.override.kind == "clipped"] == [0.0, 0.0]
    assert {each.layer: each.clip for each in found.precisions if each.clip} == {"dear": 0.7, "small": 1.15}
    assert found.reached.distance == pytest.approx(0.25 * 0.5 + 0.125)
    # What float removes then is what clipping has left.
    whole = World(FOUR, mends).search(Budget(min_agreement=99.9))
    assert taken(whole) == [*taken(found), "middle in float", "dear in float"]
    assert whole.reached.distance == pytest.approx(0)


def test_a_gain_that_images_do_not_agree_on_is_none():
    world = World(FOUR, {("dear", 0.7): 0.9})
    sure = world.search()
    plain, noisy = world.only, np.tile([3.0, -2.8], IMAGES // 2)
    world.only = lambda choices: plain(choices) * (1 if LayerChoice() in choices.values() else noisy)
    assert taken(sure) == ["dear: 70 % of its range", "cheap in float"]
    assert taken(world.search()) == ["cheap in float"]


def test_layers_that_read_one_tensor_have_one_range():
    """It is tried on all of them at once, from the first one; and it touches all."""
    readers, mends = [("dear", "middle")], {("dear", 0.85): 0.5, ("middle", 0.85): 0.5}
    world = World(FOUR, mends, readers)
    found = world.search()
    assert taken(found)[0] == "dear: 85 % of its range"
    assert found.taken[0].reached.distance == pytest.approx(1 - 0.5 * 0.625)
    assert world.reported[-1]["middle"] == world.reported[-1]["dear"] == LayerChoice(bounds=Range(-0.85, 0.85 * 3.0))
    assert sum("range" in each for each in taken(found)) == 1
    turned = World(FOUR, mends, [("middle", "dear")]).search()
    assert taken(turned)[0] == "middle: 85 % of its range"


def test_scaled_channels_cost_their_operators_and_the_columns_that_they_add():
    """1 us of operators in front of 9 us, and 12 channels where 10 were: 1 + 0.2 * 9."""
    world = World(FOUR, {("dear", 0.0): 0.1, ("middle", 0.0): 1.2}, scaled=("dear", "middle"))
    found = world.search()
    assert taken(found) == ["cheap in float", "dear: hidden channels scaled"]
    assert found.taken[1].override.price_us == pytest.approx(1 + 0.2 * 9)
    assert found.taken[1].override.left == pytest.approx(0.1)
    assert found.taken[1].reached.distance == pytest.approx(0.3)
    assert [each.layer for each in found.precisions if each.scaled] == ["dear"]
    assert world.reported[-1]["dear"] == LayerChoice(1)


def test_only_the_eight_most_sensitive_layers_are_tried_otherwise():
    layers = {f"layer {i}": (0.1 + 0.01 * i, 10.0, 1.0) for i in range(11)}
    told = []
    found = World(layers, {(name, 0.5): 0.5 for name in layers}).search(progress=lambda *each: told.append(each))
    assert {each.override.layer for each in found.taken} == {f"layer {i}" for i in range(3, 11)}
    assert told == [("other overrides of the most sensitive layers", i, 8) for i in range(9)]

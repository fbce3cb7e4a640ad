"""Mixed precision: the planted layer and no other goes to float, and only where that is worth its time."""

import dataclasses
import json

import pytest

from tests.search.planted_layer import PLANTED, table_for
from vitdeploy.graph.io.files import load_graph
from vitdeploy.quantization.placement import choose, place, shape
from vitdeploy.quantization.prepare import prepare
from vitdeploy.search.frame import Reached, answers_of
from vitdeploy.search.precision import Mixed, PrecisionOverride, Taken, choose_mends, measure_sensitivity
from vitdeploy.spec import Budget, decode, encode


@pytest.fixture(scope="module")
def sensitivity(trials, target):
    return measure_sensitivity(trials, target)


def in_float(found):
    return tuple(each.layer for each in found.precisions if each.precision == "float")


def test_the_planted_layer_alone_goes_to_float_for_a_budget(trials, sensitivity, target):
    without = choose_mends(trials, sensitivity, table_for(trials, target), Budget(min_agreement=0.0))
    assert (without.taken, without.met) == ((), True)
    expected = (without.int8.expected.agreement + 100) / 2
    found = choose_mends(trials, sensitivity, table_for(trials, target), Budget(min_agreement=expected))
    assert in_float(found) == (PLANTED,)
    assert found.met
    assert found.reached.expected.agreement >= expected > found.int8.expected.agreement
    assert found.reached.distance < 0.5 * found.int8.distance
    assert found.taken[-1].reached.distance == pytest.approx(found.reached.distance, rel=0.6)


def test_without_a_budget_it_stops_where_a_mend_costs_more_than_it_gains(trials, sensitivity, target):
    found = choose_mends(trials, sensitivity, table_for(trials, target), Budget())
    assert in_float(found) == (PLANTED,)
    assert found.met is None


def test_a_layer_whose_float_is_too_dear_stays_in_int8(trials, sensitivity, target):
    found = choose_mends(trials, sensitivity, table_for(trials, target, planted=1e6), Budget())
    assert PLANTED not in in_float(found)


def test_for_a_budget_layers_go_to_float_whatever_that_costs(trials, sensitivity, target):
    table = table_for(trials, target, planted=1e6)
    before = choose_mends(trials, sensitivity, table, Budget()).int8.expected
    found = choose_mends(trials, sensitivity, table, Budget(min_agreement=(before.agreement + 100) / 2))
    assert PLANTED in in_float(found)
    assert found.met


def test_a_budget_that_no_mend_meets_is_said(trials, sensitivity, target):
    """None is left to try but the least costly layer, which is not to blame."""
    few = dataclasses.replace(sensitivity, layers=sensitivity.layers[-1:])
    found = choose_mends(trials, few, table_for(trials, target), Budget(min_agreement=100.0))
    assert (found.met, PLANTED in in_float(found)) == (False, False)


def test_a_drop_is_a_budget_too(trials, sensitivity, target):
    found = choose_mends(trials, sensitivity, table_for(trials, target), Budget(max_drop=50.0))
    assert (found.taken, found.met) == ((), True)


def test_what_was_found_is_placed_and_answers_so(
    trials, sensitivity, target, planted_file, planted_statistics, planted_yardstick
):
    found = choose_mends(trials, sensitivity, table_for(trials, target), Budget())
    model = load_graph(planted_file)
    shape(model, target)
    prepared = prepare(model, planted_statistics, choose(model, target, asked=found.precisions))
    placement = place(model, prepared.ranges, target, (), prepared.weights, asked=found.precisions)
    assert not set(in_float(found)) & set(placement.int8)
    distance = planted_yardstick.distance(answers_of(model, target, "mixed", planted_yardstick)).mean()
    assert distance < 0.5 * found.int8.distance
    assert 0.6 < distance / found.reached.distance < 1.6


def test_json_keeps_all_of_it_and_says_what_is_mended():
    taken = [
        Taken(PrecisionOverride(kind, layer, 1.0, 0.5, share), Reached(0.2, None))
        for kind, layer, share in (
            ("clipped", "a", 0.5),
            ("scaled", "b", None),
            ("clipped", "c", 0.7),
            ("float", "a", None),
        )
    ]
    found = Mixed("openvino-cpu", 8, Reached(0.5, None), Reached(0.2, None), 100.0, tuple(taken), None, "a table")
    assert decode(Mixed, json.loads(json.dumps(encode(found)))) == found
    assert in_float(found) == ("a",)
    assert {each.layer: (each.scaled, each.clip) for each in found.precisions if each.precision == "int8"} == {
        "b": (True, None),
        "c": (False, 0.7),
    }
    assert [str(each.override) for each in taken] == [
        "a: 50 % of its range",
        "b: hidden channels scaled",
        "c: 70 % of its range",
        "a in float",
    ]

"""The layer that costs most is found, named with the statistics of what it reads."""

import json

import numpy as np
import pytest
from scipy import stats

from tests.search.planted_layer import IMAGES, PLANTED
from vitdeploy.graph.analysis.linears import find_linears
from vitdeploy.graph.io.files import load_graph
from vitdeploy.search.sensitivity import Sensitivity, groups_of, mean_interval, measure_sensitivity
from vitdeploy.search.trials import opened
from vitdeploy.spec import decode, encode


@pytest.fixture(scope="module", params=["openvino-cpu", "onnxruntime-cpu"])
def found(request, planted_file, planted_statistics, planted_yardstick):
    with opened(load_graph(planted_file), planted_statistics, request.param, planted_yardstick) as trials:
        return measure_sensitivity(trials, request.param)


def test_the_planted_layer_costs_most(found):
    worst, second = found.layers[:2]
    assert worst.cost.name == PLANTED
    assert worst.cost.distance > 3 * second.cost.distance
    assert worst.cost.share > 0.5
    assert 0 < worst.cost.ci95[0] < worst.cost.distance < worst.cost.ci95[1]
    assert (found.images, found.unit) == (IMAGES, "KL in nats")


def test_a_group_with_the_planted_layer_costs_at_least_as_much_as_it(found):
    groups = {each.name: each for each in found.groups}
    for name in ("blocks.1.*", "blocks.*.mlp.fc2"):
        assert groups[name].distance > found.layers[0].cost.distance
    assert groups["blocks.*.attn.proj"].distance < 0.3 * found.layers[0].cost.distance
    assert found.groups[0].distance == max(each.distance for each in found.groups)


def test_costs_nearly_add_up(found):
    assert found.total == pytest.approx(sum(each.cost.distance for each in found.layers))
    assert sum(each.cost.share for each in found.layers) == pytest.approx(1)
    assert 0.5 < found.total / found.distance < 2


def test_the_tensor_is_named_with_its_statistics(found, planted_file, planted_statistics):
    [linear] = [each for each in find_linears(load_graph(planted_file)) if each.name == PLANTED]
    worst, known = found.layers[0], planted_statistics[linear.input.name]
    reach = np.maximum(-known.low, known.high)
    assert worst.tensor == linear.input.name
    assert (worst.low, worst.high) == (known.low.min(), known.high.max())
    assert (worst.median, worst.channel) == (np.median(reach), reach.argmax())


def test_layers_behind_a_norm_say_what_was_folded(found):
    folds = {each.cost.name: each.folds for each in found.layers}
    assert any("channels scaled" in words for words in folds["blocks.0.mlp.fc1"])


def test_json_keeps_all_of_it(found):
    assert decode(Sensitivity, json.loads(json.dumps(encode(found)))) == found


def test_groups_are_blocks_and_roles_and_neither_one_layer_nor_all():
    names = ["patch", "blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2", "head"]
    assert groups_of(names) == {
        "blocks.0.*": ("blocks.0.fc1", "blocks.0.fc2"),
        "blocks.*.fc1": ("blocks.0.fc1", "blocks.1.fc1"),
        "blocks.*.fc2": ("blocks.0.fc2", "blocks.1.fc2"),
        "blocks.1.*": ("blocks.1.fc1", "blocks.1.fc2"),
    }
    assert groups_of(["a.0.x", "a.1.x"]) == {}


def test_an_interval_is_scipys():
    values = np.random.default_rng(0).exponential(size=20)
    wanted = stats.ttest_1samp(values, 0).confidence_interval()
    assert mean_interval(values) == pytest.approx((values.mean(), wanted.low, wanted.high))
    assert mean_interval(np.ones(1)) == (1, 1, 1)

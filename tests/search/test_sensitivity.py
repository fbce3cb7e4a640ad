"""The layer that costs most is found, named with the statistics of what it reads."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tests.search.planted_layer import IMAGES, PLANTED
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import load_graph
from vitdeploy.quantization.folds import Fold, Hidden
from vitdeploy.quantization.ranges import Statistics
from vitdeploy.search.frame import mean_interval
from vitdeploy.search.precision import Sensitivity, groups_of, measure_sensitivity
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
    expected = stats.ttest_1samp(values, 0).confidence_interval()
    assert mean_interval(values) == pytest.approx((values.mean(), expected.low, expected.high))
    assert mean_interval(np.ones(1)) == (1, 1, 1)
    assert mean_interval(values[:2])[1] == pytest.approx(stats.ttest_1samp(values[:2], 0).confidence_interval().low)


def test_what_is_told_of_a_layer_is_what_was_measured_and_folded():
    """On distances that are known: "b" costs three times as much as "a", and "c" nothing."""
    images = np.array([1.0, 2.0, 6.0])
    power = {"blocks.0.a": 1.0, "blocks.0.b": 3.0, "head": 0.0}
    found = Statistics(np.array([-1.0, -9.0, 0.0]), np.array([2.0, 3.0, 4.0]), np.zeros(3), np.ones(3), 9)
    prepared = SimpleNamespace(
        folds=[Fold(("blocks.0.a", "blocks.0.b"), 0.5, True, 2.0)], hidden=[Hidden("blocks.0.b", 0.3, {}, 2.0)]
    )
    trials = SimpleNamespace(
        layers=[SimpleNamespace(name=name, tensor=f"x of {name}", found=found) for name in power],
        images=3,
        prepared=prepared,
        reference_outputs=SimpleNamespace(task="detection"),
        estimated=lambda progress: ({"blocks.0.a": images * power["blocks.0.a"]}, ("Mod",)),
        only=lambda choices: images * sum(power[name] for name in choices if choices[name].form == 0),
        distance=lambda choices: images * (5.0 if choices == {} else 0.0),
    )
    told = []
    ours = measure_sensitivity(trials, "openvino-cpu", lambda *each: told.append(each))
    assert told == [("layers before Mod", i, 2) for i in range(3)]
    assert ours.impassable == ("Mod",)
    assert (ours.target, ours.images, ours.unit) == ("openvino-cpu", 3, "relative squared error")
    assert (ours.distance, ours.total) == (15.0, 12.0)
    assert [each.cost.name for each in ours.layers] == ["blocks.0.b", "blocks.0.a", "head"]
    worst, second, nothing = ours.layers
    assert (worst.cost.distance, worst.cost.share, worst.cost.layers) == (9.0, 0.75, 1)
    assert worst.cost.ci95 == pytest.approx(tuple(stats.ttest_1samp(3 * images, 0).confidence_interval()))
    assert (nothing.cost.distance, nothing.cost.share, nothing.folds) == (0.0, 0.0, ())
    assert (worst.low, worst.high, worst.median, worst.channel, worst.upper) == (-9.0, 4.0, 4.0, 1, None)
    assert worst.folds == ("channels shifted, channels scaled, exponent 0.5", "hidden channels scaled, exponent 0.3")
    assert second.folds == worst.folds[:1]
    [block] = ours.groups
    assert (block.name, block.layers, block.distance, block.share) == ("blocks.0.*", 2, 12.0, 1.0)
    found = Statistics(found.low, found.high, found.mean, found.covariance, 9, upper=2.5)
    trials.layers = [SimpleNamespace(name="head", tensor="x", found=found)]
    alone = measure_sensitivity(trials, "openvino-cpu")
    assert (alone.layers[0].upper, alone.layers[0].cost.share, alone.groups) == (2.5, 0.0, ())


def test_costs_and_groups_come_in_descending_order():
    names = ["blocks.0.x", "blocks.0.y", "blocks.1.x", "blocks.1.y"]
    power = dict(zip(names, (1.0, 5.0, 2.0, 3.0), strict=True))
    nothing = Statistics(np.zeros(1), np.ones(1), np.zeros(1), np.ones(1), 9)
    trials = SimpleNamespace(
        layers=[SimpleNamespace(name=name, tensor="x", found=nothing) for name in names],
        images=2,
        prepared=SimpleNamespace(folds=[], hidden=[]),
        reference_outputs=SimpleNamespace(task="classification"),
        estimated=lambda progress: ({name: np.full(2, power[name]) for name in names}, ()),
        distance=lambda choices: np.ones(2),
    )
    ours = measure_sensitivity(trials, "openvino-cpu")
    assert [each.cost.distance for each in ours.layers] == [5.0, 3.0, 2.0, 1.0]
    assert [(each.name, each.distance) for each in ours.groups] == [
        ("blocks.*.y", 8.0),
        ("blocks.0.*", 6.0),
        ("blocks.1.*", 5.0),
        ("blocks.*.x", 3.0),
    ]

"""What the page says of INT8: folds, costs by layer, overrides; and the page of costs alone."""

import copy

import pytest

from tests.documents import page_of
from tests.report.test_html import HOSTILE, REPORT, Page
from vitdeploy.report.context import sensitivity_headline
from vitdeploy.report.html import render_sensitivity
from vitdeploy.search.precision import Sensitivity
from vitdeploy.spec import decode

COST = {"layers": 1, "distance": 0.25, "ci95": [0.1, 0.4], "share": 0.5}
SENSITIVITY = {
    "target": "openvino-cpu",
    "images": 64,
    "unit": "KL in nats",
    "distance": 0.5,
    "total": 0.5,
    "layers": [
        {
            "cost": {**COST, "name": f"blocks.{i}.mlp.fc2"},
            "tensor": f"tensor {i}",
            "low": -1.0,
            "high": 216.0,
            "median": 3.25,
            "channel": 17,
            "upper": 9.5,
            "folds": ["channels shifted"],
        }
        for i in range(14)
    ],
    "groups": [{**COST, "name": "blocks.*.mlp.fc2", "layers": 14}],
}
MIXED = {
    "target": "openvino-cpu",
    "images": 64,
    "int8": {"distance": 0.5, "expected": {"agreement": 97.0, "drop": 0.2}},
    "reached": {"distance": 0.25, "expected": {"agreement": 99.5, "drop": 0.1}},
    "saved_us": 1200.0,
    "taken": [
        {
            "override": {"kind": kind, "layer": "blocks.0.mlp.fc2", "price_us": 12.5, "left": 0.5, "share": share},
            "reached": {"distance": 0.2, "expected": {"agreement": 99.25, "drop": 0.1}},
        }
        for kind, share in (("clipped", 0.7), ("scaled", None), ("float", None))
    ],
    "met": None,
}
PLACED = {
    "int8": ["head"],
    "float": {"blocks.0.mlp.fc2": "worth its time in float"},
    "folds": [{"layers": ["qkv"], "alpha": 0.5, "shifted": True, "gain": 4.5, "what": "channels scaled, exponent 0.5"}],
    "hidden": [{"layer": "fc2", "alpha": None, "copies": {"3": 28}, "gain": 30.0, "what": "1 hidden channels dealt"}],
}


def costs_page(found, name):
    return render_sensitivity(decode(Sensitivity, found), name)


def page(weight_bits=8, **facts):
    report = copy.deepcopy(REPORT)
    report["engines"][0] |= {"quantization": {**PLACED, **facts}, "weight_bits": weight_bits}
    return Page(page_of(report, {})).text


def test_folds_and_float_layers_are_shown_for_plain_int8():
    text = page()
    assert "Quantization of openvino-cpu-int8: 2 folds, 1 layer in float, 8-bit weights" in text
    assert "1 layer in float, 7-bit weights" in page(weight_bits=7)
    for part in ("channels scaled, exponent 0.5", "4.50×", "1 hidden channels dealt", "worth its time in float"):
        assert part in text
    assert "Layer by layer" not in text


def test_the_layers_that_cost_most_are_a_table_and_a_plot():
    text = page(sensitivity=SENSITIVITY)
    parts = ("Layer by layer: openvino-cpu-int8", "−1.00 to 216", "99.9 % within 9.50, median channel 3.25")
    for part in (*parts, "All other layers, and groups"):
        assert part in text
    assert "What INT8 costs: openvino-cpu" in text
    assert "blocks.*.mlp.fc2" in text


@pytest.mark.parametrize(
    ("met", "end"),
    [
        (True, "The budget is expected to be met."),
        (False, "the budget is not expected to be met."),
        (None, "more time than its reduction"),
    ],
)
def test_mends_are_shown_with_their_price_and_how_the_search_ended(met, end):
    text = page(sensitivity=SENSITIVITY, mixed={**MIXED, "met": met})
    assert "3 overrides, which cost 37.5 of the 1,200.0 µs" in text
    assert "expected agreement 97.00 % before, 99.50 % after" in text
    assert end in text
    for part in ("70 % of its range", "hidden channels scaled", "blocks.0.mlp.fc2: in float", "99.25"):
        assert part in text


def test_a_search_that_took_nothing_says_so():
    text = page(sensitivity=SENSITIVITY, mixed={**MIXED, "taken": [], "met": True})
    assert "0 overrides, which cost 0.0 of the" in text


def test_the_page_of_costs_alone_names_the_guilty_layer():
    html = costs_page(SENSITIVITY, "<b>model</b>")
    assert "blocks.0.mlp.fc2 causes 50 % (20 to 80) of the INT8 cost; other layers may cost as much." in Page(html).text
    assert "<b>" not in html
    assert html.count("<svg") == 2


def first_costs(low, high, **rest):
    layers = copy.deepcopy(SENSITIVITY["layers"])
    layers[0]["cost"]["ci95"] = [low, high]
    return sensitivity_headline(decode(Sensitivity, {**SENSITIVITY, "layers": layers[:2], **rest}))


def test_the_headline_of_costs_says_only_what_its_intervals_carry():
    sure = first_costs(0.45, 0.55)
    assert sure.startswith("blocks.0.mlp.fc2 causes 50 % (90 to 100) of the INT8 cost, more than any other")
    assert "its input ranges from −1.00 to 216" in sure
    assert "other layers may cost as much" in first_costs(0.2, 0.55)
    for found in (first_costs(-2.7e-6, 0.4), first_costs(0.1, 0.2, total=0.0)):
        assert found.startswith("No layer has a proven INT8 cost: the largest one on 64 calibration images")


def test_a_page_of_no_layer_says_so():
    assert "No layer is in INT8." in costs_page({**SENSITIVITY, "layers": [], "groups": []}, "model")


def test_hostile_names_stay_text():
    def spoil(value):
        if isinstance(value, dict):
            return {key: item if key == "kind" else spoil(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoil(item) for item in value]
        return HOSTILE if isinstance(value, str) else value

    html = costs_page(spoil(SENSITIVITY), HOSTILE)
    assert not {"script", "img"} & {tag for tag, _ in Page(html).elements}
    assert "\u202e" not in html
    report = copy.deepcopy(REPORT)
    report["engines"][0]["quantization"] = spoil({**PLACED, "sensitivity": SENSITIVITY, "mixed": MIXED})
    assert "script" not in {tag for tag, _ in Page(page_of(report, {})).elements}

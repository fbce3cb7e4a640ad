"""Layers out of plain INT8: measured, placed and computed by the runtimes."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest

from tests.graph.small_graphs import Builder
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.data.folder import split
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.quantization.placement import place
from vitdeploy.quantization.ranges import quantize_weight
from vitdeploy.runtime.engine import make_runner
from vitdeploy.search import frame as alternatives
from vitdeploy.search.costs import CostTable, FormCosts, costs_for, workload_of
from vitdeploy.search.precision import in_higher_precision
from vitdeploy.spec import encode
from vitdeploy.stages import search as high_precision
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.place import HIGH_PRECISION_SEARCH, PlaceConfig, place_graph
from vitdeploy.stages.search import (
    CalibratedGraph,
    find_high_precision,
    form_of,
    raises_precision,
)

GROUP = 32


@pytest.fixture(scope="module")
def calibrated(small_export, digits, tmp_path_factory):
    """The float graph, its statistics, and the images."""
    folder = tmp_path_factory.mktemp("calibrated")
    samples = split(digits, "none", calibration=64, evaluation=1, seed=0).calibration
    calibrate(small_export / "model.onnx", samples, folder)
    return CalibratedGraph(small_export / "model.onnx", folder / "statistics.npz", samples)


TARGETS = ("openvino-cpu", "onnxruntime-cpu")


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    """The models of these tests are small, and would be left in plain INT8 for that alone."""
    monkeypatch.setattr(high_precision, "LEAST_MACS", 0)


def found_in(calibrated, out, target="openvino-cpu", price=5.0):
    return find_high_precision(PlaceConfig(target, "int8"), price, 1, calibrated, costs_for(target), out)


@pytest.mark.parametrize("target", TARGETS)
def test_layers_are_ranked_priced_and_tried(target, calibrated, monkeypatch, tmp_path):
    monkeypatch.setattr(high_precision, "ENOUGH", 100.1)
    found = found_in(calibrated, tmp_path, target, 100.0)
    assert found == HIGH_PRECISION_SEARCH.read(tmp_path)
    assert (tmp_path / "sensitivity.json").is_file()
    assert (found.images, found.table) == (64, str(costs_for(target)))
    assert found.layers and found.reached.distance < found.int8.distance
    assert found.ratio <= 2
    assert "the distance falls from" in found.why and found.why.endswith(f"at {found.ratio:.2f} times the latency")


def test_the_price_is_a_share_of_the_time_of_plain_int8(calibrated, monkeypatch, tmp_path):
    """Of costs in proportion to products, of which float takes four times those of INT8."""
    none = dict.fromkeys(("call", "uneven", "ragged", "weight", "read", "written"), 0.0)
    forms = {name: FormCosts(**none, mac=mac) for name, mac in (("int8", 1.0), ("float", 4.0), ("dynamic", 3.0))}
    table = CostTable("onnxruntime-cpu", "a CPU", "", "a test", forms, {"fp32": 0.0}, 0.0)
    config, asked = PlaceConfig("onnxruntime-cpu", "int8"), []
    monkeypatch.setattr(high_precision, "ENOUGH", 100.1)
    monkeypatch.setattr(high_precision, "layers_by_worth", lambda *given: asked.append(given) or ((), 0.0))
    found = find_high_precision(config, 20.0, 3, calibrated, table, tmp_path)
    model = load_graph(calibrated.graph)
    work = workload_of(model, 3)
    [(_, added, most, _)] = asked
    assert most == pytest.approx(0.2 * table.plain(work))
    assert added["head"] == 3 * work.layers["head"].macs
    assert (found.batch, found.layers) == (3, ())
    assert found.why == "no layer is worth its latency within the limit of 20 %"


def test_a_small_model_is_left_alone(calibrated, monkeypatch, tmp_path):
    monkeypatch.setattr(high_precision, "LEAST_MACS", 400_000_000)
    found = found_in(calibrated, tmp_path)
    assert (found.layers, found.ratio) == ((), 1.0)
    assert "the model is too small to time single layers" in found.why
    assert not (tmp_path / "sensitivity.json").exists()


def test_a_good_model_is_left_alone(calibrated, monkeypatch, tmp_path):
    monkeypatch.setattr(high_precision, "ENOUGH", 1.0)
    found = found_in(calibrated, tmp_path)
    assert (found.layers, found.precisions, found.ratio) == ((), (), 1.0)
    assert found.why.startswith("plain INT8 is expected to keep ")
    assert not (tmp_path / "sensitivity.json").exists()


def test_a_graph_that_layers_cannot_be_tried_of_is_quantized_as_before(calibrated, monkeypatch, tmp_path):
    def refused(*given):
        raise GraphError("the layer pads by itself", found="SAME_UPPER", expected="explicit pads")

    monkeypatch.setattr(high_precision, "open_trials", refused)
    found = found_in(calibrated, tmp_path)
    assert (found.precisions, found.why) == ((), "single layers cannot be tried: the layer pads by itself")


def test_the_placement_says_which_layers_and_why(calibrated, tmp_path):
    graph, statistics = calibrated.graph, calibrated.statistics
    name = next(each.name for each in find_linears(load_graph(graph)) if each.name.endswith("fc2"))
    for form in ("dynamic", "float"):
        out = tmp_path / form
        out.mkdir()
        asked = in_higher_precision((name,), form, "the reason")
        place_graph(PlaceConfig("openvino-cpu", "int8"), graph, statistics, out, asked)
        placed = json.loads((out / "placement.json").read_text(encoding="utf-8"))
        assert placed["why"] == "the reason"
        assert name not in placed["int8"]
        assert (name in placed["dynamic"], name in placed["float"]) == (form == "dynamic", form == "float")
    both, plain = (count_int8(load_graph(tmp_path / form / graph.name)) for form in ("dynamic", "float"))
    assert both == plain + 1


def test_openvino_quantizes_groups_of_a_row(tmp_path):
    """The product, by the runtime and by NumPy: each 32 channels of a row in steps of their largest / 127."""
    if form_of(PlaceConfig("openvino-cpu", "int8")) != "dynamic":
        pytest.skip("this CPU has no VNNI, so OpenVINO computes such a layer in float")
    b = Builder()
    model = b.model({"x": ["batch", 5, 128]}, b.linear("x", 128, 64, "layer"))
    weight = find_linears(model)[0].weight
    codes, scales = quantize_weight(weight, 1)
    made = place(model, {}, "openvino-cpu", asked=in_higher_precision(["layer"], "dynamic"))
    assert (made.int8, list(made.dynamic)) == ((), ["layer"])
    save_graph(model, tmp_path / "model.onnx")
    (tmp_path / "engine").mkdir()
    engine = compile_engine(
        tmp_path / "model.onnx", tmp_path / "engine", target="openvino-cpu", precision="int8", batch=1, placed=1
    )
    x = np.random.default_rng(0).normal(size=(1, 5, 128)) * np.linspace(0.1, 9, 128)
    x = x.astype(np.float32)
    with make_runner(tmp_path / "engine", engine) as runner:
        [(_, found)] = runner.infer({"x": x}).items()
    groups = x.reshape(5, -1, GROUP)
    step = np.abs(groups).max(axis=-1, keepdims=True) / 127
    rounded = (np.rint(groups / step) * step).reshape(5, 128)
    exact = x[0] @ (codes * scales)
    expected = rounded @ (codes * scales)
    bias = found[0] - expected
    bias = np.median(bias, axis=0)
    error = np.abs(found[0] - bias - expected).max()
    assert error < 1e-3 * np.abs(expected).max()
    assert error < 0.2 * np.abs(exact - expected).max()


def test_onnxruntime_has_no_such_layers():
    b = Builder()
    model = b.model({"x": ["batch", 5, 128]}, b.linear("x", 128, 64, "layer"))
    with pytest.raises(CapabilityError, match="onnxruntime-cpu does not support dynamic quantization"):
        place(model, {}, "onnxruntime-cpu", asked=in_higher_precision(["layer"], "dynamic"))
    assert form_of(PlaceConfig("onnxruntime-cpu", "int8")) == "float"
    assert form_of(PlaceConfig("openvino-cpu", "int8", weight_bits=7)) == "float"


@pytest.mark.parametrize(
    ("target", "precision", "task", "price", "expected"),
    [
        ("openvino-cpu", "int8", "classification", 5.0, True),
        ("onnxruntime-cpu", "int8", "detection", 5.0, True),
        ("openvino-cpu", "int8", "classification", 0.0, False),
        ("openvino-cpu", "mixed", "classification", 5.0, False),
        ("tensorrt", "int8", "classification", 5.0, False),
        ("openvino-cpu", "int8", "sequence", 5.0, False),
    ],
)
def test_where_precision_is_raised(target, precision, task, price, expected):
    assert raises_precision(target, precision, task, price) is expected


def test_why_is_in_the_file(calibrated, tmp_path):
    found = found_in(calibrated, tmp_path, "onnxruntime-cpu")
    assert json.loads((tmp_path / "high_precision.json").read_text(encoding="utf-8")) == encode(found)


def test_too_few_images_prove_nothing_and_it_says_how_many_may(calibrated, monkeypatch, tmp_path):
    """Two images, one of which gains and one of which does not."""
    monkeypatch.setattr(high_precision, "ENOUGH", 100.1)
    monkeypatch.setattr(high_precision, "layers_by_worth", lambda *given: (("head",), 1.0))
    distances = iter([np.array([0.3, 0.2]), np.array([0.1, 0.2])])
    whole = alternatives.ReferenceOutputs.distance
    monkeypatch.setattr(
        alternatives.ReferenceOutputs,
        "distance",
        lambda self, answers: next(distances) if sys._getframe(1).f_code.co_name == "_find" else whole(self, answers),
    )
    two = dataclasses.replace(calibrated, samples=calibrated.samples[:2])
    found = found_in(two, tmp_path)
    assert found.layers == ()
    # t(0.975, 1) = 12.706 and a standard error of 0.1: (0.1 - low) / 0.1 = 12.706.
    needed = math.ceil(2 * 12.706205**2) + 1
    assert found.why.endswith(f"not provably closer, on 2 images; about {needed} images may prove it")

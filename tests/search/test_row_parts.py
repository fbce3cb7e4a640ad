"""Rows in parts, from what they cost to the engine that computes them."""

import dataclasses

import numpy as np
import pytest

import vitdeploy
from tests.graph.small_graphs import Builder
from vitdeploy.api.inspect import inspect
from vitdeploy.api.values import Reporter
from vitdeploy.cli.options import rows as parts_of_text
from vitdeploy.data.folder import split
from vitdeploy.devices import on_devices as rows_there
from vitdeploy.devices.on_devices import row_parts_there
from vitdeploy.devices.registry import this_machine
from vitdeploy.devices.shipment import find_device_artifacts
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host
from vitdeploy.search import costs
from vitdeploy.search import rows as row_parts
from vitdeploy.search.costs import CostTable, FormCosts
from vitdeploy.spec import decode, encode
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.compile import CompileOptions, compile_graphs
from vitdeploy.stages.place import PlaceConfig, place_graph
from vitdeploy.workflows.placement import place_graphs


@pytest.fixture(scope="module")
def placed(small_export, digits, tmp_path_factory):
    """The folder of the small model in INT8 for OpenVINO; it has 17 tokens."""
    calibrated, folder = tmp_path_factory.mktemp("calibrated"), tmp_path_factory.mktemp("placed")
    samples = split(digits, "none", calibration=8, evaluation=1, seed=0).calibration
    calibrate(small_export / "model.onnx", samples, calibrated)
    config = PlaceConfig("openvino-cpu", "int8")
    place_graph(config, small_export / "model.onnx", calibrated / "statistics.npz", folder)
    return folder


# Of a CPU whose kernels are a half slower on rows that they cannot cut into equal parts.
FORMS = dict.fromkeys(("int8", "float"), FormCosts(0, 1, 0.01, 0.5, 0, 0, 0))
RAGGED = CostTable("openvino-cpu", "a CPU", "", "a test", FORMS, {"fp32": 0}, 0)


@pytest.mark.parametrize(
    ("call", "batch", "parts"),
    [
        (0, 1, (16, 1)),  # no row more than needed
        (5000, 1, (18,)),  # a call is dearer than a row
        (0, 8, None),  # 136 rows are cut into equal parts
        (10**9, 1, None),  # rows are no time
    ],
)
def test_the_form_of_least_cost_is_chosen(placed, call, batch, parts, monkeypatch):
    """17 tokens, which no kernel for up to 16 rows cuts into equal parts."""
    monkeypatch.setattr(costs, "MOST", 16)
    form = dataclasses.replace(RAGGED.forms["int8"], call=float(call))
    table = dataclasses.replace(RAGGED, forms=dict.fromkeys(("int8", "float"), form))
    found = row_parts.choose_row_parts(placed / "model.onnx", batch, table)
    assert (found.parts, found.tokens, found.reason, found.table) == (parts, 17, "", str(table))
    assert found.ratio < 0.97 if parts else found.ratio == 1
    assert decode(row_parts.RowParts, encode(found)) == found


def test_a_device_has_its_rows_in_the_parts_of_its_class_of_cpus(placed, tmp_path, monkeypatch):
    (tmp_path / "graphs").mkdir()
    graphs = place_graphs(placed / "model.onnx", "openvino-cpu", None, tmp_path / "graphs")
    monkeypatch.setattr(costs, "MOST", 16)
    asked = []
    monkeypatch.setattr(rows_there, "costs_for", lambda *given: asked.append(given) or RAGGED)
    found = row_parts_there(graphs, 1, this_machine(), Reporter(quiet=True))
    assert found.parts == (16, 1)
    [(target, host)] = asked
    assert (target, host["isa"]) == ("openvino-cpu", describe_host()["isa"])


def test_a_device_compiles_parts_and_measures_the_bundle_s(placed, tmp_path):
    """The engine of a device, and what a device measures of a bundle, compute their rows as the manifest says."""
    given = {"split_rows": (16, 1), "progress": False}
    there = vitdeploy.compile(placed, "openvino-cpu", tmp_path / "there", on="local", **given)
    here = vitdeploy.compile(placed, "openvino-cpu", tmp_path / "here", **given)
    assert there.engines[0].row_parts == (16, 1) == here.engines[0].row_parts
    assert there.engines[0].kernels == here.engines[0].kernels
    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 1), np.uint8)
    answers = []
    for bundle in (there, here):
        with make_runner(bundle.folder, bundle.engines[0]) as runner:
            answers.append(runner.infer({runner.inputs[0].name: pixels}))
    for output, array in answers[0].items():
        np.testing.assert_array_equal(answers[1][output], array)
    graphs = [(bundle.folder / bundle.engines[0].graph).read_bytes() for bundle in (there, here)]
    assert graphs[0] == graphs[1]
    [sent] = find_device_artifacts(str(there.folder), target=None, work=tmp_path)
    assert sent.placed.row_parts == (16, 1)
    assert sent.placed.graphs[0].placed == there.engines[0].kernels["int8"]


def test_why_there_is_no_choice(tmp_path):
    b = Builder()
    for tokens, reason in (
        (None, "no linear over a fixed number of tokens"),
        (192, "192 rows are whole tiles, or less"),
    ):
        shape = ["batch", 16] if tokens is None else ["batch", tokens, 16]
        save_graph(b.model({"x": shape}, b.linear("x", 16, 16, f"layer{tokens}")), tmp_path / "model.onnx")
        found = row_parts.choose_row_parts(tmp_path / "model.onnx", 1, RAGGED)
        assert found.parts is None and found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(197, [198, 200, 208]), (17, [18, 24, 32]), (192, []), (9, [10, 16]), (5, [6, 8]), (4, []), (1, [])],
)
def test_more_rows_are_whole_tiles_and_less_than_twice_the_tokens(tokens, rows):
    assert row_parts.more_rows(tokens) == rows


def test_an_engine_in_parts_keeps_the_placement_and_answers_the_same(placed, tmp_path):
    engines, answers = [], []
    for name, rows in (("whole", None), ("parts", (16, 1)), ("more", (24,))):
        out = tmp_path / name
        out.mkdir()
        engines.append(compile_graphs(placed, "openvino-cpu", 1, out, options=CompileOptions(row_parts=rows)))
        with make_runner(out, engines[-1]) as runner:
            pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 1), np.uint8)
            answers.append(runner.infer({runner.inputs[0].name: pixels}))
    whole, split_engine, more = engines
    assert (whole.row_parts, split_engine.row_parts, more.row_parts) == (None, (16, 1), (24,))
    assert (more.kernels, more.rows_told) == (whole.kernels, "padded to 24 rows")
    assert "row_parts" not in encode(whole)
    assert split_engine.kernels["int8"] > whole.kernels["int8"]
    assert (tmp_path / "whole" / "graph.onnx").read_bytes() == (tmp_path / "parts" / "graph.onnx").read_bytes()
    for output, array in answers[0].items():
        for other in answers[1:]:
            np.testing.assert_allclose(other[output], array, rtol=0, atol=1e-5)
    with pytest.raises(GraphError, match="the rows of this graph cannot be split"):
        compile_graphs(placed, "openvino-cpu", 1, tmp_path / "none", options=CompileOptions(row_parts=(192, 5)))
    assert load_graph(placed / "model.onnx")


def test_compile_takes_parts(placed, tmp_path):
    """The rows of a small model are no time; what is given is done, or refused, and then nothing is written."""
    by_itself = vitdeploy.compile(placed, "openvino-cpu", tmp_path / "auto", progress=False)
    assert ("row_parts" in by_itself.document, by_itself.engines[0].row_parts) == (False, None)
    given = vitdeploy.compile(placed, "openvino-cpu", tmp_path / "given", split_rows=(16, 1), progress=False)
    assert (given.document["row_parts"], given.engines[0].row_parts) == ([16, 1], (16, 1))
    assert given.text[0].endswith("; 17 rows as 16 + 1")
    assert [line for line in inspect(given.folder)[1] if line.endswith("; 17 rows as 16 + 1")]
    assert not [line for line in inspect(by_itself.folder)[1] if " rows as " in line]
    refused = {(192, 5): "the rows of this graph cannot be split", (17,): "17 tokens cannot be aligned to 17 rows"}
    for rows, said in refused.items():
        with pytest.raises(GraphError, match=said):
            vitdeploy.compile(placed, "openvino-cpu", tmp_path / "no", split_rows=rows, progress=False)
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("text", "parts"), [("auto", "auto"), ("none", "none"), ("192,5", (192, 5)), ("200", (200,))])
def test_parts_on_the_command_line(text, parts):
    assert parts_of_text(text) == parts


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="'half' is not auto, none or row counts such as 192,5 or 200"):
        parts_of_text("half")


def test_parts_are_for_int8_on_openvino(small_export, tmp_path):
    graph = small_export / "model.onnx"
    with pytest.raises(CapabilityError, match="cannot split the token rows of this graph"):
        vitdeploy.compile(graph, "openvino-cpu", tmp_path / "float", split_rows=(16, 1), progress=False)

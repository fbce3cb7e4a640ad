"""Rows in parts, from what is measured to the engine that computes them."""

import platform

import numpy as np
import pytest

import vitdeploy
from vitdeploy.api.inspect import inspect
from vitdeploy.api.values import Reporter
from vitdeploy.benchmark.results import BenchRun, Measurements, Round
from vitdeploy.cli.options import rows as parts_of_text
from vitdeploy.data.folder import split
from vitdeploy.devices import on_devices as rows_there
from vitdeploy.devices.agent.documents import Failure, JobResult
from vitdeploy.devices.on_devices import measure_row_parts_there
from vitdeploy.devices.registry import this_machine
from vitdeploy.devices.shipment import find_device_artifacts
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.io.files import load_graph
from vitdeploy.runtime.engine import make_runner
from vitdeploy.search import frame as alternatives
from vitdeploy.search import rows as row_parts
from vitdeploy.search.frame import fingerprint
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


def test_every_alternative_is_measured(placed, quick_rounds):
    told = []
    table = row_parts.measure_row_parts(
        placed / "model.onnx", "openvino-cpu", 1, progress=lambda *each: told.append(each[0])
    )
    assert [each.parts for each in table.timings] == [(17,), (16, 1), (24,), (32,)]
    assert all(len(each.rounds_ms) == 2 and each.low <= each.ratio <= each.high for each in table.timings)
    assert (table.target, table.batch, table.reason, table.device) == (
        "openvino-cpu",
        1,
        "",
        fingerprint("openvino-cpu"),
    )
    assert decode(row_parts.PartsTable, encode(table)) == table
    assert {"prepare rows in parts for openvino-cpu", "time the rows in parts"} <= set(told)


def test_a_small_model_is_not_measured(placed, tmp_path):
    there = measured_there(placed, tmp_path)
    for table in (row_parts.measure_row_parts(placed / "model.onnx", "openvino-cpu", 1), there):
        assert (table.timings, table.best) == ((), None)
        assert "million products at batch 1, which are too few" in table.reason


def measured_there(placed, work):
    """By an agent in a process of this machine; the placement's folder is `work`/graphs."""
    (work / "graphs").mkdir()
    graphs = place_graphs(placed / "model.onnx", "openvino-cpu", None, work / "graphs")
    return measure_row_parts_there(graphs, 1, this_machine(), Reporter(quiet=True))


def test_a_device_measures_every_alternative(placed, tmp_path, quick_rounds):
    table = measured_there(placed, tmp_path)
    assert [each.parts for each in table.timings] == [(17,), (16, 1), (24,), (32,)]
    assert (table.timings[0].ratio, table.timings[0].low) == (1, 1)
    assert all(len(each.rounds_ms) >= 2 and each.low <= each.ratio <= each.high for each in table.timings)
    assert table.device["python"] == platform.python_version()


ALTERNATIVES = [(17,), (16, 1), (24,)]
LOST = Failure("17", CapabilityError.code, "the engine did not run as placed")


def answered(milliseconds, left_out=()):
    """What a device answers that measured these names, in their order."""
    protocol = alternatives.in_turns()
    noise = np.random.default_rng(0).uniform(0.99, 1.01, (protocol.rounds, 3))
    entries = tuple(
        Measurements(
            name, "openvino-cpu", "int8", "CPU", 0.5, 3.0,
            {"single": tuple(Round(1, np.array([ms * each[i]]), 0.25, k // 4) for k, each in enumerate(noise))},
        )
        for i, (name, ms) in enumerate(milliseconds.items())
    )  # fmt: skip
    engines = dict.fromkeys(milliseconds, object())
    return JobResult(1, "job", {"cpu": "another"}, engines, left_out, encode(BenchRun(protocol, entries, 0.1, 4)))


@pytest.mark.parametrize(
    ("result", "parts", "best", "reason"),
    [
        (answered({"16+1": 20.0, "24": 25.0, "17": 30.0}), [(17,), (16, 1), (24,)], (16, 1), ""),
        (answered({"24": 25.0, "17": 30.0}), [(17,), (24,)], (24,), ""),
        (answered({"16+1": 20.0}, (LOST,)), [], None, "board: 17: the engine did not run as placed"),
    ],
)
def test_what_a_device_measured_is_told_by_its_parts(result, parts, best, reason):
    """A form that did not run there is left out; without all rows at once there is nothing to compare with."""
    table = rows_there._table(result, ALTERNATIVES, "openvino-cpu", 1, "board")
    assert ([each.parts for each in table.timings], table.best, table.reason) == (parts, best, reason)
    assert table.device == {"cpu": "another"}


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


@pytest.mark.parametrize(
    ("work", "alternatives", "reason"),
    [
        ({}, [(1,)], "no linear over a fixed number of tokens"),
        ({192: 10**9}, [(192,)], "192 rows are whole tiles, or less than one"),
        ({197: 10**9}, [(197,), (192, 5)], ""),
    ],
)
def test_why_there_is_nothing_to_measure(work, alternatives, reason):
    assert row_parts._without_alternative(work, alternatives) == reason


@pytest.mark.parametrize(
    ("tokens", "rows"), [(197, [200, 208]), (17, [24, 32]), (192, []), (9, [16]), (5, [8]), (4, []), (1, [])]
)
def test_more_rows_are_whole_tiles_and_less_than_twice_the_tokens(tokens, rows):
    assert row_parts.more_rows(tokens, row_parts.PART_MULTIPLES) == rows


@pytest.mark.parametrize(
    ("milliseconds", "disturbed", "best"),
    [
        ((30.0, 27.0, 26.0), "", (64, 64, 64, 5)),
        ((30.0, 29.99, 31.0), "", None),
        ((30.0, 27.0, 26.0), "others had 40 % of the CPUs' time", None),
    ],
)
def test_the_best_parts_are_surely_faster_than_one(milliseconds, disturbed, best):
    noise = np.random.default_rng(0).uniform(0.98, 1.02, (3, 16))
    rounds = [
        [Round(1, np.array([ms * each]), 0.25, k // 4) for k, each in enumerate(noise[i])]
        for i, ms in enumerate(milliseconds)
    ]
    tried = [(197,), (192, 5), (64, 64, 64, 5)]
    found = zip(tried, alternatives.timings_of(rounds), strict=True)
    timings = tuple(row_parts.PartsTiming(parts=each, **vars(timing)) for each, timing in found)
    assert row_parts.PartsTable("openvino-cpu", "today", {}, batch=1, timings=timings, disturbed=disturbed).best == best


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
    assert (more.kernels, more.rows_told) == (whole.kernels, "24 rows in place of one a token")
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
    """A small model is not worth measuring; what is given is done, or refused, and then nothing is written."""
    by_itself = vitdeploy.compile(placed, "openvino-cpu", tmp_path / "auto", progress=False)
    assert ("row_parts" in by_itself.document, by_itself.engines[0].row_parts) == (False, None)
    given = vitdeploy.compile(placed, "openvino-cpu", tmp_path / "given", split_rows=(16, 1), progress=False)
    assert (given.document["row_parts"], given.engines[0].row_parts) == ([16, 1], (16, 1))
    assert given.text[0].endswith("; 17 rows as 16 + 1")
    assert [line for line in inspect(given.folder)[1] if line.endswith("; 17 rows as 16 + 1")]
    assert not [line for line in inspect(by_itself.folder)[1] if " rows as " in line]
    for rows, said in (((192, 5), "the rows of this graph cannot be split"), ((17,), "as many rows as tokens already")):
        with pytest.raises(GraphError, match=said):
            vitdeploy.compile(placed, "openvino-cpu", tmp_path / "no", split_rows=rows, progress=False)
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("text", "parts"), [("auto", "auto"), ("none", "none"), ("192,5", (192, 5)), ("200", (200,))])
def test_parts_on_the_command_line(text, parts):
    assert parts_of_text(text) == parts


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="'half' is not auto, none or rows, such as 192,5 or 200"):
        parts_of_text("half")


def test_parts_are_for_int8_on_openvino(small_export, tmp_path):
    graph = small_export / "model.onnx"
    with pytest.raises(CapabilityError, match="does not compute the rows of this graph in parts"):
        vitdeploy.compile(graph, "openvino-cpu", tmp_path / "float", split_rows=(16, 1), progress=False)

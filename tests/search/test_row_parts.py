"""Rows in parts, from what is measured to the engine that computes them."""

import click
import numpy as np
import pytest

import vitdeploy
from vitdeploy.api.inspect import inspect
from vitdeploy.benchmark.results import Round
from vitdeploy.cli.compile import parts_of_text
from vitdeploy.data.folder import split
from vitdeploy.errors import CapabilityError, GraphError, InputError
from vitdeploy.graph.io.files import load_graph
from vitdeploy.runtime.engine import make_runner
from vitdeploy.search import alternatives, parts, row_parts
from vitdeploy.search.latency import fingerprint
from vitdeploy.spec import decode, encode
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.compile import compile_graphs
from vitdeploy.stages.place import PlaceConfig, place_graph


@pytest.fixture(scope="module")
def placed(small_export, digits, tmp_path_factory):
    """The folder of the small model in INT8 for OpenVINO; it has 17 tokens."""
    calibrated, folder = tmp_path_factory.mktemp("calibrated"), tmp_path_factory.mktemp("placed")
    samples = split(digits, "none", calibration=8, evaluation=1, seed=0).calibration
    calibrate(small_export / "model.onnx", samples, calibrated)
    config = PlaceConfig("openvino-cpu", "int8")
    place_graph(config, small_export / "model.onnx", calibrated / "statistics.npz", folder)
    return folder


def test_every_alternative_is_measured(placed, monkeypatch):
    for name, value in {"ROUNDS": 2, "BLOCK_SECONDS": 0.01, "WARMUP_SECONDS": 0.01, "PROCESSES": 1}.items():
        monkeypatch.setattr(alternatives, name, value)
    monkeypatch.setattr(row_parts, "LEAST_MACS", 0)
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
    assert decode(parts.PartsTable, encode(table)) == table
    assert {"prepare rows in parts for openvino-cpu", "time the rows in parts"} <= set(told)


def test_a_small_model_is_not_measured(placed):
    table = row_parts.measure_row_parts(placed / "model.onnx", "openvino-cpu", 1)
    assert (table.timings, table.best) == ((), None)
    assert "million products at batch 1, which are too few" in table.reason


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
    assert row_parts.more_rows(tokens) == rows


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
    timings = tuple(parts.PartsTiming(each, **vars(timing)) for each, timing in found)
    assert parts.PartsTable("openvino-cpu", 1, "today", {}, timings, "", disturbed).best == best


def test_an_engine_in_parts_keeps_the_placement_and_answers_the_same(placed, tmp_path):
    engines, answers = [], []
    for name, rows in (("whole", None), ("parts", (16, 1)), ("more", (24,))):
        out = tmp_path / name
        out.mkdir()
        engines.append(compile_graphs(placed, "openvino-cpu", 1, out, row_parts=rows))
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
        compile_graphs(placed, "openvino-cpu", 1, tmp_path / "none", row_parts=(192, 5))
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
    with pytest.raises(click.BadParameter, match="'half' is not auto, none or rows, such as 192,5 or 200"):
        parts_of_text("half")


def test_parts_are_for_int8_on_openvino_here(small_export, placed, tmp_path):
    graph = small_export / "model.onnx"
    with pytest.raises(CapabilityError, match="does not compute the rows of this graph in parts"):
        vitdeploy.compile(graph, "openvino-cpu", tmp_path / "float", split_rows=(16, 1), progress=False)
    with pytest.raises(InputError, match="a device computes all rows at once"):
        vitdeploy.compile(placed, "openvino-cpu", tmp_path / "there", split_rows=(16, 1), on="pi", progress=False)

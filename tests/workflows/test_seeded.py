"""The engine of a graph alone is compared with its graph. OpenVINO, which ignores antialias, is the wrong runtime here;
without its entry in the table nobody knows."""

import sys

import numpy as np
import pytest
from PIL import Image

import vitdeploy as vd
from tests.command_line import command_line
from tests.graph.builder import Builder, values
from tests.known_bad.bundles import written
from tests.known_bad.test_commands import RESIZE, kept
from vitdeploy.errors import AnswersError
from vitdeploy.known_bad import find, platform
from vitdeploy.workflows.seeded import seeded_answers

OPENVINO, ONNXRUNTIME = "openvino-cpu", "onnxruntime-cpu"


def shrinking():
    """Two convolutions around a Resize that makes the image smaller."""
    b, half = Builder(), np.array([1, 1, 0.5, 0.5], np.float32)
    x = b.add("Relu", b.add("Conv", b.input("x", ["batch", 3, 8, 8]), values(4, 3, 1, 1)))
    small = b.add("Resize", x, "", half, mode="linear", antialias=1)
    return b.model(b.add("Conv", small, values(4, 4, 2, 2)), rank=4)


@pytest.fixture
def graph(tmp_path):
    return kept(shrinking(), tmp_path / "graph")


@pytest.fixture
def nobody_knows(monkeypatch):
    """The table has no entries."""
    for module in (find, platform):
        monkeypatch.setattr(module, "table", lambda: ())


def test_a_right_engine_is_compared_once_and_it_is_said(graph):
    made = vd.compile(graph, ONNXRUNTIME, progress=False)
    assert made.document["answers"]["compared"] == 4
    assert 0 <= made.document["answers"]["difference"] <= made.document["answers"]["tolerance"] == 1e-3
    assert made.text[-1].endswith("unoptimised ONNX Runtime on 4 random images; limit 0.001")
    assert not (made.folder / "golden").exists()


def test_a_wrong_engine_is_refused_with_the_layer(graph, tmp_path, nobody_knows):
    pytest.importorskip("openvino")
    with pytest.raises(AnswersError, match="openvino-cpu-fp32 gives wrong answers here") as refused:
        vd.compile(graph, OPENVINO, tmp_path / "bundle", progress=False)
    assert "(relative to the largest) from those of its graph (limit 1.0e-03); openvino 20" in refused.value.found
    assert "the first layer that differs is resize_" in refused.value.found
    assert not (tmp_path / "bundle").exists()
    with pytest.raises(AnswersError):
        vd.bench(graph, target=OPENVINO, duration=0.01, progress=False)


def test_what_is_known_and_accepted_is_said_to_be_wrong(graph):
    pytest.importorskip("openvino")
    made = vd.compile(graph, OPENVINO, accept_known_bad=[RESIZE], progress=False)
    assert made.text[-1].startswith("output check: WRONG (accepted): ")


def test_without_an_independent_runtime_nothing_is_compared(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert (
        "onnxruntime, which evaluates the graph, is not installed" in seeded_answers(graph / "model.onnx", OPENVINO).why
    )


def test_answers_that_rounding_changes_say_nothing(tmp_path):
    b = Builder()
    x = b.add("Reshape", b.input("x", ["batch", 3, 8, 8]), np.array([-1, 192]))
    graph = kept(b.model(b.add("Sin", b.add("Mul", x, 1e7)), rank=2), tmp_path / "graph")
    assert "depend on the rounding of its input" in seeded_answers(graph / "model.onnx", ONNXRUNTIME).why
    made = vd.compile(graph, ONNXRUNTIME, progress=False)
    assert made.text[-1].startswith("output check: skipped: the graph's own outputs depend")


def test_a_refused_engine_of_a_bundle_names_the_layer_on_the_command_line(
    nobody_knows, tmp_path, shared_store, monkeypatch
):
    """The first is wrong by its runtime, the second by its file."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wrong = written(shrinking(), OPENVINO, tmp_path / "wrong")
    changed = written(shrinking(), ONNXRUNTIME, tmp_path / "changed", spoilt=1.0)
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    with command_line(tmp_path, shared_store, short_bench=True) as run:
        for command in (("predict", wrong, "image.png"), ("bench", wrong, "--duration", "0.1")):
            done = run(*command)
            assert done.returncode == 4 and "VD4204" in done.stderr
            assert "; the first layer that differs is resize_" in done.stderr
        done = run("predict", changed, "image.png")
        assert "the expected answers come from another graph" in done.stderr


def test_a_graph_that_ranks_what_it_finds_is_not_compared(tmp_path):
    b = Builder()
    x = b.add("Reshape", b.input("x", ["batch", 3, 8, 8]), np.array([-1, 192]))
    graph = kept(b.model(b.add("TopK", x, np.array([5]), outputs=2)[0], rank=2), tmp_path / "graph")
    assert "ranks scores (TopK)" in seeded_answers(graph / "model.onnx", ONNXRUNTIME).why

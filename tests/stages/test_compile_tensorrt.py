"""What is given to TensorRT's builder, and what is refused before it starts: up to the build, which needs TensorRT."""

import dataclasses

import onnx
import pytest

from vitdeploy.bundle.read import file_sha256
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.data.folder import split
from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.folds import cast_pixels_first
from vitdeploy.lint.linter import lint
from vitdeploy.runtime import tensorrt
from vitdeploy.runtime import tensorrt as tensorrt_api
from vitdeploy.runtime.backend import loads_here
from vitdeploy.runtime.trust import register
from vitdeploy.spec import EngineSpec
from vitdeploy.stages import compile as stage
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.place import PlaceConfig
from vitdeploy.stages.typed import place_typed
from vitdeploy.workflows.placement import compile_bundle


class Built(Exception):
    """The build would start now."""


@pytest.fixture
def given(monkeypatch):
    """The graph that the builder is given."""
    graphs = []

    def build(graph, out, **_):
        graphs.append(onnx.load(graph).graph)
        raise Built

    monkeypatch.setattr(tensorrt_api, "require", lambda: "10.3.0")
    monkeypatch.setattr(stage, "compile_engine", build)
    return graphs


def test_a_float_graph_is_given_with_its_pixels_cast_first(given, small_export, tmp_path):
    with pytest.raises(Built):
        compile_bundle(small_export / "model.onnx", "tensorrt", None, None, tmp_path)
    assert given[0].node[0].op_type == "Cast"


def test_a_graph_that_tensorrt_would_refuse_is_not_built(given, small_export, tmp_path):
    with pytest.raises(GraphError, match="TensorRT would reject") as caught:
        stage.compile_graph(small_export / "model.onnx", "tensorrt", 1, tmp_path)
    assert caught.value.found.startswith("TRT108 image: uint8 read by Transpose")
    assert not given


def test_profiles_out_of_order_are_not_built(given, small_export, tmp_path):
    model = load_graph(small_export / "model.onnx")
    cast_pixels_first(model)
    save_graph(model, tmp_path / "graph.onnx")
    with pytest.raises(GraphError) as caught:
        stage.compile_graph(
            tmp_path / "graph.onnx", "tensorrt", 1, tmp_path, options=stage.CompileOptions(BuildOptions(((4, 2, 8),)))
        )
    assert caught.value.found == "TRT503 image of profile 0: 4 <= 2 <= 8 along axis 0"
    assert not given


@pytest.fixture(scope="module")
def calibrated(small_export, digits, tmp_path_factory):
    """(calibration images, their statistics)."""
    out = tmp_path_factory.mktemp("calibrated")
    samples = split(digits, "none", calibration=8, evaluation=1, seed=0).calibration
    calibrate(small_export / "model.onnx", samples, out)
    return samples, out / "statistics.npz"


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "fp8"])
def test_every_release_takes_what_is_placed_for_it(small_export, calibrated, tmp_path, precision):
    samples, statistics = calibrated
    place_typed(PlaceConfig("tensorrt", precision), small_export / "model.onnx", statistics, samples, tmp_path)
    findings = lint(load_graph(tmp_path / "model.onnx"))
    assert [finding for finding in findings if finding.severity != "note"] == []
    assert {finding.rule for finding in findings} == {"TRT401"}


def test_a_plan_is_loaded_where_it_was_built_or_signed_and_built_anew_elsewhere(tmp_path, monkeypatch):
    here = {"tensorrt": "10.3.0", "gpu": "a GPU", "compute_capability": "9.0", "driver": "550", "os": "Linux x86_64"}
    monkeypatch.setattr(tensorrt, "fingerprint", lambda: here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "engine.plan").write_bytes(b"a plan")
    digest = file_sha256(tmp_path / "engine.plan")
    engine = EngineSpec("tensorrt", "fp16", "graph.onnx", ("engine.plan",), 1, False, "", (), (), device=here)
    other = dataclasses.replace(engine, device={**here, "gpu": "another GPU"})
    assert not loads_here(tmp_path, engine, ())
    assert loads_here(tmp_path, engine, {digest}) and not loads_here(tmp_path, other, {digest})
    register(digest, {})
    assert loads_here(tmp_path, engine, ()) and not loads_here(tmp_path, other, ())
    on_cpu = dataclasses.replace(engine, target="openvino-cpu", files=())
    assert loads_here(tmp_path, on_cpu, ())

"""What is given to TensorRT's builder, and what is refused before it starts: up to the build, which needs TensorRT."""

import onnx
import pytest

from vitdeploy.compile.tensorrt import BuildOptions
from vitdeploy.errors import GraphError
from vitdeploy.graph.io import load_graph, save_graph
from vitdeploy.graph.tensorrt.pixels import cast_pixels_first
from vitdeploy.pipeline.stages import compile as stage
from vitdeploy.pipeline.subjects import compile_bundle


class Built(Exception):
    """The build would start now."""


@pytest.fixture
def given(monkeypatch):
    """The graph that the builder is given."""
    graphs = []

    def build(graph, out, **_):
        graphs.append(onnx.load(graph).graph)
        raise Built

    monkeypatch.setattr(stage, "tensorrt_version", lambda: "10.3.0")
    monkeypatch.setattr(stage, "compile_engine", build)
    return graphs


def test_a_float_graph_is_given_with_its_pixels_cast_first(given, small_export, tmp_path):
    with pytest.raises(Built):
        compile_bundle(small_export / "model.onnx", "tensorrt", None, None, tmp_path)
    assert given[0].node[0].op_type == "Cast"


def test_a_graph_that_tensorrt_would_refuse_is_not_built(given, small_export, tmp_path):
    with pytest.raises(GraphError, match="TensorRT would refuse") as caught:
        stage.compile_graph(small_export / "model.onnx", "tensorrt", 1, tmp_path)
    assert caught.value.found.startswith("TRT108 image: uint8 read by Transpose")
    assert not given


def test_profiles_out_of_order_are_not_built(given, small_export, tmp_path):
    model = load_graph(small_export / "model.onnx")
    cast_pixels_first(model)
    save_graph(model, tmp_path / "graph.onnx")
    with pytest.raises(GraphError) as caught:
        stage.compile_graph(tmp_path / "graph.onnx", "tensorrt", 1, tmp_path, build=BuildOptions(((4, 2, 8),)))
    assert caught.value.found == "TRT503 image of profile 0: 4 <= 2 <= 8 along axis 0"
    assert not given

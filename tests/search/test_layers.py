"""Shapes of layers, and tiny graphs of them."""

import dataclasses

import pytest

from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import save_graph
from vitdeploy.search.layers import Convolution, Shape, layer_graph

LINEAR = Shape(16, 32, 48)
CONVOLUTION = Shape(16, 12, 8, Convolution(3, 8, 8, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), 1))


@pytest.mark.parametrize("front", [(), ("Gelu", "Mul", "Add")])
@pytest.mark.parametrize("shape", [LINEAR, CONVOLUTION], ids=["linear", "convolution"])
def test_a_tiny_graph_holds_the_layer_several_times_with_its_own_weights(tmp_path, shape, front):
    model = layer_graph(dataclasses.replace(shape, front=front))
    save_graph(model, tmp_path / "model.onnx")  # checks it
    linears = find_linears(model)
    assert [linear.kind for linear in linears] == [shape.kind] * 8
    assert len({float(linear.weight.sum()) for linear in linears}) == 8
    assert [node.op_type for node in model.graph][: len(front)] == list(front)


def test_large_layers_stand_in_a_tiny_graph_less_often():
    assert Shape(1, 4096, 4096).copies == 2
    assert Shape(1, 16384, 8192).copies == 1

"""Layers whose activations the runtime quantizes have no range to learn."""

import pytest

from vitdeploy import qat
from vitdeploy.errors import InputError
from vitdeploy.graph.analysis.linears import is_dequantized
from vitdeploy.graph.io.files import load_graph, save_graph


def test_a_layer_without_a_range_is_refused_by_name(net, placed, tmp_path):
    model = load_graph(placed["openvino-cpu"].file)
    node = next(each for each in model.graph if each.op_type == "MatMul" and is_dequantized(each.inputs[1]))
    quantized = node.inputs[0].producer().inputs[0]
    node.replace_input_with(0, quantized.producer().inputs[0])
    save_graph(model, tmp_path / "model.onnx")
    with pytest.raises(InputError, match="leaves the input of a layer to the runtime to quantize") as refused:
        qat.prepare(net, tmp_path / "model.onnx")
    assert refused.value.found and "--high-precision 0" in refused.value.fix

"""Graphs that somebody has quantized are known by their operators."""

import onnx_ir as ir
import pytest

from vitdeploy.errors import GraphError
from vitdeploy.quantization.placement_reader import reject_quantized


def graph_of(*operators):
    x = ir.Value(name="x")
    nodes = [ir.node(operator, [x]) for operator in operators]
    return ir.Model(ir.Graph([x], [nodes[-1].outputs[0]], nodes=nodes, opset_imports={"": 20}), ir_version=9)


@pytest.mark.parametrize("operator", [
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulInteger"),
    *("ConvInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits", "QAttention", "QLinearAdd"),
])  # fmt: skip
def test_operators_of_quantization_are_refused(operator):
    with pytest.raises(GraphError, match=r"model.onnx is already quantized") as caught:
        reject_quantized(graph_of("Relu", operator, operator), "model.onnx")
    assert caught.value.found == f"2 {operator}"


def test_a_float_graph_is_not():
    reject_quantized(graph_of("MatMul", "Conv", "LayerNormalization", "Softmax", "Gelu", "Quaternion"), "model.onnx")

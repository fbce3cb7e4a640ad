"""Gemm becomes MatMul + Add and computes the same; what nothing reads goes."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, checker, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from vitdeploy.graph.canonical.products import gemm_to_matmul
from vitdeploy.graph.edit import drop_unused

sizes = st.integers(1, 9)


def gemm_model(weight, bias, *, rows=3, weight_is_input=False, **attributes):
    columns = weight.shape[1] if attributes.get("transB") else weight.shape[0]
    out = weight.shape[0] if attributes.get("transB") else weight.shape[1]
    shape = [columns, rows] if attributes.get("transA") else [rows, columns]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    constants = [numpy_helper.from_array(bias, "head.bias")] if bias is not None else []
    if weight_is_input:
        inputs.append(helper.make_tensor_value_info("head.weight", TensorProto.FLOAT, list(weight.shape)))
    else:
        constants.append(numpy_helper.from_array(weight, "head.weight"))
    names = ["x", "head.weight"] + (["head.bias"] if bias is not None else [])
    node = helper.make_node("Gemm", names, ["y"], name="head/Gemm", **attributes)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, out])
    graph = helper.make_graph([node], "test", inputs, [output], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def rewritten(proto):
    model = ir.from_proto(proto)
    gemm_to_matmul(model)
    drop_unused(model)
    result = ir.to_proto(model)
    checker.check_model(result)
    return result


def run(proto, **feeds):
    return ReferenceEvaluator(proto).run(None, feeds)[0]


def operators(proto):
    return [node.op_type for node in proto.graph.node]


@given(rows=sizes, columns=sizes, out=sizes, transposed=st.booleans(), biased=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_gemm_becomes_matmul_and_add_exactly(rows, columns, out, transposed, biased, seed):
    # Small integers: products and sums are exact in float32, so any order of summation gives the same bits.
    generator = np.random.default_rng(seed)
    weight = generator.integers(-9, 10, (out, columns) if transposed else (columns, out)).astype(np.float32)
    bias = generator.integers(-9, 10, out).astype(np.float32) if biased else None
    proto = gemm_model(weight, bias, rows=rows, transB=int(transposed))
    result = rewritten(proto)
    x = generator.integers(-9, 10, (rows, columns)).astype(np.float32)
    assert operators(result) == (["MatMul", "Add"] if biased else ["MatMul"])
    np.testing.assert_array_equal(run(result, x=x), run(proto, x=x))


@given(alpha=st.sampled_from([0.5, 1.0, 2.0]), beta=st.sampled_from([0.0, 1.0, 3.0]))
@settings(deadline=None)
def test_gemm_with_other_alpha_or_beta_is_left_alone(alpha, beta):
    weight, bias = np.eye(3, dtype=np.float32), np.ones(3, np.float32)
    result = rewritten(gemm_model(weight, bias, alpha=alpha, beta=beta))
    assert operators(result) == (["MatMul", "Add"] if (alpha, beta) == (1.0, 1.0) else ["Gemm"])


@pytest.mark.parametrize("options", [{"transA": 1}, {"weight_is_input": True}], ids=str)
def test_gemm_on_a_transposed_input_or_a_computed_weight_is_left_alone(options):
    result = rewritten(gemm_model(np.ones((3, 2), np.float32), np.ones(2, np.float32), **options))
    assert operators(result) == ["Gemm"]


def test_names_of_the_new_nodes_keep_the_module():
    result = rewritten(gemm_model(np.ones((2, 3), np.float32), np.ones(2, np.float32), transB=1))
    assert [node.name for node in result.graph.node] == ["head/MatMul", "head/Add"]
    assert {tensor.name for tensor in result.graph.initializer} == {"head.weight_t", "head.bias"}
    assert result.graph.output[0].name == "y"


def test_the_original_weight_is_dropped_once_nothing_reads_it():
    proto = gemm_model(np.ones((2, 3), np.float32), None, transB=1)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    result = rewritten(proto)
    assert [tensor.name for tensor in result.graph.initializer] == ["head.weight_t"]
    assert [entry.domain for entry in result.opset_import] == [""]

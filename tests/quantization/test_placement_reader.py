"""A placement read back, and made float again where that is asked for."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tests.targets import CPU_TARGETS
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.io.files import load_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions, optimize
from vitdeploy.quantization.observers import observe
from vitdeploy.quantization.placement import choose, place, shape
from vitdeploy.quantization.placement_reader import find_quantized, make_float
from vitdeploy.quantization.prepare import prepare
from vitdeploy.quantization.ranges import quantize_weight, range_of
from vitdeploy.spec import PreprocessSpec

PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))


@pytest.fixture(scope="module")
def pixels(digits):
    [found] = batches(split(digits, "none", calibration=4, evaluation=1, seed=0).calibration, PREPROCESS, 4)
    return found


@pytest.fixture(scope="module")
def ranges(small_export, pixels):
    found = observe(load_graph(small_export / "model.onnx"), [pixels], PREPROCESS)
    return {name: range_of(each) for name, each in found.items()}


def placed(small_export, ranges, target):
    model = load_graph(small_export / "model.onnx")
    return model, place(model, ranges, target)


def run(model, pixels):
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: pixels})[0]


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_quantized_inputs_are_found_with_the_layers_that_read_them(small_export, ranges, target):
    model, placement = placed(small_export, ranges, target)
    found = find_quantized(model)
    assert [layer for each in found for layer in each.layers] == list(placement.int8)
    inputs = {each.name: str(each.input.name) for each in find_linears(load_graph(small_export / "model.onnx"))}
    for each in found:
        assert {each.tensor.removesuffix("/unit")} == {inputs[layer] for layer in each.layers}


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_float_graph_has_nothing_quantized(small_export, target):
    model = load_graph(small_export / "model.onnx")
    assert find_quantized(model) == []
    make_float(model, [str(each.input.name) for each in find_linears(model)])
    assert len(model.graph) == len(load_graph(small_export / "model.onnx").graph)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_all_of_it_made_float_is_the_float_graph_with_rounded_weights(small_export, ranges, pixels, target):
    model, _ = placed(small_export, ranges, target)
    make_float(model, [each.tensor for each in find_quantized(model)])
    assert not {"QuantizeLinear", "DequantizeLinear", "MatMulIntegerToFloat"} & {n.op_type for n in model.graph}
    rounded = load_graph(small_export / "model.onnx")
    editor = Editor(rounded)
    for linear in editor.linears:
        if linear.name in choose(rounded, target).int8:
            factor = np.float32(255 if linear.kind == "conv" else 1)  # its pixels are in 0..1 there
            integers, scales = quantize_weight(linear.weight * factor, linear.out_axis)
            shape = [-1 if axis == linear.out_axis else 1 for axis in range(linear.weight.ndim)]
            editor.set_linear(linear, integers * scales.reshape(shape) / factor)
    np.testing.assert_allclose(run(model, pixels), run(rounded, pixels), atol=2e-5)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_one_tensor_made_float_leaves_all_others_as_they_were(small_export, ranges, target):
    model, placement = placed(small_export, ranges, target)
    before = find_quantized(model)
    make_float(model, [before[2].tensor])
    assert find_quantized(model) == [*before[:2], *before[3:]]
    assert count_int8(model) == len(placement.int8) - len(before[2].layers)


def test_quantized_outputs_are_those_of_queries_and_keys_and_can_be_made_float(small_export, pixels):
    model, target = load_graph(small_export / "model.onnx"), "openvino-cpu"
    optimize(model, OptimizeOptions())  # the factor of the scores stands in the way otherwise
    shape(model, target)
    prepared = prepare(model, observe(model, [pixels], PREPROCESS), choose(model, target))
    place(model, prepared.ranges, target, (), prepared.weights)
    outputs = [each for each in find_quantized(model) if each.output]
    assert outputs
    before = sum(node.op_type == "QuantizeLinear" for node in model.graph)
    makers = {node.name.rpartition("/")[0] for node in model.graph}
    assert all(layer in makers for each in outputs for layer in each.layers)
    make_float(model, [each.tensor for each in outputs])
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph) == before - len(outputs)
    assert not any(each.output for each in find_quantized(model))

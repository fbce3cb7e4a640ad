"""Levels of feature maps that become one list of tokens, as all detectors with deformable attention have them."""

import numpy as np
import onnx_ir as ir
import pytest

from tests.graph.small_graphs import Builder
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.quantization.placement import place, shape
from vitdeploy.quantization.ranges import Range
from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner

WIDTH = 128  # as many weights as no target takes for a small layer


def levels():
    b = Builder(0)
    tokens = []
    for i, x in enumerate(("x", "y")):
        weight = b.constant(b.random(WIDTH, WIDTH, 1, 1) * 0.1, f"level{i}.weight")
        maps = b.op("Relu", b.op("Conv", x, weight, name=f"level{i}/Conv", kernel_shape=[1, 1]))
        maps = b.op("Conv", maps, weight, name=f"next{i}/Conv", kernel_shape=[1, 1])
        tokens.append(b.op("Transpose", b.op("Reshape", maps, b.ints(0, WIDTH, -1)), perm=[0, 2, 1]))
    tokens = b.op("Concat", *tokens, axis=1)
    inputs = {"x": ["batch", WIDTH, 12, 12], "y": ["batch", WIDTH, 6, 6]}
    return b.model(inputs, b.linear(tokens, WIDTH, WIDTH, "value"), b.linear(tokens, WIDTH, WIDTH, "score"))


@pytest.mark.parametrize("batch", [1, 2])
def test_openvino_runs_tokens_of_several_levels_in_int8(batch, tmp_path):
    """It refuses a graph whose levels are transposed one by one: "cannot be broadcasted (numpy mode) to 1"."""
    model = levels()
    ir.save(model, tmp_path / "float.onnx")
    shape(model, "openvino-cpu")
    names = {str(linear.input.name) for linear in find_linears(model)}
    placement = place(
        model, {name: Range(-4.0, 4.0) if name in "xy" else Range(-2.0, 2.0) for name in names}, "openvino-cpu"
    )
    assert count_int8(model) == len(placement.int8) == 6
    ir.save(model, tmp_path / "int8.onnx")
    generator = np.random.default_rng(0)
    feeds = {"x": generator.normal(size=(batch, WIDTH, 12, 12)), "y": generator.normal(size=(batch, WIDTH, 6, 6))}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    with (
        OnnxRuntimeRunner(tmp_path / "float.onnx", name="float") as original,
        OpenVinoRunner(tmp_path / "int8.onnx", name="int8", batch=batch, options=options) as engine,
    ):
        expected, found = original.infer(feeds), engine.infer(feeds)
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() < 0.1 * np.abs(value).max()

"""uint8 pixels in front of a graph: the same numbers as the numpy preprocessing, and inputs that it does not fit."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import graph_spec, save_graph
from vitdeploy.graph.io.inputs import take_pixels
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec, TensorSpec

SPEC = PreprocessSpec(4, (4, 6), "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def two_readers(shape=("batch", 3, 4, 6), kind=TensorProto.FLOAT):
    """ "same": the input itself; "twice": the input added to itself. So every reader of the input is seen."""
    nodes = [helper.make_node("Identity", ["image"], ["same"]), helper.make_node("Add", ["image", "image"], ["twice"])]
    values = [helper.make_tensor_value_info(name, kind, shape) for name in ("image", "same", "twice")]
    graph = helper.make_graph(nodes, "two", values[:1], values[1:])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))


@pytest.mark.parametrize("shape", [("batch", 3, 4, 6), (2, 3, 4, 6), ("batch", 3, "height", "width")], ids=str)
@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_the_graph_computes_the_preprocessing_of_the_runtime(tmp_path, shape, order):
    model, spec = two_readers(shape), dataclasses.replace(SPEC, channel_order=order)
    take_pixels(model, spec)
    save_graph(model, tmp_path / "model.onnx")  # which the ONNX checker passes
    assert graph_spec(model, "").inputs == (TensorSpec("image", "uint8", (shape[0], 4, 6, 3)),)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)
    with OnnxRuntimeRunner(tmp_path / "model.onnx", name="pixels") as runner:
        found = runner.infer({"image": pixels})
    expected = normalise(pixels, spec)
    np.testing.assert_allclose(found["same"], expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(found["twice"], 2 * expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (("batch", 1, 4, 6), TensorProto.FLOAT),
        (("batch", 3, 6, 4), TensorProto.FLOAT),
        (("batch", 3, 24), TensorProto.FLOAT),
        (("batch", 3, 4, 6), TensorProto.UINT8),
        (None, TensorProto.FLOAT),
    ],
    ids=str,
)
def test_an_input_of_another_shape_or_type_is_refused(shape, kind):
    model = two_readers(shape, kind)
    with pytest.raises(GraphError, match="does not fit the graph's input") as caught:
        take_pixels(model, SPEC)
    assert caught.value.expected == "float32 [batch, 3, 4, 6]"
    assert [node.op_type for node in model.graph] == ["Identity", "Add"]

"""Images with channels last, weights listed as inputs, half precision, nodes out of order: what others write."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.graph.builder import Builder, difference, run, values
from vitdeploy.errors import GraphError
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.admit import admit
from vitdeploy.graph.io.files import import_graph, serialised

SIDE = 8


def classifier(b, image, channels):
    """Logits of the mean over an image [batch, channels, height, width]."""
    x = b.add("Conv", image, values(4, channels, 3, 3))
    return b.add("MatMul", b.add("ReduceMean", x, axes=[2, 3], keepdims=0), values(4, 5, seed=1))


@pytest.mark.parametrize(("channels", "size", "both"), [(3, 8, False), (1, 8, True), (3, 4, False)])
def test_an_image_with_channels_last_is_taken_with_channels_first(tmp_path, channels, size, both):
    b = Builder(13)
    image = b.input("image", ["batch", size, size, channels])
    logits = classifier(b, b.add("Transpose", image, perm=[0, 3, 1, 2]), channels)
    if both:  # and as it is
        logits = b.add("Add", logits, b.add("ReduceMean", image, axes=[1, 2, 3], keepdims=0))
        logits = b.add("Identity", b.add("Reshape", logits, np.array([-1, 5])))
    proto = b.model(logits, rank=2)
    onnx.save(proto, str(tmp_path / "a.onnx"))
    found = import_graph(tmp_path / "a.onnx")
    assert list(found.model.graph.inputs[0].shape)[1:] == [channels, size, size]
    assert found.notes[0].startswith("the image has its channels last")
    assert sum(node.op_type == "Transpose" for node in found.model.graph) == both
    pixels = values(2, size, size, channels)[: 1 if both else 2]
    [expected] = run(proto, image=pixels)
    [ours] = run(onnx.load_from_string(serialised(found.model)), image=pixels.transpose(0, 3, 1, 2))
    assert difference(ours, expected) <= 1e-6


def test_an_image_with_channels_first_stays(tmp_path):
    b = Builder(13)
    onnx.save(b.model(classifier(b, b.input("image", ["batch", 3, 4, 4]), 3), rank=2), str(tmp_path / "a.onnx"))
    found = import_graph(tmp_path / "a.onnx")
    assert list(found.model.graph.inputs[0].shape)[1:] == [3, 4, 4]
    assert not any("channels last" in note for note in found.notes)


def test_weights_listed_among_the_inputs_are_none(tmp_path):
    b = Builder(13)
    proto = b.model(classifier(b, b.input("image", ["batch", 3, SIDE, SIDE]), 3), rank=2)
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    onnx.save(proto, str(tmp_path / "a.onnx"))
    found = import_graph(tmp_path / "a.onnx")
    assert [value.name for value in found.model.graph.inputs] == ["image"]


def in_half(proto):
    """Weights, constants, inputs and outputs in float16."""
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return proto


def test_a_graph_in_half_precision_is_computed_in_float32(tmp_path):
    b = Builder(17)
    x = classifier(b, b.input("image", ["batch", 3, SIDE, SIDE]), 3)
    erf = b.add("Erf", b.add("Div", x, np.float32(2**0.5)))
    proto = in_half(b.model(b.add("Mul", b.add("Mul", x, b.add("Add", erf, np.float32(1))), np.float32(0.5)), rank=2))
    onnx.save(proto, str(tmp_path / "a.onnx"))
    found = import_graph(tmp_path / "a.onnx")
    assert found.notes[0] == "the graph is in float16: it is computed in float32, with the same weights"
    assert {value.dtype for value in (*found.model.graph.inputs, *found.model.graph.outputs)} == {ir.DataType.FLOAT}
    pixels = values(2, 3, SIDE, SIDE)
    [rounded] = run(proto, image=pixels.astype(np.float16))
    before = serialised(found.model)
    normalise(found.model)
    assert [node.op_type for node in found.model.graph if node.op_type in ("Gelu", "Erf")] == ["Gelu"]
    [ours] = run(onnx.load_from_string(serialised(found.model)), image=pixels)
    [expected] = run(onnx.load_from_string(before), image=pixels)
    assert difference(ours, expected) <= 1e-6  # sqrt(2), too, has its digits again
    assert difference(ours, rounded.astype(np.float32)) <= 5e-3


def test_nodes_out_of_order_are_sorted_and_a_circle_is_refused(tmp_path):
    b = Builder(17)
    proto = b.model(classifier(b, b.input("image", ["batch", 3, SIDE, SIDE]), 3), rank=2)
    nodes = [node.name for node in proto.graph.node]
    backwards = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(backwards)
    onnx.save(proto, str(tmp_path / "a.onnx"))
    assert [node.name for node in admit(tmp_path / "a.onnx").graph] == nodes
    proto.graph.node[-1].input[0] = proto.graph.output[0].name
    onnx.save(proto, str(tmp_path / "a.onnx"))
    with pytest.raises(GraphError, match="not a valid ONNX file"):
        admit(tmp_path / "a.onnx")


@pytest.mark.parametrize("inner", ["logits", "image"])
def test_a_value_inside_that_has_one_of_our_names_takes_another(tmp_path, inner):
    b = Builder(17)
    logits = classifier(b, b.add("Mul", b.input("pixels", ["batch", 3, SIDE, SIDE]), 1.0), 3)
    proto = b.model(b.add("Mul", logits, 2.0), rank=2)
    old = next(node for node in proto.graph.node if node.op_type == "MatMul").output[0]
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [inner if name == old else name for name in names]
    onnx.save(proto, str(tmp_path / "a.onnx"))
    imported = onnx.load_from_string(serialised(import_graph(tmp_path / "a.onnx").model))
    images = values(2, 3, SIDE, SIDE)
    assert np.array_equal(run(imported, image=images)[0], run(proto, pixels=images)[0])

"""Open sizes of a graph's image input: given by the user, channels by the convolution."""

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from vitdeploy.errors import GraphError
from vitdeploy.graph.io.inputs import set_image_size

OPEN = ["batch_size", "num_channels", "height", "width"]


def graph(shape, *, group=1, node="Conv"):
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 3, 2, 2], [0.0] * 48)
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", [None] * 4))]
    made = (
        helper.make_node("Conv", ["x", "w"], ["y"], group=group)
        if node == "Conv"
        else helper.make_node(node, ["x"], ["y"])
    )
    proto = helper.make_model(
        helper.make_graph([made], "g", tensors[:1], tensors[1:], [weight] if node == "Conv" else [])
    )
    return ir.from_proto(proto)


def sizes(model):
    return [size if isinstance(size, int) else str(size.value) for size in model.graph.inputs[0].shape]


def test_open_sizes_are_set_and_channels_are_the_convolutions():
    for group in (1, 2):
        model = graph(OPEN, group=group)
        set_image_size(model, (32, 48))
        assert sizes(model) == ["batch_size", 3 * group, 32, 48]


@pytest.mark.parametrize("size", [None, (32, 48)])
def test_sizes_that_the_graph_has_stay(size):
    model = graph([2, 3, 32, 48])
    set_image_size(model, size)
    assert sizes(model) == [2, 3, 32, 48]


def test_an_input_that_is_no_image_stays():
    model = graph(["n", 7], node="Relu")
    set_image_size(model, (32, 48))
    assert sizes(model) == ["n", 7]


@pytest.mark.parametrize(
    ("shape", "node", "size", "message", "fix"),
    [
        (OPEN, "Conv", None, "takes images of any size", "--image-size"),
        (["n", 3, 32, "w"], "Conv", (48, 48), "takes images of a different size", "export the model again"),
        (OPEN, "Relu", (48, 48), "number of image channels is unknown", "export the model again"),
    ],
)
def test_sizes_that_nothing_tells_or_that_contradict_the_graph_are_refused(shape, node, size, message, fix):
    with pytest.raises(GraphError, match=message) as caught:
        set_image_size(graph(shape, node=node), size)
    assert fix in caught.value.fix

"""Outputs of other people's graphs that are heat maps or pictures: by their names, or because they are asked for."""

import onnx
import pytest
from onnx import TensorProto, helper

from vitdeploy.errors import GraphError
from vitdeploy.graph.io.external import import_graph
from vitdeploy.spec import ImageSpec, KeypointSpec

FLOAT = TensorProto.FLOAT


@pytest.fixture
def graph(tmp_path):
    """graph(name, channels): a graph from an image to the first of its channels, by that name."""

    def write(name, channels=3):
        image = helper.make_tensor_value_info("image", FLOAT, ["n", 3, 8, 8])
        found = helper.make_tensor_value_info(name, FLOAT, ["n", channels, 8, 8])
        one = helper.make_tensor("split", TensorProto.INT64, [2], [channels, 3 - channels])
        node = (
            helper.make_node("Sigmoid", ["image"], [name])
            if channels == 3
            else helper.make_node("Split", ["image", "split"], [name, "rest"], axis=1)
        )
        made = helper.make_graph([node], "theirs", [image], [found], [one] if channels < 3 else [])
        opsets = [helper.make_opsetid("", 18)]
        onnx.save(helper.make_model(made, opset_imports=opsets, ir_version=9), tmp_path / "theirs.onnx")
        return tmp_path / "theirs.onnx"

    return write


@pytest.mark.parametrize(
    ("name", "channels", "asked", "task", "output", "spec"),
    [
        ("heatmaps", 2, None, "keypoints", "heatmaps", KeypointSpec()),
        ("output", 2, "keypoints", "keypoints", "heatmaps", KeypointSpec()),
        ("reconstruction", 3, None, "image-to-image", "reconstruction", ImageSpec()),
        ("enhanced", 3, "image-to-image", "image-to-image", "reconstruction", ImageSpec()),
        ("grey", 1, "image-to-image", "image-to-image", "reconstruction", ImageSpec()),
    ],
)
def test_a_map_or_a_picture_is_found(graph, name, channels, asked, task, output, spec):
    found = import_graph(graph(name, channels), task=asked)
    assert (found.task, found.postprocess) == (task, spec)
    assert [value.name for value in found.model.graph.outputs] == [output]


def test_two_channels_are_no_picture(graph):
    with pytest.raises(GraphError):
        import_graph(graph("output", 2), task="image-to-image")

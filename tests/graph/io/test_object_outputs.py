"""Outputs of other people's graphs that are heat maps, pictures or anomalies: by their names, or because they are asked
for."""

import onnx
import pytest
from onnx import TensorProto, helper

from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import import_graph
from vitdeploy.runtime.tasks.anomaly import GIVEN
from vitdeploy.runtime.tasks.image_to_image import ImageSpec
from vitdeploy.runtime.tasks.keypoints import KeypointSpec

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


def test_a_map_with_a_score_is_anomalibs(tmp_path):
    """Its four outputs, of which the verdicts are computed of the others and left out."""
    image = helper.make_tensor_value_info("input", FLOAT, ["batch_size", 3, 8, 8])
    half = helper.make_tensor("half", FLOAT, [], [0.5])
    nodes = [
        helper.make_node("ReduceMean", ["input"], ["grey"], keepdims=1, axes=[1]),
        helper.make_node("Sigmoid", ["grey"], ["anomaly_map"]),
        helper.make_node("ReduceMax", ["anomaly_map"], ["largest"], keepdims=0, axes=[2, 3]),
        helper.make_node("Identity", ["largest"], ["pred_score"]),
        helper.make_node("Greater", ["pred_score", "half"], ["pred_label"]),
        helper.make_node("Greater", ["anomaly_map", "half"], ["pred_mask"]),
    ]
    outputs = [
        helper.make_tensor_value_info("pred_score", FLOAT, ["batch_size", 1]),
        helper.make_tensor_value_info("pred_label", TensorProto.BOOL, ["batch_size", 1]),
        helper.make_tensor_value_info("anomaly_map", FLOAT, ["batch_size", 1, 8, 8]),
        helper.make_tensor_value_info("pred_mask", TensorProto.BOOL, ["batch_size", 1, 8, 8]),
    ]
    made = helper.make_graph(nodes, "theirs", [image], outputs, [half])
    opsets = [helper.make_opsetid("", 14)]
    onnx.save(helper.make_model(made, opset_imports=opsets, ir_version=9), tmp_path / "theirs.onnx")
    found = import_graph(tmp_path / "theirs.onnx")
    assert (found.task, found.postprocess) == ("anomaly", GIVEN)
    assert [value.name for value in found.model.graph.outputs] == ["anomaly_map", "pred_score"]

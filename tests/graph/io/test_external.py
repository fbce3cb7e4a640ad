"""ONNX files of others: which task their outputs are of, and that their function is kept."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitdeploy.errors import GraphError, MissingFileError
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.files import graph_spec, import_graph, serialised
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.tasks.depth import DepthSpec
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.instance_segmentation import PAIRS_ASSUMED, QUERIES_ASSUMED, InstanceSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.runtime.tasks.tensors import TensorsSpec
from vitdeploy.spec import TensorSpec

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
SHAPES = {
    "logits": ("batch", 5, 4),
    "boxes": ("batch", 5, 4),
    "masks": ("batch", 5, 2, 2),
    "features": ("batch", 6),
    "patch_features": ("batch", 5, 6),
    "flat": ("batch", 4),
    "labels": ("batch", 5),
    "scores": ("batch", 5),
}


def saved(path, outputs, *, image=("batch", 3, 4, 4), image_type=FLOAT, name="pixel_values", sizes=None):
    """A file with the `outputs`: name -> what it is (a key of SHAPES), each another constant times the mean pixel."""
    inputs = [helper.make_tensor_value_info(name, image_type, image)]
    nodes = [helper.make_node("ReduceMean", [name], ["mean"], axes=[1, 2, 3], keepdims=0)]
    constants, values = [], []
    if sizes is not None:
        inputs.append(helper.make_tensor_value_info("orig_target_sizes", INT64, sizes))
        nodes.append(helper.make_node("Cast", ["orig_target_sizes"], ["sizes"], to=FLOAT))
        nodes.append(helper.make_node("Concat", ["sizes", "sizes"], ["whwh"], axis=1))
        nodes.append(helper.make_node("Unsqueeze", ["whwh", "one"], ["scale"]))
        constants.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    for number, (output, kind) in enumerate(outputs.items()):
        shape = SHAPES[kind]
        weight = np.random.default_rng(number).uniform(0.1, 1, (1, *shape[1:])).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"w{number}"))
        constants.append(numpy_helper.from_array(np.array([-1, *[1] * (len(shape) - 1)], np.int64), f"s{number}"))
        nodes.append(helper.make_node("Reshape", ["mean", f"s{number}"], [f"m{number}"]))
        last = f"p{number}" if kind == "labels" or (kind == "boxes" and sizes is not None) else output
        nodes.append(helper.make_node("Mul", [f"m{number}", f"w{number}"], [last]))
        if kind == "labels":
            nodes.append(helper.make_node("Cast", [last], [output], to=INT64))
        elif last != output:
            nodes.append(helper.make_node("Mul", [last, "scale"], [output]))
        values.append(helper.make_tensor_value_info(output, INT64 if kind == "labels" else FLOAT, shape))
    graph = helper.make_graph(nodes, "external", inputs, values, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def infer(graph, **feeds):
    with OnnxRuntimeRunner(graph, name="graph") as runner:
        return runner.infer(feeds)


DETECTION, PANOPTIC, GIVEN = PostprocessSpec(), PostprocessSpec(), PostprocessSpec(scores="given", boxes="xyxy")


@pytest.mark.parametrize(
    ("outputs", "task", "postprocess", "names", "left"),
    [
        ({"logits": "logits", "pred_boxes": "boxes"}, "detection", DETECTION, ["logits", "boxes"], ""),
        ({"pred_boxes": "boxes", "pred_logits": "logits"}, "detection", DETECTION, ["logits", "boxes"], ""),
        (
            {"logits": "logits", "pred_boxes": "boxes", "pred_masks": "masks", "last_hidden_state": "patch_features"},
            "panoptic",
            PANOPTIC,
            ["logits", "boxes", "masks"],
            "last_hidden_state",
        ),
        (
            {"scores": "scores", "labels": "labels", "boxes": "boxes"},
            "detection",
            GIVEN,
            ["labels", "boxes", "scores"],
            "",
        ),
        ({"scores": "flat"}, "classification", None, ["logits"], ""),
        ({"logits": "flat", "embedding": "features"}, "classification", None, ["logits"], "embedding"),
        ({"logits": "flat", "hidden": "patch_features"}, "classification", None, ["logits"], "hidden"),
        (
            {"last_hidden_state": "patch_features", "pooler_output": "features"},
            "features",
            None,
            ["features", "patch_features"],
            "",
        ),
        ({"image_embeds": "features"}, "features", None, ["features"], ""),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_task_is_known_by_the_names_of_the_outputs(tmp_path, outputs, task, postprocess, names, left):
    path = saved(tmp_path / "external.onnx", outputs)
    found = import_graph(path)
    assert (found.task, found.postprocess) == (task, postprocess)
    told = (f"outputs: left out, and not compared: {left}",) if left else ()
    assert found.notes == (*told, f"imported from external.onnx: {task}, opset 17")
    spec = graph_spec(found.model, "")
    assert spec.inputs == (TensorSpec("image", "float32", ("batch", 3, 4, 4)),)
    assert [tensor.name for tensor in spec.outputs] == names
    image = np.random.default_rng(9).standard_normal((2, 3, 4, 4)).astype(np.float32)
    before, after = infer(path, pixel_values=image), infer(serialised(found.model), image=image)
    assert set(after) == set(names)
    for name, array in after.items():
        [same] = [a for a in before.values() if a.shape == array.shape and np.array_equal(a, array)]
        assert same.dtype == array.dtype, name


@pytest.mark.parametrize("sizes", [("batch", 2), (1, 2)], ids=str)
def test_boxes_scaled_by_an_input_become_relative_to_the_image(tmp_path, sizes):
    outputs = {"labels": "labels", "boxes": "boxes", "scores": "scores"}
    path = saved(tmp_path / "detector.onnx", outputs, sizes=sizes)
    found = import_graph(path)
    assert found.notes[0] == "the input orig_target_sizes is bound to 1: boxes are relative to the image"
    assert [value.name for value in found.model.graph.inputs] == ["image"]
    normalise(found.model)
    image = np.random.default_rng(9).standard_normal((3, 3, 4, 4)).astype(np.float32)
    count = 3 if sizes[0] == "batch" else 1
    before = infer(path, pixel_values=image, orig_target_sizes=np.full((count, 2), 100, np.int64))
    after = infer(serialised(found.model), image=image)
    np.testing.assert_allclose(100 * after["boxes"], before["boxes"], rtol=1e-6)
    np.testing.assert_array_equal(after["scores"], before["scores"])


def test_outputs_that_are_not_of_the_task_go_with_what_only_they_need(tmp_path):
    path = saved(tmp_path / "external.onnx", {"logits": "flat", "extra": "features"})
    found = import_graph(path, task="classification")
    assert found.notes[0] == "outputs: left out, and not compared: extra"
    assert len(found.model.graph) == len(onnx.load(str(path)).graph.node) - 2  # its Reshape and Mul
    assert set(found.model.graph.initializers) == {"w0", "s0"}
    assert found.parameters == 4 + 2


@pytest.mark.parametrize(("batch", "expected"), [("N", "batch"), (3, 3)])
def test_a_dynamic_batch_of_any_name_is_called_ours(tmp_path, monkeypatch, batch, expected):
    monkeypatch.setitem(SHAPES, "flat", (batch, 4))
    spec = graph_spec(import_graph(saved(tmp_path / "a.onnx", {"y": "flat"}, image=(batch, 3, 4, 4))).model, "")
    assert (spec.inputs[0].shape[0], spec.outputs[0].shape) == (expected, (expected, 4))


@pytest.mark.parametrize(
    ("kind", "shape", "found"),
    [
        (TensorProto.UINT8, ("batch", 4, 4, 3), "x: UINT8"),
    ],
    ids=["pixels"],
)
def test_a_graph_that_does_not_take_one_float_image_is_refused(tmp_path, kind, shape, found):
    values = [helper.make_tensor_value_info(name, kind, size) for name, size in (("x", shape), ("logits", ("b", 48)))]
    graph = helper.make_graph([helper.make_node("Flatten", ["x"], ["logits"])], "a", values[:1], values[1:])
    path = tmp_path / "a.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    with pytest.raises(GraphError, match="does not take one image") as caught:
        import_graph(path)
    assert caught.value.found.startswith(found)


def test_a_second_input_is_refused(tmp_path):
    path = saved(tmp_path / "a.onnx", {"logits": "flat"}, sizes=("batch", 2))
    proto = onnx.load(str(path))
    proto.graph.input[1].name = "mask"
    proto.graph.node[1].input[0] = "mask"
    onnx.save(proto, str(path))
    with pytest.raises(GraphError, match="does not take one image") as caught:
        import_graph(path)
    assert "mask: INT64" in caught.value.found


@pytest.mark.parametrize(
    ("outputs", "exact"),
    [({"a": "flat", "b": "features"}, ()), ({"boxes": "boxes"}, ()), ({"labels": "labels", "m": "masks"}, ("labels",))],
    ids=str,
)
def test_outputs_of_no_task_are_numbers_by_their_own_names(tmp_path, outputs, exact):
    found = import_graph(saved(tmp_path / "a.onnx", outputs))
    assert (found.task, found.postprocess) == ("tensors", TensorsSpec(exact))
    assert [value.name for value in found.model.graph.outputs] == list(outputs)
    assert found.notes[0].startswith("the outputs fit no known task")
    asked = import_graph(saved(tmp_path / "b.onnx", {"logits": "flat"}), task="tensors")
    assert asked.task == "tensors" and len(asked.notes) == 1


@pytest.mark.parametrize(
    ("outputs", "asked", "postprocess", "names", "note"),
    [
        ({"logits": "masks"}, None, SegmentationSpec(), ["logits"], "imported"),
        ({"class_queries_logits": "logits", "masks_queries_logits": "masks"}, None, SegmentationSpec("queries"),
         ["class_logits", "masks"], "masks are not enlarged"),
        ({"predicted_depth": "patch_features"}, None, DepthSpec(), ["depth"], "relative inverse depth"),
        ({"y": "masks"}, "segmentation", SegmentationSpec(), ["logits"], "imported"),
        ({"y": "patch_features"}, "depth", DepthSpec(), ["depth"], "relative inverse depth"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_answers_for_every_pixel_are_known_by_name_or_by_what_is_asked(
    tmp_path, outputs, asked, postprocess, names, note
):
    found = import_graph(saved(tmp_path / "a.onnx", outputs), task=asked)
    assert (found.task, found.postprocess) == (
        "depth" if isinstance(postprocess, DepthSpec) else "segmentation",
        postprocess,
    )
    assert [value.name for value in found.model.graph.outputs] == names and note in found.notes[0]


QUERIES = {"class_queries_logits": "logits", "masks_queries_logits": "masks"}
INDEPENDENT = InstanceSpec("sigmoid", enlarge="bilinear")


@pytest.mark.parametrize(
    ("outputs", "postprocess"),
    [
        (QUERIES, InstanceSpec()),
        ({"pred_masks": "masks", "pred_logits": "logits"}, InstanceSpec()),
        ({"dets": "boxes", "labels": "logits", "masks": "masks"}, INDEPENDENT),
    ],
    ids=["transformers", "papers", "RF-DETR"],
)
def test_queries_with_masks_are_instances_where_that_is_asked_for(tmp_path, outputs, postprocess):
    path = saved(tmp_path / "a.onnx", outputs)
    found = import_graph(path, task="instance-segmentation")
    assert (found.task, found.postprocess) == ("instance-segmentation", postprocess)
    assert [value.name for value in found.model.graph.outputs] == ["class_logits", "masks"]
    assert (found.notes[0] == PAIRS_ASSUMED) == (postprocess != INDEPENDENT)
    assert import_graph(path).task != "instance-segmentation"


def test_masks_of_scores_that_compete_are_no_instances_and_semantic_queries_say_that_they_may_be(tmp_path):
    panoptic = {"logits": "logits", "pred_boxes": "boxes", "pred_masks": "masks"}
    with pytest.raises(GraphError, match="cannot be used for the task") as caught:
        import_graph(saved(tmp_path / "a.onnx", panoptic), task="instance-segmentation")
    assert caught.value.found == "outputs of the task panoptic"
    assert caught.value.expected == "outputs of the task instance-segmentation"
    path = saved(tmp_path / "b.onnx", QUERIES)
    assert QUERIES_ASSUMED in import_graph(path).notes
    assert QUERIES_ASSUMED not in import_graph(path, task="segmentation").notes


def test_outputs_without_a_batch_or_of_text_are_refused_with_what_they_are(tmp_path):
    path = saved(tmp_path / "a.onnx", {"boxes": "boxes"})
    proto = onnx.load(path)
    proto.graph.node.append(helper.make_node("ReduceSum", ["boxes"], ["total"], keepdims=0))
    proto.graph.output.append(helper.make_tensor_value_info("total", FLOAT, ()))
    onnx.save(proto, str(path))
    with pytest.raises(GraphError, match="do not fit any task of vitdeploy") as caught:
        import_graph(path)
    assert "total: FLOAT[]" in caught.value.found and "any numbers [batch, ...]" in caught.value.expected


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MissingFileError, match="absent"):
        import_graph(tmp_path / "absent.onnx")

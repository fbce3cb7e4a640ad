"""`vitdeploy run` of instance segmentation, from somebody's graph and COCO's outlines to pictures of instances.

Labels are what ONNX Runtime and transformers' own processor find: the original has all of its metric only if it sees
the same pixels, and if every mask arrives where it belongs.
"""

import json
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image

from tests.command_line import command_line
from tests.references import reference
from vitdeploy.bundle.read import read_bundle
from vitdeploy.runtime import load
from vitdeploy.runtime.masks import RunLengths
from vitdeploy.runtime.tasks.instance_segmentation import InstanceSpec, overlaps

SIZE, QUERIES, CLASSES, IMAGES, CALIBRATION = (80, 48), 6, 3, 16, 6
HEAD = InstanceSpec(candidates="pairs", threshold=0.4)
TASK = "instance-segmentation"
TARGETS = ["openvino-cpu", "onnxruntime-cpu"]


@pytest.fixture(scope="module")
def command(tmp_path_factory, shared_store):
    with command_line(tmp_path_factory.mktemp("instances"), shared_store, short_bench=True) as command:
        yield command


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """images/, annotations.json, and model.onnx: queries with masks as transformers names them."""
    home, generator = tmp_path_factory.mktemp("home"), np.random.default_rng(1)
    shapes = {"w": (16, 3, 4, 4), "v": (16, 16, 3, 3), "m": (QUERIES, 16, 1, 1), "c": (16, QUERIES * (CLASSES + 1))}
    weights = {name: generator.normal(0, 0.35, shape).astype(np.float32) for name, shape in shapes.items()}
    weights["c"] *= 6
    weights["shape"] = np.array([-1, QUERIES, CLASSES + 1], np.int64)
    weights["half"] = np.array(0.5, np.float32)
    nodes = [
        helper.make_node("Sub", ["pixel_values", "half"], ["centred"]),
        helper.make_node("Conv", ["centred", "w"], ["stem"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Relu", ["stem"], ["first"]),
        helper.make_node("Conv", ["first", "v"], ["second"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["second", "m"], ["masks_queries_logits"], kernel_shape=[1, 1]),
        helper.make_node("Relu", ["second"], ["third"]),
        helper.make_node("ReduceMean", ["third"], ["pooled"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["pooled", "c"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], ["class_queries_logits"]),
    ]
    inputs = [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["n", 3, 64, 64])]
    outputs = [
        helper.make_tensor_value_info("class_queries_logits", TensorProto.FLOAT, ["n", QUERIES, CLASSES + 1]),
        helper.make_tensor_value_info("masks_queries_logits", TensorProto.FLOAT, ["n", QUERIES, 16, 16]),
    ]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "queries", inputs, outputs, initializers)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(home / "model.onnx")
    )
    (home / "images").mkdir()
    for i in range(IMAGES):
        coarse = Image.fromarray(generator.integers(0, 256, (3, 5, 3), np.uint8))
        coarse.resize(SIZE, Image.Resampling.BICUBIC).save(home / "images" / f"{i:02}.png")
    label(home)
    return home


def label(home):
    processor = reference("transformers").MaskFormerImageProcessor()
    session = onnxruntime.InferenceSession(str(home / "model.onnx"), providers=["CPUExecutionProvider"])
    entries, rows = [], []
    for path in sorted((home / "images").iterdir()):
        entries.append({"id": len(entries) + 1, "file_name": path.name, "width": SIZE[0], "height": SIZE[1]})
        pixels = np.asarray(Image.open(path).resize((64, 64), Image.Resampling.BILINEAR), np.float32) / 255
        answer = session.run(None, {"pixel_values": pixels.transpose(2, 0, 1)[None]})
        given = SimpleNamespace(
            class_queries_logits=torch.from_numpy(answer[0]), masks_queries_logits=torch.from_numpy(answer[1])
        )
        [found] = processor.post_process_instance_segmentation(
            given, threshold=HEAD.threshold, target_sizes=[SIZE[::-1]], return_binary_maps=True
        )
        for mask, told in zip(found["segmentation"], found["segments_info"], strict=True):
            runs = RunLengths.of(mask.numpy().astype(bool))
            rows.append({"image_id": len(entries), "category_id": told["label_id"], "segmentation": runs.to_dict()})
    categories = [{"id": i, "name": name} for i, name in enumerate(("ant", "bee", "cat"))]
    document = {"images": entries, "annotations": rows, "categories": categories}
    (home / "annotations.json").write_text(json.dumps(document))
    return rows


def test_instances_from_a_graph_to_pictures(command, home, tmp_path):
    (home / "labels.txt").write_text("ant\nbee\ncat\n")
    recipe = {
        "vitdeploy": 1,
        "name": "instances",
        "source": {"model": str(home / "model.onnx"), "task": TASK, "labels": str(home / "labels.txt")},
        "postprocess": {"candidates": "pairs", "threshold": HEAD.threshold},
        "data": {
            "path": str(home / "images"),
            "labels": "coco",
            "annotations": str(home / "annotations.json"),
            "calibration": {"images": CALIBRATION},
        },
        "targets": TARGETS,
        "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
        "budget": {"min_agreement": 0},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    report = command("run", tmp_path / "recipe.yaml", "-o", tmp_path / "bundle", "--json").document
    verified = {engine["artifact"]: engine["verify"] for engine in report["engines"]}
    for target in TARGETS:
        fp32, int8 = (verified[f"{target}-{precision}"] for precision in ("fp32", "int8"))
        assert (fp32["metric"], fp32["agreement"], fp32["mask_iou_mean"]) == ("mask mAP", 100.0, 1.0)
        assert fp32["reference_value"] == fp32["value"] == pytest.approx(100.0)
        assert fp32["drop_ci95"][0] < -5 and fp32["drop_ci95"][1] > 5  # ten images prove little
        assert int8["agreement"] > 80 and int8["mask_iou_mean"] > 0.9 and fp32["instances"] > 10
    assert any("read as Mask2Former's" in note for note in report["model"]["notes"])
    assert read_bundle(tmp_path / "bundle").postprocess == HEAD
    assert [panel["title"] for panel in report["examples"][0]["panels"]][::2] == ["original", "label"]
    page = (tmp_path / "bundle" / "report.html").read_text()
    assert "Mask mAP" in page and page.count("<figcaption>label</figcaption>") == len(report["examples"])

    options = ("--draw", tmp_path / "drawn", "--json")
    [found] = command("predict", tmp_path / "bundle", home / "images" / "03.png", *options).document["predictions"]
    assert found["drawn"] == [str(tmp_path / "drawn" / "03.png")]
    assert Image.open(found["drawn"][0]).size == SIZE
    with load(tmp_path / "bundle") as predictor:
        answer = predictor.predict(home / "images" / "03.png")
    assert answer.to_dict()["objects"] == found["objects"]
    # The engine may be an INT8 one, which moves a border by a cell.
    labels = json.loads((home / "annotations.json").read_text())
    names = {each["id"]: each["name"] for each in labels["categories"]}
    expected = [each for each in labels["annotations"] if each["image_id"] == 4]
    assert sorted(answer.labels) == sorted(names[each["category_id"]] for each in expected)
    for each in expected:
        known = RunLengths(SIZE, np.array(each["segmentation"]["counts"], np.int32))
        assert overlaps([known], [one.runs for one in answer.objects]).max() > 0.9

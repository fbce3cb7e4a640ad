"""`vitdeploy run` for tasks with an answer for every pixel, and for the task of last resort, up to `predict --draw`.

Labels are what the original itself answers by transformers' own image processors: an original has all of its metric
only if it sees the same pixels, and if every pixel of its map arrives where it belongs.
"""

from __future__ import annotations

import base64
import io
import json
import os

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image

from tests.command_line import command_line
from tests.dense_models import save
from tests.references import reference
from vitdeploy.bundle.read import read_bundle
from vitdeploy.runtime.tasks.depth import alike_share

IMAGES, CALIBRATION = 12, 4
SIZE = (80, 48)
TARGETS = ["openvino-cpu", "onnxruntime-cpu"]


@pytest.fixture(scope="module")
def command(tmp_path_factory, shared_store):
    with command_line(tmp_path_factory.mktemp("dense"), shared_store, short_bench=True) as command:
        yield command


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Lossless pictures of a few colours each."""
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(IMAGES):
        coarse = Image.fromarray(generator.integers(0, 256, (3, 5, 3), np.uint8))
        coarse.resize(SIZE, Image.Resampling.BICUBIC).save(folder / f"{i:02}.png")
    return folder


def run(command, folder, recipe):
    """A run's report; its bundle is `folder`."""
    bench = {"scenarios": ["single"], "batch": [1], "duration": 0.1}
    common = {"vitdeploy": 1, "name": "dense", "targets": TARGETS, "bench": bench, "budget": {"min_agreement": 0}}
    folder.with_suffix(".yaml").write_text(json.dumps({**common, **recipe}), encoding="utf-8")
    return command("run", folder.with_suffix(".yaml"), "-o", folder, "--json").document


def exported(command, folder, home):
    """The graph of a model folder as a recipe's source: it says itself what its outputs mean."""
    assert command("export", f"hf:{folder}", "-o", home / "exported").returncode == 0
    return {"model": str(home / "exported")}


def data(images, labels, annotations=None):
    where = {} if annotations is None else {"annotations": str(annotations)}
    return {"path": str(images), "labels": labels, **where, "calibration": {"images": CALIBRATION}}


def answers(folder, images, **settings):
    """By image: the module's outputs and transformers' image processor, at the original's size."""
    library = reference("transformers")
    config = json.loads((folder / "config.json").read_text())
    model = getattr(library, config["architectures"][0]).from_pretrained(folder).eval()
    processor = library.AutoImageProcessor.from_pretrained(folder, backend="pil", **settings)
    for path in sorted(images.iterdir()):
        with torch.no_grad():
            yield path, processor, model(**processor(Image.open(path), return_tensors="pt"))


def test_segmentation_from_a_folder_to_pictures(command, images, tmp_path):
    folder = save("SegFormer", tmp_path / "model")
    labels = tmp_path / "labels"
    labels.mkdir()
    for path, processor, outputs in answers(folder, images):
        found = processor.post_process_semantic_segmentation(outputs, [SIZE[::-1]])[0].numpy()
        Image.fromarray((found + 1).astype(np.uint8)).save(labels / path.name)  # do_reduce_labels: 1 is class 0
    recipe = {"source": exported(command, folder, tmp_path), "data": data(images, "masks", labels)}
    report = run(command, tmp_path / "bundle", recipe)
    verified = {engine["artifact"]: engine["verify"] for engine in report["engines"]}
    for target in TARGETS:
        assert verified[f"{target}-fp32"]["reference_value"] > 99.5 and verified[f"{target}-fp32"]["metric"] == "mIoU"
        assert verified[f"{target}-fp32"]["agreement"] > 99.9 and verified[f"{target}-fp32"]["max_difference"] < 1e-3
        assert verified[f"{target}-int8"]["agreement"] > 50
    assert read_bundle(tmp_path / "bundle").postprocess.reduce_labels is True
    example = report["examples"][0]
    assert [panel["title"] for panel in example["panels"]][::2] == ["original", "label"]
    page = (tmp_path / "bundle" / "report.html").read_text()
    assert page.count("<figcaption>label</figcaption>") == len(report["examples"])

    drawn = tmp_path / "drawn"
    options = ("--draw", drawn, "--json")
    [found] = command("predict", tmp_path / "bundle", images / "00.png", *options).document["predictions"]
    assert found["drawn"] == [str(drawn / "00.png"), str(drawn / "00.classes.png")]
    classes = np.asarray(Image.open(drawn / "00.classes.png"))
    # The engine may be an INT8 one, and the borders of seeded weights are nowhere sure.
    assert (classes == np.asarray(Image.open(labels / "00.png")) - 1).mean() > 0.5
    assert np.array_equal(classes, np.asarray(Image.open(io.BytesIO(base64.b64decode(found["map_png"])))))
    assert sum(each["area"] for each in found["classes"]) == SIZE[0] * SIZE[1]
    assert Image.open(drawn / "00.png").size == SIZE


@pytest.mark.skipif("VITDEPLOY_TEST_DEPTH" not in os.environ, reason="much as the walk; VITDEPLOY_TEST_DEPTH=1 runs it")
def test_depth_from_a_folder_to_pictures(command, images, tmp_path):
    folder = save("Depth Anything", tmp_path / "model")
    labels, maps = tmp_path / "labels", {}
    labels.mkdir()
    # An engine has one size: both sides are resized to it.
    for path, processor, outputs in answers(folder, images, keep_aspect_ratio=False):
        found = processor.post_process_depth_estimation(outputs, [SIZE[::-1]])[0]["predicted_depth"].numpy()
        maps[path.stem] = found
        np.save(labels / f"{path.stem}.npy", found)
    recipe = {"source": exported(command, folder, tmp_path), "data": data(images, "depth", labels)}
    report = run(command, tmp_path / "bundle", recipe)
    verified = {engine["artifact"]: engine["verify"] for engine in report["engines"]}
    for target in TARGETS:
        fp32, int8 = (verified[f"{target}-{precision}"] for precision in ("fp32", "int8"))
        assert (fp32["metric"], fp32["agreement"]) == ("delta-1", 100.0)
        assert fp32["reference_value"] > 99 and fp32["reference_abs_rel"] < 0.02
        assert int8["abs_rel"] < 0.2 and int8["agreement"] > 90
    drawn = tmp_path / "drawn"
    answer = command("predict", tmp_path / "bundle", images / "03.png", "--draw", drawn, "--json").document
    [found] = answer["predictions"]
    assert (found["values"], found["unit"], found["width"]) == ("metric", "m", SIZE[0])
    assert [name.rpartition("03")[2] for name in found["drawn"]] == [".png", ".npy", ".depth.png"]
    assert alike_share(np.load(drawn / "03.npy"), maps["03"], "metric") == 1.0
    whole = np.asarray(Image.open(drawn / "03.depth.png")) / 1000
    np.testing.assert_allclose(whole, np.load(drawn / "03.npy"), atol=6e-4)


def anything(path):
    """A graph of numbers without names that say anything: a map of floats, and the index of its best channel."""
    generator = np.random.default_rng(0)
    shapes = {"w": (6, 3, 4, 4), "m": (6, 6, 1, 1)}
    weights = {name: generator.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["stem"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Relu", ["stem"], ["hidden"]),
        helper.make_node("Conv", ["hidden", "m"], ["map"], kernel_shape=[1, 1]),
        helper.make_node("ArgMax", ["map"], ["best"], axis=1, keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 32, 32])]
    outputs = [
        helper.make_tensor_value_info("map", TensorProto.FLOAT, ["n", 6, 8, 8]),
        helper.make_tensor_value_info("best", TensorProto.INT64, ["n", 8, 8]),
    ]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "anything", inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def test_a_graph_of_no_task_is_taken_to_a_bundle_as_numbers(command, images, tmp_path):
    source = {"model": str(anything(tmp_path / "any.onnx"))}
    recipe = {"source": source, "data": data(images, "none"), "targets": ["openvino-cpu"]}
    report = run(command, tmp_path / "bundle", recipe)
    assert report["task"] == "tensors"
    assert any("--task segmentation can read them" in note for note in report["model"]["notes"])
    verified = {engine["artifact"]: engine["verify"] for engine in report["engines"]}
    fp32, int8 = (verified[f"openvino-cpu-{precision}"] for precision in ("fp32", "int8"))
    assert (fp32["agreement"], fp32["equal_min"]) == (100.0, 100.0)
    assert [each["name"] for each in int8["outputs"]] == ["map", "best"] and 10 < int8["snr_min"] < 60
    assert "Output by output" in (tmp_path / "bundle" / "report.html").read_text()
    [answer] = command("predict", tmp_path / "bundle", images / "00.png", "--json").document["predictions"]
    assert answer["outputs"]["map"]["shape"] == [6, 8, 8] and len(answer["outputs"]["best"]["values"]) == 8
    done = command("predict", tmp_path / "bundle", images / "00.png", "--draw", tmp_path / "no")
    assert done.returncode == 4 and "cannot be drawn" in done.stderr

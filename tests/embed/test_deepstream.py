"""The configuration and the parser for DeepStream: its keys are Gst-nvinfer's, and its objects are the Predictor's.

No DeepStream is here: the parser is compiled against `deepstream/`, a header with the documented names, and called as
Gst-nvinfer calls it.
"""

import configparser
import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.command_line import command_line
from tests.golden_bundle import golden_of
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import write_bundle
from vitdeploy.embed import deepstream
from vitdeploy.errors import CapabilityError, TargetError
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.runtime.postprocess import softmax
from vitdeploy.runtime.tasks.detection import detect
from vitdeploy.spec import EngineSpec, PostprocessSpec, PreprocessSpec

HERE = Path(__file__).parent / "deepstream"
QUERIES, CLASSES, HEIGHT, WIDTH = 12, 4, 32, 48
LABELS = ["car", "traffic; light", "do\tg", "person"]
# The keys of [property] and of [class-attrs-all] that are used here, as gstnvinfer_property_parser.h of
# NVIDIA/DeepStream 9.1 has them.
PUBLISHED = {
    *("gpu-id", "gie-unique-id", "process-mode", "onnx-file", "batch-size", "network-mode", "strongly-typed"),
    *("network-type", "net-scale-factor", "model-color-format", "network-input-order", "maintain-aspect-ratio"),
    *("scaling-filter", "labelfile-path", "custom-lib-path", "parse-bbox-func-name", "num-detected-classes"),
    *("cluster-mode", "parse-classifier-func-name", "classifier-threshold", "pre-cluster-threshold"),
}
HEADS = {
    "softmax": PostprocessSpec("softmax", "cxcywh", 0.3),
    "sigmoid": PostprocessSpec("sigmoid", "cxcywh", 0.4),
    "top-k": PostprocessSpec("sigmoid", "xyxy", 0.4, top_k=5),
    "given": PostprocessSpec("given", "xyxy", 0.2),
}


def graph(path, outputs, dtype=TensorProto.UINT8):
    """Pixels in, and for each output by name and shape a seeded linear of their mean."""
    generator, weights, nodes = np.random.default_rng(0), [], []
    nodes.append(helper.make_node("Cast", ["pixels"], ["x"], to=TensorProto.FLOAT))
    weights.append(numpy_helper.from_array(np.array([1, 2], np.int64), "axes"))
    nodes.append(helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0))
    told = []
    for name, shape in outputs.items():
        weight = generator.normal(0, 0.02, (3, int(np.prod(shape)))).astype(np.float32)
        weights += [numpy_helper.from_array(weight, f"{name}_w")]
        weights += [numpy_helper.from_array(np.array([-1, *shape], np.int64), f"{name}_shape")]
        nodes.append(helper.make_node("MatMul", ["mean", f"{name}_w"], [f"{name}_flat"]))
        nodes.append(helper.make_node("Reshape", [f"{name}_flat", f"{name}_shape"], [name]))
        told.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape]))
    pixels = helper.make_tensor_value_info("pixels", dtype, ["n", HEIGHT, WIDTH, 3])
    model = helper.make_model(
        helper.make_graph(nodes, "m", [pixels], told, weights), opset_imports=[helper.make_opsetid("", 20)]
    )
    onnx.save(model, path)


def bundle(folder, task="detection", head=HEADS["softmax"], preprocess=None, dtype=TensorProto.UINT8):
    """A bundle as `vitdeploy run` makes it where TensorRT is; nobody loads its plan here."""
    home, out = folder / "engine", folder / "bundle"
    for each in (home, out):
        each.mkdir()
    shapes = {"logits": (CLASSES,)}
    if task == "detection":
        shapes = {"logits": (QUERIES, CLASSES + (head.scores == "softmax")), "boxes": (QUERIES, 4)}
    graph(home / "graph.onnx", shapes, dtype)
    (home / "model.plan").write_bytes(b"a plan")
    spec = graph_spec(load_graph(home / "graph.onnx"), "graph.onnx")
    engine = EngineSpec("tensorrt", "fp16", "graph.onnx", ("model.plan",), 1, True, "GPU", spec.inputs, spec.outputs)
    pixels = np.random.default_rng(1).integers(0, 256, (2, HEIGHT, WIDTH, 3), np.uint8)
    session = onnxruntime.InferenceSession(home / "graph.onnx")
    feed = pixels if dtype == TensorProto.UINT8 else pixels.astype(np.float32)
    outputs = dict(zip(shapes, session.run(list(shapes), {"pixels": feed}), strict=True))
    write_bundle(
        out, name="street", task=task, graphs={"model": (home / "graph.onnx", spec)},
        preprocess=preprocess or PreprocessSpec((HEIGHT, WIDTH), (HEIGHT, WIDTH), "bilinear"),
        postprocess=head if task == "detection" else None, labels=LABELS, engines=[(engine, home)],
        golden=golden_of({"pixels": pixels}, outputs, engine.artifact, 1e-2),
    )  # fmt: skip
    return out


def written(folder, out):
    out.mkdir()
    assert deepstream.write(folder, out) == ["make"]
    config = configparser.ConfigParser()
    config.read(out / "config_infer.txt")
    return config


def built(out, *options):
    """The program that calls the parser as Gst-nvinfer does."""
    if shutil.which("g++") is None:
        pytest.skip("install g++")
    program = out / "program"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *options, f"-I{HERE}"]
    command += [f'-DPARSER="{out / "parser.cpp"}"', str(HERE / "main.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def called(program, folder, outputs, threshold):
    """The lines that it prints as numbers, [n, columns]."""
    types = {"float32": 0, "int64": 4, "int32": 3}
    told = []
    for name, array in outputs.items():
        array.tofile(folder / name)
        told.append(f"{name}:{types[array.dtype.name]}:{array.size}")
    arguments = [str(each) for each in (folder, WIDTH, HEIGHT, CLASSES, threshold, *told)]
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.array([line.split() for line in done.stdout.splitlines()], np.float64)


@pytest.mark.parametrize("kind", HEADS)
def test_objects_are_the_predictors(kind, tmp_path):
    head = HEADS[kind]
    # The graph of the bundle has logits; what the parser reads is written by the head alone.
    made = bundle(tmp_path, head=head)
    config = written(made, tmp_path / "out")
    assert (config["property"]["network-type"], config["property"]["cluster-mode"]) == ("0", "4")
    assert float(config["class-attrs-all"]["pre-cluster-threshold"]) == head.threshold
    program = built(tmp_path / "out", "-DBOXES")
    generator = np.random.default_rng(3)
    for case in range(4):
        boxes = generator.random((QUERIES, 4), np.float32)
        if head.boxes == "xyxy":
            boxes = np.concatenate([boxes[:, :2] / 2, boxes[:, :2] / 2 + boxes[:, 2:] / 2], axis=1)
        outputs = {"boxes": boxes}
        if head.scores == "given":
            kinds = (np.int64, np.int32, np.float32)
            labels = generator.integers(0, CLASSES, QUERIES).astype(kinds[case % 3])
            outputs |= {"scores": generator.random(QUERIES, np.float32), "labels": labels}
        else:
            columns = CLASSES + (head.scores == "softmax")
            outputs |= {"logits": generator.normal(0, 2, (QUERIES, columns)).astype(np.float32)}
        plain = PreprocessSpec((HEIGHT, WIDTH), (HEIGHT, WIDTH), "bilinear")
        wanted = detect(outputs, (WIDTH, HEIGHT), plain, head, None).objects
        found = called(program, tmp_path, outputs, head.threshold)
        found = found[np.argsort(-found[:, 1], kind="stable")]
        assert len(found) == len(wanted) > 0
        assert found[:, 0].tolist() == [each.index for each in wanted]
        np.testing.assert_allclose(found[:, 1], [each.score for each in wanted], rtol=1e-6)
        np.testing.assert_allclose(found[:, 2:], [each.box for each in wanted], atol=1e-4)


def test_classes_are_the_predictors(tmp_path):
    config = written(bundle(tmp_path, task="classification"), tmp_path / "out")
    assert (config["property"]["network-type"], "class-attrs-all" in config) == ("1", False)
    assert (tmp_path / "out" / "labels.txt").read_text() == "car;traffic, light;do g;person\n"
    program = built(tmp_path / "out")
    logits = np.array([0.3, 4.0, -2.0, 3.5], np.float32)
    [[index, score]] = called(program, tmp_path, {"logits": logits}, 0.0)
    assert index == 1 and score == pytest.approx(softmax(logits).max(), rel=1e-6)
    assert called(program, tmp_path, {"logits": logits}, 0.9).size == 0


def test_every_key_is_one_of_gst_nvinfer(tmp_path):
    for index, task in enumerate(("detection", "classification")):
        home = tmp_path / str(index)
        home.mkdir()
        config = written(bundle(home, task=task), home / "out")
        assert {key for name in config.sections() for key in config[name]} <= PUBLISHED
        files = {config["property"][key] for key in ("onnx-file", "labelfile-path")}
        assert all((home / "out" / name).is_file() for name in files)
        assert f"{config['property']['custom-lib-path']}:" in (home / "out" / "Makefile").read_text()


def test_the_graph_takes_pixels_as_floats_and_gives_the_same(tmp_path):
    made = bundle(tmp_path)
    written(made, tmp_path / "out")
    pixels = np.load(made / "golden" / "inputs.npz")["pixels"]
    wanted = np.load(made / "golden" / "outputs.npz")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    found = session.run(["logits", "boxes"], {"pixels": pixels.astype(np.float32)})
    for name, array in zip(("logits", "boxes"), found, strict=True):
        np.testing.assert_array_equal(array, wanted[name])


def test_what_deepstream_cannot_do_is_refused(tmp_path, small_bundle):
    def refused(kind, match, **changes):
        home = tmp_path / match.replace(" ", "-")
        home.mkdir()
        (home / "out").mkdir()
        with pytest.raises(kind, match=match):
            deepstream.write(bundle(home, **changes), home / "out")

    cropped = PreprocessSpec(64, (HEIGHT, WIDTH))
    refused(CapabilityError, "does not crop or pad them", preprocess=cropped)
    refused(CapabilityError, "cannot feed this engine", dtype=TensorProto.FLOAT)
    (tmp_path / "out").mkdir()
    with pytest.raises(TargetError, match="no engine that DeepStream could run"):
        deepstream.write(small_bundle, tmp_path / "out")


def test_the_command_writes_it(tmp_path, shared_store):
    made = bundle(tmp_path)
    with command_line(tmp_path, shared_store) as run:
        done = run("embed", made, "--as", "deepstream", "-o", "street", "--json")
    assert done.document["commands"] == ["make"]
    wanted = ["Makefile", "README.md", "config_infer.txt", "labels.txt", "model.onnx", "parser.cpp"]
    assert sorted(done.document["files"]) == wanted
    assert read_bundle(made).engines[0].artifact == "tensorrt-fp16"
    assert dataclasses.asdict(read_bundle(made))["name"] == "street"

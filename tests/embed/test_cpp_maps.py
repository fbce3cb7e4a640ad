"""The C++ program of models with an answer for every pixel: its maps against the Predictor's."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import openvino.utils
import pytest
from onnx import TensorProto, helper
from PIL import Image

from tests.command_line import command_line
from tests.golden_bundle import golden_of
from vitdeploy.bundle.write import write_bundle
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.embed import cpp
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.runtime import load
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import engine_outputs
from vitdeploy.spec import DepthSpec, PreprocessSpec, SegmentationSpec

QUERIES, CLASSES = 7, 5
LABELS = ["sky", "road", "ca\tr", "wall", "tree"]


def graph(path, kind):
    """A graph of few seeded layers: queries with masks, class maps, or depth; it takes 32x48 pixels."""
    generator = np.random.default_rng(0)
    nodes, weights, outputs = [], [], []

    def convolution(name, channels, output):
        weight = generator.normal(0, 0.6, (channels, 3, 4, 4)).astype(np.float32)
        weights.append(onnx.numpy_helper.from_array(weight, name))
        nodes.append(helper.make_node("Conv", ["x", name], [output], kernel_shape=[4, 4], strides=[4, 4]))

    def output(name, shape):
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    if kind == "queries":
        convolution("w", QUERIES, "masks_queries_logits")
        convolution("v", QUERIES * (CLASSES + 1), "classes")
        weights.append(onnx.numpy_helper.from_array(np.array([-1, QUERIES, CLASSES + 1], np.int64), "shape"))
        nodes.append(helper.make_node("GlobalAveragePool", ["classes"], ["pooled"]))
        nodes.append(helper.make_node("Reshape", ["pooled", "shape"], ["class_queries_logits"]))
        output("class_queries_logits", ["n", QUERIES, CLASSES + 1])
        output("masks_queries_logits", ["n", QUERIES, 8, 12])
    else:
        channels, name = (CLASSES, "logits") if kind == "logits" else (1, "predicted_depth")
        convolution("w", channels, name if kind == "logits" else "one")
        if kind == "depth":
            weights.append(onnx.numpy_helper.from_array(np.array([1], np.int64), "axis"))
            nodes.append(helper.make_node("Squeeze", ["one", "axis"], [name]))
        output(name, ["n", *([CLASSES] if kind == "logits" else []), 8, 12])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 32, 48])]
    whole = helper.make_graph(nodes, kind, inputs, outputs, weights)
    onnx.save(helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@pytest.fixture(scope="module")
def command(tmp_path_factory, shared_store):
    with command_line(tmp_path_factory.mktemp("commands"), shared_store) as command:
        yield command


def bundle_of(kind, head, command, home):
    """A bundle of the graph for OpenVINO, of images whose sides are cut (a crop) or whole."""
    graph(home / "given.onnx", kind)
    assert command("export", home / "given.onnx", "-o", home / "exported").returncode == 0
    file = home / "exported" / "model.onnx"
    (home / "engine").mkdir()
    engine = compile_engine(file, home / "engine", target="openvino-cpu", precision="fp32", batch=1, placed=0)
    cover = kind == "logits"
    spec = PreprocessSpec((40, 56) if cover else (32, 48), (32, 48), fit="cover" if cover else "stretch")
    pixels = np.random.default_rng(1).integers(0, 256, (3, 32, 48, 3), np.uint8)
    with make_runner(home / "engine", engine) as runner:
        outputs = engine_outputs(runner, spec, pixels)
    (home / "bundle").mkdir()
    write_bundle(
        home / "bundle",
        name=kind,
        task="depth" if kind == "depth" else "segmentation",
        graphs={"model": (file, graph_spec(load_graph(file), "model.onnx"))},
        preprocess=spec,
        postprocess=head,
        labels=None if kind == "depth" else LABELS,
        engines=[(engine, home / "engine")],
        golden=golden_of({"pixels": pixels}, outputs, engine.artifact, 1e-4),
    )
    return home / "bundle"


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("queries", SegmentationSpec("queries", (40, 36))),
        ("logits", SegmentationSpec()),
        ("depth", DepthSpec("metric")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_maps_are_the_predictors(kind, head, command, tmp_path):
    if not all(map(shutil.which, ("cmake", "g++"))) or not Path("/usr/include/png.h").exists():
        pytest.skip("install g++ cmake libjpeg-dev libpng-dev")
    bundle = bundle_of(kind, head, command, tmp_path)
    app, maps = tmp_path / "app", tmp_path / "maps"
    app.mkdir(), maps.mkdir()
    cpp.write(bundle, app)
    build = app / "build"
    configure = ["cmake", "-S", app, "-B", build, f"-DOpenVINO_DIR={openvino.utils.get_cmake_path()}"]
    for step in (configure, ["cmake", "--build", build], ["ctest", "--test-dir", build]):
        done = subprocess.run(step, capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    coarse = Image.fromarray(np.random.default_rng(2).integers(0, 256, (5, 7, 3), np.uint8))
    paths = [tmp_path / "wide.png", tmp_path / "small.one.png"]
    coarse.resize((131, 77), Image.Resampling.BICUBIC).save(paths[0])
    coarse.resize((9, 30)).save(paths[1])
    done = subprocess.run([build / kind, "--maps", maps, *paths], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    with load(bundle) as predictor:
        for path in paths:
            wanted, found = predictor.predict(path), np.load(maps / f"{path.stem}.npy")
            told = [line[1:] for line in lines if line[0] == str(path)]
            if kind == "depth":
                np.testing.assert_allclose(found, wanted.map, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose([float(each) for each in told[0]], wanted.range, rtol=1e-4, atol=1e-4)
                continue
            assert (found == wanted.map).mean() > 0.999 and len(np.unique(found)) > 1
            assert sorted(line[1].replace("\t", " ") for line in told) == sorted(
                each.label.replace("\t", " ") for each in wanted.classes
            )
            assert sum(int(line[2]) for line in told) == int((found >= 0).sum())
    absent = subprocess.run([build / kind, "--maps", tmp_path / "absent", paths[0]], capture_output=True, text=True)
    assert absent.returncode == 2 and "cannot be written into" in absent.stderr

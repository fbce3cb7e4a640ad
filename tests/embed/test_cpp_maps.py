"""The C++ program of models with an answer for every pixel, of key points, pictures, numbers and embeddings, against
the Predictor's."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

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
from vitdeploy.embed import cpp, source
from vitdeploy.embed.servers import write_ovms, write_triton
from vitdeploy.embed.web import SITE
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.runtime import load
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import engine_outputs
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.binary import BinarySpec
from vitdeploy.runtime.tasks.depth import DepthSpec
from vitdeploy.runtime.tasks.embedding import EmbeddingSpec
from vitdeploy.runtime.tasks.foreground import ForegroundSpec
from vitdeploy.runtime.tasks.image_to_image import ImageSpec
from vitdeploy.runtime.tasks.keypoints import KeypointSpec
from vitdeploy.runtime.tasks.multi_label import MultiLabelSpec
from vitdeploy.runtime.tasks.regression import RegressionSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.spec import PreprocessSpec

QUERIES, CLASSES = 7, 5
MAPS = {
    "logits": (CLASSES, "logits"),
    "depth": (1, "predicted_depth"),
    "foreground": (1, "alpha"),
    "heatmaps": (CLASSES, "heatmaps"),
    "reconstruction": (3, "reconstruction"),
}
TASKS = {
    **{"depth": "depth", "heatmaps": "keypoints", "reconstruction": "image-to-image", "numbers": "regression"},
    **{"features": "embedding", "foreground": "foreground", "labels": "multi-label", "yes": "binary"},
}
# What vectors are called where they are exported.
VECTORS = {"numbers": "measures", "features": "features"}
# Of the export.
OPTIONS = {
    "depth": ("--no-preprocess",),
    **{kind: ("--task", TASKS[kind]) for kind in ("numbers", "labels", "yes")},
}
LABELS = ["sky", "road", "ca\tr", "wall", "tree"]


def graph(path, kind):
    """A graph of few seeded layers: queries with masks, or maps of that name and so many channels; 32x48 pixels in."""
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
    elif kind in VECTORS:
        convolution("w", CLASSES, "map")
        nodes.append(helper.make_node("GlobalAveragePool", ["map"], ["pooled"]))
        nodes.append(helper.make_node("Flatten", ["pooled"], [VECTORS[kind]]))
        output(VECTORS[kind], ["n", CLASSES])
    elif kind in ("labels", "yes"):
        convolution("w", CLASSES if kind == "labels" else 1, "maps")
        nodes.append(helper.make_node("GlobalAveragePool", ["maps"], ["pooled"]))
        nodes.append(helper.make_node("Flatten", ["pooled"], ["logits"]))
        if kind == "yes":
            nodes.append(helper.make_node("Sigmoid", ["logits"], ["score"]))
        output("logits" if kind == "labels" else "score", ["n", CLASSES if kind == "labels" else 1])
    else:
        channels, name = MAPS[kind]
        convolution("w", channels, "one" if kind == "depth" else name)
        if kind == "depth":
            weights.append(onnx.numpy_helper.from_array(np.array([1], np.int64), "axis"))
            nodes.append(helper.make_node("Squeeze", ["one", "axis"], [name]))
        output(name, ["n", *([] if kind == "depth" else [channels]), 8, 12])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 32, 48])]
    whole = helper.make_graph(nodes, kind, inputs, outputs, weights)
    onnx.save(helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@pytest.fixture(scope="module")
def command(tmp_path_factory, shared_store):
    with command_line(tmp_path_factory.mktemp("commands"), shared_store) as command:
        yield command


def bundle_of(kind, head, fit, command, home, name=""):
    """A bundle of the graph for OpenVINO, of images whose sides are cut (covered), or whole. That of depth takes BGR,
    and leaves the scaling of pixels to the program."""
    graph(home / "given.onnx", kind)
    assert command("export", home / "given.onnx", *OPTIONS.get(kind, ()), "-o", home / "exported").returncode == 0
    file = home / "exported" / "model.onnx"
    (home / "engine").mkdir()
    engine = compile_engine(file, home / "engine", target="openvino-cpu", precision="fp32", batch=1, placed=0)
    spec = PreprocessSpec((40, 56) if fit == "cover" else (32, 48), (32, 48), fit=fit)
    if kind == "depth":
        spec = replace(spec, mean=(0.4, 0.45, 0.5), std=(0.2, 0.25, 0.3), channel_order="bgr")
    pixels = np.random.default_rng(1).integers(0, 256, (3, 32, 48, 3), np.uint8)
    with make_runner(home / "engine", engine) as runner:
        outputs = engine_outputs(runner, spec, pixels)
    (home / "bundle").mkdir()
    write_bundle(
        home / "bundle",
        name=name or kind,
        task=TASKS.get(kind, "segmentation"),
        graphs={"model": (file, graph_spec(load_graph(file), "model.onnx"))},
        preprocess=spec,
        postprocess=head,
        labels=None if kind in ("depth", "foreground", "reconstruction", "features", "yes") else LABELS,
        engines=[(engine, home / "engine")],
        golden=golden_of({"pixels": pixels}, outputs, engine.artifact, 1e-4),
    )
    return home / "bundle"


PROGRAMS = {
    "queries": ("queries", SegmentationSpec("queries", (40, 36)), "stretch"),
    "logits": ("logits", SegmentationSpec(), "cover"),
    "depth": ("depth", DepthSpec("metric"), "stretch"),
    "mattes": ("foreground", ForegroundSpec(threshold=0.4), "cover"),
    "masks": ("foreground", ForegroundSpec(enlarge="logits"), "stretch"),
    "topdown": ("heatmaps", KeypointSpec("dark", 5, -0.2), "topdown"),
    "cover": ("heatmaps", KeypointSpec("argmax", 5, -0.2), "cover"),
    "reconstruction": ("reconstruction", ImageSpec(-0.5, 1.5), "stretch"),
    "numbers": ("numbers", RegressionSpec(("m", "°C", 'k"g\\', "", "%")), "cover"),
    "embedding": ("features", EmbeddingSpec(), "cover"),
    "labels": ("labels", MultiLabelSpec((0.4, 0.5, 0.45, 0.5, 0.6)), "stretch"),
    "yes": ("yes", BinarySpec(0.45, 'a "crack"'), "stretch"),
}
# Of one vector several parts.
SEVERAL = forms.PartsForm((
    forms.PartForm("who", forms.VectorForm("features", True)),
    forms.PartForm('a "kind"', forms.RankingForm("features"), ("sky", "ro\tad")),
    forms.PartForm("tags", forms.LabelsForm("features", False, (0.4, 0.5, 0.6, 0.5, 0.5)), tuple("vwxyz")),
    forms.PartForm("warm", forms.NumbersForm("features", ("m", "°C"))),
    forms.PartForm("sure", forms.RankingForm("features", given=True)),
))  # fmt: skip
PROGRAMS["several"] = ("features", EmbeddingSpec(), "cover")
PROJECT = "cmake_minimum_required(VERSION 3.16)\nproject(programs CXX)\nenable_testing()\n"


@pytest.fixture(scope="module")
def built(command, tmp_path_factory):
    """By name the bundle and its program, whose golden answers are right. All are one project, so that CMake looks at
    the compiler once."""
    if not all(map(shutil.which, ("cmake", "g++"))) or not Path("/usr/include/png.h").exists():
        pytest.skip("install g++ cmake libjpeg-dev libpng-dev")
    work, bundles = tmp_path_factory.mktemp("programs"), {}
    for name, facts in PROGRAMS.items():
        home, app = tmp_path_factory.mktemp(name), work / name
        app.mkdir()
        bundles[name] = bundle_of(*facts, command, home, name)
        cpp.write(bundles[name], app)
        if name == "several":
            several = replace(source.find_embedded(bundles[name], cpp.TARGETS, "a test", source.has_form), form=SEVERAL)
            text = source.render(Path(cpp.__file__).parent, "main.cpp.jinja", cpp._facts(several, name))
            (app / "main.cpp").write_text(text, encoding="utf-8")
    (work / "CMakeLists.txt").write_text(PROJECT + "".join(f"add_subdirectory({name})\n" for name in PROGRAMS))
    build = work / "build"
    # Less is optimised than in the program of test_cpp.py, which is built as users build it.
    options = ["-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DOpenVINO_DIR={openvino.utils.get_cmake_path()}"]
    configure = ["cmake", "-S", work, "-B", build, *options]
    for step in (configure, ["cmake", "--build", build], ["ctest", "--test-dir", build]):
        done = subprocess.run(step, capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert f"100% tests passed, 0 tests failed out of {len(PROGRAMS)}" in done.stdout
    return {name: (bundle, build / name / name) for name, bundle in bundles.items()}


def pictures(home):
    """A wide picture, and one that is smaller than the input."""
    coarse = Image.fromarray(np.random.default_rng(2).integers(0, 256, (5, 7, 3), np.uint8))
    paths = [home / "wide.png", home / "small.one.png"]
    coarse.resize((131, 77), Image.Resampling.BICUBIC).save(paths[0])
    coarse.resize((9, 30)).save(paths[1])
    return paths


def said(program, *arguments):
    """The values of each line."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["queries", "logits", "depth"])
def test_maps_are_the_predictors(kind, built, tmp_path):
    (bundle, program), paths, maps = built[kind], pictures(tmp_path), tmp_path / "maps"
    maps.mkdir()
    lines = said(program, "--maps", maps, *paths)
    with load(bundle) as predictor:
        for path in paths:
            expected, found = predictor.predict(path), np.load(maps / f"{path.stem}.npy")
            told = [line[1:] for line in lines if line[0] == str(path)]
            if kind == "depth":
                np.testing.assert_allclose(found, expected.map, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose([float(each) for each in told[0]], expected.range, rtol=1e-4, atol=1e-4)
                continue
            assert (found == expected.map).mean() > 0.999 and len(np.unique(found)) > 1
            assert sorted(line[1].replace("\t", " ") for line in told) == sorted(
                each.label.replace("\t", " ") for each in expected.classes
            )
            assert sum(int(line[2]) for line in told) == int((found >= 0).sum())
    absent = subprocess.run([program, "--maps", tmp_path / "absent", paths[0]], capture_output=True, text=True)
    assert absent.returncode == 2 and "cannot write the map into" in absent.stderr


@pytest.mark.parametrize("kind", ["mattes", "masks"])
def test_mattes_are_the_predictors(kind, built, tmp_path):
    (bundle, program), paths, maps = built[kind], pictures(tmp_path), tmp_path / "maps"
    maps.mkdir()
    lines = said(program, "--maps", maps, *paths)
    with load(bundle) as predictor:
        for path, (_, share, *box) in zip(paths, lines, strict=True):
            expected, found = predictor.predict(path), np.load(maps / f"{path.stem}.npy")
            np.testing.assert_allclose(found, expected.matte, atol=1e-4)
            assert float(share) == pytest.approx(expected.share, abs=2e-3) and 0 < expected.share < 1
            np.testing.assert_allclose([int(side) for side in box], expected.box, atol=1)


@pytest.mark.parametrize("kind", ["labels", "yes"])
def test_labels_are_the_predictors(kind, built, tmp_path):
    (bundle, program), paths = built[kind], pictures(tmp_path)
    lines = said(program, *paths)
    with load(bundle) as predictor:
        answers = [predictor.predict(path) for path in paths]
    if kind == "yes":
        expected = [
            [str(path), "yes" if each.yes else "no", each.label] for path, each in zip(paths, answers, strict=True)
        ]
        scores = [each.score for each in answers]
    else:
        expected = [
            [str(path), str(row.index), row.label.replace("\t", " "), str(int(row in each.labels))]
            for path, each in zip(paths, answers, strict=True)
            for row in each.scores
        ]
        scores = [row.score for each in answers for row in each.scores]
        assert {row[-1] for row in expected} == {"0", "1"}
    place = 3
    assert [line[:place] + line[place + 1 :] for line in lines] == expected
    np.testing.assert_allclose([float(line[place]) for line in lines], scores, atol=1e-4)


@pytest.mark.parametrize("fit", ["topdown", "cover"])
def test_points_are_the_predictors(fit, built, tmp_path):
    """Of boxes inside of the image and beyond it, wide and high; and of whole images."""
    (bundle, program), paths = built[fit], pictures(tmp_path)
    boxes = [(10.5, 3, 90, 40), (-20, 5.25, 18, 200)] if fit == "topdown" else []
    with load(bundle) as predictor:
        answers = [(path, 0, predictor.predict(path)) for path in paths]
        lines = said(program, *paths)
        if boxes:
            answers += [
                (paths[0], number, each) for number, each in enumerate(predictor.predict_boxes(paths[0], boxes))
            ]
            given = [each for box in boxes for each in ("--box", ",".join(map(str, box)))]
            lines += said(program, *given, paths[0])
    expected = [(str(path), number, point) for path, number, answer in answers for point in answer.shown]
    assert len(lines) == len(expected) > 5
    for line, (path, number, point) in zip(lines, expected, strict=True):
        assert line[:4] == [path, str(number), str(point.index), point.name.replace("\t", " ")]
        np.testing.assert_allclose([float(each) for each in line[4:]], [point.score, point.x, point.y], atol=2e-3)
    if boxes:
        for box, words in (
            ("1,2,3", "is not a box"),
            ("300,0,400,9", "outside the image"),
            ("5,5,4,9", "is not a box"),
        ):
            refused = subprocess.run([program, "--box", box, paths[0]], capture_output=True, text=True)
            assert refused.returncode in (1, 2) and words in refused.stderr


def test_pictures_are_the_predictors(built, tmp_path):
    (bundle, program), paths, made = built["reconstruction"], pictures(tmp_path), tmp_path / "made"
    made.mkdir()
    lines = said(program, "--pictures", made, *paths)
    with load(bundle) as predictor:
        for path, line in zip(paths, lines, strict=True):
            expected, found = predictor.predict(path).pixels, np.asarray(Image.open(made / f"{path.stem}.png"))
            assert line[:4] == [str(path), "12", "8", "3"]
            assert np.abs(found.astype(int) - expected).max() <= 1 and np.ptp(found) > 50


def test_numbers_are_the_predictors(built, tmp_path):
    (bundle, program), paths = built["numbers"], pictures(tmp_path)
    lines = said(program, *paths)
    with load(bundle) as predictor:
        expected = [(str(path), number) for path in paths for number in predictor.predict(path).numbers]
    for line, (path, number) in zip(lines, expected, strict=True):
        assert line[:3] == [path, str(number.index), number.name.replace("\t", " ")]
        assert float(line[3]) == pytest.approx(number.value, rel=1e-4, abs=1e-4) and line[4] == number.unit


def test_embeddings_are_the_predictors(built, tmp_path):
    (bundle, program), paths = built["embedding"], pictures(tmp_path)
    with load(bundle) as predictor:
        for path, line in zip(paths, said(program, *paths), strict=True):
            found = [float(number) for number in line[1:]]
            np.testing.assert_allclose(found, predictor.predict(path).vector, rtol=1e-4, atol=1e-5)
            assert line[0] == str(path) and np.linalg.norm(found) == pytest.approx(1, abs=1e-5)


def test_several_answers_are_lines_with_their_names(built, tmp_path):
    """Each part says what it would say alone, with its own labels."""
    (bundle, program), paths = built["several"], pictures(tmp_path)
    with load(bundle) as predictor:
        predictor.postprocess = EmbeddingSpec(normalised=False)
        for path in paths:
            vector = predictor.predict(path).vector.astype(np.float64)
            lines = [line[1:] for line in said(program, path)]
            who, warm = (np.array([float(value) for value in lines[0][1:]]), lines[11:16])
            np.testing.assert_allclose(who, vector / np.linalg.norm(vector), rtol=1e-4, atol=1e-5)
            kinds, tags = lines[1:6], lines[6:11]
            order = np.argsort(-vector, kind="stable")
            assert [line[:3] for line in kinds] == [
                ['a "kind"', str(k), {0: "sky", 1: "ro ad"}.get(k, str(k))] for k in order.tolist()
            ]
            shares = np.exp(vector - vector.max())[order]
            np.testing.assert_allclose([float(line[3]) for line in kinds], shares / shares.sum(), atol=1e-4)
            scores = 1 / (1 + np.exp(-vector))
            np.testing.assert_allclose([float(line[3]) for line in tags], scores, atol=1e-4)
            assert [line[2] for line in tags] == list("vwxyz") and {line[0] for line in tags} == {"tags"}
            above = (scores > SEVERAL.parts[2].form.thresholds).astype(int)
            assert [int(line[4]) for line in tags] == above.tolist()
            np.testing.assert_allclose([float(line[3]) for line in warm], vector, rtol=1e-4, atol=1e-4)
            assert [line[4] for line in warm] == ["m", "°C", "", "", ""] and warm[0][:3] == ["warm", "0", "0"]
            given = np.sort(np.maximum(vector, 1e-38))[::-1]
            np.testing.assert_allclose([float(line[3]) for line in lines[16:]], given / given.sum(), atol=1e-4)


def test_every_form_is_written_by_both_programs():
    every = get_args(forms.Form)
    kinds = {kind.__dataclass_fields__["kind"].default for kind in every}
    answers, page = ((SITE / "app" / f"{name}.js").read_text("utf-8") for name in ("answers", "page"))
    assert all(f"\n  {kind}: (" in answers and kind in page for kind in kinds)
    assert set(cpp.COLUMNS) == set(every) - {forms.PartsForm}


@pytest.mark.parametrize(
    ("kind", "head", "fit", "dims"),
    [
        ("logits", SegmentationSpec(), "cover", [CLASSES, 8, 12]),
        ("depth", DepthSpec("metric"), "stretch", [8, 12]),
        ("heatmaps", KeypointSpec(), "topdown", [CLASSES, 8, 12]),
        ("reconstruction", ImageSpec(), "stretch", [3, 8, 12]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_servers_get_the_engine_and_its_golden_answers(kind, head, fit, dims, command, tmp_path):
    bundle = bundle_of(kind, head, fit, command, tmp_path)
    for name, write in (("triton", write_triton), ("ovms", write_ovms)):
        out = tmp_path / name
        out.mkdir()
        write(bundle, out)
        with np.load(out / "golden" / "outputs.npz") as outputs:
            [(name, values)] = outputs.items()
        assert list(values.shape) == [3, *dims]
    text = (tmp_path / "triton" / "models" / kind / "config.pbtxt").read_text()
    assert f'name: "{name}"' in text and str(dims if "max_batch_size: 1" in text else [-1, *dims]) in text

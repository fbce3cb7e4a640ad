"""The page of a bundle: its modules in Node, and the page itself in headless Chromium, against the Predictor."""

import base64
import contextlib
import dataclasses
import functools
import http.client
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from PIL import Image

from tests.command_line import ROOT, command_line
from tests.embed.strokes import SHAPES
from tests.examples_page import block
from tests.golden_bundle import golden_of
from tests.pipeline import planted
from tests.shell import reader_environment
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import Golden, GoldenAnswers, write_bundle
from vitdeploy.embed import source, web
from vitdeploy.embed.web.pad import drawing_form
from vitdeploy.errors import CapabilityError, InputError, TargetError
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.runtime import load
from vitdeploy.runtime.drawing import LINE, POINT, colours
from vitdeploy.runtime.geometry import input_window
from vitdeploy.runtime.postprocess import sigmoid
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.binary import BinarySpec
from vitdeploy.runtime.tasks.classification import classify
from vitdeploy.runtime.tasks.depth import Depth, DepthSpec, depth_of
from vitdeploy.runtime.tasks.detection import PostprocessSpec, detect
from vitdeploy.runtime.tasks.embedding import EmbeddingSpec
from vitdeploy.runtime.tasks.foreground import Foreground, ForegroundSpec, matte_of
from vitdeploy.runtime.tasks.image_to_image import ImageSpec, to_pixels
from vitdeploy.runtime.tasks.keypoints import KEYPOINTS, KeypointSpec
from vitdeploy.runtime.tasks.multi_label import MultiLabelSpec
from vitdeploy.runtime.tasks.registry import TASKS, reader_of
from vitdeploy.runtime.tasks.regression import RegressionSpec, numbers_of
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec, areas, classes_of
from vitdeploy.runtime.tasks.task import OutputReading
from vitdeploy.spec import PreprocessSpec, encode

DIGITS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
LABELS = ["<b>zero</b>", *"123456789"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OFFLINE = re.compile("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH")
# A GPU of software, so that WebGPU is tested without one; no look-up of names, as browsers do to keep up to date.
OPTIONS = (
    *("--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-unsafe-swiftshader"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost",
)


@pytest.fixture(scope="module")
def bundle(digits, tmp_path_factory):
    """The digits model in INT8 for ONNX Runtime, with golden answers of eight calibration images; its float graph
    beside it. A bundle of `vitdeploy run` but for the report."""
    from vitdeploy.data.folder import split
    from vitdeploy.models.source import Source
    from vitdeploy.runtime.engine import make_runner
    from vitdeploy.runtime.golden import engine_outputs
    from vitdeploy.runtime.ort import OnnxRuntimeRunner
    from vitdeploy.stages.calibrate import calibrate
    from vitdeploy.stages.compile import compile_graph
    from vitdeploy.stages.export import ExportConfig, export
    from vitdeploy.stages.place import PlaceConfig, place_graph
    from vitdeploy.stages.reference_model import Overrides, find_reference_model

    work = tmp_path_factory.mktemp("digits")
    images = split(digits, "folders", calibration=128, evaluation="all", seed=0).calibration[:32]
    reference_model = find_reference_model(
        Source("vit_w192d4h3_patch4_32", digits / "vit_digits.safetensors"), Overrides(DIGITS)
    )
    export(reference_model, ExportConfig("digits", opset=20, batch=None, in_graph=True), work)
    calibrate(work / "model.onnx", images, work)
    for name in ("placed", "engine", "bundle"):
        (work / name).mkdir()
    place_graph(
        PlaceConfig("onnxruntime-cpu", "int8", ()), work / "model.onnx", work / "statistics.npz", work / "placed"
    )
    engine = compile_graph(work / "placed" / "model.onnx", "onnxruntime-cpu", 1, work / "engine")
    pixels = np.stack([load_pixels(sample.path, DIGITS) for sample in images[:8]])
    with OnnxRuntimeRunner(work / "model.onnx", name="float") as runner:
        logits = runner.infer({"image": pixels})["logits"]
    with make_runner(work / "engine", engine) as runner:
        answers = engine_outputs(runner, DIGITS, pixels)
    write_bundle(
        work / "bundle",
        name="digits <i>",
        task="classification",
        graphs={"model": (work / "model.onnx", graph_spec(load_graph(work / "model.onnx"), "model.onnx"))},
        preprocess=DIGITS,
        engines=[(engine, work / "engine")],
        labels=LABELS,
        golden=Golden({"image": pixels}, {"logits": logits}, {engine.artifact: GoldenAnswers(answers, 0.05, 8)}),
    )
    return work / "bundle"


@pytest.fixture(scope="module")
def written(bundle, tmp_path_factory):
    """The page as it is written."""
    folder = tmp_path_factory.mktemp("page")
    web.write(bundle, folder)
    return folder


@pytest.fixture(scope="module")
def built(bundle, tmp_path_factory):
    """The page with all commands that `write` gives, as the page of the examples says it."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("install nodejs (18 or newer) and npm")
    assert (ROOT / "examples" / "web" / "build.sh").read_text().endswith("\n".join([*web.COMMANDS, ""]))
    clone = tmp_path_factory.mktemp("clone")
    (clone / "examples").symlink_to(ROOT / "examples")
    (clone / "out").mkdir()
    (clone / "out" / "digits").symlink_to(bundle)
    command = ("sh", "-e", "-c", block("sh", "examples/web/build.sh"))
    environment = reader_environment(clone / "bin")
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip("npm cannot reach its registry, so onnxruntime-web is not there")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Correct: 8 images, 8 of 8 with the original's first class" in done.stdout
    return clone / "page"


@contextlib.contextmanager
def started(folder):
    """`npm start`, whose port is the system's choice; gives the address."""
    server = subprocess.Popen(["node", "tools/serve.mjs", "0"], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://localhost:\d+/", server.stdout.readline()).group()
    finally:
        server.terminate()
        server.communicate()


@contextlib.contextmanager
def any_server(folder):
    """A static server that knows nothing of the page."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def home(built):
    with started(built) as address:
        yield address


class Opened:
    """A page in the browser; what goes wrong in it is kept."""

    def __init__(self, browser, address, **context):
        self.page = browser.new_page(viewport={"width": 1280, "height": 900}, **context)
        self.page.set_default_timeout(60_000)
        self.errors, self.requests = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def until(self, selector, text):
        """Waits until an element has a text, which is looked for; gives all of it."""
        place = self.page.locator(selector, has_text=re.compile(text))
        place.wait_for(state="attached")
        return place.text_content()

    def best(self):
        self.page.locator(".best strong").wait_for()
        return self.page.locator(".best strong").text_content()

    def draw(self, strokes):
        box = self.page.locator("#pad").bounding_box()
        for stroke in strokes:
            places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
            self.page.mouse.move(*places[0])
            self.page.mouse.down()
            for place in places[1:]:
                self.page.mouse.move(*place)
            self.page.mouse.up()

    def run(self, script, argument=None):
        """A function in the page, with the page's modules at hand."""
        return self.page.evaluate(
            f"async (argument) => {{ const at = (name) => import(`${{location.origin}}/app/${{name}}`); {script} }}",
            argument,
        )


@pytest.fixture(scope="module")
def opened(browser, home):
    page = Opened(browser, home, has_touch=True)
    page.until("#state", "^ready$")
    yield page
    page.page.close()


@pytest.fixture(autouse=True)
def nothing_went_wrong(request):
    yield
    if "opened" in request.fixturenames:
        page = request.getfixturevalue("opened")
        assert page.errors == []
        home = request.getfixturevalue("home")
        assert [url for url in page.requests if not url.startswith(home)] == []


# --- modules in Node ------------------------------------------------------------------------------------------------


def in_node(folder, **cases):
    if not shutil.which("node"):
        pytest.skip("install nodejs (18 or newer)")
    asked = {"prepare": [], "detect": [], "classify": [], "golden": [], **cases}
    script = Path(__file__).with_name("modules.mjs")
    done = subprocess.run(["node", script, folder], input=json.dumps(asked), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def form_of(task, outputs, post):
    """The form of a task's answers, as model.json has it."""
    return encode(TASKS[task].form(list(outputs), post))


SPECS = [
    PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,)),
    PreprocessSpec(31, (28, 25), "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    PreprocessSpec((20, 33), (20, 33), "lanczos", (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), channel_order="bgr"),
    PreprocessSpec((24, 24), (24, 24), "bicubic", (0.5,) * 3, (0.5,) * 3, fit="cover", crop_rounding="down"),
    PreprocessSpec(23, (30, 20), "nearest", (0.5,), (0.5,), crop_rounding="down"),
    PreprocessSpec((32, 24), (32, 24), "bilinear", (0.5,) * 3, (0.5,) * 3, fit="topdown"),
]


def test_images_are_prepared_as_the_predictor_prepares_them_to_the_bit(written):
    generator = np.random.default_rng(2)
    cases = [(spec, *generator.integers(3, 120, 2)) for spec in SPECS for _ in range(12)]
    cases += [(spec, *size) for spec in SPECS for size in ((32, 32), (1, 1), (7, 200), (200, 7), (33, 32))]
    images = [generator.integers(0, 256, (height, width, 3), np.uint8) for _, width, height in cases]
    asked = []
    for (spec, width, height), image in zip(cases, images, strict=True):
        rgba = np.concatenate([image, np.full((height, width, 1), 255, np.uint8)], axis=2)
        data = base64.b64encode(rgba.tobytes()).decode()
        asked.append({"width": int(width), "height": int(height), "data": data, "spec": encode(spec)})
    for (spec, width, height), image, found in zip(
        cases, images, in_node(written, prepare=asked)["prepare"], strict=True
    ):
        expected = load_pixels(image, spec)
        pixels = np.frombuffer(base64.b64decode(found["pixels"]), np.uint8).reshape(expected.shape)
        np.testing.assert_array_equal(pixels, expected, err_msg=f"{spec} {width}x{height}")
        floats = np.frombuffer(base64.b64decode(found["floats"]), np.float32).reshape(2, -1)
        np.testing.assert_array_equal(floats, np.tile(normalise(expected[None], spec).reshape(-1), (2, 1)))
        window = input_window((width, height), spec)
        left, top, wide, high = (found["window"][name] for name in ("left", "top", "width", "height"))
        assert (left, top, left + wide, top + high) == pytest.approx(dataclasses.astuple(window))


def test_outputs_become_the_predictors_answers(written):
    generator = np.random.default_rng(3)
    spec, labels = PreprocessSpec(30, (28, 20), "bilinear", (0.5,), (0.5,)), ["a", "b"]
    logits = [generator.normal(size=7).astype(np.float32) * 5, np.zeros(3, np.float32)]
    cases = []
    for scores, boxes, top_k in (
        *(("softmax", "cxcywh", None), ("sigmoid", "xyxy", None), ("sigmoid", "xyxy", 3), ("given", "xyxy", None)),
    ):
        outputs = {"boxes": generator.uniform(0, 1, (6, 4)), "logits": generator.normal(size=(6, 4)) * 3}
        if scores == "given":
            outputs |= {"scores": generator.uniform(size=6), "labels": generator.integers(0, 3, 6)}
        outputs = {name: np.asarray(values, np.float32) for name, values in outputs.items()}
        cases.append((outputs, PostprocessSpec(scores, boxes, 0.3, top_k=top_k)))
    size = {"width": 64, "height": 40, "spec": encode(spec), "labels": labels}
    asked = [
        {"outputs": {name: values.ravel().tolist() for name, values in outputs.items()}, **size}
        | {"post": form_of("detection", outputs, post)}
        for outputs, post in cases
    ]
    found = in_node(written, detect=asked, classify=[{"logits": each.tolist(), "labels": labels} for each in logits])
    for (outputs, post), ours in zip(cases, found["detect"], strict=True):
        expected = detect(outputs, (64, 40), spec, post, labels).objects
        assert expected and [(each["index"], each["label"]) for each in ours] == [(w.index, w.label) for w in expected]
        np.testing.assert_allclose([each["score"] for each in ours], [w.score for w in expected], rtol=1e-12)
        np.testing.assert_allclose([each["box"] for each in ours], [w.box for w in expected], atol=1e-9)
    for each, ours in zip(logits, found["classify"], strict=True):
        expected = classify(each, labels).top
        assert [(one["index"], one["label"]) for one in ours] == [(w.index, w.label) for w in expected]
        np.testing.assert_allclose([one["score"] for one in ours], [w.score for w in expected], rtol=1e-12)
    assert found["cosine"] == pytest.approx(1.5 / np.sqrt(14 * 5.25))


@pytest.mark.parametrize("labels", [[], ["age", "weight"]], ids=["no names", "names"])
def test_numbers_become_the_predictors(written, labels):
    cases = [([31.5], RegressionSpec()), ([31.5, -2e9], RegressionSpec(("years", ""))), ([0.25, 3], RegressionSpec())]
    asked = [
        {"numbers": numbers, "post": form_of("regression", ["numbers"], post), "labels": labels}
        for numbers, post in cases
    ]
    for (numbers, post), found in zip(cases, in_node(written, measured=asked)["measured"], strict=True):
        expected = numbers_of(np.array(numbers, np.float32), post, labels).numbers
        assert found == [{"label": each.name, "value": each.value, "unit": each.unit} for each in expected]


def test_several_answers_have_their_names_and_their_own_labels(written):
    """A part is what it would be alone."""
    parts = forms.PartsForm((
        forms.PartForm("kind", forms.RankingForm("kind_logits"), ("cat", "dog")),
        forms.PartForm("tags", forms.LabelsForm("tags", True, (0.2, 0.9)), ("wet", "old")),
        forms.PartForm("seven", forms.DecisionForm("score", True, 0.5)),
        forms.PartForm("age", forms.NumbersForm("years", ("y",))),
        forms.PartForm("who", forms.VectorForm("embedding", True)),
        forms.PartForm("sure", forms.RankingForm("shares", given=True), ("cat", "dog", "cow")),
    ))  # fmt: skip
    values = {"kind_logits": [0, 3], "tags": [0.5, 0.5], "score": [0.75], "years": [31.5], "embedding": [3, 4]}
    values["shares"] = [0.25, 0.75, 0]
    [found] = in_node(written, labels=[{"form": encode(parts), "outputs": values, "labels": ["not", "these"]}])[
        "labels"
    ]
    assert (found["kind"], [part["name"] for part in found["parts"]]) == ("parts", [p.name for p in parts.parts])
    kind, tags, seven, age, who, sure = found["parts"]
    assert [row["label"] for row in sure["top"]] == ["dog", "cat", "cow"]
    assert [row["score"] for row in sure["top"]] == pytest.approx([0.75, 0.25, 0], abs=1e-6)
    assert [row["label"] for row in kind["top"]] == ["dog", "cat"]
    assert [(row["label"], row["has"]) for row in tags["scores"]] == [("wet", True), ("old", False)]
    assert (seven["yes"], seven["label"], seven["score"]) == (True, "yes", 0.75)
    assert age["numbers"] == [{"label": "number", "value": 31.5, "unit": "y"}]
    assert list(who["vector"].values()) == pytest.approx([0.6, 0.8])


def test_labels_of_their_own_become_the_predictors_answers(written):
    generator = np.random.default_rng(5)
    logits, labels = generator.normal(size=4).astype(np.float32), ["a", "b"]
    cases = [
        ("multi-label", {"logits": logits}, MultiLabelSpec((0.2, 0.5, 0.9, 0.4))),
        ("multi-label", {"probabilities": sigmoid(logits)}, MultiLabelSpec()),
        ("binary", {"logits": logits[:1]}, BinarySpec(0.9)),
        ("binary", {"probabilities": sigmoid(logits[:1])}, BinarySpec(None, "crack")),
    ]
    asked = [
        {"form": form_of(task, outputs, post), "outputs": {n: v.tolist() for n, v in outputs.items()}, "labels": labels}
        for task, outputs, post in cases
    ]
    for (task, outputs, post), ours in zip(cases, in_node(written, labels=asked)["labels"], strict=True):
        expected = reader_of(task)(outputs, OutputReading((1, 1), None, post, labels))
        if task == "binary":
            assert (ours["yes"], ours["label"]) == (expected.yes, expected.label)
            assert ours["score"] == pytest.approx(expected.score, rel=1e-12)
            continue
        assert [row["label"] for row in ours["scores"]] == [row.label for row in expected.scores]
        assert {row["index"] for row in ours["scores"] if row["has"]} == {row.index for row in expected.labels}
        np.testing.assert_allclose([row["score"] for row in ours["scores"]], [row.score for row in expected.scores])


@pytest.mark.parametrize("spec", [SPECS[1], SPECS[2]], ids=["cropped", "whole"])
def test_maps_become_the_predictors_at_the_size_of_the_image(written, spec):
    generator, size, labels = np.random.default_rng(4), (64, 41), ["a", "b", "c", "d"]
    queries = {"class_logits": (6, 5), "masks": (6, 7, 6)}
    shapes = [{"logits": (5, 7, 6)}, queries, {"depth": (8, 9)}, {"depth": (1, 8, 9)}]
    shapes += [{"foreground": (1, 8, 9)}] * 3
    posts = [
        SegmentationSpec(),
        SegmentationSpec("queries", (13, 17)),
        DepthSpec("metric"),
        DepthSpec("inverse", "bilinear"),
        ForegroundSpec(threshold=0.4),
        ForegroundSpec(enlarge="logits"),
        ForegroundSpec("given"),
    ]
    tasks = ["segmentation"] * 2 + ["depth"] * 2 + ["foreground"] * 3
    outputs = [{n: generator.normal(0, 2, s).astype(np.float32) for n, s in each.items()} for each in shapes]
    asked = [
        {
            "outputs": {name: values.ravel().tolist() for name, values in each.items()},
            "shapes": shape,
            "post": form_of(task, each, post),
            **{"width": size[0], "height": size[1], "spec": encode(spec), "labels": labels},
        }
        for task, each, shape, post in zip(tasks, outputs, shapes, posts, strict=True)
    ]
    for given, post, found in zip(outputs, posts, in_node(written, maps=asked)["maps"], strict=True):
        ours = np.array(found["map"], np.float64).reshape(size[::-1])
        if isinstance(post, DepthSpec):
            expected = depth_of(given, size, spec, post)
            np.testing.assert_allclose(ours, expected, atol=1e-5)
            np.testing.assert_allclose(found["range"], Depth(expected, post.values).range, atol=1e-5)
        elif isinstance(post, ForegroundSpec):
            expected = matte_of(given, size, spec, post)
            np.testing.assert_allclose(ours, expected, atol=1e-5)
            assert found["share"] == pytest.approx(Foreground(expected, post.threshold).share, abs=1e-3)
        else:
            expected = classes_of(given, size, spec, post)
            assert (ours == expected).mean() > 0.999 and len(np.unique(expected)) > 2
            told = [(each.index, each.label) for each in areas(expected, labels)]
            assert [(each["index"], each["label"]) for each in found["classes"]] == told


@pytest.mark.parametrize("spec", SPECS[1:4:2] + SPECS[-1:], ids=["cropped", "covered", "top-down"])
@pytest.mark.parametrize("decoding", ["dark", "argmax"])
def test_heat_maps_become_the_predictors_points(written, spec, decoding):
    generator, labels = np.random.default_rng(5), ["a", "b", "c"]
    maps = generator.uniform(-0.1, 0.3, (5, 8, 6)).astype(np.float32)
    maps[4] = -1  # a map that knows no place
    for n, (y, x) in enumerate(((3, 2), (0, 5), (7, 0), (4, 4))):  # in the middle and at borders
        maps[n, y, x] = 0.9
    post = KeypointSpec(decoding, 5, 0.2)
    asked = [
        {"maps": maps.ravel().tolist(), "shape": [5, 8, 6], "width": width, "height": height}
        | {"spec": encode(spec), "post": form_of("keypoints", ["heatmaps"], post), "labels": labels}
        for width, height in ((64, 41), (30, 90))
    ]
    for each, found in zip(asked, in_node(written, points=asked)["points"], strict=True):
        reading = OutputReading((each["width"], each["height"]), spec, post, labels)
        expected = KEYPOINTS.answer({"heatmaps": maps}, reading).points
        assert [one["label"] for one in found] == [point.name for point in expected]
        np.testing.assert_allclose([[one["x"], one["y"]] for one in found], [[w.x, w.y] for w in expected], atol=2e-3)
        np.testing.assert_allclose([one["score"] for one in found], [w.score for w in expected], rtol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_values_become_the_predictors_picture(written, channels):
    values, post = np.random.default_rng(6).uniform(-1.5, 1.5, (channels, 5, 7)), ImageSpec(-1.0, 1.0)
    values = values.astype(np.float32)
    asked = [{"values": values.ravel().tolist(), "shape": [channels, 5, 7]}]
    asked[0]["post"] = form_of("image-to-image", ["reconstruction"], post)
    [found] = in_node(written, made=asked)["made"]
    pixels = np.array(found, np.uint8).reshape(5, 7, 4)
    np.testing.assert_array_equal(pixels[:, :, :3], np.broadcast_to(to_pixels(values, post), (5, 7, 3)))
    assert (pixels[:, :, 3] == 255).all()


def test_a_wrong_answer_is_found(built, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(built, changed, ignore=shutil.ignore_patterns("node_modules", "runtime"))
    (changed / "node_modules").symlink_to(built / "node_modules")
    original = changed / "golden" / "original" / "logits.f32"
    logits = np.fromfile(original, "<f4").reshape(8, 10)
    logits[3] = np.roll(logits[3], 1)
    logits.astype("<f4").tofile(original)
    done = subprocess.run(["node", "tools/check.mjs"], cwd=changed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "WRONG: 8 images, 7 of 8 with the original's first class" in done.stdout


def test_what_counts_as_a_right_answer(written):
    expected = np.array([[1, 0.99, 0], [0, 3, 0]], np.float32)
    cases = {
        "same": expected,
        "tied": np.array([[0.98, 1, 0], [0, 3, 0]]),  # two classes that the tolerance does not tell apart
        "other": np.array([[0, 0.99, 1], [0, 3, 0]]),
        "no number": np.array([[1, np.nan, 0], [0, 3, 0]]),
        "short": expected[:, :2],
    }
    asked = [
        {"expected": expected.ravel().tolist(), "rows": [[str(x) for x in row] for row in rows]}
        for rows in cases.values()
    ]
    found = dict(zip(cases, in_node(written, golden=asked)["golden"], strict=True))
    assert {name: each["ok"] for name, each in found.items()} == {
        "same": True,
        "tied": True,
        "other": False,
        "no number": False,
        "short": False,
    }
    assert [found[name]["first"] for name in ("same", "tied")] == [{"equal": 2, "tied": 0}, {"equal": 1, "tied": 1}]
    assert found["tied"]["outputs"][0]["difference"] == pytest.approx(0.02 / 3, rel=1e-3)


# --- in the browser -------------------------------------------------------------------------------------------------

RIGHT = "Correct: 8 images, 8 of 8 with the original's first class"


def test_the_golden_answers_are_right_with_threads_and_without(browser, built, home):
    with any_server(built) as plain:
        for address, where in (
            (home, r"^WebAssembly, [2-4] threads, int8\.$"),
            (plain, r"^WebAssembly, 1 thread, int8\.$"),
        ):
            page = Opened(browser, f"{address}?check")
            assert page.until("#checked", "images").startswith(RIGHT)
            assert re.search(where, page.page.text_content("#where"))
            note = page.page.text_content("#note")
            assert ("not cross-origin isolated" in note) == (address == plain)
            assert page.errors == []
            assert [url for url in page.requests if not url.startswith(address)] == []
            assert not any(
                "webgpu" in url or "float.onnx" in url for url in page.requests
            )  # nothing that is not needed
            page.page.close()


def test_labels_and_names_are_text(opened):
    assert opened.page.text_content("h1") == "digits <i>"
    opened.page.click("#examples button >> nth=0")
    opened.best()
    shown = opened.page.locator(".scores li span:first-child").all_text_contents()
    assert len(shown) == 5 and set(shown) <= set(LABELS)
    assert opened.page.locator("#answer b, h1 i").count() == 0


def test_examples_have_the_answers_of_the_original(opened, bundle):
    logits = np.load(bundle / read_bundle(bundle).golden.outputs)["logits"]
    found = opened.run("""
      const { Engine } = await at("client.js"), { goldenImages } = await at("golden.js");
      const source = await at("browser.js"), { facts } = await (await at("model.js")).readFacts(source);
      globalThis.engine = new Engine();
      await engine.call("open", "wasm");
      const answers = [];
      const images = await goldenImages(facts, source.bytes);
      for (const pixels of images) answers.push(await engine.call("predictPrepared", pixels));
      return answers.map(({ answer }) => answer.top);
    """)
    for row, top in zip(logits, found, strict=True):
        expected = classify(row, LABELS).top
        assert (top[0]["index"], top[0]["label"]) == (expected[0].index, expected[0].label)
        assert top[0]["score"] == pytest.approx(expected[0].score, abs=0.01)


@pytest.fixture(scope="module")
def pictures():
    """Files of every kind, by name: bytes."""
    generator = np.random.default_rng(1)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), np.uint8))
    colour = coarse.resize((131, 97), Image.Resampling.BICUBIC)
    grey = colour.convert("L")
    turned = [Image.Exif() for _ in range(9)]
    for orientation, exif in enumerate(turned):
        exif[0x0112] = orientation
    kinds = {
        "colour.jpg": (colour, {}),
        "fine.jpg": (colour, {"quality": 95, "subsampling": 0}),
        "progressive.jpg": (colour, {"progressive": True, "subsampling": 2}),
        "grey.jpg": (grey, {}),
        "tall.png": (coarse.resize((17, 90)), {}),
        "alpha.png": (Image.merge("RGBA", [*colour.split(), grey]), {}),
        "invisible.png": (Image.merge("RGBA", [*colour.split(), Image.new("L", colour.size)]), {}),
        "grey-alpha.png": (Image.merge("LA", [grey, grey]), {}),
        "palette.png": (colour.quantize(60), {"transparency": 3}),
        "one-bit.png": (grey.convert("1"), {}),
        "sixteen.png": (Image.fromarray(generator.integers(0, 65536, (40, 50), np.uint16)), {}),
        "turned.png": (colour, {"exif": turned[6]}),
        "lossless.webp": (Image.merge("RGBA", [*colour.split(), grey]), {"lossless": True, "exact": True}),
        "lossy.webp": (colour, {}),
        **{f"turned{i}.jpg": (colour, {"exif": turned[i]}) for i in range(2, 9)},
    }
    files = {}
    for name, (image, options) in kinds.items():
        file = io.BytesIO()
        image.save(file, format={"jpg": "JPEG"}.get(name.split(".")[1], name.split(".")[1].upper()), **options)
        files[name] = file.getvalue()
    return files


READ = """
  const { readImage } = await at("images.js"), { prepare } = await at("preprocess.js");
  const read = async ([data, spec]) => {
    const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
    try {
      const image = await readImage(new Blob([bytes]));
      return { width: image.width, height: image.height, data: Array.from(prepare(image, spec).data) };
    } catch (error) {
      return { error: error.message };
    }
  };
  return Promise.all(argument.map(read));
"""


def encoded(files, spec):
    return [[base64.b64encode(data).decode(), encode(spec)] for data in files]


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=["grey", "colour"])
def test_files_of_every_kind_give_the_predictors_pixels(opened, pictures, spec):
    """PNG must. JPEG and WebP need not: the decoder is the browser's, another one may round differently by a level or
    two; Chromium's is the one that Pillow has too."""
    for (name, data), found in zip(pictures.items(), opened.run(READ, encoded(pictures.values(), spec)), strict=True):
        expected = load_pixels(data, spec)
        pixels = np.array(found["data"]).reshape(expected.shape)
        allowed = 0 if name.endswith(".png") else 4
        assert np.abs(pixels - expected).max() <= allowed, name


def test_broken_files_are_told_and_leave_the_page_alive(opened, pictures, digits):
    jpeg, png = pictures["colour.jpg"], pictures["alpha.png"]
    spoilt = {
        b"no image": "not a JPEG, PNG or WebP",
        b"": "not a JPEG, PNG or WebP",
        jpeg[: len(jpeg) // 2]: "truncated",
        jpeg[:20]: "truncated",
        png[:-30]: "truncated",
        png[:60] + bytes([png[60] ^ 255]) + png[61:]: "cannot decode",
        pictures["lossy.webp"][:-50]: "truncated",
    }
    for (data, says), found in zip(spoilt.items(), opened.run(READ, encoded(spoilt, SPECS[0])), strict=True):
        assert says in found["error"], data[:20]
    opened.page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"text"})
    assert "not a JPEG, PNG or WebP" in opened.until("#alert", ".")
    opened.page.set_input_files(
        "#file", digits / "calibration" / "7" / sorted((digits / "calibration" / "7").iterdir())[0].name
    )
    assert opened.best() == "7"
    assert not opened.page.locator("#alert-box").is_visible()


def transfer(opened, kind, data, name):
    """A file that is dropped or pasted, as far as a script can do that."""
    opened.run(
        """
      const [kind, data, name] = argument, transfer = new DataTransfer();
      transfer.items.add(new File([Uint8Array.from(atob(data), (each) => each.charCodeAt(0))], name));
      const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true })
        : new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true });
      document.getElementById("drop").dispatchEvent(event);
    """,
        [kind, base64.b64encode(data).decode(), name],
    )


def test_images_are_dropped_and_pasted(opened, digits):
    for kind, digit in (("drop", "4"), ("paste", "6")):
        file = sorted((digits / "calibration" / digit).iterdir())[1]
        transfer(opened, kind, file.read_bytes(), file.name)
        opened.until(".best strong", f"^{digit}$")
    transfer(opened, "drop", b"words", "notes.txt")
    assert "not a JPEG" in opened.until("#alert", ".")


def test_the_gallery_of_the_examples_answers_many_files(browser, home, digits):
    files = [sorted((digits / "calibration" / digit).iterdir())[2] for digit in "481"]
    gallery = Opened(browser, f"{home}gallery.html")
    broken = {"name": "=broken.png", "mimeType": "image/png", "buffer": b"text"}
    chosen = [{"name": file.name, "mimeType": "image/png", "buffer": file.read_bytes()} for file in files]
    gallery.page.set_input_files("#files", [chosen[0], broken, *chosen[1:]])
    gallery.page.locator("#save").wait_for()
    cards = gallery.page.locator("#answers strong").all_text_contents()
    assert [card[0] for card in (cards[0], *cards[2:])] == ["4", "8", "1"]
    assert "not a JPEG" in cards[1]
    saved = gallery.page.evaluate("fetch(document.getElementById('save').href).then((answer) => answer.text())")
    rows = [line.split(",") for line in saved.replace('"', "").splitlines()]
    answers = [[file.name, digit] for file, digit in zip(files, "481", strict=True)]
    assert [row[:2] for row in rows] == [["file", "label"], *answers]
    assert gallery.errors == []
    gallery.page.close()


def test_digits_that_are_drawn_are_known(opened):
    """Three shapes of each, made up before any was tried: the pad's form is measured, not tuned to them."""
    cases = [(digit, shape) for digit, shapes in SHAPES.items() for shape in shapes]
    script = """
      const { toPixels } = await at("pad.js"), { readFacts } = await at("model.js");
      const { facts } = await readFacts(await at("browser.js")), answers = [];
      for (const strokes of argument) {
        const pixels = toPixels(strokes, facts.pad, facts.preprocess);
        answers.push((await engine.call("predictPrepared", pixels)).answer.top[0].index);
      }
      return answers;
    """
    found = opened.run(script, [shape for _, shape in cases])
    right = [digit for (digit, _), answer in zip(cases, found, strict=True) if digit == answer]
    assert len(right) >= 27, f"{len(right)} of {len(cases)}"


def test_the_pad_takes_the_mouse_and_is_cleared(opened):
    page = opened.page
    for digit in (2, 5, 0):
        page.click("#clear")
        assert "None yet." in page.text_content("#answer")
        opened.draw(SHAPES[digit][0])
        opened.until(".best strong", f"^({LABELS[digit]})$")
    assert "median of the last" in page.text_content("#latency-note")
    assert "WebAssembly" in page.text_content("#latency-note")


def test_the_pad_takes_fingers(opened):
    page = opened.page
    page.click("#clear")
    touch = page.context.new_cdp_session(page)
    box, before = page.locator("#pad").bounding_box(), page.evaluate("scrollY")
    for kind, (x, y) in zip(("touchStart", "touchMove"), SHAPES[1][0][0], strict=True):
        point = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [point]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    opened.until(".best strong", "^1$")
    assert page.evaluate("scrollY") == before


def test_the_map_is_the_rollout_that_numpy_computes(opened, bundle):
    from vitdeploy.attention import run_instrumented
    from vitdeploy.graph.analysis.attention import token_views
    from vitdeploy.graph.canonical.normalise import normalise as canonical

    model = load_graph(bundle / "model.onnx")
    canonical(model)
    views = token_views(model, "digits")
    pixels = np.load(bundle / read_bundle(bundle).golden.inputs)["image"][2]
    [instrumented] = run_instrumented(model, views, [pixels], DIGITS)
    found = opened.run(
        """
      const [width, height] = [32, 32], data = Uint8Array.from(argument);
      const map = await engine.call("look", { width, height, channels: 1, data });
      return { ...map, values: Array.from(map.values) };
    """,
        pixels.ravel().tolist(),
    )
    assert (found["rows"], found["columns"]) == views.grid
    np.testing.assert_allclose(np.reshape(found["values"], views.grid), instrumented.flow_map(views), atol=1e-6)


def test_the_overlay_is_drawn_and_taken_away(opened):
    page = opened.page
    page.click("#examples button >> nth=2")
    opened.until("#answer", "%")
    plain = page.locator("#view").screenshot()
    page.check("#overlay")
    assert "on 8 × 8 patches" in opened.until("#looked", "patches")
    assert page.locator("#view").screenshot() != plain
    page.uncheck("#overlay")
    assert page.text_content("#looked") == ""
    assert page.locator("#view").screenshot() == plain


def test_no_layout_has_a_fault_on_phones_and_desktops_light_and_dark(opened):
    page, script = opened.page, (Path(__file__).parents[1] / "report" / "layout.js").read_text()
    look = f"() => {{ {script}; return layoutErrors({{contentWindow: window, contentDocument: document}}) }}"
    page.click("#check")
    opened.until("#checked", "images")
    page.check("#overlay")
    page.click("#examples button >> nth=1")
    opened.until("#looked", "patches")
    for width, scheme in ((390, "light"), (390, "dark"), (768, "dark"), (1280, "light")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        # Requests are no fault here, and are tested elsewhere.
        assert [each for each in page.evaluate(look) if not each.startswith("request:")] == [], (width, scheme)
    page.set_viewport_size({"width": 390, "height": 844})
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"text"})
    opened.until("#alert", ".")
    box = page.locator("#alert-box").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["y"] + box["height"] <= 844
    page.click("#dismiss")
    assert not page.locator("#alert-box").is_visible()


HEADS = {
    "detection": PostprocessSpec(),
    "segmentation": SegmentationSpec(),
    "keypoints": KeypointSpec("argmax", threshold=0.1, skeleton=((0, 1),)),
    "image-to-image": ImageSpec(-1.0, 1.0),
    "regression": RegressionSpec(("m", "kg")),
    "embedding": EmbeddingSpec(),
}
NAMED = ("segmentation", "keypoints", "regression")


def planted_page(folder, model, task, built):
    """A page of a planted model, float32 [batch, 1, 32, 32] in, with the golden answers of one image."""
    from vitdeploy.compilation.engine import compile_engine
    from vitdeploy.graph.io.files import GraphMetadata, save_graph, set_metadata
    from vitdeploy.runtime.engine import make_runner

    post = HEADS.get(task)
    set_metadata(model, GraphMetadata("planted", task, planted.PREPROCESS, postprocess=post))
    for name in ("engine", "bundle", "page"):
        (folder / name).mkdir()
    save_graph(model, folder / "model.onnx")
    engine = compile_engine(
        folder / "model.onnx", folder / "engine", target="onnxruntime-cpu", precision="fp32", batch=1, placed=0
    )
    pixels = load_pixels(planted.picture(folder), planted.PREPROCESS)[None]
    with make_runner(folder / "engine", engine) as runner:
        outputs = runner.infer({"image": normalise(pixels, planted.PREPROCESS)})
    write_bundle(
        folder / "bundle",
        name="planted",
        task=task,
        graphs={"model": (folder / "model.onnx", graph_spec(model, "model.onnx"))},
        preprocess=planted.PREPROCESS,
        postprocess=post,
        engines=[(engine, folder / "engine")],
        labels={"detection": ["bright", "dark", "never"]}.get(task, ["bright", "dark"] if task in NAMED else []),
        golden=golden_of({"image": pixels}, outputs, engine.artifact, 1e-4),
    )
    web.write(folder / "bundle", folder / "page")
    shutil.copytree(built / "runtime", folder / "page" / "runtime", copy_function=os.link)
    return folder / "page"


@pytest.fixture(scope="module")
def small_page(built, tmp_path_factory):
    return planted_page(tmp_path_factory.mktemp("small"), planted.classifier(blocks=1), "classification", built)


def test_a_gpu_answers_with_the_float_graph(browser, small_page):
    """The adapter is software here, which the page takes only when it is told to."""
    with started(small_page) as address:
        page = Opened(browser, f"{address}?backend=webgpu")
        page.until("#state", "^ready$")
        assert page.page.text_content("#where") == "WebGPU, fp32."
        assert not any(name in url for url in page.requests for name in ("engine.onnx", "ort.wasm"))
        assert page.errors == []
        assert not page.page.locator("#padded").is_visible()  # these images are no drawings
        page.page.close()


def test_where_a_gpu_is_not_there_or_wrong_webassembly_answers_and_the_page_says_why(small_page, built):
    """In Node, where the session that stands for a wrong GPU runs on WebAssembly too, against other golden answers."""
    ort = (built / "node_modules" / "onnxruntime-web" / "dist" / "ort.node.min.mjs").as_uri()
    script = f"""
      import * as ort from "{ort}";
      import {{ readFile }} from "node:fs/promises";
      import {{ Model }} from "{(small_page / "app" / "model.js").as_uri()}";
      ort.env.wasm.numThreads = 1;
      const bytes = async (path) => new Uint8Array(await readFile("{small_page}/" + path)).buffer;
      const zeros = async (path) => (path.endsWith(".f32") ? new ArrayBuffer(8) : bytes(path));
      const create = (graph) => ort.InferenceSession.create(graph, {{ executionProviders: ["wasm"] }});
      const stands = {{ Tensor: ort.Tensor, InferenceSession: {{ create }} }};
      const real = async () => ({{ ort, threads: 1 }}), wrong = async () => ({{ ort: stands, threads: 1 }});
      for (const source of [{{ bytes, runtime: real }}, {{ bytes: zeros, runtime: wrong }}]) {{
        const model = await Model.open(source, "auto");
        console.log(`${{model.backend}}: ${{model.note}}`);
      }}
      process.exit(0);
    """
    done = subprocess.run(
        ["node", "--input-type=module"], input=script, cwd=built, capture_output=True, text=True, timeout=60
    )
    absent, wrong = done.stdout.splitlines()
    assert absent.startswith("wasm: WebGPU is not used: no available backend found."), done.stdout + done.stderr
    assert wrong.startswith("wasm: WebGPU is not used, because its answers are wrong. WRONG: 1 images, ")


def test_an_engine_that_cannot_be_loaded_is_told(browser, small_page):
    for file, says in (("model/engine.onnx", "failed."), ("model/model.json", "failed.")):
        whole = (small_page / file).read_bytes()
        (small_page / file).write_bytes(whole[: len(whole) // 2])
        with any_server(small_page) as address:
            page = Opened(browser, f"{address}?backend=wasm")
            assert says in page.until("#alert", ".")
            page.page.close()
        (small_page / file).write_bytes(whole)
    (small_page / "runtime" / "ort.wasm.min.mjs").unlink()
    with any_server(small_page) as address:
        page = Opened(browser, f"{address}?backend=wasm")
        assert "run npm run build" in page.until("#alert", ".")
        assert page.page.text_content("#state") == "no engine"
        page.page.close()


# --- what is written, and served ------------------------------------------------------------------------------------


def test_the_server_gives_what_is_in_the_folder_alone(home):
    port = int(home.rsplit(":", 1)[1].strip("/"))

    def ask(path, method="GET"):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=False)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    status, headers, body = ask("/")
    assert (status, b"<!doctype html>" in body) == (200, True)
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert ask("/runtime/ort-wasm-simd-threaded.wasm", "HEAD")[1]["Content-Type"] == "application/wasm"
    outside = (
        "/../../../../../../../../etc/hosts",
        "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/hosts",
        "/..%2f..%2f..%2f..%2fetc%2fhosts",
    )
    for path in (*outside, "/%00", "/%zz", "//", "/app", "/absent.js"):
        assert ask(path)[0] == 404, path
    assert ask("/", "POST")[0] == 404


def test_the_command_writes_a_page_that_names_its_bundle(bundle, small_bundle, tmp_path, shared_store):
    with command_line(tmp_path, shared_store) as here:
        done = here("embed", bundle, "--as", "web", "-o", "page")
        assert done.returncode == 0 and f"next: cd page && {' && '.join(web.COMMANDS)}" in done.stdout
        facts = json.loads((tmp_path / "page" / "model" / "model.json").read_text())
        assert facts["digest"] in (tmp_path / "page" / "README.md").read_text()
        assert not re.search(r"{[{] |{%", (tmp_path / "page" / "README.md").read_text())  # of the template
        for file in ("package.json", "package-lock.json"):
            assert json.loads((tmp_path / "page" / file).read_text())["name"] == "digits-i"
        assert (tmp_path / "page" / "model" / "engine.onnx").read_bytes() == (
            bundle / read_bundle(bundle).engines[0].graph
        ).read_bytes()
        assert here("embed", bundle, "--as", "web", "-o", "page").returncode == 2
        refused = here("embed", small_bundle, "--as", "web", "-o", "other")
        assert refused.returncode == 2 and not (tmp_path / "other").exists()


def test_what_it_cannot_be_written_for_is_refused(bundle, small_bundle, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no golden answers"):
        web.write(small_bundle, tmp_path)
    manifest = read_bundle(bundle)
    engine = manifest.engines[0]
    other = dataclasses.replace(engine.inputs[0], dtype="float64")
    for changes, error in (
        ({"engines": (dataclasses.replace(engine, target="openvino-cpu"),)}, TargetError),
        ({"engines": (dataclasses.replace(engine, inputs=(other,)),)}, CapabilityError),
        ({"task": "panoptic"}, CapabilityError),
        ({"task": "sequence", "preprocess": None}, CapabilityError),
    ):
        changed = dataclasses.replace(manifest, **changes)
        with monkeypatch.context() as patch:
            patch.setattr(source, "read_bundle", lambda folder, changed=changed: changed)
            with pytest.raises(error):
                web.write(bundle, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(web, "MOST_BYTES", 1000)
        with pytest.raises(CapabilityError, match="too large for a web page"):
            web.write(bundle, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_attention_over_patches_the_page_says_why(bundle, tmp_path, monkeypatch):
    from vitdeploy.graph.io.files import save_graph

    file = tmp_path / "windowed.onnx"
    save_graph(planted.windowed(), file)
    found = source.find_embedded(bundle, web.TARGETS, "the page", source.has_form)
    graph = dataclasses.replace(found.manifest.graphs["model"], file=str(file))
    windowed = dataclasses.replace(found, manifest=dataclasses.replace(found.manifest, graphs={"model": graph}))
    told = web._write_float(windowed, tmp_path / "float.onnx")
    assert told == {
        "reason": "No attention map: the model attends inside windows, so no token's attention covers the image."
    }
    assert (tmp_path / "float.onnx").read_bytes() == file.read_bytes()


def test_a_pad_is_for_drawings_and_knows_their_form():
    spec = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
    frames = np.zeros((4, 32, 32, 1), np.uint8)
    frames[:, 4:28, 12:20] = 255
    form = drawing_form(frames, spec)
    assert (form.light, form.height, form.width, form.detail) == (True, 24 / 32, 8 / 32, (16, 16))
    assert form.stroke == pytest.approx(2 * 24 * 8 / (2 * (24 + 8)) / 32)
    dark = drawing_form(255 - frames, spec)
    assert dataclasses.replace(dark, light=True) == form and not dark.light
    photographs = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 1), np.uint8)
    assert drawing_form(photographs, spec) is None
    assert drawing_form(np.zeros_like(frames), spec) is None


def test_a_detector_draws_its_boxes(browser, built, tmp_path):
    page = planted_page(tmp_path, planted.detector(), "detection", built)
    with started(page) as address:
        opened = Opened(browser, f"{address}?check&backend=wasm")
        assert opened.until("#checked", "images").startswith("Correct: 1 images. Largest difference: ")
        assert not opened.page.locator("#looking").is_visible()
        assert "The answer is boxes" in opened.page.text_content("#looked")
        opened.page.set_input_files("#file", tmp_path / "image.png")
        assert opened.best() == "2 objects"
        shown = opened.page.locator(".scores li > span").all_text_contents()
        assert shown == ["bright", "94.8 %", "dark", "87.0 %"]
        corner = opened.page.evaluate("""() => {
          const view = document.getElementById("view"), context = view.getContext("2d");
          const at = (x, y) => [...context.getImageData(x, y, 1, 1).data];
          return [at(view.width / 2 - 2, view.height / 4), at(view.width * 0.8, view.height / 4)];
        }""")
        assert corner[0][0] > corner[0][2] + 100 and corner[1][0] == corner[1][2]  # the box ends in the middle
        assert opened.errors == []
        opened.page.close()


def test_numbers_are_shown_with_names_and_units(browser, built, tmp_path):
    model = planted.classifier("average")
    model.graph.outputs[0].name = "numbers"
    page = planted_page(tmp_path, model, "regression", built)
    with started(page) as address, load(tmp_path / "bundle") as predictor:
        opened = Opened(browser, f"{address}?check&backend=wasm")
        assert opened.until("#checked", "images").startswith("Correct: 1 images. Largest difference: numbers")
        opened.page.set_input_files("#file", tmp_path / "image.png")
        first, second = predictor.predict(tmp_path / "image.png").numbers
        found = opened.best()
        assert found.endswith(" m") and float(found.removesuffix(" m")) == pytest.approx(first.value, rel=1e-3)
        name, text = opened.page.locator(".scores li > span").all_text_contents()
        assert name == "dark" and float(text.removesuffix(" kg")) == pytest.approx(second.value, rel=1e-3)
        assert opened.errors == []
        opened.page.close()


@pytest.mark.parametrize("task", ["features", "embedding"])
def test_vectors_are_compared(task, browser, built, tmp_path):
    model = planted.classifier("average")
    model.graph.outputs[0].name = "features"
    page = planted_page(tmp_path, model, task, built)
    with started(page) as address:
        opened = Opened(browser, f"{address}?check&backend=wasm")
        assert opened.until("#checked", "images").startswith("Correct: 1 images. Largest difference: features")
        opened.page.set_input_files("#file", tmp_path / "image.png")
        assert opened.best() == "2 numbers"
        length = float(opened.page.text_content(".best span").removeprefix("length "))
        assert (length == 1) == (task == "embedding")
        opened.page.click("#keep")
        assert opened.until("#answer", "Cosine").endswith("1.0000")
        white = io.BytesIO()
        Image.new("L", (40, 30), 255).save(white, "PNG")
        opened.page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": white.getvalue()})
        cosine = float(opened.until("#answer", r"0\.\d{4}$").rsplit(" ", 1)[1])
        with load(tmp_path / "bundle") as predictor:
            a, b = (predictor.predict(each).vector for each in (tmp_path / "image.png", white.getvalue()))
        assert cosine == pytest.approx(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), abs=1e-4)
        assert opened.errors == []
        opened.page.close()


def bright_or_dark(output="logits", gains=(1, -1), offset=0):
    """The image times each of `gains`, and an offset. Semantic segmentation: a pixel is of class 0 where its value is
    above 0, of class 1 elsewhere; heat maps: the brightest pixel and the darkest."""
    nodes = [onnx.helper.make_node("Conv", ["image", "weight", "offset"], [output], kernel_shape=[1, 1])]
    offsets = onnx.numpy_helper.from_array(np.full(len(gains), offset, np.float32), "offset")
    weight = onnx.numpy_helper.from_array(np.array(gains, np.float32).reshape(-1, 1, 1, 1), "weight")
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", channels, 32, 32])
        for name, channels in (("image", 1), (output, len(gains)))
    ]
    graph = onnx.helper.make_graph(nodes, "planted", ends[:1], ends[1:], [weight, offsets])
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8))


def test_classes_are_drawn_over_the_image(browser, built, tmp_path):
    page = planted_page(tmp_path, bright_or_dark(), "segmentation", built)
    with started(page) as address:
        opened = Opened(browser, f"{address}?check&backend=wasm")
        assert opened.until("#checked", "images").startswith("Correct: 1 images. Largest difference: logits")
        assert "The answer is a map" in opened.page.text_content("#looked")
        opened.page.set_input_files("#file", tmp_path / "image.png")
        with load(tmp_path / "bundle") as predictor:
            expected = predictor.predict(tmp_path / "image.png")
        opened.until(".scores", expected.classes[0].label)
        shown = opened.page.locator(".scores li > span").all_text_contents()
        assert shown == [text for each in expected.classes for text in (each.label, f"{100 * each.share:.1f} %")]
        corner = opened.page.evaluate("""() => {
          const view = document.getElementById("view"), context = view.getContext("2d");
          return [...context.getImageData(view.width / 2, view.height / 2, 1, 1).data];
        }""")
        tint = colours(2)[expected.map[expected.map.shape[0] // 2, expected.map.shape[1] // 2]]
        grey = np.asarray(Image.open(tmp_path / "image.png").convert("L"), float)
        under = grey[grey.shape[0] // 2, grey.shape[1] // 2]
        assert np.abs(np.array(corner[:3]) - (tint.astype(float) * 140 / 255 + under * 115 / 255)).max() <= 6
        assert opened.errors == []
        opened.page.close()


def colour_at(opened, x, y):
    """RGB of the canvas at shares of its sides."""
    return opened.page.evaluate(
        """([x, y]) => {
          const view = document.getElementById("view"), context = view.getContext("2d");
          return [...context.getImageData(view.width * x, view.height * y, 1, 1).data].slice(0, 3);
        }""",
        [x, y],
    )


def test_points_are_drawn_on_the_image(browser, built, tmp_path):
    page = planted_page(tmp_path, bright_or_dark("heatmaps", offset=1.5), "keypoints", built)
    with started(page) as address:
        opened = Opened(browser, f"{address}?check&backend=wasm")
        assert opened.until("#checked", "images").startswith("Correct: 1 images. Largest difference: heatmaps")
        spots = np.full((96, 128), 128, np.uint8)
        spots[20:32, 20:32], spots[70:82, 100:112] = 255, 0
        Image.fromarray(spots).save(tmp_path / "spots.png")
        opened.page.set_input_files("#file", tmp_path / "spots.png")
        with load(tmp_path / "bundle") as predictor:
            expected = predictor.predict(tmp_path / "spots.png")
        opened.until(".best", f"{len(expected.shown)} of 2 points")
        shown = opened.page.locator(".scores li > span").all_text_contents()
        assert shown[::2] == [point.name for point in expected.shown] == ["bright", "dark"]
        width, height = expected.size
        a, b = ((point.x + 0.5, point.y + 0.5) for point in expected.points)
        assert colour_at(opened, a[0] / width, a[1] / height) == list(POINT)
        assert colour_at(opened, b[0] / width, b[1] / height) == list(POINT)
        assert colour_at(opened, (a[0] + b[0]) / 2 / width, (a[1] + b[1]) / 2 / height) == list(LINE)
        assert opened.errors == []
        opened.page.close()


def test_the_picture_that_is_made_is_shown(browser, built, tmp_path):
    page = planted_page(tmp_path, bright_or_dark("reconstruction", (-1,)), "image-to-image", built)
    with started(page) as address:
        opened = Opened(browser, f"{address}?check&backend=wasm")
        assert opened.until("#checked", "images").startswith("Correct: 1 images. Largest difference: reconstruction")
        opened.page.set_input_files("#file", tmp_path / "image.png")
        with load(tmp_path / "bundle") as predictor:
            expected = predictor.predict(tmp_path / "image.png").pixels
        opened.until("#caption", "The model's output")
        assert opened.best() == "32 × 32 pixels"
        for row, column in ((3, 3), (16, 9), (28, 30)):
            found = colour_at(opened, (column + 0.5) / 32, (row + 0.5) / 32)
            assert np.abs(np.array(found) - expected[row, column]).max() <= 1
        assert opened.errors == []
        opened.page.close()

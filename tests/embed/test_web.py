"""The page of a bundle: its modules in Node, and the page itself in headless Chromium, against the Predictor."""

import base64
import contextlib
import dataclasses
import functools
import http.client
import http.server
import io
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_line import command_line
from tests.embed.strokes import SHAPES
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import Golden, write_bundle
from vitdeploy.embed import source, web
from vitdeploy.embed.web.pad import drawing_form
from vitdeploy.errors import CapabilityError, InputError, TargetError
from vitdeploy.graph.io import graph_spec, load_graph
from vitdeploy.runtime.detection import detect
from vitdeploy.runtime.geometry import input_window
from vitdeploy.runtime.postprocess import classify
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.spec import PostprocessSpec, PreprocessSpec, encode

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
    from vitdeploy.pipeline.origin import Overrides, find_origin
    from vitdeploy.pipeline.stages.compile import compile_graph
    from vitdeploy.pipeline.stages.export import ExportConfig, export
    from vitdeploy.pipeline.stages.quantize import PlaceConfig, calibrate, place_graph
    from vitdeploy.runtime.ort import OnnxRuntimeRunner

    work = tmp_path_factory.mktemp("digits")
    images = split(digits, "folders", calibration=128, evaluation="all", seed=0).calibration[:32]
    origin = find_origin(Source("vit_w192d4h3_patch4_32", digits / "vit_digits.safetensors"), Overrides(DIGITS))
    export(origin, ExportConfig("digits", opset=20, batch=None, in_graph=True), work)
    calibrate(work / "model.onnx", images, work)
    for name in ("placed", "engine", "bundle"):
        (work / name).mkdir()
    place_graph(PlaceConfig("onnxruntime-cpu", "int8", ()), work / "model.onnx", work / "statistics.npz", work / "placed")
    engine = compile_graph(work / "placed" / "model.onnx", "onnxruntime-cpu", 1, work / "engine")
    pixels = np.stack([load_pixels(sample.path, DIGITS) for sample in images[:8]])
    with OnnxRuntimeRunner(work / "model.onnx", name="float") as runner:
        logits = runner.infer({"image": pixels})["logits"]
    write_bundle(
        work / "bundle",
        name="digits <i>",
        task="classification",
        graphs={"model": (work / "model.onnx", graph_spec(load_graph(work / "model.onnx"), "model.onnx"))},
        preprocess=DIGITS,
        engines=[(engine, work / "engine")],
        labels=LABELS,
        golden=Golden({"image": pixels}, {"logits": logits}, {"onnxruntime-cpu": 0.05}),
    )
    return work / "bundle"


@pytest.fixture(scope="module")
def written(bundle, tmp_path_factory):
    """The page as it is written."""
    folder = tmp_path_factory.mktemp("page")
    web.write(bundle, folder)
    return folder


def npm(folder, *command):
    return subprocess.run(["npm", *command], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def built(written):
    """The page after all commands that `write` gave."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("install nodejs (18 or newer) and npm")
    for command in web.COMMANDS:
        done = npm(written, *command.split()[1:])
        if done.returncode and OFFLINE.search(done.stderr):
            pytest.skip("npm cannot reach its registry, so onnxruntime-web is not there")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Right: 8 images, 8 of 8 with the original's first class" in done.stdout
    return written


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
    thread = threading.Thread(target=server.serve_forever)
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
        return self.page.evaluate(f"async (argument) => {{ const at = (name) => import(`${{location.origin}}/app/${{name}}`); {script} }}", argument)


@pytest.fixture(scope="module")
def opened(browser, home):
    page = Opened(browser, home)
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


SPECS = [
    PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,)),
    PreprocessSpec(31, (28, 25), "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    PreprocessSpec((20, 33), (20, 33), "lanczos", (0.0,) * 3, (1.0,) * 3),
    PreprocessSpec((24, 24), (24, 24), "bicubic", (0.5,) * 3, (0.5,) * 3, fit="cover", crop_rounding="down"),
    PreprocessSpec(23, (30, 20), "nearest", (0.5,), (0.5,), crop_rounding="down"),
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
    for (spec, width, height), image, found in zip(cases, images, in_node(written, prepare=asked)["prepare"], strict=True):
        wanted = load_pixels(image, spec)
        pixels = np.frombuffer(base64.b64decode(found["pixels"]), np.uint8).reshape(wanted.shape)
        np.testing.assert_array_equal(pixels, wanted, err_msg=f"{spec} {width}x{height}")
        floats = np.frombuffer(base64.b64decode(found["floats"]), np.float32).reshape(2, -1)
        np.testing.assert_array_equal(floats, np.tile(normalise(wanted[None], spec).reshape(-1), (2, 1)))
        window = input_window((width, height), spec)
        left, top, wide, high = (found["window"][name] for name in ("left", "top", "width", "height"))
        assert (left, top, left + wide, top + high) == pytest.approx(dataclasses.astuple(window))


def test_outputs_become_the_predictors_answers(written):
    generator = np.random.default_rng(3)
    spec, labels = PreprocessSpec(30, (28, 20), "bilinear", (0.5,), (0.5,)), ["a", "b"]
    logits = [generator.normal(size=7).astype(np.float32) * 5, np.zeros(3, np.float32)]
    cases = []
    for scores, boxes in (("softmax", "cxcywh"), ("sigmoid", "xyxy"), ("given", "xyxy")):
        outputs = {"boxes": generator.uniform(0, 1, (6, 4)), "logits": generator.normal(size=(6, 4)) * 3}
        if scores == "given":
            outputs |= {"scores": generator.uniform(size=6), "labels": generator.integers(0, 3, 6)}
        outputs = {name: np.asarray(values, np.float32) for name, values in outputs.items()}
        cases.append((outputs, PostprocessSpec(scores, boxes, 0.3)))
    size = {"width": 64, "height": 40, "spec": encode(spec), "labels": labels}
    asked = [
        {"outputs": {name: values.ravel().tolist() for name, values in outputs.items()}, "post": encode(post), **size}
        for outputs, post in cases
    ]
    found = in_node(written, detect=asked, classify=[{"logits": each.tolist(), "labels": labels} for each in logits])
    for (outputs, post), ours in zip(cases, found["detect"], strict=True):
        wanted = detect(outputs, (64, 40), spec, post, labels).objects
        assert wanted and [(each["index"], each["label"]) for each in ours] == [(w.index, w.label) for w in wanted]
        np.testing.assert_allclose([each["score"] for each in ours], [w.score for w in wanted], rtol=1e-12)
        np.testing.assert_allclose([each["box"] for each in ours], [w.box for w in wanted], atol=1e-9)
    for each, ours in zip(logits, found["classify"], strict=True):
        wanted = classify(each, labels).top
        assert [(one["index"], one["label"]) for one in ours] == [(w.index, w.label) for w in wanted]
        np.testing.assert_allclose([one["score"] for one in ours], [w.score for w in wanted], rtol=1e-12)
    assert found["cosine"] == pytest.approx(1.5 / np.sqrt(14 * 5.25))


def test_a_wrong_answer_is_found(built, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(built, changed, ignore=shutil.ignore_patterns("node_modules", "runtime"))
    (changed / "node_modules").symlink_to(built / "node_modules")
    logits = np.fromfile(changed / "golden" / "logits.f32", "<f4").reshape(8, 10)
    logits[3] = np.roll(logits[3], 1)
    logits.astype("<f4").tofile(changed / "golden" / "logits.f32")
    done = subprocess.run(["node", "tools/check.mjs"], cwd=changed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "WRONG: 8 images, 7 of 8 with the original's first class" in done.stdout


def test_what_counts_as_a_right_answer(written):
    wanted = np.array([[1, 0.99, 0], [0, 3, 0]], np.float32)
    cases = {
        "same": wanted,
        "tied": np.array([[0.98, 1, 0], [0, 3, 0]]),  # two classes that the tolerance does not tell apart
        "other": np.array([[0, 0.99, 1], [0, 3, 0]]),
        "no number": np.array([[1, np.nan, 0], [0, 3, 0]]),
        "short": wanted[:, :2],
    }
    asked = [{"wanted": wanted.ravel().tolist(), "rows": [[str(x) for x in row] for row in rows]} for rows in cases.values()]
    found = dict(zip(cases, in_node(written, golden=asked)["golden"], strict=True))
    assert {name: each["ok"] for name, each in found.items()} == {
        "same": True, "tied": True, "other": False, "no number": False, "short": False
    }
    assert [found[name]["first"] for name in ("same", "tied")] == [{"equal": 2, "tied": 0}, {"equal": 1, "tied": 1}]
    assert found["tied"]["outputs"][0]["difference"] == pytest.approx(0.02 / 3, rel=1e-3)

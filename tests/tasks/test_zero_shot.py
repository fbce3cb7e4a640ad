"""Image and text encoders through the whole line, from transformers' folder to a bundle that takes texts."""

import base64
import json
import shutil

import numpy as np
import pytest
import torch

import vitdeploy as vd
from tests.command_line import command_line
from tests.models.towers import DIGITS, save_towers
from tests.references import reference
from tests.sabotage import require_unproven
from vitdeploy.api.quantize import quantize
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import CapabilityError, DataError, InputError, ManifestError, MissingFileError
from vitdeploy.models.source import Source
from vitdeploy.runtime import load
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import check_golden
from vitdeploy.runtime.preprocess import load_pixels, to_input
from vitdeploy.runtime.tasks.zero_shot import TextsBound, TextsSent
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import find_reference_model
from vitdeploy.workflows.placement import compile_bundle

TEXTS = [f"a photo of the digit {word}" for word in DIGITS]
TEMPLATE = "a photo of the digit {}"
SHARED = "onnxruntime-cpu"


@pytest.fixture(scope="module")
def words(digits, tmp_path_factory):
    """The digits in class folders that are called by words, a few of each."""
    folder = tmp_path_factory.mktemp("words")
    for part, count in (("calibration", 2), ("evaluation", 6)):
        for number, word in enumerate(DIGITS):
            (folder / part / word).mkdir(parents=True)
            for path in sorted((digits / part / str(number)).glob("*.png"))[:count]:
                shutil.copyfile(path, folder / part / word / path.name)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "clip"
    folder.mkdir()
    return folder, save_towers("clip", folder)


@pytest.fixture(scope="module")
def made(clip, words, shared_store, tmp_path_factory):
    """The bundle of a run in INT8, and its report."""
    out = tmp_path_factory.mktemp("run") / "bundle"
    recipe = {
        "vitdeploy": 1,
        "name": "clip",
        "source": {"model": f"hf:{clip[0]}"},
        "data": {"path": str(words), "calibration": {"images": 20}, "template": TEMPLATE},
        "precision": "int8",
        "targets": ["onnxruntime-cpu"],
        "budget": {"min_agreement": 0},
        "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
    }
    path = out.parent / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    with command_line(out.parent, shared_store, short_bench=True) as command:
        return out, command("run", path, "-o", out, "--json").document


@pytest.fixture(scope="module")
def pictures(words):
    return sorted((words / "evaluation").glob("*/*.png"))[::7]


def theirs(clip, pictures, texts):
    """transformers' own probabilities, with its own tokenizer and processor."""
    from PIL import Image

    folder, model = clip
    tokens = reference("transformers").AutoTokenizer.from_pretrained(folder)(
        texts, padding="max_length", truncation=True, max_length=16, return_tensors="pt"
    )
    processor = reference("transformers").CLIPImageProcessor.from_pretrained(folder)
    images = processor([Image.open(path).convert("RGB") for path in pictures], return_tensors="pt")
    with torch.no_grad():
        return model(**tokens, **images).logits_per_image.softmax(-1).numpy()


# --- the whole line ---------------------------------------------------------------------------------------------------


def test_both_towers_are_exported_verified_and_benched(made):
    bundle, report = made
    manifest = read_bundle(bundle)
    assert (report["task"], manifest.task, set(manifest.graphs)) == (
        "zero-shot",
        "zero-shot",
        {"image_tower", "text_tower"},
    )
    assert {row["graph"] for row in report["export"]["parity"]} == {"image_tower", "text_tower"}
    assert max(row["max_relative_difference"] for row in report["export"]["parity"]) < 1e-4
    assert report["export"]["tokenizer"].startswith("same tokens for 1000 texts as transformers")
    engines = {engine["artifact"]: engine for engine in report["engines"]}
    verified, int8 = engines["onnxruntime-cpu-fp32"]["verify"], engines["onnxruntime-cpu-int8"]
    assert (verified["metric"], verified["n"], verified["agreement"], verified["drop"]) == ("top-1", 60, 100, 0)
    assert int8["verify"]["agreement"] >= 80
    assert {name.partition("/")[0] for name in int8["quantization"]["int8"]} == {"image_tower", "text_tower"}
    assert int8["kernels"]["int8"] == len(int8["quantization"]["int8"])
    assert [row["artifact"] for row in report["bench"]["results"]] == ["original", *engines]
    for row in report["bench"]["results"][1:]:
        assert list(row["parts_ms"]) == ["image_tower", "text_tower"]
        assert min(row["parts_ms"].values()) > 0
    assert (bundle / "labels.txt").read_text().splitlines() == sorted(TEXTS)


def test_every_engine_gives_its_golden_answers(made):
    bundle, _ = made
    manifest = read_bundle(bundle)
    assert manifest.engines
    for engine in manifest.engines:
        with make_runner(bundle, engine) as runner:
            found = check_golden(bundle, manifest, engine, runner)
        assert (found.ok, found.inputs, found.difference) == (True, 8, 0)


@pytest.fixture(scope="module")
def exported(clip, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    export(find_reference_model(Source(f"hf:{clip[0]}")), ExportConfig("clip", 20, None, True), out)
    return out


@pytest.fixture(scope="module", params=["onnxruntime-cpu", "openvino-cpu"])
def floats(request, exported, tmp_path_factory):
    out = tmp_path_factory.mktemp("floats")
    compile_bundle(exported / "image_tower.onnx", request.param, None, None, out)
    return out


# --- the predictor ----------------------------------------------------------------------------------------------------


def test_probabilities_are_transformers(floats, clip, pictures):
    texts = ["a photo of a cat", *TEXTS]
    expected = theirs(clip, pictures, texts)
    with load(floats) as predictor:
        for path, row in zip(pictures, expected, strict=True):
            found = predictor.predict(path, top=len(texts), texts=texts)
            order = np.argsort(-row, kind="stable")
            assert (found.index, found.label) == (order[0], texts[order[0]])
            np.testing.assert_allclose(
                [each.score for each in sorted(found.top, key=lambda t: t.index)], row, atol=1e-3
            )
            assert found.to_dict()["top"][0]["similarity"] == pytest.approx(found.top[0].similarity)
            assert f"{100 * found.score:.1f} %" in str(found)


def test_a_text_runs_once(floats, pictures):
    with load(floats) as predictor:
        tower = predictor._text_tower.whole.linked.runners["text_tower"]
        runs, infer = [], tower._infer
        tower._infer = lambda feeds: runs.append(len(feeds["text"])) or infer(feeds)
        first = predictor.predict(pictures[0], texts=["one", "two"])
        again = predictor.predict_batch(pictures[:2], texts=["two", "three", "one"])
        assert sum(runs) == 3
        assert {each.label for each in first.top} == {"one", "two"}
        assert [len(each.top) for each in again] == [3, 3]
        assert predictor.timings.images == 3


def test_texts_that_are_none_are_refused(floats, pictures):
    with load(floats) as predictor:
        no_texts = (([], "no text"), ("cat", "str"), (["cat", 3], "int"), (None, "without labels"))
        for texts, found in (*no_texts, (["cat", " "], "text 1 of 2 is ' '")):
            with pytest.raises(InputError) as caught:
                predictor.predict(pictures[0], texts=texts)
            assert found in caught.value.found
        with pytest.warns(RuntimeWarning, match="text truncated to 16 tokens: 'one one .* the model does not read"):
            predictor.predict(pictures[0], texts=["one " * 50])


@pytest.mark.filterwarnings("ignore:text truncated")  # the server's log has it
def test_the_server_compares_with_the_texts_of_a_request(floats, pictures):
    """As the predictor does; a text that is cut is told, and texts that are none are refused before the image runs."""
    pytest.importorskip("uvicorn", reason="pip install 'vitdeploy[serve]'")
    from tests.serve.conftest import Running
    from vitdeploy.serve.engines import load_engines

    image, texts = base64.b64encode(pictures[0].read_bytes()).decode(), [*TEXTS, "a cat"] * 4
    with load(floats) as predictor:
        expected = predictor.predict(pictures[0], top=3, texts=texts).to_dict()
    with load_engines(floats, max_batch=1) as engines, Running(engines, max_texts=50) as server:

        def ask(texts):
            body = json.dumps({"image": image, "texts": texts})
            return server.ask("POST", "/predict?top=3", body, {"Content-Type": "application/json"})

        status, _, answer = ask(texts)
        assert (status, [each["label"] for each in answer["top"]]) == (200, [each["label"] for each in expected["top"]])
        for ours, theirs in zip(answer["top"], expected["top"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert "text truncated to 16 tokens" in ask(["one " * 50, "two"])[2]["warnings"][0]
        for wrong, told in (
            ([], "texts must be a list of at least one text; found: no text"),
            ("cat", "texts must be a list of at least one text; found: str"),
            (["cat", " "], "a text must not be blank"),
            (["cat"] * 51, "too many texts; found: 51; expected: at most 50"),
            (["cat", "a" * 4001], "a text is too long; found: 4001 characters; expected: at most 4000"),
        ):
            status, _, refused = ask(wrong)
            assert (status, refused["error"].startswith(told)) == (422, True), refused
        status, _, refused = ask(None)
        assert (status, refused["error"].startswith("no texts to compare the image with")) == (422, True)


def test_a_bundle_of_a_run_knows_its_texts(made, pictures):
    bundle, _ = made
    with load(bundle) as predictor:
        found = predictor.predict(pictures[0])
        assert found.label in TEXTS
        assert [str(each) for each in predictor.stream(pictures[:2])] == [
            str(predictor.predict(path)) for path in pictures[:2]
        ]


def test_the_command_line_takes_texts(made, pictures, tmp_path, small_bundle, shared_store):
    with command_line(tmp_path, shared_store, short_bench=True) as command:
        options = ("--text", "one", "--text", "two", "--json")
        done = command("predict", made[0], pictures[0], *options).document
        assert {each["label"] for each in done["predictions"][0]["top"]} == {"one", "two"}
        assert "similarity" in done["predictions"][0]["top"][0]
        refused = command("predict", small_bundle, pictures[0], "--text", "one")
        assert (refused.returncode, "takes no texts" in refused.stderr) == (2, True)
        told = command("bench", made[0], "--duration", "0.1", "-q")
        assert "graphs in ms: image_tower " in told.stdout + told.stderr
        seen = command("explain", made[0], pictures[0], "-o", "where.png", "--json").document
        assert (seen["read"], seen["grid"]) == ("image_tower, last attention, read by the class token", [4, 4])
        data = ("--data", pictures[0].parent.parent, "--num-samples", "2")
        cut = command("verify", made[0], "--against", made[0], *data, "--bisect", "--json").document
        assert (cut["graph"], cut["n"], cut["distance"] > 0) == ("image_tower", 2, True)
        assert all(not part["start"].startswith("text") for part in cut["parts"])
        for kind in ("web", "cpp", "triton", "ovms", "kserve"):
            other = command("embed", made[0], "--as", kind, "-o", kind)
            assert other.returncode == 4, (kind, other.stderr)
            assert "vitdeploy.runtime.load(BUNDLE) in a Python app, or `vitdeploy serve BUNDLE`" in other.stderr


# --- data -------------------------------------------------------------------------------------------------------------


def test_images_without_folders_are_compared_with_given_texts(floats, clip, pictures, tmp_path):
    for number, path in enumerate(pictures):
        shutil.copyfile(path, tmp_path / f"{number}.png")
    images = vd.images(tmp_path, texts=["one", "two", "three"])
    found = vd.verify(floats, f"hf:{clip[0]}", images, progress=False)
    assert (found.found.verified.metric, found.found.verified.n) == (None, len(pictures))
    assert (found.agreement, found.found.verified.kl < 1e-6) == (100, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"labels": "none"}, "provides no texts"),
        ({"template": "a photo"}, "has no placeholder for a class name"),
        ({"template": "{name}"}, "has no placeholder for a class name"),
        ({"texts": ["one", "two"], "template": "{}"}, "the texts do not match the class folders"),
        ({"template": "猫 " * 16 + "{}"}, "two texts have the same tokens"),
    ],
)
def test_texts_that_do_not_fit_the_images_are_refused(made, clip, words, options, says):
    images = vd.images(words / "evaluation", **options)
    with pytest.raises(DataError, match=says):
        vd.verify(made[0], f"hf:{clip[0]}", images, progress=False)


def test_calibration_needs_texts(exported, words, pictures, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    shutil.copyfile(pictures[0], flat / "one.png")
    with pytest.raises(DataError, match="provides no texts"):
        quantize(exported, flat, SHARED, tmp_path / "a", num_samples=None, progress=False)
    with pytest.raises(MissingFileError, match="no text file at"):
        vd.quantize(exported, vd.images(flat, texts=tmp_path / "none.txt"), SHARED, num_samples=None, progress=False)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(DataError, match="contains no text"):
        vd.quantize(exported, vd.images(flat, texts=tmp_path / "empty.txt"), SHARED, num_samples=None, progress=False)
    images = vd.images(flat, texts=["one", "two", "one two " * 9])
    made = quantize(
        exported, images, SHARED, tmp_path / "b", num_samples=None, float_parts=["text_tower"], progress=False
    )
    assert {name.partition("/")[0] for name in made.int8} == {"image_tower"}
    assert [text.partition(":")[0] for text in made.warnings[:3]] == [
        "Only 1 calibration image",
        "Only 3 calibration texts",
        "text truncated to 16 tokens",
    ]


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_a_bundle_without_its_tokenizer_is_refused(floats, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(floats, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = [each for each in manifest["files"] if each["path"] != "tokenizer.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match="uses files that it does not list") as caught:
        load(folder)
    assert caught.value.found == "tokenizer.json"


def test_graphs_that_do_not_fit_are_refused_when_the_manifest_is_read(floats, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(floats, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    flow = manifest["engines"][0]["flow"]
    flow["parts"][1]["feeds"] = {"tokens": "text"}
    flow["outputs"]["image_features"] = "image_tower.embedding"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match="graphs do not fit together") as caught:
        load(folder)
    assert caught.value.found.split("; ") == [
        "text_tower.text: nothing feeds this input",
        "text_tower.tokens: the graph has no such input",
        "output image_features: image_tower.embedding does not exist",
    ]


def test_a_gpu_is_refused_with_where_it_runs(exported, tmp_path):
    with pytest.raises(CapabilityError, match="tensorrt does not support models with several graphs"):
        compile_bundle(exported / "image_tower.onnx", "tensorrt", None, None, tmp_path)


def test_towers_that_cannot_be_reached_give_the_same(floats, pictures):
    """As on a device, which gives both encoders' outputs for rows of both inputs."""
    manifest = read_bundle(floats)
    pixels = np.stack([load_pixels(path, manifest.preprocess) for path in pictures[:3]])
    found = []
    for bind in (TextsBound, TextsSent):
        with load(floats) as predictor:
            tokens = predictor.tokenizer.encode(TEXTS)
        with bind(make_runner(floats, manifest.engines[0]), tokens, manifest.postprocess) as runner:
            image = to_input(list(pixels), manifest.preprocess, runner.inputs[0])
            found.append(runner.infer({runner.inputs[0].name: image})["logits"])
    assert found[0].shape == (3, 10)
    np.testing.assert_allclose(*found, atol=1e-4)


def test_shuffled_weights_never_pass(exported, words, tmp_path):
    require_unproven(exported, "image_tower.onnx", words, tmp_path)

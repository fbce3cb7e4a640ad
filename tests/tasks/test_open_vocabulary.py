"""A detector of what texts say: its data, its predictor, and the whole line from transformers' folder to a bundle."""

import base64
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

from tests.command_line import command_line
from tests.models.owl import save_owl
from tests.references import reference
from tests.serve.conftest import Running
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import DataError, InputError
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.models.torch_runner import torch_runner
from vitdeploy.progress import silent
from vitdeploy.runtime import load
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import check_golden
from vitdeploy.runtime.predictors import OpenVocabularyPredictor
from vitdeploy.runtime.tokenizer import TextTokenizer
from vitdeploy.serve.engines import load_engines
from vitdeploy.spec import Budget
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.verification.gate import accuracy_gate

TEMPLATE, NAMES = "a photo of a {}", ("cat", "digit_one", "Foto")
TEXTS = ("a photo of a cat", "a photo of a digit one", "a photo of a Foto")


@pytest.fixture(scope="module")
def owl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "owlv2"
    folder.mkdir()
    return folder, save_owl("owlv2", folder)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Noise of several shapes with a box each, whose category numbers have gaps."""
    folder = tmp_path_factory.mktemp("scenes")
    generator = np.random.default_rng(2)
    content = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 3 * k + 1, "name": n} for k, n in enumerate(NAMES)],
    }
    (folder / "images").mkdir()
    for k in range(40):
        height, width = (40, 60) if k % 2 else (50, 32)
        pixels = generator.integers(0, 256, (height // 4, width // 4, 3), np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(folder / "images" / f"{k:02}.png")
        content["images"].append({"id": k, "file_name": f"{k:02}.png", "width": width, "height": height})
        content["annotations"].append({"id": k, "image_id": k, "category_id": 3 * (k % 3) + 1, "bbox": [4, 5, 20, 18]})
    (folder / "boxes.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def chosen(scenes, **more):
    numbers = {"calibration": 4, "evaluation": 8, "seed": 0}
    labelled = {"labels": "coco", "annotations": scenes / "boxes.json", "template": TEMPLATE}
    return DataChoice(**{"path": scenes / "images", **labelled, **numbers, **more})


@pytest.fixture(scope="module")
def original(owl):
    return load_model(Source(f"hf:{owl[0]}"))


@pytest.fixture(scope="module")
def adapter(owl, original):
    signature = original.signature
    return make_adapter(
        Setting(signature.task, original.preprocess, signature.postprocess, tokenizer=owl[0] / "tokenizer.json")
    )


@pytest.fixture(scope="module")
def predictor(owl, original):
    spec = original.signature.postprocess
    tokenizer = TextTokenizer(owl[0] / "tokenizer.json", spec)
    with OpenVocabularyPredictor(torch_runner(original), original.preprocess, spec, tokenizer) as made:
        yield made


def test_shuffled_weights_are_not_the_originals(adapter, original, owl, scenes):
    other = load_model(Source(f"hf:{owl[0]}"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.copy_(parameter.ravel()[torch.randperm(parameter.numel())].reshape(parameter.shape))
    data = adapter.load(chosen(scenes), skip_bad=False, progress=silent)
    ours, theirs = (adapter.answers(torch_runner(each), data, lambda count: None) for each in (other, original))
    found = adapter.verify(ours, theirs, data)
    for budget in (Budget(min_agreement=20), Budget(max_drop=1)):
        assert accuracy_gate(found, budget).status != "pass", found
    assert adapter.verify(theirs, theirs, data).max_difference == 0


def test_categories_become_texts_and_the_original_agrees_with_itself(adapter, original, scenes):
    data = adapter.load(chosen(scenes), skip_bad=False, progress=silent)
    assert data.classes == TEXTS
    assert data.mapping.index == {1: 0, 4: 1, 7: 2}
    truth = {path.name: boxes.classes.tolist() for path, boxes in data.truth.items()}
    assert [truth["00.png"], truth["01.png"], truth["02.png"]] == [[0], [1], [2]]
    answers = adapter.answers(torch_runner(original), data, lambda count: None)
    assert set(answers.columns) == {"scores", "labels", "boxes", "size"}
    found = adapter.compare(answers, answers, data)
    assert (found.metric, found.n, found.agreement) == ("mAP", 8, 100)
    assert len(adapter.drive(adapter.calibration(chosen(scenes), skip_bad=False, progress=silent)).tokens) == 3


def test_texts_of_a_file_may_be_more_than_the_categories(adapter, scenes, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(["a photo of a dog", *TEXTS[::-1]]))
    data = adapter.load(chosen(scenes, texts=file), skip_bad=False, progress=silent)
    assert data.mapping.index == {1: 3, 4: 2, 7: 1}
    alone = adapter.load(chosen(scenes, labels="none", annotations=None, texts=file), skip_bad=False, progress=silent)
    assert (len(alone.classes), alone.truth) == (4, None)
    file.write_text("\n".join(TEXTS[:2]))
    with pytest.raises(DataError, match="texts do not match the categories") as caught:
        adapter.load(chosen(scenes, texts=file), skip_bad=False, progress=silent)
    assert "a photo of a Foto" in caught.value.found
    with pytest.raises(DataError, match="provides no texts"):
        adapter.load(chosen(scenes, labels="none", annotations=None), skip_bad=False, progress=silent)


def test_a_picture_is_searched_for_texts_as_transformers_does(owl, predictor, scenes):
    """Of a picture of the model's size, which neither of the two resizes."""
    folder, model = owl
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
    transformers = reference("transformers")
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        list(TEXTS), padding="max_length", truncation=True, max_length=16, return_tensors="pt"
    )
    processor = transformers.Owlv2ImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        output = model(**tokens, **processor(images=Image.fromarray(pixels), return_tensors="pt"))
    [expected] = processor.post_process_object_detection(output, threshold=0.1, target_sizes=[(32, 32)])
    found = predictor.predict(pixels, texts=TEXTS)
    best = int(expected["scores"].argmax())
    assert len(found.objects) == len(expected["scores"]) > 0
    assert found.objects[0].label == TEXTS[int(expected["labels"][best])]
    assert found.objects[0].score == pytest.approx(float(expected["scores"][best]), abs=1e-4)
    np.testing.assert_allclose(found.objects[0].box, expected["boxes"][best].numpy().clip(0, 32), atol=1e-2)
    several = predictor.predict_batch([pixels, scenes / "images" / "00.png"], texts=TEXTS)
    assert [each.index for each in several[0].objects] == [each.index for each in found.objects]
    assert several[1].size == (32, 50)


@pytest.mark.parametrize(
    ("texts", "says"), [([], "at least one text"), ([" "], "must not be blank"), (None, "no texts to compare")]
)
def test_without_a_text_nothing_is_searched(predictor, texts, says):
    with pytest.raises(InputError, match=says):
        predictor.predict(np.zeros((32, 32, 3), np.uint8), texts=texts)


def test_the_whole_line(owl, scenes, shared_store, tmp_path):
    if "VITDEPLOY_TEST_DEPTH" not in os.environ:
        pytest.skip("test_zero_shot.py takes two encoders through the whole line; VITDEPLOY_TEST_DEPTH=1 adds this")
    recipe = {
        "vitdeploy": 1,
        "name": "owl",
        "source": {"model": f"hf:{owl[0]}"},
        "data": {
            **{"path": str(scenes / "images"), "labels": "coco", "annotations": str(scenes / "boxes.json")},
            **{"calibration": {"images": 12}, "template": TEMPLATE},
        },
        "precision": "int8",
        "targets": ["onnxruntime-cpu", "openvino-cpu"],
        "budget": {"min_agreement": 20},
        "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
    }
    path, out = tmp_path / "recipe.yaml", tmp_path / "bundle"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    with command_line(tmp_path, shared_store, short_bench=True) as command:
        report = command("run", path, "-o", out, "--json").document
        said = command("predict", out, scenes / "images" / "03.png", "--text", "a cat", "--text", "ein Foto").stdout
    manifest = read_bundle(out)
    assert (report["task"], set(manifest.graphs)) == ("open-vocabulary-detection", {"image_tower", "text_tower"})
    assert max(row["max_relative_difference"] for row in report["export"]["parity"]) < 1e-4
    engines = {engine["artifact"]: engine for engine in report["engines"]}
    for name in ("onnxruntime-cpu", "openvino-cpu"):
        assert engines[f"{name}-fp32"]["verify"]["agreement"] >= 95
        int8 = engines[f"{name}-int8"]
        assert {each.partition("/")[0] for each in int8["quantization"]["int8"]} == {"image_tower", "text_tower"}
    for engine in manifest.engines:
        with make_runner(out, engine) as runner:
            assert check_golden(out, manifest, engine, runner).ok
    assert "a cat" in said or "ein Foto" in said or "nothing" in said
    with load(out, "onnxruntime-cpu") as predictor:
        assert set(predictor.labels) == set(TEXTS)
        assert predictor.predict(scenes / "images" / "03.png").objects
        expected = predictor.predict(scenes / "images" / "03.png", texts=["a cat", "ein Foto"]).to_dict()
    encoded = base64.b64encode((scenes / "images" / "03.png").read_bytes()).decode()
    asked = {"image": encoded, "texts": ["a cat", "ein Foto"]}
    with load_engines(out, "onnxruntime-cpu", max_batch=1) as engines, Running(engines) as running:
        status, _, answer = running.ask("POST", "/predict", json.dumps(asked), {"Content-Type": "application/json"})
    assert (status, answer["objects"]) == (200, expected["objects"])

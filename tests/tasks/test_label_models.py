"""Labels of their own and yes or no: models of libraries, and recipes from a folder of images to an app's answer."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vitdeploy as vd
from calibration.scenes.write import render
from tests.command_line import command_line
from tests.references import reference
from vitdeploy.errors import CheckpointError, ManifestError, VitdeployError
from vitdeploy.runtime import load
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.tasks.multi_label import best_threshold

SIDE = 48
RECIPE = """
vitdeploy: 1
name: digits
source: {{model: "hf:{model}", task: {task}}}
data: {{path: {data}/images, labels: columns, annotations: {data}/labels.csv, calibration: {{images: 24}}}}
precision: int8
targets: [onnxruntime-cpu]
budget: {{min_agreement: 0}}
bench: {{scenarios: [single], batch: [1], duration: 0.1}}
"""


def vit(folder, labels, **more):
    transformers = reference("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=8,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        id2label=dict(enumerate(labels)),
        initializer_range=0.3,
        **more,
    )
    module = transformers.ViTForImageClassification(config).eval()
    module.save_pretrained(folder)
    side = {"height": SIDE, "width": SIDE}
    transformers.ViTImageProcessor(size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(folder)
    return lambda images: module(images).logits


def convnext(folder, labels):
    timm = reference("timm")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    arguments = {"num_classes": 1, "depths": [1, 1, 2, 1], "dims": [8, 16, 16, 24]}
    module = timm.create_model("convnext_atto", **arguments).eval()
    folder.mkdir(exist_ok=True)
    save_file(module.state_dict(), folder / "model.safetensors")
    config = {"architecture": "convnext_atto", "model_args": arguments, "num_classes": 1, "label_names": list(labels)}
    config["pretrained_cfg"] = {"input_size": [3, SIDE, SIDE], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0}
    (folder / "config.json").write_text(json.dumps(config))
    return module


MODELS = {
    "transformers' ViT": (vit, "multi-label", ("zero", "one", "two"), {"problem_type": "multi_label_classification"}),
    "transformers' ViT with one label": (vit, "binary", ("seven",), {}),
    "timm's ConvNeXt": (convnext, "binary", ("seven",), {}),
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "digits"
    render("digits", folder, {"calibration": 24, "evaluation": 40})
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_engines_give_the_scores_of_the_librarys_own_head(name, scenes, tmp_path):
    make, task, labels, more = MODELS[name]
    module = make(tmp_path, labels, **more)
    told = vd.model(f"hf:{tmp_path}")
    assert told.task == (task if more else "tensors")
    assert more or any(f"--task {task}" in note for note in told.reference.notes)
    read = vd.model(f"hf:{tmp_path}", task=task)
    images = sorted((scenes / "images/evaluation").iterdir())[:4]
    with vd.compile(vd.export(read, progress=False), "onnxruntime-cpu", progress=False).load() as predictor:
        for image in images:
            pixels = normalise(load_pixels(image, read.reference.preprocess)[None], read.reference.preprocess)
            with torch.no_grad():
                right = torch.sigmoid(module(torch.from_numpy(pixels)))[0].double().numpy()
            found = predictor.predict(image)
            if task == "binary":
                assert found.score == pytest.approx(right[0], abs=1e-5) and found.yes == (right[0] > 0.5)
            else:
                np.testing.assert_allclose([each.score for each in found.scores], right, atol=1e-5)
                assert {each.index for each in found.labels} == set(np.flatnonzero(right > 0.5))


def test_what_is_asked_for_has_to_fit(tmp_path):
    vit(tmp_path, ("a", "b"))
    with pytest.raises(CheckpointError, match="cannot be used for the task binary"):
        vd.model(f"hf:{tmp_path}", task="binary")
    softmax = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 4), torch.nn.Softmax(1))
    spec = vd.Preprocess(8, (8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(VitdeployError, match="cannot be used for the task") as caught:
        vd.model(softmax, preprocess=spec, task="multi-label")
    assert "softmax" in caught.value.found
    softmax.config = SimpleNamespace(problem_type="multi_label_classification")
    with pytest.raises(CheckpointError, match="problem_type") as caught:
        vd.model(softmax, preprocess=spec)
    assert "softmax" in caught.value.found
    assert vd.model(softmax, preprocess=spec, task="classification").task == "classification"


@pytest.fixture(scope="module", params=["multi-label", "binary"])
def made(request, scenes, tmp_path_factory, shared_store):
    """A bundle of a recipe, its task and labels, the report, the command line and the original."""
    task, folder = request.param, tmp_path_factory.mktemp("run")
    labels = ("zero", "one", "two") if task == "multi-label" else ("seven",)
    original = vit(
        folder / "model", labels, **({"problem_type": "multi_label_classification"} if len(labels) > 1 else {})
    )
    with command_line(folder, shared_store, short_bench=True) as run:
        (folder / "recipe.yaml").write_text(RECIPE.format(model=folder / "model", task=task, data=scenes))
        report = run("run", "recipe.yaml", "-o", "bundle", "--json").document
        yield folder / "bundle", task, labels, report, run, original


def test_thresholds_are_chosen_on_calibration_images_and_travel_in_the_manifest(made, scenes):
    bundle, task, labels, report, _, original = made
    [int8] = [each for each in report["engines"] if each["precision"] == "int8"]
    verify = int8["verify"]
    assert (verify["metric"], verify["n"]) == ({"multi-label": "mean AP", "binary": "AUROC"}[task], 40)
    assert verify["control"] is not None and verify["agreement"] > 50
    assert ("f1_drop" if task == "multi-label" else "accuracy_drop") in verify
    post = json.loads((bundle / "manifest.json").read_text())["postprocess"]
    chosen = post["thresholds"] if task == "multi-label" else [post["decision_threshold"]]
    assert any("24 labelled calibration images" in note for note in report["model"]["notes"])
    rows = [line.split(",") for line in (scenes / "labels.csv").read_text().split()]
    known = {row[0]: row for row in rows[1:]}
    images = sorted((scenes / "images/calibration").iterdir())
    spec = vd.Preprocess(SIDE, (SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3)
    pixels = normalise(np.stack([load_pixels(image, spec) for image in images]), spec)
    with torch.no_grad():
        scores = torch.sigmoid(original(torch.from_numpy(pixels)).double()).numpy()
    for k, label in enumerate(labels):
        truth = np.array([known[f"calibration/{image.name}"][rows[0].index(label)] == "1" for image in images])
        best = best_threshold(scores[:, k], truth, "f1" if task == "multi-label" else "youden")
        assert chosen[k] == pytest.approx(best, abs=1e-4)


def test_commands_and_the_page_show_the_answers(made, scenes):
    bundle, task, _, _, run, _ = made
    image = scenes / "images/evaluation/000000.png"
    [found] = run("predict", bundle, image, "--json").document["predictions"]
    assert ("scores" in json.dumps(found)) if task == "multi-label" else ('"yes"' in json.dumps(found))
    page = (bundle / "report.html").read_text()
    assert ("Mean AP" if task == "multi-label" else "AUROC") in page and "labelled calibration images" in page


def test_thresholds_of_another_model_are_refused(made, tmp_path):
    bundle, task, *_ = made
    if task == "binary":
        pytest.skip("one number has one threshold")
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["postprocess"]["thresholds"] = [0.5] * 5
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match="does not fit the engine") as caught:
        load(copy)
    assert caught.value.found == "5 thresholds for 3 labels"

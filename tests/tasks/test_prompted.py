"""SAM through the whole line, from transformers' folder to a bundle that takes prompts."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitdeploy as vd
from calibration.scenes.write import render
from tests.command_line import command_line
from tests.models.prompted import processor_of, save_prompted
from tests.sabotage import require_unproven
from vitdeploy.api.quantize import quantize
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import CapabilityError, DataError, InputError, ManifestError, MissingFileError
from vitdeploy.models.source import Source
from vitdeploy.runtime import load
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import engine_outputs, largest_difference
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.runtime.prompts import Prompt, prompt_arrays
from vitdeploy.runtime.tasks.registry import bound, count_same
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import find_reference_model, reference_runner
from vitdeploy.tasks.prompted import read_prompted
from vitdeploy.workflows.placement import compile_bundle

PARTS = ["image_encoder", "prompt_decoder"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "prompted"
    render("prompted", folder, {"calibration": 4, "evaluation": 6})
    return folder


@pytest.fixture(scope="module")
def sam(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "sam"
    folder.mkdir()
    return folder, save_prompted("sam", folder)


@pytest.fixture(scope="module")
def exported(sam, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    export(find_reference_model(Source(f"hf:{sam[0]}")), ExportConfig("sam", 20, None, True), out)
    return out


@pytest.fixture(scope="module")
def bundles(exported, scenes, tmp_path_factory):
    """A bundle of one engine by name."""
    out = tmp_path_factory.mktemp("bundles")
    images = vd.images(scenes / "images/calibration")
    made = quantize(exported, images, "onnxruntime-cpu", out / "int8-graphs", num_samples=None, progress=False)
    assert {name.partition("/")[0] for name in made.int8} == set(PARTS)
    assert made.warnings[0].startswith("The calibration images have no prompts: a grid of points")
    graphs = {"onnxruntime-cpu": exported, "openvino-cpu": exported, "int8": out / "int8-graphs"}
    for name, folder in graphs.items():
        (out / name).mkdir()
        target = "onnxruntime-cpu" if name == "int8" else name
        compile_bundle(folder / "image_encoder.onnx", target, None, None, out / name)
    return {name: out / name for name in graphs}


def test_quantize_calibrates_the_decoder_on_given_prompts(exported, scenes, bundles, tmp_path):
    """Its ranges are of the prompts in the file, of calibration images alone; --labels need not be told."""
    given = vd.images(scenes / "images", annotations=scenes / "prompts.json")
    made = quantize(exported, given, "onnxruntime-cpu", tmp_path / "prompted", num_samples=4, progress=False)
    assert not any("grid of points" in text for text in made.warnings) and made.calibration_images == 4
    ours, theirs = (
        json.loads((folder / "calibration.json").read_text(encoding="utf-8"))
        for folder in (tmp_path / "prompted", bundles["int8"].parent / "int8-graphs")
    )
    assert ours.keys() == theirs.keys()
    assert {name.partition("/")[0] for name in ours if ours[name] != theirs[name]} == {"prompt_decoder"}
    for wrong, told in (("coco", "cannot use labels of kind 'coco'"), ("prompts", "too few images")):
        other = vd.images(scenes / "images", wrong, annotations=scenes / "prompts.json")
        with pytest.raises(DataError, match=told):
            quantize(exported, other, "onnxruntime-cpu", tmp_path / wrong, num_samples=5, progress=False)
    with pytest.raises(MissingFileError, match="no annotations at"):
        quantize(exported, vd.images(scenes / "images", annotations=tmp_path / "x"), "onnxruntime-cpu", progress=False)


def labelled(scenes):
    return vd.images(scenes / "images", "prompts", annotations=scenes / "prompts.json")


# --- the whole line ---------------------------------------------------------------------------------------------------


def test_masks_are_compared_with_the_original_and_with_labels(bundles, sam, scenes):
    found = {
        name: vd.verify(bundles[name], f"hf:{sam[0]}", labelled(scenes), progress=False).found.verified
        for name in ("onnxruntime-cpu", "int8")
    }
    exact, int8 = found.values()
    assert (exact.metric, exact.n, exact.drop) == ("mask IoU", 6, pytest.approx(0, abs=0.01))
    assert exact.agreement > 99.9 and exact.iou_min > 0.99 and exact.max_difference < 1e-4
    assert (exact.point_iou + exact.box_iou) / 2 == pytest.approx(exact.value)
    assert exact.masks == 2 * sum(len({*each.instances}) for each in evaluated(scenes))
    assert 60 < int8.agreement < 99.9 and int8.agreement_ci95[0] < int8.agreement < int8.agreement_ci95[1]


def evaluated(scenes):
    samples = read_prompted(scenes / "images", scenes / "prompts.json").samples
    return [each for each in samples if "evaluation" in each.path.parts]


def test_without_labels_a_grid_of_points_is_asked(bundles, sam, scenes):
    found = vd.verify(bundles["openvino-cpu"], f"hf:{sam[0]}", scenes / "images/evaluation", progress=False)
    verified = found.found.verified
    assert (verified.metric, verified.n, verified.masks, verified.value) == (None, 6, 54, None)
    assert verified.agreement > 99.9


def test_a_device_gives_the_same_masks(bundles, exported, scenes, tmp_path, shared_store):
    """The agent runs in a process of this machine, and is asked for one prompt at a time."""
    data = ("--data", scenes / "images", "--labels", "prompts", "--annotations", scenes / "prompts.json")
    with command_line(tmp_path, shared_store) as command:
        given = (bundles["int8"], "--against", exported, *data, "--num-samples", "2", "--json")
        (there,) = command("verify", *given, "--on", "local").document["devices"]
        here = command("verify", *given).document
    for name in ("n", "masks", "agreement", "value", "max_difference"):
        assert there[name] == here[name], name


def test_golden_prompts_are_bound(bundles, sam):
    """As a run writes and checks them: the engine and the original give the same for fixed prompts."""
    manifest = read_bundle(bundles["onnxruntime-cpu"])
    spec, preprocess = manifest.postprocess, manifest.preprocess
    prompts = prompt_arrays([Prompt(((20.0, 20.0),), (1,)), Prompt(box=(5, 5, 40, 40))], (48, 48), preprocess, spec)
    pixels = np.random.default_rng(5).integers(0, 256, (3, 48, 48, 3), np.uint8)
    with (
        make_runner(bundles["onnxruntime-cpu"], manifest.engines[0]) as ours,
        reference_runner(Source(f"hf:{sam[0]}")) as theirs,
    ):
        found = [
            engine_outputs(bound(manifest.task, each, {"image": pixels, **prompts}, spec)[0], preprocess, pixels)
            for each in (ours, theirs)
        ]
    assert found[0]["masks"].shape == (3, 2, 4, 24, 24)
    assert largest_difference(*found, ["masks", "iou_scores"]) < 1e-4
    assert count_same(manifest.task, preprocess, spec, *found) == 3
    other = {name: -array for name, array in found[0].items()}
    assert count_same(manifest.task, preprocess, spec, other, found[1]) == 0
    with pytest.raises(ManifestError, match="do not fit a promptable model"):
        bound(manifest.task, ours, {"image": pixels, "points": prompts["points"]}, spec)


# --- the predictor ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["onnxruntime-cpu", "openvino-cpu"])
def predictor(request, bundles):
    with load(bundles[request.param]) as found:
        yield found


def theirs(model, size, pixels, spec, multimask, **prompts):
    """transformers' own masks and scores for prepared pixels, at the image's size (width, height)."""
    scale = 48 / max(size)
    given = {f"input_{name}": torch.tensor(value, dtype=torch.float32)[None] for name, value in prompts.items()}
    for name in ("input_points", "input_boxes"):
        if name in given:
            given[name] = given[name] * scale
    if "input_labels" in given:
        given["input_labels"] = given["input_labels"].long()
    with torch.no_grad():
        found = model(pixel_values=torch.from_numpy(normalise(pixels[None], spec)), multimask_output=multimask, **given)
    inside = [[int(side * scale + 0.5) for side in size[::-1]]]
    masks = processor_of("sam").post_process_masks([found.pred_masks[0]], [size[::-1]], inside)[0]
    return masks.numpy(), found.iou_scores[0].numpy()


@pytest.mark.parametrize("multimask", [True, False])
def test_masks_are_those_of_transformers(predictor, sam, multimask):
    size = (96, 64)
    image = Image.fromarray(np.random.default_rng(7).integers(0, 256, (*size[::-1], 3), np.uint8))
    pixels = load_pixels(image, predictor.preprocess)
    prompts = {"points": [[[12.0, 20.0], [70.0, 40.0]], [[30.0, 60.0], [5.0, 5.0]]], "labels": [[1, 0], [1, 1]]}
    for given in (prompts, {"boxes": [[10.0, 8.0, 60.0, 50.0], [0.0, 0.0, 96.0, 64.0]]}):
        masks, scores = theirs(sam[1], size, pixels, predictor.preprocess, multimask, **given)
        found = predictor.predict(image, **given, multimask=multimask)
        ours = np.stack([each.masks for each in found.prompts])
        assert ours.shape == masks.shape == (2, 3 if multimask else 1, 64, 96)
        assert (ours != masks).mean() < 1e-3  # on the line between in and out rounding decides
        np.testing.assert_allclose([each.scores for each in found.prompts], scores, atol=1e-4)


def test_an_image_is_embedded_once(predictor, scenes, monkeypatch):
    path = scenes / "images/evaluation/000000.png"
    encoder, runs = predictor.flow.linked.runners["image_encoder"], []
    infer = encoder.infer
    monkeypatch.setattr(encoder, "infer", lambda feeds: runs.append(1) or infer(feeds))
    image = predictor.embed(path)
    first, second = image.masks(points=[(40, 40)]), predictor.predict(path, points=[(40, 40)])
    np.testing.assert_array_equal(first.mask, second.mask)
    assert len(runs) == 1
    predictor.predict(scenes / "images/evaluation/000001.png", boxes=[5, 5, 60, 60])
    assert len(runs) == 2
    assert image.masks(points=[(40, 40)]).score == first.score
    assert len(first[0].masks) == 3 and len(image.masks(points=[(4, 4), (9, 9)])[0].masks) == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda predictor, path: predictor.predict(path),
        lambda predictor, path: predictor.predict_batch([path]),
        lambda predictor, path: list(predictor.stream([path])),
        lambda predictor, path: predictor.predict_tensor(np.zeros((1, 48, 48, 3), np.uint8)),
    ],
)
def test_an_image_without_a_prompt_is_refused(predictor, scenes, ask):
    with pytest.raises(InputError, match=r"no prompt|needs a prompt"):
        ask(predictor, scenes / "images/evaluation/000000.png")


# --- commands ---------------------------------------------------------------------------------------------------------


def test_predict_draws_masks_and_prompts(bundles, scenes, shared_store, tmp_path):
    image, bundle = scenes / "images/evaluation/000000.png", bundles["openvino-cpu"]
    with command_line(tmp_path, shared_store) as command:
        given = ("--point", "40,50", "--point", "10,10,0", "--box", "20,20,70,80")
        found = command("predict", bundle, image, *given, "--draw", tmp_path / "drawn", "--json").document
        (answer,) = found["predictions"]
        (prompt,) = answer["prompts"]
        assert (prompt["labels"], prompt["box"], len(prompt["scores"])) == ([1, 0], [20, 20, 70, 80], 1)
        drawn = Image.open(tmp_path / "drawn/000000.png")
        assert (drawn.size, drawn.mode) == ((96, 96), "RGB")
        mask = np.asarray(Image.open(tmp_path / "drawn/000000.mask0.png"))
        assert (mask == 255).sum() == prompt["area"]
        several = command("predict", bundle, image, "--box", "1,1,20,20", "--box", "20,20,70,80", "--json").document
        assert len(several["predictions"][0]["prompts"]) == 2
        for wrong, told in (
            (("--point", "96,5"), "in an image of 96x96"),
            ((), "needs a prompt"),
            ((*given, "--box", "1,1,20,20"), "cannot be combined with several boxes"),
            (("--point", "4"), "is not x,y"),
            (("--point", "4,5,2"), "is not x,y"),
            (("--text", "a cat", "--point", "4,5"), "takes no texts"),
        ):
            refused = command("predict", bundle, image, *wrong)
            assert refused.returncode == 2 and told in refused.stderr


def test_what_is_not_done_is_refused(bundles):
    from vitdeploy.embed.source import find_embedded, has_form

    with pytest.raises(CapabilityError, match="does not support this task") as caught:
        find_embedded(bundles["openvino-cpu"], ["openvino-cpu"], "the C++ program", has_form)
    fix = "use vitdeploy.runtime.load(BUNDLE) in a Python app, or `vitdeploy serve BUNDLE` for other apps"
    assert caught.value.fix == fix


# --- labelled prompts -------------------------------------------------------------------------------------------------


def test_scenes_are_read_with_their_masks(scenes):
    found = read_prompted(scenes / "images", scenes / "prompts.json")
    assert (len(found.samples), found.unannotated) == (10, 0)
    for sample in found.samples:
        masks = found.annotations[sample.path].load()
        assert len(masks) == len(sample.prompts) == len(sample.instances)
        for mask, prompt in zip(masks, sample.prompts, strict=True):
            rows, columns = np.nonzero(mask)
            if prompt.box is None:
                ((x, y),) = prompt.points
                assert mask[int(y), int(x)]
            else:
                assert prompt.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


@pytest.mark.parametrize(
    ("document", "error", "told"),
    [
        ("not json", DataError, "is not a JSON file"),
        ([{"file_name": "evaluation/000000.png", "instance": 1}], DataError, "is not a prompt"),
        ([{"file_name": "evaluation/000000.png", "instance": "1", "point": [1, 2]}], DataError, "is not a prompt"),
        ({"annotations": []}, DataError, "is not a prompt"),
        ([{"file_name": "evaluation/000000.png", "instance": 1, "point": [96, 2]}], DataError, "outside the image"),
        (
            [{"file_name": "evaluation/000000.png", "instance": 1, "box": [1, 2]}],
            DataError,
            "prompts have an unexpected",
        ),
        ([{"file_name": "other.png", "instance": 1, "point": [1, 2]}], DataError, "annotates no image"),
    ],
)
def test_labels_that_do_not_fit_are_refused(scenes, tmp_path, document, error, told):
    file = tmp_path / "prompts.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    (tmp_path / "masks").symlink_to(scenes / "masks")
    with pytest.raises(error, match=told):
        read_prompted(scenes / "images", file)


def test_masks_that_are_not_there_are_refused(scenes, tmp_path):
    file = tmp_path / "prompts.json"
    with pytest.raises(MissingFileError, match="no prompt file"):
        read_prompted(scenes / "images", file)
    entry = {"file_name": "evaluation/000000.png", "instance": 99, "point": [1, 2]}
    file.write_text(json.dumps([entry]))
    with pytest.raises(MissingFileError, match="no masks for"):
        read_prompted(scenes / "images", file)
    (tmp_path / "masks").symlink_to(scenes / "masks")
    found = read_prompted(scenes / "images", file)
    with pytest.raises(DataError, match="no pixel of a prompted instance") as caught:
        next(iter(found.annotations.values())).load()
    assert caught.value.expected == "pixels with value 99"


def test_shuffled_weights_never_pass(exported, scenes, tmp_path):
    require_unproven(exported, "image_encoder.onnx", scenes / "images/evaluation", tmp_path)

"""SAM, SAM 2, EdgeTAM and the tracker of SAM 3 as two modules: the masks are transformers' for every kind of prompt."""

import json
import os

import numpy as np
import pytest
import torch

from tests.models.prompted import save_prompted
from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.external.prompted import CLASSES
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.runtime.prompts import Prompt, prompt_arrays
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import find_reference_model

SIDES = {"sam": 48, "sam2": 64, "edgetam": 64, "sam3": 64}
FAMILIES = {
    "sam": "SAM, transformers' modules",
    "sam2": "SAM 2, transformers' modules",
    "edgetam": "EdgeTAM, transformers' modules",
    "sam3": "SAM 3's tracker, transformers' modules",
}
POINTS, LABELS, BOX = [(5.0, 7.0), (30.5, 12.25), (20.0, 40.0)], [1, 0, 1], [4.0, 6.0, 31.0, 44.0]
PROMPTS = {"point": (POINTS[:1], LABELS[:1], None), "points": (POINTS, LABELS, None), "box": ([], [], BOX)}
PROMPTS["points and box"] = (POINTS, LABELS, BOX)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By kind, the folder and transformers' model."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in SIDES}
    return {kind: (folder, save_prompted(kind, folder)) for kind, folder in folders.items()}


def slots(kind, prompt, spec, batch):
    points, labels, box = prompt
    side = SIDES[kind]
    asked = Prompt(tuple(points), tuple(labels), box and tuple(box))
    arrays = prompt_arrays([asked] * batch, (side, side), PreprocessSpec((side, side), (side, side)), spec)
    return torch.from_numpy(arrays["points"]), torch.from_numpy(arrays["labels"])


@torch.no_grad()
def theirs(model, image, prompt):
    """All four masks and their scores, as transformers gives them: the first, and the other three."""
    points, labels, box = prompt
    given, batch = {}, len(image)
    if points:
        given["input_points"] = torch.tensor(points, dtype=image.dtype)[None, None].repeat(batch, 1, 1, 1)
        given["input_labels"] = torch.tensor(labels)[None, None].repeat(batch, 1, 1)
    if box:
        given["input_boxes"] = torch.tensor(box, dtype=image.dtype)[None, None].repeat(batch, 1, 1)
    model.mask_decoder.dynamic_multimask_via_stability = False  # the runtime's part, of which SAM has none
    found = [model(pixel_values=image, multimask_output=several, **given) for several in (False, True)]
    return tuple(torch.cat([getattr(each, name)[:, 0] for each in found], 1) for name in ("pred_masks", "iou_scores"))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", SIDES)
def test_masks_are_those_of_transformers_in_float64(kind, prompt, parity, tmp_path):
    model = save_prompted(kind, tmp_path).double()
    module, spec = CLASSES[type(model).__name__](model)
    image = torch.randn(2, 3, SIDES[kind], SIDES[kind], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    points, labels = slots(kind, PROMPTS[prompt], spec, 2)
    with torch.no_grad():
        ours = module.eval()(image, points.double(), labels)
    parity(FAMILIES[kind], "transformers", ours, theirs(model, image, PROMPTS[prompt]))


@pytest.mark.parametrize("kind", SIDES)
def test_the_graphs_are_transformers_model_at_any_batch(models, kind, parity, tmp_path, request):
    if "VITDEPLOY_TEST_DEPTH" not in os.environ and not request.config.getoption("record_parity"):
        pytest.skip("tests/tasks exports one; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 compares both")
    folder, model = models[kind]
    reference = find_reference_model(Source(f"hf:{folder}"))
    export(reference, ExportConfig(kind, 20, None, False), tmp_path)
    for engine in ENGINES:
        for batch in BATCHES:
            image = torch.randn(batch, 3, SIDES[kind], SIDES[kind], generator=torch.Generator().manual_seed(batch))
            prompt = list(PROMPTS.values())[batch % 4]
            points, labels = slots(kind, prompt, reference.postprocess, batch)
            with (
                engine_runner(engine, tmp_path / "image_encoder.onnx", batch) as encoder,
                engine_runner(engine, tmp_path / "prompt_decoder.onnx", batch) as decoder,
            ):
                embedded = encoder.infer({"image": image.numpy()})
                found = decoder.infer({**embedded, "points": points.numpy(), "labels": labels.numpy()})
            parity(FAMILIES[kind], engine, [found["masks"], found["iou_scores"]], theirs(model, image, prompt))


def test_what_cannot_be_exported_is_refused(models, tmp_path):
    folder, _ = models["sam"]
    with pytest.raises(CheckpointError, match="works at one image size only") as caught:
        load_model(Source(f"hf:{folder}", image_size=(64, 64)))
    assert (caught.value.found, caught.value.expected) == ("64x64", "48x48")
    save_prompted("sam", tmp_path, num_multimask_outputs=2)
    with pytest.raises(CheckpointError, match="a different number of masks"):
        load_model(Source(f"hf:{tmp_path}"))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"pad_size": {"height": 48, "width": 64}}, "longest_edge 48, pad_size 48x64"),
        ({"do_pad": False}, "do_pad False"),
        ({"size": {"shortest_edge": 48}}, "size.longest_edge None"),
        ({"do_resize": False}, "do_resize False"),
    ],
)
def test_a_processor_that_does_otherwise_is_refused(models, change, found, tmp_path):
    folder, _ = models["sam"]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **change}))
    with pytest.raises(CheckpointError, match="does not support the checkpoint's preprocessing") as caught:
        load_model(Source(f"hf:{tmp_path}"))
    assert found in caught.value.found


def test_slots_that_are_not_used_change_nothing(models):
    folder, _ = models["sam"]
    original = load_model(Source(f"hf:{folder}"))
    image = torch.randn(1, 3, 48, 48)
    points, labels = slots("sam", PROMPTS["points"], original.signature.postprocess, 1)
    with torch.no_grad():
        whole = original.module(image, points, labels)
        short = original.module(image, points[:, :4], labels[:, :4])
    for ours, each in zip(whole, short, strict=True):
        np.testing.assert_allclose(ours, each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "inner"), [("sam2", "Sam2"), ("edgetam", "EdgeTam"), ("sam3", "Sam3Tracker")])
@torch.no_grad()
def test_a_model_of_videos_is_its_model_of_images(kind, inner, tmp_path):
    save_prompted(f"{kind}-video", tmp_path)
    found = load_model(Source(f"hf:{tmp_path}"))
    assert f"{inner}Model, the single-image part of {inner}VideoModel" in found.notes
    image = torch.randn(2, 3, SIDES[kind], SIDES[kind], generator=torch.Generator().manual_seed(0))
    alone = getattr(reference("transformers"), f"{inner}Model").from_pretrained(tmp_path).eval()
    points, labels = slots(kind, PROMPTS["points"], found.signature.postprocess, len(image))
    masks, scores = found.module(image, points, labels)
    expected = theirs(alone, image, PROMPTS["points"])
    assert torch.allclose(masks, expected[0], atol=1e-5) and torch.allclose(scores, expected[1], atol=1e-5)


@torch.no_grad()
def test_a_coarser_map_of_sam_3_that_nothing_reads_is_left_out(tmp_path):
    model = save_prompted("sam3-coarser", tmp_path)
    found = load_model(Source(f"hf:{tmp_path}"))
    image = torch.randn(2, 3, SIDES["sam3"], SIDES["sam3"], generator=torch.Generator().manual_seed(0))
    points, labels = slots("sam3", PROMPTS["box"], found.signature.postprocess, len(image))
    for ours, expected in zip(found.module(image, points, labels), theirs(model, image, PROMPTS["box"]), strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["SamHQModel", "Sam3Model", "Sam3LiteTextModel", "Sam3VideoModel"])
def test_what_is_prompted_otherwise_is_refused_by_name(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sam", "architectures": [name]}))
    with pytest.raises(CheckpointError, match=f"transformers' {name} is not supported") as caught:
        load_model(Source(f"hf:{tmp_path}"))
    assert caught.value.found and "Model" in caught.value.fix


def test_a_model_of_videos_without_all_of_its_image_model_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_prompted("sam2-video", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["mask_decoder.iou_token.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="do not match the class Sam2Model") as caught:
        load_model(Source(f"hf:{tmp_path}"))
    assert "mask_decoder.iou_token.weight" in str(caught.value.found)

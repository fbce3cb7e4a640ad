"""OWL-ViT and OWLv2 as two encoders: candidates, objects and pixels against transformers, and what is refused."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.owl import NAMES, save_owl
from tests.models.towers import save_towers
from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.exporter.torch_onnx import export_graph, export_text_graph
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.runtime.tasks.detection import detect
from vitdeploy.runtime.tasks.open_vocabulary import OF_IMAGES, candidates, find_texts, head_of

SIDE, TEXTS = 32, 3
PAGE = "OWL-ViT and OWLv2, transformers' modules"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind, the folder and transformers' model."""
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in NAMES}
    return {kind: (path, save_owl(kind, path)) for kind, path in paths.items()}


def asked(model, batch, seed=5):
    """Images, and texts that end at several places."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 3, SIDE, SIDE, generator=generator)
    end = model.config.text_config.vocab_size - 1
    text = torch.randint(3, end - 1, (TEXTS, 16), generator=generator)
    for row, place in zip(text, (11, 5, 15), strict=True):
        row[0], row[place], row[place + 1 :] = end - 1, end, 0
    return image, text


@torch.no_grad()
def theirs(model, image, text):
    """transformers' output; it is given the same texts for each image."""
    several = text.repeat(len(image), 1)
    return model(input_ids=several, pixel_values=image, attention_mask=(several != 0).long())


def scored(found):
    """What transformers' post-processing reads of its output: of each box the best text."""
    best = found.logits.max(dim=-1)
    return best.values.sigmoid().numpy(), best.indices.numpy(), found.pred_boxes.numpy()


@pytest.mark.parametrize("kind", NAMES)
def test_the_best_text_of_every_box_is_transformers(folders, kind, parity):
    folder, model = folders[kind]
    original = load_model(Source(f"hf:{folder}"))
    assert (original.signature.task, original.signature.postprocess.threshold) == ("open-vocabulary-detection", 0.1)
    image, text = asked(model, 2)
    expected = scored(theirs(model.double(), image.double(), text))
    with torch.no_grad():
        *found, texts = original.module.double()(image.double(), text)
    outputs = {name: tensor.numpy() for name, tensor in zip(OF_IMAGES, found, strict=True)}
    ours = candidates(outputs, texts.numpy())
    np.testing.assert_array_equal(ours["labels"], expected[1])
    np.testing.assert_allclose(ours["scores"], expected[0], rtol=0, atol=1e-6)
    assert set(expected[1].ravel()) == {0, 1, 2}
    whole = theirs(model, image.double(), text)
    unit = texts / texts.norm(dim=-1, keepdim=True) / (1 + 1e-6)
    logits = (found[0] @ unit.T + found[1][..., None]) * found[2][..., None]
    with torch.no_grad():  # without the mask of queries, behind which transformers makes them float32
        exact = model.class_head(whole.image_embeds.flatten(1, 2), whole.text_embeds, None)[0]
    parity(PAGE, "transformers", [logits, found[3]], [exact, whole.pred_boxes])
    model.float()


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(("width", "height"), [(64, 64), (80, 50), (30, 90)])
def test_objects_are_those_of_transformers_processor(folders, kind, width, height):
    folder, model = folders[kind]
    original = load_model(Source(f"hf:{folder}"))
    image, text = asked(model, 1)
    processor = getattr(reference("transformers"), f"{NAMES[kind]}ImageProcessor").from_pretrained(folder)
    output = theirs(model, image, text)
    [expected] = processor.post_process_object_detection(output, threshold=0.1, target_sizes=[(height, width)])
    with torch.no_grad():
        *found, texts = original.module(image, text)
    outputs = {name: tensor[0].numpy() for name, tensor in zip(OF_IMAGES, found, strict=True)}
    spec = original.signature.postprocess
    ours = find_texts(outputs, texts.numpy(), ["a", "b", "c"], (width, height), original.preprocess, spec).objects
    theirs_clipped = (
        expected["boxes"].numpy().clip(0, [width, height, width, height])
    )  # theirs may end beside the image
    inside = (theirs_clipped[:, 2:] > theirs_clipped[:, :2]).all(1)  # or lie in the padding
    order = np.argsort(-expected["scores"].numpy(), kind="stable")
    order = order[inside[order]]
    assert len(ours) == len(order) > 3
    np.testing.assert_allclose([each.score for each in ours], expected["scores"].numpy()[order], atol=1e-5)
    assert [each.index for each in ours] == expected["labels"].numpy()[order].tolist()
    boxes = theirs_clipped[order]
    rounded = 0 if width == height or kind == "owlvit" else max(width, height) / SIDE  # half a pixel of the input
    np.testing.assert_allclose([each.box for each in ours], boxes, atol=1e-3 + rounded)
    assert [each.label for each in ours] == ["abc"[each.index] for each in ours]
    assert detect(candidates(outputs, texts.numpy()), (width, height), original.preprocess, head_of(spec), None).objects


def test_pixels_are_padded_with_black_to_a_square(folders):
    found = load_model(Source(f"hf:{folders['owlv2'][0]}"))
    assert (found.preprocess.fit, found.preprocess.fill) == ("longest-pad", 0)
    assert any("its own blur" in note for note in found.notes)
    processor = reference("transformers").Owlv2ImageProcessor.from_pretrained(folders["owlv2"][0])
    ramp = np.linspace(0, 255, 2 * SIDE)[:, None, None] * np.ones((1, SIDE, 3))  # tall, and smooth as photographs are
    image = Image.fromarray(ramp.astype(np.uint8))
    ours = normalise(load_pixels(image, found.preprocess)[None], found.preprocess)[0]
    expected = processor(images=image, return_tensors="np")["pixel_values"][0]
    inner = np.s_[:, 2:-2, : SIDE // 2 - 2]
    assert np.abs(ours - expected)[inner].max() < 4 / 255 / 0.25  # 4 grey levels
    np.testing.assert_allclose(ours[:, :, SIDE // 2 + 2 :], expected[:, :, SIDE // 2 + 2 :], atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", NAMES)
def test_the_graphs_of_both_are_transformers_model(folders, kind, engine, parity, tmp_path, request):
    if "VITDEPLOY_TEST_DEPTH" not in os.environ and not request.config.getoption("record_parity"):
        pytest.skip("every export compares them, too; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it")
    folder, model = folders[kind]
    original = load_model(Source(f"hf:{folder}"))
    images = export_graph(
        original.module.image_tower, name="images", preprocess=original.preprocess, image_size=(SIDE, SIDE), opset=20,
        batch=None, in_graph=False, outputs=list(OF_IMAGES),
    )  # fmt: skip
    texts = export_text_graph(original.module.text_tower, name="texts", length=16, opset=20)
    for part, graph in (("images", images), ("texts", texts)):
        save_graph(graph, tmp_path / f"{part}.onnx")
    for batch in BATCHES:
        image, text = asked(model, batch, batch)
        expected = theirs(model, image, text)
        with engine_runner(engine, tmp_path / "images.onnx", batch) as runner:
            outputs = runner.infer({"image": image.numpy()})
        with engine_runner(engine, tmp_path / "texts.onnx", TEXTS) as runner:
            features = runner.infer({"text": text.numpy()})["features"]
        unit = features / np.linalg.norm(features, axis=-1, keepdims=True)
        logits = (outputs["class_features"] @ unit.T + outputs["shift"][..., None]) * outputs["scale"][..., None]
        parity(PAGE, engine, [logits, outputs["boxes"]], [expected.logits, expected.pred_boxes])


def copied(folder, tmp_path, *left_out):
    out = tmp_path / "folder"
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*left_out))
    return out


def test_what_cannot_be_exported_is_refused(folders, tmp_path):
    folder = folders["owlv2"][0]
    with pytest.raises(CheckpointError, match="Owlv2ForObjectDetection works at one image size only") as caught:
        load_model(Source(f"hf:{folder}", image_size=(64, 64)))
    assert (caught.value.found, caught.value.expected) == ("64x64", "32x32")
    out = copied(folder, tmp_path, "tokenizer.json")
    with pytest.raises(CheckpointError, match="texts cannot be converted to tokens") as caught:
        load_model(Source(f"hf:{out}"))
    assert "save_pretrained" in caught.value.fix
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "architectures": ["Owlv2Model"]}))
    with pytest.raises(CheckpointError, match="transformers' Owlv2Model of owlv2 is not a detector"):
        load_model(Source(f"hf:{out}"))


@pytest.mark.parametrize("change", [{"do_pad": False}, {"size": {"height": 32, "width": 64}}, {"do_resize": False}])
def test_a_processor_that_pads_otherwise_is_refused(folders, tmp_path, change):
    out = copied(folders["owlv2"][0], tmp_path)
    file = out / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match="does not support the checkpoint's preprocessing") as caught:
        load_model(Source(f"hf:{out}"))
    assert "do_pad" in caught.value.expected


def test_a_clip_is_still_no_detector(tmp_path):
    save_towers("clip", tmp_path)
    assert load_model(Source(f"hf:{tmp_path}")).signature.task == "zero-shot"

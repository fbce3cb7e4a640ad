"""CLIP and SigLIP whole: both encoders against transformers' own, and folders that have not both."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.towers import save_towers
from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.exporter.torch_onnx import export_graph, export_text_graph
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models.load import load_model
from vitdeploy.models.model_folder.tokenizer import TEXTS, compare_tokenizers, sample_texts
from vitdeploy.models.source import Source
from vitdeploy.runtime.tasks.zero_shot import logits
from vitdeploy.runtime.tokenizer import TextTokenizer

KINDS = ("clip", "old-clip", "siglip")
PAGE = {
    "clip": "CLIP, image and text encoder",
    "old-clip": "CLIP, image and text encoder",
    "siglip": "SigLIP and SigLIP 2, image and text encoder",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind, the folder and transformers' model."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        found[kind] = folder, save_towers(kind, folder)
    return found


def source(folder, task=None):
    return Source(f"hf:{folder}", task=task)


def features(found):
    return found if isinstance(found, torch.Tensor) else found.pooler_output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@torch.no_grad()
def test_both_towers_are_transformers(folders, kind, dtype, most, parity):
    folder, theirs = folders[kind]
    original = load_model(source(folder))
    assert original.signature.task == "zero-shot"
    assert [str(tensor) for tensor in original.signature.outputs] == [
        f"image_features: float32[batch, {32 if kind == 'siglip' else 24}]",
        f"text_features: float32[texts, {32 if kind == 'siglip' else 24}]",
    ]
    torch.manual_seed(5)
    images = torch.randn(3, 3, 32, 32, dtype=dtype)
    text = torch.randint(3, theirs.config.text_config.vocab_size, (4, 16))
    for row, end in zip(text, (11, 5, 2, 8), strict=True):
        row[end:] = 1
    model = theirs.to(dtype)
    expected = (
        features(model.get_image_features(pixel_values=images)),
        features(model.get_text_features(input_ids=text)),
    )
    found = original.module.to(dtype)(images, text)
    for ours, each in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours - each).abs().max() / each.abs().max() < most
    if dtype == torch.float64:
        parity(PAGE[kind], "transformers", found, expected, keys="transformers")
    spec = original.signature.postprocess
    ours = logits(expected[0].numpy(), expected[1].numpy(), spec)
    whole = model(input_ids=text, pixel_values=images).logits_per_image
    np.testing.assert_allclose(ours, whole.numpy(), rtol=0, atol=1e-4)
    assert spec.scores == ("sigmoid" if kind == "siglip" else "softmax")
    theirs.to(torch.float32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_graphs_of_both_are_the_towers(folders, kind, engine, parity, tmp_path, request):
    if "VITDEPLOY_TEST_DEPTH" not in os.environ and not request.config.getoption("record_parity"):
        pytest.skip("every export compares them, too; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it")
    original = load_model(source(folders[kind][0]))
    module, spec = original.module, original.signature.postprocess
    images = export_graph(
        module.image_tower, name="images", preprocess=original.preprocess, image_size=(32, 32), opset=20, batch=None,
        in_graph=False, outputs=["features"],
    )  # fmt: skip
    texts = export_text_graph(module.text_tower, name="texts", length=spec.length, opset=20)
    for part, graph in (("images", images), ("texts", texts)):
        save_graph(graph, tmp_path / f"{part}.onnx")
    for batch in BATCHES:
        generator = torch.Generator().manual_seed(batch)
        image = torch.randn(batch, 3, 32, 32, generator=generator)
        text = torch.randint(3, module.text_tower.config.vocabulary, (batch, spec.length), generator=generator)
        text[:, -4:] = 1
        with torch.no_grad():
            expected = module(image, text)
        with engine_runner(engine, tmp_path / "images.onnx", batch) as runner:
            found = [runner.infer({"image": image.numpy()})["features"]]
        with engine_runner(engine, tmp_path / "texts.onnx", batch) as runner:
            found += [runner.infer({"text": text.numpy()})["features"]]
        parity(PAGE[kind], engine, found, expected)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_thousand_texts_are_transformers_tokens(folders, kind):
    folder, _ = folders[kind]
    spec = load_model(source(folder)).signature.postprocess
    theirs = reference("transformers").AutoTokenizer.from_pretrained(folder)
    texts = sample_texts()
    assert (len(texts), TEXTS, "" in texts, max(map(len, texts)) > 1000) == (1000, 1000, True, True)
    expected = theirs(texts, padding="max_length", truncation=True, max_length=spec.length)["input_ids"]
    with pytest.warns(RuntimeWarning, match="text truncated to 16 tokens"):
        found = TextTokenizer(folder / "tokenizer.json", spec).encode(texts)
    np.testing.assert_array_equal(found, np.array(expected))
    assert spec.lowercase == (kind == "siglip")
    assert str(compare_tokenizers(folder / "tokenizer.json", spec)).startswith(
        "same tokens for 1000 texts as transformers 5"
    )


def test_a_tokenizer_that_gives_other_tokens_is_refused(folders, tmp_path):
    folder, _ = folders["siglip"]
    spec = load_model(source(folder)).signature.postprocess
    other = type(spec)(**{**vars(spec), "padding": "right"})
    with pytest.raises(CheckpointError, match="gives different tokens from transformers' Siglip2Tokenizer") as caught:
        compare_tokenizers(folder / "tokenizer.json", other)
    assert "of 1000 texts" in caught.value.found


def copied(folder, tmp_path, *left_out):
    out = tmp_path / "folder"
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*left_out))
    return out


def without(folder, *prefixes):
    file = folder / "model.safetensors"
    state = load_file(file)
    save_file({key: each for key, each in state.items() if not key.startswith(prefixes)}, file, {"format": "pt"})


def test_without_a_tokenizer_it_is_the_image_tower_as_before(folders, tmp_path):
    folder, theirs = folders["clip"]
    original = load_model(source(copied(folder, tmp_path, "tokenizer*")))
    assert original.signature.task == "features"
    assert original.notes[-1] == "no tokenizer.json: image encoder only"
    assert load_model(source(folder, "features")).signature.task == "features"
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = features(theirs.get_image_features(pixel_values=image))
        torch.testing.assert_close(original.module(image), expected, rtol=0, atol=1e-5)


def test_a_config_of_both_and_weights_of_one_are_refused(folders, tmp_path):
    folder = copied(folders["clip"][0], tmp_path)
    without(folder, "text_model.", "text_projection.")
    with pytest.raises(CheckpointError, match="have no text encoder") as caught:
        load_model(source(folder))
    assert caught.value.fix.endswith("for the image encoder alone: --task features")
    assert load_model(source(folder, "features")).signature.task == "features"


def test_a_text_tower_that_is_not_whole_is_refused(folders, tmp_path):
    folder = copied(folders["siglip"][0], tmp_path)
    without(folder, "text_model.head.", "logit_bias")
    with pytest.raises(CheckpointError, match="the text encoder has missing or unknown tensors") as caught:
        load_model(source(folder))
    assert caught.value.found == "missing: head.weight, logit_bias"


def changed(folder, tmp_path, change):
    out = copied(folder, tmp_path)
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("change", "says", "found"),
    [
        (
            lambda c: c["text_config"].update(hidden_act="swish"),
            "a text encoder activation",
            "hidden_act 'swish'",
        ),
        (lambda c: c["text_config"].update(num_attention_heads=5), "does not fit the text encoder", "heads 5"),
        (
            lambda c: c.update(model_type="siglip2"),
            "does not support SigLIP 2 for images of any aspect ratio .NaFlex.",
            "pixel_attention_mask",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folders, tmp_path, change, says, found):
    with pytest.raises(CheckpointError, match=says) as caught:
        load_model(source(changed(folders["clip"][0], tmp_path, change)))
    assert found in caught.value.found


def test_towers_of_other_widths_do_not_belong_together(folders, tmp_path):
    folder = copied(folders["clip"][0], tmp_path)
    state = load_file(folder / "model.safetensors")
    state["text_projection.weight"] = state["text_projection.weight"][:16].contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="the image encoder and the text encoder do not match") as caught:
        load_model(source(folder))
    assert caught.value.found == "24 image features, 16 text features"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", "{", "is not valid JSON"),
        ("tokenizer.json", "[]", "is not a tokenizer"),
        ("tokenizer_config.json", '{"pad_token": "<none>"}', "has no valid padding token"),
    ],
)
def test_tokenizer_files_that_cannot_be_used_are_refused(folders, tmp_path, file, content, says):
    folder = copied(folders["clip"][0], tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=says):
        load_model(source(folder))


@pytest.mark.parametrize(
    ("kind", "name", "missing"),
    [("omdet-turbo", "OmDet-Turbo", "attend to"), ("grounding-dino", "Grounding DINO", "attend to")],
)
def test_detectors_that_are_told_what_to_find_are_refused_by_name(folders, tmp_path, kind, name, missing):
    with pytest.raises(CheckpointError, match=f"does not support {name}") as caught:
        load_model(source(changed(folders["clip"][0], tmp_path, lambda config: config.update(model_type=kind))))
    assert missing in caught.value.found
    assert "--model package.module:function" in caught.value.fix

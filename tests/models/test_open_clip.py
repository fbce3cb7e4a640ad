"""Folders in OpenCLIP's layout: both encoders, tokens and pixels against other implementations, and what is refused."""

import json
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.open_clip import KINDS, Clip, model_config, save_open_clip
from tests.parity import BATCHES, ENGINES, INDEPENDENT, OPEN_CLIP, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.exporter.torch_onnx import export_graph, export_text_graph
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models.load import load_model
from vitdeploy.models.model_folder.folder import ModelFolder
from vitdeploy.models.model_folder.tokenizer import compare_tokenizers, sample_texts
from vitdeploy.models.open_clip import open_clip_config, open_clip_preprocess
from vitdeploy.models.source import Source
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.runtime.tokenizer import TextTokenizer, cleaned

PAGE = "CLIP and SigLIP in OpenCLIP's layout, image and text encoder"
CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind, the folder and the independent model."""
    found = {}

    def folder(kind):
        if kind not in found:
            path = tmp_path_factory.mktemp("open_clip")
            found[kind] = path, save_open_clip(kind, path)
        return found[kind]

    return folder


def load(folder, **more):
    return load_model(Source(f"hf:{folder}", **more))


def inputs(original, model: Clip, count=3):
    """Images, and texts that end at several places and are padded with zeros, as OpenCLIP pads them."""
    torch.manual_seed(5)
    images = torch.randn(count, 3, *original.signature.image_size, dtype=torch.float64)
    end = model.text.token_embedding.num_embeddings - 1
    text = torch.randint(3, end, (4, original.signature.postprocess.length))
    for row, place in zip(text, (11, 5, 2, 8), strict=True):
        row[place], row[place + 1 :] = end, 0
    return images, text


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_both_towers_are_an_independent_implementation(folders, kind, parity):
    folder, theirs = folders(kind)
    original = load(folder)
    spec, width = original.signature.postprocess, model_config(kind)["embed_dim"]
    assert [str(tensor) for tensor in original.signature.outputs] == [
        f"image_features: float32[batch, {width}]",
        f"text_features: float32[texts, {width}]",
    ]
    assert (original.family == "vit") == (kind not in ("timm", "timm, mlp"))
    assert spec.scale == pytest.approx(np.exp(2.5))
    bias, scores, clean = (-1.5, "sigmoid", "canonicalize") if kind == "siglip" else (0, "softmax", "lower")
    assert (spec.bias, spec.scores, spec.clean, spec.pad, spec.padding) == (bias, scores, clean, 0, "right")
    images, text = inputs(original, theirs)
    model = theirs.double()
    parity(PAGE, INDEPENDENT, original.module.double()(images, text), (model.visual(images), model.text(text)))
    theirs.float()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_both_towers_are_open_clip(folders, kind, parity, monkeypatch):
    folder, own = folders(kind)
    create = reference("timm").create_model
    library = pytest.importorskip("open_clip", reason="pip install open_clip_torch to compare with it")
    config = json.loads((folder / CONFIG).read_text())["model_cfg"]
    apart = config.pop("custom_text", False)
    arguments = config["vision_cfg"].pop("timm_model_kwargs", {})  # known to versions after 3.3, which hand them on
    monkeypatch.setattr("open_clip.timm_model.timm.create_model", partial(create, **arguments))
    theirs = (library.factory.CustomTextCLIP if apart else library.CLIP)(**config).eval()
    theirs.load_state_dict(load_file(folder / WEIGHTS))
    original = load(folder)
    images, text = inputs(original, own)
    expected = theirs.double().encode_image(images), theirs.encode_text(text)
    parity(PAGE, OPEN_CLIP, original.module.double()(images, text), expected, keys="open_clip")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["average", "siglip", "timm"])
def test_the_graphs_of_both_are_the_towers(folders, kind, engine, parity, tmp_path, request):
    if "VITDEPLOY_TEST_DEPTH" not in os.environ and not request.config.getoption("record_parity"):
        pytest.skip("every export compares them, too; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it")
    folder, theirs = folders(kind)
    original = load(folder)
    module, spec, size = original.module, original.signature.postprocess, original.signature.image_size
    images = export_graph(
        module.image_tower, name="images", preprocess=original.preprocess, image_size=size, opset=20, batch=None,
        in_graph=False, outputs=["features"],
    )  # fmt: skip
    texts = export_text_graph(module.text_tower, name="texts", length=spec.length, opset=20)
    for part, graph in (("images", images), ("texts", texts)):
        save_graph(graph, tmp_path / f"{part}.onnx")
    for batch in BATCHES:
        image, text = inputs(original, theirs, batch)
        image, text = image.float(), text.repeat(2, 1)[:batch]
        with torch.no_grad():
            expected = module(image, text)
        with engine_runner(engine, tmp_path / "images.onnx", batch) as runner:
            found = [runner.infer({"image": image.numpy()})["features"]]
        with engine_runner(engine, tmp_path / "texts.onnx", batch) as runner:
            found += [runner.infer({"text": text.numpy()})["features"]]
        parity(PAGE, engine, found, expected)


@pytest.mark.filterwarnings("ignore:text truncated")
@pytest.mark.parametrize("kind", ["quickgelu", "siglip"])
def test_texts_are_cleaned_and_padded_with_zeros_on_the_right(folders, kind):
    folder, _ = folders(kind)
    file, spec = folder / "tokenizer.json", load(folder).signature.postprocess
    theirs = reference("transformers").AutoTokenizer.from_pretrained(folder)
    texts = sample_texts()
    expected = theirs([cleaned(text, spec.clean) for text in texts], truncation=True, max_length=spec.length)[
        "input_ids"
    ]
    found = TextTokenizer(file, spec).encode(texts)
    for ours, row in zip(found, expected, strict=True):
        assert ours[: len(row)].tolist() == row and not ours[len(row) :].any()
    assert str(compare_tokenizers(file, spec)).startswith("same tokens for 1000 texts as transformers 5")
    other = type(spec)(**{**vars(spec), "padding": "left"})
    with pytest.raises(CheckpointError, match="gives different tokens from transformers'"):
        compare_tokenizers(file, other)


@pytest.mark.parametrize(
    ("clean", "expected"),
    [
        ("whitespace", "It's 3 < 4 & a_b"),
        ("lower", "it's 3 < 4 & a_b"),
        ("canonicalize", "its 3 4 a b"),
    ],
)
def test_a_text_is_cleaned_as_open_clip_does(clean, expected):
    assert cleaned("  It's 3 &amp;lt; 4\n\t&amp; a_b ", clean) == expected
    tokenizer = pytest.importorskip("open_clip.tokenizer", reason="pip install open_clip_torch to compare with it")
    theirs = tokenizer.get_clean_fn(clean)
    repaired = tokenizer.ftfy.fix_text
    assert theirs("  It's 3 &amp;lt; 4\n\t&amp; a_b ") == expected
    for text in sample_texts():
        assert cleaned(repaired(text), clean) == theirs(text)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (32, {}),
        ([24, 40], {}),
        (32, {"resize_mode": "squash", "mean": 0.5, "std": [0.5] * 3, "interpolation": "bilinear"}),
    ],
)
def test_pixels_are_those_of_open_clip(folders, tmp_path, size, told):
    def change(content):
        content["model_cfg"]["vision_cfg"]["image_size"] = size
        content["preprocess_cfg"] = told

    found = open_clip_preprocess(open_clip_config(changed(folders("quickgelu")[0], tmp_path, change)))
    transform = pytest.importorskip("open_clip.transform", reason="pip install open_clip_torch to compare with it")
    theirs = transform.image_transform(tuple(size) if isinstance(size, list) else size, is_train=False, **told)
    generator = np.random.default_rng(3)
    from PIL import Image

    for shape in ((50, 71, 3), (120, 33, 3), (32, 32, 3)):
        image = Image.fromarray(generator.integers(0, 256, shape, np.uint8))
        np.testing.assert_allclose(
            normalise(load_pixels(image, found)[None], found)[0], theirs(image).numpy(), rtol=0, atol=1e-5
        )


def copied(folder, tmp_path, *left_out):
    out = tmp_path / "folder"
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*left_out))
    return out


def changed(folder, tmp_path, change):
    out = copied(folder, tmp_path)
    content = json.loads((out / CONFIG).read_text())
    change(content)
    (out / CONFIG).write_text(json.dumps(content))
    return out


def test_a_file_is_read_by_the_config_beside_it_and_so_is_a_config_of_open_clips_own(folders, tmp_path):
    folder, _ = folders("quickgelu")
    out = copied(folder, tmp_path, "tokenizer*")
    content = json.loads((out / CONFIG).read_text())
    (out / CONFIG).write_text(json.dumps(content["model_cfg"]))  # model_configs/NAME.json
    state = {f"module.{key}": tensor.half() for key, tensor in load_file(out / WEIGHTS).items()}
    torch.save({"epoch": 3, "state_dict": state}, out / "b32_400m.pt")  # as OpenCLIP's and MetaCLIP's training writes
    (out / WEIGHTS).unlink()
    original = load_model(Source(checkpoint=out / "b32_400m.pt"))
    assert original.signature.task == "features"
    assert [str(each) for each in original.signature.outputs] == ["features: float32[batch, 24]"]
    assert any(note.startswith("no tokenizer.json: image encoder only; for both") for note in original.notes)
    assert original.preprocess.mean == (0.48145466, 0.4578275, 0.40821073)
    with torch.no_grad():
        image = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(original.module(image), folders("quickgelu")[1].visual(image), rtol=0, atol=2e-2)
    (out / CONFIG).unlink()
    with pytest.raises(CheckpointError, match="its tensors do not determine heads, activation") as caught:
        load_model(Source(checkpoint=out / "b32_400m.pt"))
    assert "for OpenAI's and MetaCLIP's models, the NAME ends in -quickgelu" in caught.value.fix


def test_the_files_that_a_model_of_the_layout_is_a_function_of(folders, tmp_path):
    folder = ModelFolder(folders("quickgelu")[0])
    assert [path.name for path in folder.files] == [CONFIG, WEIGHTS]
    with pytest.raises(MissingFileError, match="no weights in") as caught:
        _ = ModelFolder(copied(folder.path, tmp_path, WEIGHTS)).weights
    assert caught.value.expected == f"{WEIGHTS} or open_clip_pytorch_model.bin"


def test_another_image_size_and_the_image_tower_alone(folders):
    folder, _ = folders("quickgelu")
    original = load(folder, image_size=(48, 64), task="features")
    assert (original.signature.task, original.signature.image_size) == ("features", (48, 64))
    assert original.module(torch.zeros(2, 3, 48, 64)).shape == (2, 24)
    found = load(folders("siglip")[0], task="features").signature.outputs
    assert [str(each) for each in found] == ["features: float32[batch, 32]", "patch_features: float32[batch, 16, 32]"]


VISION, TEXT = "vision_cfg", "text_cfg"


def setting(part, **values):
    def change(content):
        (content["model_cfg"][part] if part else content["model_cfg"]).update(values)

    return change


def prepared(**values):
    return lambda content: content["preprocess_cfg"].update(values)


@pytest.mark.parametrize(
    ("change", "says", "found"),
    [
        (setting(VISION, attentional_pool=True), "does not support", "attentional_pool True"),
        (setting(VISION, layers=[3, 4, 6, 3]), "does not support", "CLIP's ResNet"),
        (setting(VISION, pool_type="none"), "does not support", "pool_type 'none'"),
        (setting(VISION, no_ln_pre=True), "does not support", "no_ln_pre True"),
        (setting(VISION, width="32"), "does not support", "width '32'"),
        (setting(VISION, act_kwargs={"approximate": "tanh"}), "does not support", "quick_gelu True"),
        (setting(VISION, image_size="all"), "does not support", "image_size 'all'"),
        (setting(VISION, timm_model_name="vit_x", timm_pool="abs_attn"), "does not support", "timm_pool 'abs_attn'"),
        (setting(VISION, image_size=64, width=48), "does not match the weights", "width 48, the weights have 32"),
        (setting(VISION, image_size=64), "does not match the weights", "image_size 64, the weights have (32, 32)"),
        (setting(None, embed_dim=16), "does not match the weights", "embed_dim 16, the weights have 24"),
        (setting(None, multimodal_cfg={"width": 1}), "not the config of an image encoder and a text", "multimodal_cfg"),
        (setting(TEXT, hf_model_name="roberta-base"), "does not support", "transformers, roberta-base"),
        (setting(TEXT, embed_cls=True), "does not support", "embed_cls True"),
        (setting(TEXT, pool_type="first"), "does not support", "pool_type 'first'"),
        (setting(TEXT, proj_type="none"), "does not support", "proj_type 'none'"),
        (setting(TEXT, pool_type="eos"), "does not support", "eos_id None"),
        (setting(TEXT, tokenizer_kwargs={"strip_sep_token": True}), "does not support", "strip_sep_token"),
        (setting(TEXT, context_length=77), "does not match the weights", "context_length 77, the weights have 16"),
        (prepared(resize_mode="longest"), "does not support", "resize_mode 'longest'"),
        (prepared(mean=["a"]), "does not support", "mean ['a']"),
        (prepared(std=0.0001, mean=[1, 2]), "does not support", "mean [1, 2]"),
        (prepared(std=[-1, 1, 1]), "does not support", "std [-1, 1, 1]"),
    ],
)
def test_what_a_config_says_and_is_not_done_is_refused_by_name(folders, tmp_path, change, says, found):
    with pytest.raises(CheckpointError, match=says) as caught:
        load(changed(folders("quickgelu")[0], tmp_path, change))
    assert found in caught.value.found


def replaced(folder, change):
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "says", "found"),
    [
        (lambda s: s.pop("visual.ln_post.bias"), "the image encoder is incomplete", "norm.bias"),
        (lambda s: s.update({"visual.ls": torch.ones(1)}), "image encoder has tensors that CLIP does not", "visual.ls"),
        (
            lambda s: s.pop("ln_final.bias"),
            "the text encoder is incomplete",
            "1 missing, by vitdeploy's names: norm.bias",
        ),
        (lambda s: s.update({"cls_emb": torch.ones(1)}), "text encoder has tensors that CLIP does not", "cls_emb"),
        (lambda s: s.update({"visual.proj": torch.ones(24)}), "with unexpected shapes", "head.weight [24]"),
        (lambda s: s.pop("logit_scale"), "comparing images and texts", ""),
        (lambda s: s.pop("token_embedding.weight"), "have no text encoder", "tokenizer.json"),
    ],
)
def test_weights_that_are_not_whole_are_refused(folders, tmp_path, change, says, found):
    folder = copied(folders("quickgelu")[0], tmp_path)
    replaced(folder, change)
    with pytest.raises(CheckpointError, match=says) as caught:
        load(folder)
    assert found in caught.value.found


def test_a_tower_of_timm_that_is_another_is_refused(folders, tmp_path):
    folder = copied(folders("timm, mlp")[0], tmp_path)
    replaced(folder, lambda s: s.update({"visual.head.mlp.fc1.weight": torch.ones(48, 100)}))
    with pytest.raises(CheckpointError, match="OpenCLIP's projection does not fit timm's test_byobnet") as caught:
        load(folder)
    assert caught.value.found == "visual.head.mlp.fc1.weight [48, 100]"
    other = changed(folders("timm")[0], tmp_path / "other", setting(VISION, timm_proj="none"))
    with pytest.raises(CheckpointError, match="does not fit the architecture"):
        load(other)
    sized = changed(folders("siglip")[0], tmp_path / "sized", lambda c: c["model_cfg"].update(embed_dim=48))
    with pytest.raises(CheckpointError, match="image encoder does not return the features shared by images and texts"):
        load(sized)


def test_a_tokenizer_of_another_model_is_refused(folders, tmp_path):
    folder = copied(folders("quickgelu")[0], tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    more = len(vocabulary)
    added[0]["content"] = "<|other|>"
    vocabulary["<|other|>"] = vocabulary.pop("<|startoftext|>")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="is not CLIP's byte-pair tokenizer") as caught:
        load(folder)
    assert f"<|endoftext|> is {more - 1}" in caught.value.found
    vocabulary["more"] = more
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="has more tokens than the text encoder") as caught:
        load(folder)
    assert caught.value.found == f"{more + 1} tokens, {more} rows of token_embedding.weight"

"""Model folders as transformers and timm write them: ours, with their preprocessing and labels, and their outputs."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.models.detr_reference import outputs_of, small
from tests.models.detr_reference import randomise as randomise_detr
from tests.references import reference
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source

LABELS = {0: "cat", 1: "dog", 2: "newt", 3: "owl", 4: "yak"}
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
VISION = {**SHAPE, "hidden_act": "gelu"}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
SQUARE = {"height": 32, "width": 32}


def randomised(model, seed=0):
    """float32, in evaluation mode, no parameter or statistic at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise + (1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0))
    return model.eval()


def image(size=(32, 32), channels=3, batch=2):
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(1))


def difference(ours, theirs):
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def of_classes(library, name, **more):
    """A config of that name with the small shape, our labels and what else is given."""
    numbers = {name: number for number, name in LABELS.items()}
    return getattr(library, f"{name}Config")(**SHAPE, id2label=LABELS, label2id=numbers, **more)


def of_transformers(kind):
    """Model, image processor's settings, and the outputs that ours are to be equal to, as functions of pixels."""
    library = reference("transformers")

    def logits(model, pixels):
        return [model(pixels).logits]

    def tokens(model, pixels):
        found = model(pixels)
        return [found.last_hidden_state[:, 0], found.last_hidden_state[:, 1:]]

    if kind == "ViT":
        return library.ViTForImageClassification(of_classes(library, "ViT")), HALF, logits
    if kind == "DeiT with teacher":
        return library.DeiTForImageClassificationWithTeacher(of_classes(library, "DeiT")), IMAGENET, logits
    if kind == "DINOv2":
        return library.Dinov2Model(library.Dinov2Config(**SHAPE, mlp_ratio=2)), IMAGENET, tokens
    if kind == "DINOv2 classifier":
        return library.Dinov2ForImageClassification(of_classes(library, "Dinov2", mlp_ratio=2)), IMAGENET, logits
    if kind == "DINOv2 with registers":
        config = library.Dinov2WithRegistersConfig(**SHAPE, mlp_ratio=2, num_register_tokens=3)

        def patches(model, pixels):
            found = model(pixels).last_hidden_state
            return [found[:, 0], found[:, 4:]]

        return library.Dinov2WithRegistersModel(config), IMAGENET, patches
    if kind == "CLIP vision":
        model = library.CLIPVisionModelWithProjection(library.CLIPVisionConfig(**SHAPE, projection_dim=24))
        return model, HALF, lambda model, pixels: [model(pixels).image_embeds]
    if kind == "CLIP":
        config = library.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=24)

        def projected(model, pixels):
            return [model.visual_projection(model.vision_model(pixels).pooler_output)]

        return library.CLIPModel(config), HALF, projected
    if kind == "SigLIP vision":
        model = library.SiglipVisionModel(library.SiglipVisionConfig(**SHAPE))

        def pooled(model, pixels):
            found = model(pixels)
            return [found.pooler_output, found.last_hidden_state]

        return model, HALF, pooled
    if kind == "Swin":
        config = library.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, id2label=LABELS
        )
        return library.SwinForImageClassification(config), IMAGENET, logits
    assert kind == "MAE"

    def unmasked(model, pixels):
        order = torch.arange(16.0).expand(len(pixels), 16)
        return tokens(lambda pixels: model(pixels, noise=order), pixels)

    return library.ViTMAEModel(library.ViTMAEConfig(**SHAPE, mask_ratio=0.0)), IMAGENET, unmasked


KINDS = {
    "ViT": ("vit", "classification"),
    "DeiT with teacher": ("deit", "classification"),
    "DINOv2": ("vit", "features"),
    "DINOv2 classifier": ("vit", "classification"),
    "DINOv2 with registers": ("vit", "features"),
    "CLIP vision": ("vit", "features"),
    "CLIP": ("vit", "features"),
    "SigLIP vision": ("vit", "features"),
    "Swin": ("swin", "classification"),
    "MAE": ("vit", "features"),
}


def folder_of(model, processor, path):
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return Source(model=f"hf:{path}")


def outputs(original, pixels):
    with torch.no_grad():
        found = original.module(pixels)
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers_is_ours_with_its_outputs_preprocessing_and_labels(kind, tmp_path):
    model, statistics, answer = of_transformers(kind)
    randomised(model)
    processor = {"image_processor_type": "ViTImageProcessor", "size": SQUARE, "resample": 3, **statistics}
    original = load_model(folder_of(model, processor, tmp_path))
    family, task = KINDS[kind]
    assert (original.family, original.signature.task) == (family, task)
    assert original.labels == (tuple(LABELS.values()) if task == "classification" else ())
    assert original.preprocess.crop == original.preprocess.resize == (32, 32)
    assert original.preprocess.interpolation == "bicubic"
    assert original.preprocess.mean == tuple(statistics["image_mean"])
    assert original.preprocess.std == tuple(statistics["image_std"])
    with torch.no_grad():
        expected = answer(model, image())
    found = outputs(original, image())
    assert len(found) >= len(expected)
    assert max(map(difference, found, expected)) < 1e-5


@pytest.mark.parametrize("panoptic", [False, True])
def test_a_folder_of_detr_is_ours_at_the_size_that_was_asked_for(panoptic, tmp_path):
    model = small(panoptic)
    processor = {"image_processor_type": "DetrImageProcessor", "size": {"shortest_edge": 96, "longest_edge": 160}}
    source = folder_of(model, {**processor, **IMAGENET, "resample": 2}, tmp_path)
    original = load_model(Source(model=source.model, image_size=(64, 96)))
    assert (original.family, original.signature.task) == ("detr", "panoptic" if panoptic else "detection")
    assert original.signature.image_size == original.preprocess.crop == (64, 96)
    assert original.preprocess.mean == tuple(IMAGENET["image_mean"])
    found = outputs(original, image((64, 96)))
    assert max(map(difference, found, outputs_of(model, image((64, 96))))) < 1e-5


def test_a_detectors_size_is_that_to_which_its_processor_resizes(tmp_path):
    processor = {"image_processor_type": "DetrImageProcessor", "size": {"height": 64, "width": 96}}
    original = load_model(folder_of(small(False), {**processor, **IMAGENET}, tmp_path))
    assert original.signature.image_size == original.preprocess.crop == original.preprocess.resize == (64, 96)
    asked = load_model(Source(model=f"hf:{tmp_path}", image_size=(96, 64)))
    assert asked.signature.image_size == asked.preprocess.crop == (96, 64)


def test_labels_of_a_detector_are_those_of_its_classes_without_no_object(tmp_path):
    library = reference("transformers")
    config = small(False).config.to_dict() | {"id2label": {i: f"thing {i}" for i in range(7)}}
    model = library.DetrForObjectDetection(library.DetrConfig.from_dict(config)).eval()
    randomise_detr(model)
    original = load_model(folder_of(model, {**IMAGENET, "size": SQUARE}, tmp_path))
    assert original.labels == tuple(f"thing {i}" for i in range(7))


def test_weights_in_shards_are_one_state_dict(tmp_path):
    model, statistics, answer = of_transformers("ViT")
    randomised(model)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": SQUARE, **statistics}))
    original = load_model(Source(model=f"hf:{tmp_path}"))
    with torch.no_grad():
        assert difference(original.module(image()), answer(model, image())[0]) < 1e-5


def test_a_folder_without_processor_says_what_it_assumes(tmp_path):
    model = randomised(of_transformers("ViT")[0])
    model.save_pretrained(tmp_path)
    original = load_model(Source(model=f"hf:{tmp_path}"))
    assert original.preprocess.mean == (0.5, 0.5, 0.5)
    assert any("preprocessor_config.json" in note and "assum" in note for note in original.notes)


def test_a_model_that_is_not_ours_is_transformers_own_with_its_preprocessing_and_labels(tmp_path):
    library = reference("transformers")
    model = randomised(library.BeitForImageClassification(of_classes(library, "Beit", use_relative_position_bias=True)))
    processor = {"image_processor_type": "BeitImageProcessor", "size": SQUARE, "crop_size": SQUARE, **HALF}
    original = load_model(folder_of(model, processor, tmp_path))
    assert (original.family, original.labels) == ("transformers", tuple(LABELS.values()))
    assert original.preprocess.mean == (0.5, 0.5, 0.5)
    assert any("transformers" in note and "own module" in note for note in original.notes)
    with torch.no_grad():
        assert difference(original.module(image()), model(image()).logits) < 1e-5


def test_transformers_own_module_is_resized_as_transformers_does(tmp_path):
    library = reference("transformers")
    config = library.ViTMSNConfig(**SHAPE, id2label=LABELS)
    model = randomised(library.ViTMSNForImageClassification(config))
    source = folder_of(model, {"size": SQUARE, **IMAGENET}, tmp_path)
    original = load_model(Source(model=source.model, image_size=(48, 40)))
    assert original.signature.image_size == original.preprocess.crop == (48, 40)
    assert "resized from 32x32 to 48x40 pixels" in original.notes
    with torch.no_grad():
        expected = model(image((48, 40)), interpolate_pos_encoding=True).logits
        assert difference(original.module(image((48, 40))), expected) < 1e-5


# timm's folders. Each: name, arguments of a small one, and whose module it becomes.
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
TIMM = {
    "vit": ("vit_base_patch16_224", VIT, "vit"),
    "deit": ("deit_base_distilled_patch16_224", VIT, "deit"),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, "swin"),
    "swinv2": ("swinv2_tiny_window8_256", SWIN, "timm"),
    "eva02": ("eva02_tiny_patch14_224", {**VIT, "patch_size": 8}, "timm"),
    "dinov3": ("vit_small_patch16_dinov3", {**VIT, "dynamic_img_size": False}, "timm"),
}


def timm_folder(name, arguments, path, classes=5):
    timm = reference("timm")
    model = randomised(timm.create_model(name, num_classes=classes, **arguments))
    own = {
        "input_size": [3, 224, 224], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.8,
        "interpolation": "bilinear", "label_names": list(LABELS.values()),
    }  # fmt: skip
    config = {"architecture": name, "num_classes": classes, "pretrained_cfg": own, "model_args": arguments}
    (path / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), path / "model.safetensors")
    return model, Source(model=f"hf:{path}")


@pytest.mark.parametrize("kind", TIMM)
def test_a_folder_of_timm_gives_timms_logits_with_its_preprocessing_and_labels(kind, tmp_path):
    name, arguments, family = TIMM[kind]
    model, source = timm_folder(name, arguments, tmp_path)
    original = load_model(source)
    side = 32
    assert (original.family, original.labels) == (family, tuple(LABELS.values()))
    assert original.signature.image_size == original.preprocess.crop == (side, side)
    assert original.preprocess.resize == int(side / 0.8)
    assert (original.preprocess.mean, original.preprocess.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert original.preprocess.interpolation == "bilinear"
    with torch.no_grad():
        assert difference(original.module(image((side, side))), model(image((side, side)))) < 1e-5


@pytest.mark.parametrize("kind", ["vit", "deit", "swin", "swinv2", "eva02", "dinov3"])
def test_a_folder_of_timm_is_resized_as_timm_resizes(kind, tmp_path):
    timm = reference("timm")
    name, arguments, _ = TIMM[kind]
    model, source = timm_folder(name, arguments, tmp_path)
    original = load_model(Source(model=source.model, image_size=(64, 64)))
    assert original.signature.image_size == original.preprocess.crop == (64, 64)
    assert "resized from 32x32 to 64x64 pixels" in original.notes
    if kind.startswith("swin"):  # windows stay as large as they are
        theirs = timm.create_model(name, num_classes=5, **arguments | {"img_size": 64}).eval()
        theirs.load_state_dict(model.state_dict())
    else:
        theirs = model
        theirs.set_input_size(img_size=(64, 64))
    with torch.no_grad():
        assert difference(original.module(image((64, 64))), theirs(image((64, 64)))) < 1e-5


def test_a_module_of_timm_without_classes_gives_features(tmp_path):
    name, arguments, _ = TIMM["dinov3"]
    _, source = timm_folder(name, arguments, tmp_path, classes=0)
    original = load_model(source)
    assert original.signature.task == "features"
    assert [tensor.name for tensor in original.signature.outputs] == ["features"]
    assert original.labels == ()

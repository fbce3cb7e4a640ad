"""transformers' own modules against timm's with the mapped weights, from module keys and from saved files."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file

from tests.models.keys.timm_vit import difference, randomise, timm_output
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.family import Hints
from vitdeploy.models.keys.vit_transformers import to_timm

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-3,
}
LABELS = {"num_labels": 5}
DINO = {"mlp_ratio": 2}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "intermediate_size": 32}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def vision(transformers, name, **extra):
    return getattr(transformers, f"{name}Config")(**{**SHAPE, **extra})


def both(transformers, name, **extra):
    config = getattr(transformers, f"{name}Config")(vision_config=SHAPE, text_config=TEXT, **extra)
    return config


def logits(output):
    return output.logits, None


def cls_of_last(output):
    return output.last_hidden_state[:, 0], output.last_hidden_state


def pooler(output):
    return output.pooler_output, None


# model class, its config, what it gives, options of the call
CASES = {
    "ViTModel": (lambda t: vision(t, "ViT"), cls_of_last),
    "ViTForImageClassification": (lambda t: vision(t, "ViT", hidden_act="gelu_new", **LABELS), logits),
    "ViTForImageClassification, no biases of query, key and value": (
        lambda t: vision(t, "ViT", qkv_bias=False, num_channels=1, **LABELS),
        logits,
    ),
    "ViTForImageClassification, 32x48": (lambda t: vision(t, "ViT", image_size=[32, 48], **LABELS), logits),
    "ViTForMaskedImageModeling": (lambda t: vision(t, "ViT"), None),
    "ViTMAEModel": (lambda t: vision(t, "ViTMAE", mask_ratio=0.0), cls_of_last),
    "ViTMAEForPreTraining": (lambda t: vision(t, "ViTMAE", mask_ratio=0.0, decoder_num_hidden_layers=1), None),
    "DeiTModel": (lambda t: vision(t, "DeiT"), cls_of_last),
    "DeiTForImageClassification": (lambda t: vision(t, "DeiT", **LABELS), logits),
    "DeiTForImageClassificationWithTeacher": (lambda t: vision(t, "DeiT", **LABELS), logits),
    "Dinov2Model": (lambda t: vision(t, "Dinov2", **DINO), cls_of_last),
    "Dinov2Model, SwiGLU": (lambda t: vision(t, "Dinov2", use_swiglu_ffn=True, **DINO), cls_of_last),
    "Dinov2ForImageClassification": (lambda t: vision(t, "Dinov2", **DINO, **LABELS), logits),
    "Dinov2WithRegistersModel": (lambda t: vision(t, "Dinov2WithRegisters", **DINO), cls_of_last),
    "Dinov2WithRegistersForImageClassification, SwiGLU": (
        lambda t: vision(t, "Dinov2WithRegisters", use_swiglu_ffn=True, num_register_tokens=3, **DINO, **LABELS),
        logits,
    ),
    "CLIPVisionModel": (lambda t: vision(t, "CLIPVision"), pooler),
    "CLIPVisionModelWithProjection": (
        lambda t: vision(t, "CLIPVision", projection_dim=20, hidden_act="gelu"),
        lambda output: (output.image_embeds, None),
    ),
    "CLIPModel": (lambda t: both(t, "CLIP", projection_dim=20), "get_image_features"),
    "CLIPForImageClassification": (lambda t: both(t, "CLIP", **LABELS), logits),
    "SiglipVisionModel": (
        lambda t: vision(t, "SiglipVision"),
        lambda output: (output.pooler_output, output.last_hidden_state),
    ),
    "SiglipModel": (lambda t: both(t, "Siglip"), "get_image_features"),
    "SiglipForImageClassification": (lambda t: both(t, "Siglip", **LABELS), logits),
}


def build(case):
    transformers = reference("transformers")
    config, result = CASES[case]
    model = getattr(transformers, case.split(",")[0])(config(transformers))
    return randomise(model), result


@torch.no_grad()
def expected(model, result, image):
    if result == "get_image_features":
        features = model.get_image_features(image)
        return getattr(features, "pooler_output", features), None
    if result is None:  # the encoder inside a model for pre-training
        model, result = model.vit, cls_of_last
    patches = (image.shape[-2] // 8) * (image.shape[-1] // 8)
    # An MAE shuffles its patches by sorted noise: increasing noise leaves them in place.
    noise = {"noise": torch.arange(patches).repeat(len(image), 1)} if "MAE" in type(model).__name__ else {}
    return result(model(image, **noise))


@pytest.mark.parametrize("keys", ["module", "file"])
@pytest.mark.parametrize("case", CASES)
def test_mapped_weights_compute_what_the_model_computes(case, keys, tmp_path):
    model, result = build(case)
    config = model.config.to_dict()
    if keys == "module":
        state = model.state_dict()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
    mapped = to_timm(state, Hints(config=config))
    sizes = config.get("vision_config", config)
    image = torch.randn(2, sizes["num_channels"], *mapped.facts.image_size, dtype=torch.float64)
    theirs, theirs_tokens = expected(model, result, image)
    ours, ours_tokens = timm_output(mapped, image)
    assert difference(ours, theirs) <= 1e-10
    if theirs_tokens is not None:
        assert difference(ours_tokens, theirs_tokens) <= 1e-10

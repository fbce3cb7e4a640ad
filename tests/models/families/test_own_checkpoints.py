"""A module of ours, saved as training scripts save theirs, is the same model when it comes back as a checkpoint."""

from dataclasses import fields, replace

import pytest
import torch

from tests.models.vit_samples import SMALL
from vitdeploy.models.architectures.detr import DETRConfig, ResNetConfig
from vitdeploy.models.architectures.swin import SwinConfig
from vitdeploy.models.architectures.transformer import TransformerConfig
from vitdeploy.models.architectures.vit import DeiTConfig
from vitdeploy.models.catalog import family_named
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source

SQUARE = replace(SMALL, image_size=(32, 32))
OF_VIT = {field.name: getattr(SQUARE, field.name) for field in fields(SQUARE)}
DETECTION = DETRConfig(
    image_size=(64, 96), backbone=ResNetConfig(3, 8, (16, 32, 48, 64), (1, 2, 1, 1)),
    width=64, heads=8, encoder_layers=1, decoder_layers=2, hidden=48, queries=5, num_classes=7,
)  # fmt: skip
MODELS = {
    "ViT": ("vit", SQUARE),
    "ViT, features": ("vit", replace(SQUARE, num_classes=0)),
    "ViT, MLP head": ("vit", replace(SQUARE, pre_logits=24)),
    "ViT, MAE": ("vit", replace(SQUARE, positions="sincos_2d", pooling="average", final_norm="after_pooling")),
    "ViT, sinusoids": ("vit", replace(SQUARE, positions="sinusoidal")),
    "DINOv2": ("vit", replace(SQUARE, layer_scale=True, registers=4, prefix_positions=False, pooling="class_average")),
    "DINOv2, SwiGLU": ("vit", replace(SQUARE, num_classes=0, layer_scale=True, mlp="swiglu_packed")),
    "CLIP": ("vit", replace(SQUARE, stem_norm=True, layer_norm_eps=1e-5, head="projection")),
    "SigLIP": ("vit", replace(SQUARE, class_token=False, pooling="attention", num_classes=0)),
    "DeiT": ("deit", DeiTConfig(**OF_VIT)),
    "DeiT, features": ("deit", DeiTConfig(**OF_VIT | {"num_classes": 0})),
    "Swin": (
        "swin",
        SwinConfig(image_size=(64, 64), width=16, depths=(2, 2), heads=(2, 4), windows=(4, 4), num_classes=7),
    ),
    "DETR": ("detr", DETECTION),
    "DETR, panoptic": ("detr", replace(DETECTION, panoptic=True)),
    "Transformer": ("transformer", TransformerConfig(11, 11, 32, 1, 2, 4, 64)),
}

# Fields that no tensor has the shape of, and that are yet part of the function.
CONVENTIONS = ("layer_norm_eps", "activation", "pooling", "final_norm", "border", "pre_norm")


def lively(family, config):
    """No parameter or statistic at a neutral value: each has to come back to its place."""
    torch.manual_seed(0)
    model = family_named(family).build(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.add_(0.2 * torch.rand(tensor.shape) if "running" in name else 0.2 * torch.randn(tensor.shape))
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_a_saved_module_comes_back(kind, tmp_path):
    family, config = MODELS[kind]
    model, file = lively(family, config), tmp_path / "trained.pt"
    torch.save({"model": model.state_dict(), "epoch": 3}, file)
    # What tensors cannot show is told as a user would tell it.
    heads = None if family == "swin" else config.heads
    original = load_model(Source(checkpoint=file, image_size=getattr(config, "image_size", None), heads=heads))
    assert original.family == family
    found, expected = original.module.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    same = {field: getattr(config, field) for field in CONVENTIONS if hasattr(config, field)}
    assert {field: getattr(original.module.config, field) for field in same} == same
    if family != "transformer":
        image = torch.randn(2, 3, *config.image_size)
        with torch.no_grad():
            outputs = [each if isinstance(each, tuple) else (each,) for each in (original.module(image), model(image))]
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))

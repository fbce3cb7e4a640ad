"""Small ViTs, one for each variant, and the same models as timm's class builds them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from tests.references import reference
from vitdeploy.models.architectures.vit import ViTConfig

SMALL = ViTConfig((32, 48), 8, 3, width=32, depth=2, heads=4, num_classes=7)
# Every config here is one that timm's VisionTransformer can be.
TIMM_VARIANTS = {
    "plain": SMALL,
    "grey 28x28": replace(SMALL, image_size=(28, 28), patch_size=7, in_channels=1),
    "grid of part patches": replace(SMALL, image_size=(35, 46), drop_remainder=True),
    "no positions": replace(SMALL, positions="none"),
    "class token without position": replace(SMALL, prefix_positions=False),
    "registers": replace(SMALL, registers=4, prefix_positions=False),
    "registers with positions": replace(SMALL, registers=3),
    "registers, no class token": replace(SMALL, class_token=False, registers=2, pooling="average"),
    "average": replace(SMALL, pooling="average"),
    "average, then norm": replace(SMALL, pooling="average", final_norm="after_pooling"),
    "average, no class token": replace(SMALL, class_token=False, pooling="average"),
    "attention pooling": replace(
        SMALL, class_token=False, pooling="attention", activation="gelu_tanh", preset="siglip"
    ),
    "attention pooling, class token left out": replace(SMALL, pooling="attention", preset="siglip"),
    "no final norm": replace(SMALL, final_norm="none"),
    "ReLU": replace(SMALL, activation="relu"),
    "CLIP": replace(SMALL, stem_norm=True, layer_norm_eps=1e-5, preset="clip"),
    "CLIP of OpenAI": replace(SMALL, stem_norm=True, activation="quick_gelu", layer_norm_eps=1e-5, preset="clip"),
    "SwiGLU packed": replace(SMALL, mlp="swiglu_packed", mlp_ratio=16 / 3 + 0.5),
    "SwiGLU": replace(SMALL, mlp="swiglu", mlp_ratio=2.75),
    "DeiT-III": replace(SMALL, layer_scale=True, prefix_positions=False, preset="imagenet"),
    "DINOv2 features": replace(SMALL, layer_scale=True, num_classes=0, preset="imagenet"),
    "query and key norms": replace(SMALL, qk_norm=True),
    "no query, key, value bias": replace(SMALL, qkv_bias=False),
    "uneven MLP": replace(SMALL, mlp_ratio=3.7362),
}
# As which models the table of parities counts these; all others are plain ViTs.
TIMM_FAMILIES = {
    "attention pooling": "SigLIP image encoder",
    "CLIP": "CLIP image encoder",
    "CLIP of OpenAI": "CLIP image encoder",
    "DeiT-III": "DeiT-III",
    "DINOv2 features": "DINOv2",
}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_tanh": "gelu_tanh"}
POOLINGS = {"class": "token", "average": "avg", "attention": "map"}


def timm_vit(config: ViTConfig, kind: str = "VisionTransformer", **arguments: object) -> nn.Module:
    """timm's module for `config`; skips the test where timm is not installed."""
    reference("timm")
    from timm import layers, models

    plain = config.mlp == "mlp"
    mlps = {"mlp": layers.Mlp, "swiglu_packed": layers.SwiGLUPacked, "swiglu": layers.SwiGLU}
    return getattr(models.deit if "Distilled" in kind else models.vision_transformer, kind)(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=config.num_classes,
        global_pool=POOLINGS[config.pooling],
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        init_values=1.0 if config.layer_scale else None,
        class_token=config.class_token,
        pos_embed="none" if config.positions == "none" else "learn",
        no_embed_class=not config.prefix_positions,
        reg_tokens=config.registers,
        pre_norm=config.stem_norm,
        final_norm=config.final_norm != "none",
        fc_norm=config.final_norm == "after_pooling",
        norm_layer=partial(nn.LayerNorm, eps=config.layer_norm_eps),
        act_layer=ACTIVATIONS[config.activation] if plain else nn.SiLU,
        mlp_layer=mlps[config.mlp],
        **arguments,
    )


def randomised(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model in evaluation mode with no parameter at a neutral value: every term has to be in its place."""
    generator = torch.Generator().manual_seed(0)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            centre = 1.0 if parameter.ndim == 1 and name.endswith(("weight", "gamma")) else 0.0
            parameter.copy_(centre + 0.3 * noise)
    return model


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|, of equal shapes."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max())


def images(config: ViTConfig, batch: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, config.in_channels, *config.image_size, generator=generator, dtype=dtype)

"""timm's own module from facts that a key reader found: the independent model that mapped weights are proved in."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tests.references import reference
from vitdeploy.models.keys.facts import Mapped, ViTFacts

POOLS = {"token": "token", "average": "avg", "attention": "map", "token_and_average": "token"}


def timm_module(facts: ViTFacts) -> nn.Module:
    reference("timm")
    from timm.layers import SwiGLUPacked
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    arguments = {
        "img_size": facts.image_size,
        "patch_size": facts.patch_size,
        "in_chans": facts.channels,
        "num_classes": facts.classes if facts.pooling != "token_and_average" and not facts.pre_logits else 0,
        "embed_dim": facts.width,
        "depth": facts.depth,
        "num_heads": facts.heads,
        "mlp_ratio": facts.mlp_width * (2 if facts.swiglu else 1) / facts.width,
        "init_values": 1e-5 if facts.layer_scale else None,
        "pre_norm": facts.pre_norm,
        "norm_layer": partial(nn.LayerNorm, eps=facts.layer_norm_eps),
        "act_layer": nn.SiLU if facts.swiglu else facts.activation,
        **({"mlp_layer": SwiGLUPacked} if facts.swiglu else {}),
    }
    if facts.distilled:
        return VisionTransformerDistilled(**arguments)
    return VisionTransformer(
        **arguments,
        global_pool=POOLS[facts.pooling],
        class_token=facts.class_token,
        reg_tokens=facts.registers,
        no_embed_class=facts.class_token and not facts.class_position,
        final_norm=facts.final_norm != "none",
        fc_norm=facts.final_norm == "after_pooling",
    )


@torch.no_grad()
def timm_output(mapped: Mapped, image: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (pooled features where there is no head), and all tokens after the last norm."""
    facts = mapped.facts
    model = timm_module(facts).to(image.dtype).eval()
    outside = ("head.", "pre_logits.") if facts.pooling == "token_and_average" or facts.pre_logits else ()
    model.load_state_dict({key: tensor for key, tensor in mapped.state.items() if not key.startswith(outside)})
    tokens = model.forward_features(image)
    if not outside:
        return model(image), tokens
    pooled = tokens[:, 0]
    if facts.pooling == "token_and_average":
        pooled = torch.cat([pooled, tokens[:, 1 + facts.registers :].mean(1)], dim=1)
    if facts.pre_logits:
        pooled = torch.tanh(pooled @ mapped.state["pre_logits.fc.weight"].T + mapped.state["pre_logits.fc.bias"])
    return pooled @ mapped.state["head.weight"].T + mapped.state["head.bias"], tokens


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """No parameter or buffer at a neutral value, so that none can be mapped wrongly unseen; float64, evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.3)
                if "norm" in name and name.endswith("weight"):
                    tensor.add_(1)
    return module


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())

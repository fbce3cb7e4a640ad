"""How a mapping is proved: weights without neutral values, loaded strictly, compared in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitdeploy.models.architectures.vit import DeiTConfig, DistilledVisionTransformer, VisionTransformer
from vitdeploy.models.family import Recognised


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Float64, in evaluation mode, no parameter or buffer at a neutral value: none can be mapped wrongly unseen."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.3)
                if ("norm" in name or "ln" in name) and name.endswith("weight"):
                    tensor.add_(1)
    return module


def loaded(recognised: Recognised) -> VisionTransformer:
    """Our module with the recognised weights, float64."""
    config = recognised.config
    assert recognised.family == ("deit" if isinstance(config, DeiTConfig) else "vit")
    module = DistilledVisionTransformer(config) if isinstance(config, DeiTConfig) else VisionTransformer(config)
    module = module.double().eval()
    module.load_state_dict(recognised.state, strict=True)
    return module


@torch.no_grad()
def answer(module: VisionTransformer, image: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, or pooled features where there is no head; and all tokens after the last block and its norm."""
    given = module(image)
    return (given[0] if isinstance(given, tuple) else given), module.encode(image)


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())

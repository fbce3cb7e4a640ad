"""Small seeded folders in OpenCLIP's layout, and an implementation of their towers of torch.nn and timm alone.

Sources: Radford et al. (arXiv 2103.00020) and openai/CLIP's `model.py` for names and order; the switches are those of
open_clip_torch's `CLIPVisionCfg` and `CLIPTextCfg`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.models.towers import LENGTH, byte_pairs
from tests.references import reference

FEATURES, SIDE, VOCABULARY = 24, 32, "vocab_size"
VISION = {"image_size": SIDE, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8}
TEXT = {"context_length": LENGTH, "width": 24, "heads": 3, "layers": 2}
SIGLIP = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": SIDE, "patch_size": 8}
# By kind: what OpenCLIP's `model_cfg` says beside what all have.
KINDS: dict[str, dict[str, Any]] = {
    # OpenAI's, and MetaCLIP's
    "quickgelu": {"quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT},
    # LAION's, whose text encoder was built apart
    "custom text": {"custom_text": True, "vision_cfg": {**VISION, "mlp_ratio": 2.5}, "text_cfg": TEXT},
    # CLIPA's: no norm before the blocks, an average, which is normed
    "average": {
        "vision_cfg": {**VISION, "no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": {**TEXT, "pool_type": "last"},
    },
    # SigLIP 2: timm's image encoder, which is ours, and a text encoder without a mask
    "siglip": {
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": {
            "image_size": SIDE,
            "timm_model_name": "vit_base_patch16_siglip_224",
            "timm_pool": "map",
            "timm_proj": "none",
            "timm_model_kwargs": SIGLIP,
        },
        "text_cfg": {
            **TEXT,
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6},
            "act_kwargs": {"approximate": "tanh"},
            "hf_tokenizer_name": "timm/ViT-B-16-SigLIP2",
            "tokenizer_kwargs": {"clean": "canonicalize"},
        },
    },
    # MobileCLIP's form: an image encoder that only timm has, with its own last linear; the text encoder sees padding
    "timm": {
        "custom_text": True,
        "vision_cfg": {"image_size": 64, "timm_model_name": "test_byobnet", "timm_pool": "avg", "timm_proj": None},
        "text_cfg": {**TEXT, "no_causal_mask": True},
    },
    # the same with OpenCLIP's projection behind it
    "timm, mlp": {
        "custom_text": True,
        "vision_cfg": {"image_size": 64, "timm_model_name": "test_byobnet", "timm_pool": "avg", "timm_proj": "mlp"},
        "text_cfg": TEXT,
    },
}


def model_config(kind: str) -> dict[str, Any]:
    """`model_cfg` of a kind."""
    width = SIGLIP["embed_dim"] if kind == "siglip" else FEATURES
    return {"embed_dim": width, **KINDS[kind]}


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, activation: Any, norm: Any) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = norm(width), norm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, hidden))
        self.mlp.add_module("gelu", activation())
        self.mlp.add_module("c_proj", nn.Linear(hidden, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Blocks(nn.Module):
    def __init__(self, width: int, layers: int, *rest: Any) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, *rest) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


def parts(cfg: dict[str, Any], quick: bool) -> tuple[Any, Any]:
    activation = QuickGELU if quick else partial(nn.GELU, **cfg.get("act_kwargs", {}))
    return activation, partial(nn.LayerNorm, **cfg.get("norm_kwargs", {}))


class Image(nn.Module):
    def __init__(self, cfg: dict[str, Any], features: int, quick: bool) -> None:
        super().__init__()
        self.cfg, width, patch = cfg, cfg["width"], cfg["patch_size"]
        activation, norm = parts(cfg, quick)
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros((cfg["image_size"] // patch) ** 2 + 1, width))
        self.ln_pre = nn.Identity() if cfg.get("no_ln_pre") else norm(width)
        hidden = int(width * cfg.get("mlp_ratio", 4))
        self.transformer = Blocks(width, cfg["layers"], width // cfg["head_width"], hidden, activation, norm)
        self.ln_post, self.proj = norm(width), nn.Parameter(torch.zeros(width, features))

    def forward(self, image: Tensor) -> Tensor:
        patches = self.conv1(image).flatten(2).mT
        first = self.class_embedding.expand(len(image), 1, -1)
        x = self.transformer(self.ln_pre(torch.cat([first, patches], dim=1) + self.positional_embedding))
        x = x if self.cfg.get("final_ln_after_pool") else self.ln_post(x)
        x = x[:, 1:].mean(dim=1) if self.cfg.get("pool_type") == "avg" else x[:, 0]
        return (self.ln_post(x) if self.cfg.get("final_ln_after_pool") else x) @ self.proj


class TimmImage(nn.Module):
    def __init__(self, cfg: dict[str, Any], features: int) -> None:
        super().__init__()
        projection, kwargs = cfg["timm_proj"], cfg.get("timm_model_kwargs", {})
        classes = 0 if projection else features
        name, pool = cfg["timm_model_name"], cfg["timm_pool"]
        self.trunk = reference("timm").create_model(name, num_classes=classes, global_pool=pool, **kwargs)
        self.head = nn.Sequential()
        if projection == "mlp":
            self.head.add_module("mlp", nn.Sequential())
            self.head.mlp.add_module("fc1", nn.Linear(self.trunk.num_features, 2 * features))
            self.head.mlp.add_module("act", nn.GELU())
            self.head.mlp.add_module("fc2", nn.Linear(2 * features, features, bias=False))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.trunk(image))


class Text(nn.Module):
    def __init__(self, cfg: dict[str, Any], features: int, quick: bool) -> None:
        super().__init__()
        self.cfg, width, length = cfg, cfg["width"], cfg["context_length"]
        activation, norm = parts(cfg, quick)
        self.token_embedding = nn.Embedding(cfg["vocab_size"], width)
        self.positional_embedding = nn.Parameter(torch.zeros(length, width))
        self.transformer = Blocks(width, cfg["layers"], cfg["heads"], 4 * width, activation, norm)
        self.ln_final = norm(width)
        biased = cfg.get("proj_bias")
        self.text_projection = nn.Linear(width, features) if biased else nn.Parameter(torch.zeros(width, features))

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        hidden = torch.full((length, length), -torch.inf, dtype=self.positional_embedding.dtype).triu(1)
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.transformer(x, None if self.cfg.get("no_causal_mask") else hidden))
        rows = torch.arange(len(x))
        x = x[:, -1] if self.cfg.get("pool_type") == "last" else x[rows, text.argmax(dim=-1)]
        return self.text_projection(x) if isinstance(self.text_projection, nn.Linear) else x @ self.text_projection


class Clip(nn.Module):
    """Both encoders, whose state dict has OpenCLIP's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, quick = config["embed_dim"], config.get("quick_gelu", False)
        vision, text = config["vision_cfg"], config["text_cfg"]
        self.visual = TimmImage(vision, width) if "timm_model_name" in vision else Image(vision, width, quick)
        self.text, self.apart = Text(text, width, quick), config.get("custom_text", False)
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        if "init_logit_bias" in config:
            self.logit_bias = nn.Parameter(torch.tensor(-1.5))

    def names(self) -> dict[str, Tensor]:
        state = self.state_dict()
        return state if self.apart else {key.removeprefix("text."): tensor for key, tensor in state.items()}


def save_open_clip(kind: str, folder: Path) -> Clip:
    """The model, saved in `folder` with its config and a tokenizer."""
    transformers = reference("transformers")
    if kind == "siglip":
        tokenizer = transformers.T5Tokenizer(extra_ids=0).train_new_from_iterator(["a photo of a cat", "zero one"], 200)
    else:
        tokenizer = byte_pairs(transformers, marks_last=True)
    config = model_config(kind)
    config["text_cfg"] = {**config["text_cfg"], VOCABULARY: len(tokenizer)}
    torch.manual_seed(4)
    model = Clip(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("logit"):
                parameter.add_(0.15 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.3 * torch.rand_like(buffer))
    tokenizer.save_pretrained(folder)
    squash = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    preprocess = squash if kind == "siglip" else {"mean": [0.48, 0.45, 0.4], "std": [0.26, 0.26, 0.27]}
    content = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(content), encoding="utf-8")
    state = {key: tensor.contiguous() for key, tensor in model.names().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    return model.eval()

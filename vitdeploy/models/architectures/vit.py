"""ViT, DeiT and text encoders."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.models.architectures import layers

# --- Vision Transformer -----------------------------------------------------------------------------------------------
# Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021 (arXiv 2010.11929), equations 1-4:
#
#     z_0  = [x_class; x_1 E; ...; x_N E] + E_pos          patch embedding, class token, position embedding  (1)
#     z'_l = MSA(LN(z_{l-1})) + z_{l-1}                    multi-head self-attention, pre-norm                (2)
#     z_l  = MLP(LN(z'_l)) + z'_l                          two linear layers with GELU                        (3)
#     y    = LN(z_L)[0]                                    the class token, then a linear head                (4)
#
# This is exactly the default configuration. Each later variant changes one term, described by the `ViTConfig` fields:
# DeiT-III (2204.07118), DINOv2 (2304.07193) and its registers (2309.16588), MAE (2111.06377), the image encoders of
# CLIP (2103.00020) and SigLIP (2303.15343). DeiT with a distillation token is below.
#
# Parameter names are those of timm's `vit_*` checkpoints, so that such a state dict loads unchanged.


Positions: TypeAlias = Literal["learned", "sinusoidal", "sincos_2d", "none"]
Pooling: TypeAlias = Literal["class", "average", "attention", "class_average"]
FinalNorm: TypeAlias = Literal["before_pooling", "after_pooling", "none"]
Head: TypeAlias = Literal["linear", "projection"]
Preset: TypeAlias = Literal["augreg", "imagenet", "clip", "siglip"]


@dataclass(frozen=True)
class ViTConfig:
    """Configuration of a Vision Transformer. Sizes are in pixels, `image_size` as (height, width).

    mlp_ratio: rows of the MLP's first linear over the width; a packed SwiGLU counts both halves.
    num_classes: 0 for a model that returns features instead of logits.
    drop_remainder: allows an image size that the patch size does not divide; the last rows and columns are not read
        (SigLIP so400m/14 at 384).
    positions: the origin of E_pos in equation 1; it is always stored as the table `pos_embed`.
    position_resampling: how that table is resized for other image sizes, see `resize_positions`.
    class_token, registers: the tokens before the patches, in this order.
    prefix_positions: whether E_pos has rows for these tokens too (not in DeiT-III, nor with DINOv2's registers).
    stem_norm: LayerNorm right after equation 1, and no bias in the patch embedding (CLIP).
    post_norm: z' = LN(z + MSA(z)) and so on instead of equations 2 and 3, as in arXiv 1706.03762. The last block then
        ends in a LayerNorm, so `final_norm` is "none".
    layer_scale: a learned factor per channel after MSA and after MLP (DeiT-III, DINOv2).
    pooling: "class": equation 4. "average" of the patches. "attention": a learned query over the patches (SigLIP).
        "class_average": class token and average concatenated, twice the width (DINOv2's classifiers).
    final_norm: the position of the LayerNorm of equation 4: on all tokens (`norm`), on the pooled one (`fc_norm`: MAE
        fine-tuned with "average"), or nowhere.
    pre_logits: width of tanh(W y) before the linear head, the paper's MLP head for pre-training; 0 for none.
    head: "linear", or "projection": without bias, to the `num_classes` dimensions shared by CLIP's two encoders.
    preset: the source of the default preprocessing (pixel statistics and crop); does not affect the function.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: int = 16
    in_channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    layer_norm_eps: float = 1e-6
    drop_remainder: bool = False
    positions: Positions = "learned"
    position_resampling: layers.Resampling = "antialias"
    class_token: bool = True
    registers: int = 0
    prefix_positions: bool = True
    stem_norm: bool = False
    post_norm: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    mlp: layers.FeedForward = "mlp"
    activation: layers.Activation = "gelu"
    layer_scale: bool = False
    pooling: Pooling = "class"
    final_norm: FinalNorm = "before_pooling"
    pre_logits: int = 0
    head: Head = "linear"
    preset: Preset = "augreg"

    def __post_init__(self) -> None:
        height, width = self.image_size
        sizes = {"image": min(height, width), "patch": self.patch_size, "width": self.width, "depth": self.depth}
        sizes |= {"heads": self.heads, "channels": self.in_channels, "MLP": self.hidden}
        if min(sizes.values()) < 1:
            raise ValueError(f"sizes of 0: {', '.join(name for name, size in sizes.items() if size < 1)}")
        counts = {"classes": self.num_classes, "registers": self.registers, "pre-logits": self.pre_logits}
        if min(counts.values()) < 0:
            raise ValueError(f"negative: {', '.join(name for name, count in counts.items() if count < 0)}")
        if min(height, width) < self.patch_size:
            raise ValueError(f"image size {height}x{width} is smaller than the patch size {self.patch_size}")
        if (height % self.patch_size or width % self.patch_size) and not self.drop_remainder:
            raise ValueError(f"image size {height}x{width} is not divisible by the patch size {self.patch_size}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.positions == "sincos_2d" and self.width % 4:
            raise ValueError(f"2-D sin-cos positions need a width divisible by 4, not {self.width}")
        if self.positions == "sinusoidal" and self.width % 2:
            raise ValueError(f"sinusoidal positions need an even width, not {self.width}")
        if self.mlp == "swiglu_packed" and self.hidden % 2:
            raise ValueError(f"the {self.hidden} rows of a SwiGLU cannot be split into halves")
        if self.pooling in ("class", "class_average") and not self.class_token:
            raise ValueError(f"pooling {self.pooling!r} needs a class token")
        if self.head == "projection" and not self.num_classes:
            raise ValueError("a projection needs num_classes, its number of output dimensions")

    @property
    def grid(self) -> layers.Grid:
        """(rows, columns) of patches."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return int(self.class_token) + self.registers

    @property
    def positioned_prefix(self) -> int:
        """Tokens before the patches that have a row in the position table."""
        return self.prefix if self.prefix_positions else 0

    @property
    def hidden(self) -> int:
        """Rows of the MLP's first linear layer: width * mlp_ratio, rounded down with tolerance for rounding errors."""
        return int(self.width * self.mlp_ratio + 1e-6)

    @property
    def pooled_width(self) -> int:
        """Width of the pooled features."""
        return 2 * self.width if self.pooling == "class_average" else self.width

    @property
    def feature_width(self) -> int:
        """Width of the features that the linear head reads."""
        return self.pre_logits or self.pooled_width


class EncoderBlock(nn.Module):
    """Equations 2 and 3, or their post-norm form. Float [b, n, d] -> [b, n, d]."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, eps = config.width, config.layer_norm_eps
        self.post_norm = config.post_norm
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = layers.SelfAttention(width, config.heads, qkv_bias=config.qkv_bias, qk_norm=config.qk_norm, eps=eps)
        self.ls1 = layers.LayerScale(width) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = layers.feed_forward(config.mlp, width, config.hidden, config.activation)
        self.ls2 = layers.LayerScale(width) if config.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.post_norm:
            x = self.norm1(x + self.ls1(self.attn(x)))
            return self.norm2(x + self.ls2(self.mlp(x)))
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Image in; class logits out, or features if `config.num_classes` is 0.

    Input: float32 [b, in_channels, height, width], normalised pixels. Output: float32 [b, num_classes], logits (for a
    projection, the embedding). Without classes, two tensors: pooled features [b, feature_width], and the patch tokens
    [b, num_patches, width], normalised if the final norm precedes the pooling.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.width, config.layer_norm_eps
        self.patch_embed = layers.PatchEmbedding(
            config.in_channels, width, config.patch_size, bias=not config.stem_norm
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if config.class_token else None
        self.pos_embed = _position_table(config)
        self.reg_token = nn.Parameter(torch.zeros(1, config.registers, width)) if config.registers else None
        self.norm_pre = nn.LayerNorm(width, eps=eps) if config.stem_norm else nn.Identity()
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=eps) if config.final_norm == "before_pooling" else nn.Identity()
        self.attn_pool = (
            layers.AttentionPool(width, config.heads, config.hidden, activation=config.activation, eps=eps)
            if config.pooling == "attention"
            else None
        )
        after_pooling = config.final_norm == "after_pooling"
        self.fc_norm = nn.LayerNorm(config.pooled_width, eps=eps) if after_pooling else nn.Identity()
        self.pre_logits = (
            nn.Sequential(OrderedDict(fc=nn.Linear(config.pooled_width, config.pre_logits), act=nn.Tanh()))
            if config.pre_logits
            else nn.Identity()
        )
        self.head = linear_head(config)
        self.initialise()

    def initialise(self) -> None:
        """Truncated normal with std 0.02 for weights and tokens, zero for biases (the paper's released code)."""
        for parameter in (self.cls_token, self.reg_token, self.pos_embed):
            if parameter is not None and parameter.requires_grad:
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.attn_pool is not None:
            nn.init.trunc_normal_(self.attn_pool.latent, std=self.config.width**-0.5)

    def prefix_tokens(self) -> list[Tensor]:
        """Return the learned tokens before the patches, each [1, count, d], in order."""
        return [token for token in (self.cls_token, self.reg_token) if token is not None]

    def embed(self, image: Tensor) -> Tensor:
        """Equation 1: [b, c, height, width] -> [b, prefix + num_patches, d].

        Computed as [0; x_1 E; ...; x_N E] + [x_class + p_0; p_1; ...; p_N], whose second term is one constant of the
        exported graph: repeating the class token for every image would make the graph depend on the batch size.
        """
        patches, table = self.patch_embed(image), self.token_table()
        if table is None:
            return patches
        return (F.pad(patches, (0, 0, self.config.prefix, 0)) if self.config.prefix else patches) + table

    def token_table(self) -> Tensor | None:
        """Return the part that is the same for every image: the learned tokens, plus E_pos on rows with a position.

        Float [1, prefix + num_patches, d]; None if the model has neither.
        """
        tokens, config = self.prefix_tokens(), self.config
        learned = F.pad(torch.cat(tokens, dim=1), (0, 0, 0, config.num_patches)) if tokens else None
        if self.pos_embed is None:
            return learned
        positions = F.pad(self.pos_embed, (0, 0, config.prefix - config.positioned_prefix, 0))
        return positions if learned is None else learned + positions

    def encode(self, image: Tensor) -> Tensor:
        """Equations 1 to 3, and the final norm if it precedes the pooling: [b, prefix + num_patches, d]."""
        x = self.norm_pre(self.embed(image))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def pool(self, tokens: Tensor) -> Tensor:
        """[b, prefix + num_patches, d] -> [b, pooled_width]; registers are never read."""
        if self.config.pooling == "class":
            return tokens[:, 0]
        patches = tokens[:, self.config.prefix :] if self.config.prefix else tokens
        if self.attn_pool is not None:
            return self.attn_pool(patches)
        average = patches.mean(dim=1)
        return average if self.config.pooling == "average" else torch.cat([tokens[:, 0], average], dim=-1)

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        tokens = self.encode(image)
        pooled = self.pre_logits(self.fc_norm(self.pool(tokens)))
        if self.config.num_classes:
            return self.head(pooled)
        return pooled, tokens[:, self.config.prefix :]


def _position_table(config: ViTConfig) -> nn.Parameter | None:
    if config.positions == "none":
        return None
    prefix = config.positioned_prefix
    tokens = prefix + config.num_patches
    if config.positions == "learned":
        return nn.Parameter(torch.zeros(1, tokens, config.width))
    fixed = (
        layers.sinusoidal(tokens, config.width)
        if config.positions == "sinusoidal"
        else layers.sincos_2d(config.grid, config.width, prefix)
    )
    return nn.Parameter(fixed, requires_grad=False)


def linear_head(config: ViTConfig) -> nn.Module:
    """Return the last linear layer, [b, feature_width] -> [b, num_classes]; the identity without classes."""
    if not config.num_classes:
        return nn.Identity()
    return nn.Linear(config.feature_width, config.num_classes, bias=config.head != "projection")


# --- DeiT with its distillation token ---------------------------------------------------------------------------------
# Source: Touvron et al., "Training data-efficient image transformers & distillation through attention", ICML 2021
# (arXiv 2012.12877), section 4: a second learned token, after the class token, which a second linear head reads. It was
# trained on a teacher's outputs, like the class token on the labels; at inference the two heads' outputs are averaged.
#
# A DeiT without that token is a plain ViT, and DeiT-III is a ViT with LayerScale.


@dataclass(frozen=True)
class DeiTConfig(ViTConfig):
    """A `ViTConfig` whose tokens are class token, distillation token, patches."""

    preset: Preset = "imagenet"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.registers or self.pre_logits or (self.pooling, self.final_norm) != ("class", "before_pooling"):
            raise ValueError("a distilled DeiT must pool its class and distillation tokens after the final norm")

    @property
    def prefix(self) -> int:
        return 2


class DistilledVisionTransformer(VisionTransformer):
    """Image in; class logits out, or features if `config.num_classes` is 0.

    As `VisionTransformer`; the pooled features are the mean of the class and the distillation token.
    """

    def __init__(self, config: DeiTConfig) -> None:
        super().__init__(config)
        self.dist_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.head_dist = linear_head(config)
        nn.init.trunc_normal_(self.dist_token, std=0.02)
        if isinstance(self.head_dist, nn.Linear):
            nn.init.trunc_normal_(self.head_dist.weight, std=0.02)
            if self.head_dist.bias is not None:
                nn.init.zeros_(self.head_dist.bias)

    def prefix_tokens(self) -> list[Tensor]:
        return [*super().prefix_tokens(), self.dist_token]

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        tokens = self.encode(image)
        of_labels, of_teacher = self.head(tokens[:, 0]), self.head_dist(tokens[:, 1])
        mean = (of_labels + of_teacher) / 2
        return mean if self.config.num_classes else (mean, tokens[:, self.config.prefix :])


# --- The text encoders of CLIP and SigLIP: a pre-norm Transformer over tokens, one of which becomes the features ------
# Sources: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021 (arXiv
# 2103.00020), section 2.4: each token attends to itself and earlier ones, and the features are those of the end token.
# Zhai et al., "Sigmoid Loss for Language Image Pre-Training", ICCV 2023 (arXiv 2303.15343): every token attends to all
# tokens, including padding, and the features are those of the last one.
#
# Parameter names are those of our Vision Transformer, so that both encoders are read the same way.


TextPooling: TypeAlias = Literal["end", "highest", "last"]


@dataclass(frozen=True)
class TextConfig:
    """Configuration of a text encoder. `length`: tokens of every padded text. `features`: width of the output. `end`:
    the end token. `pooling`: "end" for the features at the first end token, "highest" at the first occurrence of the
    largest token id (CLIP's own rule, whose end token has the largest id), "last" at the last position."""

    vocabulary: int
    length: int
    width: int
    depth: int
    heads: int
    hidden: int
    features: int
    layer_norm_eps: float
    activation: layers.Activation
    causal: bool
    pooling: TextPooling
    end: int
    head_bias: bool


class _TextBlock(nn.Module):
    """x + MSA(LN(x)), then x + MLP(LN(x)). Float [b, n, d] -> [b, n, d]."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        width, eps = config.width, config.layer_norm_eps
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = layers.SelfAttention(width, config.heads, causal=config.causal)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = layers.MLP(width, config.hidden, config.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TextEncoder(nn.Module):
    """Token ids int64 [b, length] in, features float32 [b, features] out, not normalised to length 1."""

    places: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embed = nn.Embedding(config.vocabulary, config.width)
        self.pos_embed = nn.Parameter(torch.zeros(1, config.length, config.width))
        self.blocks = nn.ModuleList(_TextBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.head = nn.Linear(config.width, config.features, bias=config.head_bias)
        self.register_buffer("places", torch.arange(config.length)[None], persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token_embed(text) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(self.norm(x), text))

    def pool(self, tokens: Tensor, text: Tensor) -> Tensor:
        """[b, n, d] -> [b, d]. A product with a one-hot vector selects a row: an index would make the graph depend on
        the batch size."""
        if self.config.pooling == "last":
            return tokens[:, -1]
        marks = text if self.config.pooling == "highest" else (text == self.config.end).to(torch.int64)
        place = marks.argmax(dim=-1, keepdim=True)
        chosen = (self.places == place).to(tokens.dtype)
        return (chosen[:, None] @ tokens)[:, 0]

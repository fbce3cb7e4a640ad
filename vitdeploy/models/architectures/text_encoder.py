"""The text encoders of CLIP and SigLIP: a pre-norm Transformer over tokens, one of which becomes the features.

Sources: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021 (arXiv
2103.00020), section 2.4: each token sees itself and those before it, and the features are those of the end token. Zhai
et al., "Sigmoid Loss for Language Image Pre-Training", ICCV 2023 (arXiv 2303.15343): every token sees all of them,
padding too, and the features are those of the last one.

Parameter names are those of our Vision Transformer, so that both towers are read alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.models.architectures.layers import MLP, Activation, SelfAttention

TextPooling: TypeAlias = Literal["end", "highest", "last"]


@dataclass(frozen=True)
class TextConfig:
    """`length`: tokens of every text, padded. `features`: width of what is given. `end`: the token whose features are
    taken, by `pooling` "end" at the first place where it stands; "highest" at the first place of the largest token
    number (CLIP's own rule, whose end token has the largest), "last" at the last place."""

    vocabulary: int
    length: int
    width: int
    depth: int
    heads: int
    hidden: int
    features: int
    layer_norm_eps: float
    activation: Activation
    causal: bool
    pooling: TextPooling
    end: int
    head_bias: bool


class CausalSelfAttention(SelfAttention):
    """Self-attention in which a token sees itself and those before it. Float [b, n, d] -> [b, n, d]."""

    def forward(self, x: Tensor) -> Tensor:
        _, tokens, width = x.shape
        qkv = self.qkv(x).reshape(-1, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)  # each [b, h, n, e]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(-1, tokens, width))


class TextBlock(nn.Module):
    """x + MSA(LN(x)), then x + MLP(LN(x)). Float [b, n, d] -> [b, n, d]."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        width, eps = config.width, config.layer_norm_eps
        attention = CausalSelfAttention if config.causal else SelfAttention
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = attention(width, config.heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = MLP(width, config.hidden, config.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TextEncoder(nn.Module):
    """Token numbers int64 [b, length] in, features float32 [b, features] out, not normalised to length 1."""

    places: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embed = nn.Embedding(config.vocabulary, config.width)
        self.pos_embed = nn.Parameter(torch.zeros(1, config.length, config.width))
        self.blocks = nn.ModuleList(TextBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.head = nn.Linear(config.width, config.features, bias=config.head_bias)
        self.register_buffer("places", torch.arange(config.length)[None], persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token_embed(text) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(self.norm(x), text))

    def pool(self, tokens: Tensor, text: Tensor) -> Tensor:
        """[b, n, d] -> [b, d]. One row is chosen by a product with zeros and a one: an index would bring the size of
        the batch into the graph."""
        if self.config.pooling == "last":
            return tokens[:, -1]
        marks = text if self.config.pooling == "highest" else (text == self.config.end).to(torch.int64)
        place = marks.argmax(dim=-1, keepdim=True)
        chosen = (self.places == place).to(tokens.dtype)
        return (chosen[:, None] @ tokens)[:, 0]

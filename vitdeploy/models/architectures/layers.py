"""The layers that Vision Transformers are made of, each with the equation that it computes.

Axis names used in the comments: b batch, c input channels, n tokens, d width, h heads, e width per head.
In every reshape only the batch is -1, the one axis that stays dynamic: every other size is a constant of the exported
graph. Parameter names are timm's, so that its state dicts load as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation: TypeAlias = Literal["relu", "gelu", "quick_gelu", "gelu_tanh"]
FeedForward: TypeAlias = Literal["mlp", "swiglu_packed", "swiglu"]


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), the approximation that OpenAI trained CLIP with (arXiv 1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # exact: x Phi(x)
    "quick_gelu": quick_gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class PatchEmbedding(nn.Module):
    """Non-overlapping patches, each projected to the model's width: a convolution whose stride is its kernel.

    Float [b, c, height, width] -> [b, n, d], row by row. Rows and columns beyond the last whole patch are not read.
    """

    def __init__(self, in_channels: int, width: int, patch_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch_size, stride=patch_size, bias=bias)

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(image).flatten(2).transpose(1, 2)  # [b, c, H, W] -> [b, n, d]


class SelfAttention(nn.Module):
    """Multi-head self-attention: softmax(Q K^T / sqrt(e)) V, heads side by side, then one output linear.

    Source: arXiv 1706.03762, section 3.2. With `qk_norm`, LayerNorm over e of every query and key (arXiv 2302.05442,
    section 2). Float [b, n, d] -> [b, n, d].
    """

    def __init__(
        self, width: int, heads: int, *, qkv_bias: bool = True, qk_norm: bool = False, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        _, tokens, width = x.shape
        qkv = self.qkv(x).reshape(-1, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)  # each [b, h, n, e]
        mixed = F.scaled_dot_product_attention(self.q_norm(query), self.k_norm(key), value)
        return self.proj(mixed.transpose(1, 2).reshape(-1, tokens, width))


class MLP(nn.Module):
    """W2 f(W1 x), f an activation (arXiv 1706.03762, equation 2, where it is ReLU)."""

    def __init__(self, width: int, hidden: int, activation: Activation = "gelu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class PackedSwiGLU(nn.Module):
    """W2 (SiLU(G x) * U x) with G above U in one linear (arXiv 2002.05202, equation 6; DINOv2's giant).

    `hidden` counts the rows of that linear, both halves: `fc2` reads hidden / 2.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class SwiGLU(nn.Module):
    """The same function with two linears of `hidden` rows: `fc1_g` for the gate, `fc1_x` for what it gates."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(width, hidden)
        self.fc1_x = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1_g(x)) * self.fc1_x(x))


def feed_forward(kind: FeedForward, width: int, hidden: int, activation: Activation) -> nn.Module:
    """The second half of a block, float [b, n, d] -> [b, n, d]; a SwiGLU has its own activation."""
    if kind == "mlp":
        return MLP(width, hidden, activation)
    return PackedSwiGLU(width, hidden) if kind == "swiglu_packed" else SwiGLU(width, hidden)


class LayerScale(nn.Module):
    """diag(gamma) x: each channel of a residual branch has its own learned factor (arXiv 2103.17239, section 2)."""

    def __init__(self, width: int, initial: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class AttentionPool(nn.Module):
    """One learned query that attends over all tokens, then a residual MLP: SigLIP's pooling.

        y = W_o MHA(latent, x, x),    pooled = y + MLP(LN(y))

    Source: the MAP head of arXiv 2106.04560, after pooling by multi-head attention in arXiv 1810.00825, section 3.2.
    Float [b, n, d] -> [b, d].
    """

    def __init__(self, width: int, heads: int, hidden: int, *, activation: Activation, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.mlp = MLP(width, hidden, activation)

    def forward(self, x: Tensor) -> Tensor:
        _, tokens, width = x.shape
        # The query is the same for every image: it keeps a batch of 1, which the attention broadcasts.
        query = self.q(self.latent).reshape(1, 1, self.heads, width // self.heads).transpose(1, 2)
        keys_values = self.kv(x).reshape(-1, tokens, 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        key, value = keys_values.unbind(0)  # each [b, h, n, e]
        mixed = F.scaled_dot_product_attention(query, key, value)
        pooled = self.proj(mixed.transpose(1, 2).reshape(-1, width))
        return pooled + self.mlp(self.norm(pooled))

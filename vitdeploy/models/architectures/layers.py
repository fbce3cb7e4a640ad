"""Layers that architectures share, and their positions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- The layers that Vision Transformers are made of, each with the equation that it computes -------------------------
# Axis names used in the comments: b batch, c input channels, n tokens, d width, h heads, e width per head. In every
# reshape only the batch is -1, the one axis that stays dynamic: every other size is a constant of the exported graph.
# Parameter names are timm's, so that its state dicts load as they are.


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
    section 2). `causal`: a token sees itself and those before it. Float [b, n, d] -> [b, n, d].
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        eps: float = 1e-6,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        _, tokens, width = x.shape
        qkv = self.qkv(x).reshape(-1, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)  # each [b, h, n, e]
        mixed = F.scaled_dot_product_attention(self.q_norm(query), self.k_norm(key), value, is_causal=self.causal)
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


class _PackedSwiGLU(nn.Module):
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


class _SwiGLU(nn.Module):
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
    return _PackedSwiGLU(width, hidden) if kind == "swiglu_packed" else _SwiGLU(width, hidden)


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


# --- Position tables: what a fresh one holds, and how one is resized to another grid of patches -----------------------
# A table is float32 [1, prefix + rows * columns, width]: one row for each prefix token (class token, registers) that
# has a position, then one for each patch, row by row.


Grid = tuple[int, int]  # (rows, columns) of patches
Resampling: TypeAlias = Literal["antialias", "plain", "align_corners", "offset"]
# Whose method each is: what a note says of a model at another size.
RESAMPLING: dict[str, str] = {
    "antialias": "bicubic with antialiasing, as timm does (the code of DINO, DeiT and MAE does not)",
    "plain": "bicubic without antialiasing, as transformers and MAE do",
    "align_corners": "bicubic with aligned corners, as torchvision does",
    "offset": "bicubic at a scale that is 0.1 patches too large, as the code of DINO and DINOv2 does",
}
# What DINO and DINOv2 add to the number of patches, so that rounding never gives one patch too few.
OFFSET = 0.1


def sinusoidal(tokens: int, width: int) -> Tensor:
    """The fixed 1-D table of the Transformer, float32 [1, tokens, width]; positions count every token from 0.

        PE(t, 2i) = sin(t / 10000^(2i / width)),   PE(t, 2i + 1) = cos(t / 10000^(2i / width))

    Source: arXiv 1706.03762, section 3.5.

    Raises:
        ValueError: an odd width.
    """
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width, not {width}")
    angles = _angles(torch.arange(tokens, dtype=torch.float64), width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[None].float()


def sincos_2d(grid: Grid, width: int, prefix: int = 0) -> Tensor:
    """The fixed 2-D table of MAE, float32 [1, prefix + rows * columns, width].

    With x the column and y the row of a patch and w_i = 10000^(-4i / width) for i < width / 4, its row is
    [sin(x w), cos(x w), sin(y w), cos(y w)]. Rows of prefix tokens are 0.

    Source: arXiv 2111.06377, appendix A.1, in the form of its released code. arXiv 2205.01580 has the same with
    exponents spread over i / (width / 4 - 1); such a table is loaded as values.

    Raises:
        ValueError: a width that 4 does not divide.
    """
    if width % 4:
        raise ValueError(f"2-D sin-cos positions need a width that 4 divides, not {width}")
    rows, columns = grid
    y, x = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64), torch.arange(columns, dtype=torch.float64), indexing="ij"
    )
    axes = [_angles(axis.flatten(), width // 2) for axis in (x, y)]
    table = torch.cat([part for angles in axes for part in (angles.sin(), angles.cos())], dim=1)
    return torch.cat([torch.zeros(prefix, width, dtype=torch.float64), table])[None].float()


def _angles(positions: Tensor, width: int) -> Tensor:
    """positions [t] times the width / 2 frequencies 10000^(-2i / width): float64 [t, width / 2]."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    return positions[:, None] * frequencies


def resize_positions(table: Tensor, old: Grid, new: Grid, prefix: int, method: Resampling = "antialias") -> Tensor:
    """The table for another grid: bicubic, in float32, rows of prefix tokens unchanged.

    Each library has its own method, so that a model at another size is the one that its library runs: timm antialiases
    (`resample_abs_pos_embed`); transformers does not (`interpolate_pos_encoding`, "plain"; of its ViTs only DINOv2 with
    registers antialiases); torchvision lays the outermost patches of both grids on each other
    (`interpolate_embeddings`, "align_corners"). The code of DINO and of DINOv2 without registers samples at the scale
    (new + 0.1) / old (`interpolate_pos_encoding`, "offset").

    Args:
        table: [1, prefix + old rows * old columns, width], returned as it is when the grid stays the same.
    """
    if old == new:
        return table
    width = table.shape[-1]
    image = table[:, prefix:].float().reshape(1, *old, width).permute(0, 3, 1, 2)
    if method == "offset":
        scale = ((new[0] + OFFSET) / old[0], (new[1] + OFFSET) / old[1])
        resized = F.interpolate(image, scale_factor=scale, mode="bicubic")
    else:
        resized = F.interpolate(
            image, size=new, mode="bicubic", align_corners=method == "align_corners", antialias=method == "antialias"
        )
    patches = resized.permute(0, 2, 3, 1).reshape(1, new[0] * new[1], width).to(table.dtype)
    return torch.cat([table[:, :prefix], patches], dim=1)

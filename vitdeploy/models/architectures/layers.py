"""Layers shared by architectures, and position tables."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- The layers of Vision Transformers, each with its equation --------------------------------------------------------
# Axis names in comments: b batch, c input channels, n tokens, d width, h heads, e width per head. In every reshape only
# the batch, the one dynamic axis, is -1: every other size is a constant of the exported graph. Parameter names are
# timm's, so that its state dicts load unchanged.


Activation: TypeAlias = Literal["relu", "gelu", "quick_gelu", "gelu_tanh"]
FeedForward: TypeAlias = Literal["mlp", "swiglu_packed", "swiglu"]


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), the approximation used to train OpenAI's CLIP (arXiv 1606.08415, section 2)."""
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
    """Multi-head self-attention: softmax(Q K^T / sqrt(e)) V, heads concatenated, then one output linear layer.

    Source: arXiv 1706.03762, section 3.2. `qk_norm`: LayerNorm over e of every query and key (arXiv 2302.05442, section
    2). `causal`: a token attends to itself and earlier ones. Float [b, n, d] -> [b, n, d].
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
    """W2 f(W1 x), with an activation f (arXiv 1706.03762, equation 2, which uses ReLU)."""

    def __init__(self, width: int, hidden: int, activation: Activation = "gelu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class _PackedSwiGLU(nn.Module):
    """W2 (SiLU(G x) * U x) with G stacked on U in one linear layer (arXiv 2002.05202, equation 6; DINOv2's giant).

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
    """The same function with two linear layers of `hidden` rows: `fc1_g` for the gate, `fc1_x` for the gated values."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(width, hidden)
        self.fc1_x = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1_g(x)) * self.fc1_x(x))


def feed_forward(kind: FeedForward, width: int, hidden: int, activation: Activation) -> nn.Module:
    """Build the feed-forward part of a block, float [b, n, d] -> [b, n, d]; a SwiGLU has its own activation."""
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
    """SigLIP's pooling: one learned query attends over all tokens, then a residual MLP.

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
        # The query is the same for every image, so it has a batch of 1, which the attention broadcasts.
        query = self.q(self.latent).reshape(1, 1, self.heads, width // self.heads).transpose(1, 2)
        keys_values = self.kv(x).reshape(-1, tokens, 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        key, value = keys_values.unbind(0)  # each [b, h, n, e]
        mixed = F.scaled_dot_product_attention(query, key, value)
        pooled = self.proj(mixed.transpose(1, 2).reshape(-1, width))
        return pooled + self.mlp(self.norm(pooled))


# --- Position tables: initial values, and resizing to another grid of patches -----------------------------------------
# A table is float32 [1, prefix + rows * columns, width]: one row for each prefix token (class token, registers) that
# has a position, then one for each patch, row by row.


Grid = tuple[int, int]  # (rows, columns) of patches
Resampling: TypeAlias = Literal["antialias", "plain", "align_corners", "offset"]
# Descriptions of the resampling methods, for notes.
RESAMPLING: dict[str, str] = {
    "antialias": "bicubic with antialiasing, as in timm (not in the code of DINO, DeiT and MAE)",
    "plain": "bicubic without antialiasing, as in transformers and MAE",
    "align_corners": "bicubic with aligned corners, as in torchvision",
    "offset": "bicubic at a scale that is 0.1 patches too large, as in the code of DINO and DINOv2",
}
# DINO and DINOv2 add this to the number of patches, so that rounding never loses a patch.
OFFSET = 0.1


def sinusoidal(tokens: int, width: int) -> Tensor:
    """Return the fixed 1-D table of the Transformer, float32 [1, tokens, width], with positions from 0.

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
    """Return the fixed 2-D table of MAE, float32 [1, prefix + rows * columns, width].

    With x the column and y the row of a patch and w_i = 10000^(-4i / width) for i < width / 4, its row is
    [sin(x w), cos(x w), sin(y w), cos(y w)]. Rows of prefix tokens are 0.

    Source: arXiv 2111.06377, appendix A.1, in the form of its released code. arXiv 2205.01580 spreads the exponents
    over i / (width / 4 - 1) instead; such a table is loaded as values.

    Raises:
        ValueError: the width is not divisible by 4.
    """
    if width % 4:
        raise ValueError(f"2-D sin-cos positions need a width divisible by 4, not {width}")
    rows, columns = grid
    y, x = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64), torch.arange(columns, dtype=torch.float64), indexing="ij"
    )
    axes = [_angles(axis.flatten(), width // 2) for axis in (x, y)]
    table = torch.cat([part for angles in axes for part in (angles.sin(), angles.cos())], dim=1)
    return torch.cat([torch.zeros(prefix, width, dtype=torch.float64), table])[None].float()


def _angles(positions: Tensor, width: int) -> Tensor:
    """Return positions [t] times the width / 2 frequencies 10000^(-2i / width): float64 [t, width / 2]."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    return positions[:, None] * frequencies


def resize_positions(table: Tensor, old: Grid, new: Grid, prefix: int, method: Resampling = "antialias") -> Tensor:
    """Resize the table to another grid: bicubic, in float32, rows of prefix tokens unchanged.

    The methods are those of the libraries, so that a model at another size equals the library's: timm antialiases
    (`resample_abs_pos_embed`); transformers does not (`interpolate_pos_encoding`, "plain"), except for DINOv2 with
    registers; torchvision aligns the outermost patches of both grids (`interpolate_embeddings`, "align_corners"). The
    code of DINO and of DINOv2 without registers samples at the scale (new + 0.1) / old (`interpolate_pos_encoding`,
    "offset").

    Args:
        table: [1, prefix + old rows * old columns, width], returned unchanged for the same grid.
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

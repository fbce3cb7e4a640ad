"""Position tables: what a fresh one holds, and how one is resized to another grid of patches.

A table is float32 [1, prefix + rows * columns, width]: one row for each prefix token (class token, registers) that has
a position, then one for each patch, row by row.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

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

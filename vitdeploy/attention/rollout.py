"""Attention rollout and maps: rows over tokens become maps over the patch grid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def rollout(blocks: Sequence[Floats], *, pooled: bool = False) -> Floats:
    """How much of each token of the input is in each token of the output, if attention alone mixed them.

    Abnar & Zuidema, "Quantifying Attention Flow in Transformers", arXiv 2005.00928, section 3: a block's matrix is the
    mean over its heads, A = 0.5 W + 0.5 I for its residual connection, rows made to sum to 1; the blocks' matrices are
    multiplied, the last one leftmost.

    Args:
        blocks: the mean over the heads, [tokens, tokens] each; the last one may have the first rows only,
            [queries, tokens].
        pooled: the last one is attention pooling, whose query is a parameter: it has no residual connection.

    Returns: [queries of the last block, tokens]; rows sum to 1.
    """
    flow: Floats = np.eye(blocks[0].shape[-1])
    for index, weights in enumerate(blocks):
        last = index == len(blocks) - 1
        mixed = weights if last and pooled else 0.5 * weights + 0.5 * np.eye(*weights.shape)
        flow = mixed / mixed.sum(axis=-1, keepdims=True) @ flow
    return flow


def read_by(weights: Floats, rows: Sequence[int]) -> Floats:
    """The mean of some rows: [..., queries, tokens] -> [..., tokens]."""
    return np.asarray(weights[..., list(rows), :].mean(axis=-2))


def to_grid(weights: Floats, grid: tuple[int, int]) -> Floats:
    """[..., prefix + patches] -> [..., rows, columns]: the tokens before the patches are left out, nothing is rescaled,
    so that a map's sum is the share that goes to patches."""
    patches = grid[0] * grid[1]
    return np.asarray(weights[..., weights.shape[-1] - patches :].reshape(*weights.shape[:-1], *grid))

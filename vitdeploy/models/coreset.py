"""Choose few points that lie near all others: greedy k-centre selection.

Source: PatchCore (arXiv 2106.08265), section 3.2 and algorithm 1, after Sener & Savarese (arXiv 1708.00489): the next
point is the one that is farthest from those chosen, by distances in a random projection.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Dimensions of the projection, as in the paper's code.
PROJECTED = 128
# Points nearer to a chosen one than this share of their mean squared length are taken for the same.
SAME = 1e-6


def k_centres(
    points: Tensor, count: int, seed: int, progress: Callable[[int], None] = lambda chosen: None
) -> npt.NDArray[np.int64]:
    """The indices of at most `count` of the points, float32 [n, d], in the order in which they were chosen; fewer
    where the others are copies of these. `progress` is told after every one."""
    generator = np.random.RandomState(seed)
    if points.shape[1] > PROJECTED:
        matrix = generator.standard_normal((points.shape[1], PROJECTED)) / np.sqrt(PROJECTED)
        points = points @ torch.from_numpy(matrix.astype(np.float32))
    lengths = points.square().sum(1)
    least = SAME * float(lengths.mean())
    chosen = [int(generator.randint(len(points)))]
    distances = torch.full((len(points),), torch.inf)
    while True:
        last = chosen[-1]
        found = torch.addmv(lengths + lengths[last], points, points[last], alpha=-2)
        torch.minimum(distances, found, out=distances)
        distances[last] = 0.0
        progress(1)
        farthest = int(distances.argmax())
        if len(chosen) >= count or float(distances[farthest]) <= least:
            return np.array(chosen, np.int64)
        chosen.append(farthest)


def nearest_entries(entries: Tensor, count: int, rows: int = 1024) -> npt.NDArray[np.int64]:
    """int64 [n, min(count, n)]: of each entry, float32 [n, d], itself and those nearest to it."""
    found = []
    for start in range(0, len(entries), rows):
        part = torch.arange(start, min(start + rows, len(entries)))
        distances = torch.cdist(entries[part], entries)
        distances[torch.arange(len(part)), part] = -1.0
        found.append(distances.topk(min(count, len(entries)), largest=False, sorted=True).indices)
    return np.asarray(torch.cat(found).numpy(), np.int64)

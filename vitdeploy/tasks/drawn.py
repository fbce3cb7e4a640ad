"""A few numbers of large outputs: of a thousand images all of them would not fit into memory."""

from __future__ import annotations

import numpy as np

SEED = 0


def drawn(output: np.ndarray, count: int) -> np.ndarray:
    """`count` elements in a seeded choice that depends on the size alone, so that it is the same of every image and
    artifact; the output as it is where it has no more."""
    if output.size <= count:
        return output
    chosen = np.random.RandomState(SEED).choice(output.size, count, replace=False)
    return np.asarray(output.reshape(-1)[np.sort(chosen)])

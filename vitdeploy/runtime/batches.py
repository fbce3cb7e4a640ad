"""Runs more images than an engine takes at once, or fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from vitdeploy.runtime.runner import Array


def run_batches(
    chunks: Iterable[Array], batch: int | None, infer: Callable[[Array], Mapping[str, Array]]
) -> dict[str, Array]:
    """Every output, [n, ...], for all rows of the chunks, of which there is at least one.

    A chunk is [at most `batch`, ...]; a shorter one is padded with its last row, and the padding's outputs are dropped.
    `batch` None means an engine that takes any number.
    """
    runs = []
    for chunk in chunks:
        count = len(chunk)
        missing = 0 if batch is None else batch - count
        found = infer(np.concatenate([chunk, np.repeat(chunk[-1:], missing, axis=0)]) if missing else chunk)
        runs.append({name: output[:count] for name, output in found.items()})
    return runs[0] if len(runs) == 1 else {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}

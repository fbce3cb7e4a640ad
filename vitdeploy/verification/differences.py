"""How far raw outputs are apart, image by image: the largest of all images is the largest of any pieces of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitdeploy.verification.collect import Answers
from vitdeploy.verification.records import Table


def differences(ours: Answers, reference: Answers, names: Sequence[str]) -> Table:
    """Of each image max|a - b| (`apart`) and max|b| (`largest`) of the named outputs, b the reference's: float64
    [images, names] each."""
    apart, largest = (np.zeros((len(reference), len(names))) for _ in range(2))
    for k, name in enumerate(names):
        for i, (a, b) in enumerate(zip(ours.columns[name], reference.columns[name], strict=True)):
            wide = b.astype(np.float64)
            apart[i, k], largest[i, k] = np.abs(a.astype(np.float64) - wide).max(), np.abs(wide).max()
    return Table.each(apart=apart, largest=largest)


def worst_of(table: Table) -> float:
    """max|a - b| / max|b| over all images, of the output where it is largest; 0.0 without any output."""
    apart, largest = table["apart"].max(axis=0), table["largest"].max(axis=0)
    return float((apart / np.maximum(largest, 1e-300)).max(initial=0.0))

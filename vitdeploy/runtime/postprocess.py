"""Functions shared by several tasks: probabilities, rankings, labels, and the similarity of two arrays."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Up to this many scores, a full sort is faster than a partition.
SORTED_SCORES = 250


def softmax(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Return the probabilities over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def sigmoid(logits: Array) -> Array:
    """Return 1 / (1 + exp(-x)) in the dtype of the logits, without overflow."""
    small = np.exp(-np.abs(logits))
    return np.asarray(np.where(logits >= 0, 1, small) / (1 + small))


def shortened(text: str, count: int = 3) -> str:
    """Return the first lines of a text as one line."""
    lines = text.split("\n")
    rest = [f"and {len(lines) - count} more"] if len(lines) > count else []
    return ", ".join([*lines[:count], *rest])


def label_of(index: int, labels: Sequence[str] | None) -> str:
    """Return the label of a class, or its number without labels."""
    return labels[index] if labels and 0 <= index < len(labels) else str(index)


def best_classes(logits: npt.NDArray[np.floating[Any]], count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the `count` highest logits [classes], best first; ties: lower index first."""
    if 0 < count < logits.size and logits.size > SORTED_SCORES:
        candidates = (logits >= np.partition(logits, -count)[-count]).nonzero()[0]
        if candidates.size >= count:  # fewer only with NaN
            return np.asarray(candidates[np.argsort(-logits[candidates], kind="stable")[:count]])
    return np.argsort(-logits, kind="stable")[:count]


def cosine(a: Array, b: Array) -> float:
    """Return the cosine of the angle between two arrays as vectors, in float64."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-300))


def signal_to_noise(ours: Array, theirs: Array) -> float:
    """Return 10 log10(sum(b^2) / sum((a - b)^2)) in decibels, a = ours, b = theirs; inf if they are equal, -inf if
    theirs is all zero and ours is not."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    noise, signal = float(np.square(a - b).sum()), float(np.square(b).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def equal_share(ours: Array, theirs: Array) -> float:
    """Return the share of equal elements, 0..1; 1 without elements."""
    return float((ours == theirs).mean()) if theirs.size else 1.0

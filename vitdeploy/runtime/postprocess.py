"""From a classifier's outputs to what an app reads, and the functions that all answers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.task import Outputs, Reading, RuntimeTask

# Sorting so many scores is faster than finding the best ones first.
SORTED_SCORES = 250


@dataclass(frozen=True)
class ClassScore:
    """One class: its index, its label and its softmax probability."""

    index: int
    label: str
    score: float


@dataclass(frozen=True, repr=False)
class Ranked:
    """An answer that is a ranking, best first: of classes, or of texts."""

    top: tuple[ClassScore, ...]

    @property
    def label(self) -> str:
        return self.top[0].label

    @property
    def index(self) -> int:
        return self.top[0].index

    @property
    def score(self) -> float:
        return self.top[0].score

    def to_dict(self) -> dict[str, Any]:
        top = [dict(vars(each)) for each in self.top]
        return {"label": self.label, "index": self.index, "score": self.score, "top": top}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


@dataclass(frozen=True, repr=False)
class Classification(Ranked):
    """The answer for one image: the best classes, best first."""

    def __str__(self) -> str:
        return ", ".join(f"{entry.label} {100 * entry.score:.1f} %" for entry in self.top)


def softmax(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Probabilities over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def sigmoid(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """1 / (1 + exp(-x)) in the dtype of the logits, without overflow."""
    small = np.exp(-np.abs(logits))
    return np.asarray(np.where(logits >= 0, 1, small) / (1 + small))


def shortened(text: str, count: int = 3) -> str:
    """The first lines of a text as one line."""
    lines = text.split("\n")
    rest = [f"and {len(lines) - count} more"] if len(lines) > count else []
    return ", ".join([*lines[:count], *rest])


def label_of(index: int, labels: Sequence[str] | None) -> str:
    """The label of a class; its number if it has none."""
    return labels[index] if labels and 0 <= index < len(labels) else str(index)


def best_classes(logits: npt.NDArray[np.floating[Any]], count: int) -> npt.NDArray[np.intp]:
    """The indices of the `count` highest logits [classes], best first; of equal ones the lower index first."""
    if 0 < count < logits.size and logits.size > SORTED_SCORES:
        candidates = (logits >= np.partition(logits, -count)[-count]).nonzero()[0]
        if candidates.size >= count:  # fewer only where one is not a number
            return np.asarray(candidates[np.argsort(-logits[candidates], kind="stable")[:count]])
    return np.argsort(-logits, kind="stable")[:count]


def classify(logits: npt.NDArray[np.float32], labels: Sequence[str] | None, count: int = 5) -> Classification:
    """The `count` best classes of one image. logits: float32 [classes]; labels: one name per class, or None.

    The scores are those of `softmax`; only the requested ones are divided.
    """
    best = best_classes(logits, count).tolist()
    powers = logits.astype(np.float64)
    powers -= powers.max()
    np.exp(powers, out=powers)
    total = float(powers.sum())
    return Classification(tuple([ClassScore(i, label_of(i, labels), float(powers[i]) / total) for i in best]))


def _answer(outputs: Outputs, reading: Reading) -> Classification:
    return classify(outputs["logits"], reading.labels, reading.top)


def _same(ours: Outputs, theirs: Outputs, reading: Reading) -> bool:
    return bool(ours["logits"].argmax() == theirs["logits"].argmax())


CLASSIFICATION = RuntimeTask(_answer, _same)

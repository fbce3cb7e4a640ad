"""Compares an engine's logits with the original's over the same images."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.verification.comparison import Comparison, Control, counted_agreement, paired_accuracy, paired_counts

Logits = npt.NDArray[np.float32]

TOP1_ANSWERS = "images with the same top-1 answer"
# The counts that `paired_counts` returns, in its order.
PAIRED = ("both", "lost", "gained", "neither")


@dataclass(frozen=True, kw_only=True)
class Agreement(Comparison):
    """A classifier against the original. The metric is top-1; accuracy fields are None without labels.

    drop has its paired interval after Newcombe 1998, method 10; agreement its Wilson interval.
    kl: mean over images of KL(original || artifact) of the softmax outputs, in nats. cosine: of the logits, per image.
    """

    top1: float | None = None
    reference_top1: float | None = None
    top5: float | None = None
    reference_top5: float | None = None
    kl: float
    cosine_mean: float
    cosine_min: float


@dataclass(frozen=True)
class Tally:
    """Counts over n images. Sums are exact: adding the tallies of any partition of a set, in any order, gives the tally
    of the set.

    same: images with the same top-1 answer. right: how many images `both` answer correctly, only the original (`lost`),
        only the artifact (`gained`), and `neither`; and how many labels are among the top 5 of each (`top5`,
        `reference_top5`); None without labels. kl, cosine: summed over images; the least cosine.
    difference, largest: max|a - b| and max|b| of the logits, b the original's.
    answers, reference_answers, labels: images by class, of the top-1 answers and of the labels (() without).
    low, high: the least and the largest of the original's logits, by class.
    """

    n: int
    same: int
    right: Mapping[str, int] | None
    kl: Fraction
    cosine: Fraction
    cosine_min: float
    difference: float
    largest: float
    answers: tuple[int, ...]
    reference_answers: tuple[int, ...]
    labels: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __add__(self, other: Tally) -> Tally:
        right = None
        if self.right is not None and other.right is not None:
            right = {name: count + other.right[name] for name, count in self.right.items()}
        return Tally(
            self.n + other.n,
            self.same + other.same,
            right,
            self.kl + other.kl,
            self.cosine + other.cosine,
            min(self.cosine_min, other.cosine_min),
            max(self.difference, other.difference),
            max(self.largest, other.largest),
            _sums(self.answers, other.answers),
            _sums(self.reference_answers, other.reference_answers),
            _sums(self.labels, other.labels),
            tuple(map(min, self.low, other.low)),
            tuple(map(max, self.high, other.high)),
        )

    def to_dict(self) -> dict[str, object]:
        """Return lossless JSON values: exact sums as numerator and denominator."""
        sums = {"kl": list(self.kl.as_integer_ratio()), "cosine": list(self.cosine.as_integer_ratio())}
        return {**vars(self), **sums}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tally:
        """The inverse of `to_dict`."""
        rows = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        sums = {"kl": Fraction(*values["kl"]), "cosine": Fraction(*values["cosine"])}
        return cls(**{**values, **rows, **sums})

    def agreement(self) -> Agreement:
        """Return the comparison for these counts."""
        return Agreement(
            n=self.n,
            metric=None if self.right is None else "top-1",
            agreement_of=TOP1_ANSWERS,
            **counted_agreement(self.same, self.n),
            kl=float(self.kl / self.n),
            cosine_mean=float(self.cosine / self.n),
            cosine_min=self.cosine_min,
            max_difference=self.difference / max(self.largest, 1e-300),
            control=self._control(),
            **({} if self.right is None else _accuracy(self.right, self.n)),
        )

    def _control(self) -> Control | None:
        """Return the mean over all pairs of two different images."""
        pairs = self.n * (self.n - 1)
        if not pairs:
            return None
        value = None
        if self.right is not None:
            same = self.right["both"] + self.right["gained"]
            value = 100 * (_products(self.answers, self.labels) - same) / pairs
        return Control(
            100 * (_products(self.answers, self.reference_answers) - self.same) / pairs,
            value,
            max(map(operator.sub, self.high, self.low)) / max(self.largest, 1e-300),
        )


def compare(logits: Logits, reference: Logits, labels: npt.NDArray[np.int64] | None) -> Agreement:
    """Compare float32 [n, classes] with the original's for the same images; labels int64 [n] or None.

    Raises:
        ValueError: other shapes, or no image at all.
    """
    return tally(logits, reference, labels).agreement()


def tally(logits: Logits, reference: Logits, labels: npt.NDArray[np.int64] | None) -> Tally:
    """Return the counts behind `compare`; same arguments and errors."""
    if logits.shape != reference.shape or not len(logits):
        raise ValueError(f"logits {logits.shape} against {reference.shape}")
    a, b = logits.astype(np.float64), reference.astype(np.float64)
    cosine = (a * b).sum(axis=1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-300)
    return Tally(
        len(logits),
        int((logits.argmax(axis=1) == reference.argmax(axis=1)).sum()),
        None if labels is None else _right(logits, reference, labels),
        _exact_sum(kl_divergence(b, a)),
        _exact_sum(cosine),
        float(cosine.min()),
        float(np.abs(a - b).max()),
        float(np.abs(b).max()),
        _by_class(logits.argmax(axis=1), logits.shape[1]),
        _by_class(reference.argmax(axis=1), logits.shape[1]),
        () if labels is None else _by_class(labels, logits.shape[1]),
        tuple(b.min(axis=0).tolist()),
        tuple(b.max(axis=0).tolist()),
    )


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(operator.add, a, b))


def _products(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(map(operator.mul, a, b))


def _by_class(classes: npt.NDArray[np.int64], count: int) -> tuple[int, ...]:
    """Return the number of images per class."""
    return tuple(np.bincount(classes[(classes >= 0) & (classes < count)], minlength=count).tolist())


def _exact_sum(values: npt.NDArray[np.float64]) -> Fraction:
    return sum(map(Fraction, values.tolist()), Fraction())


def kl_divergence(p_logits: npt.NDArray[np.float64], q_logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """KL(p || q) = sum p (log p - log q) in nats, of the softmax over the last axis; never below zero."""
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    return np.asarray(np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=-1), 0.0))


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _right(logits: Logits, reference: Logits, labels: npt.NDArray[np.int64]) -> dict[str, int]:
    pairs = paired_counts(logits.argmax(axis=1) == labels, reference.argmax(axis=1) == labels)
    counts = dict(zip(PAIRED, pairs, strict=True))
    return {**counts, "top5": _in_top_k(logits, labels, 5), "reference_top5": _in_top_k(reference, labels, 5)}


def _accuracy(right: Mapping[str, int], n: int) -> dict[str, Any]:
    shares = paired_accuracy(*(right[name] for name in PAIRED))
    return {
        **shares,
        "top1": shares["value"],
        "reference_top1": shares["reference_value"],
        "top5": 100 * right["top5"] / n,
        "reference_top5": 100 * right["reference_top5"] / n,
    }


def _in_top_k(logits: Logits, labels: npt.NDArray[np.int64], k: int) -> int:
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return int((best == labels[:, None]).any(axis=1).sum())

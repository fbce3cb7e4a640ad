"""Compares an engine's logits with the original's over the same images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.verification.comparison import Comparison, paired_accuracy
from vitdeploy.verification.intervals import wilson

Logits = npt.NDArray[np.float32]

TOP1_ANSWERS = "images with the same top-1 answer"


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


def compare(logits: Logits, reference: Logits, labels: npt.NDArray[np.int64] | None) -> Agreement:
    """Compare float32 [n, classes] with the original's for the same images; labels int64 [n] or None.

    Raises:
        ValueError: other shapes, or no image at all.
    """
    if logits.shape != reference.shape or not len(logits):
        raise ValueError(f"logits {logits.shape} against {reference.shape}")
    n = len(logits)
    answers, originals = logits.argmax(axis=1), reference.argmax(axis=1)
    same = int((answers == originals).sum())
    a, b = logits.astype(np.float64), reference.astype(np.float64)
    cosine = (a * b).sum(axis=1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-300)
    accuracy = _accuracy(logits, reference, labels) if labels is not None else {}
    low, high = wilson(same, n)
    return Agreement(
        n=n,
        metric=None if labels is None else "top-1",
        agreement_of=TOP1_ANSWERS,
        agreement=100 * same / n,
        agreement_ci95=(100 * low, 100 * high),
        kl=float(kl_divergence(b, a).mean()),
        cosine_mean=float(cosine.mean()),
        cosine_min=float(cosine.min()),
        max_difference=float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)),
        **accuracy,
    )


def kl_divergence(p_logits: npt.NDArray[np.float64], q_logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """KL(p || q) = sum p (log p - log q) in nats, of the softmax over the last axis; never below zero."""
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    return np.asarray(np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=-1), 0.0))


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _accuracy(logits: Logits, reference: Logits, labels: npt.NDArray[np.int64]) -> dict[str, Any]:
    found = paired_accuracy(logits.argmax(axis=1) == labels, reference.argmax(axis=1) == labels)
    return {
        **found,
        "top1": found["value"],
        "reference_top1": found["reference_value"],
        "top5": 100 * _top_k(logits, labels, 5),
        "reference_top5": 100 * _top_k(reference, labels, 5),
    }


def _top_k(logits: Logits, labels: npt.NDArray[np.int64], k: int) -> float:
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return float((best == labels[:, None]).any(axis=1).mean())

"""Compares a sequence model's tokens with the original's, and both with the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import DataError
from vitdeploy.verification.bootstrap import draws, least_of_difference, least_of_share, percentile_interval
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.intervals import wilson

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SequenceComparison(Comparison):
    """The sequences of an artifact against the original's; n counts sequences. The metric is "token accuracy".

    Two sequences are compared position by position as far as the longer one reaches: a token that the other one does
    not have is a difference; positions where both hold padding are left out. agreement and token accuracy are the
    percent of positions with equal tokens, over all sequences together (100 where there is no position at all; `tokens`
    is 0 then); their intervals are of drawn sequences, as tokens of one sequence depend on each other.

    tokens: positions of the agreement. exact_agreement: percent of sequences equal to the original's, with its Wilson
    interval. exact_match, reference_exact_match: percent of sequences equal to the wanted ones.
    """

    tokens: int
    exact_agreement: float
    exact_agreement_ci95: tuple[float, float]
    exact_match: float | None = None
    reference_exact_match: float | None = None


def compare_sequences(
    artifact: Sequence[Tokens],
    reference: Sequence[Tokens],
    targets: Sequence[Tokens] | None,
    *,
    pad: int,
    max_difference: float,
    seed: int = 0,
) -> SequenceComparison:
    """Compare int64 [length] token arrays, of any lengths, or the rows of padded int64 [n, length].

    Args:
        targets: what is to be written, or None.
        pad: the token that fills up.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: other numbers of sequences, or none.
        DataError: targets of padding only.
    """
    n = len(reference)
    if not n or len(artifact) != n or (targets is not None and len(targets) != n):
        raise ValueError(f"{len(artifact)} sequences against {n}, {'no' if targets is None else len(targets)} targets")
    weights = draws(n, seed)
    counts = _counts(artifact, reference, pad)
    tokens, exact = int(counts[:, 1].sum()), _exact(counts)
    agreement = float(_share(np.ones(n), counts))
    low, high = wilson(exact, n)
    accuracy = _accuracy(artifact, reference, targets, pad, weights) if targets is not None else {}
    return SequenceComparison(
        n=n,
        metric="token accuracy" if targets is not None else None,
        agreement=agreement,
        agreement_ci95=percentile_interval(
            agreement, _share(weights, counts), least_of_share(agreement / 100, tokens), (0.0, 100.0)
        ),
        agreement_of="tokens at the same position",
        max_difference=max_difference,
        tokens=tokens,
        exact_agreement=100 * exact / n,
        exact_agreement_ci95=(100 * low, 100 * high),
        **accuracy,
    )


def token_changes(
    artifact: Sequence[Tokens], reference: Sequence[Tokens], targets: Sequence[Tokens] | None, pad: int
) -> Changes:
    """Which sequences have another token somewhere; the more of them, the worse. Right is what is wholly right."""
    counts = _counts(artifact, reference, pad)
    other = 1 - counts[:, 0] / np.maximum(counts[:, 1], 1)
    if targets is None:
        return judged(counts[:, 0] < counts[:, 1], other)
    right = [each[:, 0] == each[:, 1] for each in (_counts(side, targets, pad) for side in (artifact, reference))]
    return judged(counts[:, 0] < counts[:, 1], other, *right)


def _counts(a: Sequence[Tokens], b: Sequence[Tokens], pad: int) -> npt.NDArray[np.float64]:
    """For each pair of sequences: equal positions, and positions where at least one has a token. float64 [n, 2]."""
    rows = []
    for one, other in zip(a, b, strict=True):
        length = max(len(one), len(other))
        one, other = _filled(one, length, pad), _filled(other, length, pad)
        used = (one != pad) | (other != pad)
        rows.append((int((one == other)[used].sum()), int(used.sum())))
    return np.array(rows, np.float64)


def _filled(tokens: Tokens, length: int, pad: int) -> Tokens:
    return np.pad(np.asarray(tokens, np.int64), (0, length - len(tokens)), constant_values=pad)


def _exact(counts: npt.NDArray[np.float64]) -> int:
    return int((counts[:, 0] == counts[:, 1]).sum())


def _share(weights: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> Any:
    """Percent of positions that are equal, of weighted sequences; 100 without positions."""
    equal, used = weights @ counts[:, 0], weights @ counts[:, 1]
    return np.where(used > 0, 100 * equal / np.maximum(used, 1), 100.0)


def _accuracy(
    artifact: Sequence[Tokens],
    reference: Sequence[Tokens],
    targets: Sequence[Tokens],
    pad: int,
    weights: npt.NDArray[np.float64],
) -> dict[str, Any]:
    wanted = [np.flatnonzero(np.asarray(target) != pad) for target in targets]
    if not sum(map(len, wanted)):
        raise DataError(
            "the targets hold not one token",
            found=f"{len(targets)} sequences of padding",
            wanted=f"tokens besides {pad}",
        )
    ours, theirs = (_counts(side, targets, pad) for side in (artifact, reference))
    value, reference_value = (float(_share(np.ones(len(targets)), counts)) for counts in (ours, theirs))
    drop = reference_value - value
    right = [
        np.concatenate(
            [
                _filled(tokens, max(len(tokens), len(target)), pad)[at] == np.asarray(target)[at]
                for tokens, target, at in zip(side, targets, wanted, strict=True)
            ]
        )
        for side in (reference, artifact)
    ]
    spread = _share(weights, theirs) - _share(weights, ours)
    return {
        "value": value,
        "reference_value": reference_value,
        "drop": drop,
        "drop_ci95": percentile_interval(drop, spread, least_of_difference(*right), (-100.0, 100.0)),
        "exact_match": 100 * _exact(ours) / len(targets),
        "reference_exact_match": 100 * _exact(theirs) / len(targets),
    }

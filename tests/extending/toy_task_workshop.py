"""The same task in the workshop: class folders are the ratings that people gave, 0 and up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from toy_task import NEAR

from vitdeploy.tasks.adapter import Data, ImageAdapter, labels_of, worst_difference
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison, counted_agreement, paired_accuracy, paired_counts
from vitdeploy.verification.records import Answers


@dataclass(frozen=True, kw_only=True)
class RatingComparison(Comparison):
    """apart: how far an artifact's ratings are from the original's, in the mean."""

    apart: float


class RatingAdapter(ImageAdapter):
    compared = RatingComparison
    metrics = (Metric("near", "Near counts images rated within 0.5 of their folder.", title="Near"),)
    measures = (Measure("Apart, mean", "apart", None),)

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        a, b, labels = ratings(ours), ratings(reference), labels_of(data)
        right = None if labels is None else [abs(each - labels) <= NEAR for each in (a, b)]
        return RatingComparison(
            n=len(b),
            metric=None if right is None else "near",
            **counted_agreement(int((abs(a - b) <= NEAR).sum()), len(b)),
            agreement_of="ratings within 0.5 of the original's",
            max_difference=worst_difference(ours, reference, ["rating"]),
            apart=float(abs(a - b).mean()),
            **({} if right is None else paired_accuracy(*paired_counts(*right))),
        )

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        apart = abs(ratings(ours) - ratings(reference))
        return judged(apart > NEAR, apart)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        return Said(f"{ratings(answers)[index]:.1f}", None)


def ratings(answers: Answers) -> np.ndarray:
    return answers.stacked("rating")[:, 0].astype(np.float64)

"""Binary classification: two class folders or a column of 0 and 1; AUROC, average precision, accuracy."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.data import annotations, classes, decoding
from vitdeploy.errors import DataError
from vitdeploy.runtime.tasks.binary import BinarySpec
from vitdeploy.spec import OutputSpec
from vitdeploy.tasks import adapter, multi_label
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification import intervals, ranking
from vitdeploy.verification.comparison import (
    Comparison,
    Fields,
    counted_agreement,
    paired_accuracy,
    paired_counts,
    worst_of,
)
from vitdeploy.verification.records import Answers, ImageRows, Records

CHANCE = 50.0


@dataclass(frozen=True, kw_only=True)
class BinaryComparison(Comparison):
    """A binary classifier against the original. The metric is AUROC in percent (see `verification.ranking`).

    agreement: percent of the images with the same answer (yes or no).
    average_precision, reference_average_precision: in percent. accuracy, reference_accuracy: percent of right answers
        at the threshold, and the drop in points. called_yes, reference_called_yes: images with the answer yes.
    The interval of `accuracy_drop` is paired, as for top-1; all others are bootstraps over the images, stratified by
    label, and no narrower than that of as many independent trials as there are images.
    """

    auroc_ci95: tuple[float, float] | None = None
    reference_auroc_ci95: tuple[float, float] | None = None
    average_precision: float | None = None
    reference_average_precision: float | None = None
    average_precision_ci95: tuple[float, float] | None = None
    accuracy: float | None = None
    reference_accuracy: float | None = None
    accuracy_drop: float | None = None
    accuracy_drop_ci95: tuple[float, float] | None = None
    called_yes: int
    reference_called_yes: int


def binary_comparison(rows: ImageRows, *, max_difference: float) -> BinaryComparison:
    """Return the comparison for the rows of all images, as `multi_label.multi_label_comparison` with one label."""
    above = rows["ours_above"][:, 0], rows["theirs_above"][:, 0]
    truth = rows["truth"][:, 0] if "truth" in rows.columns else None
    scores = [rows[side][:, 0].astype(np.float64) for side in ("ours", "theirs")]
    return BinaryComparison(
        n=len(rows),
        metric=None if truth is None else "AUROC",
        **counted_agreement(int((above[0] == above[1]).sum()), len(rows)),
        agreement_of="images with the same yes or no",
        max_difference=max_difference,
        called_yes=int(above[0].sum()),
        reference_called_yes=int(above[1].sum()),
        **({} if truth is None else _measured(scores, above, truth)),
    )


def _measured(scores: Sequence[intervals.Floats], above: Sequence[ranking.Bools], truth: ranking.Bools) -> Fields:
    n = len(truth)
    weights = np.vstack([np.ones(n), ranking.stratified_draws(truth, 0)])
    areas = [ranking.auroc_of_counts(*ranking.counted(side, truth, weights)) for side in scores]
    precise = [ranking.precisions(side, truth, weights.T) for side in scores]
    right = [side == truth for side in above]
    decided = paired_accuracy(*paired_counts(*right))
    return {
        **multi_label.drop_with_interval([side[0] for side in areas], [side[1:] for side in areas], right),
        "auroc_ci95": multi_label.percent_with_interval(areas[0][0], areas[0][1:], n),
        "reference_auroc_ci95": multi_label.percent_with_interval(areas[1][0], areas[1][1:], n),
        "average_precision": 100 * float(precise[0][0]),
        "reference_average_precision": 100 * float(precise[1][0]),
        "average_precision_ci95": multi_label.percent_with_interval(precise[0][0], precise[0][1:], n),
        "accuracy": decided["value"],
        "reference_accuracy": decided["reference_value"],
        "accuracy_drop": decided["drop"],
        "accuracy_drop_ci95": decided["drop_ci95"],
    }


class BinaryAdapter(multi_label.LabelsAdapter):
    kinds = ("folders", "columns", "none")
    compared = BinaryComparison
    metrics = (
        Metric(
            "AUROC",
            "AUROC is the chance that an image with the answer yes has a higher score than one with no; 50 % is "
            "guessing.",
        ),
    )
    measures = (
        Measure("AUROC, %", "value", interval="auroc_ci95"),
        Measure("of the original, %", "reference_value", interval="reference_auroc_ci95"),
        Measure("Average precision, %", "average_precision", original=True, interval="average_precision_ci95"),
        Measure("Accuracy, %", "accuracy", original=True),
        Measure("Accuracy drop", "accuracy_drop", interval="accuracy_drop_ci95"),
        Measure("Answers yes", "called_yes", 0, original=True),
    )
    guard = 95.0
    score = "the probability of yes"
    gain = ("youden", "Youden's J")
    head: BinarySpec

    @property
    def thresholds(self) -> Sequence[float] | None:
        return None if self.head.decision_threshold is None else (self.head.decision_threshold,)

    def with_thresholds(self, thresholds: tuple[float, ...]) -> OutputSpec:
        return dataclasses.replace(self.head, decision_threshold=thresholds[0])

    @property
    def positive(self) -> tuple[str, ...]:
        """The name of the class that yes means, () if unknown."""
        return (self.head.positive,) if self.head.positive is not None else self.setting.labels[:1]

    def read(
        self, choice: adapter.DataChoice, skipped: decoding.Skipped | None
    ) -> tuple[multi_label.LabelledSet, classes.ClassMap]:
        if choice.labels == "columns" and choice.annotations is not None:
            return multi_label.read_table(choice.path, choice.annotations, self.positive, 1)
        folders = multi_label.read_folders(choice.path)
        chosen = classes.match_some(folders.classes, self.positive, "class folders")
        if len(folders.classes) != 2 or chosen is None:
            names = ", ".join(folders.classes[:5])
            known = f"yes is {self.positive[0]!r}" if self.positive else "no name for yes is set"
            raise DataError(
                "cannot tell which class folder means yes",
                found=f"{len(folders.classes)} folders ({names}); {known}",
                expected="two class folders, one of them with the name of yes",
                fix="postprocess: {positive: FOLDER} in a recipe, or that name as the model's label (source.labels)",
            )
        both = next((path for path, names in folders.names.items() if len(names) > 1), None)
        if both is not None:
            raise DataError(
                "an image is in both class folders",
                found=both.name,
                expected="each image in one folder",
                fix="remove the wrong copy",
            )
        labelled = {
            path: multi_label.ImageLabels(tuple(chosen.index[name] for name in names if name in chosen.index))
            for path, names in folders.names.items()
        }
        return annotations.AnnotatedSet(choice.path, folders.samples, labelled, (), 0), chosen

    def check(self, truth: ranking.Bools) -> list[str]:
        if truth.any() and not truth.all():
            return []
        raise DataError(
            "all evaluation images have the same label",
            found=f"{len(truth)} images, all {'yes' if truth.any() else 'no'}",
            expected="images with both labels: a ranking cannot be measured on one",
            fix="add images with the other label, or verify without labels (data.labels: none)",
        )

    def comparison(self, counts: Records) -> Comparison:
        return binary_comparison(counts["images"], max_difference=worst_of(counts["outputs"]))

    def doubt(self, reference: Answers, data: adapter.Data, found: Comparison) -> str | None:
        assert isinstance(found, BinaryComparison)
        interval = found.reference_auroc_ci95
        if interval is None or interval[1] >= CHANCE:
            return None
        return (
            f"the original's AUROC is {found.reference_value:.1f} %, and chance is {CHANCE:g} %: images labelled no "
            "have the higher scores. Check the meaning of yes (postprocess: {positive: NAME})"
        )

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        row = Answers({name: [column[index]] for name, column in answers.columns.items()})
        return Said("yes" if self.above(row)[0, 0] else "no", float(self.scores(row)[0, 0]))

    def truth_line(self, truth: multi_label.ImageLabels, labels: Sequence[str] | None) -> str:
        return "yes" if truth.labels else "no"

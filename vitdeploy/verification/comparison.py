"""Comparisons of an artifact's answers with the original's, and the likely cause of a difference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.extensions import lazy
from vitdeploy.spec import PreprocessSpec
from vitdeploy.verification import intervals, records

# Loaded at first use: benchmark processes import this module and do not need it.
optimize = lazy("scipy.optimize")

# --- The common fields of every task's comparison of an artifact with the original, for one gate and one report -------


@dataclass(frozen=True)
class Control:
    """The score of unrelated answers: the artifact's, each compared with the original's answer to another image. A
    measure under which unrelated answers score equally well cannot distinguish models.

    agreement: as `Comparison.agreement`; value: as `Comparison.value`, None without labels; difference: as
        `Comparison.max_difference`: how much outputs change from image to image.
    """

    agreement: float
    value: float | None
    difference: float


# Some of the fields of a comparison, by name.
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One artifact against the original on the same n images (or sequences). Percents are 0..100, drops are points.

    metric: the name of what `value` (the artifact's) and `reference_value` (the original's) measure against labels.
    drop: reference_value - value (negative: the artifact gains), with its paired 95 % interval. All of these are None
        without labels.
    agreement: percent of the original's answers that the artifact reproduces, regardless of labels, with its 95 %
        interval; `agreement_of` names what is counted.
    max_difference: max|a - b| / max|b| over the raw outputs, b the original's.
    control: None for a single image.
    """

    n: int
    metric: str | None
    value: float | None = None
    reference_value: float | None = None
    drop: float | None = None
    drop_ci95: tuple[float, float] | None = None
    agreement: float
    agreement_ci95: tuple[float, float]
    agreement_of: str
    max_difference: float
    control: Control | None = None

    @property
    def by_head(self) -> Mapping[str, "Comparison"]:
        """The comparison of each head of a multi-head model; {} for other models."""
        return {}

    @property
    def proves_nothing(self) -> str:
        """Why the agreement proves nothing about the artifact; "" if it does.

        The agreement must be closer to 100 % than to the agreement of unrelated answers, and its interval must lie
        above the latter.
        """
        if self.control is None:
            why = "there is only one image" if self.n == 1 else "answers to other images have other shapes"
            return f"{why}, so the score of unrelated answers is unknown"
        others = self.control.agreement
        if self.agreement > least_to_prove(self.control) and self.agreement_ci95[0] > others:
            return ""
        return f"answers to other images agree to {others:.2f} %"

    def drop_proves_nothing(self, max_drop: float) -> str:
        """As `proves_nothing`, for a drop by labels of at most `max_drop` points: unrelated answers must lose more than
        that, and more than twice what the artifact loses."""
        if self.control is None:
            return self.proves_nothing
        if self.drop is None or self.drop_ci95 is None or self.reference_value is None:
            return ""
        lost = self.reference_value - (self.control.value or 0.0)
        if lost <= max(max_drop, self.drop_ci95[1], 2 * self.drop):
            return f"answers to other images would lose {lost:.2f} points"
        return self.proves_nothing if self.agreement_ci95[0] <= self.control.agreement else ""


def least_to_prove(control: Control) -> float:
    """Return the agreement in percent halfway between that of unrelated answers and 100 %."""
    return (100 + control.agreement) / 2


def counted_agreement(same: int, n: int) -> Fields:
    """Return the agreement fields of a `Comparison` for `same` equal answers of n, with Wilson's interval."""
    low, high = intervals.wilson(same, n)
    return {"agreement": 100 * same / n, "agreement_ci95": (100 * low, 100 * high)}


def resampled_agreement(agreement: float, drawn: intervals.Floats, trials: int) -> Fields:
    """Return the same fields for an agreement in percent, from the bootstrap replicates `drawn`. The interval is no
    narrower than that of `trials` independent trials."""
    least = intervals.least_of_share(agreement / 100, trials)
    return {
        "agreement": agreement,
        "agreement_ci95": intervals.percentile_interval(agreement, drawn, least, (0.0, 100.0)),
    }


def resampled_accuracy(
    values: Sequence[float], drawn: intervals.Floats, right: Sequence[npt.NDArray[np.bool_]], drop: float | None = None
) -> Fields:
    """Return the accuracy fields of a `Comparison` from the bootstrap replicates `drawn` of the drop.

    Args:
        values: the artifact's and the original's. drop: None for their difference.
        right: for both sides, which answers are right; the interval is no narrower than that of these paired answers.
    """
    lost = values[1] - values[0] if drop is None else drop
    interval = intervals.percentile_interval(
        lost, drawn, intervals.least_of_difference(right[1], right[0]), (-100.0, 100.0)
    )
    return {"value": values[0], "reference_value": values[1], "drop": lost, "drop_ci95": interval}


def paired_counts(ours: npt.NDArray[np.bool_], theirs: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Return how many answers are right on both sides, only for the original, only for the artifact, and on neither,
    from which are right: bool [n] each."""
    both, lost, gained = (int(each.sum()) for each in (ours & theirs, theirs & ~ours, ours & ~theirs))
    return both, lost, gained, len(ours) - both - lost - gained


def paired_accuracy(both: int, lost: int, gained: int, neither: int) -> Fields:
    """Return the accuracy fields of a `Comparison` from `paired_counts`."""
    # The difference is original minus artifact, so that a loss is positive.
    low, high = intervals.paired_difference(both, lost, gained, neither)
    n = both + lost + gained + neither
    return {
        "value": 100 * (both + gained) / n,
        "reference_value": 100 * (both + lost) / n,
        "drop": 100 * (lost - gained) / n,
        "drop_ci95": (100 * low, 100 * high),
    }


# --- How far raw outputs are apart, image by image --------------------------------------------------------------------
# the maximum over all images is the maximum over any pieces of them.


def differences(ours: records.Answers, reference: records.Answers, names: Sequence[str]) -> records.ImageRows:
    """Return max|a - b| (`apart`) and max|b| (`largest`) per image and named output, b the reference's: float64
    [images, names] each."""
    apart, largest = (np.zeros((len(reference), len(names))) for _ in range(2))
    for k, name in enumerate(names):
        for i, (a, b) in enumerate(zip(ours.columns[name], reference.columns[name], strict=True)):
            wide = b.astype(np.float64)
            apart[i, k], largest[i, k] = np.abs(a.astype(np.float64) - wide).max(), np.abs(wide).max()
    return records.ImageRows.each(apart=apart, largest=largest)


def worst_of(table: records.ImageRows) -> float:
    """Return max|a - b| / max|b| over all images, for the worst output; 0.0 without outputs."""
    apart, largest = table["apart"].max(axis=0), table["largest"].max(axis=0)
    return float((apart / np.maximum(largest, 1e-300)).max(initial=0.0))


# --- Detects a reference accuracy too low for a trained model, which means that the labels do not fit -----------------
# A wrong class order changes no comparison of an engine with the original, but makes both wrong. It shows only in the
# original's own accuracy.


Indices = npt.NDArray[np.int64]

# Multiples of chance. With few classes a good model may not reach that, so the limit is at most one half, and slightly
# above chance for two classes.
CHANCES, HALF, NEARLY = 3.0, 0.5, 1.2
# Points below the accuracy that the model's own files claim for other images of the same task.
BELOW_CLAIM = 20.0
# Percent of mAP, PQ or token accuracy below which the model effectively found nothing.
FLOOR = 1.0
# Assigning classes to each other takes memory quadratic and time cubic in their number.
MOST_CLASSES = 2000
# Conditions for naming another class order: the lower end of its accuracy interval, and its ratio to the upper end for
# the present order.
ORDERED, TIMES = 0.5, 2.0


@dataclass(frozen=True)
class ClaimedAccuracy:
    """The accuracy in percent that a checkpoint's own files claim, and the file that claims it."""

    percent: float
    file: str


def least_accuracy(classes: int) -> float:
    """Return the share of right answers, 0..1, that every trained classifier exceeds."""
    return 0.0 if classes < 2 else min(CHANCES / classes, max(HALF, NEARLY / classes))


def doubt_accuracy(answers: Indices, labels: Indices, classes: int, claim: ClaimedAccuracy | None) -> str | None:
    """Return evidence against the labels from a classifier's own top-1 answers, int64 [n] each, or None.

    An interval decides, so a few images prove nothing.
    """
    n, right = len(answers), int((answers == labels).sum())
    share, high, least = right / n, intervals.wilson(right, n)[1], least_accuracy(classes)
    text = f"the original's top-1 is {100 * share:.2f} % of {n:,} images"
    if share < least and high < max(HALF, least):
        text += f", and chance is {100 / classes:.3g} %"
    elif claim is not None and 100 * high < claim.percent - BELOW_CLAIM:
        text += f", and {claim.file} says {claim.percent:.4g} %"
    else:
        return None
    ordered = accuracy_in_best_order(answers, labels, classes)
    low = intervals.wilson(round(ordered * n), n)[0]
    if low > max(ORDERED, TIMES * high):
        return (
            f"{text}: the class order may be wrong. In another order, fitted on one half of the images, it is "
            f"{100 * ordered:.0f} % on the other half (at least {math.floor(100 * low)} %)"
        )
    return f"{text}: check the class order, and whether the preprocessing matches the training"


def accuracy_in_best_order(answers: Indices, labels: Indices, classes: int) -> float:
    """Return the share of right answers, 0..1, under the class order that fits the answers best.

    The order is fitted on one half of the images and evaluated on the other, and vice versa: on the same images some
    order always fits. 0 if there are too many classes to search.
    """
    if classes > MOST_CLASSES:
        return 0.0
    halves = np.random.RandomState(0).permutation(len(answers)) % 2
    right = 0
    for half in (0, 1):
        seen = halves != half
        table = np.zeros((classes, classes), np.int64)
        np.add.at(table, (labels[seen], answers[seen]), 1)
        rows, columns = optimize.linear_sum_assignment(table, maximize=True)
        called = np.full(classes, -1)
        # Pairs without images exist only because every class needs a partner.
        called[columns] = np.where(table[rows, columns] > 0, rows, -1)
        right += int((called[answers[~seen]] == labels[~seen]).sum())
    return right / len(answers)


def doubt_value(metric: str | None, value: float | None) -> str | None:
    """Return the same for a metric that is near zero if the labels belong to other classes, boxes or tokens."""
    if metric is None or value is None or value >= FLOOR:
        return None
    return (
        f"the original's {metric} is {value:.2f} %: check that the labels belong to the inputs and use the model's "
        "classes"
    )


# --- Where a difference comes from: the proven cause, or "unknown" ----------------------------------------------------
# A cause is named if the two agree without it and differ with it. Both are first fed the same tensor, then the same
# image, each through its own preprocessing.


FLOAT_TOLERANCE = 1e-3
# The lowest percent of equal answers that rounding alone is known to cause; below, something else may be wrong as well.
ROUNDING = 90.0
FIELDS = ("resize", "crop", "fit", "crop_rounding", "fill", "interpolation", "mean", "std", "channel_order")
BISECT = "run verify --bisect against the float graph it was made from to locate the cause"


def diagnose(
    tensor: Comparison | None,
    image: Comparison,
    ours: PreprocessSpec | None,
    theirs: PreprocessSpec | None,
    precision: str,
) -> str:
    """Return a sentence on the cause of a difference.

    Args:
        tensor: the comparison with both models fed the artifact's preprocessed tensor; None if the original does not
            accept it.
        image: the comparison with each model fed the image through its own preprocessing.
        ours, theirs: preprocessing of the artifact and of the original; None if the input is not an image.
    """
    if ours == theirs:
        return _of_graph(image, precision)
    named = f"preprocessing differs: {_fields(ours, theirs)}"
    if tensor is None:
        return (
            f"unknown: {named}; on the same image {_percent(image)} agree, but the original does not accept the "
            "artifact's tensor, so the cause is not confirmed"
        )
    both = f"on the same tensor {_percent(tensor)} agree, on the same image {_percent(image)}"
    if nothing := _proves_nothing(tensor):
        return f"unknown: {named}; on the same tensor {nothing}"
    if not _same_function(tensor, precision):
        return f"unknown: {named}; but {both}, so preprocessing is not the only cause"
    if tensor.agreement_ci95[0] > image.agreement_ci95[1]:
        return f"{named}; {both}"
    if tensor.max_difference <= FLOAT_TOLERANCE < image.max_difference:
        return f"{named}; {both}: it changes the outputs; an effect on the answers is not shown"
    return f"{named}; {both}: no effect is shown"


def _of_graph(facts: Comparison, precision: str) -> str:
    """Return what a difference on the same tensor implies."""
    difference = f"largest difference {facts.max_difference:.1e}"
    if nothing := _proves_nothing(facts):
        return f"unknown: {difference}; {nothing}"
    if facts.max_difference <= FLOAT_TOLERANCE:
        return f"the same function: {difference}"
    if precision == "fp32":
        return f"the graph differs: {difference} on the same tensor, more than float32 rounding explains"
    if facts.agreement >= ROUNDING:
        return f"{precision} rounding (likely): {difference} of the largest output"
    return (
        f"unknown: {_percent(facts)} agree, less than {precision} rounding alone explains: another model, other "
        f"weights or a broken layer; {BISECT}"
    )


def same_outputs(facts: Comparison) -> bool:
    """Whether the outputs equal the original's within the tolerance, and change from image to image by more than
    that."""
    return facts.max_difference <= FLOAT_TOLERANCE < _changes(facts) / 2


def follows(facts: Comparison) -> bool:
    """Whether outputs differ from the original's by at most a quarter of their change from image to image, which no
    other model achieves, regardless of the answers."""
    return facts.max_difference <= _changes(facts) / 4


def _changes(facts: Comparison) -> float:
    return facts.control.difference if facts.control is not None else 0.0


def _proves_nothing(facts: Comparison) -> str:
    """Why similar results prove nothing; "" if the results differ, or if outputs or answers vary between images."""
    control = facts.control
    if same_outputs(facts):
        return ""
    if facts.max_difference <= FLOAT_TOLERANCE:
        away = "" if control is None else f": outputs for other images differ by only {control.difference:.1e}"
        return f"that proves nothing{away or ': ' + facts.proves_nothing}"
    alike = facts.agreement >= ROUNDING and facts.proves_nothing
    return f"the agreement proves nothing: {alike}" if alike else ""


def _same_function(tensor: Comparison, precision: str) -> bool:
    """Whether the two appear to be the same function except for rounding."""
    return bool(tensor.max_difference <= FLOAT_TOLERANCE or (precision != "fp32" and tensor.agreement >= ROUNDING))


def _fields(ours: PreprocessSpec | None, theirs: PreprocessSpec | None) -> str:
    return ", ".join(
        f"{name} {getattr(ours, name)} instead of {getattr(theirs, name)}"
        for name in FIELDS
        if getattr(ours, name, None) != getattr(theirs, name, None)
    )


def _percent(facts: Comparison) -> str:
    return f"{facts.agreement:.1f} %"

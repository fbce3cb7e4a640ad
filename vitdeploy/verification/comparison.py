"""Comparisons of answers: what differs, and whether it can be right."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.extensions import lazy
from vitdeploy.spec import PreprocessSpec
from vitdeploy.verification import intervals, records

# Measuring processes load this module, and need no order.
optimize = lazy("scipy.optimize")

# --- The common fields of every task's comparison of an artifact with the original, for one gate and one report -------


@dataclass(frozen=True)
class Control:
    """What answers score that have nothing to do with the image: the artifact's own, each against the original's answer
    to another image. A measure under which they score as well cannot tell one model from another.

    agreement: as `Comparison.agreement`; value: as `Comparison.value`, None without labels; difference: as
    `Comparison.max_difference`, by which outputs change from image to image.
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
    agreement: percent of the original's answers that the artifact gives too, whatever the labels say, with its 95 %
        interval; `agreement_of` says in a few words what is counted.
    max_difference: max|a - b| / max|b| over the raw outputs, b the original's.
    control: None where there is none: of one image alone.
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
        """The comparisons that this is made of, of a model with several heads."""
        return {}

    @property
    def proves_nothing(self) -> str:
        """Why the agreement says nothing of the artifact; "" where it does.

        It has to be nearer to that of the original itself, which is 100 %, than to that of unrelated answers, and its
        interval above these.
        """
        if self.control is None:
            why = "there is one image" if self.n == 1 else "answers to other images are of other shapes"
            return f"{why}, so nothing shows how unrelated answers would score"
        others = self.control.agreement
        if self.agreement > least_to_prove(self.control) and self.agreement_ci95[0] > others:
            return ""
        return f"answers to other images agree to {others:.2f} %"

    def drop_proves_nothing(self, max_drop: float) -> str:
        """The same of a drop by labels of at most `max_drop` points: answers to other images have to lose more, and
        more than twice of what the artifact loses."""
        if self.control is None:
            return self.proves_nothing
        if self.drop is None or self.drop_ci95 is None or self.reference_value is None:
            return ""
        lost = self.reference_value - (self.control.value or 0.0)
        if lost <= max(max_drop, self.drop_ci95[1], 2 * self.drop):
            return f"answers to other images would lose {lost:.2f} points"
        return self.proves_nothing if self.agreement_ci95[0] <= self.control.agreement else ""


def least_to_prove(control: Control) -> float:
    """The agreement in percent half-way between unrelated answers and the original's."""
    return (100 + control.agreement) / 2


def counted_agreement(same: int, n: int) -> Fields:
    """The agreement fields of a `Comparison`, of n answers of which so many are the same, with Wilson's interval."""
    low, high = intervals.wilson(same, n)
    return {"agreement": 100 * same / n, "agreement_ci95": (100 * low, 100 * high)}


def resampled_agreement(agreement: float, drawn: intervals.Floats, trials: int) -> Fields:
    """The same of an agreement in percent, by those that are `drawn` from the images again; its interval is no narrower
    than that of so many independent trials."""
    least = intervals.least_of_share(agreement / 100, trials)
    return {
        "agreement": agreement,
        "agreement_ci95": intervals.percentile_interval(agreement, drawn, least, (0.0, 100.0)),
    }


def resampled_accuracy(
    values: Sequence[float], drawn: intervals.Floats, right: Sequence[npt.NDArray[np.bool_]], drop: float | None = None
) -> Fields:
    """The accuracy fields of a `Comparison`, by the drops that are `drawn` from the images again.

    Args:
        values: the artifact's and the original's. drop: None for their difference.
        right: of both, whether each answer to the same questions is: no interval is narrower than that of these.
    """
    lost = values[1] - values[0] if drop is None else drop
    interval = intervals.percentile_interval(
        lost, drawn, intervals.least_of_difference(right[1], right[0]), (-100.0, 100.0)
    )
    return {"value": values[0], "reference_value": values[1], "drop": lost, "drop_ci95": interval}


def paired_counts(ours: npt.NDArray[np.bool_], theirs: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """How many are right of both, only of the original, only of the artifact, of neither: from who was right, bool [n]
    each."""
    both, lost, gained = (int(each.sum()) for each in (ours & theirs, theirs & ~ours, ours & ~theirs))
    return both, lost, gained, len(ours) - both - lost - gained


def paired_accuracy(both: int, lost: int, gained: int, neither: int) -> Fields:
    """The accuracy fields of a `Comparison`, from `paired_counts`."""
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
# the largest of all images is the largest of any pieces of them.


def differences(ours: records.Answers, reference: records.Answers, names: Sequence[str]) -> records.ImageRows:
    """Of each image max|a - b| (`apart`) and max|b| (`largest`) of the named outputs, b the reference's: float64
    [images, names] each."""
    apart, largest = (np.zeros((len(reference), len(names))) for _ in range(2))
    for k, name in enumerate(names):
        for i, (a, b) in enumerate(zip(ours.columns[name], reference.columns[name], strict=True)):
            wide = b.astype(np.float64)
            apart[i, k], largest[i, k] = np.abs(a.astype(np.float64) - wide).max(), np.abs(wide).max()
    return records.ImageRows.each(apart=apart, largest=largest)


def worst_of(table: records.ImageRows) -> float:
    """max|a - b| / max|b| over all images, of the output where it is largest; 0.0 without any output."""
    apart, largest = table["apart"].max(axis=0), table["largest"].max(axis=0)
    return float((apart / np.maximum(largest, 1e-300)).max(initial=0.0))


# --- Detects a reference accuracy too low for a trained model, which means that the labels do not fit -----------------
# A wrong class order changes no comparison of an engine with the original, but makes both wrong. It shows only in the
# original's own accuracy.


Indices = npt.NDArray[np.int64]

# Times chance; with few classes that is more than a good model may have, so never more than half, and a little more
# than chance where there are two.
CHANCES, HALF, NEARLY = 3.0, 0.5, 1.2
# So many points below what its own files claim for other images of the same task.
BELOW_CLAIM = 20.0
# Percent of mAP, PQ or token accuracy below which nothing was found.
FLOOR = 1.0
# The assignment of classes to each other takes memory by their square, and time by their cube.
MOST_CLASSES = 2000
# How often another order must be right for it to be named: by the lower end of its interval, of all images and against
# the upper end of the order at hand.
ORDERED, TIMES = 0.5, 2.0


@dataclass(frozen=True)
class ClaimedAccuracy:
    """The accuracy in percent that a checkpoint's own files claim, and the file that claims it."""

    percent: float
    file: str


def least_accuracy(classes: int) -> float:
    """The share of right answers, 0..1, that every trained classifier exceeds."""
    return 0.0 if classes < 2 else min(CHANCES / classes, max(HALF, NEARLY / classes))


def doubt_accuracy(answers: Indices, labels: Indices, classes: int, claim: ClaimedAccuracy | None) -> str | None:
    """Evidence against the labels from a classifier's own top-1 answers, int64 [n] each; None without any.

    An interval decides, so that a few images prove nothing.
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
            f"{text}: the class order may be wrong; in another one, found on one half of the images, it is "
            f"{100 * ordered:.0f} % of the other (at least {math.floor(100 * low)} %)"
        )
    return f"{text}: is the class order right, and the preprocessing that of the training?"


def accuracy_in_best_order(answers: Indices, labels: Indices, classes: int) -> float:
    """The share of right answers, 0..1, under the class order that fits the answers best.

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
        # Pairs that no image is of are there only because every class needs a partner.
        called[columns] = np.where(table[rows, columns] > 0, rows, -1)
        right += int((called[answers[~seen]] == labels[~seen]).sum())
    return right / len(answers)


def doubt_value(metric: str | None, value: float | None) -> str | None:
    """The same of a metric that is near zero where the labels speak of other classes, boxes or tokens."""
    if metric is None or value is None or value >= FLOOR:
        return None
    return f"the original's {metric} is {value:.2f} %: are these the inputs' labels, and in this model's classes?"


# --- Where a difference comes from: the proven cause, or "unknown" ----------------------------------------------------
# A cause is named if the two agree without it and differ with it. Both are first fed the same tensor, then the same
# image, each through its own preprocessing.


FLOAT_TOLERANCE = 1e-3
# The lowest percent of equal answers that rounding alone is known to cause; below, something else may be wrong as well.
ROUNDING = 90.0
FIELDS = ("resize", "crop", "fit", "crop_rounding", "fill", "interpolation", "mean", "std", "channel_order")
BISECT = "verify --bisect against the float graph that it was made of says where it enters"


def diagnose(
    tensor: Comparison | None,
    image: Comparison,
    ours: PreprocessSpec | None,
    theirs: PreprocessSpec | None,
    precision: str,
) -> str:
    """One sentence on where a difference comes from.

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
            f"unknown: {named}; on the same image {_percent(image)} agree, but the original cannot be fed the "
            "artifact's tensor, so whether that is the cause is not shown"
        )
    both = f"on the same tensor {_percent(tensor)} agree, on the same image {_percent(image)}"
    if nothing := _proves_nothing(tensor):
        return f"unknown: {named}; on the same tensor {nothing}"
    if not _same_function(tensor, precision):
        return f"unknown: {named}; but {both}, so that is not all of it"
    if tensor.agreement_ci95[0] > image.agreement_ci95[1]:
        return f"{named}; {both}"
    if tensor.max_difference <= FLOAT_TOLERANCE < image.max_difference:
        return f"{named}; {both}: it moves the outputs, and is not shown to move the answers"
    return f"{named}; {both}: it is not shown to make a difference"


def _of_graph(facts: Comparison, precision: str) -> str:
    """What a difference on the same tensor implies."""
    difference = f"largest difference {facts.max_difference:.1e}"
    if nothing := _proves_nothing(facts):
        return f"unknown: {difference}; {nothing}"
    if facts.max_difference <= FLOAT_TOLERANCE:
        return f"the same function: {difference}"
    if precision == "fp32":
        return f"the graph differs: {difference} on the same tensor, which float32 does not explain"
    if facts.agreement >= ROUNDING:
        return f"{precision} rounding, as far as is shown: {difference} of the largest output"
    return (
        f"unknown: {_percent(facts)} agree, which {precision} rounding alone does not explain; another model, other "
        f"weights or a broken layer are not told apart; {BISECT}"
    )


def same_outputs(facts: Comparison) -> bool:
    """Whether the outputs are the original's, and change from image to image by more than what they may be off by."""
    return facts.max_difference <= FLOAT_TOLERANCE < _changes(facts) / 2


def follows(facts: Comparison) -> bool:
    """Whether outputs are nearer to the original's than a quarter of what they change by from image to image, as those
    of no other model are, whatever the answers say."""
    return facts.max_difference <= _changes(facts) / 4


def _changes(facts: Comparison) -> float:
    return facts.control.difference if facts.control is not None else 0.0


def _proves_nothing(facts: Comparison) -> str:
    """Why two that are alike may be any two; "" where they are not, or where outputs or answers tell images apart."""
    control = facts.control
    if same_outputs(facts):
        return ""
    if facts.max_difference <= FLOAT_TOLERANCE:
        away = "" if control is None else f", where outputs for other images are {control.difference:.1e} apart"
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

"""Regression: numbers per image, their errors against labelled columns, and agreement with the original."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data import annotations, columns, decoding, folder
from vitdeploy.errors import DataError
from vitdeploy.paths import name_bytes
from vitdeploy.runtime.tasks.regression import NUMBERS, RegressionSpec, numbers_of
from vitdeploy.tasks.adapter import Data, DataChoice
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.tasks.counted import CountedAdapter
from vitdeploy.verification.changes import Changes, Counts, judged
from vitdeploy.verification.comparison import (
    Comparison,
    Fields,
    counted_agreement,
    differences,
    doubt_value,
    worst_of,
)
from vitdeploy.verification.intervals import Floats, least_of_difference, percentile_interval, replicates
from vitdeploy.verification.records import Answers, ImageRows, Records

# --- Compares an artifact's numbers with the original's, and both with labels -----------------------------------------


# Default tolerance, as a share of the standard deviation of the original's answers. Errors of this size in all answers
# cost 6 points of R2; answers to other images are this close in 14 % of cases.
SPREAD_SHARE = 0.25


@dataclass(frozen=True)
class NumberFacts:
    """Results for one output number over all images, in its unit; the fields are those of `RegressionComparison`.

    r2, reference_r2: in percent. All but the first five are None without labels.
    """

    name: str
    unit: str
    tolerance: float
    difference_mean: float
    difference_max: float
    mae: float | None = None
    reference_mae: float | None = None
    mae_change: float | None = None
    mae_change_ci95: tuple[float, float] | None = None
    r2: float | None = None
    reference_r2: float | None = None


@dataclass(frozen=True, kw_only=True)
class RegressionComparison(Comparison):
    """Numbers of an artifact against the original's. The metric is R2 in percent, the share of the labels' variance
    that the numbers explain: 100 (1 - sum (y - label)^2 / sum (mean label - label)^2), the mean over the numbers. It is
        below 0 if the mean label is a better prediction.

    agreement: percent of images with all numbers within tolerance of the original's, with its Wilson interval. The
        interval of drop, and of mae_change, is a bootstrap over the images; the former is no narrower than that of as
        many independent trials as there are images.
    difference_mean, difference_max: |artifact's - original's|, the mean and the largest.
    mae, reference_mae: mean |number - label|, lower is better; mae_change: the artifact's minus the original's, with
        its paired interval. None without labels. With several numbers these five are means over the numbers (in mixed
        units), or the overall maximum; `numbers` has those of each.
    """

    numbers: tuple[NumberFacts, ...]
    difference_mean: float
    difference_max: float
    mae: float | None = None
    reference_mae: float | None = None
    mae_change: float | None = None
    mae_change_ci95: tuple[float, float] | None = None


def compare_numbers(
    ours: Floats,
    theirs: Floats,
    truth: Floats | None,
    spec: RegressionSpec,
    labels: Sequence[str] = (),
    *,
    max_difference: float,
) -> RegressionComparison:
    """Compare float64 [n, k] of an artifact and of the original; `truth` float64 [n, k], or None.

    Raises:
        ValueError: other shapes, or no image.
        DataError: all labels are equal, so R2 is undefined.
    """
    if ours.shape != theirs.shape or not len(ours):
        raise ValueError(f"numbers {ours.shape} against {theirs.shape}")
    n, k = ours.shape
    names = [number.name for number in numbers_of(theirs[0], spec, labels).numbers]
    allowed, apart = tolerances(theirs, spec), np.abs(ours - theirs)
    facts: list[Fields] = [
        {"name": name, "unit": spec.unit(j), "tolerance": float(allowed[j]), **_differences(apart[:, j])}
        for j, name in enumerate(names)
    ]
    accuracy: Fields = {"metric": None}
    if truth is not None:
        accuracy, errors = _accuracy(ours, theirs, truth, allowed, names)
        facts = [{**row, **more} for row, more in zip(facts, errors, strict=True)]
    within = ", ".join(f"{allowed[j]:.3g}{' ' * bool(unit := spec.unit(j))}{unit}" for j in range(k))
    derived = "" if spec.tolerance is not None else f", {SPREAD_SHARE:g} of their standard deviation"
    return RegressionComparison(
        n=n,
        **counted_agreement(int(alike(ours, theirs, allowed).sum()), n),
        agreement_of=f"images with numbers within {within} of the original's{derived}",
        max_difference=max_difference,
        numbers=tuple(NumberFacts(**row) for row in facts),
        difference_mean=float(apart.mean()),
        difference_max=float(apart.max()),
        **accuracy,
    )


def tolerances(theirs: Floats, spec: RegressionSpec) -> Floats:
    """Return float64 [k], the tolerance of each number: from the spec, or from the spread of the original's answers [n,
    k]."""
    stated = spec.tolerances(theirs.shape[1])
    return np.asarray(SPREAD_SHARE * theirs.std(axis=0)) if stated is None else stated


def alike(ours: Floats, theirs: Floats, allowed: Floats) -> npt.NDArray[np.bool_]:
    """Return bool [n], whether all numbers of an image are within their tolerances of each other."""
    return np.asarray((np.abs(ours - theirs) <= allowed).all(axis=1))


def _differences(apart: Floats) -> Fields:
    return {"difference_mean": float(apart.mean()), "difference_max": float(apart.max())}


def _accuracy(
    ours: Floats, theirs: Floats, truth: Floats, allowed: Floats, names: Sequence[str]
) -> tuple[Fields, list[Fields]]:
    """Return the fields of all numbers together, and those of each."""
    n, k = truth.shape
    centred = truth - truth.mean(axis=0)
    constant = [name for name, column in zip(names, centred.T, strict=True) if not np.ptp(column)]
    if constant:
        raise DataError(
            "the labels of the evaluation images do not vary, so R2 is undefined",
            found=f"{', '.join(constant)}: one value for {n} images",
            expected="images with different labels",
            fix="use more images, or no labels (data.labels: none)",
        )
    sides = [np.square(side - truth) for side in (ours, theirs)]
    farther = np.abs(ours - truth) - np.abs(theirs - truth)
    squares = np.square(centred)

    def measure(weights: Floats) -> Floats:
        """Return [draws, 1 + k]: the drop of R2 in points, and the increase of each number's mean error."""
        spread = weights @ squares - np.square(weights @ centred) / n
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = 100 * (weights @ (sides[0] - sides[1]) / spread).mean(axis=1, keepdims=True)
        return np.concatenate([np.where(spread.min(axis=1, keepdims=True) > 0, lost, np.nan), weights @ farther / n], 1)

    drawn = replicates(n, 0, measure)
    shares = [100 * (1 - side.sum(axis=0) / squares.sum(axis=0)) for side in sides]
    values = [float(share.mean()) for share in shares]
    right = [alike(side, truth, allowed) for side in (ours, theirs)]
    drop, least = values[1] - values[0], least_of_difference(right[1], right[0])
    errors = [np.abs(side - truth).mean(axis=0) for side in (ours, theirs)]
    rows = [
        {
            **_mae(errors[0][j], errors[1][j], drawn[:, 1 + j]),
            "r2": float(shares[0][j]),
            "reference_r2": float(shares[1][j]),
        }
        for j in range(k)
    ]
    fields = {
        "metric": "R2",
        "value": values[0],
        "reference_value": values[1],
        "drop": drop,
        "drop_ci95": percentile_interval(drop, drawn[:, 0], least, (-np.inf, np.inf)),
        **_mae(errors[0].mean(), errors[1].mean(), drawn[:, 1:].mean(axis=1)),
    }
    return fields, rows


def _mae(ours: float, theirs: float, drawn: Floats) -> Fields:
    low, high = np.percentile(drawn, [2.5, 97.5])
    change = {"mae_change": float(ours - theirs), "mae_change_ci95": (float(low), float(high))}
    return {"mae": float(ours), "reference_mae": float(theirs), **change}


# --- Labels: the numeric columns of a table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledNumbers:
    """The numbers of one image, in the model's order."""

    values: tuple[float, ...]

    def content(self) -> bytes:
        return name_bytes(repr(self.values))


NumberSet = annotations.AnnotatedSet[LabelledNumbers]


def read_numbers(images: Path, file: Path, names: Sequence[str], count: int) -> NumberSet:
    """Return the images below `images` with their numbers from a table; images with an empty cell are skipped.

    The columns are those with the `names` of the model's `count` numbers; for one number also the only numeric column.

    Raises:
        DataError: as `columns.read_columns`; columns that are not the model's; a cell that is not a finite number.
    """
    rows = columns.read_columns(images, file)
    chosen, notes = _columns(file, rows, names, count)
    known: dict[Path, LabelledNumbers] = {}
    for path, row in rows.annotations.items():
        values = [row.number(column) for column in chosen]
        if None not in values:
            known[path] = LabelledNumbers(tuple(value for value in values if value is not None))
    if not known:
        raise annotations.nothing_annotated(images, file, f"only empty cells in {', '.join(chosen)}")
    if empty := len(rows.annotations) - len(known):
        notes = (*notes, f"{empty} images have an empty cell in {', '.join(chosen)} and are ignored")
    samples = tuple(sample for sample in rows.samples if sample.path in known)
    return annotations.AnnotatedSet(images, samples, known, (), rows.unannotated + empty, (*rows.notes, *notes))


def _columns(
    file: Path, rows: columns.RowSet, names: Sequence[str], count: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the column of each number, and notes on assumptions."""
    cells = [row.cells for row in rows.annotations.values()]
    there = list(cells[0])
    if names and set(names) <= set(there):
        return tuple(names), ()
    numeric = [name for name in there if _is_numeric([row[name] for row in cells])]
    if count == 1 and len(numeric) == 1:
        notes = (f"labels: column {numeric[0]!r} is used for {name!r}: it is the only numeric column" for name in names)
        return tuple(numeric), tuple(notes)
    if count == len(there) == 1:  # a text column: the error names its first cell
        return tuple(there), ()
    of_each = f"columns {', '.join(names)}" if names else "one named column per number"
    raise DataError(
        f"the columns of {file} do not match the numbers of the model",
        found=f"numeric columns: {', '.join(numeric) or 'none'}; all: {', '.join(there)[:100] or 'none'}",
        expected=of_each if names or count > 1 else "one numeric column",
        fix="rename the columns, or list the names of the model's numbers in a file, one per line (source.labels)",
    )


def _is_numeric(cells: Sequence[columns.Cell]) -> bool:
    """Whether more than half of the non-empty cells are numbers; the others are then errors."""
    known = [cell for cell in cells if cell is not None]

    def fits(cell: columns.Cell) -> bool:
        try:
            return bool(np.isfinite(float(cell)))
        except (TypeError, ValueError):
            return False

    return 2 * sum(map(fits, known)) > len(known)


# --- The task ---------------------------------------------------------------------------------------------------------


IMAGES, TRUTH = "images", "truth"


class RegressionAdapter(CountedAdapter):
    kinds = ("columns", "none")
    compared = RegressionComparison
    changed_when = "An answer has changed if a number differs from the original’s by more than its tolerance."
    metrics = (
        Metric(
            "R2",
            "R2 is the share of the labels’ variance that the numbers explain; below 0 the mean label is a better "
            "prediction.",
        ),
    )
    measures = (
        Measure("MAE", "mae", None, original=True),
        Measure("MAE change", "mae_change", None, interval="mae_change_ci95"),
        Measure("Difference from the original, mean", "difference_mean", None),
        Measure("Difference from the original, largest", "difference_max", None),
    )
    attention = True
    head: RegressionSpec

    def annotated(self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None) -> NumberSet:
        return read_numbers(choice.path, place, self.setting.labels, self.setting.classes or 1)

    def fits(self, data: Data) -> bool:
        """Whether to choose a tolerance, which needs no labels."""
        return self.head.tolerance is None and len(data.calibration) > 1

    def fit(self, answers: Answers, data: Data) -> tuple[RegressionSpec, str]:
        """Return the tolerance of each number, from the spread of the original's answers to calibration images."""
        numbers = _numbers(answers)
        allowed = tuple(float(f"{value:.3g}") for value in tolerances(numbers, self.head).tolist())
        if not all(allowed):
            return self.head, "tolerance: not chosen, as the original gives the same answer to all calibration images"
        shown = ", ".join(f"{value:g}" for value in allowed)
        why = f"{SPREAD_SHARE:g} of the standard deviation of the original's answers to {len(numbers)} images"
        note = f"tolerance: {shown}, {why} (to change it: postprocess: {{tolerance: ...}})"
        return dataclasses.replace(self.head, tolerance=allowed), note

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the numbers, float32 [k]."""
        return {NUMBERS: np.atleast_1d(outputs[NUMBERS])}

    keep = kept

    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        sides = {"ours": _numbers(ours), "theirs": _numbers(reference)}
        records = Records(len(reference), {IMAGES: ImageRows.each(**sides)})
        if data.truth is not None:
            truth = np.array([label.values for label in data.truths() or ()], np.float64)
            records = records.with_tables(**{TRUTH: ImageRows.each(values=truth)})
        return records.with_tables(outputs=differences(ours, reference, [NUMBERS]))

    def comparison(self, counts: Records) -> Comparison:
        numbers = counts[IMAGES]
        truth = counts[TRUTH]["values"] if TRUTH in counts else None
        worst = worst_of(counts["outputs"])
        return compare_numbers(
            numbers["ours"], numbers["theirs"], truth, self.head, self.setting.labels, max_difference=worst
        )

    def doubt_counted(
        self, found: Comparison, facts: Sequence[Mapping[str, object]], places: Sequence[folder.Ints], listed: Data
    ) -> str | None:
        if doubt_value(found.metric, found.reference_value) is None:
            return None
        return (
            f"the original's R2 is {found.reference_value:.2f} %, no better than predicting the mean label: check that "
            "the labels belong to these images and have the model's units, and that the preprocessing matches the "
            "training"
        )

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        """Return the changed images: those with a number outside its tolerance of the original's; the farther, the
        worse. A number is right within the tolerance of its label."""
        a, b = _numbers(ours), _numbers(reference)
        allowed = tolerances(b, self.head)
        apart = (np.abs(a - b) / np.maximum(allowed, 1e-300)).max(axis=1)
        right: tuple[npt.NDArray[np.bool_] | None, ...] = (None, None)
        if data.truth is not None:
            truth = np.array([label.values for label in data.truths() or ()], np.float64)
            right = alike(a, truth, allowed), alike(b, truth, allowed)
        return judged(~alike(a, b, allowed), 1 - 1 / (1 + apart), *right)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        """Return the numbers with the precision of the tolerance: smaller differences are not shown."""
        values = np.atleast_1d(answers.columns[NUMBERS][index]).tolist()
        allowed = self.head.tolerances(len(values))
        if allowed is None:
            shown = [float(f"{value:.3g}") for value in values]
        else:
            places = (-np.floor(np.log10(allowed))).astype(int).tolist()
            shown = [round(value, count) for value, count in zip(values, places, strict=True)]
        return Said(str(numbers_of(np.array(shown), self.head, labels)), None)

    def truth_line(self, truth: LabelledNumbers, labels: Sequence[str] | None) -> str:
        return str(numbers_of(np.array(truth.values), self.head, labels))


def _numbers(answers: Answers) -> Floats:
    """Return the numbers as float64 [n, k]."""
    return np.asarray(answers.stacked(NUMBERS).astype(np.float64))

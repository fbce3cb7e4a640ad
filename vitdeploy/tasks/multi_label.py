"""Multi-label classification: independent labels, any number per image. Readers, thresholds, mean average precision.
The task `binary`, with a single label, uses the same parts."""

import dataclasses
import json
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from vitdeploy.data import annotations, classes, columns, decoding, folder
from vitdeploy.errors import DataError
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.runtime.preprocess import Frame
from vitdeploy.runtime.tasks.multi_label import HALF, LOGITS, PROBABILITIES, MultiLabelSpec, probabilities
from vitdeploy.spec import OutputSpec
from vitdeploy.tasks import adapter, counted, images
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification import intervals, ranking
from vitdeploy.verification.changes import Changes, Counts, judged
from vitdeploy.verification.comparison import (
    Comparison,
    Fields,
    counted_agreement,
    differences,
    resampled_accuracy,
    resampled_agreement,
    worst_of,
)
from vitdeploy.verification.records import Answers, ImageRows, Records

# --- Which labels an image has: by columns of a table, COCO's categories, or the class folders that it lies in --------


COCO_KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "category_id"),
    "categories": ("id", "name"),
}
# Separators of the labels in one cell.
SEPARATORS = re.compile(r"[,;|]")
COLUMNS_WANTED = "one column of 0 and 1 per label, named like the model's labels, or one column with lists of labels"


@dataclass(frozen=True)
class ImageLabels:
    """The labels of an image, as ascending label numbers of the model."""

    labels: tuple[int, ...]

    def content(self) -> bytes:
        return repr(self.labels).encode()

    def turned(self, frame: Frame) -> "ImageLabels":
        """Return self: labels do not depend on the orientation."""
        return self


LabelledSet = annotations.AnnotatedSet[ImageLabels]


def read_table(
    path: Path, file: Path, labels: Sequence[str], count: int | None
) -> tuple[LabelledSet, classes.ClassMap]:
    """Return the images below `path` with a row in a table, with their labels.

    Args:
        labels: the model's, or (); `count`: the model's number of labels.

    Raises:
        DataError: as `columns.read_columns`; columns that do not match the labels, or a cell that is neither 0 nor 1.
    """
    table = columns.read_columns(path, file)
    rows = table.annotations
    names = list(next(iter(rows.values())).cells) if rows else []
    chosen = classes.match_some(names, labels, "columns")
    if chosen is None and labels and (listed := _list_column(rows, names, labels)) is not None:
        column, chosen = listed
        parsed = {key: listed_labels(row.cells[column]) or [] for key, row in rows.items()}
        index = {key: sorted({chosen.index[name] for name in names}) for key, names in parsed.items()}
        notes = (*table.notes, f"labels: read from the lists in the column {column!r}")
    else:
        chosen = chosen or _by_order(file, rows, names, labels, count)
        if missing := [label for place, label in enumerate(labels) if place not in chosen.index.values()]:
            raise DataError(
                f"{file} has no column for some labels of the model",
                found=f"none for {', '.join(missing[:5])}; columns {', '.join(names)[:200]}",
                expected=COLUMNS_WANTED,
                fix="add the columns, with 0 if no image has the label",
            )
        index = {key: sorted(_flags(row, chosen.index)) for key, row in rows.items()}
        others = [name for name in names if name not in chosen.index]
        notes = (*table.notes, *([f"labels: columns that are not labels, ignored: {', '.join(others)}"] * bool(others)))
    labelled = {key: ImageLabels(tuple(labels)) for key, labels in index.items()}
    whole = annotations.AnnotatedSet(path, table.samples, labelled, (), table.unannotated, notes)
    return whole, chosen


def listed_labels(cell: columns.Cell) -> list[str] | None:
    """Return the labels of a list in a cell: a Parquet list, a JSON list, or names separated by commas, semicolons or
    bars; [] for an empty cell, None for anything else."""
    if cell is None:
        return []
    if isinstance(cell, str) and cell.startswith("["):
        try:
            cell = json.loads(cell)
        except ValueError:
            return None
    if isinstance(cell, str):
        return [name.strip() for name in SEPARATORS.split(cell) if name.strip()]
    return [str(name).strip() for name in cell] if isinstance(cell, list) else None


def _list_column(
    rows: Mapping[Path, columns.LabelRow], names: Sequence[str], labels: Sequence[str]
) -> tuple[str, classes.ClassMap] | None:
    """Return the only column whose cells are all lists of the model's labels, and the label of each name in it.

    Raises:
        DataError: several such columns.
    """
    candidates = []
    for name in names:
        parsed = [listed_labels(row.cells[name]) for row in rows.values()]
        known = sorted({label for cell in parsed if cell is not None for label in cell})
        chosen = classes.match_some(known, labels, "labels of the data")
        if chosen is not None and len(chosen.index) == len(known) and None not in parsed:
            candidates.append((name, chosen))
    if len(candidates) > 1:
        raise DataError(
            "several columns contain lists of the model's labels",
            found=", ".join(name for name, _ in candidates),
            expected="one such column",
            fix="remove the others",
        )
    return candidates[0] if candidates else None


def _by_order(
    file: Path, rows: Mapping[Path, columns.LabelRow], names: Sequence[str], labels: Sequence[str], count: int | None
) -> classes.ClassMap:
    """Return the columns of 0 and 1 in order, for a model without labels, if there is one per output."""
    flags = [name for name in names if all(_is_flag(row, name) for row in rows.values())]
    if labels or len(flags) != count:
        known = f"the labels {', '.join(labels)[:100]}" if labels else f"{count} unnamed labels"
        raise DataError(
            f"{file} does not show which column is which label of the model",
            found=f"columns of 0 and 1: {', '.join(flags)[:100] or 'none'}; of the model: {known}",
            expected=COLUMNS_WANTED,
            fix="rename the columns to the model's labels, or the labels to the columns (source.labels of a recipe)",
        )
    text = (
        f"columns are mapped by position: the model's labels have no names, so the columns {', '.join(flags)[:100]} "
        "are used"
    )
    return classes.ClassMap("position", {name: place for place, name in enumerate(flags)}, text)


def _is_flag(row: columns.LabelRow, name: str) -> bool:
    try:
        return row.flag(name) is not None
    except DataError:
        return False


def _flags(row: columns.LabelRow, index: Mapping[str, int]) -> list[int]:
    flags = {name: row.flag(name) for name in index}
    if empty := [name for name, flag in flags.items() if flag is None]:
        raise DataError(
            f"{row.line}: the column {empty[0]!r} is empty",
            expected="0 or 1",
            fix="fill the cell, or remove the row",
        )
    return [index[name] for name, flag in flags.items() if flag]


def read_categories(
    path: Path, file: Path, labels: Sequence[str], count: int | None, skipped: decoding.Skipped | None
) -> tuple[LabelledSet, classes.ClassMap]:
    """Return the images that a COCO file lists, with the categories of their annotations; errors as
    `annotations.read_coco` and `classes.match_categories`."""
    coco = annotations.read_coco(path, file, COCO_KEYS)
    used = {entry["category_id"] for objects in coco.annotations.values() for _, entry in objects}
    chosen = classes.match_categories(coco.categories, used, labels, count)

    def labels_of(path: Path, frame: Frame, objects: annotations.Objects) -> ImageLabels:
        return ImageLabels(tuple(sorted({chosen.index[entry["category_id"]] for _, entry in objects})))

    return coco.annotated(labels_of, skipped), chosen


class Folders(NamedTuple):
    """Images in class folders, each content once: its path, and the names of all folders that contain it."""

    samples: tuple[folder.Sample, ...]
    names: Mapping[Path, frozenset[str]]
    classes: tuple[str, ...]

    @property
    def empty(self) -> Collection[str]:
        return set(self.classes) - {name for names in self.names.values() for name in names}


def read_folders(path: Path) -> Folders:
    """Return the images of class folders; a copy of an image in another folder gives it another label. Errors as
    `folder.list_images`."""
    parts = [path / part for part in folder.OWN_SPLIT] if folder.has_own_split(path) else [path]
    samples, names, known = list[folder.Sample](), dict[Path, set[str]](), set[str]()
    for part in parts:
        listed, folders = folder.list_images(part, "folders")
        known |= set(folders.names)
        first = dict[str, folder.Sample]()
        every = list(listed)
        for sample, content in zip(every, folder.contents(every), strict=True):
            assert sample.label is not None
            kept = first.setdefault(content, dataclasses.replace(sample, label=None))
            names.setdefault(kept.path, set()).add(folders.names[sample.label])
        samples += first.values()
    rows = {key: frozenset(folders) for key, folders in names.items()}
    return Folders(tuple(samples), rows, tuple(sorted(known)))


# --- Compares the labels of an artifact with the original's, and both with what is known of the images ----------------


Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MultiLabelComparison(Comparison):
    """A multi-label classifier against the original. The metric is the mean average precision in percent: the mean over
    the labels that some image has (see `verification.ranking`).

    agreement: percent of the images with exactly the original's labels.
    label_agreement: percent of all decisions (per image and label) equal to the original's; least_label_agreement: for
        the worst label.
    f1, reference_f1: the mean over the same labels of F1 at the thresholds, in percent; with the drop in points.
    labelled: the number of labels that occur.
    The interval of the agreement is Wilson's; all others are bootstraps over the images. Those of `value`, `f1` and
    their drops are no narrower than that of as many independent trials as there are images.
    """

    map_ci95: tuple[float, float] | None = None
    reference_map_ci95: tuple[float, float] | None = None
    f1: float | None = None
    reference_f1: float | None = None
    f1_ci95: tuple[float, float] | None = None
    f1_drop: float | None = None
    f1_drop_ci95: tuple[float, float] | None = None
    labelled: int | None = None
    label_agreement: float
    label_agreement_ci95: tuple[float, float]
    least_label_agreement: float


def mean_precision(scores: Floats, truth: Bools, weights: Floats) -> Floats:
    """Return mean average precisions [draws], 0..1, of scores [n, labels], without labels that no image of a draw
    has."""
    known = np.flatnonzero(truth.any(axis=0))
    counts = np.ascontiguousarray(weights.T)
    rows = [ranking.precisions(scores[:, k], truth[:, k], counts) for k in known]
    return _mean_of_known(np.stack(rows))


def mean_f1(above: Bools, truth: Bools, weights: Floats) -> Floats:
    """Return the mean F1 [draws], 0..1, of labels bool [n, labels], over the labels that occur."""
    known = truth.any(axis=0)
    a, b = (labels[:, known].astype(np.float64) for labels in (above, truth))
    both, either = weights @ (a * b), weights @ a + weights @ b
    with np.errstate(invalid="ignore"):
        return _mean_of_known((2 * both / either).T)


def _mean_of_known(rows: Floats) -> Floats:
    """Return the mean [draws] over the finite values of rows [labels, draws]."""
    known = np.isfinite(rows)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, rows, 0).sum(axis=0) / known.sum(axis=0))


def percent_with_interval(value: float, drawn: Floats, n: int) -> tuple[float, float]:
    """Return the 95 % interval in percent of a share 0..1 of n images, from bootstrap replicates."""
    least = intervals.least_of_share(value, n)
    return intervals.percentile_interval(100 * value, 100 * drawn, least, (0.0, 100.0))


def drop_with_interval(values: Sequence[float], drawn: Sequence[Floats], right: Sequence[Bools]) -> Fields:
    """Return the accuracy fields of a comparison from shares 0..1, the artifact's and the original's, and bootstrap
    replicates. `right`: for both sides, which answers are right."""
    lost = 100 * (drawn[1] - drawn[0])
    return resampled_accuracy([100 * value for value in values], lost, right)


def multi_label_comparison(rows: ImageRows, *, max_difference: float) -> MultiLabelComparison:
    """Return the comparison for the rows of all images: `ours` and `theirs` [n, labels], the scores; `ours_above` and
    `theirs_above` bool, the predicted labels; with labels `truth` bool.

    Raises:
        DataError: no image has a label.
    """
    above = rows["ours_above"], rows["theirs_above"]
    equal, n = above[0] == above[1], len(rows)
    shares = equal.mean(axis=1)
    drawn = intervals.replicates(n, 0, lambda weights: 100 * weights @ shares / n)
    decisions = resampled_agreement(100 * float(shares.mean()), drawn, n)
    measured = _measured(rows, above) if "truth" in rows.columns else {}
    return MultiLabelComparison(
        n=n,
        metric="mean AP" if measured else None,
        **counted_agreement(int(equal.all(axis=1).sum()), n),
        agreement_of="images with the same labels",
        max_difference=max_difference,
        label_agreement=decisions["agreement"],
        label_agreement_ci95=decisions["agreement_ci95"],
        least_label_agreement=100 * float(equal.mean(axis=0).min()),
        **measured,
    )


def _measured(rows: ImageRows, above: Sequence[Bools]) -> Fields:
    truth, scores = rows["truth"], (rows["ours"].astype(np.float64), rows["theirs"].astype(np.float64))
    n, labelled = len(rows), int(truth.any(axis=0).sum())
    if not labelled:
        raise DataError(
            "no evaluation image has a label",
            found=f"{n} images without labels",
            expected="images with labels of the model",
            fix="check the labels, or verify without them (data.labels: none)",
        )

    def measure(weights: Floats) -> Floats:
        ranked = [mean_precision(side, truth, weights) for side in scores]
        return np.stack([*ranked, *(mean_f1(side, truth, weights) for side in above)], axis=1)

    precise, theirs, f1, their_f1 = (float(value) for value in measure(np.ones((1, n)))[0])
    drawn = intervals.replicates(n, 0, measure).T
    right = [(side == truth).all(axis=1) for side in above]
    decided = drop_with_interval([f1, their_f1], drawn[2:], right)
    return {
        **drop_with_interval([precise, theirs], drawn[:2], right),
        "map_ci95": percent_with_interval(precise, drawn[0], n),
        "reference_map_ci95": percent_with_interval(theirs, drawn[1], n),
        "f1": decided["value"],
        "reference_f1": decided["reference_value"],
        "f1_ci95": percent_with_interval(f1, drawn[2], n),
        "f1_drop": decided["drop"],
        "f1_drop_ci95": decided["drop_ci95"],
        "labelled": labelled,
    }


# --- Thresholds: chosen only from the original's answers to labelled calibration images -------------------------------


def best_threshold(scores: Floats, truth: Bools, gain: str) -> float:
    """Return the threshold of scores [n], 0..1, with the largest gain; among equals the one in the widest gap between
    the logits of two images, where rounding changes the fewest answers. HALF if all labels are equal.

    gain: "f1"; or "youden", the share of positives above it minus that of negatives (Youden 1950, "Index for rating
        diagnostic tests"), which does not depend on the share of positive images.
    """
    if truth.all() or not truth.any():
        return HALF
    order = np.argsort(-scores, kind="stable")
    ranked, positive = scores[order], truth[order]
    cuts = np.append(np.flatnonzero(np.diff(ranked) < 0), len(ranked) - 1)  # between this image and the next
    hits, count, positives = np.cumsum(positive)[cuts], cuts + 1, int(truth.sum())
    if gain == "f1":
        gains = 2 * hits / (count + positives)
    else:
        gains = hits / positives - (count - hits) / (len(truth) - positives)
    lower = np.append(ranked[1:], 0.0)[cuts]
    a, b = (np.log(np.clip(edge, 1e-12, 1)) - np.log(np.clip(1 - edge, 1e-12, 1)) for edge in (ranked[cuts], lower))
    best = np.flatnonzero(gains >= gains.max() - 1e-12)
    chosen = best[np.argmax((a - b)[best])]
    return float(1 / (1 + np.exp(-(a + b)[chosen] / 2)))


# --- The adapter ------------------------------------------------------------------------------------------------------


class LabelsAdapter(counted.CountedAdapter):
    """The base class for independent labels, several or one. `gain`: the criterion for thresholds, and its name."""

    listable = ("none",)
    in_words = True
    guard = 90.0
    gain: ClassVar[tuple[str, str]]

    @property
    @abstractmethod
    def thresholds(self) -> Sequence[float] | None:
        """One per label; None if not set."""

    @abstractmethod
    def with_thresholds(self, thresholds: tuple[float, ...]) -> OutputSpec:
        """Return the output spec with these thresholds."""

    @abstractmethod
    def read(
        self, choice: adapter.DataChoice, skipped: decoding.Skipped | None
    ) -> tuple[LabelledSet, classes.ClassMap]:
        """Return the images with the labels that `choice` names, and the mapping to the model's labels."""

    @abstractmethod
    def check(self, truth: Bools) -> list[str]:
        """Return what makes results on evaluation images with these labels, bool [n, labels], doubtful, a sentence
        each. Raises DataError if no result is possible."""

    def find(self, choice: adapter.DataChoice, skipped: decoding.Skipped | None = None) -> images.FoundData:
        if choice.labels == "none":
            unlabelled = super().find(choice, skipped)
            note = "thresholds are 0.5: fitting them needs labelled calibration images (data.labels)"
            parts = dataclasses.replace(unlabelled.parts, notes=(*unlabelled.parts.notes, note))
            return unlabelled if self.thresholds is not None else dataclasses.replace(unlabelled, parts=parts)
        labelled, mapping = self.read(choice, skipped)
        parts = labelled.split(**choice.numbers)
        doubts = self.check(self.matrix([labelled.annotations[sample.path] for sample in parts.evaluation]))
        labelled = dataclasses.replace(labelled, warnings=(*labelled.warnings, *doubts))
        return images.FoundData(parts, labelled, labelled.annotations, mapping)

    def matrix(self, truths: Sequence[ImageLabels]) -> Bools:
        """Return the labels as bool [n, labels]."""
        table = np.zeros((len(truths), self.setting.classes or 1), np.bool_)
        for row, truth in zip(table, truths, strict=True):
            row[list(truth.labels)] = True
        return table

    def fits(self, data: adapter.Data) -> bool:
        return self.thresholds is None and data.truth is not None and len(data.calibration) > 0

    def fit(self, answers: Answers, data: adapter.Data) -> tuple[OutputSpec, str]:
        scores, truth = self.scores(answers), self.matrix(data.truths() or [])
        thresholds = tuple(best_threshold(scores[:, k], truth[:, k], self.gain[0]) for k in range(truth.shape[1]))
        low, high = min(thresholds), max(thresholds)
        spread = f"{low:.3g}" if len(thresholds) == 1 else f"{low:.3g} to {high:.3g}"
        note = f"thresholds: {spread}, by {self.gain[1]} on {len(truth)} labelled calibration images"
        one_kind = int((truth.all(axis=0) | ~truth.any(axis=0)).sum())
        more = f"; 0.5 for {one_kind} labels that all of them have, or none" if one_kind else ""
        return self.with_thresholds(thresholds), note + more

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        return {name: np.atleast_1d(outputs[name]) for name in (LOGITS, PROBABILITIES) if name in outputs}

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        return self.kept(outputs, size)

    def scores(self, answers: Answers) -> Floats:
        """Return probabilities, float64 [n, labels]."""
        return np.concatenate(
            [probabilities({name: piece}) for name in answers.columns for piece in answers.pieces(name)]
        )

    def above(self, answers: Answers) -> Bools:
        """Return the predicted labels, bool [n, labels]."""
        return np.asarray(self.scores(answers) > np.array(HALF if self.thresholds is None else self.thresholds))

    def count(self, ours: Answers, reference: Answers, data: adapter.Data) -> Counts:
        sides = ours, reference
        if {*ours.columns} != {*reference.columns}:  # one of the two ends in sigmoids
            first, second = (Answers({PROBABILITIES: list(self.scores(side))}) for side in sides)
            sides = first, second
        [name] = sides[0].columns
        columns = {"ours": sides[0].stacked(name), "theirs": sides[1].stacked(name)}
        columns |= {"ours_above": self.above(ours), "theirs_above": self.above(reference)}
        if (truths := data.truths()) is not None:
            columns["truth"] = self.matrix(truths)
        return Records(len(reference), {"images": ImageRows.each(**columns), "outputs": differences(*sides, [name])})

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        """Return the changed images; the more the probabilities of changed labels have moved, the worse."""
        first, second, truths = self.above(ours), self.above(reference), data.truths()
        moved = (np.abs(self.scores(ours) - self.scores(reference)) * (first != second)).max(axis=1)
        changed = (first != second).any(axis=1)
        if truths is None:
            return judged(changed, moved)
        truth = self.matrix(truths)
        return judged(changed, moved, (first == truth).all(axis=1), (second == truth).all(axis=1))

    def certainty(self, answers: Answers) -> np.ndarray:
        """Return the distance of the closest probability from its threshold."""
        limits = np.array(HALF if self.thresholds is None else self.thresholds)
        return np.asarray(np.abs(self.scores(answers) - limits).min(axis=1))


class MultiLabelAdapter(LabelsAdapter):
    kinds = ("columns", "coco", "folders", "none")
    compared = MultiLabelComparison
    metrics = (
        Metric(
            "mean AP",
            "Mean AP is the mean over the labels of the average precision, which measures how well images with a "
            "label rank above those without.",
            words="mean average precision",
            title="Mean AP",
        ),
    )
    measures = (
        Measure("Mean AP, %", "value", interval="map_ci95"),
        Measure("of the original, %", "reference_value", interval="reference_map_ci95"),
        Measure("F1, %", "f1", original=True),
        Measure("F1 drop", "f1_drop", interval="f1_drop_ci95"),
        Measure("Same decisions, %", "label_agreement", interval="label_agreement_ci95"),
        Measure("of the worst label, %", "least_label_agreement"),
    )
    gain = ("f1", "F1")
    head: MultiLabelSpec

    @property
    def thresholds(self) -> Sequence[float] | None:
        return self.head.thresholds

    def with_thresholds(self, thresholds: tuple[float, ...]) -> OutputSpec:
        return dataclasses.replace(self.head, thresholds=thresholds)

    def read(
        self, choice: adapter.DataChoice, skipped: decoding.Skipped | None
    ) -> tuple[LabelledSet, classes.ClassMap]:
        known = self.setting.labels, self.setting.classes
        if choice.labels == "columns" and choice.annotations is not None:
            return read_table(choice.path, choice.annotations, *known)
        if choice.labels == "coco" and choice.annotations is not None:
            return read_categories(choice.path, choice.annotations, *known, skipped)
        folders = read_folders(choice.path)
        mapping = classes.match_folders(folders.classes, folders.empty, *known)
        labelled = {
            key: ImageLabels(tuple(sorted(mapping.index[name] for name in names)))
            for key, names in folders.names.items()
        }
        several = sum(len(names) > 1 for names in folders.names.values())
        notes = (f"labels: {several} images are in several class folders, and have the labels of all",) * bool(several)
        return annotations.AnnotatedSet(choice.path, folders.samples, labelled, (), 0, notes), mapping

    def check(self, truth: Bools) -> list[str]:
        missing = [label_of(k, self.setting.labels) for k in np.flatnonzero(~truth.any(axis=0)).tolist()]
        if not missing:
            return []
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return [f"no evaluation image has the label {names}: mean AP and F1 cover only the other labels"]

    def comparison(self, counts: Records) -> Comparison:
        return multi_label_comparison(counts["images"], max_difference=worst_of(counts["outputs"]))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        row = Answers({name: [column[index]] for name, column in answers.columns.items()})
        return Said(_names(np.flatnonzero(self.above(row)[0]).tolist(), labels), None)

    def truth_line(self, truth: ImageLabels, labels: Sequence[str] | None) -> str:
        return _names(truth.labels, labels)


def _names(indices: Sequence[int], labels: Sequence[str] | None) -> str:
    return ", ".join(label_of(index, labels) for index in indices) or "no label"

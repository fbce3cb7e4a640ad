"""Embeddings: retrieval of images of the same identity, and verification of labelled pairs."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.data import annotations, columns, decoding, folder
from vitdeploy.data.label_file import Repairs
from vitdeploy.errors import DataError
from vitdeploy.paths import name_bytes
from vitdeploy.progress import Progress
from vitdeploy.tasks import adapter, classification, features
from vitdeploy.tasks.answers import Measure, Metric
from vitdeploy.verification import intervals
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.comparison import Comparison, Fields, paired_accuracy, paired_counts
from vitdeploy.verification.records import Answers

# --- Compares an artifact's embeddings with the original's, by identities or by pairs ---------------------------------


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

RECALL, PAIRS = "recall@1", "verification accuracy"
# Neighbours searched for one with the same identity.
NEAR = 5
# As in the "image restricted" protocol of Labeled Faces in the Wild (Huang et al. 2007, UMass 07-49, section 4).
FOLDS = 10
# A trained embedder has more than CHANCES times the recall of chance. On pairs it exceeds the majority answer by more
# than the share BEYOND of that answer's errors.
CHANCES, BEYOND = 3.0, 0.25


@dataclass(frozen=True, kw_only=True)
class EmbeddingComparison(features.FeatureComparison):
    """The embeddings of an artifact against the original's. Agreement is as for features: images with the same nearest
    other image.

    The metric is "recall@1" of images whose folder is their identity: the percent whose nearest other image by cosine
    has the same identity, among images with another of theirs (leave-one-out). For pairs it is "verification accuracy":
    the percent whose cosine is on the right side of a threshold. The pairs are split into ten folds; the threshold of
    each is the original's best on the nine others, so no pair influences its own threshold. The artifact is judged at
    the original's thresholds, since an app has one for all engines: a shift of its cosines is a loss. `drop` has the
    paired interval of Newcombe 1998, method 10, over images or pairs.

    trials: the number of images or pairs behind the metric. recall5: percent of the same images with one of their
        identity among the five nearest; recall5_ci95: Wilson's interval. threshold: for pairs, the mean of the ten.
    """

    trials: int | None = None
    recall5: float | None = None
    recall5_ci95: tuple[float, float] | None = None
    reference_recall5: float | None = None
    threshold: float | None = None


def recalls(unit: Floats, labels: Ints) -> tuple[Bools, Bools]:
    """Return for each image whether its nearest other image has its identity, and whether one of the five nearest has;
    bool [n] each, only for images with another image of their identity.

    Args:
        unit: float64 [images, width], each of length 1 or 0. labels: int64 [images], the identities.
    """
    first, among = np.zeros(len(unit), bool), np.zeros(len(unit), bool)
    near = min(NEAR, len(unit) - 1)
    for start in range(0, len(unit), features.BLOCK):
        rows = np.arange(start, min(start + features.BLOCK, len(unit)))
        table = features.similarities(unit, rows)
        first[rows] = labels[table.argmax(axis=1)] == labels[rows]
        nearest = np.argpartition(-table, near - 1, axis=1)[:, :near]
        among[rows] = first[rows] | (labels[nearest] == labels[rows][:, None]).any(axis=1)
    queries = _queries(labels)
    return first[queries], among[queries]


def _queries(labels: Ints) -> Bools:
    """Return which images have another one of their identity."""
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.asarray(counts[places] > 1)


def fold_thresholds(cosines: Floats, same: Bools) -> Floats:
    """Return the threshold of each pair, float64 [pairs]: the one with the most right answers on the nine folds without
    the pair. Folds are drawn with a fixed seed, stratified by kind of pair.

    Args:
        cosines: float64 [pairs], the original's. same: bool [pairs].
    """
    random, folds = np.random.RandomState(0), np.empty(len(same), np.int64)
    for kind in (True, False):
        places = np.flatnonzero(same == kind)
        folds[random.permutation(places)] = np.arange(len(places)) % FOLDS
    best = np.array([best_threshold(cosines[folds != fold], same[folds != fold]) for fold in range(FOLDS)])
    return np.asarray(best[folds])


def best_threshold(cosines: Floats, same: Bools) -> float:
    """Return the cosine threshold for "same" with the most right answers. It lies halfway between two pairs; the middle
    one of several optima."""
    order = np.argsort(cosines, kind="stable")
    ranked = cosines[order]
    # For a threshold below the k-th pair, right are: different pairs below it, and same pairs from it on.
    differ = np.concatenate([[0], np.cumsum(~same[order])])
    right = differ + same.sum() - np.concatenate([[0], np.cumsum(same[order])])
    middles = np.concatenate([[ranked[0] - 1e-6], (ranked[1:] + ranked[:-1]) / 2, [ranked[-1] + 1e-6]])
    # No threshold fits between equal cosines.
    apart = np.concatenate([[True], ranked[1:] > ranked[:-1], [True]])
    places = np.flatnonzero(apart & (right == right[apart].max()))
    return float(middles[places[len(places) // 2]])


def compare_embeddings(
    ours: features.Features,
    reference: features.Features,
    labels: Ints | None = None,
    pairs: tuple[Ints, Bools] | None = None,
) -> EmbeddingComparison:
    """Compare float32 [n, width], n >= 2, with the original's for the same images.

    Args:
        labels: int64 [n], the identities. pairs: the two images of each, int64 [pairs, 2], and whether they are the
            same, bool [pairs]. At most one of the two.

    Raises:
        ValueError: other shapes. DataError: as `features.compare_features`.
    """
    plain = features.compare_features(ours, reference, None)
    a, b = (features.unit(side) for side in (ours, reference))
    metric: str | None = None
    more: Fields = {}
    if labels is not None and _queries(labels).any():
        metric = RECALL
        (first, among), (originals, originals5) = recalls(a, labels), recalls(b, labels)
        low, high = intervals.wilson(int(among.sum()), len(among))
        more = {
            **paired_accuracy(*paired_counts(first, originals)),
            "trials": len(first),
            "recall5": 100 * float(among.mean()),
            "recall5_ci95": (100 * low, 100 * high),
            "reference_recall5": 100 * float(originals5.mean()),
        }
    elif pairs is not None:
        metric, (places, same) = PAIRS, pairs
        cosines, theirs = ((side[places[:, 0]] * side[places[:, 1]]).sum(axis=1) for side in (a, b))
        thresholds = fold_thresholds(theirs, same)
        counts = paired_counts((cosines > thresholds) == same, (theirs > thresholds) == same)
        more = {**paired_accuracy(*counts), "trials": len(same), "threshold": float(thresholds.mean())}
    return EmbeddingComparison(**{**vars(plain), "metric": metric, **more})


# --- Pairs of images, each with whether both show the same ------------------------------------------------------------


# The columns of the table, in this order, with alternative names.
COLUMNS = (
    ("image_a", "image_1", "image1", "a", "left", "first"),
    ("image_b", "image_2", "image2", "b", "right", "second"),
    ("same", "label", "is_same", "match"),
)
EXAMPLE = "a CSV, TSV, Parquet or JSON file with the columns image_a, image_b and same (1 or 0)"


@dataclass(frozen=True)
class Partners:
    """The images paired with one image, by their paths below the folder, and whether they show the same identity."""

    same: Mapping[str, bool]

    def content(self) -> bytes:
        """Return b"": labels belong to two images, and a copy of one has other partners (see `PairSet.digest`)."""
        return b""


@dataclass(frozen=True)
class PairSet(annotations.AnnotatedSet[Partners]):
    """The images of pairs. `others`: the images below the folder without a pair."""

    others: tuple[folder.Sample, ...] = ()

    def split(self, *, calibration: int | None, evaluation: int | Literal["all"], seed: int) -> folder.DataSplit:
        """Choose calibration images, unpaired ones first; and evaluation images, pair by pair in seeded order, so that
        few pairs are split.

        Raises:
            DataError: fewer images than requested.
        """
        random = np.random.RandomState(seed)
        paired = {sample.path: sample for sample in self.samples}
        left, free = dict(paired), [self.others[i] for i in random.permutation(len(self.others))]
        if own := folder.has_own_split(self.folder):
            parts = [
                [s for s in (*free, *left.values()) if self.folder / p in s.path.parents] for p in folder.OWN_SPLIT
            ]
            chosen = [parts[0][i] for i in random.permutation(len(parts[0]))]
            left = {sample.path: sample for sample in parts[1] if sample.path in paired}
        ordered: dict[Path, folder.Sample] = {}
        for path in [list(left)[i] for i in random.permutation(len(left))]:
            partners = [self.folder / name for name in self.annotations[path].same]
            ordered |= {place: left[place] for place in (path, *partners) if place in left}
        if not own:
            # The last pairs are split if there are not enough unpaired images.
            chosen = [*free, *reversed(ordered.values())]
        count = folder.usual_calibration(len(chosen), own=own) if calibration is None else calibration
        folder.enough(self.folder, len(chosen) - (not own), count, "calibration")
        calibrated = {sample.path for sample in chosen[:count]}
        rest = [sample for path, sample in ordered.items() if path not in calibrated]
        if evaluation != "all":
            folder.enough(self.folder, len(rest), evaluation, "evaluation")
            rest = rest[:evaluation]
        folder.enough(self.folder, len(rest), 2, "evaluation")
        return folder.DataSplit(tuple(chosen[:count]), tuple(rest))

    def digest(self, samples: Iterable[folder.Sample]) -> str:
        """Return the SHA-256 over the pairs of these images."""
        paths = [sample.path for sample in samples]
        names = [path.relative_to(self.folder).as_posix() for path in paths]
        places, same = pairs_of(names, [self.annotations[path] for path in paths])
        total = hashlib.sha256()
        for (i, j), is_same in zip(places.tolist(), same.tolist(), strict=True):
            total.update(name_bytes(f"{names[i]}\t{names[j]}\t{int(is_same)}\n"))
        return total.hexdigest()


def pairs_of(names: Sequence[str], partners: Sequence[Partners]) -> tuple[Ints, Bools]:
    """Return the pairs with both images present, once each, in the order of their first image: int64 [pairs, 2], bool
    [pairs]."""
    index = {name: i for i, name in enumerate(names)}
    rows = sorted(
        (i, index[name], same)
        for i, known in enumerate(partners)
        for name, same in known.same.items()
        if i < index.get(name, -1)
    )
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, :2], table[:, 2].astype(bool)


def read_pairs(place: Path, file: Path) -> PairSet:
    """Return the images below `place` that are paired in a table. Pairs with missing images are ignored and counted.

    Raises:
        MissingFileError: no such folder or file. MissingPackageError: a Parquet file, and no pyarrow.
        DataError: not a table of pairs; an image paired with itself; contradictory rows for a pair; none of the
            folder's images.
    """
    table, paths, repairs = columns.read_table(file), annotations.folder_images(place), Repairs()
    names = [next((c for c in table if c.lower() in known), "") for known in COLUMNS]
    if not all(names):
        raise DataError(
            f"{file} is not a table of pairs", found=f"the columns {', '.join(table)}"[:200], expected=EXAMPLE
        )
    written = [str(cell) for name in names[:2] for cell in table[name]]
    located = annotations.located(place, paths, written, repairs)
    known: dict[Path, dict[str, bool]] = {}
    for row, cells in enumerate(zip(*(table[name] for name in names), strict=True), 1):
        where, pair = f"{file}, row {row}", [located.get(str(cell)) for cell in cells[:2]]
        same = columns.LabelRow({names[2]: cells[2]}, where).flag(names[2])
        if None in cells:
            raise DataError(f"{where} has an empty cell", found=", ".join(map(str, cells)), expected=EXAMPLE)
        first, second = pair
        if first is None or second is None:
            repairs.add("pairs with an image that is not in the folder, ignored", f"row {row}")
        elif first == second:
            raise DataError(f"{where} pairs an image with itself", found=str(cells[0]), expected="two different images")
        else:
            assert same is not None
            for path, other in ((first, second), (second, first)):
                partners, name = known.setdefault(path, {}), other.relative_to(place).as_posix()
                if partners.setdefault(name, same) != same:
                    raise DataError(
                        f"{where} contradicts another row for the same pair",
                        found=f"{cells[0]} and {cells[1]}: same is 0 and 1",
                        expected="one label per pair",
                        fix="remove the wrong row",
                    )
    if not known:
        raise annotations.other_names(place, file, paths, written)
    samples = tuple(folder.Sample(path, None) for path in sorted(known))
    others = tuple(folder.Sample(path, None) for path in sorted(set(paths.values()) - set(known)))
    annotated = {sample.path: Partners(known[sample.path]) for sample in samples}
    return PairSet(place, samples, annotated, (), len(others), repairs.notes, others=others)


# --- Embeddings: labels are folders of identities, or pairs -----------------------------------------------------------


class EmbeddingAdapter(features.FeaturesAdapter):
    kinds = ("folders", "pairs", "none")
    compared = EmbeddingComparison
    metrics = (
        Metric(
            RECALL,
            "Recall@1 is the share of images whose nearest other image has their identity, among images with another "
            "of their identity.",
            title="Recall@1",
        ),
        Metric(
            PAIRS,
            "Verification accuracy is the share of pairs on the right side of a threshold chosen on other pairs.",
            title="Correct pairs",
        ),
    )
    changed_when = "An answer has changed if another image is nearest, which may be equally right."
    measures = (
        Measure("Recall@5, %", "recall5", original=True, interval="recall5_ci95"),
        Measure("Pair threshold", "threshold", 3),
        *classification.COSINES,
    )

    def annotated(self, choice: adapter.DataChoice, place: Path, skipped: decoding.Skipped | None) -> PairSet:
        return read_pairs(choice.path, place)

    def load(self, choice: adapter.DataChoice, *, skip_bad: bool, progress: Progress) -> adapter.Data:
        data = super().load(choice, skip_bad=skip_bad, progress=progress)
        if (pairs := self._pairs(data)) is not None:
            least = min(int((pairs[1] == kind).sum()) for kind in (True, False))
            if least < FOLDS:
                raise DataError(
                    f"{choice.annotations} has too few pairs of each kind to choose and test a threshold",
                    found=f"{int(pairs[1].sum())} pairs of the same and {int((~pairs[1]).sum())} of different "
                    "identities, among the evaluation images",
                    expected=f"at least {FOLDS} of each",
                    fix="add pairs, or evaluate on more images (data.evaluation.images)",
                )
        return data

    def compare(self, ours: Answers, reference: Answers, data: adapter.Data) -> Comparison:
        a, b = (side.stacked(features.VECTOR) for side in (ours, reference))
        return compare_embeddings(a, b, adapter.labels_of(data), self._pairs(data))

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        """Either of two images of one identity may be nearest: a change does not imply right or wrong."""
        vectors = [side.stacked(features.VECTOR) for side in (ours, reference)]
        return features.neighbour_changes(vectors[0], vectors[1], None)

    def doubt(self, reference: Answers, data: adapter.Data, found: Comparison) -> str | None:
        assert isinstance(found, EmbeddingComparison)
        if found.reference_value is None or not found.trials:
            return None
        right = round(found.reference_value / 100 * found.trials)
        high = intervals.wilson(right, found.trials)[1]
        pairs, labels = self._pairs(data), adapter.labels_of(data)
        if pairs is not None:
            common = max(float(pairs[1].mean()), 1 - float(pairs[1].mean()))
            low, what = common + BEYOND * (1 - common), f"the majority answer has {100 * common:.2f} %"
        else:
            assert labels is not None
            _, counts = np.unique(labels, return_counts=True)
            chance = float((counts * (counts - 1)).sum() / (counts[counts > 1].sum() * (len(labels) - 1)))
            low, what = min(CHANCES * chance, 0.5), f"chance is {100 * chance:.2f} %"
        if high >= low:
            return None
        return (
            f"the original's {found.metric} is {found.reference_value:.2f} % of {found.trials:,}, and {what}: check "
            "the identities, and whether the preprocessing matches the training"
        )

    def truth_line(self, truth: Partners, labels: Sequence[str] | None) -> str | None:
        names = [f"{'same as' if same else 'other than'} {name}" for name, same in truth.same.items()]
        more = f", {len(names) - 2} more" if len(names) > 2 else ""
        return ", ".join(names[:2]) + more

    def _pairs(self, data: adapter.Data) -> tuple[Ints, Bools] | None:
        """Return the pairs of evaluation images, or None."""
        partners = data.truths()
        if partners is None:
            return None
        names = [sample.path.relative_to(data.root).as_posix() for sample in data.evaluation]
        return pairs_of(names, partners)

"""Multi-head models: a label table with a column per head, a comparison per head, and a combined one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vitdeploy.data import annotations, classes, columns, decoding, folder
from vitdeploy.data.containers.listing import number_of
from vitdeploy.errors import DataError
from vitdeploy.paths import name_bytes
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.runtime.tasks.heads import HeadSpec, HeadsSpec
from vitdeploy.spec import OutputSpec
from vitdeploy.tasks import adapter, binary, classification, embedding, images, multi_label, regression
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification.agreement import Agreement
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.comparison import Comparison, Control, Fields, counted_agreement
from vitdeploy.verification.records import Answers, LazyColumn

ADAPTERS: Mapping[str, type[adapter.ImageAdapter]] = {
    "classification": classification.ClassificationAdapter,
    "multi-label": multi_label.MultiLabelAdapter,
    "binary": binary.BinaryAdapter,
    "regression": regression.RegressionAdapter,
    "embedding": embedding.EmbeddingAdapter,
}
OfHead: TypeAlias = (
    Agreement
    | multi_label.MultiLabelComparison
    | binary.BinaryComparison
    | regression.RegressionComparison
    | embedding.EmbeddingComparison
)

# --- What all heads say together --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadFacts:
    """One head: its name, its task and its `comparison`, as for a single-head model of that task."""

    name: str
    task: str
    comparison: OfHead


@dataclass(frozen=True, kw_only=True)
class HeadsComparison(Comparison):
    """Several heads of an artifact against the original's. `parts`: the comparison of each head with its own metric.

    drop: that of the head that loses most, `worst`, in points of its metric. Its interval combines all heads: its upper
        end is the largest upper end, so a bound holds for all heads with the confidence of one; its lower end is the
        largest lower end. `value` is 100 minus the drop, with a `reference_value` of 100, whatever the heads' metrics
        are.
    agreement: percent of the images to which every head gives the original's answer, with its Wilson interval. It
        proves something if each head's agreement does.
    """

    parts: tuple[HeadFacts, ...]
    worst: str | None = None

    @property
    def proves_nothing(self) -> str:
        if found := super().proves_nothing:
            return found
        return _first(self.parts, lambda each: each.proves_nothing)

    def drop_proves_nothing(self, max_drop: float) -> str:
        if self.control is None:
            return self.proves_nothing
        return _first(self.parts, lambda each: each.drop_proves_nothing(max_drop))

    @property
    def by_head(self) -> Mapping[str, Comparison]:
        return {part.name: part.comparison for part in self.parts}


def _first(parts: Sequence[HeadFacts], describe: Callable[[OfHead], str]) -> str:
    return next((f"head {part.name}: {text}" for part in parts if (text := describe(part.comparison))), "")


def together(parts: Sequence[HeadFacts], same: int) -> HeadsComparison:
    """Return the combined comparison of heads on n images; on `same` of them all heads give the original's answer."""
    n = parts[0].comparison.n
    judged = [part for part in parts if part.comparison.drop is not None]
    accuracy: Fields = {"metric": None}
    if judged:
        drop, worst = max((part.comparison.drop or 0.0, part.name) for part in judged)
        lows, highs = zip(*(part.comparison.drop_ci95 or (-np.inf, np.inf) for part in judged), strict=True)
        accuracy = {"metric": WORST, "worst": worst, "value": 100 - drop, "reference_value": 100.0}
        accuracy |= {"drop": drop, "drop_ci95": (max(lows), max(highs))}
    return HeadsComparison(
        n=n,
        **counted_agreement(same, n),
        agreement_of="images with the same answer from every head",
        max_difference=max(part.comparison.max_difference for part in parts),
        parts=tuple(parts),
        **accuracy,
    )


# --- Labels: a table with a column for each head ----------------------------------------------------------------------


@dataclass(frozen=True)
class HeadLabel:
    """The label of an image for one head: as its task's adapter takes it (a class or identity as a number), and as
    text."""

    value: Any
    shown: str


@dataclass(frozen=True)
class HeadLabels:
    """The labels of an image, in the order of the heads."""

    labels: tuple[HeadLabel, ...]

    def content(self) -> bytes:
        return name_bytes(repr([label.value for label in self.labels]))


Rows: TypeAlias = Mapping[Path, columns.LabelRow]
# For one head: a function from a row to the image's label (None if a cell is empty); and notes.
Read: TypeAlias = tuple[Callable[[columns.LabelRow], HeadLabel | None], tuple[str, ...]]
HeadSet = annotations.AnnotatedSet[HeadLabels]


def read_heads(images: Path, file: Path, heads: Sequence[HeadSpec]) -> HeadSet:
    """Return the images below `images` with a row in a table, with a label for each head. The column with the head's
    name contains a class by name or number, a list of labels, 0 or 1, a number, or the name of an identity. Several
    numbers, and labels not given as a list, need a column for each of the head's labels. Images with an empty cell are
    skipped.

    Raises:
        DataError: as `columns.read_columns`; no column for a head, or an invalid cell.
    """
    rows = columns.read_columns(images, file)
    reads = [READ[str(head.task)](head, rows.annotations, file) for head in heads]
    known: dict[Path, HeadLabels] = {}
    empty = dict.fromkeys((head.name for head in heads), 0)
    for path, row in rows.annotations.items():
        found = {head.name: read(row) for head, (read, _) in zip(heads, reads, strict=True)}
        labels = tuple(label for label in found.values() if label is not None)
        if len(labels) == len(heads):
            known[path] = HeadLabels(labels)
        for name, label in found.items():
            empty[name] += label is None
    lacking = ", ".join(name for name, count in empty.items() if count)
    if not known:
        raise annotations.nothing_annotated(images, file, f"every row has an empty cell, for {lacking}")
    notes = [note for _, more in reads for note in more]
    if left := len(rows.annotations) - len(known):
        notes.append(f"{left} images have an empty cell for a head ({lacking}) and are ignored for all heads")
    samples = tuple(sample for sample in rows.samples if sample.path in known)
    return annotations.AnnotatedSet(images, samples, known, (), rows.unannotated + left, (*rows.notes, *notes))


def _column(head: HeadSpec, rows: Rows, file: Path, expected: str) -> str:
    names = list(next(iter(rows.values())).cells)
    if head.name not in names:
        raise DataError(
            f"{file} has no column for the head {head.name}",
            found=f"the columns {', '.join(names)}"[:200],
            expected=f"a column {head.name} with {expected}",
            fix="rename the column to the head's name, or the head to the column's name (postprocess.heads in a "
            "recipe)",
        )
    return head.name


def _columns_of_labels(head: HeadSpec, rows: Rows) -> tuple[str, ...]:
    """Return a column for each of the head's labels if there is no column for the head; () unless all exist."""
    names = next(iter(rows.values())).cells
    return head.labels if head.labels and head.name not in names and set(head.labels) <= set(names) else ()


def _classes(head: HeadSpec, rows: Rows, file: Path) -> Read:
    column = _column(head, rows, file, "the name or number of a class")
    names = sorted({str(row.cells[column]) for row in rows.values() if row.cells[column] is not None})
    match = classes.match_words if any(number_of(name) is None for name in names) else classes.match_numbers
    with _of_head(head, file):
        chosen = match(names, (), head.labels, head.width)

    def read(row: columns.LabelRow) -> HeadLabel | None:
        cell = row.cells[column]
        place = None if cell is None else chosen.index[str(cell)]
        return None if place is None else HeadLabel(place, label_of(place, head.labels))

    return read, tuple(f"head {head.name}: {note}" for note in (*chosen.notes, *chosen.warnings))


def _labels(head: HeadSpec, rows: Rows, file: Path) -> Read:
    def label(places: Sequence[int]) -> HeadLabel:
        labels = multi_label.ImageLabels(tuple(sorted(set(places))))
        return HeadLabel(labels, ", ".join(label_of(place, head.labels) for place in labels.labels) or "no label")

    if flags := _columns_of_labels(head, rows):

        def by_flags(row: columns.LabelRow) -> HeadLabel | None:
            labels = [row.flag(name) for name in flags]
            return None if None in labels else label([place for place, flag in enumerate(labels) if flag])

        return by_flags, ()
    column = _column(head, rows, file, "lists of labels, or one column of 0 and 1 per label")
    lists = {row.line: multi_label.listed_labels(row.cells[column]) for row in rows.values()}
    if broken := next((row for row in rows.values() if lists[row.line] is None), None):
        raise DataError(
            f"{broken.line}: the column {column!r} is not a list of labels",
            found=repr(broken.cells[column])[:60],
            expected="names separated by commas, semicolons or bars, or a list in a Parquet file",
            fix="correct the cell, or remove the row",
        )
    known = sorted({name for each in lists.values() for name in each or ()})
    with _of_head(head, file):
        chosen = classes.match_words(known, (), head.labels, head.width) if known else None

    def by_list(row: columns.LabelRow) -> HeadLabel:
        return label([chosen.index[name] for name in lists[row.line] or ()] if chosen is not None else [])

    return by_list, () if chosen is None else tuple(f"head {head.name}: {note}" for note in chosen.notes)


def _flag(head: HeadSpec, rows: Rows, file: Path) -> Read:
    column = _column(head, rows, file, "0 or 1")

    def read(row: columns.LabelRow) -> HeadLabel | None:
        flag = row.flag(column)
        places = (0,) if flag else ()
        return None if flag is None else HeadLabel(multi_label.ImageLabels(places), "yes" if flag else "no")

    return read, ()


def _numbers(head: HeadSpec, rows: Rows, file: Path) -> Read:
    several = _columns_of_labels(head, rows)
    if head.width not in (None, 1) and not several:
        raise DataError(
            f"{file} does not have a column for each number of the head {head.name}",
            found=f"the columns {', '.join(next(iter(rows.values())).cells)}"[:200],
            expected=f"columns {', '.join(head.labels)}" if head.labels else f"names of its {head.width} numbers",
            fix="rename the columns to the head's labels (labels of the head, in postprocess.heads of a recipe)",
        )
    chosen = several or (_column(head, rows, file, "a number"),)

    def read(row: columns.LabelRow) -> HeadLabel | None:
        values = [row.number(name) for name in chosen]
        known = tuple(value for value in values if value is not None)
        if len(known) < len(values):
            return None
        return HeadLabel(regression.LabelledNumbers(known), ", ".join(f"{value:.6g}" for value in known))

    return read, ()


def _identities(head: HeadSpec, rows: Rows, file: Path) -> Read:
    column = _column(head, rows, file, "the name of an identity")
    cells = (row.cells[column] for row in rows.values())
    numbers = {name: place for place, name in enumerate(sorted({str(cell) for cell in cells if cell is not None}))}

    def read(row: columns.LabelRow) -> HeadLabel | None:
        cell = row.cells[column]
        return None if cell is None else HeadLabel(numbers[str(cell)], str(cell))

    return read, ()


class _of_head:
    """Adds the name of the head to errors of a class mapping."""

    def __init__(self, head: HeadSpec, file: Path) -> None:
        self.where = f"{file}, head {head.name}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, DataError):
            fix = "set its classes to the names in the column (labels of the head, in postprocess.heads of a recipe)"
            raise DataError(
                f"{self.where}: {error.message}", found=error.found, expected=error.expected, fix=fix
            ) from None


READ: Mapping[str, Callable[[HeadSpec, Rows, Path], Read]] = {
    "classification": _classes,
    "multi-label": _labels,
    "binary": _flag,
    "regression": _numbers,
    "embedding": _identities,
}

# --- The adapter ------------------------------------------------------------------------------------------------------


WORST = "worst head"


class HeadsAdapter(adapter.ImageAdapter):
    kinds = ("columns", "none")
    compared = HeadsComparison
    metrics = (
        Metric(
            WORST,
            "Worst head is 100 minus the largest drop of any head, in points of the metric of its task.",
            words="the worst head",
            title="Worst head",
        ),
    )
    measures = (Measure("Largest output difference", "max_difference", None),)
    changed_when = "An answer has changed if the answer of any head has."
    attention = True
    head: HeadsSpec

    def __init__(self, setting: adapter.Setting) -> None:
        super().__init__(setting)
        self.adapters = [
            ADAPTERS[str(head.task)](
                adapter.Setting(str(head.task), setting.preprocess, head.spec, labels=head.labels, classes=head.width)
            )
            for head in self.head.heads
        ]

    def find(self, choice: adapter.DataChoice, skipped: decoding.Skipped | None = None) -> images.FoundData:
        found = super().find(choice, skipped)
        unset = [
            head.name
            for head, each in zip(self.head.heads, self.adapters, strict=True)
            if isinstance(each, multi_label.LabelsAdapter) and each.thresholds is None
        ]
        if found.annotated is not None or not unset:
            return found
        note = f"thresholds of {', '.join(unset)} are 0.5: fitting them needs labelled calibration images (data.labels)"
        return dataclasses.replace(found, parts=dataclasses.replace(found.parts, notes=(*found.parts.notes, note)))

    def find_annotated(
        self, choice: adapter.DataChoice, place: Path, skipped: decoding.Skipped | None
    ) -> images.FoundData:
        labelled = read_heads(choice.path, place, self.head.heads)
        parts = labelled.split(**choice.numbers)
        doubts = list[str]()
        for k, (head, each) in enumerate(zip(self.head.heads, self.adapters, strict=True)):
            values = [labelled.annotations[sample.path].labels[k].value for sample in parts.evaluation]
            if isinstance(each, multi_label.LabelsAdapter):
                doubts += [f"head {head.name}: {doubt}" for doubt in each.check(each.matrix(values))]
            elif head.task == "embedding" and len(set(values)) == len(values):
                raise DataError(
                    f"{place}: no identity of the head {head.name} has two evaluation images",
                    found=f"{len(values)} identities in {len(values)} images",
                    expected="several images of some identities, since the nearest other image is judged",
                    fix="add images, or evaluate on more (data.evaluation.images)",
                )
        labelled = dataclasses.replace(labelled, warnings=(*labelled.warnings, *doubts))
        return images.FoundData(parts, labelled, labelled.annotations)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the outputs that the heads read, float32 [width] each."""
        return {head.reads: np.atleast_1d(outputs[head.reads]) for head in self.head.heads}

    def _answers(self, answers: Answers, k: int) -> Answers:
        """Return the answers of one head, as from a model of its task."""
        head = self.head.heads[k]
        column = answers.columns[head.reads]
        [name] = head.outputs(column[0])
        return Answers({name: LazyColumn(len(column), lambda index: head.outputs(column[index])[name])})

    def _data(self, data: adapter.Data, k: int) -> adapter.Data:
        """Return the data with the labels of one head, as its adapter takes them."""
        if data.truth is None:
            return data
        known = {path: each.labels[k].value for path, each in data.truth.items()}
        if not isinstance(self.adapters[k], classification.ClassificationAdapter | embedding.EmbeddingAdapter):
            return dataclasses.replace(data, truth=known)
        samples: list[folder.Sample] = [dataclasses.replace(each, label=known[each.path]) for each in data.evaluation]
        return dataclasses.replace(data, truth=None, evaluation=samples)

    def _changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> list[Changes]:
        return [
            each.changes(self._answers(ours, k), self._answers(reference, k), self._data(data, k))
            for k, each in enumerate(self.adapters)
        ]

    def _same(self, ours: Answers, reference: Answers, data: adapter.Data) -> int:
        """Return the number of images on which every head gives the original's answer."""
        changed = [change.changed for change in self._changes(ours, reference, data)]
        return int((~np.any(changed, axis=0)).sum())

    def _facts(self, k: int, found: Comparison) -> HeadFacts:
        assert isinstance(found, OfHead)
        return HeadFacts(self.head.heads[k].name, str(self.head.heads[k].task), found)

    def compare(self, ours: Answers, reference: Answers, data: adapter.Data) -> Comparison:
        parts = [
            self._facts(k, each.compare(self._answers(ours, k), self._answers(reference, k), self._data(data, k)))
            for k, each in enumerate(self.adapters)
        ]
        return together(parts, self._same(ours, reference, data))

    def verify(self, ours: Answers, reference: Answers, data: adapter.Data) -> Comparison:
        """As `compare`, with a control for each head and a combined one, from answers to other images."""
        parts = [
            self._facts(k, each.verify(self._answers(ours, k), self._answers(reference, k), self._data(data, k)))
            for k, each in enumerate(self.adapters)
        ]
        found = together(parts, self._same(ours, reference, data))
        controls = [part.comparison.control for part in parts if part.comparison.control is not None]
        if len(controls) < len(parts):
            return found
        [moved] = super().unrelated(ours, reference, data)
        same = self._same(moved, reference, data)
        lost = [
            part.comparison.reference_value - control.value
            for part, control in zip(parts, controls, strict=True)
            if part.comparison.reference_value is not None and control.value is not None
        ]
        value = 100 - max(lost) if lost else None
        least = min(control.difference for control in controls)
        return dataclasses.replace(found, control=Control(100 * same / found.n, value, least))

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        """Return the changes of the head that changed worst. An image is lost if a head lost it, gained if one gained
        it and none lost it, and equally right if no head with labels changed in another way."""
        every = self._changes(ours, reference, data)
        changed, severity = (
            np.any([each.changed for each in every], axis=0),
            np.max([each.severity for each in every], 0),
        )
        lost, gained = ([getattr(e, name) for e in every if e.lost is not None] for name in ("lost", "gained"))
        if not lost:
            return Changes(changed, None, None, severity)
        worse, better = np.any(lost, axis=0), np.any(gained, axis=0)
        wrong = np.any([each for e in every if (each := e.otherwise) is not None], axis=0)
        return Changes(changed, worse, better & ~worse, severity, changed & ~(worse | better | wrong))

    def doubt(self, reference: Answers, data: adapter.Data, found: Comparison) -> str | None:
        assert isinstance(found, HeadsComparison)
        for k, (each, part) in enumerate(zip(self.adapters, found.parts, strict=True)):
            reason = each.doubt(self._answers(reference, k), self._data(data, k), part.comparison)
            if reason is not None:
                return f"head {part.name}: {reason}"
        return None

    def fits(self, data: adapter.Data) -> bool:
        return any(each.fits(self._data(data, k)) for k, each in enumerate(self.adapters))

    def fit(self, answers: Answers, data: adapter.Data) -> tuple[OutputSpec, str]:
        heads, notes = list(self.head.heads), list[str]()
        for k, each in enumerate(self.adapters):
            known = self._data(data, k)
            if each.fits(known):
                postprocess, note = each.fit(self._answers(answers, k), known)
                heads[k] = dataclasses.replace(heads[k], postprocess=postprocess)  # type: ignore[arg-type]
                notes.append(f"head {heads[k].name}: {note}")
        return HeadsSpec(tuple(heads)), "; ".join(notes)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        answers_of_heads = [
            f"{head.name}: {each.show(self._answers(answers, k), index, head.labels or None).label}"
            for k, (head, each) in enumerate(zip(self.head.heads, self.adapters, strict=True))
        ]
        return Said("; ".join(answers_of_heads), None)

    def truth_line(self, truth: HeadLabels, labels: Sequence[str] | None) -> str:
        pairs = zip(self.head.heads, truth.labels, strict=True)
        return "; ".join(f"{head.name}: {label.shown}" for head, label in pairs)

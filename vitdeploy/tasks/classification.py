"""Classification: class folders, top-1 and top-5."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from vitdeploy.data import decoding, folder
from vitdeploy.data.classes import ClassMap, match_folders, match_listed, match_numbers, match_words
from vitdeploy.runtime.postprocess import softmax
from vitdeploy.runtime.tasks.classification import classify
from vitdeploy.tasks import adapter, counted, images
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification.agreement import Agreement, Tally, tally
from vitdeploy.verification.changes import Changes, Counts, judged
from vitdeploy.verification.classes import Classified
from vitdeploy.verification.comparison import Comparison, doubt_accuracy
from vitdeploy.verification.records import Answers

# By the kind of class names in the data (`containers.listing.ClassKind`).
MATCH = {"folders": match_folders, "words": match_words, "list": match_listed, "numbers": match_numbers}
COSINES: tuple[Measure, ...] = (Measure("Cosine, mean", "cosine_mean", 5), Measure("Cosine, least", "cosine_min", 5))


class ClassificationAdapter(counted.CountedAdapter):
    compared = Agreement
    metrics = (Metric("top-1", words="top-1 accuracy", title="Top-1"),)
    measures = (Measure("Top-5, %", "top5", original=True), Measure("KL, nats", "kl", None), *COSINES)
    guard = 95.0
    score: ClassVar[str | None] = "the confidence"
    in_words = True
    attention = True
    named_by_data = True

    def find(self, choice: adapter.DataChoice, skipped: decoding.Skipped | None = None) -> images.FoundData:
        """Return the images with the model's classes as labels."""
        parts, mapping = self._listed(choice)
        samples = tuple(parts.calibration), tuple(parts.evaluation)
        return images.FoundData(folder.DataSplit(*samples, parts.classes, notes=parts.notes), mapping=mapping)

    def listed(self, choice: adapter.DataChoice, *, skip_bad: bool) -> adapter.Data:
        parts, mapping = self._listed(choice)
        return adapter.Data(choice.path, (), parts.evaluation, mapping=mapping, remarks=parts.notes)

    def _listed(self, choice: adapter.DataChoice) -> tuple[folder.ListedSplit, ClassMap | None]:
        """As `find`, for a folder of any size.

        Raises:
            DataError: the wrong kind of labels, or classes that are not the model's.
        """
        adapter.check_labels(choice, self.kinds, self.setting.task)
        parts = folder.list_split(choice.path, "folders" if choice.labels == "folders" else "none", **choice.numbers)
        if not parts.classes:
            return parts, None
        found = MATCH[parts.kind](parts.classes, parts.empty, self.setting.labels, self.setting.classes)
        index = [found.index.get(name, -1) for name in parts.classes]  # -1: a folder without images
        both = parts.calibration.renumbered(index), parts.evaluation.renumbered(index)
        names = self.setting.labels
        if found.how == "position" or (found.how == "number" and not names):
            names = parts.classes if parts.kind != "numbers" else tuple(map(str, range(max(index) + 1)))
        return folder.ListedSplit(*both, names, parts.empty, notes=parts.notes), found

    @property
    def reading(self) -> dict[str, object]:
        """Logits are kept and counted unchanged."""
        return {}

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        return {"logits": outputs["logits"]}

    def count(self, ours: Answers, reference: Answers, data: adapter.Data) -> Counts:
        labels, tallies, start = adapter.labels_of(data), list[Tally](), 0
        for a, b in zip(ours.pieces("logits"), reference.pieces("logits"), strict=True):
            tallies.append(tally(a, b, None if labels is None else labels[start : start + len(a)]))
            start += len(a)
        return functools.reduce(operator.add, tallies)

    def comparison(self, counts: Counts) -> Comparison:
        assert isinstance(counts, Tally)
        return counts.agreement()

    def facts(self, answers: Answers) -> dict[str, object]:
        """Return the best classes, and the number of classes."""
        return {"best": _best(answers).tolist(), "classes": answers.columns["logits"][0].shape[0]}

    def doubt(self, reference: Answers, data: adapter.Data, found: Comparison) -> str | None:
        labels = adapter.labels_of(data)
        classes = reference.columns["logits"][0].shape[0]
        return None if labels is None else self._doubt(_best(reference), labels, classes, data.mapping)

    def doubt_counted(
        self,
        found: Comparison,
        facts: Sequence[Mapping[str, object]],
        places: Sequence[folder.Ints],
        listed: adapter.Data,
    ) -> str | None:
        assert isinstance(listed.evaluation, folder.Samples)
        labels = listed.evaluation.labels
        if labels is None:
            return None
        answers, classes = np.full(len(labels), -1), 0
        for each, at in zip(facts, places, strict=True):
            best, count = each["best"], each["classes"]
            assert isinstance(best, list) and isinstance(count, int)
            answers[at], classes = best, max(classes, count)
        read = answers >= 0
        return self._doubt(answers[read], labels[read].astype(np.int64), classes, listed.mapping)

    def _doubt(self, answers: np.ndarray, labels: np.ndarray, classes: int, mapping: ClassMap | None) -> str | None:
        """As `doubt`, from the original's best classes and the labels, int64 [n] each, in the order of the images."""
        text = doubt_accuracy(answers, labels, classes, self.setting.claim)
        return f"{text} ({mapping.text})" if text is not None and mapping is not None else text

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        """Return the changed images; the more confident the new answer, the worse."""
        found, original, labels = _best(ours), _best(reference), adapter.labels_of(data)
        right = (None, None) if labels is None else (found == labels, original == labels)
        return judged(found != original, _best_scores(ours)[:, 0], *right)

    def classified(self, answers: Answers, data: adapter.Data) -> Classified | None:
        labels = adapter.labels_of(data)
        return None if labels is None else Classified(labels, _best(answers), _best_scores(answers)[:, 0])

    def certainty(self, answers: Answers) -> np.ndarray:
        """Return the margin of the best class over the second."""
        best = _best_scores(answers)
        return np.asarray(best[:, 0] - best[:, -1])

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        best = classify(answers.columns["logits"][index], labels, 1)
        return Said(best.label, best.score)


def _best(answers: Answers) -> np.ndarray:
    return np.concatenate([logits.argmax(axis=1) for logits in answers.pieces("logits")])


def _best_scores(answers: Answers) -> np.ndarray:
    """Return the scores of the best and second class of each image, [n, 2]; [n, 1] for a model with one class."""
    pieces = (np.sort(softmax(logits), axis=1) for logits in answers.pieces("logits"))
    return np.concatenate([scores[:, :-3:-1] for scores in pieces])

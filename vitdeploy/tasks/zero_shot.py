"""Zero-shot classification: images of class folders against texts made from the folders' names, or against texts of a
file."""

import hashlib
import string
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitdeploy.data import decoding, label_file
from vitdeploy.data.classes import ClassMap
from vitdeploy.data.containers.listing import CLASSES_FILE, ClassKind
from vitdeploy.data.folder import DataSplit, Sample, list_split, split
from vitdeploy.errors import DataError
from vitdeploy.paths import name_bytes
from vitdeploy.progress import Progress
from vitdeploy.quantization.prepare import LEAST_IMAGES
from vitdeploy.runtime import flow, flows, tokenizer
from vitdeploy.runtime.postprocess import sigmoid
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks import classification, zero_shot
from vitdeploy.runtime.tokenizer import OpenVocabularySpec, ReadsTexts, ZeroShotSpec
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks.adapter import Calibration, Count, Data, DataChoice, Drive, Setting, TaskAdapter
from vitdeploy.tasks.answers import Said
from vitdeploy.tasks.classification import ClassificationAdapter
from vitdeploy.tasks.images import FoundData, labels_in
from vitdeploy.verification.records import Answers

# Number of texts that a golden image is compared with.
GOLDEN_TEXTS = 32


@dataclass(frozen=True)
class EmbeddingDrive(Drive):
    """Embeds the calibration images and texts, one by one."""

    samples: Sequence[Sample]
    tokens: tokenizer.Tokens
    preprocess: PreprocessSpec
    cut: tuple[str, ...] = ()
    noun = "images and texts"

    @property
    def total(self) -> int:
        return len(self.samples) + len(self.tokens)

    @property
    def distinct(self) -> int:
        return len(self.samples) + len(np.unique(self.tokens, axis=0))

    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        image, text = runners[flows.IMAGE_TOWER], runners[flows.TEXT_TOWER]
        tensor = image.inputs[0]
        for pixels in decoding.batches(self.samples, self.preprocess, 1):
            image.infer({tensor.name: to_input(list(pixels), self.preprocess, tensor)})
            progress(1)
        for row in self.tokens:
            text.infer({text.inputs[0].name: row[None]})
            progress(1)

    def warnings(self) -> list[str]:
        """Return warnings for each encoder, which sees only its own samples."""
        counts = {"image": len(self.samples), "text": len(np.unique(self.tokens, axis=0))}
        few = [
            f"Only {count} calibration {noun}{'s' * (count > 1)}: the ranges of that encoder will be too narrow for "
            "other inputs."
            for noun, count in counts.items()
            if count < LEAST_IMAGES
        ]
        return [*few, *self.cut]


class TextAdapter(TaskAdapter):
    """The base class of tasks with an image and a text encoder, whose classes are texts."""

    in_shards = False
    named_by_data = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        assert isinstance(setting.postprocess, ZeroShotSpec | OpenVocabularySpec)
        self.spec: ReadsTexts = setting.postprocess

    def tokens(self, texts: Sequence[str]) -> tuple[tokenizer.Tokens, tuple[str, ...]]:
        """Return int64 [texts, length] from the model's tokenizer, and its warnings about truncated texts."""
        assert self.setting.tokenizer is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = tokenizer.TextTokenizer(self.setting.tokenizer, self.spec).encode(texts)
        return found, tuple(dict.fromkeys(str(each.message) for each in caught))

    def with_texts(self, data: Data) -> Data:
        """Return the data with digests that include the texts."""
        digest = hashlib.sha256(name_bytes("\n".join(data.classes))).hexdigest()
        return replace(
            data,
            calibration_digest=data.calibration_digest + digest,
            evaluation_digest=data.evaluation_digest + digest,
        )

    def require_apart(self, texts: Sequence[str]) -> None:
        """Raise DataError if two texts have the same tokens: their answers could not be distinguished."""
        seen: dict[bytes, str] = {}
        for text, row in zip(texts, self.tokens(texts)[0], strict=True):
            if (other := seen.setdefault(row.tobytes(), text)) is not text:
                raise DataError(
                    "two texts have the same tokens, so the model cannot distinguish them",
                    found=f"{other!r} and {text!r}",
                    expected="texts that differ in known words, before the point of truncation",
                    fix="change the texts, the template, or the names of the class folders",
                )

    def drive(self, calibration: Calibration) -> EmbeddingDrive:
        tokens, cut = self.tokens(calibration.texts)
        return EmbeddingDrive(calibration.samples, tokens, self.setting.images, cut)

    def shared_golden(self, data: Data) -> dict[str, Array]:
        return {"text": self.tokens(data.classes[:GOLDEN_TEXTS])[0]}


class ZeroShotAdapter(TextAdapter, ClassificationAdapter):
    """A classifier with the texts of the data as classes. Without class folders an image's answer is its nearest
    text."""

    score = None
    attention = False

    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        return self.with_texts(super().load(choice, skip_bad=skip_bad, progress=progress))

    def find(self, choice: DataChoice, skipped: decoding.Skipped | None = None) -> FoundData:
        """Return the images; their classes are the texts."""
        parts = split(choice.path, "folders" if choice.labels == "folders" else "none", **choice.numbers)
        listed = label_file.read_texts(choice.texts) if choice.texts is not None else None
        if not parts.classes:
            if not listed:
                raise no_texts(choice.path)
            self.require_apart(listed)
            return FoundData(DataSplit(parts.calibration, parts.evaluation, listed, notes=parts.notes))
        written = texts_of(_words(parts.classes, parts.kind), choice.template)
        texts = written if listed is None else listed
        index = places(parts.classes, written, texts)
        self.require_apart(texts)
        calibration, evaluation = (
            tuple(replace(sample, label=index[sample.label]) for sample in part if sample.label is not None)
            for part in (parts.calibration, parts.evaluation)
        )
        mapping = ClassMap(
            "name", dict(zip(parts.classes, index, strict=True)), mapping_text("class folders", written, choice)
        )
        return FoundData(DataSplit(calibration, evaluation, texts, notes=parts.notes), mapping=mapping)

    def calibration(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Calibration:
        found = super().calibration(choice, skip_bad=skip_bad, progress=progress)
        listed = label_file.read_texts(choice.texts) if choice.texts is not None else None
        if listed is None and labels_in(choice.path) == "folders":
            parts = list_split(choice.path, "folders", calibration=1, evaluation="all", seed=0)
            listed = texts_of(_words(parts.classes, parts.kind), choice.template)
        if not listed:
            raise no_texts(choice.path)
        return replace(found, texts=listed)

    def bound(self, runner: Runner, data: Data) -> Runner:
        """Return the runner with the texts of the data bound, since they are the same for all images."""
        assert isinstance(self.spec, ZeroShotSpec)
        tokens = self.tokens(data.classes)[0]
        if isinstance(runner, flow.FlowRunner):
            return zero_shot.TextsBound(runner, tokens, self.spec)
        return zero_shot.TextsSent(runner, tokens, self.spec)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        """Return the best text; SigLIP's probability applies to that text only."""
        logits = answers.columns["logits"][index]
        best = classification.classify(logits, labels, 1)
        assert isinstance(self.spec, ZeroShotSpec)
        alone = self.spec.scores == "sigmoid"
        return Said(best.label, float(sigmoid(logits.max().astype(np.float64))) if alone else best.score)


def texts_of(names: Sequence[str], template: str) -> tuple[str, ...]:
    """Return the texts for classes: the template with {} replaced by each name, with spaces for underscores.

    Raises:
        DataError: the template has no {}, or another field.
    """
    fields = [name for _, name, _, _ in _parsed(template) if name is not None]
    if fields != [""]:
        raise DataError(
            f"the template {template!r} has no placeholder for a class name",
            found=f"{len(fields)} fields",
            expected="one {}, as in 'a photo of a {}'",
        )
    return tuple(template.format(name.replace("_", " ")) for name in names)


def _words(classes: tuple[str, ...], kind: ClassKind) -> tuple[str, ...]:
    """Return the names of the data's classes; DataError if they are unnamed numbers."""
    if kind == "numbers":
        raise DataError(
            "the classes of the data are numbers, which cannot become texts",
            found=", ".join(classes[:5]),
            expected="class names",
            fix=f"list their names in order, one per line, in {CLASSES_FILE} next to the data",
        )
    return classes


def _parsed(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError:
        return []


def places(
    names: Sequence[str], written: Sequence[str], texts: Sequence[str], what: str = "class folders"
) -> list[int]:
    """Return the index of each class among the texts.

    Raises:
        DataError: a class whose text is missing, or is there twice.
    """
    lost = [name for name, text in zip(names, written, strict=True) if list(texts).count(text) != 1]
    if lost:
        raise DataError(
            f"the texts do not match the {what}",
            found=f"missing or repeated texts: {', '.join(repr(written[names.index(name)]) for name in lost[:3])}",
            expected="one line for each, made from its name with the template",
            fix="change the text file, or --template (data.template)",
        )
    return [list(texts).index(text) for text in written]


def mapping_text(what: str, written: Sequence[str], choice: DataChoice) -> str:
    return f"{what} as texts, such as {written[0]!r}" + (" of the file" if choice.texts is not None else "")


def no_texts(folder: Path) -> DataError:
    return DataError(
        f"{folder} provides no texts to compare its images with",
        found="images without class folders, and no text file",
        expected="texts, one per line, as in later use",
        fix="--texts FILE (data.texts in a recipe); or class folders, whose names become texts by --template",
    )

"""Image-to-text models: agreement and error rates of their texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data import annotations, decoding, folder
from vitdeploy.errors import DataError
from vitdeploy.runtime import flows, runner, text_decoder, tokenizer
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.runtime.tasks.image_to_text import Text, to_text
from vitdeploy.runtime.tokenizer import TextSpec
from vitdeploy.spec import PreprocessSpec, SequenceSpec
from vitdeploy.tasks.adapter import Calibration, Count, Data, DataChoice, Drive, ImageAdapter, thumbnail
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison, Fields, counted_agreement, resampled_accuracy
from vitdeploy.verification.intervals import Floats, draws
from vitdeploy.verification.records import Answers

# --- Compares the texts that a model reads with the original's, and both with what is written -------------------------


@dataclass(frozen=True, kw_only=True)
class TextComparison(Comparison):
    """The texts of an artifact against the original's; n counts images. The metric is "character accuracy".

    Character accuracy is 100 minus the character error rate of all images together: 1 - (insertions, deletions and
    substitutions) / (reference characters), in percent, and 0 if there are more mistakes than characters. A character
    is a code point of Unicode; nothing is normalised. Its intervals resample images, since characters of one text are
    not independent.

    agreement: percent of images with exactly the original's text, with its Wilson interval.
    character_agreement: as character accuracy, of the artifact's texts against the original's. characters: of the
    original's texts. line_accuracy, reference_line_accuracy: percent of images whose text is entirely right. cut: texts
    of the artifact that were truncated at the model's maximum length.
    """

    characters: int
    character_agreement: float
    cut: int = 0
    line_accuracy: float | None = None
    reference_line_accuracy: float | None = None


def edit_distance(a: str, b: str) -> int:
    """Return the least number of insertions, deletions and substitutions of single characters that turn `a` into `b`.

    Wagner & Fischer 1974, "The string-to-string correction problem", Journal of the ACM 21:168-173, row by row;
    insertions within a row are a running minimum.
    """
    places = np.arange(len(b) + 1)
    target, row = np.array([*map(ord, b)], np.int64), places
    for number, character in enumerate(map(ord, a), 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (target != character))
        row = np.minimum.accumulate(np.concatenate([[number], best]) - places) + places
    return int(row[-1])


def compare_texts(
    artifact: Sequence[str],
    reference: Sequence[str],
    written: Sequence[str] | None,
    *,
    cut: int,
    max_difference: float,
) -> TextComparison:
    """Compare the texts of the same images.

    Args:
        written: the true texts, or None. cut, max_difference: passed on.

    Raises:
        ValueError: different numbers of texts, or none. DataError: the true texts are empty.
    """
    n = len(reference)
    if not n or len(artifact) != n or (written is not None and len(written) != n):
        raise ValueError(f"{len(artifact)} texts against {n}, {'no' if written is None else len(written)} written ones")
    equal = sum(a == b for a, b in zip(artifact, reference, strict=True))
    characters = sum(map(len, reference))
    apart = sum(edit_distance(a, b) for a, b in zip(artifact, reference, strict=True))
    return TextComparison(
        n=n,
        metric="character accuracy" if written is not None else None,
        **counted_agreement(equal, n),
        agreement_of="images with the same text",
        max_difference=max_difference,
        characters=characters,
        character_agreement=100 * max(0.0, 1 - apart / max(characters, 1)),
        cut=cut,
        **(_accuracy(artifact, reference, written) if written is not None else {}),
    )


def text_changes(artifact: Sequence[str], reference: Sequence[str], written: Sequence[str] | None) -> Changes:
    """Return the images with a different text; the more characters differ, the worse. Only entirely right texts count
    as right."""
    pairs = list(zip(artifact, reference, strict=True))
    changed = np.array([a != b for a, b in pairs], bool)
    size = np.array([edit_distance(a, b) / max(len(a), len(b), 1) for a, b in pairs], np.float64)
    if written is None:
        return judged(changed, size)
    right = [np.array([a == b for a, b in zip(side, written, strict=True)]) for side in (artifact, reference)]
    return judged(changed, size, *right)


def _accuracy(artifact: Sequence[str], reference: Sequence[str], written: Sequence[str]) -> Fields:
    lengths = np.array([len(text) for text in written], np.float64)
    if not lengths.sum():
        raise DataError(
            "the labels of these images contain no characters",
            found=f"{len(written)} empty texts",
            expected="the text of each image, as `text` in the label file",
        )
    ours, theirs = (
        np.array([edit_distance(text, expected) for text, expected in zip(side, written, strict=True)], np.float64)
        for side in (artifact, reference)
    )
    once = np.ones((1, len(written)))
    value, reference_value = (float(_percent(once, each, lengths)[0]) for each in (ours, theirs))
    weights = draws(len(written), 0)
    spread = _percent(weights, theirs, lengths) - _percent(weights, ours, lengths)
    return {
        **resampled_accuracy((value, reference_value), spread, [_right(side, lengths) for side in (ours, theirs)]),
        "line_accuracy": 100 * float((ours == 0).mean()),
        "reference_line_accuracy": 100 * float((theirs == 0).mean()),
    }


def _percent(weights: Floats, mistakes: Floats, lengths: Floats) -> Floats:
    """Return the character accuracy of weighted images; NaN for draws without a character."""
    total = weights @ lengths
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(100 * np.maximum(1 - (weights @ mistakes) / total, np.where(total > 0, 0.0, np.nan)))


def _right(mistakes: Floats, lengths: Floats) -> npt.NDArray[np.bool_]:
    """Return per image as many right characters as have no mistake, the same ones on both sides if possible."""
    right = [np.arange(int(length)) < length - count for count, length in zip(mistakes, lengths, strict=True)]
    return np.concatenate(right)


# --- Image to text: what is written in images, character accuracy, and whether the same text is read ------------------


# The longer side of a picture in a report: a line of text must be legible.
SHOWN_SIDE = 288


@dataclass(frozen=True)
class Writing(Drive):
    """Generates the texts of the calibration images one by one, each with the original's own tokens, until it ends:
    only steps that an app would run."""

    samples: Sequence[folder.Sample]
    preprocess: PreprocessSpec
    sequence: SequenceSpec

    def __call__(self, runners: Mapping[str, runner.Runner], progress: Count) -> None:
        encoder, step = (runners[name] for name in flows.ENCODER_DECODER.parts)
        decoder = text_decoder.TextRunner(encoder, step, self.sequence)
        decoder.load()
        for pixels in decoding.batches(self.samples, self.preprocess, 1):
            decoder.write(to_input(list(pixels), self.preprocess, encoder.inputs[0]))
            progress(1)


class ImageToTextAdapter(ImageAdapter):
    kinds = ("texts", "none")
    compared = TextComparison
    metrics = (
        Metric(
            "character accuracy",
            "Character accuracy is 100 % minus the character error rate: insertions, deletions and substitutions "
            "divided by all characters of the true texts.",
            title="Character accuracy",
        ),
    )
    measures = (
        Measure("Fully correct texts, %", "line_accuracy", original=True),
        Measure("Characters equal to the original, %", "character_agreement"),
        Measure("Truncated texts", "cut", 0),
    )
    in_words = True
    head: TextSpec

    def annotated(self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None) -> annotations.TextSet:
        return annotations.read_written(choice.path, place)

    @property
    def _sequence(self) -> SequenceSpec:
        assert self.setting.sequence is not None
        return self.setting.sequence

    @cached_property
    def _writer(self) -> tokenizer.TextWriter:
        assert self.setting.tokenizer is not None
        return tokenizer.TextWriter(self.setting.tokenizer, self.head)

    def drive(self, calibration: Calibration) -> Writing:
        return Writing(calibration.samples, self.setting.images, self._sequence)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        return outputs

    def _text(self, answers: Answers, index: int) -> Text:
        outputs = {name: answers.columns[name][index] for name in (text_decoder.TOKENS, text_decoder.SCORES)}
        return to_text(outputs, self._sequence, self._writer)

    def _texts(self, answers: Answers) -> list[str]:
        return [self._text(answers, index).text for index in range(len(answers))]

    def _written(self, data: Data) -> list[str] | None:
        known = data.truths()
        return None if known is None else [written.text for written in known]

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        return compare_texts(
            self._texts(ours),
            self._texts(reference),
            self._written(data),
            cut=sum(self._text(ours, index).cut for index in range(len(ours))),
            max_difference=score_difference(ours, reference),
        )

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return text_changes(self._texts(ours), self._texts(reference), self._written(data))

    def certainty(self, answers: Answers) -> np.ndarray | None:
        """Return the probability of each text."""
        return np.asarray(np.exp(answers.stacked(text_decoder.SCORES).astype(np.float64).sum(axis=1)))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        found = self._text(answers, index)
        return Said(found.text, float(np.exp(found.score)))

    def picture(self, data: Data, index: int) -> bytes:
        return thumbnail(self.pixels(data)[index][0], SHOWN_SIDE)

    def truth_line(self, truth: annotations.WrittenText, labels: Sequence[str] | None) -> str:
        return truth.text


def score_difference(ours: Answers, reference: Answers) -> float:
    """Return max|a - b| / max|b| of the tokens' log probabilities, up to the first different token: after it the texts
    differ."""
    worst = largest = 0.0
    columns = (
        answers.columns[name] for answers in (ours, reference) for name in (text_decoder.TOKENS, text_decoder.SCORES)
    )
    for a, scores, b, expected in zip(*columns, strict=True):
        differ = np.flatnonzero(a != b)
        steps = int(differ[0]) if len(differ) else len(a)
        worst = max(worst, float(np.abs(scores[:steps] - expected[:steps]).max(initial=0.0)))
        largest = max(largest, float(np.abs(expected).max(initial=0.0)))
    return worst / max(largest, 1e-300)

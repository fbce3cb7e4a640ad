"""Image to text: what is written in images, character accuracy, and whether the same text is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import Skipped, batches
from vitdeploy.data.texts import WrittenText, read_written
from vitdeploy.document.answers import Said
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.text import Text, to_text
from vitdeploy.runtime.text_decoder import SCORES, TOKENS, TextDecoder
from vitdeploy.runtime.tokenizer import TextWriter
from vitdeploy.spec import PreprocessSpec, SequenceSpec, TextSpec
from vitdeploy.tasks.adapter import Calibration, Count, Data, DataChoice, Found, ImageKit, thumbnail
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.plausible import doubt_value
from vitdeploy.verification.texts import compare_texts, text_changes

# The longer side of a picture in a report: a line of writing is to be read.
SHOWN_SIDE = 288


@dataclass(frozen=True)
class Writing:
    """Writes the texts of the calibration images one at a time, each with the tokens that the original chooses itself,
    until it ends: no step that an app would not run."""

    samples: Sequence[Sample]
    preprocess: PreprocessSpec
    sequence: SequenceSpec
    noun: str = field(default="images", init=False)

    @property
    def total(self) -> int:
        return len(self.samples)

    @property
    def distinct(self) -> int:
        return len(self.samples)

    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        encoder, step = (runners[name] for name in FLOWS["image-to-text"].parts)
        decoder = TextDecoder(encoder, step, self.sequence)
        for pixels in batches(self.samples, self.preprocess, 1):
            decoder.write(to_input(list(pixels), self.preprocess, encoder.inputs[0]))
            progress(1)

    def warnings(self) -> list[str]:
        return []


class ImageToTextKit(ImageKit):
    kinds = ("texts", "none")

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        found = read_written(choice.path, choice.annotations)
        return Found(found.split(**choice.numbers), found, found.annotations)

    @property
    def _sequence(self) -> SequenceSpec:
        assert self.setting.sequence is not None
        return self.setting.sequence

    @cached_property
    def _writer(self) -> TextWriter:
        assert isinstance(self.setting.postprocess, TextSpec) and self.setting.tokenizer is not None
        return TextWriter(self.setting.tokenizer, self.setting.postprocess)

    def drive(self, calibration: Calibration) -> Writing:
        return Writing(calibration.samples, self.setting.images, self._sequence)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        return outputs

    def _text(self, answers: Answers, index: int) -> Text:
        outputs = {name: answers.columns[name][index] for name in (TOKENS, SCORES)}
        return to_text(outputs, self._sequence, self._writer)

    def _texts(self, answers: Answers) -> list[str]:
        return [self._text(answers, index).text for index in range(len(answers))]

    def _written(self, data: Data) -> list[str] | None:
        return None if data.truth is None else [self._label(data, index) for index in range(len(data.evaluation))]

    def _label(self, data: Data, index: int) -> str:
        written: WrittenText = data.truth_at(index)
        return written.text

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

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        return doubt_value(found.metric, found.reference_value)

    def certainty(self, answers: Answers) -> np.ndarray | None:
        """The probability of each text."""
        return np.asarray(np.exp(answers.stacked(SCORES).astype(np.float64).sum(axis=1)))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        found = self._text(answers, index)
        return Said(found.text, float(np.exp(found.score)))

    def picture(self, data: Data, index: int) -> bytes:
        return thumbnail(self.pixels(data)[index][0], SHOWN_SIDE)

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        return None if data.truth is None else self._label(data, index)


def score_difference(ours: Answers, reference: Answers) -> float:
    """max|a - b| / max|b| of the tokens' log probabilities, up to the first token that differs: behind it they are of
    other texts."""
    worst = largest = 0.0
    columns = (answers.columns[name] for answers in (ours, reference) for name in (TOKENS, SCORES))
    for a, scores, b, wanted in zip(*columns, strict=True):
        differ = np.flatnonzero(a != b)
        steps = int(differ[0]) if len(differ) else len(a)
        worst = max(worst, float(np.abs(scores[:steps] - wanted[:steps]).max(initial=0.0)))
        largest = max(largest, float(np.abs(wanted).max(initial=0.0)))
    return worst / max(largest, 1e-300)

"""Answers of a bundle to many inputs, some possibly unreadable; needs only numpy, Pillow and one runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api.reporter import Reporter
from vitdeploy.errors import InputError
from vitdeploy.progress import Progress

if TYPE_CHECKING:
    from vitdeploy.runtime.predictor import Predictor
    from vitdeploy.runtime.sequence_predictor import SequencePredictor
    from vitdeploy.runtime.topdown import Box


@dataclass(frozen=True)
class Input:
    """One image, or one file of tokens, by the name that its answer has. `content`: of standard input."""

    name: str
    content: bytes | None = None

    @property
    def image(self) -> Path | bytes:
        return Path(self.name) if self.content is None else self.content


Answers = list[tuple[Input, list[dict[str, Any]], list[str]]]
Failures = list[tuple[Input, InputError]]


@dataclass(frozen=True)
class Predicted:
    """The result for each input: JSON values and lines in `answered`, errors in `failed`. `why`: the reason for this
    engine."""

    engine: str
    why: str
    found: Sequence[Input]
    answered: Answers
    failed: Failures


def predict(
    bundle: Path,
    find: Callable[[bool], Sequence[Input]],
    target: str = "auto",
    *,
    top: int,
    texts: Sequence[str] = (),
    boxes: Sequence[Box] = (),
    trust: Path | None,
    reporter: Reporter,
) -> Predicted:
    """Answer all inputs that can be read.

    Args:
        find: the inputs, by whether the bundle takes token files, not images.
        target: which engine, by target or name.
        top: how many classes of an image.
        texts: what images are compared with, by a bundle of two towers; () for its labels.
        boxes: what a top-down model is to answer for in each image; () for all of the image.

    Raises:
        InputError: texts for a bundle that takes none.
        Errors of `find`, and of reading and loading the bundle, as `runtime.load`.
    """
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.runtime import load, load_sequence

    task = read_bundle(bundle).task
    if texts and task != "zero-shot":
        raise InputError(f"{bundle} takes no texts", found=f"the task {task}", fix="leave --text out")
    if task == "sequence":
        found = find(True)
        with reporter, load_sequence(bundle, target, trust=trust) as translator:
            answers = _translate(translator, found, reporter.progress)
            return Predicted(translator.target, translator.why, found, *answers)
    found = find(False)
    with reporter, load(bundle, target, trust=trust) as predictor:
        if texts:
            predictor.labels = texts
        answers = _answer_boxes(predictor, found, boxes) if boxes else _answer(predictor, found, top, reporter.progress)
        return Predicted(predictor.target, predictor.why, found, *answers)


def _answer(predictor: Predictor, found: Sequence[Input], top: int, progress: Progress) -> tuple[Answers, Failures]:
    answered: Answers = []
    failed: Failures = []
    results = predictor.stream((each.image for each in found), top, return_exceptions=True)
    for done, (given, result) in enumerate(zip(found, results, strict=True), start=1):
        if isinstance(result, InputError):
            failed.append((given, result))
        else:
            lines = [f": {line}" for line in str(result).split("\n")]
            answered.append((given, [{"image": given.name, **result.to_dict()}], lines))
        if len(found) > 1:
            progress("predict", done, len(found))
    return answered, failed


def _answer_boxes(predictor: Predictor, found: Sequence[Input], boxes: Sequence[Box]) -> tuple[Answers, Failures]:
    answered: Answers = []
    failed: Failures = []
    for given in found:
        try:
            results = predictor.predict_boxes(given.image, boxes)
        except InputError as error:
            failed.append((given, error))
            continue
        lines = [f"[{row}]: {line}" for row, result in enumerate(results) for line in str(result).split("\n")]
        answered.append((given, [{"image": given.name, **result.to_dict()} for result in results], lines))
    return answered, failed


def _translate(translator: SequencePredictor, found: Sequence[Input], progress: Progress) -> tuple[Answers, Failures]:
    from vitdeploy.data.tokens import read_tokens

    answered: Answers = []
    failed: Failures = []
    for done, given in enumerate(found, start=1):
        try:
            answers = translator.predict(list(read_tokens(Path(given.name)).source))
        except InputError as error:
            failed.append((given, error))
            continue
        rows = [{"file": given.name, "row": row, **answer.to_dict()} for row, answer in enumerate(answers)]
        lines = [f"[{row}]: {' '.join(map(str, answer.tokens))}" for row, answer in enumerate(answers)]
        answered.append((given, rows, lines))
        if len(found) > 1:
            progress("predict", done, len(found))
    return answered, failed

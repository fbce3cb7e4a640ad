"""Answers of a bundle to many inputs, some possibly unreadable; needs only numpy, Pillow and one runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api.values import Reporter
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import CapabilityError, ImageError, InputError, MissingFileError
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime import load, load_sequence
from vitdeploy.runtime.preprocess import decode

if TYPE_CHECKING:
    from vitdeploy.runtime.predictor import Predictor
    from vitdeploy.runtime.prompted_predictor import PromptedPredictor
    from vitdeploy.runtime.sequence_predictor import SequencePredictor
    from vitdeploy.runtime.tasks.task import Result
    from vitdeploy.runtime.topdown import Box
    from vitdeploy.spec import Task


PROMPTED: Task = "promptable-segmentation"


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
class Point:
    """A point in pixels of an image: inside of the object that is meant, or outside."""

    x: float
    y: float
    inside: bool = True


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
    points: Sequence[Point] = (),
    beams: int | None = None,
    prompt: str | None = None,
    trust: Path | None,
    expect_digest: str | None = None,
    draw: Path | None = None,
    reporter: Reporter,
) -> Predicted:
    """Answer all inputs that can be read.

    Args:
        find: the inputs, by whether the bundle takes token files, not images.
        target: which engine, by target or name.
        top: how many classes of an image.
        texts: what images are compared with, by a bundle of two towers; () for its labels.
        boxes: what a top-down model is to answer for in each image; () for all of the image. Of promptable
            segmentation each is a prompt; with points there may be one.
        beams, prompt: of a bundle that writes texts; see `TextPredictor.predict`.
        points: of promptable segmentation: all of them are one prompt.
        trust, expect_digest: who must have signed the bundle, and the digest of its manifest, as of `runtime.load`.
        draw: a folder for pictures of the answers, made if it is not there.

    Raises:
        CapabilityError: `draw` for a task whose answers are no pictures.
        InputError: texts, points, beams or a prompt for a bundle that takes none; of promptable segmentation nothing
            that says which object is meant, or points and several boxes.
        Errors of `find`, and of reading and loading the bundle, as `runtime.load`.
    """
    task = read_bundle(bundle).task
    if draw is not None:
        _require_drawing(task)
    if texts and task not in ("zero-shot", "open-vocabulary-detection"):
        raise InputError(f"{bundle} takes no texts", found=f"the task {task}", fix="leave --text out")
    if points and task != PROMPTED:
        raise InputError(f"{bundle} takes no points", found=f"the task {task}", fix="leave --point out")
    if task == PROMPTED:
        _require_one_object(points, boxes)
    if (beams is not None or prompt is not None) and task != "image-to-text":
        asked = "--beams" if beams is not None else "--prompt"
        raise InputError(f"{bundle} writes no texts", found=f"the task {task}", fix=f"leave {asked} out")
    if task == "sequence":
        found = find(True)
        with reporter, load_sequence(bundle, target, trust=trust, expect_digest=expect_digest) as translator:
            answers = _translate(translator, found, reporter.progress)
            return Predicted(translator.target, translator.why, found, *answers)
    found = find(False)
    with reporter, load(bundle, target, trust=trust, expect_digest=expect_digest) as predictor:
        if texts:
            predictor.labels = texts
        if task == PROMPTED:
            answers = _answer_prompts(predictor, found, points, boxes, draw)  # type: ignore[arg-type]
        elif beams is not None or prompt is not None:
            answers = _read(predictor, found, beams, prompt, reporter.progress)
        elif boxes:
            answers = _answer_boxes(predictor, found, boxes, draw)
        else:
            answers = _answer(predictor, found, top, draw, reporter.progress)
        return Predicted(predictor.target, predictor.why, found, *answers)


def _require_one_object(points: Sequence[Point], boxes: Sequence[Box]) -> None:
    if not points and not boxes:
        raise InputError(
            "promptable segmentation needs a prompt: nothing says which object is meant",
            wanted="--point x,y or --box left,top,right,bottom, in pixels of the image",
        )
    if points and len(boxes) > 1:
        raise InputError(
            "all points together are one prompt, and several boxes are several",
            found=f"{len(points)} points and {len(boxes)} boxes",
            wanted="points with at most one box, or boxes alone",
            fix="ask for each object by itself",
        )


def _require_drawing(task: Task) -> None:
    from vitdeploy.runtime.tasks.registry import TASKS

    drawn = [name for name, row in TASKS.items() if row.draw is not None]
    if task not in drawn:
        raise CapabilityError(
            "the answers of this bundle cannot be drawn",
            found=f"the task {task}",
            wanted=f"one of {', '.join(drawn)}",
            fix="leave --draw out",
        )


def _draw(folder: Path, task: Task, given: Input, result: Result | Sequence[Result], taken: set[str]) -> list[str]:
    """Write the pictures of one answer, or of all for boxes of an image, under the name of the input, or the next free
    one; gives their paths."""
    from vitdeploy.runtime.tasks.registry import TASKS

    folder.mkdir(parents=True, exist_ok=True)
    stem, free = Path(given.name).stem if given.content is None else "stdin", 1
    draw = TASKS[task].draw
    assert draw is not None, "refused by _require_drawing"
    files = draw(decode(given.image, 3), result)
    name = stem
    while name in taken:
        free += 1
        name = f"{stem}-{free}"
    taken.add(name)
    for end, content in files.items():
        (folder / f"{name}{end}").write_bytes(content)
    return [str(folder / f"{name}{end}") for end in files]


def _answer(
    predictor: Predictor, found: Sequence[Input], top: int, draw: Path | None, progress: Progress
) -> tuple[Answers, Failures]:
    answered: Answers = []
    failed: Failures = []
    taken: set[str] = set()
    results = predictor.stream((each.image for each in found), top, return_exceptions=True)
    for done, (given, result) in enumerate(zip(found, results, strict=True), start=1):
        if isinstance(result, InputError):
            failed.append((given, result))
        else:
            lines = [f": {line}" for line in str(result).split("\n")]
            answer = {"image": given.name, **result.to_dict()}
            if draw is not None:
                answer["drawn"] = _draw(draw, predictor.task, given, result, taken)
            answered.append((given, [answer], lines))
        if len(found) > 1:
            progress("predict", done, len(found))
    return answered, failed


def _each(
    found: Sequence[Input],
    answer: Callable[[Input], tuple[list[dict[str, Any]], list[str]]],
    progress: Progress = silent,
    errors: tuple[type[InputError], ...] = (InputError,),
) -> tuple[Answers, Failures]:
    """The answers of inputs one after the other, and the errors of those that cannot be read."""
    answered: Answers = []
    failed: Failures = []
    for done, given in enumerate(found, start=1):
        try:
            answered.append((given, *answer(given)))
        except errors as error:
            failed.append((given, error))
            continue
        if len(found) > 1:
            progress("predict", done, len(found))
    return answered, failed


def _answer_boxes(
    predictor: Predictor, found: Sequence[Input], boxes: Sequence[Box], draw: Path | None
) -> tuple[Answers, Failures]:
    taken: set[str] = set()

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        results = predictor.predict_boxes(given.image, boxes)
        lines = [f"[{row}]: {line}" for row, result in enumerate(results) for line in str(result).split("\n")]
        drawn = {} if draw is None else {"drawn": _draw(draw, predictor.task, given, results, taken)}
        return [{"image": given.name, **result.to_dict(), **drawn} for result in results], lines

    return _each(found, answer)


def _answer_prompts(
    predictor: PromptedPredictor,
    found: Sequence[Input],
    points: Sequence[Point],
    boxes: Sequence[Box],
    draw: Path | None,
) -> tuple[Answers, Failures]:
    taken: set[str] = set()
    prompts: dict[str, Any] = {"boxes": list(boxes) or None}
    if points:
        prompts |= {
            "points": [[(point.x, point.y) for point in points]],
            "labels": [[int(point.inside) for point in points]],
        }

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        result = predictor.predict(given.image, **prompts)
        drawn = {} if draw is None else {"drawn": _draw(draw, predictor.task, given, result, taken)}
        return [{"image": given.name, **result.to_dict(), **drawn}], [f": {line}" for line in str(result).split("\n")]

    return _each(found, answer)


def _read(
    predictor: Predictor, found: Sequence[Input], beams: int | None, prompt: str | None, progress: Progress
) -> tuple[Answers, Failures]:
    """Texts, of another search than the bundle's own."""
    from vitdeploy.runtime.text_predictor import TextPredictor

    assert isinstance(predictor, TextPredictor)

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        text = predictor.predict(given.image, beams=beams, prompt=prompt)
        return [{"image": given.name, **text.to_dict()}], [f": {text}"]

    return _each(found, answer, progress, (ImageError, MissingFileError))


def _translate(translator: SequencePredictor, found: Sequence[Input], progress: Progress) -> tuple[Answers, Failures]:
    from vitdeploy.data.tokens import read_tokens

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        answers = translator.predict(list(read_tokens(Path(given.name)).source))
        rows = [{"file": given.name, "row": row, **answer.to_dict()} for row, answer in enumerate(answers)]
        return rows, [f"[{row}]: {' '.join(map(str, answer.tokens))}" for row, answer in enumerate(answers)]

    return _each(found, answer, progress)

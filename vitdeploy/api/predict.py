"""Run a bundle on many inputs, some possibly unreadable; needs only numpy, Pillow and one runtime.

Annotations of options are evaluated: no future import.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api.option import Options, advanced, option, required
from vitdeploy.api.options import EXPECT_DIGEST, FIRST_ENGINE, TRUST
from vitdeploy.api.values import Reporter
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import CapabilityError, ImageError, InputError, MissingFileError
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime import load, load_sequence, preprocess
from vitdeploy.runtime.inputs import read_further
from vitdeploy.runtime.tasks.registry import TASKS

if TYPE_CHECKING:
    from vitdeploy.runtime.gallery import EmbeddingPredictor
    from vitdeploy.runtime.predictor import Predictor
    from vitdeploy.runtime.predictors import PromptedPredictor, TextPredictor
    from vitdeploy.runtime.sequence_predictor import SequencePredictor
    from vitdeploy.runtime.tasks.task import Result
    from vitdeploy.spec import Task


@dataclass(frozen=True)
class Input:
    """One image or one file of tokens. `name` also names the answer; `content`: the bytes read from standard input."""

    name: str
    content: bytes | None = None

    @property
    def image(self) -> Path | bytes:
        return Path(self.name) if self.content is None else self.content


Answers = list[tuple[Input, list[dict[str, Any]], list[str]]]
Failures = list[tuple[Input, InputError]]


@dataclass(frozen=True)
class Predict(Options):
    """A box is (left, top, right, bottom) in pixels of an image. A point is (x, y) in pixels, and whether it is inside
    the object; all points together are one prompt."""

    bundle: Path = field(metadata=required(place="one"))
    inputs: Sequence[str] = field(metadata=required(place="many", kind="input"))
    target: str = option("auto", FIRST_ENGINE)
    top: int = option(3, "Number of classes, or of images of --gallery, to show.", min=1)
    texts: Sequence[str] = option((), "Text to compare the images with. Repeatable.", flag="--text")
    beams: int | None = advanced(None, "Beams of a text search; 1: greedy. Default: the bundle's.")
    prompt: str | None = advanced(None, "Start of the text, such as the task prompt of a Donut model.")
    beside: Sequence[str] = advanced(
        (),
        "Further model input, a .npy or .png file; the same for all images. Repeatable.",
        flag="--input",
        metavar="NAME=FILE",
    )
    boxes: Sequence[tuple[float, float, float, float]] = option(
        (),
        "Box in pixels: find the key points or the mask of the object in it. Repeatable.",
        flag="--box",
        kind="box",
        metavar="L,T,R,B",
    )
    points: Sequence[tuple[float, float, bool]] = option(
        (),
        "Point (pixels) of the object to segment; 0: outside of it. All points describe one object. Repeatable.",
        flag="--point",
        kind="point",
        metavar="X,Y[,0|1]",
    )
    gallery: Path | None = option(
        None,
        "Find the most similar images (by embedding) in this folder or saved gallery.",
        kind="path",
        metavar="DIR-or-FILE",
    )
    draw: Path | None = option(
        None,
        "Folder for a picture of each answer: boxes, segments, classes, depth or masks.",
        kind="folder",
        metavar="DIR",
    )
    expect_digest: str | None = option(None, EXPECT_DIGEST)
    trust: Path | None = option(None, TRUST)


@dataclass(frozen=True)
class Predicted:
    """The result for each input: JSON values and lines in `answered`, errors in `failed`. `why`: the reason for the
    choice of the engine."""

    engine: str
    why: str
    answered: Answers
    failed: Failures


def predict(options: Predict, find: Callable[[bool], Sequence[Input]], reporter: Reporter) -> Predicted:
    """Answer all readable inputs. `find(tokens)` returns the inputs: token files if `tokens`, else images.

    Raises:
        CapabilityError: `draw` for a task whose answers cannot be drawn.
        InputError: texts, points, beams, a prompt, inputs or a gallery that the bundle does not take; promptable
            segmentation without a prompt, or with points and several boxes; a gallery of another model.
        Errors of `find`, and of reading and loading the bundle, as `runtime.load`.
    """
    bundle, texts, searched = options.bundle, options.texts, (options.beams, options.prompt) != (None, None)
    task = read_bundle(bundle).task
    takes = TASKS[task].takes
    if options.draw is not None:
        _require_drawing(task)
    if texts and takes != "texts":
        raise InputError(f"{bundle} takes no texts", found=f"the task {task}", fix="leave --text out")
    if options.points and takes != "prompts":
        raise InputError(f"{bundle} takes no points", found=f"the task {task}", fix="leave --point out")
    if takes == "prompts":
        _require_one_object(options)
    if searched and task != "image-to-text":
        flag = "--beams" if options.beams is not None else "--prompt"
        raise InputError(f"{bundle} writes no texts", found=f"the task {task}", fix=f"leave {flag} out")
    if options.beside and takes != "images":
        raise InputError(f"{bundle} takes no further inputs", found=f"the task {task}", fix="leave --input out")
    if options.gallery is not None and task != "embedding":
        raise InputError(f"{bundle} cannot search a gallery", found=f"the task {task}", fix="leave --gallery out")
    inputs = find(takes == "tokens")
    if len(inputs) == 1 and takes != "tokens":
        preprocess.file_of(inputs[0].image)  # an error about the only image comes before the engine is loaded
    loaded: Any = load_sequence if takes == "tokens" else load
    with (
        reporter,
        loaded(bundle, options.target, trust=options.trust, expect_digest=options.expect_digest) as predictor,
    ):
        if texts:
            predictor.labels = texts
        if takes == "tokens":
            answers = _translate(predictor, inputs, reporter.progress)
        elif takes == "prompts":
            answers = _answer_prompts(predictor, inputs, options)
        elif searched:
            answers = _read(predictor, inputs, options, reporter.progress)
        elif options.gallery is not None:
            answers = _search(predictor, inputs, options.gallery, options.top, reporter.progress)
        elif options.boxes:
            answers = _answer_boxes(predictor, inputs, options)
        elif takes == "images" and (options.beside or predictor.inputs):
            answers = _answer_with(predictor, inputs, options, reporter.progress)
        else:
            answers = _answer(predictor, inputs, options, reporter.progress)
        return Predicted(predictor.target, predictor.why, *answers)


def _require_one_object(options: Predict) -> None:
    points, boxes = options.points, options.boxes
    if not points and not boxes:
        raise InputError(
            "promptable segmentation needs a prompt",
            found="no point and no box",
            expected="--point x,y or --box left,top,right,bottom, in pixels of the image",
        )
    if points and len(boxes) > 1:
        raise InputError(
            "points cannot be combined with several boxes: all points describe one object",
            found=f"{len(points)} points and {len(boxes)} boxes",
            expected="points with at most one box, or only boxes",
            fix="run one command per object",
        )


def _require_drawing(task: "Task") -> None:
    drawn = [name for name, row in TASKS.items() if row.draw is not None]
    if task not in drawn:
        raise CapabilityError(
            "the answers of this bundle cannot be drawn",
            found=f"the task {task}",
            expected=f"one of {', '.join(drawn)}",
            fix="leave --draw out",
        )


def _drawn(
    folder: Path | None, task: "Task", given: Input, result: "Result | Sequence[Result]", taken: set[str]
) -> dict[str, list[str]]:
    """Write the pictures of one answer, or of the answers for all boxes of an image, under the name of the input or the
    next free one. Return their paths; {} without a folder."""
    if folder is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    stem, free = Path(given.name).stem if given.content is None else "stdin", 1
    draw = TASKS[task].draw
    assert draw is not None, "refused by _require_drawing"
    files = draw(preprocess.decode(given.image, 3), result)
    name = stem
    while name in taken:
        free += 1
        name = f"{stem}-{free}"
    taken.add(name)
    for end, content in files.items():
        (folder / f"{name}{end}").write_bytes(content)
    return {"drawn": [str(folder / f"{name}{end}") for end in files]}


def _answer(
    predictor: "Predictor", inputs: Sequence[Input], options: Predict, progress: Progress
) -> tuple[Answers, Failures]:
    answered: Answers = []
    failed: Failures = []
    taken: set[str] = set()
    results = predictor.stream((each.image for each in inputs), options.top, return_exceptions=True)
    for done, (given, result) in enumerate(zip(inputs, results, strict=True), start=1):
        if isinstance(result, InputError):
            failed.append((given, result))
        else:
            drawn = _drawn(options.draw, predictor.task, given, result, taken)
            answered.append((given, [{"image": given.name, **result.to_dict(), **drawn}], _lines(result)))
        if len(inputs) > 1:
            progress("predict", done, len(inputs))
    return answered, failed


def _lines(result: object) -> list[str]:
    return [f": {line}" for line in str(result).split("\n")]


def _each(
    inputs: Sequence[Input],
    answer: Callable[[Input], tuple[list[dict[str, Any]], list[str]]],
    progress: Progress = silent,
    errors: tuple[type[InputError], ...] = (InputError,),
) -> tuple[Answers, Failures]:
    """Answer the inputs one by one; return the answers, and the errors of unreadable inputs."""
    answered: Answers = []
    failed: Failures = []
    for done, given in enumerate(inputs, start=1):
        try:
            answered.append((given, *answer(given)))
        except errors as error:
            failed.append((given, error))
            continue
        if len(inputs) > 1:
            progress("predict", done, len(inputs))
    return answered, failed


def _answer_boxes(predictor: "Predictor", inputs: Sequence[Input], options: Predict) -> tuple[Answers, Failures]:
    taken: set[str] = set()

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        results = predictor.predict_boxes(given.image, options.boxes)
        lines = [f"[{row}]{line}" for row, result in enumerate(results) for line in _lines(result)]
        drawn = _drawn(options.draw, predictor.task, given, results, taken)
        return [{"image": given.name, **result.to_dict(), **drawn} for result in results], lines

    return _each(inputs, answer)


def _answer_prompts(
    predictor: "PromptedPredictor", inputs: Sequence[Input], options: Predict
) -> tuple[Answers, Failures]:
    taken: set[str] = set()
    prompts: dict[str, Any] = {"boxes": list(options.boxes) or None}
    if options.points:
        prompts["points"] = [[(x, y) for x, y, _ in options.points]]
        prompts["labels"] = [[int(inside) for _, _, inside in options.points]]

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        result = predictor.predict(given.image, **prompts)
        drawn = _drawn(options.draw, predictor.task, given, result, taken)
        return [{"image": given.name, **result.to_dict(), **drawn}], _lines(result)

    return _each(inputs, answer)


def _answer_with(
    predictor: "Predictor", inputs: Sequence[Input], options: Predict, progress: Progress
) -> tuple[Answers, Failures]:
    """Answer with a model that takes more than the image; the further inputs are the same for every image."""
    brought, taken = dict(map(_named, options.beside)), set[str]()
    beside = read_further(brought, predictor.inputs)

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        result = predictor.predict_with(given.image, beside, options.top)
        drawn = _drawn(options.draw, predictor.task, given, result, taken)
        return [{"image": given.name, **result.to_dict(), **drawn}], _lines(result)

    return _each(inputs, answer, progress)


def _named(text: str) -> tuple[str, str]:
    name, _, file = text.partition("=")
    if not name or not file:
        raise InputError("--input has an invalid value", found=text, expected="NAME=FILE, a .npy or .png")
    return name, file


def _search(
    predictor: "EmbeddingPredictor", inputs: Sequence[Input], place: Path, top: int, progress: Progress
) -> tuple[Answers, Failures]:
    gallery = predictor.gallery(place)

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        matches = predictor.search(given.image, gallery, top)
        row = {"image": given.name, "matches": [dict(vars(match)) for match in matches]}
        return [row], [f": {match.name} {match.similarity:.3f}" for match in matches]

    return _each(inputs, answer, progress)


def _read(
    predictor: "TextPredictor", inputs: Sequence[Input], options: Predict, progress: Progress
) -> tuple[Answers, Failures]:
    """Write texts with the beams or the prompt of the options."""

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        text = predictor.predict(given.image, beams=options.beams, prompt=options.prompt)
        return [{"image": given.name, **text.to_dict()}], [f": {text}"]

    return _each(inputs, answer, progress, (ImageError, MissingFileError))


def _translate(
    translator: "SequencePredictor", inputs: Sequence[Input], progress: Progress
) -> tuple[Answers, Failures]:
    from vitdeploy.data.tokens import read_tokens

    def answer(given: Input) -> tuple[list[dict[str, Any]], list[str]]:
        answers = translator.predict(list(read_tokens(Path(given.name)).source))
        rows = [{"file": given.name, "row": row, **answer.to_dict()} for row, answer in enumerate(answers)]
        return rows, [f"[{row}]: {' '.join(map(str, answer.tokens))}" for row, answer in enumerate(answers)]

    return _each(inputs, answer, progress)

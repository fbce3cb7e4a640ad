"""What a task is to the pipeline: answers, labels, a comparison, counts in shards."""

import contextlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, TypedDict

import numpy as np
from PIL import Image

from vitdeploy.data.classes import ClassMap
from vitdeploy.data.containers.find import find_containers, root_of
from vitdeploy.data.decoding import DecodedImages, DecodedSet, Skipped, decode_images
from vitdeploy.data.folder import DataSplit, Sample, digest, split
from vitdeploy.data.inputs import InputFiles
from vitdeploy.errors import DataError
from vitdeploy.paths import is_dir
from vitdeploy.progress import Progress
from vitdeploy.runtime.inputs import Further, stacked
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.preprocess import SUFFIXES, Pixels, to_input
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import LabelKind, OutputSpec, Postprocess, PreprocessSpec, SequenceSpec, Task, TensorSpec
from vitdeploy.tasks.answers import Copies, MappingFacts, Marks, Measure, Metric, Said
from vitdeploy.tasks.images import FoundData, OfTask, calibration_images, check_images, nearest_pixels, without_copies
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.classes import Classified
from vitdeploy.verification.comparison import ClaimedAccuracy, Comparison, Control, differences, doubt_value, worst_of
from vitdeploy.verification.records import SIZE, Answers, LazyColumn, collect, gather

# --- The task adapter: one interface, which every task implements in its own way --------------------------------------


Count = Callable[[int], None]
# Of a task's own class.
Samples: TypeAlias = Sequence[OfTask]
# Pictures of answers, PNG or JPEG, each with its title: whose answer it is, or "label".
Panels: TypeAlias = Iterator[tuple[str, bytes]]
# Kinds of labels that lie apart from the images, and what `annotations` names.
PLACES = {
    "yolo": "the folder of YOLO files",
    "coco": "COCO's JSON file",
    "panoptic": "COCO's JSON file",
    "masks": "the folder of PNGs of class indices or mattes, by the names of the images",
    "depth": "the folder of .npy files or PNGs of 16 bits, by the names of the images",
    "targets": "the folder of target pictures, by the names of the images",
    "prompts": "the JSON file of prompts, beside the folder masks",
    "texts": "the JSON list of file_name and text",
    "columns": "the CSV, TSV, Parquet or JSON file with a row per image",
    "pairs": "the CSV, TSV, Parquet or JSON file of image_a, image_b and same (1 or 0)",
}


@dataclass(frozen=True)
class Setting:
    """How a model's inputs and outputs are read. `labels`: its own class names, () without; `classes`: how many;
    `claim`: the accuracy that its own files claim; `tokenizer`: the file that texts become tokens by, of a model that
    takes texts; `inputs`: what each image brings besides its pixels."""

    task: Task
    preprocess: PreprocessSpec | None
    postprocess: Postprocess | None = None
    sequence: SequenceSpec | None = None
    labels: tuple[str, ...] = ()
    classes: int | None = None
    claim: ClaimedAccuracy | None = None
    tokenizer: Path | None = None
    inputs: tuple[TensorSpec, ...] = ()

    @property
    def images(self) -> PreprocessSpec:
        assert self.preprocess is not None, "asked of a model that takes no images"
        return self.preprocess


class Numbers(TypedDict):
    """The arguments of every `split`."""

    calibration: int | None
    evaluation: int | Literal["all"]
    seed: int


# Among so many evaluation samples golden ones are looked for.
POOL = 64
# What CLIP's authors use where they use one template alone (arXiv 2103.00020, section 3.1.4).
TEMPLATE = "a photo of a {}."


@dataclass(frozen=True)
class DataChoice:
    """The choice of data in a recipe or on the command line; see the recipe's `data`. `calibration`: None for
    `data.folder.usual_calibration`. `texts`: a file, one a line; `template`: what makes the name of a class folder a
    text, for models that take texts. `inputs`: the folder of what each image brings besides its pixels."""

    path: Path
    labels: str
    annotations: Path | None
    calibration: int | None
    evaluation: int | Literal["all"]
    seed: int
    texts: Path | None = None
    template: str = TEMPLATE
    inputs: Path | None = None

    @property
    def numbers(self) -> Numbers:
        """The number of samples of each part, and the seed, as every `split` takes them."""
        return {"calibration": self.calibration, "evaluation": self.evaluation, "seed": self.seed}


@dataclass(frozen=True)
class Data:
    """Samples that choices may be made on, samples that they are judged on, and what is known of these.

    `classes` are the names of the model's classes, as the model or the data has them; () if labels are not classes.
    `truth`: by sample path, None without. `unannotated`: how many images of an annotated set have no annotation, None
    of any other. `mapping`: how the data's classes became the model's, None without classes. `copies`: images of the
    same bytes, which `evaluation` holds once; None where there are none. `remarks`: what was assumed, repaired
    or left out; `doubts`: what makes all numbers on these labels doubtful. `decoded`: the pixels of evaluation images.
    `inputs`: what each image brings besides its pixels, of a model that takes more.
    """

    root: Path
    calibration: Samples
    evaluation: Samples
    calibration_digest: str = ""
    evaluation_digest: str = ""
    classes: tuple[str, ...] = ()
    truth: Mapping[Path, OfTask] | None = None
    skipped: tuple[str, ...] = ()
    unannotated: int | None = None
    mapping: ClassMap | None = None
    copies: Copies | None = None
    remarks: tuple[str, ...] = ()
    decoded: DecodedSet | None = field(default=None, repr=False, compare=False)
    doubts: tuple[str, ...] = ()
    inputs: InputFiles | None = None

    def truths(self) -> list[OfTask] | None:
        """What is known of the evaluation samples, in their order; None without labels."""
        return None if self.truth is None else [self.truth[sample.path] for sample in self.evaluation]

    def truth_at(self, index: int) -> OfTask:
        """What is known of one evaluation sample, of labelled data."""
        assert self.truth is not None
        return self.truth[self.evaluation[index].path]

    @property
    def mapping_facts(self) -> MappingFacts | None:
        """The mapping as documents have it."""
        found = self.mapping
        return None if found is None else MappingFacts(found.how, len(found.index), found.text)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for people on the data, before any work."""
        return (*(self.mapping.notes if self.mapping is not None else ()), *self.remarks)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes all numbers on these labels doubtful: for people before any work, and before the verdict."""
        return (*(self.mapping.warnings if self.mapping is not None else ()), *self.doubts)


@dataclass(frozen=True)
class Calibration:
    """Samples to calibrate on, the paths of those that cannot be read, texts, of a model that takes texts, and what
    each image brings besides its pixels."""

    samples: Samples
    skipped: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    inputs: InputFiles | None = None


@dataclass(frozen=True)
class Drive(ABC):
    """Runs a model's float graphs on its calibration samples: whatever flows into each graph is what it is calibrated
    on. `noun`: what a sample is called, in the plural."""

    samples: Samples
    noun: ClassVar[str] = "images"

    @property
    def total(self) -> int:
        """How many samples there are."""
        return len(self.samples)

    @property
    def distinct(self) -> int:
        """How many of them differ."""
        return self.total

    @abstractmethod
    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        """Run all samples through loaded runners of all graphs, by name; `progress` is called with how many are
        done since its last call."""

    def warnings(self) -> list[str]:
        """What may be wrong with the samples, a sentence each; to be asked after the run."""
        return []


@dataclass(frozen=True)
class InputsDrive(Drive):
    """Runs one graph that takes more than the image: images of the calibration, each with what it brings."""

    preprocess: PreprocessSpec
    inputs: InputFiles

    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        [runner] = runners.values()
        image, held = runner.inputs[0], list[tuple[Pixels, Further]]()
        size = batch if isinstance(batch := image.shape[0], int) else 1
        if self.total % size:
            raise DataError(
                f"the graph has the fixed batch {size}",
                found=f"{self.total} calibration images",
                expected=f"a multiple of {size}",
                fix=f"data.calibration.images: {max(1, self.total // size) * size}, or --num-samples",
            )
        for sample, pixels, _ in decode_images(self.samples, self.preprocess):
            held.append((pixels, self.inputs.of(sample)))
            if len(held) == size:
                tensor = to_input([each for each, _ in held], self.preprocess, image)
                runner.infer({image.name: tensor, **stacked([brought for _, brought in held])})
                progress(size)
                held = []


class TaskAdapter(ABC):
    """The task's answers to: which data, what to keep of the answers, do they agree, how are they shown.

    compared: the class of its comparisons. metrics, measures: the columns of reports. counts: the field of a comparison
    with how many answers of the original an agreement is a share of, where that can be nothing.
    guard: the percentage of the original's answers that an engine must provably give if no budget bounds the loss.
    changed_when: which answers count as changed, in a sentence; "" where that goes without saying.
    score: what the score of an answer is, None where answers have none. in_words: its answer in words is the whole
    answer, so that it is right where it is the label. attention: it is read from tokens over patches.
    named_by_data: the classes of its data are those of its answers, so that a bundle carries their names where the
    model has none. Otherwise folders may be called as people are, of whom an app is to know nothing.
    """

    compared: ClassVar[type[Comparison]]
    metrics: ClassVar[tuple[Metric, ...]] = ()
    measures: ClassVar[tuple[Measure, ...]] = ()
    counts: ClassVar[str] = ""
    guard: ClassVar[float] = 90.0
    changed_when: ClassVar[str] = ""
    score: ClassVar[str | None] = None
    in_words: ClassVar[bool] = False
    attention: ClassVar[bool] = False
    named_by_data: ClassVar[bool] = False
    noun = "image"
    # Whether it can answer some of the samples at a time: `parts`.
    divisible = False
    # The kind of labels that say more of a calibration image than its pixels do, such as prompts; None if none does.
    calibrated_on: LabelKind | None = None

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.head: OfTask = setting.postprocess  # of the task's own class

    @abstractmethod
    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        """Find the data, read all of it once, and split it. Errors of data and images propagate."""

    @abstractmethod
    def answers(self, runner: Runner, data: Data, progress: Count) -> Answers:
        """An artifact's answers to the evaluation samples, as far as `compare` and `show` need them."""

    def parts(self, runner: Runner, data: Data, ranges: Sequence[range], progress: Count) -> Iterator[Answers]:
        """The same in parts, of a task that is `divisible`: the answers to each of some ranges of the samples. They
        begin at multiples of `collect.CHUNK`, so each image is computed with the same others."""
        raise AssertionError("of tasks that are divisible")

    @abstractmethod
    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        """`ours` against `reference` on the evaluation samples; of a task's own class."""

    def verify(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        """`compare`, with the control: that of `unrelated` answers, the most alike of them."""
        found = self.compare(ours, reference, data)
        if found.control is not None or len(reference) < 2:
            return found
        others = []
        for each in self.unrelated(ours, reference, data):
            with contextlib.suppress(ValueError):  # of other shapes
                others.append(self.compare(each, reference, data))
        return controlled(found, others) if others else found

    def unrelated(self, ours: Answers, reference: Answers, data: Data) -> Iterator[Answers]:
        """Answers that have nothing to do with what an image shows: those to other images, half of all further on.
        Labels lie beside the images, so each is read at its place's size."""
        n = len(reference)
        yield self.moved(ours, [(index + n // 2) % n for index in range(n)], reference)

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        """The answers in another order, as of images of the sizes that `reference` has answers of."""

        def moved(column: Sequence[np.ndarray]) -> LazyColumn:
            return LazyColumn(len(order), lambda index: column[order[index]])

        columns = answers.columns.items()
        return Answers({name: column if name == SIZE else moved(column) for name, column in columns})

    def unlike(self, reference: Answers, data: Data, count: int) -> list[int]:
        """Evaluation samples whose answers differ from each other, then the first others: `count`, or all."""
        pool = min(POOL, len(reference))
        left, chosen = list(range(pool)), list[int]()
        head = Answers({name: LazyColumn(pool, column.__getitem__) for name, column in reference.columns.items()})
        part = replace(data, evaluation=data.evaluation[:pool])
        while left and len(chosen) < count:
            chosen.append(left[0])
            changed = self.changes(self.moved(head, [left[0]] * pool, head), head, part).changed
            left = [index for index in left if changed[index] and index != chosen[-1]]
        others = [index for index in range(len(reference)) if index not in chosen]
        return [*chosen, *others[: count - len(chosen)]]

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        """A reason to doubt the original's own answers, in a sentence; None without one. `found`: the result of
        `compare` for some artifact."""
        return doubt_value(found.metric, found.reference_value)

    @abstractmethod
    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        """One answer for the report."""

    @abstractmethod
    def picture(self, data: Data, index: int) -> bytes | None:
        """A PNG or JPEG of one evaluation sample as the model sees it; None if it is no image."""

    @abstractmethod
    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        """The ground truth of one evaluation sample, in a line; None if unknown."""

    @abstractmethod
    def golden_inputs(self, data: Data, chosen: Sequence[int]) -> np.ndarray:
        """Some evaluation samples as an engine takes them: uint8 [n, height, width, channels], or tokens."""

    @abstractmethod
    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        """The evaluation samples with different answers, and how bad each difference is."""

    @abstractmethod
    def sample_name(self, data: Data, index: int) -> str:
        """The name by which people can find one evaluation sample."""

    def shared_golden(self, data: Data) -> dict[str, np.ndarray]:
        """What all golden inputs have in common, by name; {} where a sample is the only input."""
        return {}

    def brought(self, data: Data, chosen: Sequence[int]) -> dict[str, np.ndarray]:
        """What some evaluation samples bring besides their pixels, [n, ...] by name; {} of a model of images alone."""
        return {} if data.inputs is None else stacked([data.inputs.of(data.evaluation[index]) for index in chosen])

    def drive(self, calibration: Calibration) -> Drive | None:
        """What runs a model of several graphs, or one that takes more than the image, on its calibration samples; None
        of any other."""
        if calibration.inputs is None:
            return None
        return InputsDrive(calibration.samples, self.setting.images, calibration.inputs)

    def input_files(self, choice: DataChoice) -> InputFiles | None:
        """Where the images of a choice have what they bring besides their pixels; errors as `InputFiles.of_images`."""
        return InputFiles.of_images(choice.inputs, choice.path, self.setting.inputs)

    def calibration(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Calibration:
        """The samples that `choice` asks for to calibrate on (0: all), in seeded order; errors as `load`."""
        count = choice.calibration or None
        spec, inputs = self.setting.images, self.input_files(choice)
        if choice.annotations is None or self.calibrated_on is None:
            found = calibration_images(choice.path, count, choice.seed, spec, skip_bad=skip_bad, progress=progress)
            if inputs is not None:
                inputs.require_own(found[0])
                for sample in found[0]:  # each is read before any work
                    inputs.of(sample)
            return Calibration(*found, inputs=inputs)
        check_labels(choice, (self.calibrated_on,), self.setting.task)
        skipped = Skipped([])
        chosen = DataSplit(self.labelled(choice, count, skipped if skip_bad else None), ())
        checked, _, bad = check_images(chosen, spec, skip_bad=skip_bad, progress=progress)
        return Calibration(checked.calibration, (*skipped.paths, *bad))

    def labelled(self, choice: DataChoice, count: int | None, skipped: Skipped | None) -> tuple[Sample, ...]:
        """The samples of `count` images (None: all) with their labels, of a task that is `calibrated_on` some.
        Unreadable images are noted in `skipped` and left out; None: an error."""
        raise AssertionError("of tasks that are calibrated on labels")

    def fits(self, data: Data) -> bool:
        """Whether `fit` has something to choose, such as thresholds, and labels to choose by."""
        return False

    def fit(self, answers: Answers, data: Data) -> tuple[OutputSpec, str]:
        """What the outputs mean by the original's `answers` to labelled calibration samples, which are the evaluation
        samples of `data` here, and a note on that."""
        raise AssertionError("of tasks with something to choose")

    def classified(self, answers: Answers, data: Data) -> Classified | None:
        """Each sample's class, and the one that it was taken for; None without labels, or where samples have none."""
        return None

    def certainty(self, answers: Answers) -> np.ndarray | None:
        """float64 [n], how sure each answer is; None if the task does not say."""
        return None

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Panels:
        """Pictures of the answers of these artifacts to one sample, and of its label; none if words say it all."""
        return iter(())

    def marks(self, engine: str, ours: Answers, reference: Answers, index: int) -> Marks | None:
        """Marks to draw on the picture of a sample for which `engine` answered `ours`; None if there are none."""
        return None


def controlled(found: Comparison, unrelated: Sequence[Comparison]) -> Comparison:
    """The comparison with the control that these are, the one that is most alike."""
    most = max(unrelated, key=lambda each: each.agreement)
    return replace(found, control=Control(most.agreement, most.value, unrelated[0].max_difference))


def with_maps_of(answers: Answers, name: str, reference: Answers) -> Answers:
    """The answers with their maps [height, width] of a name at the sizes of those of `reference`."""
    maps, expected = answers.columns[name], reference.columns[name]
    resized = LazyColumn(len(expected), lambda index: nearest_pixels(maps[index], expected[index].shape))
    return Answers({**answers.columns, name: resized})


class ImageAdapter(TaskAdapter):
    """The base of all tasks on images. `kinds`: the kinds of labels that the task uses."""

    kinds: tuple[str, ...] = ("folders", "none")
    divisible = True

    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        check_labels(choice, self.kinds, self.setting.task)
        inputs, unread = self.input_files(choice), Skipped([])
        found = self.find(choice, unread if skip_bad else None)
        if inputs is not None:
            inputs.require_own((*found.parts.calibration, *found.parts.evaluation))
        chosen, known, copies, (notes, doubts) = without_copies(found, None if inputs is None else inputs.content)
        parts, decoded, skipped = check_images(chosen, self.setting.images, skip_bad=skip_bad, progress=progress)
        labels, mapping, root = found.annotated, found.mapping, root_of(choice.path)
        calibration, evaluation = (
            digest(part, root, [known[id(sample)] for sample in part]) for part in (parts.calibration, parts.evaluation)
        )
        return Data(
            root=root,
            calibration=parts.calibration,
            evaluation=parts.evaluation,
            calibration_digest=calibration,
            evaluation_digest=evaluation
            + (labels.digest(parts.evaluation) if labels is not None else "")
            + (mapping.digest if labels is not None and mapping is not None else ""),
            classes=() if labels is not None else parts.classes,
            truth=found.truth,
            skipped=(*unread.paths, *skipped),
            unannotated=labels.unannotated if labels is not None else None,
            mapping=mapping,
            copies=copies,
            remarks=(*parts.notes, *(labels.notes if labels is not None else ()), *notes),
            decoded=decoded,
            doubts=(*(labels.warnings if labels is not None else ()), *doubts),
            inputs=inputs,
        )

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> FoundData:
        """The images of a choice, split; with class folders where `choice.labels` says so. Where labels have to fit
        an image's size, the unreadable are noted in `skipped` and left out; None: an error."""
        if choice.annotations is not None and choice.labels in PLACES:
            return self.find_annotated(choice, choice.annotations, skipped)
        return FoundData(split(choice.path, "folders" if choice.labels == "folders" else "none", **choice.numbers))

    def find_annotated(self, choice: DataChoice, place: Path, skipped: Skipped | None) -> FoundData:
        """The same with labels that lie apart from the images, at `place`."""
        raise AssertionError("of tasks with such labels")

    def answers(self, runner: Runner, data: Data, progress: Count) -> Answers:
        brought = None if data.inputs is None else data.inputs.each(data.evaluation)
        return collect(self.bound(runner, data), self.pixels(data), self.setting.images, self.keep, progress, brought)

    def parts(self, runner: Runner, data: Data, ranges: Sequence[range], progress: Count) -> Iterator[Answers]:
        pixels = self.pixels(data)
        with Predictor(self.bound(runner, data), self.setting.images) as predictor:
            for part in ranges:
                samples = data.evaluation[part.start : part.stop]
                brought = None if data.inputs is None else data.inputs.each(samples)
                yield gather(predictor, pixels.some(part), self.keep, progress, further=brought, fill=True)

    def bound(self, runner: Runner, data: Data) -> Runner:
        """The runner as it takes images alone."""
        return runner

    def pixels(self, data: Data) -> DecodedImages:
        """The evaluation images as this model sees them."""
        assert data.decoded is not None
        return data.decoded.of(self.setting.images)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The outputs to keep for one image: all of them, and its size."""
        return {**outputs, "size": np.array(size, np.int64)}

    def picture(self, data: Data, index: int) -> bytes:
        return thumbnail(self.pixels(data)[index][0])

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        if data.truth is not None:
            return self.truth_line(data.truth_at(index), labels)
        label = data.evaluation[index].label
        return data.classes[label] if label is not None else None

    def truth_line(self, truth: OfTask, labels: Sequence[str] | None) -> str | None:
        """What is known of a sample, in a line; None where that is a picture."""
        return None

    def sample_name(self, data: Data, index: int) -> str:
        sample: Sample = data.evaluation[index]
        return sample.name_below(data.root)

    def golden_inputs(self, data: Data, chosen: Sequence[int]) -> np.ndarray:
        pixels = self.pixels(data)
        return np.stack([pixels[index][0] for index in chosen])


def labels_of(data: Data) -> np.ndarray | None:
    """The class of each evaluation sample, int64 [n]; None without labels."""
    samples = data.evaluation
    return None if samples[0].label is None else np.array([sample.label for sample in samples], np.int64)


def thumbnail(pixels: np.ndarray, side: int = 160) -> bytes:
    """A picture of uint8 [height, width, channels], its longer side at most `side` pixels, enlarged where it is tiny: a
    PNG, or a JPEG where that is smaller, as it is of photographs."""
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    short = min(image.size)
    if short < 96:
        factor = -(-96 // short)
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((side, side))
    files = []
    for form, options in (("PNG", {"optimize": True}), ("JPEG", {"quality": 88})):
        buffer = io.BytesIO()
        image.save(buffer, form, **options)
        files.append(buffer.getvalue())
    return min(files, key=len)


def check_labels(choice: DataChoice, allowed: Sequence[str], task: Task) -> None:
    """Raise DataError for a kind of labels that the task has no use for."""
    if choice.labels not in allowed:
        raise DataError(
            f"labels of the kind {choice.labels!r} do not fit a model for {task}",
            found=f"data.labels: {choice.labels}",
            expected=", ".join(allowed),
            fix="change data.labels",
        )
    files = choice.labels not in ("folders", "none")
    if files and not is_dir(choice.path) and find_containers(choice.path, SUFFIXES) is not None:
        raise DataError(
            f"labels of the kind {choice.labels!r} are for a folder of image files",
            found=f"tars, tables or a list at {choice.path}",
            expected="image files, which the labels name",
            fix="write the images into a folder",
        )
    if choice.labels in PLACES and choice.annotations is None:
        raise DataError(
            f"labels of the kind {choice.labels!r} need a place", expected=f"data.annotations: {PLACES[choice.labels]}"
        )


def worst_difference(ours: Answers, reference: Answers, names: Sequence[str]) -> float:
    """max|a - b| / max|b| over the named outputs, the worst of them."""
    return worst_of(differences(ours, reference, names))

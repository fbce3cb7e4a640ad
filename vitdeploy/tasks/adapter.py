"""The task interface of the pipeline: data and labels, answers, and their comparison."""

import contextlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, TypedDict

import numpy as np
from PIL import Image

from vitdeploy.data.annotations import AnnotatedSet
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
# Samples are instances of a class of the task.
Samples: TypeAlias = Sequence[OfTask]
# Pictures of answers, PNG or JPEG, each with its title: the artifact's name, or "label".
Panels: TypeAlias = Iterator[tuple[str, bytes]]
# Kinds of labels stored apart from the images, and what `annotations` must name.
PLACES = {
    "yolo": "the folder of YOLO files",
    "coco": "COCO's JSON file",
    "panoptic": "COCO's JSON file",
    "masks": "the folder of PNGs of class indices or mattes, named like the images",
    "depth": "the folder of .npy files or 16-bit PNGs, named like the images",
    "targets": "the folder of target pictures, named like the images",
    "prompts": "the JSON file of prompts, next to the folder masks",
    "texts": "the JSON list of file_name and text",
    "columns": "the CSV, TSV, Parquet or JSON file with one row per image",
    "pairs": "the CSV, TSV, Parquet or JSON file of image_a, image_b and same (1 or 0)",
}


@dataclass(frozen=True)
class Setting:
    """How to interpret a model's inputs and outputs. `labels`: its class names, or (); `classes`: their number;
    `claim`: the accuracy that its own files claim; `tokenizer`: the tokenizer file of a model that takes texts;
    `inputs`: additional inputs for each image."""

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
        assert self.preprocess is not None, "the model takes no images"
        return self.preprocess


class Numbers(TypedDict):
    """The arguments of every `split`."""

    calibration: int | None
    evaluation: int | Literal["all"]
    seed: int


# Golden samples are chosen among this many evaluation samples.
POOL = 64
# The template that CLIP's authors use if they use only one (arXiv 2103.00020, section 3.1.4).
TEMPLATE = "a photo of a {}."


@dataclass(frozen=True)
class DataChoice:
    """The choice of data in a recipe or on the command line; see the recipe's `data`. `calibration`: None for
    `data.folder.usual_calibration`. `texts`: a file, one per line; `template`: turns the name of a class folder into a
    text, for models that take texts. `inputs`: the folder of additional inputs for each image."""

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
        """The number of samples of each part, and the seed: the arguments of every `split`."""
        return {"calibration": self.calibration, "evaluation": self.evaluation, "seed": self.seed}


@dataclass(frozen=True)
class Data:
    """Calibration samples, evaluation samples, and their labels.

    `classes`: the names of the model's classes, from the model or the data; () if labels are not classes.
    `truth`: labels by sample path, or None. `unannotated`: the number of images without annotation in an annotated set,
    None for other data. `mapping`: from the data's classes to the model's, None without classes. `copies`: images with
    identical bytes, which are in `evaluation` once; None without any. `remarks`: assumptions, repairs and omissions;
    `doubts`: what makes all numbers on these labels doubtful. `decoded`: the pixels of evaluation images. `inputs`:
    additional inputs for each image, if the model has any.
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
        """Return the labels of the evaluation samples, in order; None without labels."""
        return None if self.truth is None else [self.truth[sample.path] for sample in self.evaluation]

    def truth_at(self, index: int) -> OfTask:
        """Return the label of one evaluation sample of labelled data."""
        assert self.truth is not None
        return self.truth[self.evaluation[index].path]

    @property
    def mapping_facts(self) -> MappingFacts | None:
        """The mapping for JSON documents."""
        found = self.mapping
        return None if found is None else MappingFacts(found.how, len(found.index), found.text)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the data, shown to the user before any work."""
        return (*(self.mapping.notes if self.mapping is not None else ()), *self.remarks)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes all numbers on these labels doubtful: shown to the user before any work, and before the
        verdict."""
        return (*(self.mapping.warnings if self.mapping is not None else ()), *self.doubts)


@dataclass(frozen=True)
class Calibration:
    """Calibration samples, the paths of unreadable ones, texts for a model that takes texts, and additional inputs for
    each image."""

    samples: Samples
    skipped: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    inputs: InputFiles | None = None


@dataclass(frozen=True)
class Drive(ABC):
    """Runs a model's float graphs on its calibration samples, so that each graph is calibrated on the inputs it sees in
    use. `noun`: the plural name of samples."""

    samples: Samples
    noun: ClassVar[str] = "images"

    @property
    def total(self) -> int:
        """The number of samples."""
        return len(self.samples)

    @property
    def distinct(self) -> int:
        """The number of distinct samples."""
        return self.total

    @abstractmethod
    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        """Run all samples through loaded runners of all graphs, by name; `progress` is called with the number done
        since its last call."""

    def warnings(self) -> list[str]:
        """Return possible problems with the samples, a sentence each; call it after the run."""
        return []


@dataclass(frozen=True)
class InputsDrive(Drive):
    """Runs one graph with additional inputs on calibration images and their inputs."""

    preprocess: PreprocessSpec
    inputs: InputFiles

    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        [runner] = runners.values()
        image, held = runner.inputs[0], list[tuple[Pixels, Further]]()
        size = batch if isinstance(batch := image.shape[0], int) else 1
        if self.total % size:
            raise DataError(
                f"the graph has a fixed batch size of {size}",
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
    """A task: which data it reads, which outputs it keeps, how it compares answers, and how it shows them.

    compared: the class of its comparisons. metrics, measures: the columns of reports. counts: the field of a comparison
        with the denominator of the agreement, if that can be 0.
    guard: the percentage of the original's answers that an engine must provably reproduce if no budget bounds the loss.
    changed_when: a sentence that says when an answer counts as changed; "" if obvious.
    score: the meaning of an answer's score, None without scores. in_words: the answer in words is the whole answer, so
        it is right if it equals the label. attention: the model attends from tokens to patches.
    named_by_data: the classes of the data are those of the answers, so a bundle contains their names if the model has
        none. For other tasks folder names may be names of people, which an app must not contain.
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
    # Whether it can answer a part of the samples: see `parts`.
    divisible = False
    # The kind of labels that are needed for calibration, such as prompts; None if none is.
    calibrated_on: LabelKind | None = None

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.head: OfTask = setting.postprocess  # of a class of the task

    @abstractmethod
    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        """Find the data, read all of it once, and split it. Errors of data and images propagate."""

    @abstractmethod
    def answers(self, runner: Runner, data: Data, progress: Count) -> Answers:
        """Return the parts of an artifact's answers to the evaluation samples that `compare` and `show` need."""

    def parts(self, runner: Runner, data: Data, ranges: Sequence[range], progress: Count) -> Iterator[Answers]:
        """Yield the answers to each of several ranges of the samples, for a `divisible` task. Ranges begin at multiples
        of `records.CHUNK`, so each image is always in the same batch."""
        raise AssertionError("only for divisible tasks")

    @abstractmethod
    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        """Compare `ours` with `reference` on the evaluation samples; returns an instance of `compared`."""

    def verify(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        """As `compare`, with the control: the most similar of the `unrelated` answers."""
        found = self.compare(ours, reference, data)
        if found.control is not None or len(reference) < 2:
            return found
        others = []
        for each in self.unrelated(ours, reference, data):
            with contextlib.suppress(ValueError):  # other shapes
                others.append(self.compare(each, reference, data))
        return controlled(found, others) if others else found

    def unrelated(self, ours: Answers, reference: Answers, data: Data) -> Iterator[Answers]:
        """Yield answers that are unrelated to the images: the answers to other images, shifted by half of all. Each is
        read at the size of the image it is compared with, since labels have that size."""
        n = len(reference)
        yield self.moved(ours, [(index + n // 2) % n for index in range(n)], reference)

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        """Return the answers in another order, with the image sizes of `reference`."""

        def moved(column: Sequence[np.ndarray]) -> LazyColumn:
            return LazyColumn(len(order), lambda index: column[order[index]])

        columns = answers.columns.items()
        return Answers({name: column if name == SIZE else moved(column) for name, column in columns})

    def unlike(self, reference: Answers, data: Data, count: int) -> list[int]:
        """Return `count` evaluation samples (or all): those with distinct answers first."""
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
        """Return a sentence with a reason to doubt the original's own answers, or None. `found`: the result of
        `compare` for some artifact."""
        return doubt_value(found.metric, found.reference_value)

    @abstractmethod
    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        """Return one answer for the report."""

    @abstractmethod
    def picture(self, data: Data, index: int) -> bytes | None:
        """Return a PNG or JPEG of one evaluation sample as the model sees it; None if it is not an image."""

    @abstractmethod
    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        """Return the ground truth of one evaluation sample, in one line; None if unknown."""

    @abstractmethod
    def golden_inputs(self, data: Data, chosen: Sequence[int]) -> np.ndarray:
        """Return some evaluation samples as engine inputs: uint8 [n, height, width, channels], or tokens."""

    @abstractmethod
    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        """Return the evaluation samples with different answers, and the severity of each difference."""

    @abstractmethod
    def sample_name(self, data: Data, index: int) -> str:
        """Return the name by which a user can find one evaluation sample."""

    def shared_golden(self, data: Data) -> dict[str, np.ndarray]:
        """Return the inputs shared by all golden samples, by name; {} if a sample is the only input."""
        return {}

    def brought(self, data: Data, chosen: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the additional inputs of some evaluation samples, [n, ...] by name; {} for a model that takes only
        images."""
        return {} if data.inputs is None else stacked([data.inputs.of(data.evaluation[index]) for index in chosen])

    def drive(self, calibration: Calibration) -> Drive | None:
        """Return the drive that runs a model with several graphs or additional inputs on its calibration samples; None
        for other models."""
        if calibration.inputs is None:
            return None
        return InputsDrive(calibration.samples, self.setting.images, calibration.inputs)

    def input_files(self, choice: DataChoice) -> InputFiles | None:
        """Return the files of the additional inputs for the images of a choice; errors as `InputFiles.of_images`."""
        return InputFiles.of_images(choice.inputs, choice.path, self.setting.inputs)

    def calibration(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Calibration:
        """Return the calibration samples of `choice` (0: all), in seeded order; errors as `load`."""
        count = choice.calibration or None
        spec, inputs = self.setting.images, self.input_files(choice)
        if choice.annotations is None or self.calibrated_on is None:
            found = calibration_images(choice.path, count, choice.seed, spec, skip_bad=skip_bad, progress=progress)
            if inputs is not None:
                inputs.require_own(found[0])
                for sample in found[0]:  # reads all files before any work
                    inputs.of(sample)
            return Calibration(*found, inputs=inputs)
        check_labels(choice, (self.calibrated_on,), self.setting.task)
        skipped = Skipped([])
        chosen = DataSplit(self.labelled(choice, count, skipped if skip_bad else None), ())
        checked, _, bad = check_images(chosen, spec, skip_bad=skip_bad, progress=progress)
        return Calibration(checked.calibration, (*skipped.paths, *bad))

    def labelled(self, choice: DataChoice, count: int | None, skipped: Skipped | None) -> tuple[Sample, ...]:
        """Return the samples of `count` images (None: all) with the labels in `calibrated_on`. Unreadable images are
        skipped and added to `skipped`; None: an error."""
        raise AssertionError("only for tasks calibrated on labels")

    def fits(self, data: Data) -> bool:
        """Whether `fit` has something to choose, such as thresholds, and labels for it."""
        return False

    def fit(self, answers: Answers, data: Data) -> tuple[OutputSpec, str]:
        """Return the output spec fitted to the original's `answers` to labelled calibration samples (here the
        evaluation samples of `data`), and a note on it."""
        raise AssertionError("only for tasks with something to choose")

    def classified(self, answers: Answers, data: Data) -> Classified | None:
        """Return the true and the predicted class of each sample; None without labels or classes."""
        return None

    def certainty(self, answers: Answers) -> np.ndarray | None:
        """Return the certainty of each answer, float64 [n]; None if the task has none."""
        return None

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Panels:
        """Return pictures of these artifacts' answers to one sample, and of its label; none if words suffice."""
        return iter(())

    def marks(self, engine: str, ours: Answers, reference: Answers, index: int) -> Marks | None:
        """Return marks to draw on the picture of a sample that `engine` answered with `ours`, or None."""
        return None


def controlled(found: Comparison, unrelated: Sequence[Comparison]) -> Comparison:
    """Return the comparison with its control: the most similar of `others`."""
    most = max(unrelated, key=lambda each: each.agreement)
    return replace(found, control=Control(most.agreement, most.value, unrelated[0].max_difference))


def with_maps_of(answers: Answers, name: str, reference: Answers) -> Answers:
    """Return the answers with the maps [height, width] named `name` at the sizes of those in `reference`."""
    maps, expected = answers.columns[name], reference.columns[name]
    resized = LazyColumn(len(expected), lambda index: nearest_pixels(maps[index], expected[index].shape))
    return Answers({**answers.columns, name: resized})


class ImageAdapter(TaskAdapter):
    """The base class of tasks on images. `kinds`: the kinds of labels that the task uses."""

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
        """Return the images of a choice, split; with class folders if `choice.labels` says so. If labels must match the
        image size, unreadable images are skipped and added to `skipped`; None: an error."""
        if choice.annotations is not None and choice.labels in PLACES:
            return self.find_annotated(choice, choice.annotations, skipped)
        return FoundData(split(choice.path, "folders" if choice.labels == "folders" else "none", **choice.numbers))

    def find_annotated(self, choice: DataChoice, place: Path, skipped: Skipped | None) -> FoundData:
        """Return the same with labels stored apart from the images, at `place`."""
        found = self.annotated(choice, place, skipped)
        return FoundData(found.split(**choice.numbers), found, found.annotations)

    def annotated(self, choice: DataChoice, place: Path, skipped: Skipped | None) -> AnnotatedSet[OfTask]:
        """Return the images with these labels."""
        raise AssertionError("only for tasks with such labels")

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
        """Return a runner that takes only images."""
        return runner

    def pixels(self, data: Data) -> DecodedImages:
        """Return the evaluation images as this model sees them."""
        assert data.decoded is not None
        return data.decoded.of(self.setting.images)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the outputs to keep for one image: all of them, and its size."""
        return {**outputs, "size": np.array(size, np.int64)}

    def picture(self, data: Data, index: int) -> bytes:
        return thumbnail(self.pixels(data)[index][0])

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        if data.truth is not None:
            return self.truth_line(data.truth_at(index), labels)
        label = data.evaluation[index].label
        return data.classes[label] if label is not None else None

    def truth_line(self, truth: OfTask, labels: Sequence[str] | None) -> str | None:
        """Return the label of a sample, in one line; None if it is a picture."""
        return None

    def sample_name(self, data: Data, index: int) -> str:
        sample: Sample = data.evaluation[index]
        return sample.name_below(data.root)

    def golden_inputs(self, data: Data, chosen: Sequence[int]) -> np.ndarray:
        pixels = self.pixels(data)
        return np.stack([pixels[index][0] for index in chosen])


def labels_of(data: Data) -> np.ndarray | None:
    """Return the class of each evaluation sample, int64 [n]; None without labels."""
    samples = data.evaluation
    return None if samples[0].label is None else np.array([sample.label for sample in samples], np.int64)


def thumbnail(pixels: np.ndarray, side: int = 160) -> bytes:
    """Return a picture of uint8 [height, width, channels], its longer side at most `side` pixels, enlarged if tiny: as
    PNG, or as JPEG if smaller (as for photographs)."""
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
    """Raise DataError for a kind of labels that the task does not use."""
    if choice.labels not in allowed:
        raise DataError(
            f"the task {task} cannot use labels of kind {choice.labels!r}",
            found=f"data.labels: {choice.labels}",
            expected=", ".join(allowed),
            fix="change data.labels",
        )
    files = choice.labels not in ("folders", "none")
    if files and not is_dir(choice.path) and find_containers(choice.path, SUFFIXES) is not None:
        raise DataError(
            f"labels of kind {choice.labels!r} require a folder of image files",
            found=f"tars, tables or a list at {choice.path}",
            expected="image files, named in the labels",
            fix="save the images as files in a folder",
        )
    if choice.labels in PLACES and choice.annotations is None:
        raise DataError(
            f"labels of kind {choice.labels!r} need a path", expected=f"data.annotations: {PLACES[choice.labels]}"
        )


def worst_difference(ours: Answers, reference: Answers, names: Sequence[str]) -> float:
    """Return the largest max|a - b| / max|b| among the named outputs."""
    return worst_of(differences(ours, reference, names))

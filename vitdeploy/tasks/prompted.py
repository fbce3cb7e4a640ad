"""Promptable segmentation: labelled points and boxes or a grid of points, the IoU of masks, and their pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import Skipped
from vitdeploy.data.prompts import PromptedMap, PromptedSample, read_prompted
from vitdeploy.document.answers import Said
from vitdeploy.errors import EngineError
from vitdeploy.progress import Progress
from vitdeploy.runtime.drawing import class_picture
from vitdeploy.runtime.flow import FlowRunner, one_by_one, run_rows
from vitdeploy.runtime.flows import IMAGE_ENCODER, PROMPT_DECODER
from vitdeploy.runtime.preprocess import load_image, to_input
from vitdeploy.runtime.prompted import decode, embed, iou, read_masks
from vitdeploy.runtime.prompts import POINTS, Prompt, grid_prompts, prompt_arrays
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import PreprocessSpec, PromptSpec
from vitdeploy.spec.prompts import IOU_SCORES, MASKS
from vitdeploy.tasks.adapter import (
    Calibration,
    Count,
    Data,
    DataChoice,
    Found,
    ImageKit,
    Panel,
    nearest_pixels,
    thumbnail,
)
from vitdeploy.tasks.drawn import drawn
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import SIZE, Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.plausible import doubt_value
from vitdeploy.verification.prompted import PromptErrors, compare_prompted, prompted_changes

# Columns of answers: the best masks as bits, the IoU promised of them, and some of the raw logits.
BITS, PROMISED, LOGITS = "bits", "promised", "logits"
KEPT = 1 << 12


@dataclass(frozen=True)
class Prompting:
    """Embeds the calibration images one at a time, and asks for the objects of each."""

    samples: Sequence[Sample]
    preprocess: PreprocessSpec
    spec: PromptSpec
    noun: str = field(default="images", init=False)

    @property
    def total(self) -> int:
        return len(self.samples)

    @property
    def distinct(self) -> int:
        return len({sample.path for sample in self.samples})

    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        encoder, decoder = runners[IMAGE_ENCODER], runners[PROMPT_DECODER]
        tensor = encoder.inputs[0]
        for sample in self.samples:
            pixels, size = load_image(sample.path, self.preprocess)
            embedded = run_rows(encoder, {tensor.name: to_input([pixels], self.preprocess, tensor)})
            asked = prompt_arrays(_calibrating(sample, size), size, self.preprocess, self.spec)
            count = len(asked[POINTS])
            repeated = {name: np.repeat(array, count, axis=0) for name, array in embedded.items()}
            run_rows(decoder, {**repeated, **asked})
            progress(1)

    def warnings(self) -> list[str]:
        """What may be wrong with the samples."""
        if any(isinstance(sample, PromptedSample) for sample in self.samples):
            return []
        return [
            "The calibration images have no prompts: a grid of points and a box in the middle stand for them. "
            "--annotations names a file of prompts."
        ]


def _calibrating(sample: Sample, size: tuple[int, int]) -> Sequence[Prompt]:
    """The sample's own prompts; else a grid of points, and a box."""
    if isinstance(sample, PromptedSample):
        return sample.prompts
    width, height = size
    return [*grid_prompts(size), Prompt(box=(width / 4, height / 4, 3 * width / 4, 3 * height / 4))]


class PromptedKit(ImageKit):
    kinds = ("prompts", "none")
    divisible = False
    calibrated_on = "prompts"

    @property
    def _head(self) -> PromptSpec:
        assert isinstance(self.setting.postprocess, PromptSpec)
        return self.setting.postprocess

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        found = read_prompted(choice.path, choice.annotations, skipped)
        return Found(found.split(**choice.numbers), found, found.annotations)

    def labelled(self, choice: DataChoice, count: int | None, skipped: Skipped | None) -> tuple[Sample, ...]:
        assert choice.annotations is not None
        return read_prompted(choice.path, choice.annotations, skipped).to_calibrate(count, choice.seed)

    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        data = super().load(choice, skip_bad=skip_bad, progress=progress)
        asked = [sample.prompts for sample in data.calibration if isinstance(sample, PromptedSample)]
        digest = hashlib.sha256(repr(asked).encode()).hexdigest()
        return replace(data, calibration_digest=data.calibration_digest + digest)

    def drive(self, calibration: Calibration) -> Prompting:
        return Prompting(calibration.samples, self.setting.images, self._head)

    def answers(self, runner: Runner, data: Data, progress: Count) -> Answers:
        columns: dict[str, list[Array]] = {}
        broken = 0
        with runner:
            for sample, (pixels, size) in zip(data.evaluation, self.pixels(data), strict=True):
                found, finite = self._answer(runner, sample, pixels, size)
                for name, array in found.items():
                    columns.setdefault(name, []).append(array)
                broken += not finite
                progress(1)
        if broken:
            raise EngineError(
                f"{runner.name} gives outputs that are not finite",
                found=f"NaN or infinity for {broken} of {len(data.evaluation)} images",
                wanted="finite outputs",
                fix="choose another precision, or check the checkpoint",
            )
        return Answers({name: tuple(column) for name, column in columns.items()})

    def _answer(
        self, runner: Runner, sample: Sample, pixels: Array, size: tuple[int, int]
    ) -> tuple[dict[str, Array], bool]:
        """What is kept of one image, and whether all outputs are finite."""
        spec, prompts = self.setting.images, prompts_of(sample, size)
        image, arrays = to_input([pixels], spec, runner.inputs[0]), prompt_arrays(prompts, size, spec, self._head)
        if isinstance(runner, FlowRunner):
            outputs = decode(runner, embed(runner, image), arrays)
        else:
            outputs = one_by_one(runner, {runner.inputs[0].name: image, **arrays})
        found = read_masks(outputs, prompts, size, spec, self._head)
        kept = {
            BITS: np.stack([np.packbits(each.mask) for each in found.prompts]),
            PROMISED: np.array([each.score for each in found.prompts]),
            LOGITS: drawn(outputs[MASKS][0], KEPT),
            IOU_SCORES: outputs[IOU_SCORES],
            SIZE: np.array(size, np.int64),
        }
        return kept, all(bool(np.isfinite(array).all()) for array in outputs.values())

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        errors = None
        if data.truth is not None:
            errors = [self._errors(ours, reference, data, i) for i in range(len(data.evaluation))]
        raw = (_difference(ours.columns[name], reference.columns[name]) for name in (LOGITS, IOU_SCORES))
        return compare_prompted(_overlaps(ours, reference), errors, max_difference=max(raw))

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        """As many masks as the image at each place is asked for."""
        rows: list[dict[str, Array]] = []
        for place, index in enumerate(order):
            width, height = (int(side) for side in reference.columns[SIZE][place])
            masks = _masks(answers, index)
            used = np.arange(len(reference.columns[BITS][place])) % len(masks)
            bits = np.stack([np.packbits(nearest_pixels(each, (height, width))) for each in masks[used]])
            logits = np.resize(answers.columns[LOGITS][index], reference.columns[LOGITS][place].shape)
            scores = {name: answers.columns[name][index][used] for name in (PROMISED, IOU_SCORES)}
            rows.append({BITS: bits, LOGITS: logits, **scores})
        found = super().moved(answers, order, reference).columns
        return Answers({**found, **{name: [row[name] for row in rows] for name in rows[0]}})

    def _errors(self, ours: Answers, reference: Answers, data: Data, index: int) -> PromptErrors:
        truth = self._truth(data, index).load()
        a, b = (
            np.array([iou(mask, true) for mask, true in zip(_masks(each, index), truth, strict=True)])
            for each in (ours, reference)
        )
        boxes = np.array([prompt.box is not None for prompt in data.evaluation[index].prompts])
        return PromptErrors(a, b, boxes)

    def _truth(self, data: Data, index: int) -> PromptedMap:
        found = data.truth_at(index)
        assert isinstance(found, PromptedMap)
        return found

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        return doubt_value(found.metric, found.reference_value)

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return prompted_changes(_overlaps(ours, reference))

    def certainty(self, answers: Answers) -> np.ndarray:
        return np.array([float(np.clip(each.mean(), 0, 1)) for each in answers.columns[PROMISED]])

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        promised = answers.columns[PROMISED][index]
        masks = _masks(answers, index)
        shares = 100 * masks.mean(axis=(1, 2))
        said = f"{len(masks)} prompts, masks of {shares.min():.1f} to {shares.max():.1f} % of the image"
        return Said(said, float(np.clip(promised.mean(), 0, 1)))

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        sample = data.evaluation[index]
        if not isinstance(sample, PromptedSample):
            return None
        return f"{len(set(sample.instances))} objects"

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Iterator[Panel]:
        """The masks of every artifact, and the labelled ones, small ones on top."""
        for name, each in answers.items():
            yield Panel(name, _picture(_masks(each, index)))
        if data.truth is not None:
            yield Panel("label", _picture(self._truth(data, index).load()))

    def shared_golden(self, data: Data) -> dict[str, Array]:
        """A point in the middle and a box around it, whatever the image shows."""
        width, height = size = self.setting.images.crop[1], self.setting.images.crop[0]
        box = Prompt(box=(width / 4, height / 4, 3 * width / 4, 3 * height / 4))
        square = replace(self.setting.images, fit="stretch")
        return prompt_arrays([*grid_prompts(size, 1), box], size, square, self._head)


def prompts_of(sample: Sample, size: tuple[int, int]) -> Sequence[Prompt]:
    """What an image of `size` (width, height) is asked: its own prompts, or a grid of points."""
    return sample.prompts if isinstance(sample, PromptedSample) else grid_prompts(size)


def _masks(answers: Answers, index: int) -> np.ndarray:
    """bool [prompts, height, width] at the image's size."""
    width, height = (int(side) for side in answers.columns[SIZE][index])
    bits = answers.columns[BITS][index]
    found = np.unpackbits(bits, axis=1, count=width * height)
    return found.reshape(len(bits), height, width).astype(np.bool_)


def _overlaps(ours: Answers, reference: Answers) -> list[np.ndarray]:
    """Of each image the IoU of both sides' masks, float64 [prompts]."""
    return [
        np.array([iou(a, b) for a, b in zip(_masks(ours, i), _masks(reference, i), strict=True)])
        for i in range(len(reference))
    ]


def _difference(ours: Sequence[Array], reference: Sequence[Array]) -> float:
    """max|a - b| / max|b| over all images, whose numbers of prompts differ."""
    apart = max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(ours, reference, strict=True))
    return apart / max(*(float(np.abs(b).max()) for b in reference), 1e-300)


def _picture(masks: np.ndarray) -> bytes:
    """Each mask in a colour of its own."""
    found = np.full(masks.shape[1:], -1, np.int64)
    for index in np.argsort(-masks.sum(axis=(1, 2)), kind="stable"):
        found[masks[index]] = index
    return thumbnail(np.asarray(class_picture(found)))

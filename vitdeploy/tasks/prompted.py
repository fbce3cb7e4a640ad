"""Promptable segmentation: prompts, masks and their agreement."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data import annotations, decoding, folder, label_file
from vitdeploy.data.masks import read_map
from vitdeploy.errors import DataError, EngineError, InputError, MissingFileError
from vitdeploy.progress import Progress
from vitdeploy.runtime import drawing, flow, flows
from vitdeploy.runtime.preprocess import Frame, load_image, to_input
from vitdeploy.runtime.prompts import IOU_SCORES, POINTS, Prompt, PromptSpec, grid_prompts, prompt_arrays, read_prompts
from vitdeploy.runtime.prompts import MASKS as PROMPTED_MASKS
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.prompted import decode, embed, iou, read_masks
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks import adapter
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.tasks.images import drawn, nearest_pixels
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison, Fields, resampled_accuracy, resampled_agreement
from vitdeploy.verification.intervals import Floats, draws
from vitdeploy.verification.records import SIZE, Answers

# --- Compares the masks of prompted objects with the original's, and both with labelled masks -------------------------


# An object counts as found from this IoU on.
FOUND = 0.5
# An answer has changed if the mean IoU of its masks with the original's is below this.
MOVED_IOU = 0.9


@dataclass(frozen=True, kw_only=True)
class PromptComparison(Comparison):
    """A promptable segmentation model against the original. The metric is the mean IoU in percent of the best mask of
    each prompt with the labelled object.

    agreement: the mean IoU in percent of the two sides' masks. All intervals are bootstraps over the images, and none
        is narrower than that of as many independent trials as there are prompts.
    masks: the number of prompts. iou_min: the least IoU with the original's mask, 0..1. point_iou, box_iou: the metric
        for points and for boxes only, the artifact's and the original's; None without labels, or without such prompts.
    """

    masks: int
    iou_min: float
    point_iou: float | None = None
    reference_point_iou: float | None = None
    box_iou: float | None = None
    reference_box_iou: float | None = None


@dataclass(frozen=True)
class PromptErrors:
    """Results for one image: the IoU of each prompt's mask with the labelled one, the artifact's and the original's,
    float64 [prompts]; `boxes`: bool [prompts], which prompts are boxes."""

    ours: Floats
    theirs: Floats
    boxes: npt.NDArray[np.bool_]


def compare_prompted(
    overlaps: Sequence[Floats], errors: Sequence[PromptErrors] | None, *, max_difference: float
) -> PromptComparison:
    """Compare the masks of the same prompts of the same images.

    Args:
        overlaps: for each image the IoU between both sides' masks, float64 [prompts], 0..1.
        errors: for each image, None without labels.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: no image.
    """
    if not overlaps:
        raise ValueError("no image")
    weights, every = draws(len(overlaps), 0), np.concatenate(overlaps)
    agreement = 100 * float(every.mean())
    drawn = 100 * _ratio(weights, [overlap.sum() for overlap in overlaps], [len(each) for each in overlaps])
    return PromptComparison(
        n=len(overlaps),
        metric="mask IoU" if errors is not None else None,
        **resampled_agreement(agreement, drawn, len(every)),
        agreement_of="mean IoU of the masks with the original's",
        max_difference=max_difference,
        masks=len(every),
        iou_min=float(every.min()),
        **({} if errors is None else _accuracy(errors, weights)),
    )


def _ratio(weights: Floats, sums: Sequence[float], counts: Sequence[int]) -> Floats:
    """Return the mean over all prompts in each draw of images."""
    return np.asarray((weights @ np.array(sums, np.float64)) / (weights @ np.array(counts, np.float64)))


def _accuracy(errors: Sequence[PromptErrors], weights: Floats) -> Fields:
    counts = [len(error.ours) for error in errors]
    ours, theirs = (np.concatenate([getattr(each, side) for each in errors]) for side in ("ours", "theirs"))
    boxes = np.concatenate([each.boxes for each in errors])
    drop = 100 * float((theirs - ours).mean())
    drawn = 100 * _ratio(weights, [(each.theirs - each.ours).sum() for each in errors], counts)
    kinds = {
        f"{side}{name}": 100 * float(values[chosen].mean()) if chosen.any() else None
        for name, chosen in (("point_iou", ~boxes), ("box_iou", boxes))
        for side, values in (("", ours), ("reference_", theirs))
    }
    percents = [100 * float(side.mean()) for side in (ours, theirs)]
    return {**resampled_accuracy(percents, drawn, (ours >= FOUND, theirs >= FOUND), drop), **kinds}


def prompted_changes(overlaps: Sequence[Floats]) -> Changes:
    """Return the changed images: those whose masks have a mean IoU with the original's below MOVED_IOU."""
    moved = np.array([1 - float(overlap.mean()) for overlap in overlaps])
    return judged(moved > 1 - MOVED_IOU, moved)


# --- Prompted objects: a point in each and a box around it, and the mask that is meant --------------------------------
# prompts.json    [{"file_name": "evaluation/000000.png", "instance": 1, "point": [x, y], "box": [x0, y0, x1, y1]}, ...]
# masks/...png    beside it, of the images' relative names: a pixel of value k belongs to the image's instance k
#
# Points are pixel columns and rows; "point" or "box" is optional.


MASKS = "masks"
EXPECTED = 'a list of {"file_name": ..., "instance": k, "point": [x, y], "box": [x0, y0, x1, y1]}'


@dataclass(frozen=True)
class PromptedSample(folder.Sample):
    """An image with its prompts; `instances` has the object of each prompt."""

    prompts: tuple[Prompt, ...] = ()
    instances: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptedMap:
    """The PNG of one image with the orientation `frame`, and its prompts."""

    png: Path
    frame: Frame
    sample: PromptedSample

    def content(self) -> bytes:
        return repr((self.sample.prompts, self.sample.instances)).encode() + self.png.read_bytes()

    def load(self) -> npt.NDArray[np.bool_]:
        """Return bool [prompts, height, width]: the mask of each prompt's object.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is not a map of numbers, its size differs from the image's, or it has no pixel of an instance.
        """
        values = read_map(self.png, "a PNG of instances", self.frame)
        masks = np.stack([values == instance for instance in self.sample.instances])
        empty = np.flatnonzero(~masks.any(axis=(1, 2)))
        if len(empty):
            raise DataError(
                f"{self.png} has no pixel of a prompted instance",
                found=f"values {', '.join(map(str, np.unique(values)[:8].tolist()))}",
                expected=f"pixels with value {self.sample.instances[empty[0]]}",
                fix="write pixels of the k-th instance of the image as k",
            )
        return masks


PromptedSet = annotations.AnnotatedSet[PromptedMap]


def read_prompted(images: Path, labels: Path, skipped: decoding.Skipped | None = None) -> PromptedSet:
    """Return the images below `images` with prompts in the file `labels`. Their PNGs are read by `load`.

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        MissingFileError: `images` or `labels` does not exist, or an image has no PNG.
        DataError: the file has the wrong form, a prompt is outside its image, or the file is for other images.
        ImageError: an unreadable image and `skipped` is None.
    """
    paths, repairs = annotations.folder_images(images), label_file.Repairs()
    by_name = _entries(labels, repairs)
    places = annotations.located(images, paths, [*by_name], repairs)
    maps: dict[Path, PromptedMap] = {}
    for name, path in sorted(places.items()):
        frame = annotations.frame_or_skip(path, skipped)
        if frame is None:
            continue
        if path in maps:
            raise DataError(f"{labels} has two names for one image", found=name, expected=f"one name for {path}")
        png = (labels.parent / MASKS / path.relative_to(images)).with_suffix(".png")
        if not png.is_file():
            raise MissingFileError(f"no masks for {name}", found=f"no {png}", expected="a PNG of its instances")
        prompts = [_prompt(labels, index, entry, frame.size) for index, entry in by_name[name]]
        kept = tuple(prompt for each in prompts for prompt in each)
        instances = tuple(
            int(entry["instance"]) for (_, entry), each in zip(by_name[name], prompts, strict=True) for _ in each
        )
        maps[path] = PromptedMap(png, frame, PromptedSample(path, None, prompts=kept, instances=instances))
    if not maps:
        raise annotations.other_names(images, labels, paths, [*by_name])
    samples = tuple(each.sample for each in maps.values())
    notes = annotations.upright_notes((each.frame for each in maps.values()), "map")
    return annotations.AnnotatedSet(
        images, samples, maps, (), len(set(paths.values())) - len(maps), (*notes, *repairs.notes)
    )


def _entries(labels: Path, repairs: label_file.Repairs) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Return the entries of each image by its name, each with its index in the file."""
    if not labels.is_file():
        raise MissingFileError(f"no prompt file at {labels}", fix="check the path of --annotations")
    try:
        document = json.loads(labels.read_bytes())
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise DataError(f"{labels} is not a JSON file", found=str(error)[:200], expected=EXPECTED) from None
    found: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for index, entry in enumerate(document if isinstance(document, list) else [document]):
        fits = isinstance(entry, dict) and isinstance(entry.get("file_name"), str)
        if not fits or type(entry.get("instance")) is not int or not ({"point", "box"} & set(entry)):
            raise DataError(f"{labels}: [{index}] is not a prompt", found=repr(entry)[:80], expected=EXPECTED)
        entries = found.setdefault(entry["file_name"], [])
        if any(entry == other for _, other in entries):
            repairs.add("repeated prompts, counted once", f"[{index}]")
            continue
        entries.append((index, entry))
    return found


def _prompt(labels: Path, index: int, entry: Mapping[str, Any], size: tuple[int, int]) -> list[Prompt]:
    """Return a prompt for the point and one for the box of an entry, if present."""
    point, box = entry.get("point"), entry.get("box")
    prompts: list[Prompt] = []
    try:
        if point is not None:
            prompts += read_prompts([point], None, None, size)
        if box is not None:
            prompts += read_prompts(None, None, box, size)
    except InputError as error:
        raise DataError(
            f"{labels}: [{index}]: {error.message}", found=error.found, expected=error.expected, fix=error.fix
        ) from None
    return prompts


# --- Promptable segmentation: labelled points and boxes or a grid of points, the IoU of masks, and their pictures -----


# Columns of answers: the best masks as bits, their predicted IoU, and some of the raw logits.
BITS, PROMISED, LOGITS = "bits", "promised", "logits"
KEPT = 1 << 12


@dataclass(frozen=True)
class Prompting(adapter.Drive):
    """Embeds the calibration images one by one, and decodes the prompts of each."""

    samples: Sequence[folder.Sample]
    preprocess: PreprocessSpec
    spec: PromptSpec

    @property
    def distinct(self) -> int:
        return len({sample.path for sample in self.samples})

    def __call__(self, runners: Mapping[str, Runner], progress: adapter.Count) -> None:
        encoder, decoder = runners[flows.IMAGE_ENCODER], runners[flows.PROMPT_DECODER]
        tensor = encoder.inputs[0]
        for sample in self.samples:
            pixels, size = load_image(sample.path, self.preprocess)
            embedded = flow.run_rows(encoder, {tensor.name: to_input([pixels], self.preprocess, tensor)})
            arrays = prompt_arrays(_calibrating(sample, size), size, self.preprocess, self.spec)
            count = len(arrays[POINTS])
            repeated = {name: np.repeat(array, count, axis=0) for name, array in embedded.items()}
            flow.run_rows(decoder, {**repeated, **arrays})
            progress(1)

    def warnings(self) -> list[str]:
        """Return possible problems with the samples."""
        if any(isinstance(sample, PromptedSample) for sample in self.samples):
            return []
        return [
            "The calibration images have no prompts: a grid of points and a box in the middle are used. Pass a prompt "
            "file with --annotations."
        ]


def _calibrating(sample: folder.Sample, size: tuple[int, int]) -> Sequence[Prompt]:
    """Return the sample's own prompts, else a grid of points and a box."""
    if isinstance(sample, PromptedSample):
        return sample.prompts
    width, height = size
    return [*grid_prompts(size), Prompt(box=(width / 4, height / 4, 3 * width / 4, 3 * height / 4))]


class PromptedAdapter(adapter.ImageAdapter):
    kinds = ("prompts", "none")
    compared = PromptComparison
    metrics = (
        Metric(
            "mask IoU",
            "Mask IoU is the mean intersection over union with the labelled objects over all prompts.",
            words="IoU of the masks",
            title="Mask IoU",
        ),
    )
    measures = (
        Measure("IoU for points, %", "point_iou", original=True),
        Measure("IoU for boxes, %", "box_iou", original=True),
        Measure("Prompts", "masks", 0),
        Measure("IoU with the original, least", "iou_min", 3),
    )
    score = "the mean IoU that the model predicts"
    head: PromptSpec
    divisible = False
    calibrated_on = "prompts"

    def annotated(self, choice: adapter.DataChoice, place: Path, skipped: decoding.Skipped | None) -> PromptedSet:
        return read_prompted(choice.path, place, skipped)

    def labelled(
        self, choice: adapter.DataChoice, count: int | None, skipped: decoding.Skipped | None
    ) -> tuple[folder.Sample, ...]:
        assert choice.annotations is not None
        return read_prompted(choice.path, choice.annotations, skipped).to_calibrate(count, choice.seed)

    def load(self, choice: adapter.DataChoice, *, skip_bad: bool, progress: Progress) -> adapter.Data:
        data = super().load(choice, skip_bad=skip_bad, progress=progress)
        prompts = [sample.prompts for sample in data.calibration if isinstance(sample, PromptedSample)]
        digest = hashlib.sha256(repr(prompts).encode()).hexdigest()
        return replace(data, calibration_digest=data.calibration_digest + digest)

    def drive(self, calibration: adapter.Calibration) -> Prompting:
        return Prompting(calibration.samples, self.setting.images, self.head)

    def answers(self, runner: Runner, data: adapter.Data, progress: adapter.Count) -> Answers:
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
                f"{runner.name} produces non-finite outputs",
                found=f"NaN or infinity for {broken} of {len(data.evaluation)} images",
                expected="finite outputs",
                fix="choose another precision, or check the checkpoint",
            )
        return Answers({name: tuple(column) for name, column in columns.items()})

    def _answer(
        self, runner: Runner, sample: folder.Sample, pixels: Array, size: tuple[int, int]
    ) -> tuple[dict[str, Array], bool]:
        """Return the values kept for one image, and whether all outputs are finite."""
        spec, prompts = self.setting.images, prompts_of(sample, size)
        image, arrays = to_input([pixels], spec, runner.inputs[0]), prompt_arrays(prompts, size, spec, self.head)
        if isinstance(runner, flow.FlowRunner):
            outputs = decode(runner, embed(runner, image), arrays)
        else:
            outputs = flow.one_by_one(runner, {runner.inputs[0].name: image, **arrays})
        found = read_masks(outputs, prompts, size, spec, self.head)
        kept = {
            BITS: np.stack([np.packbits(prompt.mask) for prompt in found.prompts]),
            PROMISED: np.array([each.score for each in found.prompts]),
            LOGITS: drawn(outputs[PROMPTED_MASKS][0], KEPT),
            IOU_SCORES: outputs[IOU_SCORES],
            SIZE: np.array(size, np.int64),
        }
        return kept, all(bool(np.isfinite(array).all()) for array in outputs.values())

    def compare(self, ours: Answers, reference: Answers, data: adapter.Data) -> Comparison:
        errors = None
        if data.truth is not None:
            errors = [self._errors(ours, reference, data, i) for i in range(len(data.evaluation))]
        raw = (_difference(ours.columns[name], reference.columns[name]) for name in (LOGITS, IOU_SCORES))
        return compare_prompted(_overlaps(ours, reference), errors, max_difference=max(raw))

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        """Return as many masks as the image at each index has prompts."""
        rows: list[dict[str, Array]] = []
        for place, index in enumerate(order):
            width, height = reference.size(place)
            masks = _masks(answers, index)
            used = np.arange(len(reference.columns[BITS][place])) % len(masks)
            bits = np.stack([np.packbits(nearest_pixels(each, (height, width))) for each in masks[used]])
            logits = np.resize(answers.columns[LOGITS][index], reference.columns[LOGITS][place].shape)
            scores = {name: answers.columns[name][index][used] for name in (PROMISED, IOU_SCORES)}
            rows.append({BITS: bits, LOGITS: logits, **scores})
        found = super().moved(answers, order, reference).columns
        return Answers({**found, **{name: [row[name] for row in rows] for name in rows[0]}})

    def _errors(self, ours: Answers, reference: Answers, data: adapter.Data, index: int) -> PromptErrors:
        truth = self._truth(data, index).load()
        a, b = (
            np.array([iou(mask, true) for mask, true in zip(_masks(each, index), truth, strict=True)])
            for each in (ours, reference)
        )
        boxes = np.array([prompt.box is not None for prompt in data.evaluation[index].prompts])
        return PromptErrors(a, b, boxes)

    def _truth(self, data: adapter.Data, index: int) -> PromptedMap:
        truth = data.truth_at(index)
        assert isinstance(truth, PromptedMap)
        return truth

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        return prompted_changes(_overlaps(ours, reference))

    def certainty(self, answers: Answers) -> np.ndarray:
        return np.array([float(np.clip(each.mean(), 0, 1)) for each in answers.columns[PROMISED]])

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        promised = answers.columns[PROMISED][index]
        masks = _masks(answers, index)
        shares = 100 * masks.mean(axis=(1, 2))
        text = f"{len(masks)} prompts, masks of {shares.min():.1f} to {shares.max():.1f} % of the image"
        return Said(text, float(np.clip(promised.mean(), 0, 1)))

    def truth_of(self, data: adapter.Data, index: int, labels: Sequence[str] | None) -> str | None:
        sample = data.evaluation[index]
        if not isinstance(sample, PromptedSample):
            return None
        return f"{len(set(sample.instances))} objects"

    def panels(self, data: adapter.Data, index: int, answers: Mapping[str, Answers]) -> adapter.Panels:
        """Yield the masks of every artifact, and the labelled ones, small ones on top."""
        for name, each in answers.items():
            yield name, _picture(_masks(each, index))
        if data.truth is not None:
            yield "label", _picture(self._truth(data, index).load())

    def shared_golden(self, data: adapter.Data) -> dict[str, Array]:
        """Return a point in the middle and a box around it, for any image."""
        width, height = size = self.setting.images.crop[1], self.setting.images.crop[0]
        box = Prompt(box=(width / 4, height / 4, 3 * width / 4, 3 * height / 4))
        square = replace(self.setting.images, fit="stretch")
        return prompt_arrays([*grid_prompts(size, 1), box], size, square, self.head)


def prompts_of(sample: folder.Sample, size: tuple[int, int]) -> Sequence[Prompt]:
    """Return the prompts for an image of `size` (width, height): its own, or a grid of points."""
    return sample.prompts if isinstance(sample, PromptedSample) else grid_prompts(size)


def _masks(answers: Answers, index: int) -> np.ndarray:
    """Return bool [prompts, height, width] at the image's size."""
    width, height = answers.size(index)
    bits = answers.columns[BITS][index]
    found = np.unpackbits(bits, axis=1, count=width * height)
    return found.reshape(len(bits), height, width).astype(np.bool_)


def _overlaps(ours: Answers, reference: Answers) -> list[np.ndarray]:
    """Return for each image the IoU between both sides' masks, float64 [prompts]."""
    return [
        np.array([iou(a, b) for a, b in zip(_masks(ours, i), _masks(reference, i), strict=True)])
        for i in range(len(reference))
    ]


def _difference(ours: Sequence[Array], reference: Sequence[Array]) -> float:
    """Return max|a - b| / max|b| over all images, which have different numbers of prompts."""
    apart = max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(ours, reference, strict=True))
    return apart / max(*(float(np.abs(b).max()) for b in reference), 1e-300)


def _picture(masks: np.ndarray) -> bytes:
    """Draw each mask in its own colour."""
    found = np.full(masks.shape[1:], -1, np.int64)
    for index in np.argsort(-masks.sum(axis=(1, 2)), kind="stable"):
        found[masks[index]] = index
    return adapter.thumbnail(np.asarray(drawing.class_picture(found)))

"""Promptable segmentation: masks of prompted objects at the image's size, from a decoder's outputs.

Source: Kirillov et al., "Segment Anything", ICCV 2023 (arXiv 2304.02643); Ravi et al., "SAM 2", arXiv 2408.00714.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError, ManifestError
from vitdeploy.runtime import drawing, flow, flows, upsample
from vitdeploy.runtime.masks import RunLengths, png_bytes
from vitdeploy.runtime.preprocess import resized_size
from vitdeploy.runtime.prompts import INSIDE, IOU_SCORES, LABELS, MASKS, POINTS, Prompt, PromptSpec
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.spec import Postprocess, PreprocessSpec, TensorSpec

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

Bools = npt.NDArray[np.bool_]
# The format of a written mask: PNG, or COCO run lengths.
MaskForm = Literal["png", "rle"]
# Prompts per run of a decoder with a dynamic batch.
TOGETHER = 16
# Limit for all masks of an answer, so that they fit into memory.
MOST_BYTES = 4 << 30
# Masks with at least this IoU agree.
SAME_IOU = 0.5


@dataclass(frozen=True, eq=False, repr=False)
class PromptMasks:
    """The answer to one prompt. `masks`: bool [n, height, width] at the image's size, one, or three for an ambiguous
    prompt; `scores`: the predicted IoU of each with the object."""

    prompt: Prompt
    masks: Bools
    scores: tuple[float, ...]

    @property
    def best(self) -> int:
        """The index of the mask with the highest score."""
        return int(np.argmax(self.scores))

    @property
    def mask(self) -> Bools:
        """The mask with the highest score, bool [height, width]."""
        return np.asarray(self.masks[self.best])

    @property
    def score(self) -> float:
        return self.scores[self.best]

    @property
    def box(self) -> tuple[int, int, int, int] | None:
        """(left, top, right, bottom) around the best mask in pixels, None if it is empty."""
        return _box(self.mask)

    def png(self) -> bytes:
        """Return the best mask as a grey PNG, 255 inside."""
        return _png(self.mask)

    def to_dict(self, masks: MaskForm = "png") -> dict[str, Any]:
        """Return the prompt, the scores, and the best mask with its area in pixels and its box, as "mask_png" (a PNG in
        Base64) or "segmentation" (COCO run lengths)."""
        return {
            **self.prompt.to_dict(),
            "scores": list(self.scores),
            "best": self.best,
            **_mask_fields(self.mask, masks),
        }

    def __str__(self) -> str:
        share = 100 * float(self.mask.mean())
        others = f", the best of {len(self.scores)}" if len(self.scores) > 1 else ""
        box = f" in {self.box[0]},{self.box[1]},{self.box[2]},{self.box[3]}" if self.box else ""
        return f"a mask of {share:.1f} % of the image{box}, predicted IoU {self.score:.2f}{others}"


@dataclass(frozen=True, eq=False, repr=False)
class PromptedMasks:
    """The answer for one image: `prompts` has one entry per prompt, in order."""

    prompts: tuple[PromptMasks, ...]

    @property
    def mask(self) -> Bools:
        """The best mask of the first prompt, bool [height, width]."""
        return self.prompts[0].mask

    @property
    def score(self) -> float:
        """The predicted IoU of `mask`."""
        return self.prompts[0].score

    def to_dict(self, masks: MaskForm = "png") -> dict[str, Any]:
        height, width = self.mask.shape
        return {"width": width, "height": height, "prompts": [prompt.to_dict(masks) for prompt in self.prompts]}

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> PromptMasks:
        return self.prompts[index]

    def __str__(self) -> str:
        """One prompt per line."""
        return "\n".join(map(str, self.prompts))

    def __repr__(self) -> str:
        height, width = self.mask.shape
        return f"<PromptedMasks: {len(self.prompts)} prompts in {width}x{height}: {self.prompts[0]}>"


def _box(mask: Bools) -> tuple[int, int, int, int] | None:
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return None
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _png(mask: Bools) -> bytes:
    from PIL import Image

    return png_bytes(Image.fromarray(mask.view(np.uint8) * np.uint8(255)))


def _mask_fields(mask: Bools, form: MaskForm) -> dict[str, Any]:
    """The fields of one mask in `PromptMasks.to_dict`."""
    box = _box(mask)
    facts: dict[str, Any] = {"area": int(mask.sum()), "mask_box": None if box is None else list(box)}
    if form == "rle":
        return {**facts, "segmentation": RunLengths.of(mask).to_dict()}
    return {**facts, "mask_png": base64.b64encode(_png(mask)).decode("ascii")}


def chosen(masks: Array, scores: Array, spec: PromptSpec, multimask: bool) -> tuple[Array, Array]:
    """Return the masks and scores of a prompt's answer from all four [4, h, w] and [4]: the three for ambiguous prompts
    (`multimask`), or one."""
    if multimask:
        return masks[1:], scores[1:]
    one = 0
    if spec.stability is not None and _stability(masks[0], spec.stability[0]) < spec.stability[1]:
        one = 1 + int(scores[1:].argmax())
    return masks[one : one + 1], scores[one : one + 1]


def _stability(mask: Array, delta: float) -> float:
    """A mask's area at +delta divided by its area at -delta; 1 if that is 0 (float32, as in transformers)."""
    most = int((mask > -delta).sum())
    return float(np.float32((mask > delta).sum()) / np.float32(most)) if most else 1.0


def full_size(masks: Array, size: tuple[int, int], preprocess: PreprocessSpec, threshold: float = 0.0) -> Bools:
    """Return masks, bool [n, height, width], at the image's size (width, height), from logits [n, h, w].

    Equals `post_process_masks` of transformers' SAM and SAM 2 processors, whose fits are "longest-pad" and "stretch":
    SAM enlarges the masks to the input, crops the padding, and resizes the rest.
    """
    found = np.zeros((len(masks), size[1], size[0]), np.bool_)
    for i, mask in enumerate(masks):
        if preprocess.fit == "longest-pad":
            width, height = resized_size(*size, preprocess)
            inside = upsample.enlarged(mask[None], preprocess.crop)[:, :height, :width]
            for rows, band in upsample.enlarged_bands(inside, (size[1], size[0])):
                found[i, rows] = band[0] > threshold
        else:
            for rows, columns, band in upsample.bands(mask[None], size, preprocess):
                found[i, rows, columns] = band[0] > threshold
    return found


def read_masks(
    outputs: Outputs,
    prompts: Sequence[Prompt],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    spec: PromptSpec,
    multimask: bool | None = None,
) -> PromptedMasks:
    """Return the answer for "masks" [prompts, 4, h, w] and "iou_scores" [prompts, 4].

    Args:
        multimask: True returns three masks per prompt, False one; None: three for an ambiguous prompt.
    """
    found = []
    for prompt, masks, scores in zip(prompts, outputs[MASKS], outputs[IOU_SCORES], strict=True):
        several = prompt.ambiguous if multimask is None else multimask
        logits, promised = chosen(masks, scores, spec, several)
        answer = full_size(logits, size, preprocess, spec.mask_threshold)
        found.append(PromptMasks(prompt, answer, tuple(float(each) for each in promised)))
    return PromptedMasks(tuple(found))


def require_room(prompts: Sequence[Prompt], size: tuple[int, int], multimask: bool | None) -> None:
    """Raise InputError if the masks of all prompts, one byte per pixel, exceed `MOST_BYTES`."""
    count = sum(3 if (prompt.ambiguous if multimask is None else multimask) else 1 for prompt in prompts)
    expected = MOST_BYTES // (size[0] * size[1])
    if count > expected:
        raise InputError(
            "too many prompts: their masks do not fit into memory",
            found=f"{count} masks of {size[0]}x{size[1]} pixels",
            expected=f"at most {expected} masks",
            fix="use fewer prompts per call: image = predictor.embed(...), then several calls of image.masks(...)",
        )


def tell_best(
    outputs: Outputs,
    prompts: Sequence[Prompt],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    spec: PromptSpec,
    multimask: bool | None = None,
    masks: MaskForm = "png",
) -> list[dict[str, Any]]:
    """Return `PromptMasks.to_dict` for each prompt of `read_masks`, but enlarge only the best of three masks: for a
    12-megapixel image, enlarging takes longer than all other steps."""
    found = []
    for prompt, logits, scores in zip(prompts, outputs[MASKS], outputs[IOU_SCORES], strict=True):
        several = prompt.ambiguous if multimask is None else multimask
        kept, promised = chosen(logits, scores, spec, several)
        best = int(np.argmax(promised))
        [mask] = full_size(kept[best : best + 1], size, preprocess, spec.mask_threshold)
        scored = {"scores": [float(each) for each in promised], "best": best}
        found.append({**prompt.to_dict(), **scored, **_mask_fields(mask, masks)})
    return found


def embed(runner: flow.FlowRunner, tensor: Array) -> dict[str, Array]:
    """Return the encoder's outputs for images [n, ...], by the names of the decoder's inputs."""
    feeds = runner.flow.parts[-1].feeds
    passed = {name: source for name, source in feeds.items() if source.startswith(f"{flows.IMAGE_ENCODER}.")}
    found = runner.linked.values({runner.inputs[0].name: tensor}, list(passed.values()))
    return {name: found[source] for name, source in passed.items()}


def decode(runner: flow.FlowRunner, embedding: Mapping[str, Array], prompts: Mapping[str, Array]) -> dict[str, Array]:
    """Return the decoder's outputs, [prompts, ...], for one image's embedding [1, ...] and the arrays of prompts.

    The embedding is repeated only for the prompts of one run: for 1,000 prompts of SAM it would take 4 GB.
    """
    decoder = runner.linked.runners[flows.PROMPT_DECODER]
    size = decoder.inputs[0].shape[0]
    step = size if isinstance(size, int) else TOGETHER
    runs = []
    for start in range(0, len(prompts[POINTS]), step):
        rows = {name: array[start : start + step] for name, array in prompts.items()}
        repeated = {name: np.repeat(array, len(rows[POINTS]), axis=0) for name, array in embedding.items()}
        runs.append(flow.run_rows(decoder, {**repeated, **rows}))
    return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}


class PromptsBound(Runner):
    """A flow of encoder and decoder with fixed prompts: it takes images, and returns "masks" [n, prompts, 4, h, w] and
    "iou_scores" [n, prompts, 4]."""

    def __init__(self, whole: flow.FlowRunner, prompts: Mapping[str, Array]) -> None:
        super().__init__(whole.name)
        self.whole, self.prompts = whole, dict(prompts)

    def _load(self) -> None:
        self.whole.load()
        count = len(self.prompts[POINTS])
        self.inputs, self.provider = self.whole.inputs[:1], self.whole.provider
        self.outputs = tuple(
            TensorSpec(tensor.name, tensor.dtype, (tensor.shape[0], count, *tensor.shape[1:]))
            for tensor in self.whole.outputs
        )

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        embedded = embed(self.whole, feeds[self.inputs[0].name])
        rows = [
            decode(self.whole, {name: array[i : i + 1] for name, array in embedded.items()}, self.prompts)
            for i in range(len(next(iter(embedded.values()))))
        ]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _close(self) -> None:
        self.whole.close()


def iou(a: Bools, b: Bools) -> float:
    """Return the IoU of two masks; 1 for two empty ones."""
    either = int((a | b).sum())
    return int((a & b).sum()) / either if either else 1.0


def no_prompt() -> InputError:
    return InputError(
        "promptable segmentation needs a prompt",
        found="only an image",
        expected="points or a box",
        fix="predict(image, points=[(x, y)]) or predict(image, boxes=[left, top, right, bottom])",
    )


def _answer(outputs: Outputs, reading: OutputReading) -> PromptedMasks:
    raise no_prompt()


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    """Whether the masks of the golden prompts overlap enough, on average."""
    spec = reading.head(PromptSpec)
    pairs = zip(ours[MASKS][:, 0], theirs[MASKS][:, 0], strict=True)
    return float(np.mean([iou(a > spec.mask_threshold, b > spec.mask_threshold) for a, b in pairs])) >= SAME_IOU


def bind_prompts(runner: Runner, given: Mapping[str, Array], postprocess: Postprocess | None) -> PromptsBound:
    """Return encoder and decoder with the prompts in `given`; raise ManifestError for another model or other arrays."""
    if (
        not isinstance(runner, flow.FlowRunner)
        or not isinstance(postprocess, PromptSpec)
        or {name: (array.dtype.kind, array.shape[1:]) for name, array in given.items()}
        != {POINTS: ("f", (postprocess.slots, 2)), LABELS: ("i", (postprocess.slots,))}
    ):
        raise ManifestError(
            "the golden inputs do not fit a promptable model", found=", ".join(given), expected="points, labels"
        )
    return PromptsBound(runner, given)


def _draw(image: Image.Image, result: PromptedMasks) -> Files:
    """The best mask of each prompt in its own colour, with the prompt: a box, points inside as discs, points outside as
    crosses. Also each mask as a file."""
    from PIL import ImageDraw

    drawn, palette = image, drawing.colours(len(result.prompts))
    for place, each in enumerate(result.prompts):
        drawn = drawing.over(drawn, drawing.class_picture(np.where(each.mask, place, -1)), each.mask)
    pen, radius = ImageDraw.Draw(drawn), max(2, min(image.size) // 100)
    for each, colour in zip(result.prompts, palette.tolist(), strict=True):
        if each.prompt.box is not None:
            pen.rectangle(each.prompt.box, outline=tuple(colour), width=max(1, radius // 2))
        for (x, y), label in zip(each.prompt.points, each.prompt.labels, strict=True):
            _mark(pen, x, y, radius, tuple(colour), inside=label == INSIDE)
    masks = {f".mask{place}.png": each.png() for place, each in enumerate(result.prompts)}
    return {".png": png_bytes(drawn), **masks}


def _mark(pen: ImageDraw.ImageDraw, x: float, y: float, radius: int, colour: tuple[int, ...], *, inside: bool) -> None:
    """Draw a disc with a white rim for a point inside an object, a white cross for one outside."""
    if inside:
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour, outline="white")
        return
    for down in (-1, 1):
        pen.line(
            [x - radius, y - down * radius, x + radius, y + down * radius], fill="white", width=max(1, radius // 2)
        )


PROMPTED = DeviceTask(
    _answer,
    _same,
    bind_prompts,
    _draw,
    "vitdeploy.runtime.predictors:PromptedPredictor",
    "prompts",
    flows.PROMPTED_GRAPHS,
    PromptSpec,
)

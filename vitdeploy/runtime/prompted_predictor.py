"""The predictor of a bundle of promptable segmentation: an image is embedded once, and asked as often as wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from vitdeploy.runtime.flow import FlowRunner
from vitdeploy.runtime.predictor import OpenedBundle, Predictor, require_several
from vitdeploy.runtime.preprocess import ImageSource
from vitdeploy.runtime.prompts import Given, Prompt, prompt_arrays, read_prompts, require_slots
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.prompted import (
    TOGETHER,
    MaskForm,
    PromptedMasks,
    PromptMasks,
    decode,
    embed,
    no_prompt,
    read_masks,
    require_room,
    tell_best,
)
from vitdeploy.runtime.tasks.task import Result
from vitdeploy.runtime.topdown import Box
from vitdeploy.spec import ChannelOrder, PreprocessSpec, PromptSpec


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddedImage:
    """An image that was embedded: it can be asked for masks as often as wanted, and only the small decoder runs.

    `size`: (width, height) of the image. Usable as long as its predictor is open.
    """

    predictor: PromptedPredictor
    embedding: Mapping[str, Array]
    size: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """How much memory the embedding takes."""
        return sum(array.nbytes for array in self.embedding.values())

    def masks(
        self, points: Given = None, labels: Given = None, boxes: Given = None, multimask: bool | None = None
    ) -> PromptedMasks:
        """The masks of one prompt or several, as `PromptedPredictor.predict` says."""
        return self.predictor.ask(self, points, labels, boxes, multimask)


class PromptedPredictor(Predictor):
    """Answers which pixels belong to the object that points or a box mean, with the two engines of a bundle.

    The embedding of the last image is kept: further prompts for it run the decoder alone.

    >>> predictor = load("out/sam")                                                    # doctest: +SKIP
    >>> predictor.predict("cat.jpg", points=[(120, 80), (300, 40)], labels=[1, 0])     # doctest: +SKIP
    <PromptedMasks: 1 prompts in 640x480: a mask of 12.3 % of the image in 80,20,310,240, IoU 0.94 promised>
    >>> cat = predictor.embed("cat.jpg")                                               # doctest: +SKIP
    >>> cat.masks(boxes=[80, 20, 310, 240]).mask.sum()                                 # doctest: +SKIP
    37786
    """

    def __init__(self, runner: Runner, preprocess: PreprocessSpec, spec: PromptSpec, why: str = "") -> None:
        assert isinstance(runner, FlowRunner)
        self.spec, self.flow = spec, runner
        super().__init__(runner, preprocess, None, "promptable-segmentation", spec, why)
        # From here on: golden answers and measurements run every part every time.
        runner.linked.keep = True

    @classmethod
    def of_bundle(cls, opened: OpenedBundle) -> Predictor:
        spec = opened.files.manifest.postprocess
        assert isinstance(spec, PromptSpec), "a manifest without it is refused when it is read"
        return cls(opened.runner, opened.preprocess, spec, opened.why)

    def embed(self, image: ImageSource, *, channels: ChannelOrder = "rgb") -> EmbeddedImage:
        """The image's embedding; of the image that was embedded last it is the one that is kept. `channels`: of an
        array, as of `Predictor.predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
        """
        tensor, size = self.prepare(image, channels=channels)
        return EmbeddedImage(self, self.encode(tensor), size)

    def encode(self, tensor: Array) -> dict[str, Array]:
        """The embeddings [n, ...] of preprocessed images [n, ...], which `prepare` gives."""
        start = perf_counter_ns()
        found = embed(self.flow, tensor)
        self._ran(tensor, found, start)
        self._stopwatch.count(len(tensor))
        return found

    def predict(
        self,
        image: ImageSource,
        top: int = 5,
        *,
        points: Given = None,
        labels: Given = None,
        boxes: Given = None,
        multimask: bool | None = None,
        channels: ChannelOrder = "rgb",
    ) -> PromptedMasks:
        """The masks of an image for one prompt or several.

        Args:
            top: of classifiers; not used.
            points: [n, 2] of one prompt, [prompts, n, 2] of several: x, y in pixels of the image.
            labels: one for each point: 1 inside of the object, 0 outside; None: all are inside.
            boxes: [4] of one prompt, [prompts, 4] of several: left, top, right, bottom in pixels.
            multimask: three masks for each prompt, or one; None: three where a prompt is one point, which may mean a
                part or the whole, and one for all others, as SAM was trained.
            channels: of an array, as of `Predictor.predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
            InputError: no prompt, or one that is not in the image, or of another form; so many that their masks do not
                fit into memory.
        """
        return self.embed(image, channels=channels).masks(points, labels, boxes, multimask)

    def ask(
        self, image: EmbeddedImage, points: Given, labels: Given, boxes: Given, multimask: bool | None
    ) -> PromptedMasks:
        """What `EmbeddedImage.masks` says."""
        prompts = read_prompts(points, labels, boxes, image.size)
        self.require(prompts)
        require_room(prompts, image.size, multimask)
        found: list[PromptMasks] = []
        for start in range(0, len(prompts), TOGETHER):  # the logits of all would be larger than the masks
            some = prompts[start : start + TOGETHER]
            found += self.read(self.decode(image, some), some, image.size, multimask).prompts
        return PromptedMasks(tuple(found))

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Raise InputError for a prompt of more points than there are slots."""
        require_slots(prompts, self.spec)

    def decode(self, image: EmbeddedImage, prompts: Sequence[Prompt]) -> dict[str, Array]:
        """The decoder's outputs, [prompts, ...]; `read` says what they mean.

        Raises:
            InputError: a prompt of more points than there are slots.
        """
        arrays = prompt_arrays(prompts, image.size, self.preprocess, self.spec)
        start = perf_counter_ns()
        outputs = decode(self.flow, image.embedding, arrays)
        self._stopwatch.add("infer", start)
        return outputs

    def read(
        self, outputs: Mapping[str, Array], prompts: Sequence[Prompt], size: tuple[int, int], multimask: bool | None
    ) -> PromptedMasks:
        """The masks that outputs of `decode` mean, at the size (width, height) of the image."""
        start = perf_counter_ns()
        found = read_masks(outputs, prompts, size, self.preprocess, self.spec, multimask)
        self._stopwatch.add("postprocess", start)
        return found

    def tell(
        self,
        outputs: Mapping[str, Array],
        prompts: Sequence[Prompt],
        size: tuple[int, int],
        multimask: bool | None = None,
        masks: MaskForm = "png",
    ) -> list[dict[str, Any]]:
        """What `read(...).to_dict(masks)` says of each prompt, faster: only the masks that are told are enlarged."""
        start = perf_counter_ns()
        found = tell_best(outputs, prompts, size, self.preprocess, self.spec, multimask, masks)
        self._stopwatch.add("postprocess", start)
        return found

    def predict_batch(
        self,
        images: Sequence[ImageSource],
        top: int = 5,
        *,
        points: Given = None,
        labels: Given = None,
        boxes: Given = None,
        multimask: bool | None = None,
        channels: ChannelOrder = "rgb",
    ) -> list[Result]:
        """Answers for images, each to the same prompts; errors as `predict`."""
        require_several(images)
        embedded = (self.embed(image, channels=channels) for image in images)
        return [image.masks(points, labels, boxes, multimask) for image in embedded]

    def answer(
        self, outputs: Mapping[str, Array], size: tuple[int, int], top: int = 5, box: Box | None = None
    ) -> PromptedMasks:
        """Raises InputError: outputs of an image alone mean nothing."""
        raise no_prompt()

    def _infer(self, feed: Array) -> dict[str, Array]:
        """Raises InputError: what runs on an image alone, such as `predict_tensor`, has no prompt."""
        raise no_prompt()

"""Predictors of tasks that take prompts or texts, or write a text.

The predictor of promptable segmentation embeds an image once and answers any number of prompts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError
from vitdeploy.runtime import flow, flows, text_decoder, topdown
from vitdeploy.runtime.inputs import Further
from vitdeploy.runtime.predictor import OpenedBundle, Predictor, require_several, require_top
from vitdeploy.runtime.preprocess import ImageSource, in_rgb
from vitdeploy.runtime.prompts import Given, Prompt, PromptSpec, prompt_arrays, read_prompts, require_slots
from vitdeploy.runtime.runner import Array, Runner, forkable_lock
from vitdeploy.runtime.tasks import detection, image_to_text, open_vocabulary, prompted, task, zero_shot
from vitdeploy.runtime.tokenizer import (
    OpenVocabularySpec,
    ReadsTexts,
    TextSpec,
    TextTokenizer,
    TextWriter,
    ZeroShotSpec,
    require_texts,
)
from vitdeploy.spec import BeamSpec, ChannelOrder, PreprocessSpec, Task


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddedImage:
    """An embedded image: each further prompt runs only the small decoder.

    `size`: (width, height) of the image. Usable as long as its predictor is open.
    """

    predictor: PromptedPredictor
    embedding: Mapping[str, Array]
    size: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """The size of the embedding in bytes."""
        return sum(array.nbytes for array in self.embedding.values())

    def masks(
        self, points: Given = None, labels: Given = None, boxes: Given = None, multimask: bool | None = None
    ) -> prompted.PromptedMasks:
        """Return the masks of one prompt or several; arguments and errors as `PromptedPredictor.predict`."""
        return self.predictor.ask(self, points, labels, boxes, multimask)


class PromptedPredictor(Predictor):
    """Segments the objects that points or boxes indicate, with the image encoder and prompt decoder of a bundle.

    The embedding of the last image is cached: further prompts for it run only the decoder.

    >>> predictor = load("out/sam")                                                    # doctest: +SKIP
    >>> predictor.predict("cat.jpg", points=[(120, 80), (300, 40)], labels=[1, 0])     # doctest: +SKIP
    <PromptedMasks: 1 prompts in 640x480: a mask of 12.3 % of the image in 80,20,310,240, predicted IoU 0.94>
    >>> cat = predictor.embed("cat.jpg")                                               # doctest: +SKIP
    >>> cat.masks(boxes=[80, 20, 310, 240]).mask.sum()                                 # doctest: +SKIP
    37786
    """

    def __init__(self, runner: Runner, preprocess: PreprocessSpec, spec: PromptSpec, why: str = "") -> None:
        assert isinstance(runner, flow.FlowRunner)
        self.spec, self.flow = spec, runner
        super().__init__(runner, preprocess, None, "promptable-segmentation", spec, why)
        # Set after loading: golden answers and measurements must run every part every time.
        runner.linked.keep = True

    @classmethod
    def of_bundle(cls, opened: OpenedBundle) -> Predictor:
        spec = opened.files.manifest.postprocess
        assert isinstance(spec, PromptSpec), "a manifest without it is refused when it is read"
        return cls(opened.runner, opened.preprocess, spec, opened.why)

    def embed(self, image: ImageSource, *, channels: ChannelOrder = "rgb") -> EmbeddedImage:
        """Return the image's embedding, which is cached for the last image. `channels`: as for `Predictor.predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
        """
        tensor, size = self.prepare(image, channels=channels)
        return EmbeddedImage(self, self.encode(tensor), size)

    def encode(self, tensor: Array) -> dict[str, Array]:
        """Return the embeddings [n, ...] of preprocessed images [n, ...] from `prepare`."""
        start = perf_counter_ns()
        found = prompted.embed(self.flow, tensor)
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
    ) -> prompted.PromptedMasks:
        """Return the masks of an image for one prompt or several.

        Args:
            top: not used.
            points: [n, 2] of one prompt, [prompts, n, 2] of several: x, y in pixels of the image.
            labels: one per point: 1 inside the object, 0 outside; None: all are inside.
            boxes: [4] of one prompt, [prompts, 4] of several: left, top, right, bottom in pixels.
            multimask: True returns three masks per prompt, False one; None: three for a prompt of one point, which may
                mean a part or the whole, one for all others, as SAM was trained.
            channels: as for `Predictor.predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
            InputError: no prompt, one outside the image or of an unexpected form, or more prompts than their masks fit
                into memory.
        """
        return self.embed(image, channels=channels).masks(points, labels, boxes, multimask)

    def ask(
        self, image: EmbeddedImage, points: Given, labels: Given, boxes: Given, multimask: bool | None
    ) -> prompted.PromptedMasks:
        """Return the masks of prompts, as `EmbeddedImage.masks`."""
        prompts = read_prompts(points, labels, boxes, image.size)
        self.require(prompts)
        prompted.require_room(prompts, image.size, multimask)
        answers: list[prompted.PromptMasks] = []
        for start in range(0, len(prompts), prompted.TOGETHER):  # limits the memory for logits
            some = prompts[start : start + prompted.TOGETHER]
            answers += self.read(self.decode(image, some), some, image.size, multimask).prompts
        return prompted.PromptedMasks(tuple(answers))

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Raise InputError for a prompt with more points than the decoder's slots."""
        require_slots(prompts, self.spec)

    def decode(self, image: EmbeddedImage, prompts: Sequence[Prompt]) -> dict[str, Array]:
        """Return the decoder's outputs, [prompts, ...], for `read`.

        Raises:
            InputError: a prompt has more points than the decoder's slots.
        """
        arrays = prompt_arrays(prompts, image.size, self.preprocess, self.spec)
        start = perf_counter_ns()
        outputs = prompted.decode(self.flow, image.embedding, arrays)
        self._stopwatch.add("infer", start)
        return outputs

    def read(
        self, outputs: Mapping[str, Array], prompts: Sequence[Prompt], size: tuple[int, int], multimask: bool | None
    ) -> prompted.PromptedMasks:
        """Return the masks for the outputs of `decode`, at the size (width, height) of the image."""
        start = perf_counter_ns()
        found = prompted.read_masks(outputs, prompts, size, self.preprocess, self.spec, multimask)
        self._stopwatch.add("postprocess", start)
        return found

    def tell(
        self,
        outputs: Mapping[str, Array],
        prompts: Sequence[Prompt],
        size: tuple[int, int],
        multimask: bool | None = None,
        masks: prompted.MaskForm = "png",
    ) -> list[dict[str, Any]]:
        """Return `read(...).to_dict(masks)` for each prompt, faster: only the reported masks are enlarged."""
        start = perf_counter_ns()
        found = prompted.tell_best(outputs, prompts, size, self.preprocess, self.spec, multimask, masks)
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
    ) -> list[task.Result]:
        """Return the answers for images, all with the same prompts; errors as `predict`."""
        require_several(images)
        embedded = (self.embed(image, channels=channels) for image in images)
        return [image.masks(points, labels, boxes, multimask) for image in embedded]

    def answer(
        self, outputs: Mapping[str, Array], size: tuple[int, int], top: int = 5, box: topdown.Box | None = None
    ) -> prompted.PromptedMasks:
        """Raise InputError: outputs without a prompt have no meaning."""
        raise prompted.no_prompt()

    def _infer(self, feeds: Further) -> dict[str, Array]:
        """Raise InputError: methods that take only an image, such as `predict_tensor`, have no prompt."""
        raise prompted.no_prompt()


# --- Image and text encoder: compare images with texts given at run time, or find objects that texts describe ---------


Features = npt.NDArray[np.float32]

# Number of texts whose features are cached: some 100 MB for a model with width 768.
KEPT_TEXTS = 30_000


class TextsPredictor(Predictor):
    """Answers with the engines of a bundle's image encoder and text encoder. The features of a text are cached, so each
    text runs once. Without texts the bundle's labels are used, with which it was verified."""

    of_images: ClassVar[Sequence[str]]
    its_task: ClassVar[Task]

    def __init__(
        self,
        runner: Runner,
        preprocess: PreprocessSpec,
        spec: ReadsTexts,
        tokenizer: TextTokenizer,
        labels: Sequence[str] | None = None,
        why: str = "",
    ) -> None:
        assert isinstance(runner, flow.FlowRunner)
        self.spec, self.tokenizer = spec, tokenizer
        self._text_tower = flow.FlowView(runner, [flows.TEXT_FEATURES]).load()
        self._features: dict[str, Features] = {}
        self._turn = forkable_lock()
        super().__init__(flow.FlowView(runner, self.of_images), preprocess, labels, self.its_task, spec, why)

    @classmethod
    def of_bundle(cls, opened: OpenedBundle) -> Predictor:
        spec = opened.files.manifest.postprocess
        assert isinstance(spec, ZeroShotSpec | OpenVocabularySpec), "a manifest without it is refused when it is read"
        tokenizer = TextTokenizer(opened.files.folder / spec.tokenizer, spec, opened.tokenizer)
        return cls(opened.runner, opened.preprocess, spec, tokenizer, opened.labels, opened.why)

    @abstractmethod
    def _read(
        self, outputs: Mapping[str, Array], features: Features, texts: Sequence[str], size: tuple[int, int], top: int
    ) -> task.Result:
        """Return the answer for one image of `size` (width, height); outputs without the batch axis."""

    def text_features(self, texts: Sequence[str]) -> Features:
        """Return the features of texts, float32 [texts, width], not normalised; cached texts do not run again.

        Raises:
            InputError: no text, or something other than a text.
        """
        require_texts(texts)
        with self._turn:
            new = list(dict.fromkeys(text for text in texts if text not in self._features))
            if new:
                if len(self._features) + len(new) > KEPT_TEXTS:
                    self._features.clear()
                    new = list(dict.fromkeys(texts))
                tokens = self.tokenizer.encode(new)
                found = self._text_tower.infer({self._text_tower.inputs[0].name: tokens})[flows.TEXT_FEATURES]
                self._features |= dict(zip(new, found, strict=True))
            return np.stack([self._features[text] for text in texts])

    def predict_batch(
        self,
        images: Sequence[ImageSource],
        top: int = 5,
        texts: Sequence[str] | None = None,
        *,
        channels: ChannelOrder = "rgb",
    ) -> list[task.Result]:
        """Return the answers for images, all with the same texts; `channels` and errors as `predict`."""
        require_several(images)
        require_top(top)
        return self._compared(images, top, self._given(texts), channels)

    def _compared(
        self, images: Sequence[ImageSource], top: int, texts: Sequence[str], channels: ChannelOrder
    ) -> list[task.Result]:
        features = self.text_features(texts)
        loaded = [self._load(in_rgb(image, channels)) for image in images]
        if not loaded:
            return []
        found = self.outputs([pixels for pixels, _ in loaded])
        return [
            self._read({name: array[i] for name, array in found.items()}, features, texts, size, top)
            for i, (_, size) in enumerate(loaded)
        ]

    def answer(
        self, outputs: Mapping[str, Array], size: tuple[int, int], top: int = 5, box: topdown.Box | None = None
    ) -> task.Result:
        """Return the answer for the outputs of one image, or a box of it, among the bundle's labels."""
        given = self._given(None)
        return self._read(outputs, self.text_features(given), given, size, top)

    def among(
        self, outputs: Mapping[str, Array], texts: Sequence[str], size: tuple[int, int], top: int = 5
    ) -> task.Result:
        """Return the answer for the outputs (of `run`) of one image of `size`, among texts; errors as `predict`."""
        given = self._given(texts)
        return self._read(outputs, self.text_features(given), given, size, top)

    def require(self, texts: Sequence[str] | None) -> None:
        """Raise InputError for texts that `predict` would refuse."""
        self._given(texts)

    def _given(self, texts: Sequence[str] | None) -> Sequence[str]:
        if texts is None and not self.labels:
            raise InputError(
                "no texts to compare the image with",
                found="a bundle without labels",
                expected="a list of texts",
                fix="predict(image, texts=['a photo of a cat', ...]), or --text TEXT, as often as needed",
            )
        chosen = texts if texts is not None else tuple(self.labels or ())
        require_texts(chosen)
        blank = [place for place, text in enumerate(chosen) if not text.strip()]
        if blank:
            raise InputError(
                "a text must not be blank",
                found=f"text {blank[0]} of {len(chosen)} is {chosen[blank[0]]!r}",
                expected="texts such as 'a photo of a cat'",
            )
        return chosen


class ZeroShotPredictor(TextsPredictor):
    """Ranks texts by how well they fit an image.

    >>> predictor = load("out/clip")                                                     # doctest: +SKIP
    >>> predictor.predict("cat.jpg", texts=["a photo of a cat", "a photo of a dog"])     # doctest: +SKIP
    <ZeroShot: a photo of a cat 98.3 % (+0.271), a photo of a dog 1.7 % (+0.230)>
    """

    of_images, its_task = (flows.IMAGE_FEATURES,), "zero-shot"

    def predict(
        self,
        image: ImageSource,
        top: int = 5,
        texts: Sequence[str] | None = None,
        *,
        channels: ChannelOrder = "rgb",
    ) -> zero_shot.ZeroShot:
        """Return the answer for one image among `texts`; None uses the bundle's labels. `channels`: as for
        `Predictor.predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
            InputError: no text, or a blank one.
        """
        require_top(top)
        return self._compared([image], top, self._given(texts), channels)[0]  # type: ignore[return-value]

    def _read(
        self, outputs: Mapping[str, Array], features: Features, texts: Sequence[str], size: tuple[int, int], top: int
    ) -> zero_shot.ZeroShot:
        assert isinstance(self.postprocess, ZeroShotSpec)
        return zero_shot.compare_texts(outputs[flows.IMAGE_FEATURES], features, texts, self.postprocess, top)


class OpenVocabularyPredictor(TextsPredictor):
    """Finds the objects in an image that texts describe.

    >>> predictor = load("out/owl")                                                      # doctest: +SKIP
    >>> predictor.predict("street.jpg", texts=["a photo of a bus", "a photo of a dog"])  # doctest: +SKIP
    <Detections: 1 in 640x480: a photo of a bus 61.4 % at 12 40 410 455>
    """

    of_images, its_task = open_vocabulary.OF_IMAGES, "open-vocabulary-detection"

    def predict(
        self,
        image: ImageSource,
        top: int = 5,
        texts: Sequence[str] | None = None,
        *,
        channels: ChannelOrder = "rgb",
    ) -> detection.Detections:
        """Return the objects in one image that `texts` describe; None uses the bundle's labels. `channels` and errors
        as for `ZeroShotPredictor.predict`; `top` is not used."""
        return self._compared([image], top, self._given(texts), channels)[0]  # type: ignore[return-value]

    def _read(
        self, outputs: Mapping[str, Array], features: Features, texts: Sequence[str], size: tuple[int, int], top: int
    ) -> detection.Detections:
        assert isinstance(self.postprocess, OpenVocabularySpec)
        return open_vocabulary.find_texts(outputs, features, texts, size, self.preprocess, self.postprocess)


# --- Image to text: handwriting, documents ----------------------------------------------------------------------------


class TextPredictor(Predictor):
    """Reads the text of images with the encoder and decoder of a bundle.

    `search` is the bundle's default beam search; None is greedy search, the likeliest token at each step.

    >>> predictor = load("out/trocr")                       # doctest: +SKIP
    >>> predictor.predict("line.png", beams=4).text         # doctest: +SKIP
    'industry, " Mr. Brown commented icily.'
    """

    def __init__(
        self, runner: Runner, preprocess: PreprocessSpec, spec: TextSpec, writer: TextWriter, why: str = ""
    ) -> None:
        assert isinstance(runner, text_decoder.TextRunner)
        super().__init__(runner, preprocess, None, "image-to-text", spec, why)
        self.writer, self.sequence = writer, runner.spec
        self.search: BeamSpec | None = runner.spec.search
        self._decoder = runner

    @classmethod
    def of_bundle(cls, opened: OpenedBundle) -> Predictor:
        spec = opened.files.manifest.postprocess
        assert isinstance(spec, TextSpec), "a manifest without it is refused when it is read"
        writer = TextWriter(opened.files.folder / spec.tokenizer, spec, opened.tokenizer)
        return cls(opened.runner, opened.preprocess, spec, writer, opened.why)

    def predict(
        self,
        image: ImageSource,
        top: int = 5,
        beams: int | None = None,
        prompt: str | None = None,
        *,
        channels: ChannelOrder = "rgb",
    ) -> image_to_text.Text:
        """Return the text of one image.

        Args:
            top: not used.
            beams: number of beams of the search, 1 for the likeliest token at each step; None: the model's setting.
            prompt: the beginning of the text, such as the task of a Donut ("<s_docvqa><s_question>..."), instead of
                the model's own. It is not part of the answer.
            channels: as for `Predictor.predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
            InputError: an invalid number of beams, or a prompt that is too long.
        """
        return self._texts([image], beams, prompt, channels)[0]

    def predict_batch(
        self,
        images: Sequence[ImageSource],
        top: int = 5,
        beams: int | None = None,
        prompt: str | None = None,
        *,
        channels: ChannelOrder = "rgb",
    ) -> list[task.Result]:
        """Return the texts of images; arguments and errors as `predict`."""
        require_several(images)
        return list(self._texts(images, beams, prompt, channels))

    def _texts(
        self, images: Sequence[ImageSource], beams: int | None, prompt: str | None, channels: ChannelOrder
    ) -> list[image_to_text.Text]:
        search = self._search(beams)
        given = self.writer.prompt(prompt) if prompt is not None else []
        loaded = [self._load(in_rgb(image, channels))[0] for image in images]
        found = []
        for start in range(0, len(loaded), self._batch):
            feed = self._input_of(loaded[start : start + self._batch])
            began = perf_counter_ns()
            tokens, scores = self._decoder.write(feed, search, given)
            self._ran(feed, {text_decoder.SCORES: scores}, began)
            self._stopwatch.count(len(feed))
            found += [
                {text_decoder.TOKENS: each, text_decoder.SCORES: score}
                for each, score in zip(tokens, scores, strict=True)
            ]
        return [image_to_text.to_text(outputs, self.sequence, self.writer) for outputs in found]

    def _search(self, beams: int | None) -> BeamSpec | None:
        if beams is None:
            return self.search
        text_decoder.require_beams(beams, self._decoder.vocabulary)
        if beams == 1:
            return None
        return BeamSpec(beams) if self.search is None else replace(self.search, beams=beams)

    def answer(
        self, outputs: Mapping[str, Array], size: tuple[int, int], top: int = 5, box: topdown.Box | None = None
    ) -> image_to_text.Text:
        """Return the text for the outputs of one image."""
        return image_to_text.to_text(
            {name: np.asarray(array) for name, array in outputs.items()}, self.sequence, self.writer
        )

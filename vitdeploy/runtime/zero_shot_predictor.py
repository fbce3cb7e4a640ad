"""The predictors of bundles of two towers: images among texts that are given at run time, or what texts say in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError
from vitdeploy.runtime.flow import FlowRunner, FlowView
from vitdeploy.runtime.flows import IMAGE_FEATURES, TEXT_FEATURES
from vitdeploy.runtime.predictor import OpenedBundle, Predictor, require_several, require_top
from vitdeploy.runtime.preprocess import ImageSource, in_rgb
from vitdeploy.runtime.runner import Array, Runner, forkable_lock
from vitdeploy.runtime.tasks.detection import Detections
from vitdeploy.runtime.tasks.open_vocabulary import OF_IMAGES, find_texts
from vitdeploy.runtime.tasks.task import Result
from vitdeploy.runtime.tasks.zero_shot import ZeroShot, compare_texts
from vitdeploy.runtime.tokenizer import TextTokenizer, require_texts
from vitdeploy.runtime.topdown import Box
from vitdeploy.spec import ChannelOrder, OpenVocabularySpec, PreprocessSpec, ReadsTexts, Task, ZeroShotSpec

Features = npt.NDArray[np.float32]

# Texts whose features are kept: some 100 MB of a model that is 768 wide.
KEPT_TEXTS = 30_000


class TextsPredictor(Predictor):
    """Answers with the engines of a bundle's two towers. The features of a text are kept: it runs once, however often
    it is asked for. Without texts those of the bundle's labels are meant, which it was verified with."""

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
        assert isinstance(runner, FlowRunner)
        self.spec, self.tokenizer = spec, tokenizer
        self._text_tower = FlowView(runner, [TEXT_FEATURES]).load()
        self._features: dict[str, Features] = {}
        self._turn = forkable_lock()
        super().__init__(FlowView(runner, self.of_images), preprocess, labels, self.its_task, spec, why)

    @classmethod
    def of_bundle(cls, opened: OpenedBundle) -> Predictor:
        spec = opened.files.manifest.postprocess
        assert isinstance(spec, ZeroShotSpec | OpenVocabularySpec), "a manifest without it is refused when it is read"
        tokenizer = TextTokenizer(opened.files.folder / spec.tokenizer, spec, opened.tokenizer)
        return cls(opened.runner, opened.preprocess, spec, tokenizer, opened.labels, opened.why)

    @abstractmethod
    def _read(
        self, outputs: Mapping[str, Array], features: Features, texts: Sequence[str], size: tuple[int, int], top: int
    ) -> Result:
        """The answer for one image of `size` (width, height); outputs without the batch axis."""

    def text_features(self, texts: Sequence[str]) -> Features:
        """float32 [texts, width], not normalised; texts that were asked for before do not run again.

        Raises:
            InputError: no text, or something that is none.
        """
        require_texts(texts)
        with self._turn:
            new = list(dict.fromkeys(text for text in texts if text not in self._features))
            if new:
                if len(self._features) + len(new) > KEPT_TEXTS:
                    self._features.clear()
                    new = list(dict.fromkeys(texts))
                tokens = self.tokenizer.encode(new)
                found = self._text_tower.infer({self._text_tower.inputs[0].name: tokens})[TEXT_FEATURES]
                self._features |= dict(zip(new, found, strict=True))
            return np.stack([self._features[text] for text in texts])

    def predict_batch(
        self,
        images: Sequence[ImageSource],
        top: int = 5,
        texts: Sequence[str] | None = None,
        *,
        channels: ChannelOrder = "rgb",
    ) -> list[Result]:
        """Answers for images, each among the same texts; `channels` and errors as `predict`."""
        require_several(images)
        require_top(top)
        return self._compared(images, top, self._given(texts), channels)

    def _compared(
        self, images: Sequence[ImageSource], top: int, texts: Sequence[str], channels: ChannelOrder
    ) -> list[Result]:
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
        self, outputs: Mapping[str, Array], size: tuple[int, int], top: int = 5, box: Box | None = None
    ) -> Result:
        """The answer that the outputs of one image, or of a box of it, mean among the bundle's labels."""
        given = self._given(None)
        return self._read(outputs, self.text_features(given), given, size, top)

    def among(self, outputs: Mapping[str, Array], texts: Sequence[str], size: tuple[int, int], top: int = 5) -> Result:
        """The answer that the outputs of one image of `size`, of `run`, mean among texts; errors as `predict`."""
        given = self._given(texts)
        return self._read(outputs, self.text_features(given), given, size, top)

    def require(self, texts: Sequence[str] | None) -> None:
        """Raise InputError for texts that `predict` would refuse."""
        self._given(texts)

    def _given(self, texts: Sequence[str] | None) -> Sequence[str]:
        if texts is None and not self.labels:
            raise InputError(
                "an image is compared with texts, and none is given",
                found="a bundle without labels of its own",
                wanted="texts",
                fix="predict(image, texts=['a photo of a cat', ...]), or --text as often as needed",
            )
        given = texts if texts is not None else tuple(self.labels or ())
        require_texts(given)
        blank = [place for place, text in enumerate(given) if not text.strip()]
        if blank:
            raise InputError(
                "a blank text says nothing that an image could show",
                found=f"text {blank[0]} of {len(given)} is {given[blank[0]]!r}",
                wanted="texts such as 'a photo of a cat'",
            )
        return given


class ZeroShotPredictor(TextsPredictor):
    """Answers which of some texts fit an image.

    >>> predictor = load("out/clip")                                                     # doctest: +SKIP
    >>> predictor.predict("cat.jpg", texts=["a photo of a cat", "a photo of a dog"])     # doctest: +SKIP
    <ZeroShot: a photo of a cat 98.3 % (+0.271), a photo of a dog 1.7 % (+0.230)>
    """

    of_images, its_task = (IMAGE_FEATURES,), "zero-shot"

    def predict(
        self,
        image: ImageSource,
        top: int = 5,
        texts: Sequence[str] | None = None,
        *,
        channels: ChannelOrder = "rgb",
    ) -> ZeroShot:
        """The answer for one image among `texts`; None: among the bundle's labels. `channels`: of an array, as of
        `Predictor.predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
            InputError: no text, or a blank one.
        """
        require_top(top)
        return self._compared([image], top, self._given(texts), channels)[0]  # type: ignore[return-value]

    def _read(
        self, outputs: Mapping[str, Array], features: Features, texts: Sequence[str], size: tuple[int, int], top: int
    ) -> ZeroShot:
        assert isinstance(self.postprocess, ZeroShotSpec)
        return compare_texts(outputs[IMAGE_FEATURES], features, texts, self.postprocess, top)


class OpenVocabularyPredictor(TextsPredictor):
    """Finds in an image what some texts say.

    >>> predictor = load("out/owl")                                                      # doctest: +SKIP
    >>> predictor.predict("street.jpg", texts=["a photo of a bus", "a photo of a dog"])  # doctest: +SKIP
    <Detections: 1 in 640x480: a photo of a bus 61.4 % at 12 40 410 455>
    """

    of_images, its_task = OF_IMAGES, "open-vocabulary-detection"

    def predict(
        self,
        image: ImageSource,
        top: int = 5,
        texts: Sequence[str] | None = None,
        *,
        channels: ChannelOrder = "rgb",
    ) -> Detections:
        """The objects in one image that `texts` say; None: that the bundle's labels say. `channels` and errors as of
        `ZeroShotPredictor.predict`; `top` has no part in it."""
        return self._compared([image], top, self._given(texts), channels)[0]  # type: ignore[return-value]

    def _read(
        self, outputs: Mapping[str, Array], features: Features, texts: Sequence[str], size: tuple[int, int], top: int
    ) -> Detections:
        assert isinstance(self.postprocess, OpenVocabularySpec)
        return find_texts(outputs, features, texts, size, self.preprocess, self.postprocess)

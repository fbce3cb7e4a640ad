"""The predictor of a bundle that writes a text for each image: lines of writing, documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter_ns

import numpy as np

from vitdeploy.runtime.predictor import OpenedBundle, Predictor, require_several
from vitdeploy.runtime.preprocess import ImageSource, in_rgb
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.image_to_text import Text, to_text
from vitdeploy.runtime.tasks.task import Result
from vitdeploy.runtime.text_decoder import SCORES, TOKENS, TextRunner, require_beams
from vitdeploy.runtime.tokenizer import TextWriter
from vitdeploy.runtime.topdown import Box
from vitdeploy.spec import BeamSpec, ChannelOrder, PreprocessSpec, TextSpec


class TextPredictor(Predictor):
    """Reads images with the engines of a bundle's encoder and decoder.

    `search` is how the bundle searches unless it is asked for beams; None takes the likeliest token at each step.

    >>> predictor = load("out/trocr")                       # doctest: +SKIP
    >>> predictor.predict("line.png", beams=4).text         # doctest: +SKIP
    'industry, " Mr. Brown commented icily.'
    """

    def __init__(
        self, runner: Runner, preprocess: PreprocessSpec, spec: TextSpec, writer: TextWriter, why: str = ""
    ) -> None:
        assert isinstance(runner, TextRunner)
        super().__init__(runner, preprocess, None, "image-to-text", spec, why)
        self.writer, self.sequence = writer, runner.spec
        self.search: BeamSpec | None = runner.spec.search
        self._decoder = runner.decoder

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
    ) -> Text:
        """The text of one image.

        Args:
            top: without a meaning here. beams: of a beam search, 1 for the likeliest token at each step; None: as the
            model's own files say. prompt: what the text begins with, such as the task of a Donut
            ("<s_docvqa><s_question>..."), in the place of
                the model's own beginning. It is no part of the answer. channels: of an array, as of
            `Predictor.predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
            InputError: no sensible number of beams; a prompt that is too long.
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
    ) -> list[Result]:
        """The texts of images; arguments and errors as `predict`."""
        require_several(images)
        return list(self._texts(images, beams, prompt, channels))

    def _texts(
        self, images: Sequence[ImageSource], beams: int | None, prompt: str | None, channels: ChannelOrder
    ) -> list[Text]:
        search = self._search(beams)
        given = self.writer.prompt(prompt) if prompt is not None else []
        loaded = [self._load(in_rgb(image, channels))[0] for image in images]
        found = []
        for start in range(0, len(loaded), self._batch):
            feed = self._input_of(loaded[start : start + self._batch])
            began = perf_counter_ns()
            tokens, scores = self._decoder.write(feed, search, given)
            self._ran(feed, {SCORES: scores}, began)
            self._stopwatch.count(len(feed))
            found += [{TOKENS: each, SCORES: score} for each, score in zip(tokens, scores, strict=True)]
        return [to_text(outputs, self.sequence, self.writer) for outputs in found]

    def _search(self, beams: int | None) -> BeamSpec | None:
        if beams is None:
            return self.search
        require_beams(beams, self._decoder.vocabulary)
        if beams == 1:
            return None
        return BeamSpec(beams) if self.search is None else replace(self.search, beams=beams)

    def answer(self, outputs: Mapping[str, Array], size: tuple[int, int], top: int = 5, box: Box | None = None) -> Text:
        """The text that the outputs of one image mean."""
        return to_text({name: np.asarray(array) for name, array in outputs.items()}, self.sequence, self.writer)

"""From an image to the tokens of a text: greedy decoding or beam search over the engines of encoder and decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vitdeploy.errors import InputError
from vitdeploy.runtime.beams import Floats, Tokens, allowed, beam_search, log_softmax
from vitdeploy.runtime.flows import inputs_of
from vitdeploy.runtime.runner import Array, Runner, require_array, type_name
from vitdeploy.runtime.sequence import DecodingRunner, SequenceDecoder
from vitdeploy.spec import BeamSpec, FlowSpec, SequenceSpec, TensorSpec

# More beams than this have never been found to read better, and each is a run of the decoder.
MOST_BEAMS = 64
# Tokens of the text that is measured, or as many as the model can write.
MEASURED = 32
TOKENS, SCORES = "tokens", "scores"


def text_outputs(spec: SequenceSpec) -> tuple[TensorSpec, ...]:
    """The outputs of such an engine as a whole. "scores" are the natural logarithms of the tokens' probabilities."""
    shape = ("batch", spec.max_length)
    return TensorSpec(TOKENS, "int64", shape), TensorSpec(SCORES, "float32", shape)


class TextDecoder(SequenceDecoder):
    """Writes a text for each image. A context manager, or `close`."""

    def __init__(self, encoder: Runner, decoder_step: Runner, spec: SequenceSpec, flow: FlowSpec | None = None) -> None:
        """Loads the runners; errors as `SequenceDecoder`."""
        super().__init__(encoder, decoder_step, spec.start, spec.end, spec.pad, spec.max_length, flow=flow)
        self.spec = spec
        logits = next(tensor for tensor in decoder_step.outputs if tensor.name == self._logits)
        self.vocabulary = int(logits.shape[-1])
        self.inputs = inputs_of(self._linked.flow, self._linked.graphs)

    def write(self, images: Array, search: BeamSpec | None = None, prompt: Sequence[int] = ()) -> tuple[Tokens, Floats]:
        """For images [n, ...] as the encoder takes them: their tokens, int64 [n, max_length], padded behind the end
        token, and the natural logarithm of the probability of each, float32, 0 behind the end.

        Args:
            search: beam search; None takes the likeliest token at each step.
            prompt: tokens that the text begins with, in the place of the start token; they are not in the answer.

        Raises:
            TensorError: images of another dtype or shape.
            InputError: no sensible number of beams, or a prompt of no tokens of this model, or too many.
        """
        self._check(images)
        self._check_prompt(prompt)
        if search is not None:
            require_beams(search.beams, self.vocabulary)
        steps = self.max_length - max(0, len(prompt) - 1)
        tokens, scores = self._grouped(images, lambda group: self._write(group, self.spec, search, prompt, steps))
        assert scores is not None
        missing = ((0, 0), (0, self.max_length - tokens.shape[1]))
        return np.pad(tokens, missing, constant_values=self.pad), np.pad(scores, missing).astype(np.float32)

    def decode(self, source: Array, steps: int | None = None) -> Tokens:
        """The tokens alone, found as the engine's `SequenceSpec` says; `steps` is not asked of a text."""
        return self.write(source, self.spec.search)[0]

    def measured(self, images: Array) -> None:
        """A text of MEASURED tokens for each image, or of as many as the model can write, found as the engine's
        `SequenceSpec` says: two engines of one model do the same work, whatever they read in noise."""
        endless, steps = replace(self.spec, end=-1, forced_end=None, no_repeat=None), min(MEASURED, self.max_length)
        self._grouped(images, lambda group: self._write(group, endless, self.spec.search, (), steps))

    def _write(
        self, images: Array, spec: SequenceSpec, search: BeamSpec | None, prompt: Sequence[int], steps: int
    ) -> tuple[Tokens, Floats]:
        feeds, rows = self._begin(images), len(images)
        given = list(prompt) or [self.start]
        for token in given[:-1]:
            self._advance(feeds, np.full((rows, 1), token, np.int64))
        if search is None or search.beams == 1:
            return self._likeliest(feeds, rows, given, spec, steps)
        beams = search.beams
        feeds = {name: np.repeat(array, beams, axis=0) for name, array in feeds.items()}

        def step(token: Tokens, origin: Tokens | None) -> Array:
            for cache in self._caches if origin is not None else ():
                feeds[cache.name] = feeds[cache.name][origin]
            return self._advance(feeds, token)

        return beam_search(step, rows, given, spec, search, steps)

    def _likeliest(
        self, feeds: dict[str, Array], rows: int, given: Sequence[int], spec: SequenceSpec, steps: int
    ) -> tuple[Tokens, Floats]:
        token, ended = np.full((rows, 1), given[-1], np.int64), np.zeros(rows, bool)
        tokens: list[Tokens] = []
        scores: list[Floats] = []
        while len(tokens) < steps and not ended.all():
            logits = self._advance(feeds, token)
            written = np.stack(tokens, axis=1) if tokens else np.zeros((rows, 0), np.int64)
            best = allowed(logits, written, given, spec, last=len(tokens) == steps - 1).argmax(axis=-1)
            found = log_softmax(logits)
            scores.append(np.where(ended, 0, found[np.arange(rows), best]))
            tokens.append(np.where(ended, self.pad, best))
            token, ended = tokens[-1][:, None], ended | (tokens[-1] == spec.end)
        return np.stack(tokens, axis=1), np.stack(scores, axis=1)

    def _check(self, source: Array) -> None:
        require_array(source, self.inputs[0], "the images")

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        wrong = [token for token in prompt if not 0 <= token < self.vocabulary]
        if wrong or len(prompt) > self.max_length:
            raise InputError(
                "the prompt does not fit the model",
                found=f"the token {wrong[0]}" if wrong else f"{len(prompt)} tokens",
                wanted=f"tokens 0 to {self.vocabulary - 1}, at most {self.max_length}",
            )


def require_beams(beams: object, vocabulary: int) -> None:
    """Raise InputError for anything but a number of beams that a search makes sense with."""
    most = min(MOST_BEAMS, vocabulary - 1)
    if isinstance(beams, bool) or not isinstance(beams, int) or not 1 <= beams <= most:
        raise InputError(
            "that is no number of beams",
            found=repr(beams) if isinstance(beams, int | float | str) else type_name(beams),
            wanted=f"a whole number, 1 (the likeliest token at each step) to {most}",
        )


class TextRunner(DecodingRunner[TextDecoder]):
    """An encoder-decoder of images. Outputs: `text_outputs`, found as the engine's `SequenceSpec` says."""

    def _load(self) -> None:
        self._decoder = TextDecoder(*self.parts, self.spec, self.flow)
        self.inputs, self.outputs = self._decoder.inputs, text_outputs(self.spec)
        self.provider = self.parts[0].provider

    def measured(self, feeds: Mapping[str, Array]) -> None:
        self.decoder.measured(feeds[self.inputs[0].name])

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        tokens, scores = self.decoder.write(feeds[self.inputs[0].name], self.spec.search)
        return {TOKENS: tokens, SCORES: scores}

"""From an image to the tokens of a text: greedy decoding or beam search over the engines of encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError
from vitdeploy.runtime import flows, runner, sequence
from vitdeploy.spec import BeamSpec, SequenceSpec, TensorSpec

# --- Beam search over the steps of a decoder, with the rules of transformers' `generate` ------------------------------
# Source: `GenerationMixin._beam_search` of transformers 5.23, which these rules are compared with token by token. Its
# default, early_stopping False, ends by a heuristic: the best running beam is judged as if it ended where it is.


Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# What takes a beam out of a ranking.
OUT = np.float32(-1e9)

# The logits [rows * beams, v] after these tokens, int64 [rows * beams, 1], each of which goes on from the beam of the
# step before that the second array names, int64 [rows * beams]; None at the first step.
Step = Callable[[Tokens, Tokens | None], runner.Array]


@dataclass(frozen=True)
class _Beams:
    """Of each row some texts: their tokens and the log probability of each, [rows, beams, steps], and their score,
    float32 [rows, beams], which ranks them. `ended`: bool [rows, beams]."""

    tokens: Tokens
    each: Floats
    score: Floats
    ended: npt.NDArray[np.bool_]

    def take(self, chosen: Tokens) -> _Beams:
        """Those at int64 [rows, n] of each row."""
        rows = np.arange(len(chosen))[:, None]
        return _Beams(
            self.tokens[rows, chosen], self.each[rows, chosen], self.score[rows, chosen], self.ended[rows, chosen]
        )

    def join(self, other: _Beams) -> _Beams:
        return _Beams(
            np.concatenate([self.tokens, other.tokens], axis=1),
            np.concatenate([self.each, other.each], axis=1),
            np.concatenate([self.score, other.score], axis=1),
            np.concatenate([self.ended, other.ended], axis=1),
        )


def log_softmax(logits: runner.Array) -> Floats:
    """float32 of the last axis."""
    shifted = logits.astype(np.float32) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def beam_search(
    step: Step, rows: int, given: Sequence[int], spec: SequenceSpec, search: BeamSpec, steps: int
) -> tuple[Tokens, Floats]:
    """The best text of each row: its tokens, int64 [rows, steps], padded behind the end, and the log probability of
    each, float32, 0 there. `given` are the tokens before it, of which the first step reads the last."""
    count = search.beams
    running = _none(rows, count, steps, spec.pad, first_alone=True)
    done = _none(rows, count, steps, spec.pad)
    improvable = np.ones((rows, 1), bool)
    token, origin = np.full((rows * count, 1), given[-1], np.int64), None
    for number in range(steps):
        last = number == steps - 1
        written = running.tokens[:, :, :number].reshape(rows * count, -1)
        scores = allowed(log_softmax(step(token, origin)), written, given, spec, last=last).reshape(rows, count, -1)
        found, beam = _continued(running, scores, number, spec.end, last=last)
        chosen = _top(found.score + found.ended * OUT, count)
        running = replace(found.take(chosen), score=np.take_along_axis(found.score + found.ended * OUT, chosen, 1))
        done = _finished(done, found, search, number + 1, improvable)
        length = steps if search.early_stopping == "never" and search.length_penalty > 0 else number + 1
        hoped = running.score[:, :1] / np.float32(length**search.length_penalty)
        worst = np.where(done.ended, done.score.min(axis=1, keepdims=True), OUT)
        improvable = improvable & (hoped > worst).any(axis=1, keepdims=True)
        full = search.early_stopping is True and done.ended.all()
        if not improvable.any() or full or found.ended.all():
            break
        token = running.tokens[:, :, number].reshape(-1, 1)
        origin = (np.take_along_axis(beam, chosen, 1) + count * np.arange(rows)[:, None]).ravel()
    return done.tokens[:, 0], done.each[:, 0]


def allowed(
    scores: runner.Array, written: Tokens, given: Sequence[int], spec: SequenceSpec, *, last: bool
) -> runner.Array:
    """Scores [n, v] of the next tokens, minus infinity for those that the spec rules out after `written`, int64 [n, t],
    and what was `given` before. `last`: no more tokens can follow."""
    if last and spec.forced_end:
        scores = np.full_like(scores, -np.inf)
        scores[:, spec.end] = 0
        return scores
    size = spec.no_repeat
    tokens = np.concatenate([np.tile(np.array(given, np.int64), (len(written), 1)), written], axis=1)
    if size is None or tokens.shape[1] < size:
        return scores
    runs = np.lib.stride_tricks.sliding_window_view(tokens, size, axis=1)
    begun = tokens[:, tokens.shape[1] - size + 1 :]
    rows, places = np.nonzero((runs[:, :, :-1] == begun[:, None]).all(axis=2))
    scores = scores.copy()
    scores[rows, runs[rows, places, -1]] = -np.inf
    return scores


def _none(rows: int, count: int, steps: int, pad: int, *, first_alone: bool = False) -> _Beams:
    """No text yet. Of running ones the first alone counts: the others would say the same."""
    score = np.full((rows, count), OUT)
    if first_alone:
        score[:, 0] = 0
    shape = rows, count, steps
    return _Beams(np.full(shape, pad, np.int64), np.zeros(shape, np.float32), score, np.zeros((rows, count), bool))


def _continued(running: _Beams, scores: Floats, number: int, end: int, *, last: bool) -> tuple[_Beams, Tokens]:
    """The best continuations of all running beams, best first, twice as many as beams, so that enough go on if all the
    best ones end; and the beam of each, int64 [rows, n]. Their score is the sum of their log probabilities."""
    rows, count, vocabulary = scores.shape
    total = (running.score[:, :, None] + scores).reshape(rows, -1)
    best = _top(total, 2 * count)
    beam, token = best // vocabulary, best % vocabulary
    found = running.take(beam)
    found.tokens[:, :, number] = token
    found.each[:, :, number] = np.take_along_axis(scores.reshape(rows, -1), best, 1)
    return _Beams(found.tokens, found.each, np.take_along_axis(total, best, 1), (token == end) | last), beam


def _finished(done: _Beams, found: _Beams, search: BeamSpec, length: int, improvable: npt.NDArray[np.bool_]) -> _Beams:
    """The best texts that have ended, with those that ended now among the first `beams` continuations."""
    now = found.ended & (np.arange(found.ended.shape[1]) < search.beams)
    score = found.score / np.float32(length**search.length_penalty)
    full = done.ended.all(axis=1, keepdims=True) & (search.early_stopping is True)
    score = score + full * OUT + ~improvable * OUT + ~now * OUT
    both = done.join(replace(found, score=score.astype(np.float32), ended=now))
    return both.take(_top(both.score, search.beams))


def _top(values: Floats, count: int) -> Tokens:
    """Where the largest values of each row are, largest first; of equal ones the first."""
    if values.shape[1] > 8 * count:  # a vocabulary: sorting all of it would take longer than the step
        near = np.sort(np.argpartition(-values, count - 1, axis=1)[:, :count], axis=1)
        order = np.argsort(-np.take_along_axis(values, near, 1), axis=1, kind="stable")
        return np.take_along_axis(near, order, 1)
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


# --- An encoder-decoder of images as one runner -----------------------------------------------------------------------


# More beams than this have never been found to read better, and each is a run of the decoder.
MOST_BEAMS = 64
# Tokens of the text that is measured, or as many as the model can write.
MEASURED = 32
TOKENS, SCORES = "tokens", "scores"


def text_outputs(spec: SequenceSpec) -> tuple[TensorSpec, ...]:
    """The outputs of such an engine as a whole. "scores" are the natural logarithms of the tokens' probabilities."""
    shape = ("batch", spec.max_length)
    return TensorSpec(TOKENS, "int64", shape), TensorSpec(SCORES, "float32", shape)


class TextRunner(sequence.SequenceRunner):
    """An encoder-decoder of images, which writes a text for each. Inputs: those of the encoder. Outputs:
    `text_outputs`, found as the engine's `SequenceSpec` says."""

    def _load(self) -> None:
        super()._load()
        logits = next(tensor for tensor in self.decoder_step.outputs if tensor.name == self._logits)
        self.vocabulary = int(logits.shape[-1])

    def _tensors(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        return flows.inputs_of(self._linked.flow, self._linked.graphs), text_outputs(self.spec)

    def example(self, batch: int) -> None:
        return None

    def measured(self, feeds: Mapping[str, runner.Array]) -> object:
        return self._query(feeds[self.inputs[0].name])

    def _infer(self, feeds: Mapping[str, runner.Array]) -> dict[str, runner.Array]:
        tokens, scores = self.write(feeds[self.inputs[0].name], self.spec.search)
        return {TOKENS: tokens, SCORES: scores}

    def write(
        self, images: runner.Array, search: BeamSpec | None = None, prompt: Sequence[int] = ()
    ) -> tuple[Tokens, Floats]:
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
        most = self.spec.max_length
        steps = most - max(0, len(prompt) - 1)
        tokens, scores = self._grouped(images, lambda group: self._write(group, self.spec, search, prompt, steps))
        assert scores is not None
        missing = ((0, 0), (0, most - tokens.shape[1]))
        return np.pad(tokens, missing, constant_values=self.spec.pad), np.pad(scores, missing).astype(np.float32)

    def _query(self, images: runner.Array) -> object:
        """A text of MEASURED tokens for each image, or of as many as the model can write, found as the engine's
        `SequenceSpec` says: two engines of one model do the same work, whatever they read in noise."""
        endless, steps = (
            replace(self.spec, end=-1, forced_end=None, no_repeat=None),
            min(MEASURED, self.spec.max_length),
        )
        return self._grouped(images, lambda group: self._write(group, endless, self.spec.search, (), steps))

    def _write(
        self, images: runner.Array, spec: SequenceSpec, search: BeamSpec | None, prompt: Sequence[int], steps: int
    ) -> tuple[Tokens, Floats]:
        feeds, rows = self._begin(images), len(images)
        given = list(prompt) or [self.spec.start]
        for token in given[:-1]:
            self._advance(feeds, np.full((rows, 1), token, np.int64))
        if search is None or search.beams == 1:
            return self._likeliest(feeds, rows, given, spec, steps)
        beams = search.beams
        feeds = {name: np.repeat(array, beams, axis=0) for name, array in feeds.items()}

        def step(token: Tokens, origin: Tokens | None) -> runner.Array:
            for cache in self._caches if origin is not None else ():
                feeds[cache.name] = feeds[cache.name][origin]
            return self._advance(feeds, token)

        return beam_search(step, rows, given, spec, search, steps)

    def _likeliest(
        self, feeds: dict[str, runner.Array], rows: int, given: Sequence[int], spec: SequenceSpec, steps: int
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
            tokens.append(np.where(ended, self.spec.pad, best))
            token, ended = tokens[-1][:, None], ended | (tokens[-1] == spec.end)
        return np.stack(tokens, axis=1), np.stack(scores, axis=1)

    def _check(self, source: runner.Array) -> None:
        runner.require_array(source, self.inputs[0], "the images")

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        wrong = [token for token in prompt if not 0 <= token < self.vocabulary]
        if wrong or len(prompt) > self.spec.max_length:
            raise InputError(
                "the prompt does not fit the model",
                found=f"the token {wrong[0]}" if wrong else f"{len(prompt)} tokens",
                expected=f"tokens 0 to {self.vocabulary - 1}, at most {self.spec.max_length}",
            )


def require_beams(beams: object, vocabulary: int) -> None:
    """Raise InputError for anything but a number of beams that a search makes sense with."""
    most = min(MOST_BEAMS, vocabulary - 1)
    if isinstance(beams, bool) or not isinstance(beams, int) or not 1 <= beams <= most:
        raise InputError(
            "that is no number of beams",
            found=repr(beams) if isinstance(beams, int | float | str) else runner.type_name(beams),
            expected=f"a whole number, 1 (the likeliest token at each step) to {most}",
        )

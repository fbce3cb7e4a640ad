"""Decode an image to the tokens of a text: greedy decoding or beam search with the engines of encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError
from vitdeploy.runtime import flows, runner, sequence
from vitdeploy.spec import BeamSpec, SequenceSpec, TensorSpec

# --- Beam search with the rules of transformers' `generate` -----------------------------------------------------------
# Source: `GenerationMixin._beam_search` of transformers 5.23, compared with this code token by token in tests. Its
# default, early_stopping False, stops by a heuristic: the best running beam is scored as if it ended now.


Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# Added to the score of a beam to remove it from a ranking.
OUT = np.float32(-1e9)

# Returns the logits [rows * beams, v] after these tokens, int64 [rows * beams, 1]. The second array, int64 [rows *
# beams], is the beam of the previous step that each continues; None at the first step.
Step = Callable[[Tokens, Tokens | None], runner.Array]


@dataclass(frozen=True)
class _Beams:
    """Candidate texts of each row: tokens and their log probabilities, [rows, beams, steps], and the ranking scores,
    float32 [rows, beams]. `ended`: bool [rows, beams]."""

    tokens: Tokens
    each: Floats
    score: Floats
    ended: npt.NDArray[np.bool_]

    def take(self, chosen: Tokens) -> _Beams:
        """Return the candidates at indices int64 [rows, n] of each row."""
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
    """Return the log-softmax over the last axis, float32."""
    shifted = logits.astype(np.float32) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def beam_search(
    step: Step, rows: int, given: Sequence[int], spec: SequenceSpec, search: BeamSpec, steps: int
) -> tuple[Tokens, Floats]:
    """Return the best text of each row: its tokens, int64 [rows, steps], padded after the end, and their log
    probabilities, float32, 0 after the end. `given` are the tokens before it; the first step reads the last of them."""
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
    """Return the scores [n, v] of the next tokens, -inf for those that the spec forbids after `given` and `written`,
    int64 [n, t]. `last`: no more tokens can follow."""
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
    """Empty candidates. With `first_alone` only the first counts, because all running beams start equal."""
    score = np.full((rows, count), OUT)
    if first_alone:
        score[:, 0] = 0
    shape = rows, count, steps
    return _Beams(np.full(shape, pad, np.int64), np.zeros(shape, np.float32), score, np.zeros((rows, count), bool))


def _continued(running: _Beams, scores: Floats, number: int, end: int, *, last: bool) -> tuple[_Beams, Tokens]:
    """The best continuations of all running beams, best first, and the beam of each, int64 [rows, n]. There are twice
    as many as beams, so that enough continue if all the best ones end. The score is the sum of log probabilities."""
    rows, count, vocabulary = scores.shape
    total = (running.score[:, :, None] + scores).reshape(rows, -1)
    best = _top(total, 2 * count)
    beam, token = best // vocabulary, best % vocabulary
    found = running.take(beam)
    found.tokens[:, :, number] = token
    found.each[:, :, number] = np.take_along_axis(scores.reshape(rows, -1), best, 1)
    return _Beams(found.tokens, found.each, np.take_along_axis(total, best, 1), (token == end) | last), beam


def _finished(done: _Beams, beams: _Beams, search: BeamSpec, length: int, improvable: npt.NDArray[np.bool_]) -> _Beams:
    """The best ended texts, including those that ended now among the first `beams` continuations."""
    now = beams.ended & (np.arange(beams.ended.shape[1]) < search.beams)
    score = beams.score / np.float32(length**search.length_penalty)
    full = done.ended.all(axis=1, keepdims=True) & (search.early_stopping is True)
    score = score + full * OUT + ~improvable * OUT + ~now * OUT
    both = done.join(replace(beams, score=score.astype(np.float32), ended=now))
    return both.take(_top(both.score, search.beams))


def _top(values: Floats, count: int) -> Tokens:
    """The indices of the largest values of each row, largest first; ties: lower index first."""
    if values.shape[1] > 8 * count:  # a vocabulary: sorting all of it would take longer than the decoder step
        near = np.sort(np.argpartition(-values, count - 1, axis=1)[:, :count], axis=1)
        order = np.argsort(-np.take_along_axis(values, near, 1), axis=1, kind="stable")
        return np.take_along_axis(near, order, 1)
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


# --- An image encoder and text decoder as one runner ------------------------------------------------------------------


# Limit of beams; each costs a row in every decoder run.
MOST_BEAMS = 64
# Tokens per text in measurements, or the model's maximum if lower.
MEASURED = 32
TOKENS, SCORES = "tokens", "scores"


def text_outputs(spec: SequenceSpec) -> tuple[TensorSpec, ...]:
    """Return the outputs of the whole engine. "scores" are the natural logarithms of the tokens' probabilities."""
    shape = ("batch", spec.max_length)
    return TensorSpec(TOKENS, "int64", shape), TensorSpec(SCORES, "float32", shape)


class TextRunner(sequence.SequenceRunner):
    """An encoder-decoder that writes a text for each image. Inputs: those of the encoder. Outputs: `text_outputs`,
    decoded by the engine's `SequenceSpec`."""

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
        """Return the tokens of images [n, ...] (as the encoder takes them), int64 [n, max_length], padded after the end
        token, and the natural logarithm of each token's probability, float32, 0 after the end.

        Args:
            search: settings of the beam search; None decodes greedily.
            prompt: the first tokens of the text, instead of the start token; they are not in the answer.

        Raises:
            TensorError: images of the wrong dtype or shape.
            InputError: an invalid number of beams, or a prompt with unknown tokens or too many.
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
        """Write MEASURED tokens for each image (or the model's maximum, if lower), decoded by the engine's
        `SequenceSpec` but without an end: so two engines of one model do the same work on random images."""
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
                "the prompt has unknown tokens, or too many",
                found=f"the token {wrong[0]}" if wrong else f"{len(prompt)} tokens",
                expected=f"tokens 0 to {self.vocabulary - 1}, at most {self.spec.max_length}",
            )


def require_beams(beams: object, vocabulary: int) -> None:
    """Raise InputError unless `beams` is a valid number of beams."""
    most = min(MOST_BEAMS, vocabulary - 1)
    if isinstance(beams, bool) or not isinstance(beams, int) or not 1 <= beams <= most:
        raise InputError(
            "invalid number of beams",
            found=repr(beams) if isinstance(beams, int | float | str) else runner.type_name(beams),
            expected=f"an integer from 1 (greedy) to {most}",
        )

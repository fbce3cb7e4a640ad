"""Beam search over the steps of a decoder, with the rules of transformers' `generate`.

Source: `GenerationMixin._beam_search` of transformers 5.23, which these rules are compared with token by token. Its
default, early_stopping False, ends by a heuristic: the best running beam is judged as if it ended where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.runner import Array
from vitdeploy.spec import BeamSpec, SequenceSpec

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# What takes a beam out of a ranking.
OUT = np.float32(-1e9)

# The logits [rows * beams, v] after these tokens, int64 [rows * beams, 1], each of which goes on from the beam of the
# step before that the second array names, int64 [rows * beams]; None at the first step.
Step = Callable[[Tokens, Tokens | None], Array]


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


def log_softmax(logits: Array) -> Floats:
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


def allowed(scores: Array, written: Tokens, given: Sequence[int], spec: SequenceSpec, *, last: bool) -> Array:
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

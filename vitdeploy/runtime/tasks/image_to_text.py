"""Image to text: the text from the tokens that a model wrote for an image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitdeploy.runtime import flows, runner, text_decoder, tokenizer
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs
from vitdeploy.spec import SequenceSpec


@dataclass(frozen=True, repr=False)
class Text:
    """The answer for one image: the text that the model reads in it.

    `tokens` exclude start, end and padding. `score` is the natural logarithm of the model's probability of the tokens
    and the end after them: the sum over the tokens, independent of the ranking in a beam search. `cut`: the model
    reached its maximum number of tokens before the end.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    cut: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": list(self.tokens), "score": self.score, "cut": self.cut}

    def __str__(self) -> str:
        shown = self.text.replace("\n", "\\n").replace("\r", "\\r")
        return f"{shown} [cut at {len(self.tokens)} tokens]" if self.cut else shown

    def __repr__(self) -> str:
        return f"<Text of {len(self.tokens)} tokens, score {self.score:.3f}: {self}>"


def written(tokens: runner.Array, spec: SequenceSpec) -> tuple[runner.Array, bool]:
    """Return the tokens before the end, from padded int64 [length], and whether the end is missing."""
    ends = np.flatnonzero(tokens == spec.end)
    if len(ends):
        return tokens[: ends[0]], False
    kept = np.flatnonzero(tokens != spec.pad)
    return tokens[: kept[-1] + 1] if len(kept) else tokens[:0], True


def to_text(outputs: Mapping[str, runner.Array], spec: SequenceSpec, writer: tokenizer.TextWriter) -> Text:
    """Return the answer for one image; outputs by name, without the batch axis."""
    tokens, cut = written(outputs[text_decoder.TOKENS], spec)
    score = float(outputs[text_decoder.SCORES].astype(np.float64).sum())
    return Text(writer.text(tokens.tolist()), tuple(int(token) for token in tokens), score, cut)


def _answer(outputs: Outputs, reading: OutputReading) -> Text:
    raise AssertionError("TextPredictor makes the answers: it has the tokenizer")


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    """Whether both wrote the same tokens."""
    return bool(np.array_equal(ours[text_decoder.TOKENS], theirs[text_decoder.TOKENS]))


IMAGE_TO_TEXT = DeviceTask(
    _answer,
    _same,
    predictor="vitdeploy.runtime.predictors:TextPredictor",
    flow=flows.ENCODER_DECODER,
    postprocess=tokenizer.TextSpec,
)
# Tokens in, tokens out: `sequence_predictor` answers.
SEQUENCE = DeviceTask(_answer, _same, takes="tokens", flow=flows.ENCODER_DECODER)

"""An encoder-decoder as one runner: source tokens in, target tokens out, decoded greedily: one encoder run per source
and one decoder run per target token."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.bundle.layout import PartTensors
from vitdeploy.errors import TensorError
from vitdeploy.runtime.flow import LinkedParts, run_rows
from vitdeploy.runtime.flows import DECODER_STEP, ENCODER, flow_of_graphs
from vitdeploy.runtime.postprocess import softmax
from vitdeploy.runtime.runner import Array, Runner, type_name
from vitdeploy.spec import FlowSpec, SequenceSpec, TensorSpec

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
Keep = Callable[[Logits, Tokens], Array]

SEED = 0  # of example sources
_EXPECTED_SOURCE = "int64 [batch, source_length], neither of them 0"
# The inputs and outputs of a whole encoder-decoder.
SEQUENCE_INPUTS = (TensorSpec("source", "int64", ("batch", "source_length")),)
SEQUENCE_OUTPUTS = (
    TensorSpec("tokens", "int64", ("batch", "target_length")),
    TensorSpec("logits", "float32", ("batch", "target_length", "vocabulary")),
)


@dataclass(frozen=True, repr=False)
class Sequence:
    """The answer for one source: its tokens, without start, end and padding.

    `score` is the natural logarithm of the model's probability of these tokens (and of the end token, if it came before
    the maximum length): the sum over the steps.
    """

    tokens: tuple[int, ...]
    score: float

    def to_dict(self) -> dict[str, Any]:
        return {"tokens": list(self.tokens), "score": self.score}

    def __str__(self) -> str:
        return " ".join(map(str, self.tokens))

    def __repr__(self) -> str:
        return f"<Sequence of {len(self.tokens)} tokens, score {self.score:.3f}: {self}>"


class SequenceRunner(Runner):
    """Decodes any number of sources. Input "source": int64 [batch, source_length]. Outputs "tokens": int64 [batch,
    target_length], and "logits": float32 [batch, target_length, vocabulary], from which each token was chosen.

    `encoder` and `decoder_step` are the runners of the two graphs. `flow` connects their tensors (None: the flow for
    their names): the decoder step's inputs from the encoder, and its caches from step to step. With a fixed batch,
    sources run in groups of that batch, the last one padded. Without a `source_vocabulary` in `spec` tokens are not
    checked here, and OpenVINO reads zeros for an unknown token.
    """

    def __init__(
        self,
        encoder: Runner,
        decoder_step: Runner,
        spec: SequenceSpec,
        *,
        name: str = "the encoder-decoder",
        flow: FlowSpec | None = None,
    ) -> None:
        super().__init__(name)
        self.encoder, self.decoder_step, self.spec, self.flow = encoder, decoder_step, spec, flow

    def _load(self) -> None:
        """Load both graphs; raise TargetError if they do not fit together."""
        runners = {ENCODER: self.encoder.load(), DECODER_STEP: self.decoder_step.load()}
        graphs = {name: PartTensors(runner.inputs, runner.outputs) for name, runner in runners.items()}
        self._linked = LinkedParts(self.flow or flow_of_graphs(graphs), runners, "the encoder-decoder")
        self._linked.load()
        size = self.encoder.inputs[0].shape[0]
        self._batch = size if isinstance(size, int) else None
        self._step = self._linked.flow.parts[-1]
        self._source = next(iter(self._linked.flow.parts[0].feeds.values()))
        self._logits = self._linked.flow.outputs["logits"].partition(".")[2]
        self._caches = [tensor for tensor in self.decoder_step.inputs if tensor.name in self._step.carries]
        self.inputs, self.outputs = self._tensors()
        self.provider = self.encoder.provider

    def _tensors(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """The inputs and outputs of the encoder-decoder."""
        return SEQUENCE_INPUTS, SEQUENCE_OUTPUTS

    def example(self, batch: int) -> dict[str, Array] | None:
        return example_source(self.spec, batch)

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        tokens, logits = self.decode_with_logits(feeds["source"])
        return {"tokens": tokens, "logits": logits}

    def decode(self, source: Array, steps: int | None = None) -> Tokens:
        """Return the target tokens, int64 [b, t], of sources, int64 [b, s]; a row that has ended is padded.

        They include the end token but not the start token. Decoding stops when every row has ended, or after `steps`
        tokens (None: the maximum length).

        Raises:
            TensorError: not a non-empty int64 array with two axes, a source that is too long, or a token outside the
                vocabulary.
        """
        return self._decode(source, steps, keep_logits=False)[0]

    def decode_with_logits(self, source: Array, steps: int | None = None) -> tuple[Tokens, Logits]:
        """As `decode`, and float32 [b, t, v]: the logits from which each token was chosen; 0 for steps that a row did
        not run."""
        tokens, logits = self._decode(source, steps, keep_logits=True)
        assert logits is not None
        return tokens, logits

    def predict(self, sources: SequenceOf[SequenceOf[int]]) -> list[Sequence]:
        """Return one Sequence per source; sources of different lengths are padded to the longest."""
        sources = _token_lists(sources)
        if not sources:
            return []
        padded = np.full((len(sources), max(len(source) for source in sources)), self.spec.pad, np.int64)
        for row, source in zip(padded, sources, strict=True):
            row[: len(source)] = source
        return self.sequences(*self.decode_with_logits(padded))

    def sequences(self, tokens: Tokens, logits: Logits) -> list[Sequence]:
        """Return the results from the output of `decode_with_logits`."""
        answers = []
        for row, scores in zip(tokens, logits, strict=True):
            ends = np.flatnonzero(row == self.spec.end)
            steps = int(ends[0]) + 1 if len(ends) else len(row)
            chosen = softmax(scores[:steps])[np.arange(steps), row[:steps]]
            words = row[: steps - 1] if len(ends) else row
            answers.append(Sequence(tuple(int(token) for token in words), float(np.log(chosen).sum())))
        return answers

    def _query(self, source: Array) -> object:
        """The query that `part_times` measures."""
        return self.decode(source)

    def part_times(self, feeds: Mapping[str, Array]) -> dict[str, float]:
        """Return the milliseconds of the encoder, and of all decoder steps."""
        source, start = feeds[self.inputs[0].name], perf_counter()
        size = self._batch or len(source)
        for first in range(0, len(source), size):
            rows = source[first : first + size]
            self._begin(np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)]))
        encoder = 1e3 * (perf_counter() - start)
        start = perf_counter()
        self._query(source)
        return {ENCODER: encoder, DECODER_STEP: max(1e3 * (perf_counter() - start) - encoder, 0.0)}

    def _decode(self, source: Array, steps: int | None, keep_logits: bool) -> tuple[Tokens, Logits | None]:
        self._check(source)
        most = self.spec.max_length if steps is None else min(steps, self.spec.max_length)
        keep: Keep | None = (lambda logits, chosen: logits) if keep_logits else None
        return self._grouped(source, lambda group: self._greedy(group, most, keep))

    def _grouped(
        self, source: Array, decode: Callable[[Array], tuple[Tokens, Array | None]]
    ) -> tuple[Tokens, Array | None]:
        """The tokens of all sources and the values kept with them, decoded in groups of the runners' batch."""
        size = self._batch or len(source)
        parts = []
        for first in range(0, len(source), size):
            group = source[first : first + size]
            filled = np.concatenate([group, np.repeat(group[-1:], size - len(group), axis=0)])
            tokens, kept = decode(filled)
            parts.append((tokens[: len(group)], None if kept is None else kept[: len(group)]))
        longest = max(tokens.shape[1] for tokens, _ in parts)
        tokens = np.concatenate([_lengthen(tokens, longest, self.spec.pad) for tokens, _ in parts])
        found = [_lengthen(kept, longest, 0) for _, kept in parts if kept is not None]
        return tokens, np.concatenate(found) if found else None

    def _begin(self, source: Array) -> dict[str, Array]:
        """The inputs of the first step besides the token: the encoder's outputs, and empty caches."""
        step = self._step
        encoded = self._linked.values({self._source: source}, list(step.feeds.values()))
        feeds: dict[str, Array] = {name: encoded[made] for name, made in step.feeds.items()}
        for cache in self._caches:  # [batch, heads, past_length, head_width]
            _, heads, _, width = cache.shape
            feeds[cache.name] = np.zeros((len(source), int(heads), 0, int(width)), cache.dtype)
        return feeds

    def _advance(self, feeds: dict[str, Array], token: Tokens) -> Logits:
        """The logits [rows, v] after one more token, int64 [rows, 1]; the caches in `feeds` become the next step's."""
        outputs = run_rows(self.decoder_step, {**feeds, str(self._step.token): token})
        for cache in self._caches:
            feeds[cache.name] = outputs[self._step.carries[cache.name]]
        return outputs[self._logits]

    def _greedy(self, source: Array, steps: int, keep: Keep | None) -> tuple[Tokens, Array | None]:
        """Decode greedily. `keep` returns the values to keep of each step, from its logits [rows, v] and the chosen
        tokens [rows]."""
        rows, feeds = len(source), self._begin(source)
        token = np.full((rows, 1), self.spec.start, np.int64)
        ended = np.zeros(rows, bool)
        tokens: list[Tokens] = []
        kept: list[Array] = []
        while len(tokens) < steps and not ended.all():
            logits = self._advance(feeds, token)
            best = logits.argmax(axis=-1).astype(np.int64)
            token = np.where(ended, self.spec.pad, best)[:, None]
            ended |= token[:, 0] == self.spec.end
            tokens.append(token)
            if keep is not None:
                kept.append(keep(logits, token[:, 0]))
        return np.concatenate(tokens, axis=1), np.stack(kept, axis=1) if kept else None

    def _check(self, source: Array) -> None:
        if not isinstance(source, np.ndarray):
            raise TensorError(
                "the source is not an array of tokens", found=type_name(source), expected=_EXPECTED_SOURCE
            )
        if source.dtype != np.int64 or source.ndim != 2 or 0 in source.shape:
            raise TensorError(
                "the source is not an array of tokens",
                found=f"{source.dtype.name} {list(source.shape)}",
                expected=_EXPECTED_SOURCE,
            )
        if source.shape[1] > self.spec.max_length:
            raise TensorError(
                "the source is too long for this model",
                found=f"{source.shape[1]} tokens",
                expected=f"at most {self.spec.max_length}",
            )
        vocabulary = self.spec.source_vocabulary
        last = np.iinfo(np.int64).max if vocabulary is None else vocabulary - 1
        outside = source[(source < 0) | (source > last)]
        if len(outside):
            raise TensorError(
                "the source has tokens outside the vocabulary",
                found=", ".join(str(token) for token in np.unique(outside)[:5]),
                expected="non-negative integers" if vocabulary is None else f"0 to {last}",
            )

    def _close(self) -> None:
        self._linked.close()


def example_source(spec: SequenceSpec, batch: int) -> dict[str, Array]:
    """Return seeded random sources of half the maximum length, without start, end and padding."""
    assert spec.source_vocabulary is not None, "only for token sources"
    words = [token for token in range(spec.source_vocabulary) if token not in (spec.start, spec.end, spec.pad)]
    generator = np.random.default_rng(SEED)
    return {"source": generator.choice(np.array(words, np.int64), (batch, max(1, spec.max_length // 2)))}


def _token_lists(sources: object) -> list[list[int]]:
    """The sources as lists of integers.

    Raises:
        TensorError: anything else.
    """
    found = type_name(sources)
    if isinstance(sources, SequenceOf | np.ndarray) and not isinstance(sources, str | bytes):
        wrong = [row for row in sources if not _is_tokens(row)]
        if not wrong:
            return [[int(token) for token in row] for row in sources]
        found = f"a source of type {type_name(wrong[0])}"
    raise TensorError(
        "sources must be lists of token numbers",
        found=found,
        expected="one list of token numbers per source, or an integer array [batch, source_length]",
        fix="pass a single source as [[1, 2, 3]]",
    )


def _is_tokens(row: object) -> bool:
    if isinstance(row, np.ndarray):
        return row.ndim == 1 and row.dtype.kind in "iu"
    if isinstance(row, str | bytes) or not isinstance(row, SequenceOf):
        return False
    return all(isinstance(token, int | np.integer) for token in row)


def _lengthen(array: Array, length: int, fill: int) -> Array:
    """Pad [b, t, ...] to [b, length, ...] with `fill` at the end."""
    missing = np.full((len(array), length - array.shape[1], *array.shape[2:]), fill, array.dtype)
    return np.concatenate([array, missing], axis=1)

"""An encoder-decoder as one runner: source tokens in, target tokens out, by greedy decoding over its two engines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.sequence import SEQUENCE_INPUTS, SEQUENCE_OUTPUTS, SequenceDecoder
from vitdeploy.spec import FlowSpec, SequenceSpec

SEED = 0


class SequenceRunner(Runner):
    """Input "source": int64 [batch, source_length], any batch. Outputs "tokens": int64 [batch, target_length], and
    "logits": float32 [batch, target_length, vocabulary], those that each token was chosen by."""

    def __init__(
        self,
        encoder: Runner,
        decoder_step: Runner,
        spec: SequenceSpec,
        *,
        name: str,
        flow: FlowSpec | None = None,
    ) -> None:
        super().__init__(name)
        self.parts = (encoder, decoder_step)
        self.spec, self.flow = spec, flow
        self.decoder: SequenceDecoder | None = None

    def _load(self) -> None:
        spec = self.spec
        self.decoder = SequenceDecoder(
            *self.parts, spec.start, spec.end, spec.pad, spec.max_length, spec.source_vocabulary, self.flow
        )
        self.inputs, self.outputs = SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
        self.provider = self.parts[0].provider

    def example(self, batch: int) -> dict[str, Array]:
        return example_source(self.spec, batch)

    def part_times(self, feeds: Mapping[str, Array]) -> dict[str, float]:
        """Of the encoder, and of all steps that the decoding takes."""
        self._require_loaded("part_times()")
        assert self.decoder is not None
        return self.decoder.part_times(feeds["source"])

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        assert self.decoder is not None
        tokens, logits = self.decoder.decode_with_logits(feeds["source"])
        return {"tokens": tokens, "logits": logits}

    def _close(self) -> None:
        if self.decoder is not None:
            self.decoder.close()
        self.decoder = None


def example_source(spec: SequenceSpec, batch: int) -> dict[str, Array]:
    """Seeded random sources of half the largest length, without start, end and padding."""
    assert spec.source_vocabulary is not None, "of a source of tokens"
    words = [token for token in range(spec.source_vocabulary) if token not in (spec.start, spec.end, spec.pad)]
    generator = np.random.default_rng(SEED)
    return {"source": generator.choice(np.array(words, np.int64), (batch, max(1, spec.max_length // 2)))}

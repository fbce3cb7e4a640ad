"""Sequences: token arrays in, token arrays out, compared token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data.tokens import Tokens, digest, read_tokens, shuffled, split
from vitdeploy.document.answers import Said
from vitdeploy.errors import DataError, EngineError
from vitdeploy.progress import Progress
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.sequence import SequenceDecoder
from vitdeploy.spec import SequenceSpec
from vitdeploy.tasks.adapter import Calibration, Count, Data, DataChoice, TaskAdapter
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.plausible import doubt_value
from vitdeploy.verification.sequence import compare_sequences, token_changes

CHUNK = 32
TOKENS, BEST = "tokens", "best"


@dataclass(frozen=True)
class Pair:
    """A source, int64 [s], and what is to be written for it, int64 [t] or None; both padded."""

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class Decoding:
    """Decodes the calibration sources one at a time, each until it ends: no step that an app would not run."""

    samples: Sequence[Pair]
    sequence: SequenceSpec
    noun = "sequences"

    @property
    def total(self) -> int:
        return len(self.samples)

    @property
    def distinct(self) -> int:
        return len({pair.source.tobytes() for pair in self.samples})

    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        spec = self.sequence
        encoder, step = (runners[name] for name in FLOWS["sequence"].parts)
        decoder = SequenceDecoder(
            encoder, step, spec.start, spec.end, spec.pad, spec.max_length, spec.source_vocabulary
        )
        for pair in self.samples:
            decoder.decode(pair.source[None])
            progress(1)

    def warnings(self) -> list[str]:
        return []


class SequenceKit(TaskAdapter):
    noun = "sequence"

    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        progress("read the tokens", 0, 1)
        calibration, evaluation = split(_tokens(choice.path), **choice.numbers, source=str(choice.path))
        progress("read the tokens", 1, 1)
        rows = [_pairs(part) for part in (calibration, evaluation)]
        return Data(choice.path.parent, rows[0], rows[1], digest(calibration), digest(evaluation))

    def drive(self, calibration: Calibration) -> Decoding:
        assert self.setting.sequence is not None
        return Decoding(calibration.samples, self.setting.sequence)

    def calibration(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Calibration:
        found = shuffled(_tokens(choice.path), choice.calibration or None, choice.seed, source=str(choice.path))
        return Calibration(_pairs(found))

    @property
    def _pad(self) -> int:
        assert self.setting.sequence is not None
        return self.setting.sequence.pad

    @property
    def _end(self) -> int:
        assert self.setting.sequence is not None
        return self.setting.sequence.end

    def answers(self, runner: Runner, data: Data, progress: Count) -> Answers:
        """The tokens, and the logit of each: all logits of all steps would not fit into memory."""
        samples: Sequence[Pair] = data.evaluation
        tokens: list[np.ndarray] = []
        best: list[np.ndarray] = []
        with runner:
            for start in range(0, len(samples), CHUNK):
                group = samples[start : start + CHUNK]
                outputs = runner.infer({runner.inputs[0].name: np.stack([pair.source for pair in group])})
                if not np.isfinite(outputs["logits"]).all():
                    raise EngineError(
                        f"{runner.name} gives logits that are not finite",
                        wanted="finite logits",
                        fix="choose another precision, or check the checkpoint",
                    )
                tokens += list(outputs["tokens"])
                best += list(outputs["logits"].max(axis=-1))
                progress(len(group))
        return Answers({TOKENS: tuple(tokens), BEST: tuple(best)})

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        targets = [pair.target for pair in data.evaluation if pair.target is not None]
        return compare_sequences(
            ours.columns[TOKENS],
            reference.columns[TOKENS],
            targets or None,
            pad=self._pad,
            max_difference=self._difference(ours, reference),
        )

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        targets = [pair.target for pair in data.evaluation if pair.target is not None]
        return token_changes(ours.columns[TOKENS], reference.columns[TOKENS], targets or None, self._pad)

    def sample_name(self, data: Data, index: int) -> str:
        return f"sequence {index}"

    def _difference(self, ours: Answers, reference: Answers) -> float:
        """max|a - b| / max|b| of the chosen tokens' logits, up to the first token that differs."""
        worst = largest = 0.0
        columns = (a.columns[name] for a in (ours, reference) for name in (TOKENS, BEST))
        for a, scores, b, wanted in zip(*columns, strict=True):
            steps = min(len(a), len(b))
            last = np.flatnonzero((a[:steps] != b[:steps]) | (a[:steps] == self._end))
            steps = int(last[0]) + 1 if len(last) else steps
            worst = max(worst, float(np.abs(scores[:steps] - wanted[:steps]).max(initial=0.0)))
            largest = max(largest, float(np.abs(wanted[:steps]).max(initial=0.0)))
        return worst / max(largest, 1e-300)

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        return doubt_value(found.metric, found.reference_value)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        return Said(self._text(answers.columns[TOKENS][index]), None)

    def _text(self, tokens: np.ndarray) -> str:
        return " ".join(str(int(token)) for token in tokens if token != self._pad)

    def picture(self, data: Data, index: int) -> bytes | None:
        return None

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        target = data.evaluation[index].target
        return None if target is None else self._text(target)

    def golden_inputs(self, data: Data, chosen: Sequence[int]) -> np.ndarray:
        return np.stack([data.evaluation[index].source for index in chosen])


def _tokens(path: Path) -> Tokens:
    if path.suffix != ".npz":
        raise DataError(
            f"{path} does not fit a model for sequences",
            found="a folder" if path.is_dir() else f"a {path.suffix or 'nameless'} file",
            wanted="an .npz with int64 arrays source [n, s] and, where known, target [n, t]",
            fix="change data.path",
        )
    return read_tokens(path)


def _pairs(tokens: Tokens) -> list[Pair]:
    return [Pair(tokens.source[i], None if tokens.target is None else tokens.target[i]) for i in range(len(tokens))]

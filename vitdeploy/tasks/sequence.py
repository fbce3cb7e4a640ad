"""Token sequences: agreement and accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data.tokens import TokenArrays as SequenceTokens
from vitdeploy.data.tokens import digest, read_tokens, shuffled, split
from vitdeploy.errors import DataError, EngineError
from vitdeploy.progress import Progress
from vitdeploy.runtime.flows import ENCODER_DECODER
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.sequence import SequenceRunner
from vitdeploy.spec import SequenceSpec
from vitdeploy.tasks.adapter import Calibration, Count, Data, DataChoice, Drive, TaskAdapter
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison, Fields, resampled_accuracy, resampled_agreement
from vitdeploy.verification.intervals import Floats, draws, wilson
from vitdeploy.verification.records import Answers

# --- Compares a sequence model's tokens with the original's, and both with the targets --------------------------------


Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SequenceComparison(Comparison):
    """The sequences of an artifact against the original's; n counts sequences. The metric is "token accuracy".

    Two sequences are compared position by position up to the longer one's end: a token without a counterpart is a
    difference; positions with padding on both sides are ignored. agreement and token accuracy are the percent of
    positions with equal tokens, over all sequences together (100 without positions; `tokens` is 0 then); their
    intervals resample sequences, since tokens of one sequence are not independent.

    tokens: positions of the agreement. exact_agreement: percent of sequences equal to the original's, with its Wilson
    interval. exact_match, reference_exact_match: percent of sequences equal to the expected ones.
    """

    tokens: int
    exact_agreement: float
    exact_agreement_ci95: tuple[float, float]
    exact_match: float | None = None
    reference_exact_match: float | None = None


def compare_sequences(
    artifact: Sequence[Tokens],
    reference: Sequence[Tokens],
    targets: Sequence[Tokens] | None,
    *,
    pad: int,
    max_difference: float,
) -> SequenceComparison:
    """Compare int64 [length] token arrays, of any lengths, or the rows of padded int64 [n, length].

    Args:
        targets: the expected sequences, or None. pad: the padding token.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: different numbers of sequences, or none.
        DataError: targets of padding only.
    """
    n = len(reference)
    if not n or len(artifact) != n or (targets is not None and len(targets) != n):
        raise ValueError(f"{len(artifact)} sequences against {n}, {'no' if targets is None else len(targets)} targets")
    weights = draws(n, 0)
    counts = _counts(artifact, reference, pad)
    tokens, exact = int(counts[:, 1].sum()), _exact(counts)
    agreement = float(_share(np.ones(n), counts))
    low, high = wilson(exact, n)
    accuracy = _accuracy(artifact, reference, targets, pad, weights) if targets is not None else {}
    return SequenceComparison(
        n=n,
        metric="token accuracy" if targets is not None else None,
        **resampled_agreement(agreement, _share(weights, counts), tokens),
        agreement_of="tokens at the same position",
        max_difference=max_difference,
        tokens=tokens,
        exact_agreement=100 * exact / n,
        exact_agreement_ci95=(100 * low, 100 * high),
        **accuracy,
    )


def token_changes(
    artifact: Sequence[Tokens], reference: Sequence[Tokens], targets: Sequence[Tokens] | None, pad: int
) -> Changes:
    """Return the sequences with a different token; the more, the worse. Only entirely right sequences count as
    right."""
    counts = _counts(artifact, reference, pad)
    other = 1 - counts[:, 0] / np.maximum(counts[:, 1], 1)
    if targets is None:
        return judged(counts[:, 0] < counts[:, 1], other)
    right = [each[:, 0] == each[:, 1] for each in (_counts(side, targets, pad) for side in (artifact, reference))]
    return judged(counts[:, 0] < counts[:, 1], other, *right)


def _counts(a: Sequence[Tokens], b: Sequence[Tokens], pad: int) -> Floats:
    """Return for each pair of sequences: equal positions, and positions where at least one has a token. float64 [n,
    2]."""
    rows = []
    for one, other in zip(a, b, strict=True):
        length = max(len(one), len(other))
        one, other = _filled(one, length, pad), _filled(other, length, pad)
        used = (one != pad) | (other != pad)
        rows.append((int((one == other)[used].sum()), int(used.sum())))
    return np.array(rows, np.float64)


def _filled(tokens: Tokens, length: int, pad: int) -> Tokens:
    return np.pad(np.asarray(tokens, np.int64), (0, length - len(tokens)), constant_values=pad)


def _exact(counts: Floats) -> int:
    return int((counts[:, 0] == counts[:, 1]).sum())


def _share(weights: Floats, counts: Floats) -> Floats:
    """Return the percent of equal positions of weighted sequences; 100 without positions."""
    equal, used = weights @ counts[:, 0], weights @ counts[:, 1]
    return np.where(used > 0, 100 * equal / np.maximum(used, 1), 100.0)


def _accuracy(
    artifact: Sequence[Tokens],
    reference: Sequence[Tokens],
    targets: Sequence[Tokens],
    pad: int,
    weights: Floats,
) -> Fields:
    expected = [np.flatnonzero(np.asarray(target) != pad) for target in targets]
    if not sum(map(len, expected)):
        raise DataError(
            "the targets contain no tokens",
            found=f"{len(targets)} sequences of padding",
            expected=f"tokens besides {pad}",
        )
    ours, theirs = (_counts(side, targets, pad) for side in (artifact, reference))
    value, reference_value = (float(_share(np.ones(len(targets)), counts)) for counts in (ours, theirs))
    right = [
        np.concatenate(
            [
                _filled(tokens, max(len(tokens), len(target)), pad)[at] == np.asarray(target)[at]
                for tokens, target, at in zip(side, targets, expected, strict=True)
            ]
        )
        for side in (artifact, reference)
    ]
    spread = _share(weights, theirs) - _share(weights, ours)
    return {
        **resampled_accuracy((value, reference_value), spread, right),
        "exact_match": 100 * _exact(ours) / len(targets),
        "reference_exact_match": 100 * _exact(theirs) / len(targets),
    }


# --- Sequences: token arrays in, token arrays out, compared token by token --------------------------------------------


CHUNK = 32
TOKENS, BEST = "tokens", "best"


@dataclass(frozen=True)
class TokenPair:
    """A source, int64 [s], and its target, int64 [t] or None; both padded."""

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class Decoding(Drive):
    """Decodes the calibration sources one by one, each until it ends: only steps that an app would run."""

    samples: Sequence[TokenPair]
    sequence: SequenceSpec
    noun = "sequences"

    @property
    def distinct(self) -> int:
        return len({pair.source.tobytes() for pair in self.samples})

    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        encoder, step = (runners[name] for name in ENCODER_DECODER.parts)
        decoder = SequenceRunner(encoder, step, self.sequence)
        decoder.load()
        for pair in self.samples:
            decoder.decode(pair.source[None])
            progress(1)


class SequenceAdapter(TaskAdapter):
    noun = "sequence"
    compared = SequenceComparison
    metrics = (
        Metric(
            "token accuracy",
            "Token accuracy is the share of positions with the expected token.",
            title="Token accuracy",
        ),
    )
    measures = (
        Measure("Fully correct, %", "exact_match", original=True),
        Measure("Identical to the original, %", "exact_agreement", interval="exact_agreement_ci95"),
        Measure("Tokens compared", "tokens", 0),
    )
    counts = "tokens"
    guard = 95.0
    in_words = True

    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        self.input_files(choice)  # token sequences have no additional inputs
        progress("read tokens", 0, 1)
        calibration, evaluation = split(_tokens(choice.path), **choice.numbers, source=str(choice.path))
        progress("read tokens", 1, 1)
        rows = [_pairs(part) for part in (calibration, evaluation)]
        return Data(choice.path.parent, rows[0], rows[1], digest(calibration), digest(evaluation))

    def drive(self, calibration: Calibration) -> Decoding:
        return Decoding(calibration.samples, self._sequence)

    def calibration(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Calibration:
        self.input_files(choice)
        arrays = shuffled(_tokens(choice.path), choice.calibration or None, choice.seed, source=str(choice.path))
        return Calibration(_pairs(arrays))

    @property
    def _sequence(self) -> SequenceSpec:
        assert self.setting.sequence is not None
        return self.setting.sequence

    def answers(self, runner: Runner, data: Data, progress: Count) -> Answers:
        """Return the tokens, and the logit of each: all logits of all steps would not fit into memory."""
        samples: Sequence[TokenPair] = data.evaluation
        tokens: list[np.ndarray] = []
        best: list[np.ndarray] = []
        with runner:
            for start in range(0, len(samples), CHUNK):
                group = samples[start : start + CHUNK]
                outputs = runner.infer({runner.inputs[0].name: np.stack([pair.source for pair in group])})
                if not np.isfinite(outputs["logits"]).all():
                    raise EngineError(
                        f"{runner.name} produces non-finite logits",
                        expected="finite logits",
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
            pad=self._sequence.pad,
            max_difference=self._difference(ours, reference),
        )

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        targets = [pair.target for pair in data.evaluation if pair.target is not None]
        return token_changes(ours.columns[TOKENS], reference.columns[TOKENS], targets or None, self._sequence.pad)

    def sample_name(self, data: Data, index: int) -> str:
        return f"sequence {index}"

    def _difference(self, ours: Answers, reference: Answers) -> float:
        """Return max|a - b| / max|b| of the chosen tokens' logits, up to the first different token."""
        worst = largest = 0.0
        columns = (a.columns[name] for a in (ours, reference) for name in (TOKENS, BEST))
        for a, scores, b, expected in zip(*columns, strict=True):
            steps = min(len(a), len(b))
            last = np.flatnonzero((a[:steps] != b[:steps]) | (a[:steps] == self._sequence.end))
            steps = int(last[0]) + 1 if len(last) else steps
            worst = max(worst, float(np.abs(scores[:steps] - expected[:steps]).max(initial=0.0)))
            largest = max(largest, float(np.abs(expected[:steps]).max(initial=0.0)))
        return worst / max(largest, 1e-300)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        return Said(self._text(answers.columns[TOKENS][index]), None)

    def _text(self, tokens: np.ndarray) -> str:
        return " ".join(str(int(token)) for token in tokens if token != self._sequence.pad)

    def picture(self, data: Data, index: int) -> bytes | None:
        return None

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        target = data.evaluation[index].target
        return None if target is None else self._text(target)

    def golden_inputs(self, data: Data, chosen: Sequence[int]) -> np.ndarray:
        return np.stack([data.evaluation[index].source for index in chosen])


def _tokens(path: Path) -> SequenceTokens:
    if path.suffix != ".npz":
        raise DataError(
            f"{path} is not data for a sequence model",
            found="a folder" if path.is_dir() else f"a file with the suffix {path.suffix!r}",
            expected="an .npz with int64 arrays source [n, s] and optionally target [n, t]",
            fix="change data.path",
        )
    return read_tokens(path)


def _pairs(tokens: SequenceTokens) -> list[TokenPair]:
    return [
        TokenPair(tokens.source[i], None if tokens.target is None else tokens.target[i]) for i in range(len(tokens))
    ]

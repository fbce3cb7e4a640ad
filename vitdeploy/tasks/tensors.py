"""Outputs of no known task: their differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.postprocess import cosine, equal_share, signal_to_noise
from vitdeploy.runtime.runner import Array
from vitdeploy.runtime.tasks.tensors import TensorsSpec, line_of
from vitdeploy.tasks import adapter, images
from vitdeploy.tasks.answers import Measure, Said
from vitdeploy.verification import comparison, records
from vitdeploy.verification.changes import Changes, judged

# --- Compares outputs of which only the numbers are known with the original's -----------------------------------------


# By output: one array per image.
Columns = Mapping[str, Sequence[Array]]

# An image counts as answered alike from this signal-to-noise ratio on, in decibels, in every output: the error has at
# most 2 % of the energy of the output. Then the cosine is at least 0.99; but the cosine alone would pass outputs of
# another scale. Of a classifier's logits 17 dB is about where top-1 answers begin to change.
LEAST_SNR = 17.0
# And this share of the elements that are no floats is equal.
LEAST_EQUAL = 0.99


@dataclass(frozen=True)
class OutputFacts:
    """One output of an artifact against the original's, over all images.

    max_difference: max|a - b| / max|b|. cosine_mean, cosine_min: over the images. snr: of all images together, snr_min
    the least of an image, in decibels; None where there is no error at all. Of an output that is no float only `equal`
    is known, the percent of equal elements; it is None of all others.
    """

    name: str
    max_difference: float | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None
    snr: float | None = None
    snr_min: float | None = None
    equal: float | None = None


@dataclass(frozen=True, kw_only=True)
class TensorComparison(comparison.Comparison):
    """Tensors of no known task against the original's: there is no metric.

    agreement: percent of images of which every output has a signal-to-noise ratio of at least LEAST_SNR decibels and,
        if it is no float, LEAST_EQUAL of its elements equal, with its Wilson interval.
    outputs: each one. cosine_min, snr_min, equal_min: of the output where it is worst; None where no output has one.
    """

    outputs: tuple[OutputFacts, ...]
    cosine_min: float | None = None
    snr_min: float | None = None
    equal_min: float | None = None


def compare_tensors(ours: Columns, theirs: Columns, exact: Sequence[str]) -> TensorComparison:
    """Compare an artifact's outputs with the original's for the same images; `exact` are those that are no floats.

    Raises:
        ValueError: other names or shapes, or no image.
    """
    n = len(next(iter(theirs.values()), ()))
    shapes = [{name: [each.shape for each in column] for name, column in side.items()} for side in (ours, theirs)]
    if shapes[0] != shapes[1] or not n:
        raise ValueError(f"outputs {shapes[0]} against {shapes[1]}")
    facts = tuple((_exact if name in exact else _floats)(name, ours[name], theirs[name]) for name in theirs)
    alike = n - int(_differs(ours, theirs, exact).sum())
    return TensorComparison(
        n=n,
        metric=None,
        **comparison.counted_agreement(alike, n),
        agreement_of=f"images whose outputs all have {LEAST_SNR:g} dB of signal to noise",
        max_difference=max((each.max_difference for each in facts if each.max_difference is not None), default=0.0),
        outputs=facts,
        cosine_min=_least([each.cosine_min for each in facts]),
        snr_min=_least([each.snr_min for each in facts]),
        equal_min=_least([each.equal for each in facts]),
    )


def tensor_changes(ours: Columns, theirs: Columns, exact: Sequence[str]) -> Changes:
    """Changed images: those that are not answered alike; the larger the error of the worst output, the worse."""
    errors = np.zeros(len(next(iter(theirs.values()))))
    for name, column in theirs.items():
        pairs = zip(ours[name], column, strict=True)
        if name in exact:
            found = [1 - equal_share(a, b) for a, b in pairs]
        else:
            found = [10 ** (-max(signal_to_noise(a, b), 0.0) / 20) for a, b in pairs]
        errors = np.maximum(errors, found)
    return judged(_differs(ours, theirs, exact), errors)


def _differs(ours: Columns, theirs: Columns, exact: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Of each image whether some output is not alike, bool [n]."""
    differs = np.zeros(len(next(iter(theirs.values()))), bool)
    for name, column in theirs.items():
        for i, (a, b) in enumerate(zip(ours[name], column, strict=True)):
            alike = equal_share(a, b) >= LEAST_EQUAL if name in exact else signal_to_noise(a, b) >= LEAST_SNR
            differs[i] |= not alike
    return differs


def _floats(name: str, ours: Sequence[Array], theirs: Sequence[Array]) -> OutputFacts:
    pairs = list(zip(ours, theirs, strict=True))
    cosines = [1.0 if np.array_equal(a, b) else cosine(a, b) for a, b in pairs]
    ratios = [signal_to_noise(a, b) for a, b in pairs]
    whole = [np.concatenate([each.ravel() for each in side]) for side in (ours, theirs)]
    largest = max(float(np.abs(b).max(initial=0)) for b in theirs)
    apart = max(float(np.abs(a.astype(np.float64) - b).max(initial=0)) for a, b in pairs)
    return OutputFacts(
        name,
        max_difference=apart / max(largest, 1e-300),
        cosine_mean=float(np.mean(cosines)),
        cosine_min=float(np.min(cosines)),
        snr=_decibels(signal_to_noise(*whole)),
        snr_min=_decibels(min(ratios)),
    )


def _exact(name: str, ours: Sequence[Array], theirs: Sequence[Array]) -> OutputFacts:
    return OutputFacts(name, equal=100 * float(np.mean([equal_share(a, b) for a, b in zip(ours, theirs, strict=True)])))


def _decibels(ratio: float) -> float | None:
    """JSON has no infinity: None is no error at all, and an error without any signal is as large as a double says."""
    return None if ratio == math.inf else max(ratio, -1e3)


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


# --- The task of last resort: outputs that vitdeploy knows no meaning of are compared as numbers ----------------------


# Numbers of one output that are kept of each image: the maps of a thousand images would not fit into memory.
KEPT = 1 << 16


class TensorsAdapter(adapter.ImageAdapter):
    kinds = ("none", "folders")
    compared = TensorComparison
    changed_when = (
        "An answer has changed where an output has less than 17 dB of signal to noise against the original’s."
    )
    measures = (
        Measure("Cosine, least", "cosine_min", 5),
        Measure("Signal to noise, least, dB", "snr_min", 1),
        Measure("Equal elements, %", "equal_min"),
    )
    guard = 95.0
    head: TensorsSpec

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Every output; of a larger one KEPT of its numbers, the same of every image and artifact."""
        return {name: images.drawn(output, KEPT) for name, output in outputs.items()}

    def compare(self, ours: records.Answers, reference: records.Answers, data: adapter.Data) -> comparison.Comparison:
        return compare_tensors(ours.columns, reference.columns, self.head.exact)

    def changes(self, ours: records.Answers, reference: records.Answers, data: adapter.Data) -> Changes:
        return tensor_changes(ours.columns, reference.columns, self.head.exact)

    def show(self, answers: records.Answers, index: int, labels: Sequence[str] | None) -> Said:
        """The first output, in the numbers that describe it."""
        name, column = next(iter(answers.columns.items()))
        return Said(f"{name} {line_of(column[index])}", None)

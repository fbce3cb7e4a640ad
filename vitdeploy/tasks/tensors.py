"""Outputs of unknown tasks: numerical differences."""

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

# An answer counts as equal from this signal-to-noise ratio on, in decibels, in every output: the error has at most 2 %
# of the energy of the output. The cosine is then at least 0.99; the cosine alone would accept a different scale. For a
# classifier's logits, top-1 answers begin to change at about 17 dB.
LEAST_SNR = 17.0
# Least share of equal elements in non-float outputs.
LEAST_EQUAL = 0.99


@dataclass(frozen=True)
class OutputFacts:
    """One output of an artifact against the original's, over all images.

    max_difference: max|a - b| / max|b|. cosine_mean, cosine_min: over the images. snr: over all images together,
    snr_min the least of an image, in decibels; None without any error. A non-float output has only `equal`, the percent
    of equal elements, which is None for all others.
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
    """Tensors of an unknown task against the original's, without a metric.

    agreement: percent of images where every float output has a signal-to-noise ratio of at least LEAST_SNR decibels,
        and every other output a share of LEAST_EQUAL equal elements; with its Wilson interval.
    outputs: each output. cosine_min, snr_min, equal_min: of the worst output; None if no output has one.
    """

    outputs: tuple[OutputFacts, ...]
    cosine_min: float | None = None
    snr_min: float | None = None
    equal_min: float | None = None


def compare_tensors(ours: Columns, theirs: Columns, exact: Sequence[str]) -> TensorComparison:
    """Compare an artifact's outputs with the original's for the same images; `exact`: the non-float ones.

    Raises:
        ValueError: different names or shapes, or no image.
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
        agreement_of=f"images with a signal-to-noise ratio of {LEAST_SNR:g} dB or more in all outputs",
        max_difference=max((fact.max_difference for fact in facts if fact.max_difference is not None), default=0.0),
        outputs=facts,
        cosine_min=_least([each.cosine_min for each in facts]),
        snr_min=_least([each.snr_min for each in facts]),
        equal_min=_least([each.equal for each in facts]),
    )


def tensor_changes(ours: Columns, theirs: Columns, exact: Sequence[str]) -> Changes:
    """Return the changed images: those with different answers; the larger the error of the worst output, the worse."""
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
    """Return whether some output of each image differs, bool [n]."""
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
    """Return a JSON value, since JSON has no infinity: None for no error, at least -1000 for an error without
    signal."""
    return None if ratio == math.inf else max(ratio, -1e3)


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


# --- The fallback task: outputs of unknown meaning are compared as numbers --------------------------------------------


# Numbers kept from each output per image: the maps of a thousand images would not fit into memory.
KEPT = 1 << 16


class TensorsAdapter(adapter.ImageAdapter):
    kinds = ("none", "folders")
    compared = TensorComparison
    changed_when = (
        "An answer has changed if the signal-to-noise ratio of an output against the original’s is below 17 dB."
    )
    measures = (
        Measure("Cosine, least", "cosine_min", 5),
        Measure("Signal-to-noise ratio, least, dB", "snr_min", 1),
        Measure("Equal elements, %", "equal_min"),
    )
    guard = 95.0
    head: TensorsSpec

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return every output; KEPT of the numbers of a larger one, the same for every image and artifact."""
        return {name: images.drawn(output, KEPT) for name, output in outputs.items()}

    def compare(self, ours: records.Answers, reference: records.Answers, data: adapter.Data) -> comparison.Comparison:
        return compare_tensors(ours.columns, reference.columns, self.head.exact)

    def changes(self, ours: records.Answers, reference: records.Answers, data: adapter.Data) -> Changes:
        return tensor_changes(ours.columns, reference.columns, self.head.exact)

    def show(self, answers: records.Answers, index: int, labels: Sequence[str] | None) -> Said:
        """Return summary numbers of the first output."""
        name, column = next(iter(answers.columns.items()))
        return Said(f"{name} {line_of(column[index])}", None)

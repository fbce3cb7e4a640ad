"""Multi-label classification: independent labels, any number per image, from a model's outputs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.postprocess import label_of, sigmoid
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.classification import ClassScore
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs
from vitdeploy.spec import SHARE, OutputSpec, TensorSpec, last_axis

# The output's name: logits, or probabilities if the model ends in a sigmoid.
LOGITS, PROBABILITIES = "logits", "probabilities"
# The default threshold: an image has a label above this score.
HALF = 0.5


@dataclass(frozen=True)
class MultiLabelSpec(OutputSpec):
    """How independent "logits" or "probabilities" [labels] become the labels of an image.

    `thresholds`: one per label, in output order; an image has a label if its probability is above. None: 0.5.
    """

    thresholds: tuple[float, ...] | None = field(default=None, metadata=SHARE)
    tensors: ClassVar[Mapping[str, int | tuple[int, ...]]] = {LOGITS: 2}
    about_images: ClassVar[bool] = True
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        return labels_in(outputs)

    def misfit(self, outputs: Iterable[TensorSpec]) -> str:
        count = labels_in(outputs)
        if self.thresholds is None or count in (None, len(self.thresholds)):
            return ""
        return f"{len(self.thresholds)} thresholds for {count} labels"


@dataclass(frozen=True, repr=False)
class Labels:
    """The answer for one image. labels: its labels, highest score first; scores: of all labels, in output order. Scores
    are independent probabilities: they do not add up to 1."""

    labels: tuple[ClassScore, ...]
    scores: tuple[ClassScore, ...]

    def to_dict(self) -> dict[str, Any]:
        return {name: [dict(vars(row)) for row in rows] for name, rows in vars(self).items()}

    def __str__(self) -> str:
        texts = (f"{label.label} {100 * label.score:.1f} %" for label in self.labels)
        return ", ".join(texts) or "no label above its threshold"

    def __repr__(self) -> str:
        return f"<Labels: {self}>"


def labels_in(outputs: Iterable[TensorSpec]) -> int | None:
    """Return the number of labels in the outputs; None if their shape does not tell."""
    every = list(outputs)
    return last_axis(every, LOGITS) or last_axis(every, PROBABILITIES)


def output_of(outputs: Collection[str]) -> tuple[str, bool]:
    """Return the name of the output to read, and whether it holds probabilities."""
    given = PROBABILITIES in outputs
    return PROBABILITIES if given else LOGITS, given


def probabilities(outputs: Outputs) -> npt.NDArray[np.float64]:
    """Return the probabilities, float64 [..., labels] in 0..1."""
    if PROBABILITIES in outputs:
        return np.asarray(outputs[PROBABILITIES], np.float64)
    return np.asarray(sigmoid(outputs[LOGITS].astype(np.float64)))


def label_scores(
    scores: npt.NDArray[np.float64], thresholds: Sequence[float] | None, labels: Sequence[str] | None
) -> Labels:
    """Return the answer for the probabilities, float64 [labels], of one image; ties: lower index first."""
    rows = [ClassScore(index, label_of(index, labels), score) for index, score in enumerate(scores.tolist())]
    above = [row for row in rows if row.score > (HALF if thresholds is None else thresholds[row.index])]
    return Labels(tuple(sorted(above, key=lambda row: -row.score)), tuple(rows))


def _answer(outputs: Outputs, reading: OutputReading) -> Labels:
    return label_scores(probabilities(outputs), reading.head(MultiLabelSpec).thresholds, reading.labels)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    """Whether the same labels are above their thresholds."""
    first, second = (_answer(side, reading) for side in (ours, theirs))
    return {row.index for row in first.labels} == {row.index for row in second.labels}


def _form(outputs: Collection[str], spec: MultiLabelSpec) -> forms.LabelsForm:
    return forms.LabelsForm(*output_of(outputs), spec.thresholds)


MULTI_LABEL = DeviceTask(_answer, _same, postprocess=MultiLabelSpec, form=_form)

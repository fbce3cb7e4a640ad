"""Binary classification: yes or no, from one number of a model."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vitdeploy.runtime.tasks import forms, multi_label
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs
from vitdeploy.spec import SHARE, OutputSpec, TensorSpec


@dataclass(frozen=True)
class BinarySpec(OutputSpec):
    """How "logits" or "probabilities", one number per image, become yes or no.

    `decision_threshold`: the answer is yes above this probability; None: 0.5. `positive`: the name of the positive
    class in the data; None: the model's label, if it has one.
    """

    decision_threshold: float | None = field(default=None, metadata=SHARE)
    positive: str | None = None
    tensors: ClassVar[Mapping[str, int | tuple[int, ...]]] = {multi_label.LOGITS: (1, 2)}
    about_images: ClassVar[bool] = True
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    @property
    def threshold(self) -> float:
        return multi_label.HALF if self.decision_threshold is None else self.decision_threshold

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        return 1

    def misfit(self, outputs: Iterable[TensorSpec]) -> str:
        for tensor in outputs:
            if tensor.shape[1:] not in ((), (1,)):
                return f"{tensor.name} {list(tensor.shape)}, which is not one number per image"
        return ""


@dataclass(frozen=True, repr=False)
class Decision:
    """The answer for one image. score: the probability of yes, 0..1; label: the positive class; threshold: for the
    score."""

    yes: bool
    score: float
    label: str
    threshold: float

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.label}: {'yes' if self.yes else 'no'} ({100 * self.score:.1f} %)"

    def __repr__(self) -> str:
        return f"<Decision: {self}>"


def _answer(outputs: Outputs, reading: OutputReading) -> Decision:
    head = reading.head(BinarySpec)
    score = float(multi_label.probabilities(outputs).reshape(()))
    label = head.positive or (reading.labels[0] if reading.labels else "yes")
    return Decision(score > head.threshold, score, label, head.threshold)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    return _answer(ours, reading).yes == _answer(theirs, reading).yes


def _form(outputs: Collection[str], spec: BinarySpec) -> forms.DecisionForm:
    return forms.DecisionForm(*multi_label.output_of(outputs), spec.threshold, spec.positive or None)


BINARY = DeviceTask(_answer, _same, postprocess=BinarySpec, form=_form)

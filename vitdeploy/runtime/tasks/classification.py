"""Classification: the best classes of an image, from a model's logits."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.postprocess import best_classes, label_of
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs


@dataclass(frozen=True)
class ClassScore:
    """One class: its index, its label and its softmax probability."""

    index: int
    label: str
    score: float


@dataclass(frozen=True, repr=False)
class Ranking:
    """An answer that is a ranking, `top`, best first: of classes, or of texts. `label`, `index` and `score` (0..1) are
    those of the best one."""

    top: tuple[ClassScore, ...]

    @property
    def label(self) -> str:
        return self.top[0].label

    @property
    def index(self) -> int:
        return self.top[0].index

    @property
    def score(self) -> float:
        return self.top[0].score

    def to_dict(self) -> dict[str, Any]:
        top = [dict(vars(each)) for each in self.top]
        return {"label": self.label, "index": self.index, "score": self.score, "top": top}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


@dataclass(frozen=True, repr=False)
class Classification(Ranking):
    """The answer for one image: the best classes, best first."""

    def __str__(self) -> str:
        return ", ".join(f"{entry.label} {100 * entry.score:.1f} %" for entry in self.top)


def classify(logits: npt.NDArray[np.float32], labels: Sequence[str] | None, count: int = 5) -> Classification:
    """Return the `count` best classes of one image. logits: float32 [classes]; labels: one name per class, or None.

    The scores are the softmax; only the requested ones are divided.
    """
    best = best_classes(logits, count).tolist()
    powers = logits.astype(np.float64)
    powers -= powers.max()
    np.exp(powers, out=powers)
    total = float(powers.sum())
    return Classification(tuple([ClassScore(i, label_of(i, labels), float(powers[i]) / total) for i in best]))


def _answer(outputs: Outputs, reading: OutputReading) -> Classification:
    return classify(outputs["logits"], reading.labels, reading.top)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    return bool(ours["logits"].argmax() == theirs["logits"].argmax())


def _form(outputs: Collection[str], spec: None) -> forms.RankingForm:
    return forms.RankingForm("logits")


CLASSIFICATION = DeviceTask(_answer, _same, form=_form)

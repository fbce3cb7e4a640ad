"""The answer formats that a program without Python can write.

`DeviceTask.form` returns the form of a task's answers; the programs of `vitdeploy embed` implement each form. Outputs
have the graph's names and no batch axis here. Fields that a task's spec also has mean the same there.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias


def _kind(name: str) -> str:
    """A constant field with the name of a form, used in documents and programs."""
    kind: str = field(default=name, init=False)
    return kind


@dataclass(frozen=True)
class RankingForm:
    """The best of mutually exclusive classes with their softmax scores. output [classes]: logits, or the scores
    themselves if `given`."""

    output: str = "logits"
    given: bool = False
    kind: str = _kind("ranking")


@dataclass(frozen=True)
class LabelsForm:
    """Independent labels, any number per image. output [labels]: logits, or probabilities if `given`. thresholds: one
    per label, applied to its probability; None: 0.5."""

    output: str
    given: bool
    thresholds: tuple[float, ...] | None = None
    kind: str = _kind("labels")


@dataclass(frozen=True)
class DecisionForm:
    """Whether one probability is above `threshold`. positive: the name of the positive class; None: the label, if there
    is one."""

    output: str
    given: bool
    threshold: float
    positive: str | None = None
    kind: str = _kind("decision")


@dataclass(frozen=True)
class VectorForm:
    """The vector `output` [width]; `normalised`: scaled to length 1."""

    output: str
    normalised: bool = False
    kind: str = _kind("vector")


@dataclass(frozen=True)
class NumbersForm:
    """The numbers of `output` [k], or one without an axis, named by the labels; units: one per number, () without."""

    output: str
    units: tuple[str, ...] = ()
    kind: str = _kind("numbers")


@dataclass(frozen=True)
class BoxesForm:
    """Objects with boxes, from the outputs of `tasks.detection.PostprocessSpec`."""

    scores: str
    boxes: str
    threshold: float
    top_k: int | None
    kind: str = _kind("boxes")


@dataclass(frozen=True)
class ClassMapForm:
    """The class of every pixel, from the outputs of `tasks.segmentation.SegmentationSpec`."""

    maps: str
    mask_size: tuple[int, int] | None
    kind: str = _kind("classes")


@dataclass(frozen=True)
class DepthForm:
    """The depth of every pixel. output: [height, width]."""

    output: str
    resize: Literal["bilinear", "bicubic"]
    values: str
    kind: str = _kind("depth")


@dataclass(frozen=True)
class MatteForm:
    """The foreground share of every pixel. output: [1, height, width] or [height, width]."""

    output: str
    alpha: str
    enlarge: str
    threshold: float
    kind: str = _kind("matte")


@dataclass(frozen=True)
class PointsForm:
    """Named points at the peaks of `output` [points, height, width]."""

    output: str
    decoding: str
    kernel: int
    threshold: float
    skeleton: tuple[tuple[int, int], ...]
    kind: str = _kind("points")


@dataclass(frozen=True)
class PictureForm:
    """A picture made by the model. output: [1 or 3, height, width]."""

    output: str
    black: float
    white: float
    kind: str = _kind("picture")


# Forms shown as text, not in the image.
Line: TypeAlias = RankingForm | LabelsForm | DecisionForm | VectorForm | NumbersForm


@dataclass(frozen=True)
class PartForm:
    """One of several answers: its name, form and labels."""

    name: str
    form: Line
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartsForm:
    """Several answers to one image, in their order."""

    parts: tuple[PartForm, ...]
    kind: str = _kind("parts")


Form: TypeAlias = Line | BoxesForm | ClassMapForm | DepthForm | MatteForm | PointsForm | PictureForm | PartsForm

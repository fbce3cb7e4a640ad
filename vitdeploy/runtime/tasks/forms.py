"""The forms of answers that a program without Python can write.

A task says by its row which form its answers have (`DeviceTask.form`); what a form looks like, the programs of
`vitdeploy embed` know. Outputs have the names of the graph and no batch axis here. Fields that the class of a task has
too mean what they mean there.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias


def _kind(name: str) -> str:
    """A field that is the name of a form, by which documents and programs know it."""
    kind: str = field(default=name, init=False)
    return kind


@dataclass(frozen=True)
class RankingForm:
    """Classes that compete, the best ones, with their softmax scores. output [classes]: logits, or these scores, which
    are `given`."""

    output: str = "logits"
    given: bool = False
    kind: str = _kind("ranking")


@dataclass(frozen=True)
class LabelsForm:
    """Labels of their own, of which an image may have any number. output [labels]: logits, or `given` probabilities.
    thresholds: one a label, which its probability is above; None: 0.5."""

    output: str
    given: bool
    thresholds: tuple[float, ...] | None = None
    kind: str = _kind("labels")


@dataclass(frozen=True)
class DecisionForm:
    """Whether one probability is above `threshold`. positive: what yes means; None: the label, if there is one."""

    output: str
    given: bool
    threshold: float
    positive: str | None = None
    kind: str = _kind("decision")


@dataclass(frozen=True)
class VectorForm:
    """The numbers of `output` [width]; `normalised`: at length 1."""

    output: str
    normalised: bool = False
    kind: str = _kind("vector")


@dataclass(frozen=True)
class NumbersForm:
    """The numbers of `output` [k], or one without an axis, with labels as their names; a unit for each, () without."""

    output: str
    units: tuple[str, ...] = ()
    kind: str = _kind("numbers")


@dataclass(frozen=True)
class BoxesForm:
    """Objects in boxes, of the outputs that `tasks.detection.PostprocessSpec` names."""

    scores: str
    boxes: str
    threshold: float
    top_k: int | None
    kind: str = _kind("boxes")


@dataclass(frozen=True)
class ClassMapForm:
    """The class of every pixel, of the outputs that `tasks.segmentation.SegmentationSpec` names."""

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
    """How much of every pixel is foreground. output: [1, height, width] or [height, width]."""

    output: str
    alpha: str
    enlarge: str
    threshold: float
    kind: str = _kind("matte")


@dataclass(frozen=True)
class PointsForm:
    """Points with names, at the peaks of `output` [points, height, width]."""

    output: str
    decoding: str
    kernel: int
    threshold: float
    skeleton: tuple[tuple[int, int], ...]
    kind: str = _kind("points")


@dataclass(frozen=True)
class PictureForm:
    """A picture that the model makes. output: [1 or 3, height, width]."""

    output: str
    black: float
    white: float
    kind: str = _kind("picture")


# What stands in lines, not in the image.
Line: TypeAlias = RankingForm | LabelsForm | DecisionForm | VectorForm | NumbersForm


@dataclass(frozen=True)
class PartForm:
    """One of several answers: its name, and the labels of its own."""

    name: str
    form: Line
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartsForm:
    """Several answers to one image, in their order."""

    parts: tuple[PartForm, ...]
    kind: str = _kind("parts")


Form: TypeAlias = Line | BoxesForm | ClassMapForm | DepthForm | MatteForm | PointsForm | PictureForm | PartsForm

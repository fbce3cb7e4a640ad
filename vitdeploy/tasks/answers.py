"""Report data about a task's answers."""

from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.spec import SPARSE
from vitdeploy.verification.classes import Confusion, Drops, Reliability

# --- Single answers in a report ---------------------------------------------------------------------------------------
# examples with all answers, how many changed, class by class, and maps of attention.


Why = Literal["changed", "unsure", "usual"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Metric:
    """A metric by its name in JSON documents: an explanation if the name is not one, and its names in sentences and
    columns."""

    name: str
    meaning: str = ""
    words: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", self.words or self.name)
        object.__setattr__(self, "title", self.title or self.name)


@dataclass(frozen=True)
class Measure:
    """A task-specific number as a column of reports. `key`: its path in a comparison ("a.b": b of a); `interval`: the
    path of its 95 % bounds; `original`: the original has one too, named "reference_" and the key. `digits`: decimals;
    None for a number that may be tiny."""

    title: str
    key: str
    digits: int | None = 2
    original: bool = False
    interval: str = ""


@dataclass(frozen=True)
class Said:
    """One artifact's answer to one sample, in one line; `score` in 0..1, None if the task has none."""

    label: str
    score: float | None


@dataclass(frozen=True)
class Marks:
    """Boxes to draw over a picture, (left, top, right, bottom) relative to its sides: objects that the original and
    `engine` both find, and those that only one of them finds."""

    engine: str
    both: tuple[Box, ...] = ()
    artifact: tuple[Box, ...] = ()
    original: tuple[Box, ...] = ()


@dataclass(frozen=True)
class PanelFacts:
    """The file name of a picture of one answer; `title`: the artifact, or "label"."""

    title: str
    image: str


@dataclass(frozen=True)
class ExampleFacts:
    """One evaluation sample with every artifact's answer.

    `number`: its index among the samples. `why`: the reason for showing it. `sample`: its name for the user. `image`:
    the name of its picture, None if it is not an image. `label`: its ground truth. `panels`: for answers that are
    pictures: the original's, that of the engine that differs most, and the label. `differing`: the engines whose answer
    has changed, which the text may not show.
    """

    image: str | None
    label: str | None
    reference: Said
    engines: dict[str, Said]
    number: int | None = None
    why: Why | None = None
    sample: str = ""
    marks: Marks | None = None
    panels: tuple[PanelFacts, ...] = ()
    differing: tuple[str, ...] = field(default=(), metadata=SPARSE)


@dataclass(frozen=True)
class ChangedCounts:
    """The number of answers that differ from the original's; among these, right answers that became wrong, and wrong
    ones that became right (None without labels); `kept`: different answers that are equally right."""

    changed: int
    lost: int | None
    gained: int | None
    kept: int = field(default=0, metadata=SPARSE)


@dataclass(frozen=True)
class AnswerFacts:
    """`changed`: by engine; `reliability`: by artifact. All other fields are None if samples have no class."""

    changed: dict[str, ChangedCounts] = field(default_factory=dict)
    confusion: Confusion | None = None
    classes: Drops | None = None
    reliability: dict[str, Reliability] | None = None


@dataclass(frozen=True)
class MapFacts:
    """One attention map: its picture's name, the share of attention on patches, and the share that overlaps the
    original's (None for the original itself)."""

    artifact: str
    image: str
    on_patches: float
    shared: float | None


@dataclass(frozen=True)
class MappedExample:
    """The maps of one example; `example` is its index in `examples` of the report."""

    example: int
    maps: tuple[MapFacts, ...]


@dataclass(frozen=True)
class AttentionFacts:
    """`grid`: rows and columns of patches. `reader`: the token whose attention is shown. `left_out`: by engine, the
    reason for a missing map."""

    grid: tuple[int, int]
    reader: str
    blocks: int
    left_out: dict[str, str]
    examples: tuple[MappedExample, ...]


# --- `mapping` and `copies` of JSON documents, made by task adapters --------------------------------------------------
# No other part of the package is imported here: an adapter's imports are part of the keys of the stages that use it.


@dataclass(frozen=True)
class MappingFacts:
    """The mapping of the data's classes to the model's."""

    how: str
    classes: int
    text: str


@dataclass(frozen=True)
class Copies:
    """Numbers of images with the same bytes as another. `evaluation`: copies left out, since each image counts once;
    `relabelled`: those of them whose label differs from that of the image that counts. `calibration`: copies among the
    calibration images. `shared`: evaluation images that are also calibration images."""

    evaluation: int = 0
    calibration: int = 0
    shared: int = 0
    relabelled: int = 0

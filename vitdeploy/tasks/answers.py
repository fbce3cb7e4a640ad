"""What a report says of a task's answers."""

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
    """A metric by its name in documents: what it is where its name does not say so, and what a sentence and a column
    call it."""

    name: str
    meaning: str = ""
    words: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", self.words or self.name)
        object.__setattr__(self, "title", self.title or self.name)


@dataclass(frozen=True)
class Measure:
    """One of a task's own numbers, as a column of reports. `key` leads to it in a comparison ("a.b": b of a),
    `interval` to its 95 % bounds; `original`: the original has one too, which is called "reference_" and the key.
    `digits`: after the point; None of a number that may be tiny."""

    title: str
    key: str
    digits: int | None = 2
    original: bool = False
    interval: str = ""


@dataclass(frozen=True)
class Said:
    """One artifact's answer to one sample, in a line; `score` in 0..1, None if the task has none."""

    label: str
    score: float | None


@dataclass(frozen=True)
class Marks:
    """Boxes to draw over a picture, (left, top, right, bottom) in shares of its sides: what the original and `engine`
    both find, and what one of them finds alone."""

    engine: str
    both: tuple[Box, ...] = ()
    artifact: tuple[Box, ...] = ()
    original: tuple[Box, ...] = ()


@dataclass(frozen=True)
class PanelFacts:
    """The picture of one answer by its name; `title`: the artifact that gave it, or "label"."""

    title: str
    image: str


@dataclass(frozen=True)
class ExampleFacts:
    """One evaluation sample with every artifact's answer.

    `number`: among the samples. `why`: why it is shown. `sample`: what a person
    finds it by. `image`: the name of its picture, None if it is none. `label`: what is known to be in it. `panels`: of
    answers that are pictures, the original's, that of the engine that differs most, and the label. `differing`: the
    engines whose answer has changed, which words may not show.
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
    ones that became right (None without labels); `kept`: other answers that are as right."""

    changed: int
    lost: int | None
    gained: int | None
    kept: int = field(default=0, metadata=SPARSE)


@dataclass(frozen=True)
class AnswerFacts:
    """`changed`: by engine. The rest is None, and `reliability` by artifact, where samples have no class."""

    changed: dict[str, ChangedCounts] = field(default_factory=dict)
    confusion: Confusion | None = None
    classes: Drops | None = None
    reliability: dict[str, Reliability] | None = None


@dataclass(frozen=True)
class MapFacts:
    """One map of attention: its picture's name, the share of the attention that is on patches, and how much of it is
    where the original's is (None of the original itself)."""

    artifact: str
    image: str
    on_patches: float
    shared: float | None


@dataclass(frozen=True)
class MappedExample:
    """The maps of one example; `example` is its place in `examples` of the report."""

    example: int
    maps: tuple[MapFacts, ...]


@dataclass(frozen=True)
class AttentionFacts:
    """`grid`: rows and columns of patches. `reader`: whose attention is shown. `left_out`: by engine, why it has no
    map."""

    grid: tuple[int, int]
    reader: str
    blocks: int
    left_out: dict[str, str]
    examples: tuple[MappedExample, ...]


# --- `mapping` and `copies` of documents, which a task adapter makes. It imports no other part ------------------------
# what an adapter imports is. part of the keys of the stages that use it.


@dataclass(frozen=True)
class MappingFacts:
    """The mapping of the data's classes to those of the model."""

    how: str
    classes: int
    text: str


@dataclass(frozen=True)
class Copies:
    """Images that have the same bytes as another. `evaluation`: so many were left out, as each counts once, and so many
    of these, `relabelled`, had another label than the one that counts. `calibration`: so many are copies of others.
    `shared`: so many of the images to evaluate on are among those for calibration."""

    evaluation: int = 0
    calibration: int = 0
    shared: int = 0
    relabelled: int = 0

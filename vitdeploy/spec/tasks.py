"""The tasks: the device's row of each, what a model's outputs mean, and how its graphs run together."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, Union

from vitdeploy.extensions import RowTable, entry_points_of
from vitdeploy.spec.coding import SPARSE, Extensible
from vitdeploy.spec.preprocess import TensorSpec

# Where the row of each of our tasks stands: a `runtime.tasks.task.DeviceTask`. `tasks/registry.py` has the workshop's.
DEVICE_ROWS: Mapping[str, str] = {
    "classification": "vitdeploy.runtime.tasks.classification:CLASSIFICATION",
    "multi-label": "vitdeploy.runtime.tasks.multi_label:MULTI_LABEL",
    "binary": "vitdeploy.runtime.tasks.binary:BINARY",
    "features": "vitdeploy.runtime.tasks.features:FEATURES",
    "detection": "vitdeploy.runtime.tasks.detection:DETECTION",
    "panoptic": "vitdeploy.runtime.tasks.panoptic:PANOPTIC",
    "segmentation": "vitdeploy.runtime.tasks.segmentation:SEGMENTATION",
    "instance-segmentation": "vitdeploy.runtime.tasks.instance_segmentation:INSTANCES",
    "depth": "vitdeploy.runtime.tasks.depth:DEPTH",
    "regression": "vitdeploy.runtime.tasks.regression:REGRESSION",
    "foreground": "vitdeploy.runtime.tasks.foreground:FOREGROUND",
    "anomaly": "vitdeploy.runtime.tasks.anomaly:ANOMALY",
    "keypoints": "vitdeploy.runtime.tasks.keypoints:KEYPOINTS",
    "image-to-image": "vitdeploy.runtime.tasks.image_to_image:IMAGE_TO_IMAGE",
    "image-to-text": "vitdeploy.runtime.tasks.image_to_text:IMAGE_TO_TEXT",
    "sequence": "vitdeploy.runtime.tasks.image_to_text:SEQUENCE",
    "tensors": "vitdeploy.runtime.tasks.tensors:TENSORS",
    "zero-shot": "vitdeploy.runtime.tasks.zero_shot:ZERO_SHOT",
    "open-vocabulary-detection": "vitdeploy.runtime.tasks.open_vocabulary:OPEN_VOCABULARY",
    "promptable-segmentation": "vitdeploy.runtime.tasks.prompted:PROMPTED",
    "embedding": "vitdeploy.runtime.tasks.embedding:EMBEDDING",
    "heads": "vitdeploy.runtime.tasks.heads:HEADS",
}
# The entry points of other packages' tasks.
TASKS_GROUP = "vitdeploy.runtime.tasks"
# Where the labels of images come from: `data/` says what each is.
LabelKind = Literal[
    "folders",
    "none",
    "yolo",
    "coco",
    "panoptic",
    "masks",
    "depth",
    "targets",
    "prompts",
    "texts",
    "mvtec",
    "columns",
    "pairs",
]


@dataclass(frozen=True)
class Evidence:
    """What the model says of one of its outputs: the task that it is surely of, None where that is not sure; what it
    ends in, "" where that tells nothing; how many numbers of an image it has, None where that is not known."""

    task: str | None
    ends_in: str
    width: int | None


class OutputSpec:
    """What the outputs of a task mean: a frozen dataclass for each task that has something to say of that. No two tasks
    have the same fields, so that JSON values say of which class they are. `within` bounds numbers in a field.

    tensors: the float outputs [batch, ...] by their names, each with its number of axes, or those that it may have, by
        which a graph or a module of others is of the task where that is asked for; it then means what the defaults say.
        Where names and axes do not tell, `among` says which outputs are of the task; what older tasks recognise unasked
        stands in `graph.io.outputs` and `models.external.outputs`.
    about_images: whether its answers are about an image as such, not about places in it: a module that does not say how
        its images are prepared then sees the middle of them.
    reads: another task, whose outputs mean this where it is asked for: a model of that task is one of this, with those
        of its outputs that `tensors` names.
    in_recipes: whether a recipe may say it, as `postprocess`; None: no. The names are of fields that it has to give,
        which tell it from what other tasks' outputs mean.
    """

    tensors: ClassVar[Mapping[str, int | tuple[int, ...]]] = {}
    about_images: ClassVar[bool] = False
    reads: ClassVar[str | None] = None
    in_recipes: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def among(cls, shapes: Mapping[str, tuple[int | str, ...]], asked: bool) -> Mapping[str, str]:
        """Of the float outputs of somebody else's graph or module those of the task: the own name of each by the
        task's name for it; empty where they are not of the task.

        Args:
            shapes: of each output by its own name, without the batch axis.
            asked: whether the user asks for the task. Without, only what is certain counts.
        """
        return {}

    @classmethod
    def by_range(cls, bounded: bool) -> "OutputSpec":
        """What the outputs that `among` chose mean; `bounded`: all lie in 0..1, as behind a sigmoid."""
        return cls()

    @classmethod
    def by_evidence(cls, outputs: Mapping[str, Evidence]) -> "OutputSpec | None":
        """The same by what the model says of each output that `among` chose, by the task's names; None of a task that
        `by_range` suffices for."""
        return None

    def completed(self, own: "OutputSpec | None") -> "OutputSpec":
        """This, which a user says, with what only the model says itself, as `own`."""
        return self

    @property
    def assumed(self) -> str:
        """What is taken for granted of outputs that `among` chose, and how to say otherwise, as a note; "" of
        nothing."""
        return ""

    @property
    def proposal(self) -> str:
        """How a user says what the outputs are, where they do not say it themselves; "" where no more is to be said
        than the task."""
        return ""

    @property
    def otherwise(self) -> str:
        """What to do where the outputs are not of the task, or do not say enough."""
        return self.proposal or "name another task, or none"

    @classmethod
    def axes(cls, name: str) -> tuple[int, ...]:
        """The numbers of axes that one of `tensors` may have."""
        axes = cls.tensors[name]
        return (axes,) if isinstance(axes, int) else axes

    @classmethod
    def in_words(cls) -> str:
        """The outputs that are of the task, for people."""
        return " and ".join(f"{name} of {' or '.join(map(str, cls.axes(name)))} axes" for name in cls.tensors)

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes the outputs are of, without "no object"; None where there are none, or they do not say."""
        return None

    def misfit(self, outputs: Iterable[TensorSpec]) -> str:
        """What of this is of other outputs than these, such as thresholds of other classes; "" where nothing is."""
        return ""


def within(**bounds: float) -> dict[str, object]:
    """The metadata of a field whose numbers a recipe may choose between bounds: `ge`, `gt`, `le`, as pydantic calls
    them. Of lists they bound every number inside."""
    return {"within": bounds}


SHARE = within(ge=0, le=1)


def task_names() -> tuple[str, ...]:
    """All tasks: ours, then those of other packages."""
    return (*DEVICE_ROWS, *(name for name in entry_points_of(TASKS_GROUP) if name not in DEVICE_ROWS))


def postprocess_of(task: str) -> type[Any] | None:
    """The class that says what a task's outputs mean; None of a task with nothing to say of that, or an unknown one.

    Raises:
        HostError: the package of the task cannot be loaded.
    """
    # The class of the rows is known further up, where it is checked.
    rows: RowTable[Any] = RowTable(TASKS_GROUP, object, DEVICE_ROWS)
    return getattr(rows[task], "postprocess", None) if task in rows else None


def task_read_by(task: str | None) -> str | None:
    """The task whose outputs a task reads (`OutputSpec.reads`); None of one that has outputs of its own."""
    kind = None if task is None else postprocess_of(task)
    return None if kind is None else kind.reads


def recognising_classes(asked: str | None) -> Mapping[str, type[OutputSpec]]:
    """By task the classes that say by `among` which outputs are theirs: ours, and that of the task `asked` for."""
    tasks = dict.fromkeys([*DEVICE_ROWS, *([] if asked is None else [asked])])
    kinds = ((task, postprocess_of(task)) for task in tasks)
    return {task: kind for task, kind in kinds if kind is not None and "among" in vars(kind)}


def postprocess_classes(tasks: Iterable[str]) -> tuple[type[Any], ...]:
    """What the outputs of these tasks mean: each class once."""
    return tuple(dict.fromkeys(filter(None, map(postprocess_of, tasks))))


if TYPE_CHECKING:
    Task: TypeAlias = str
    Postprocess: TypeAlias = OutputSpec
else:
    Task = Annotated[Literal[tuple(DEVICE_ROWS)], Extensible(lambda: operator.getitem(Literal, task_names()))]
    Postprocess = Annotated[
        OutputSpec, Extensible(lambda: _postprocess(task_names()), lambda: _postprocess(DEVICE_ROWS))
    ]


def _postprocess(tasks: Iterable[str]) -> Any:
    return operator.getitem(Union, postprocess_classes(tasks))


def tokenizer_file(postprocess: OutputSpec | None) -> str | None:
    """The file of a bundle that turns texts into tokens, or tokens into texts; None of a model without."""
    return getattr(postprocess, "tokenizer", None)


# --- How the graphs of a model run together, and how tokens are decoded -----------------------------------------------


@dataclass(frozen=True)
class FlowPart:
    """One graph of a flow, and where its inputs come from.

    `feeds`: by input of the graph, "part.output" of an earlier part, or the name of an input of the whole. `carries`:
    by input, the graph's own output of the step before, of a part that runs step by step; nothing is in it at the first
    step. `token`: the input of such a part that takes the tokens chosen last.
    `batch`: what the leading axis of its tensors is called in the whole; parts of one name run on equally many.
    """

    name: str
    feeds: dict[str, str]
    carries: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    batch: str = "batch"

    @property
    def repeats(self) -> bool:
        """Whether it runs step by step, as `SequenceSpec` says."""
        return self.token is not None


@dataclass(frozen=True)
class FlowSpec:
    """How the graphs of a model run together: `parts` in their order, and `outputs` of the whole by name, each a
    "part.output". Only the last part may repeat."""

    parts: tuple[FlowPart, ...]
    outputs: dict[str, str]


@dataclass(frozen=True)
class BeamSpec:
    """Beam search with the rules of transformers' `generate`: the texts that end are ranked by the sum of their tokens'
    log probabilities over (number of tokens) ** `length_penalty`.

    `early_stopping`: True ends with the first `beams` texts, False where a heuristic sees no better one, "never" where
    none can come.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams {self.beams}: expected at least 1")


@dataclass(frozen=True)
class SequenceSpec:
    """How an encoder-decoder's tokens are decoded: which tokens start, end and pad, how many it can read and write, and
    how many different ones a source may have (None of a source that is an image).

    `search`: beam search, None takes the likeliest token at each step. `forced_end`: the last token that can be written
    is the end, whatever the model says. `no_repeat`: no run of so many tokens is written twice, the start counted.
    """

    start: int
    end: int
    pad: int
    max_length: int
    source_vocabulary: int | None
    search: BeamSpec | None = field(default=None, metadata=SPARSE)
    forced_end: bool | None = field(default=None, metadata=SPARSE)
    no_repeat: int | None = field(default=None, metadata=SPARSE)

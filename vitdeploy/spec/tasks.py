"""The tasks: their device rows, the meaning of a model's outputs, and how its graphs run together."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, Union

from vitdeploy.extensions import RowTable, entry_points_of
from vitdeploy.spec.coding import SPARSE, Extensible
from vitdeploy.spec.preprocess import TensorSpec

# The location of each task's device row, a `runtime.tasks.task.DeviceTask`. `tasks/registry.py` has the build rows.
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
# Sources of the labels of images, documented in `data/`.
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
    """Evidence on one output of a model: the task that it certainly belongs to, None if uncertain; the kind of its last
    operation, "" if that tells nothing; the number of values per image, None if unknown."""

    task: str | None
    ends_in: str
    width: int | None


class OutputSpec:
    """The meaning of the outputs of a task: one frozen dataclass per task that needs it. No two tasks have the same
    fields, so JSON values identify their class. `within` bounds numbers in a field.

    tensors: the float outputs [batch, ...] by name, each with its allowed numbers of axes. An external graph or module
        with these outputs is accepted for the task if the user requests it, with the defaults of the class. If names
        and axes are not enough, `among` selects the outputs; tasks that are recognised without a request are in
        `graph.io.outputs` and `models.external.outputs`.
    about_images: whether answers describe the image as a whole, not places in it: a module without preprocessing then
        gets the centre of its images.
    reads: another task whose outputs this task reads: a model of that task can be used for this one, with the outputs
        that `tensors` names.
    in_recipes: the fields that a recipe must give in `postprocess`, which tell the class from those of other tasks;
        None: a recipe cannot give it.
    """

    tensors: ClassVar[Mapping[str, int | tuple[int, ...]]] = {}
    about_images: ClassVar[bool] = False
    reads: ClassVar[str | None] = None
    in_recipes: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def among(cls, shapes: Mapping[str, tuple[int | str, ...]], asked: bool) -> Mapping[str, str]:
        """Select the outputs of the task among the float outputs of an external graph or module: by the task's name for
        it, the name of each; empty if they do not belong to the task.

        Args:
            shapes: the shape of each output by its name, without the batch axis.
            asked: whether the user requests the task. If not, only certain evidence counts.
        """
        return {}

    @classmethod
    def by_range(cls, bounded: bool) -> "OutputSpec":
        """The meaning of the outputs that `among` selected; `bounded`: all lie in 0..1, as after a sigmoid."""
        return cls()

    @classmethod
    def by_evidence(cls, outputs: Mapping[str, Evidence]) -> "OutputSpec | None":
        """The meaning of the outputs that `among` selected, from the evidence on each, by the task's names; None for a
        task for which `by_range` is enough."""
        return None

    def completed(self, own: "OutputSpec | None") -> "OutputSpec":
        """This meaning, given by the user, completed with the fields that only the model defines, from `own`."""
        return self

    @property
    def assumed(self) -> str:
        """A note on the assumptions about the outputs that `among` selected, and how to override them; "" without
        assumptions."""
        return ""

    @property
    def proposal(self) -> str:
        """How a user describes the outputs if they do not identify themselves; "" if the task alone is enough."""
        return ""

    @property
    def otherwise(self) -> str:
        """The fix if the outputs do not belong to the task, or do not identify themselves."""
        return self.proposal or "name another task, or none"

    @classmethod
    def axes(cls, name: str) -> tuple[int, ...]:
        """The allowed numbers of axes of one of `tensors`."""
        axes = cls.tensors[name]
        return (axes,) if isinstance(axes, int) else axes

    @classmethod
    def in_words(cls) -> str:
        """The outputs of the task, in words."""
        return " and ".join(f"{name} with {' or '.join(map(str, cls.axes(name)))} axes" for name in cls.tensors)

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """The outputs that can be compared value by value."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """The number of classes, without "no object"; None without classes, or if the outputs do not show it."""
        return None

    def misfit(self, outputs: Iterable[TensorSpec]) -> str:
        """The part of this that does not fit these outputs, such as thresholds of other classes; "" if all fits."""
        return ""


def within(**bounds: float) -> dict[str, object]:
    """The metadata of a field whose numbers a recipe may choose within bounds: `ge`, `gt`, `le`, as in pydantic. In
    lists they bound every number."""
    return {"within": bounds}


SHARE = within(ge=0, le=1)


def task_names() -> tuple[str, ...]:
    """All tasks: built-in ones, then those of other packages."""
    return (*DEVICE_ROWS, *(name for name in entry_points_of(TASKS_GROUP) if name not in DEVICE_ROWS))


def postprocess_of(task: str) -> type[Any] | None:
    """The class for the meaning of a task's outputs; None for a task without one, or an unknown task.

    Raises:
        HostError: the package of the task cannot be loaded.
    """
    # The class of the rows is defined in a higher layer, which checks it.
    rows: RowTable[Any] = RowTable(TASKS_GROUP, object, DEVICE_ROWS)
    return getattr(rows[task], "postprocess", None) if task in rows else None


def task_read_by(task: str | None) -> str | None:
    """The task whose outputs a task reads (`OutputSpec.reads`); None for a task with its own outputs."""
    kind = None if task is None else postprocess_of(task)
    return None if kind is None else kind.reads


def recognising_classes(asked: str | None) -> Mapping[str, type[OutputSpec]]:
    """By task, the classes that select their outputs by `among`: built-in ones, and that of the requested task."""
    tasks = dict.fromkeys([*DEVICE_ROWS, *([] if asked is None else [asked])])
    kinds = ((task, postprocess_of(task)) for task in tasks)
    return {task: kind for task, kind in kinds if kind is not None and "among" in vars(kind)}


def postprocess_classes(tasks: Iterable[str]) -> tuple[type[Any], ...]:
    """The classes for the outputs of these tasks, each once."""
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
    """The tokenizer file of a bundle; None for a model without one."""
    return getattr(postprocess, "tokenizer", None)


# --- How the graphs of a model run together, and how tokens are decoded -----------------------------------------------


@dataclass(frozen=True)
class FlowPart:
    """One graph of a flow, and where its inputs come from.

    `feeds`: by input of the graph, "part.output" of an earlier part, or the name of an input of the whole model.
    `carries`: for a part that runs step by step, by input, the output of the previous step; empty at the first step.
    `token`: the input of such a part for the most recently chosen tokens.
    `batch`: the name of the leading axis of its tensors in the whole model; parts with the same name have the same
    batch size.
    """

    name: str
    feeds: dict[str, str]
    carries: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    batch: str = "batch"

    @property
    def repeats(self) -> bool:
        """Whether it runs step by step, as described by `SequenceSpec`."""
        return self.token is not None


@dataclass(frozen=True)
class FlowSpec:
    """How the graphs of a model run together: `parts` in order, and `outputs` of the whole model by name, each a
    "part.output". Only the last part may repeat."""

    parts: tuple[FlowPart, ...]
    outputs: dict[str, str]


@dataclass(frozen=True)
class BeamSpec:
    """Beam search with the rules of transformers' `generate`: finished texts are ranked by the sum of their tokens' log
    probabilities divided by (number of tokens) ** `length_penalty`.

    `early_stopping`: True stops after the first `beams` texts, False when a heuristic expects no better text, "never"
    when no better text is possible.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams {self.beams}: expected at least 1")


@dataclass(frozen=True)
class SequenceSpec:
    """How an encoder-decoder's tokens are decoded: the start, end and padding tokens, the maximum length of source and
    target, and the size of the source vocabulary (None if the source is an image).

    `search`: beam search; None is greedy decoding. `forced_end`: the last possible token is always the end token.
    `no_repeat`: no sequence of this many tokens is written twice, including the start token.
    """

    start: int
    end: int
    pad: int
    max_length: int
    source_vocabulary: int | None
    search: BeamSpec | None = field(default=None, metadata=SPARSE)
    forced_end: bool | None = field(default=None, metadata=SPARSE)
    no_repeat: int | None = field(default=None, metadata=SPARSE)

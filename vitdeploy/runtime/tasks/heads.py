"""Several heads on one backbone, such as a class, a number and an embedding: each output is read by its head's task,
and an answer has one part per head."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.binary import BINARY, BinarySpec
from vitdeploy.runtime.tasks.classification import CLASSIFICATION
from vitdeploy.runtime.tasks.embedding import EMBEDDING, VECTOR, EmbeddingSpec
from vitdeploy.runtime.tasks.multi_label import LOGITS, MULTI_LABEL, PROBABILITIES, MultiLabelSpec
from vitdeploy.runtime.tasks.regression import NUMBERS, REGRESSION, RegressionSpec
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs, Result
from vitdeploy.spec import SPARSE, Evidence, OutputSpec, Postprocess, TensorSpec

HeadTask: TypeAlias = Literal["classification", "multi-label", "binary", "regression", "embedding"]
# The last operation of an output, if it limits the tasks that can read it.
Ending: TypeAlias = Literal["", "softmax", "sigmoid", "scaled", "log"]

# By task: its row, and its output's name.
KINDS: Mapping[str, tuple[DeviceTask, str]] = {
    "classification": (CLASSIFICATION, LOGITS),
    "multi-label": (MULTI_LABEL, LOGITS),
    "binary": (BINARY, LOGITS),
    "regression": (REGRESSION, NUMBERS),
    "embedding": (EMBEDDING, VECTOR),
}
# Tasks that an output with this ending cannot belong to.
NOT_OF: Mapping[str, tuple[str, ...]] = {
    "softmax": ("multi-label", "binary"),
    "log": ("multi-label", "binary"),
    "sigmoid": ("classification",),
    "scaled": ("classification", "multi-label", "binary"),
}
MOST, LONGEST = 64, 256
# The smallest probability with a finite logarithm.
LEAST = float(np.finfo(np.float32).tiny)
# Set from the model, not from a recipe.
OWN = {**SPARSE, "own": True}


@dataclass(frozen=True)
class HeadSpec:
    """One head, with its `name` in answers, labels and reports.

    `task`: the task that reads its output; None if unknown, which no bundle has. `output`: the model's output; None: it
    has the head's name. `labels`: names of its classes, labels or numbers, in order, () without. `postprocess`: the
    spec of its task; None: the task's default. `ends_in`, `width`: from the model, the output's last operation and its
    size per image.
    """

    name: str
    task: HeadTask | None
    output: str | None = None
    labels: tuple[str, ...] = ()
    postprocess: MultiLabelSpec | BinarySpec | RegressionSpec | EmbeddingSpec | None = None
    ends_in: Ending = field(default="", metadata=OWN)
    width: int | None = field(default=None, metadata=OWN)

    def __post_init__(self) -> None:
        if not (0 < len(self.name) <= LONGEST and all(map(str.isprintable, (self.name, *self.labels)))):
            raise ValueError(f"head {self.name[:80]!r}: expected a name and labels without line breaks")

    @property
    def reads(self) -> str:
        """The name of the model's output."""
        return self.output or self.name

    @property
    def spec(self) -> Postprocess | None:
        """The spec that reads the output, of the task's class."""
        kind = None if self.task is None else KINDS[self.task][0].postprocess
        return self.postprocess or (None if kind is None else kind())

    @property
    def given(self) -> bool:
        """Whether the output holds independent probabilities."""
        return self.ends_in == "sigmoid" and self.task in ("multi-label", "binary")

    def outputs(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return the model's output [...] as the outputs of a model of the head's task."""
        if self.given:
            return {PROBABILITIES: values}
        if self.ends_in == "softmax" and self.task == "classification":
            values = np.log(np.maximum(values, LEAST))
        assert self.task is not None, "misfit() refuses a head without a task"
        return {KINDS[self.task][1]: values}

    def misfit(self, outputs: Mapping[str, TensorSpec]) -> str:
        """Return how this head does not fit the outputs, by name; "" if it fits."""
        found = outputs.get(self.reads)
        if found is None:
            return f"no output {self.reads!r}; the outputs are {', '.join(outputs)}"
        shown = f"{found.name} {list(found.shape)}"
        if self.task is None:
            return f"unknown task for {shown}: classification, multi-label, binary, regression or embedding"
        row, name = KINDS[self.task]
        if self.postprocess is not None and type(self.postprocess) is not row.postprocess:
            return f"{', '.join(vars(self.postprocess))} do not apply to the task {self.task}"
        if len(found.shape) not in ((1, 2) if self.task in ("binary", "regression") else (2,)):
            return f"{shown} has the wrong shape for the task {self.task}"
        if self.task in NOT_OF.get(self.ends_in, ()):
            return f"{shown} ends in {self.ends_in}, which does not fit the task {self.task}"
        width = 1 if len(found.shape) == 1 else found.shape[1]
        if isinstance(width, int):
            if self.width not in (None, width):
                return f"{shown}, expected {self.width} numbers per image"
            if self.labels and len(self.labels) != width:
                return f"{len(self.labels)} labels for {shown}"
        spec = self.spec
        return "" if spec is None else spec.misfit([dataclasses.replace(found, name=name)])


@dataclass(frozen=True)
class HeadsSpec(OutputSpec):
    """How the outputs of several heads become an answer with one part per head.

    `heads`: 1 to 64, in the order of the answers, with unique names and outputs.
    """

    heads: tuple[HeadSpec, ...]
    about_images: ClassVar[bool] = True
    in_recipes: ClassVar[tuple[str, ...] | None] = ("heads",)

    def __post_init__(self) -> None:
        if not 1 <= len(self.heads) <= MOST:
            raise ValueError(f"{len(self.heads)} heads: expected 1 to {MOST}")
        for what, names in (("name", [h.name for h in self.heads]), ("output", [h.reads for h in self.heads])):
            if repeated := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"two heads have the {what} {repeated[0]!r}: expected unique ones")

    @classmethod
    def among(cls, shapes: Mapping[str, tuple[int | str, ...]], asked: bool) -> Mapping[str, str]:
        """If the task is requested explicitly, return all outputs that are a vector or a number per image, if there are
        several."""
        flat = [own for own, shape in shapes.items() if len(shape) <= 1]
        if not asked or len(flat) < 2:
            return {}
        names: dict[str, str] = {}
        for own in flat:
            name = re.sub(r"\W", "_", own)
            while name in names or name == "image":  # the name of the input
                name += "_"
            names[name] = own
        return names

    @classmethod
    def in_words(cls) -> str:
        return "several outputs [batch, width] or [batch]"

    @classmethod
    def by_evidence(cls, outputs: Mapping[str, Evidence]) -> "HeadsSpec":
        return cls(tuple(HeadSpec(name, **vars(each)) for name, each in outputs.items()))

    @property
    def assumed(self) -> str:
        known = [f"{head.reads} is {head.task}" for head in self.heads if head.task is not None]
        return "" if len(known) < len(self.heads) else f"tasks assumed from names and endings: {', '.join(known)}"

    @property
    def proposal(self) -> str:
        rows = ", ".join(f"{{name: {head.reads}, task: {head.task or '...'}}}" for head in self.heads)
        return f"--task heads, with postprocess: {{heads: [{rows}]}} in a recipe, sets each task"

    def completed(self, own: OutputSpec | None) -> "HeadsSpec":
        known = {head.reads: head for head in own.heads} if isinstance(own, HeadsSpec) else {}
        return HeadsSpec(
            tuple(
                dataclasses.replace(head, ends_in=found.ends_in, width=found.width)
                if (found := known.get(head.reads)) is not None
                else head
                for head in self.heads
            )
        )

    def misfit(self, outputs: Iterable[TensorSpec]) -> str:
        known = {tensor.name: tensor for tensor in outputs}
        found = ((head.name, head.misfit(known)) for head in self.heads)
        return "; ".join(f"head {name}: {misfit}" for name, misfit in found if misfit)


@dataclass(frozen=True, eq=False, repr=False)
class Heads:
    """The answer for one image. parts: by the name of a head, the answer of its task."""

    parts: Mapping[str, Result]

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]

    def to_dict(self) -> dict[str, Any]:
        return {name: part.to_dict() for name, part in self.parts.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {part}" for name, part in self.parts.items())

    def __repr__(self) -> str:
        return f"<Heads: {', '.join(f'{name}: {part}' for name, part in self.parts.items())}>"


def _reading(head: HeadSpec, reading: OutputReading) -> OutputReading:
    return dataclasses.replace(reading, postprocess=head.spec, labels=head.labels or None)


def _answer(outputs: Outputs, reading: OutputReading) -> Heads:
    parts = {}
    for head in reading.head(HeadsSpec).heads:
        row, _ = KINDS[str(head.task)]
        parts[head.name] = row.answer(head.outputs(outputs[head.reads]), _reading(head, reading))
    return Heads(parts)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    """Whether every part agrees."""
    return all(
        KINDS[str(head.task)][0].same(
            head.outputs(ours[head.reads]), head.outputs(theirs[head.reads]), _reading(head, reading)
        )
        for head in reading.head(HeadsSpec).heads
    )


def _form(outputs: Collection[str], spec: HeadsSpec) -> forms.PartsForm:
    return forms.PartsForm(tuple(forms.PartForm(head.name, _line(head), head.labels) for head in spec.heads))


def _line(head: HeadSpec) -> forms.Line:
    if head.task == "classification":
        return forms.RankingForm(head.reads, given=head.ends_in == "softmax")
    row, name = KINDS[str(head.task)]
    names = [PROBABILITIES if head.given else name]
    found = None if row.form is None else row.form(names, head.spec)
    assert isinstance(found, forms.LabelsForm | forms.DecisionForm | forms.VectorForm | forms.NumbersForm), (
        "every head's task has one of these forms"
    )
    return dataclasses.replace(found, output=head.reads)


HEADS = DeviceTask(_answer, _same, postprocess=HeadsSpec, form=_form)

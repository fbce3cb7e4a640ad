"""The original of a job, its properties and its runner. The results of every command are compared with it.

It is a PyTorch module, or an ONNX file from another exporter; both run behind the same `Runner`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.bundle.read import SIZES_FOLDER, file_sha256
from vitdeploy.data.label_file import read_labels
from vitdeploy.errors import CheckpointError, GraphError
from vitdeploy.graph.io.bound import anywhere, file_of, without_folders
from vitdeploy.graph.io.meanings import OUTPUTS, may_be_logits, of_problem, without_assumption
from vitdeploy.models import json_file, pixel_range
from vitdeploy.models.model_folder import hub, image_processor, model_card
from vitdeploy.models.model_folder.folder import CONFIG, PREPROCESSOR, ModelFolder, labels_for
from vitdeploy.models.model_folder.folder import FILE as GENERATION
from vitdeploy.models.names import LIBRARIES, NAMES, ONNX_FILE, graph_folder
from vitdeploy.models.source import Source
from vitdeploy.runtime import ort, runner, values
from vitdeploy.runtime.inputs import further_inputs
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import (
    Postprocess,
    PreprocessSpec,
    SequenceSpec,
    Task,
    TensorSpec,
    decode,
    encode,
    last_axis,
    postprocess_of,
    task_read_by,
)
from vitdeploy.stages import step
from vitdeploy.verification.comparison import ClaimedAccuracy

# Code that reads graphs is imported only if the original is a graph: a process that measures a module does not need it.
if TYPE_CHECKING:
    from vitdeploy.graph.io.files import ForeignGraph
    from vitdeploy.models.family import LoadedModel

# Fields of a source that name files.
FILES = ("checkpoint", "text_features", "module", "normal", "memory")


@dataclass(frozen=True)
class Overrides:
    """The user's values that replace those of the checkpoint; None keeps the checkpoint's."""

    preprocess: PreprocessSpec | None = None
    postprocess: Postprocess | None = None
    labels: Path | None = None


@dataclass(frozen=True)
class ReferenceModel:
    """The pipeline's data about the original. `source` names files on this machine; `name` is for messages and reports.

    `classes`: the number of classes; None for a model without classes, or if its outputs do not show it. `labels`: the
    model's own class names, () without any. `digests`: SHA-256 of all files that it was read from, by name. `claim`:
    the accuracy that files next to the checkpoint claim, `license`: the licence that they state. `tokenizer`: the
    tokenizer file on this machine, for a model that takes texts. `inputs`: further inputs besides the image, in the
    order of the graph's inputs after the first.
    """

    name: str
    source: Source
    task: Task
    image_size: tuple[int, int]
    channels: int
    outputs: tuple[TensorSpec, ...]
    parameters: int
    preprocess: PreprocessSpec | None
    postprocess: Postprocess | None = None
    sequence: SequenceSpec | None = None
    labels: tuple[str, ...] = ()
    family: str = ""
    revision: str | None = None
    notes: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    claim: ClaimedAccuracy | None = None
    license: str | None = None
    tokenizer: Path | None = None
    inputs: tuple[TensorSpec, ...] = ()

    @property
    def size(self) -> str:
        """The image size in messages and folder names: "384x384" (height, width)."""
        return f"{self.image_size[0]}x{self.image_size[1]}"

    @property
    def classes(self) -> int | None:
        return values.number_of_classes(self.outputs, self.postprocess)

    @property
    def images(self) -> PreprocessSpec:
        assert self.preprocess is not None, "the model takes no images"
        return self.preprocess

    def identity(self) -> dict[str, Any]:
        """Everything that its graphs and answers depend on, except the bytes of its files; contains no local paths."""
        source = self.source
        return {
            "model": None if self.digests and source.checkpoint is None else source.model,
            "image_size": source.image_size,
            "batch": source.only_batch,
            "heads": source.heads,
            "preprocess": encode(self.preprocess),
            "postprocess": encode(self.postprocess),
            "labels": list(self.labels),
            **({"task": source.task} if source.task is not None else {}),
            **({"bind": without_folders(source.bind)} if source.bind else {}),
        }

    def facts(self) -> dict[str, Any]:
        """The `model` part of a report."""
        return {
            "source": self.name,
            "family": self.family,
            "task": self.task,
            "parameters": self.parameters,
            "image_size": list(self.image_size),
            "channels": self.channels,
            "classes": self.classes,
            "revision": self.revision,
            "notes": list(self.notes),
        }


def is_onnx(source: Source) -> bool:
    return source.model is not None and source.model.endswith(".onnx")


def find_reference_model(source: Source, overrides: Overrides | None = None) -> ReferenceModel:
    """Read the original, and return its properties. Errors of reading it propagate.

    Raises:
        CheckpointError: an override does not fit the model.
        DataError: the labels are not UTF-8.
    """
    given = overrides or Overrides()
    source = dataclasses.replace(_in_folder(source), preprocess=given.preprocess or source.preprocess)
    if source.bind and not is_onnx(source) and source.function is None and source.module is None:
        raise CheckpointError(
            f"{source.name} has no further inputs to bind",
            found=", ".join(source.bind),
            expected="an .onnx file, or your own module whose forward takes more than the image",
            fix="remove --bind (in a recipe source.bind)",
        )
    reference_model = _of_graph(source, given) if is_onnx(source) else _of_module(source)
    preprocess, postprocess = (
        given.preprocess or reference_model.preprocess,
        given.postprocess or reference_model.postprocess,
    )
    expected = postprocess_of(reference_model.task)
    if given.postprocess is not None and expected is not None and not isinstance(given.postprocess, expected):
        raise CheckpointError(
            f"the post-processing does not fit {reference_model.name}",
            found=", ".join(vars(given.postprocess)),
            expected=", ".join(f.name for f in dataclasses.fields(expected)),
            fix=f"set postprocess: for the task {reference_model.task}, or set source.task to the model's task",
        )
    if given.postprocess is not None:
        reference_model, postprocess = _completed(reference_model, given.postprocess)
    if postprocess is not None and (misfit := postprocess.misfit(reference_model.outputs)):
        own = given.postprocess is None
        raise CheckpointError(
            f"{reference_model.name} cannot be used for the task {reference_model.task}"
            if own
            else f"the post-processing does not fit {reference_model.name}",
            found=misfit,
            expected="outputs of that task" if own else "values that were chosen for this model",
            fix=postprocess.otherwise if own else "change postprocess: in the recipe, or remove it",
        )
    if preprocess is not None and (
        preprocess.crop != reference_model.image_size or preprocess.channels != reference_model.channels
    ):
        raise CheckpointError(
            f"the preprocessing does not fit {reference_model.name}",
            found=f"crop {preprocess.crop[0]}x{preprocess.crop[1]}, {preprocess.channels} channels",
            expected=f"crop {reference_model.size}, {reference_model.channels} channels",
            fix="change preprocess.crop, mean and std, or choose a model with that image size",
        )
    if postprocess is None and reference_model.task in ("detection", "panoptic"):
        raise CheckpointError(
            f"it is unknown how {reference_model.name} scores its objects",
            found="logits and boxes of a model without an image processor in transformers",
            expected='"softmax" with "no object" as the last class, or "sigmoid" for each class',
            fix="postprocess: {scores: softmax} or {scores: sigmoid} in a recipe",
        )
    reference_model = dataclasses.replace(reference_model, preprocess=preprocess, postprocess=postprocess)
    reference_model = _labels_apart(reference_model, given.labels)
    if reference_model.labels or given.labels is not None:
        reference_model = dataclasses.replace(reference_model, notes=without_assumption(reference_model.notes))
    if given.labels is None:
        return reference_model
    labels = _labels(given.labels, reference_model)
    note = f"{given.labels} replaces the model's own labels"
    notes = (*reference_model.notes, note) if reference_model.labels not in ((), labels) else reference_model.notes
    return dataclasses.replace(reference_model, labels=labels, notes=notes)


def _completed(reference_model: ReferenceModel, postprocess: Postprocess) -> tuple[ReferenceModel, Postprocess]:
    """The model without its notes on assumed post-processing, and the user's post-processing completed with values that
    only the model has."""
    own = reference_model.postprocess
    notes = tuple(note for note in reference_model.notes if own is None or note != own.assumed)
    return dataclasses.replace(reference_model, notes=notes), postprocess.completed(own)


def _labels_apart(reference_model: ReferenceModel, given: Path | None) -> ReferenceModel:
    """The model without labels if each of its outputs has its own. Raises CheckpointError for labels from a file."""
    proposal = "" if reference_model.postprocess is None else reference_model.postprocess.proposal
    if not proposal:
        return reference_model
    if given is not None:
        raise CheckpointError(
            f"{given} has one list of labels, but each output of {reference_model.name} has its own classes",
            expected="labels for each output",
            fix=f"use no label file: {proposal}, with labels: [...] next to the name",
        )
    return dataclasses.replace(reference_model, labels=())


def _of_module(source: Source) -> ReferenceModel:
    # These import PyTorch, which only modules need.
    from vitdeploy.models.external.module import identity, identity_in_memory, weights_digest
    from vitdeploy.models.load import load_model, located, refuse_unusable

    local, folder = located(source)
    original = load_model(local)
    refuse_unusable(original)
    files = folder.files if folder is not None else ()
    tokenizer = (
        folder.path / step.TOKENIZER_FILE
        if folder and hasattr(postprocess_of(original.signature.task), "tokenizer")
        else None
    )
    files = (*files, *([tokenizer] if tokenizer is not None else []))
    if folder is not None and original.signature.sequence is not None:
        files = (*files, *(path for path in [folder.path / GENERATION] if path.is_file()))
    digests = _digests([*files, *(path for path in (source.checkpoint, source.text_features, source.memory) if path)])
    digests |= _bound_digests(source)
    if source.function is not None:
        local = dataclasses.replace(local, weights=weights_digest(original.module))
        digests[source.function] = identity(original)
    if source.module is not None:
        local = dataclasses.replace(local, weights=weights_digest(original.module))
        digests[source.name] = identity_in_memory(original)
    elif original.family not in (*NAMES, *LIBRARIES):  # code that vitdeploy's version does not cover
        digests[original.family] = identity(original)
    signature = original.signature
    return ReferenceModel(
        name=source.name if folder is None else hub.pinned(source.name, folder),
        source=local,
        task=signature.task,
        image_size=signature.image_size,
        channels=signature.channels,
        outputs=signature.outputs,
        parameters=original.parameters,
        preprocess=original.preprocess,
        postprocess=signature.postprocess,
        sequence=signature.sequence,
        labels=original.labels,
        family=original.family,
        revision=folder.revision if folder is not None else None,
        notes=original.notes,
        digests=digests,
        claim=_claim(folder),
        license=model_card.stated_license(folder.path) if folder is not None else None,
        tokenizer=tokenizer,
        inputs=signature.inputs,
    )


def _claim(folder: ModelFolder | None) -> ClaimedAccuracy | None:
    found = model_card.claimed_accuracy(folder.path) if folder is not None else None
    return ClaimedAccuracy(*found) if found is not None else None


def _of_graph(source: Source, overrides: Overrides) -> ReferenceModel:
    from vitdeploy.graph.io.files import graph_spec
    from vitdeploy.graph.io.inputs import FirstValues

    try:
        graph = graph_of(dataclasses.replace(source, image_size=source.size))
    except GraphError:
        if source.image_size or not source.size:
            raise
        # The image size differs from the crop: find_reference_model reports it.
        graph = graph_of(source)
    spec, own = graph_spec(graph.model, ""), graph.metadata
    sizes = [int(size) if isinstance(size, int) else 0 for size in spec.inputs[0].shape[1:]]
    height, width, channels = sizes if graph.takes_pixels else (*sizes[1:], sizes[0])
    source = dataclasses.replace(source, image_size=(height, width))
    notes = list(graph.notes)
    zeros, ones = (0.0,) * channels, (1.0,) * channels
    preprocess = PreprocessSpec((height, width), (height, width), "bilinear", zeros, ones)
    postprocess = graph.postprocess
    if own is not None:
        preprocess, labels = own.images, step.known_labels(_graph_file(source), own)
        notes += _contradictions(graph, overrides)
    else:
        postprocess, remarks = settled_scores(_graph_file(source), postprocess, spec.outputs)
        notes += remarks if overrides.postprocess is None else ()
        classes = values.number_of_classes(spec.outputs, overrides.postprocess or postprocess)
        beside = find_beside(_graph_file(source), channels, (height, width), classes)
        labels, stated = beside.labels, overrides.preprocess or beside.preprocess
        scaling = pixel_range.scaling_of(FirstValues(graph.model), channels, (height, width))
        preprocess, remarks = pixel_range.settled(stated or preprocess, scaling, None if stated else ASSUMED)
        notes += [note for note in beside.notes if overrides.preprocess is None or note.startswith("labels")]
        notes += remarks
    return ReferenceModel(
        name=source.name,
        source=source,
        task=graph.task,
        image_size=(height, width),
        channels=channels,
        outputs=spec.outputs,
        parameters=graph.parameters,
        preprocess=preprocess,
        postprocess=postprocess,
        labels=labels,
        family="onnx",
        notes=tuple(notes),
        digests=_digests([_graph_file(source)]) | _bound_digests(source),
        inputs=further_inputs(graph.task, spec.inputs),
    )


def graph_of(source: Source) -> ForeignGraph:
    """The ONNX file of a source, with the task from the source or from the files beside it; errors as in
    `import_graph`."""
    from vitdeploy.graph.io.files import graph_spec, import_graph

    file, how = _graph_file(source), (source.image_size, source.only_batch)
    graph = import_graph(file, *how, source.task, source.bind)
    beside = None if graph.metadata else task_beside(file, graph.task, graph_spec(graph.model, "").outputs)
    if beside is None or source.task not in (None, "classification"):
        return graph
    if source.task is not None:
        raise GraphError(
            f"{file} cannot be used for the task {source.task}",
            found=beside[1].removeprefix(OUTPUTS),
            expected="logits of mutually exclusive classes",
            fix="set no task: the outputs are then compared as numbers",
        )
    graph = import_graph(file, *how, beside[0], source.bind)
    return dataclasses.replace(graph, notes=(*graph.notes, beside[1]))


def _contradictions(graph: ForeignGraph, overrides: Overrides) -> list[str]:
    """Notes on user values that override those of the file.

    Raises:
        CheckpointError: a value cannot be overridden, because it is part of the graph.
    """
    own = graph.metadata
    assert own is not None
    spec, other = own.images, overrides.preprocess
    if graph.takes_pixels and other is not None and not spec.same_scale(other):
        raise CheckpointError(
            f"the normalisation in the graph of {own.name} differs from preprocess:",
            found=other.normalisation,
            expected=f"{spec.normalisation}, as it was exported",
            fix="remove preprocess: from the recipe, or export the model again with --no-preprocess",
        )
    notes = []
    if other not in (None, spec):
        notes.append(f"the requested preprocessing replaces that of the exported file ({_differing(spec, other)})")
    if overrides.postprocess not in (None, own.postprocess):
        differing = _differing(own.postprocess, overrides.postprocess)
        notes.append(f"the requested post-processing replaces that of the exported file ({differing})")
    return notes


def _differing(own: Any, other: Any) -> str:
    """The fields of `own` with another value in `other`."""
    theirs = encode(other) or {}
    fields = [f"{key} {value}" for key, value in (encode(own) or {}).items() if theirs.get(key) != value]
    return ", ".join(fields) or "none"


def _in_folder(source: Source) -> Source:
    """The graph of the requested image size in a folder that `vitdeploy export` made."""
    folder = graph_folder(source.model)
    if folder is None:
        return source
    size = "x".join(map(str, source.image_size or ()))
    other = folder / SIZES_FOLDER / size / ONNX_FILE
    return dataclasses.replace(source, model=str(other if size and other.is_file() else folder / ONNX_FILE))


def _graph_file(source: Source) -> Path:
    assert source.model is not None
    path = Path(source.model)
    step.require_onnx_file(path)
    return path


def _digests(files: list[Path]) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in files}


def _bound_digests(source: Source) -> dict[str, str]:
    """The digests of the files of bound inputs, by input: file names may be the same in several folders."""
    files = {text: file for text in source.bind if (file := file_of(text)) is not None}
    return {short: file_sha256(file) for short, file in zip(without_folders(files), files.values(), strict=True)}


def _labels(path: Path, reference_model: ReferenceModel) -> tuple[str, ...]:
    """The labels in a file: one name per line, in the order of the model's classes."""
    step.require_label_file(path)
    labels = read_labels(path)
    if reference_model.task == "tensors" or "features" in (reference_model.task, task_read_by(reference_model.task)):
        notes = [note for note in reference_model.notes if note.startswith(OUTPUTS)]
        may = (
            "--task classification (source.task in a recipe, task= in Python), or " if may_be_logits(f"{notes}") else ""
        )
        raise CheckpointError(
            f"{path} has labels, but {reference_model.name} has no classes",
            found="; ".join([f"the task {reference_model.task}", *notes]),
            expected="a model with classes",
            fix=f"{may if may_be_logits(' '.join(notes)) else ''}use no labels",
        )
    if reference_model.classes not in (None, len(labels)):
        raise CheckpointError(
            f"{path} does not fit {reference_model.name}",
            found=f"{len(labels)} lines",
            expected=f"{reference_model.classes} lines, one per class",
        )
    return labels


def reference_runner(source: Source, *, threads: int = 0, original: LoadedModel | None = None) -> runner.Runner:
    """The runner of the original, not loaded yet: PyTorch in eager mode, or ONNX Runtime for an ONNX file."""
    if is_onnx(source):
        from vitdeploy.graph.io.files import serialised

        graph = graph_of(source)
        return ort.OnnxRuntimeRunner(
            serialised(graph.model), name=step.ORIGINAL, threads=threads, external=_graph_file(source).name
        )
    from vitdeploy.models.load import load_model
    from vitdeploy.models.torch_runner import torch_runner

    return torch_runner(original or load_model(source), threads=threads)


def to_request(source: Source) -> dict[str, Any]:
    """The source as JSON values with absolute paths, for a measuring process in any working folder."""
    files = {name: path.resolve() for name in FILES if (path := getattr(source, name))}
    if is_onnx(source):
        files["model"] = _graph_file(source).resolve()
    plain = {**encode(source), **{name: str(path) for name, path in files.items()}, "bind": list(anywhere(source.bind))}
    folder = Path(plain["model"].removeprefix("hf:")) if str(plain["model"]).startswith("hf:") else None
    return {**plain, "model": f"hf:{folder.resolve()}"} if folder is not None and folder.is_dir() else plain


def from_request(request: Mapping[str, Any]) -> Source:
    """The inverse of `to_request`."""
    plain = {key: value for key, value in request.items() if key in {f.name for f in dataclasses.fields(Source)}}
    paths = {name: Path(plain[name]) for name in FILES if plain.get(name)}
    size = plain.get("image_size")
    spec = decode(PreprocessSpec, plain["preprocess"]) if plain.get("preprocess") else None
    sized = {"image_size": tuple(size) if size else None, "bind": tuple(plain.get("bind", ())), "preprocess": spec}
    return Source(**{**plain, **paths, **sized})


# --- The files next to an ONNX file that does not itself contain its preprocessing and class names --------------------
# Exporters of transformers' models leave the model's config files there, or one folder up if the file is in `onnx/`.


ASSUMED = "an ONNX file does not describe its preprocessing: / 255 and a plain resize are assumed"

SOFTMAX = (
    "scores are assumed to be a softmax whose last column is 'no object', as in DETR: neither the graph nor a file "
    "beside it says; for independent scores, set `postprocess: {scores: sigmoid}` in a recipe"
)


@dataclass(frozen=True)
class Beside:
    """`preprocess` None if unknown; `labels` () unless there is one for each class; `notes` for the user."""

    preprocess: PreprocessSpec | None
    labels: tuple[str, ...]
    notes: tuple[str, ...]


def find_beside(file: Path, channels: int, image_size: tuple[int, int], classes: int | None) -> Beside:
    """Read the files next to `file`, an external ONNX file, for images of (height, width)."""
    folder = _folder(file)
    preprocess, notes = _preprocess(folder, channels, image_size)
    of_config, remarks = _config_labels(folder, classes)
    for source, labels in ((step.LABELS_FILE, step.labels_beside(file)), (CONFIG, of_config)):
        if labels and len(labels) == classes:
            more = remarks if source == CONFIG else ()
            return Beside(preprocess, labels, (*notes, *more, f"labels: from {source} beside the file"))
    return Beside(preprocess, (), notes)


def task_beside(file: Path, task: Task, outputs: Sequence[TensorSpec]) -> tuple[Task, str] | None:
    """The task of an external ONNX file with one output according to the files beside it, and a note; None if they
    do not differ from `task`."""
    folder, [output, *others] = _folder(file), outputs
    if task == "classification" and (folder / CONFIG).is_file():
        with contextlib.suppress(CheckpointError):  # a file of another program
            return of_problem(json_file.read_json(folder / CONFIG))
    width = output.shape[-1]
    if task != "features" or others or not isinstance(width, int):
        return None
    labelled = len(step.labels_beside(file)) == width or _config_labels(folder, width)[0]
    return (
        ("classification", f"{OUTPUTS}logits: a file beside it has a label for each of the {width}")
        if labelled
        else None
    )


def settled_scores(
    file: Path, postprocess: Postprocess | None, outputs: Iterable[TensorSpec]
) -> tuple[Postprocess | None, tuple[str, ...]]:
    """The post-processing of a detector whose graph does not show the kind of its scores, and notes on it.

    In transformers' convention, a softmax has one more column of logits ("no object") than config.json has labels;
    independent scores (sigmoid) have one column for each label.
    """
    columns = last_axis(outputs, "logits")
    if not isinstance(postprocess, PostprocessSpec) or postprocess.scores != "softmax" or columns is None:
        return postprocess, ()
    folder = _folder(file)
    try:
        names = json_file.read_json(folder / CONFIG).get("id2label") if (folder / CONFIG).is_file() else None
    except CheckpointError:  # a file of another program
        names = None
    count = len(names) if isinstance(names, dict) else None
    if count == columns:
        note = f"scores are independent (sigmoid): {CONFIG} beside the file has a label for each of {columns} logits"
        return dataclasses.replace(postprocess, scores="sigmoid"), (note,)
    return postprocess, () if count == columns - 1 else (SOFTMAX,)


def _folder(file: Path) -> Path:
    return file.parent.parent if file.parent.name == "onnx" else file.parent


def _preprocess(
    folder: Path, channels: int, image_size: tuple[int, int]
) -> tuple[PreprocessSpec | None, tuple[str, ...]]:
    try:
        processor = image_processor.transformers_processor(folder)
        if processor is None:
            return None, ()
        spec, notes = image_processor.transformers_preprocess(processor, channels, image_size)
    except CheckpointError as error:
        return None, (f"{PREPROCESSOR} beside the file is ignored: {error.message} ({error.found})",)
    return spec, (f"preprocessing: from {PREPROCESSOR} beside the file", *notes)


def _config_labels(folder: Path, classes: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels, and notes on them."""
    try:
        return labels_for(json_file.read_json(folder / CONFIG), classes) if (folder / CONFIG).is_file() else ((), ())
    except CheckpointError:  # a file of another program, or for another model
        return (), ()

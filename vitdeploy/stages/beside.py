"""Read the files next to an ONNX file that does not itself contain its preprocessing and class names.

Exporters of transformers' models leave the model's config files there, or one folder up if the file is in `onnx/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitdeploy.errors import CheckpointError
from vitdeploy.graph.io.meanings import OUTPUTS, of_problem
from vitdeploy.models.json_file import read_json
from vitdeploy.models.model_folder.folder import CONFIG, PREPROCESSOR, labels_for
from vitdeploy.models.model_folder.image_processor import transformers_preprocess, transformers_processor
from vitdeploy.spec import Postprocess, PostprocessSpec, PreprocessSpec, Task, TensorSpec, last_axis
from vitdeploy.stages.step import LABELS_FILE, labels_beside

ASSUMED = "an ONNX file does not say how images are prepared: / 255 and a plain resize are assumed"

SOFTMAX = (
    "scores are taken for a softmax with a last column 'no object', as DETR's: nothing in the graph or beside it says; "
    "if they are independent, `postprocess: {scores: sigmoid}` in a recipe"
)


@dataclass(frozen=True)
class Beside:
    """`preprocess` None if nothing says it; `labels` () if there is none for each class; `notes` for people."""

    preprocess: PreprocessSpec | None
    labels: tuple[str, ...]
    notes: tuple[str, ...]


def find_beside(file: Path, channels: int, image_size: tuple[int, int], classes: int | None) -> Beside:
    """Read the files next to `file`, an external ONNX file, for images of (height, width)."""
    folder = _folder(file)
    preprocess, notes = _preprocess(folder, channels, image_size)
    of_config, remarks = _config_labels(folder, classes)
    for source, labels in ((LABELS_FILE, labels_beside(file)), (CONFIG, of_config)):
        if labels and len(labels) == classes:
            more = remarks if source == CONFIG else ()
            return Beside(preprocess, labels, (*notes, *more, f"labels: those of {source} beside the file"))
    return Beside(preprocess, (), notes)


def task_beside(file: Path, task: Task, outputs: Sequence[TensorSpec]) -> tuple[Task, str] | None:
    """The task that files beside an external ONNX file say its one output to be of, and a note; None if they say no
    other than `task`."""
    folder, [output, *others] = _folder(file), outputs
    if task == "classification" and (folder / CONFIG).is_file():
        with contextlib.suppress(CheckpointError):  # of another program
            note = of_problem(read_json(folder / CONFIG))
            return ("tensors", note) if note else None
    width = output.shape[-1]
    if task != "features" or others or not isinstance(width, int):
        return None
    labelled = len(labels_beside(file)) == width or _config_labels(folder, width)[0]
    return (
        ("classification", f"{OUTPUTS}logits: beside the file is a label for each of the {width}") if labelled else None
    )


def settled_scores(
    file: Path, postprocess: Postprocess | None, outputs: Iterable[TensorSpec]
) -> tuple[Postprocess | None, tuple[str, ...]]:
    """What the scores of a detector are where its graph does not show it, and notes on it.

    By transformers' convention: a softmax has a column of logits more than config.json has labels ("no object"),
    independent scores (sigmoid) have one for each label.
    """
    columns = last_axis(outputs, "logits")
    if not isinstance(postprocess, PostprocessSpec) or postprocess.scores != "softmax" or columns is None:
        return postprocess, ()
    folder = _folder(file)
    try:
        names = read_json(folder / CONFIG).get("id2label") if (folder / CONFIG).is_file() else None
    except CheckpointError:  # of another program
        names = None
    count = len(names) if isinstance(names, dict) else None
    if count == columns:
        told = f"scores are independent (sigmoid): {CONFIG} beside the file has a label for each of {columns} logits"
        return replace(postprocess, scores="sigmoid"), (told,)
    return postprocess, () if count == columns - 1 else (SOFTMAX,)


def _folder(file: Path) -> Path:
    return file.parent.parent if file.parent.name == "onnx" else file.parent


def _preprocess(
    folder: Path, channels: int, image_size: tuple[int, int]
) -> tuple[PreprocessSpec | None, tuple[str, ...]]:
    try:
        processor = transformers_processor(folder)
        if processor is None:
            return None, ()
        spec, notes = transformers_preprocess(processor, channels, image_size)
    except CheckpointError as error:
        return None, (f"{PREPROCESSOR} beside the file is not followed: {error.message} ({error.found})",)
    return spec, (f"images are prepared as {PREPROCESSOR} beside the file says", *notes)


def _config_labels(folder: Path, classes: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels, and notes on them."""
    try:
        return labels_for(read_json(folder / CONFIG), classes) if (folder / CONFIG).is_file() else ((), ())
    except CheckpointError:  # of another program, or of another model
        return (), ()

"""Read the files next to an ONNX file that does not itself contain its preprocessing and class names.

Exporters of transformers' models leave the model's config files there, or one folder up if the file is in `onnx/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitdeploy.errors import CheckpointError
from vitdeploy.models.json_file import read_json
from vitdeploy.models.model_folder.files import CONFIG, PREPROCESSOR
from vitdeploy.models.model_folder.image_processor import transformers_preprocess, transformers_processor
from vitdeploy.models.model_folder.labels import labels_for
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.files import LABELS_FILE, labels_beside

ASSUMED = "an ONNX file does not say how images are prepared: / 255 and a plain resize are assumed"


@dataclass(frozen=True)
class Beside:
    """`preprocess` None if nothing says it; `labels` () if there is none for each class; `notes` for people."""

    preprocess: PreprocessSpec | None
    labels: tuple[str, ...]
    notes: tuple[str, ...]


def find_beside(file: Path, channels: int, image_size: tuple[int, int], classes: int | None) -> Beside:
    """Read the files next to `file`, an external ONNX file, for images of (height, width)."""
    folder = file.parent.parent if file.parent.name == "onnx" else file.parent
    preprocess, notes = _preprocess(folder, channels, image_size)
    of_config, remarks = _config_labels(folder, classes)
    for source, labels in ((LABELS_FILE, labels_beside(file)), (CONFIG, of_config)):
        if labels and len(labels) == classes:
            more = remarks if source == CONFIG else ()
            return Beside(preprocess, labels, (*notes, *more, f"labels: those of {source} beside the file"))
    return Beside(preprocess, (), notes)


def _preprocess(
    folder: Path, channels: int, image_size: tuple[int, int]
) -> tuple[PreprocessSpec | None, tuple[str, ...]]:
    try:
        processor = transformers_processor(folder)
        if processor is None:
            return None, (ASSUMED,)
        spec, notes = transformers_preprocess(processor, channels, image_size)
    except CheckpointError as error:
        return None, (f"{PREPROCESSOR} beside the file is not followed: {error.message} ({error.found})", ASSUMED)
    return spec, (f"images are prepared as {PREPROCESSOR} beside the file says", *notes)


def _config_labels(folder: Path, classes: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels, and notes on them."""
    try:
        return labels_for(read_json(folder / CONFIG), classes) if (folder / CONFIG).is_file() else ((), ())
    except CheckpointError:  # of another program, or of another model
        return (), ()

"""The names of a bundle's classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitdeploy.bundle.checked import CheckedFiles
from vitdeploy.errors import ManifestError
from vitdeploy.spec import Manifest, Postprocess, TensorSpec, last_axis


def read_labels(folder: Path, manifest: Manifest, files: CheckedFiles | None = None) -> list[str] | None:
    """One label per class, or None if the bundle has none. `files`: the bundle's, where it is being loaded.

    Raises:
        DigestError, ManifestError: the file is not the recorded one, or has not one line a class.
    """
    if manifest.labels is None:
        return None
    data = (files or CheckedFiles(folder, manifest)).read(manifest.labels)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{folder / manifest.labels} is not UTF-8", found=str(error)[:200]) from None
    # Not splitlines(): a label may hold other characters that it takes for the end of a line.
    labels = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    for engine in manifest.engines:
        classes = number_of_classes(engine.outputs, manifest.postprocess)
        if classes is not None and classes != len(labels):
            raise ManifestError(
                f"{folder / manifest.labels} does not fit the engine {engine.artifact}",
                found=f"{len(labels)} labels",
                wanted=f"one per class: {classes}",
            )
    return labels


def number_of_classes(outputs: Sequence[TensorSpec], postprocess: Postprocess | None) -> int | None:
    """How many classes the outputs are of; None if they do not say."""
    return last_axis(outputs, "logits") if postprocess is None else postprocess.number_of_classes(outputs)

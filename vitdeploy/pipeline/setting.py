"""Settings (how inputs and outputs are read) of a graph, of a bundle's engine and of a reference model."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.graph.io.files import GraphMetadata
from vitdeploy.runtime.values import number_of_classes
from vitdeploy.spec import EngineSpec, GraphSpec, Manifest
from vitdeploy.stages.reference_model import ReferenceModel
from vitdeploy.stages.step import TOKENIZER_FILE, known_labels
from vitdeploy.tasks.adapter import Setting


def graph_setting(
    file: Path, metadata: GraphMetadata, spec: GraphSpec | None = None, labels: tuple[str, ...] | None = None
) -> Setting:
    """The setting of the graph in a file that vitdeploy wrote.

    Args:
        spec: inputs and outputs of the graph, which give the number of classes; calibration needs no classes.
        labels: labels of the bundle that contains the file; None: the graph's own, or those in the same folder.

    Raises:
        GraphError, DataError: as in `known_labels`.
    """
    return Setting(
        metadata.task,
        metadata.preprocess,
        metadata.postprocess,
        metadata.sequence,
        known_labels(file, metadata) if labels is None else labels,
        None if spec is None else number_of_classes(spec.outputs, metadata.postprocess),
        tokenizer=file.parent / TOKENIZER_FILE,
    )


def engine_setting(folder: Path, manifest: Manifest, engine: EngineSpec, labels: tuple[str, ...]) -> Setting:
    """The setting of one engine of the bundle in `folder`, with these class names."""
    classes = number_of_classes(engine.outputs, manifest.postprocess)
    tokenizer = folder / TOKENIZER_FILE
    return Setting(
        manifest.task, manifest.preprocess, manifest.postprocess, engine.sequence, labels, classes, tokenizer=tokenizer
    )


def reference_setting(model: ReferenceModel) -> Setting:
    return Setting(
        model.task,
        model.preprocess,
        model.postprocess,
        model.sequence,
        model.labels,
        model.classes,
        model.claim,
        model.tokenizer,
    )

"""Settings (how inputs and outputs are read) of a graph, of a bundle's engine and of the original; and the fitting of
models, or of their post-processing, on images."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from vitdeploy.data.folder import Sample, scan
from vitdeploy.data.masks import normal_folder, refuse_contents
from vitdeploy.errors import CheckpointError, InputError
from vitdeploy.graph.io.files import GraphMetadata
from vitdeploy.models.names import is_graph
from vitdeploy.models.source import Source
from vitdeploy.pipeline.run import default_store, run_plan
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime.inputs import further_inputs, require_image_alone
from vitdeploy.runtime.values import number_of_classes
from vitdeploy.spec import EngineSpec, GraphSpec, Manifest, decode
from vitdeploy.stages import answers
from vitdeploy.stages.reference_model import Overrides, ReferenceModel, find_reference_model
from vitdeploy.stages.step import TOKENIZER_FILE, known_labels, read_json
from vitdeploy.tasks.adapter import Data, Setting
from vitdeploy.tasks.registry import make_adapter


def graph_setting(
    file: Path, metadata: GraphMetadata, spec: GraphSpec | None = None, labels: tuple[str, ...] | None = None
) -> Setting:
    """The setting of a graph that vitdeploy wrote.

    Args:
        spec: inputs and outputs of the graph, for the number of classes; calibration needs no classes.
        labels: labels of the bundle that contains the file; None for the graph's own, or those in the same folder.

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
        inputs=() if spec is None else further_inputs(metadata.task, spec.inputs),
    )


def engine_setting(folder: Path, manifest: Manifest, engine: EngineSpec, labels: tuple[str, ...]) -> Setting:
    """The setting of one engine of the bundle in `folder`, with these class names."""
    classes = number_of_classes(engine.outputs, manifest.postprocess)
    return Setting(
        manifest.task,
        manifest.preprocess,
        manifest.postprocess,
        engine.sequence,
        labels,
        classes,
        tokenizer=folder / TOKENIZER_FILE,
        inputs=further_inputs(manifest.task, engine.inputs),
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
        model.inputs,
    )


# --- Post-processing parameters chosen on labelled calibration samples ------------------------------------------------


def with_fitted(model: ReferenceModel, data: Data, progress: Progress = silent) -> ReferenceModel:
    """The model with the parameters that its task chooses on labelled calibration samples, such as thresholds, from the
    store or computed now. Errors of reading images and models propagate."""
    adapter = make_adapter(reference_setting(model))
    if not adapter.fits(data):
        return model
    step = answers.fit_step(model, adapter, data)
    folder = run_plan([step], default_store(), resume=True, progress=progress)[answers.FITTED].path
    found = read_json(folder / answers.FITTED_FILE)
    postprocess = decode(type(model.postprocess), found["postprocess"])
    return dataclasses.replace(model, postprocess=postprocess, notes=(*model.notes, found["note"]))


# --- The memory bank of an anomaly model ------------------------------------------------------------------------------


def fitted(
    source: Source, given: Overrides | None = None, progress: Progress = silent, *, skip_bad: bool = False
) -> Source:
    """The source with the file of its memory bank instead of its normal images, from the store or fitted now. A source
    without normal images is returned unchanged.

    Raises:
        InputError: normal images for another task. DataError: too few normal images.
        CheckpointError: an .onnx file, which cannot be fitted, or a model without patch tokens. Errors of reading
            images and models propagate.
    """
    if source.normal is None or source.memory is not None:
        return source
    if source.task != "anomaly":
        raise InputError(
            "normal images are for the task anomaly only",
            found=f"--normal {source.normal}, and " + (f"the task {source.task}" if source.task else "no task"),
            expected="--task anomaly (in a recipe source.task)",
        )
    if is_graph(source.model):
        raise CheckpointError(
            f"{source.name} is an ONNX graph and cannot be fitted on normal images",
            expected="the PyTorch model that it was exported from",
            fix="pass that model with --normal; or, if the graph itself detects anomalies, remove --normal",
        )
    from vitdeploy.stages.fit import FIT, MEMORY_FILE, distinct, fit_step  # PyTorch with it

    plain = Overrides(preprocess=given.preprocess if given else None)
    features = find_reference_model(dataclasses.replace(source, task=None, normal=None), plain)
    require_image_alone(features.name, features.inputs, "an anomaly model")
    folder = normal_folder(source.normal)
    normal = distinct(scan(folder, "none")[0], folder)
    step = fit_step(features, folder, normal, skip_bad)
    artifact = run_plan([step], default_store(), resume=True, progress=progress)[FIT]
    return dataclasses.replace(source, memory=artifact.path / MEMORY_FILE)


def refuse_known(source: Source, evaluation: Iterable[Sample]) -> None:
    """Raise DataError if evaluation images are among the images that the model was fitted on."""
    if source.memory is None:
        return
    from vitdeploy.models.memory_bank import MemoryBank

    images = set(MemoryBank.load(source.memory).images)
    refuse_contents([sample.path for sample in evaluation], images, "the evaluation data", "the normal images")

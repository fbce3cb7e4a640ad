"""Export the original to its float graph, and compare the two at three batch sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from vitdeploy.errors import ExportError, GraphError
from vitdeploy.exporter.parity import FREE_BATCH, TOLERANCE, ask, check_graph
from vitdeploy.exporter.torch_onnx import expected_seconds, export_graph
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.bound import without_folders
from vitdeploy.graph.io.files import GraphMetadata, fixed_batch, get_metadata, graph_spec, save_graph, set_metadata
from vitdeploy.graph.io.inputs import take_pixels
from vitdeploy.models.load import load_model
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.progress import Progress, silent
from vitdeploy.spec import encode
from vitdeploy.stages.files import LABELS_FILE, MODEL_FILE, graphs_in, write_json
from vitdeploy.stages.image_text import export_image_text_model
from vitdeploy.stages.prompted import export_prompted
from vitdeploy.stages.reference_model import ReferenceModel, graph_of, is_onnx, reference_runner
from vitdeploy.stages.sequence import export_sequence_model
from vitdeploy.stages.step import EXPORT, Folders, Step
from vitdeploy.stages.tools import package_versions
from vitdeploy.stages.towers import export_towers

# An export that takes longer says at its start how long.
SAID_SECONDS = 20.0
PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "numpy", "timm", "transformers")


@dataclass(frozen=True)
class ExportConfig:
    """How the original is exported; `batch` None is dynamic."""

    name: str
    opset: int
    batch: int | None
    in_graph: bool


def export(
    reference_model: ReferenceModel, config: ExportConfig, out: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Writes the graph or graphs, export.json (what the export is, and its parity), labels.txt where there are any."""
    compared: str | None = None
    parity: Sequence[Any]
    if reference_model.task in ("zero-shot", "open-vocabulary-detection"):
        size = config.opset, config.batch, config.in_graph
        parity, opset, compared = export_towers(reference_model, config.name, *size, out, progress)
    elif reference_model.task == "promptable-segmentation":
        size = config.opset, config.batch, config.in_graph
        parity, opset = export_prompted(reference_model, config.name, *size, out, progress)
    elif reference_model.task == "image-to-text":
        size = config.opset, config.batch, config.in_graph
        parity, opset, compared = export_image_text_model(reference_model, config.name, *size, out, progress)
    elif reference_model.task == "sequence":
        parity, opset = export_sequence_model(reference_model, config.name, config.opset, out, progress)
    else:
        parity, opset = _export_image_model(reference_model, config, out, progress)
    if reference_model.labels:
        (out / LABELS_FILE).write_text("".join(f"{label}\n" for label in reference_model.labels), encoding="utf-8")
    files = graphs_in(out).values()
    facts = {
        "model": reference_model.facts(),
        "opset": opset[0],
        "ir_version": opset[1],
        "bytes": sum(file.stat().st_size for file in files),
        "parity": [asdict(row) for row in parity],
        "tolerance": TOLERANCE,
        **({"tokenizer": compared} if compared is not None else {}),
    }
    write_json(out / "export.json", facts)
    return facts


def _export_image_model(
    reference_model: ReferenceModel, config: ExportConfig, out: Path, progress: Progress
) -> tuple[Sequence[Any], tuple[int, int]]:
    progress("load the model", 0, 3)
    original: LoadedModel | None = None if is_onnx(reference_model.source) else load_model(reference_model.source)
    progress("export to ONNX", 1, 3)
    if original is None:
        graph = _imported(reference_model, config)
    else:
        images = reference_model.channels, reference_model.image_size, config.batch
        seconds = expected_seconds(original.module, *images)
        if seconds > SAID_SECONDS:
            progress(f"export to ONNX: about {seconds:.0f} s where nothing else runs", 1, 3)
        graph = export_graph(
            original.module,
            name=config.name,
            preprocess=reference_model.images,
            image_size=reference_model.image_size,
            opset=config.opset,
            batch=config.batch,
            in_graph=config.in_graph,
            task=reference_model.task,
            outputs=[tensor.name for tensor in reference_model.outputs],
            postprocess=reference_model.postprocess,
        )
    batch = fixed_batch(graph_spec(graph, MODEL_FILE))
    if batch not in (None, config.batch):
        raise ExportError(
            f"{reference_model.name} bakes the batch {batch} into a constant of its graph",
            found=f"batch {batch}",
            wanted=f"batch {config.batch or 'dynamic'}",
            fix=FREE_BATCH,
        )
    set_metadata(graph, dataclasses.replace(get_metadata(graph, MODEL_FILE), labels=reference_model.labels))
    save_graph(graph, out / MODEL_FILE)
    versions = graph.opset_imports[""], graph.ir_version or 0
    del graph
    progress("compare with the original", 2, 3)
    with reference_runner(reference_model.source, original=original) as reference:
        asked = ask(reference, reference_model.images, batch)
    parity = check_graph(out / MODEL_FILE, asked, reference_model.images)
    progress("compare with the original", 3, 3)
    return parity, versions


def _imported(reference_model: ReferenceModel, config: ExportConfig) -> ir.Model:
    """The user's ONNX file in the one form that later stages know, with its preprocessing."""
    assert reference_model.source.model is not None
    found = graph_of(reference_model.source)
    if found.takes_pixels and not config.in_graph:
        raise GraphError(
            f"{reference_model.source.model} takes pixels: its preprocessing is part of it",
            found="export.preprocess: false, or --no-preprocess",
            wanted="export.preprocess: true",
            fix="export the model that it was made from with --no-preprocess",
        )
    normalise(found.model, opset=config.opset)
    if config.in_graph and not found.takes_pixels:
        take_pixels(found.model, reference_model.images)
    found.model.graph.name = config.name
    set_metadata(
        found.model,
        GraphMetadata(
            config.name,
            reference_model.task,
            reference_model.images,
            postprocess=reference_model.postprocess,
            bound=tuple(without_folders(reference_model.source.bind))
            or (found.metadata.bound if found.metadata else ()),
        ),
    )
    return found.model


def export_step(reference_model: ReferenceModel, config: ExportConfig) -> Step:
    """The float graph or graphs of the original."""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        export(reference_model, config, out, progress)

    return Step(
        EXPORT,
        "export",
        write,
        {**reference_model.identity(), **encode(config)},
        outside=dict(reference_model.digests),
        packages=package_versions(PACKAGES),
    )

"""A bare ONNX file, of whatever exporter, as the float graph that the other stages take."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.graph.io.files import load_graph
from vitdeploy.models.source import Source
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement_reader import reject_quantized
from vitdeploy.stages.batches import settle_batch
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.files import MODEL_FILE
from vitdeploy.stages.reference_model import find_reference_model

OPSET = 20


def import_external(
    file: Path, out: Path, progress: Progress = silent, image_size: tuple[int, int] | None = None
) -> tuple[Path, tuple[str, ...]]:
    """Writes what `vitdeploy export FILE` does, at the batch that the file has; its errors propagate.

    `image_size` is (height, width), for a file that leaves it open.

    Returns: the graph written, and what was assumed of the file, one per line.
    """
    reject_quantized(load_graph(file), str(file))
    reference_model, batch = settle_batch(find_reference_model(Source(model=str(file), image_size=image_size)))
    export(reference_model, ExportConfig(file.stem[:64], OPSET, batch, True), out, progress)
    return out / MODEL_FILE, reference_model.notes

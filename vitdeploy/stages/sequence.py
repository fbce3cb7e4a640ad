"""Export of an encoder-decoder: two graphs, compared with step-by-step decoding in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitdeploy.exporter.sequence import DECODER_STEP, ENCODER, check_sequence_parity, export_sequence
from vitdeploy.graph.io.files import GraphMetadata, save_graph, set_metadata
from vitdeploy.models.architectures.transformer import Transformer
from vitdeploy.models.load import load_model
from vitdeploy.progress import Progress
from vitdeploy.stages.reference_model import ReferenceModel


def export_sequence_model(
    reference_model: ReferenceModel, name: str, opset: int, out: Path, progress: Progress
) -> tuple[Sequence[Any], tuple[int, int]]:
    """Writes encoder.onnx and decoder_step.onnx; returns the parity rows, and opset and IR version."""
    progress("load the model", 0, 3)
    module = load_model(reference_model.source).module
    assert isinstance(module, Transformer)
    progress("export to ONNX", 1, 3)
    graphs = export_sequence(module, name=name, opset=opset)
    for part, graph in graphs.items():
        set_metadata(graph, GraphMetadata(name, "sequence", None, sequence=reference_model.sequence))
        save_graph(graph, out / f"{part}.onnx")
    progress("compare with the original", 2, 3)
    parity = check_sequence_parity(out / f"{ENCODER}.onnx", out / f"{DECODER_STEP}.onnx", module)
    progress("compare with the original", 3, 3)
    graph = graphs[ENCODER]
    return parity, (graph.opset_imports[""], graph.ir_version or 0)

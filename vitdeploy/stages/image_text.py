"""Export of an encoder-decoder of images: two graphs, compared with PyTorch, and the tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from vitdeploy.exporter.image_text import ImageTextParts, TextParity, check_text_parity, export_image_text
from vitdeploy.exporter.sequence import DECODER_STEP, ENCODER
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models.external.image_text import DecoderStep, Encoder, ImageText
from vitdeploy.models.external.tokenizer import compare_writers
from vitdeploy.models.load import load_model
from vitdeploy.progress import Progress
from vitdeploy.spec import TextSpec
from vitdeploy.stages.files import TOKENIZER_FILE
from vitdeploy.stages.reference_model import ReferenceModel


def export_image_text_model(
    reference_model: ReferenceModel,
    name: str,
    opset: int,
    batch: int | None,
    in_graph: bool,
    out: Path,
    progress: Progress,
) -> tuple[Sequence[TextParity], tuple[int, int], str | None]:
    """Writes encoder.onnx, decoder_step.onnx and tokenizer.json. Returns the parity rows, opset and IR version, and
    what the tokenizer was compared with (None: with nothing).

    Args:
        batch: of images; the decoder's is dynamic.
        in_graph: whether the encoder takes pixels.

    Raises:
        ExportError: the graphs are not the same function as the model.
        CheckpointError: the tokenizer makes other texts than transformers' own.
    """
    progress("load the model", 0, 4)
    module, spec, sequence = (
        load_model(reference_model.source).module,
        reference_model.postprocess,
        reference_model.sequence,
    )
    assert isinstance(module, ImageText) and isinstance(spec, TextSpec) and sequence is not None
    assert reference_model.tokenizer is not None
    shutil.copyfile(reference_model.tokenizer, out / TOKENIZER_FILE)
    progress("compare the tokenizer", 1, 4)
    compared = compare_writers(reference_model.tokenizer, spec, sequence)
    progress("export to ONNX", 2, 4)
    graphs = export_image_text(
        ImageTextParts(module, Encoder(module), DecoderStep(module)),
        name=name,
        preprocess=reference_model.images,
        postprocess=spec,
        sequence=sequence,
        opset=opset,
        batch=batch,
        in_graph=in_graph,
    )
    for part, graph in graphs.items():
        save_graph(graph, out / f"{part}.onnx")
    progress("compare with the original", 3, 4)
    encoder, step = (out / f"{part}.onnx" for part in (ENCODER, DECODER_STEP))
    parity = check_text_parity(encoder, step, module, reference_model.images, sequence, fixed_batch=batch)
    progress("compare with the original", 4, 4)
    graph = graphs[ENCODER]
    return parity, (graph.opset_imports[""], graph.ir_version or 0), compared

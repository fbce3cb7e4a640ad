"""Export of two towers: a graph each, compared with PyTorch, and the tokenizer, compared with transformers'."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitdeploy.exporter.parity import BATCHES, SEED, GraphParity, ask, check_graph, check_outputs
from vitdeploy.exporter.torch_onnx import export_graph, export_text_graph
from vitdeploy.graph.io.files import GraphMetadata, save_graph, set_metadata
from vitdeploy.models.external.tokenizer import compare_tokenizers
from vitdeploy.models.load import load_model
from vitdeploy.models.open_vocabulary import OpenVocabulary
from vitdeploy.models.torch_runner import torch_runner
from vitdeploy.models.towers import Towers
from vitdeploy.progress import Progress
from vitdeploy.runtime.flow import FlowRunner
from vitdeploy.runtime.flows import IMAGE_FEATURES, IMAGE_TOWER, TEXT_TOWER
from vitdeploy.spec import OpenVocabularySpec, ReadsTexts, ZeroShotSpec
from vitdeploy.stages.files import TOKENIZER_FILE
from vitdeploy.stages.reference_model import ReferenceModel


def export_towers(
    reference_model: ReferenceModel,
    name: str,
    opset: int,
    batch: int | None,
    in_graph: bool,
    out: Path,
    progress: Progress,
) -> tuple[Sequence[GraphParity], tuple[int, int], str | None]:
    """Writes image_tower.onnx, text_tower.onnx and tokenizer.json. Returns the parity rows, opset
    and IR version, and what the tokenizer was compared with (None: with nothing).

    Args:
        batch: of images; texts have a dynamic one.
        in_graph: whether the image tower takes pixels.

    Raises:
        ExportError: a graph is not the same function as its tower.
        CheckpointError: the tokenizer gives other tokens than transformers' own.
    """
    progress("load the model", 0, 5)
    original = load_model(reference_model.source)
    module, spec = original.module, reference_model.postprocess
    assert isinstance(module, Towers | OpenVocabulary) and isinstance(spec, ZeroShotSpec | OpenVocabularySpec)
    assert reference_model.tokenizer is not None
    shutil.copyfile(reference_model.tokenizer, out / TOKENIZER_FILE)
    progress("compare the tokenizer", 1, 5)
    compared = compare_tokenizers(reference_model.tokenizer, spec)
    progress("export the image tower", 2, 5)
    image = export_graph(
        module.image_tower,
        name=f"{name}_{IMAGE_TOWER}",
        preprocess=reference_model.images,
        image_size=reference_model.image_size,
        opset=opset,
        batch=batch,
        in_graph=in_graph,
        outputs=[{IMAGE_FEATURES: "features"}.get(each.name, each.name) for each in original.signature.outputs[:-1]],
    )
    progress("export the text tower", 3, 5)
    text = export_text_graph(module.text_tower, name=f"{name}_{TEXT_TOWER}", length=spec.length, opset=opset)
    for part, graph in ((IMAGE_TOWER, image), (TEXT_TOWER, text)):
        set_metadata(graph, GraphMetadata(name, reference_model.task, reference_model.images, postprocess=spec))
        save_graph(graph, out / f"{part}.onnx")
    progress("compare with the original", 4, 5)
    with torch_runner(original) as reference:
        assert isinstance(reference, FlowRunner)
        parts = reference.linked.runners
        rows = check_graph(
            out / f"{IMAGE_TOWER}.onnx", ask(parts[IMAGE_TOWER], reference_model.images, batch), reference_model.images
        )
        parity = [GraphParity(**vars(row), graph=IMAGE_TOWER) for row in rows]
        asked = _texts(spec, module.text_tower.config.vocabulary, module.text_tower.config.end)
        answers = [parts[TEXT_TOWER].infer({"text": tokens})["features"] for tokens in asked]
        feeds = [({"text": tokens}, {"features": found}) for tokens, found in zip(asked, answers, strict=True)]
        parity += check_outputs(out / f"{TEXT_TOWER}.onnx", feeds, TEXT_TOWER)
    progress("compare with the original", 5, 5)
    return parity, (image.opset_imports[""], image.ir_version or 0), compared


def _texts(spec: ReadsTexts, vocabulary: int, end: int) -> list[np.ndarray]:
    """Seeded random tokens at three batch sizes, which end anywhere and are padded."""
    generator, found = np.random.default_rng(SEED), []
    for batch in BATCHES:
        tokens = generator.integers(0, vocabulary, (batch, spec.length))
        for row, last in zip(tokens, generator.integers(1, spec.length, batch), strict=True):
            row[last], row[last + 1 :] = min(end, vocabulary - 1), spec.pad
        found.append(tokens)
    return found

"""Export of promptable segmentation: an image encoder and a decoder of prompts, each compared with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitdeploy.exporter.parity import BATCHES, SEED, GraphParity, check_outputs
from vitdeploy.exporter.torch_onnx import export_graph, export_tensors_graph
from vitdeploy.graph.io.files import GraphMetadata, save_graph, set_metadata
from vitdeploy.models.external.prompted import Prompted, embeddings_of
from vitdeploy.models.load import load_model
from vitdeploy.models.torch_runner import torch_runner
from vitdeploy.progress import Progress
from vitdeploy.runtime.flow import FlowRunner
from vitdeploy.runtime.flows import IMAGE_ENCODER, PROMPT_DECODER
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.prompts import prompt_tensors
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import PromptSpec
from vitdeploy.spec.prompts import BOTTOM_RIGHT, EMPTY
from vitdeploy.stages.reference_model import ReferenceModel

Feeds = list[tuple[dict[str, Array], dict[str, Array]]]


def export_prompted(
    reference_model: ReferenceModel,
    name: str,
    opset: int,
    batch: int | None,
    in_graph: bool,
    out: Path,
    progress: Progress,
) -> tuple[Sequence[GraphParity], tuple[int, int]]:
    """Writes image_encoder.onnx and prompt_decoder.onnx. Returns the parity rows, opset and IR version.

    Args:
        batch: of images; prompts have a dynamic one.
        in_graph: whether the encoder takes pixels.

    Raises:
        ExportError: a graph is not the same function as its module.
    """
    progress("load the model", 0, 4)
    original = load_model(reference_model.source)
    module, spec = original.module, reference_model.postprocess
    assert isinstance(module, Prompted) and isinstance(spec, PromptSpec)
    embedded = embeddings_of(module, reference_model.channels, reference_model.image_size)
    progress("export the image encoder", 1, 4)
    encoder = export_graph(
        module.image_encoder,
        name=f"{name}_{IMAGE_ENCODER}",
        preprocess=reference_model.images,
        image_size=reference_model.image_size,
        opset=opset,
        batch=batch,
        in_graph=in_graph,
        outputs=[tensor.name for tensor in embedded],
    )
    progress("export the prompt decoder", 2, 4)
    decoder = export_tensors_graph(
        module.prompt_decoder,
        name=f"{name}_{PROMPT_DECODER}",
        inputs=[*embedded, *prompt_tensors(spec)],
        outputs=[tensor.name for tensor in reference_model.outputs],
        opset=opset,
    )
    for part, graph in ((IMAGE_ENCODER, encoder), (PROMPT_DECODER, decoder)):
        set_metadata(graph, GraphMetadata(name, reference_model.task, reference_model.images, postprocess=spec))
        save_graph(graph, out / f"{part}.onnx")
    progress("compare with the original", 3, 4)
    with torch_runner(original) as reference:
        assert isinstance(reference, FlowRunner)
        images, prompts = _asked(reference, reference_model, spec, batch, in_graph)
    parity = check_outputs(out / f"{IMAGE_ENCODER}.onnx", images, IMAGE_ENCODER)
    parity += check_outputs(out / f"{PROMPT_DECODER}.onnx", prompts, PROMPT_DECODER)
    progress("compare with the original", 4, 4)
    return parity, (encoder.opset_imports[""], encoder.ir_version or 0)


def _asked(
    reference: FlowRunner, model: ReferenceModel, spec: PromptSpec, fixed: int | None, in_graph: bool
) -> tuple[Feeds, Feeds]:
    """Seeded images, and prompts for their embeddings, each with what the original gives for them."""
    generator, parts = np.random.default_rng(SEED), reference.linked.runners
    images: Feeds = []
    prompts: Feeds = []
    for batch in BATCHES if fixed is None else (fixed,) * len(BATCHES):
        shape = (batch, *model.image_size, model.channels)
        pixels = generator.integers(0, 256, shape, dtype=np.uint8)
        tensor = normalise(pixels, model.images)
        embedded = parts[IMAGE_ENCODER].infer({"image": tensor})
        images.append(({"image": pixels if in_graph else tensor}, embedded))
        points = generator.uniform(0, min(model.image_size), (batch, spec.slots, 2)).astype(np.float32)
        labels = generator.integers(-1, BOTTOM_RIGHT + 1, (batch, spec.slots))
        for row, used in zip(labels, generator.integers(1, spec.slots, batch), strict=True):
            row[used:] = EMPTY
        feeds = {**embedded, "points": points, "labels": labels}
        prompts.append((feeds, parts[PROMPT_DECODER].infer(feeds)))
    return images, prompts

"""Export of the original to its float graph or graphs, with a comparison at three batch sizes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import CapabilityError, ExportError, GraphError
from vitdeploy.exporter import batches, torch_onnx
from vitdeploy.exporter.parity import BATCHES, FREE_BATCH, SEED, TOLERANCE, ParityRow, ask, check_graph, check_outputs
from vitdeploy.exporter.sequence import (
    DECODER_STEP,
    ENCODER,
    check_sequence_parity,
    check_text_parity,
    export_image_text,
    export_sequence,
)
from vitdeploy.graph.canonical.normalise import normalise as export_normalise
from vitdeploy.graph.io import admit, bound, inputs
from vitdeploy.graph.io.files import (
    GraphMetadata,
    fixed_batch,
    get_metadata,
    graph_spec,
    save_graph,
    set_metadata,
)
from vitdeploy.models import family, load, source, towers
from vitdeploy.models.architectures.transformer import Transformer
from vitdeploy.models.external import image_text, prompted
from vitdeploy.models.model_folder.tokenizer import compare_tokenizers, compare_writers
from vitdeploy.models.torch_runner import torch_runner
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement_reader import reject_quantized
from vitdeploy.runtime import flow, preprocess
from vitdeploy.runtime.flows import IMAGE_ENCODER, IMAGE_FEATURES, IMAGE_TOWER, PROMPT_DECODER, TEXT_TOWER
from vitdeploy.runtime.prompts import BOTTOM_RIGHT, EMPTY, PromptSpec, prompt_tensors
from vitdeploy.runtime.runner import Array
from vitdeploy.runtime.tokenizer import OpenVocabularySpec, ReadsTexts, TextSpec, ZeroShotSpec
from vitdeploy.spec import Task, encode
from vitdeploy.stages.reference_model import ReferenceModel, find_reference_model, graph_of, is_onnx, reference_runner
from vitdeploy.stages.step import (
    EXPORT,
    LABELS_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    Folders,
    Step,
    graphs_in,
    package_versions,
    write_json,
)

if TYPE_CHECKING:
    from torch import nn

# --- The export of any model ------------------------------------------------------------------------------------------


# From this expected duration on, the progress line gives an estimate.
ESTIMATED_SECONDS = 20.0
PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "numpy", "timm", "transformers")
Versions = tuple[int, int]
# Parity rows, opset and IR version, and what the tokenizer was compared with (None without a comparison).
Exported = tuple[Sequence[ParityRow], Versions, "str | None"]


@dataclass(frozen=True)
class ExportConfig:
    """How the original is exported. `batch`: the batch of images, None for dynamic; the batch of other inputs is always
    dynamic. `in_graph`: the graph takes pixels and includes the preprocessing."""

    name: str
    opset: int
    batch: int | None
    in_graph: bool


def export(
    reference_model: ReferenceModel, config: ExportConfig, out: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Write the graph or graphs, export.json (facts and parity of the export), and labels.txt if the model has labels.

    Raises:
        ExportError: a graph does not compute the same function as the model.
        CheckpointError: a tokenizer gives other tokens or texts than the one in transformers.
    """
    make = _OF_SEVERAL_GRAPHS.get(reference_model.task, _export_image_model)
    parity, (opset, ir_version), compared = make(reference_model, config, out, progress)
    if reference_model.labels:
        (out / LABELS_FILE).write_text("".join(f"{label}\n" for label in reference_model.labels), encoding="utf-8")
    files = graphs_in(out).values()
    facts = {
        "model": reference_model.facts(),
        "opset": opset,
        "ir_version": ir_version,
        "bytes": sum(file.stat().st_size for file in files),
        "parity": [row.facts() for row in parity],
        "tolerance": TOLERANCE,
        **({"tokenizer": compared} if compared is not None else {}),
    }
    write_json(out / "export.json", facts)
    return facts


def _save(graphs: Mapping[str, ir.Model], out: Path, metadata: GraphMetadata | None = None) -> Versions:
    """Write each graph under its name, with `metadata` if given; returns the versions of the first graph."""
    for part, graph in graphs.items():
        if metadata is not None:
            set_metadata(graph, metadata)
        save_graph(graph, out / f"{part}.onnx")
    first = next(iter(graphs.values()))
    return first.opset_imports[""], first.ir_version or 0


def _image_part(
    model: ReferenceModel, config: ExportConfig, module: nn.Module, part: str, outputs: Sequence[str]
) -> ir.Model:
    """The graph that takes the image, in a model with several graphs."""
    return torch_onnx.export_graph(
        module,
        name=f"{config.name}_{part}",
        preprocess=model.images,
        image_size=model.image_size,
        opset=config.opset,
        batch=config.batch,
        in_graph=config.in_graph,
        outputs=outputs,
    )


# --- Image-to-text: two graphs, compared with PyTorch, and the tokenizer ----------------------------------------------


def _export_image_text(model: ReferenceModel, config: ExportConfig, out: Path, progress: Progress) -> Exported:
    progress("load the model", 0, 4)
    module, spec, sequence = load.load_model(model.source).module, model.postprocess, model.sequence
    assert isinstance(module, image_text.ImageText) and isinstance(spec, TextSpec) and sequence is not None
    assert model.tokenizer is not None
    shutil.copyfile(model.tokenizer, out / TOKENIZER_FILE)
    progress("check the tokenizer", 1, 4)
    compared = compare_writers(model.tokenizer, spec, sequence)
    progress("export to ONNX", 2, 4)
    graphs = export_image_text(
        module,
        name=config.name,
        preprocess=model.images,
        postprocess=spec,
        sequence=sequence,
        opset=config.opset,
        batch=config.batch,
        in_graph=config.in_graph,
    )
    versions = _save({ENCODER: graphs[ENCODER], DECODER_STEP: graphs[DECODER_STEP]}, out)
    progress("compare with the original", 3, 4)
    encoder, step = (out / f"{part}.onnx" for part in (ENCODER, DECODER_STEP))
    parity = check_text_parity(encoder, step, module, model.images, sequence, fixed_batch=config.batch)
    progress("compare with the original", 4, 4)
    return parity, versions, compared


# --- Promptable segmentation: an image encoder and a decoder of prompts, each compared with PyTorch -------------------


Feeds = list[tuple[dict[str, Array], dict[str, Array]]]


def _export_prompted(model: ReferenceModel, config: ExportConfig, out: Path, progress: Progress) -> Exported:
    progress("load the model", 0, 4)
    original = load.load_model(model.source)
    module, spec = original.module, model.postprocess
    assert isinstance(module, prompted.Prompted) and isinstance(spec, PromptSpec)
    embedded = prompted.embeddings_of(module, model.channels, model.image_size)
    progress("export the image encoder", 1, 4)
    encoder = _image_part(model, config, module.image_encoder, IMAGE_ENCODER, [tensor.name for tensor in embedded])
    progress("export the prompt decoder", 2, 4)
    decoder = torch_onnx.export_tensors_graph(
        module.prompt_decoder,
        name=f"{config.name}_{PROMPT_DECODER}",
        inputs=[*embedded, *prompt_tensors(spec)],
        outputs=[tensor.name for tensor in model.outputs],
        opset=config.opset,
    )
    metadata = GraphMetadata(config.name, model.task, model.images, postprocess=spec)
    versions = _save({IMAGE_ENCODER: encoder, PROMPT_DECODER: decoder}, out, metadata)
    progress("compare with the original", 3, 4)
    with torch_runner(original) as reference:
        assert isinstance(reference, flow.FlowRunner)
        images, prompts = _images_and_prompts(reference, model, spec, config)
    parity = check_outputs(out / f"{IMAGE_ENCODER}.onnx", images, IMAGE_ENCODER)
    parity += check_outputs(out / f"{PROMPT_DECODER}.onnx", prompts, PROMPT_DECODER)
    progress("compare with the original", 4, 4)
    return parity, versions, None


def _images_and_prompts(
    reference: flow.FlowRunner, model: ReferenceModel, spec: PromptSpec, config: ExportConfig
) -> tuple[Feeds, Feeds]:
    """Seeded images, and prompts for their embeddings, each with the original's outputs."""
    generator, parts = np.random.default_rng(SEED), reference.linked.runners
    images: Feeds = []
    prompts: Feeds = []
    for batch in BATCHES if config.batch is None else (config.batch,) * len(BATCHES):
        shape = (batch, *model.image_size, model.channels)
        pixels = generator.integers(0, 256, shape, dtype=np.uint8)
        tensor = preprocess.normalise(pixels, model.images)
        embedded = parts[IMAGE_ENCODER].infer({"image": tensor})
        images.append(({"image": pixels if config.in_graph else tensor}, embedded))
        points = generator.uniform(0, min(model.image_size), (batch, spec.slots, 2)).astype(np.float32)
        labels = generator.integers(-1, BOTTOM_RIGHT + 1, (batch, spec.slots))
        for row, used in zip(labels, generator.integers(1, spec.slots, batch), strict=True):
            row[used:] = EMPTY
        feeds = {**embedded, "points": points, "labels": labels}
        prompts.append((feeds, parts[PROMPT_DECODER].infer(feeds)))
    return images, prompts


# --- An encoder-decoder: two graphs, compared with step-by-step decoding in PyTorch -----------------------------------


def _export_sequence(model: ReferenceModel, config: ExportConfig, out: Path, progress: Progress) -> Exported:
    progress("load the model", 0, 3)
    module = load.load_model(model.source).module
    assert isinstance(module, Transformer)
    progress("export to ONNX", 1, 3)
    graphs = export_sequence(module, name=config.name, opset=config.opset)
    metadata = GraphMetadata(config.name, "sequence", None, sequence=model.sequence)
    versions = _save({ENCODER: graphs[ENCODER], DECODER_STEP: graphs[DECODER_STEP]}, out, metadata)
    progress("compare with the original", 2, 3)
    parity = check_sequence_parity(out / f"{ENCODER}.onnx", out / f"{DECODER_STEP}.onnx", module)
    progress("compare with the original", 3, 3)
    return parity, versions, None


# --- Image and text encoder: one graph each, compared with PyTorch, and the tokenizer, compared with transformers' ----


def _export_towers(model: ReferenceModel, config: ExportConfig, out: Path, progress: Progress) -> Exported:
    progress("load the model", 0, 5)
    original = load.load_model(model.source)
    module, spec = original.module, model.postprocess
    assert isinstance(module, towers.Towers) and isinstance(spec, ZeroShotSpec | OpenVocabularySpec)
    assert model.tokenizer is not None
    shutil.copyfile(model.tokenizer, out / TOKENIZER_FILE)
    progress("check the tokenizer", 1, 5)
    compared = compare_tokenizers(model.tokenizer, spec)
    progress("export the image encoder", 2, 5)
    outputs = [{IMAGE_FEATURES: "features"}.get(tensor.name, tensor.name) for tensor in original.signature.outputs[:-1]]
    image = _image_part(model, config, module.image_tower, IMAGE_TOWER, outputs)
    progress("export the text encoder", 3, 5)
    name = f"{config.name}_{TEXT_TOWER}"
    text = torch_onnx.export_text_graph(module.text_tower, name=name, length=spec.length, opset=config.opset)
    metadata = GraphMetadata(config.name, model.task, model.images, postprocess=spec)
    versions = _save({IMAGE_TOWER: image, TEXT_TOWER: text}, out, metadata)
    progress("compare with the original", 4, 5)
    with torch_runner(original) as reference:
        assert isinstance(reference, flow.FlowRunner)
        parts = reference.linked.runners
        asked = ask(parts[IMAGE_TOWER], model.images, config.batch)
        rows = check_graph(out / f"{IMAGE_TOWER}.onnx", asked, model.images)
        parity = [dataclasses.replace(row, graph=IMAGE_TOWER) for row in rows]
        texts = _texts(spec, module.text_tower.config.vocabulary, module.text_tower.config.end)
        feeds = [
            ({"text": tokens}, {"features": parts[TEXT_TOWER].infer({"text": tokens})["features"]}) for tokens in texts
        ]
        parity += check_outputs(out / f"{TEXT_TOWER}.onnx", feeds, TEXT_TOWER)
    progress("compare with the original", 5, 5)
    return parity, versions, compared


def _texts(spec: ReadsTexts, vocabulary: int, end: int) -> list[np.ndarray]:
    """Seeded random tokens at three batch sizes, with random lengths and padding."""
    generator, texts = np.random.default_rng(SEED), []
    for batch in BATCHES:
        tokens = generator.integers(0, vocabulary, (batch, spec.length))
        for row, last in zip(tokens, generator.integers(1, spec.length, batch), strict=True):
            row[last], row[last + 1 :] = min(end, vocabulary - 1), spec.pad
        texts.append(tokens)
    return texts


_OF_SEVERAL_GRAPHS: Mapping[Task, Callable[[ReferenceModel, ExportConfig, Path, Progress], Exported]] = {
    "zero-shot": _export_towers,
    "open-vocabulary-detection": _export_towers,
    "promptable-segmentation": _export_prompted,
    "image-to-text": _export_image_text,
    "sequence": _export_sequence,
}


# --- Models with one graph: a PyTorch module, or the user's ONNX file -------------------------------------------------


def _export_image_model(
    reference_model: ReferenceModel, config: ExportConfig, out: Path, progress: Progress
) -> Exported:
    progress("load the model", 0, 3)
    original: family.LoadedModel | None = (
        None if is_onnx(reference_model.source) else load.load_model(reference_model.source)
    )
    progress("export to ONNX", 1, 3)
    if original is None:
        graph = _imported(reference_model, config)
    else:
        images = reference_model.channels, reference_model.image_size, config.batch, reference_model.inputs
        seconds = torch_onnx.expected_seconds(original.module, *images)
        if seconds > ESTIMATED_SECONDS:
            progress(f"export to ONNX: about {seconds:.0f} s on an idle machine", 1, 3)
        graph = torch_onnx.export_graph(
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
            further=reference_model.inputs,
        )
    batch = fixed_batch(graph_spec(graph, MODEL_FILE))
    if batch not in (None, config.batch):
        raise ExportError(
            f"the exported graph of {reference_model.name} contains the batch size {batch} as a constant",
            found=f"batch {batch}",
            expected=f"batch {config.batch or 'dynamic'}",
            fix=FREE_BATCH,
        )
    metadata = get_metadata(graph, MODEL_FILE)
    given = bound.constants(reference_model.source.bind)
    constants = tuple(bound.without_folders(given)) or metadata.bound
    set_metadata(graph, dataclasses.replace(metadata, labels=reference_model.labels, bound=constants))
    versions = _save({"model": graph}, out)
    del graph
    progress("compare with the original", 2, 3)
    with reference_runner(reference_model.source, original=original) as reference:
        asked = ask(reference, reference_model.images, batch)
    parity = check_graph(out / MODEL_FILE, asked, reference_model.images)
    progress("compare with the original", 3, 3)
    return parity, versions, None


def _imported(reference_model: ReferenceModel, config: ExportConfig) -> ir.Model:
    """The user's ONNX file in the canonical form of later stages, with its preprocessing."""
    assert reference_model.source.model is not None
    found = graph_of(reference_model.source)
    if found.takes_pixels and not config.in_graph:
        raise GraphError(
            f"{reference_model.source.model} takes pixels: it includes its preprocessing",
            found="export.preprocess: false, or --no-preprocess",
            expected="export.preprocess: true",
            fix="export the original model with --no-preprocess",
        )
    export_normalise(found.model, opset=config.opset)
    if config.in_graph and not found.takes_pixels:
        inputs.take_pixels(found.model, reference_model.images)
    found.model.graph.name = config.name
    set_metadata(
        found.model,
        GraphMetadata(
            config.name,
            reference_model.task,
            reference_model.images,
            postprocess=reference_model.postprocess,
            bound=found.metadata.bound if found.metadata else (),
        ),
    )
    return found.model


def export_step(reference_model: ReferenceModel, config: ExportConfig) -> Step:
    """The step that exports the float graph or graphs of the original."""

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


# --- Import of a bare ONNX file from any exporter as the float graph of the other stages ------------------------------


OPSET = 20


def import_external(
    file: Path, out: Path, progress: Progress = silent, image_size: tuple[int, int] | None = None
) -> tuple[Path, tuple[str, ...]]:
    """Write the same files as `vitdeploy export FILE`, at the file's own batch; errors of the export propagate.

    `image_size` is (height, width), for a file with a dynamic size.

    Returns: the path of the graph, and notes on what was assumed about the file.
    """
    reject_quantized(admit.admit_graph(file), str(file))
    reference_model, batch = settle_batch(find_reference_model(source.Source(model=str(file), image_size=image_size)))
    export(reference_model, ExportConfig(file.stem[:64], OPSET, batch, True), out, progress)
    return out / MODEL_FILE, reference_model.notes


# --- The batch size of the export: an ONNX file may have a fixed one, or work only at some ----------------------------


# "auto": dynamic, or that of the file.
Asked = Literal["auto", "dynamic"] | int


def settle_batch(reference_model: ReferenceModel, asked: Asked = "auto") -> tuple[ReferenceModel, int | None]:
    """The original at the batch size of its export, and that batch size; None if it is dynamic.

    Raises:
        CapabilityError: an ONNX file does not work at the requested batch size. ExportError: it works at none.
    """
    batch = asked if isinstance(asked, int) else None
    if not is_onnx(reference_model.source):
        return reference_model, batch
    graph = graph_of(dataclasses.replace(reference_model.source, only_batch=None))
    fixed = fixed_batch(graph_spec(graph.model, ""))
    if fixed is not None:
        return _at_one_of(reference_model, (fixed,), asked, "the batch size is fixed")
    if graph.metadata is None:  # otherwise the export compared it with its original
        with reference_runner(reference_model.source) as runner:
            function = batches.one_function(runner, reference_model.images)
        if function.sizes:
            return _at_one_of(reference_model, function.sizes, asked, function.why)
    return _at_batch(reference_model, batch), batch


def _at_batch(reference_model: ReferenceModel, batch: int | None) -> ReferenceModel:
    return dataclasses.replace(reference_model, source=dataclasses.replace(reference_model.source, only_batch=batch))


def _at_one_of(
    reference_model: ReferenceModel, sizes: tuple[int, ...], asked: Asked, why: str
) -> tuple[ReferenceModel, int]:
    """The original at one of these batch sizes: the requested one, or the smallest."""
    batch = asked if isinstance(asked, int) else sizes[0]
    shown = ", ".join(map(str, sizes))
    if batch not in sizes or asked == "dynamic":
        raise CapabilityError(
            f"{reference_model.name} cannot be exported at batch {asked}",
            found=f"a model that works at batch {shown} only: {why}",
            expected=f"batch {sizes[0]}",
            fix=f"--batch {sizes[0]}, in a recipe export.batch: {sizes[0]} or no such key; or export the model again "
            "with a dynamic batch",
        )
    note = f"{reference_model.name} works at batch {shown} only ({why}); using batch {batch}"
    return dataclasses.replace(_at_batch(reference_model, batch), notes=(*reference_model.notes, note)), batch

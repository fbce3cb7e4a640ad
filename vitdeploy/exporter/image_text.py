"""An encoder-decoder of images as two ONNX graphs, and the proof that writing with them is the model.

    encoder        image, as of every image model
                -> for each decoder block i: cross_key_i, cross_value_i [batch, heads, places, head_width]
    decoder_step   token int64 [batch, 1], every cross_key_i and cross_value_i, and for each decoder block:
                   past_key_i, past_value_i [batch, heads, past_length, head_width]; past_length is 0 at the first step
                -> logits [batch, vocabulary],
                   and for each block: present_key_i, present_value_i [batch, heads, past_length + 1, head_width]

They are those of an encoder-decoder of tokens (`exporter.sequence`), but for the mask: an image has no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from vitdeploy.errors import EngineError, ExportError, TensorError
from vitdeploy.exporter.parity import BATCHES, SEED, TOLERANCE, Parity, all_but_constant, relative_difference
from vitdeploy.exporter.sequence import DECODER_STEP, ENCODER, PAST_LENGTH, copy_sizes
from vitdeploy.exporter.torch_onnx import export_graph, tidy, traced
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.files import BATCH, GraphMetadata, set_metadata
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise as to_tensor
from vitdeploy.runtime.runner import Array
from vitdeploy.runtime.text_decoder import TextDecoder
from vitdeploy.spec import PreprocessSpec, SequenceSpec, TextSpec

# torch.export takes sizes 0 and 1 for constants, and equal sizes for one axis.
EXAMPLE_BATCH, EXAMPLE_PAST = 3, 7
# Runtimes compute in blocks of up to 16, and a block has to be passed to see its seam.
STEPS = 20

Pair: TypeAlias = tuple[Tensor, Tensor]


class ImageTextModel(Protocol):
    """A torch module in these ways, as `models.external.image_text.ImageText` is."""

    def __call__(self, image: Tensor, target: Tensor, /) -> Tensor: ...
    def encode(self, image: Tensor) -> Sequence[Pair]: ...


@dataclass(frozen=True)
class ImageTextParts:
    """A model, and the modules that are its graphs: `encoder` takes the image; `step` the token, and lists of the keys
    and values of cross-attention and of the tokens before."""

    model: ImageTextModel
    encoder: nn.Module
    step: nn.Module


def export_image_text(
    parts: ImageTextParts,
    *,
    name: str,
    preprocess: PreprocessSpec,
    postprocess: TextSpec,
    sequence: SequenceSpec,
    opset: int,
    batch: int | None,
    in_graph: bool,
) -> dict[str, ir.Model]:
    """The graphs "encoder" and "decoder_step", with their metadata.

    Args:
        batch: of images, None for a dynamic one; that of the step is dynamic, as a search has several texts an image.

    Raises:
        ExportError: the model cannot be exported, or writes too few tokens to tell its axes apart.
    """
    size = preprocess.crop
    with torch.no_grad():
        cross = [
            tensor
            for pair in parts.model.encode(torch.zeros(EXAMPLE_BATCH, preprocess.channels, *size))
            for tensor in pair
        ]
    blocks = len(cross) // 2
    encoder = export_graph(
        parts.encoder,
        name=f"{name}_{ENCODER}",
        preprocess=preprocess,
        image_size=size,
        opset=opset,
        batch=batch,
        in_graph=in_graph,
        outputs=names("cross", blocks),
    )
    step = _export_step(parts.step, cross, sequence, name=f"{name}_{DECODER_STEP}", opset=opset)
    graphs = {ENCODER: encoder, DECODER_STEP: step}
    for graph in graphs.values():
        metadata = GraphMetadata(name, "image-to-text", preprocess, postprocess=postprocess, sequence=sequence)
        set_metadata(graph, metadata)
    return graphs


def names(kind: str, blocks: int) -> list[str]:
    """The tensors of one kind, key and value of each block."""
    return [f"{kind}_{part}_{i}" for i in range(blocks) for part in ("key", "value")]


def _export_step(step: nn.Module, cross: list[Tensor], sequence: SequenceSpec, *, name: str, opset: int) -> ir.Model:
    longest, blocks = sequence.max_length, len(cross) // 2
    if longest <= 2:
        raise ExportError(
            f"{name} writes too few tokens to be exported with a dynamic length",
            found=f"{longest}",
            wanted="at least 3",
            fix="raise max_length in generation_config.json",
        )
    past = [
        tensor.new_zeros(EXAMPLE_BATCH, tensor.shape[1], _example_past(longest), tensor.shape[3]) for tensor in cross
    ]
    batch, past_length = torch.export.Dim(BATCH), torch.export.Dim(PAST_LENGTH, max=longest - 1)
    graph = traced(
        _StepIn(step),
        (torch.zeros(EXAMPLE_BATCH, 1, dtype=torch.int64), cross, past),
        {
            "token": {0: batch},
            "cross": [{0: batch}] * len(cross),
            "past": [{0: batch, 2: past_length}] * len(cross),
        },
        opset,
        ["token", *names("cross", blocks), *names("past", blocks)],
        ["logits", *names("present", blocks)],
        name,
    )
    tidy(graph, prefix="model")
    copy_sizes(graph)
    declared = [value.shape for value in graph.graph.outputs]
    normalise(graph)
    for value, shape in zip(graph.graph.outputs, declared, strict=True):
        value.shape = shape  # with the names of the axes, which passes may lose
    graph.graph.name = name
    return graph


def _example_past(longest: int) -> int:
    """A length that no other axis of the example has, and that the model has positions for."""
    return min(EXAMPLE_PAST, longest - 1)


class _StepIn(nn.Module):
    """The step under the attribute name of all models."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, cross: list[Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.model(token, cross, past)
        return found


@dataclass(frozen=True, kw_only=True)
class TextParity(Parity):
    """max|a - b| / max|b| over the logits of all steps; a the two graphs on ONNX Runtime, b the PyTorch model, which
    sees all tokens at once."""

    steps: int


def check_text_parity(
    encoder: Path,
    decoder_step: Path,
    model: ImageTextModel,
    preprocess: PreprocessSpec,
    sequence: SequenceSpec,
    *,
    fixed_batch: int | None = None,
) -> list[TextParity]:
    """Write greedily through both graphs, and compare each step with the model that sees all tokens at once, on seeded
    random pixels at batch 1, 2 and 5, or thrice at a fixed one. No text ends early.

    Raises:
        ExportError: a batch that does not run, or a difference above 1e-4.
    """
    generator, rows = np.random.default_rng(SEED), list[TextParity]()
    answers: list[dict[str, np.ndarray]] = []
    with (
        OnnxRuntimeRunner(encoder, name="the exported encoder") as first,
        OnnxRuntimeRunner(decoder_step, name="the exported decoder step") as second,
    ):
        decoder = TextDecoder(first, second, sequence)
        decoder.end = -1
        for batch in BATCHES if fixed_batch is None else (fixed_batch,) * len(BATCHES):
            pixels = generator.integers(0, 256, (batch, *preprocess.crop, preprocess.channels), dtype=np.uint8)
            tensor = to_tensor(pixels, preprocess)
            feed = pixels if first.inputs[0].dtype == "uint8" else tensor
            try:
                tokens, ours = decoder.decode_with_logits(feed, STEPS)
            except (EngineError, TensorError) as error:
                raise ExportError(
                    f"the exported graphs do not run at batch {batch}",
                    found=error.found,
                    wanted="every batch size",
                    fix="in the model, take sizes from the tensor",
                ) from None
            theirs = _whole(model, tensor, tokens, sequence.start)
            answers.append({"logits": theirs.reshape(-1, theirs.shape[-1])})
            difference = relative_difference(ours, theirs)
            rows.append(TextParity(batch=batch, max_relative_difference=difference, steps=tokens.shape[1]))
    worst = rows[int(np.argmax([row.max_relative_difference for row in rows]))]  # a NaN, where there is one
    if not worst.max_relative_difference <= TOLERANCE:
        raise ExportError(
            "the exported graphs are not the same function as the original",
            found=f"max|a-b| / max|b| = {worst.max_relative_difference:.2e} at batch {worst.batch}",
            wanted=f"at most {TOLERANCE:.0e}",
        )
    unproven = all_but_constant(answers)
    return [replace(row, unproven=unproven) for row in rows]


def _whole(model: ImageTextModel, image: Array, tokens: Array, start: int) -> Array:
    """The model's logits [b, t, v] for these tokens, without a cache."""
    target = np.concatenate([np.full((len(tokens), 1), start, np.int64), tokens[:, :-1]], axis=1)
    with torch.inference_mode():
        found: Array = model(torch.from_numpy(image), torch.from_numpy(target)).numpy()
    return found

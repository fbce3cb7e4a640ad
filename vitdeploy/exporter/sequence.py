"""Export an encoder-decoder as two ONNX graphs, and compare decoding through them with the model.

`encoder` runs once per source. `decoder_step` runs once per target token, on the keys and values of earlier steps:

    encoder        source int64 [batch, source_length]
                -> memory [batch, source_length, width], source_mask [batch, 1, 1, source_length],
                   and for each decoder block i: cross_key_i, cross_value_i [batch, heads, source_length, head_width]
    decoder_step   token int64 [batch, 1], source_mask, every cross_key_i and cross_value_i, and for each decoder block:
                   past_key_i, past_value_i [batch, heads, past_length, head_width]; past_length is 0 at the first step
                -> logits [batch, vocabulary],
                   and for each block: present_key_i, present_value_i [batch, heads, past_length + 1, head_width]

All floats are float32. The token's position is past_length, so that no caller can pass a wrong one. Each block has its
own cache tensors instead of one stack, which a runtime would have to split and join at every step.

If the source is an image, the encoder takes it like every image model and returns only the keys and values, and the
step has no source_mask: an image has no padding.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from vitdeploy.errors import EngineError, ExportError, TensorError
from vitdeploy.exporter.parity import BATCHES, SEED, TOLERANCE, ParityRow, all_but_constant, relative_difference
from vitdeploy.exporter.torch_onnx import ModelIn, export_graph, exported
from vitdeploy.graph.io.files import BATCH, GraphMetadata, set_metadata
from vitdeploy.runtime import ort, runner, text_decoder
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.sequence import SequenceRunner
from vitdeploy.runtime.tokenizer import TextSpec
from vitdeploy.spec import PreprocessSpec, SequenceSpec

ENCODER, DECODER_STEP = "encoder", "decoder_step"
SOURCE_LENGTH, PAST_LENGTH = "source_length", "past_length"
# torch.export treats sizes 0 and 1 as constants, and equal sizes as the same axis.
EXAMPLE_BATCH, EXAMPLE_SOURCE, EXAMPLE_PAST = 3, 5, 7
# Lengths and steps for the parity check: runtimes compute in blocks of up to 16, so lengths must exceed one block.
SOURCE_LENGTHS, STEPS = (1, 4, 19), 20


# The keys and values of one attention.
KeyValue: TypeAlias = tuple[Tensor, Tensor]


class _Encoder(nn.Module):
    """The encoder of a model whose `encode` returns the keys and values of each decoder block, perhaps after other
    tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, source: Tensor) -> list[Tensor]:
        encoded = self.model.encode(source)
        *others, cross = encoded if isinstance(encoded, tuple) else (encoded,)
        return [*others, *_flat(cross)]


class _DecoderStep(nn.Module):
    """One decoder step. Arguments: the token, the further inputs of `step`, then the lists of keys and values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, token: Tensor, *read: Any) -> list[Tensor]:
        *others, cross, past = read
        logits, present = self.model.step(token, *others, _paired(cross), _paired(past))
        return [logits, *_flat(present)]


class _MaskedStep(_DecoderStep):
    """The same with a source mask. torch.export names axes after the arguments, and so do the graphs."""

    def forward(self, token: Tensor, mask: Tensor, cross: list[Tensor], past: list[Tensor]) -> list[Tensor]:
        return super().forward(token, mask, cross, past)


def _flat(pairs: Sequence[KeyValue]) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]


def _paired(flat: list[Tensor]) -> list[KeyValue]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _names(kind: str, blocks: int) -> list[str]:
    return [f"{kind}_{part}_{i}" for i in range(blocks) for part in ("key", "value")]


# --- Export -----------------------------------------------------------------------------------------------------------


def export_sequence(module: nn.Module, *, name: str, opset: int) -> dict[str, ir.Model]:
    """Return the graphs "encoder" and "decoder_step" of `module`, named `<name>_encoder` and `<name>_decoder_step`.

    `module` has the `config`, `encode` and `step` of `models.architectures.transformer.Transformer`.

    Raises:
        ExportError: the model cannot be exported, or its max_length is too small to distinguish its axes.
    """
    config: Any = module.config
    if config.max_length <= EXAMPLE_PAST:
        raise ExportError(
            f"max_length of {name} is too small for an export with dynamic lengths",
            found=f"max_length {config.max_length}",
            expected=f"at least {EXAMPLE_PAST + 1}",
            fix="build the model with a larger max_length: its weights do not depend on it",
        )
    blocks, head_width = config.decoder_depth, config.width // config.heads
    batch = torch.export.Dim(BATCH)
    source_length = torch.export.Dim(SOURCE_LENGTH, max=config.max_length)
    past_length = torch.export.Dim(PAST_LENGTH, max=config.max_length - 1)

    def caches(length: int) -> list[Tensor]:
        return [torch.zeros(EXAMPLE_BATCH, config.heads, length, head_width) for _ in range(2 * blocks)]

    encoder = exported(
        _Encoder(module),
        (torch.zeros(EXAMPLE_BATCH, EXAMPLE_SOURCE, dtype=torch.int64),),
        {"source": {0: batch, 1: source_length}},
        opset,
        ["source"],
        ["memory", "source_mask", *_names("cross", blocks)],
        f"{name}_{ENCODER}",
        lengths=True,
    )
    step = exported(
        _MaskedStep(module),
        (
            torch.zeros(EXAMPLE_BATCH, 1, dtype=torch.int64),
            torch.zeros(EXAMPLE_BATCH, 1, 1, EXAMPLE_SOURCE),
            caches(EXAMPLE_SOURCE),
            caches(EXAMPLE_PAST),
        ),
        {
            "token": {0: batch},
            "mask": {0: batch, 3: source_length},
            "cross": [{0: batch, 2: source_length}] * (2 * blocks),
            "past": [{0: batch, 2: past_length}] * (2 * blocks),
        },
        opset,
        ["token", "source_mask", *_names("cross", blocks), *_names("past", blocks)],
        ["logits", *_names("present", blocks)],
        f"{name}_{DECODER_STEP}",
        lengths=True,
    )
    return {ENCODER: encoder, DECODER_STEP: step}


def export_image_text(
    module: Any,
    *,
    name: str,
    preprocess: PreprocessSpec,
    postprocess: TextSpec,
    sequence: SequenceSpec,
    opset: int,
    batch: int | None,
    in_graph: bool,
) -> dict[str, ir.Model]:
    """Return the graphs "encoder" and "decoder_step" of an image-to-text model, with their metadata.

    `module` has the `encode` and `step` of `models.external.image_text.ImageText`.

    Args:
        batch: the batch of images, None if dynamic; the step's is always dynamic, as a search has several texts per
            image.

    Raises:
        ExportError: the model cannot be exported, or writes too few tokens to distinguish its axes.
    """
    size, longest = preprocess.crop, sequence.max_length
    with torch.no_grad():
        cross = _flat(module.encode(torch.zeros(EXAMPLE_BATCH, preprocess.channels, *size)))
    blocks = len(cross) // 2
    encoder = export_graph(
        _Encoder(module),
        name=f"{name}_{ENCODER}",
        preprocess=preprocess,
        image_size=size,
        opset=opset,
        batch=batch,
        in_graph=in_graph,
        outputs=_names("cross", blocks),
    )
    if longest <= 2:
        raise ExportError(
            f"{name}_{DECODER_STEP} writes too few tokens to be exported with a dynamic length",
            found=f"{longest}",
            expected="at least 3 tokens",
            fix="raise max_length in generation_config.json",
        )
    # A length that differs from all other axes of the example and is within the model's positions.
    length = min(EXAMPLE_PAST, longest - 1)
    past = [tensor.new_zeros(EXAMPLE_BATCH, tensor.shape[1], length, tensor.shape[3]) for tensor in cross]
    open_batch, past_length = torch.export.Dim(BATCH), torch.export.Dim(PAST_LENGTH, max=longest - 1)
    opened = {0: open_batch}, [{0: open_batch}] * len(cross), [{0: open_batch, 2: past_length}] * len(cross)
    step = exported(
        ModelIn(_DecoderStep(module)),
        (torch.zeros(EXAMPLE_BATCH, 1, dtype=torch.int64), cross, past),
        {"inputs": opened},
        opset,
        ["token", *_names("cross", blocks), *_names("past", blocks)],
        ["logits", *_names("present", blocks)],
        f"{name}_{DECODER_STEP}",
        lengths=True,
    )
    metadata = GraphMetadata(name, "image-to-text", preprocess, postprocess=postprocess, sequence=sequence)
    for graph in (encoder, step):
        set_metadata(graph, metadata)
    return {ENCODER: encoder, DECODER_STEP: step}


# --- Parity -----------------------------------------------------------------------------------------------------------


def check_sequence_parity(encoder: Path, decoder_step: Path, module: nn.Module) -> list[ParityRow]:
    """Decode greedily through both graphs, and compare each step with the model run on all target tokens at once.

    Sources are seeded random tokens of several lengths with padding of several widths, at batch 1, 2 and 5. The target
    never ends early: every run goes through the same number of steps, the first with an empty cache.

    Raises:
        ExportError: a batch or length that does not run, a difference above 1e-4, or a token that differs from the
            model's although its best logit leads by more than that.
    """
    config: Any = module.config
    module.eval()
    generator = np.random.default_rng(SEED)
    lengths = [length for length in SOURCE_LENGTHS if length <= config.max_length]
    words = np.delete(np.arange(config.source_vocabulary), config.pad)
    rows: list[ParityRow] = []
    answers: list[dict[str, runner.Array]] = []
    with (
        ort.OnnxRuntimeRunner(encoder, name="the exported encoder") as first,
        ort.OnnxRuntimeRunner(decoder_step, name="the exported decoder step") as second,
    ):
        decoder = SequenceRunner(first, second, SequenceSpec(config.start, -1, config.pad, config.max_length, None))
        decoder.load()
        for batch in BATCHES:
            for length in lengths:
                source = generator.choice(words, (batch, length))
                source[np.arange(length) >= generator.integers(1, length + 1, (batch, 1))] = config.pad
                where = f"at batch {batch} and source length {length}"
                tokens, ours = _decoded(decoder, source, where, "every batch and length")
                theirs = _whole(module, source, tokens, config.start)
                difference = relative_difference(ours, theirs)
                rows.append(ParityRow(batch, difference, length, tokens.shape[1]))
                _refuse_different(difference, where, "the PyTorch model")
                _refuse_other_tokens(tokens, theirs, where)
                answers.append({"logits": theirs.reshape(-1, theirs.shape[-1])})
    unproven = all_but_constant(answers)
    return [replace(row, unproven=unproven) for row in rows]


def check_text_parity(
    encoder: Path,
    decoder_step: Path,
    model: Any,
    preprocess: PreprocessSpec,
    sequence: SequenceSpec,
    *,
    fixed_batch: int | None = None,
) -> list[ParityRow]:
    """Decode greedily through both graphs, and compare each step with the model run on all tokens at once, on seeded
    random pixels at batch 1, 2 and 5, or three times at a fixed batch. No text ends early.

    Raises:
        ExportError: a batch that does not run, or a difference above 1e-4.
    """
    generator, rows = np.random.default_rng(SEED), list[ParityRow]()
    answers: list[dict[str, runner.Array]] = []
    with (
        ort.OnnxRuntimeRunner(encoder, name="the exported encoder") as first,
        ort.OnnxRuntimeRunner(decoder_step, name="the exported decoder step") as second,
    ):
        decoder = text_decoder.TextRunner(first, second, replace(sequence, end=-1))
        decoder.load()
        for batch in BATCHES if fixed_batch is None else (fixed_batch,) * len(BATCHES):
            pixels = generator.integers(0, 256, (batch, *preprocess.crop, preprocess.channels), dtype=np.uint8)
            tensor = normalise(pixels, preprocess)
            feed = pixels if first.inputs[0].dtype == "uint8" else tensor
            tokens, ours = _decoded(decoder, feed, f"at batch {batch}", "every batch size")
            theirs = _whole(model, tensor, tokens, sequence.start)
            answers.append({"logits": theirs.reshape(-1, theirs.shape[-1])})
            difference = relative_difference(ours, theirs)
            rows.append(ParityRow(batch, difference, steps=tokens.shape[1]))
    worst = rows[int(np.argmax([row.max_relative_difference for row in rows]))]  # a NaN, where there is one
    _refuse_different(worst.max_relative_difference, f"at batch {worst.batch}", "the original")
    unproven = all_but_constant(answers)
    return [replace(row, unproven=unproven) for row in rows]


def _decoded(decoder: Any, source: runner.Array, where: str, expected: str) -> tuple[runner.Array, runner.Array]:
    """Return tokens and logits; raises ExportError if the graphs do not run."""
    try:
        tokens, logits = decoder.decode_with_logits(source, STEPS)
    except (EngineError, TensorError) as error:
        raise ExportError(
            f"the exported graphs do not run {where}",
            found=error.found,
            expected=expected,
            fix="in the model, read sizes from the tensor's shape",
        ) from None
    return tokens, logits


def _whole(model: Any, source: runner.Array, tokens: runner.Array, start: int) -> runner.Array:
    """Return the model's logits [b, t, v] for the decoded tokens, computed without a cache."""
    target = np.concatenate([np.full((len(tokens), 1), start, np.int64), tokens[:, :-1]], axis=1)
    with torch.inference_mode():
        logits: runner.Array = model(torch.from_numpy(source), torch.from_numpy(target)).numpy()
    return logits


def _refuse_different(difference: float, where: str, original: str) -> None:
    if not difference <= TOLERANCE:
        raise ExportError(
            f"the exported graphs are not the same function as {original}",
            found=f"max|a-b| / max|b| = {difference:.2e} {where}",
            expected=f"at most {TOLERANCE:.0e}",
        )


def _refuse_other_tokens(tokens: runner.Array, logits: runner.Array, where: str) -> None:
    lead = logits.max(axis=-1) - np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    if (lead > 2 * TOLERANCE * np.abs(logits).max()).any():
        raise ExportError(
            "decoding through the exported graphs gives different tokens from the PyTorch model",
            found=f"{int((lead > 0).sum())} of {tokens.size} tokens {where}",
            expected="the token with the largest logit",
        )

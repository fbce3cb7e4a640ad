"""An encoder-decoder as two ONNX graphs, and the proof that decoding with them is the model.

`encoder` runs once a source. `decoder_step` runs once a target token, on the keys and values that earlier steps gave:

    encoder        source int64 [batch, source_length]
                -> memory [batch, source_length, width], source_mask [batch, 1, 1, source_length],
                   and for each decoder block i: cross_key_i, cross_value_i [batch, heads, source_length, head_width]
    decoder_step   token int64 [batch, 1], source_mask, every cross_key_i and cross_value_i, and for each decoder block:
                   past_key_i, past_value_i [batch, heads, past_length, head_width]; past_length is 0 at the first step
                -> logits [batch, vocabulary],
                   and for each block: present_key_i, present_value_i [batch, heads, past_length + 1, head_width]

All floats are float32. The token's position is past_length, so that no caller can give a wrong one. Caches are one
tensor a block and not one stack: a runtime then grows each in place of cutting the stack up and joining it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from vitdeploy.errors import EngineError, ExportError, TensorError
from vitdeploy.exporter.attention import attention
from vitdeploy.exporter.parity import BATCHES, SEED, TOLERANCE, all_but_constant, relative_difference
from vitdeploy.exporter.torch_onnx import _quiet, tidy
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.edit import Names, drop_unused
from vitdeploy.graph.io.files import BATCH
from vitdeploy.graph.values import is_constant
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.sequence import SequenceDecoder

ENCODER, DECODER_STEP = "encoder", "decoder_step"
SOURCE_LENGTH, PAST_LENGTH = "source_length", "past_length"
# torch.export takes sizes 0 and 1 for constants, and equal sizes for one axis.
EXAMPLE_BATCH, EXAMPLE_SOURCE, EXAMPLE_PAST = 3, 5, 7
# What parity is checked at: runtimes compute in blocks of up to 16, and a block has to be passed to see its seam.
SOURCE_LENGTHS, STEPS = (1, 4, 19), 20


# The keys and values of one attention.
KeyValue: TypeAlias = tuple[Tensor, Tensor]


class SequenceConfig(Protocol):
    """The sizes and tokens of an encoder-decoder, as `models.transformer.TransformerConfig` has them."""

    @property
    def source_vocabulary(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def decoder_depth(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def start(self) -> int: ...


class SequenceModel(Protocol):
    """A torch module in these three ways, as `models.transformer.Transformer` is."""

    @property
    def config(self) -> SequenceConfig: ...
    def __call__(self, source: Tensor, target: Tensor, /) -> Tensor: ...
    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, Sequence[KeyValue]]: ...
    def step(
        self, token: Tensor, mask: Tensor, cross: Sequence[KeyValue], past: Sequence[KeyValue]
    ) -> tuple[Tensor, Sequence[KeyValue]]: ...
    def eval(self) -> Any: ...


class _Encoder(nn.Module):
    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor) -> list[Tensor]:
        memory, mask, cross = self.model.encode(source)
        return [memory, mask, *_flat(cross)]


class _DecoderStep(nn.Module):
    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, mask: Tensor, cross: list[Tensor], past: list[Tensor]) -> list[Tensor]:
        logits, present = self.model.step(token, mask, _paired(cross), _paired(past))
        return [logits, *_flat(present)]


def _flat(pairs: Sequence[KeyValue]) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]


def _paired(flat: list[Tensor]) -> list[KeyValue]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _names(kind: str, blocks: int) -> list[str]:
    return [f"{kind}_{part}_{i}" for i in range(blocks) for part in ("key", "value")]


def export_sequence(module: SequenceModel, *, name: str, opset: int) -> dict[str, ir.Model]:
    """The graphs "encoder" and "decoder_step" of `module`, named `<name>_encoder` and `<name>_decoder_step`.

    Raises:
        ExportError: the model cannot be exported, or its max_length is too small to tell its axes apart.
    """
    if module.config.max_length <= EXAMPLE_PAST:
        raise ExportError(
            f"{name} is too short to be exported with dynamic lengths",
            found=f"max_length {module.config.max_length}",
            wanted=f"at least {EXAMPLE_PAST + 1}",
            fix="build the model with a larger max_length: its weights do not depend on it",
        )
    return {
        ENCODER: export_encoder(module, name=f"{name}_{ENCODER}", opset=opset),
        DECODER_STEP: export_decoder_step(module, name=f"{name}_{DECODER_STEP}", opset=opset),
    }


def export_encoder(module: SequenceModel, *, name: str, opset: int) -> ir.Model:
    batch, source_length, _ = _axes(module)
    return _export(
        _Encoder(module),
        (torch.zeros(EXAMPLE_BATCH, EXAMPLE_SOURCE, dtype=torch.int64),),
        {"source": {0: batch, 1: source_length}},
        inputs=["source"],
        outputs=["memory", "source_mask", *_names("cross", module.config.decoder_depth)],
        name=name,
        opset=opset,
    )


def export_decoder_step(module: SequenceModel, *, name: str, opset: int) -> ir.Model:
    config = module.config
    blocks, head_width = config.decoder_depth, config.width // config.heads
    batch, source_length, past_length = _axes(module)

    def caches(length: int) -> list[Tensor]:
        return [torch.zeros(EXAMPLE_BATCH, config.heads, length, head_width) for _ in range(2 * blocks)]

    return _export(
        _DecoderStep(module),
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
        inputs=["token", "source_mask", *_names("cross", blocks), *_names("past", blocks)],
        outputs=["logits", *_names("present", blocks)],
        name=name,
        opset=opset,
    )


def _axes(module: SequenceModel) -> tuple[Any, Any, Any]:
    """Batch, source length and past length as torch.export's dynamic axes."""
    longest = module.config.max_length
    return (
        torch.export.Dim(BATCH),
        torch.export.Dim(SOURCE_LENGTH, max=longest),
        torch.export.Dim(PAST_LENGTH, max=longest - 1),
    )


def _export(
    module: nn.Module,
    example: tuple[Any, ...],
    shapes: dict[str, Any],
    *,
    inputs: list[str],
    outputs: list[str],
    name: str,
    opset: int,
) -> ir.Model:
    try:
        with _quiet():
            program = torch.onnx.export(
                module.eval(),
                example,
                dynamo=True,
                dynamic_shapes=shapes,
                opset_version=opset,
                input_names=inputs,
                output_names=outputs,
                verbose=False,
                custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: attention},
            )
    except Exception as error:
        cause = error.__cause__ or error
        lines = [line for line in str(cause).splitlines() if line.strip()]
        raise ExportError(
            f"{name} cannot be exported to ONNX", found=(lines[0] if lines else repr(cause))[:300]
        ) from error
    assert program is not None
    graph = program.model
    tidy(graph, prefix="model")
    copy_sizes(graph)
    declared = [value.shape for value in graph.graph.outputs]
    normalise(graph)
    for value, shape in zip(graph.graph.outputs, declared, strict=True):
        value.shape = shape  # with the names of the axes, which passes may lose
    graph.graph.name = name
    return graph


def copy_sizes(model: ir.Model) -> None:
    """Give every Reshape a constant shape where its declared shapes allow: 0 keeps a size, one -1 is worked out.

    The exporter reads dynamic sizes from the input with Shape and Concat. `[batch, length, width]` to
    `[batch, length, heads, head_width]` needs none of that: the shape is `[0, 0, heads, head_width]`. In place.
    """
    names = Names(model)
    for node in model.graph:
        if node.op_type != "Reshape" or node.inputs[1] is None or is_constant(node.inputs[1], overridable=True):
            continue
        before, after = node.inputs[0], node.outputs[0]
        if before is None or before.shape is None or after.shape is None:
            continue
        sizes = [
            size if isinstance(size, int) else 0 if i < len(before.shape) and before.shape[i] == size else -1
            for i, size in enumerate(after.shape)
        ]
        if sizes.count(-1) > 1 or 0 in after.shape.dims:
            continue
        node.replace_input_with(1, names.constant(np.array(sizes, np.int64), f"{node.name}.shape"))
        node.attributes.pop("allowzero", None)  # the exporter sets it, and with it 0 is a size
    drop_unused(model)


@dataclass(frozen=True)
class SequenceParity:
    """max|a - b| / max|b| over the logits of all steps; a the two graphs on ONNX Runtime, b the PyTorch model.
    `unproven`: as of `Parity`."""

    batch: int
    source_length: int
    steps: int
    max_relative_difference: float
    unproven: tuple[str, ...] | None = None


def check_sequence_parity(encoder: Path, decoder_step: Path, module: SequenceModel) -> list[SequenceParity]:
    """Decode greedily through both graphs, and compare each step with the model that sees the whole target at once.

    Sources are seeded random tokens of several lengths with padding of several widths, at batch 1, 2 and 5. The target
    never ends early: every run goes through the same number of steps, the first with an empty cache.

    Raises:
        ExportError: a batch or length that does not run, a difference above 1e-4, or another token than the model's
            where its best logit leads by more than that difference.
    """
    config = module.config
    module.eval()
    generator = np.random.default_rng(SEED)
    lengths = [length for length in SOURCE_LENGTHS if length <= config.max_length]
    words = np.delete(np.arange(config.source_vocabulary), config.pad)
    rows: list[SequenceParity] = []
    answers: list[dict[str, np.ndarray]] = []
    with (
        OnnxRuntimeRunner(encoder, name="the exported encoder") as first,
        OnnxRuntimeRunner(decoder_step, name="the exported decoder step") as second,
    ):
        decoder = SequenceDecoder(first, second, config.start, end=-1, pad=config.pad, max_length=config.max_length)
        for batch in BATCHES:
            for length in lengths:
                source = generator.choice(words, (batch, length))
                source[np.arange(length) >= generator.integers(1, length + 1, (batch, 1))] = config.pad
                try:
                    tokens, ours = decoder.decode_with_logits(source, STEPS)
                except (EngineError, TensorError) as error:
                    raise ExportError(
                        f"the exported graphs do not run at batch {batch} and source length {length}",
                        found=error.found,
                        wanted="every batch and length",
                        fix="in the model, take sizes from the tensor",
                    ) from None
                theirs = _full_logits(module, source, tokens)
                difference = relative_difference(ours, theirs)
                rows.append(SequenceParity(batch, length, tokens.shape[1], difference))
                _check(rows[-1], tokens, theirs)
                answers.append({"logits": theirs.reshape(-1, theirs.shape[-1])})
    unproven = all_but_constant(answers)
    return [replace(row, unproven=unproven) for row in rows]


def _full_logits(module: SequenceModel, source: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The model's logits [b, t, v] for the tokens that were decoded, without a cache."""
    start = np.full((len(tokens), 1), module.config.start, np.int64)
    target = np.concatenate([start, tokens[:, :-1]], axis=1)
    with torch.inference_mode():
        return module(torch.from_numpy(source), torch.from_numpy(target)).numpy()


def _check(row: SequenceParity, tokens: np.ndarray, theirs: np.ndarray) -> None:
    where = f"at batch {row.batch} and source length {row.source_length}"
    if not row.max_relative_difference <= TOLERANCE:
        raise ExportError(
            "the exported graphs are not the same function as the PyTorch model",
            found=f"max|a-b| / max|b| = {row.max_relative_difference:.2e} {where}",
            wanted=f"at most {TOLERANCE:.0e}",
        )
    lead = theirs.max(axis=-1) - np.take_along_axis(theirs, tokens[..., None], axis=-1)[..., 0]
    if (lead > 2 * TOLERANCE * np.abs(theirs).max()).any():
        raise ExportError(
            "decoding through the exported graphs gives other tokens than the PyTorch model",
            found=f"{int((lead > 0).sum())} of {tokens.size} tokens {where}",
            wanted="the token with the largest logit",
        )

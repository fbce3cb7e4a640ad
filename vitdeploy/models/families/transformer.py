"""The Transformer family: names and checkpoints.

    transformer_base, transformer_big               table 3 of arXiv 1706.03762, one vocabulary of 37,000
    transformer_w<width>e<blocks>d<blocks>h<heads>_v<vocabulary>_l<max length>          any other (e encoder, d decoder)

Defaults without a checkpoint or config: the hidden width is four times the width, embeddings and generator share their
weight, and tokens 0, 1 and 2 are padding, start and end.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.layers import sinusoidal
from vitdeploy.models.architectures.transformer import Transformer, TransformerConfig
from vitdeploy.models.family import Family, Hints, Recognised, Signature
from vitdeploy.models.keys.rules import count_below, renamed, rules
from vitdeploy.runtime.sequence import SEQUENCE_OUTPUTS
from vitdeploy.spec import SequenceSpec

NAME = "transformer"
NAMES = {
    "transformer_base": TransformerConfig(),
    "transformer_big": TransformerConfig(width=1024, heads=16, hidden=4096),
}
_NAME = re.compile(
    r"transformer_w(?P<width>\d+)e(?P<encoder>\d+)d(?P<decoder>\d+)h(?P<heads>\d+)_v(?P<vocabulary>\d+)_l(?P<length>\d+)"
)
# Fields that tensors do not show; a config may use torch.nn.Transformer's names for them.
_UNTOLD = ("heads", "max_length", "pad", "start", "end", "pre_norm", "layer_norm_eps")
_WORDS = {"nhead": "heads", "norm_first": "pre_norm"}
_OWN = "decoder.0.cross_attention.key_value.weight"
_TORCH = "decoder.layers.0.multihead_attn.in_proj_weight"
# Attributes that define the architecture, by display name.
ARCHITECTURE = {
    "width": "width",
    "encoder blocks": "encoder_depth",
    "decoder blocks": "decoder_depth",
    "heads": "heads",
    "MLP width": "hidden",
}


def parse(name: str) -> TransformerConfig | None:
    """Return the configuration of a name; None for names of other families.

    Raises:
        UnknownModelError: the sizes contradict each other.
    """
    if name in NAMES:
        return NAMES[name]
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        return TransformerConfig(
            source_vocabulary=int(match["vocabulary"]),
            target_vocabulary=int(match["vocabulary"]),
            width=int(match["width"]),
            encoder_depth=int(match["encoder"]),
            decoder_depth=int(match["decoder"]),
            heads=int(match["heads"]),
            hidden=4 * int(match["width"]),
            max_length=int(match["length"]),
        )
    except ValueError as error:
        raise UnknownModelError(f"{name!r} cannot be built", found=str(error)) from None


def build(config: TransformerConfig) -> Transformer:
    return Transformer(config)


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """Recognise a state dict with our names, or a torch.nn.Transformer between embeddings and a generator.

    The latter as in PyTorch's translation tutorial (`transformer.`, `src_tok_emb.embedding.`, `tgt_tok_emb.embedding.`,
    `generator.`), or with our names for the embeddings. The number of heads is a hint or in the config; the config also
    has `max_length`, `pad`, `start`, `end`, `pre_norm` and `layer_norm_eps` if they differ from the defaults. Config
    keys are the names of TransformerConfig's fields, or `nhead` and `norm_first`.

    Raises:
        CheckpointError: unknown number of heads; learned positions; unknown tensors; invalid shapes; a config value of
            the wrong type.
    """
    known: dict[str, Any] = {}
    notes: list[str] = []
    if _OWN in state:
        style, weights = "original", dict(state)
    elif any(key.endswith(_TORCH) for key in state):
        style, weights = "torch", _from_torch(state, known, notes)
    else:
        return None
    config = _configure(weights, _untold(hints, known, notes))
    return Recognised(NAME, style, config, weights, tuple(notes))


def _configure(weights: Mapping[str, Tensor], fields: dict[str, Any]) -> TransformerConfig:
    shared = "embedding.weight" in weights
    try:
        source = weights["embedding.weight" if shared else "source_embedding.weight"]
        target = weights["embedding.weight" if shared else "target_embedding.weight"]
        hidden = weights["encoder.0.mlp.fc1.weight"]
        return TransformerConfig(
            source_vocabulary=source.shape[0],
            target_vocabulary=target.shape[0],
            width=source.shape[1],
            encoder_depth=count_below(weights, "encoder."),
            decoder_depth=count_below(weights, "decoder."),
            hidden=hidden.shape[0],
            shared_embeddings=shared,
            generator_bias="generator.bias" in weights,
            final_norm="decoder_norm.weight" in weights,
            **fields,
        )
    except KeyError as error:
        raise CheckpointError(
            "the state dict is an incomplete Transformer",
            found=f"no tensor {error.args[0]}",
            expected="an encoder, a decoder, their embeddings and a generator",
        ) from None
    except (ValueError, IndexError) as error:
        raise CheckpointError("the state dict is not a valid Transformer", found=str(error)) from None


def _untold(hints: Hints, known: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the configuration fields from hints, with their types checked, besides those in `known`."""
    types = {field.name: type(field.default) for field in dataclasses.fields(TransformerConfig)}
    fields = dict(known)
    for key, value in hints.config.items():
        name = _WORDS.get(key, key)
        if name not in _UNTOLD:
            continue
        if type(value) is not types[name]:
            raise CheckpointError(
                f"the config's {key!r} has the wrong type", found=repr(value)[:60], expected=types[name].__name__
            )
        fields[name] = value
    if hints.heads is not None:
        fields["heads"] = hints.heads
    if "heads" not in fields:
        raise CheckpointError(
            "the tensors of a Transformer do not determine its number of heads",
            expected="the number of heads used in training",
            fix='--heads N, or a config.json with "heads" next to the checkpoint',
        )
    defaults = TransformerConfig()
    assumed = [f"{name} {getattr(defaults, name)}" for name in _UNTOLD if name not in fields]
    if assumed:
        notes.append(f"not in the checkpoint, using defaults: {', '.join(assumed)}")
    return fields


def _from_torch(state: Mapping[str, Tensor], known: dict[str, Any], notes: list[str]) -> dict[str, Tensor]:
    """Rename the tensors of torch.nn.Transformer, embeddings and generator to our names.

    Adds facts from a stored position table to `known`, and dropped tensors to `notes`.
    """
    prefix = next(key for key in state if key.endswith(_TORCH)).removesuffix(_TORCH)
    inner: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if _is_positions(key):
            known["max_length"] = _sinusoidal_length(key, tensor)
            notes.append(f"left out, fixed sinusoidal positions: {key}")
        else:
            inner[key.removeprefix(prefix)] = tensor
    weights, _, refused = renamed(_RULES, inner)
    unknown = [key if key in state else prefix + key for key in refused]
    if unknown:
        raise CheckpointError(
            "the Transformer state dict has unknown tensors",
            found=", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""),
            expected=f"torch.nn.Transformer's, and {', '.join(_AROUND)}",
        )
    ends = [weights.get(f"{name}.weight") for name in ("source_embedding", "target_embedding", "generator")]
    first = ends[0]
    if first is not None and all(other is not None and torch.equal(first, other) for other in ends[1:]):
        for name in ("source_embedding", "target_embedding", "generator"):
            del weights[f"{name}.weight"]
        weights["embedding.weight"] = first
        notes.append("embeddings and generator have equal weights: stored once")
    return weights


# Tensors outside the block stacks.
_AROUND = (
    *("src_tok_emb.embedding.weight", "tgt_tok_emb.embedding.weight", "embedding.weight", "source_embedding.weight"),
    *("target_embedding.weight", "generator.weight", "generator.bias"),
)
# `in_proj` stacks query, key and value; in cross-attention they become two linear layers here.
_RULES = rules(
    """
    {src,tgt}_tok_emb.embedding.weight              {source,target}_embedding.weight
    {$TABLES}.weight                                {$TABLES}.weight
    generator.bias                                  generator.bias
    {encoder,decoder}.norm.$W                       {encoder,decoder}_norm.$W
    {encoder,decoder}.layers.*.self_attn.in_proj_$W     {encoder,decoder}.*.self_attention.qkv.$W
    {encoder,decoder}.layers.*.self_attn.out_proj.$W    {encoder,decoder}.*.self_attention.proj.$W
    decoder.layers.*.multihead_attn.in_proj_$W      decoder.*.cross_attention.<query,key_value,key_value>.$W
    decoder.layers.*.multihead_attn.out_proj.$W     decoder.*.cross_attention.proj.$W
    {encoder,decoder}.layers.*.linear{1,2}.$W       {encoder,decoder}.*.mlp.fc{1,2}.$W
    {encoder,decoder}.layers.*.norm{1,2,3}.$W       {encoder,decoder}.*.norm{1,2,3}.$W
    """,
    W="{weight,bias}",
    TABLES="embedding,source_embedding,target_embedding,generator",
)


def _is_positions(key: str) -> bool:
    return key.rsplit(".", 1)[-1] in ("pos_embedding", "pe")


def _sinusoidal_length(key: str, table: Tensor) -> int:
    """Return the length of the tutorial's sinusoid table, [length, 1, width] or [length, width]."""
    rows = table.squeeze().double()
    width = rows.shape[-1] if rows.ndim == 2 else 1
    if width % 2 or not bool((rows - sinusoidal(len(rows), width)[0]).abs().max() < 1e-3):
        raise CheckpointError(
            "vitdeploy does not support this Transformer's positions",
            found=f"{key} {list(table.shape)}, different from the sinusoids of section 3.5",
            expected="sinusoidal positions",
        )
    return len(rows)


def describe(config: TransformerConfig) -> Signature:
    """Return the signature: tokens in, tokens out, no image."""
    spec = SequenceSpec(config.start, config.end, config.pad, config.max_length, config.source_vocabulary)
    return Signature("sequence", (0, 0), 0, SEQUENCE_OUTPUTS, sequence=spec)


def hints(name: str, config: TransformerConfig) -> Hints:
    return Hints(heads=config.heads, config={field: getattr(config, field) for field in _UNTOLD})


def resize(
    config: TransformerConfig, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[TransformerConfig, dict[str, Tensor]]:
    raise CheckpointError("a Transformer takes tokens, not images", found=f"an image size of {image_size}")


FAMILY = Family(
    name=NAME,
    paper="arXiv 1706.03762",
    names=NAMES,
    parse=parse,
    build=build,
    describe=describe,
    recognise=recognise,
    resize=resize,
    preprocess=lambda config: None,
    hints=hints,
    free={"source_vocabulary": "tokens", "target_vocabulary": "tokens"},
    architecture=ARCHITECTURE,
)

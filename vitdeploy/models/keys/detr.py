"""DETR with our own keys, those of its released code (facebookresearch/detr), or those of Hugging Face transformers.

Two generations of transformers' names are read: those of files (hubs, and whatever `save_pretrained` writes) and those
of the modules of transformers 5, for example

    original  transformer.decoder.layers.0.multihead_attn.in_proj_weight       mask_head.lay3.weight
    file      model.decoder.layers.0.encoder_attn.out_proj.weight              mask_head.lay3.weight
    module    model.decoder.layers.0.encoder_attn.o_proj.weight                mask_head.fpn_stages.0.refine.conv.weight

The backbone has torchvision's and timm's names (`layer1.0.bn1.weight`) or those of transformers' ResNet
(`encoder.stages.0.layers.0.layer.0.normalization.weight`). Models with a mask head have all others below `detr.`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from vitdeploy.errors import CheckpointError

Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]

_MARKS = {
    "vitdeploy": ("query_embed", "class_embed.weight", "decoder.0.cross_attn.query.weight"),
    "original": (
        "query_embed.weight",
        "class_embed.weight",
        "transformer.decoder.layers.0.multihead_attn.in_proj_weight",
    ),
    "transformers": (
        "model.query_position_embeddings.weight",
        "class_labels_classifier.weight",
        "model.decoder.layers.0.encoder_attn.q_proj.weight",
    ),
}
_PRE_NORM = ("transformer.encoder.norm.weight", "model.encoder.layernorm.weight")
_LEARNED = ("backbone.1.row_embed.weight", "model.position_embedding.row_embeddings.weight")


def _before(number: str, step: int = 1) -> int:
    return int(number) - step


# Every rule that matches a key is applied to it, in this order.
_RULES: dict[str, Rules] = {
    "vitdeploy": (),
    "original": (
        (r"^backbone\.0\.body\.", "backbone."),
        (r"^transformer\.(encoder|decoder)\.layers\.", r"\1."),
        (r"^transformer\.decoder\.norm\.", "decoder_norm."),
        (r"\.multihead_attn\.", ".cross_attn."),
        (r"_attn\.out_proj\.", "_attn.out."),
        (r"\.linear([12])\.", r".mlp.fc\1."),
        (r"^query_embed\.weight$", "query_embed"),
        (r"^bbox_embed\.", "box_embed."),
    ),
    "transformers": (
        (r"^model\.backbone\.(conv_encoder\.)?model\.", "backbone."),
        (r"^model\.(encoder|decoder)\.layers\.", r"\1."),
        (r"^model\.decoder\.layernorm\.", "decoder_norm."),
        (r"^(\w+\.\d+)\.self_attn_layer_norm\.", r"\1.norm1."),
        (r"^(\w+\.\d+)\.encoder_attn_layer_norm\.", r"\1.norm2."),
        (r"^(encoder\.\d+)\.final_layer_norm\.", r"\1.norm2."),
        (r"^(decoder\.\d+)\.final_layer_norm\.", r"\1.norm3."),
        (r"\.encoder_attn\.", ".cross_attn."),
        (r"_attn\.(o|out)_proj\.", "_attn.out."),
        (r"_attn\.([qkv])_proj\.", lambda m: f"_attn.{ {'q': 'query', 'k': 'key', 'v': 'value'}[m[1]] }."),
        (r"^(\w+\.\d+)\.(mlp\.)?fc([12])\.", r"\1.mlp.fc\3."),
        (r"^model\.input_projection\.", "input_proj."),
        (r"^model\.query_position_embeddings\.weight$", "query_embed"),
        (r"^class_labels_classifier\.", "class_embed."),
        (r"^bbox_predictor\.", "box_embed."),
    ),
}
_BACKBONE_RULES: Rules = (
    (r"^backbone\.embedder\.embedder\.convolution\.", "backbone.conv1."),
    (r"^backbone\.embedder\.embedder\.normalization\.", "backbone.conv1.norm."),
    (r"^backbone\.encoder\.stages\.(\d+)\.layers\.(\d+)\.", r"backbone.layers.\1.\2."),
    (r"\.layer\.(\d)\.convolution\.", lambda m: f".conv{_before(m[1], -1)}."),
    (r"\.layer\.(\d)\.normalization\.", lambda m: f".conv{_before(m[1], -1)}.norm."),
    (r"\.shortcut\.convolution\.", ".downsample."),
    (r"\.shortcut\.normalization\.", ".downsample.norm."),
    (r"^backbone\.layer(\d)\.", lambda m: f"backbone.layers.{_before(m[1])}."),
    (r"^(backbone\..*)\bbn(\d)\.", r"\1conv\2.norm."),
    (r"\.downsample\.0\.", ".downsample."),
    (r"\.downsample\.1\.", ".downsample.norm."),
)
_MASK_RULES: Rules = (
    (r"^bbox_attention\.q_(linear|proj)\.", "mask_attention.query."),
    (r"^bbox_attention\.k_(linear|proj)\.", "mask_attention.key."),
    (r"^mask_head\.lay([12])\.", r"mask_head.conv\1."),
    (r"^mask_head\.gn([12])\.", r"mask_head.norm\1."),
    (r"^mask_head\.conv([12])\.conv\.", r"mask_head.conv\1."),
    (r"^mask_head\.conv([12])\.norm\.", r"mask_head.norm\1."),
    (r"^mask_head\.adapter([123])\.", lambda m: f"mask_head.upsamples.{_before(m[1])}.adapter."),
    (r"^mask_head\.lay([345])\.", lambda m: f"mask_head.upsamples.{_before(m[1], 3)}.conv."),
    (r"^mask_head\.gn([345])\.", lambda m: f"mask_head.upsamples.{_before(m[1], 3)}.norm."),
    (r"^mask_head\.fpn_stages\.(\d)\.fpn_adapter\.", r"mask_head.upsamples.\1.adapter."),
    (r"^mask_head\.fpn_stages\.(\d)\.refine\.", r"mask_head.upsamples.\1."),
    (r"^mask_head\.(out_lay|output_conv)\.", "mask_head.out."),
)


@dataclass(frozen=True)
class Mapped:
    """A state dict under the names of `models.detr` and `models.detr_masks`; unknown keys are left as they are."""

    style: str
    state: dict[str, Tensor]
    notes: tuple[str, ...]


def to_detr(state: Mapping[str, Tensor]) -> Mapped | None:
    """The state dict under our names; None if its keys are not those of a DETR.

    Raises:
        CheckpointError: a variant of DETR that is another function (pre-norm, learned image positions).
    """
    inner = {key.removeprefix("detr."): tensor for key, tensor in state.items()}
    style = next((style for style, marks in _MARKS.items() if all(mark in inner for mark in marks)), None)
    if style is None:
        return None
    _refuse_variants(inner)
    renamed: dict[str, Tensor] = {}
    counters = 0
    for key, tensor in inner.items():
        if key.endswith(".num_batches_tracked"):
            counters += 1
            continue
        name = _renamed(key, (*_RULES[style], *_BACKBONE_RULES, *_MASK_RULES))
        renamed.update(_split(name, tensor, inner_width=inner[_MARKS[style][0]].shape[-1]))
    notes = (f"left out, used in training only: {counters} counters of batch norm",) if counters else ()
    return Mapped(style, renamed, notes)


def _refuse_variants(state: Mapping[str, Tensor]) -> None:
    for keys, variant in ((_PRE_NORM, "layer norms before the attentions"), (_LEARNED, "learned image positions")):
        found = [key for key in keys if key in state]
        if found:
            raise CheckpointError(
                f"the state dict is that of a DETR with {variant}, which vitdeploy does not have",
                found=found[0],
                wanted="DETR as published: post-norm, with sine positions",
                fix="export it where it was made, and bring the ONNX file",
            )


def _renamed(key: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    return key


def _split(name: str, tensor: Tensor, inner_width: int) -> dict[str, Tensor]:
    """Tensors that the released code has as one and we as several: the rows of query, key and value, and the inputs of
    the mask head's first convolution: projected features, then attention maps."""
    stem, _, packed = name.rpartition(".in_proj_")
    if stem:
        parts = zip(("query", "key", "value"), tensor.chunk(3), strict=False)
        return {f"{stem}.{part}.{packed}": rows for part, rows in parts}
    if name == "mask_head.conv1.bias":
        return {"mask_head.from_features.bias": tensor}
    if name == "mask_head.conv1.weight" and tensor.ndim == 4:
        features, attention = tensor[:, :inner_width], tensor[:, inner_width:]
        return {"mask_head.from_features.weight": features, "mask_head.from_attention.weight": attention}
    return {name: tensor}

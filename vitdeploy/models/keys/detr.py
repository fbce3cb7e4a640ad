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

from collections.abc import Mapping

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.keys.rules import renamed, rules

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
# What no rule takes keeps its name.
RULES = rules(
    """
    **.num_batches_tracked                          -
    $NET.conv1.                                     backbone.conv1.
    $NET.bn1.                                       backbone.conv1.norm.
    $NET.layer{1,2,3,4}.*.conv{1,2,3}.              backbone.layers.{0,1,2,3}.*.conv{1,2,3}.
    $NET.layer{1,2,3,4}.*.bn{1,2,3}.                backbone.layers.{0,1,2,3}.*.conv{1,2,3}.norm.
    $NET.layer{1,2,3,4}.*.downsample.{0,1}.         backbone.layers.{0,1,2,3}.*.downsample.{,norm.}
    $NET.embedder.embedder.{convolution,normalization}.     backbone.conv1.{,norm.}
    $STAGE.layer.{0,1,2}.{convolution,normalization}.       backbone.layers.*.*.conv{1,2,3}.{,norm.}
    $STAGE.shortcut.{convolution,normalization}.    backbone.layers.*.*.downsample.{,norm.}

    transformer.{encoder,decoder}.layers.*.self_attn.in_proj_       {encoder,decoder}.*.self_attn.<query,key,value>.
    transformer.{encoder,decoder}.layers.*.self_attn.out_proj.      {encoder,decoder}.*.self_attn.out.
    transformer.decoder.layers.*.multihead_attn.in_proj_            decoder.*.cross_attn.<query,key,value>.
    transformer.decoder.layers.*.multihead_attn.out_proj.           decoder.*.cross_attn.out.
    transformer.{encoder,decoder}.layers.*.linear{1,2}.             {encoder,decoder}.*.mlp.fc{1,2}.
    transformer.{encoder,decoder}.layers.                           {encoder,decoder}.
    transformer.decoder.norm.                       decoder_norm.
    query_embed.weight                              query_embed
    bbox_embed.                                     box_embed.

    model.{encoder,decoder}.layers.*.self_attn_layer_norm.          {encoder,decoder}.*.norm1.
    model.decoder.layers.*.encoder_attn_layer_norm.                 decoder.*.norm2.
    model.encoder.layers.*.final_layer_norm.        encoder.*.norm2.
    model.decoder.layers.*.final_layer_norm.        decoder.*.norm3.
    model.{encoder,decoder}.layers.*.self_attn.{q,k,v}_proj.        {encoder,decoder}.*.self_attn.{query,key,value}.
    model.{encoder,decoder}.layers.*.self_attn.(o|out)_proj.        {encoder,decoder}.*.self_attn.out.
    model.decoder.layers.*.encoder_attn.{q,k,v}_proj.               decoder.*.cross_attn.{query,key,value}.
    model.decoder.layers.*.encoder_attn.(o|out)_proj.               decoder.*.cross_attn.out.
    model.{encoder,decoder}.layers.*.(mlp.)?fc{1,2}.                {encoder,decoder}.*.mlp.fc{1,2}.
    model.{encoder,decoder}.layers.                 {encoder,decoder}.
    model.decoder.layernorm.                        decoder_norm.
    model.input_projection.                         input_proj.
    model.query_position_embeddings.weight          query_embed
    class_labels_classifier.                        class_embed.
    bbox_predictor.                                 box_embed.

    bbox_attention.{q,k}_(linear|proj).             mask_attention.{query,key}.
    mask_head.{lay1,lay2,gn1,gn2}.                  mask_head.{conv1,conv2,norm1,norm2}.
    mask_head.conv{1,2}.conv.                       mask_head.conv{1,2}.
    mask_head.conv{1,2}.norm.                       mask_head.norm{1,2}.
    mask_head.adapter{1,2,3}.                       mask_head.upsamples.{0,1,2}.adapter.
    mask_head.lay{3,4,5}.                           mask_head.upsamples.{0,1,2}.conv.
    mask_head.gn{3,4,5}.                            mask_head.upsamples.{0,1,2}.norm.
    mask_head.fpn_stages.*.fpn_adapter.             mask_head.upsamples.*.adapter.
    mask_head.fpn_stages.*.refine.                  mask_head.upsamples.*.
    mask_head.(out_lay|output_conv).                mask_head.out.
    """,
    STAGE="$NET.encoder.stages.*.layers.*",
    NET="(backbone.0.body|model.backbone.model|model.backbone.conv_encoder.model)",
)


def read(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor], list[str]] | None:
    """Style of the keys, the tensors under our names, and what was left out; None if the keys are not those of a DETR.

    Keys that the style does not have are passed on as they are: loading then names them as unexpected.

    Raises:
        CheckpointError: a variant of DETR that is another function (pre-norm, learned image positions).
    """
    inner = {key.removeprefix("detr."): tensor for key, tensor in state.items()}
    style = next((style for style, marks in _MARKS.items() if all(mark in inner for mark in marks)), None)
    if style is None:
        return None
    _refuse_variants(inner)
    mapped, counters, unknown = renamed(RULES, inner)
    mapped |= {key: inner[key] for key in unknown}
    notes = [f"left out, used in training only: {len(counters)} counters of batch norm"] if counters else []
    return style, _split(mapped, width=inner[_MARKS[style][0]].shape[-1]), notes


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


def _split(state: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """With the mask head's first convolution as two, by its inputs: projected features, then attention maps."""
    stem = "mask_head.from_features"
    if (bias := state.pop("mask_head.conv1.bias", None)) is not None:
        state[f"{stem}.bias"] = bias
    if "mask_head.conv1.weight" in state and state["mask_head.conv1.weight"].ndim == 4:
        weight = state.pop("mask_head.conv1.weight")
        state |= {f"{stem}.weight": weight[:, :width], "mask_head.from_attention.weight": weight[:, width:]}
    return state

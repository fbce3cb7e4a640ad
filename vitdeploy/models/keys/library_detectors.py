"""Keys of RT-DETR, RT-DETRv2, D-FINE and RF-DETR as their repositories save them, under the names of transformers'
modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from vitdeploy.models.keys.rules import Rule, rules

Kind: TypeAlias = Literal["rt_detr", "rt_detr_v2", "d_fine", "rf_detr"]

# What a model computes for one image size, and what only training asks for.
COMPUTED = ("decoder.anchors", "decoder.valid_mask")
TRAINING = ("decoder.denoising_class_embed.",)
# One number of D-FINE's decoder under a second name, which the model has once.
TWINS = {"decoder.decoder.up": "decoder.up", "decoder.decoder.reg_scale": "decoder.reg_scale"}

# The backbone's norms count no batches: they are the constants that they are in training. After a pooling that halves
# the map, the convolution of a shortcut is the second part.
_RESNET = """
    backbone.**.num_batches_tracked                 -
    backbone.conv1.conv1_{1,2,3}.{conv,norm}.       $NET.embedder.embedder.{0,1,2}.{convolution,normalization}.
    $BLOCK.branch2{a,b,c}.{conv,norm}.              $LAYER.layer.{0,1,2}.{convolution,normalization}.
    $BLOCK.short.conv.{conv,norm}.                  $LAYER.shortcut.1.{convolution,normalization}.
    $BLOCK.short.{conv,norm}.                       $LAYER.shortcut.{convolution,normalization}.
"""
_HGNET = """
    backbone.**.num_batches_tracked                 -
    backbone.stem.*.{conv,bn,lab}.                  $NET.embedder.*.$NORMED.
    backbone.stages.*.downsample.{conv,bn,lab}.     $NET.encoder.stages.*.downsample.$NORMED.
    $BLOCKS.aggregation.*.{conv,bn,lab}.            $NET.encoder.stages.*.blocks.*.aggregation.*.$NORMED.
    $BLOCKS.layers.*.{conv1,conv2}.{conv,bn,lab}.   $NET.encoder.stages.*.blocks.*.layers.*.{conv1,conv2}.$NORMED.
    $BLOCKS.layers.*.{conv,bn,lab}.                 $NET.encoder.stages.*.blocks.*.layers.*.$NORMED.
"""
_SHARED = """
    decoder.(anchors|valid_mask)                    -
    decoder.denoising_class_embed.                  -
    {encoder,decoder}.input_proj.*.{0,1,conv,norm}.     model.{encoder,decoder}_input_proj.*.{0,1,0,1}.
    {$PLACES}.self_attn.in_proj_                    {$NAMES}.self_attn.<q,k,v>_proj.
    {$PLACES}.self_attn.out_proj.                   {$NAMES}.self_attn.o_proj.
    {$PLACES}.linear{1,2}.                          {$NAMES}.mlp.{$MLP}.
    {$PLACES}.norm1.                                {$NAMES}.self_attn_layer_norm.
    encoder.encoder.*.layers.*.norm2.               model.encoder.aifi.*.layers.*.final_layer_norm.
    decoder.decoder.layers.*.norm{2,3}.             model.decoder.layers.*.{encoder_attn,final}_layer_norm.
    encoder.lateral_convs.                          model.encoder.lateral_convs.
    decoder.decoder.layers.*.cross_attn.num_points_scale    model.decoder.layers.*.encoder_attn.$SCALE
    decoder.decoder.layers.*.cross_attn.{$READ}.   model.decoder.layers.*.encoder_attn.{$READ}.
    decoder.query_pos_head.                         model.decoder.query_pos_head.
    decoder.enc_output.{0,1,proj,norm}.             model.enc_output.{0,1,0,1}.
    decoder.enc_{score,bbox}_head.                  model.enc_{score,bbox}_head.
"""
# Transformers' later modules hold the heads twice, as one tensor.
_HEAD = """
    decoder.dec_{score,bbox}_head.*.                model.decoder.{class,bbox}_embed.*.
"""
_HEADS = """
    decoder.dec_{score,bbox}_head.*.                model.decoder.{class,bbox}_embed.*.     {class,bbox}_embed.*.
"""
_PYRAMID = """
    encoder.downsample_convs.                       model.encoder.downsample_convs.
    encoder.{fpn,pan}_blocks.*.conv{1,2,3}.         model.encoder.{fpn,pan}_blocks.*.conv{1,2,3}.
    encoder.{fpn,pan}_blocks.*.bottlenecks.*.conv{1,2}.     model.encoder.{fpn,pan}_blocks.*.bottlenecks.*.conv{1,2}.
"""
_FINE = """
    decoder.decoder.(up|reg_scale)                  -
    encoder.downsample_convs.*.0.cv{1,2}.           model.encoder.downsample_convs.*.conv{1,2}.
    encoder.{fpn,pan}_blocks.*.cv{1,4}.             model.encoder.{fpn,pan}_blocks.*.conv{1,4}.
    encoder.{fpn,pan}_blocks.*.cv{2,3}.0.conv{1,2,3}.   model.encoder.{fpn,pan}_blocks.*.csp_rep{1,2}.conv{1,2,3}.
    $CSP.cv{2,3}.0.bottlenecks.*.conv{1,2}.   model.encoder.{fpn,pan}_blocks.*.csp_rep{1,2}.bottlenecks.*.conv{1,2}.
    encoder.{fpn,pan}_blocks.*.cv{2,3}.1.           model.encoder.{fpn,pan}_blocks.*.conv{2,3}.
    decoder.decoder.layers.*.gateway.               model.decoder.layers.*.gateway.
    decoder.decoder.lqe_layers.                     model.decoder.lqe_layers.
    decoder.pre_bbox_head.                          model.decoder.pre_bbox_head.
    decoder.{up,reg_scale}                          model.decoder.{up,reg_scale}
"""
_RF_DETR = """
    backbone.0.encoder.encoder.{embeddings,layernorm}.      model.backbone.backbone.{embeddings,layernorm}.
    $BLOCK.attention.attention.{query,key,value}.   $LAYER.attention.{q,k,v}_proj.
    $BLOCK.attention.output.dense.                  $LAYER.attention.o_proj.
    $BLOCK.{norm1,norm2,layer_scale1,layer_scale2,mlp}.     $LAYER.{norm1,norm2,layer_scale1,layer_scale2,mlp}.
    $STAGE.0.cv{1,2}.{conv,bn}.                     model.backbone.projector.projector_layer.conv{1,2}.{conv,norm}.
    $STAGE.0.m.*.cv{1,2}.{conv,bn}.     model.backbone.projector.projector_layer.bottlenecks.*.conv{1,2}.{conv,norm}.
    $STAGE.1.                                       model.backbone.projector.layer_norm.
    refpoint_embed.                                 model.reference_point_embed.
    query_feat.                                     model.query_feat.
    $DECODER.self_attn.in_proj_                     model.decoder.layers.*.self_attn.<q,k,v>_proj.
    $DECODER.self_attn.out_proj.                    model.decoder.layers.*.self_attn.o_proj.
    $DECODER.cross_attn.                            model.decoder.layers.*.cross_attn.
    $DECODER.norm{1,2,3}.       model.decoder.layers.*.{self_attn_layer_norm,cross_attn_layer_norm,layer_norm}.
    $DECODER.linear{1,2}.                           model.decoder.layers.*.mlp.fc{1,2}.
    transformer.decoder.{norm,ref_point_head}.      model.decoder.{layernorm,ref_point_head}.
    transformer.enc_{output,output_norm,out_bbox_embed,out_class_embed}.    \
model.enc_{output,output_norm,out_bbox_embed,out_class_embed}.
    {class,bbox}_embed.                             {class,bbox}_embed.
"""


def _of_family(kind: Kind) -> tuple[Rule, ...]:
    fine = kind == "d_fine"
    parts = (_HGNET, _FINE, _SHARED, _HEADS) if fine else (_RESNET, _PYRAMID, _SHARED, _HEADS)
    if kind == "rt_detr":
        parts = (*parts[:3], _HEAD)
    return rules(
        "".join(parts),
        BLOCKS="backbone.stages.*.blocks.*",
        BLOCK="backbone.res_layers.*.blocks.*",
        LAYER="model.backbone.model.encoder.stages.*.layers.*",
        NORMED="{convolution,normalization,lab}",
        NET="model.backbone.model",
        PLACES="encoder.encoder.*.layers.*,decoder.decoder.layers.*",
        NAMES="model.encoder.aifi.*.layers.*,model.decoder.layers.*",
        MLP="layers.0,layers.1" if fine else "fc1,fc2",
        SCALE="num_points_scale" if fine else "n_points_scale",
        READ="sampling_offsets,attention_weights,value_proj,output_proj",
        CSP="encoder.{fpn,pan}_blocks.*",
    )


RULES: Mapping[Kind, tuple[Rule, ...]] = {
    "rt_detr": _of_family("rt_detr"),
    "rt_detr_v2": _of_family("rt_detr_v2"),
    "d_fine": _of_family("d_fine"),
    "rf_detr": rules(
        _RF_DETR,
        BLOCK="backbone.0.encoder.encoder.encoder.layer.*",
        LAYER="model.backbone.backbone.encoder.layer.*",
        STAGE="backbone.0.projector.stages.0",
        DECODER="transformer.decoder.layers.*",
    ),
}

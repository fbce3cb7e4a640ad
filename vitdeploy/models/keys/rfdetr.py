"""Keys of RF-DETR as its repository saves them, under the names of transformers' module."""

from __future__ import annotations

from vitdeploy.models.keys.rules import Rule

_LAYER, _DECODER = "transformer.decoder.layers.*", "model.decoder.layers.*"
_BLOCK, _ENCODER = "backbone.0.encoder.encoder.encoder.layer.*", "model.backbone.backbone.encoder.layer.*"
_STAGE, _PROJECTOR = "backbone.0.projector.stages.0", "model.backbone.projector"
_SAME = ("norm1", "norm2", "mlp", "layer_scale1", "layer_scale2")
RULES: tuple[Rule, ...] = (
    ("backbone.0.encoder.encoder.embeddings.", "model.backbone.backbone.embeddings."),
    *(
        (f"{_BLOCK}.attention.attention.{theirs}.", f"{_ENCODER}.attention.{ours}_proj.")
        for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v"))
    ),
    (f"{_BLOCK}.attention.output.dense.", f"{_ENCODER}.attention.o_proj."),
    *(
        (f"{_BLOCK}.{part}.", f"{_ENCODER}.{part}.")
        for part in ("norm1", "norm2", "layer_scale1", "layer_scale2", "mlp")
    ),
    ("backbone.0.encoder.encoder.layernorm.", "model.backbone.backbone.layernorm."),
    *(
        (f"{_STAGE}.0.{theirs}{index}.{part}.", f"{_PROJECTOR}.projector_layer.{ours}{index}.{named}.")
        for theirs, ours in (("cv", "conv"), ("m.*.cv", "bottlenecks.*.conv"))
        for index in (1, 2)
        for part, named in (("conv", "conv"), ("bn", "norm"))
    ),
    (f"{_STAGE}.1.", f"{_PROJECTOR}.layer_norm."),
    ("refpoint_embed.", "model.reference_point_embed."),
    ("query_feat.", "model.query_feat."),
    (f"{_LAYER}.self_attn.in_proj_", f"{_DECODER}.self_attn.{{qkv}}_proj."),
    (f"{_LAYER}.self_attn.out_proj.", f"{_DECODER}.self_attn.o_proj."),
    (f"{_LAYER}.cross_attn.", f"{_DECODER}.cross_attn."),
    (f"{_LAYER}.norm1.", f"{_DECODER}.self_attn_layer_norm."),
    (f"{_LAYER}.norm2.", f"{_DECODER}.cross_attn_layer_norm."),
    (f"{_LAYER}.norm3.", f"{_DECODER}.layer_norm."),
    *((f"{_LAYER}.linear{index}.", f"{_DECODER}.mlp.fc{index}.") for index in (1, 2)),
    ("transformer.decoder.norm.", "model.decoder.layernorm."),
    ("transformer.decoder.ref_point_head.", "model.decoder.ref_point_head."),
    *(
        (f"transformer.{part}.", f"model.{part}.")
        for part in ("enc_output", "enc_output_norm", "enc_out_bbox_embed", "enc_out_class_embed")
    ),
    ("class_embed.", "class_embed."),
    ("bbox_embed.", "bbox_embed."),
)

"""RF-DETR in the catalog: checkpoints of the original repository, under its tensor names.

    rfdetr_<nano|small|medium|base|large>

`large` is the version of 2026, at 704x704.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models import family, names
from vitdeploy.models.families.library_detector import Kind, LibraryDetector, checked, describe, resize, told_unknown
from vitdeploy.models.keys.rules import apply, count_below, rules
from vitdeploy.models.model_folder.image_processor import IMAGENET_MEAN, IMAGENET_STD
from vitdeploy.spec import PreprocessSpec

_HEAD = 64  # channels per head of DINOv2


@dataclass(frozen=True)
class RFDETRConfig:
    """Configuration of an RF-DETR (arXiv 2511.09554): DINOv2 with windowed patches, a projector to one map, a decoder.

    positions: the side of the square grid of the learned positions.
    windows: the number of windows along each side of the image.
    taken: the layers whose outputs are used, counted from 1; the layer after each attends over all windows.
    fusions: blocks of the projector.
    points: sampling points per decoder head.
    groups: query groups in training, of which inference uses the first.
    """

    patch_size: int = 16
    positions: int = 24
    windows: int = 2
    taken: tuple[int, ...] = (3, 6, 9, 12)
    width: int = 384
    depth: int = 12
    fusions: int = 3
    decoder_width: int = 256
    decoder_hidden: int = 2048
    decoder_layers: int = 3
    points: int = 2
    groups: int = 13
    queries: int = 300
    num_classes: int = 91
    image_size: tuple[int, int] = (384, 384)
    kind: Kind = "rf_detr"

    @property
    def multiple(self) -> int:
        """The number of pixels that both image sides must be a multiple of."""
        return self.patch_size * self.windows

    def tokens(self, size: tuple[int, int]) -> int:
        """Return the number of tokens of an image (height, width), from which queries are selected."""
        return (size[0] // self.patch_size) * (size[1] // self.patch_size)

    def settings(self) -> dict[str, Any]:
        """Return the values for a transformers config.json."""
        return {
            "backbone_config": {
                "model_type": "rf_detr_dinov2",
                "hidden_size": self.width,
                "num_hidden_layers": self.depth,
                "num_attention_heads": self.width // _HEAD,
                "image_size": self.positions * self.patch_size,
                "patch_size": self.patch_size,
                "num_windows": self.windows,
                "out_indices": list(self.taken),
            },
            "c2f_num_blocks": self.fusions,
            "layer_norm_eps": 1e-6,  # for the projector's convolutions; transformers' own default is 1e-5
            "d_model": self.decoder_width,
            "decoder_ffn_dim": self.decoder_hidden,
            "decoder_layers": self.decoder_layers,
            "decoder_n_points": self.points,
            "decoder_self_attention_heads": self.decoder_width // 32,
            "decoder_cross_attention_heads": _cross_heads(self.decoder_width),
            "group_detr": self.groups,
            "num_queries": self.queries,
            "num_labels": self.num_classes,
        }


def _cross_heads(width: int) -> int:
    """Return the heads of RF-DETR's deformable attention, with 16 channels each in all published models."""
    return width // 16


# From the repository's config.py.
_BASE = RFDETRConfig(14, positions=37, windows=4, taken=(2, 5, 8, 11), image_size=(560, 560))
_VARIANTS = (
    RFDETRConfig(positions=24, decoder_layers=2, image_size=(384, 384)),
    RFDETRConfig(positions=32, decoder_layers=3, image_size=(512, 512)),
    RFDETRConfig(positions=36, decoder_layers=4, image_size=(576, 576)),
    _BASE,
    RFDETRConfig(positions=44, decoder_layers=4, image_size=(704, 704)),
)
_PARAMETERS = (30_467_298, 32_111_170, 33_687_458, 32_174_530, 33_933_218)
_EMBEDDINGS = "backbone.0.encoder.encoder.embeddings."
_MARKS = ("refpoint_embed.weight", "query_feat.weight", f"{_EMBEDDINGS}position_embeddings")
# The repository's keys and the names in transformers' module.
RULES = rules(
    """
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
    transformer.enc_{$ENDS}.                        model.enc_{$ENDS}.
    {class,bbox}_embed.                             {class,bbox}_embed.
    """,
    BLOCK="backbone.0.encoder.encoder.encoder.layer.*",
    LAYER="model.backbone.backbone.encoder.layer.*",
    STAGE="backbone.0.projector.stages.0",
    DECODER="transformer.decoder.layers.*",
    ENDS="output,output_norm,out_bbox_embed,out_class_embed",
)


def _recognise(state: Mapping[str, Tensor], hints: family.Hints) -> family.Recognised | None:
    """Recognise a checkpoint of the original repository by its keys, and its configuration by tensor shapes.

    Tensors do not show the windows, the layers used and the heads: those of the published models are assumed, of which
    `base` has patches of 14 pixels and all others patches of 16.

    Raises:
        CheckpointError: an unsupported variant (masks, several maps), or tensors are missing.
    """
    if any(mark not in state for mark in _MARKS) or "model_type" in hints.config:
        return None  # transformers saves other models under these names, too; their config.json names them
    renamed = apply(RULES, state)
    if unknown := [key for key, tensors in renamed.items() if tensors is None]:
        raise CheckpointError(
            "vitdeploy does not support the RF-DETR variant of the state dict",
            found=told_unknown(unknown, state),
            expected=f"{', '.join(names.NAMES['rfdetr'])}, with any number of classes",
            fix="export it where it was trained (model.export() in the repository), and use the ONNX file",
        )
    config = checked("RF-DETR", partial(_config, state), "")
    mapped = {f"model.{name}": tensor for tensors in renamed.values() for name, tensor in (tensors or {}).items()}
    taken = ", ".join(map(str, config.taken))
    note = f"assuming {config.windows}x{config.windows} windows and layers {taken}, as published for patches of "
    return family.Recognised("rfdetr", "original", config, mapped, (f"{note}{config.patch_size} pixels",))


def _config(state: Mapping[str, Tensor]) -> RFDETRConfig:
    width, _, patch, _ = state[f"{_EMBEDDINGS}patch_embeddings.projection.weight"].shape
    groups = count_below(state, "transformer.enc_output.")
    decoder_width = state["query_feat.weight"].shape[1]
    weights = len(state["transformer.decoder.layers.0.cross_attn.attention_weights.bias"])
    positions = math.isqrt(state[_MARKS[2]].shape[1] - 1)
    published = _BASE if patch == _BASE.patch_size else RFDETRConfig()
    side = _BASE.image_size[0] if published is _BASE else positions * patch
    return RFDETRConfig(
        patch,
        positions,
        published.windows,
        published.taken,
        width=width,
        depth=count_below(state, "backbone.0.encoder.encoder.encoder.layer."),
        fusions=count_below(state, "backbone.0.projector.stages.0.0.m."),
        decoder_width=decoder_width,
        decoder_hidden=len(state["transformer.decoder.layers.0.linear1.weight"]),
        decoder_layers=count_below(state, "transformer.decoder.layers."),
        points=weights // _cross_heads(decoder_width),
        groups=groups,
        queries=len(state["query_feat.weight"]) // groups,
        num_classes=len(state["class_embed.weight"]),
        image_size=(side, side),
    )


FAMILY = family.Family(
    name="rfdetr",
    paper="arXiv 2511.09554",
    names=dict(zip(names.NAMES["rfdetr"], _VARIANTS, strict=True)),
    parse=lambda name: None,
    build=LibraryDetector,
    describe=describe,
    recognise=_recognise,
    # The module resizes its positions itself.
    resize=partial(resize, ("RF-DETR does not take", "RF-DETR")),
    preprocess=lambda config: PreprocessSpec(
        config.image_size, config.image_size, "bilinear", IMAGENET_MEAN, IMAGENET_STD
    ),
    free={"num_classes": "classes"},
    architecture={
        "patch": "patch_size",
        "positions": "positions",
        "windows": "windows",
        "layers taken": "taken",
        "width": "width",
        "layers": "depth",
        "blocks of the projector": "fusions",
        "decoder width": "decoder_width",
        "decoder MLP": "decoder_hidden",
        "decoder layers": "decoder_layers",
        "points": "points",
        "queries": "queries",
    },
    parameters=dict(zip(names.NAMES["rfdetr"], _PARAMETERS, strict=True)),
)

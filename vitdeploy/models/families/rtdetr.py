"""RT-DETR, RT-DETRv2 and D-FINE in the catalog: checkpoints of the original repositories, under their tensor names.

    rtdetr_<backbone>, rtdetrv2_<backbone>[_dsp | _sp<n>]     r18vd, r34vd, r50vd_m, r50vd, r101vd
    dfine_<n|s|m|l|x>

`_dsp` samples the nearest cell instead of interpolating four ("discrete sampling"), `_sp<n>` has n points per map.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.families.library_detector import Kind, LibraryDetector, checked, describe, resize, told_unknown
from vitdeploy.models.family import Family, Hints, Recognised
from vitdeploy.models.keys.rules import Rule, apply, count_below, rules
from vitdeploy.models.names import NAMES
from vitdeploy.spec import PreprocessSpec

Sampling: TypeAlias = Literal["default", "discrete"]
STRIDES = (4, 8, 16, 32)  # strides of a backbone's four stages


@dataclass(frozen=True)
class RTDETRConfig:
    """Configuration of an RT-DETR (arXiv 2304.08069), RT-DETRv2 (arXiv 2407.17140) or D-FINE (arXiv 2410.13842): a
    convolutional backbone, a hybrid encoder, which attends within the smallest map and fuses scales by convolutions,
    and a decoder whose queries are the encoder's best cells. Input pixels are in 0 to 1.

    backbone: the values for a transformers config.json.
    maps: the number of the backbone's last stages that the encoder reads.
    width, hidden: channels of the encoder, and of its MLP.
    fused, fusions: channels and blocks of the fusion of two scales.
    decoder_layers: the layers that are run; training may have more.
    points: sampling points of a decoder head in each map; interpolated, or the nearest cell ("discrete").
    bins: intervals of D-FINE's distributions over a box's sides.
    """

    kind: Kind
    backbone: Mapping[str, Any]
    maps: int = 3
    width: int = 256
    hidden: int = 1024
    fused: int = 256
    fusions: int = 3
    decoder_width: int = 256
    decoder_hidden: int = 1024
    decoder_layers: int = 6
    points: tuple[int, ...] = (4, 4, 4)
    sampling: Sampling = "default"
    heads: int = 8
    bins: int = 32
    queries: int = 300
    num_classes: int = 80
    image_size: tuple[int, int] = (640, 640)

    @property
    def multiple(self) -> int:
        """The number of pixels that both image sides must be a multiple of."""
        return STRIDES[-1]

    @property
    def strides(self) -> tuple[int, ...]:
        return STRIDES[-self.maps :]

    def tokens(self, size: tuple[int, int]) -> int:
        """Return the number of cells of all maps for an image (height, width), from which queries are selected."""
        return sum((size[0] // stride) * (size[1] // stride) for stride in self.strides)

    def settings(self) -> dict[str, Any]:
        """Return the values for a transformers config.json."""
        settings: dict[str, Any] = {
            "backbone_config": {**self.backbone, "out_indices": list(range(5 - self.maps, 5))},
            "encoder_hidden_dim": self.width,
            "encoder_in_channels": self.backbone["hidden_sizes"][-self.maps :],
            "feat_strides": list(self.strides),
            "encode_proj_layers": [self.maps - 1],
            "encoder_ffn_dim": self.hidden,
            "encoder_attention_heads": self.heads,
            "hidden_expansion": self.fused / self.width,
            "d_model": self.decoder_width,
            "decoder_in_channels": [self.width] * self.maps,
            "decoder_ffn_dim": self.decoder_hidden,
            "decoder_attention_heads": self.heads,
            "decoder_layers": self.decoder_layers,
            "decoder_n_points": self.points[0],
            "num_feature_levels": self.maps,
            "num_queries": self.queries,
            "num_denoising": 0,  # only training has queries of noisy boxes
            "num_labels": self.num_classes,
        }
        if self.kind != "rt_detr":
            settings |= {"decoder_method": self.sampling, "decoder_n_levels": self.maps}
        if self.kind == "d_fine":
            # transformers rounds half of an odd number of channels down, so that any number is possible.
            settings |= {
                "hidden_expansion": (2 * self.fused + 1) / self.width,
                "depth_mult": self.fusions / 3,
                "decoder_n_points": list(self.points),
                "max_num_bins": self.bins,
            }
        return settings


def _resnet(depths: Sequence[int], bottlenecks: bool) -> dict[str, Any]:
    """Return the settings of a ResNet-D (arXiv 1812.01187), with bottlenecks or basic blocks of two convolutions."""
    return {
        "model_type": "rt_detr_resnet",
        "depths": list(depths),
        "hidden_sizes": [(4 if bottlenecks else 1) * width for width in (64, 128, 256, 512)],
        "layer_type": "bottleneck" if bottlenecks else "basic",
    }


def _hgnet(stem: Sequence[int], stages: Sequence[Sequence[int]], affine: bool) -> dict[str, Any]:
    """Return the settings of PaddlePaddle's PP-HGNetV2. `stem`: channels inside and after the stem; `affine`: a learned
    scale and bias after each activation. Each of the `blocks` of a stage has `layers` convolutions of `inner` channels,
    whose results are joined to `width` channels. Light ones are a pointwise and a depthwise convolution."""
    inner, widths, blocks, light, kernels, layers = (list(column) for column in zip(*stages, strict=True))
    return {
        "model_type": "hgnet_v2",
        "stem_channels": [3, *stem],
        "stage_in_channels": [stem[1], *widths[:-1]],
        "stage_mid_channels": inner,
        "stage_out_channels": widths,
        "stage_num_blocks": blocks,
        "stage_downsample": [index > 0 for index in range(len(stages))],
        "stage_light_block": list(map(bool, light)),
        "stage_kernel_size": kernels,
        "stage_numb_of_layers": layers,
        "depths": blocks,
        "hidden_sizes": widths,
        "use_learnable_affine_block": affine,
    }


def _published_hgnet(
    stem: tuple[int, int], inner: int, outer: Sequence[int], blocks: Sequence[int], layers: int
) -> dict[str, Any]:
    """Return the settings of a published PP-HGNetV2. `inner`: channels of the first stage. Small ones are affine."""
    stages = [
        (inner << index, width, count, index > 1, 5 if index > 1 else 3, layers)
        for index, (width, count) in enumerate(zip(outer, blocks, strict=True))
    ]
    return _hgnet(stem, stages, layers < 6)


_B0 = _published_hgnet((16, 16), 16, (64, 256, 512, 1024), (1, 1, 2, 1), 3)
_B2 = _published_hgnet((24, 32), 32, (96, 384, 768, 1536), (1, 1, 3, 1), 4)
_B4 = _published_hgnet((32, 48), 48, (128, 512, 1024, 2048), (1, 1, 3, 1), 6)
_B5 = _published_hgnet((32, 64), 64, (128, 512, 1024, 2048), (1, 2, 5, 2), 6)
_R50 = _resnet((3, 4, 6, 3), True)
_SMALLEST = {"maps": 2, "width": 128, "hidden": 512, "decoder_width": 128, "decoder_hidden": 512, "points": (6, 6)}
# Parameter counts, and values in the repositories' configs/ that differ from `RTDETRConfig`.
_VARIANTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "r18vd": (20_153_872, {"backbone": _resnet((2, 2, 2, 2), False), "fused": 128, "decoder_layers": 3}),
    "r34vd": (31_403_652, {"backbone": _resnet((3, 4, 6, 3), False), "fused": 128, "decoder_layers": 4}),
    "r50vd_m": (33_125_904, {"backbone": _R50, "fused": 128, "decoder_layers": 3}),
    "r50vd": (42_870_636, {"backbone": _R50}),
    "r101vd": (
        76_535_532,
        {"backbone": _resnet((3, 4, 23, 3), True), "width": 384, "fused": 384, "hidden": 2048},
    ),
    "n": (3_760_053, {**_SMALLEST, "backbone": _B0, "fused": 21, "fusions": 2, "decoder_layers": 3}),
    "s": (10_288_869, {"backbone": _B0, "fused": 64, "fusions": 1, "decoder_layers": 3}),
    "m": (19_542_632, {"backbone": _B2, "fused": 128, "fusions": 2, "decoder_layers": 4}),
    "l": (31_223_416, {"backbone": _B4, "fused": 128}),
    "x": (62_600_824, {"backbone": _B5, "fused": 192, "width": 384, "hidden": 2048}),
}
_FEWER = {"_sp1": 19_987_336, "_sp2": 20_042_848, "_sp3": 20_098_360}  # parameter counts of r18vd
_KINDS: Mapping[str, Kind] = {"rtdetr": "rt_detr", "rtdetrv2": "rt_detr_v2", "dfine": "d_fine"}
_NAME = re.compile(r"(rtdetr|rtdetrv2|dfine)_(.+?)(_dsp|_sp\d)?")


def _published(name: str) -> tuple[RTDETRConfig, int]:
    """Return the config of a published model, and its number of parameters."""
    match = _NAME.fullmatch(name)
    assert match is not None
    family, variant, sampling = match.groups()
    parameters, fields = _VARIANTS[variant]
    if family == "dfine":
        fields = {"points": (3, 6, 3), **fields}
    if sampling == "_dsp":
        fields = {**fields, "sampling": "discrete"}
    elif sampling is not None:
        fields = {**fields, "points": (int(sampling[-1]),) * 3}
    return RTDETRConfig(_KINDS[family], **fields), _FEWER.get(sampling or "", parameters)


_RESNET_KEY, _HGNET_KEY = "backbone.conv1.conv1_1.conv.weight", "backbone.stem.stem1.conv.weight"
_FIRST = "decoder.dec_score_head.0.weight"
_MEDIUM = "encoder.fpn_blocks.0.conv3.conv.weight"  # exists only in CSP blocks narrower than the encoder
# Fusion tensors in RT-DETR's and in D-FINE's encoder.
_FUSED = ("encoder.fpn_blocks.0.conv1.conv.weight", "encoder.fpn_blocks.0.cv2.1.conv.weight")
_FUSIONS = ("encoder.fpn_blocks.0.bottlenecks.", "encoder.fpn_blocks.0.cv2.0.bottlenecks.")
_LAYER = re.compile(r"decoder\.(?:decoder\.(?:layers|lqe_layers)|dec_score_head|dec_bbox_head)\.(\d+)\..*")


def _recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """Recognise a checkpoint of the original repositories by its keys, and its configuration by tensor shapes.

    Tensors do not show how cells are sampled ("default" unless a name or a config says "discrete"), nor whether a model
    stops before its last decoder layer.

    Raises:
        CheckpointError: a variant without a transformers module, missing tensors, or an ambiguous configuration.
    """
    if _FIRST not in state or not (_RESNET_KEY in state or _HGNET_KEY in state) or "model_type" in hints.config:
        return None
    later = "decoder.decoder.layers.0.cross_attn.num_points_scale" in state
    kind: Kind = "rt_detr_v2" if later else "rt_detr"
    if "decoder.pre_bbox_head.layers.0.weight" in state:
        kind = "d_fine"
    notes: list[str] = []
    layers = _layers_run(state, kind, hints, notes)
    kept = {key: tensor for key, tensor in state.items() if not ((m := _LAYER.fullmatch(key)) and int(m[1]) >= layers)}
    renamed = apply(RULES[kind], kept)
    unknown = [key for key, tensors in renamed.items() if tensors is None]
    other = [key for key, twin in TWINS.items() if key in kept and not kept[key].equal(kept.get(twin, kept[key]))]
    if unknown or other:
        problems = [told_unknown(unknown, state)] if unknown else []
        problems += [f"values that differ from those of the duplicate: {listed(other)}"] if other else []
        raise CheckpointError(
            "vitdeploy does not support the RT-DETR or D-FINE variant of the state dict",
            found="; ".join(problems),
            expected="a published variant, with any number of classes: vitdeploy export list rtdetr, or dfine",
            fix="export it where it was trained (export_onnx.py in the repository's tools/), and use the ONNX file",
        )
    make = partial(_config, kept, kind, layers, hints, notes)
    config = checked("RT-DETR or D-FINE", make, " (vitdeploy export list)")
    for why, keys in (("used in training only", TRAINING), ("computed by the model itself", COMPUTED)):
        if there := [key for key in state if key.startswith(keys)]:
            notes.append(f"left out, {why}: {listed(there)}")
    mapped = {f"model.{name}": tensor for tensors in renamed.values() for name, tensor in (tensors or {}).items()}
    for name in [name for name in mapped if name.endswith(".reg_scale")]:
        mapped[name] = mapped[name].float()  # D-FINE saves an integer if its configuration has one
    return Recognised("rtdetr", "original", config, mapped, tuple(notes))


def _layers_run(state: Mapping[str, Tensor], kind: Kind, hints: Hints, notes: list[str]) -> int:
    """Return the number of decoder layers used at inference."""
    trained = count_below(state, "decoder.dec_score_head.")
    run = hints.config.get("decoder_layers")
    if isinstance(run, int) and 0 < run < trained:
        notes.append(f"left out, used in training only: decoder layers {run + 1} to {trained}")
        return run
    if run is None and kind != "d_fine" and trained == 6 and _MEDIUM in state:
        raise CheckpointError(
            "the tensors do not determine the last decoder layer of this RT-DETR at inference",
            found=f"narrow CSP blocks and {trained} layers; the published r50vd_m stops after the third",
            expected="the model's name",
            fix=f"vitdeploy export {'rtdetrv2' if kind == 'rt_detr_v2' else 'rtdetr'}_r50vd_m --checkpoint FILE",
        )
    return trained


def _config(state: Mapping[str, Tensor], kind: Kind, layers: int, hints: Hints, notes: list[str]) -> RTDETRConfig:
    fine, maps = kind == "d_fine", count_below(state, "encoder.input_proj.")
    points, heads = _points(state, maps)
    config = RTDETRConfig(
        kind,
        _hgnet_of(state) if fine else _resnet_of(state),
        maps=maps,
        width=len(state["encoder.lateral_convs.0.conv.weight"]),
        hidden=len(state["encoder.encoder.0.layers.0.linear1.weight"]),
        fused=len(state[_FUSED[fine]]),
        fusions=count_below(state, _FUSIONS[fine]),
        decoder_width=len(state["decoder.enc_bbox_head.layers.0.weight"]),
        decoder_hidden=len(state["decoder.decoder.layers.0.linear1.weight"]),
        decoder_layers=layers,
        points=points,
        sampling=_sampling(kind, hints, notes),
        heads=heads,
        bins=len(state["decoder.dec_bbox_head.0.layers.2.weight"]) // 4 - 1 if fine else 32,
        num_classes=len(state[_FIRST]),
    )
    return replace(config, image_size=_evaluated_size(state, config, hints, notes))


def _points(state: Mapping[str, Tensor], maps: int) -> tuple[tuple[int, ...], int]:
    """Return the sampling points of a head in each map, and the number of heads: 8 if no tensor has the points."""
    attention = "decoder.decoder.layers.0.cross_attn"
    rows = len(state[f"{attention}.attention_weights.bias"])
    if (scale := state.get(f"{attention}.num_points_scale")) is None:
        return (rows // (8 * maps),) * maps, 8
    points: list[int] = []
    while sum(points) < len(scale):
        points.append(max(1, round(1 / float(scale[sum(points)]))))
    if len(points) != maps or sum(points) != len(scale):
        raise ValueError(f"the decoder samples {len(points)} maps, the encoder has {maps}")
    return tuple(points), rows // len(scale)


def _sampling(kind: Kind, hints: Hints, notes: list[str]) -> Sampling:
    method = hints.config.get("decoder_method") if kind != "rt_detr" else "default"
    if method is None and kind == "rt_detr_v2":  # all published D-FINE models use the default
        notes.append('assuming interpolated sampling ("default"); for discrete sampling, name it: rtdetrv2_..._dsp')
    return "discrete" if method == "discrete" else "default"


def _evaluated_size(
    state: Mapping[str, Tensor], config: RTDETRConfig, hints: Hints, notes: list[str]
) -> tuple[int, int]:
    """Return the image size of the anchors in the checkpoint, at which it was evaluated."""
    anchors, usual = state.get("decoder.anchors"), hints.image_size or config.image_size
    if anchors is None:
        return usual
    cells = anchors.shape[1]
    side = math.isqrt(round(cells / sum(1 / stride**2 for stride in config.strides)))
    if side and config.tokens((side, side)) == cells:
        return side, side
    notes.append(f"{cells} anchors do not match a square image: assuming {usual[0]}x{usual[1]}")
    return usual


def _resnet_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    depths = [count_below(state, f"backbone.res_layers.{stage}.blocks.") for stage in range(4)]
    return _resnet(depths, "backbone.res_layers.0.blocks.0.branch2c.conv.weight" in state)


def _hgnet_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    stem = len(state[_HGNET_KEY]), len(state["backbone.stem.stem4.conv.weight"])
    stages = []
    for blocks in (f"backbone.stages.{index}.blocks." for index in range(4)):
        light = f"{blocks}0.layers.0.conv1.conv.weight" in state
        first = state[f"{blocks}0.layers.0.{'conv2.' if light else ''}conv.weight"]
        width, layers = len(state[f"{blocks}0.aggregation.1.conv.weight"]), count_below(state, f"{blocks}0.layers.")
        stages.append((len(first), width, count_below(state, blocks), light, first.shape[-1], layers))
    return _hgnet(stem, stages, "backbone.stem.stem1.lab.scale" in state)


# --- The repositories' keys and the names in transformers' modules ----------------------------------------------------


# Tensors that a model computes for one image size, and tensors that only training needs.
COMPUTED = ("decoder.anchors", "decoder.valid_mask")
TRAINING = ("decoder.denoising_class_embed.",)
# Duplicate names of scalars in D-FINE's decoder.
TWINS = {"decoder.decoder.up": "decoder.up", "decoder.decoder.reg_scale": "decoder.reg_scale"}

# The backbone's norms are frozen and have no batch counters. In shortcuts with pooling, the convolution is the second
# module.
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
# transformers' later modules hold the heads under two names, as one tensor.
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


RULES: Mapping[Kind, tuple[Rule, ...]] = {kind: _of_family(kind) for kind in _KINDS.values()}


FAMILY = Family(
    name="rtdetr",
    paper="arXiv 2304.08069",
    names={name: _published(name)[0] for name in NAMES["rtdetr"]},
    parse=lambda name: None,
    build=LibraryDetector,
    describe=describe,
    recognise=_recognise,
    # The weights do not depend on the image size.
    resize=partial(resize, ("RT-DETR and D-FINE do not take", "RT-DETR or D-FINE")),
    # Both sides are scaled to the input; pixels in 0 to 1, without mean and std.
    preprocess=lambda config: PreprocessSpec(config.image_size, config.image_size, "bilinear", (0.0,) * 3, (1.0,) * 3),
    # Values that tensors do not show, in the form of a transformers config.json.
    hints=lambda name, config: Hints(
        config={"decoder_layers": config.decoder_layers, "decoder_method": config.sampling}
    ),
    free={"num_classes": "classes"},
    architecture={
        "architecture": "kind",
        "backbone": "backbone",
        "feature maps": "maps",
        "encoder width": "width",
        "encoder MLP": "hidden",
        "channels of its CSP blocks": "fused",
        "blocks in these": "fusions",
        "decoder width": "decoder_width",
        "decoder MLP": "decoder_hidden",
        "decoder layers": "decoder_layers",
        "points": "points",
        "sampling": "sampling",
        "heads": "heads",
        "bins": "bins",
    },
    parameters={name: _published(name)[1] for name in NAMES["rtdetr"]},
)

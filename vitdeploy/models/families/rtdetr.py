"""RT-DETR, RT-DETRv2 and D-FINE in the catalog: checkpoints of the original repositories, by their own names.

    rtdetr_<backbone>, rtdetrv2_<backbone>[_dsp | _sp<n>]     r18vd, r34vd, r50vd_m, r50vd, r101vd
    dfine_<n|s|m|l|x>

`_dsp` samples the nearest cell instead of between four ("discrete sampling"), `_sp<n>` has n points in each map. What
transformers saved comes as a folder instead (`hf:`), with its config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.library_detectors import (
    RTDETR,
    HGNetV2,
    Kind,
    ResNetD,
    RTDETRConfig,
    Sampling,
    Stage,
    fused_channels,
    square_of,
)
from vitdeploy.models.checkpoints.mismatch import listed, patterns
from vitdeploy.models.family import Family, Hints, Recognised, Signature, refuse_few_tokens
from vitdeploy.models.keys.rtdetr import COMPUTED, TRAINING, renamed
from vitdeploy.models.keys.rules import count_below
from vitdeploy.spec import PostprocessSpec, PreprocessSpec, TensorSpec

RESNETS = {
    "r18vd": ResNetD((2, 2, 2, 2), False),
    "r34vd": ResNetD((3, 4, 6, 3), False),
    "r50vd": ResNetD((3, 4, 6, 3), True),
    "r101vd": ResNetD((3, 4, 23, 3), True),
}
# Of the repositories' files in configs/, where they differ from `RTDETRConfig`.
_VARIANTS: Mapping[str, dict[str, Any]] = {
    "r18vd": {"backbone": RESNETS["r18vd"], "fused": 128, "decoder_layers": 3},
    "r34vd": {"backbone": RESNETS["r34vd"], "fused": 128, "decoder_layers": 4},
    "r50vd_m": {"backbone": RESNETS["r50vd"], "fused": 128, "decoder_layers": 3},
    "r50vd": {"backbone": RESNETS["r50vd"]},
    "r101vd": {"backbone": RESNETS["r101vd"], "width": 384, "fused": 384, "hidden": 2048},
}
_SAMPLINGS: Mapping[str, dict[str, Any]] = {
    "_dsp": {"sampling": "discrete"},
    **{f"_sp{points}": {"points": (points,) * 3} for points in (1, 2, 3)},
}
_PUBLISHED_SAMPLINGS = ("r18vd_dsp", "r34vd_dsp", "r50vd_m_dsp", "r50vd_dsp", "r18vd_sp1", "r18vd_sp2", "r18vd_sp3")


def _hgnet(stem: tuple[int, int], widths: tuple[int, ...], blocks: tuple[int, ...], layers: int) -> HGNetV2:
    """A published HGNetV2; `widths`: inner and outer channels of each stage. The small ones have affine blocks."""
    stages = zip(widths[::2], widths[1::2], blocks, strict=True)
    return HGNetV2(
        stem,
        tuple(
            Stage(inner, width, count, index > 1, 5 if index > 1 else 3, layers)
            for index, (inner, width, count) in enumerate(stages)
        ),
        affine=layers < 6,
    )


_B0 = _hgnet((16, 16), (16, 64, 32, 256, 64, 512, 128, 1024), (1, 1, 2, 1), 3)
_B2 = _hgnet((24, 32), (32, 96, 64, 384, 128, 768, 256, 1536), (1, 1, 3, 1), 4)
_B4 = _hgnet((32, 48), (48, 128, 96, 512, 192, 1024, 384, 2048), (1, 1, 3, 1), 6)
_B5 = _hgnet((32, 64), (64, 128, 128, 512, 256, 1024, 512, 2048), (1, 2, 5, 2), 6)
_SMALLEST = {"maps": 2, "width": 128, "hidden": 512, "decoder_width": 128, "decoder_hidden": 512, "points": (6, 6)}
_FINE: Mapping[str, tuple[HGNetV2, float, dict[str, Any]]] = {  # backbone, expansion, all else
    "n": (_B0, 0.34, {**_SMALLEST, "fusions": 2, "decoder_layers": 3}),
    "s": (_B0, 0.5, {"fusions": 1, "decoder_layers": 3}),
    "m": (_B2, 1.0, {"fusions": 2, "decoder_layers": 4}),
    "l": (_B4, 1.0, {}),
    "x": (_B5, 1.0, {"width": 384, "hidden": 2048}),
}


def _published() -> dict[str, RTDETRConfig]:
    named = {f"rtdetr_{name}": RTDETRConfig("rt_detr", **given) for name, given in _VARIANTS.items()}
    named |= {f"rtdetrv2_{name}": RTDETRConfig("rt_detr_v2", **given) for name, given in _VARIANTS.items()}
    for name in _PUBLISHED_SAMPLINGS:
        backbone, _, sampling = name.rpartition("_")
        named[f"rtdetrv2_{name}"] = replace(named[f"rtdetrv2_{backbone}"], **_SAMPLINGS[f"_{sampling}"])
    for size, (net, expansion, given) in _FINE.items():
        fused = fused_channels(given.get("width", 256), expansion)
        named[f"dfine_{size}"] = RTDETRConfig("d_fine", net, **{"points": (3, 6, 3), "fused": fused, **given})
    return named


NAMES = _published()
PARAMETERS = {
    "rtdetr_r18vd": 20_153_872,
    "rtdetr_r34vd": 31_403_652,
    "rtdetr_r50vd_m": 33_125_904,
    "rtdetr_r50vd": 42_870_636,
    "rtdetr_r101vd": 76_535_532,
    "rtdetrv2_r18vd": 20_153_872,
    "rtdetrv2_r34vd": 31_403_652,
    "rtdetrv2_r50vd_m": 33_125_904,
    "rtdetrv2_r50vd": 42_870_636,
    "rtdetrv2_r101vd": 76_535_532,
    "rtdetrv2_r18vd_dsp": 20_153_872,
    "rtdetrv2_r34vd_dsp": 31_403_652,
    "rtdetrv2_r50vd_m_dsp": 33_125_904,
    "rtdetrv2_r50vd_dsp": 42_870_636,
    "rtdetrv2_r18vd_sp1": 19_987_336,
    "rtdetrv2_r18vd_sp2": 20_042_848,
    "rtdetrv2_r18vd_sp3": 20_098_360,
    "dfine_n": 3_760_053,
    "dfine_s": 10_288_869,
    "dfine_m": 19_542_632,
    "dfine_l": 31_223_416,
    "dfine_x": 62_600_824,
}

# What makes another architecture, by the word that a user knows it by.
ARCHITECTURE = {
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
}
_RESNET_KEY, _HGNET_KEY = "backbone.conv1.conv1_1.conv.weight", "backbone.stem.stem1.conv.weight"
_FIRST = "decoder.dec_score_head.0.weight"
_MEDIUM = "encoder.fpn_blocks.0.conv3.conv.weight"  # of CSP blocks that are narrower than the encoder
# Of RT-DETR's and of D-FINE's encoder.
_FUSED = ("encoder.fpn_blocks.0.conv1.conv.weight", "encoder.fpn_blocks.0.cv2.1.conv.weight")
_FUSIONS = ("encoder.fpn_blocks.0.bottlenecks.", "encoder.fpn_blocks.0.cv2.0.bottlenecks.")
_LAYER = re.compile(r"decoder\.(?:decoder\.(?:layers|lqe_layers)|dec_score_head|dec_bbox_head)\.(\d+)\..*")


def hints(name: str, config: RTDETRConfig) -> Hints:
    """What no tensor shows, as transformers' config.json would say it."""
    return Hints(config={"decoder_layers": config.decoder_layers, "decoder_method": config.sampling})


def describe(config: RTDETRConfig) -> Signature:
    """Outputs, and how they are read: all queries by the best classes of a sigmoid, as the repositories do."""
    outputs = (
        TensorSpec("logits", "float32", ("batch", config.queries, config.num_classes)),
        TensorSpec("boxes", "float32", ("batch", config.queries, 4)),
    )
    return Signature("detection", config.image_size, 3, outputs, PostprocessSpec(scores="sigmoid"))


def preprocess(config: RTDETRConfig) -> PreprocessSpec:
    """Both sides are scaled to the input, bilinear; colours in 0 to 1, with no mean and deviation."""
    return PreprocessSpec(config.image_size, config.image_size, "bilinear", (0.0,) * 3, (1.0,) * 3)


def resize(
    config: RTDETRConfig, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[RTDETRConfig, dict[str, Tensor]]:
    """The same weights at another image size: none of them depends on it.

    Raises:
        CheckpointError: 32 does not divide both sides, or there are fewer tokens than queries.
    """
    try:
        resized = replace(config, image_size=image_size)
    except ValueError as error:
        near = "x".join(str(max(32, round(side / 32) * 32)) for side in image_size)
        raise CheckpointError(
            "RT-DETR and D-FINE do not take this image size",
            found=str(error),
            wanted="a height and a width that are multiples of 32",
            fix=f"--image-size {near}",
        ) from None
    refuse_few_tokens("RT-DETR or D-FINE", image_size, config.queries, config.tokens, 32)
    return resized, dict(state)


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """A checkpoint of the original repositories, by its keys; its shape by its tensors.

    Tensors do not show how cells are sampled ("default", until a name or a config says "discrete"), nor that a model
    answers before its last decoder layer.

    Raises:
        CheckpointError: a variant that transformers has no module for, tensors are missing, or what they cannot show
            makes a difference.
    """
    if _FIRST not in state or not (_RESNET_KEY in state or _HGNET_KEY in state) or "model_type" in hints.config:
        return None
    kind = _kind(state)
    notes: list[str] = []
    run = _layers_run(state, kind, hints, notes)
    kept = {key: tensor for key, tensor in state.items() if not ((m := _LAYER.fullmatch(key)) and int(m[1]) >= run)}
    found = renamed(kept, kind)
    if found.unknown or found.twice:
        raise _other_variant(found.unknown, found.twice, state)
    try:
        config = _config(kept, kind, run, hints, notes)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            "the state dict is that of an RT-DETR or D-FINE which vitdeploy cannot build",
            found=f"no tensor {error}" if isinstance(error, KeyError) else str(error),
            wanted="every tensor of a published variant (vitdeploy export list), with any number of classes",
            fix="save the whole state dict",
        ) from None
    for why, keys in (("used in training only", TRAINING), ("computed by the model itself", COMPUTED)):
        if there := [key for key in state if key.startswith(keys)]:
            notes.append(f"left out, {why}: {listed(there)}")
    mapped = {f"model.{key}": tensor for key, tensor in found.state.items()}
    return Recognised("rtdetr", "original", config, mapped, tuple(notes))


def _kind(state: Mapping[str, Tensor]) -> Kind:
    if "decoder.pre_bbox_head.layers.0.weight" in state:
        return "d_fine"
    return "rt_detr_v2" if "decoder.decoder.layers.0.cross_attn.num_points_scale" in state else "rt_detr"


def _layers_run(state: Mapping[str, Tensor], kind: Kind, hints: Hints, notes: list[str]) -> int:
    """How many of the decoder's layers answer."""
    trained = count_below(state, "decoder.dec_score_head.")
    told = hints.config.get("decoder_layers")
    if isinstance(told, int) and 0 < told < trained:
        notes.append(f"left out, used in training only: decoder layers {told + 1} to {trained}")
        return told
    if told is None and kind != "d_fine" and trained == 6 and _MEDIUM in state:
        raise CheckpointError(
            "no tensor says after which decoder layer this RT-DETR answers",
            found=f"narrow CSP blocks and {trained} layers, of which r50vd_m, as published, answers after the third",
            wanted="the model's name",
            fix=f"vitdeploy export {'rtdetrv2' if kind == 'rt_detr_v2' else 'rtdetr'}_r50vd_m --checkpoint FILE",
        )
    return trained


def _other_variant(unknown: tuple[str, ...], twice: tuple[str, ...], state: Mapping[str, Tensor]) -> CheckpointError:
    told = [f"{len(unknown)} unknown: {listed(patterns(unknown, state))}"] if unknown else []
    told += [f"other numbers than its twin has: {listed(list(twice))}"] if twice else []
    return CheckpointError(
        "the state dict is that of an RT-DETR or D-FINE which vitdeploy does not have",
        found="; ".join(told),
        wanted="a published variant, with any number of classes: vitdeploy export list rtdetr, or dfine",
        fix="export it where it was trained (export_onnx.py in the repository's tools/), and bring the ONNX file",
    )


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
    return replace(config, image_size=_image_size(state, config, hints, notes))


def _points(state: Mapping[str, Tensor], maps: int) -> tuple[tuple[int, ...], int]:
    """What a head samples of each map, and the heads: 8, where no tensor says the points."""
    attention = "decoder.decoder.layers.0.cross_attn"
    rows = len(state[f"{attention}.attention_weights.bias"])
    if (scale := state.get(f"{attention}.num_points_scale")) is None:
        return (rows // (8 * maps),) * maps, 8
    points: list[int] = []
    while sum(points) < len(scale):
        points.append(max(1, round(1 / float(scale[sum(points)]))))
    if len(points) != maps or sum(points) != len(scale):
        raise ValueError(f"{len(points)} maps to sample in the decoder, {maps} in the encoder")
    return tuple(points), rows // len(scale)


def _sampling(kind: Kind, hints: Hints, notes: list[str]) -> Sampling:
    if kind == "rt_detr":
        return "default"
    told = hints.config.get("decoder_method")
    if told is None and kind == "rt_detr_v2":  # of D-FINE no model is published that samples otherwise
        notes.append('sampling between cells is assumed ("default"); name a discretely sampled model: rtdetrv2_..._dsp')
    return "discrete" if told == "discrete" else "default"


def _image_size(state: Mapping[str, Tensor], config: RTDETRConfig, hints: Hints, notes: list[str]) -> tuple[int, int]:
    """The size of the anchors in the checkpoint, which are those of the size that it was evaluated at."""
    anchors, told = state.get("decoder.anchors"), hints.image_size or config.image_size
    if anchors is None:
        return told
    side = square_of(anchors.shape[1], config.strides)
    if side is None:
        notes.append(f"{anchors.shape[1]} anchors, which no square image has: {told[0]}x{told[1]} is assumed")
    return told if side is None else (side, side)


def _resnet_of(state: Mapping[str, Tensor]) -> ResNetD:
    depths = tuple(count_below(state, f"backbone.res_layers.{stage}.blocks.") for stage in range(4))
    return ResNetD(depths, "backbone.res_layers.0.blocks.0.branch2c.conv.weight" in state)


def _hgnet_of(state: Mapping[str, Tensor]) -> HGNetV2:
    stem = (len(state[_HGNET_KEY]), len(state["backbone.stem.stem4.conv.weight"]))
    stages = tuple(_stage(state, f"backbone.stages.{index}.blocks.") for index in range(4))
    return HGNetV2(stem, stages, "backbone.stem.stem1.lab.scale" in state)


def _stage(state: Mapping[str, Tensor], blocks: str) -> Stage:
    light = f"{blocks}0.layers.0.conv1.conv.weight" in state
    first = state[f"{blocks}0.layers.0.{'conv2.' if light else ''}conv.weight"]
    return Stage(
        inner=len(first),
        width=len(state[f"{blocks}0.aggregation.1.conv.weight"]),
        blocks=count_below(state, blocks),
        light=light,
        kernel=first.shape[-1],
        layers=count_below(state, f"{blocks}0.layers."),
    )


FAMILY = Family(
    name="rtdetr",
    paper="arXiv 2304.08069",
    names=NAMES,
    parse=lambda name: None,
    build=RTDETR,
    describe=describe,
    recognise=recognise,
    resize=resize,
    preprocess=preprocess,
    hints=hints,
    free={"num_classes": "classes"},
    architecture=ARCHITECTURE,
    parameters=PARAMETERS,
)

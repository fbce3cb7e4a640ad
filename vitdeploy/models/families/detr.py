"""DETR in the catalog: names, inputs and outputs of a model, and the shape that a checkpoint implies.

    detr_<resnet50|resnet101>[_dc5][_panoptic]                                  the published models
    detr_r<n>-<n>-<n>-<n>c<C>_w<W>h<H>e<E>d<D>q<Q>_<size>[_dc5][_panoptic]      any other

<n> are the blocks of the backbone's stages and C the channels of its stem (64 in ResNet-50); W the width, H the heads,
E and D the layers of encoder and decoder, Q the object queries; <size> is a side in pixels, or <height>x<width>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.detr import DETR, MIN_SIDE, DETRConfig, DETRPanoptic, ResNetConfig
from vitdeploy.models.family import Family, Hints, Recognised, Signature, refuse_channels
from vitdeploy.models.keys import detr as keys
from vitdeploy.models.keys.rules import count_below
from vitdeploy.models.model_folder.image_processor import IMAGENET_MEAN, IMAGENET_STD
from vitdeploy.models.names import NAMES
from vitdeploy.spec import PostprocessSpec, PreprocessSpec, TensorSpec

RESNETS = {"resnet50": ResNetConfig(), "resnet101": ResNetConfig(depths=(3, 4, 23, 3))}
# COCO's panoptic labels: ids up to 90 are things, higher ones stuff, 250 columns (hubconf.py of the released code).
PANOPTIC_CLASSES, PANOPTIC_THINGS = 250, 91
# The released code's demo shows detections above 0.7, its panoptic post-processing keeps queries above 0.85.
DETECTION_THRESHOLD, PANOPTIC_THRESHOLD = 0.7, 0.85
_PUBLISHED_WIDTH, _PUBLISHED_HEADS = 256, 8

_NAME = re.compile(
    r"detr_(?:(?P<resnet>resnet50|resnet101)|r(?P<depths>\d+-\d+-\d+-\d+)c(?P<stem>\d+)"
    r"_w(?P<width>\d+)h(?P<heads>\d+)e(?P<encoder>\d+)d(?P<decoder>\d+)q(?P<queries>\d+)"
    r"_(?P<height>\d+)(?:x(?P<image_width>\d+))?)(?P<dc5>_dc5)?(?P<panoptic>_panoptic)?"
)
# What makes another architecture, by the word that a user knows it by.
ARCHITECTURE = {
    "backbone's blocks": "backbone.depths",
    "backbone's widths": "backbone.widths",
    "width": "width",
    "heads": "heads",
    "encoder layers": "encoder_layers",
    "decoder layers": "decoder_layers",
    "MLP width": "hidden",
    "queries": "queries",
    "mask head": "panoptic",
}


def parse(name: str) -> DETRConfig | None:
    """The configuration that a name spells out, with COCO's number of classes until a checkpoint says otherwise.

    Raises:
        UnknownModelError: the sizes in the name contradict each other.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    dilated, panoptic = match["dc5"] is not None, match["panoptic"] is not None
    classes = PANOPTIC_CLASSES if panoptic else 91
    if match["resnet"] is not None:
        backbone = replace(RESNETS[match["resnet"]], dilate_last=dilated)
        return DETRConfig(backbone=backbone, num_classes=classes, panoptic=panoptic)
    first, second, third, fourth = map(int, match["depths"].split("-"))
    stem, width, height = int(match["stem"]), int(match["width"]), int(match["height"])
    try:
        return DETRConfig(
            image_size=(height, int(match["image_width"] or height)),
            backbone=ResNetConfig(
                stem_width=stem,
                widths=(4 * stem, 8 * stem, 16 * stem, 32 * stem),
                depths=(first, second, third, fourth),
                dilate_last=dilated,
            ),
            width=width,
            heads=int(match["heads"]),
            encoder_layers=int(match["encoder"]),
            decoder_layers=int(match["decoder"]),
            hidden=8 * width,
            queries=int(match["queries"]),
            num_classes=classes,
            panoptic=panoptic,
        )
    except ValueError as error:
        raise UnknownModelError(f"{name!r} cannot be built", found=str(error)) from None


def build(config: DETRConfig) -> nn.Module:
    return DETRPanoptic(config) if config.panoptic else DETR(config)


def describe(config: DETRConfig) -> Signature:
    """Outputs, and how they are read: thresholds as the released code's, all else as transformers' defaults.

    Which classes are things is known for COCO's panoptic labels only; with any other number of classes all are, so that
    no segments of a class are fused (transformers' default).
    """
    outputs = [
        TensorSpec("logits", "float32", ("batch", config.queries, config.num_classes + 1)),
        TensorSpec("boxes", "float32", ("batch", config.queries, 4)),
    ]
    if not config.panoptic:
        postprocess = PostprocessSpec("softmax", "cxcywh", DETECTION_THRESHOLD)
        return Signature("detection", config.image_size, config.backbone.in_channels, tuple(outputs), postprocess)
    outputs.append(TensorSpec("masks", "float32", ("batch", config.queries, *config.mask_size)))
    things = PANOPTIC_THINGS if config.num_classes == PANOPTIC_CLASSES else config.num_classes
    postprocess = PostprocessSpec("softmax", "cxcywh", PANOPTIC_THRESHOLD, tuple(range(things)))
    return Signature("panoptic", config.image_size, config.backbone.in_channels, tuple(outputs), postprocess)


def preprocess(config: DETRConfig) -> PreprocessSpec:
    """ImageNet's mean and deviation, bilinear. Both sides are scaled to the model's input.

    The released code keeps the aspect and pads batches instead: an engine has one input size and no padding.

    Raises:
        CheckpointError: the backbone does not take 3 channels.
    """
    refuse_channels(config.backbone.in_channels, grey=False)
    return PreprocessSpec(config.image_size, config.image_size, "bilinear", IMAGENET_MEAN, IMAGENET_STD)


def resize(
    config: DETRConfig, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[DETRConfig, dict[str, Tensor]]:
    """The same weights at another image size: no tensor of a DETR depends on it.

    Raises:
        CheckpointError: a side of less than 32 pixels.
    """
    try:
        return replace(config, image_size=image_size), dict(state)
    except ValueError as error:
        raise CheckpointError(
            "DETR does not take this image size",
            found=str(error),
            wanted=f"any height and width of at least {MIN_SIDE} pixels",
            fix="--image-size HEIGHTxWIDTH",
        ) from None


def transformers_keys(values: Mapping[str, Any], config: DETRConfig) -> dict[str, Any]:
    return {
        "d_model": config.width,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_ffn_dim": config.hidden,
        "num_queries": config.queries,
    }


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """A DETR by its keys; its shape by its tensors; what they cannot show from `hints`.

    Tensors cannot show the heads of a model without a mask head, nor whether the backbone is dilated (DC5): that is
    `"dilation": true` in the config.

    Raises:
        CheckpointError: the heads cannot be known, tensors are missing, or a variant that is another function.
    """
    if hints.config.get("model_type", "detr") != "detr":
        return None  # others have the same names: Table Transformer, for one
    read = keys.read(state)
    if read is None:
        return None
    style, found, notes = read
    _check_config(hints.config)
    width = _size(found, "input_proj.weight", 0)
    panoptic = any(key.startswith("mask_head.") for key in found)
    try:
        config = DETRConfig(
            image_size=hints.image_size or DETRConfig().image_size,
            backbone=_backbone(found, hints.config, notes),
            width=width,
            heads=_heads(found, width, hints, notes),
            encoder_layers=count_below(found, "encoder."),
            decoder_layers=count_below(found, "decoder."),
            hidden=_size(found, "encoder.0.mlp.fc1.weight", 0),
            queries=_size(found, "query_embed", 0),
            num_classes=_size(found, "class_embed.weight", 0) - 1,
            panoptic=panoptic,
        )
    except ValueError as error:
        raise CheckpointError("the state dict is that of a DETR which cannot be built", found=str(error)) from None
    return Recognised("detr", style, config, found, tuple(notes))


def _check_config(config: Mapping[str, Any]) -> None:
    wanted = {"activation_function": "relu", "position_embedding_type": "sine"}
    found = {key: config[key] for key, value in wanted.items() if config.get(key, value) != value}
    if config.get("encoder_attention_heads") != config.get("decoder_attention_heads"):
        key = "decoder_attention_heads"
        wanted[key], found[key] = str(config.get("encoder_attention_heads")), config.get(key)
    if found:
        raise CheckpointError(
            "config.json is that of a DETR which vitdeploy does not have",
            found=", ".join(f"{key} {value!r}" for key, value in found.items()),
            wanted=", ".join(f"{key} {wanted[key]}" for key in found),
            fix="export it where it was made, and bring the ONNX file",
        )


def _backbone(state: Mapping[str, Tensor], config: Mapping[str, Any], notes: list[str]) -> ResNetConfig:
    if "backbone.layers.0.0.conv2.weight" in state and "backbone.layers.0.0.conv3.weight" not in state:
        raise CheckpointError(
            "the backbone has blocks of two convolutions",
            found="as ResNet-18 and ResNet-34",
            wanted="bottlenecks of three, as ResNet-50 and ResNet-101",
            fix="export it where it was made, and bring the ONNX file",
        )
    first, second, third, fourth = (_size(state, f"backbone.layers.{stage}.0.conv3.weight", 0) for stage in range(4))
    depths = [count_below(state, f"backbone.layers.{stage}.") for stage in range(4)]
    own = config.get("backbone_config")
    stride = own.get("output_stride") if isinstance(own, Mapping) else None
    dilated = bool(config.get("dilation", stride == 16))
    if "dilation" not in config and stride is None:
        notes.append("backbone taken as not dilated: tensors cannot show whether it is (DC5)")
    return ResNetConfig(
        in_channels=_size(state, "backbone.conv1.weight", 1),
        stem_width=_size(state, "backbone.conv1.weight", 0),
        widths=(first, second, third, fourth),
        depths=(depths[0], depths[1], depths[2], depths[3]),
        dilate_last=dilated,
    )


def _heads(state: Mapping[str, Tensor], width: int, hints: Hints, notes: list[str]) -> int:
    said = hints.heads or hints.config.get("encoder_attention_heads")
    shown = state.get("mask_head.from_attention.weight")
    if shown is not None and said not in (None, shown.shape[1]):
        raise CheckpointError(
            "the number of attention heads is not that of the mask head",
            found=f"{said} heads",
            wanted=f"{shown.shape[1]}, as mask_head's first convolution has",
            fix="leave out --heads",
        )
    if shown is not None:
        return int(shown.shape[1])
    if said is None and width != _PUBLISHED_WIDTH:
        raise CheckpointError(
            "the number of attention heads cannot be known from the tensors",
            found=f"width {width}",
            wanted=f"the published width ({_PUBLISHED_WIDTH}), a config.json, or the number",
            fix=f"--heads N, a divisor of {width}",
        )
    if said is None:
        notes.append(f"{_PUBLISHED_HEADS} heads, as the published models of width {width} have; --heads says otherwise")
    return int(said or _PUBLISHED_HEADS)


def _size(state: Mapping[str, Tensor], key: str, axis: int) -> int:
    tensor = state.get(key)
    if tensor is None or tensor.ndim <= axis:
        raise CheckpointError(
            "the state dict has the names of a DETR, but is not whole",
            found=f"no {key}" if tensor is None else f"{key} of {list(tensor.shape)}",
            wanted="every tensor of the model",
            fix="save model.state_dict() of the whole model",
        )
    return int(tensor.shape[axis])


FAMILY = Family(
    name="detr",
    paper="arXiv 2005.12872",
    names={name: parse(name) for name in NAMES["detr"]},
    parse=parse,
    build=build,
    describe=describe,
    recognise=recognise,
    resize=resize,
    preprocess=preprocess,
    hints=lambda name, config: Hints(heads=config.heads, config={"dilation": config.backbone.dilate_last}),
    architecture=ARCHITECTURE,
    model_types=frozenset({"detr"}),
    transformers_keys=transformers_keys,
)

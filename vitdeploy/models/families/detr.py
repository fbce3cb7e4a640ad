"""DETR in the catalog: names, inputs and outputs of a model, and the configuration that a checkpoint implies.

    detr_<resnet50|resnet101>[_dc5][_panoptic]                                  the published models
    detr_r<n>-<n>-<n>-<n>c<C>_w<W>h<H>e<E>d<D>q<Q>_<size>[_dc5][_panoptic]      any other configuration

<n> is the number of blocks of a backbone stage, C the channels of its stem (64 in ResNet-50), W the width, H the heads,
E and D the layers of encoder and decoder, Q the object queries; <size> is a side in pixels, or <height>x<width>.

Two generations of transformers' names are read: those of files (hubs, `save_pretrained`) and those of the modules of
transformers 5, for example

    original  transformer.decoder.layers.0.multihead_attn.in_proj_weight       mask_head.lay3.weight
    file      model.decoder.layers.0.encoder_attn.out_proj.weight              mask_head.lay3.weight
    module    model.decoder.layers.0.encoder_attn.o_proj.weight                mask_head.fpn_stages.0.refine.conv.weight

The backbone has torchvision's and timm's names (`layer1.0.bn1.weight`) or those of transformers' ResNet
(`encoder.stages.0.layers.0.layer.0.normalization.weight`). Models with a mask head have all others below `detr.`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.detr import DETR, MIN_SIDE, DETRConfig, DETRPanoptic, ResNetConfig
from vitdeploy.models.family import Family, Hints, Recognised, Signature, refuse_channels
from vitdeploy.models.keys.rules import count_below, renamed, rules
from vitdeploy.models.model_folder.image_processor import IMAGENET_MEAN, IMAGENET_STD
from vitdeploy.models.names import NAMES
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import PreprocessSpec, TensorSpec

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
# Attributes that define the architecture, by display name.
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
    """Return the configuration of a name, with COCO's number of classes unless a checkpoint has another.

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
    """Return the outputs and their decoding: thresholds of the released code, otherwise transformers' defaults.

    Which classes are things is known only for COCO's panoptic labels; with any other number of classes all are things,
    so that segments of a class are not fused (transformers' default).
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
    """Return the preprocessing: ImageNet's mean and std, bilinear, both sides scaled to the model's input.

    The released code keeps the aspect ratio and pads batches; an engine has one input size and no padding.

    Raises:
        CheckpointError: the backbone does not take 3 channels.
    """
    refuse_channels(config.backbone.in_channels, grey=False)
    return PreprocessSpec(config.image_size, config.image_size, "bilinear", IMAGENET_MEAN, IMAGENET_STD)


def resize(
    config: DETRConfig, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[DETRConfig, dict[str, Tensor]]:
    """Return config and state for another image size: no tensor of a DETR depends on it.

    Raises:
        CheckpointError: a side of less than 32 pixels.
    """
    try:
        return replace(config, image_size=image_size), dict(state)
    except ValueError as error:
        raise CheckpointError(
            "DETR does not take this image size",
            found=str(error),
            expected=f"any height and width of at least {MIN_SIDE} pixels",
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
    """Recognise a DETR by its keys, its configuration by tensor shapes, and the rest by `hints`.

    Tensors do not show the heads of a model without a mask head, nor whether the backbone is dilated (DC5), which is
    `"dilation": true` in the config.

    Raises:
        CheckpointError: the heads are unknown, tensors are missing, or the variant is not supported.
    """
    if hints.config.get("model_type", "detr") != "detr":
        return None  # other models have the same names, such as Table Transformer
    named = read(state)
    if named is None:
        return None
    style, found, notes = named
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
        raise CheckpointError("the state dict describes an invalid DETR", found=str(error)) from None
    return Recognised("detr", style, config, found, tuple(notes))


def _check_config(config: Mapping[str, Any]) -> None:
    expected = {"activation_function": "relu", "position_embedding_type": "sine"}
    found = {key: config[key] for key, value in expected.items() if config.get(key, value) != value}
    if config.get("encoder_attention_heads") != config.get("decoder_attention_heads"):
        key = "decoder_attention_heads"
        expected[key], found[key] = str(config.get("encoder_attention_heads")), config.get(key)
    if found:
        raise CheckpointError(
            "config.json describes a DETR variant that vitdeploy does not support",
            found=", ".join(f"{key} {value!r}" for key, value in found.items()),
            expected=", ".join(f"{key} {expected[key]}" for key in found),
            fix="export it to ONNX with its own library, and use the ONNX file",
        )


def _backbone(state: Mapping[str, Tensor], config: Mapping[str, Any], notes: list[str]) -> ResNetConfig:
    if "backbone.layers.0.0.conv2.weight" in state and "backbone.layers.0.0.conv3.weight" not in state:
        raise CheckpointError(
            "vitdeploy does not support DETR backbones with basic blocks",
            found="blocks of two convolutions, as in ResNet-18 and ResNet-34",
            expected="bottlenecks of three, as in ResNet-50 and ResNet-101",
            fix="export it to ONNX with its own library, and use the ONNX file",
        )
    first, second, third, fourth = (_size(state, f"backbone.layers.{stage}.0.conv3.weight", 0) for stage in range(4))
    depths = [count_below(state, f"backbone.layers.{stage}.") for stage in range(4)]
    own = config.get("backbone_config")
    stride = own.get("output_stride") if isinstance(own, Mapping) else None
    dilated = bool(config.get("dilation", stride == 16))
    if "dilation" not in config and stride is None:
        notes.append("assuming a backbone without dilation (DC5), which tensors do not show")
    return ResNetConfig(
        in_channels=_size(state, "backbone.conv1.weight", 1),
        stem_width=_size(state, "backbone.conv1.weight", 0),
        widths=(first, second, third, fourth),
        depths=(depths[0], depths[1], depths[2], depths[3]),
        dilate_last=dilated,
    )


def _heads(state: Mapping[str, Tensor], width: int, hints: Hints, notes: list[str]) -> int:
    stated = hints.heads or hints.config.get("encoder_attention_heads")
    shown = state.get("mask_head.from_attention.weight")
    if shown is not None and stated not in (None, shown.shape[1]):
        raise CheckpointError(
            "the number of attention heads contradicts the mask head",
            found=f"{stated} heads",
            expected=f"{shown.shape[1]}, from mask_head's first convolution",
            fix="omit --heads",
        )
    if shown is not None:
        return int(shown.shape[1])
    if stated is None and width != _PUBLISHED_WIDTH:
        raise CheckpointError(
            "the tensors do not determine the number of attention heads",
            found=f"width {width}",
            expected=f"the published width ({_PUBLISHED_WIDTH}), a config.json, or --heads",
            fix=f"--heads N, a divisor of {width}",
        )
    if stated is None:
        notes.append(f"assuming {_PUBLISHED_HEADS} heads, as in published models of width {width} (override: --heads)")
    return int(stated or _PUBLISHED_HEADS)


def _size(state: Mapping[str, Tensor], key: str, axis: int) -> int:
    tensor = state.get(key)
    if tensor is None or tensor.ndim <= axis:
        raise CheckpointError(
            "the state dict has the names of a DETR, but is incomplete",
            found=f"no {key}" if tensor is None else f"{key} {list(tensor.shape)}",
            expected="every tensor of the model",
            fix="save model.state_dict() of the whole model",
        )
    return int(tensor.shape[axis])


# --- The names of tensors in other libraries --------------------------------------------------------------------------


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
# A key without a rule keeps its name.
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
    """Return the key style, the tensors under our names, and notes; None if the keys are not from a DETR.

    Unknown keys are passed on unchanged: loading then reports them as unexpected.

    Raises:
        CheckpointError: an unsupported variant of DETR (pre-norm, learned image positions).
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
                f"the state dict belongs to a DETR with {variant}, which vitdeploy does not support",
                found=found[0],
                expected="DETR as published: post-norm, with sine positions",
                fix="export it to ONNX with its own library, and use the ONNX file",
            )


def _split(state: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """Split the mask head's first convolution by its inputs: projected features, then attention maps."""
    stem = "mask_head.from_features"
    if (bias := state.pop("mask_head.conv1.bias", None)) is not None:
        state[f"{stem}.bias"] = bias
    if "mask_head.conv1.weight" in state and state["mask_head.conv1.weight"].ndim == 4:
        weight = state.pop("mask_head.conv1.weight")
        state |= {f"{stem}.weight": weight[:, :width], "mask_head.from_attention.weight": weight[:, width:]}
    return state


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

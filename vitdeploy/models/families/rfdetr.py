"""RF-DETR in the catalog: checkpoints of the original repository, by their own names.

    rfdetr_<nano|small|medium|base|large>

`large` is that of 2026, at 704x704. What transformers saved comes as a folder instead (`hf:`), with its config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.library_detectors import RFDETR, RFDETRConfig, cross_heads
from vitdeploy.models.checkpoints.mismatch import listed, patterns
from vitdeploy.models.family import Family, Hints, Recognised, Signature, refuse_few_tokens
from vitdeploy.models.keys.rfdetr import RULES
from vitdeploy.models.keys.rules import apply, count_below
from vitdeploy.models.model_folder.image_processor import IMAGENET_MEAN, IMAGENET_STD
from vitdeploy.spec import PostprocessSpec, PreprocessSpec, TensorSpec

# Of the repository's config.py.
NAMES = {
    "rfdetr_nano": RFDETRConfig(positions=24, decoder_layers=2, image_size=(384, 384)),
    "rfdetr_small": RFDETRConfig(positions=32, decoder_layers=3, image_size=(512, 512)),
    "rfdetr_medium": RFDETRConfig(positions=36, decoder_layers=4, image_size=(576, 576)),
    "rfdetr_base": RFDETRConfig(14, positions=37, windows=4, taken=(2, 5, 8, 11), image_size=(560, 560)),
    "rfdetr_large": RFDETRConfig(positions=44, decoder_layers=4, image_size=(704, 704)),
}
PARAMETERS = {
    "rfdetr_nano": 30_467_298,
    "rfdetr_small": 32_111_170,
    "rfdetr_medium": 33_687_458,
    "rfdetr_base": 32_174_530,
    "rfdetr_large": 33_933_218,
}
_MARKS = ("refpoint_embed.weight", "query_feat.weight", "backbone.0.encoder.encoder.embeddings.position_embeddings")
_PATCHES = "backbone.0.encoder.encoder.embeddings.patch_embeddings.projection.weight"
_BASE = NAMES["rfdetr_base"]
ARCHITECTURE = {
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
}


def describe(config: RFDETRConfig) -> Signature:
    """Outputs, and how they are read: all queries by the best classes of a sigmoid, as the repository does."""
    outputs = (
        TensorSpec("logits", "float32", ("batch", config.queries, config.num_classes)),
        TensorSpec("boxes", "float32", ("batch", config.queries, 4)),
    )
    return Signature("detection", config.image_size, 3, outputs, PostprocessSpec(scores="sigmoid"))


def preprocess(config: RFDETRConfig) -> PreprocessSpec:
    """Both sides are scaled to the input, bilinear; ImageNet's mean and deviation."""
    return PreprocessSpec(config.image_size, config.image_size, "bilinear", IMAGENET_MEAN, IMAGENET_STD)


def resize(
    config: RFDETRConfig, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[RFDETRConfig, dict[str, Tensor]]:
    """The same weights at another image size: the module scales its positions itself.

    Raises:
        CheckpointError: windows of whole patches do not divide both sides, or there are fewer tokens than queries.
    """
    try:
        resized = replace(config, image_size=image_size)
    except ValueError as error:
        unit = config.multiple
        near = "x".join(str(max(1, round(side / unit)) * unit) for side in image_size)
        raise CheckpointError(
            "RF-DETR does not take this image size",
            found=str(error),
            wanted=f"a height and a width that are multiples of {unit}",
            fix=f"--image-size {near}",
        ) from None
    refuse_few_tokens("RF-DETR", image_size, config.queries, config.tokens, config.multiple)
    return resized, dict(state)


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """A checkpoint of the original repository, by its keys; its shape by its tensors.

    Tensors do not show windows, the layers that are taken, nor heads: they are those of the published models, of which
    `base` has patches of 14 pixels and all others patches of 16.

    Raises:
        CheckpointError: a variant that vitdeploy does not have (masks, several maps), or tensors are missing.
    """
    if any(mark not in state for mark in _MARKS) or "model_type" in hints.config:
        return None  # transformers saves its own models under these names, too: their config.json says what they are
    found = apply(RULES, state)
    if unknown := [key for key, named in found.items() if not named]:
        raise CheckpointError(
            "the state dict is that of an RF-DETR which vitdeploy does not have",
            found=f"{len(unknown)} unknown: {listed(patterns(unknown, state))}",
            wanted=f"{', '.join(NAMES)}, with any number of classes",
            fix="export it where it was trained (model.export() in the repository), and bring the ONNX file",
        )
    try:
        config = _config(state, hints)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            "the state dict is that of an RF-DETR which vitdeploy cannot build",
            found=f"no tensor {error}" if isinstance(error, KeyError) else str(error),
            wanted="every tensor of a published variant, with any number of classes",
            fix="save the whole state dict",
        ) from None
    mapped = {f"model.{name}": tensor for named in found.values() for name, tensor in named.items()}
    taken = ", ".join(map(str, config.taken))
    note = f"{config.windows}x{config.windows} windows, layers {taken} taken: as published with patches of "
    return Recognised("rfdetr", "original", config, mapped, (f"{note}{config.patch_size} pixels",))


def _config(state: Mapping[str, Tensor], hints: Hints) -> RFDETRConfig:
    width, _, patch, _ = state[_PATCHES].shape
    groups = count_below(state, "transformer.enc_output.")
    decoder_width = state["query_feat.weight"].shape[1]
    points = len(state["transformer.decoder.layers.0.cross_attn.attention_weights.bias"]) // cross_heads(decoder_width)
    positions = isqrt(state[_MARKS[2]].shape[1] - 1)
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
        points=points,
        groups=groups,
        queries=len(state["query_feat.weight"]) // groups,
        num_classes=len(state["class_embed.weight"]),
        image_size=(side, side),
    )


FAMILY = Family(
    name="rfdetr",
    paper="arXiv 2511.09554",
    names=NAMES,
    parse=lambda name: None,
    build=RFDETR,
    describe=describe,
    recognise=recognise,
    resize=resize,
    preprocess=preprocess,
    free={"num_classes": "classes"},
    architecture=ARCHITECTURE,
    parameters=PARAMETERS,
)

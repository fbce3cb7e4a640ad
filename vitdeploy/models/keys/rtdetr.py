"""Keys of RT-DETR, RT-DETRv2 and D-FINE as their repositories save them, under the names of transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from vitdeploy.models.architectures.library_detectors import Kind
from vitdeploy.models.keys.rules import Rule, apply

_STAGE, _BLOCK = "backbone.res_layers.*.blocks.*", "model.backbone.model.encoder.stages.*.layers.*"
_NORMED = (("conv", "convolution"), ("norm", "normalization"))
_RESNET: tuple[Rule, ...] = (
    *(
        (f"backbone.conv1.conv1_{index + 1}.{theirs}.", f"model.backbone.model.embedder.embedder.{index}.{ours}.")
        for index in range(3)
        for theirs, ours in _NORMED
    ),
    *(
        (f"{_STAGE}.branch2{letter}.{theirs}.", f"{_BLOCK}.layer.{index}.{ours}.")
        for index, letter in enumerate("abc")
        for theirs, ours in _NORMED
    ),
    # After a pooling that halves the map, the convolution is the second part.
    *((f"{_STAGE}.short.conv.{theirs}.", f"{_BLOCK}.shortcut.1.{ours}.") for theirs, ours in _NORMED),
    (f"{_STAGE}.short.conv.", f"{_BLOCK}.shortcut.convolution."),
    (f"{_STAGE}.short.norm.", f"{_BLOCK}.shortcut.normalization."),
)
_HGNET: tuple[Rule, ...] = tuple(
    (f"backbone.{theirs}.{part}.", f"model.backbone.model.{ours}.{named}.")
    for theirs, ours in (
        ("stem.*", "embedder.*"),
        ("stages.*.downsample", "encoder.stages.*.downsample"),
        ("stages.*.blocks.*.aggregation.*", "encoder.stages.*.blocks.*.aggregation.*"),
        ("stages.*.blocks.*.layers.*.conv1", "encoder.stages.*.blocks.*.layers.*.conv1"),
        ("stages.*.blocks.*.layers.*.conv2", "encoder.stages.*.blocks.*.layers.*.conv2"),
        ("stages.*.blocks.*.layers.*", "encoder.stages.*.blocks.*.layers.*"),
    )
    for part, named in (("conv", "convolution"), ("bn", "normalization"), ("lab", "lab"))
)


def _layer(theirs: str, ours: str, mlp: tuple[str, str], norms: tuple[str, ...]) -> tuple[Rule, ...]:
    """What an encoder's and a decoder's layer have in common; `norms` in the order of norm1, norm2 ..."""
    return (
        (f"{theirs}.self_attn.in_proj_", f"{ours}.self_attn.{{qkv}}_proj."),
        (f"{theirs}.self_attn.out_proj.", f"{ours}.self_attn.o_proj."),
        *((f"{theirs}.linear{index + 1}.", f"{ours}.mlp.{name}.") for index, name in enumerate(mlp)),
        *((f"{theirs}.norm{index + 1}.", f"{ours}.{name}.") for index, name in enumerate(norms)),
    )


def _pyramid(inside: tuple[tuple[str, str], ...]) -> tuple[Rule, ...]:
    """The blocks that mix two scales, downwards and upwards, by what is inside them."""
    return tuple(
        (f"encoder.{blocks}.*.{theirs}.", f"model.encoder.{blocks}.*.{ours}.")
        for blocks in ("fpn_blocks", "pan_blocks")
        for theirs, ours in inside
    )


def _rules(kind: Kind) -> tuple[Rule, ...]:
    fine = kind == "d_fine"
    layer, decoder = "decoder.decoder.layers.*", "model.decoder.layers.*"
    mlp = ("layers.0", "layers.1") if fine else ("fc1", "fc2")
    # D-FINE has a gate instead of the norm after the cross-attention.
    norms = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    heads = tuple(
        (f"decoder.dec_{theirs}_head.*.", tuple(f"{place}{ours}_embed.*." for place in _places(kind)))
        for theirs, ours in (("score", "class"), ("bbox", "bbox"))
    )
    return (
        *(_HGNET if fine else _RESNET),
        *((f"encoder.input_proj.*.{part}.", f"model.encoder_input_proj.*.{index}.") for part, index in _PAIR),
        *((f"decoder.input_proj.*.{part}.", f"model.decoder_input_proj.*.{index}.") for part, index in _PAIR),
        *_layer("encoder.encoder.*.layers.*", "model.encoder.aifi.*.layers.*", mlp, (norms[0], norms[2])),
        ("encoder.lateral_convs.*.", "model.encoder.lateral_convs.*."),
        *(_FINE_ENCODER if fine else _ENCODER),
        *_layer(layer, decoder, mlp, norms),
        (f"{layer}.cross_attn.num_points_scale", f"{decoder}.encoder_attn.{'num' if fine else 'n'}_points_scale"),
        *(
            (f"{layer}.cross_attn.{part}.", f"{decoder}.encoder_attn.{part}.")
            for part in ("sampling_offsets", "attention_weights", "value_proj", "output_proj")
        ),
        ("decoder.query_pos_head.", "model.decoder.query_pos_head."),
        *((f"decoder.enc_output.{part}.", f"model.enc_output.{index}.") for part, index in _OUTPUT),
        ("decoder.enc_score_head.", "model.enc_score_head."),
        ("decoder.enc_bbox_head.", "model.enc_bbox_head."),
        *heads,
        *(_FINE_DECODER if fine else ()),
    )


def _places(kind: Kind) -> tuple[str, ...]:
    """Where the heads are: transformers' later modules hold them twice, as one tensor."""
    return ("model.decoder.",) if kind == "rt_detr" else ("model.decoder.", "")


# A projection is saved by numbers in the first repository, by names in the later ones.
_PAIR = (("0", "0"), ("1", "1"), ("conv", "0"), ("norm", "1"))
_OUTPUT = (("0", "0"), ("1", "1"), ("proj", "0"), ("norm", "1"))
_ENCODER: tuple[Rule, ...] = (
    ("encoder.downsample_convs.*.", "model.encoder.downsample_convs.*."),
    *_pyramid(
        tuple((part, part) for part in ("conv1", "conv2", "conv3", "bottlenecks.*.conv1", "bottlenecks.*.conv2"))
    ),
)
_FINE_ENCODER: tuple[Rule, ...] = (
    *(
        (f"encoder.downsample_convs.*.0.cv{index}.", f"model.encoder.downsample_convs.*.conv{index}.")
        for index in (1, 2)
    ),
    *_pyramid(
        (
            ("cv1", "conv1"),
            ("cv4", "conv4"),
            *(
                (f"cv{index + 1}.0.{part}", f"csp_rep{index}.{part}")
                for index in (1, 2)
                for part in ("conv1", "conv2", "conv3", "bottlenecks.*.conv1", "bottlenecks.*.conv2")
            ),
            ("cv2.1", "conv2"),
            ("cv3.1", "conv3"),
        )
    ),
)
_FINE_DECODER: tuple[Rule, ...] = (
    ("decoder.decoder.layers.*.gateway.", "model.decoder.layers.*.gateway."),
    ("decoder.decoder.lqe_layers.*.", "model.decoder.lqe_layers.*."),
    ("decoder.pre_bbox_head.", "model.decoder.pre_bbox_head."),
    ("decoder.up", "model.decoder.up"),
    ("decoder.reg_scale", "model.decoder.reg_scale"),
)
RULES: Mapping[Kind, tuple[Rule, ...]] = {kind: _rules(kind) for kind in ("rt_detr", "rt_detr_v2", "d_fine")}
# One number of D-FINE's decoder under a second name, which the model has once.
_AGAIN = {"decoder.decoder.up": "decoder.up", "decoder.decoder.reg_scale": "decoder.reg_scale"}
# What a model computes for one image size, and what only training asks for.
COMPUTED = ("decoder.anchors", "decoder.valid_mask")
TRAINING = ("decoder.denoising_class_embed.",)


@dataclass(frozen=True)
class Renamed:
    """`state` under transformers' names; `names`: what became of each key, nothing where it was left out; `unknown`:
    keys that no rule takes, which are not in `state`; `twice`: keys whose number is another than that of their twin."""

    state: dict[str, Tensor]
    names: Mapping[str, tuple[str, ...]]
    unknown: tuple[str, ...]
    twice: tuple[str, ...] = ()


def renamed(state: Mapping[str, Tensor], kind: Kind) -> Renamed:
    """The tensors of a checkpoint of the original repositories under the names of transformers' module."""
    found: dict[str, Tensor] = {}
    names: dict[str, tuple[str, ...]] = {}
    unknown, twice = [], []
    for key, named in apply(RULES[kind], state).items():
        # The backbone's norms count no batches: they are the constants that they are in training.
        counter = key.startswith("backbone.") and key.endswith(".num_batches_tracked")
        if counter or key.startswith((*COMPUTED, *TRAINING)):
            names[key] = ()
        elif key in _AGAIN and kind == "d_fine":
            names[key] = ()
            if not state[key].equal(state.get(_AGAIN[key], state[key])):
                twice.append(key)
        elif named:
            # D-FINE saves a whole number where its configuration has one.
            found |= {name: each.float() if name.endswith(".reg_scale") else each for name, each in named.items()}
            names[key] = tuple(named)
        else:
            unknown.append(key)
    return Renamed(found, names, tuple(unknown), tuple(twice))

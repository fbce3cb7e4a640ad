"""Detectors that are a library's modules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from vitdeploy.models.architectures.library_detector import detector_of

# --- RT-DETR (arXiv 2304.08069), RT-DETRv2 (arXiv 2407.17140) and D-FINE (arXiv 2410.13842) ---------------------------
# transformers' own modules,. built from what a checkpoint of the original repositories tells.
#
# The three are one architecture: a convolutional backbone, a hybrid encoder, which attends within the smallest map and
# mixes the scales by convolutions, and a decoder whose queries are the encoder's best cells.


Kind: TypeAlias = Literal["rt_detr", "rt_detr_v2", "d_fine"]
Sampling: TypeAlias = Literal["default", "discrete"]
CLASSES: dict[Kind, str] = {"rt_detr": "RTDetr", "rt_detr_v2": "RTDetrV2", "d_fine": "DFine"}
STRIDES = (4, 8, 16, 32)  # of a backbone's four stages


@dataclass(frozen=True)
class ResNetD:
    """ResNet-D (arXiv 1812.01187): blocks of its four stages; bottlenecks, or basic blocks of two convolutions."""

    depths: tuple[int, ...]
    bottlenecks: bool

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple((4 if self.bottlenecks else 1) * width for width in (64, 128, 256, 512))

    def settings(self) -> dict[str, Any]:
        """What a config.json of transformers says of it."""
        return {
            "model_type": "rt_detr_resnet",
            "depths": list(self.depths),
            "hidden_sizes": list(self.widths),
            "layer_type": "bottleneck" if self.bottlenecks else "basic",
        }


@dataclass(frozen=True)
class Stage:
    """A stage of HGNetV2: `layers` convolutions of `inner` channels in each of `blocks`, whose results are joined to
    `width` channels. Light ones are a pointwise and a depthwise convolution."""

    inner: int
    width: int
    blocks: int
    light: bool
    kernel: int
    layers: int


@dataclass(frozen=True)
class HGNetV2:
    """PaddlePaddle's PP-HGNetV2. `stem`: channels inside the stem and after it; `affine`: a learned scale and bias
    after each activation."""

    stem: tuple[int, int]
    stages: tuple[Stage, ...]
    affine: bool

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(stage.width for stage in self.stages)

    def settings(self) -> dict[str, Any]:
        """What a config.json of transformers says of it."""
        return {
            "model_type": "hgnet_v2",
            "stem_channels": [3, *self.stem],
            "stage_in_channels": [self.stem[1], *self.widths[:-1]],
            "stage_mid_channels": [stage.inner for stage in self.stages],
            "stage_out_channels": list(self.widths),
            "stage_num_blocks": [stage.blocks for stage in self.stages],
            "stage_downsample": [index > 0 for index in range(len(self.stages))],
            "stage_light_block": [stage.light for stage in self.stages],
            "stage_kernel_size": [stage.kernel for stage in self.stages],
            "stage_numb_of_layers": [stage.layers for stage in self.stages],
            "depths": [stage.blocks for stage in self.stages],
            "hidden_sizes": list(self.widths),
            "use_learnable_affine_block": self.affine,
        }


@dataclass(frozen=True)
class RTDETRConfig:
    """One model.

    maps: how many of the backbone's last stages the encoder takes.
    width, hidden: channels of the encoder, and of its MLP.
    fused, fusions: channels and blocks where it mixes two scales.
    decoder_layers: those that are run; training may have more.
    points: what a head of the decoder samples of each map; between cells, or the nearest ("discrete").
    bins: intervals of D-FINE's distributions over a box's sides.

    Raises:
        ValueError: a side that the largest stride does not divide.
    """

    kind: Kind
    backbone: ResNetD | HGNetV2
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

    def __post_init__(self) -> None:
        if any(side <= 0 or side % STRIDES[-1] for side in self.image_size):
            height, width = self.image_size
            raise ValueError(f"an image of {height}x{width}, of which {STRIDES[-1]} does not divide both sides")

    @property
    def strides(self) -> tuple[int, ...]:
        return STRIDES[-self.maps :]

    def tokens(self, size: tuple[int, int]) -> int:
        """The cells of all maps of an image (height, width), of which the queries are taken."""
        return sum((size[0] // stride) * (size[1] // stride) for stride in self.strides)

    def settings(self) -> dict[str, Any]:
        """What a config.json of transformers says of it."""
        last = [4 - self.maps + 1 + index for index in range(self.maps)]
        told: dict[str, Any] = {
            "backbone_config": {**self.backbone.settings(), "out_indices": last},
            "encoder_hidden_dim": self.width,
            "encoder_in_channels": list(self.backbone.widths[-self.maps :]),
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
            "num_denoising": 0,  # training alone has queries of noisy boxes
            "num_labels": self.num_classes,
        }
        if self.kind != "rt_detr":
            told |= {"decoder_method": self.sampling, "decoder_n_levels": self.maps}
        if self.kind == "d_fine":
            # Half of an odd number of channels is rounded down there, so that any number can be had.
            told |= {
                "hidden_expansion": (2 * self.fused + 1) / self.width,
                "depth_mult": self.fusions / 3,
                "decoder_n_points": list(self.points),
                "max_num_bins": self.bins,
            }
        return told


class RTDETR(nn.Module):
    """Takes float32 [batch, 3, height, width] in 0 to 1; returns class logits [batch, queries, classes], for a sigmoid,
    and boxes [batch, queries, 4] as cxcywh in shares of the image.

    Raises:
        MissingPackageError: transformers is not installed.
        CapabilityError: it cannot be imported, or is too old.
    """

    def __init__(self, config: RTDETRConfig) -> None:
        super().__init__()
        self.config = config
        self.model = detector_of(CLASSES[config.kind], config.settings(), "model.encoder.aifi")
        if hasattr(self.model, "class_embed"):  # the decoder's own: one module stays one where tensors are replaced
            self.model.class_embed = self.model.model.decoder.class_embed
            self.model.bbox_embed = self.model.model.decoder.bbox_embed

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(image)
        return found.logits, found.pred_boxes


def fused_channels(width: int, expansion: float) -> int:
    """Channels where D-FINE's encoder mixes two scales, as its repository computes them."""
    return round(expansion * width // 2)


def square_of(cells: int, strides: tuple[int, ...]) -> int | None:
    """The side of the square image whose maps of these strides have so many cells together; None if there is none."""
    side = math.isqrt(round(cells / sum(1 / stride**2 for stride in strides)))
    return side if side and sum((side // stride) ** 2 for stride in strides) == cells else None


# --- RF-DETR (arXiv 2511.09554): transformers' own module, built from what a checkpoint of its repository tells -------


_HEAD = 64  # channels of a head of DINOv2


@dataclass(frozen=True)
class RFDETRConfig:
    """One model: DINOv2 with its patches in windows, a projector to one map, and a decoder.

    positions: the side of the square grid that positions were learned for.
    windows: in how many each side of the image is cut.
    taken: the layers whose outputs are taken, counted from 1; the one after each attends over all windows.
    fusions: blocks of the projector.
    points: what a head of the decoder samples.
    groups: sets of queries in training, of which the first answers.

    Raises:
        ValueError: a side that windows of whole patches do not divide.
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

    def __post_init__(self) -> None:
        if any(side <= 0 or side % self.multiple for side in self.image_size):
            height, width = self.image_size
            raise ValueError(f"an image of {height}x{width}, of which {self.multiple} does not divide both sides")

    @property
    def multiple(self) -> int:
        """What both sides of an image are multiples of."""
        return self.patch_size * self.windows

    def tokens(self, size: tuple[int, int]) -> int:
        """The tokens of an image (height, width), of which the queries are taken."""
        return (size[0] // self.patch_size) * (size[1] // self.patch_size)

    def settings(self) -> dict[str, Any]:
        """What a config.json of transformers says of it."""
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
            "layer_norm_eps": 1e-6,  # of the projector's convolutions; transformers' own default is 1e-5
            "d_model": self.decoder_width,
            "decoder_ffn_dim": self.decoder_hidden,
            "decoder_layers": self.decoder_layers,
            "decoder_n_points": self.points,
            "decoder_self_attention_heads": self.decoder_width // 32,
            "decoder_cross_attention_heads": cross_heads(self.decoder_width),
            "group_detr": self.groups,
            "num_queries": self.queries,
            "num_labels": self.num_classes,
        }


def cross_heads(width: int) -> int:
    """Heads of the decoder's deformable attention, of 16 channels each in all published models."""
    return width // 16


class RFDETR(nn.Module):
    """Takes float32 [batch, 3, height, width], normalised; returns class logits [batch, queries, classes], for a
    sigmoid, and boxes [batch, queries, 4] as cxcywh in shares of the image.

    Raises:
        MissingPackageError: transformers is not installed.
        CapabilityError: it cannot be imported, or is too old.
    """

    def __init__(self, config: RFDETRConfig) -> None:
        super().__init__()
        self.config = config
        self.model = detector_of("RfDetr", config.settings(), "model.backbone.projector.projector_layer")

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(image)
        return found.logits, found.pred_boxes

"""RF-DETR (arXiv 2511.09554): transformers' own module, built from what a checkpoint of its repository tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitdeploy.models.architectures.library_detector import detector_of

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

"""ResNet with bottleneck blocks and frozen batch norm: the backbone of DETR.

Sources: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016 (arXiv 1512.03385), table 1 and figure 5,
with the stride in the 3x3 convolution (torchvision's "v1.5"); Carion et al. (arXiv 2005.12872), section 4: batch norm
is frozen, and the DC5 variant replaces the last stage's stride by a dilation.

Every halving rounds up, so an image of any size of at least 1x1 pixel has features.
Axis names used in the comments: b batch, c channels, H and W height and width of the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REDUCTION = 4  # a bottleneck computes its 3x3 convolution on a quarter of its output's channels


@dataclass(frozen=True)
class ResNetConfig:
    """Shape of a ResNet. `widths` are the output channels of the four stages, `depths` their numbers of blocks.

    `dilate_last`: the last stage keeps the resolution and dilates its 3x3 convolutions by 2 (DC5).
    """

    in_channels: int = 3
    stem_width: int = 64
    widths: tuple[int, int, int, int] = (256, 512, 1024, 2048)
    depths: tuple[int, int, int, int] = (3, 4, 6, 3)
    dilate_last: bool = False

    def __post_init__(self) -> None:
        if min(self.in_channels, self.stem_width, *self.widths, *self.depths) < 1:
            raise ValueError("sizes of 0 in the backbone")
        if any(width % REDUCTION for width in self.widths):
            raise ValueError(f"backbone widths {self.widths} are not divisible by {REDUCTION}")

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """The stride of each stage's features, in pixels of the image."""
        return 4, 8, 16, 16 if self.dilate_last else 32


class FrozenBatchNorm(nn.Module):
    """Batch norm whose statistics and affine parameters are constants: y = scale * x + shift."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self) -> tuple[Tensor, Tensor]:
        """(scale, shift), each [c]."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return scale, self.bias - self.running_mean * scale


class ConvNorm(nn.Module):
    """A convolution and its frozen batch norm, computed as one convolution with a bias.

    The scale multiplies the weights instead of the output, which constant folding turns into a plain Conv at export.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.stride, self.dilation, self.padding = stride, dilation, dilation * (kernel // 2)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.norm = FrozenBatchNorm(outputs)
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.norm()
        weight = self.weight * scale.reshape(-1, 1, 1, 1)
        return F.conv2d(x, weight, shift, self.stride, self.padding, self.dilation)


class Bottleneck(nn.Module):
    """1x1 convolution to a quarter of the channels, 3x3, 1x1 back, and a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int, dilation: int) -> None:
        super().__init__()
        inner = outputs // REDUCTION
        self.conv1 = ConvNorm(inputs, inner, 1)
        self.conv2 = ConvNorm(inner, inner, 3, stride, dilation)
        self.conv3 = ConvNorm(inner, outputs, 1)
        self.downsample = ConvNorm(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.relu(self.conv3(inner) + self.downsample(x))


class ResNet(nn.Module):
    """Image in, the features of the four stages out.

    Input: float32 [b, in_channels, H, W], normalised pixels.
    Output: four of float32 [b, widths[i], ceil(H / strides[i]), ceil(W / strides[i])].
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.conv1 = ConvNorm(config.in_channels, config.stem_width, 7, 2)
        self.layers = nn.ModuleList()
        inputs = config.stem_width
        for stage, (outputs, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
            dilated = config.dilate_last and stage == 3
            blocks = nn.Sequential()
            for block in range(depth):
                stride = 2 if block == 0 and stage > 0 and not dilated else 1
                # The first block of a dilated stage still sees the undilated grid of the stage before it.
                blocks.append(Bottleneck(inputs, outputs, stride, dilation=2 if dilated and block > 0 else 1))
                inputs = outputs
            self.layers.append(blocks)

    def forward(self, image: Tensor) -> list[Tensor]:
        x = F.max_pool2d(F.relu(self.conv1(image)), kernel_size=3, stride=2, padding=1)
        features = []
        for stage in self.layers:
            x = stage(x)
            features.append(x)
        return features

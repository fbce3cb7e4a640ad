"""DETR on a ResNet, with an optional mask head."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.models.architectures.layers import MLP

# --- ResNet with bottleneck blocks and frozen batch norm: the backbone of DETR ----------------------------------------
# Sources: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016 (arXiv 1512.03385), table 1 and figure
# 5, with the stride in the 3x3 convolution (torchvision's "v1.5"); Carion et al. (arXiv 2005.12872), section 4: batch
# norm is frozen, and the DC5 variant replaces the last stage's stride by a dilation.
#
# Every halving rounds up, so any image of at least 1x1 pixel has features. Axis names in comments: b batch, c channels,
# H and W height and width of the image.


REDUCTION = 4  # a bottleneck computes its 3x3 convolution on a quarter of its output's channels


@dataclass(frozen=True)
class ResNetConfig:
    """Configuration of a ResNet. `widths` are the output channels of the four stages, `depths` their numbers of blocks.

    `dilate_last`: the last stage keeps the resolution and dilates its 3x3 convolutions by 2 (DC5).
    """

    in_channels: int = 3
    stem_width: int = 64
    widths: tuple[int, int, int, int] = (256, 512, 1024, 2048)
    depths: tuple[int, int, int, int] = (3, 4, 6, 3)
    dilate_last: bool = False

    def __post_init__(self) -> None:
        if min(self.in_channels, self.stem_width, *self.widths, *self.depths) < 1:
            raise ValueError("the backbone has a size of 0")
        if any(width % REDUCTION for width in self.widths):
            raise ValueError(f"backbone widths {self.widths} are not divisible by {REDUCTION}")

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """The stride of each stage's features, in pixels of the image."""
        return 4, 8, 16, 16 if self.dilate_last else 32


class _FrozenBatchNorm(nn.Module):
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


class _ConvNorm(nn.Module):
    """A convolution and its frozen batch norm, computed as one convolution with a bias.

    The scale multiplies the weights instead of the output, which constant folding turns into a plain Conv at export.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.stride, self.dilation, self.padding = stride, dilation, dilation * (kernel // 2)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.norm = _FrozenBatchNorm(outputs)
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.norm()
        weight = self.weight * scale.reshape(-1, 1, 1, 1)
        return F.conv2d(x, weight, shift, self.stride, self.padding, self.dilation)


class _Bottleneck(nn.Module):
    """1x1 convolution to a quarter of the channels, 3x3, 1x1 back, and a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int, dilation: int) -> None:
        super().__init__()
        inner = outputs // REDUCTION
        self.conv1 = _ConvNorm(inputs, inner, 1)
        self.conv2 = _ConvNorm(inner, inner, 3, stride, dilation)
        self.conv3 = _ConvNorm(inner, outputs, 1)
        self.downsample = _ConvNorm(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else nn.Identity()

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
        self.conv1 = _ConvNorm(config.in_channels, config.stem_width, 7, 2)
        self.layers = nn.ModuleList()
        inputs = config.stem_width
        for stage, (outputs, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
            dilated = config.dilate_last and stage == 3
            blocks = nn.Sequential()
            for block in range(depth):
                stride = 2 if block == 0 and stage > 0 and not dilated else 1
                # The first block of a dilated stage still sees the undilated grid of the stage before it.
                blocks.append(_Bottleneck(inputs, outputs, stride, dilation=2 if dilated and block > 0 else 1))
                inputs = outputs
            self.layers.append(blocks)

    def forward(self, image: Tensor) -> list[Tensor]:
        x = F.max_pool2d(F.relu(self.conv1(image)), kernel_size=3, stride=2, padding=1)
        features = []
        for stage in self.layers:
            x = stage(x)
            features.append(x)
        return features


# --- DETR -------------------------------------------------------------------------------------------------------------
# Source: Carion et al., "End-to-End Object Detection with Transformers", ECCV 2020 (arXiv 2005.12872), section 3.2 and
# appendices A.2-A.4. A ResNet's last features, projected to the model's width, are the tokens of a Transformer encoder.
# A decoder turns a fixed set of learned object queries into as many objects, each with class logits and a box.
#
# Encoder and decoder are post-norm. Positions are added to the queries and keys of every attention, never to the
# values: 2-D sines for image tokens, the learned object queries for objects.
#
# Images fill the model's input, so no attention mask for padding is needed. Axis names in comments: b batch, n image
# tokens, q object queries, d width, h heads, e width per head.


MIN_SIDE = 32  # image pixels per token, without dilation; larger sizes need not be multiples of it


@dataclass(frozen=True)
class DETRConfig:
    """Configuration of a DETR. `image_size` is (height, width) in pixels, each at least 32.

    `num_classes` excludes "no object", for which the class logits have one more column, the last. `panoptic`: with the
    mask head.
    """

    image_size: tuple[int, int] = (800, 800)
    backbone: ResNetConfig = field(default_factory=ResNetConfig)
    width: int = 256
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    hidden: int = 2048
    queries: int = 100
    num_classes: int = 91
    panoptic: bool = False

    def __post_init__(self) -> None:
        sizes = {"width": self.width, "heads": self.heads, "hidden": self.hidden}
        sizes |= {"encoder layers": self.encoder_layers, "decoder layers": self.decoder_layers}
        sizes |= {"queries": self.queries, "classes": self.num_classes}
        if min(sizes.values()) < 1:
            raise ValueError(f"sizes of 0: {', '.join(name for name, size in sizes.items() if size < 1)}")
        if min(self.image_size) < MIN_SIDE:
            raise ValueError(f"image size {self.image_size[0]}x{self.image_size[1]} has a side below {MIN_SIDE} pixels")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.width % 4:
            raise ValueError(f"width {self.width} is not divisible by 4 (sine and cosine of two axes)")
        if self.panoptic and any(size < 1 or size % min(8, size) for size in self.mask_widths):
            raise ValueError(f"the mask head's widths {self.mask_widths} are not divisible into 8 groups")

    @property
    def feature_size(self) -> tuple[int, int]:
        """Height and width of the backbone's last features: the image tokens."""
        return self.size_at(3)

    @property
    def mask_size(self) -> tuple[int, int]:
        """Height and width of a mask: a quarter of the image's."""
        return self.size_at(0)

    def size_at(self, stage: int) -> tuple[int, int]:
        """Height and width of the features of a stage, 0 to 3."""
        stride = self.backbone.strides[stage]
        return -(-self.image_size[0] // stride), -(-self.image_size[1] // stride)

    @property
    def mask_widths(self) -> tuple[int, ...]:
        """Channels after each of the mask head's five normalised convolutions."""
        return (self.width + self.heads, *(self.width // 2**i for i in range(1, 5)))


def sine_positions(height: int, width: int, channels: int) -> Tensor:
    """Return float64 [1, height * width, channels]: sines and cosines of y in the first half of the channels, then x.

    Coordinates are 1 to size, scaled to end at 2 pi; frequencies as in arXiv 1706.03762, section 3.5. The epsilon in
    the scaling is the released code's.
    """
    half = channels // 2
    frequency = 10000.0 ** -(torch.arange(0, half, 2, dtype=torch.float64, device="cpu") / half)
    axes = []
    for size in (height, width):
        position = torch.arange(1, size + 1, dtype=torch.float64, device="cpu") / (size + 1e-6) * (2 * math.pi)
        angle = position[:, None] * frequency
        axes.append(torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1))  # [size, half]: sine, cosine, sine ...
    y = axes[0][:, None].expand(-1, width, -1)
    x = axes[1][None].expand(height, -1, -1)
    return torch.cat([y, x], dim=2).reshape(1, height * width, channels)


class _Attention(nn.Module):
    """Multi-head attention: softmax(Q K^T / sqrt(e)) V, heads concatenated, then one output linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, tokens, width = query.shape
        mixed = F.scaled_dot_product_attention(
            self._split(self.query(query)), self._split(self.key(key)), self._split(self.value(value))
        )
        # -1 only for the batch, the one axis that stays dynamic: every other size is a constant of the exported graph.
        return self.out(mixed.transpose(1, 2).reshape(-1, tokens, width))

    def _split(self, x: Tensor) -> Tensor:
        _, tokens, width = x.shape
        return x.reshape(-1, tokens, self.heads, width // self.heads).transpose(1, 2)  # [b, h, tokens, e]


class _EncoderLayer(nn.Module):
    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width, config.hidden, "relu")
        self.norm2 = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        placed = x + positions
        x = self.norm1(x + self.self_attn(placed, placed, x))
        return self.norm2(x + self.mlp(x))


class _DecoderLayer(nn.Module):
    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width)
        self.cross_attn = _Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width, config.hidden, "relu")
        self.norm3 = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, queries: Tensor, memory: Tensor, placed_memory: Tensor) -> Tensor:
        placed = x + queries
        x = self.norm1(x + self.self_attn(placed, placed, x))
        x = self.norm2(x + self.cross_attn(x + queries, placed_memory, memory))
        return self.norm3(x + self.mlp(x))


class _BoxHead(nn.Module):
    """Three linear layers with ReLU, and a sigmoid: centre x, centre y, width, height, relative to the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, outputs) for outputs in (width, width, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layers[0](x))
        x = F.relu(self.layers[1](x))
        return self.layers[2](x).sigmoid()


@dataclass
class _Decoded:
    """Inputs of the heads: the backbone's `features` by stage, the last of them `projected` to [b, d, height, width],
    the encoder's `memory` [b, n, d] and the decoder's `objects` [b, q, d]."""

    features: list[Tensor]
    projected: Tensor
    memory: Tensor
    objects: Tensor


class DETR(nn.Module):
    """DETR: image in, objects out.

    Input: float32 [b, 3, height, width], normalised pixels. Output: logits [b, q, num_classes + 1], whose last column
    is "no object", and boxes [b, q, 4], centre x, centre y, width, height in 0..1.
    """

    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = ResNet(config.backbone)
        self.input_proj = nn.Conv2d(config.backbone.widths[3], config.width, 1)
        self.encoder = nn.ModuleList(_EncoderLayer(config) for _ in range(config.encoder_layers))
        self.query_embed = nn.Parameter(torch.empty(config.queries, config.width))
        self.decoder = nn.ModuleList(_DecoderLayer(config) for _ in range(config.decoder_layers))
        self.decoder_norm = nn.LayerNorm(config.width)
        self.class_embed = nn.Linear(config.width, config.num_classes + 1)
        self.box_embed = _BoxHead(config.width)
        # Depends only on the image size. Not a buffer, whose values would be lost when the model is built on the meta
        # device and filled from a checkpoint.
        self.positions = sine_positions(*config.feature_size, config.width)
        self.initialise()

    def initialise(self) -> None:
        """Initialise as in the released code: Glorot uniform for the Transformer (query, key and value as one matrix),
        zero for attention biases, standard normal for the queries, PyTorch's defaults elsewhere."""
        nn.init.normal_(self.query_embed)
        for module in (*self.encoder.modules(), *self.decoder.modules()):
            if isinstance(module, MLP):
                nn.init.xavier_uniform_(module.fc1.weight)
                nn.init.xavier_uniform_(module.fc2.weight)
            elif isinstance(module, _Attention):
                for linear in (module.query, module.key, module.value):
                    nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
                nn.init.xavier_uniform_(module.out.weight)
                for linear in (module.query, module.key, module.value, module.out):
                    nn.init.zeros_(linear.bias)

    def decode(self, image: Tensor) -> _Decoded:
        features = self.backbone(image)
        projected = self.input_proj(features[-1])
        memory = projected.flatten(2).transpose(1, 2)
        positions = self.positions.to(memory)
        for layer in self.encoder:
            memory = layer(memory, positions)
        placed_memory = memory + positions
        # The decoder starts from zeros for every image: its first self-attention depends only on parameters, so it is
        # computed at batch 1 (a constant of the exported graph), and the first cross-attention broadcasts it.
        queries = self.query_embed[None]
        objects = torch.zeros_like(queries)
        for layer in self.decoder:
            objects = layer(objects, queries, memory, placed_memory)
        return _Decoded(features, projected, memory, self.decoder_norm(objects))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        objects = self.decode(image).objects
        return self.class_embed(objects), self.box_embed(objects)


# --- DETR's panoptic head: one mask for every object query ------------------------------------------------------------
# Source: Carion et al., arXiv 2005.12872, section 4.4 and figure 8. Every object attends to the encoder's output, and
# the attention maps of its heads, concatenated to the projected features, go through a small convolutional network that
# upsamples them three times, each time adding the backbone's features of that resolution.
#
# Values independent of the object are computed once per image and broadcast: the first convolution is linear, so its
# result for a concatenation is a sum of two (`from_features` and `from_attention`, which split the published weights).
# For 100 objects, this saves most of the head's work. Axis names: b batch, q object queries, n image tokens, d width,
# h heads, e width per head, c channels.


class _AttentionMaps(nn.Module):
    """softmax(Q K^T / sqrt(e)) over all heads and all image tokens together: an object's maps sum to 1."""

    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        for linear in (self.query, self.key):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, objects: Tensor, memory: Tensor) -> Tensor:
        """Objects [b, q, d] and memory [b, n, d] -> [b, q, h * n]."""
        (_, count, width), tokens = objects.shape, memory.shape[1]
        each = width // self.heads
        query = self.query(objects).reshape(-1, count, self.heads, each).transpose(1, 2)
        key = self.key(memory).reshape(-1, tokens, self.heads, each).permute(0, 2, 3, 1)
        scores = (query * each**-0.5) @ key  # [b, h, q, n]
        return scores.transpose(1, 2).reshape(-1, count, self.heads * tokens).softmax(-1)


class GroupNorm(nn.Module):
    """Group norm (arXiv 1803.08494) with 8 groups, or one per channel if there are fewer.

    Written as instance norm of the groups, so that every size except the batch is a constant of the exported graph.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.groups = min(8, channels)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        normalised = F.instance_norm(x.reshape(-1, self.groups, channels // self.groups * height * width))
        x = normalised.reshape(-1, channels, height, width)
        return x * self.weight.reshape(-1, 1, 1) + self.bias.reshape(-1, 1, 1)


class _Upsample(nn.Module):
    """Nearest-neighbour upsampling to the next features and their sum; then convolution, group norm, ReLU."""

    def __init__(self, features: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.adapter = nn.Conv2d(features, inputs, 1)
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = GroupNorm(outputs)

    def forward(self, x: Tensor, features: Tensor, count: int) -> Tensor:
        """x [b * q, inputs, ...] and features [b, c, height, width] -> [b * q, outputs, height, width], q = `count`."""
        height, width = features.shape[2:]
        if x.shape[2:] != features.shape[2:]:
            # Halving rounded up, so the doubled size has at most one row or column too many.
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")[:, :, :height, :width]
        x = x.reshape(-1, count, x.shape[1], height, width) + self.adapter(features)[:, None]
        return F.relu(self.norm(self.conv(x.reshape(-1, *x.shape[2:]))))


class _MaskHead(nn.Module):
    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        first, *widths = config.mask_widths
        self.from_features = nn.Conv2d(config.width, first, 3, padding=1)
        self.from_attention = nn.Conv2d(config.heads, first, 3, padding=1, bias=False)
        self.norm1 = GroupNorm(first)
        self.conv2 = nn.Conv2d(first, widths[0], 3, padding=1)
        self.norm2 = GroupNorm(widths[0])
        channels = reversed(config.backbone.widths[:3])
        self.upsamples = nn.ModuleList(map(_Upsample, channels, widths, widths[1:]))
        self.out = nn.Conv2d(widths[3], 1, 3, padding=1)
        self.initialise(first)

    def initialise(self, fan_in: int) -> None:
        """Kaiming uniform with a = 1 and zero biases, as in the released code; the split convolution as one."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        bound = (3 / (9 * fan_in)) ** 0.5
        nn.init.uniform_(self.from_features.weight, -bound, bound)
        nn.init.uniform_(self.from_attention.weight, -bound, bound)

    def forward(self, projected: Tensor, maps: Tensor, features: list[Tensor]) -> Tensor:
        """Projected [b, d, height, width], maps [b, q, h * n] and all features -> mask logits [b, q, H / 4, W / 4]."""
        count, (height, width) = maps.shape[1], projected.shape[2:]
        attention = self.from_attention(maps.reshape(-1, self.from_attention.in_channels, height, width))
        shared = self.from_features(projected)
        x = attention.reshape(-1, count, attention.shape[1], height, width) + shared[:, None]
        x = F.relu(self.norm1(x.reshape(-1, *x.shape[2:])))
        x = F.relu(self.norm2(self.conv2(x)))
        for upsample, level in zip(self.upsamples, reversed(features[:3]), strict=True):
            x = upsample(x, level, count)
        return self.out(x).reshape(-1, count, *features[0].shape[2:])


class DETRPanoptic(DETR):
    """DETR with masks: outputs as DETR, and mask logits [b, q, ceil(height / 4), ceil(width / 4)]."""

    def __init__(self, config: DETRConfig) -> None:
        super().__init__(config)
        self.mask_attention = _AttentionMaps(config)
        self.mask_head = _MaskHead(config)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        decoded = self.decode(image)
        maps = self.mask_attention(decoded.objects, decoded.memory)
        masks = self.mask_head(decoded.projected, maps, decoded.features)
        return self.class_embed(decoded.objects), self.box_embed(decoded.objects), masks

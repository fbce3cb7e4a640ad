"""Modules as people write them with libraries (einops, timm, torchvision) and by hand: conv stems, windows, rotary
positions, tied weights, scripted parts, half precision, odd sizes and odd outputs. Each `make_...` returns one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn
from torch.utils.checkpoint import checkpoint

from tests.compatibility.modules_attention import CLASSES, DEPTH, DIM, HEADS, BatchFirst, Net, Patches, mlp
from tests.references import reference

# einops, einsum -------------------------------------------------------------------------------------------------------


class RearrangedAttention(nn.Module):
    """lucidrains' ViT: einops everywhere, heads of another width than the model's share."""

    def __init__(self, dim_head: int = 24) -> None:
        super().__init__()
        inner = dim_head * HEADS
        self.norm, self.attend, self.dropout = nn.LayerNorm(DIM), nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.to_qkv = nn.Linear(DIM, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, DIM), nn.Dropout(0.1))
        self.scale = dim_head**-0.5

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange

        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=HEADS) for t in qkv)
        attn = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
        return self.to_out(rearrange(torch.matmul(attn, v), "b h n d -> b n (h d)"))


class Rearranged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from einops.layers.torch import Rearrange, Reduce

        self.to_patch_embedding = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=8, p2=8),
            nn.LayerNorm(192),
            nn.Linear(192, DIM),
            nn.LayerNorm(DIM),
        )
        self.pos = nn.Parameter(torch.randn(16, DIM))
        self.layers = nn.ModuleList(
            nn.ModuleList([RearrangedAttention(), nn.Sequential(nn.LayerNorm(DIM), mlp())]) for _ in range(DEPTH)
        )
        self.to_logits = nn.Sequential(Reduce("b n d -> b d", "mean"), nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))

    def forward(self, img: Tensor) -> Tensor:
        x = self.to_patch_embedding(img) + self.pos
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.to_logits(x)


def make_einops() -> nn.Module:
    return Rearranged()


class EinsumAttention(nn.Module):
    """The formula as it stands in papers; the projections are parameters, not layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(DIM, HEADS, DIM // HEADS) * 0.1) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(HEADS, DIM // HEADS, DIM) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (einsum("bnd,dhe->bhne", y, w) for w in (self.wq, self.wk, self.wv))
        attn = (einsum("bhie,bhje->bhij", q, k) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return x + einsum("bhie,hed->bid", einsum("bhij,bhje->bhie", attn, v), self.wo)


def make_einsum() -> nn.Module:
    return Net(*(EinsumAttention() for _ in range(DEPTH)))


# timm, torchvision ----------------------------------------------------------------------------------------------------


def make_torchvision() -> nn.Module:
    model = reference("torchvision").models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=DEPTH, num_heads=HEADS, hidden_dim=DIM, mlp_dim=4 * DIM, num_classes=7
    )
    nn.init.normal_(model.heads.head.weight)  # as it is before training, all logits are 0
    return model


class TorchvisionBlock(nn.Module):
    """torchvision's style, copied into one's own code: ordered parts, dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            OrderedDict(linear_1=nn.Linear(DIM, 64), act=nn.GELU("tanh"), linear_2=nn.Linear(64, DIM))
        )

    def forward(self, input: Tensor) -> Tensor:
        torch._assert(input.dim() == 3, f"Expected (batch, seq_length, hidden_dim) got {input.shape}")
        x = self.ln_1(input)
        x, _ = self.self_attention(query=x, key=x, value=x, need_weights=False)
        x = self.dropout(x) + input
        return x + self.mlp(self.ln_2(x))


def make_torchvision_style() -> nn.Module:
    return Net(*(TorchvisionBlock() for _ in range(DEPTH)))


class TimmParts(nn.Module):
    """timm's patch embedding and blocks in a module of one's own, with registers and two heads averaged as DeiT has."""

    def __init__(self) -> None:
        super().__init__()
        reference("timm")
        from timm.layers import PatchEmbed, trunc_normal_
        from timm.models.vision_transformer import Block

        self.patch_embed = PatchEmbed(img_size=32, patch_size=8, in_chans=3, embed_dim=DIM)
        self.cls, self.dist = nn.Parameter(torch.randn(1, 1, DIM)), nn.Parameter(torch.randn(1, 1, DIM))
        self.registers = nn.Parameter(torch.randn(1, 2, DIM))
        self.pos_embed = nn.Parameter(trunc_normal_(torch.zeros(1, self.patch_embed.num_patches, DIM), std=0.5))
        self.blocks = nn.ModuleList(
            Block(DIM, HEADS, qkv_bias=True, qk_norm=True, init_values=1e-1, drop_path=0.1) for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(DIM)
        self.head, self.head_dist = nn.Linear(DIM, CLASSES), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x) + self.pos_embed
        first = [t.expand(x.size(0), -1, -1) for t in (self.cls, self.dist, self.registers)]
        x = torch.cat([*first, x], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2


def make_timm_blocks() -> nn.Module:
    return TimmParts()


def make_timm_modern() -> nn.Module:
    """RMS norms, SwiGLU, average pooling, no class token: timm's layers, plugged into its class."""
    timm = reference("timm")
    from timm.layers import RmsNorm, SwiGLU

    return timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=DIM, depth=DEPTH, num_heads=HEADS, num_classes=CLASSES, class_token=False,
        global_pool="avg", norm_layer=RmsNorm, mlp_layer=SwiGLU, mlp_ratio=2, dynamic_img_size=False,
    )  # fmt: skip


# Convolutions ---------------------------------------------------------------------------------------------------------


class ConvStem(nn.Module):
    """Early convolutions, batch norms, and a Transformer on what they see."""

    def __init__(self) -> None:
        super().__init__()
        stages, channels = [], 3
        for width in (8, 16, DIM):
            stages += [nn.Conv2d(channels, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU(inplace=True)]
            channels = width
        self.stem = nn.Sequential(*stages, nn.Conv2d(DIM, DIM, 1))
        self.blocks = nn.ModuleList(BatchFirst() for _ in range(DEPTH))
        self.pool, self.fc = nn.AdaptiveAvgPool1d(1), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(start_dim=2).permute(0, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.fc(self.pool(x.transpose(1, 2)).flatten(1))


def make_conv_stem() -> nn.Module:
    model = ConvStem()
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.normal_(norm.running_mean)
    return model


class LayerNorm2d(nn.Module):
    """Over the channels of [B, C, H, W], by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Convolved(nn.Module):
    """ConvNeXt's block, with the global response normalisation of its second version."""

    def __init__(self) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(DIM, DIM, 7, padding=3, groups=DIM)
        self.norm, self.act = nn.LayerNorm(DIM, eps=1e-6), nn.GELU()
        self.pwconv1, self.pwconv2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.gamma, self.beta = (nn.Parameter(torch.randn(1, 1, 1, 4 * DIM) * 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.pwconv1(self.norm(self.dwconv(x).permute(0, 2, 3, 1))))
        gx = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        y = self.gamma * (y * (gx / (gx.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + y
        return x + self.pwconv2(y).permute(0, 3, 1, 2)


def make_convnext() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, DIM, 4, 4), LayerNorm2d(DIM))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))
    return nn.Sequential(stem, Convolved(), Convolved(), head)


# Outputs --------------------------------------------------------------------------------------------------------------


class DictOut(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = self.norm(self.blocks(self.patches(x)))
        return {"logits": self.head(tokens[:, 0]), "features": tokens[:, 0], "loss": tokens.new_zeros(())}


def make_dict_output() -> nn.Module:
    return DictOut(BatchFirst(), BatchFirst())


class Output(NamedTuple):
    features: Tensor
    patches: Tensor


class TupleOut(Net):
    def forward(self, x: Tensor) -> Output:
        tokens = self.norm(self.blocks(self.patches(x)))
        return Output(tokens[:, 0], tokens[:, 1:])


def make_tuple_output() -> nn.Module:
    return TupleOut(BatchFirst(), BatchFirst())


class OtherKeys(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = self.norm(self.blocks(self.patches(x)))
        return {"age": self.head(tokens[:, 0]), "gender": self.head(tokens[:, 1])}


def make_two_heads() -> nn.Module:
    return OtherKeys(BatchFirst())


class Adaptive(Net):
    """Leaves early where it is sure: Python asks the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for block in self.blocks:
            x = block(x)
            logits = self.head(self.norm(x)[:, 0])
            if logits.softmax(-1).max() > 0.9:
                return logits
        return logits


def make_early_exit() -> nn.Module:
    return Adaptive(BatchFirst(), BatchFirst())


# Buffers, tables, positions -------------------------------------------------------------------------------------------


class WindowAttention(nn.Module):
    """Swin's: shifted windows of 4x4, a table of position biases read through an index buffer, a mask by region."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.norm1, self.norm2, self.mlp = shift, nn.LayerNorm(DIM), nn.LayerNorm(DIM), mlp()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.table = nn.Parameter(torch.randn(49, HEADS))
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + 3
        self.register_buffer("index", apart[..., 0] * 7 + apart[..., 1], persistent=False)
        region = torch.zeros(1, 8, 8, 1)
        for i, rows in enumerate((slice(0, 4), slice(4, 8 - shift), slice(8 - shift, 8)) if shift else ()):
            for j, columns in enumerate((slice(0, 4), slice(4, 8 - shift), slice(8 - shift, 8))):
                region[:, rows, columns] = 3 * i + j
        windows = self.windows(region).squeeze(-1)
        mask = windows[:, None, :] != windows[:, :, None]
        self.register_buffer("mask", torch.zeros(mask.shape).masked_fill(mask, -100.0), persistent=False)

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        return x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), dims=(1, 2)) if self.shift else self.norm1(x)
        y = self.windows(y)
        q, k, v = self.qkv(y).reshape(-1, 16, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        attn = (q * (c // HEADS) ** -0.5) @ k.transpose(-2, -1)
        attn = attn + self.table[self.index.view(-1)].view(16, 16, -1).permute(2, 0, 1).contiguous()
        if self.shift:
            attn = attn.view(b, -1, HEADS, 16, 16) + self.mask[None, :, None]
            attn = attn.view(-1, HEADS, 16, 16)
        y = self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c))
        y = y.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + (torch.roll(y, (self.shift, self.shift), dims=(1, 2)) if self.shift else y)
        return x + self.mlp(self.norm2(x))


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, DIM, 4, 4)
        self.layers = nn.ModuleList(WindowAttention(shift) for shift in (0, 2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean((1, 2)))


def make_windows() -> nn.Module:
    return Windows()


class Rotary(nn.Module):
    """Rotary positions, RMS norms by hand, SwiGLU: a language model's block on patches."""

    def __init__(self) -> None:
        super().__init__()
        self.g1, self.g2 = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(DIM))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = nn.Linear(DIM, 64, bias=False), nn.Linear(DIM, 64, bias=False), nn.Linear(64, DIM)
        angle = torch.outer(torch.arange(17.0), 100 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def rms(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain

    def rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-right, left), dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        y = self.rms(x, self.g1)
        q, k, v = (w(y).view(b, n, HEADS, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v)
        x = x + self.wo(y.transpose(1, 2).contiguous().view(b, n, -1))
        y = self.rms(x, self.g2)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def make_rotary() -> nn.Module:
    return Net(*(Rotary() for _ in range(DEPTH)))


class Unfolded(nn.Module):
    """Patches by `unfold`, sine and cosine positions in a buffer, resized for the image at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(192, DIM)
        at = torch.arange(49.0)[:, None] * torch.exp(torch.arange(0, DIM, 2) * (-math.log(1e4) / DIM))
        self.register_buffer("pos", torch.stack((at.sin(), at.cos()), dim=-1).flatten(1)[None])
        self.blocks = nn.ModuleList(BatchFirst() for _ in range(DEPTH))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2] // 8, x.shape[-1] // 8
        x = self.embed(F.unfold(x, kernel_size=8, stride=8).transpose(1, 2))
        pos = self.pos.reshape(1, 7, 7, -1).permute(0, 3, 1, 2)
        pos = F.interpolate(pos, size=(h, w), mode="bicubic", align_corners=False)
        x = x + pos.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def make_unfold() -> nn.Module:
    return Unfolded()


# Weights and code -----------------------------------------------------------------------------------------------------


@torch.jit.script
def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class ScriptedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class PartlyScripted(BatchFirst):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(ScriptedMlp())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + quick_gelu(self.scripted(x))


def make_scripted_parts() -> nn.Module:
    return Net(*(PartlyScripted() for _ in range(DEPTH)))


def make_script() -> nn.Module:
    """All of it is TorchScript, as an archive is that somebody saved."""
    torch.manual_seed(0)
    return torch.jit.script(nn.Sequential(nn.Conv2d(3, DIM, 8, 8), nn.Flatten(2), ScriptedHead()))


class ScriptedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=True)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.transpose(1, 2)).mean(1))


class Tied(nn.Module):
    """One block, three times over, and a head that is the embedding of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block = Patches(), BatchFirst()
        self.classes = nn.Embedding(CLASSES, DIM)
        self.head = nn.Linear(DIM, CLASSES, bias=False)
        self.head.weight = self.classes.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=False)
        return self.head(x[:, 0] + self.classes.weight.mean(0))


def make_tied() -> nn.Module:
    return Tied()


def make_half() -> nn.Module:
    return make_conv_stem().half()


def make_bfloat16() -> nn.Module:
    return Net(*(BatchFirst() for _ in range(DEPTH))).to(torch.bfloat16)


class Normed(nn.Module):
    """Weights that are computed: weight normalisation and spectral normalisation."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm, spectral_norm = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, 17))
        self.fc1, self.fc2 = weight_norm(nn.Linear(DIM, 96)), spectral_norm(nn.Linear(96, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.fc2(F.mish(self.fc1(x)))


def make_mixer() -> nn.Module:
    return Net(*(Normed() for _ in range(DEPTH)))


# Sizes ----------------------------------------------------------------------------------------------------------------


class Digits(nn.Module):
    """[B, 1, 28, 28], as every course on MNIST has it."""

    def __init__(self) -> None:
        super().__init__()
        self.image_size = 28
        self.embed = nn.Sequential(nn.Conv2d(1, DIM, kernel_size=7, stride=7), nn.Flatten(2))
        self.pos = nn.Parameter(torch.randn(16, 1, DIM))
        layer = nn.TransformerEncoderLayer(d_model=DIM, nhead=4, dim_feedforward=64)
        self.encoder = nn.TransformerEncoder(layer, num_layers=DEPTH)
        self.classifier = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 10), nn.LogSoftmax(dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(2, 0, 1) + self.pos
        return self.classifier(self.encoder(x).mean(0))


def make_digits() -> nn.Module:
    return Digits()


class Wide(nn.Module):
    """[B, 3, 24, 48]: rows and columns have positions of their own; global attention per row, then per column."""

    def __init__(self) -> None:
        super().__init__()
        self.image_size = (24, 48)
        self.conv = nn.Conv2d(3, DIM, 8, 8)
        self.rows, self.columns = nn.Parameter(torch.randn(DIM, 3, 1)), nn.Parameter(torch.randn(DIM, 1, 6))
        self.along, self.across = BatchFirst(), BatchFirst()
        self.head = nn.Conv1d(DIM, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) + self.rows + self.columns
        b, c, h, w = x.shape
        x = self.along(x.permute(0, 2, 3, 1).reshape(b * h, w, c)).view(b, h, w, c)
        x = self.across(x.transpose(1, 2).reshape(b * w, h, c)).view(b, w, h, c)
        return self.head(x.flatten(1, 2).transpose(1, 2)).amax(-1)


def make_wide() -> nn.Module:
    return Wide()


MAKERS: dict[str, Callable[[], nn.Module]] = {
    name.removeprefix("make_"): made for name, made in globals().items() if name.startswith("make_")
}

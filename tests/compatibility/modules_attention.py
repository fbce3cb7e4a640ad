"""Modules as people write them around PyTorch's own attention: `nn.MultiheadAttention`, encoders, decoders, and
`scaled_dot_product_attention`. Each `make_...` returns one, untrained, for 32x32 images unless it says otherwise."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, CLASSES = 32, 2, 5
DEPTH = int(os.environ.get("VITDEPLOY_TEST_DEPTH", "1"))  # `make modules` has 3: exports take as long as they are deep


class Patches(nn.Module):
    """[B, 3, 32, 32] -> [B, 17, DIM]: a convolution, a class token and learned positions."""

    def __init__(self, patch: int = 8, size: int = 32, channels: int = 3) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, DIM, patch, patch)
        self.cls = nn.Parameter(torch.randn(1, 1, DIM))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos


class Net(nn.Module):
    """Patches, blocks, and a head on the class token."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.patches = Patches()
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x)))[:, 0])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * DIM, DIM))


# nn.MultiheadAttention ------------------------------------------------------------------------------------------------


class BatchFirst(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True, **options)
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def make_batch_first() -> nn.Module:
    return Net(*(BatchFirst(dropout=0.1) for _ in range(DEPTH)))


class SequenceFirst(nn.Module):
    """The layout that `nn.MultiheadAttention` has by default: [tokens, batch, width]; it returns its weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()
        self.attention = nn.ModuleList(nn.MultiheadAttention(DIM, HEADS) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * DEPTH))
        self.mlps = nn.ModuleList(mlp() for _ in range(DEPTH))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(1, 0, 2)
        for i, attention in enumerate(self.attention):
            y, _weights = attention(x, x, x)
            x = self.norms[2 * i](x + y)
            x = self.norms[2 * i + 1](x + self.mlps[i](x))
        return self.head(x.mean(dim=0))


def make_sequence_first() -> nn.Module:
    return SequenceFirst()


class FloatMask(BatchFirst):
    """A local window, as numbers that are added to the scores."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        apart = (torch.arange(17)[:, None] - torch.arange(17)[None]).abs()
        self.register_buffer("mask", torch.zeros(17, 17).masked_fill(apart > 5, float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, attn_mask=self.mask)[0]
        return x + self.mlp(self.norm2(x))


def make_float_mask() -> nn.Module:
    return Net(*(FloatMask() for _ in range(DEPTH)))


class BoolMask(BatchFirst):
    """The same as truth values, which hide what is true."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", (torch.arange(17)[:, None] - torch.arange(17)[None]).abs() > 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, attn_mask=self.hidden, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def make_bool_mask() -> nn.Module:
    return Net(*(BoolMask() for _ in range(DEPTH)))


class PaddingMask(BatchFirst):
    """Some tokens are never read: a key padding mask that a buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("padding", torch.arange(17) > 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, key_padding_mask=self.padding.expand(x.size(0), -1))[0]
        return x + self.mlp(self.norm2(x))


def make_padding_mask() -> nn.Module:
    return Net(*(PaddingMask() for _ in range(DEPTH)))


class Counted(Net):
    """Python's `len` of a tensor is a number, whatever the batch will be."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.blocks(self.patches(x))
        return self.head(tokens.reshape(len(x), -1, DIM).mean(1))


def make_python_length() -> nn.Module:
    return Counted(BatchFirst())


class Pooling(nn.Module):
    """One learned query asks all patches (attention pooling); keys of another width than the query's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 8, 8)
        self.probe = nn.Parameter(torch.randn(1, 1, DIM))
        self.attn = nn.MultiheadAttention(DIM, HEADS, kdim=48, vdim=48, batch_first=True)
        self.mlp, self.norm = mlp(), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        pooled, _ = self.attn(self.probe.repeat(x.size(0), 1, 1), x, x)
        return self.head((pooled + self.mlp(self.norm(pooled))).squeeze(1))


def make_attention_pooling() -> nn.Module:
    return Pooling()


# nn.TransformerEncoder, nn.TransformerDecoder -------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, encoder: nn.TransformerEncoder, *, causal: bool = False) -> None:
        super().__init__()
        self.patches = Patches()
        self.encoder = encoder
        self.head = nn.Linear(DIM, CLASSES)
        self.mask = nn.Transformer.generate_square_subsequent_mask(17) if causal else None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x), mask=self.mask)[:, -1])


def layer(**options: object) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, batch_first=True, **options)


def make_encoder_norm_last() -> nn.Module:
    return Encoder(nn.TransformerEncoder(layer(), DEPTH))


def make_encoder_norm_first() -> nn.Module:
    first = layer(norm_first=True, activation="gelu", dropout=0.0)
    return Encoder(nn.TransformerEncoder(first, DEPTH, norm=nn.LayerNorm(DIM), enable_nested_tensor=False))


def make_encoder_causal() -> nn.Module:
    return Encoder(nn.TransformerEncoder(layer(activation=F.gelu), DEPTH), causal=True)


class QueryDecoder(nn.Module):
    """A query for each class reads the patches through a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()
        layer = nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, DEPTH)
        self.queries = nn.Embedding(CLASSES, DIM)
        self.score = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.weight.unsqueeze(0).expand(x.shape[0], -1, -1)
        return self.score(self.decoder(queries, self.patches(x))).squeeze(-1)


def make_query_decoder() -> nn.Module:
    return QueryDecoder()


class Detector(nn.Module):
    """DETR in fifty lines: a backbone, `nn.Transformer`, and what it sees by name."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 4, 1)
        )
        self.conv = nn.Conv2d(32, DIM, 1)
        self.transformer = nn.Transformer(DIM, HEADS, 1, 1, 2 * DIM)
        self.linear_class = nn.Linear(DIM, CLASSES + 1)
        self.linear_bbox = nn.Linear(DIM, 4)
        self.query_pos = nn.Parameter(torch.rand(10, DIM))
        self.row_embed = nn.Parameter(torch.rand(50, DIM // 2))
        self.col_embed = nn.Parameter(torch.rand(50, DIM // 2))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        h = self.conv(self.backbone(inputs))
        height, width = h.shape[-2:]
        columns = self.col_embed[:width].unsqueeze(0).repeat(height, 1, 1)
        rows = self.row_embed[:height].unsqueeze(1).repeat(1, width, 1)
        pos = torch.cat([columns, rows], dim=-1).flatten(0, 1).unsqueeze(1)
        queries = self.query_pos.unsqueeze(1).repeat(1, h.size(0), 1)
        h = self.transformer(pos + 0.1 * h.flatten(2).permute(2, 0, 1), queries).transpose(0, 1)
        return {"pred_logits": self.linear_class(h), "pred_boxes": self.linear_bbox(h).sigmoid()}


def make_detector() -> nn.Module:
    model = Detector()
    with torch.no_grad():  # that all images do not look the same to what has learnt nothing
        model.conv.weight.mul_(30)
    return model


# F.scaled_dot_product_attention ---------------------------------------------------------------------------------------


class FusedAttention(nn.Module):
    """One linear for query, key and value, and the fused function."""

    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM), mlp()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(DIM // HEADS), nn.LayerNorm(DIM // HEADS)
        self.bias = nn.Parameter(torch.randn(HEADS, 17, 17))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        if self.mode == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.mode == "normed":
            y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=self.bias, scale=0.3)
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


def make_fused() -> nn.Module:
    return Net(*(FusedAttention() for _ in range(DEPTH)))


class LastToken(Net):
    """Under a causal mask the last token alone has seen all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x)))[:, -1])


def make_fused_causal() -> nn.Module:
    return LastToken(*(FusedAttention("causal") for _ in range(DEPTH)))


def make_fused_with_bias() -> nn.Module:
    """Normed queries and keys, a learned bias on the scores, a scale of one's own."""
    return Net(*(FusedAttention("normed") for _ in range(DEPTH)))


class Grouped(nn.Module):
    """Four heads of queries share two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.kv(y).chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def make_grouped_queries() -> nn.Module:
    return Net(*(Grouped() for _ in range(DEPTH)))

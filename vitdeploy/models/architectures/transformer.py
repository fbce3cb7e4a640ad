"""The Transformer, encoder and decoder.

Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017 (arXiv 1706.03762):

    Attention(Q, K, V) = softmax(Q K^T / sqrt(e)) V                        equation 1; h heads, section 3.2.2
    MLP(x) = max(0, x W1 + b1) W2 + b2                                     equation 2
    LN(x + sublayer(x))                                                    residual and post-norm, section 3.1
    embedding * sqrt(d); one matrix for both embeddings and the generator  section 3.4
    PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(same)       section 3.5

Axis names in comments: b batch, s source tokens, t target tokens, p cached tokens, d width, h heads, e width per head,
v vocabulary.

A decoding step needs only the new token's query: keys and values of earlier tokens are cached, and those of the source
are computed once for all steps (`Encoded.cross`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.models.architectures.layers import MLP, sinusoidal

# Added to the score of a masked token. Its softmax is exactly 0 in float16, float32 and float64, and a row with only
# masked tokens stays finite, whereas minus infinity would give NaN.
MASKED = -1e4


@dataclass(frozen=True)
class TransformerConfig:
    """Configuration of a Transformer; the defaults are the base model (section 5.1 and table 3).

    `pad`, `start` and `end` are token ids: padding, start and end of a target. `max_length` is the maximum number of
    tokens of a source and of a target. `pre_norm` normalises before each sublayer, not after the sum; `final_norm`
    also normalises the outputs of encoder and decoder (torch.nn.Transformer does; usual with pre-norm).
    `shared_embeddings`: one matrix embeds source and target and is the generator's weight.
    """

    source_vocabulary: int = 37_000
    target_vocabulary: int = 37_000
    width: int = 512
    encoder_depth: int = 6
    decoder_depth: int = 6
    heads: int = 8
    hidden: int = 2048
    max_length: int = 512
    pad: int = 0
    start: int = 1
    end: int = 2
    shared_embeddings: bool = True
    generator_bias: bool = False
    pre_norm: bool = False
    final_norm: bool = False
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        sizes = {"source vocabulary": self.source_vocabulary, "target vocabulary": self.target_vocabulary}
        sizes |= {"width": self.width, "encoder depth": self.encoder_depth, "decoder depth": self.decoder_depth}
        sizes |= {"heads": self.heads, "hidden": self.hidden, "max length": self.max_length}
        if min(sizes.values()) < 1:
            raise ValueError(f"sizes of 0: {', '.join(name for name, size in sizes.items() if size < 1)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd: positions are pairs of sine and cosine")
        if self.shared_embeddings and self.source_vocabulary != self.target_vocabulary:
            raise ValueError(
                f"one shared embedding for two vocabularies, of {self.source_vocabulary} and {self.target_vocabulary}"
            )
        if not 0 <= self.pad < min(self.source_vocabulary, self.target_vocabulary):
            raise ValueError(f"the token {self.pad} (pad) is outside a vocabulary")
        for name, token in (("start", self.start), ("end", self.end)):
            if not 0 <= token < self.target_vocabulary:
                raise ValueError(f"the token {token} ({name}) is outside the vocabulary of {self.target_vocabulary}")


# Keys and values of one attention, each [b, h, n, e].
KeyValue: TypeAlias = tuple[Tensor, Tensor]


class Encoded(NamedTuple):
    """The encoded source, as needed by the decoder.

    memory: [b, s, d], the encoder's output. mask: [b, 1, 1, s], 0 for tokens and MASKED for padding, added to scores.
    cross: the KeyValue of the memory for each decoder block.
    """

    memory: Tensor
    mask: Tensor
    cross: list[KeyValue]


def causal_mask(length: int, like: Tensor) -> Tensor:
    """Return [t, t], 0 on and below the diagonal and MASKED above, with the dtype and device of `like`."""
    return torch.full((length, length), MASKED, dtype=like.dtype, device=like.device).triu(1)


class _SplitHeads(nn.Module):
    """Split concatenated outputs of `parts` linear layers into heads: [b, n, parts * d] -> `parts` x [b, h, n, e]."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        if parts == 1:
            return (x.unflatten(2, (self.heads, -1)).transpose(1, 2),)
        return x.unflatten(2, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class _SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself and, with `past`, to cached earlier tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.split = _SplitHeads(heads)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None, past: KeyValue | None = None) -> tuple[Tensor, KeyValue]:
        """x: [b, n, d]. Return [b, n, d], and the keys and values [b, h, p + n, e] of past and present tokens."""
        query, key, value = self.split(self.qkv(x), 3)
        if past is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(past, (key, value), strict=True))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).flatten(2)), (key, value)


class _CrossAttention(nn.Module):
    """Multi-head attention of the target to the encoder's memory."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.split = _SplitHeads(heads)
        self.proj = nn.Linear(width, width)

    def read(self, memory: Tensor) -> KeyValue:
        """Return the keys and values [b, h, s, e] of the memory [b, s, d], the same for every target token."""
        key, value = self.split(self.key_value(memory), 2)
        return key, value

    def forward(self, x: Tensor, source: KeyValue, mask: Tensor) -> Tensor:
        (query,) = self.split(self.query(x), 1)
        mixed = F.scaled_dot_product_attention(query, *source, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class _EncoderBlock(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.self_attention = _SelfAttention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = MLP(config.width, config.hidden, "relu")
        self.norm2 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.self_attention(self.norm1(x), mask)[0]
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.self_attention(x, mask)[0])
        return self.norm2(x + self.mlp(x))


class _DecoderBlock(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.self_attention = _SelfAttention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.cross_attention = _CrossAttention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = MLP(config.width, config.hidden, "relu")
        self.norm3 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)

    def forward(
        self, x: Tensor, mask: Tensor | None, source: KeyValue, source_mask: Tensor, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        if self.pre_norm:
            mixed, present = self.self_attention(self.norm1(x), mask, past)
            x = x + mixed
            x = x + self.cross_attention(self.norm2(x), source, source_mask)
            return x + self.mlp(self.norm3(x)), present
        mixed, present = self.self_attention(x, mask, past)
        x = self.norm1(x + mixed)
        x = self.norm2(x + self.cross_attention(x, source, source_mask))
        return self.norm3(x + self.mlp(x)), present


class Generator(nn.Module):
    """The linear layer before the softmax, with its own weight or that of the shared embedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if not config.shared_embeddings:
            self.weight = nn.Parameter(torch.empty(config.target_vocabulary, config.width))
            nn.init.xavier_uniform_(self.weight)
        self.bias = nn.Parameter(torch.zeros(config.target_vocabulary)) if config.generator_bias else None

    def forward(self, x: Tensor, shared: Tensor | None) -> Tensor:
        """[b, t, d] -> logits [b, t, v]. `shared`: the embedding [v, d], None if the generator has a weight."""
        return F.linear(x, self.weight if shared is None else shared, self.bias)


class Transformer(nn.Module):
    """Transformer: source and target tokens in, logits of each next target token out.

    Padding follows the tokens of a sequence. Padded source tokens are masked; padded target tokens need no mask,
    because no earlier token attends to them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        if config.shared_embeddings:
            self.embedding = nn.Embedding(config.source_vocabulary, config.width)
        else:
            self.source_embedding = nn.Embedding(config.source_vocabulary, config.width)
            self.target_embedding = nn.Embedding(config.target_vocabulary, config.width)
        self.generator = Generator(config)
        self.encoder = nn.ModuleList(_EncoderBlock(config) for _ in range(config.encoder_depth))
        self.decoder = nn.ModuleList(_DecoderBlock(config) for _ in range(config.decoder_depth))
        if config.final_norm:
            self.encoder_norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
            self.decoder_norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        # Not a buffer, and on the CPU, so that a model built on the meta device still has its table.
        with torch.device("cpu"):
            self.positions = sinusoidal(config.max_length, config.width)[0]
        self.initialise()

    def initialise(self) -> None:
        """Glorot-uniform linear layers with zero biases, embeddings with std d^-0.5 (the authors' released code)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.width**-0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """All positions at once, as in training. int64 [b, s] and int64 [b, t] -> logits [b, t, v].

        The target begins with the start token; the logits at a position are those of the token after it.
        """
        _, source_mask, cross = self.encode(source)
        x = self._embed(target, self._embeddings[1])
        x = x + self.positions.to(x)[: target.shape[1]]
        mask = causal_mask(target.shape[1], x)
        for block, read in zip(self.decoder, cross, strict=True):
            x, _ = block(x, mask, read, source_mask)
        return self._generate(x)

    def encode(self, source: Tensor) -> Encoded:
        """int64 [b, s] -> the encoded source, which every decoder step reads."""
        x = self._embed(source, self._embeddings[0])
        x = x + self.positions.to(x)[: source.shape[1]]
        mask = torch.where(source == self.config.pad, MASKED, 0.0).to(x.dtype)[:, None, None, :]
        for block in self.encoder:
            x = block(x, mask)
        memory = self.encoder_norm(x) if self.config.final_norm else x
        blocks = cast("Iterable[_DecoderBlock]", self.decoder)
        return Encoded(memory, mask, [block.cross_attention.read(memory) for block in blocks])

    def step(
        self, token: Tensor, mask: Tensor, cross: Sequence[KeyValue], past: Sequence[KeyValue]
    ) -> tuple[Tensor, list[KeyValue]]:
        """Decode one more token of each target.

        Args:
            token: int64 [b, 1], the latest token; its position is the number of cached ones.
            mask, cross: from `encode`.
            past: for each block of the decoder, [b, h, p, e] of the p tokens before; p is 0 at the first step.

        Returns:
            The logits [b, v] of the next token, and the caches [b, h, p + 1, e].
        """
        x = self._embed(token, self._embeddings[1])
        x = x + self.positions.to(x)[past[0][0].shape[2]]
        present = []
        for block, read, cached in zip(self.decoder, cross, past, strict=True):
            x, grown = block(x, None, read, mask, cached)
            present.append(grown)
        return self._generate(x).squeeze(1), present

    @property
    def _embeddings(self) -> tuple[nn.Embedding, nn.Embedding]:
        """Return the embeddings of source and target."""
        if self.config.shared_embeddings:
            return self.embedding, self.embedding
        return self.source_embedding, self.target_embedding

    def _embed(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Section 3.4: [b, n] -> [b, n, d]."""
        return embedding(tokens) * math.sqrt(self.config.width)

    def _generate(self, x: Tensor) -> Tensor:
        if self.config.final_norm:
            x = self.decoder_norm(x)
        return self.generator(x, self.embedding.weight if self.config.shared_embeddings else None)

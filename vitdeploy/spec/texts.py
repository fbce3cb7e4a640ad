"""Texts as tokens: of models that compare them with images, and of those that write them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vitdeploy.spec.tensors import TensorSpec


@dataclass(frozen=True)
class ZeroShotSpec:
    """How texts become tokens, and how the features of images and texts are compared.

    A text is `length` tokens, padded with the token `pad` on the side `padding`; `tokenizer` is the file of the bundle
    that makes them, `lowercase` whether texts become small letters first. The logit of an image and a text is scale *
    cosine + bias; `scores` says what its probability is: "softmax" over the texts that are given (CLIP, arXiv
    2103.00020, section 2.3), or "sigmoid" of each (SigLIP, arXiv 2303.15343, section 3.2).
    """

    length: int
    pad: int
    scale: float
    bias: float = 0.0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    padding: Literal["left", "right"] = "right"
    lowercase: bool = False
    tokenizer: str = "tokenizer.json"

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """All outputs can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """The texts are given when an image is: there is no number of classes."""
        return None


@dataclass(frozen=True)
class SequenceSpec:
    """How an encoder-decoder's tokens are decoded: which tokens start, end and pad, how many it can read and write, and
    how many different ones a source may have."""

    start: int
    end: int
    pad: int
    max_length: int
    source_vocabulary: int

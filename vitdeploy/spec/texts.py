"""Texts as tokens: of models that compare them with images, and of those that write them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from vitdeploy.spec.coding import SPARSE
from vitdeploy.spec.preprocess import TensorSpec

# What OpenCLIP's tokenizers do to a text first: nothing but white space; small letters; no punctuation either.
Clean = Literal["whitespace", "lower", "canonicalize"]
CLEANINGS: tuple[Clean, ...] = get_args(Clean)


@dataclass(frozen=True)
class ZeroShotSpec:
    """How texts become tokens, and how the features of images and texts are compared.

    A text is `length` tokens, padded with the token `pad` on the side `padding`; `tokenizer` is the file of the bundle
    that makes them, `lowercase` whether texts become small letters first, `clean` how they are changed before all that
    (`runtime.tokenizer.cleaned`; OpenCLIP's checkpoints). The logit of an image and a text is scale * cosine + bias;
    `scores` says what its probability is: "softmax" over the texts that are given (CLIP, arXiv 2103.00020, section
    2.3), or "sigmoid" of each (SigLIP, arXiv 2303.15343, section 3.2).
    """

    length: int
    pad: int
    scale: float
    bias: float = 0.0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    padding: Literal["left", "right"] = "right"
    lowercase: bool = False
    tokenizer: str = "tokenizer.json"
    clean: Clean | None = field(default=None, metadata=SPARSE)

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """All outputs can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """The texts are given when an image is: there is no number of classes."""
        return None


@dataclass(frozen=True)
class OpenVocabularySpec:
    """How texts become tokens, and how a detector finds what they say (OWL-ViT, arXiv 2205.06230; OWLv2, 2306.09683).

    `length`, `pad`, `padding`, `tokenizer`, `lowercase` and `clean` are as in `ZeroShotSpec`. The logit of a box and a
    text is (cosine + shift) * scale, with the box's own shift and scale; of each box the best text is a candidate, with
    its sigmoid as the score, and it is shown from `threshold` on. Boxes are cx cy w h relative to the model's input.
    """

    length: int
    pad: int
    threshold: float = 0.1
    padding: Literal["left", "right"] = "right"
    lowercase: bool = False
    tokenizer: str = "tokenizer.json"
    clean: Clean | None = field(default=None, metadata=SPARSE)

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of "scores", "labels" and "boxes" the scores: boxes of nearly equal scores for two texts may change these."""
        return [name for name in outputs if name == "scores"]

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """The texts are given when an image is: there is no number of classes."""
        return None


# What says how texts become tokens.
ReadsTexts: TypeAlias = "ZeroShotSpec | OpenVocabularySpec"


@dataclass(frozen=True)
class TextSpec:
    """How tokens become a text: by the file `tokenizer` of the bundle, without the tokens `left_out`, such as those
    that begin, end and fill up."""

    left_out: tuple[int, ...]
    tokenizer: str = "tokenizer.json"

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """None of the outputs: the scores behind the first token that differs are of other texts."""
        return []

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """None: there are no classes."""
        return None


@dataclass(frozen=True)
class BeamSpec:
    """Beam search with the rules of transformers' `generate`: the texts that end are ranked by the sum of their tokens'
    log probabilities over (number of tokens) ** `length_penalty`.

    `early_stopping`: True ends with the first `beams` texts, False where a heuristic sees no better one, "never" where
    none can come.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams {self.beams}: wanted at least 1")


@dataclass(frozen=True)
class SequenceSpec:
    """How an encoder-decoder's tokens are decoded: which tokens start, end and pad, how many it can read and write, and
    how many different ones a source may have (None of a source that is an image).

    `search`: beam search, None takes the likeliest token at each step. `forced_end`: the last token that can be written
    is the end, whatever the model says. `no_repeat`: no run of so many tokens is written twice, the start counted.
    """

    start: int
    end: int
    pad: int
    max_length: int
    source_vocabulary: int | None
    search: BeamSpec | None = field(default=None, metadata=SPARSE)
    forced_end: bool | None = field(default=None, metadata=SPARSE)
    no_repeat: int | None = field(default=None, metadata=SPARSE)

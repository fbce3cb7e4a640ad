"""Texts to tokens on the device, and tokens to texts, with the `tokenizers` package and the tokenizer file of the
bundle."""

import html
import importlib
import string
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError, ManifestError, MissingFileError, MissingPackageError
from vitdeploy.runtime.runner import type_name
from vitdeploy.spec import SPARSE, OutputSpec

# What OpenCLIP's tokenizers do to a text first: nothing but white space; small letters; no punctuation either.
Clean = Literal["whitespace", "lower", "canonicalize"]
CLEANINGS: tuple[Clean, ...] = get_args(Clean)


@dataclass(frozen=True)
class ZeroShotSpec(OutputSpec):
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
    about_images: ClassVar[bool] = True


@dataclass(frozen=True)
class OpenVocabularySpec(OutputSpec):
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


@dataclass(frozen=True)
class TextSpec(OutputSpec):
    """How tokens become a text: by the file `tokenizer` of the bundle, without the tokens `left_out`, such as those
    that begin, end and fill up."""

    left_out: tuple[int, ...]
    tokenizer: str = "tokenizer.json"

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """None of the outputs: the scores behind the first token that differs are of other texts."""
        return []


# What says how texts become tokens.
ReadsTexts: TypeAlias = "ZeroShotSpec | OpenVocabularySpec"


Tokens = npt.NDArray[np.int64]

# Of the files that are published the largest has 34 MB.
MAX_BYTES = 256 << 20
SHOWN_CHARACTERS = 60
_NO_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))


class TextTokenizer:
    """Turns texts into token numbers as their spec says. Safe to call from several threads."""

    def __init__(self, file: Path, spec: ReadsTexts, data: bytes | None = None) -> None:
        """Reads the file, or takes `data` for what it has.

        Raises:
            MissingPackageError: `tokenizers` is not installed.
            MissingFileError, ManifestError: there is no such file, or it is no tokenizer.
        """
        self.spec = spec
        self._tokenizer = _opened(file, data)
        if spec.lowercase:
            package = _require()
            own, lower = self._tokenizer.normalizer, package.normalizers.Lowercase()
            self._tokenizer.normalizer = lower if own is None else package.normalizers.Sequence([lower, own])
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(spec.length)

    def encode(self, texts: Sequence[str]) -> Tokens:
        """int64 [texts, length]. A RuntimeWarning names each text that is cut, and what of it is not read.

        Raises:
            InputError: no text, or something that is none.
        """
        require_texts(texts)
        spec = self.spec
        texts = [cleaned(text, spec.clean) for text in texts] if spec.clean else texts
        tokens = np.full((len(texts), spec.length), spec.pad, np.int64)
        for row, text, found in zip(tokens, texts, self._tokenizer.encode_batch(list(texts)), strict=True):
            ids = found.ids
            if spec.padding == "left":
                row[spec.length - len(ids) :] = ids
            else:
                row[: len(ids)] = ids
            if found.overflowing:
                warnings.warn(_cut(text, found, spec.length), RuntimeWarning, stacklevel=2)
        return tokens

    def cuts(self, texts: Sequence[str]) -> list[str]:
        """A sentence for each of these texts that is cut, as `encode` warns."""
        found = zip(texts, self._tokenizer.encode_batch(list(texts)), strict=True)
        return [_cut(text, each, self.spec.length) for text, each in found if each.overflowing]


def cleaned(text: str, clean: Clean) -> str:
    """A text as OpenCLIP's tokenizers change it first: HTML's names of characters become these characters (twice, as
    texts from the web have them), white space becomes one space. "lower": small letters too; "canonicalize": also
    without punctuation, a space for each underscore.

    OpenCLIP has the package ftfy repair a text before that (curly quotes, ligatures, wrong encodings); this does not.
    """
    text = html.unescape(html.unescape(text))
    if clean == "canonicalize":
        text = text.translate(_NO_PUNCTUATION)
    if clean != "whitespace":
        text = text.lower()
    return " ".join(text.split())


class TextWriter:
    """Turns token numbers into texts as `TextSpec` says. Safe to call from several threads."""

    def __init__(self, file: Path, spec: TextSpec, data: bytes | None = None) -> None:
        """Reads the file, or takes `data` for what it has; errors as `TextTokenizer`."""
        self.spec = spec
        self._tokenizer = _opened(file, data)
        self._left_out = frozenset(spec.left_out)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, with those that were added."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def text(self, tokens: Iterable[int]) -> str:
        """The text of these tokens; those that are left out, or that the tokenizer does not have, are nothing."""
        kept = [int(token) for token in tokens if int(token) not in self._left_out]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text that an answer begins with, without any that the tokenizer would put around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _opened(file: Path, data: bytes | None) -> Any:
    """The tokenizer of a file, or of its bytes; errors as `TextTokenizer`."""
    if data is None and not file.is_file():
        raise MissingFileError(
            f"no tokenizer at {file}", expected="tokenizer.json", fix="copy the folder of the model again, whole"
        )
    package = _require()
    size = file.stat().st_size if data is None else len(data)
    if size > MAX_BYTES:
        raise ManifestError(f"{file} is too large", found=f"{size:,} bytes", expected=f"{MAX_BYTES:,}")
    try:
        return package.Tokenizer.from_file(str(file)) if data is None else package.Tokenizer.from_buffer(data)
    except Exception as error:  # the bindings raise plain Exception
        raise ManifestError(f"{file} is no tokenizer", found=str(error)[:200], expected="tokenizer.json") from None


def require_texts(texts: object) -> None:
    """Raise InputError for anything but at least one text in a list."""
    several = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
    if several and texts and all(isinstance(text, str) for text in texts):  # type: ignore[attr-defined]
        return
    wrong = next((each for each in texts if not isinstance(each, str)), None) if several else None  # type: ignore[attr-defined]
    raise InputError(
        "an image is compared with at least one text",
        found="no text" if several and not texts else type_name(texts if wrong is None else wrong),
        expected="a list of texts, such as ['a photo of a cat', 'a photo of a dog']",
    )


def _cut(text: str, found: Any, length: int) -> str:
    """What the model does not see of a text. Special tokens have no place in it."""
    kept = max((end for _, end in found.offsets), default=0)
    lost = text[kept:].strip()
    return f"a text is cut at {length} tokens: of {_shown(text)} the model does not read {_shown(lost)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ...")


def _require() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise MissingPackageError("tokenizers", "text", "turning texts into tokens", error=error) from None

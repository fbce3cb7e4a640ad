"""Convert texts to tokens and tokens to texts, with the `tokenizers` package and the bundle's tokenizer file."""

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

# Text cleaning of OpenCLIP's tokenizers: white space only; also lower case; also without punctuation.
Clean = Literal["whitespace", "lower", "canonicalize"]
CLEANINGS: tuple[Clean, ...] = get_args(Clean)


@dataclass(frozen=True)
class ZeroShotSpec(OutputSpec):
    """How texts become tokens, and how features of images and texts are compared.

    A text is `length` tokens, padded with the token `pad` on the side `padding`; `tokenizer` is the bundle's tokenizer
    file, `lowercase` converts texts to lower case first, `clean` cleans them before that (`runtime.tokenizer.cleaned`;
    OpenCLIP's checkpoints). The logit of an image and a text is scale * cosine + bias; `scores` turns logits into
    probabilities: "softmax" over the given texts (CLIP, arXiv 2103.00020, section 2.3), or "sigmoid" of each (SigLIP,
    arXiv 2303.15343, section 3.2).
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
    """How texts become tokens, and how a detector finds the objects they describe (OWL-ViT, arXiv 2205.06230; OWLv2,
    2306.09683).

    `length`, `pad`, `padding`, `tokenizer`, `lowercase` and `clean` are as in `ZeroShotSpec`. The logit of a box and a
    text is (cosine + shift) * scale, with the box's shift and scale; the best text of each box is a candidate, with its
    sigmoid as the score, and is returned above `threshold`. Boxes are cx cy w h relative to the model's input.
    """

    length: int
    pad: int
    threshold: float = 0.1
    padding: Literal["left", "right"] = "right"
    lowercase: bool = False
    tokenizer: str = "tokenizer.json"
    clean: Clean | None = field(default=None, metadata=SPARSE)

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Return only "scores": a box with nearly equal scores for two texts may swap its label."""
        return [name for name in outputs if name == "scores"]


@dataclass(frozen=True)
class TextSpec(OutputSpec):
    """How tokens become a text: with the bundle's file `tokenizer`, without the tokens `left_out`, such as start, end
    and padding."""

    left_out: tuple[int, ...]
    tokenizer: str = "tokenizer.json"

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Return no outputs: after the first different token, scores belong to different texts."""
        return []


# Specs that describe how texts become tokens.
ReadsTexts: TypeAlias = "ZeroShotSpec | OpenVocabularySpec"


Tokens = npt.NDArray[np.int64]

# The largest published tokenizer file that we know has 34 MB.
MAX_BYTES = 256 << 20
SHOWN_CHARACTERS = 60
_NO_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))


class TextTokenizer:
    """Turns texts into token numbers by their spec. Safe to call from several threads."""

    def __init__(self, file: Path, spec: ReadsTexts, data: bytes | None = None) -> None:
        """Read the file, or use `data` as its contents.

        Raises:
            MissingPackageError: `tokenizers` is not installed.
            MissingFileError, ManifestError: the file is missing, or not a tokenizer.
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
        """Return the tokens, int64 [texts, length]. A RuntimeWarning names each truncated text and the part that is not
        read.

        Raises:
            InputError: no text, or something other than a text.
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
        """Return a sentence for each truncated text, as in the warnings of `encode`."""
        found = zip(texts, self._tokenizer.encode_batch(list(texts)), strict=True)
        return [_cut(text, each, self.spec.length) for text, each in found if each.overflowing]


def cleaned(text: str, clean: Clean) -> str:
    """Return a text cleaned like OpenCLIP's tokenizers: HTML entities are unescaped (twice, as in texts from the web),
    and white space becomes one space. "lower": also lower case; "canonicalize": also without punctuation, with a space
    for each underscore.

    OpenCLIP first repairs a text with the package ftfy (curly quotes, ligatures, wrong encodings); this does not.
    """
    text = html.unescape(html.unescape(text))
    if clean == "canonicalize":
        text = text.translate(_NO_PUNCTUATION)
    if clean != "whitespace":
        text = text.lower()
    return " ".join(text.split())


class TextWriter:
    """Turns token numbers into texts by `TextSpec`. Safe to call from several threads."""

    def __init__(self, file: Path, spec: TextSpec, data: bytes | None = None) -> None:
        """Read the file, or use `data` as its contents; errors as `TextTokenizer`."""
        self.spec = spec
        self._tokenizer = _opened(file, data)
        self._left_out = frozenset(spec.left_out)

    @property
    def vocabulary(self) -> int:
        """The number of tokens, including added ones."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of these tokens, without those in `left_out` or unknown to the tokenizer."""
        kept = [int(token) for token in tokens if int(token) not in self._left_out]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, without special tokens of the tokenizer."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _opened(file: Path, data: bytes | None) -> Any:
    """The tokenizer of a file, or of its bytes; errors as `TextTokenizer`."""
    if data is None and not file.is_file():
        raise MissingFileError(
            f"no tokenizer at {file}", expected="tokenizer.json", fix="copy the complete model folder again"
        )
    package = _require()
    size = file.stat().st_size if data is None else len(data)
    if size > MAX_BYTES:
        raise ManifestError(f"{file} is too large", found=f"{size:,} bytes", expected=f"at most {MAX_BYTES:,}")
    try:
        return package.Tokenizer.from_file(str(file)) if data is None else package.Tokenizer.from_buffer(data)
    except Exception as error:  # the bindings raise plain Exception
        raise ManifestError(f"{file} is not a tokenizer", found=str(error)[:200], expected="tokenizer.json") from None


def require_texts(texts: object) -> None:
    """Raise InputError unless `texts` is a list with at least one text."""
    several = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
    if several and texts and all(isinstance(text, str) for text in texts):  # type: ignore[attr-defined]
        return
    wrong = next((each for each in texts if not isinstance(each, str)), None) if several else None  # type: ignore[attr-defined]
    raise InputError(
        "texts must be a list of at least one text",
        found="no text" if several and not texts else type_name(texts if wrong is None else wrong),
        expected="a list of texts, such as ['a photo of a cat', 'a photo of a dog']",
    )


def _cut(text: str, found: Any, length: int) -> str:
    """The warning for a truncated text, with the part that the model does not see. Special tokens have empty
    offsets."""
    kept = max((end for _, end in found.offsets), default=0)
    lost = text[kept:].strip()
    return f"text truncated to {length} tokens: {_shown(text)}; the model does not read {_shown(lost)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ...")


def _require() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise MissingPackageError("tokenizers", "text", "turning texts into tokens", error=error) from None

"""Does the tokenizer of a bundle give the tokens of transformers' own? Asked of a thousand texts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.errors import CheckpointError
from vitdeploy.runtime.tokenizer import TextTokenizer, TextWriter, cleaned
from vitdeploy.spec import ReadsTexts, SequenceSpec, TextSpec

TEXTS, SEED = 1000, 0
# Texts that tokenizers have had trouble with: nothing, spaces of many kinds, marks that combine, scripts without spaces
# or from right to left, emoji of several code points, control characters, and names of special tokens.
ODD = (
    "",
    " ",
    "  a   photo\tof\na cat  ",
    "a photo of a cat",
    "A PHOTO OF A CAT!",
    "a cat's tail, it's 10,000.50 km — “quoted” … #1 @home",
    "naïve café, cafe\u0301, Ångström, Straße, İstanbul, ﬁne, ①②, ½",
    "ein Foto einer Katze",
    "Ảnh chụp một con mèo",
    "фото кошки",
    "μια γάτα ΣΑΣ",
    "صورة قطة",
    "תמונה של חתול",
    "बिल्ली की तस्वीर",
    "ภาพถ่ายของแมว",
    "猫の写真。犬？",
    "一张猫的照片",
    "고양이 사진",
    "🐱🐶 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽",
    "\u200b\ufeff\u00a0\u2028zero width",
    "\x00\x01\x1f\x7f",
    "<|startoftext|> <|endoftext|> <s> </s> <pad> <unk> <bos> <eos> [CLS] ▁ ##",
    "https://example.com/a?b=c&d=%20#e",
    "x" * 400,
    "word " * 300,
    "猫" * 200,
    "🐱" * 120,
)
_PARTS = (
    *("a", "photo", "of", "the", "cat", "Dog", "JPEG", "it's", "don't", "3", "1984", "0.5", "red-ish", "left,", "end."),
    *(
        "über",
        "año",
        "naïve",
        "кошка",
        "γάτα",
        "猫",
        "고양이",
        "قطة",
        "🐱",
        "👩‍👩‍👧",
        "\t",
        "\n",
        "  ",
        "…",
        "_x_",
        "<pad>",
    ),
)


def sample_texts() -> list[str]:
    """A thousand texts, always the same: the odd ones, and seeded mixtures of 1 to 120 words."""
    generator = np.random.default_rng(SEED)
    mixed = [
        " ".join(generator.choice(_PARTS, generator.integers(1, 121 if i % 10 == 0 else 12)))
        for i in range(TEXTS - len(ODD))
    ]
    return [*ODD, *mixed]


def compare_tokenizers(file: Path, spec: ReadsTexts) -> str | None:
    """What the tokenizer in the folder of `file` was compared with, in a few words; None where transformers is not
    installed, or has no tokenizer for the folder.

    Raises:
        CheckpointError: other tokens than transformers' own, for at least one text.
        MissingPackageError: the package `tokenizers` is not installed.
    """
    texts = sample_texts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ours = TextTokenizer(file, spec).encode(texts)
    try:
        import transformers
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
        wanted = _padded(theirs, texts, spec)
    except Exception:  # transformers has many, of files that it does not know and of packages that it needs
        return None
    different = [i for i, row in enumerate(np.asarray(wanted)) if not np.array_equal(ours[i], row)]
    if different:
        first = different[0]
        place = int(np.flatnonzero(ours[first] != np.asarray(wanted[first]))[0])
        raise CheckpointError(
            f"{file} gives other tokens than transformers' {type(theirs).__name__} of its folder",
            found=f"{len(different)} of {len(texts)} texts, first {texts[first][:60]!r}: token {ours[first][place]} at "
            f"place {place}, transformers' {wanted[first][place]}",
            wanted="the same tokens for every text",
            fix="save the tokenizer again with transformers' save_pretrained, and export that folder",
        )
    return f"{len(texts)} texts as transformers {transformers.__version__}'s {type(theirs).__name__}"


def _padded(theirs: Any, texts: Sequence[str], spec: ReadsTexts) -> Sequence[Sequence[int]]:
    """The tokens of transformers' tokenizer; of a model of OpenCLIP as that library asks it for them."""
    if spec.clean is None:
        return theirs(texts, padding="max_length", truncation=True, max_length=spec.length)["input_ids"]
    rows = theirs([cleaned(text, spec.clean) for text in texts], truncation=True, max_length=spec.length)["input_ids"]
    return [[*row, *[spec.pad] * (spec.length - len(row))] for row in rows]


def compare_writers(file: Path, spec: TextSpec, sequence: SequenceSpec) -> str | None:
    """The same of texts that are made of tokens: a thousand seeded answers, each with an end and padding.

    Raises:
        CheckpointError: another text than transformers' own, for at least one answer.
        MissingPackageError: the package `tokenizers` is not installed.
    """
    writer = TextWriter(file, spec)
    generator, count = np.random.default_rng(SEED), writer.vocabulary
    answers = [generator.integers(0, count, generator.integers(1, 40)).tolist() for _ in range(TEXTS)]
    answers = [[*answer, sequence.end, sequence.pad, sequence.pad] for answer in answers]
    try:
        import transformers
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
        if not set(theirs.all_special_ids) <= set(spec.left_out):  # as of Donut: compared without any
            hidden = {*theirs.all_special_ids, *spec.left_out}
            answers = [[token for token in answer if token not in hidden] for answer in answers]
        wanted = [theirs.decode(answer, skip_special_tokens=True) for answer in answers]
    except Exception:  # as above
        return None
    ours = [writer.text(answer) for answer in answers]
    different = [i for i, text in enumerate(wanted) if text != ours[i]]
    if different:
        first = different[0]
        raise CheckpointError(
            f"{file} makes other texts than transformers' {type(theirs).__name__} of its folder",
            found=f"{len(different)} of {len(answers)} answers, first {ours[first][:60]!r}, transformers' "
            f"{wanted[first][:60]!r}",
            wanted="the same text of every answer",
            fix="save the tokenizer again with transformers' save_pretrained, and export that folder",
        )
    return f"{len(answers)} answers as transformers {transformers.__version__}'s {type(theirs).__name__}"

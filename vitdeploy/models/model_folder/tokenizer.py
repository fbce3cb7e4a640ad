"""Tokenizers in model folders: settings outside `tokenizer.json`, and a comparison of a bundle's tokenizer with
transformers' own."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitdeploy.errors import CheckpointError, python_command
from vitdeploy.models.json_file import read_json
from vitdeploy.runtime.tokenizer import ReadsTexts, TextSpec, TextTokenizer, TextWriter, cleaned
from vitdeploy.spec import SequenceSpec

# --- A model folder's tokenizer settings outside `tokenizer.json` -----------------------------------------------------


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# The largest vocabularies, of 256,000 tokens, need half of that.
MAX_BYTES = 64 << 20
# Files that transformers converts to a tokenizer.json.
OTHER_TOKENIZERS = ("vocab.", "merges.txt", "sentencepiece", "spiece", "tokenizer")
Side = Literal["left", "right"]
# CLIP's start and end marks: the last two tokens of its byte-pair vocabulary.
CLIP_MARKS = ("<|startoftext|>", "<|endoftext|>")
# Behaviour of transformers 5.23's classes, whatever tokenizer.json says: whether texts are lowercased, and the padding
# side if tokenizer_config.json does not set it.
CLASSES: dict[str, tuple[bool, Side]] = {"Siglip2Tokenizer": (True, "left")}


def tokenizer_of(folder: Path) -> dict[str, Any] | None:
    """Return a folder's tokenizer settings as fields of `ZeroShotSpec`: the id of the padding token, the padding side,
    and whether texts are lowercased; None without a tokenizer.json.

    Raises:
        CheckpointError: its files cannot be read, or do not name a padding token.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        return None
    beside = folder / TOKENIZER_CONFIG
    config: Mapping[str, Any] = read_json(beside) if beside.is_file() else {}
    own = _content(file)
    padding = own.get("padding")
    padding = padding if isinstance(padding, Mapping) else {}
    pad = config.get("pad_token", padding.get("pad_token"))
    name = pad.get("content") if isinstance(pad, Mapping) else pad
    number = _number(own, name)
    if number is None:
        raise CheckpointError(
            f"the tokenizer in {folder} has no valid padding token",
            found=f"pad_token {name!r}",
            expected=f"pad_token in {TOKENIZER_CONFIG}: one of the tokens of {TOKENIZER}",
            fix="use the complete model folder, as written by save_pretrained",
        )
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    lowercase, usual = CLASSES.get(kind, (False, str(padding.get("direction", "right")).lower()))
    side = config.get("padding_side", usual)
    return {"pad": number, "padding": "left" if side == "left" else "right", "lowercase": lowercase}


def byte_pairs_of(folder: Path, vocabulary: int) -> dict[str, Any]:
    """Return the settings of CLIP's byte-pair tokenizer in OpenCLIP: padded with token 0, which is also a word's token.

    Raises:
        CheckpointError: the file cannot be read, or its start and end marks are not the last of `vocabulary` tokens.
    """
    file = folder / TOKENIZER
    own = _content(file)
    found = tuple(_number(own, name) for name in CLIP_MARKS)
    if found != (vocabulary - 2, vocabulary - 1):
        raise CheckpointError(
            f"{file} is not CLIP's byte-pair tokenizer",
            found=", ".join(f"{name} is {number}" for name, number in zip(CLIP_MARKS, found, strict=True)),
            expected=f"{vocabulary - 2} and {vocabulary - 1}, the last of the text encoder's {vocabulary} tokens",
            fix="use tokenizer.json from openai/clip-vit-base-patch32",
        )
    return {"pad": 0, "padding": "right", "lowercase": False}


def text_spec(folder: Path, *, keeps_special: bool) -> TextSpec:
    """Return how a model's output tokens are converted to a text.

    Args:
        keeps_special: special tokens are part of the text, except the start, end and padding tokens.

    Raises:
        CheckpointError: no tokenizer.json, or one that cannot be read.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        others = sorted(path.name for path in folder.iterdir() if path.name.startswith(OTHER_TOKENIZERS))
        raise CheckpointError(
            f"{folder} has no {TOKENIZER}: the model's tokens cannot be converted to text",
            found=", ".join(others) or "no tokenizer file",
            expected=f"{TOKENIZER}, as written by the package tokenizers",
            fix=python_command(
                f"from transformers import AutoTokenizer as A; d = {str(folder)!r}; "
                "A.from_pretrained(d).save_pretrained(d)"
            )
            + " writes it from the other files"
            if others
            else "copy the whole model folder",
        )
    own = _content(file)
    beside = folder / TOKENIZER_CONFIG
    config: Mapping[str, Any] = read_json(beside) if beside.is_file() else {}
    added = [each for each in own.get("added_tokens") or () if isinstance(each, Mapping)]
    special = [each["id"] for each in added if each.get("special") and isinstance(each.get("id"), int)]
    if keeps_special:
        names = (config.get(name) for name in ("bos_token", "eos_token", "pad_token"))
        ends = {_number(own, name.get("content") if isinstance(name, Mapping) else name) for name in names}
        special = [number for number in special if number in ends]
    return TextSpec(tuple(sorted(special)))


def tokens_of(file: Path) -> int:
    """Return the number of token ids, from 0 on, for which a tokenizer.json has a text; errors as `text_spec`."""
    own = _content(file)
    vocabulary = own["model"].get("vocab")
    numbers = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else [len(vocabulary or ()) - 1]
    numbers += [each.get("id") for each in own.get("added_tokens") or () if isinstance(each, Mapping)]
    return 1 + max((number for number in numbers if isinstance(number, int)), default=-1)


def _content(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"{file.stat().st_size:,} bytes (limit {MAX_BYTES:,})")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON", found=str(error)[:200], fix="copy it again") from None
    model = found.get("model") if isinstance(found, dict) else None
    vocabulary, added = (model.get("vocab"), found.get("added_tokens")) if isinstance(model, dict) else (0, 0)
    if not isinstance(vocabulary, dict | list | None) or not isinstance(added, list | None):
        raise CheckpointError(f"{file} is not a tokenizer", expected="tokenizer.json of the package tokenizers")
    return found


def _number(tokenizer: Mapping[str, Any], name: object) -> int | None:
    """Return the id of a token; None for an unknown token."""
    if not isinstance(name, str):
        return None
    added = tokenizer.get("added_tokens") or ()
    for each in added:
        if isinstance(each, Mapping) and each.get("content") == name and isinstance(each.get("id"), int):
            return int(each["id"])
    vocabulary = tokenizer["model"].get("vocab")
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(name)
        return found if isinstance(found, int) else None
    if isinstance(vocabulary, list):
        return next((i for i, row in enumerate(vocabulary) if isinstance(row, list) and row[:1] == [name]), None)
    return None


# --- Compare the tokenizer of a bundle with transformers' own, on a thousand texts ------------------------------------


TEXTS, SEED = 1000, 0
# Texts that are difficult for tokenizers: empty, many kinds of spaces, combining marks, scripts without spaces or from
# right to left, emoji of several code points, control characters, and names of special tokens.
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
    """Return a thousand fixed texts: the odd ones, and seeded mixtures of 1 to 120 words."""
    generator = np.random.default_rng(SEED)
    mixed = [
        " ".join(generator.choice(_PARTS, generator.integers(1, 121 if i % 10 == 0 else 12)))
        for i in range(TEXTS - len(ODD))
    ]
    return [*ODD, *mixed]


def compare_tokenizers(file: Path, spec: ReadsTexts) -> str | None:
    """Compare the tokenizer in `file` with transformers' for its folder; return a short description of the comparison,
    None if transformers is not installed or has no tokenizer for the folder.

    Raises:
        CheckpointError: the tokens differ from transformers' for at least one text.
        MissingPackageError: the package `tokenizers` is not installed.
    """
    texts = sample_texts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ours = TextTokenizer(file, spec).encode(texts)

    def padded(theirs: Any) -> Any:
        """Tokenize with padding, as transformers does; for an OpenCLIP model, as OpenCLIP calls it."""
        if spec.clean is None:
            return theirs(texts, padding="max_length", truncation=True, max_length=spec.length)["input_ids"]
        plain = [cleaned(text, spec.clean) for text in texts]
        rows = theirs(plain, truncation=True, max_length=spec.length)["input_ids"]
        return [[*row, *[spec.pad] * (spec.length - len(row))] for row in rows]

    if (library := _of_transformers(file, padded)) is None:
        return None
    name, theirs = library[0], np.asarray(library[1])
    different = [i for i, row in enumerate(theirs) if not np.array_equal(ours[i], row)]
    if different:
        first = different[0]
        place = int(np.flatnonzero(ours[first] != theirs[first])[0])
        raise _other(
            f"{file} gives different tokens from transformers' {name.split()[-1]} of its folder",
            f"{len(different)} of {len(texts)} texts, first {texts[first][:60]!r}: token {ours[first][place]} at "
            f"position {place}, in transformers {theirs[first][place]}",
            "the same tokens for every text",
        )
    return f"same tokens for {len(texts)} texts as {name}"


def compare_writers(file: Path, spec: TextSpec, sequence: SequenceSpec) -> str | None:
    """Like `compare_tokenizers` for detokenization: a thousand seeded token sequences, each with an end and padding.

    Raises:
        CheckpointError: the text differs from transformers' for at least one sequence.
        MissingPackageError: the package `tokenizers` is not installed.
    """
    writer = TextWriter(file, spec)
    generator, count = np.random.default_rng(SEED), writer.vocabulary
    answers = [generator.integers(0, count, generator.integers(1, 40)).tolist() for _ in range(TEXTS)]
    answers = [[*answer, sequence.end, sequence.pad, sequence.pad] for answer in answers]

    def decoded(theirs: Any) -> tuple[list[list[int]], list[str]]:
        """Return the token sequences and their texts; without special tokens if these are part of texts (Donut)."""
        kept, hidden = answers, {*theirs.all_special_ids, *spec.left_out}
        if hidden != set(spec.left_out):
            kept = [[token for token in answer if token not in hidden] for answer in answers]
        return kept, [theirs.decode(answer, skip_special_tokens=True) for answer in kept]

    if (library := _of_transformers(file, decoded)) is None:
        return None
    name, (kept, texts) = library
    different = [pair for pair in zip(map(writer.text, kept), texts, strict=True) if pair[0] != pair[1]]
    if different:
        ours, theirs = different[0]
        raise _other(
            f"{file} decodes to different texts from transformers' {name.split()[-1]} of its folder",
            f"{len(different)} of {len(answers)} sequences, first {ours[:60]!r}, in transformers {theirs[:60]!r}",
            "the same text for every sequence",
        )
    return f"same texts for {len(answers)} token sequences as {name}"


def _of_transformers(file: Path, ask: Callable[[Any], Any]) -> tuple[str, Any] | None:
    """Return the name of transformers' tokenizer for a folder and the result of `ask`; None if it has none."""
    try:
        import transformers

        theirs = transformers.AutoTokenizer.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
        return f"transformers {transformers.__version__}'s {type(theirs).__name__}", ask(theirs)
    except Exception:  # transformers raises many kinds, for unknown files and missing packages
        return None


def _other(message: str, found: str, expected: str) -> CheckpointError:
    fix = "save the tokenizer again with transformers' save_pretrained, and export that folder"
    return CheckpointError(message, found=found, expected=expected, fix=fix)

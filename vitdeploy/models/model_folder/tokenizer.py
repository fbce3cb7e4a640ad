"""What a model folder says of its tokenizer, as far as `tokenizer.json` alone does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitdeploy.errors import CheckpointError, python_command
from vitdeploy.models.json_file import read_json
from vitdeploy.spec import Clean, TextSpec

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# The largest vocabularies, of 256,000 tokens, take half of that.
MAX_BYTES = 64 << 20
# Files that transformers makes a tokenizer.json of.
OTHER_TOKENIZERS = ("vocab.", "merges.txt", "sentencepiece", "spiece", "tokenizer")
Side = Literal["left", "right"]
# CLIP's marks around a text: the last two tokens of its byte pairs.
CLIP_MARKS = ("<|startoftext|>", "<|endoftext|>")
# What transformers 5.23's classes do, whatever tokenizer.json says: whether texts become small letters, and the side of
# the padding where tokenizer_config.json does not say it.
CLASSES: dict[str, tuple[bool, Side]] = {"Siglip2Tokenizer": (True, "left")}


@dataclass(frozen=True)
class TokenizerFacts:
    """`pad`: the number of the token that texts are padded with, on the side `padding`; the rest as `ZeroShotSpec`."""

    file: Path
    pad: int
    padding: Side
    lowercase: bool
    clean: Clean | None = None


def tokenizer_of(folder: Path) -> TokenizerFacts | None:
    """The tokenizer of a folder; None without a tokenizer.json.

    Raises:
        CheckpointError: its files cannot be read, or do not say what texts are padded with.
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
            f"{folder} does not say what its texts are padded with",
            found=f"pad_token {name!r}",
            wanted=f"pad_token in {TOKENIZER_CONFIG}: one of the tokens of {TOKENIZER}",
            fix="take the folder of the model whole, as save_pretrained writes it",
        )
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    lowercase, usual = CLASSES.get(kind, (False, str(padding.get("direction", "right")).lower()))
    side = config.get("padding_side", usual)
    return TokenizerFacts(file, number, "left" if side == "left" else "right", lowercase)


def byte_pairs_of(folder: Path, vocabulary: int) -> TokenizerFacts:
    """CLIP's byte pairs as OpenCLIP uses them: padded with the token 0, which is a word's, too.

    Raises:
        CheckpointError: the file cannot be read, or its marks around a text are not the last of `vocabulary` tokens.
    """
    file = folder / TOKENIZER
    own = _content(file)
    found = tuple(_number(own, name) for name in CLIP_MARKS)
    if found != (vocabulary - 2, vocabulary - 1):
        raise CheckpointError(
            f"{file} is not the tokenizer of CLIP's byte pairs",
            found=", ".join(f"{name} is {number}" for name, number in zip(CLIP_MARKS, found, strict=True)),
            wanted=f"{vocabulary - 2} and {vocabulary - 1}, the last of the text tower's {vocabulary} tokens",
            fix="take tokenizer.json of openai/clip-vit-base-patch32",
        )
    return TokenizerFacts(file, 0, "right", False)


def text_spec(folder: Path, *, keeps_special: bool) -> TextSpec:
    """How the tokens that a model writes become a text.

    Args:
        keeps_special: special tokens are part of the text, but those that begin, end and fill it up.

    Raises:
        CheckpointError: no tokenizer.json, or one that cannot be read.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        others = sorted(path.name for path in folder.iterdir() if path.name.startswith(OTHER_TOKENIZERS))
        raise CheckpointError(
            f"{folder} has no {TOKENIZER}: nothing says which text the model's tokens are",
            found=", ".join(others) or "no file of a tokenizer",
            wanted=f"{TOKENIZER}, the file of the package tokenizers",
            fix=python_command(
                f"from transformers import AutoTokenizer as A; d = {str(folder)!r}; "
                "A.from_pretrained(d).save_pretrained(d)"
            )
            + " writes it of the other files"
            if others
            else "copy the folder of the model whole",
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
    """How many token numbers a tokenizer.json has a text for, from 0 on; errors as `text_spec`."""
    own = _content(file)
    vocabulary = own["model"].get("vocab")
    numbers = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else [len(vocabulary or ()) - 1]
    numbers += [each.get("id") for each in own.get("added_tokens") or () if isinstance(each, Mapping)]
    return 1 + max((number for number in numbers if isinstance(number, int)), default=-1)


def _content(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"{file.stat().st_size:,} bytes, at most {MAX_BYTES:,} are read")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON", found=str(error)[:200], fix="copy it again") from None
    model = found.get("model") if isinstance(found, dict) else None
    vocabulary, added = (model.get("vocab"), found.get("added_tokens")) if isinstance(model, dict) else (0, 0)
    if not isinstance(vocabulary, dict | list | None) or not isinstance(added, list | None):
        raise CheckpointError(f"{file} is no tokenizer", wanted="tokenizer.json of the package tokenizers")
    return found


def _number(tokenizer: Mapping[str, Any], name: object) -> int | None:
    """The number of a token; None if there is no such token."""
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

"""Tokenizers and OpenCLIP's configs in folders of libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitdeploy.errors import CheckpointError, python_command
from vitdeploy.models.json_file import read_json
from vitdeploy.models.model_folder.folder import OPEN_CLIP, sides
from vitdeploy.models.model_folder.image_processor import CLIP_MEAN, CLIP_STD
from vitdeploy.spec import CLEANINGS, Clean, Interpolation, PreprocessSpec, TextSpec

# --- What a model folder says of its tokenizer, as far as `tokenizer.json` alone does not -----------------------------


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


# --- A folder in OpenCLIP's layout ------------------------------------------------------------------------------------
# `open_clip_config.json` beside weights with OpenCLIP's names, and what it says.
#
# Source: `CLIPVisionCfg`, `CLIPTextCfg` and `PreprocessCfg` of open_clip_torch 3.3, whose defaults stand for what the
# file leaves out. A key that is not read here must have a value that changes nothing.


ALONE = "for the image tower alone: --task features"
# Keys that are read, and those that have no part in what a trained tower computes.
_VISION = {"layers", "width", "head_width", "patch_size", "image_size", "no_ln_pre", "final_ln_after_pool"}
_VISION |= {"pool_type", "act_kwargs", "norm_kwargs", "timm_model_name", "timm_pool", "timm_proj", "timm_model_kwargs"}
_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "no_causal_mask", "pool_type", "eos_id"}
_TEXT |= {"act_kwargs", "norm_kwargs", "hf_tokenizer_name", "tokenizer_kwargs"}
_BY_TENSORS = {"mlp_ratio", "ls_init_value", "pos_embed_type", "proj_bias", "timm_proj_bias"}
_OF_TRAINING = {"patch_dropout", "output_tokens", "image_seq_len", "timm_model_pretrained", "timm_drop"}
_OF_TRAINING |= {"timm_drop_path", "attn_pooler_queries", "attn_pooler_heads"}
# Of tokenizers, whose numbers are in their own files; and of text towers that are refused before.
_OF_TOKENIZERS = {"pad_id", "bos_id", "hf_model_pretrained", "hf_proj_type", "hf_pooler_type"}
_NEUTRAL: tuple[Any, ...] = (None, False, "", "default")
# Values that are as good as absent where they are these.
_USUAL = {"text_arch": "clip", "proj_type": "linear", "in_chans": 3, "tiktoken_name": "cl100k_base"}
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("width", "head_width", "heads", "context_length", "vocab_size", "patch_size"), (int,)),
    **dict.fromkeys(
        ("pool_type", "proj_type", "timm_model_name", "timm_pool", "timm_proj", "hf_tokenizer_name"), (str,)
    ),
    **dict.fromkeys(("act_kwargs", "norm_kwargs", "timm_model_kwargs", "tokenizer_kwargs"), (dict,)),
    **dict.fromkeys(("no_ln_pre", "final_ln_after_pool", "no_causal_mask"), (bool,)),
}


@dataclass(frozen=True)
class OpenClip:
    """What the file says. `vision`, `text`: its parts as they are; `features`: the width that both towers share."""

    file: Path
    features: int
    quick_gelu: bool
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    preprocess: Mapping[str, Any]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        size = sides(self.vision.get("image_size", 224))
        if size is None:
            raise self.refused(f"image_size {self.vision['image_size']!r}", "a side in pixels, or height and width")
        return size

    def refused(self, found: str, wanted: str, fix: str = "") -> CheckpointError:
        """The error of a value that vitdeploy does not have."""
        return CheckpointError(
            f"{self.file} says something that vitdeploy does not do", found=found, wanted=wanted, fix=fix
        )

    def refuse_vision(self) -> None:
        """Raise CheckpointError for an image tower with parts that ours does not have."""
        self._refuse("vision_cfg", self.vision, _VISION, "the image tower of CLIP, SigLIP or timm")

    def refuse_text(self) -> None:
        """Raise CheckpointError for a text tower that is not OpenCLIP's own Transformer."""
        name = self.text.get("hf_model_name")
        if name:
            raise self.refused(f"a text tower of transformers, {name}", "OpenCLIP's own text Transformer", ALONE)
        self._refuse("text_cfg", self.text, _TEXT, "the text tower of CLIP or SigLIP", ALONE)

    def _refuse(self, name: str, part: Mapping[str, Any], read: set[str], wanted: str, fix: str = "") -> None:
        known = read | _BY_TENSORS | _OF_TRAINING | _OF_TOKENIZERS
        others = {key: value for key, value in part.items() if key not in known and value not in _NEUTRAL}
        foreign = [f"{key} {value!r}" for key, value in others.items() if _USUAL.get(key) != value]
        foreign += [
            f"{key} {part[key]!r}"
            for key, kinds in _KINDS.items()
            if part.get(key) is not None and (type(part[key]) not in kinds or (kinds == (int,) and part[key] < 1))
        ]
        if foreign:
            raise self.refused(f"{name}: {', '.join(foreign)}", wanted, fix)

    @property
    def clean(self) -> Clean:
        """How OpenCLIP's tokenizers change a text first.

        Raises:
            CheckpointError: a tokenizer of another kind, or one that is used in a way of its own.
        """
        arguments = self.text.get("tokenizer_kwargs") or {}
        clean = arguments.get("clean", "whitespace" if self.text.get("hf_tokenizer_name") else "lower")
        if set(arguments) - {"clean"} or clean not in CLEANINGS:
            raise self.refused(
                f"tokenizer_kwargs {dict(arguments)}", f"clean alone, one of {', '.join(CLEANINGS)}", ALONE
            )
        return clean


def open_clip_config(folder: Path) -> OpenClip:
    """What `open_clip_config.json` says: the file of a model folder, or one of OpenCLIP's own `model_configs`.

    Raises:
        CheckpointError: it describes no dual tower, or one with a decoder.
    """
    file = folder / OPEN_CLIP
    content = read_json(file)
    model = content.get("model_cfg", content)
    model = model if isinstance(model, Mapping) else {}
    vision, text, width = (model.get(key) for key in ("vision_cfg", "text_cfg", "embed_dim"))
    others = [
        key for key, value in model.items() if key.endswith("_cfg") and value and key not in ("vision_cfg", "text_cfg")
    ]
    whole = isinstance(vision, Mapping) and isinstance(text, Mapping) and isinstance(width, int)
    if not whole or others:
        raise CheckpointError(
            f"{file} is not the config of an image tower and a text tower",
            found=", ".join(map(str, others or model or content)) or "{}",
            wanted="model_cfg with embed_dim, vision_cfg and text_cfg, as OpenCLIP writes it",
            fix="CoCa, CLAP and GenLIP have further parts, and are not read"
            if others
            else "copy the folder again, whole",
        )
    preprocess = content.get("preprocess_cfg")
    preprocess = preprocess if isinstance(preprocess, Mapping) else {}
    return OpenClip(file, width, model.get("quick_gelu") is True, vision, text, preprocess)  # type: ignore[arg-type]


def open_clip_preprocess(config: OpenClip) -> PreprocessSpec:
    """The preprocessing of `preprocess_cfg`, as OpenCLIP's `image_transform` does it for evaluation.

    Raises:
        CheckpointError: a setting that vitdeploy does not have.
    """
    cfg, size = config.preprocess, config.image_size
    mode, named = cfg.get("resize_mode") or "shortest", cfg.get("interpolation") or "bicubic"
    own = sides(cfg.get("size")) or size
    fill, colours = cfg.get("fill_color") or 0, cfg.get("mode") or "RGB"
    if (
        mode not in ("shortest", "squash")
        or named not in ("bicubic", "bilinear", "random")
        or (own, fill, colours) != (size, 0, "RGB")
    ):
        raise config.refused(
            f"resize_mode {mode!r}, interpolation {named!r}, size {own}, fill_color {fill!r}, mode {colours!r}",
            f"shortest or squash; bicubic or bilinear; size {size[0]}x{size[1]}; 0; RGB",
        )
    # OpenCLIP's own reading: what is random in training is bicubic, and so is a crop that is not square.
    square = size[0] == size[1]
    plain = named == "bilinear" and (square or mode == "squash")
    interpolation: Interpolation = "bilinear" if plain else "bicubic"
    mean, std = (_channels(config, key, usual) for key, usual in (("mean", CLIP_MEAN), ("std", CLIP_STD)))
    if mode == "squash":
        return PreprocessSpec(size, size, interpolation, mean, std)
    if square:
        return PreprocessSpec(size[0], size, interpolation, mean, std)
    return PreprocessSpec(size, size, interpolation, mean, std, "cover")


def _channels(config: OpenClip, key: str, usual: tuple[float, ...]) -> tuple[float, ...]:
    found = config.preprocess.get(key) or usual
    values = list(found) if isinstance(found, list | tuple) else [found] * 3
    if len(values) != 3 or not all(type(value) in (int, float) and abs(value) < 1e6 for value in values):
        raise config.refused(f"{key} {found!r}", "a number for each of 3 channels")
    if key == "std" and min(values) <= 0:
        raise config.refused(f"std {found!r}", "numbers above 0")
    return tuple(map(float, values))

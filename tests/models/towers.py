"""Seeded CLIP and SigLIP folders, as transformers saves them, each with a small tokenizer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch

from tests.references import reference

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTH = 16
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = [" ".join(DIGITS), "a photo of a cat", "ein Foto", "фото кошки", "猫の写真", "the digit 🐱"] * 3


def byte_pairs(transformers: Any, *, marks_last: bool = False) -> Any:
    """CLIP's kind of tokenizer, whose merges join the first three bytes of each word, with the marks around a text as
    the first tokens, or as the last, as CLIP's own are. Learned ones are others in each
    process: the trainer numbers the bytes at the ends of words as it meets them, in no fixed order."""
    first = transformers.CLIPTokenizer().backend_tokenizer
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for text in WORDS:
        for word, _ in first.pre_tokenizer.pre_tokenize_str(first.normalizer.normalize_str(text)):
            symbols = [*word[:-1], f"{word[-1]}</w>"]
            pairs = [(symbols[0], symbols[1])] if len(symbols) > 1 else []
            pairs += [(symbols[0] + symbols[1], symbols[2])] if len(symbols) > 2 else []
            merges += [pair for pair in pairs if pair not in merges]
    joined = ["".join(pair) for pair in merges]
    marks = ["<|startoftext|>", "<|endoftext|>"]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *joined]
    tokens = [*tokens, *marks] if marks_last else [*marks, *tokens]
    return transformers.CLIPTokenizer(vocab={token: k for k, token in enumerate(tokens)}, merges=merges)


def save_towers(kind: str, folder: Path) -> Any:
    """The model, saved in `folder` with its processor and tokenizer. `kind`: "clip", "old-clip", "siglip"."""
    transformers = reference("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    siglip = transformers.Siglip2Tokenizer().train_new_from_iterator(WORDS, 300) if kind == "siglip" else None
    tokenizer = siglip or byte_pairs(transformers)
    count = len(tokenizer)
    torch.manual_seed(2)
    if kind == "siglip":
        text = {**TEXT, "vocab_size": count, "max_position_embeddings": LENGTH, "projection_size": 32}
        model = transformers.SiglipModel(transformers.SiglipConfig(vision_config=VISION, text_config=text))
    else:
        ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        # CLIP's first configs name token 2 as the end, and its largest token is.
        ends |= {"eos_token_id": 2} if kind == "old-clip" else {}
        text = {**TEXT, "vocab_size": count, "max_position_embeddings": LENGTH, **ends}
        config = transformers.CLIPConfig(vision_config=VISION, text_config=text, projection_dim=24)
        model = transformers.CLIPModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        model.logit_scale.fill_(2.5)
        if kind == "siglip":
            model.logit_bias.fill_(-1.5)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind != "siglip":
        size = {"height": 32, "width": 32}
        transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
    return model

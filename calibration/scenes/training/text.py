"""Text recognition: TrOCR (arXiv 2109.10282), a ViT that reads a line and a Transformer that writes its characters.

While it is trained, a linear head also names the character in each patch. Without it the decoder learns for long how
often characters are, and reads none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibration.scenes import lines
from calibration.scenes.canvas import Bytes
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import mean_of_images
from calibration.scenes.training.libraries import reference, transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES

PATCH, WIDTH = 8, 128
LONGEST = lines.LONGEST + 2  # tokens of a line, with start and end
CLASSES = 1 + len(lines.CHARACTERS)  # of a patch: nothing, or a character
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Sample:
    """`image` uint8 [height, width, 3]; `shares` float32 [patches, CLASSES], what of each patch each class covers."""

    image: Bytes
    text: str
    shares: np.ndarray


def draw(split: str, index: int) -> Sample:
    height, width = SIZES["text"]
    drawn = lines.line(stream("text", split, index), height, width, split)
    ids = np.array([0, *(lines.CHARACTERS.index(each) + 1 for each in drawn.text)])
    classes = np.eye(CLASSES, dtype=np.float32)[ids[drawn.owner]]
    patches = classes.reshape(height // PATCH, PATCH, width // PATCH, PATCH, CLASSES).mean(axis=(1, 3))
    return Sample(drawn.image, drawn.text, patches.reshape(-1, CLASSES))


@functools.cache
def tokenizer() -> Any:
    """A token for each character, after the four special ones."""
    names = [*SPECIAL.values(), *lines.CHARACTERS]
    ids = {name: k for k, name in enumerate(names)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=SPECIAL["unk_token"]))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    ends = [(SPECIAL[name], ids[SPECIAL[name]]) for name in ("bos_token", "eos_token")]
    words.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=LONGEST, **SPECIAL)


def build() -> nn.Module:
    words = tokenizer()
    encoder = transformers.ViTConfig(
        image_size=list(SIZES["text"]),
        patch_size=PATCH,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    decoder = transformers.TrOCRConfig(
        vocab_size=len(words),
        d_model=WIDTH,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=LONGEST + 2,
        dropout=0.0,
        is_decoder=True,
        add_cross_attention=True,
        cross_attention_hidden_size=WIDTH,
        tie_word_embeddings=False,
    )
    special = {name: getattr(words, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=words.bos_token_id, tie_word_embeddings=False, **special
    )
    model = transformers.VisionEncoderDecoderModel(config)
    model.generation_config = transformers.GenerationConfig(
        max_length=LONGEST, decoder_start_token_id=words.bos_token_id, **special
    )
    return model


def processors() -> tuple[Any, ...]:
    height, width = SIZES["text"]
    return transformers.ViTImageProcessor(size={"height": height, "width": width}), tokenizer()


def inputs(images: list[Bytes]) -> Tensor:
    processor = processors()[0]
    return pixels(images, processor.image_mean, processor.image_std)


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """Cross-entropy of the characters and the end, each told from the true ones before it, and that of the patches."""
    words = tokenizer()
    # The start is what the decoder reads first, not what it has to say.
    labels = words([each.text for each in samples], padding=True, return_tensors="pt").input_ids[:, 1:]
    labels = labels.masked_fill(labels == words.pad_token_id, -100)
    output = model(pixel_values=inputs([each.image for each in samples]), labels=labels)
    patches = model.helper(output.encoder_last_hidden_state[:, 1:])
    true = torch.from_numpy(np.stack([each.shares for each in samples]))
    return output.loss + F.cross_entropy(patches.flatten(0, 1), true.flatten(0, 1))


@torch.inference_mode()
def read(model: Any, images: list[Bytes]) -> list[str]:
    """The texts, decoded greedily."""
    found = [
        model.generate(inputs(images[i : i + 50]), num_beams=1, do_sample=False) for i in range(0, len(images), 50)
    ]
    return [text for part in found for text in tokenizer().batch_decode(part, skip_special_tokens=True)]


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """Character accuracy, 100 minus torchmetrics' character error rate, and the share of lines wholly right."""
    error_rate = reference("torchmetrics").functional.text.char_error_rate
    found = read(model, [each.image for each in samples])
    right, whole = [], []
    for text, sample in zip(found, samples, strict=True):
        right.append(np.full(len(sample.text), 1 - float(error_rate(text, sample.text))))
        whole.append(np.array([text == sample.text]))
    return {
        "character_accuracy": mean_of_images(right, "characters", percent=True),
        "line_accuracy": mean_of_images(whole, "lines", percent=True),
    }


def patch_head() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


RECIPE = Recipe(16000, 4000, 48, 1.5e-3, weight_decay=0.05)
KIND = Kind(RECIPE, build, draw, loss, measure, processors, evaluated=500, helper=patch_head)

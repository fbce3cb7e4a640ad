"""Two towers: CLIP (arXiv 2103.00020), a ViT for pictures and a Transformer for captions, with its own tokenizer.

While it is trained, a linear head also names the shape in each patch. Captions alone teach colours within minutes, and
shapes not in half an hour (54 % zero-shot top-1 on the hold-out, each colour right and 55 % of the shapes).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibration.scenes import captions
from calibration.scenes.canvas import Bytes
from calibration.scenes.shapes import NAMES, Scene
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import mean_of_images
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES, semantic_map, zero_shot

SIDE, LENGTH, PROJECTION = SIZES["captions"][0], 16, 64
PATCH, WIDTH = 8, 128  # of the picture's tower
CLASSES = 1 + len(NAMES)  # of a patch: the ground, or a shape
PATCH_LOSS = 3.0  # its weight
START, END = "<|startoftext|>", "<|endoftext|>"
TOKENIZER_CAPTIONS, MERGES = 2000, 160
TEMPLATE = "a {}"
GALLERY = 24  # pictures and captions to match


@dataclass(frozen=True)
class Sample:
    """`image` uint8 [SIDE, SIDE, 3] and its caption.

    In training `shares`, float32 [patches, CLASSES], what of each patch each class covers; elsewhere `single`, a
    picture of one shape, and its `label`.
    """

    image: Bytes
    caption: str
    shares: np.ndarray | None = None
    single: Bytes | None = None
    label: str = ""


def draw(split: str, index: int) -> Sample:
    scene, caption = captions.captioned(stream("captions", split, index), SIDE, split)
    if split == "training":
        return Sample(scene.image, caption, shares=shares(scene))
    single, label = zero_shot(split, index)
    return Sample(scene.image, caption, single=single.image, label=label)


def shares(scene: Scene) -> np.ndarray:
    """The share of each patch that each class covers: float32 [patches, CLASSES], patches row by row."""
    classes = np.eye(CLASSES, dtype=np.float32)[semantic_map(scene)]
    side = SIDE // PATCH
    return classes.reshape(side, PATCH, side, PATCH, CLASSES).mean(axis=(1, 3)).reshape(-1, CLASSES)


@functools.cache
def tokenizer() -> Any:
    """CLIP's kind of byte pairs, their merges learned from training captions.

    Every byte has a token, alone and at the end of a word, as in OpenAI's vocabulary: any text can be read.
    """
    texts = [captions.captioned(stream("captions", "training", i), 8, "training")[1] for i in range(TOKENIZER_CAPTIONS)]
    empty = transformers.CLIPTokenizer().backend_tokenizer
    learner = tokenizers.Tokenizer(tokenizers.models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer, learner.pre_tokenizer = empty.normalizer, empty.pre_tokenizer
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    learner.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=len(alphabet) + MERGES,
            initial_alphabet=alphabet,
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    merges = [tuple(each) for each in json.loads(learner.to_str())["model"]["merges"]]
    tokens = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *("".join(each) for each in merges), START, END]
    vocabulary = {token: k for k, token in enumerate(dict.fromkeys(tokens))}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=LENGTH)


def build() -> nn.Module:
    words = tokenizer()
    ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    text = {
        **{"vocab_size": len(words), "hidden_size": 96, "intermediate_size": 384, "projection_dim": PROJECTION},
        **{"num_hidden_layers": 3, "num_attention_heads": 3, "max_position_embeddings": LENGTH, **ends},
    }
    vision = {
        **{"image_size": SIDE, "patch_size": PATCH, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "projection_dim": PROJECTION},
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=PROJECTION)
    return transformers.CLIPModel(config)


def processors() -> tuple[Any, ...]:
    side = {"height": SIDE, "width": SIDE}
    return transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=side), tokenizer()


def inputs(images: list[Bytes]) -> Tensor:
    processor = processors()[0]
    return pixels(images, processor.image_mean, processor.image_std)


def tokens(texts: list[str]) -> dict[str, Tensor]:
    return dict(tokenizer()(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"))


def meaning(caption: str) -> str:
    """The caption without its prefix: captions with the same meaning are not negatives of each other."""
    return caption[caption.index("a ", len("a ") if caption.startswith(("a photo", "a picture")) else 0) :]


def loss(model: nn.Module, samples: Samples, random: Random) -> Tensor:
    """CLIP's loss both ways, where all captions of a picture's meaning are right, and the shapes of the patches."""
    output = model(pixel_values=inputs([each.image for each in samples]), **tokens([each.caption for each in samples]))
    same = [meaning(each.caption) for each in samples]
    right = torch.tensor([[float(a == b) for b in same] for a in same])
    right = right / right.sum(dim=1, keepdim=True)
    logits = output.logits_per_image
    both = (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2
    patches = model.helper(output.vision_model_output.last_hidden_state[:, 1:])
    true = torch.from_numpy(np.stack([each.shares for each in samples]))
    return both + PATCH_LOSS * F.cross_entropy(patches.flatten(0, 1), true.flatten(0, 1))


@torch.inference_mode()
def image_features(model: Any, images: list[Bytes]) -> np.ndarray:
    """Unit vectors, float32 [n, PROJECTION]."""
    found = [model.get_image_features(pixel_values=inputs(images[i : i + 100])) for i in range(0, len(images), 100)]
    return unit(found)


@torch.inference_mode()
def text_features(model: Any, texts: list[str]) -> np.ndarray:
    """Unit vectors, float32 [n, PROJECTION]."""
    return unit([model.get_text_features(**tokens(texts))])


def unit(found: list[Any]) -> np.ndarray:
    joined = torch.cat([getattr(each, "pooler_output", each) for each in found])
    return F.normalize(joined, dim=1).numpy()


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """Zero-shot top-1 among 48 labels, of all and of the six that training lacks; retrieval top-1 among GALLERY pairs.

    All in percent. A picture whose caption means the same as the right one is right too.
    """
    labels = text_features(model, [TEMPLATE.format(label) for label in captions.LABELS])
    best = (image_features(model, [each.single for each in samples]) @ labels.T).argmax(axis=1)
    right = [np.array([captions.LABELS[k] == each.label]) for k, each in zip(best, samples, strict=True)]
    unseen = [each for each, sample in zip(right, samples, strict=True) if captions.held_out(*sample.label.split())]
    pictures = image_features(model, [each.image for each in samples])
    texts = text_features(model, [each.caption for each in samples])
    same = [meaning(each.caption) for each in samples]
    found: dict[str, list[np.ndarray]] = {"text_to_image": [], "image_to_text": []}
    for first in range(0, len(samples), GALLERY):
        part = slice(first, first + GALLERY)
        alike = pictures[part] @ texts[part].T
        for name, best_of in (("text_to_image", alike.argmax(axis=0)), ("image_to_text", alike.argmax(axis=1))):
            found[name] += [np.array([same[first + k] == same[first + i]]) for i, k in enumerate(best_of)]
    return {
        "zero_shot_top1": mean_of_images(right, "images", percent=True),
        "zero_shot_top1_held_out": mean_of_images(unseen, "images", percent=True),
        **{f"{name}_top1": mean_of_images(each, "pairs", percent=True) for name, each in found.items()},
    }


def patch_head() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


RECIPE = Recipe(24000, 5000, 64, 1e-3, weight_decay=0.05)
KIND = Kind(RECIPE, build, draw, loss, measure, processors, evaluated=480, helper=patch_head)

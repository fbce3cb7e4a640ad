"""CLIP and SigLIP whole: our image tower, and the text tower of the same checkpoint beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.text_encoder import TextEncoder
from vitdeploy.models.checkpoints.load_state import load_state
from vitdeploy.models.keys.text_transformers import TextTower, has_text_tower, recognise_text
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.model_folder.tokenizer import TOKENIZER, TokenizerFacts, tokenizer_of
from vitdeploy.spec import Task, TensorSpec, ZeroShotSpec

# `model_type` of configs that are about both towers.
BOTH = ("clip", "siglip")
# SigLIP 2 with images of any aspect: its patches come with a mask and sizes, as a sequence of their own.
NAFLEX = ("siglip2", "siglip2_vision_model")
_WITHIN = "its layers attend to the tokens of the text: no flow passes these and their masks yet"
# By model_type: what it is called, and what is missing (ADR 18).
OPEN_VOCABULARY: Mapping[str, tuple[str, str]] = {
    "grounding-dino": ("Grounding DINO", _WITHIN),
    "mm-grounding-dino": ("MM Grounding DINO", _WITHIN),
    "omdet-turbo": ("OmDet-Turbo", _WITHIN),
}


class ImageTower(nn.Module):
    """The pooled features alone of a tower: float32 [b, channels, height, width] -> [b, features]."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, image: Tensor) -> Tensor:
        found = self.tower(image)
        return found if isinstance(found, Tensor) else found[0]


class Towers(nn.Module):
    """Both towers: float32 [b, channels, height, width] and int64 [texts, length] -> the features of each."""

    def __init__(self, image: nn.Module, text: TextEncoder) -> None:
        super().__init__()
        self.image_tower, self.text_tower = ImageTower(image), text

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.image_tower(image), self.text_tower(text)


def refuse_naflex(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for SigLIP 2 NaFlex, whose images have no one size."""
    if config.get("model_type") in NAFLEX:
        raise CheckpointError(
            "SigLIP 2 with images of any aspect (NaFlex) is not exported by this version",
            found=f"model_type {config['model_type']}: it takes patches with pixel_attention_mask and spatial_shapes",
            wanted="a SigLIP 2 of one image size, whose config has model_type siglip",
            fix="take the checkpoint of a fixed size, such as google/siglip2-base-patch16-224",
        )


def refuse_open_vocabulary(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a detector that is told at run time what to find."""
    found = OPEN_VOCABULARY.get(str(config.get("model_type")))
    if found is not None:
        raise CheckpointError(
            f"{found[0]} is not exported by this version: what it is to find is text at run time",
            found=f"model_type {config['model_type']}; {found[1]}",
            wanted="a detector with classes of its own",
            fix="for a fixed list of things: --model package.module:function, which returns a module that keeps their "
            "tokens, takes the image alone and returns class logits and boxes",
        )


def with_text_tower(
    original: LoadedModel, folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], task: Task | None
) -> LoadedModel:
    """The same with its text tower, where the folder has both and a tokenizer; else itself, with a note of what is not
    there.

    Raises:
        CheckpointError: the folder says that it has both, and its weights have no text tower, or not a whole one.
    """
    if config.get("model_type") not in BOTH or original.signature.task != "features" or task in ("features", "anomaly"):
        return original
    tokenizer, text = tokenizer_of(folder), has_text_tower(state)
    if tokenizer is None:
        told = f"no {TOKENIZER}" if text else "no text tower and no tokenizer"
        return dataclasses.replace(original, notes=(*original.notes, f"{told}: the image tower alone"))
    if not text:
        raise CheckpointError(
            f"the text tower is not in the weights of {folder}",
            found=f"model_type {config['model_type']} in config.json, {TOKENIZER}, and no tensor text_model...",
            wanted="the weights of both",
            fix="save the whole model; or, for the image tower alone: --task features",
        )
    return both_towers(original, recognise_text(state, config), tokenizer, f"the text tower of {folder}")


def text_encoder(tower: TextTower, what: str) -> TextEncoder:
    """The module of a text tower, which is called `what`; raises CheckpointError if the tensors do not fit it."""
    with torch.device("meta"):
        module = TextEncoder(tower.config)
    module = module.to_empty(device="cpu")
    module.places = torch.arange(tower.config.length)[None]
    load_state(module, tower.state, what)
    return module.eval()


def both_towers(original: LoadedModel, tower: TextTower, tokenizer: TokenizerFacts, what: str) -> LoadedModel:
    """The image tower with a text tower, which is called `what`.

    Raises:
        CheckpointError: they give features of different widths; or the tensors do not fit the text tower.
    """
    image = original.signature.outputs[0].shape[-1]
    if tower.config.features != image:
        raise CheckpointError(
            "the towers do not belong together",
            found=f"{image} image features, {tower.config.features} text features",
            wanted="as many of each",
        )
    module = text_encoder(tower, what)
    spec = ZeroShotSpec(
        length=tower.config.length,
        pad=tokenizer.pad,
        scale=tower.scale,
        bias=tower.bias,
        scores="sigmoid" if tower.sigmoid else "softmax",
        padding=tokenizer.padding,
        lowercase=tokenizer.lowercase,
        clean=tokenizer.clean,
    )
    outputs = (
        TensorSpec("image_features", "float32", ("batch", image)),
        TensorSpec("text_features", "float32", ("texts", image)),
    )
    return dataclasses.replace(
        original,
        module=Towers(original.module, module).eval(),
        signature=dataclasses.replace(original.signature, task="zero-shot", outputs=outputs, postprocess=spec),
        notes=(
            *(note for note in original.notes if "text_model" not in note),  # which would say that it is left out
            f"both towers; texts of up to {tower.config.length} tokens",
        ),
    )

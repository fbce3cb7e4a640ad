"""OWL-ViT (arXiv 2205.06230) and OWLv2 (arXiv 2306.09683) of transformers as two towers: one gives boxes with class
features, the other the features of texts. The runtime compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, python_command
from vitdeploy.models.architectures.text_encoder import TextEncoder
from vitdeploy.models.external.transformers import library_model
from vitdeploy.models.family import Signature
from vitdeploy.models.keys.text_transformers import recognise_text
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.model_folder.config import sides
from vitdeploy.models.model_folder.tokenizer import TOKENIZER, tokenizer_of
from vitdeploy.models.towers import text_encoder
from vitdeploy.runtime.flows import TEXT_FEATURES
from vitdeploy.runtime.open_vocabulary import BOXES, CLASS_FEATURES, EPSILON, OF_IMAGES, SCALE, SHIFT
from vitdeploy.spec import OpenVocabularySpec, PreprocessSpec, TensorSpec

# By model_type: the attribute that holds both encoders, which is the class's, too.
KINDS = {"owlvit": "OwlViTForObjectDetection", "owlv2": "Owlv2ForObjectDetection"}


class OwlImage(nn.Module):
    """float32 [b, channels, side, side] -> class features of length 1 [b, boxes, width], shift and scale of their
    cosines [b, boxes], and boxes [b, boxes, 4], cx cy w h relative to the image."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        model, head = self.model, self.model.class_head
        grid = model.image_embedder(image)[0]
        tokens = grid.flatten(1, 2)
        features = head.dense0(tokens)
        features = features / (torch.linalg.norm(features, dim=-1, keepdim=True) + EPSILON)
        shift, scale = head.logit_shift(tokens)[..., 0], head.elu(head.logit_scale(tokens)[..., 0]) + 1
        return features, shift, scale, model.box_predictor(tokens, grid)


class OpenVocabulary(nn.Module):
    """Both towers: float32 [b, channels, side, side] and int64 [texts, length] -> what `OwlImage` gives, and the
    features of the texts [texts, width]."""

    def __init__(self, image: OwlImage, text: TextEncoder) -> None:
        super().__init__()
        self.image_tower, self.text_tower = image, text

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        return (*self.image_tower(image), self.text_tower(text))


def from_owl(
    folder: Path,
    config: Mapping[str, Any],
    preprocess: Callable[[int, tuple[int, int]], tuple[PreprocessSpec, tuple[str, ...]]],
    image_size: tuple[int, int] | None,
    state: Mapping[str, Tensor] | None = None,
) -> LoadedModel:
    """A model folder of OWL-ViT or OWLv2, with the weights of `state`, or those of the folder.

    Args:
        preprocess: of channels and an image size (height, width), with notes.

    Raises:
        CheckpointError: another class, no tokenizer, or another image size than the model's own. Else as
            `library_model`.
    """
    kind = str(config["model_type"])
    named = str((config.get("architectures") or [""])[0])
    if named != KINDS[kind]:
        raise CheckpointError(
            f"transformers' {named or 'class'} of {kind} finds no objects",
            found=f"architectures {named or 'missing'}",
            wanted=KINDS[kind],
            fix="take the folder of the detector, as its authors publish it",
        )
    tokenizer = tokenizer_of(folder)
    if tokenizer is None:
        raise CheckpointError(
            f"{folder} has no {TOKENIZER}: nothing says which tokens a text is",
            wanted=f"{TOKENIZER}, the file of the package tokenizers",
            fix=python_command(
                f"from transformers import CLIPTokenizer as T; d = {str(folder)!r}; "
                "T.from_pretrained(d).save_pretrained(d)"
            )
            + " writes it of vocab.json and merges.txt",
        )
    model, name, notes = library_model(folder, config, state)
    vision = model.config.vision_config
    own = sides(vision.image_size) or (0, 0)
    if image_size is not None and image_size != own:
        raise CheckpointError(
            f"transformers' {name} is made for one image size",
            found="x".join(map(str, image_size)),
            wanted="x".join(map(str, own)),
            fix="leave --image-size out: the boxes begin at the places of its own patches",
        )
    both = getattr(model, kind)
    found = recognise_text(both.state_dict(), {"model_type": "clip", "text_config": model.config.text_config.to_dict()})
    tower = dataclasses.replace(found, config=dataclasses.replace(found.config, pooling="highest"))
    module = OpenVocabulary(OwlImage(model), text_encoder(tower, f"the text tower of {folder}")).eval()
    images, told = preprocess(vision.num_channels, own)
    spec = OpenVocabularySpec(
        tower.config.length, tokenizer.pad, padding=tokenizer.padding, lowercase=tokenizer.lowercase
    )
    boxes, width = (own[0] // vision.patch_size) * (own[1] // vision.patch_size), tower.config.features
    shapes = {CLASS_FEATURES: (boxes, width), SHIFT: (boxes,), SCALE: (boxes,), BOXES: (boxes, 4)}
    outputs = [TensorSpec(each, "float32", ("batch", *shapes[each])) for each in OF_IMAGES]
    outputs.append(TensorSpec(TEXT_FEATURES, "float32", ("texts", width)))
    length = f"texts of up to {tower.config.length} tokens; {boxes} boxes an image"
    signature = Signature("open-vocabulary-detection", own, vision.num_channels, tuple(outputs), spec, notes=(length,))
    return LoadedModel(folder.name, "transformers", module, signature, images, notes=(*notes, *told))

"""Seeded OWL-ViT and OWLv2 folders, as transformers saves them, with a small tokenizer of CLIP's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models.towers import LENGTH, TEXT, VISION, byte_pairs
from tests.references import reference

NAMES = {"owlvit": "OwlViT", "owlv2": "Owlv2"}


def save_owl(kind: str, folder: Path, side: int = 32) -> Any:
    """The model, saved in `folder` with its processor and tokenizer."""
    transformers = reference("transformers")
    reference("torchvision")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = byte_pairs(transformers, marks_last=True)
    tokenizer.pad_token = "!"
    count, name = len(tokenizer), NAMES[kind]
    ends = {"bos_token_id": count - 2, "eos_token_id": count - 1, "pad_token_id": 0}
    text = {**TEXT, "hidden_size": 24, "num_attention_heads": 3, "vocab_size": count, **ends}
    text["max_position_embeddings"] = LENGTH
    config = getattr(transformers, f"{name}Config")
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForObjectDetection")(
        config(vision_config={**VISION, "image_size": side}, text_config=text, projection_dim=24)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        model.box_head.dense2.weight.mul_(0.005)  # else boxes have no area, and no two of them an IoU
        model.class_head.logit_scale.weight.mul_(0.05)  # else it is 0 for some boxes, and all texts are as good
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # "!" is a token of its own wherever it stands once the padding is told, as in the published folders.
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    getattr(transformers, f"{name}ImageProcessor")(size={"height": side, "width": side}).save_pretrained(folder)
    return model

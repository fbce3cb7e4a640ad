"""Small encoder-decoders of images from transformers with seeded weights, and a tokenizer of characters.

Weights are drawn wide, so that an image changes what is written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.conftest import ROOT
from tests.references import reference

# The trained model of the drawn scenes.
TRAINED = ROOT / "calibration/scenes/models/text"
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
FIELDS = ["<s_task>", "<s_name>", "</s_name>"]
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUV"
LENGTH = 14
VIT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
ENCODERS = {
    "TrOCR": ("ViTConfig", VIT | {"image_size": [16, 48], "patch_size": 8}),
    # Windows of 4 on a map of 8x8 and of 4x4: with a shift, and without.
    "Donut": (
        "DonutSwinConfig", {"image_size": [32, 32], "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2,
        4], "window_size": 4},
    ),
}  # fmt: skip
HEADS = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40}
DECODERS = {
    "TrOCR": ("TrOCRConfig", HEADS | {"cross_attention_hidden_size": 32, "use_learned_position_embeddings": True}),
    "Donut": ("MBartConfig", HEADS | {"scale_embedding": True, "add_final_layer_norm": True, "encoder_layers": 2}),
}
PROCESSORS = {
    "TrOCR": {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 48}},
    "Donut": {
        "image_processor_type": "DonutImageProcessor",
        "size": {"height": 32, "width": 32},
        "do_thumbnail": True,
        "do_pad": True,
        "do_align_long_axis": False,
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def tokenizer() -> Any:
    tokenizers = reference("tokenizers")
    ids = {name: k for k, name in enumerate([*SPECIAL.values(), *CHARACTERS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=SPECIAL["unk_token"]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    found = reference("transformers").PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
    found.add_special_tokens({"additional_special_tokens": FIELDS})
    return found


def saved(kind: str, folder: Path, **more: Any) -> Path:
    """A model folder as save_pretrained writes it; `more`: of the decoder's config."""
    transformers, words = reference("transformers"), tokenizer()
    (encoder, image), (decoder, text) = ENCODERS[kind], DECODERS[kind]
    sizes = {"vocab_size": len(words), "max_position_embeddings": LENGTH}
    text = sizes | {"is_decoder": True, "dropout": 0.0} | text | more
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        getattr(transformers, encoder)(**image), getattr(transformers, decoder)(add_cross_attention=True, **text)
    )
    torch.manual_seed(0)
    model = transformers.VisionEncoderDecoderModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    start = words.convert_tokens_to_ids(FIELDS[0]) if kind == "Donut" else words.bos_token_id
    model.generation_config = transformers.GenerationConfig(
        max_length=LENGTH,
        decoder_start_token_id=start,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        **({"forced_eos_token_id": words.eos_token_id, "num_beams": 2} if kind == "Donut" else {}),
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]), encoding="utf-8")
    return folder

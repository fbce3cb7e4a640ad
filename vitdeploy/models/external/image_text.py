"""Image encoder-decoders from transformers: TrOCR (arXiv 2109.10282), Donut (arXiv 2111.15664) and similar models.

The module is the library's own. It is split into two parts: the encoder with the keys and values of the decoder's
cross-attention, which every step reads, and one decoder step on the keys and values of earlier tokens.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError
from vitdeploy.models.external.transformers import library_model
from vitdeploy.models.family import LoadedModel, Signature
from vitdeploy.models.model_folder.folder import searched
from vitdeploy.models.model_folder.tokenizer import TOKENIZER, text_spec, tokens_of
from vitdeploy.models.source import library, where
from vitdeploy.runtime.text_decoder import text_outputs
from vitdeploy.spec import PreprocessSpec

MODEL_TYPE = "vision-encoder-decoder"
# Number of positions of a decoder whose config does not have it.
USUAL_POSITIONS = 512

Pair = tuple[Tensor, Tensor]


class ImageText(nn.Module):
    """transformers' VisionEncoderDecoderModel with three functions: the whole without a cache, its encoder, and one
    step of its decoder.

    Axis names: b batch, s encoder output positions, t target tokens, p cached tokens, h heads, e width per head,
    v vocabulary.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        caches = library("transformers", "a decoder's cache").cache_utils
        self.joint_cache, self.cache = caches.EncoderDecoderCache, caches.DynamicCache

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        """float32 [b, channels, height, width] and int64 [b, t] -> the logits [b, t, v] of each next token."""
        found: Tensor = self.model(pixel_values=image, decoder_input_ids=target, use_cache=False).logits
        return found

    def encode(self, image: Tensor) -> list[Pair]:
        """Return the keys and values [b, h, s, e] of the cross-attention of each decoder block.

        The decoder computes them at its first token, whatever that is; the rest of that step is discarded.
        """
        hidden, model = self.model.encoder(pixel_values=image)[0], self.model
        if hasattr(model, "enc_to_dec_proj"):
            hidden = model.enc_to_dec_proj(hidden)
        cache = self.joint_cache(self.cache(), self.cache())
        token = torch.zeros(image.shape[0], 1, dtype=torch.int64)
        model.decoder(input_ids=token, encoder_hidden_states=hidden, past_key_values=cache, use_cache=True)
        return [(layer.keys, layer.values) for layer in cache.cross_attention_cache.layers]

    def step(self, token: Tensor, cross: Sequence[Pair], past: Sequence[Pair]) -> tuple[Tensor, list[Pair]]:
        """Take one token, int64 [b, 1]; return the logits [b, v] of the next one, and the caches [b, h, p + 1, e]."""
        own, of_image = self.cache(), self.cache()
        for block, (read, cached) in enumerate(zip(cross, past, strict=True)):
            of_image.update(*read, block)
            own.update(*cached, block)
        cache = self.joint_cache(own, of_image)
        cache.is_updated = dict.fromkeys(range(len(cross)), True)
        # A placeholder: the decoder only checks that it exists; keys and values are in the cache.
        hidden = past[0][0].new_zeros(token.shape[0], 1, 1)
        found = self.model.decoder(input_ids=token, encoder_hidden_states=hidden, past_key_values=cache, use_cache=True)
        return found.logits[:, -1], [(layer.keys, layer.values) for layer in own.layers]


def from_encoder_decoder(
    folder: Path,
    config: Mapping[str, Any],
    preprocess: PreprocessSpec,
    image_size: tuple[int, int],
    state: Mapping[str, Tensor] | None = None,
) -> LoadedModel:
    """Load a folder of transformers' VisionEncoderDecoderModel, with the weights of `state`, or those of the folder.

    Raises:
        CheckpointError: no tokenizer; unsupported generation settings; the model does not run on images of this size.
            Otherwise as `from_transformers`.
    """
    tokens = text_spec(folder, keeps_special=_marks_up(config))
    model, name, notes = library_model(folder, config, state)
    _fill_tables(model)
    positions = getattr(model.decoder.config, "max_position_embeddings", None)
    sequence, remarks = searched(model.generation_config, positions or USUAL_POSITIONS)
    known, vocabulary = tokens_of(folder / TOKENIZER), model.decoder.config.vocab_size
    if known < vocabulary:
        remarks += (f"{TOKENIZER} has no text for the last {vocabulary - known} of the model's {vocabulary} tokens",)
    module = ImageText(_sized(model, image_size)).eval()
    try:
        with torch.no_grad():
            module.encode(torch.zeros(2, preprocess.channels, *image_size))
    except Exception as error:
        raise CheckpointError(
            f"transformers' {name} does not run on an image of {image_size[0]}x{image_size[1]}",
            found=where(error),
            expected="the encoder's image size in config.json",
            fix="omit --image-size, or correct `size` in preprocessor_config.json",
        ) from None
    signature = Signature(
        "image-to-text",
        image_size,
        preprocess.channels,
        text_outputs(sequence),
        tokens,
        sequence,
        notes=(f"writes up to {sequence.max_length} tokens", *remarks),
    )
    return LoadedModel(folder.name, "transformers", module, signature, preprocess, notes=tuple(notes))


def _fill_tables(model: Any) -> None:
    """Recompute sinusoidal position tables (TrOCR large, stage 1): transformers 5 builds a model on the meta device and
    fills it from the file, which does not have them."""
    for part in model.modules():
        table = getattr(part, "weights", None)
        if isinstance(table, Tensor) and table.is_meta and hasattr(part, "get_embedding"):
            part.weights = part.get_embedding(table.shape[0], table.shape[1], part.padding_idx)


def _marks_up(config: Mapping[str, Any]) -> bool:
    """Whether special tokens are part of the model's text: Donut's are field names."""
    encoder = config.get("encoder")
    return isinstance(encoder, Mapping) and "donut" in str(encoder.get("model_type"))


def _sized(model: Any, image_size: tuple[int, int]) -> Any:
    """Return the model, with interpolated positions enabled if its encoder needs that for another image size."""
    encoder = model.encoder
    if "interpolate_pos_encoding" in inspect.signature(encoder.forward).parameters:
        own = getattr(encoder.config, "image_size", None)
        sides = (own, own) if isinstance(own, int) else tuple(own or image_size)
        if sides != tuple(image_size):
            forward = encoder.forward
            encoder.forward = lambda *values, **named: forward(*values, interpolate_pos_encoding=True, **named)
    return model

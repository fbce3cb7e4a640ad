"""Encoder-decoders of images from transformers: TrOCR (arXiv 2109.10282), Donut (arXiv 2111.15664) and their kin.

The module is the library's own. Here it is cut in two: what the encoder gives to every step of the decoder, which are
the keys and values of its cross-attention, and one step, on the keys and values of the tokens before.
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
# Tokens of a decoder whose config does not say how many it has positions for.
USUAL_POSITIONS = 512

Pair = tuple[Tensor, Tensor]


class ImageText(nn.Module):
    """transformers' VisionEncoderDecoderModel in three ways: whole, without a cache; its encoder; one step of its
    decoder.

    Axis names: b batch, s places of the encoder's output, t target tokens, p cached tokens, h heads, e width per head,
    v vocabulary.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        caches = library("transformers", "a decoder's cache").cache_utils
        self.joint_cache, self.cache = caches.EncoderDecoderCache, caches.DynamicCache

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        """float32 [b, channels, height, width] and int64 [b, t] -> the logits [b, t, v] of the token after each."""
        found: Tensor = self.model(pixel_values=image, decoder_input_ids=target, use_cache=False).logits
        return found

    def encode(self, image: Tensor) -> list[Pair]:
        """For each block of the decoder, keys and values [b, h, s, e] of its cross-attention.

        The decoder computes them itself at its first token, whichever that is: nothing else of that step is used.
        """
        hidden, model = self.model.encoder(pixel_values=image)[0], self.model
        if hasattr(model, "enc_to_dec_proj"):
            hidden = model.enc_to_dec_proj(hidden)
        cache = self.joint_cache(self.cache(), self.cache())
        token = torch.zeros(image.shape[0], 1, dtype=torch.int64)
        model.decoder(input_ids=token, encoder_hidden_states=hidden, past_key_values=cache, use_cache=True)
        return [(layer.keys, layer.values) for layer in cache.cross_attention_cache.layers]

    def step(self, token: Tensor, cross: Sequence[Pair], past: Sequence[Pair]) -> tuple[Tensor, list[Pair]]:
        """One more token, int64 [b, 1]: the logits [b, v] of the next one, and the caches [b, h, p + 1, e]."""
        own, of_image = self.cache(), self.cache()
        for block, (read, cached) in enumerate(zip(cross, past, strict=True)):
            of_image.update(*read, block)
            own.update(*cached, block)
        cache = self.joint_cache(own, of_image)
        cache.is_updated = dict.fromkeys(range(len(cross)), True)
        # That there is something to attend to is all that the decoder asks of it: keys and values are in the cache.
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
    """A model folder of transformers' VisionEncoderDecoderModel, with the weights of `state`, or those of the folder.

    Raises:
        CheckpointError: no tokenizer; a way of generating that is not done here; a model that does not run on images of
            this size. Else as `from_transformers`.
    """
    tokens = text_spec(folder, keeps_special=_marks_up(config))
    model, name, notes = library_model(folder, config, state)
    _fill_tables(model)
    positions = getattr(model.decoder.config, "max_position_embeddings", None)
    sequence, told = searched(model.generation_config, positions or USUAL_POSITIONS)
    known, vocabulary = tokens_of(folder / TOKENIZER), model.decoder.config.vocab_size
    if known < vocabulary:
        told += (f"{TOKENIZER} has no text for the last {vocabulary - known} of the {vocabulary} tokens of the model",)
    module = ImageText(_sized(model, image_size)).eval()
    try:
        with torch.no_grad():
            module.encode(torch.zeros(2, preprocess.channels, *image_size))
    except Exception as error:
        raise CheckpointError(
            f"transformers' {name} does not run on an image of {image_size[0]}x{image_size[1]}",
            found=where(error),
            expected="the image size that config.json says of the encoder",
            fix="leave --image-size out, or correct `size` in preprocessor_config.json",
        ) from None
    signature = Signature(
        "image-to-text",
        image_size,
        preprocess.channels,
        text_outputs(sequence),
        tokens,
        sequence,
        notes=(f"writes up to {sequence.max_length} tokens", *told),
    )
    return LoadedModel(folder.name, "transformers", module, signature, preprocess, notes=tuple(notes))


def _fill_tables(model: Any) -> None:
    """Compute tables of sinusoidal positions (TrOCR large, stage 1) again: transformers 5 builds a model without memory
    and fills it from the file, where these are not."""
    for part in model.modules():
        table = getattr(part, "weights", None)
        if isinstance(table, Tensor) and table.is_meta and hasattr(part, "get_embedding"):
            part.weights = part.get_embedding(table.shape[0], table.shape[1], part.padding_idx)


def _marks_up(config: Mapping[str, Any]) -> bool:
    """Whether special tokens are part of what the model says: Donut's are the names of fields."""
    encoder = config.get("encoder")
    return isinstance(encoder, Mapping) and "donut" in str(encoder.get("model_type"))


def _sized(model: Any, image_size: tuple[int, int]) -> Any:
    """The model; where its encoder takes images of another size only if it is asked to, it is asked."""
    encoder = model.encoder
    if "interpolate_pos_encoding" in inspect.signature(encoder.forward).parameters:
        own = getattr(encoder.config, "image_size", None)
        sides = (own, own) if isinstance(own, int) else tuple(own or image_size)
        if sides != tuple(image_size):
            forward = encoder.forward
            encoder.forward = lambda *values, **named: forward(*values, interpolate_pos_encoding=True, **named)
    return model

"""transformers' SAM (arXiv 2304.02643) and, for single images, SAM 2 (arXiv 2408.00714), EdgeTAM (arXiv 2501.07256) and
SAM 3's tracker (arXiv 2511.16719), as two modules: an image encoder, and a decoder with one prompt per image. The last
two are SAM 2 with other backbones.

A prompt has a fixed number of slots; empty slots are masked in every attention that reads the prompt. So the masks
equal those of transformers for the same points and boxes, whatever their number. The decoder returns all four masks;
transformers drops the first, or the last three.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError
from vitdeploy.models.family import Signature
from vitdeploy.models.model_folder.folder import sides
from vitdeploy.runtime.prompts import EMPTY, IOU_SCORES, MASKS, NO_POINT, PromptSpec
from vitdeploy.spec import TensorSpec

# Points and box corners per prompt: cheap compared with the image's thousands of tokens.
SLOTS = 10
# Added to the scores of masked tokens. It is finite in float16 and float32, and its exponential is 0 in both.
MASKED = -1e4
EMBEDDING = "embedding"
MULTIPLE = 3
# Batch of a blank image and prompt, on which the module is run once to get its tensor shapes.
BLANK_BATCH = 2


class _SamEncoder(nn.Module):
    """float32 [b, channels, side, side] -> the embedding [b, width, h, w]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.vision_encoder

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return (self.encoder(image).last_hidden_state,)


class _Sam2Encoder(nn.Module):
    """float32 [b, channels, side, side] -> the embedding [b, width, h, w], and two finer maps for the decoder's last
    layers.

    SAM 3's encoder may also return a coarser map that its tracker does not read; transformers then adds the "no memory"
    embedding to that map.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.no_memory = model.vision_encoder, model.no_memory_embedding
        self.levels = len(model.backbone_feature_sizes)
        self.project = nn.ModuleList([model.mask_decoder.conv_s0, model.mask_decoder.conv_s1])

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        maps = self.encoder(image).fpn_hidden_states
        *finer, last = maps[: self.levels]
        embedding = last + self.no_memory.reshape(1, -1, 1, 1) if len(maps) == self.levels else last
        return (embedding, *(project(each) for project, each in zip(self.project, finer, strict=True)))


class _PromptDecoder(nn.Module):
    """The embedding and finer maps, points float32 [b, slots, 2] in pixels of the input, kinds int64 [b, slots] ->
    masks [b, 4, 4h, 4w], logits, and their predicted IoU [b, 4]."""

    gaussian: Tensor
    kinds: Tensor
    positions: Tensor

    def __init__(self, model: Any, kinds: Tensor, tokens: tuple[nn.Embedding, ...]) -> None:
        super().__init__()
        prompt, decoder = model.prompt_encoder, model.mask_decoder
        self.side = int(prompt.input_image_size)
        self.no_point, self.no_mask = prompt.not_a_point_embed, prompt.no_mask_embed
        self.tokens, self.decoder = nn.ModuleList(tokens), decoder
        self.networks = decoder.output_hypernetworks_mlps
        self.register_buffer("gaussian", prompt.shared_embedding.positional_embedding.detach())
        self.register_buffer("kinds", kinds.detach())
        with torch.no_grad():
            positions = model.get_image_wide_positional_embeddings()
        self.register_buffer("positions", positions.flatten(2).transpose(1, 2)[:, None])

    def forward(self, embedding: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        *finer, points, labels = rest
        batch, _, height, width = embedding.shape
        prompt = self._prompt(points, labels)
        own = torch.cat(list(self.tokens.parameters()))
        tokens = torch.cat([own[None].expand(batch, -1, -1), prompt], dim=1)[:, None]
        hidden = torch.where(labels == EMPTY, MASKED, 0.0).to(tokens.dtype)
        mask = F.pad(hidden, (len(own), 0))[:, None, None]
        dense = (embedding + self.no_mask.weight.reshape(1, -1, 1, 1)).flatten(2).transpose(1, 2)[:, None]
        found, dense = _two_way(self.decoder.transformer, tokens, dense, self.positions, mask)
        maps = self._enlarged(dense[:, 0].transpose(1, 2).unflatten(2, (height, width)), finer)
        first = len(own) - MULTIPLE - 1  # index of the first mask token; the IoU token precedes it
        networks = enumerate(self.networks, start=first)
        weights = torch.stack([network(found[:, 0, token]) for token, network in networks], dim=1)
        masks = (weights @ maps.flatten(2)).unflatten(2, maps.shape[2:])
        return masks, self.decoder.iou_prediction_head(found[:, 0, first - 1])

    def _prompt(self, points: Tensor, labels: Tensor) -> Tensor:
        """[b, slots, width]: random Fourier features of the points' centres, and the embedding of their kinds."""
        places = 2 * ((points + 0.5) / self.side) - 1
        angles = 2 * np.pi * (places @ self.gaussian)
        found = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1) + F.embedding(labels.clamp(min=0), self.kinds)
        return torch.where((labels == NO_POINT)[..., None], self.no_point.weight, found)

    def _enlarged(self, image: Tensor, finer: list[Tensor]) -> Tensor:
        """Upscale the embedding after the prompt attention to [b, width / 8, 4h, 4w]."""
        decoder = self.decoder
        half, full = decoder.upscale_conv1, decoder.upscale_conv2
        if not finer:
            halfway = decoder.activation(decoder.upscale_layer_norm(half(image)))
            return decoder.activation(full(halfway))
        halfway = decoder.activation(decoder.upscale_layer_norm(half(image) + finer[1]))
        return decoder.activation(full(halfway) + finer[0])


def _two_way(transformer: Any, prompt: Tensor, image: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The decoder's transformer on prompt tokens [b, 1, n, width] and image tokens [b, 1, hw, width]: section A of
    arXiv 2304.02643, and the `forward` of transformers' classes. mask: [b, 1, 1, n], added to prompt scores."""
    queries, keys = prompt, image
    for layer in transformer.layers:
        if layer.skip_first_layer_pe:
            queries = layer.self_attn(queries, queries, queries, mask)[0]
        else:
            query = queries + prompt
            queries = queries + layer.self_attn(query, query, queries, mask)[0]
        queries = layer.layer_norm1(queries)
        found = layer.cross_attn_token_to_image(queries + prompt, keys + positions, keys)[0]
        queries = layer.layer_norm2(queries + found)
        queries = layer.layer_norm3(queries + layer.mlp(queries))
        found = layer.cross_attn_image_to_token(keys + positions, queries + prompt, queries, mask)[0]
        keys = layer.layer_norm4(keys + found)
    found = transformer.final_attn_token_to_image(queries + prompt, keys + positions, keys)[0]
    return transformer.layer_norm_final_attn(queries + found), keys


class Prompted(nn.Module):
    """Both modules: [b, channels, side, side], points [b, slots, 2], kinds [b, slots] -> masks and their scores."""

    def __init__(self, image_encoder: nn.Module, prompt_decoder: _PromptDecoder) -> None:
        super().__init__()
        self.image_encoder, self.prompt_decoder = image_encoder, prompt_decoder

    def forward(self, image: Tensor, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.prompt_decoder(*self.image_encoder(image), points, labels)
        return found


def _sam(model: Any) -> tuple[Prompted, PromptSpec]:
    kinds = torch.cat([each.weight for each in model.prompt_encoder.point_embed])
    decoder = model.mask_decoder
    tokens = (decoder.iou_token, decoder.mask_tokens)
    return Prompted(_SamEncoder(model), _PromptDecoder(model, kinds, tokens)), PromptSpec(SLOTS)


def _sam2(model: Any) -> tuple[Prompted, PromptSpec]:
    decoder = model.mask_decoder
    tokens = (decoder.obj_score_token, decoder.iou_token, decoder.mask_tokens)
    stability = None
    if decoder.dynamic_multimask_via_stability:
        stability = (
            float(decoder.dynamic_multimask_stability_delta),
            float(decoder.dynamic_multimask_stability_thresh),
        )
    kinds = model.prompt_encoder.point_embed.weight
    module = Prompted(_Sam2Encoder(model), _PromptDecoder(model, kinds, tokens))
    return module, PromptSpec(SLOTS, closed_box=True, stability=stability)


# The transformers classes, and how each is split into two modules.
CLASSES: Mapping[str, Callable[[Any], tuple[Prompted, PromptSpec]]] = {
    "SamModel": _sam,
    "Sam2Model": _sam2,
    "EdgeTamModel": _sam2,
    "Sam3TrackerModel": _sam2,
}


def as_prompted(model: Any, image_size: tuple[int, int]) -> tuple[Prompted, Signature] | None:
    """Return the two modules of a model of `CLASSES`; None for any other model.

    Raises:
        CheckpointError: the model needs another image size, or returns the wrong number of masks.
    """
    make = CLASSES.get(type(model).__name__)
    if make is None:
        return None
    own = sides(model.prompt_encoder.input_image_size)
    if own != image_size:
        raise CheckpointError(
            f"transformers' {type(model).__name__} works at one image size only",
            found=f"{image_size[0]}x{image_size[1]}",
            expected="x".join(map(str, own or ())),
            fix="omit --image-size: the positions of patches and prompts are tied to the model's own size",
        )
    multiple = model.mask_decoder.num_multimask_outputs
    if multiple != MULTIPLE:
        raise CheckpointError(
            f"transformers' {type(model).__name__} returns a different number of masks from SAM's",
            found=f"num_multimask_outputs {multiple}",
            expected=f"num_multimask_outputs {MULTIPLE}",
        )
    module, spec = make(model.eval())
    channels = next(int(part.in_channels) for part in model.vision_encoder.modules() if isinstance(part, nn.Conv2d))
    image = torch.zeros(BLANK_BATCH, channels, *image_size)
    prompt = torch.zeros(BLANK_BATCH, spec.slots, 2), torch.full((BLANK_BATCH, spec.slots), NO_POINT)
    with torch.no_grad():
        found = module.eval()(image, *prompt)
    outputs = tuple(
        TensorSpec(name, "float32", ("batch", *tensor.shape[1:]))
        for name, tensor in zip((MASKS, IOU_SCORES), found, strict=True)
    )
    note = f"a prompt has up to {spec.slots} points and box corners"
    return module, Signature("promptable-segmentation", image_size, channels, outputs, spec, notes=(note,))


def embeddings_of(module: Prompted, channels: int, image_size: tuple[int, int]) -> tuple[TensorSpec, ...]:
    """Return the tensors passed from encoder to decoder: the embedding, and finer maps, finest first."""
    with torch.no_grad():
        found = module.image_encoder(torch.zeros(1, channels, *image_size))
    names = [EMBEDDING, *(f"finer_{i}" for i in range(len(found) - 1))]
    return tuple(
        TensorSpec(name, "float32", ("batch", *tensor.shape[1:])) for name, tensor in zip(names, found, strict=True)
    )

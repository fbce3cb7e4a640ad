"""Models of two encoders: an image encoder and a text encoder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingFileError, python_command
from vitdeploy.models.architectures.layers import Activation
from vitdeploy.models.architectures.vit import TextConfig, TextEncoder
from vitdeploy.models.checkpoints import fit, mismatch
from vitdeploy.models.external.transformers import library_model
from vitdeploy.models.family import LoadedModel, Signature
from vitdeploy.models.keys import vit, vit_transformers
from vitdeploy.models.keys.rules import renamed, rules
from vitdeploy.models.model_folder.folder import sides
from vitdeploy.models.model_folder.tokenizer import TOKENIZER, tokenizer_of
from vitdeploy.paths import is_file
from vitdeploy.runtime.flows import TEXT_FEATURES
from vitdeploy.runtime.tasks.open_vocabulary import BOXES, CLASS_FEATURES, EPSILON, OF_IMAGES, SCALE, SHIFT
from vitdeploy.runtime.tokenizer import OpenVocabularySpec, ZeroShotSpec
from vitdeploy.spec import PreprocessSpec, Task, TensorSpec
from vitdeploy.zip_members import DAMAGED

# --- The text encoder of transformers' CLIPModel and SiglipModel, and how its features are compared -------------------


PREFIX = "text_model."
_RULES = rules(
    """
    $P.embeddings.position_ids                      -
    $P.embeddings.token_embedding.weight            token_embed.weight
    $P.embeddings.position_embedding.weight         pos_embed
    $P.final_layer_norm.$W                          norm.$W
    ($P.head|text_projection).$W                    head.$W
    $P.encoder.layers.*.layer_norm{1,2}.$W          blocks.*.norm{1,2}.$W
    $P.encoder.layers.*.self_attn.{q,k,v,out}_proj.$W   blocks.*.attn.{q,k,v,proj}.$W
    $P.encoder.layers.*.mlp.fc{1,2}.$W              blocks.*.mlp.fc{1,2}.$W
    """,
    P="text_model",
    W="{weight,bias}",
)
_LAYERS = ("norm1", "norm2", "attn.q", "attn.k", "attn.v", "attn.proj", "mlp.fc1", "mlp.fc2")
# By model_type: the defaults of transformers 5.23's text config and of the model's class.
_DEFAULTS: dict[str, tuple[float, Activation, int]] = {
    "clip": (1e-5, "quick_gelu", 8),
    "siglip": (1e-6, "gelu_tanh", 12),
}
CLIP_END = 49407
# CLIP configs from before transformers corrected the end token: it stands for the largest token id.
OLD_END = 2


@dataclass(frozen=True)
class TextTower:
    """`state` loads strictly into a `TextEncoder` of `config`. `compared`: the fields of `ZeroShotSpec` for comparing
    its features, logit = scale * cosine + bias, with a sigmoid (SigLIP) or a softmax over the texts (CLIP)."""

    config: TextConfig
    state: dict[str, Tensor]
    compared: dict[str, Any]

    @classmethod
    def measured(
        cls, tensors: dict[str, Tensor], state: Mapping[str, Tensor], *, sigmoid: bool, **conventions: Any
    ) -> TextTower:
        """Build it from tensors under our names, with the scale and bias in `state`. `conventions`: the fields of
        TextConfig that sizes leave open."""
        config = TextConfig(
            vocabulary=tensors["token_embed.weight"].shape[0],
            length=tensors["pos_embed"].shape[1],
            depth=vit.depth_of(tensors),
            hidden=tensors["blocks.0.mlp.fc1.weight"].shape[0],
            features=tensors["head.weight"].shape[0],
            head_bias="head.bias" in tensors,
            **conventions,
        )
        compared = {
            "scale": math.exp(float(state["logit_scale"])),
            "bias": float(state["logit_bias"]) if "logit_bias" in state else 0.0,
            "scores": "sigmoid" if sigmoid else "softmax",
        }
        return cls(config, tensors, compared)


def recognise_text(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> TextTower:
    """Return the text encoder of a whole CLIP or SigLIP; `config` is the folder's config.json.

    Raises:
        CheckpointError: tensors are missing, unknown or of unexpected shapes, or the config does not fit them.
    """
    kind, part = str(config.get("model_type")), config.get("text_config") or {}
    eps, activation, heads = _DEFAULTS[kind]
    name = part.get("hidden_act", activation)
    if name not in vit_transformers.ACTIVATIONS and name != activation:
        raise CheckpointError(
            "config.json names a text encoder activation that vitdeploy does not support",
            found=f"hidden_act {name!r}",
            expected=", ".join(vit_transformers.ACTIVATIONS),
        )
    tensors = _renamed(state, kind)
    width, end = tensors["norm.weight"].shape[0], part.get("eos_token_id", CLIP_END)
    end = end if isinstance(end, int) else CLIP_END
    heads, eps = part.get("num_attention_heads", heads), part.get("layer_norm_eps", eps)
    if not isinstance(heads, int) or heads < 1 or width % heads or not isinstance(eps, int | float) or eps < 0:
        raise CheckpointError(
            "config.json does not fit the text encoder",
            found=f"num_attention_heads {heads!r}, layer_norm_eps {eps!r}",
            expected=f"a number of heads that divides the width {width}, and an epsilon >= 0",
        )
    return TextTower.measured(
        tensors,
        state,
        sigmoid=kind == "siglip",
        width=width,
        heads=heads,
        layer_norm_eps=float(eps),
        activation=vit_transformers.ACTIVATIONS.get(name, activation),
        causal=kind == "clip",
        pooling="last" if kind == "siglip" else "highest" if end == OLD_END else "end",
        end=end,
    )


def _renamed(state: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    text = {key: tensor for key, tensor in state.items() if key.startswith(PREFIX) or key == "text_projection.weight"}
    found, _, unknown = renamed(_RULES, text)
    expected = ["token_embed.weight", "pos_embed", "norm.weight", "norm.bias", "head.weight"]
    expected += [f"blocks.0.{part}.weight" for part in _LAYERS]
    missing = [name for name in expected if name not in found]
    missing += [key for key in ("logit_scale", *(("logit_bias",) if kind == "siglip" else ())) if key not in state]
    if unknown or missing:
        raise CheckpointError(
            "the text encoder has missing or unknown tensors",
            found="; ".join(
                f"{what}: {mismatch.listed(keys)}"
                for what, keys in (("missing", missing), ("unknown", unknown))
                if keys
            ),
            expected=f"the tensors of transformers' {'CLIPModel' if kind == 'clip' else 'SiglipModel'}",
            fix="save the whole model; or, for the image encoder alone, --task features",
        )
    found["pos_embed"] = found["pos_embed"][None] if found["pos_embed"].ndim == 2 else found["pos_embed"]
    return vit.merge_attention(found, [])


# --- Whole CLIP and SigLIP: the built-in image encoder, and the text encoder of the same checkpoint -------------------


# `model_type` of configs that describe both encoders.
BOTH = ("clip", "siglip")


class _ImageTower(nn.Module):
    """Only the pooled features of a tower: float32 [b, channels, height, width] -> [b, features]."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, image: Tensor) -> Tensor:
        found = self.tower(image)
        return found if isinstance(found, Tensor) else found[0]


class Towers(nn.Module):
    """Both encoders: float32 [b, channels, height, width] and int64 [texts, length] -> the image encoder's outputs and
    the text features [texts, width]."""

    def __init__(self, image: nn.Module, text: TextEncoder) -> None:
        super().__init__()
        self.image_tower, self.text_tower = image, text

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        of_images = self.image_tower(image)
        of_images = (of_images,) if isinstance(of_images, Tensor) else of_images
        return (*of_images, self.text_tower(text))


def with_text_tower(
    original: LoadedModel, folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], task: Task | None
) -> LoadedModel:
    """Add the text encoder if the folder has both encoders and a tokenizer; else return `original`, with a note on what
    is missing.

    Raises:
        CheckpointError: the config names both encoders, but the weights have no text encoder, or an incomplete one.
    """
    if config.get("model_type") not in BOTH or original.signature.task != "features" or task in ("features", "anomaly"):
        return original
    tokenizer, text = tokenizer_of(folder), any(key.startswith(PREFIX) for key in state)
    if tokenizer is None:
        missing = f"no {TOKENIZER}" if text else "no text encoder and no tokenizer"
        return dataclasses.replace(original, notes=(*original.notes, f"{missing}: image encoder only"))
    if not text:
        raise CheckpointError(
            f"the weights of {folder} have no text encoder",
            found=f"model_type {config['model_type']} in config.json, {TOKENIZER}, and no tensor text_model...",
            expected="the weights of both encoders",
            fix="save the whole model; or, for the image encoder alone: --task features",
        )
    return both_towers(original, recognise_text(state, config), tokenizer, f"the text encoder of {folder}")


def text_encoder(tower: TextTower, what: str) -> TextEncoder:
    """Build the module of a text encoder, called `what` in errors; raises CheckpointError if the tensors do not fit."""
    with torch.device("meta"):
        module = TextEncoder(tower.config)
    module = module.to_empty(device="cpu")
    module.places = torch.arange(tower.config.length)[None]
    fit.load_state(module, tower.state, what)
    return module.eval()


def both_towers(original: LoadedModel, tower: TextTower, tokenizer: Mapping[str, Any], what: str) -> LoadedModel:
    """Return the image encoder with a text encoder, called `what` in errors.

    Raises:
        CheckpointError: the feature widths differ, or the tensors do not fit the text encoder.
    """
    image = original.signature.outputs[0].shape[-1]
    if tower.config.features != image:
        raise CheckpointError(
            "the image encoder and the text encoder do not match",
            found=f"{image} image features, {tower.config.features} text features",
            expected="the same number of features",
        )
    module = text_encoder(tower, what)
    spec = ZeroShotSpec(tower.config.length, **tower.compared, **tokenizer)
    outputs = (
        TensorSpec("image_features", "float32", ("batch", image)),
        TensorSpec("text_features", "float32", ("texts", image)),
    )
    return dataclasses.replace(
        original,
        module=Towers(_ImageTower(original.module), module).eval(),
        signature=dataclasses.replace(original.signature, task="zero-shot", outputs=outputs, postprocess=spec),
        notes=(
            *(note for note in original.notes if "text_model" not in note),  # a note that it was dropped
            f"both encoders; texts of up to {tower.config.length} tokens",
        ),
    )


# --- transformers' OWL-ViT (arXiv 2205.06230) and OWLv2 (arXiv 2306.09683) as image and text encoder ------------------
# One gives boxes with class features, the other text features. The runtime compares them.


# By model_type, which is also the attribute of the class that holds both encoders.
KINDS = {"owlvit": "OwlViTForObjectDetection", "owlv2": "Owlv2ForObjectDetection"}


class _OwlImage(nn.Module):
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


def from_owl(
    folder: Path,
    config: Mapping[str, Any],
    preprocess: Callable[[int, tuple[int, int]], tuple[PreprocessSpec, tuple[str, ...]]],
    image_size: tuple[int, int] | None,
    state: Mapping[str, Tensor] | None = None,
) -> LoadedModel:
    """Load a model folder of OWL-ViT or OWLv2, with the weights of `state`, or those of the folder.

    Args:
        preprocess: takes channels and an image size (height, width); returns the spec and notes.

    Raises:
        CheckpointError: another class, no tokenizer, or not the model's own image size. Otherwise as
            `library_model`.
    """
    kind = str(config["model_type"])
    named = str((config.get("architectures") or [""])[0])
    if named != KINDS[kind]:
        raise CheckpointError(
            f"transformers' {named or 'class'} of {kind} is not a detector",
            found=f"architectures {named or 'missing'}",
            expected=KINDS[kind],
            fix="use the detector's folder as published by its authors",
        )
    tokenizer = tokenizer_of(folder)
    if tokenizer is None:
        raise CheckpointError(
            f"{folder} has no {TOKENIZER}: texts cannot be converted to tokens",
            expected=f"{TOKENIZER}, as written by the package tokenizers",
            fix=python_command(
                f"from transformers import CLIPTokenizer as T; d = {str(folder)!r}; "
                "T.from_pretrained(d).save_pretrained(d)"
            )
            + " writes it from vocab.json and merges.txt",
        )
    model, name, notes = library_model(folder, config, state)
    vision = model.config.vision_config
    own = sides(vision.image_size) or (0, 0)
    if image_size is not None and image_size != own:
        raise CheckpointError(
            f"transformers' {name} works at one image size only",
            found="x".join(map(str, image_size)),
            expected="x".join(map(str, own)),
            fix="omit --image-size: box positions depend on the model's own patch grid",
        )
    both = getattr(model, kind)
    found = recognise_text(both.state_dict(), {"model_type": "clip", "text_config": model.config.text_config.to_dict()})
    tower = dataclasses.replace(found, config=dataclasses.replace(found.config, pooling="highest"))
    module = Towers(_OwlImage(model), text_encoder(tower, f"the text encoder of {folder}")).eval()
    images, remarks = preprocess(vision.num_channels, own)
    spec = OpenVocabularySpec(tower.config.length, **tokenizer)
    boxes, width = (own[0] // vision.patch_size) * (own[1] // vision.patch_size), tower.config.features
    shapes = {CLASS_FEATURES: (boxes, width), SHIFT: (boxes,), SCALE: (boxes,), BOXES: (boxes, 4)}
    outputs = [TensorSpec(each, "float32", ("batch", *shapes[each])) for each in OF_IMAGES]
    outputs.append(TensorSpec(TEXT_FEATURES, "float32", ("texts", width)))
    length = f"texts of up to {tower.config.length} tokens; {boxes} boxes per image"
    signature = Signature("open-vocabulary-detection", own, vision.num_channels, tuple(outputs), spec, notes=(length,))
    return LoadedModel(folder.name, "transformers", module, signature, images, notes=(*notes, *remarks))


# --- Zero-shot classification with an image encoder: the text features of the class names as a constant matrix --------
# Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021 (arXiv
# 2103.00020), section 3.1.2: logits = scale * (image / |image|) (text / |text|)^T.
#
# The softmax equals CLIP's if the checkpoint's scale is 100, as in all of OpenAI's models. SigLIP (arXiv 2303.15343,
# section 3.2) uses sigmoid(scale * cosine + bias) for each class instead: the ranking of the classes is the same, the
# probabilities are not.


# exp(t) at the end of CLIP's training, which clips t to log 100.
ZERO_SHOT_SCALE = 100.0


class _ZeroShotClassifier(nn.Module):
    """A tower's features -> float32 [b, classes]: cosines with the rows of `text`, times CLIP's scale."""

    text: Tensor

    def __init__(self, tower: nn.Module, text: Tensor) -> None:
        super().__init__()
        self.tower = tower
        # Transposed and scaled once, so that the graph has a single linear layer.
        self.register_buffer("text", (ZERO_SHOT_SCALE * text / text.norm(dim=1, keepdim=True)).T.contiguous())

    def forward(self, image: Tensor) -> Tensor:
        outputs = self.tower(image)
        features = outputs if isinstance(outputs, Tensor) else outputs[0]
        return (features / features.norm(dim=1, keepdim=True)) @ self.text


def with_text_features(original: LoadedModel, path: Path) -> LoadedModel:
    """Return the classifier made of a tower and a file of text features, float32 [classes, width] (.npy).

    Raises:
        MissingFileError: no such file.
        CheckpointError: the model does not return image features, or the matrix does not fit them.
    """
    if not is_file(path):
        raise MissingFileError(f"no text features at {path}", expected="a .npy file, float32 [classes, width]")
    output = original.signature.outputs[0]
    if original.signature.task == "sequence" or len(output.shape) != 2:
        raise CheckpointError(
            "text features need a model with image features",
            found=f"{original.signature.task}: {output}",
            expected="the image encoder of CLIP or SigLIP",
        )
    try:
        # Memory-mapped, so that a header larger than the file is detected before memory is allocated.
        text = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        raise CheckpointError(f"{path} is not a .npy file", found=str(error)[:200]) from None
    if not isinstance(text, np.ndarray):
        raise CheckpointError(f"{path} is not a .npy file", found="an .npz archive", fix="np.save the matrix alone")
    width = output.shape[1]
    fits = text.ndim == 2 and len(text) > 0 and text.shape[1] == width and text.dtype.kind == "f"
    lengths = np.linalg.norm(text.astype(np.float64), axis=1) if fits else np.zeros(1)
    if not np.isfinite(lengths).all() or not lengths.all():
        raise CheckpointError(
            f"{path} does not fit the model",
            found=f"{text.dtype} {list(text.shape)}",
            expected=f"float32 [classes, {width}], finite, without zero rows",
            fix="embed the class names with the text encoder of the same checkpoint, and np.save the matrix",
        )
    module = _ZeroShotClassifier(original.module, torch.from_numpy((text / lengths[:, None]).astype(np.float32)))
    logits = TensorSpec("logits", "float32", ("batch", len(text)))
    signature = dataclasses.replace(original.signature, task="classification", outputs=(logits,))
    return dataclasses.replace(original, module=module.eval(), signature=signature, labels=())

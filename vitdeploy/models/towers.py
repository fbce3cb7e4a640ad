"""Models of two towers, image and text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingFileError, UnknownModelError, python_command
from vitdeploy.models.architectures.vit import TextEncoder, ViTConfig
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.external.transformers import from_timm, library_model
from vitdeploy.models.family import Hints, LoadedModel, Recognised, Signature
from vitdeploy.models.keys import vit_timm
from vitdeploy.models.keys.open_clip import TRUNK, compare, image_tower, text_tower
from vitdeploy.models.keys.open_clip import has_text_tower as open_clip_has_text_tower
from vitdeploy.models.keys.text_transformers import TextTower, has_text_tower, recognise_text
from vitdeploy.models.keys.vit import parse_vit
from vitdeploy.models.model_folder.folder import ModelFolder, sides
from vitdeploy.models.model_folder.tokenizer import (
    ALONE,
    TOKENIZER,
    OpenClip,
    TokenizerFacts,
    byte_pairs_of,
    tokenizer_of,
    tokens_of,
)
from vitdeploy.models.source import Source
from vitdeploy.paths import is_file
from vitdeploy.runtime.flows import TEXT_FEATURES
from vitdeploy.runtime.tasks.open_vocabulary import BOXES, CLASS_FEATURES, EPSILON, OF_IMAGES, SCALE, SHIFT
from vitdeploy.spec import OpenVocabularySpec, PreprocessSpec, Task, TensorSpec, ZeroShotSpec
from vitdeploy.zip_members import DAMAGED

# --- CLIP and SigLIP whole: our image tower, and the text tower of the same checkpoint beside it ----------------------


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
    """Both towers: float32 [b, channels, height, width] and int64 [texts, length] -> what the one gives of images, and
    the features of the texts [texts, width]."""

    def __init__(self, image: nn.Module, text: TextEncoder) -> None:
        super().__init__()
        self.image_tower, self.text_tower = image, text

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        of_images = self.image_tower(image)
        of_images = (of_images,) if isinstance(of_images, Tensor) else of_images
        return (*of_images, self.text_tower(text))


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
        module=Towers(ImageTower(original.module), module).eval(),
        signature=dataclasses.replace(original.signature, task="zero-shot", outputs=outputs, postprocess=spec),
        notes=(
            *(note for note in original.notes if "text_model" not in note),  # which would say that it is left out
            f"both towers; texts of up to {tower.config.length} tokens",
        ),
    )


# --- Models in OpenCLIP's layout: the image tower, ours where we have it and timm's otherwise, and the text tower -----


HEAD = "visual.head."
PROJECTIONS = ("linear", "mlp")
# timm's arguments of what a name spells out, and our fields.
SIZES = {"embed_dim": "width", "depth": "depth", "num_heads": "heads", "patch_size": "patch_size"}
# Pooling that OpenCLIP adds to a tower of timm.
ATTENTIVE = ("abs_attn", "rot_attn")


def image_part(state: Mapping[str, Tensor], config: OpenClip, source: Source, file: str) -> Recognised | LoadedModel:
    """The image tower: as tensors of our Vision Transformer, or as timm's own module.

    Raises:
        CheckpointError: tensors are missing or unknown, or the config names a tower that neither is.
        MissingPackageError: it is timm's, which is not installed.
    """
    name = config.vision.get("timm_model_name")
    if name is None and isinstance(config.vision.get("layers"), list):
        raise config.refused(
            "an image tower of convolutions (CLIP's ResNet)", "a Vision Transformer, or a tower of timm"
        )
    if name is None:
        return image_tower(state, config, source.heads)
    config.refuse_vision()
    pooling, projection = config.vision.get("timm_pool", "avg"), config.vision.get("timm_proj", "linear")
    if pooling in ATTENTIVE or projection not in (*PROJECTIONS, "none", "", None):
        raise config.refused(
            f"timm_pool {pooling!r}, timm_proj {projection!r}", "pooling of timm's own, and a projection"
        )
    arguments = dict(config.vision.get("timm_model_kwargs") or {})
    if pooling or projection not in PROJECTIONS:
        arguments["global_pool"] = pooling
    trunk = {key.removeprefix(TRUNK): tensor for key, tensor in state.items() if key.startswith(TRUNK)}
    head = {key.removeprefix(HEAD): tensor for key, tensor in state.items() if key.startswith(HEAD)}
    if projection != "mlp" and (found := _ours(trunk, head, config, name, arguments, source)) is not None:
        return found
    arguments["num_classes"] = 0 if projection else config.features
    told = {"architecture": name, "model_args": arguments}
    size = source.size or config.image_size
    return _projected(from_timm(name, told, trunk, size, file, "features"), head)


def _ours(
    trunk: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    config: OpenClip,
    name: str,
    arguments: Mapping[str, Any],
    source: Source,
) -> Recognised | None:
    """timm's tower as our Vision Transformer; None if it is another one."""
    try:
        named = parse_vit(name)
    except UnknownModelError:
        named = None
    if named is None:
        return None
    tensors = {**trunk, **{key.replace("proj.", "head."): tensor for key, tensor in head.items()}}
    hints = Hints(source.heads, config.image_size, {"architecture": name, "model_args": dict(arguments)})
    found = vit_timm.recognise(tensors, hints)
    if found is None or not isinstance(found.config, ViTConfig):
        return None
    said = {field: arguments.get(argument, getattr(named, field)) for argument, field in SIZES.items()}
    compare(config, said, {field: getattr(found.config, field) for field in SIZES.values()})
    compare(config, {"image_size": config.image_size}, {"image_size": found.config.image_size})
    return found


def _projected(tower: LoadedModel, head: Mapping[str, Tensor]) -> LoadedModel:
    """timm's module with OpenCLIP's projection behind it, if it has one."""
    layers: list[nn.Module] = [tower.module]
    width = tower.signature.outputs[0].shape[-1]
    for key in ("proj", "mlp.fc1", "mlp.fc2"):
        found = {name: head[f"{key}.{name}"] for name in ("weight", "bias") if f"{key}.{name}" in head}
        if "weight" not in found:
            continue
        if found["weight"].ndim != 2 or found["weight"].shape[1] != width:
            raise CheckpointError(
                f"OpenCLIP's projection does not fit timm's {tower.name}",
                found=f"{HEAD}{key}.weight of {list(found['weight'].shape)}",
                wanted=f"rows of {width}, the width of its features",
            )
        width = len(found["weight"])
        linear = nn.Linear(found["weight"].shape[1], width, bias="bias" in found)
        linear.load_state_dict(found)
        layers += [linear, nn.GELU()] if key == "mlp.fc1" else [linear]
    if len(layers) == 1:
        return tower
    pooled = TensorSpec("features", "float32", ("batch", width))
    signature = dataclasses.replace(tower.signature, outputs=(pooled,))
    return dataclasses.replace(tower, module=nn.Sequential(*layers).eval(), signature=signature)


def as_features(original: LoadedModel, features: int) -> LoadedModel:
    """The image tower as what it gives, whatever its last linear looks like."""
    own = original.signature
    pooled = TensorSpec("features", "float32", ("batch", features))
    if own.outputs[0].shape != pooled.shape:
        raise CheckpointError(
            "the image tower does not give the features that images and texts share",
            found=str(own.outputs[0]),
            wanted=f"features [batch, {features}], as embed_dim says",
        )
    rest = own.outputs[1:] if own.task == "features" else ()
    return dataclasses.replace(
        original, signature=dataclasses.replace(own, task="features", outputs=(pooled, *rest), postprocess=None)
    )


def with_text(original: LoadedModel, folder: ModelFolder, state: Mapping[str, Tensor], config: OpenClip) -> LoadedModel:
    """The same with its text tower; without a tokenizer itself, with a note.

    Raises:
        CheckpointError: the text tower is missing, not whole, or none that vitdeploy has; or the tokenizer has other
            tokens than the tower.
    """
    if not (folder.path / TOKENIZER).is_file():
        own = config.text.get("hf_tokenizer_name")
        told = f"that of {own}" if own else "CLIP's, which is that of openai/clip-vit-base-patch32"
        note = f"no {TOKENIZER}: the image tower alone; for both, put the tokenizer beside the weights: {told}"
        return dataclasses.replace(original, notes=(*original.notes, note))
    config.refuse_text()
    if not open_clip_has_text_tower(state):
        raise CheckpointError(
            f"the text tower is not in the weights of {folder.path}",
            found=f"text_cfg in {config.file.name}, {TOKENIZER}, and no tensor token_embedding.weight",
            wanted="the weights of both",
            fix=f"save the whole model; or, {ALONE}",
        )
    tower, clean = text_tower(state, config), config.clean
    count, rows = tokens_of(folder.path / TOKENIZER), tower.config.vocabulary
    if count > rows:
        raise CheckpointError(
            f"{TOKENIZER} has tokens that the text tower does not have",
            found=f"{count} tokens, {rows} rows of token_embedding.weight",
            wanted="the tokenizer that the model was trained with",
            fix=f"get it of {config.text.get('hf_tokenizer_name') or 'openai/clip-vit-base-patch32'}",
        )
    if config.text.get("hf_tokenizer_name"):
        tokenizer = tokenizer_of(folder.path)
        assert tokenizer is not None
        # OpenCLIP pads at the right, whatever the tokenizer's own file says.
        tokenizer = dataclasses.replace(tokenizer, padding="right", lowercase=False, clean=clean)
    else:
        tokenizer = dataclasses.replace(byte_pairs_of(folder.path, rows), clean=clean)
    return both_towers(original, tower, tokenizer, f"the text tower of {folder.path}")


# --- OWL-ViT (arXiv 2205.06230) and OWLv2 (arXiv 2306.09683) of transformers as two towers ----------------------------
# one gives boxes with class. features, the other the features of texts. The runtime compares them.


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
    module = Towers(OwlImage(model), text_encoder(tower, f"the text tower of {folder}")).eval()
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


# --- Zero-shot classification with an image tower: the text features of the class names as a constant matrix ----------
# Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021 (arXiv
# 2103.00020), section 3.1.2: logits = scale * (image / |image|) (text / |text|)^T.
#
# Its softmax is CLIP's where the checkpoint's scale is 100, as in all of OpenAI's. SigLIP (arXiv 2303.15343, section
# 3.2) gives sigmoid(scale * cosine + bias) for each class instead: the order of the classes is the same, the
# probabilities are not.


# exp(t) at the end of CLIP's training, where t is clipped to log 100.
ZERO_SHOT_SCALE = 100.0


class ZeroShotClassifier(nn.Module):
    """float32 [b, classes] of a tower's features: cosines with the rows of `text`, times CLIP's scale."""

    text: Tensor

    def __init__(self, tower: nn.Module, text: Tensor) -> None:
        super().__init__()
        self.tower = tower
        # Transposed and scaled once, so that the graph has one plain linear.
        self.register_buffer("text", (ZERO_SHOT_SCALE * text / text.norm(dim=1, keepdim=True)).T.contiguous())

    def forward(self, image: Tensor) -> Tensor:
        outputs = self.tower(image)
        features = outputs if isinstance(outputs, Tensor) else outputs[0]
        return (features / features.norm(dim=1, keepdim=True)) @ self.text


def with_text_features(original: LoadedModel, path: Path) -> LoadedModel:
    """The classifier of a tower and a file of text features, float32 [classes, width] (.npy).

    Raises:
        MissingFileError: no such file.
        CheckpointError: the model gives no image features, or the matrix does not fit them.
    """
    if not is_file(path):
        raise MissingFileError(f"no text features at {path}", wanted="a .npy file, float32 [classes, width]")
    output = original.signature.outputs[0]
    if original.signature.task == "sequence" or len(output.shape) != 2:
        raise CheckpointError(
            "text features need a model with image features",
            found=f"{original.signature.task}: {output}",
            wanted="the image tower of CLIP or SigLIP",
        )
    try:
        # Mapped, so that a header that promises more than the file has is found before memory is taken for it.
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
            wanted=f"float32 [classes, {width}], finite, no row of zeros",
            fix="embed the class names with the text tower of the same checkpoint, and np.save the matrix",
        )
    module = ZeroShotClassifier(original.module, torch.from_numpy((text / lengths[:, None]).astype(np.float32)))
    logits = TensorSpec("logits", "float32", ("batch", len(text)))
    signature = dataclasses.replace(original.signature, task="classification", outputs=(logits,))
    return dataclasses.replace(original, module=module.eval(), signature=signature, labels=())

"""Models in OpenCLIP's layout: the image tower, ours where we have it and timm's otherwise, and the text tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.vit import ViTConfig
from vitdeploy.models.external.timm import from_timm
from vitdeploy.models.family import Hints, Recognised
from vitdeploy.models.keys import vit_timm
from vitdeploy.models.keys.open_clip import TRUNK, compare, has_text_tower, image_tower, text_tower
from vitdeploy.models.keys.vit_names import parse_vit
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.model_folder.files import ModelFolder
from vitdeploy.models.model_folder.open_clip import ALONE, OpenClip
from vitdeploy.models.model_folder.tokenizer import TOKENIZER, byte_pairs_of, tokenizer_of, tokens_of
from vitdeploy.models.source import Source
from vitdeploy.models.towers import both_towers
from vitdeploy.spec import TensorSpec

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
    if not has_text_tower(state):
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

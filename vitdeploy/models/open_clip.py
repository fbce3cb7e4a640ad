"""Models in OpenCLIP's layout: `open_clip_config.json` beside weights with OpenCLIP's names, which are OpenAI's:
`visual.transformer.resblocks.0.attn.in_proj_weight`.

The image encoder is built-in if available, else timm's. The text encoder's names have no prefix, or `text.` if OpenCLIP
built it separately (`custom_text`). A timm image encoder has timm's names below `visual.trunk.`. The config supplies
what tensors cannot show; where both state a value, the values must agree.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models import family, json_file, towers
from vitdeploy.models.architectures.layers import Activation
from vitdeploy.models.architectures.vit import TextPooling, ViTConfig
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.external.transformers import from_timm
from vitdeploy.models.keys import vit, vit_timm
from vitdeploy.models.keys.rules import Rule, renamed, rules
from vitdeploy.models.model_folder.folder import OPEN_CLIP, ModelFolder, sides
from vitdeploy.models.model_folder.image_processor import CLIP_MEAN, CLIP_STD
from vitdeploy.models.model_folder.tokenizer import TOKENIZER, byte_pairs_of, tokenizer_of, tokens_of
from vitdeploy.models.source import Source
from vitdeploy.runtime.tokenizer import CLEANINGS, Clean
from vitdeploy.spec import Interpolation, PreprocessSpec, TensorSpec

# --- The config -------------------------------------------------------------------------------------------------------
# Source: `CLIPVisionCfg`, `CLIPTextCfg` and `PreprocessCfg` of open_clip_torch 3.3; their defaults replace missing
# keys. A key that is not read here must have a value without effect.


ALONE = "for the image encoder alone: --task features"
# Keys that are read, and keys that do not affect a trained tower.
_VISION = {"layers", "width", "head_width", "patch_size", "image_size", "no_ln_pre", "final_ln_after_pool"}
_VISION |= {"pool_type", "act_kwargs", "norm_kwargs", "timm_model_name", "timm_pool", "timm_proj", "timm_model_kwargs"}
_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "no_causal_mask", "pool_type", "eos_id"}
_TEXT |= {"act_kwargs", "norm_kwargs", "hf_tokenizer_name", "tokenizer_kwargs"}
_BY_TENSORS = {"mlp_ratio", "ls_init_value", "pos_embed_type", "proj_bias", "timm_proj_bias"}
_OF_TRAINING = {"patch_dropout", "output_tokens", "image_seq_len", "timm_model_pretrained", "timm_drop"}
_OF_TRAINING |= {"timm_drop_path", "attn_pooler_queries", "attn_pooler_heads"}
# Tokenizer keys, whose values come from the tokenizer's own files; and keys of text encoders that are refused earlier.
_OF_TOKENIZERS = {"pad_id", "bos_id", "hf_model_pretrained", "hf_proj_type", "hf_pooler_type"}
_NEUTRAL: tuple[Any, ...] = (None, False, "", "default")
# Values that have the same effect as a missing key.
_USUAL = {"text_arch": "clip", "proj_type": "linear", "in_chans": 3, "tiktoken_name": "cl100k_base"}
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("width", "head_width", "heads", "context_length", "vocab_size", "patch_size"), (int,)),
    **dict.fromkeys(
        ("pool_type", "proj_type", "timm_model_name", "timm_pool", "timm_proj", "hf_tokenizer_name"), (str,)
    ),
    **dict.fromkeys(("act_kwargs", "norm_kwargs", "timm_model_kwargs", "tokenizer_kwargs"), (dict,)),
    **dict.fromkeys(("no_ln_pre", "final_ln_after_pool", "no_causal_mask"), (bool,)),
}


@dataclass(frozen=True)
class OpenClip:
    """An `open_clip_config.json`. `vision`, `text`: its parts, unchanged; `features`: the width that both share."""

    file: Path
    features: int
    quick_gelu: bool
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    preprocess: Mapping[str, Any]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        size = sides(self.vision.get("image_size", 224))
        if size is None:
            raise self.refused(f"image_size {self.vision['image_size']!r}", "a side in pixels, or height and width")
        return size

    def refused(self, found: str, expected: str, fix: str = "") -> CheckpointError:
        """Return the error for a setting that vitdeploy does not support."""
        return CheckpointError(
            f"{self.file} has a setting that vitdeploy does not support", found=found, expected=expected, fix=fix
        )

    def refuse_vision(self) -> None:
        """Raise CheckpointError for an image encoder with unsupported parts."""
        self._refuse("vision_cfg", self.vision, _VISION, "the image encoder of CLIP, SigLIP or timm")

    def refuse_text(self) -> None:
        """Raise CheckpointError for a text encoder that is not OpenCLIP's own Transformer."""
        name = self.text.get("hf_model_name")
        if name:
            raise self.refused(f"a text encoder from transformers, {name}", "OpenCLIP's own text Transformer", ALONE)
        self._refuse("text_cfg", self.text, _TEXT, "the text encoder of CLIP or SigLIP", ALONE)

    def _refuse(self, name: str, part: Mapping[str, Any], read: set[str], expected: str, fix: str = "") -> None:
        known = read | _BY_TENSORS | _OF_TRAINING | _OF_TOKENIZERS
        others = {key: value for key, value in part.items() if key not in known and value not in _NEUTRAL}
        foreign = [f"{key} {value!r}" for key, value in others.items() if _USUAL.get(key) != value]
        foreign += [
            f"{key} {part[key]!r}"
            for key, kinds in _KINDS.items()
            if part.get(key) is not None and (type(part[key]) not in kinds or (kinds == (int,) and part[key] < 1))
        ]
        if foreign:
            raise self.refused(f"{name}: {', '.join(foreign)}", expected, fix)

    @property
    def clean(self) -> Clean:
        """Return how OpenCLIP's tokenizer cleans a text first.

        Raises:
            CheckpointError: another kind of tokenizer, or unsupported tokenizer arguments.
        """
        arguments = self.text.get("tokenizer_kwargs") or {}
        clean = arguments.get("clean", "whitespace" if self.text.get("hf_tokenizer_name") else "lower")
        if set(arguments) - {"clean"} or clean not in CLEANINGS:
            raise self.refused(
                f"tokenizer_kwargs {dict(arguments)}", f"only clean, one of {', '.join(CLEANINGS)}", ALONE
            )
        return clean


def open_clip_config(folder: Path) -> OpenClip:
    """Read `open_clip_config.json`: the file of a model folder, or one of OpenCLIP's own `model_configs`.

    Raises:
        CheckpointError: it does not describe an image and a text encoder, or has a decoder, too.
    """
    file = folder / OPEN_CLIP
    content = json_file.read_json(file)
    model = content.get("model_cfg", content)
    model = model if isinstance(model, Mapping) else {}
    vision, text, width = (model.get(key) for key in ("vision_cfg", "text_cfg", "embed_dim"))
    others = [
        key for key, value in model.items() if key.endswith("_cfg") and value and key not in ("vision_cfg", "text_cfg")
    ]
    whole = isinstance(vision, Mapping) and isinstance(text, Mapping) and isinstance(width, int)
    if not whole or others:
        raise CheckpointError(
            f"{file} is not the config of an image encoder and a text encoder",
            found=", ".join(map(str, others or model or content)) or "{}",
            expected="model_cfg with embed_dim, vision_cfg and text_cfg, as written by OpenCLIP",
            fix="use a CLIP or SigLIP model: CoCa, CLAP and GenLIP have further parts"
            if others
            else "copy the whole folder again",
        )
    preprocess = content.get("preprocess_cfg")
    preprocess = preprocess if isinstance(preprocess, Mapping) else {}
    return OpenClip(file, width, model.get("quick_gelu") is True, vision, text, preprocess)  # type: ignore[arg-type]


def open_clip_preprocess(config: OpenClip) -> PreprocessSpec:
    """Return the preprocessing of `preprocess_cfg`, as in OpenCLIP's `image_transform` for evaluation.

    Raises:
        CheckpointError: a setting that vitdeploy does not support.
    """
    cfg, size = config.preprocess, config.image_size
    mode, named = cfg.get("resize_mode") or "shortest", cfg.get("interpolation") or "bicubic"
    own = sides(cfg.get("size")) or size
    fill, colours = cfg.get("fill_color") or 0, cfg.get("mode") or "RGB"
    if (
        mode not in ("shortest", "squash")
        or named not in ("bicubic", "bilinear", "random")
        or (own, fill, colours) != (size, 0, "RGB")
    ):
        raise config.refused(
            f"resize_mode {mode!r}, interpolation {named!r}, size {own}, fill_color {fill!r}, mode {colours!r}",
            f"shortest or squash; bicubic or bilinear; size {size[0]}x{size[1]}; 0; RGB",
        )
    # As in OpenCLIP, an interpolation that is random in training becomes bicubic, as does that of a non-square crop.
    square = size[0] == size[1]
    plain = named == "bilinear" and (square or mode == "squash")
    interpolation: Interpolation = "bilinear" if plain else "bicubic"
    mean, std = (_channels(config, key, usual) for key, usual in (("mean", CLIP_MEAN), ("std", CLIP_STD)))
    if mode == "squash":
        return PreprocessSpec(size, size, interpolation, mean, std)
    if square:
        return PreprocessSpec(size[0], size, interpolation, mean, std)
    return PreprocessSpec(size, size, interpolation, mean, std, "cover")


def _channels(config: OpenClip, key: str, usual: tuple[float, ...]) -> tuple[float, ...]:
    found = config.preprocess.get(key) or usual
    values = list(found) if isinstance(found, list | tuple) else [found] * 3
    if len(values) != 3 or not all(type(value) in (int, float) and abs(value) < 1e6 for value in values):
        raise config.refused(f"{key} {found!r}", "a number for each of 3 channels")
    if key == "std" and min(values) <= 0:
        raise config.refused(f"std {found!r}", "numbers above 0")
    return tuple(map(float, values))


# --- Both encoders in OpenCLIP's names --------------------------------------------------------------------------------


IMAGE, TEXT, TRUNK = "visual.", "text.", "visual.trunk."
# A key that identifies a state dict with OpenCLIP's own image encoder.
SIGN = f"{IMAGE}transformer.resblocks.0.attn.in_proj_weight"
# The first are buffers of OpenAI's archives and of old versions; they do not belong to one tower.
_BLOCK = """
    $P(logit_scale|logit_bias|attn_mask|input_resolution|context_length|vocab_size)     -
    $BLOCK.ln_{1,2}.$W              blocks.*.norm{1,2}.$W
    $BLOCK.attn.in_proj_$W          blocks.*.attn.qkv.$W
    $BLOCK.attn.out_proj.$W         blocks.*.attn.proj.$W
    $BLOCK.mlp.{c_fc,c_proj}.$W     blocks.*.mlp.{fc1,fc2}.$W
"""
_IMAGE_NAMES = rules(
    _BLOCK
    + """
    $BLOCK.ls_{1,2}.gamma           blocks.*.ls{1,2}.gamma
    $Pconv1.weight                  patch_embed.proj.weight
    $Pclass_embedding               cls_token
    $Ppositional_embedding          pos_embed
    $Pln_pre.$W                     norm_pre.$W
    $Pln_post.$W                    norm.$W
    $Pproj                          head.weight
    """,
    BLOCK="$Ptransformer.resblocks.*",
    W="{weight,bias}",
    P=IMAGE,
)
_TEXT_NAMES = rules(
    _BLOCK
    + """
    $Ptoken_embedding.weight        token_embed.weight
    $Ppositional_embedding          pos_embed
    $Pln_final.$W                   norm.$W
    $Ptext_projection               head.weight
    $Ptext_projection.$W            head.$W
    """,
    BLOCK="$Ptransformer.resblocks.*",
    W="{weight,bias}",
    P=f"({TEXT})?",
)
# The tensors of every block, and those outside the blocks.
_LAYERS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
_PARTS = [f"{layer}.{kind}" for layer in _LAYERS for kind in ("weight", "bias")]
_IMAGE_STEM = ("patch_embed.proj.weight", "cls_token", "pos_embed", "norm.weight", "norm.bias", "head.weight")
_TEXT_STEM = ("token_embed.weight", "pos_embed", "norm.weight", "norm.bias", "head.weight")
# Number of axes of the tensors whose sizes are read.
_AXES = {"patch_embed.proj.weight": 4, "token_embed.weight": 2, "head.weight": 2, "blocks.0.mlp.fc1.weight": 2}
POOLINGS: Mapping[str, TextPooling] = {"argmax": "highest", "last": "last", "eos": "end"}


def image_tower(state: Mapping[str, Tensor], config: OpenClip, heads: int | None) -> family.Recognised:
    """Return OpenCLIP's own Vision Transformer up to the features shared by images and texts.

    Args:
        heads: overrides the config's value.

    Raises:
        CheckpointError: tensors are missing or unknown, contradict the config, or the config has a setting that the
            built-in Vision Transformer does not support.
    """
    config.refuse_vision()
    cfg = config.vision
    image = {key: tensor for key, tensor in state.items() if key.startswith(IMAGE)}
    tensors = _renamed(image, _IMAGE_NAMES, "image encoder")
    _require(tensors, _IMAGE_STEM, "image encoder")
    tensors = vit.as_rows(tensors)
    tensors["head.weight"] = tensors["head.weight"].T.contiguous()
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    if "norm_pre.weight" not in tensors:  # our patch embedding lacks a bias only if a norm follows it
        tensors["patch_embed.proj.bias"] = torch.zeros(width)
    size = config.image_size
    compare(
        config,
        cfg,
        {
            "width": width,
            "layers": vit.depth_of(tensors),
            "patch_size": patch,
            "embed_dim": len(tensors["head.weight"]),
        },
    )
    notes: list[str] = []
    fitting = vit.image_size_for(tensors["pos_embed"].shape[1] - 1, patch, family.Hints(image_size=size), None, notes)
    compare(config, cfg, {"image_size": fitting if fitting != size else cfg.get("image_size", 224)})
    pooling, after = cfg.get("pool_type", "tok"), cfg.get("final_ln_after_pool") is True
    if pooling not in ("tok", "avg") or bool(cfg.get("no_ln_pre")) == ("norm_pre.weight" in tensors):
        raise config.refused(
            f"pool_type {pooling!r}, no_ln_pre {cfg.get('no_ln_pre', False)}",
            "tok or avg, and a ln_pre in the weights if and only if the config has one",
        )
    if after:
        tensors |= {f"fc_{key}": tensors.pop(key) for key in ("norm.weight", "norm.bias")}
    activation, eps = conventions(config, cfg)
    found = vit.measured(
        tensors,
        vit.heads_for(width, family.Hints(heads), max(1, width // cfg.get("head_width", 64)), notes),
        size,
        layer_norm_eps=eps,
        activation=activation,
        pooling="class" if pooling == "tok" else "average",
        final_norm="after_pooling" if after else "before_pooling",
        preset="clip",
    )
    return vit.recognised("OpenCLIP", tensors, found, notes)


def refuse_without_config(state: Mapping[str, Tensor], file: str) -> None:
    """Raise CheckpointError for an OpenCLIP state dict without a config, which tensors alone do not determine."""
    if SIGN in state:
        raise CheckpointError(
            f"{file} is an OpenCLIP checkpoint: its tensors do not determine heads, activation and text pooling",
            found=f"{SIGN}, no {OPEN_CLIP} next to it",
            expected=f"{OPEN_CLIP}, and tokenizer.json for the text encoder",
            fix="put the model's config next to it: from its repository, or OpenCLIP's model_configs/NAME.json saved "
            f"as {OPEN_CLIP} (for OpenAI's and MetaCLIP's models, the NAME ends in -quickgelu)",
        )


def text_tower(state: Mapping[str, Tensor], config: OpenClip) -> towers.TextTower:
    """Return OpenCLIP's own text Transformer, with the scale and bias for comparing its features.

    Raises:
        CheckpointError: as `image_tower`.
    """
    config.refuse_text()
    cfg = config.text
    own = {key: tensor for key, tensor in state.items() if not key.startswith(IMAGE)}
    tensors = _renamed(own, _TEXT_NAMES, "text encoder")
    _require(tensors, _TEXT_STEM, "text encoder")
    if f"{TEXT}text_projection.weight" not in state and "text_projection.weight" not in state:
        tensors["head.weight"] = tensors["head.weight"].T.contiguous()
    tensors = vit.as_rows(tensors)
    vocabulary, width = tensors["token_embed.weight"].shape
    length, heads = tensors["pos_embed"].shape[1], cfg.get("heads", 8)
    tells = {"width": width, "layers": vit.depth_of(tensors), "vocab_size": vocabulary, "context_length": length}
    compare(config, cfg, {**tells, "embed_dim": len(tensors["head.weight"])})
    pooling, end = cfg.get("pool_type", "argmax"), cfg.get("eos_id")
    if pooling not in POOLINGS or (pooling == "eos" and type(end) is not int) or width % heads:
        raise config.refused(
            f"text_cfg: pool_type {pooling!r}, eos_id {end!r}, heads {heads}",
            f"one of {', '.join(POOLINGS)}, a token id for eos, and a number of heads that divides {width}",
            ALONE,
        )
    if "logit_scale" not in state:
        raise CheckpointError(
            "the weights have no scale for comparing images and texts", expected="logit_scale", fix=ALONE
        )
    activation, eps = conventions(config, cfg)
    return towers.TextTower.measured(
        tensors,
        state,
        sigmoid="logit_bias" in state,
        width=width,
        heads=heads,
        layer_norm_eps=eps,
        activation=activation,
        causal=not cfg.get("no_causal_mask", False),
        pooling=POOLINGS[pooling],
        end=end if type(end) is int else vocabulary - 1,
    )


def conventions(config: OpenClip, part: Mapping[str, Any]) -> tuple[Activation, float]:
    """Return the activation and the LayerNorm epsilon of one encoder's config.

    Raises:
        CheckpointError: neither those of CLIP nor of SigLIP.
    """
    act, norm = part.get("act_kwargs") or {}, part.get("norm_kwargs") or {}
    eps, tanh = norm.get("eps", 1e-5), act == {"approximate": "tanh"}
    if (act and (not tanh or config.quick_gelu)) or set(norm) - {"eps"} or not isinstance(eps, float) or eps < 0:
        raise config.refused(
            f"act_kwargs {dict(act)}, norm_kwargs {dict(norm)}, quick_gelu {config.quick_gelu}",
            'quick_gelu alone, or act_kwargs {"approximate": "tanh"}, or neither; norm_kwargs {"eps": 1e-06}',
        )
    return "quick_gelu" if config.quick_gelu else "gelu_tanh" if tanh else "gelu", eps


def _renamed(state: Mapping[str, Tensor], table: tuple[Rule, ...], what: str) -> dict[str, Tensor]:
    tensors, _, unknown = renamed(table, state)
    if unknown:
        raise CheckpointError(
            f"the {what} has tensors that CLIP does not have",
            found=listed(unknown),
            expected="the tensors of OpenCLIP's own Transformer",
            fix=ALONE if what == "text encoder" else "",
        )
    return tensors


def _require(tensors: Mapping[str, Tensor], stem: Iterable[str], what: str) -> None:
    expected = [*stem, *(f"blocks.{block}.{part}" for block in range(max(1, vit.depth_of(tensors))) for part in _PARTS)]
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise CheckpointError(
            f"the {what} is incomplete",
            found=f"{len(missing)} missing, by vitdeploy's names: {listed(missing)}",
            expected="every tensor of OpenCLIP's own Transformer",
            fix="save the whole model",
        )
    wrong = [name for name, axes in _AXES.items() if name in tensors and tensors[name].ndim != axes]
    if wrong:
        raise CheckpointError(
            f"the {what} has tensors with unexpected shapes",
            found=", ".join(f"{name} {list(tensors[name].shape)}" for name in wrong),
            expected=", ".join(f"{name} with {_AXES[name]} axes" for name in wrong),
        )


def compare(config: OpenClip, part: Mapping[str, object], tells: Mapping[str, object]) -> None:
    """Raise CheckpointError if sizes in the config contradict the weights; missing keys are not compared."""
    stated = {"embed_dim": config.features, **part}
    wrong = [
        f"{key} {stated[key]}, the weights have {value}"
        for key, value in tells.items()
        if stated.get(key, value) != value
    ]
    if wrong:
        raise CheckpointError(
            f"{config.file.name} does not match the weights",
            found="; ".join(wrong),
            expected="config and weights of the same model",
            fix="take both from the same repository; for OpenCLIP's own model names, from its model_configs",
        )


# --- The image encoder, built-in or timm's, and the text encoder ------------------------------------------------------


HEAD = "visual.head."
PROJECTIONS = ("linear", "mlp")
# timm's arguments for the sizes in a model name, and our config fields.
SIZES = {"embed_dim": "width", "depth": "depth", "num_heads": "heads", "patch_size": "patch_size"}
# Pooling that OpenCLIP adds to a timm tower.
ATTENTIVE = ("abs_attn", "rot_attn")


def image_part(
    state: Mapping[str, Tensor], config: OpenClip, source: Source, file: str
) -> family.Recognised | family.LoadedModel:
    """Return the image encoder: as tensors of the built-in Vision Transformer, or as timm's own module.

    Raises:
        CheckpointError: tensors are missing or unknown, or the config names another kind of tower.
        MissingPackageError: the tower is timm's, and timm is not installed.
    """
    name = config.vision.get("timm_model_name")
    if name is None and isinstance(config.vision.get("layers"), list):
        raise config.refused("a convolutional image encoder (CLIP's ResNet)", "a Vision Transformer, or a timm encoder")
    if name is None:
        return image_tower(state, config, source.heads)
    config.refuse_vision()
    pooling, projection = config.vision.get("timm_pool", "avg"), config.vision.get("timm_proj", "linear")
    if pooling in ATTENTIVE or projection not in (*PROJECTIONS, "none", "", None):
        raise config.refused(f"timm_pool {pooling!r}, timm_proj {projection!r}", "timm's own pooling, and a projection")
    arguments = dict(config.vision.get("timm_model_kwargs") or {})
    if pooling or projection not in PROJECTIONS:
        arguments["global_pool"] = pooling
    trunk = {key.removeprefix(TRUNK): tensor for key, tensor in state.items() if key.startswith(TRUNK)}
    head = {key.removeprefix(HEAD): tensor for key, tensor in state.items() if key.startswith(HEAD)}
    if projection != "mlp" and (found := _ours(trunk, head, config, name, arguments, source)) is not None:
        return found
    arguments["num_classes"] = 0 if projection else config.features
    timm_config = {"architecture": name, "model_args": arguments}
    size = source.size or config.image_size
    return _projected(from_timm(name, timm_config, trunk, size, file, "features"), head)


def _ours(
    trunk: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    config: OpenClip,
    name: str,
    arguments: Mapping[str, Any],
    source: Source,
) -> family.Recognised | None:
    """Return timm's tower as the built-in Vision Transformer; None if it is another architecture."""
    try:
        named = vit.parse_vit(name)
    except UnknownModelError:
        named = None
    if named is None:
        return None
    tensors = {**trunk, **{key.replace("proj.", "head."): tensor for key, tensor in head.items()}}
    hints = family.Hints(source.heads, config.image_size, {"architecture": name, "model_args": dict(arguments)})
    found = vit_timm.recognise(tensors, hints)
    if found is None or not isinstance(found.config, ViTConfig):
        return None
    stated = {field: arguments.get(argument, getattr(named, field)) for argument, field in SIZES.items()}
    compare(config, stated, {field: getattr(found.config, field) for field in SIZES.values()})
    compare(config, {"image_size": config.image_size}, {"image_size": found.config.image_size})
    return found


def _projected(tower: family.LoadedModel, head: Mapping[str, Tensor]) -> family.LoadedModel:
    """Return timm's module followed by OpenCLIP's projection, if there is one."""
    layers: list[nn.Module] = [tower.module]
    width = tower.signature.outputs[0].shape[-1]
    for key in ("proj", "mlp.fc1", "mlp.fc2"):
        found = {name: head[f"{key}.{name}"] for name in ("weight", "bias") if f"{key}.{name}" in head}
        if "weight" not in found:
            continue
        if found["weight"].ndim != 2 or found["weight"].shape[1] != width:
            raise CheckpointError(
                f"OpenCLIP's projection does not fit timm's {tower.name}",
                found=f"{HEAD}{key}.weight {list(found['weight'].shape)}",
                expected=f"rows of {width}, the feature width",
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


def as_features(original: family.LoadedModel, features: int) -> family.LoadedModel:
    """Return the image encoder as a feature extractor, whatever its last linear layer is."""
    own = original.signature
    pooled = TensorSpec("features", "float32", ("batch", features))
    if own.outputs[0].shape != pooled.shape:
        raise CheckpointError(
            "the image encoder does not return the features shared by images and texts",
            found=str(own.outputs[0]),
            expected=f"features [batch, {features}], from embed_dim",
        )
    rest = own.outputs[1:] if own.task == "features" else ()
    return dataclasses.replace(
        original, signature=dataclasses.replace(own, task="features", outputs=(pooled, *rest), postprocess=None)
    )


def with_text(
    original: family.LoadedModel, folder: ModelFolder, state: Mapping[str, Tensor], config: OpenClip
) -> family.LoadedModel:
    """Add the text encoder; without a tokenizer, return `original` with a note.

    Raises:
        CheckpointError: the text encoder is missing, incomplete or unsupported; or the tokenizer's vocabulary does not
            match it.
    """
    if not (folder.path / TOKENIZER).is_file():
        own = config.text.get("hf_tokenizer_name")
        origin = f"from {own}" if own else "CLIP's, from openai/clip-vit-base-patch32"
        note = f"no {TOKENIZER}: image encoder only; for both encoders, put the tokenizer next to the weights: {origin}"
        return dataclasses.replace(original, notes=(*original.notes, note))
    config.refuse_text()
    if not any(key.removeprefix(TEXT) == "token_embedding.weight" for key in state):
        raise CheckpointError(
            f"the weights of {folder.path} have no text encoder",
            found=f"text_cfg in {config.file.name}, {TOKENIZER}, and no tensor token_embedding.weight",
            expected="the weights of both encoders",
            fix=f"save the whole model; or, {ALONE}",
        )
    tower, clean = text_tower(state, config), config.clean
    count, rows = tokens_of(folder.path / TOKENIZER), tower.config.vocabulary
    if count > rows:
        raise CheckpointError(
            f"{TOKENIZER} has more tokens than the text encoder",
            found=f"{count} tokens, {rows} rows of token_embedding.weight",
            expected="the tokenizer that the model was trained with",
            fix=f"get it from {config.text.get('hf_tokenizer_name') or 'openai/clip-vit-base-patch32'}",
        )
    if config.text.get("hf_tokenizer_name"):
        tokenizer = tokenizer_of(folder.path)
        assert tokenizer is not None
        # OpenCLIP pads on the right, whatever the tokenizer's own file says.
        tokenizer = {**tokenizer, "padding": "right", "lowercase": False}
    else:
        tokenizer = byte_pairs_of(folder.path, rows)
    return towers.both_towers(original, tower, {**tokenizer, "clean": clean}, f"the text encoder of {folder.path}")

"""The catalog's rows for ViTs: names, signatures, default preprocessing, other image sizes."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.models.vit_samples import (
    ACTIVATIONS,
    POOLINGS,
    SMALL,
    TIMM_VARIANTS,
    difference,
    images,
    randomised,
    timm_vit,
)
from tests.references import reference
from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.layers import RESAMPLING, sincos_2d
from vitdeploy.models.architectures.vit import VisionTransformer, ViTConfig
from vitdeploy.models.families.vit import DEIT_FAMILY, FAMILY
from vitdeploy.models.keys.vit import SIZES, parse_deit, parse_vit
from vitdeploy.spec import PreprocessSpec, TensorSpec

FAMILIES = {name: family for family in (FAMILY, DEIT_FAMILY) for name in family.names}


def architecture(name: str) -> str:
    return name.removesuffix(".mae").removesuffix(".dino")


# --- names ------------------------------------------------------------------------------------------------------------


def timms_arguments(name, monkeypatch):
    """The class and the arguments with which timm builds the model of that name, without building it."""
    timm = reference("timm")
    from timm.models import deit, vision_transformer

    for module in (deit, vision_transformer):
        monkeypatch.setattr(module, "build_model_with_cfg", lambda cls, *_, **given: (cls.__name__, given))
    kind, arguments = timm.model_entrypoint(architecture(name))()
    plumbing = {"pretrained_filter_fn", "pretrained_strict", "feature_cfg", "out_indices"}
    return kind, {key: value for key, value in arguments.items() if key not in plumbing}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_built_in_name_is_built_as_timm_builds_it(name, monkeypatch):
    config = FAMILIES[name].names[name]
    kind, theirs = timms_arguments(name, monkeypatch)
    pooling = theirs.pop("global_pool", "token")
    norm, mlp, activation = (theirs.pop(part, None) for part in ("norm_layer", "mlp_layer", "act_layer"))
    assert kind == ("VisionTransformerDistilled" if FAMILIES[name] is DEIT_FAMILY else "VisionTransformer")
    assert (theirs.pop("patch_size", 16), theirs.pop("embed_dim")) == (config.patch_size, config.width)
    assert (theirs.pop("depth"), theirs.pop("num_heads")) == (config.depth, config.heads)
    assert int(config.width * theirs.pop("mlp_ratio", 4.0)) == config.hidden
    assert (theirs.pop("init_values", None) is not None) is config.layer_scale
    assert theirs.pop("no_embed_class", False) is not config.prefix_positions
    assert (theirs.pop("class_token", True), theirs.pop("reg_tokens", 0)) == (config.class_token, config.registers)
    assert theirs.pop("pre_norm", False) is config.stem_norm
    assert theirs.pop("fc_norm", False) is False
    assert config.final_norm == "before_pooling"
    assert POOLINGS[config.pooling] == pooling
    assert (norm.keywords["eps"] if norm else 1e-6) == config.layer_norm_eps
    assert (mlp is None) is (config.mlp == "mlp")
    assert mlp is not None or ACTIVATIONS[config.activation] == (activation or "gelu")
    assert not theirs, "arguments of timm that change the function"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("vit_base_patch16_224", ViTConfig()),
        ("vit_small_patch32_384", ViTConfig((384, 384), 32, width=384, depth=12, heads=6)),
        ("vit_huge_patch14_224", ViTConfig((224, 224), 14, width=1280, depth=32, heads=16)),
        ("vit_w192d4h3_patch4_32", ViTConfig((32, 32), 4, width=192, depth=4, heads=3)),
        ("vit_w32d2h2_patch8_32x48", ViTConfig((32, 48), 8, width=32, depth=2, heads=2)),
    ],
)
def test_names_of_plain_vits_change_nothing_but_sizes(name, config):
    assert parse_vit(name) == config


def test_a_size_of_ones_own_works_in_every_pattern():
    distilled = parse_deit("deit_w32d2h4_distilled_patch8_32")
    assert (distilled.width, distilled.depth, distilled.heads, distilled.image_size) == (32, 2, 4, (32, 32))
    clip = parse_vit("vit_w32d2h4_patch8_clip_quickgelu_32x48")
    assert (clip.width, clip.activation, clip.head, clip.image_size) == (32, "quick_gelu", "projection", (32, 48))


@pytest.mark.parametrize(
    "name",
    [
        "vit_micro_patch16_224",
        "vit_base_patch16_224.augreg_in21k",
        "vit_base_patch16_rope_224",
        "vit_small_patch16_18x2_224",
        "vit_base_r50_s16_224",
        "swin_tiny_patch4_window7_224",
        "vit_base_patch16_224 ",
        "",
    ],
)
def test_other_names_are_not_ours(name):
    assert parse_vit(name) is None
    assert parse_deit(name) is None


@pytest.mark.parametrize(
    ("parse", "name", "reason"),
    [
        (parse_vit, "vit_tiny_patch16_225", "225x225 is not divisible by the patch size 16"),
        (parse_vit, "vit_so400m_patch14_siglip_390", "390x390 is not divisible"),
        (parse_vit, "vit_w32d2h3_patch8_clip_32", "width 32 is not divisible by 3 heads"),
        (parse_vit, "vit_w36d2h3_patch0_32", "patch"),
        (parse_deit, "deit_tiny_distilled_patch16_230", "230x230 is not divisible"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(parse, name, reason):
    with pytest.raises(UnknownModelError) as caught:
        parse(name)
    assert reason in caught.value.found
    assert repr(name) in caught.value.message


def test_every_size_is_one_that_a_name_uses():
    assert {size for size in SIZES if any(f"_{size}_" in name for name in FAMILIES)} == set(SIZES)


# --- signature and preprocessing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "task", "outputs"),
    [
        ({}, "classification", {"logits": ("batch", 7)}),
        ({"num_classes": 0}, "features", {"features": ("batch", 32), "patch_features": ("batch", 24, 32)}),
        (
            {"num_classes": 0, "pooling": "class_average", "registers": 2},
            "features",
            {"features": ("batch", 64), "patch_features": ("batch", 24, 32)},
        ),
        (
            {"num_classes": 0, "pre_logits": 20},
            "features",
            {"features": ("batch", 20), "patch_features": ("batch", 24, 32)},
        ),
        ({"head": "projection"}, "features", {"features": ("batch", 7)}),
    ],
)
def test_a_signature_says_what_the_module_gives(change, task, outputs):
    config = replace(SMALL, **change)
    signature = FAMILY.describe(config)
    assert (signature.task, signature.image_size, signature.channels) == (task, (32, 48), 3)
    assert signature.outputs == tuple(TensorSpec(name, "float32", shape) for name, shape in outputs.items())
    result = FAMILY.build(config)(torch.zeros(2, 3, 32, 48))
    tensors = result if isinstance(result, tuple) else (result,)
    assert [tuple(tensor.shape) for tensor in tensors] == [spec.with_batch(2).shape for spec in signature.outputs]


def test_default_preprocessing_is_one_that_timm_has_for_the_model():
    reference("timm")
    import timm.models._registry as registry

    for name, family in FAMILIES.items():
        spec = family.preprocess(family.names[name])
        base, _, tag = name.partition(".")
        settings = registry._model_default_cfgs[base].cfgs
        expected = []
        for config in [settings[tag]] if tag else settings.values():
            side = int(config.input_size[1] / config.crop_pct)
            resize = (side, side) if config.crop_mode == "squash" else side
            crop = tuple(config.input_size[1:])
            expected.append(PreprocessSpec(resize, crop, config.interpolation, tuple(config.mean), tuple(config.std)))
        assert spec in expected, name


def test_preprocessing_of_a_grey_model_has_one_channel():
    assert FAMILY.preprocess(replace(SMALL, image_size=(224, 224), in_channels=1)) == PreprocessSpec(
        248, (224, 224), "bicubic", (0.5,), (0.5,)
    )


def test_a_model_of_4_channels_takes_no_images():
    with pytest.raises(CheckpointError, match="does not take images") as caught:
        FAMILY.preprocess(replace(SMALL, in_channels=4))
    assert caught.value.found == "4 input channels"


# --- other image sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant", ["plain", "class token without position", "registers with positions", "no positions"]
)
def test_a_resized_model_is_timms_resized(variant):
    config = TIMM_VARIANTS[variant]
    theirs = randomised(timm_vit(config), torch.float32)
    resized, state = FAMILY.resize(config, theirs.state_dict(), (56, 24))
    theirs.set_input_size((56, 24))
    ours = FAMILY.build(resized).eval()
    ours.load_state_dict(state, strict=True)
    if "pos_embed" in state:
        assert torch.equal(state["pos_embed"], theirs.pos_embed)
    image = images(resized, dtype=torch.float32)
    with torch.no_grad():
        assert difference(ours(image), theirs(image)) <= 1e-5


def test_resizing_leaves_the_given_state_alone_and_everything_else_equal():
    state = VisionTransformer(SMALL).state_dict()
    before = state["pos_embed"].clone()
    resized, other = FAMILY.resize(SMALL, state, (32, 32))
    assert resized == replace(SMALL, image_size=(32, 32))
    assert torch.equal(state["pos_embed"], before)
    assert all(other[key] is state[key] for key in state if key != "pos_embed")


def test_a_resized_formula_is_a_table_of_values():
    config = replace(SMALL, positions="sincos_2d")
    resized, state = FAMILY.resize(config, VisionTransformer(config).state_dict(), (64, 48))
    assert resized.positions == "learned"
    assert not torch.allclose(state["pos_embed"], sincos_2d((8, 6), 32, 1), atol=0.1)
    same, untouched = FAMILY.resize(config, state, (32, 48))
    assert (same, untouched) == (config, state)


def test_the_config_says_how_the_table_is_resized():
    state = VisionTransformer(SMALL).state_dict()
    tables = [
        FAMILY.resize(replace(SMALL, position_resampling=method), state, (16, 16))[1]["pos_embed"]
        for method in RESAMPLING
    ]
    assert not any(torch.allclose(a, b, atol=1e-4) for a, b in itertools.combinations(tables, 2))


def test_a_size_that_the_patch_does_not_divide_is_answered_with_those_that_it_does():
    with pytest.raises(CheckpointError) as caught:
        FAMILY.resize(SMALL, VisionTransformer(SMALL).state_dict(), (30, 48))
    assert caught.value.found == "image size 30x48 is not divisible by the patch size 8"
    assert caught.value.expected == "multiples of 8, for example 24x48, 32x48"


def test_a_distilled_model_keeps_its_type_and_both_prefix_rows():
    config = parse_deit("deit_w32d1h2_distilled_patch8_32")
    state = DEIT_FAMILY.build(config).state_dict()
    resized, other = DEIT_FAMILY.resize(config, state, (48, 32))
    assert type(resized) is type(config)
    assert torch.equal(other["pos_embed"][:, :2], state["pos_embed"][:, :2])
    DEIT_FAMILY.build(resized).load_state_dict(other, strict=True)

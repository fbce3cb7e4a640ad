"""State dicts with timm's keys: what names and shapes tell, what a config file adds, what cannot be known."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.models.vit_samples import (
    ACTIVATIONS,
    POOLINGS,
    SMALL,
    TIMM_FAMILIES,
    TIMM_VARIANTS,
    images,
    randomised,
    timm_vit,
)
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.vit import DeiTConfig, DistilledVisionTransformer, VisionTransformer, ViTConfig
from vitdeploy.models.families.vit import recognise_deit, recognise_vit
from vitdeploy.models.family import Hints
from vitdeploy.models.keys.vit import parse_deit, parse_vit

HINTS = Hints(heads=4, image_size=(32, 48))
WIDE = ViTConfig((32, 32), 16, 3, width=192, depth=1, heads=3, num_classes=5)


def state_of(config: ViTConfig, **changes: Tensor | None) -> dict[str, Tensor]:
    """A randomised state dict of `config`; a change of None removes the key (in it, "__" stands for ".")."""
    build = DistilledVisionTransformer if isinstance(config, DeiTConfig) else VisionTransformer
    state = randomised(build(config), torch.float32).state_dict()
    state |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in state.items() if value is not None}


def config_json(config: ViTConfig) -> dict[str, object]:
    """The part of timm's config.json that tells what the tensors do not."""
    arguments: dict[str, object] = {"act_layer": ACTIVATIONS[config.activation]}
    if config.positions == "none":
        arguments |= {"pos_embed": "none", "img_size": config.image_size}
    if config.final_norm == "none":
        arguments["final_norm"] = False
    return {"global_pool": POOLINGS[config.pooling], "model_args": arguments}


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", TIMM_VARIANTS)
def test_every_variant_is_recognised_from_timms_state_dict(variant, parity):
    config = TIMM_VARIANTS[variant]
    theirs = randomised(timm_vit(config))
    hints = Hints(heads=config.heads, image_size=config.image_size, config=config_json(config))
    found = recognise_vit(theirs.state_dict(), hints)
    assert (found.family, found.style) == ("vit", "timm")
    assert replace(found.config, mlp_ratio=config.mlp_ratio) == config
    assert found.config.hidden == config.hidden
    model = VisionTransformer(found.config).double().eval()
    model.load_state_dict(found.state, strict=True)
    image = images(config)
    with torch.no_grad():
        result = model(image)
        result = result if config.num_classes else result[0]
        parity(TIMM_FAMILIES.get(variant, "ViT"), "timm", result, theirs(image), keys=found.style)


@pytest.mark.parametrize("variant", [name for name, config in TIMM_VARIANTS.items() if config.activation == "gelu"])
def test_without_a_config_file_the_same_is_found_where_keys_tell(variant):
    config = TIMM_VARIANTS[variant]
    hints = replace(HINTS, image_size=config.image_size)
    state = randomised(timm_vit(config)).state_dict()
    if variant in ("no positions", "no final norm"):
        with pytest.raises(CheckpointError):
            recognise_vit(state, hints)
        return
    found = recognise_vit(state, hints).config
    pooling = config.pooling if variant != "average" else "class"  # timm's class averages here without any key for it
    assert replace(found, mlp_ratio=config.mlp_ratio, preset=config.preset) == replace(config, pooling=pooling)


@pytest.mark.parametrize(
    "name", ["vit_w96d1h2_patch8_clip_quickgelu_32", "vit_w96d1h2_patch8_siglip_32", "deit3_w96d1h2_patch8_32"]
)
def test_naming_the_model_tells_heads_activation_epsilon_and_preprocessing(name):
    config = parse_vit(name)
    found = recognise_vit(state_of(config), Hints(config={"architecture": name}))
    assert found.config == config
    assert not [note for note in found.notes if "keys do not show" in note or "published models" in note]


@pytest.mark.parametrize(
    ("change", "preset", "epsilon"),
    [
        ({}, "augreg", 1e-6),
        ({"num_classes": 0}, "imagenet", 1e-6),
        ({"layer_scale": True}, "imagenet", 1e-6),
        ({"stem_norm": True}, "clip", 1e-5),
        ({"pooling": "attention", "class_token": False}, "siglip", 1e-6),
    ],
)
def test_what_keys_do_not_show_is_taken_from_the_likeliest_model_and_said(change, preset, epsilon):
    found = recognise_vit(state_of(replace(WIDE, **change)), Hints())
    assert (found.config.preset, found.config.layer_norm_eps, found.config.activation) == (preset, epsilon, "gelu")
    assert any("keys do not show activation and LayerNorm epsilon" in note for note in found.notes)
    assert any("assuming 3 heads, as in published models of width 192" in note for note in found.notes)


def test_the_last_note_sums_the_model_up():
    assert recognise_vit(state_of(WIDE), Hints()).notes[-1] == (
        "1 blocks of width 192, 3 heads, gelu; patches of 16, image 32x32, 5 classes"
    )


@pytest.mark.parametrize(("mlp", "heads"), [("mlp", 16), ("swiglu_packed", 24)])
def test_of_the_two_published_models_of_width_1536_only_dinov2_has_a_swiglu(mlp, heads):
    config = replace(WIDE, width=1536, heads=heads, mlp=mlp, mlp_ratio=1 / 16)
    found = recognise_vit(VisionTransformer(config).state_dict(), Hints())
    assert found.config.heads == heads
    assert sum("override: --heads" in note for note in found.notes) == 1


def test_norms_of_query_and_key_tell_the_heads():
    found = recognise_vit(state_of(replace(SMALL, qk_norm=True)), Hints(image_size=(32, 48)))
    assert found.config.heads == 4


@pytest.mark.parametrize("kind", ["sincos_2d", "sinusoidal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_table_that_follows_a_formula_is_recognised(kind, dtype):
    table = VisionTransformer(replace(WIDE, positions=kind)).pos_embed.data.to(dtype)
    assert recognise_vit(state_of(WIDE, pos_embed=table), Hints()).config.positions == kind


@pytest.mark.parametrize("bias", [torch.zeros(5), None], ids=["zero bias", "no bias"])
def test_clips_head_without_bias_is_a_projection(bias):
    config = replace(WIDE, stem_norm=True)
    found = recognise_vit(state_of(config, head__bias=bias), Hints())
    assert found.config.head == "projection"
    assert "the head has no bias: treated as a projection to 5 dimensions, not classes" in found.notes
    VisionTransformer(found.config).load_state_dict(found.state, strict=True)


def test_a_classifier_over_class_token_and_average_is_told_by_its_width():
    config = replace(WIDE, pooling="class_average")
    assert recognise_vit(state_of(config), Hints()).config.pooling == "class_average"


def test_a_fine_tuned_mae_is_pooled_by_the_average_and_that_is_said():
    config = replace(WIDE, pooling="average", final_norm="after_pooling")
    found = recognise_vit(state_of(config), Hints())
    assert (found.config.pooling, found.config.final_norm) == ("average", "after_pooling")
    assert "assuming average pooling of the patches, as in models with fc_norm" in found.notes


def test_tensors_of_training_are_left_out_and_that_is_said():
    extra = {"mask_token": torch.zeros(1, 1, 8), "decoder_embed__weight": torch.zeros(8, 192)}
    found = recognise_vit(state_of(replace(WIDE, num_classes=0), **extra), Hints())
    VisionTransformer(found.config).load_state_dict(found.state, strict=True)
    assert found.notes[0].startswith("left out, used in training only: ")
    assert "mask_token" in found.notes[0]
    assert "decoder_embed" in found.notes[0]


def test_a_tensor_that_no_vit_has_is_left_for_the_strict_load_to_name():
    found = recognise_vit(state_of(WIDE, extra__weight=torch.zeros(1)), Hints())
    assert "extra.weight" in found.state


def test_a_distilled_model_is_a_deit_and_no_vit():
    config = DeiTConfig((32, 32), 16, 3, width=192, depth=1, heads=3, num_classes=5)
    state = state_of(config)
    assert recognise_vit(state, Hints()) is None
    found = recognise_deit(state, Hints())
    assert (found.family, found.config) == ("deit", config)
    DistilledVisionTransformer(found.config).load_state_dict(found.state, strict=True)
    assert recognise_deit(state_of(WIDE), Hints()) is None
    named = recognise_deit(state, Hints(config={"architecture": "deit_tiny_distilled_patch16_224"}))
    assert (named.config, parse_deit("deit_tiny_distilled_patch16_224").heads) == (config, 3)


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_original_dinov2_is_translated_as_timm_translates_it(registers, swiglu, chunked):
    reference("timm")
    from timm.models.vision_transformer import _convert_dinov2

    config = replace(
        WIDE, num_classes=0, layer_scale=True, registers=registers, mlp="swiglu_packed" if swiglu else "mlp"
    )
    renamed = {"reg_token": "register_tokens", "blocks.0.mlp.fc1.": "blocks.0.mlp.w12.", "mlp.fc2.": "mlp.w3."}
    original = {}
    for key, tensor in state_of(config, mask_token=torch.zeros(1, 192)).items():
        for new, old in renamed.items():
            key = key.replace(new, old) if swiglu or "mlp" not in new else key
        original[key] = tensor
    if registers:
        original["pos_embed"] = original["pos_embed"][:, registers:]  # the release has rows for class token and patches
    expected = _convert_dinov2(dict(original), None)
    if chunked:  # as it is while it trains; the second number counts through all chunks
        original = {key.replace("blocks.", "blocks.0."): tensor for key, tensor in original.items()}
    found = recognise_vit(original, Hints())
    assert (found.style, found.config.position_resampling) == ("original", "antialias" if registers else "offset")
    assert found.state.keys() == expected.keys()
    assert all(torch.equal(found.state[key], expected[key].reshape(found.state[key].shape)) for key in expected)
    assert (found.config.registers, found.config.prefix_positions) == (registers, registers == 0)
    assert ("the tokens before the patches have no positions" in found.notes) is (registers > 0)
    VisionTransformer(found.config).load_state_dict(found.state, strict=True)


@pytest.mark.parametrize(("kind", "recognise"), [("ViT", recognise_vit), ("DeiT", recognise_deit)])
def test_the_family_reads_other_libraries_keys_too(kind, recognise):
    transformers = reference("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes, image_size=32, patch_size=8)
    name = "DeiTForImageClassificationWithTeacher" if kind == "DeiT" else "ViTForImageClassification"
    state = getattr(transformers, name)(config).state_dict()
    found = recognise(state, Hints(heads=4))
    assert (found.family, found.style) == (kind.lower(), "transformers")
    assert (recognise_vit if kind == "DeiT" else recognise_deit)(state, Hints(heads=4)) is None


# --- image size and heads ---------------------------------------------------------------------------------------------


def test_a_square_image_is_told_by_the_number_of_positions():
    assert recognise_vit(state_of(WIDE), Hints()).config.image_size == (32, 32)
    # A flag that asks for another size is not about the checkpoint.
    assert recognise_vit(state_of(WIDE), Hints(image_size=(224, 224))).config.image_size == (32, 32)


def test_an_image_that_the_patches_do_not_cover_is_told_by_the_hint():
    found = recognise_vit(state_of(WIDE), Hints(image_size=(35, 40)))
    assert (found.config.image_size, found.config.drop_remainder) == ((35, 40), True)
    assert any("leave out its last rows or columns" in note for note in found.notes)


def test_an_image_size_of_the_config_file_is_used_where_it_fits():
    state = state_of(SMALL)
    hints = Hints(heads=4, config={"pretrained_cfg": {"input_size": [3, 32, 48]}})
    assert recognise_vit(state, hints).config.image_size == (32, 48)


def test_positions_that_make_no_square_need_the_image_size():
    with pytest.raises(CheckpointError) as caught:
        recognise_vit(state_of(replace(SMALL, image_size=(16, 24))), Hints(heads=4))
    assert "6 positions do not match a square image" in caught.value.message
    assert "--image-size" in caught.value.fix


def test_an_unpublished_width_needs_the_heads():
    with pytest.raises(CheckpointError) as caught:
        recognise_vit(state_of(SMALL), Hints(image_size=(32, 48)))
    assert "--heads" in caught.value.fix


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_embed": None}, "position table is missing"),
        ({"norm__weight": None, "norm__bias": None}, "the final norm is missing"),
        ({"patch_embed__proj__weight": torch.zeros(192, 3, 16, 8)}, "the patches are not square"),
        ({"pos_embed": torch.zeros(5)}, "not its shapes"),
        ({"head__weight": torch.zeros(5)}, "not its shapes"),
        ({"cls_token": None}, "5 positions do not match a square"),
        ({"blocks__0__mlp__fc1__weight": None}, "not its shapes"),
        ({"blocks__999999999__norm1__weight": torch.zeros(192)}, "blocks are missing"),
        ({"blocks__0__attn__q_norm__weight": torch.zeros(65)}, "norms of 65, width 192"),
        ({"reg_token": torch.zeros(1, 0, 192)}, "not its shapes"),
    ],
)
def test_a_state_dict_that_is_not_whole_is_refused(changes, message):
    with pytest.raises(CheckpointError) as caught:
        recognise_vit(state_of(WIDE, **changes), Hints())
    assert message in str(caught.value)


def test_heads_that_contradict_the_norms_of_query_and_key_are_refused():
    with pytest.raises(CheckpointError) as caught:
        recognise_vit(state_of(replace(SMALL, qk_norm=True)), Hints(heads=8, image_size=(32, 48)))
    assert caught.value.found == "norms of 8, width 32, --heads 8"


@pytest.mark.parametrize(
    "changes",
    [
        {"patch_embed__proj__weight": None},
        {"patch_embed__proj__weight": torch.zeros(192, 768)},
        {"blocks__0__attn__qkv__weight": None},
        {"blocks__0__gamma_1": torch.zeros(192)},
        {"blocks__0__attn__relative_position_bias_table": torch.zeros(9, 3)},
        {"blocks__0__attn__norm__weight": torch.zeros(192)},
    ],
)
def test_other_architectures_with_similar_keys_are_not_ours(changes):
    assert recognise_vit(state_of(WIDE, **changes), Hints()) is None


@pytest.mark.parametrize(
    "config",
    [
        {"architecture": "vit_small_patch16_rope_ape_224"},
        {"architecture": "vit_tiny_patch16_225"},
        {"model_args": {"block_fn": "ParallelThingsBlock"}},
        {"global_pool": "avgmax"},
    ],
)
def test_a_config_file_that_names_another_function_of_timms_is_not_ours(config):
    assert recognise_vit(state_of(WIDE), Hints()) is not None
    assert recognise_vit(state_of(WIDE), Hints(config=config)) is None


@pytest.mark.parametrize("name", ["vit_small_patch16_rope_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_rotary_and_relative_models_of_timm_are_not_ours(name):
    timm = reference("timm")
    with torch.device("meta"):
        state = timm.create_model(name, depth=1).state_dict()
    assert recognise_vit(state, Hints()) is None

"""transformers' own modules against ours with the mapped weights, from module keys and from saved files."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file

from tests.models.keys.proof import answer, difference, loaded, randomise
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.vit import ViTConfig
from vitdeploy.models.family import Hints
from vitdeploy.models.keys.vit_transformers import recognise

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-3,
}
LABELS = {"num_labels": 5}
DECODER = {"decoder_num_hidden_layers": 1, "decoder_hidden_size": 16, "decoder_num_attention_heads": 2}
DECODER |= {"decoder_intermediate_size": 16}
DINO = {"mlp_ratio": 2}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "intermediate_size": 32}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def vision(transformers, name, **extra):
    return getattr(transformers, f"{name}Config")(**{**SHAPE, **extra})


def both(transformers, name, **extra):
    return getattr(transformers, f"{name}Config")(vision_config=SHAPE, text_config=TEXT, **extra)


def logits(output):
    return output.logits, None


def cls_of_last(output):
    return output.last_hidden_state[:, 0], output.last_hidden_state


def pooler(output):
    return output.pooler_output, None


# model class, its config, what it gives, options of the call
CASES = {
    "ViTModel": (lambda t: vision(t, "ViT"), cls_of_last),
    "ViTForImageClassification": (lambda t: vision(t, "ViT", hidden_act="gelu_new", **LABELS), logits),
    "ViTForImageClassification, no biases of query, key and value": (
        lambda t: vision(t, "ViT", qkv_bias=False, num_channels=1, **LABELS),
        logits,
    ),
    "ViTForImageClassification, 32x48": (lambda t: vision(t, "ViT", image_size=[32, 48], **LABELS), logits),
    "ViTForMaskedImageModeling": (lambda t: vision(t, "ViT"), None),
    "ViTMAEModel": (lambda t: vision(t, "ViTMAE", mask_ratio=0.0, **DECODER), cls_of_last),
    "ViTMAEForPreTraining": (lambda t: vision(t, "ViTMAE", mask_ratio=0.0, **DECODER), None),
    "DeiTModel": (lambda t: vision(t, "DeiT"), cls_of_last),
    "DeiTForImageClassification": (lambda t: vision(t, "DeiT", **LABELS), logits),
    "DeiTForImageClassificationWithTeacher": (lambda t: vision(t, "DeiT", **LABELS), logits),
    "Dinov2Model": (lambda t: vision(t, "Dinov2", **DINO), cls_of_last),
    "Dinov2Model, SwiGLU": (lambda t: vision(t, "Dinov2", use_swiglu_ffn=True, **DINO), cls_of_last),
    "Dinov2ForImageClassification": (lambda t: vision(t, "Dinov2", **DINO, **LABELS), logits),
    "Dinov2WithRegistersModel": (lambda t: vision(t, "Dinov2WithRegisters", **DINO), cls_of_last),
    "Dinov2WithRegistersForImageClassification, SwiGLU": (
        lambda t: vision(t, "Dinov2WithRegisters", use_swiglu_ffn=True, num_register_tokens=3, **DINO, **LABELS),
        logits,
    ),
    "CLIPVisionModel": (lambda t: vision(t, "CLIPVision"), pooler),
    "CLIPVisionModelWithProjection": (
        lambda t: vision(t, "CLIPVision", projection_dim=20, hidden_act="gelu"),
        lambda output: (output.image_embeds, None),
    ),
    "CLIPModel": (lambda t: both(t, "CLIP", projection_dim=20), "get_image_features"),
    "CLIPForImageClassification": (lambda t: both(t, "CLIP", **LABELS), logits),
    "SiglipVisionModel": (
        lambda t: vision(t, "SiglipVision"),
        lambda output: (output.pooler_output, output.last_hidden_state),
    ),
    "SiglipModel": (lambda t: both(t, "Siglip"), "get_image_features"),
    "SiglipForImageClassification": (lambda t: both(t, "Siglip", **LABELS), logits),
}


# The beginning of a class's name tells its row in the table of parities: the first that fits.
FAMILIES = {
    "ViTMAE": "MAE",
    "ViT": "ViT",
    "DeiT": "DeiT",
    "Dinov2WithRegisters": "DINOv2 with registers",
    "Dinov2": "DINOv2",
    "CLIP": "CLIP image encoder",
    "Siglip": "SigLIP image encoder",
}


def build(case):
    transformers = reference("transformers")
    config, result = CASES[case]
    model = getattr(transformers, case.split(",")[0])(config(transformers))
    return randomise(model), result


@torch.no_grad()
def expected(model, result, image):
    if result == "get_image_features":
        features = model.get_image_features(image)
        return getattr(features, "pooler_output", features), None
    if result is None:  # the encoder inside a model for pre-training
        model, result = model.vit, cls_of_last
    patches = (image.shape[-2] // 8) * (image.shape[-1] // 8)
    # An MAE shuffles its patches by sorted noise: increasing noise leaves them in place.
    noise = {"noise": torch.arange(patches).repeat(len(image), 1)} if "MAE" in type(model).__name__ else {}
    return result(model(image, **noise))


def saved(model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("keys", ["module", "file"])
@pytest.mark.parametrize("case", CASES)
def test_mapped_weights_compute_what_the_model_computes(case, keys, tmp_path, parity):
    model, result = build(case)
    config = model.config.to_dict()
    state = model.state_dict() if keys == "module" else saved(model, tmp_path)
    recognised = recognise(state, Hints(config=config))
    sizes = config.get("vision_config", config)
    image = torch.randn(2, sizes["num_channels"], *recognised.config.image_size, dtype=torch.float64)
    theirs, their_tokens = expected(model, result, image)
    ours, our_tokens = answer(loaded(recognised), image)
    if their_tokens is not None:
        ours, theirs = [ours, our_tokens], [theirs, their_tokens]
    family = next(family for beginning, family in FAMILIES.items() if case.startswith(beginning))
    parity(family, "transformers", ours, theirs, keys=recognised.style)


# Names in files on the hub, written before transformers 5, that no module of it has any more.
OLD_FILES = {
    "CLIPVisionModel": lambda key: f"vision_model.{key}",
    "SiglipVisionModel": lambda key: f"vision_model.{key}",
    "DeiTModel": lambda key: f"deit.{key}",
    "Dinov2Model": lambda key: f"dinov2.{key}",
}


@pytest.mark.parametrize("case", OLD_FILES)
def test_a_prefix_of_the_base_model_changes_nothing(case):
    model, _ = build(case)
    hints = Hints(config=model.config.to_dict())
    plain = recognise(model.state_dict(), hints)
    state = {OLD_FILES[case](key): tensor for key, tensor in model.state_dict().items()}
    state["vision_model.embeddings.position_ids" if "vision" in case.lower() else "logit_scale"] = torch.arange(17)
    prefixed = recognise(state, hints)
    assert prefixed.config == plain.config
    assert all(torch.equal(prefixed.state[key], tensor) for key, tensor in plain.state.items())


@pytest.fixture(scope="module")
def vit():
    """State dict and config of a ViT classifier of width 192, which published models have with 3 heads."""
    transformers = reference("transformers")
    config = transformers.ViTConfig(
        **{**SHAPE, "hidden_size": 192, "num_attention_heads": 6, "num_hidden_layers": 1}, **LABELS
    )
    return transformers.ViTForImageClassification(config).state_dict(), config.to_dict()


def test_the_config_of_the_folder_says_what_the_tensors_cannot(vit):
    state, config = vit
    assert recognise(state, Hints(config=config)).config == ViTConfig(
        image_size=(32, 32),
        patch_size=8,
        width=192,
        depth=1,
        heads=6,
        mlp_ratio=0.25,
        num_classes=5,
        layer_norm_eps=1e-3,
        position_resampling="plain",  # transformers resizes the positions of its ViT so
    )


def test_without_a_config_defaults_are_named_in_notes(vit):
    found = recognise(vit[0], Hints())
    assert (found.config.heads, found.config.layer_norm_eps, found.config.activation) == (3, 1e-12, "gelu")
    assert found.notes == (
        "no transformers config.json: assuming activation gelu and epsilon 1e-12, vit's defaults",
        "assuming 3 heads, as in published models of width 192 (override: --heads)",
    )


def test_a_flag_is_stronger_than_the_config(vit):
    state, config = vit
    assert recognise(state, Hints(heads=2, config=config)).config.heads == 2


def test_notes_name_what_is_left_out():
    notes = {
        case: recognise(model.state_dict(), Hints(config=model.config.to_dict())).notes
        for case, model in ((case, build(case)[0]) for case in ("ViTModel", "ViTMAEForPreTraining", "CLIPModel"))
    }
    assert notes["ViTModel"] == ("left out, not part of the image encoder: pooler.dense (2 tensors)",)
    assert notes["ViTMAEForPreTraining"][0].startswith("left out, not part of the image encoder: decoder.")
    assert "text_model.*" in notes["CLIPModel"][0]


def test_a_bias_that_only_the_query_has_is_zero_for_key_and_value(vit):
    state, config = vit
    state = {key: t + 1 for key, t in state.items() if not key.endswith(("k_proj.bias", "v_proj.bias"))}
    found = recognise(state, Hints(config=config))
    bias = found.state["blocks.0.attn.qkv.bias"]
    assert bias[:192].eq(1).all() and bias[192:].eq(0).all()
    assert found.notes == ("2 biases of query, key or value are not in the file: using zero",)


def test_an_image_that_the_patches_do_not_divide_keeps_its_size():
    transformers = reference("transformers")
    model = randomise(transformers.SiglipVisionModel(vision(transformers, "SiglipVision", image_size=36)))
    found = recognise(model.state_dict(), Hints(config=model.config.to_dict()))
    image = torch.randn(1, 3, 36, 36, dtype=torch.float64)
    assert found.config.image_size == (36, 36)
    assert found.notes == ("image size 36x36: patches of 8 leave out its last rows or columns",)
    with torch.no_grad():
        assert difference(answer(loaded(found), image)[0], model(image).pooler_output) <= 1e-10


def test_a_siglip_without_pooling_head_gives_the_mean_and_says_so():
    transformers = reference("transformers")
    model = transformers.SiglipVisionModel(vision(transformers, "SiglipVision", vision_use_head=False))
    found = recognise(model.state_dict(), Hints(config=model.config.to_dict()))
    assert found.config.pooling == "average"
    assert found.notes == ("no attention pooling in the file: features are the mean of the patch tokens",)


def without(state, ending):
    return {key: tensor for key, tensor in state.items() if not key.endswith(ending)}


def replaced(state, ending, tensor):
    return {key: tensor if key.endswith(ending) else old for key, old in state.items()}


FAULTS = {
    "a tensor of another class": (
        lambda s: s | {"vit.encoder.mid_position_embeddings": torch.zeros(1)},
        {},
        "1 unknown: vit.encoder.mid_position_embeddings",
    ),
    "two generations of names at once": (
        lambda s: s | {"vit.encoder.layer.0.layernorm_before.bias": torch.zeros(192)},
        {},
        "1 unknown: vit.encoder.layer.0.layernorm_before.bias",
    ),
    "a truncated file": (lambda s: without(s, "fc1.weight"), {}, "1 missing: blocks.0.mlp.fc1.weight"),
    "other axes": (lambda s: replaced(s, "q_proj.weight", torch.zeros(9)), {}, "blocks.0.attn.q.weight [9]"),
    "other rows": (lambda s: replaced(s, "cls_token", torch.zeros(1, 1, 5)), {}, "cls_token [1, 1, 5]"),
    "query unlike key": (
        lambda s: replaced(s, "q_proj.weight", torch.zeros(96, 192)),
        {},
        "[96, 192], [192, 192], [192, 192]",
    ),
    "patches not square": (lambda s: replaced(s, "projection.weight", torch.zeros(192, 3, 8, 4)), {}, "8x4"),
    "patches of nothing": (
        lambda s: replaced(s, "projection.weight", torch.zeros(192, 3, 0, 0)),
        {},
        "patch_embed.proj.weight [192, 3, 0, 0]",
    ),
    "positions of no square": (
        lambda s: replaced(s, "position_embeddings", torch.zeros(1, 7, 192)),
        {},
        "one of 8x48, 16x24, 24x16, 48x8",
    ),
    "no positions but the class token's": (
        lambda s: replaced(s, "position_embeddings", torch.zeros(1, 1, 192)),
        {},
        "at least one patch",
    ),
    "heads that do not divide": (lambda s: s, {"num_attention_heads": 7}, "7 heads, width 192"),
    "heads that are no number": (lambda s: s, {"num_attention_heads": "6"}, "num_attention_heads '6'"),
    "an activation of another world": (lambda s: s, {"hidden_act": "mish"}, "hidden_act 'mish'"),
    "a config of another model": (lambda s: s, {"model_type": "clip"}, "model_type clip, tensors of vit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named(fault, vit):
    change, changed, message = FAULTS[fault]
    state, config = vit
    with pytest.raises(CheckpointError) as raised:
        recognise(change(state), Hints(config={**config, **changed}))
    assert message in str(raised.value)


def test_an_unpublished_width_needs_the_flag():
    state = build("ViTModel")[0].state_dict()
    with pytest.raises(CheckpointError, match="--heads N, a divisor of 32"):
        recognise(state, Hints())
    assert recognise(state, Hints(heads=4)).config.heads == 4


def test_an_oblong_image_needs_the_flag_or_the_config():
    state = build("ViTForImageClassification, 32x48")[0].state_dict()
    with pytest.raises(CheckpointError, match="--image-size HEIGHTxWIDTH"):
        recognise(state, Hints(heads=4))
    assert recognise(state, Hints(heads=4, image_size=(32, 48))).config.image_size == (32, 48)


def test_a_size_flag_that_does_not_fit_is_left_to_resizing(vit):
    state, config = vit
    assert recognise(state, Hints(image_size=(64, 64), config=config)).config.image_size == (32, 32)


def test_other_state_dicts_are_not_recognised(vit):
    state, config = vit
    transformers = reference("transformers")
    swin = transformers.SwinModel(transformers.SwinConfig(image_size=32, embed_dim=8, depths=[1], num_heads=[1]))
    assert recognise(swin.state_dict(), Hints()) is None
    assert recognise({"patch_embed.proj.weight": torch.zeros(8, 3, 4, 4)}, Hints()) is None
    assert recognise(state, Hints(config={**config, "model_type": "yolos"})) is None

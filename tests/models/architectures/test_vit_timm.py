"""Every variant of the ViT against timm's class, in float64, and the terms that timm lacks against other writings."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models.vit_samples import SMALL, TIMM_FAMILIES, TIMM_VARIANTS, difference, images, randomised, timm_vit
from tests.parity import family_of
from tests.references import reference
from vitdeploy.models.architectures.vit import EncoderBlock, VisionTransformer, ViTConfig
from vitdeploy.models.keys.vit import parse_vit

TOLERANCE = 1e-10


def loaded(config: ViTConfig, state: dict[str, torch.Tensor]) -> VisionTransformer:
    model = VisionTransformer(config).double().eval()
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("variant", TIMM_VARIANTS)
def test_logits_and_keys_are_those_of_timm(variant, parity):
    config = TIMM_VARIANTS[variant]
    theirs = randomised(timm_vit(config))
    ours = loaded(config, theirs.state_dict())
    image = images(config)
    with torch.no_grad():
        result, expected = ours(image), theirs(image)
        if config.num_classes == 0:
            expected = expected, theirs.forward_features(image)[:, config.prefix :]
    parity(TIMM_FAMILIES.get(variant, "ViT"), "timm", result, expected)
    assert set(ours.state_dict()) == set(theirs.state_dict())


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_base_patch16_224.mae",
        "vit_base_patch32_clip_quickgelu_224",
        "vit_large_patch16_siglip_512",
        "vit_so400m_patch14_siglip_384",
        "vit_small_patch14_reg4_dinov2",
        "vit_giant_patch14_dinov2",
        "deit3_medium_patch16_224",
    ],
)
def test_a_built_in_name_is_timms_model_of_that_name(name, parity):
    """One narrow block on a small image: everything else is as the name says."""
    config = parse_vit(name)
    side = 4 * config.patch_size + 6 * config.drop_remainder
    config = replace(config, image_size=(side, side), width=72, heads=6, depth=1)
    theirs = randomised(
        reference("timm").create_model(
            name.removesuffix(".mae"),
            img_size=config.image_size,
            embed_dim=72,
            num_heads=6,
            depth=1,
            num_classes=config.num_classes,
        )
    )
    state = theirs.state_dict()
    if config.head == "projection":
        state["head.bias"].zero_()
        state = {key: tensor for key, tensor in state.items() if key != "head.bias"}
    ours = loaded(config, state)
    image = images(config)
    with torch.no_grad():
        result = ours(image)
        parity(family_of(name), "timm", result if config.num_classes else result[0], theirs(image), keys="timm")


def test_a_post_norm_block_is_that_of_pytorch():
    """torch.nn.TransformerEncoderLayer is arXiv 1706.03762's layer: LN(x + f(x)), ReLU."""
    config = replace(SMALL, post_norm=True, final_norm="none", activation="relu", layer_norm_eps=1e-5)
    block = randomised(EncoderBlock(config))
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, activation="relu", batch_first=True).double().eval()
    names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.proj."}
    names |= {f"linear{i}.": f"mlp.fc{i}." for i in (1, 2)} | {f"norm{i}.": f"norm{i}." for i in (1, 2)}
    state = block.state_dict()
    layer.load_state_dict(
        {f"{theirs}{kind}": state[f"{ours}{kind}"] for theirs, ours in names.items() for kind in ("weight", "bias")}
    )
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert difference(block(x), layer(x)) <= TOLERANCE


def test_class_token_and_average_stand_side_by_side():
    """DINOv2's classifier reads [class token; mean of the patch tokens] after the final norm."""
    features = replace(SMALL, num_classes=0, registers=2, prefix_positions=False)
    theirs = randomised(timm_vit(features))
    both = replace(features, pooling="class_average", num_classes=5)
    head = {"head.weight": torch.randn(5, 64, dtype=torch.float64), "head.bias": torch.randn(5, dtype=torch.float64)}
    ours = loaded(both, {**theirs.state_dict(), **head})
    image = images(features)
    with torch.no_grad():
        tokens = theirs.forward_features(image)
        expected = F.linear(torch.cat([tokens[:, 0], tokens[:, 3:].mean(dim=1)], dim=1), *head.values())
        assert difference(ours(image), expected) <= TOLERANCE


def test_the_mlp_head_is_a_tanh_layer_before_the_linear():
    config = replace(SMALL, pre_logits=24)
    ours = randomised(VisionTransformer(config))
    state = ours.state_dict()
    theirs = timm_vit(replace(SMALL, num_classes=0)).double().eval()
    theirs.load_state_dict({key: state[key] for key in theirs.state_dict()})
    image = images(config)
    with torch.no_grad():
        hidden = torch.tanh(theirs(image) @ state["pre_logits.fc.weight"].T + state["pre_logits.fc.bias"])
        expected = hidden @ state["head.weight"].T + state["head.bias"]
        assert difference(ours(image), expected) <= TOLERANCE


def test_a_projection_has_no_bias():
    config = replace(SMALL, head="projection", num_classes=16)
    ours = randomised(VisionTransformer(config))
    state = ours.state_dict()
    assert "head.bias" not in state
    theirs = timm_vit(replace(SMALL, num_classes=0)).double().eval()
    theirs.load_state_dict({key: state[key] for key in theirs.state_dict()})
    image = images(config)
    with torch.no_grad():
        assert difference(ours(image), theirs(image) @ state["head.weight"].T) <= TOLERANCE


@pytest.mark.parametrize("positions", ["sinusoidal", "sincos_2d"])
def test_a_fixed_table_is_added_like_a_learned_one_and_kept_by_the_initialisation(positions):
    fixed = VisionTransformer(replace(SMALL, positions=positions))
    learned = VisionTransformer(SMALL)
    learned.load_state_dict(fixed.state_dict(), strict=True)
    assert not fixed.pos_embed.requires_grad
    assert float(fixed.pos_embed.abs().max()) == 1.0
    image = images(SMALL, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(fixed(image), learned(image), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image_size": (32, 44)}, "32x44 is not divisible by the patch size 8"),
        ({"image_size": (4, 44), "drop_remainder": True}, "4x44 is smaller than the patch size 8"),
        ({"heads": 3}, "width 32 is not divisible by 3 heads"),
        ({"depth": 0}, "sizes of 0: depth"),
        ({"mlp_ratio": 0.01}, "sizes of 0: MLP"),
        ({"num_classes": -1, "registers": -2}, "negative: classes, registers"),
        ({"width": 34, "heads": 2, "positions": "sincos_2d"}, "a width divisible by 4, not 34"),
        ({"width": 33, "heads": 3, "positions": "sinusoidal"}, "an even width, not 33"),
        ({"mlp": "swiglu_packed", "mlp_ratio": 33 / 32}, "33 rows of a SwiGLU cannot be split"),
        ({"class_token": False}, "pooling 'class' needs a class token"),
        ({"head": "projection", "num_classes": 0}, "a projection needs num_classes"),
    ],
)
def test_sizes_that_make_no_model_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        replace(SMALL, **change)


def test_a_ratio_that_was_measured_gives_the_rows_that_it_was_measured_on():
    """98 * (h / 98) is below h for some h in floating point."""
    rows = range(1, 400)
    assert any(int(98 * (h / 98)) != h for h in rows)
    assert [replace(SMALL, width=98, heads=2, mlp_ratio=h / 98).hidden for h in rows] == list(rows)

"""Names of architectures: what they spell out, and what is refused."""

import pytest
import torch

from vitdeploy.errors import UnknownModelError
from vitdeploy.models.catalog import COMMON_NAMES, adapt_to_checkpoint, config_for
from vitdeploy.models.source import default_preprocess, load_original
from vitdeploy.models.vit import ViTConfig
from vitdeploy.spec import PreprocessSpec


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("vit_tiny_patch16_224", ViTConfig((224, 224), 16, width=192, depth=12, heads=3)),
        ("vit_small_patch32_384", ViTConfig((384, 384), 32, width=384, depth=12, heads=6)),
        ("vit_base_patch16_224", ViTConfig((224, 224), 16, width=768, depth=12, heads=12)),
        ("vit_large_patch16_224", ViTConfig((224, 224), 16, width=1024, depth=24, heads=16)),
        ("vit_huge_patch14_224", ViTConfig((224, 224), 14, width=1280, depth=32, heads=16)),
        ("vit_w192d4h3_patch4_32", ViTConfig((32, 32), 4, width=192, depth=4, heads=3)),
        ("vit_w32d2h2_patch8_32x48", ViTConfig((32, 48), 8, width=32, depth=2, heads=2)),
    ],
)
def test_a_name_spells_out_the_whole_configuration(name, config):
    assert config_for(name) == config


def test_every_suggested_name_exists():
    assert {config_for(name).patch_size for name in COMMON_NAMES} == {14, 16, 32}


@pytest.mark.parametrize(
    "name", ["vit_tiny", "vit_micro_patch16_224", "resnet50", "", "vit_tiny_patch16_224 ", "VIT_TINY_PATCH16_224"]
)
def test_an_unknown_name_is_refused(name):
    with pytest.raises(UnknownModelError) as caught:
        config_for(name)
    assert caught.value.exit_code == 2
    assert repr(name) in caught.value.message


def test_a_misspelt_name_is_answered_with_its_neighbours():
    with pytest.raises(UnknownModelError) as caught:
        config_for("vit_tinny_patch16_224")
    assert caught.value.fix.startswith("did you mean vit_tiny_patch16_224")


def test_a_name_like_no_other_is_answered_with_an_example():
    with pytest.raises(UnknownModelError) as caught:
        config_for("xyz")
    assert caught.value.fix == "for example vit_base_patch16_224"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_tiny_patch16_225", "225x225 is not divisible by the patch size 16"),
        ("vit_tiny_patch16_224x100", "224x100 is not divisible by the patch size 16"),
        ("vit_w32d2h3_patch8_32", "width 32 is not divisible by 3 heads"),
        ("vit_w32d2h0_patch8_32", "heads"),
        ("vit_w32d0h2_patch8_32", "depth"),
        ("vit_w0d2h2_patch8_32", "width"),
        ("vit_tiny_patch0_224", "patch"),
        ("vit_tiny_patch16_0", "image"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(name, reason):
    with pytest.raises(UnknownModelError) as caught:
        config_for(name)
    assert reason in caught.value.found


def test_the_checkpoint_says_the_number_of_classes_and_channels():
    state = {"head.weight": torch.zeros(10, 192), "patch_embed.proj.weight": torch.zeros(192, 1, 16, 16)}
    adapted = adapt_to_checkpoint(config_for("vit_tiny_patch16_224"), state)
    assert (adapted.num_classes, adapted.in_channels) == (10, 1)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"head.weight": torch.zeros(10), "patch_embed.proj.weight": torch.zeros(192, 1)},
        {"head.weight": torch.zeros(0, 192), "patch_embed.proj.weight": torch.zeros(192, 0, 16, 16)},
    ],
    ids=["absent", "misshapen", "empty"],
)
def test_a_checkpoint_that_does_not_say_them_leaves_the_configuration_alone(state):
    config = config_for("vit_tiny_patch16_224")
    assert adapt_to_checkpoint(config, state) == config


def test_without_a_checkpoint_the_weights_are_the_same_noise_every_time():
    first, second = (load_original("vit_w32d1h2_patch8_32", None).module.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["head.weight"].any()


def test_default_preprocessing_is_that_of_augreg():
    assert default_preprocess(config_for("vit_tiny_patch16_224")) == PreprocessSpec(
        248, (224, 224), "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    )

"""Names of architectures: what they spell out, what is listed, and what is refused."""

import pytest
import torch

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models import catalog
from vitdeploy.models.architectures.vit import ViTConfig
from vitdeploy.models.catalog import entries, find, find_or_raise, recognise, unrecognised
from vitdeploy.models.family import Hints

# One small name of every family, with its task.
SMALL = {
    "vit_w32d1h2_patch8_32": ("vit", "classification"),
    "deit_w32d1h2_distilled_patch8_32": ("deit", "classification"),
    "swin_w16d1-1h1-2_patch2_window4_16": ("swin", "classification"),
    "detr_r1-1-1-1c8_w32h2e1d1q5_64": ("detr", "detection"),
    "dfine_n": ("rtdetr", "detection"),
    "rfdetr_nano": ("rfdetr", "detection"),
    "transformer_w16e1d1h2_v11_l24": ("transformer", "sequence"),
}


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
    family, found = find_or_raise(name)
    assert (family.name, found) == ("vit", config)


@pytest.mark.parametrize("name", SMALL)
def test_every_family_is_found_by_its_names(name):
    expected, task = SMALL[name]
    family, config = find_or_raise(name)
    assert (family.name, family.describe(config).task) == (expected, task)


def test_no_family_is_left_out_of_that_test():
    assert [family for family, _ in SMALL.values()] == [family.name for family in catalog.FAMILIES]


def test_every_listed_name_is_found_as_its_own():
    names = [(family.name, name, config) for family in catalog.FAMILIES for name, config in family.names.items()]
    assert len({name for _, name, _ in names}) == len(names) > 80
    for family, name, config in names:
        assert find(name) is not None
        found, spelled = find_or_raise(name)
        assert (found.name, spelled) == (family, config)


@pytest.mark.parametrize(
    "name", ["vit_tiny", "vit_micro_patch16_224", "resnet50", "", "vit_tiny_patch16_224 ", "VIT_TINY_PATCH16_224"]
)
def test_an_unknown_name_is_refused(name):
    assert find(name) is None
    with pytest.raises(UnknownModelError) as caught:
        find_or_raise(name)
    assert caught.value.exit_code == 2
    assert repr(name) in caught.value.message


@pytest.mark.parametrize(
    ("misspelt", "near"),
    [
        ("vit_tinny_patch16_224", "vit_tiny_patch16_224"),
        ("swin_tiny_patch4_window7", "swin_tiny_patch4_window7_224"),
        ("detr_resnet_50", "detr_resnet50"),
    ],
)
def test_a_misspelt_name_is_answered_with_its_neighbours(misspelt, near):
    with pytest.raises(UnknownModelError) as caught:
        find_or_raise(misspelt)
    assert caught.value.fix.startswith(f"did you mean {near}")


def test_a_name_like_no_other_is_answered_with_where_else_to_look():
    with pytest.raises(UnknownModelError) as caught:
        find_or_raise("xyz")
    assert caught.value.fix == "if timm has it: timm:xyz"


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
        ("transformer_w16e1d1h3_v11_l24", "width 16 is not divisible by 3 heads"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(name, reason):
    with pytest.raises(UnknownModelError) as caught:
        find_or_raise(name)
    assert reason in caught.value.found


# --- the list ---------------------------------------------------------------------------------------------------------


def test_the_list_has_parameters_task_and_size_of_every_match():
    [entry] = entries("vit_base_patch16_224")
    assert (entry.family, entry.paper, entry.task) == ("vit", "arXiv 2010.11929", "classification")
    assert (entry.parameters, entry.image_size) == (86_567_656, (224, 224))


def test_the_list_takes_a_pattern_and_no_more():
    names = [entry.name for entry in entries("*_distilled_*")]
    assert names
    assert {entry.family for entry in entries("*_distilled_*")} == {"deit"}
    assert list(entries("VIT_*")) == []  # as file names on Linux: capitals differ


def test_a_model_of_tokens_is_listed_without_an_image_size():
    assert {(entry.task, entry.image_size) for entry in entries("transformer_*")} == {("sequence", (0, 0))}


# --- bare state dicts -------------------------------------------------------------------------------------------------


# DETRs' modules have names that no checkpoint of their own code has: see test_detr_family.py, keys/test_rtdetr.py.
@pytest.mark.parametrize("name", [name for name, (family, _) in SMALL.items() if not family.endswith("detr")])
def test_a_state_dict_is_recognised_as_its_own_family(name):
    family, config = find_or_raise(name)
    state = family.build(config).state_dict()
    found = recognise(state, Hints(heads=2))
    assert found is not None
    assert found.family == family.name
    assert set(found.state) == set(state)


@pytest.mark.parametrize("state", [{}, {"conv1.weight": torch.zeros(8, 3, 3, 3)}, {"head.weight": torch.zeros(2, 2)}])
def test_a_state_dict_of_nobody_is_nobodys(state):
    assert recognise(state, Hints()) is None


def test_what_is_not_recognised_is_said_with_its_first_keys():
    error = unrecognised({f"layer{i}.weight": torch.zeros(1) for i in range(8)}, "weights.pt")
    assert isinstance(error, CheckpointError)
    assert error.found.startswith("8 tensors: layer0.weight, layer1.weight")
    assert error.found.endswith("layer5.weight ...")
    assert all(family.name in error.expected for family in catalog.FAMILIES)

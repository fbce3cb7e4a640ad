"""Distances to a memory bank, how its entries are chosen, and whose tokens it is of."""

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.references import reference
from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.external.module import from_module
from vitdeploy.models.load import load_model
from vitdeploy.models.memory_bank import (
    AnomalyModel,
    BankDistances,
    MemoryBank,
    features_of,
    k_centres,
    nearest_entries,
    patch_tokens,
    with_memory,
)
from vitdeploy.models.source import Source

DEEP = pytest.mark.skipif("VITDEPLOY_TEST_DEPTH" not in os.environ, reason="slow import; VITDEPLOY_TEST_DEPTH=1")
CLASSIFIER = "vit_w32d2h2_patch8_32"


def bank(entries=20, width=32, window=1, **more):
    generator = np.random.default_rng(0)
    memory = generator.normal(size=(entries, width)).astype(np.float32)
    neighbours = nearest_entries(torch.from_numpy(memory), 9)
    mean = generator.normal(size=width).astype(np.float32)
    found = MemoryBank(memory, mean, neighbours, window, 2.0, 1.5, 200, entries, ("a",))
    return dataclasses.replace(found, **more)


def test_distances_are_those_of_all_pairs():
    """Computed in float64 one by one, as PatchCore's section 3.3 says them."""
    made, patches = bank(), torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0))
    distances, neighbours = BankDistances(made)(patches)
    entries = made.memory.astype(np.float64) + made.mean
    pairs = np.linalg.norm(patches.numpy()[:, :, None].astype(np.float64) - entries, axis=-1)
    np.testing.assert_allclose(distances, pairs.min(axis=2), rtol=1e-5)
    for image, found in zip(pairs, neighbours.numpy(), strict=True):
        patch = image.min(axis=1).argmax()
        nearest = image[patch].argmin()
        between = np.linalg.norm(entries - entries[nearest], axis=1)
        np.testing.assert_allclose(found, image[patch][np.argsort(between)[:9]], rtol=1e-5)
        assert found[0] == found.min() == pytest.approx(image.min(axis=1).max(), rel=1e-5)


def test_what_is_in_the_bank_has_no_distance():
    made = bank()
    found, _ = BankDistances(made)(torch.from_numpy(made.memory + made.mean)[None])
    assert float(found.max()) < 5e-3 * np.linalg.norm(made.memory, axis=1).mean()


def test_a_neighbourhood_is_the_mean_of_the_patches_that_there_are():
    tokens = torch.randn(2, 12, 5)
    grid = tokens.unflatten(1, (3, 4))
    found = features_of(tokens, (3, 4), 3).unflatten(1, (3, 4))
    torch.testing.assert_close(found[:, 1, 1], grid[:, :3, :3].mean(dim=(1, 2)))
    torch.testing.assert_close(found[:, 0, 3], grid[:, :2, 2:].mean(dim=(1, 2)))
    assert features_of(tokens, (3, 4), 1) is tokens


def test_k_centres_are_those_of_algorithm_1():
    points = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    told = []
    found = k_centres(points, 12, 0, told.append)
    chosen = [int(found[0])]
    for _ in range(11):
        chosen.append(int(torch.cdist(points, points[chosen]).min(dim=1).values.argmax()))
    assert found.tolist() == chosen and sum(told) == 12


def test_copies_are_chosen_once_and_wide_points_are_projected():
    points = torch.randn(5, 300).repeat(4, 1)
    found = k_centres(points, 12, 0)
    assert sorted(found % 5) == [0, 1, 2, 3, 4]


def test_the_neighbours_of_an_entry_begin_with_itself():
    points = torch.randn(30, 4)
    found = nearest_entries(points, 9, rows=7)
    assert found[:, 0].tolist() == list(range(30))
    np.testing.assert_array_equal(found, torch.cdist(points, points).argsort(dim=1)[:, :9])
    assert nearest_entries(points[:3], 9).shape == (3, 3)


def tokens_of(original, image=None):
    module, width = patch_tokens(original)
    size = original.signature.image_size
    shape = (2, original.signature.channels, *size)
    image = torch.randn(shape, generator=torch.Generator().manual_seed(2)) if image is None else image
    with torch.no_grad():
        found = module(image)
    assert found.shape == (2, module.grid[0] * module.grid[1], width)
    return image, found, module.grid


def test_a_classifier_and_a_model_of_features_have_the_same_tokens():
    original = load_model(Source(CLASSIFIER))
    image, found, grid = tokens_of(original)
    assert grid == (4, 4)
    torch.testing.assert_close(found, original.module.encode(image)[:, 1:])
    assert tokens_of(load_model(Source("swin_w16d2-2h2-4_patch4_window4_32")))[2] == (4, 4)


class Tokens(nn.Module):
    """Pooled features and tokens of 4x4 pixels, after `before` others."""

    def __init__(self, before=0):
        super().__init__()
        self.before, self.patches = before, nn.Conv2d(3, 8, 4, stride=4)

    def forward(self, image):
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        return tokens.mean(1), torch.cat([tokens[:, : self.before] * 0, tokens], dim=1)


class Mapped(Tokens):
    """As timm's: logits, and features by a method of this name."""

    num_features, num_prefix_tokens = 8, 2

    def forward(self, image):
        return self.patches(image).mean(dim=(2, 3))

    def forward_features(self, image):
        if self.before == 2:
            return Tokens.forward(self, image)[1]
        return self.patches(image) if self.before == 0 else self.patches(image).permute(0, 2, 3, 1)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_tokens_of_other_modules(before):
    """A map with channels first or last, or tokens after two that the module counts."""
    plain, mapped = Tokens(), Mapped(before)
    mapped.load_state_dict(plain.state_dict())
    for size in ((16, 16), (16, 24)):
        image, found, grid = tokens_of(from_module(plain, image_size=size))
        assert grid == (size[0] // 4, size[1] // 4)
        torch.testing.assert_close(tokens_of(from_module(mapped, image_size=size), image)[1:2], (found,))


class Registered(Tokens):
    """As transformers' modules are: its config says how many registers stand before the patches."""

    config = SimpleNamespace(patch_size=4, num_register_tokens=3)

    def forward(self, image):
        return {"last_hidden_state": super().forward(image)[1]}


def test_registers_are_left_out_where_the_config_says_them():
    """The first token is the class token, of which the others are told apart already."""
    module = Registered(before=4)
    image, found, grid = tokens_of(from_module(module, image_size=(16, 24)))
    with torch.no_grad():
        torch.testing.assert_close(found, module(image)["last_hidden_state"][:, 4:])
    assert grid == (4, 6)


@DEEP
def test_registers_of_transformers_are_left_out():
    library = reference("transformers")
    config = library.DINOv3ViTConfig(
        image_size=32, patch_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_register_tokens=4,
    )  # fmt: skip
    model = library.DINOv3ViTModel(config).eval()
    image, found, grid = tokens_of(from_module(model, image_size=(32, 48)), torch.randn(2, 3, 32, 48))
    assert grid == (4, 6)
    with torch.no_grad():
        torch.testing.assert_close(found, model(image).last_hidden_state[:, 5:])


def test_tokens_that_form_no_grid_are_refused():
    with pytest.raises(CheckpointError, match="the tokens of Tokens do not form a grid over its images") as error:
        patch_tokens(from_module(Tokens(before=3), image_size=(16, 16)))
    assert error.value.found == "19 tokens for an image of 16x16"


def test_a_model_without_patch_tokens_is_refused():
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(768, 5))
    with pytest.raises(CheckpointError, match="Sequential has no patch tokens") as error:
        patch_tokens(from_module(classifier, image_size=(16, 16)))
    assert "patch_features [batch, patches, width]" in error.value.expected


def test_a_bank_is_read_as_it_was_written(tmp_path):
    made = bank()
    made.save(tmp_path / "memory.npz")
    found = MemoryBank.load(tmp_path / "memory.npz")
    for field in dataclasses.fields(made):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(made, field.name))
    assert type(found.threshold) is float and found.images == ("a",)


def test_the_model_of_a_bank(tmp_path):
    bank(asked=30).save(tmp_path / "memory.npz")
    original = load_model(Source(CLASSIFIER, task="anomaly", memory=tmp_path / "memory.npz"))
    assert original.signature.task == "anomaly" and isinstance(original.module, AnomalyModel)
    with torch.no_grad():
        found = original.module(torch.zeros(2, 3, 32, 32))
    assert [list(each.shape[1:]) for each in found] == [list(spec.shape[1:]) for spec in original.signature.outputs]
    assert "memory bank: 20 of 200 normal patches, reduced from 30 (" in original.notes[-1]
    assert original.signature.postprocess.threshold == 2.0 and original.labels == ()
    assert any("of a 16:9 one: defects outside it" in note for note in original.notes)
    whole = dataclasses.replace(original.preprocess, resize=original.preprocess.crop, fit="stretch")
    source = Source(CLASSIFIER, task="anomaly", memory=tmp_path / "memory.npz", preprocess=whole)
    assert not any("defects outside it" in note for note in load_model(source).notes)


def test_a_bank_of_another_model_is_refused(tmp_path):
    bank(width=16).save(tmp_path / "memory.npz")
    with pytest.raises(CheckpointError, match="is the memory bank of another model") as error:
        with_memory(load_model(Source(CLASSIFIER)), tmp_path / "memory.npz")
    assert (error.value.found, error.value.expected) == ("features of width 16", f"width 32, as in {CLASSIFIER}")


def test_files_that_are_no_bank_are_refused(tmp_path):
    with pytest.raises(MissingFileError, match="no memory bank at"):
        MemoryBank.load(tmp_path / "memory.npz")
    np.savez(tmp_path / "memory.npz", memory=np.zeros(3))
    with pytest.raises(CheckpointError, match="is not a memory bank"):
        MemoryBank.load(tmp_path / "memory.npz")


def test_without_normal_images_nothing_is_known():
    with pytest.raises(CheckpointError, match="needs normal reference images") as error:
        load_model(Source(CLASSIFIER, task="anomaly"))
    assert error.value.fix == "--normal DIR (in a recipe: source.normal)"

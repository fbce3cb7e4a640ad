"""A model family of another package, whole: one module and one entry point, no file of ours.

toy_family.py                                  the family: config, module, names, reader of keys, FAMILY
toy_mixer-1.0.dist-info/entry_points.txt       [vitdeploy.families] toymixer = toy_family:FAMILY
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

from tests.extending.installed import install
from vitdeploy.errors import CheckpointError, HostError, UnknownModelError
from vitdeploy.extensions import entry_points_of
from vitdeploy.models import catalog
from vitdeploy.models.load import load_model
from vitdeploy.models.names import check_name
from vitdeploy.models.source import Source
from vitdeploy.stages.reference_model import find_reference_model

ROOT = Path(__file__).parents[2]
# All that a family consists of.
FILES = (Path(__file__).with_name("toy_family.py"),)
ENTRY_POINTS = {"vitdeploy.families": {"toymixer": "toy_family:FAMILY"}}
NAME = "toymixer_w32d2_patch8_64"
OURS = "vit_w32d1h2_patch8_32"


def distribution(folder, package, **rows):
    """What pip leaves of a package with these entry points, beside its modules."""
    install(folder, package, (), {"vitdeploy.families": rows})


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that Python finds packages in."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    entry_points_of.cache_clear()
    yield folder
    entry_points_of.cache_clear()
    for module in [name for name in sys.modules if name.startswith("toy_")]:
        del sys.modules[module]


@pytest.fixture
def toy(site):
    install(site, "toy_mixer", FILES, ENTRY_POINTS)
    return site


def command(site, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "vitdeploy.cli.main", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "VITDEPLOY_STORE": str(cwd / "store")},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_consists_of_one_module_and_one_entry_point(toy):
    files = [str(path.relative_to(toy)) for path in sorted(toy.rglob("*")) if path.is_file()]
    info = "toy_mixer-1.0.dist-info"
    assert files == ["toy_family.py", f"{info}/METADATA", f"{info}/entry_points.txt"]


def test_a_name_of_ours_and_an_early_check_load_nothing_of_it(toy):
    catalog.find_or_raise(OURS)
    load_model(Source(OURS))
    check_name(NAME)
    assert "toy_family" not in sys.modules
    with pytest.raises(UnknownModelError):
        check_name("toymixers_w32d2_patch8_64")


def test_it_is_listed_behind_ours(toy):
    entries = list(catalog.entries())
    assert [entry.name for entry in entries[-2:]] == [NAME, "toymixer_w64d4_patch8_64"]
    module = load_model(Source(NAME)).module
    assert entries[-2].parameters == sum(parameter.numel() for parameter in module.parameters())


def test_a_name_is_built_or_answered_with_its_neighbours(toy):
    assert load_model(Source("toymixer_w16d1_patch4_32")).signature.image_size == (32, 32)
    with pytest.raises(UnknownModelError, match="cannot be built"):
        load_model(Source("toymixer_w16d1_patch5_32"))
    with pytest.raises(UnknownModelError) as raised:
        load_model(Source("toymixer_w32d2_patch8"))
    assert NAME in raised.value.fix


def saved(toy, path, name=NAME, prefix="", **changes):
    """A checkpoint of somebody's training, and its module."""
    family, config = catalog.find_or_raise(name)
    module = family.build(dataclasses.replace(config, **changes)).eval()
    save_file({prefix + key: tensor.contiguous() for key, tensor in module.state_dict().items()}, path)
    return module


@pytest.mark.parametrize("prefix", ["", "net.encoder."])
def test_a_bare_state_dict_is_recognised(toy, tmp_path, prefix):
    module = saved(toy, tmp_path / "own.safetensors", prefix=prefix, num_classes=7)
    original = load_model(Source(checkpoint=tmp_path / "own.safetensors"))
    image = torch.randn(2, 3, 64, 64)
    assert (original.family, original.classes) == ("toymixer", 7)
    assert torch.equal(original.module(image), module(image))


def test_a_checkpoint_under_a_name_must_be_of_its_architecture(toy, tmp_path):
    saved(toy, tmp_path / "own.safetensors", num_classes=7)
    original = load_model(Source(NAME, tmp_path / "own.safetensors"))
    assert f"classes: 7 in the checkpoint, 10 in {NAME} by default" in original.notes
    with pytest.raises(CheckpointError) as raised:
        load_model(Source("toymixer_w64d4_patch8_64", tmp_path / "own.safetensors"))
    assert raised.value.found == "width 32 instead of 64, depth 2 instead of 4"


class Computed(torch.nn.Module):
    """A module as many are written: a number read from a tensor, a tensor that no checkpoint holds."""

    def __init__(self, mixer, read):
        super().__init__()
        self.mixer = mixer
        self.rate = torch.linspace(0, 0.5, 3)[1].item() if read else 0.25
        self.register_buffer("scale", torch.full((1,), 3.0), persistent=False)

    def forward(self, image):
        return self.mixer(image * self.scale) * self.rate


@pytest.mark.parametrize("read", [False, True])
def test_what_a_module_computes_when_it_is_built_is_there_under_a_checkpoint(toy, tmp_path, read):
    family, config = catalog.find_or_raise(NAME)
    own = dataclasses.replace(family, build=lambda config: Computed(family.build(config), read))
    module, loaded = own.build(config), own.empty(config)
    loaded.load_state_dict(module.state_dict())
    image = torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded(image), module(image))
    assert catalog._parameters(own, config) == sum(parameter.numel() for parameter in module.parameters())


def test_it_is_resized(toy, tmp_path):
    module = saved(toy, tmp_path / "own.safetensors")
    original = load_model(Source(checkpoint=tmp_path / "own.safetensors", image_size=(96, 64)))
    assert original.signature.image_size == original.preprocess.crop == (96, 64)
    assert original.module.positions.shape == (1, 32, 12, 8)
    assert torch.equal(original.module.patches.weight, module.patches.weight)
    with pytest.raises(CheckpointError, match="does not take this image size"):
        load_model(Source(NAME, image_size=(60, 60)))


def test_commands_list_and_deploy_it(toy, tmp_path):
    module = saved(toy, tmp_path / "own.safetensors", num_classes=7)
    listed = command(toy, "export", "list", "toymixer", "--json", cwd=tmp_path)["models"]
    assert (listed[0]["name"], listed[0]["family"]) == (NAME, "toymixer")
    arguments = ("--checkpoint", "own.safetensors", "--no-preprocess", "-o", "exported", "--json")
    document = command(toy, "export", NAME, *arguments, cwd=tmp_path)
    assert document["model"]["family"] == "toymixer"
    assert all(row["max_relative_difference"] < 1e-4 for row in document["parity"])
    image = torch.randn(3, 3, 64, 64)
    session = onnxruntime.InferenceSession(tmp_path / "exported" / "model.onnx")
    [logits] = session.run(None, {"image": image.numpy()})
    np.testing.assert_allclose(logits, module(image).detach().numpy(), rtol=1e-3, atol=1e-4)


def test_other_code_is_another_model_to_the_store(toy):
    before = find_reference_model(Source(NAME)).digests
    assert before == find_reference_model(Source(NAME)).digests
    file = toy / "toy_family.py"
    file.write_text(file.read_text().replace("nn.GELU()", "nn.ReLU()"))
    del sys.modules["toy_family"]
    assert find_reference_model(Source(NAME)).digests != before


# --- what does not fit ------------------------------------------------------------------------------------------------


def refused(value, found=None):
    with pytest.raises(HostError) as raised:
        list(catalog.families())
    assert value in raised.value.found
    return f"{raised.value.message}: {raised.value.found}"


def test_two_packages_with_one_family_are_refused(toy):
    distribution(toy, "toy_other", toymixer="toy_other:FAMILY")
    entry_points_of.cache_clear()
    assert "toy_other:FAMILY" in refused("toy_family:FAMILY")


@pytest.mark.parametrize("name", ["vit", "swin", "timm"])
def test_a_family_called_as_ours_is_refused(site, name):
    distribution(site, "toy_mixer", **{name: "toy_family:FAMILY"})
    assert f"vitdeploy's own {name}" in refused("toy_family:FAMILY")
    assert find_reference_model(Source(OURS)).family == "vit"


@pytest.mark.parametrize(
    ("entry", "names", "told"),
    [
        ("mixer", "toymixer_a", "the entry point 'mixer' provides a family with a different name"),
        ("toymixer", "mixer_a", "does not begin with the family's name"),
        (
            "vit_tiny",
            "vit_tiny_patch16_224",
            "two families have the name vit_tiny_patch16_224: vitdeploy's own vit and",
        ),
    ],
)
def test_names_that_are_not_the_familys_are_refused(toy, entry, names, told):
    own = "toymixer" if entry == "mixer" else entry
    code = f"import dataclasses, toy_family\nFAMILY = dataclasses.replace(toy_family.FAMILY, name={own!r}, "
    (toy / "toy_named.py").write_text(code + f"names={{{names!r}: toy_family.ToyConfig()}})\n")
    shutil.rmtree(toy / "toy_mixer-1.0.dist-info")
    distribution(toy, "toy_mixer", **{entry: "toy_named:FAMILY"})
    assert told in refused("toy_named:FAMILY")


def test_a_name_of_two_families_of_others_is_refused(toy):
    code = "import dataclasses, toy_family\nFAMILY = dataclasses.replace(toy_family.FAMILY, name='toymixer_w32d2', "
    (toy / "toy_other.py").write_text(f"{code}names={{}})\n")
    distribution(toy, "toy_other", toymixer_w32d2="toy_other:FAMILY")
    entry_points_of.cache_clear()
    with pytest.raises(HostError, match=f"two families have the name {NAME}") as raised:
        catalog.find(NAME)
    assert raised.value.found == "toy_family:FAMILY and toy_other:FAMILY"

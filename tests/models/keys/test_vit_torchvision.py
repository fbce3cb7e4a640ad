"""torchvision's own module against ours with the mapped weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.keys.proof import answer, difference, loaded, randomise
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.vit import ViTConfig
from vitdeploy.models.families.vit import resize
from vitdeploy.models.family import Hints
from vitdeploy.models.keys.vit_others import recognise_torchvision as recognise

HINTS = Hints(heads=4)


def vit(**changed):
    module = reference("torchvision.models").vision_transformer.VisionTransformer
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    return randomise(module(**{**sizes, "num_classes": 5, **changed}))


@pytest.mark.parametrize("representation", [None, 24])
def test_mapped_weights_compute_what_the_model_computes(representation, parity):
    model = vit(representation_size=representation)
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found = recognise(model.state_dict(), HINTS)
    with torch.no_grad():
        parity("ViT", "torchvision", answer(loaded(found), image)[0], model(image), keys=found.style)
    assert found.config == ViTConfig(
        image_size=(32, 32),
        patch_size=8,
        width=32,
        depth=2,
        heads=4,
        mlp_ratio=1.5,
        num_classes=5,
        pre_logits=representation or 0,
        preset="imagenet",
        position_resampling="align_corners",
    )
    assert (found.family, found.style, found.notes) == ("vit", "torchvision", ())


@pytest.mark.parametrize("side", [16, 40, 64])
def test_at_another_size_it_is_the_model_that_torchvision_resizes(side, parity):
    resizing = reference("torchvision.models").vision_transformer.interpolate_embeddings
    state = {key: tensor.float() for key, tensor in vit().state_dict().items()}
    found = recognise(state, HINTS)
    config, resized = resize(found.config, found.state, (side, side))
    model = vit(image_size=side)
    model.load_state_dict(resizing(side, 8, state))
    image = torch.randn(2, 3, side, side, dtype=torch.float64)
    ours = replace(found, config=config, state=resized)
    with torch.no_grad():
        parity("ViT", "torchvision", answer(loaded(ours), image)[0], model(image), keys=found.style)


def test_released_files_have_other_names_for_the_linears_of_the_mlp():
    state = vit().state_dict()
    old = {k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): t for k, t in state.items()}
    assert old.keys() != state.keys()
    new, found = recognise(state, HINTS).state, recognise(old, HINTS).state
    assert new.keys() == found.keys()
    assert all(torch.equal(new[key], tensor) for key, tensor in found.items())


def test_without_a_head_it_gives_features():
    model = vit()
    state = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith("heads.")}
    found = recognise(state, HINTS)
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    model.heads = torch.nn.Identity()
    assert found.config.num_classes == 0
    with torch.no_grad():
        assert difference(answer(loaded(found), image)[0], model(image)) <= 1e-10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"conv_proj.conv_last.weight": torch.zeros(1)}, "conv_proj.conv_*"),
        (lambda s: s | {"encoder.extra": torch.zeros(1)}, "1 unknown: encoder.extra"),
        (lambda s: {k: t for k, t in s.items() if "out_proj.weight" not in k}, "2 missing: blocks.0.attn.proj.weight"),
    ],
)
def test_every_fault_is_named(change, message):
    with pytest.raises(CheckpointError) as raised:
        recognise(change(vit().state_dict()), HINTS)
    assert message in str(raised.value)


def test_other_state_dicts_are_not_recognised():
    resnet = reference("torchvision.models").resnet18
    with torch.device("meta"):
        assert recognise(resnet().state_dict(), HINTS) is None

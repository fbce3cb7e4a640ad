"""DETR against transformers' implementation, its dilated backbone against timm's."""

import copy

import numpy as np
import pytest
import torch

from tests.models.detr_reference import original_state, outputs_of, randomise, saved_state, small
from tests.references import reference
from vitdeploy.models.architectures.detr import DETR, DETRConfig, GroupNorm, ResNet, ResNetConfig, sine_positions
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.families.detr import FAMILY, RULES, build, parse, recognise, resize
from vitdeploy.models.family import Hints
from vitdeploy.models.keys.rules import renamed

ROW = {False: "DETR, detection", True: "DETR, panoptic"}
TINY = "detr_r1-1-1-1c4_w32h4e1d2q6_40x56"


def loaded(panoptic, image_size, dtype, state=None):
    """Our model with the weights of `small`, under other names where `state` has them."""
    found = recognise(state or small(panoptic).state_dict(), Hints(heads=8, image_size=image_size))
    model = build(found.config)
    load_state(model, found.state, "the reference")
    return model.to(dtype).eval()


@pytest.mark.parametrize(
    ("image_size", "dtype"),
    [((72, 100), torch.float32), ((72, 100), torch.float64), ((33, 64), torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("panoptic", [False, True], ids=["detection", "panoptic"])
def test_outputs_equal_those_of_transformers(panoptic, image_size, dtype, parity):
    # With random weights a decoder turns float32's rounding errors of 1e-7 into 2e-6 for this image, 1e-5 for others.
    torch.manual_seed(3)
    image = torch.randn(3, 3, *image_size, dtype=dtype)
    theirs = outputs_of(copy.deepcopy(small(panoptic)).to(dtype), image)
    with torch.no_grad():
        ours = loaded(panoptic, image_size, dtype)(image)
    assert len(ours) == len(theirs) == (3 if panoptic else 2)
    parity(ROW[panoptic], "transformers", ours, theirs, keys="transformers")


@pytest.mark.parametrize("panoptic", [False, True], ids=["detection", "panoptic"])
def test_weights_under_the_names_of_the_released_code_give_the_same_outputs(panoptic, parity):
    image = torch.randn(1, 3, 40, 56, dtype=torch.float64)
    state = original_state(saved_state(small(panoptic)))
    with torch.no_grad():
        ours = loaded(panoptic, (40, 56), torch.float64, state)(image)
    theirs = outputs_of(copy.deepcopy(small(panoptic)).double(), image)
    parity(ROW[panoptic], "transformers", ours, theirs, keys="original")


def test_resizing_changes_the_image_size_and_no_tensor():
    found = recognise(small(True).state_dict(), Hints(image_size=(64, 64)))
    config, state = resize(found.config, found.state, (50, 90))
    assert all(state[key] is tensor for key, tensor in found.state.items())
    model = build(config).double().eval()
    load_state(model, state, "the reference")
    image = torch.randn(1, 3, 50, 90, dtype=torch.float64)
    with torch.no_grad():
        masks = model(image)[2]
    assert config.mask_size == masks.shape[2:] == (13, 23)


@pytest.mark.parametrize("dilated", [False, True], ids=["stride 32", "dc5"])
def test_features_of_the_backbone_equal_those_of_timm(dilated):
    timm = reference("timm")
    resnet = timm.models.resnet
    theirs = resnet.ResNet(
        resnet.Bottleneck, (1, 2, 1, 3), channels=(4, 8, 12, 16), num_classes=0, output_stride=16 if dilated else 32
    ).eval()
    randomise(theirs)
    stem = theirs.conv1.out_channels
    ours = ResNet(ResNetConfig(3, stem, (16, 32, 48, 64), (1, 2, 1, 3), dilated)).eval()
    state = {f"backbone.0.body.{key}": tensor for key, tensor in theirs.state_dict().items()}
    tensors, _, _ = renamed(RULES, state)
    ours.load_state_dict({key.removeprefix("backbone."): tensor for key, tensor in tensors.items()})
    image = torch.randn(2, 3, 75, 100, dtype=torch.float64)
    with torch.no_grad():
        features = ours.double()(image)
        expected = theirs.double().forward_intermediates(image, intermediates_only=True, norm=False)[1:]
    for mine, their in zip(features, expected, strict=True):
        assert mine.shape == their.shape
        assert (mine - their).abs().max() / their.abs().max() <= 1e-12


def test_a_dilated_detr_has_tokens_at_stride_16_and_masks_at_stride_4():
    config = parse("detr_r1-1-1-2c4_w64h8e1d1q3_50x70_dc5_panoptic")
    with torch.no_grad():
        outputs = build(config).eval()(torch.randn(2, 3, 50, 70))
    assert config.feature_size == (4, 5)
    assert [tuple(output.shape) for output in outputs] == [(2, 3, 251), (2, 3, 4), (2, 3, 13, 18)]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 4), (25, 34)])
def test_positions_are_those_of_transformers(height, width):
    detr = reference("transformers").models.detr.modeling_detr
    theirs = detr.DetrSinePositionEmbedding(20, normalize=True)(
        torch.Size([1, 40, height, width]), torch.device("cpu"), torch.float64
    )
    ours = sine_positions(height, width, 40).transpose(1, 2).reshape(1, 40, height, width)
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=1e-13)


def test_positions_survive_a_model_that_is_built_without_memory():
    with torch.device("meta"):
        model = DETR(parse(TINY))
    model = model.to_empty(device="cpu")
    assert torch.equal(model.positions, sine_positions(2, 2, 32))


@pytest.mark.parametrize("name", ["detr_resnet50", "detr_resnet101", "detr_resnet50_panoptic"])
def test_number_of_parameters_is_that_of_transformers(name):
    transformers = reference("transformers")
    reference("timm")
    config = transformers.DetrConfig(backbone=name.split("_")[1], num_labels=FAMILY.names[name].num_classes)
    kind = transformers.DetrForSegmentation if FAMILY.names[name].panoptic else transformers.DetrForObjectDetection
    with torch.device("meta"):
        theirs, ours = kind(config), build(FAMILY.names[name])
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    assert 41_000_000 < count < 61_000_000


def test_an_image_does_not_change_the_outputs_of_its_neighbour_in_the_batch():
    model = loaded(True, (40, 56), torch.float64)
    images = torch.randn(3, 3, 40, 56, dtype=torch.float64)
    with torch.no_grad():
        together = model(images)
        alone = [model(image[None]) for image in images]
    for i, output in enumerate(together):
        assert (output - torch.cat([one[i] for one in alone])).abs().max() <= 1e-12


@pytest.mark.parametrize("channels", [4, 8, 72])
def test_group_norm_is_pytorchs(channels):
    ours, theirs = GroupNorm(channels), torch.nn.GroupNorm(min(8, channels), channels)
    randomise(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, channels, 3, 5, dtype=torch.float64)
    assert (ours.double()(x) - theirs.double()(x)).abs().max() <= 1e-12


def test_fresh_weights_are_drawn_as_in_the_released_code():
    torch.manual_seed(0)
    model = build(parse("detr_r1-1-1-1c4_w128h8e1d1q50_32_panoptic"))
    layer, head = model.decoder[0].cross_attn, model.mask_head
    assert 0.95 < float(model.query_embed.detach().std()) < 1.05
    # Glorot: query, key and value are drawn as one matrix of three times the outputs.
    assert float(layer.key.weight.detach().max()) == pytest.approx((6 / (4 * 128)) ** 0.5, rel=0.01)
    assert float(layer.out.weight.detach().max()) == pytest.approx((6 / (2 * 128)) ** 0.5, rel=0.01)
    assert not any(linear.bias.any() for linear in (layer.query, layer.key, layer.value, layer.out))
    # The two parts of the mask head's first convolution are drawn as the one that they are.
    bound = (3 / (9 * (128 + 8))) ** 0.5
    assert float(head.from_attention.weight.detach().max()) == pytest.approx(bound, rel=0.01)
    assert float(head.from_features.weight.detach().max()) == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_size": (31, 64)}, "31x64 has a side below 32"),
        ({"width": 30, "heads": 5}, "divisible by 4"),
        ({"heads": 3}, "divisible by 3 heads"),
        ({"queries": 0}, "sizes of 0: queries"),
        ({"width": 96, "panoptic": True}, "mask head's widths"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        DETRConfig(**{"width": 64, "heads": 8, **changes})

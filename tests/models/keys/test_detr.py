"""State dicts of DETRs under the names of transformers' modules, its files, timm's backbone, and the released code."""

import pytest
import torch

from tests.models.detr_reference import original_state, saved_state, small
from vitdeploy.errors import CheckpointError
from vitdeploy.models.families.detr import build, read, recognise
from vitdeploy.models.family import Hints


def states(panoptic):
    """The same weights under every style of names."""
    model = small(panoptic)
    saved = saved_state(model)
    return {"module": model.state_dict(), "file": saved, "original": original_state(saved)}


@pytest.mark.parametrize("panoptic", [False, True], ids=["detection", "panoptic"])
def test_every_style_gives_the_same_tensors_and_all_of_the_models(panoptic):
    found = {name: read(state) for name, state in states(panoptic).items()}
    assert {name: style for name, (style, _, _) in found.items()} == {
        "module": "transformers",
        "file": "transformers",
        "original": "original",
    }
    expected = build(recognise(small(panoptic).state_dict(), Hints(heads=8)).config).state_dict()
    for _, tensors, notes in found.values():
        assert {key: tensor.shape for key, tensor in tensors.items()} == {
            key: tensor.shape for key, tensor in expected.items()
        }
        assert all(torch.equal(tensor, found["file"][1][key]) for key, tensor in tensors.items())
        assert notes == []


def test_a_backbone_of_timm_has_torchvisions_names():
    state = states(False)
    timm = {
        key.replace("backbone.0.body.", "model.backbone.conv_encoder.model."): tensor
        for key, tensor in state["original"].items()
        if key.startswith("backbone")
    } | {key: tensor for key, tensor in state["file"].items() if "backbone" not in key}
    for style in (timm, {key.replace("conv_encoder.", ""): tensor for key, tensor in timm.items()}):
        kind, tensors, _ = read(style)
        _, expected, _ = read(state["file"])
        assert kind == "transformers"
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in tensors.items())


def test_counters_of_batch_norm_are_left_out_and_counted():
    state = original_state(saved_state(small(False)))
    counter = {"backbone.0.body.layer1.0.downsample.1.num_batches_tracked": torch.tensor(3)}
    _, tensors, notes = read(state | counter)
    assert tensors.keys() == read(state)[1].keys()
    assert notes == ["left out, used in training only: 1 counters of batch norm"]


def test_unknown_tensors_stay_for_the_loader_to_name():
    state = small(False).state_dict() | {"model.decoder.extra.weight": torch.zeros(1)}
    assert "model.decoder.extra.weight" in read(state)[1]


@pytest.mark.parametrize(
    "without",
    ["query_embed.weight", "class_embed.weight", "transformer.decoder.layers.0.multihead_attn.in_proj_weight"],
)
def test_a_state_dict_without_the_marks_is_no_detr(without):
    state = original_state(saved_state(small(False)))
    del state[without]
    assert read(state) is None


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("transformer.encoder.norm.weight", "layer norms before the attentions"),
        ("backbone.1.row_embed.weight", "learned image positions"),
    ],
)
def test_a_variant_that_is_another_function_is_refused(key, what):
    state = original_state(saved_state(small(False))) | {key: torch.zeros(64)}
    with pytest.raises(CheckpointError, match=what) as caught:
        read(state)
    assert caught.value.found == key

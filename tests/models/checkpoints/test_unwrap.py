"""Checkpoints as training scripts save them, opened to the one state dict that was meant."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.fit import PREFIXES, unwrap

PLAIN = {"cls_token": torch.full((1, 1, 4), 1.0), "head.weight": torch.full((2, 4), 1.0)}
AVERAGE = {key: tensor + 1 for key, tensor in PLAIN.items()}
OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]}


def prefixed(prefix, state=PLAIN):
    return {prefix + key: tensor for key, tensor in state.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_a_flat_state_dict_is_returned_as_it_is():
    state, notes = unwrap(OrderedDict(PLAIN))
    assert_same(state, PLAIN)
    assert notes == ()


CONTAINERS = {
    "DeiT": (
        {"model": PLAIN, "optimizer": OPTIMIZER, "epoch": 3},
        PLAIN,
        "'model'; ignored: optimizer, epoch",
    ),
    "DeiT with EMA": ({"model": PLAIN, "model_ema": AVERAGE}, AVERAGE, "'model_ema'; ignored: model"),
    "timm": ({"state_dict": PLAIN, "arch": "vit"}, PLAIN, "'state_dict'; ignored: arch"),
    "timm with EMA": ({"state_dict": PLAIN, "state_dict_ema": AVERAGE}, AVERAGE, "'state_dict_ema'"),
    "an EMA that was not kept": ({"model": PLAIN, "model_ema": None}, PLAIN, "'model'; ignored: model_ema"),
    "DINO": ({"student": PLAIN, "teacher": AVERAGE, "dino_loss": {"center": torch.zeros(1)}}, AVERAGE, "'teacher'"),
    "DeepSpeed": ({"module": PLAIN, "epoch": 1}, PLAIN, "'module'"),
    "a name of one's own": ({"net": PLAIN, "acc": 0.9}, PLAIN, "'net'; ignored: acc"),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_containers_are_opened(case):
    loaded, expected, note = CONTAINERS[case]
    state, notes = unwrap(loaded)
    assert_same(state, expected)
    assert len(notes) == 1
    assert notes[0].startswith(f"weights taken from {note}")


def test_containers_inside_each_other():
    state, notes = unwrap({"ema": {"module": prefixed("module."), "updates": 7}, "epoch": 1})
    assert_same(state, PLAIN)
    assert notes == (
        "weights taken from 'ema'; ignored: epoch",
        "weights taken from 'module'; ignored: updates",
        "prefix 'module.' dropped from all keys",
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(PREFIXES), max_size=4).map("".join))
def test_any_sequence_of_prefixes_is_dropped(prefix):
    state, notes = unwrap(prefixed(prefix))
    assert_same(state, PLAIN)
    assert notes == ((f"prefix {prefix!r} dropped from all keys",) if prefix else ())


def test_a_prefix_that_only_some_keys_have_stays():
    mixed = {**prefixed("backbone."), "transformer.weight": torch.zeros(1)}
    assert_same(unwrap(mixed)[0], mixed)


@pytest.mark.parametrize("head", ["head.mlp.0.weight", "head.last_layer.weight_g", "dino_head.x", "ibot_head.x"])
def test_projection_heads_of_self_supervised_training_are_left_out(head):
    state, notes = unwrap({"teacher": prefixed("module.", prefixed("backbone.") | {head: torch.zeros(1)})})
    assert_same(state, PLAIN)
    assert notes[1:] == (
        f"left out, used in training only: {head}",
        "prefix 'module.backbone.' dropped from all keys",
    )


def test_a_head_without_its_backbone_is_not_a_model_to_empty():
    heads = {"head.mlp.0.weight": torch.zeros(1)}
    assert_same(unwrap(heads)[0], heads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32_and_nothing_else_changes(dtype):
    values = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    state, notes = unwrap({"w": values, "count": torch.tensor(3), "d": torch.ones(1, dtype=torch.float64)})
    assert [tensor.dtype for tensor in state.values()] == [torch.float32, torch.int64, torch.float64]
    assert torch.equal(state["w"].to(dtype), values)
    assert notes == (f"1 of 3 tensors converted from {str(dtype)[6:]} to float32",)


def test_leftovers_that_are_no_tensors_are_named():
    state, notes = unwrap({**PLAIN, "epoch": 3, "args": {"lr": 0.1}})
    assert_same(state, PLAIN)
    assert notes == ("ignored, not tensors: epoch (int), args (dict)",)


def test_parameters_come_without_their_gradient():
    state, _ = unwrap({"w": nn.Parameter(torch.ones(2))})
    assert not state["w"].requires_grad


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        ([torch.zeros(1)], "list"),
        ({}, "an empty dict"),
        ({"epoch": 3, "optimizer": OPTIMIZER}, "epoch (int), optimizer (dict)"),
        ({0: torch.zeros(1)}, "keys are not parameter names"),
        ({"model": PLAIN, "state_dict": PLAIN}, "'state_dict', 'model'"),
        ({"model_ema": PLAIN, "teacher": PLAIN}, "'model_ema', 'teacher'"),
        ({"generator": PLAIN, "discriminator": PLAIN}, "'generator', 'discriminator'"),
        ({"model": {"model": {"model": {"model": PLAIN}}}}, "more than 4 dicts"),
    ],
)
def test_every_fault_is_named(loaded, message):
    with pytest.raises(CheckpointError) as raised:
        unwrap(loaded)
    assert message in str(raised.value)

"""DETR in the catalog: names, signatures, and what is said of checkpoints that do not fit."""

from dataclasses import replace

import pytest
import torch

from tests.models.detr_reference import DEPTHS, WIDTHS, original_state, saved_state, small
from tests.references import reference
from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.detr import DETRConfig, ResNetConfig
from vitdeploy.models.families.detr import FAMILY, build, describe, parse, preprocess, recognise, resize
from vitdeploy.models.family import Hints
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import PreprocessSpec


def refused(state, hints):
    with pytest.raises(CheckpointError) as caught:
        recognise(state, hints)
    return str(caught.value)


def test_published_names():
    resnets = ("resnet50", "resnet101", "resnet50_dc5", "resnet101_dc5")
    assert list(FAMILY.names) == [f"detr_{name}" for name in resnets] + [f"detr_{name}_panoptic" for name in resnets]
    assert all(parse(name) == config for name, config in FAMILY.names.items())
    assert FAMILY.names["detr_resnet101_dc5"].backbone == ResNetConfig(depths=(3, 4, 23, 3), dilate_last=True)


def test_a_name_spells_out_the_whole_configuration():
    assert parse("detr_r1-2-3-4c8_w64h8e5d6q7_48x64_dc5_panoptic") == DETRConfig(
        image_size=(48, 64),
        backbone=ResNetConfig(3, 8, (32, 64, 128, 256), (1, 2, 3, 4), True),
        width=64, heads=8, encoder_layers=5, decoder_layers=6, hidden=512, queries=7, num_classes=250, panoptic=True,
    )  # fmt: skip
    assert parse("detr_r1-1-1-1c4_w32h4e1d1q3_64").image_size == (64, 64)


def test_other_names_are_not_ours():
    assert all(parse(name) is None for name in ("vit_tiny_patch16_224", "detr", "detr_resnet18", "detr_resnet50_640"))


def test_sizes_that_contradict_each_other_are_refused():
    with pytest.raises(UnknownModelError) as caught:
        parse("detr_r1-1-1-1c8_w64h3e1d1q5_64")
    assert "width 64 is not divisible by 3 heads" in caught.value.found


@pytest.mark.parametrize("name", ["detr_r1-1-1-1c4_w64h8e1d1q3_33x50", "detr_r1-1-1-1c4_w64h8e1d1q3_33x50_panoptic"])
def test_the_signature_is_what_the_module_gives(name):
    config = parse(name)
    signature = describe(config)
    with torch.no_grad():
        outputs = build(config).eval()(torch.randn(2, signature.channels, *signature.image_size))
    assert [spec.with_batch(2).shape for spec in signature.outputs] == [tuple(output.shape) for output in outputs]
    assert [spec.name for spec in signature.outputs] == ["logits", "boxes", "masks"][: len(outputs)]


def test_what_outputs_mean():
    detection, panoptic = describe(FAMILY.names["detr_resnet50"]), describe(FAMILY.names["detr_resnet50_panoptic"])
    assert (detection.task, panoptic.task) == ("detection", "panoptic")
    assert detection.postprocess == PostprocessSpec("softmax", "cxcywh", 0.7)
    assert panoptic.postprocess == PostprocessSpec("softmax", "cxcywh", 0.85, tuple(range(91)), 0.5, 0.8)
    fine_tuned = describe(replace(FAMILY.names["detr_resnet50_panoptic"], num_classes=4))
    assert fine_tuned.postprocess.things == (0, 1, 2, 3)


def test_preprocessing():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config = replace(FAMILY.names["detr_resnet50"], image_size=(480, 640))
    assert preprocess(config) == PreprocessSpec((480, 640), (480, 640), "bilinear", mean, std)
    with pytest.raises(CheckpointError, match="does not take images"):
        preprocess(replace(config, backbone=ResNetConfig(in_channels=4)))


def test_any_size_from_32_pixels_will_do():
    assert resize(FAMILY.names["detr_resnet50"], {}, (32, 1333))[0].image_size == (32, 1333)
    with pytest.raises(CheckpointError) as caught:
        resize(FAMILY.names["detr_resnet50"], {}, (640, 31))
    assert caught.value.found == "image size 640x31 has a side below 32 pixels"
    assert caught.value.expected == "any height and width of at least 32 pixels"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_says_its_shape():
    model = small(True)
    found = recognise(model.state_dict(), Hints(config=model.config.to_dict()))
    assert (found.family, found.style) == ("detr", "transformers")
    assert found.config == DETRConfig(
        backbone=ResNetConfig(3, 8, WIDTHS, DEPTHS),
        width=64, heads=8, encoder_layers=1, decoder_layers=2, hidden=48, queries=5, num_classes=7, panoptic=True,
    )  # fmt: skip
    assert found.notes == ()


def test_without_a_config_notes_say_what_was_assumed():
    state = original_state(saved_state(small(False)))
    found = recognise(state, Hints(heads=4, image_size=(96, 64)))
    assert (found.config.heads, found.config.image_size, found.style) == (4, (96, 64), "original")
    assert found.notes == ("assuming a backbone without dilation (DC5), which tensors do not show",)


@pytest.mark.parametrize("config", [{"dilation": True}, {"backbone_config": {"output_stride": 16}}])
def test_a_config_says_that_the_backbone_is_dilated(config):
    found = recognise(small(True).state_dict(), Hints(config=config))
    assert found.config.backbone.dilate_last
    assert found.notes == ()


def test_heads_are_seen_in_the_mask_head_or_assumed_at_the_published_width():
    state = small(False).state_dict()
    assert recognise(small(True).state_dict(), Hints()).config.heads == 8
    text = refused(state, Hints())
    assert "tensors do not determine the number of attention heads" in text and "--heads N, a divisor of 64" in text
    assert "width 64 is not divisible by 5 heads" in refused(state, Hints(heads=5))
    assert "expected: 8, from mask_head's" in refused(small(True).state_dict(), Hints(heads=4))


def test_the_published_model_is_recognised_by_its_state_dict_alone():
    transformers = reference("transformers")
    reference("timm")  # transformers takes its ResNet-50 from there
    with torch.device("meta"):
        state = transformers.DetrForObjectDetection(transformers.DetrConfig(num_labels=91)).state_dict()
    found = recognise(state, Hints())
    assert found.config == FAMILY.names["detr_resnet50"]
    assert found.notes[-1].startswith("assuming 8 heads, as in published models of width 256")


def test_other_models_are_not_ours():
    assert recognise({"cls_token": torch.zeros(1)}, Hints()) is None
    assert recognise(small(False).state_dict(), Hints(config={"model_type": "table-transformer"})) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"activation_function": "gelu"}, "activation_function 'gelu'"),
        ({"position_embedding_type": "learned"}, "position_embedding_type 'learned'"),
        ({"encoder_attention_heads": 8, "decoder_attention_heads": 4}, "decoder_attention_heads 4"),
    ],
)
def test_a_config_of_another_function_is_refused(config, said):
    assert said in refused(small(False).state_dict(), Hints(config=config))


def test_an_incomplete_state_dict_is_refused():
    state = dict(small(False).state_dict())
    del state["model.input_projection.weight"]
    assert "no input_proj.weight" in refused(state, Hints(heads=8))


def test_blocks_of_two_convolutions_are_refused():
    state = original_state(saved_state(small(False)))
    state = {key: tensor for key, tensor in state.items() if ".conv3." not in key and ".bn3." not in key}
    assert "ResNet-18" in refused(state, Hints(heads=8))


def test_sizes_that_cannot_be_are_refused():
    assert "has a side below 32" in refused(small(False).state_dict(), Hints(heads=8, image_size=(16, 16)))

"""A config.json that says something else than the weights beside it: every difference is told, and its fix works."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.detr_reference import small
from tests.models.test_load_folders import LABELS, SHAPE, SWIN, VIT, of_classes, timm_folder
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.load import load_model
from vitdeploy.models.model_folder.folder import model_config
from vitdeploy.models.source import Source


def of_transformers(kind):
    library = reference("transformers")
    if kind == "vit":
        return library.ViTForImageClassification(of_classes(library, "ViT"))
    if kind == "dinov2":
        return library.Dinov2ForImageClassification(of_classes(library, "Dinov2", mlp_ratio=2))
    if kind == "clip":
        return library.CLIPVisionModelWithProjection(library.CLIPVisionConfig(**SHAPE, projection_dim=24))
    if kind == "detr":
        return small(False)
    assert kind == "swin"
    config = library.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, id2label=LABELS
    )
    return library.SwinForImageClassification(config)


def changed(folder, changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return Source(model=f"hf:{folder}")


def refused(source):
    with pytest.raises(CheckpointError, match=r"config\.json does not match the weights") as caught:
        load_model(source)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("vit", {"num_hidden_layers": 3, "hidden_size": 64, "patch_size": 4, "image_size": 48, "num_channels": 1}),
        ("vit", {"intermediate_size": 64, "qkv_bias": False}),
        ("dinov2", {"num_hidden_layers": 1, "mlp_ratio": 4, "use_swiglu_ffn": True}),
        ("clip", {"projection_dim": 32, "num_hidden_layers": 3}),
        ("swin", {"depths": [2, 6], "num_heads": [2, 8], "embed_dim": 32, "mlp_ratio": 2.0}),
        ("detr", {"encoder_layers": 9, "num_queries": 100}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_that_a_config_says_otherwise_is_told_with_a_mend_that_works(kind, changes, tmp_path):
    of_transformers(kind).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    error = refused(changed(tmp_path, changes))
    for key, value in changes.items():
        assert f"{key} {json.dumps(value)}, the weights have {json.dumps(whole[key])}" in error.found
    assert error.found.count("the weights have") == len(changes)
    mend = json.loads("{" + error.fix.partition("in config.json: ")[2] + "}")
    assert mend == {key: whole[key] for key in changes}
    load_model(changed(tmp_path, mend))


def test_other_names_than_classes(tmp_path):
    of_transformers("vit").save_pretrained(tmp_path)
    error = refused(changed(tmp_path, {"id2label": {"0": "cat", "1": "dog"}}))
    assert error.found == "classes by id2label 2, the weights have 5"
    assert error.fix.endswith("in config.json: no id2label, no label2id")
    original = load_model(changed(tmp_path, {"id2label": None, "label2id": None}))
    assert (original.classes, original.labels) == (5, ())


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_a_classifier_that_is_not_there_is_not_random_numbers(kind, tmp_path):
    of_transformers(kind).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    backbone = {key: tensor for key, tensor in state.items() if not key.startswith("classifier.")}
    save_file(backbone, tmp_path / "model.safetensors")
    name = {"vit": "ViT", "swin": "Swin"}[kind]
    error = refused(Source(model=f"hf:{tmp_path}"))
    assert error.found == f'architectures ["{name}ForImageClassification"], the weights have ["{name}Model"]'
    original = load_model(changed(tmp_path, {"architectures": [f"{name}Model"]}))
    assert original.signature.task == "features"


@pytest.mark.parametrize(
    ("name", "arguments", "changes", "found"),
    [
        ("vit_base_patch16_224", VIT, {"depth": 3, "img_size": 64}, ["depth 3", "img_size [64, 64]"]),
        ("vit_base_patch16_224", VIT, {"patch_size": 4, "reg_tokens": 2}, ["patch_size 4", "reg_tokens 2"]),
        ("swin_tiny_patch4_window7_224", SWIN, {"depths": [2, 6]}, ["depths [2, 6], the weights have [2, 2]"]),
    ],
)
def test_arguments_of_timm_that_are_not_the_weights(name, arguments, changes, found, tmp_path):
    timm_folder(name, arguments, tmp_path)
    error = refused(changed(tmp_path, {"model_args": arguments | changes, "num_classes": 7}))
    for text in [*found, "num_classes 7, the weights have 5"]:
        assert text in error.found


def test_a_name_of_timm_that_is_not_the_weights(tmp_path):
    """Without arguments the name says all."""
    timm_folder("vit_base_patch16_224", VIT | {"embed_dim": 48, "num_heads": 12}, tmp_path)
    error = refused(changed(tmp_path, {"model_args": {}}))
    for text in ["vit_base_patch16_224 has depth 12, the weights have 2", "has embed_dim 768", "input_size [224, 224]"]:
        assert text in error.found


def test_a_pooling_layer_beside_a_classifier_needs_its_config(tmp_path):
    """ViTForImageClassification reads no pooling layer; a head of one's own above a ViTModel may."""
    model = of_transformers("vit")
    pooler = {"vit.pooler.dense.weight": torch.ones(32, 32), "vit.pooler.dense.bias": torch.ones(32)}
    path = tmp_path / "own.safetensors"
    save_file({**model.state_dict(), **pooler}, path)
    with pytest.raises(CheckpointError, match="may or may not read its pooling layer"):
        load_model(Source(checkpoint=path, heads=4))
    model.config.save_pretrained(tmp_path)
    assert load_model(Source(checkpoint=path)).labels == tuple(LABELS.values())


@pytest.mark.parametrize("named", ["vit_w32d2h4_patch8_32", "vit_w32d3h4_patch8_32"])
def test_a_name_with_a_file_beside_its_config_is_checked_and_the_config_read(named, tmp_path):
    library = reference("transformers")
    config = library.ViTConfig(**SHAPE | {"intermediate_size": 128}, id2label=LABELS, hidden_act="relu")
    library.ViTForImageClassification(config).save_pretrained(tmp_path)
    source = Source(named, tmp_path / "model.safetensors")
    if "d3" in named:
        with pytest.raises(CheckpointError, match=f"is not a checkpoint of {named}") as caught:
            load_model(source)
        assert caught.value.found == "depth 2 instead of 3"
    else:
        original = load_model(source)
        assert (original.labels, original.module.config.activation) == (tuple(LABELS.values()), "relu")


def test_a_config_of_another_program_is_not_a_models(tmp_path):
    (tmp_path / "config.json").write_text("[1, 2]")
    save_file(of_transformers("vit").state_dict(), tmp_path / "model.safetensors")
    assert load_model(Source(checkpoint=tmp_path / "model.safetensors", heads=4)).labels == ()


def test_a_config_that_cannot_be_parsed_beside_a_file_is_not_passed_by(tmp_path):
    """Heads, labels and preprocessing would be others than it says, without a word."""
    of_transformers("vit").save_pretrained(tmp_path)
    source, path = Source(checkpoint=tmp_path / "model.safetensors", heads=4), tmp_path / "config.json"
    text = path.read_text()
    path.write_text(text.rstrip().removesuffix("}") + ",}")
    with pytest.raises(CheckpointError, match=r"config\.json is not a config file") as caught:
        load_model(source)
    assert "line" in caught.value.found
    path.write_text(text, encoding="utf-8-sig")  # the fix
    assert load_model(source).labels == tuple(LABELS.values())
    assert "move it elsewhere" in caught.value.fix
    path.unlink()
    assert load_model(source).labels == ()


WRONG = {
    "architectures text": ("vit", {"architectures": "ViTForImageClassification"}, "architectures"),
    "architectures object": ("vit", {"architectures": {"a": 1}}, "architectures"),
    "model_type": ("vit", {"model_type": ["vit"]}, "model_type"),
    "hidden_act": ("vit", {"hidden_act": ["gelu"]}, "hidden_act"),
    "hidden_act inside": ("clip", {"vision_config": {**SHAPE, "hidden_act": {}}}, "hidden_act"),
    "mlp_ratio": ("swin", {"mlp_ratio": [4, 4]}, "mlp_ratio"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_value_of_another_type_is_named(kind, tmp_path):
    model, changes, key = WRONG[kind]
    of_transformers(model).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        load_model(changed(tmp_path, changes))
    assert caught.value.found.startswith(f"{key} ")
    assert key in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_args": [3]}, "model_args [3]"),
        ({"architecture": None}, "architecture null"),
    ],
)
def test_a_value_of_another_type_in_timms_config_is_named(changes, found, tmp_path):
    timm_folder("vit_base_patch16_224", VIT, tmp_path)
    with pytest.raises(CheckpointError, match="has an invalid value") as caught:
        load_model(changed(tmp_path, changes))
    assert caught.value.found == found


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_act": [[[]]]}, "hidden_act"),
        ({"text_config": {"hidden_act": [[[]]]}}, "hidden_act"),
        ({"text_config": 7}, "text_config"),
        ({"vision_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
        ({"hidden_size": {"a": [{}]}}, "hidden_size"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps"),
        ({"architectures": {"a": 1}}, "architectures"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"image_size": 10**400}, "image_size"),
        ({"image_size": functools.reduce(lambda inner, _: [inner], range(500), 224)}, "image_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"global_pool": [[]]}, "global_pool"),
    ],
)
def test_values_that_no_model_has_are_named_wherever_they_stand(changes, key, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", **changes}))
    with pytest.raises(CheckpointError, match="has an invalid value") as caught:
        model_config(tmp_path / "config.json")
    assert caught.value.found.startswith(f"{key} ") and caught.value.expected.startswith(f"{key}: ")


def test_what_libraries_write_is_taken(tmp_path):
    nested = {"hidden_sizes": [32, 64], "num_attention_heads": [1, 2], "image_size": [224, 224], "hidden_act": "gelu"}
    config = {"model_type": "x", "text_config": None, "vision_config": nested, "hidden_size": None, "vocab_size": 5000}
    config |= {"id2label": {"0": "depth"}, "label2id": {"depth": "many"}, "image_size": {"height": 1, "width": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_config(tmp_path / "config.json") == config


def test_an_image_size_that_is_none_is_not_compared(tmp_path):
    timm_folder("vit_base_patch16_224", VIT, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    load_model(changed(tmp_path, {"model_args": {**config["model_args"], "img_size": 32.0}}))


def test_a_backbone_of_ours_in_a_model_of_transformers_is_not_taken_out_of_it(tmp_path):
    library = reference("transformers")
    backbone = library.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        out_features=["stage1", "stage2"],
    )  # fmt: skip
    sizes = {"hidden_size": 16, "pool_scales": [1], "auxiliary_in_channels": 16, "auxiliary_channels": 8}
    config = library.UperNetConfig(backbone_config=backbone, num_labels=3, use_auxiliary_head=False, **sizes)
    library.UperNetForSemanticSegmentation(config).save_pretrained(tmp_path)
    original = load_model(Source(model=f"hf:{tmp_path}"))
    assert (original.family, original.signature.task) == ("transformers", "segmentation")
    assert [tensor.name for tensor in original.signature.outputs] == ["logits"]

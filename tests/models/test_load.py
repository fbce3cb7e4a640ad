"""From a checkpoint file, a name or a function to the original: every key style, what the name tells, every refusal."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.detr_reference import original_state, outputs_of, saved_state
from tests.models.detr_reference import randomise as randomise_detr
from tests.models.keys.jax_layout import as_jax
from tests.models.test_load_folders import SHAPE, SWIN, VIT, difference, image, outputs, randomised
from tests.references import reference
from vitdeploy.errors import CheckpointError, InputError, MissingPackageError, UnknownModelError
from vitdeploy.models import catalog
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.stages.reference_model import from_request, to_request

NAMES = {
    "vit": "vit_w32d2h4_patch8_32",
    "swin": "swin_w16d2-2h2-4_patch4_window4_32",
    "detr": "detr_r1-1-1-1c8_w32h4e1d1q5_64",
    "transformer": "transformer_w32e1d1h4_v50_l9",
}


def written(state, path):
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
    return path


def seeded(name, **changed):
    """A module of ours with the config of a built-in name, re-randomised."""
    family, config = catalog.find_or_raise(name)
    torch.manual_seed(0)
    return randomised(family.build(dataclasses.replace(config, **changed)))


def timm_vit(**changed):
    return randomised(reference("timm").create_model("vit_base_patch16_224", **VIT | {"num_classes": 5} | changed))


# --- every key style, alone and under a name ---


def style_timm():
    model = timm_vit()
    return model.state_dict(), model


def style_transformers():
    library = reference("transformers")
    config = library.ViTConfig(**SHAPE | {"intermediate_size": 128}, num_labels=5, layer_norm_eps=1e-6)
    model = randomised(library.ViTForImageClassification(config))
    return model.state_dict(), lambda pixels: model(pixels).logits


def style_torchvision():
    from torchvision.models import VisionTransformer

    model = randomised(VisionTransformer(32, 8, 2, 4, 32, 128, num_classes=5))
    return model.state_dict(), model


def style_jax():
    model = timm_vit()
    arrays = as_jax(model.state_dict(), 4, (0, 2, 3))
    return {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}, model


def style_swin():
    model = randomised(reference("timm").create_model("swin_tiny_patch4_window7_224", num_classes=5, **SWIN))
    return model.state_dict(), model


def style_detr():
    library = reference("transformers")
    backbone = library.ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="bottleneck",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = library.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, num_queries=5,
        num_labels=7,
    )  # fmt: skip
    model = library.DetrForObjectDetection(config).eval()
    randomise_detr(model)
    return original_state(saved_state(model)), lambda pixels: outputs_of(model, pixels)[0]


STYLES = {
    "timm": (style_timm, "vit"),
    "transformers": (style_transformers, "vit"),
    "torchvision": (style_torchvision, "vit"),
    "jax": (style_jax, "vit"),
    "swin": (style_swin, "swin"),
    "detr": (style_detr, "detr"),
}


@pytest.mark.parametrize("style", STYLES)
def test_a_checkpoint_in_any_key_style_is_recognised_and_under_its_name_needs_no_hint(style, tmp_path):
    reference("timm")
    make, family = STYLES[style]
    state, model = make()
    if style == "jax":
        path = tmp_path / "weights.npz"
        np.savez(path, **{key: tensor.numpy() for key, tensor in state.items()})
    else:
        path = written(state, tmp_path / "weights.safetensors")
    size = (64, 64) if family == "detr" else (32, 32)
    with torch.no_grad():
        expected = model(image(size))
    named = load_model(Source(model=NAMES[family], checkpoint=path))
    assert (named.family, named.signature.image_size, named.preprocess.crop) == (family, size, size)
    assert difference(outputs(named, image(size))[0], expected) < 1e-5
    if style == "jax":  # its own code has GELU in the tanh form
        assert any("taken from vit_w32d2h4_patch8_32: activation gelu" in note for note in named.notes)
    else:
        heads = None if family == "swin" else 4
        bare = load_model(Source(checkpoint=path, heads=heads, image_size=size))
        assert difference(outputs(bare, image(size))[0], expected) < 1e-5


def test_a_transformer_takes_from_its_name_what_no_tensor_tells(tmp_path):
    path = written(seeded(NAMES["transformer"]).state_dict(), tmp_path / "weights.safetensors")
    named = load_model(Source(model=NAMES["transformer"], checkpoint=path))
    assert named.module.config == catalog.find_or_raise(NAMES["transformer"])[1]
    with pytest.raises(CheckpointError, match="number of heads") as caught:
        load_model(Source(checkpoint=path))
    assert "--heads" in caught.value.fix


def test_a_name_says_whether_the_backbone_of_a_detr_is_dilated(tmp_path):
    state, _ = style_detr()
    path = written(state, tmp_path / "weights.safetensors")
    plain, dilated = (
        load_model(Source(model=name, checkpoint=path)) for name in (NAMES["detr"], NAMES["detr"] + "_dc5")
    )
    assert (plain.module.config.backbone.dilate_last, dilated.module.config.backbone.dilate_last) == (False, True)


@pytest.mark.parametrize("activation", ["clip", "clip_quickgelu"])
def test_a_name_says_the_activation(activation, tmp_path):
    name = f"vit_w32d2h4_patch8_{activation}_32"
    family, config = catalog.find_or_raise(name)
    model = randomised(family.build(config))
    path = written(model.state_dict(), tmp_path / "weights.safetensors")
    assert load_model(Source(model=name, checkpoint=path)).module.config == config
    assert config.activation == ("quick_gelu" if "quick" in activation else "gelu")


def test_transformers_keys_under_a_name_have_the_names_epsilon_and_say_so(tmp_path):
    state, _ = style_transformers()
    path = written(state, tmp_path / "weights.safetensors")
    original = load_model(Source(model=NAMES["vit"], checkpoint=path))
    assert original.module.config.layer_norm_eps == 1e-6
    assert f"taken from {NAMES['vit']}: layer_norm_eps 1e-06" in original.notes


# --- what a checkpoint may have otherwise than its name, and what not ---


def test_a_fine_tuned_checkpoint_has_its_own_classes_and_channels(tmp_path):
    path = written(seeded(NAMES["vit"], num_classes=3, in_channels=1).state_dict(), tmp_path / "weights.safetensors")
    original = load_model(Source(model=NAMES["vit"], checkpoint=path))
    assert (original.classes, original.signature.channels, original.preprocess.channels) == (3, 1, 1)
    for what in ("classes: 3 in the checkpoint", "channels: 1 in the checkpoint"):
        assert any(note.startswith(what) for note in original.notes)


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_a_checkpoint_without_head_is_a_feature_extractor(family, tmp_path):
    path = written(seeded(NAMES[family], num_classes=0).state_dict(), tmp_path / "weights.safetensors")
    original = load_model(Source(model=NAMES[family], checkpoint=path))
    assert original.signature.task == "features"
    assert original.notes.count("no classification head: used as a feature extractor") == 1


def test_a_checkpoint_of_another_image_size_keeps_it_and_says_so(tmp_path):
    path = written(seeded("vit_w32d2h4_patch8_64").state_dict(), tmp_path / "weights.safetensors")
    original = load_model(Source(model=NAMES["vit"], checkpoint=path))
    assert original.signature.image_size == original.preprocess.crop == (64, 64)
    assert any("image size 64x64" in note and "is 32x32" in note for note in original.notes)


@pytest.mark.parametrize(
    ("name", "other", "found"),
    [
        (NAMES["vit"], "vit_w64d2h4_patch8_32", "width 64 instead of 32, MLP width 256 instead of 128"),
        (NAMES["vit"], "vit_w32d1h4_patch8_32", "depth 1 instead of 2"),
        (NAMES["vit"], "vit_w32d2h4_patch4_32", "patch size 4 instead of 8"),
        (NAMES["vit"], "deit_w32d2h4_distilled_patch8_32", "a deit instead of a vit"),
        (NAMES["vit"], "deit3_w32d2h4_patch8_32", "LayerScale True instead of False"),
        (NAMES["vit"], NAMES["swin"], "a swin instead of a vit"),
        (NAMES["swin"], "swin_w16d2-1h2-4_patch4_window4_32", "depths (2, 1) instead of (2, 2)"),
        (NAMES["swin"], "swin_w16d2-2h2-4_patch4_window2_32", "windows ((2, 2), (2, 2)) instead of ((4, 4), (4, 4))"),
        (NAMES["transformer"], "transformer_w32e2d1h4_v50_l9", "encoder blocks 2 instead of 1"),
    ],
)
def test_a_checkpoint_that_contradicts_its_name_is_refused_with_both(name, other, found, tmp_path):
    path = written(seeded(other).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=name) as caught:
        load_model(Source(model=name, checkpoint=path))
    assert caught.value.message == f"{path} is not a checkpoint of {name}"
    assert caught.value.found == found


def test_what_a_reader_refuses_is_said_with_file_and_name(tmp_path):
    path = written(seeded("vit_w30d2h5_patch8_32").state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=f"weights.safetensors cannot be read as {NAMES['vit']}") as caught:
        load_model(Source(model=NAMES["vit"], checkpoint=path))
    assert "4 heads, width 30" in caught.value.found


# --- another image size ---


@pytest.mark.parametrize("name", [NAMES["vit"], "deit_w32d2h4_distilled_patch8_32", NAMES["swin"], NAMES["detr"]])
def test_an_image_size_other_than_the_checkpoints_resizes(name, tmp_path):
    family, config = catalog.find_or_raise(name)
    size = (96, 64)
    if family.name == "detr":
        state = style_detr()[0]
        base = load_model(Source(model=name, checkpoint=written(state, tmp_path / "base.safetensors")))
        config, state = base.module.config, {key: value.clone() for key, value in base.module.state_dict().items()}
        path = tmp_path / "base.safetensors"
    else:
        state = seeded(name).state_dict()
        path = written(state, tmp_path / "weights.safetensors")
    original = load_model(Source(model=name, checkpoint=path, image_size=size))
    expected, resized = family.resize(config, state, size)
    module = family.build(expected).eval()
    module.load_state_dict(resized)
    assert original.signature.image_size == original.preprocess.crop == size
    own = f"{config.image_size[0]}x{config.image_size[1]}"
    assert f"resized from {own} to 96x64 pixels" in original.notes
    with torch.no_grad():
        theirs = module(image(size))
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert difference(outputs(original, image(size))[0], theirs) < 1e-6


# --- timm:NAME with a file ---


def test_a_name_of_timm_that_is_ours_is_ours(tmp_path):
    path = written(seeded(NAMES["vit"]).state_dict(), tmp_path / "weights.safetensors")
    assert load_model(Source(model=f"timm:{NAMES['vit']}.some_tag", checkpoint=path)).family == "vit"


def test_a_name_of_timm_that_is_not_ours_takes_classes_from_the_file(tmp_path):
    model = randomised(reference("timm").create_model("vit_wee_patch16_reg1_gap_256", num_classes=3))
    path = written(model.state_dict(), tmp_path / "weights.safetensors")
    original = load_model(Source(model="timm:vit_wee_patch16_reg1_gap_256.sbb_in1k", checkpoint=path))
    assert (original.family, original.classes) == ("timm", 3)
    assert any(note.startswith("num_classes 3 in the checkpoint") for note in original.notes)
    with torch.no_grad():
        assert difference(original.module(image((256, 256), batch=1)), model(image((256, 256), batch=1))) < 1e-5


def as_convnext_release(key):
    """ConvNeXt's names for timm's."""
    for ours, theirs in (
        (r"^stem\.", "downsample_layers.0."),
        (r"^stages\.(\d+)\.blocks\.", r"stages.\1."),
        (r"^stages\.(\d+)\.downsample\.", r"downsample_layers.\1."),
        ("conv_dw", "dwconv"),
        (r"mlp\.fc", "pwconv"),
        (r"^head\.norm\.", "norm."),
        (r"^head\.fc\.", "head."),
    ):
        key = re.sub(ours, theirs, key)
    return key


def as_swin_release(key):
    """Swin's names for timm's: a stage ends in what makes the next one smaller."""
    key = re.sub(r"^layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) - 1}.downsample", key)
    return key.replace("head.fc.", "head.")


@pytest.mark.parametrize(
    ("name", "rename"), [("test_convnext", as_convnext_release), ("swinv2_tiny_window8_256", as_swin_release)]
)
def test_a_checkpoint_of_the_papers_authors_is_read_as_timm_reads_it(name, rename, tmp_path):
    theirs = randomised(reference("timm").create_model(name, num_classes=7))
    state = {rename(key): tensor for key, tensor in theirs.state_dict().items()}
    assert state.keys() != theirs.state_dict().keys()
    path = written(state, tmp_path / "weights.safetensors")
    original = load_model(Source(model=f"timm:{name}", checkpoint=path))
    assert original.classes == 7 and any("converted by timm's loader" in note for note in original.notes)
    size = original.signature.image_size
    with torch.no_grad():
        assert difference(original.module(image(size, batch=1)), theirs(image(size, batch=1))) < 1e-5


def test_dinov3_with_biases_that_an_architecture_does_not_have_is_refused_with_the_one_that_has(tmp_path):
    theirs = randomised(reference("timm").create_model("vit_small_patch16_dinov3_qkvb"))
    state = {}
    for key, tensor in theirs.state_dict().items():
        if key.endswith("q_bias"):  # the release has one bias for the three, whose middle is zero
            value = theirs.state_dict()[key.replace("q_bias", "v_bias")]
            state[key.replace("q_bias", "qkv.bias")] = torch.cat([tensor, torch.zeros_like(tensor), value])
        elif not key.endswith("v_bias"):
            key = key.replace("reg_token", "storage_tokens")
            state[re.sub(r"gamma_(\d)", r"ls\1.gamma", key)] = tensor
    path = written(state, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(Source(model="timm:vit_small_patch16_dinov3", checkpoint=path))
    name = caught.value.fix.removeprefix("name ")
    original = load_model(Source(model=name, checkpoint=path))
    with torch.no_grad():
        assert difference(original.module(image((64, 64), batch=1)), theirs(image((64, 64), batch=1))) < 1e-5


# --- refusals ---


def test_no_name_at_all_is_refused():
    with pytest.raises(InputError, match="no model given"):
        load_model(Source())


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownModelError) as caught:
        load_model(Source(model="vit_tinny_patch16_224"))
    assert "vit_tiny_patch16_224" in caught.value.fix


def test_a_name_that_timm_does_not_have_either_is_answered_with_some_that_it_has(tmp_path):
    reference("timm")
    path = written({"x": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(UnknownModelError, match="has no architecture 'swinv2_teeny'") as caught:
        load_model(Source(model="timm:swinv2_teeny", checkpoint=path))
    assert "swinv2_" in caught.value.fix


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_missing_library_is_named_with_the_way_to_install_it(library, tmp_path, monkeypatch):
    import importlib

    real = importlib.import_module

    def without(name, *args):
        if name == library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    config = {"architecture": "swinv2_x"} if library == "timm" else {"model_type": "x", "architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    written({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(MissingPackageError, match=f"needs the package {library}") as caught:
        load_model(Source(model=f"hf:{tmp_path}"))
    assert "vitdeploy[models]" in caught.value.fix


def test_weights_of_no_architecture_are_named(tmp_path):
    path = written({"conv.weight": torch.ones(1), "fc.bias": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="no architecture that vitdeploy knows") as caught:
        load_model(Source(checkpoint=path))
    assert caught.value.found == "2 tensors: conv.weight, fc.bias"
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        load_model(Source(model=NAMES["vit"], checkpoint=path))
    assert "missing: cls_token" in caught.value.found
    assert "2 unexpected: conv.weight, fc.bias" in caught.value.found


def test_a_state_that_is_nearly_one_of_ours_says_whose_and_what_differs(tmp_path):
    state = dict(seeded(NAMES["vit"]).state_dict())
    del state["blocks.1.attn.proj.bias"]
    path = written({**state, "my.extra": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors \(timm's keys of a vit\) does not fit") as caught:
        load_model(Source(checkpoint=path, heads=2))
    assert caught.value.found == "1 missing: blocks.1.attn.proj.bias; 1 unexpected: my.extra"


@pytest.mark.parametrize("named", [False, True])
def test_a_prefix_of_a_training_scripts_own_is_dropped(named, tmp_path):
    state = seeded(NAMES["vit"]).state_dict()
    path = written({f"net.{key}": tensor for key, tensor in state.items()}, tmp_path / "weights.safetensors")
    source = Source(model=NAMES["vit"], checkpoint=path) if named else Source(checkpoint=path, heads=4)
    original = load_model(source)
    assert "prefix 'net.' dropped from all keys" in original.notes
    assert all(torch.equal(tensor, state[key]) for key, tensor in original.module.state_dict().items())


@pytest.mark.parametrize(
    ("made", "name", "what", "fix"),
    [
        ("config.json", "mine", "a folder", "hf:{}"),
        ("notes.txt", "mine", "a folder", "hf:FOLDER, with config.json and weights"),
        ("mine.pt", "mine.pt", "a file", "--checkpoint {}, with or without a model name"),
        (None, "google/vit-base-patch16-224", "not a path here", "hf:google/vit-base-patch16-224"),
    ],
)
def test_a_path_or_repository_instead_of_a_name_is_told_how_to_be_named(made, name, what, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if made is not None:
        path = tmp_path / made if made == name else tmp_path / name / made
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.raises(UnknownModelError, match=f"no built-in model is called '{name}', which is {what}") as caught:
        load_model(Source(model=name))
    assert fix.format(name) in caught.value.fix


def test_heads_that_contradict_the_name_are_told_to_be_left_out(tmp_path):
    path = written(seeded(NAMES["vit"]).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="is not a checkpoint of") as caught:
        load_model(Source(model=NAMES["vit"], checkpoint=path, heads=2))
    assert caught.value.fix.startswith("omit --heads")


def test_a_safetensors_file_may_begin_with_the_byte_of_a_pickle(tmp_path):
    for length in range(60, 140):
        path = written({"x" * length: torch.ones(1)}, tmp_path / "weights.safetensors")
        if path.read_bytes()[0] == 0x80:
            break
    assert path.read_bytes()[0] == 0x80
    with pytest.raises(CheckpointError, match="no architecture"):
        load_model(Source(checkpoint=path))


def test_heads_that_nothing_tells_are_asked_for(tmp_path):
    path = written(seeded(NAMES["vit"]).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="tensors do not determine the number of attention heads") as caught:
        load_model(Source(checkpoint=path))
    assert "--heads" in caught.value.fix


def test_channels_that_no_image_has_are_refused(tmp_path):
    path = written(seeded(NAMES["vit"], in_channels=5).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="does not take images") as caught:
        load_model(Source(model=NAMES["vit"], checkpoint=path))
    assert caught.value.found == "5 input channels"


# --- the measuring process ---


@pytest.mark.parametrize(
    "source",
    [
        Source(model=NAMES["vit"], checkpoint="weights.safetensors", image_size=(32, 48), heads=4),
        Source(model="hf:folder", text_features="text.npy"),
        Source(function="package.module:function", image_size=(64, 64)),
    ],
)
def test_a_measuring_process_gets_the_same_source(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {name: tmp_path / file for name in ("checkpoint", "text_features") if (file := getattr(source, name))}
    source = dataclasses.replace(source, **files)
    request = json.loads(json.dumps(to_request(source)))
    monkeypatch.chdir("/")
    assert from_request(request) == source


def test_relative_paths_of_a_source_are_made_absolute_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = to_request(Source(checkpoint=tmp_path.relative_to(tmp_path) / "weights.pt"))
    assert from_request(request).checkpoint == tmp_path / "weights.pt"


# --- the list ---


@pytest.mark.parametrize("pattern", ["vit_giant*", "deit_*", "swin_base*", "detr_resnet50", "transformer_base"])
def test_the_list_counts_every_parameter_of_the_module(pattern):
    entries = list(catalog.entries(pattern))
    assert entries
    for entry in entries[:2]:
        family, config = catalog.find_or_raise(entry.name)
        with torch.device("meta"):
            module = family.build(config)
        assert entry.parameters == sum(parameter.numel() for parameter in module.parameters())
        assert (entry.family, entry.image_size) == (family.name, family.describe(config).image_size)

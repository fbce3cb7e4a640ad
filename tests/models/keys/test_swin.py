"""Swin checkpoints of timm, Microsoft, torchvision and transformers: recognised, renamed, then the same function."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.swin import SwinConfig, SwinTransformer
from vitdeploy.models.architectures.vit import VisionTransformer, ViTConfig
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.families.swin import recognise, resize
from vitdeploy.models.family import Hints

SMALL = SwinConfig((32, 32), 4, 3, width=16, depths=(2, 2), heads=(2, 4), windows=(4, 4), num_classes=10)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """No weight at a neutral value: a wrong mapping cannot hide."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module.double().eval()


def image_of(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def of_timm(config: SwinConfig) -> torch.nn.Module:
    reference("timm")
    from timm.models.swin_transformer import SwinTransformer as Theirs

    return randomised(
        Theirs(
            img_size=config.image_size,
            patch_size=config.patch_size,
            num_classes=config.num_classes,
            embed_dim=config.width,
            depths=config.depths,
            num_heads=config.heads,
            window_size=tuple((side, side) for side in config.windows),
            mlp_ratio=config.mlp_ratio,
        )
    )


def of_torchvision(config: SwinConfig) -> torch.nn.Module:
    reference("torchvision")
    from torchvision.models.swin_transformer import SwinTransformer as Theirs

    sizes = ([config.patch_size] * 2, config.width, list(config.depths), list(config.heads), [config.windows[0]] * 2)
    return randomised(Theirs(*sizes, num_classes=config.num_classes))


def of_transformers(config: SwinConfig, kind: str = "SwinForImageClassification") -> torch.nn.Module:
    library = reference("transformers")
    settings = library.SwinConfig(
        image_size=list(config.image_size),
        patch_size=config.patch_size,
        embed_dim=config.width,
        depths=list(config.depths),
        num_heads=list(config.heads),
        window_size=config.windows[0],
        mlp_ratio=config.mlp_ratio,
        qkv_bias=config.qkv_bias,
        num_labels=config.num_classes,
        attn_implementation="sdpa",  # the eager attention computes its softmax in float32
    )
    return randomised(getattr(library, kind)(settings))


def read(state: dict[str, Tensor], **hints) -> tuple[SwinTransformer, object]:
    """The module that the state dict makes, loaded strictly, and what was recognised."""
    found = recognise(state, Hints(**hints))
    assert found is not None
    model = SwinTransformer(found.config).double()
    load_state(model, found.state, "the state dict")
    return model.eval(), found


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def before_timm_0_9(theirs: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict that Microsoft's code, or an old timm, would have saved of this model."""
    old = {}
    for key, tensor in theirs.state_dict().items():
        key = re.sub(r"layers\.(\d)\.downsample", lambda stage: f"layers.{int(stage[1]) - 1}.downsample", key)
        old[key.replace("head.fc.", "head.")] = tensor
    for i, stage in enumerate(theirs.layers):
        for j, block in enumerate(stage.blocks):
            old[f"layers.{i}.blocks.{j}.attn.relative_position_index"] = block.attn.relative_position_index
            if block.attn_mask is not None:
                old[f"layers.{i}.blocks.{j}.attn_mask"] = block.attn_mask
    return old


# --- timm and Microsoft -----------------------------------------------------------------------------------------------

TIMM = {
    "small": SMALL,
    "features": replace(SMALL, num_classes=0),
    "four stages": replace(SMALL, depths=(1, 2, 1, 1), heads=(1, 2, 4, 8), windows=(4,) * 4, image_size=(128, 128)),
    "a window for each stage": replace(SMALL, windows=(2, 4)),
    "the first one larger, as in S3": replace(SMALL, windows=(8, 4)),
    "mlp 2.75": replace(SMALL, mlp_ratio=2.75),
}


@pytest.mark.parametrize("config", TIMM.values(), ids=TIMM)
def test_timms_state_dict_tells_the_configuration_and_loads_as_it_is(config, parity):
    theirs = of_timm(config)
    ours, found = read(theirs.state_dict())
    assert (found.family, found.style, found.config) == ("swin", "timm", config)
    with torch.no_grad():
        outputs = ours(image_of(config.image_size))
        logits = outputs if config.num_classes else outputs[0]
        parity("Swin", "timm", logits, theirs(image_of(config.image_size)), keys=found.style)


@pytest.mark.parametrize(("width", "ratio"), [(16, 8 / 3), (112, 61 / 112)])
def test_an_mlp_of_no_whole_ratio_has_its_sizes(width, ratio):
    """timm gives 42 and 85 hidden features for the first; the second's 61 are more than 112 * (61 / 112) in floats."""
    config = replace(SMALL, width=width, mlp_ratio=ratio)
    state = {**SwinTransformer(config).state_dict()}
    ours, _ = read(state)
    assert [block.mlp.fc1.out_features for block in (ours.layers[0].blocks[0], ours.layers[1].blocks[0])] == [
        state[f"layers.{i}.blocks.0.mlp.fc1.weight"].shape[0] for i in (0, 1)
    ]
    assert state["layers.0.blocks.0.mlp.fc1.weight"].shape[0] == {16: 42, 112: 61}[width]


def test_the_image_size_is_assumed_and_said_so():
    _, found = read(of_timm(SMALL).state_dict())
    assumed = "image size is not in the checkpoint: assuming 32x32, at which the last stage is one window"
    assert found.notes == (f"{assumed} (override: --image-size)",)


def test_the_original_release_merges_patches_at_the_end_of_a_stage(parity):
    config = replace(SMALL, image_size=(64, 64), depths=(2, 2, 2), heads=(1, 2, 4), windows=(4,) * 3)
    theirs = of_timm(config)
    state = before_timm_0_9(theirs)
    assert {"layers.0.downsample.reduction.weight", "head.weight", "layers.0.blocks.1.attn_mask"} <= set(state)
    ours, found = read(state)
    assert (found.style, found.config) == ("original", config)
    assert found.notes == ("8 stored indices and masks left out: they are computed",)
    with torch.no_grad():
        parity("Swin", "timm", ours(image_of((64, 64))), theirs(image_of((64, 64))), keys=found.style)


def test_stored_masks_tell_the_image_size():
    """Without them it would be 32x32."""
    _, found = read(before_timm_0_9(of_timm(replace(SMALL, image_size=(96, 96)))))
    assert found.config.image_size == (96, 96)


def test_a_headless_checkpoint_is_a_feature_extractor():
    state = {key: value for key, value in before_timm_0_9(of_timm(SMALL)).items() if not key.startswith("head.")}
    _, found = read(state)
    assert (found.style, found.config.num_classes) == ("original", 0)
    assert "no classification head: used as a feature extractor" in found.notes


# --- torchvision and transformers -------------------------------------------------------------------------------------

# What the two do where a window does not fit, and timm does otherwise.
FITS = {"whole windows": (32, 64)}
PADDED = {"padded": (48, 40), "odd merging": (60, 36), "one row of windows": (32, 96)}


@pytest.mark.parametrize("size", [*FITS.values(), *PADDED.values(), (16, 64), (8, 12)], ids=str)
def test_torchvisions_state_dict_gives_torchvisions_logits_at_every_size(size, parity):
    """At 8x12 pixels there are 2x3 tokens in windows of 4x4."""
    theirs = of_torchvision(SMALL)
    ours, found = read(theirs.state_dict(), image_size=size)
    assert (found.style, found.config) == ("torchvision", replace(SMALL, image_size=size, border="torchvision"))
    assert found.notes == ("4 stored indices and masks left out: they are computed",)
    with torch.no_grad():
        parity("Swin", "torchvision", ours(image_of(size)), theirs(image_of(size)), keys=found.style)


@pytest.mark.parametrize("size", [*FITS.values(), *PADDED.values()], ids=str)
def test_transformers_state_dict_gives_transformers_logits_at_every_size(size, parity):
    theirs = of_transformers(replace(SMALL, image_size=size))
    ours, found = read(theirs.state_dict(), config=theirs.config.to_dict())
    assert (found.style, found.config) == ("transformers", replace(SMALL, image_size=size, border="transformers"))
    assert found.notes == ("query, key and value joined into one linear in 4 blocks",)
    with torch.no_grad():
        parity("Swin", "transformers", ours(image_of(size)), theirs(image_of(size)).logits, keys=found.style)


@pytest.mark.parametrize("style", ["torchvision", "transformers"])
def test_these_sizes_do_tell_the_implementations_apart(style):
    """Or the two tests above would prove nothing of the order of padding and shifting."""
    size = PADDED["padded"]
    theirs = of_torchvision(SMALL) if style == "torchvision" else of_transformers(replace(SMALL, image_size=size))
    ours, found = read(theirs.state_dict(), image_size=size)
    timms = SwinTransformer(replace(found.config, border="timm")).double().eval()
    timms.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert difference(timms(image_of(size)), ours(image_of(size))) > 1e-3


def test_a_resized_torchvision_model_keeps_its_windows():
    theirs = of_torchvision(SMALL)
    _, found = read(theirs.state_dict())
    config, state = resize(found.config, found.state, (48, 12))
    ours = SwinTransformer(config).double().eval()
    ours.load_state_dict(state)
    with torch.no_grad():
        assert difference(ours(image_of((48, 12))), theirs(image_of((48, 12)))) <= 1e-10


def test_transformers_files_keep_the_names_of_the_hub(tmp_path):
    """Its modules have other names since version 5; what it writes does not."""
    theirs = of_transformers(SMALL)
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "swin.encoder.layers.0.blocks.0.attention.self.query.weight" in state
    assert "swin.encoder.layers.0.blocks.0.attention.q_proj.weight" in theirs.state_dict()
    stored = "swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"
    ours, found = read({**state, stored: torch.zeros(16, 16)})
    assert (found.style, found.config) == ("transformers", replace(SMALL, border="transformers"))
    with torch.no_grad():
        assert difference(ours(image_of((32, 32))), theirs(image_of((32, 32))).logits) <= 1e-10


def test_transformers_backbone_gives_its_tokens_and_their_average(parity):
    config = replace(SMALL, image_size=(40, 32), qkv_bias=False)
    theirs = of_transformers(config, "SwinModel")
    ours, found = read(theirs.state_dict(), image_size=config.image_size)
    assert found.config == replace(config, num_classes=0, border="transformers")
    with torch.no_grad():
        features = ours(image_of(config.image_size))
        expected = theirs(image_of(config.image_size))
    parity("Swin", "transformers", features, [expected.pooler_output, expected.last_hidden_state], keys=found.style)


def test_parts_of_masked_pre_training_are_left_out():
    theirs = of_transformers(SMALL, "SwinForMaskedImageModeling")
    _, found = read(theirs.state_dict())
    left_out = "swin.embeddings.mask_token, decoder.0.weight, decoder.0.bias left out: used in masked pre-training only"
    assert found.notes[0] == left_out


def test_transformers_cannot_compute_windows_larger_than_the_resolution():
    """That is its own limit: no function, so none to be equal to."""
    theirs = of_transformers(SMALL)
    with torch.no_grad(), pytest.raises(RuntimeError):
        theirs(image_of((16, 16)))
    _, found = read(theirs.state_dict())
    with pytest.raises(CheckpointError, match="cannot be built for this image size") as caught:
        resize(found.config, found.state, (16, 16))
    assert "2x2 tokens and windows of 4x4, which the transformers library cannot compute" in caught.value.found


# --- image sizes and windows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"architecture": "swin_tiny_patch4_window7_224", "pretrained_cfg": {"input_size": [3, 96, 64]}},
        {"architecture": "swin_tiny_patch4_window7_224", "input_size": [3, 96, 64]},
        {"model_type": "swin", "image_size": [96, 64]},
    ],
    ids=["timm", "timm, old", "transformers"],
)
def test_the_config_beside_the_checkpoint_tells_the_image_size(config):
    _, found = read(of_timm(SMALL).state_dict(), config=config)
    assert found.config.image_size == (96, 64)


def test_a_square_image_size_may_be_one_number():
    assert read(of_timm(SMALL).state_dict(), config={"image_size": 96})[1].config.image_size == (96, 96)


def test_the_users_image_size_goes_before_that_of_the_config():
    _, found = read(of_timm(SMALL).state_dict(), config={"image_size": 96}, image_size=(64, 64))
    assert found.config.image_size == (64, 64)


@pytest.mark.parametrize("size", [(24, 24), (20, 56), (28, 56)], ids=str)
def test_windows_that_shrank_with_the_image_are_recognised_at_its_size(size):
    """At 20x56 the tables are those of windows of 5x7 and 3x7 tokens."""
    theirs = of_timm(replace(SMALL, windows=(7, 7), image_size=size))
    ours, found = read(theirs.state_dict(), image_size=size)
    assert found.notes == ()
    with torch.no_grad():
        assert difference(ours(image_of(size)), theirs(image_of(size))) <= 1e-10


@pytest.mark.filterwarnings("ignore::UserWarning")  # timm's interpolation, of PyTorch
def test_tables_of_a_larger_image_are_resized_to_the_size_that_was_asked_for():
    from timm.models.swin_transformer import checkpoint_filter_fn

    state = of_timm(replace(SMALL, windows=(7, 7), image_size=(56, 56))).state_dict()
    theirs = of_timm(replace(SMALL, windows=(7, 7), image_size=(24, 24)))
    theirs.load_state_dict(checkpoint_filter_fn(state, theirs))
    ours, found = read(state, image_size=(24, 24))
    assert found.notes == (
        "stage 0: bias tables resized from a window of 7x7 to 6x6",
        "stage 1: bias tables resized from a window of 7x7 to 3x3",
    )
    with torch.no_grad():
        assert difference(ours(image_of((24, 24))), theirs(image_of((24, 24)))) <= 1e-5


def test_a_table_of_no_square_window_needs_the_image_size():
    state = of_timm(replace(SMALL, windows=(7, 7), image_size=(20, 56))).state_dict()
    with pytest.raises(CheckpointError, match="tensors do not determine the window of this Swin Transformer") as caught:
        recognise(state, Hints())
    assert caught.value.found == "a bias table of 65 rows, which does not match a square window"
    assert caught.value.fix == "--image-size HEIGHTxWIDTH"


# --- what is not a Swin Transformer, or not one of ours ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["swinv2_cr_tiny_224", "beit_base_patch16_224", "swinv2_tiny_window8_256"])
def test_models_of_other_families_are_left_to_them(name):
    timm = reference("timm")
    with torch.device("meta"):
        state = timm.create_model(name).state_dict()
    assert recognise(state, Hints()) is None


def test_a_vit_is_left_to_its_family():
    assert (
        recognise(VisionTransformer(ViTConfig((16, 16), 8, width=16, depth=1, heads=2)).state_dict(), Hints()) is None
    )


@pytest.mark.parametrize(
    ("extra", "config", "found"),
    [
        ({"absolute_pos_embed": torch.zeros(1, 64, 16)}, {}, "absolute position embeddings"),
        ({"swin.embeddings.position_embeddings": torch.zeros(1)}, {}, "absolute position embeddings"),
        ({}, {"hidden_act": "relu"}, "an activation other than GELU"),
        ({}, {"layer_norm_eps": 1e-6}, "a LayerNorm epsilon other than 1e-5"),
        ({}, {"model_args": {"always_partition": True}}, "always_partition"),
    ],
    ids=["original", "transformers", "activation", "epsilon", "timm"],
)
def test_variants_that_we_do_not_have_are_refused(extra, config, found):
    state = SwinTransformer(SMALL).state_dict()
    with pytest.raises(CheckpointError, match="does not support this variant of the Swin Transformer") as caught:
        recognise({**state, **extra}, Hints(config=config))
    assert caught.value.found == found


def test_blocks_of_a_stage_that_are_missing_are_named():
    state = {key: value for key, value in SwinTransformer(SMALL).state_dict().items() if ".blocks.0." not in key}
    state = {key: value for key, value in state.items() if not key.startswith("layers.0.blocks.1.")}
    with pytest.raises(CheckpointError, match="stage 0 of a Swin Transformer cannot be read"):
        recognise(state, Hints())


def test_patches_that_are_not_square_are_refused():
    state = {**SwinTransformer(SMALL).state_dict(), "patch_embed.proj.weight": torch.zeros(16, 3, 4, 8)}
    with pytest.raises(CheckpointError, match="the patches are not square") as caught:
        recognise(state, Hints())
    assert caught.value.found == "4x8"


def test_sizes_that_contradict_each_other_are_refused():
    with pytest.raises(CheckpointError, match="is not a valid Swin Transformer") as caught:
        recognise(SwinTransformer(SMALL).state_dict(), Hints(image_size=(30, 32)))
    assert caught.value.found.startswith("image size 30x32 is not divisible by the patch size 4")


def test_keys_that_nobody_knows_are_named_when_the_model_is_loaded():
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        read({**SwinTransformer(SMALL).state_dict(), "layers.0.adapter.weight": torch.zeros(1)})
    assert caught.value.found == "1 unexpected: layers.0.adapter.weight"


STATES = {
    "timm": lambda: SwinTransformer(SMALL).state_dict(),
    "transformers": lambda: of_transformers(SMALL).state_dict(),
}


@pytest.mark.parametrize("style", STATES)
def test_a_damaged_state_dict_is_read_or_refused_but_never_a_bug(style):
    whole = STATES[style]()

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        st.lists(st.sampled_from(sorted(whole)), max_size=4),
        st.dictionaries(st.sampled_from(sorted(whole)), st.lists(st.integers(0, 5), max_size=4), max_size=3),
    )
    def check(dropped, misshapen):
        state = {key: value for key, value in whole.items() if key not in dropped}
        state |= {key: torch.zeros(shape) for key, shape in misshapen.items()}
        try:
            found = recognise(state, Hints())
            if found is not None:
                load_state(SwinTransformer(found.config).double(), found.state, "damaged")
        except CheckpointError:
            pass

    check()

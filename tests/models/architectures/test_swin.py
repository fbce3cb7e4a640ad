"""The Swin Transformer against timm's: every weight random, regular and shifted windows, sizes that do not fit them."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx.shape_inference import infer_shapes
from torch import Tensor

from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models.architectures.swin import SwinConfig, SwinTransformer, relative_position_index, shift_mask
from vitdeploy.models.families.swin import FAMILY, parse, resize, resize_table
from vitdeploy.spec import PreprocessSpec, TensorSpec

SMALL = SwinConfig((32, 32), 4, 3, width=16, depths=(2, 2), heads=(2, 4), windows=(4, 4), num_classes=10)
# (height, width), windows of the two stages: what the size does to them.
SIZES = {
    "whole windows": ((64, 64), (4, 4)),
    "not square": ((32, 64), (4, 4)),
    "the last stage is one window": ((32, 32), (4, 4)),
    "padded": ((48, 48), (5, 5)),
    "padded on one axis, odd merging": ((60, 36), (4, 4)),
    "padded by different amounts": ((44, 52), (7, 5)),
    "shrunk window": ((24, 24), (7, 7)),
    "window shrunk on one axis": ((20, 56), (7, 7)),
    "shifted along one axis": ((28, 56), (7, 7)),
    "one token in the last stage": ((8, 8), (2, 2)),
    "windows of one token": ((16, 24), (1, 1)),
    "a window for each stage": ((64, 64), (4, 8)),
}
TINY_PARAMETERS = 28_288_354  # published with torchvision's weights


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """No weight at a neutral value: every term has to be in its place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def images(config: SwinConfig, batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, config.in_channels, *config.image_size, generator=generator, dtype=dtype)


def of_timm(config: SwinConfig, **arguments) -> torch.nn.Module:
    reference("timm")
    from timm.models.swin_transformer import SwinTransformer as Theirs

    return Theirs(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=config.num_classes,
        embed_dim=config.width,
        depths=config.depths,
        num_heads=config.heads,
        window_size=tuple((side, side) for side in config.windows),
        mlp_ratio=config.mlp_ratio,
        qkv_bias=config.qkv_bias,
        **arguments,
    )


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_logits_equal_those_of_timm(name, parity):
    size, windows = SIZES[name]
    config = replace(SMALL, image_size=size, windows=windows, depths=(2, 3))
    theirs = randomise(of_timm(config)).double()
    ours = SwinTransformer(config).double().eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        parity("Swin", "timm", ours(images(config, 2)), theirs(images(config, 2)))


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, in_channels=1, patch_size=2, image_size=(16, 16)),
        replace(SMALL, mlp_ratio=2.5, qkv_bias=False, heads=(1, 8)),
        replace(SMALL, depths=(1,), heads=(2,), windows=(4,)),
        replace(SMALL, image_size=(64, 64), depths=(1, 2, 2, 1), heads=(1, 2, 4, 8), windows=(4, 4, 4, 2)),
    ],
    ids=["grey, patch 2", "no bias, mlp 2.5", "one stage", "four stages"],
)
def test_logits_equal_those_of_timm_for_other_shapes(config, parity):
    theirs = randomise(of_timm(config)).double()
    ours = SwinTransformer(config).double().eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        parity("Swin", "timm", ours(images(config, 2)), theirs(images(config, 2)))


def test_in_float32_logits_are_within_1e_5_of_timm(parity):
    theirs = randomise(of_timm(SMALL))
    ours = SwinTransformer(SMALL).eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        parity("Swin", "timm", ours(images(SMALL, 3).float()), theirs(images(SMALL, 3).float()))


def test_features_are_timms_normalised_tokens_and_their_average(parity):
    config = replace(SMALL, image_size=(40, 56), num_classes=0)
    theirs = randomise(of_timm(config)).double()
    ours = SwinTransformer(config).double().eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        tokens = theirs.forward_features(images(config, 2)).flatten(1, 2)
        parity("Swin", "timm", ours(images(config, 2)), [theirs(images(config, 2)), tokens])


def test_without_patch_norm_the_embedding_is_the_convolution_alone():
    config = replace(SMALL, patch_norm=False)
    model = randomise(SwinTransformer(config))
    assert not [key for key in model.state_dict() if key.startswith("patch_embed.norm")]
    image = images(config, 1, torch.float32)
    with torch.no_grad():
        embedded = model.patch_embed(image)
        assert torch.equal(embedded, model.patch_embed.proj(image).flatten(2).transpose(1, 2))


def test_an_image_does_not_change_the_logits_of_its_neighbour_in_the_batch():
    model = randomise(SwinTransformer(SMALL)).double()
    together = images(SMALL, 3)
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in together])
        assert difference(model(together), alone) <= 1e-12


def test_a_model_built_without_storage_computes_the_same_once_its_weights_are_loaded():
    """Checkpoints are loaded this way; a computed buffer would be left uninitialised."""
    model = randomise(SwinTransformer(SMALL))
    with torch.device("meta"):
        empty = SwinTransformer(SMALL)
    loaded = empty.to_empty(device="cpu").eval()
    loaded.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(images(SMALL, 1).float()), model(images(SMALL, 1).float()))


def test_the_bias_table_is_read_as_in_the_paper():
    """Section 3.2: relative positions of a 2x3 window lie in [-1, 1] and [-2, 2]; index 0 is one up and two left."""
    index = relative_position_index((2, 3))
    assert index.shape == (6, 6)
    assert (index.min(), index.max()) == (0, 14)
    assert set(np.diag(index)) == {7}
    assert index[0, 5] == 0  # the query in the first row and column, the key one down and two right
    assert index[5, 0] == 14
    assert index[1, 0] == 8


def test_the_mask_keeps_apart_what_only_the_cyclic_shift_brought_together():
    stage = replace(SMALL, image_size=(32, 48)).stages[0]  # 8x12 tokens, windows of 4x4
    mask = shift_mask(stage)
    assert mask.shape == (6, 16, 16)
    assert set(np.unique(mask)) == {-100.0, 0.0}
    assert not mask[0].any() and not mask[1].any()  # inside the image
    assert (mask[2] == 0).mean() == 0.5  # the right edge: two halves
    assert (mask[5] == 0).mean() == 0.25  # the corner: four quarters


def test_number_of_parameters_is_the_published_one():
    with torch.device("meta"):
        model = SwinTransformer(FAMILY.names["swin_tiny_patch4_window7_224"])
    assert sum(parameter.numel() for parameter in model.parameters()) == TINY_PARAMETERS


@pytest.mark.parametrize(
    "name",
    [
        "swin_tiny_patch4_window7_224",
        "swin_small_patch4_window7_224",
        "swin_base_patch4_window12_384",
        "swin_large_patch4_window7_224",
    ],
)
def test_built_in_names_have_timms_parameters(name):
    timm = reference("timm")
    with torch.device("meta"):
        ours, theirs = SwinTransformer(FAMILY.names[name]).state_dict(), timm.create_model(name).state_dict()
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in theirs.items()}


def test_a_fresh_model_has_truncated_normal_weights_and_tables_and_zero_biases():
    torch.manual_seed(0)
    state = FAMILY.build(replace(SMALL, width=32)).state_dict()
    drawn = [value for key, value in state.items() if value.ndim == 2]
    assert all(0.015 < float(tensor.std()) < 0.025 for tensor in drawn)
    assert all(not value.any() for key, value in state.items() if key.endswith("bias") and "patch" not in key)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("swin_tiny_patch4_window7_224", SwinConfig()),
        (
            "swin_base_patch4_window12_384",
            SwinConfig((384, 384), 4, 3, 128, (2, 2, 18, 2), (4, 8, 16, 32), (12, 12, 12, 12)),
        ),
        ("swin_w16d2-2h2-4_patch4_window4_32", replace(SMALL, num_classes=1000)),
        (
            "swin_w16d2-2h2-4_patch2_window4-2_32x48",
            replace(SMALL, num_classes=1000, patch_size=2, image_size=(32, 48), windows=(4, 2)),
        ),
    ],
)
def test_a_name_spells_out_the_whole_configuration(name, config):
    assert parse(name) == config


def test_the_names_listed_are_those_of_the_paper_and_parse_to_what_is_listed():
    assert len(FAMILY.names) == 6
    assert all(parse(name) == config for name, config in FAMILY.names.items())


@pytest.mark.parametrize(
    "name", ["", "vit_tiny_patch16_224", "swin_tiny", "swin_huge_patch4_window7_224", "swinv2_tiny_window8_256"]
)
def test_names_of_others_are_left_to_them(name):
    assert parse(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_w16d2-2h2_patch4_window4_32", "the stages do not match: 2 depths, 1 heads, 2 windows"),
        ("swin_w16d2-2h2-4_patch4_window4-4-4_32", "2 depths, 2 heads, 3 windows"),
        ("swin_w16d2-2h3-4_patch4_window4_32", "width 16 is not divisible by 3 heads"),
        ("swin_w16d0-2h2-4_patch4_window4_32", "sizes of 0: depths"),
        ("swin_w16d2-2h2-4_patch4_window0_32", "sizes of 0: windows"),
        (
            "swin_tiny_patch4_window7_225",
            "225x225 is not divisible by the patch size 4; use a multiple of 4; multiples of 224 need no padding",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(name, reason):
    with pytest.raises(UnknownModelError) as caught:
        parse(name)
    assert reason in caught.value.found


def test_a_negative_number_of_classes_is_refused():
    with pytest.raises(ValueError, match="number of classes is -1"):
        replace(SMALL, num_classes=-1)


# --- signature and preprocessing --------------------------------------------------------------------------------------


def test_a_classifier_gives_logits():
    signature = FAMILY.describe(replace(SMALL, in_channels=1))
    assert (signature.task, signature.image_size, signature.channels) == ("classification", (32, 32), 1)
    assert signature.outputs == (TensorSpec("logits", "float32", ("batch", 10)),)


def test_the_signature_of_a_feature_extractor_is_what_it_returns():
    config = replace(SMALL, image_size=(36, 64), num_classes=0)
    signature = FAMILY.describe(config)
    assert signature.task == "features"
    assert [output.name for output in signature.outputs] == ["features", "patch_features"]
    with torch.no_grad():
        outputs = SwinTransformer(config)(images(config, 2).float())
    assert [output.with_batch(2).shape for output in signature.outputs] == [tuple(tensor.shape) for tensor in outputs]


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swin_base_patch4_window12_384"])
def test_default_preprocessing_is_timms(name):
    timm = reference("timm")
    theirs = timm.get_pretrained_cfg(name)
    side = theirs.input_size[-1]
    assert FAMILY.preprocess(FAMILY.names[name]) == PreprocessSpec(
        int(side / theirs.crop_pct), (side, side), theirs.interpolation, theirs.mean, theirs.std
    )


def test_grey_images_have_one_mean():
    assert FAMILY.preprocess(replace(SMALL, in_channels=1)).channels == 1


def test_a_model_of_four_channels_takes_no_images():
    with pytest.raises(CheckpointError, match="does not take images") as caught:
        FAMILY.preprocess(replace(SMALL, in_channels=4))
    assert caught.value.found == "4 input channels"


# --- other image sizes ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")  # timm's interpolation, of PyTorch
@pytest.mark.parametrize(
    ("old", "new"),
    [((4, 4), (7, 7)), ((7, 7), (12, 12)), ((7, 7), (4, 4)), ((7, 7), (3, 7)), ((3, 5), (6, 2)), ((1, 2), (3, 3))],
    ids=str,
)
def test_bias_tables_are_resized_as_by_timm(old, new):
    reference("timm")
    from timm.layers import resize_rel_pos_bias_table

    table = torch.randn((2 * old[0] - 1) * (2 * old[1] - 1), 3)
    shape = ((2 * new[0] - 1) * (2 * new[1] - 1), 3)
    theirs = resize_rel_pos_bias_table(table, new, shape, old_window_size=old)
    ours = resize_table(table, old, new)
    assert ours.dtype == table.dtype
    assert difference(ours, theirs) <= 1e-5


@pytest.mark.filterwarnings("ignore::UserWarning")  # timm's interpolation, of PyTorch
@pytest.mark.parametrize("size", [(64, 64), (16, 16), (24, 52), (96, 32)], ids=str)
def test_another_image_size_gives_the_logits_of_timms_model_of_that_size(size):
    """timm builds the model for the new size, with the windows of the name, and resizes tables as it loads."""
    config = replace(SMALL, windows=(7, 7), image_size=(56, 56))
    original = randomise(of_timm(config))
    from timm.models.swin_transformer import checkpoint_filter_fn

    theirs = of_timm(replace(config, image_size=size)).eval()
    theirs.load_state_dict(checkpoint_filter_fn(original.state_dict(), theirs))
    resized, state = resize(config, original.state_dict(), size)
    ours = SwinTransformer(resized).eval()
    ours.load_state_dict(state)
    with torch.no_grad():
        image = images(resized, 2)
        assert difference(ours.double()(image), theirs.double()(image)) <= 1e-5


def test_the_same_size_changes_nothing():
    state = SwinTransformer(SMALL).state_dict()
    config, same = resize(SMALL, state, (32, 32))
    assert config == SMALL
    assert all(torch.equal(state[key], same[key]) for key in state)


@pytest.mark.parametrize("size", [(30, 32), (0, 32)], ids=str)
def test_an_image_size_that_patches_do_not_divide_is_refused(size):
    with pytest.raises(CheckpointError, match="cannot be built for this image size") as caught:
        resize(SMALL, SwinTransformer(SMALL).state_dict(), size)
    assert ("use a multiple of 4; multiples of 32 need no padding" in caught.value.found) == (size[0] > 0)


# --- the exported graph -----------------------------------------------------------------------------------------------

# All at once: a regular and a shifted block, padding to 9x12 and to 4x8 tokens, merging of 7x11 tokens.
EXPORTED = replace(SMALL, image_size=(28, 44), windows=(3, 4), depths=(2, 1))
PIXELS = PreprocessSpec(31, (28, 44), "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ALLOWED = {
    *("Conv", "LayerNormalization", "MatMul", "Add", "Mul", "Softmax", "Gelu", "ReduceMean"),
    *("Reshape", "Transpose", "Slice", "Squeeze", "Split", "Concat", "Pad"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The model, its graph, and the path of its file."""
    torch.manual_seed(0)
    model = randomise(SwinTransformer(EXPORTED))
    with torch.no_grad():
        graph = export_graph(
            model,
            name="swin",
            preprocess=PIXELS,
            image_size=EXPORTED.image_size,
            opset=20,
            batch=None,
            in_graph=False,
        )
    path = tmp_path_factory.mktemp("swin") / "model.onnx"
    save_graph(graph, path)
    return model, graph, path


def test_bias_and_mask_are_constants_and_nothing_counts_at_run_time(exported):
    _, graph, _ = exported
    assert {node.op_type for node in graph.graph} <= ALLOWED
    integers = [
        output
        for node in graph.graph
        for output in node.outputs
        if output.dtype is not None and output.dtype.is_integer()
    ]
    assert not integers
    softmaxes = [node for node in graph.graph if node.op_type == "Softmax"]
    assert len(softmaxes) == 3
    for softmax in softmaxes:
        add = softmax.inputs[0].producer()
        assert add.op_type == "Add" and add.inputs[0].producer().op_type == "MatMul"
        assert add.inputs[1].const_value is not None


def test_no_tensor_has_more_than_five_axes(exported):
    _, _, path = exported
    shapes = [value.type.tensor_type.shape.dim for value in infer_shapes(onnx.load(path)).graph.value_info]
    assert len(shapes) > 50
    assert max(map(len, shapes)) <= 5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch", BATCHES)
def test_both_engines_agree_at_every_batch(exported, engine, batch, parity):
    model, _, path = exported
    image = images(model.config, batch, torch.float32)
    with torch.no_grad(), engine_runner(engine, path, batch) as runner:
        parity("Swin", engine, runner.infer({"image": image.numpy()})["logits"], model(image), top1=True)

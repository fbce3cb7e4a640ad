"""Config files as timm, transformers and the hub have them: preprocessing and labels, and what is refused."""

import json
import sys
from dataclasses import replace

import pytest

from tests.references import reference
from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.json_file import read_json
from vitdeploy.models.model_folder import image_processor
from vitdeploy.models.model_folder.folder import labels_for, timm_config
from vitdeploy.models.model_folder.image_processor import (
    CLIP_MEAN,
    CLIP_STD,
    COMMON,
    HALF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PROCESSORS,
    defaults_of,
    fixed_size,
    timm_preprocess,
    transformers_preprocess,
    transformers_processor,
)
from vitdeploy.spec import PreprocessSpec

SQUARE = (224, 224)


def refused(config, size=SQUARE, channels=3, read=transformers_preprocess):
    with pytest.raises(CheckpointError, match="does not support the checkpoint's preprocessing") as caught:
        read(config, channels, size)
    assert caught.value.fix
    return caught.value


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_json_object_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"a": "ü"}', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"a": "ü"}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MissingFileError, match=r"no config\.json in"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "data", [b"", b"[1]", b"{", b"\xff{}", b"[" * 100_000, b'{"a": "' + b"a" * (16 << 20) + b'"}'], ids=range(6)
)
def test_anything_else_is_refused(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"config\.json is not a config file"):
        read_json(tmp_path / "config.json")


def test_the_processor_inside_another_one_counts_first(tmp_path):
    assert transformers_processor(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text('{"size": 224}')
    assert transformers_processor(tmp_path) == {"size": 224}
    (tmp_path / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    assert transformers_processor(tmp_path) == {"size": 224}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"size": 384}}')
    assert transformers_processor(tmp_path) == {"size": 384}


# --- timm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "size", "resize"),
    [
        ({"crop_pct": 0.9}, (224, 224), 248),
        ({"crop_pct": 0.875}, (224, 224), 256),
        ({"crop_pct": 1.0}, (384, 384), 384),
        ({}, (224, 224), 256),
        ({"crop_pct": 0.95, "crop_mode": "squash"}, (384, 384), (404, 404)),
        ({"crop_pct": 1.0, "crop_mode": "squash"}, (64, 96), (64, 96)),
        ({"crop_pct": 0.9, "input_size": [3, 192, 192], "test_input_size": [3, 256, 256]}, (256, 256), 284),
        (
            {"crop_pct": 0.9, "test_crop_pct": 1.0, "input_size": [3, 192, 192], "test_input_size": [3, 256, 256]},
            (256, 256),
            256,
        ),
        (
            {"crop_pct": 0.9, "test_crop_pct": 1.0, "input_size": [3, 192, 192], "test_input_size": [3, 256, 256]},
            (192, 192),
            213,
        ),
    ],
)
def test_timms_sizes(config, size, resize):
    spec = timm_preprocess(config, 3, size)
    assert (spec.resize, spec.crop, spec.fit) == (resize, size, "stretch")


def test_a_size_that_is_not_square_is_covered_as_in_timm():
    spec = timm_preprocess({"crop_pct": 0.9}, 3, (224, 448))
    assert (spec.resize, spec.crop, spec.fit) == ((248, 497), (224, 448), "cover")


def test_timms_own_configs_say_what_timm_resolves():
    """The whole file as timm writes it to the hub."""
    timm = reference("timm")
    small = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=1, embed_dim=24)
    names = ("vit_base_patch16_siglip_224", "swin_tiny_patch4_window7_224", "vit_base_patch16_clip_quickgelu_224")
    for own in (small.pretrained_cfg, *(timm.models.get_pretrained_cfg(name).to_dict() for name in names)):
        name = own["architecture"]
        config = json.loads(json.dumps({"architecture": name, "num_classes": 5, "pretrained_cfg": own}))
        theirs = timm.data.resolve_data_config(pretrained_cfg=own)
        spec = timm_preprocess(timm_config(config), 3, tuple(theirs["input_size"][1:]))
        assert (spec.interpolation, spec.mean, spec.std) == (theirs["interpolation"], theirs["mean"], theirs["std"])
        assert spec.resize == int(spec.crop[0] / theirs["crop_pct"])


def test_what_timms_config_leaves_out_is_timms_default():
    nulls = dict.fromkeys(("interpolation", "crop_pct", "crop_mode", "mean", "std", "test_input_size"))
    for config in ({}, nulls):
        assert timm_preprocess(config, 3, SQUARE) == PreprocessSpec(256, SQUARE, "bicubic", IMAGENET_MEAN, IMAGENET_STD)


def test_old_flat_configs_of_timm():
    flat = {"architecture": "vit_tiny_patch16_224", "input_size": [3, 224, 224], "crop_pct": 0.9, "labels": ["a", "b"]}
    assert timm_config(flat) == flat
    assert labels_for(flat, 2) == (("a", "b"), ())
    assert timm_config({"model_type": "vit", "architectures": ["ViTModel"]}) is None


def test_a_grey_model_gets_the_mean_of_rgb_values():
    spec = timm_preprocess({"mean": [0.2, 0.4, 0.6], "std": [0.1, 0.2, 0.3]}, 1, SQUARE)
    assert (spec.mean, spec.std) == (pytest.approx((0.4,)), pytest.approx((0.2,)))
    assert timm_preprocess({"mean": [0.1307], "std": 0.3}, 1, SQUARE).mean == (0.1307,)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"crop_mode": "border"}, "crop_mode border"),
        ({"interpolation": "random"}, "interpolation random"),
        ({"interpolation": ["bicubic"]}, "interpolation ['bicubic']"),
        ({"crop_pct": -1}, "crop_pct -1"),
        ({"crop_pct": "0.9"}, "crop_pct '0.9'"),
        ({"crop_pct": [0.9, 0.9]}, "crop_pct [0.9, 0.9]"),
        ({"mean": [0.5, 0.5]}, "mean [0.5, 0.5]"),
        ({"mean": [0.5, 0.5, float("nan")]}, "mean nan"),
        ({"mean": "0.5"}, "mean '0.5'"),
        ({"std": [0.5, 0.5, 0.0]}, "std 0.0"),
        ({"std": [1, 1, 10**400]}, "std 1000"),
    ],
)
def test_what_timm_would_do_otherwise_is_refused(config, found):
    assert found in refused(config, read=timm_preprocess).found


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMON)
def test_what_is_known_of_a_class_without_transformers_is_what_it_says_itself(name, monkeypatch):
    transformers = reference("transformers")
    reference("torchvision")
    known = dict(defaults_of(name))
    monkeypatch.setattr(image_processor, "COMMON", {})
    theirs = dict(defaults_of.__wrapped__(name))
    assert {key: _plain(value) for key, value in known.items()} == {key: _plain(value) for key, value in theirs.items()}
    processor = getattr(transformers, f"{name}ImageProcessor")
    assert processor.do_rescale and processor.rescale_factor == 1 / 255


def _plain(value):
    return tuple(value) if isinstance(value, list | tuple) else value or None


def test_a_class_that_nothing_tells_of_is_read_where_its_file_says_enough(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(image_processor, "defaults_of", defaults_of.__wrapped__)
    config = {"image_processor_type": "SegformerImageProcessor", "size": {"height": 64, "width": 64}}
    said = {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}
    spec = PreprocessSpec((64, 64), (64, 64), "bilinear", IMAGENET_MEAN, IMAGENET_STD)
    assert transformers_preprocess({**config, **said}, 3, (64, 64)) == (spec, ())
    assert refused(config, (64, 64)).found == "image_mean None"


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_file_that_says_everything_means_the_same_as_one_that_says_nothing(name):
    transformers = reference("transformers")
    reference("torchvision")
    whole = json.loads(json.dumps(getattr(transformers, f"{name}ImageProcessor")().to_dict()))
    for written in (f"{name}ImageProcessor", f"{name}ImageProcessorFast", f"{name}ImageProcessorPil"):
        expected = transformers_preprocess({**whole, "image_processor_type": written}, 3, SQUARE)
        assert transformers_preprocess({"image_processor_type": written}, 3, SQUARE) == expected
    assert transformers_preprocess({"feature_extractor_type": f"{name}FeatureExtractor"}, 3, SQUARE) == expected


def test_a_processor_of_boxes_cuts_them_out():
    reference("torchvision")
    whole = json.loads(json.dumps(reference("transformers").VitPoseImageProcessor().to_dict()))
    spec, notes = transformers_preprocess(whole, 3, (256, 192))
    assert spec == PreprocessSpec((256, 192), (256, 192), "bilinear", IMAGENET_MEAN, IMAGENET_STD, "topdown")
    assert notes == ("the processor crops a box; without a box, the whole image is used",)
    assert transformers_preprocess(whole, 3, (128, 96))[0].resize == (128, 96)
    for changed in ({"do_affine_transform": False}, {"normalize_factor": 100.0}):
        assert next(iter(changed)) in refused({**whole, **changed}).found
    other = {**whole, "image_processor_type": "ViTImageProcessor"}
    assert refused(other).found == "do_affine_transform"


def test_a_processor_that_only_pads_leaves_the_padding_to_the_model():
    reference("torchvision")
    whole = json.loads(json.dumps(reference("transformers").Swin2SRImageProcessor().to_dict()))
    for config in (whole, {**whole, "pad_size": 8}):  # as it was called
        spec, notes = transformers_preprocess(config, 3, (48, 64))
        assert spec == PreprocessSpec((48, 64), (48, 64), "bilinear", (0.0,) * 3, (1.0,) * 3)
        assert ["pads images" in notes[0], "does not resize images; vitdeploy resizes them" in notes[1]] == [True, True]
    assert len(transformers_preprocess({**whole, "do_pad": False}, 3, (48, 64))[1]) == 1


RESCALED = {"do_rescale": True, "rescale_factor": 0.00392156862745098}
# In the forms that files of the hub have, old and new.
HUB = {
    "google/vit-base-patch16-224": (
        {
            "do_normalize": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "feature_extractor_type": "ViTFeatureExtractor",
            "resample": 2,
            "size": 224,
        },
        PreprocessSpec((224, 224), SQUARE, "bilinear", HALF, HALF),
    ),
    "facebook/deit-base-distilled-patch16-224": (
        {
            "crop_size": 224,
            "do_center_crop": True,
            "do_normalize": True,
            "do_resize": True,
            "feature_extractor_type": "DeiTFeatureExtractor",
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "resample": 3,
            "size": 256,
        },
        PreprocessSpec((256, 256), SQUARE, "bicubic", IMAGENET_MEAN, IMAGENET_STD, crop_rounding="down"),
    ),
    "openai/clip-vit-base-patch32": (
        {
            "crop_size": 224,
            "do_center_crop": True,
            "do_normalize": True,
            "do_resize": True,
            "feature_extractor_type": "CLIPFeatureExtractor",
            "image_mean": list(CLIP_MEAN),
            "image_std": list(CLIP_STD),
            "resample": 3,
            "size": 224,
        },
        PreprocessSpec(224, SQUARE, "bicubic", CLIP_MEAN, CLIP_STD, crop_rounding="down"),
    ),
    "facebook/dinov2-base": (
        {
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_resize": True,
            "image_mean": [0.485, 0.456, 0.406],
            "image_processor_type": "BitImageProcessor",
            "image_std": [0.229, 0.224, 0.225],
            "resample": 3,
            "size": {"shortest_edge": 256},
            **RESCALED,
        },
        PreprocessSpec(256, SQUARE, "bicubic", IMAGENET_MEAN, IMAGENET_STD, crop_rounding="down"),
    ),
    "google/siglip-base-patch16-224": (
        {
            "do_normalize": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "SiglipImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "SiglipProcessor",
            "resample": 3,
            "size": {"height": 224, "width": 224},
            **RESCALED,
        },
        PreprocessSpec((224, 224), SQUARE, "bicubic", HALF, HALF),
    ),
    "microsoft/swin-tiny-patch4-window7-224": (
        {
            "do_normalize": True,
            "do_resize": True,
            "feature_extractor_type": "ViTFeatureExtractor",
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "resample": 3,
            "size": 224,
        },
        PreprocessSpec((224, 224), SQUARE, "bicubic", IMAGENET_MEAN, IMAGENET_STD),
    ),
    "microsoft/beit-base-patch16-224": (
        {
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": False,
            "do_normalize": True,
            "do_reduce_labels": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "BeitImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
            "size": {"height": 224, "width": 224},
            **RESCALED,
        },
        PreprocessSpec((224, 224), SQUARE, "bilinear", HALF, HALF),
    ),
    "facebook/convnext-tiny-224": (
        {
            "crop_pct": 0.875,
            "do_normalize": True,
            "do_resize": True,
            "feature_extractor_type": "ConvNextFeatureExtractor",
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "resample": 3,
            "size": 224,
        },
        PreprocessSpec(256, SQUARE, "bicubic", IMAGENET_MEAN, IMAGENET_STD, crop_rounding="down"),
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_files_of_the_hub(name):
    config, spec = HUB[name]
    assert transformers_preprocess(config, 3, SQUARE) == (spec, ())


DETR_NOTE = (
    "the processor keeps the aspect ratio (short side 800) and pads; vitdeploy resizes both sides to the engine's size"
)


@pytest.mark.parametrize(
    "size", [{"size": 800, "max_size": 1333}, {"size": {"shortest_edge": 800, "longest_edge": 1333}, "do_pad": True}]
)
def test_detr_is_resized_to_the_size_of_the_engine_and_says_so(size):
    config = {"feature_extractor_type": "DetrFeatureExtractor", "format": "coco_detection", **size}
    spec = PreprocessSpec((800, 1066), (800, 1066), "bilinear", IMAGENET_MEAN, IMAGENET_STD)
    assert transformers_preprocess(config, 3, (800, 1066)) == (spec, (DETR_NOTE,))


def test_a_file_without_a_class_is_read_as_vits_and_says_so():
    spec, notes = transformers_preprocess({"size": 224, "do_normalize": True}, 3, SQUARE)
    assert spec == PreprocessSpec(SQUARE, SQUARE, "bilinear", HALF, HALF)
    assert notes == ("the preprocessor's file names no class: assuming the defaults of ViTImageProcessor",)


@pytest.mark.parametrize(
    ("name", "size", "resize", "fit"),
    [
        ("facebook/dinov2-base", (518, 518), 592, "stretch"),
        ("openai/clip-vit-base-patch32", (336, 336), 336, "stretch"),
        ("facebook/deit-base-distilled-patch16-224", (384, 384), (439, 439), "stretch"),
        ("google/siglip-base-patch16-224", (256, 384), (256, 384), "stretch"),
        ("facebook/dinov2-base", (224, 448), (256, 512), "cover"),
    ],
)
def test_at_another_image_size_the_processors_sizes_are_scaled(name, size, resize, fit):
    config, own = HUB[name]
    spec, notes = transformers_preprocess(config, 3, size)
    assert spec == replace(own, resize=resize, crop=size, fit=fit)
    assert notes == ("the processor's output of 224x224 pixels is scaled to the model's size",)


def vit(**settings):
    return {"image_processor_type": "ViTImageProcessor", "size": 224, **settings}


@pytest.mark.parametrize(
    ("settings", "mean", "std"),
    [
        ({}, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ({"image_mean": None, "image_std": None}, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ({"do_normalize": False, "image_mean": [0.1, 0.2, 0.3]}, (0, 0, 0), (1, 1, 1)),
        ({"image_mean": 0.25, "image_std": 0.5}, (0.25, 0.25, 0.25), (0.5, 0.5, 0.5)),
        ({"rescale_factor": 0.003921569}, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ({"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1.0}, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ({"do_rescale": False, "image_mean": 127.5, "image_std": 51}, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
    ],
)
def test_normalisation(settings, mean, std):
    spec, notes = transformers_preprocess(vit(**settings), 3, SQUARE)
    assert (spec.mean, spec.std) == (pytest.approx(mean), pytest.approx(std))
    assert bool(notes) is ("do_rescale" in settings)


def test_images_that_are_not_resized_are_noted():
    spec, notes = transformers_preprocess(vit(do_resize=False), 3, (32, 48))
    assert (spec.resize, spec.crop) == ((32, 48), (32, 48))
    assert notes == ("the processor does not resize images; vitdeploy resizes them to the engine's size",)


def test_padding_of_images_of_one_size_changes_nothing():
    for pad_size in ({}, {"pad_size": {"height": 224, "width": 224}}):
        config = {"image_processor_type": "YolosImageProcessor", "size": {"height": 224, "width": 224}, **pad_size}
        assert transformers_preprocess(config, 3, SQUARE)[1] == ()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"image_processor_type": "SamHQImageProcessor", "size": {"longest_edge": 1024}}, "the processor SamHQImage"),
        ({"image_processor_type": "ViltImageProcessor"}, "the processor ViltImageProcessor"),
        ({"feature_extractor_type": "PerceiverFeatureExtractor"}, "the processor PerceiverFeatureExtractor"),
        ({"size": 224, "do_flip_channel_order": True}, "do_flip_channel_order"),
        (vit(do_thumbnail=True, do_align_long_axis=True), "do_align_long_axis, do_thumbnail"),
        (vit(do_pad=True, pad_size={"height": 256, "width": 256}), "do_pad to (256, 256)"),
        (vit(do_resize=False, do_center_crop=True, crop_size=224), "do_center_crop without do_resize"),
        (vit(size={"longest_edge": 1024}), "size {'longest_edge': 1024}"),
        (vit(size={"min_pixels": 1, "max_pixels": 9}), "size {'min_pixels'"),
        (vit(size=[224]), "size [224]"),
        (vit(size="224"), "size '224'"),
        (vit(size=0), "size 0"),
        (vit(size=-224), "size -224"),
        (vit(size=False), "size False"),
        (vit(size={"height": 224.5, "width": 224}), "size 224.5"),
        (vit(size={"height": 10**9, "width": 10**9}), "size 1000000000"),
        (vit(do_center_crop=True), "crop_size None"),
        (vit(do_center_crop=True, crop_size={"shortest_edge": 224}), "crop_size {'shortest_edge': 224}"),
        (
            vit(do_center_crop=True, crop_size=224, size={"shortest_edge": 224, "longest_edge": 300}),
            "size {'shortest_edge': 224, 'longest_edge': 300} with a crop",
        ),
        (vit(resample=4), "resample 4"),
        (vit(resample="bicubic"), "resample 'bicubic'"),
        (vit(resample=[3]), "resample [3]"),
        (vit(resample=False), "resample False"),
        (vit(rescale_factor=0), "rescale_factor 0"),
        (vit(rescale_factor="1/255"), "rescale_factor '1/255'"),
        (vit(image_mean=[0.5, 0.5]), "image_mean [0.5, 0.5]"),
        (vit(image_std=[0.5, 0.5, 0]), "image_std 0.0"),
        ({"image_processor_type": "ConvNextImageProcessor", "size": 224, "crop_pct": -1}, "crop_pct -1"),
    ],
)
def test_what_preprocessing_cannot_express_is_refused(config, found):
    assert found in refused(config).found


# --- labels -----------------------------------------------------------------------------------------------------------


def test_the_numbers_of_resampling_are_pillows():
    from PIL import Image

    names = {number: Image.Resampling(number).name.lower() for number in image_processor.RESAMPLE}
    assert names == image_processor.RESAMPLE


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        ({"size": {"height": 640, "width": 512}}, (640, 512)),
        ({"size": {"shortest_edge": 800, "longest_edge": 1333}}, None),
        ({"size": {"height": 256, "width": 256}, "do_center_crop": True}, None),
        ({"size": {"height": 640}}, None),
        ({"size": {"height": 640, "width": 1e9}}, None),
        ({"size": 224}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_size_to_which_all_images_are_resized(processor, size):
    assert fixed_size(processor) == size


# --- of models with an answer for every pixel -------------------------------------------------------------------------


def test_a_processor_that_keeps_the_aspect_in_steps_is_stretched_and_said():
    config = {"image_processor_type": "DPTImageProcessor", "size": {"height": 518, "width": 518}}
    config |= {"keep_aspect_ratio": True, "ensure_multiple_of": 14, "do_pad": False, "size_divisor": None}
    spec, [note] = transformers_preprocess(config, 3, (518, 518))
    assert (spec.resize, spec.crop, spec.fit, spec.interpolation) == ((518, 518), (518, 518), "stretch", "bicubic")
    assert "about 518x518, sides in steps of 14" in note and "--image-size" in note


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"image_processor_type": "EomtImageProcessorFast", "do_split_image": True}, "do_split_image"),
        ({"image_processor_type": "ZoeDepthImageProcessor"}, "the processor ZoeDepthImageProcessor"),
        (
            {"image_processor_type": "DPTImageProcessor", "do_pad": True, "size_divisor": 14},
            "size 384x384 with size_divisor 14",
        ),
        (
            {"image_processor_type": "Mask2FormerImageProcessor", "size": {"height": 100, "width": 96}},
            "size 100x96 with size_divisor 32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_dense_processor_does_that_no_spec_says_is_refused_by_name(config, found):
    assert refused(config).found == found


def test_a_model_that_takes_any_size_has_the_short_side_of_its_processor():
    config = {"image_processor_type": "Mask2FormerImageProcessor", "size": {"shortest_edge": 390, "longest_edge": 999}}
    assert fixed_size(config) == (384, 384)
    assert fixed_size({**config, "image_processor_type": "DetrImageProcessor"}) is None
    spec, [note] = transformers_preprocess(config, 3, (384, 384))
    assert spec.resize == (384, 384) and "short side 390" in note

"""Preprocessing as the checkpoint's own config says, against torchvision's, timm's and transformers' own.

Equal to the last bit wherever the library resizes with Pillow; where it resizes tensors, within the grey levels that
`vitdeploy.runtime.preprocess` says.
"""

import io

import numpy as np
import pytest
from PIL import Image

from tests.references import reference
from vitdeploy.models.model_folder.image_processor import timm_preprocess, transformers_preprocess
from vitdeploy.runtime.preprocess import load_pixels, normalise, resize_and_crop
from vitdeploy.spec import PreprocessSpec

# Width, height: odd, photographs, the input's own, nearly its own, thin both ways, one pixel wide, one pixel.
SIZES = [(37, 53), (53, 37), (250, 187), (167, 125), (64, 64), (66, 71), (180, 11), (11, 180), (1, 7), (7, 1), (1, 1)]


def noise(width, height, low=0, high=256):
    generator = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(generator.integers(low, high, (height, width, 3), np.uint8))


def smooth(width, height):
    y, x = np.mgrid[0:height, 0:width]
    ramps = x / max(1, width - 1), y / max(1, height - 1), (x + y) / max(1, width + height - 2)
    return Image.fromarray((255 * np.stack(ramps, axis=-1)).astype(np.uint8))


IMAGES = [make(*size) for size in SIZES for make in (noise, smooth)]


# --- torchvision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", [48, 64, (48, 64), (64, 47)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_pixels_are_torchvisions(resize, interpolation):
    reference("torchvision")
    from torchvision import transforms

    crop = (45, 52)
    theirs = transforms.Compose(
        [transforms.Resize(resize, transforms.InterpolationMode(interpolation)), transforms.CenterCrop(crop)]
    )
    for image in (*IMAGES, noise(53, 37).convert("L")):
        channels = len(image.getbands())
        spec = PreprocessSpec(resize, crop, interpolation, (0.5,) * channels, (0.5,) * channels)
        assert np.array_equal(resize_and_crop(image, spec), np.asarray(theirs(image)).reshape(*crop, channels))


# --- timm -------------------------------------------------------------------------------------------------------------


def assert_timms_numbers(config, size):
    """Ours and timm's evaluation transform give the same input for every image."""
    timm = reference("timm")
    theirs = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=config), is_training=False)
    spec = timm_preprocess(config, 3, size)
    for image in IMAGES:
        found = normalise(resize_and_crop(image, spec)[None], spec)[0]
        np.testing.assert_allclose(found, theirs(image).numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("share", [0.875, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_are_timms(mode, share, interpolation):
    config = {"input_size": (3, 64, 64), "crop_pct": share, "crop_mode": mode, "interpolation": interpolation}
    assert_timms_numbers(config, (64, 64))


@pytest.mark.parametrize("size", [(48, 80), (80, 48)])
def test_pixels_are_timms_when_both_sides_are_squashed_to_a_size_that_is_not_square(size):
    assert_timms_numbers({"input_size": (3, *size), "crop_pct": 0.9, "crop_mode": "squash"}, size)


@pytest.mark.parametrize("size", [(48, 80), (80, 48)])
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_pixels_are_timms_for_a_size_that_is_not_square(size, share):
    assert_timms_numbers({"input_size": (3, *size), "crop_pct": share}, size)


@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_224.augreg_in21k_ft_in1k",
        "deit_base_distilled_patch16_384.fb_in1k",
        "vit_base_patch14_dinov2.lvd142m",
        "vit_base_patch16_siglip_224.webli",
        "vit_base_patch16_clip_224.openai",
        "swin_tiny_patch4_window7_224.ms_in1k",
        "swinv2_base_window12to24_192to384.ms_in22k_ft_in1k",
    ],
)
def test_pretrained_configs_of_timm_are_read(name):
    timm = reference("timm")
    config = timm.models.get_pretrained_cfg(name).to_dict()
    theirs = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=config), is_training=False)
    size = tuple(config["input_size"][1:])
    spec = timm_preprocess(config, 3, size)
    image = noise(250, 187)
    found = normalise(resize_and_crop(image, spec)[None], spec)[0]
    np.testing.assert_allclose(found, theirs(image).numpy(), rtol=0, atol=2e-6)


# --- transformers -----------------------------------------------------------------------------------------------------

SHORT = {"shortest_edge": 64}
# A processor, what its file says beside the class's defaults, and (height, width) of what it gives.
PROCESSORS = {
    "ViT": ("ViT", {"size": {"height": 56, "width": 48}}, (56, 48)),
    "ViT, one number, lanczos": ("ViT", {"size": 56, "resample": 1}, (56, 56)),
    "ViT, nearest": ("ViT", {"size": 56, "resample": 0}, (56, 56)),
    "DeiT": ("DeiT", {"size": {"height": 64, "width": 64}, "crop_size": {"height": 56, "width": 56}}, (56, 56)),
    "DeiT, old": ("DeiT", {"size": 64, "crop_size": 56, "resample": 3}, (56, 56)),
    "BEiT with crop": ("Beit", {"size": 64, "crop_size": 56, "do_center_crop": True}, (56, 56)),
    "CLIP": ("CLIP", {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}, (56, 56)),
    "CLIP, old": ("CLIP", {"size": 56, "crop_size": 56}, (56, 56)),
    "CLIP, crop not square": ("CLIP", {"size": SHORT, "crop_size": {"height": 56, "width": 40}}, (56, 40)),
    "SigLIP": ("Siglip", {"size": {"height": 56, "width": 56}}, (56, 56)),
    "DINOv2": ("Bit", {"size": SHORT, "crop_size": {"height": 56, "width": 56}}, (56, 56)),
    "ConvNeXt": ("ConvNext", {"size": {"shortest_edge": 56}}, (56, 56)),
    "ConvNeXt, large": ("ConvNext", {"size": {"shortest_edge": 384}}, (384, 384)),
    "RT-DETR": ("RTDetr", {"size": {"height": 64, "width": 56}}, (64, 56)),
    "no normalisation": ("ViT", {"size": 56, "do_normalize": False}, (56, 56)),
    "no rescaling": ("ViT", {"size": 56, "do_rescale": False, "image_mean": [120, 110, 100]}, (56, 56)),
    "other rescaling": ("ViT", {"size": 56, "rescale_factor": 1 / 127.5, "image_mean": [1, 1, 1]}, (56, 56)),
}


def processor(name, settings, suffix):
    transformers = reference("transformers")
    reference("torchvision")
    return getattr(transformers, f"{name}ImageProcessor{suffix}")(**settings)


def numbers(theirs, image):
    return np.asarray(theirs(image, return_tensors="np")["pixel_values"][0])


def ours(image, spec):
    return normalise(resize_and_crop(image, spec)[None], spec)[0]


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_are_those_of_transformers_on_pillow(case):
    name, settings, size = PROCESSORS[case]
    theirs = processor(name, settings, "Pil")
    spec, notes = transformers_preprocess(theirs.to_dict(), 3, size)
    assert notes == (("the processor does not divide pixel values by 255",) if case == "no rescaling" else ())
    for image in IMAGES:
        np.testing.assert_allclose(ours(image, spec), numbers(theirs, image), rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("suffix", ["", "Pil"])
@pytest.mark.parametrize("width", [65, 66, 67, 75])
def test_a_crop_of_an_odd_number_of_pixels_is_that_of_transformers(suffix, width):
    theirs = processor("CLIP", {"size": SHORT, "crop_size": 64}, suffix)
    spec, _ = transformers_preprocess(theirs.to_dict(), 3, (64, 64))
    image = noise(width, 64, 80, 176)
    limit = 2.01 if suffix == "" else 0.001
    levels = 255 * np.asarray(spec.std)[:, None, None]
    assert np.abs(levels * (ours(image, spec) - numbers(theirs, image))).max() < limit


@pytest.mark.parametrize("case", [case for case in PROCESSORS if case not in ("no rescaling", "ViT, nearest")])
def test_pixels_are_those_of_transformers_on_tensors_within_two_grey_levels(case):
    name, settings, size = PROCESSORS[case]
    theirs = processor(name, settings, "")
    spec, _ = transformers_preprocess(theirs.to_dict(), 3, size)
    levels = 255 * np.asarray(spec.std)[:, None, None]
    limit = {"bilinear": 1, "bicubic": 2, "lanczos": 2}[spec.interpolation] + 0.01
    # Within 80..175 no filter overshoots black or white.
    images = [noise(*width_height, 80, 176) for width_height in SIZES] + IMAGES[1::2]
    images += IMAGES[::2] if limit < 2 else []
    for image in images:
        assert np.abs(levels * (ours(image, spec) - numbers(theirs, image))).max() <= limit


def test_resizing_before_rounding_to_whole_grey_levels_differs_by_one():
    theirs = processor("DINOv3ViT", {"size": {"height": 56, "width": 56}}, "")
    spec, _ = transformers_preprocess(theirs.to_dict(), 3, (56, 56))
    for image in IMAGES:
        levels = 255 * np.asarray(spec.std)[:, None, None]
        assert np.abs(levels * (ours(image, spec) - numbers(theirs, image))).max() <= 1.01


def test_of_a_processor_that_keeps_the_aspect_both_sides_are_resized():
    theirs = processor("Detr", {}, "Pil")
    spec, notes = transformers_preprocess(theirs.to_dict(), 3, (64, 48))
    assert (spec.resize, spec.crop, spec.interpolation) == ((64, 48), (64, 48), "bilinear")
    assert notes == (
        "the processor keeps the aspect ratio (short side 800) and pads; "
        "vitdeploy resizes both sides to the engine's size",
    )
    squashing = processor("Detr", {"size": {"height": 64, "width": 48}}, "Pil")
    assert transformers_preprocess(squashing.to_dict(), 3, (64, 48)) == (spec, ())
    np.testing.assert_allclose(ours(IMAGES[4], spec), numbers(squashing, IMAGES[4]), rtol=0, atol=3e-6)


# --- what files hold --------------------------------------------------------------------------------------------------


def file_of(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


FILES = {
    "grey": lambda: file_of(noise(60, 41).convert("L")),
    "grey with alpha": lambda: file_of(noise(60, 41).convert("LA")),
    "one bit": lambda: file_of(noise(60, 41).convert("1")),
    "RGBA": lambda: file_of(Image.merge("RGBA", (*noise(60, 41).split(), noise(41, 60).resize((60, 41)).split()[0]))),
    "palette": lambda: file_of(noise(60, 41).convert("P")),
    "palette with transparency": lambda: file_of(noise(60, 41).convert("P"), transparency=bytes(range(256))),
    "CMYK JPEG": lambda: file_of(noise(60, 41).convert("CMYK"), "JPEG", quality=90),
    "grey JPEG": lambda: file_of(noise(60, 41).convert("L"), "JPEG"),
    "WebP": lambda: file_of(noise(60, 41), "WEBP", lossless=True),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_is_read_as_transformers_reads_it(kind, tmp_path):
    theirs = processor("CLIP", {"size": 40, "crop_size": 40}, "Pil")
    from transformers.image_utils import load_image

    spec, _ = transformers_preprocess(theirs.to_dict(), 3, (40, 40))
    path = tmp_path / "image"
    path.write_bytes(FILES[kind]())
    found = normalise(load_pixels(path, spec)[None], spec)[0]
    np.testing.assert_allclose(found, numbers(theirs, load_image(str(path))), rtol=0, atol=3e-6)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_upright_as_in_transformers(orientation, tmp_path):
    theirs = processor("CLIP", {"size": 40, "crop_size": 40}, "Pil")
    from transformers.image_utils import load_image

    spec, _ = transformers_preprocess(theirs.to_dict(), 3, (40, 40))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "image.jpg"
    path.write_bytes(file_of(noise(60, 41), "JPEG", exif=exif))
    found = normalise(load_pixels(path, spec)[None], spec)[0]
    np.testing.assert_allclose(found, numbers(theirs, load_image(str(path))), rtol=0, atol=3e-6)

"""Golden pixels by torchvision and Pillow: what any machine must get from the same files without these libraries.

Where torchvision is installed, it is asked again. A golden file that is missing is then made again, and the test fails
once so that somebody looks at it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image, ImageOps

from tests.references import reference
from vitdeploy.runtime.preprocess import load_pixels
from vitdeploy.spec import PreprocessSpec

FOLDER = Path(__file__).parent / "golden"
RGB, GREY = (0.5,) * 3, (0.5,)
# Before 13, Pillow rounds some bilinear pixels otherwise. It is the newest for Python 3.11.
BILINEAR = 0 if int(PIL.__version__.partition(".")[0]) >= 13 else 1


@dataclass(frozen=True)
class Case:
    """`tolerance` in grey levels: JPEG decoders may round otherwise."""

    image: str
    spec: PreprocessSpec
    tolerance: int = 0


CASES = {
    "bicubic, centre crop": Case("noise.png", PreprocessSpec(28, (24, 24), "bicubic")),
    "bilinear, both sides": Case("noise.png", PreprocessSpec((20, 30), (20, 30), "bilinear"), tolerance=BILINEAR),
    "lanczos, odd crop": Case("noise.png", PreprocessSpec(24, (19, 22), "lanczos")),
    "nearest": Case("noise.png", PreprocessSpec(18, (18, 18), "nearest")),
    "upscaled bicubic": Case("tiny.png", PreprocessSpec(32, (32, 24), "bicubic")),
    "smaller than the crop": Case("wide.png", PreprocessSpec(8, (13, 40), "bilinear")),
    "grey": Case("grey.png", PreprocessSpec(20, (16, 16), "bicubic", GREY, GREY)),
    "grey for an RGB model": Case("grey.png", PreprocessSpec((16, 16), (16, 16), "bilinear")),
    "RGB for a grey model": Case("noise.png", PreprocessSpec(20, (16, 16), "bicubic", GREY, GREY)),
    "RGBA": Case("rgba.png", PreprocessSpec(20, (16, 16), "bicubic")),
    "palette with transparency": Case("palette.png", PreprocessSpec(20, (16, 16), "bilinear")),
    "turned by EXIF": Case("turned.png", PreprocessSpec(20, (16, 24), "bicubic")),
    "CMYK JPEG": Case("cmyk.jpg", PreprocessSpec(20, (16, 16), "bicubic"), tolerance=2),
}
PARAMETERS = pytest.mark.parametrize("name", CASES)


def golden(name: str) -> Path:
    return FOLDER / f"{name.replace(',', '').replace(' ', '-')}.npy"


def by_torchvision(case: Case) -> np.ndarray:
    reference("torchvision")
    from torchvision import transforms

    image = ImageOps.exif_transpose(Image.open(FOLDER / case.image))
    if image.mode == "P":
        image = image.convert("RGBA")
    mode = transforms.InterpolationMode(case.spec.interpolation)
    steps = [transforms.Resize(case.spec.resize, mode), transforms.CenterCrop(case.spec.crop)]
    pixels = np.asarray(transforms.Compose(steps)(image.convert("RGB" if case.spec.channels == 3 else "L")))
    return pixels.reshape(*case.spec.crop, case.spec.channels)


@PARAMETERS
def test_the_golden_pixels_are_met(name):
    case = CASES[name]
    found, expected = load_pixels(FOLDER / case.image, case.spec), np.load(golden(name))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.abs(found.astype(int) - expected).max() <= case.tolerance


@PARAMETERS
def test_torchvision_gives_the_golden_pixels(name):
    case = CASES[name]
    expected = by_torchvision(case)
    if not golden(name).exists():
        np.save(golden(name), expected)
        pytest.fail(f"{golden(name).name} was missing and is made now")
    assert np.abs(np.load(golden(name)).astype(int) - expected).max() <= case.tolerance


def test_no_golden_file_is_left_over():
    known = {golden(name).name for name in CASES} | {case.image for case in CASES.values()}
    assert {path.name for path in FOLDER.iterdir()} == known

"""What is said of unsuitable calibration images, and that nothing is said of good ones."""

import numpy as np
import pytest

from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.errors import DataError
from vitdeploy.quantization.prepare import ImageChecks
from vitdeploy.spec import PreprocessSpec

NAMES = [f"{i}.png" for i in range(20)]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5,) * 3, (0.5,) * 3
NOTHING = (0.0,) * 3, (1.0,) * 3


def checked(images, mean=HALF[0], std=HALF[1]):
    checks = ImageChecks(PreprocessSpec(32, (32, 32), "bicubic", mean, std))
    for image in images:
        checks.update(np.asarray(image, np.uint8)[None])
    return checks


def photographs(count=10, low=0, high=256):
    """Pixels as spread as those of photographs: mean 0.45, deviation 0.27."""
    values = np.random.default_rng(0).normal(0.45, 0.27, (count, 32, 32, 3)).clip(0, 1)
    return (low + values * (high - low)).clip(0, 255)


@pytest.mark.parametrize("numbers", [IMAGENET, HALF, NOTHING], ids=["imagenet", "half", "nothing"])
def test_photographs_are_what_every_usual_preprocessing_is_for(numbers):
    checks = checked(photographs(), *numbers)
    assert checks.warnings(NAMES) == []
    assert checks.distinct == 10


def test_the_digits_are_what_theirs_is_for(digits):
    preprocess = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
    checks = ImageChecks(preprocess)
    for pixels in batches(split(digits, "none", calibration=32, evaluation=1, seed=0).calibration, preprocess, 8):
        checks.update(pixels)
    assert checks.warnings(NAMES) == []


@pytest.mark.parametrize("numbers", [IMAGENET, HALF, NOTHING], ids=["imagenet", "half", "nothing"])
def test_images_that_are_nearly_black(numbers):
    """12 of 16 bits, shown as 8."""
    [warning] = checked(photographs(high=16), *numbers).warnings(NAMES)
    assert "do not match the preprocessing: their pixels in 0..1 have mean 0.03" in warning
    assert "deviation 0.02" in warning
    assert "Check the images, and mean and std." in warning


def test_black_and_white_exchanged():
    mean, std = (0.1307,), (0.3081,)
    digits = np.where(np.random.default_rng(0).random((10, 28, 28, 1)) < 0.13, 255, 0)
    assert checked(digits, mean, std).warnings(NAMES) == []
    [warning] = checked(255 - digits, mean, std).warnings(NAMES)
    assert "mean 0.87 and deviation 0.34, while preprocess has mean 0.13 and std 0.31" in warning


def test_images_of_one_colour_are_named():
    images = photographs()
    for i in (2, 5, 6, 7):
        images[i] = i
    [warning] = checked(images).warnings(NAMES)
    assert warning == (
        "4 of 10 calibration images have a single colour and are useless: 2.png, 5.png, 6.png and 1 more."
    )


def test_images_of_one_colour_alone_are_refused():
    with pytest.raises(DataError, match="every calibration image has a single colour") as caught:
        checked([np.full((8, 8, 3), i) for i in range(3)]).warnings(NAMES)
    assert caught.value.found == "images of a single colour: 3 of 3"


def test_copies_of_an_image_count_once():
    images = photographs(2)
    assert checked([images[0], images[1], images[0], images[0]]).distinct == 2


def test_checks_go_on_from_their_state():
    images = photographs(7)
    images[1] = images[4] = 9
    whole, first, second = checked(images), checked(images[:3]), checked([])
    second.restore(first.state())
    for image in images[3:]:
        second.update(image.astype(np.uint8)[None])
    assert second.warnings(NAMES) == whole.warnings(NAMES)
    assert (second.images, second.distinct) == (7, 6)
    np.testing.assert_array_equal(second.total, whole.total)

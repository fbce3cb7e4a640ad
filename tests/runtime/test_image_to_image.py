"""Pictures of image-to-image models: ranges, rounding, PSNR, and how an answer is given."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from vitdeploy.runtime.tasks.image_to_image import IMAGE_TO_IMAGE, MOST, ImageSpec, psnr, to_pixels
from vitdeploy.runtime.tasks.registry import TASKS
from vitdeploy.runtime.tasks.task import OutputReading
from vitdeploy.spec import DecodeError, PreprocessSpec, decode, encode

READING = OutputReading((9, 7), PreprocessSpec((4, 4), (4, 4)), ImageSpec())


def drawn(result):
    return Image.open(io.BytesIO(TASKS["image-to-image"].draw(Image.new("RGB", (9, 7)), result)[".png"]))


def test_values_become_levels_clipped_and_rounded_to_the_nearest():
    values = np.array([[[-0.2, 0.0, 0.5, 1.0, 1.7, 100.4 / 255, 100.6 / 255]]], np.float32)
    np.testing.assert_array_equal(to_pixels(values, ImageSpec())[0, :, 0], [0, 0, 128, 255, 255, 100, 101])
    signed = np.array([[[-1.0, 0.0, 1.0]]], np.float32)
    np.testing.assert_array_equal(to_pixels(signed, ImageSpec(-1.0, 1.0))[0, :, 0], [0, 128, 255])


def test_psnr_is_the_formula_and_has_a_bound():
    a = np.zeros((4, 4, 3), np.uint8)
    assert psnr(a, a) == MOST
    assert psnr(a, a + np.uint8(255)) == 0
    assert psnr(a, a + np.uint8(10)) == pytest.approx(20 * np.log10(25.5))


def test_the_answer_is_a_picture_of_the_models_size():
    outputs = {"reconstruction": np.stack([np.full((6, 8), level, np.float32) for level in (0.0, 0.5, 1.0)])}
    found = IMAGE_TO_IMAGE.answer(outputs, READING)
    assert (found.size, found.pixels.shape) == ((9, 7), (6, 8, 3))
    assert str(found) == "a picture of 8x6, RGB, mean level 128 of 255"
    document = found.to_dict()
    assert (document["width"], document["height"], document["channels"]) == (8, 6, 3)
    with Image.open(io.BytesIO(base64.b64decode(document["png"]))) as image:
        np.testing.assert_array_equal(np.asarray(image), found.pixels)
    assert drawn(found).getpixel((3, 3)) == (0, 128, 255)
    grey = IMAGE_TO_IMAGE.answer({"reconstruction": outputs["reconstruction"][1:2]}, READING)
    assert (grey.image.mode, drawn(grey).mode) == ("L", "L")


def test_two_answers_are_the_same_unless_they_are_far_off():
    values = np.random.default_rng(0).uniform(0, 1, (3, 8, 8)).astype(np.float32)
    assert IMAGE_TO_IMAGE.same({"reconstruction": values}, {"reconstruction": values + 0.01}, READING)
    assert not IMAGE_TO_IMAGE.same({"reconstruction": values}, {"reconstruction": 1 - values}, READING)


def test_a_range_without_extent_is_refused():
    assert decode(ImageSpec, encode(ImageSpec(-1.0, 1.0))) == ImageSpec(-1.0, 1.0)
    with pytest.raises(DecodeError, match="expected white above black"):
        decode(ImageSpec, {"black": 1.0, "white": 1.0})

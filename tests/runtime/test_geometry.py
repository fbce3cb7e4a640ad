"""The window of the original image that the model's input shows, against resize and crop of pixels that say where they
come from."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitdeploy.runtime.geometry import Window, input_window
from vitdeploy.runtime.preprocess import resize_and_crop
from vitdeploy.spec import PreprocessSpec

sides = st.integers(1, 60)


def shown(size, spec, axis):
    """For every pixel of the input along x (axis 0) or y (1), the pixel of the original there; -1 where padded."""
    width, height = size
    ramp = np.arange(size[axis]) + 1  # 0 is padding
    pixels = np.broadcast_to(ramp if axis == 0 else ramp[:, None], (height, width)).astype(np.uint8)
    found = resize_and_crop(Image.fromarray(np.ascontiguousarray(pixels)), spec)[:, :, 0].astype(int) - 1
    return found.max(axis=axis)


@settings(deadline=None, max_examples=80)
@given(
    st.tuples(sides, sides),
    st.one_of(sides, st.tuples(sides, sides)),
    st.tuples(sides, sides),
    st.sampled_from(["stretch", "cover"]),
    st.sampled_from(["even", "down"]),
)
def test_the_window_is_where_the_pixels_of_the_input_come_from(size, resize, crop, fit, rounding):
    spec = PreprocessSpec(resize, crop, "nearest", (0.5,), (0.5,), fit, rounding)
    window = input_window(size, spec)
    for axis, (start, stop) in enumerate([(window.left, window.right), (window.top, window.bottom)]):
        count = spec.crop[1 - axis]
        centres = start + (np.arange(count) + 0.5) * (stop - start) / count
        # Nearest-neighbour sampling takes the pixel under the centre: exact but for rounding at a pixel's edge.
        pixels = shown(size, spec, axis)
        near_edge = np.abs(centres - np.round(centres)) < 1e-6
        outside = (centres < 0) | (centres > size[axis])
        assert (pixels[outside] == -1).all()
        sure = ~outside & ~near_edge
        assert (pixels[sure] == np.floor(centres[sure])).all()


def test_squashing_shows_the_whole_image():
    assert input_window((640, 427), PreprocessSpec((800, 600), (800, 600))) == Window(0, 0, 640, 427)


def test_a_centre_crop_of_the_short_side_shows_its_middle():
    # 640x480 -> 320x240, of which the crop takes x 50..270 and y 10..230.
    assert input_window((640, 480), PreprocessSpec(240, (220, 220))) == Window(100, 20, 540, 460)


def test_padding_lies_outside_of_the_image():
    assert input_window((100, 50), PreprocessSpec((50, 100), (60, 120))) == Window(-10, -5, 110, 55)

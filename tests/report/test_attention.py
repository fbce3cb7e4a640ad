"""The picture of attention maps: its size, its colours, its order."""

import io

import numpy as np
import pytest
from PIL import Image

from vitdeploy.report import attention
from vitdeploy.report.attention import MapPanel, attention_picture, picture_size


def decode(picture):
    image = Image.open(io.BytesIO(picture))
    assert image.format == "PNG"
    return image.convert("RGB")


def tile(picture, index, columns, height=attention.TILE):
    """The image of tile `index`, uint8 [height, width, 3]."""
    left = attention.MARGIN + (index % columns) * (attention.TILE + attention.GAP)
    top = attention.HEAD + attention.TITLE + (index // columns) * (attention.TITLE + height + attention.GAP)
    box = [attention.SCALE * side for side in (left, top, left + attention.TILE, top + height)]
    return np.asarray(picture.crop(box)).astype(float)


def patch(pixels, row, column, grid):
    """The mean colour of the middle of a patch."""
    height, width = pixels.shape[0] / grid[0], pixels.shape[1] / grid[1]
    middle = pixels[
        round((row + 0.3) * height) : round((row + 0.7) * height),
        round((column + 0.3) * width) : round((column + 0.7) * width),
    ]
    return middle.mean(axis=(0, 1))


@pytest.mark.parametrize(("panels", "shape"), [(2, (32, 32, 1)), (6, (32, 64, 3)), (15, (48, 32, 3))])
def test_the_picture_has_the_size_that_is_said(panels, shape):
    image = np.full(shape, 90, np.uint8)
    picture = attention_picture(image, [MapPanel("a")] * panels, "b", "c")
    assert decode(picture).size == picture_size(image, panels)


def test_the_strongest_patch_is_the_lightest_whatever_the_image_below_it():
    image = np.zeros((32, 32, 3), np.uint8)
    image[:, 16:] = 255
    weights = np.array([[0.4, 0.1], [0.0, 0.05]])  # the strongest on black, the weak ones on white
    picture = decode(attention_picture(image, [MapPanel("image"), MapPanel("map", map=weights)], "b", "c"))
    plain, shown = tile(picture, 0, 2), tile(picture, 1, 2)
    assert patch(plain, 0, 0, (2, 2)) == pytest.approx([0, 0, 0], abs=2)
    assert patch(plain, 0, 1, (2, 2)) == pytest.approx([255, 255, 255], abs=2)
    light = {(row, column): patch(shown, row, column, (2, 2)).mean() for row in (0, 1) for column in (0, 1)}
    assert max(light, key=light.get) == (0, 0)
    yellow = patch(shown, 0, 0, (2, 2))
    assert min(yellow[0], yellow[1]) > 2 * yellow[2]


def test_a_map_without_any_attention_is_the_darkest_colour():
    image = np.full((32, 32, 1), 128, np.uint8)
    weights = np.array([[0.0, 1.0], [0.0, 0.0]])
    picture = decode(
        attention_picture(image, [MapPanel("a", map=weights), MapPanel("b", map=np.zeros((2, 2)))], "b", "c")
    )
    assert patch(tile(picture, 1, 2), 0, 1, (2, 2)) == pytest.approx(patch(tile(picture, 0, 2), 0, 0, (2, 2)), abs=2)


def test_a_box_is_drawn_where_it_is():
    image = np.full((40, 40, 3), 90, np.uint8)
    picture = decode(attention_picture(image, [MapPanel("a", box=(10, 10, 30, 20)), MapPanel("b")], "b", "c"))
    with_box, without = tile(picture, 0, 2), tile(picture, 1, 2)
    rows, columns = np.nonzero(np.abs(with_box - without).max(axis=2) > 20)
    side = with_box.shape[0] / 40
    assert (columns.min() / side, rows.min() / side) == pytest.approx((10, 10), abs=0.5)
    assert (columns.max() / side, rows.max() / side) == pytest.approx((30, 20), abs=0.5)


def test_names_of_any_length_and_script_are_drawn_and_markup_is_not_read():
    image = np.full((32, 32, 3), 90, np.uint8)
    panel = MapPanel("$\\frac{1}{2}$ 猫 " * 20, "\x1b[31m\ud800" * 30)
    one, two = (attention_picture(image, [panel], "x" * 500, "$" * 500) for _ in range(2))
    assert decode(one).size == picture_size(image, 1)
    assert one == two

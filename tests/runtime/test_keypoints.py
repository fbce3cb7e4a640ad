"""Key points of one object: the box and the decoding against transformers' VitPoseImageProcessor, the rest by hand."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.references import reference
from vitdeploy.errors import InputError
from vitdeploy.runtime.drawing import LINE, POINT, draw_keypoints
from vitdeploy.runtime.geometry import input_window
from vitdeploy.runtime.preprocess import resize_and_crop
from vitdeploy.runtime.tasks.keypoints import KEYPOINTS, Keypoint, Keypoints, KeypointSpec, locate
from vitdeploy.runtime.tasks.registry import TASKS
from vitdeploy.runtime.tasks.task import OutputReading
from vitdeploy.spec import DecodeError, PreprocessSpec, decode, encode

SPEC = PreprocessSpec((64, 48), (64, 48), "bilinear", fit="topdown")
POINTS = 5


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def heatmaps(seed=0, height=16, width=12):
    """Peaks of several heights and places on noise; one of them in a corner, one map nowhere above 0."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    places = [(0, 0), *generator.uniform((0, 0), (width, height), (POINTS - 1, 2))]
    scales = (1, 0.9, 0.4, 1.2, 0.05)
    peaks = [s * np.exp(-((x - a) ** 2 + (y - b) ** 2) / 6) for (a, b), s in zip(places, scales, strict=True)]
    return (np.stack(peaks) + generator.normal(0, 0.01, (POINTS, height, width))).astype(np.float32)


def answer(maps, size, box, spec=None):
    return KEYPOINTS.answer({"heatmaps": maps}, OutputReading(size, SPEC, spec or KeypointSpec(), None, 5, box))


@pytest.mark.parametrize("size", [(120, 90), (31, 100), (20, 12)])
def test_boxes_are_cut_out_and_points_come_back_as_in_transformers(size):
    processor = reference("transformers").VitPoseImageProcessor(size={"height": 64, "width": 48})
    width, height = size
    image = noise(*size)
    for number, (left, top, right, bottom) in enumerate(
        [(0, 0, width, height), (3.3, 2.7, 14.9, 11.2), (-9, -5, width / 2, height / 2), (width / 2, 1, 1.4 * width, 9)]
    ):
        given = [[left, top, right - left, bottom - top]]
        theirs = processor(image, boxes=[given], do_rescale=False, do_normalize=False, return_tensors="np")
        box = (left, top, right, bottom)
        ours = resize_and_crop(image, SPEC, box if number else None)
        np.testing.assert_array_equal(ours, theirs["pixel_values"][0].transpose(1, 2, 0))

        maps = heatmaps(number)
        outputs = SimpleNamespace(heatmaps=torch.from_numpy(maps)[None])
        expected = processor.post_process_pose_estimation(outputs, boxes=[given])[0][0]
        found = answer(maps, size, box if number else None)
        assert found.box == box
        np.testing.assert_allclose([(p.x, p.y) for p in found.points], expected["keypoints"], atol=2e-3)
        np.testing.assert_allclose([p.score for p in found.points], expected["scores"], rtol=1e-6)


def test_argmax_takes_the_pixel_and_a_map_nowhere_above_zero_has_no_place():
    maps = np.zeros((2, 16, 12), np.float32)
    maps[0, 3, 7] = 0.5
    places, scores = locate(maps - 0.1, KeypointSpec("argmax"))
    np.testing.assert_array_equal(places, [[7, 3], [-1, -1]])
    np.testing.assert_allclose(scores, [0.4, -0.1], rtol=1e-6)
    np.testing.assert_array_equal(locate(maps - 0.1, KeypointSpec())[0][1], [-1, -1])
    # A symmetric peak stays where it is.
    np.testing.assert_allclose(locate(maps, KeypointSpec())[0][0], [7, 3], atol=1e-6)


def test_the_window_of_the_input_is_where_its_pixels_come_from():
    window = input_window((120, 90), SPEC)
    # Of a ramp, the grey of the first and last pixel centre says where these are; the enlarged box is beyond the image.
    assert (window.left + window.right) / 2 == pytest.approx(60.5)
    assert (window.top + window.bottom) / 2 == pytest.approx(45.5)
    step = (window.right - window.left) / 48
    ramp = Image.fromarray(np.tile(np.arange(120, dtype=np.uint8), (90, 1))).convert("RGB")
    row = resize_and_crop(ramp, SPEC)[32, :, 0].astype(int)
    inside = np.flatnonzero((row > 0) & (row < 119))
    np.testing.assert_allclose(row[inside], window.left + (inside + 0.5) * step - 0.5, atol=0.51)


@pytest.mark.parametrize(
    "spec",
    [
        PreprocessSpec((64, 48), (64, 48), "bilinear"),
        PreprocessSpec(70, (64, 48), "bilinear"),
        PreprocessSpec((80, 60), (64, 48), "bilinear", fit="cover"),
        SPEC,
    ],
    ids=["stretched", "cropped", "covered", "top-down"],
)
@pytest.mark.parametrize("spot", [(40, 50), (85, 70)], ids=str)
def test_a_bright_spot_is_found_where_it_is_however_images_are_prepared(spec, spot):
    """The "model" is a mean over cells of 4x4 pixels, so its maps are cells of what the input shows."""
    size = (120, 110)
    x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    grey = 255 * np.exp(-((x - spot[0]) ** 2 + (y - spot[1]) ** 2) / 200)
    pixels = resize_and_crop(Image.fromarray(grey.astype(np.uint8)).convert("RGB"), spec)[:, :, 0] / 255
    maps = pixels.reshape(1, 16, 4, 12, 4).mean(axis=(2, 4)).astype(np.float32)
    [found] = KEYPOINTS.answer({"heatmaps": maps}, OutputReading(size, spec, KeypointSpec(threshold=0.1))).points
    # Maps of a top-down model lie from first to last centre, as cells of a mean do not: half a cell at the border.
    bound = 8 if spec is SPEC else 2.5
    assert np.hypot(found.x - spot[0], found.y - spot[1]) < bound


@pytest.mark.parametrize("box", [(5, 5, 5, 9), (5, 5, 4, 9), (0, 0, float("nan"), 3), (1, 2, 3), 7, "box"])
def test_a_box_without_anything_in_it_is_refused(box):
    with pytest.raises(InputError, match="invalid box") as refused:
        resize_and_crop(noise(20, 20), SPEC, box)
    assert "left, top, right, bottom" in refused.value.expected


@pytest.mark.parametrize("box", [(20, 0, 30, 9), (0, 20, 9, 30), (-9, 0, 0, 9), (0, -9, 9, 0)])
def test_a_box_outside_of_the_image_is_refused(box):
    with pytest.raises(InputError, match="the box is outside the image") as refused:
        resize_and_crop(noise(20, 20), SPEC, box)
    assert "in an image of 20x20" in refused.value.found


def test_a_box_for_a_model_of_whole_images_is_refused():
    with pytest.raises(InputError, match="this model takes whole images"):
        resize_and_crop(noise(20, 20), PreprocessSpec(16, (16, 16)), (0, 0, 9, 9))


def test_two_answers_are_the_same_where_most_points_are_near():
    reading, maps = OutputReading((48, 64), SPEC, KeypointSpec()), heatmaps()
    assert KEYPOINTS.same({"heatmaps": maps}, {"heatmaps": np.roll(maps, 1, axis=2)}, reading)
    assert not KEYPOINTS.same({"heatmaps": maps}, {"heatmaps": np.roll(maps, 6, axis=2)}, reading)


def test_the_answer_in_words_values_and_a_picture():
    rows = ((0, "nose", 10.0, 20.0, 0.9), (1, "eye", 30.0, 20.0, 0.8), (2, "ear", 9.0, 9.0, 0.1))
    points = tuple(Keypoint(*row) for row in rows)
    found = Keypoints((40, 40), (0.0, 0.0, 40.0, 40.0), points, 0.3, ((0, 1), (1, 2)))
    assert str(found) == "nose 0.90 at 10.0 20.0\neye 0.80 at 30.0 20.0"
    assert str(Keypoints((4, 4), (0.0, 0.0, 4.0, 4.0), points[2:], 0.3)) == "nothing above the threshold"
    assert repr(found).startswith("<Keypoints: 2 of 3 in 40x40: nose")
    document = found.to_dict()
    assert (document["width"], document["box"], len(document["points"])) == (40, [0.0, 0.0, 40.0, 40.0], 3)
    assert document["points"][1] == {"index": 1, "name": "eye", "x": 30.0, "y": 20.0, "score": 0.8}
    image = Image.new("RGB", (40, 40))
    drawn = draw_keypoints(image, [found])
    assert (drawn.getpixel((10, 20)), drawn.getpixel((30, 20)), drawn.getpixel((20, 20))) == (POINT, POINT, LINE)
    assert drawn.getpixel((9, 9)) == image.getpixel((10, 20)) == (0, 0, 0)
    other = Keypoints((40, 40), (20.0, 20.0, 40.0, 40.0), (Keypoint(0, "nose", 33.0, 34.0, 0.9),))
    for result, count in (([found, other], 2), (other, 1)):  # of two boxes of an image, and of one
        [(end, content)] = TASKS["keypoints"].draw(image, result).items()
        pixels = Image.open(io.BytesIO(content))
        seen = [pixels.getpixel(place) == POINT for place in ((10, 20), (33, 34))]
        assert (end, seen) == (".png", [count == 2, True])


def test_specs_go_through_json_and_refuse_what_cannot_be():
    spec = KeypointSpec("argmax", 7, 0.2, ((0, 1),))
    assert decode(KeypointSpec, encode(spec)) == spec
    assert decode(PreprocessSpec, encode(SPEC)) == SPEC
    with pytest.raises(DecodeError, match="kernel 4: expected an odd number"):
        decode(KeypointSpec, {**encode(spec), "kernel": 4})
    with pytest.raises(DecodeError, match="topdown cuts out a box of 64x48"):
        decode(PreprocessSpec, {**encode(SPEC), "resize": [70, 48]})

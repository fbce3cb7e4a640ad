"""Scores and maps of anomalies: against scipy, PyTorch and the paper's equation as it is written."""

import io

import numpy as np
import pytest
from PIL import Image

from vitdeploy.runtime.tasks.anomaly import (
    ANOMALY,
    GIVEN,
    AnomalySpec,
    anomaly_map,
    draw_heat,
    gaussian,
    image_score,
    smoothed,
)
from vitdeploy.runtime.tasks.registry import TASKS
from vitdeploy.runtime.tasks.task import OutputReading
from vitdeploy.spec import DecodeError, PreprocessSpec, decode

HEAD = AnomalySpec(threshold=2.0, pixel_threshold=1.5, sigma=1.0)
WHOLE = PreprocessSpec((12, 16), (12, 16), "bilinear", (0.5,) * 3, (0.5,) * 3)


def planes(*shape):
    return np.random.default_rng(0).uniform(1, 3, shape).astype(np.float32)


@pytest.mark.parametrize("sigma", [0.4, 4.0, 9.0])
def test_the_gaussian_is_scipys(sigma):
    """Also where it reaches beyond the other end."""
    scipy = pytest.importorskip("scipy.ndimage")
    values = planes(30, 7)
    np.testing.assert_allclose(gaussian(values, sigma), scipy.gaussian_filter1d(values.astype(float), sigma, axis=0))


def test_a_map_is_enlarged_as_pytorch_does_and_smoothed_as_scipy_does():
    scipy, torch = pytest.importorskip("scipy.ndimage"), pytest.importorskip("torch")
    plane = planes(7, 9)
    large = torch.nn.functional.interpolate(torch.from_numpy(plane)[None, None], (50, 63), mode="bilinear")[0, 0]
    np.testing.assert_allclose(smoothed(plane, (50, 63), 4.0), scipy.gaussian_filter(large.numpy(), 4.0), atol=1e-5)
    np.testing.assert_allclose(smoothed(plane, (50, 63), 0.0), large.numpy(), atol=1e-6)


def test_the_score_is_equation_7():
    distances, around = planes(4, 5), np.array([2.9, 3.1, 3.3, 4.0], np.float32)
    powers = np.exp(around.astype(float))
    expected = (1 - powers[0] / powers.sum()) * distances.max()
    assert image_score({"distances": distances, "neighbours": around}) == pytest.approx(expected)
    far = {"distances": distances, "neighbours": np.array([2000, 2001, 2002], np.float32)}  # exp would be infinite
    assert image_score(far) == pytest.approx((1 - 1 / (1 + np.e + np.e**2)) * distances.max())
    alone = {"distances": distances, "neighbours": np.array([2.9], np.float32)}  # a bank of one entry
    assert image_score(alone) == pytest.approx(distances.max())


def test_where_the_model_does_not_look_there_is_no_number():
    """A wide image of which the crop shows the middle."""
    cropped = PreprocessSpec(12, (12, 12), "bilinear", (0.5,) * 3, (0.5,) * 3)
    found = anomaly_map({"distances": planes(3, 3)}, (36, 12), cropped, HEAD)
    assert found.shape == (12, 36) and found.dtype == np.float32
    assert np.isfinite(found[:, 12:24]).all() and np.isnan(found[:, :12]).all() and np.isnan(found[:, 24:]).all()


def answer(distances, head=HEAD, size=(160, 120)):
    outputs = {"distances": distances, "neighbours": np.array([3.0, 3.0], np.float32)}
    return ANOMALY.answer(outputs, OutputReading(size, WHOLE, head))


def test_an_answer_and_its_picture():
    distances = np.ones((3, 4), np.float32)
    distances[2, 3] = 8.0
    found = answer(distances)
    assert (found.anomalous, found.score, found.threshold) == (True, 4.0, 2.0)
    x, y = found.peak
    assert x > 120 and y > 80 and found.mask[y, x] and not found.mask[:, :40].any()
    told = found.to_dict()
    assert told["anomalous"] and told["peak"] == (x, y) and told["share"] == pytest.approx(found.mask.mean())
    assert str(found) == f"anomalous: score 4, threshold 2, most at x {x}, y {y}"
    image = Image.fromarray(np.full((120, 160, 3), 90, np.uint8))
    files = TASKS["anomaly"].draw(image, found)
    drawn = np.asarray(Image.open(io.BytesIO(files[".png"])), np.int64)
    assert drawn[y, x, 0] > drawn[y, x, 2] + 50 and (drawn[100, 10] == 90).all()
    np.testing.assert_array_equal(np.load(io.BytesIO(files[".npy"])), found.map)


def test_a_normal_image_stays_as_it_is():
    found = answer(np.ones((3, 4), np.float32))
    assert not found.anomalous and str(found) == "normal: score 0.5, threshold 2" and not found.mask.any()
    grey = np.full((120, 160, 3), 90, np.uint8)
    np.testing.assert_array_equal(draw_heat(Image.fromarray(grey), found.map, (1.2, 2.1)), grey)


def test_a_map_and_a_score_that_are_given_stay_as_they_are():
    plane = planes(1, 12, 16) / 3
    given = {"anomaly_map": plane, "pred_score": np.array(0.7, np.float32)}
    found = ANOMALY.answer(given, OutputReading((16, 12), WHOLE, GIVEN))
    assert found.anomalous and found.score == pytest.approx(0.7)
    np.testing.assert_allclose(found.map, plane[0], atol=1e-6)


def test_engines_that_round_are_the_same_and_wrong_ones_are_not():
    outputs = {"distances": planes(4, 5), "neighbours": np.array([3.0, 3.2], np.float32)}
    rounded = {**outputs, "distances": outputs["distances"] * np.float32(1.05)}
    wrong = {**outputs, "distances": outputs["distances"][::-1, ::-1]}
    reading = OutputReading((16, 12), WHOLE, HEAD)
    assert ANOMALY.same(rounded, outputs, reading) and not ANOMALY.same(wrong, outputs, reading)


def test_a_sigma_below_0_is_no_spec():
    with pytest.raises(DecodeError, match="sigma -1: expected >= 0 pixels"):
        decode(AnomalySpec, {"threshold": 1.0, "pixel_threshold": 1.0, "sigma": -1.0})

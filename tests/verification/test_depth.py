"""Depth against plain formulas: alignment, AbsRel, delta-1, agreement; and files of labels."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LinearRegression

from vitdeploy.errors import DataError, ImageError
from vitdeploy.runtime.tasks.depth import Depth, alike_share
from vitdeploy.tasks.depth import (
    DepthError,
    aligned_depth,
    depth_changes,
    depth_comparison,
    depth_error,
    depth_records,
    read_depth,
)

RANDOM = np.random.default_rng(0)
TRUTH = RANDOM.uniform(1, 8, (6, 5)).astype(np.float32)


def test_relative_depth_is_aligned_by_least_squares_in_disparity():
    disparity = 3 / TRUTH + 0.2 + RANDOM.normal(0, 0.05, TRUTH.shape)
    a, b = disparity.reshape(-1, 1), 1 / TRUTH.reshape(-1)
    fitted = LinearRegression().fit(a, b).predict(a)
    expected = 1 / np.maximum(fitted, b.min())
    np.testing.assert_allclose(aligned_depth(a[:, 0], 1 / b), expected, rtol=1e-6)
    error = depth_error(disparity, TRUTH, "inverse")
    assert error.abs_rel == pytest.approx(float((np.abs(expected - 1 / b) * b).mean()), rel=1e-5)
    # What differs by scale and shift alone has no error; what says nothing is everywhere the same.
    assert depth_error(7 / TRUTH - 2, TRUTH, "inverse").abs_rel == pytest.approx(0, abs=1e-5)
    assert np.ptp(aligned_depth(np.ones(9), np.linspace(1, 2, 9))) == 0


def test_metric_depth_is_not_aligned_and_unknown_pixels_do_not_count():
    truth = TRUTH.copy()
    truth[0] = np.nan
    found = depth_error(1.2 * TRUTH, truth, "metric")
    assert (found.abs_rel, found.delta1) == (pytest.approx(0.2, rel=1e-5), 1.0)
    assert depth_error(1.3 * TRUTH, truth, "metric").delta1 == 0.0
    assert depth_error(TRUTH, np.full_like(TRUTH, np.nan), "metric") is None


def test_two_maps_are_alike_by_ratios_and_what_is_far_is_far():
    theirs = np.array([[10.0, 1.0, 0.02, 0.0, np.nan]])
    ours = np.array([[10.9, 1.3, 0.0, 0.05, 1.0]])
    assert alike_share(ours, theirs, "inverse") == 3 / 4  # only 1.0 and 1.3 are not
    assert alike_share(ours[:, :3], theirs[:, :3], "metric") == 1 / 3


def test_the_comparison_has_the_means_over_images_with_intervals():
    rates = [(0.9, 0.1), (0.8, 0.2), (0.7, 0.3), (0.6, 0.35)]
    errors = [(DepthError(b, a), DepthError(b / 2, a + 0.05)) for a, b in rates]
    planes = list(RANDOM.uniform(1, 2, (4, 3, 3)))
    found = depth_comparison(depth_records(planes, planes, errors, "metric"), max_difference=0.0)
    assert (found.metric, found.agreement, found.n) == ("delta-1", 100.0, 4)
    assert (found.value, found.reference_value, found.drop) == pytest.approx((75.0, 80.0, 5.0))
    assert (found.abs_rel, found.reference_abs_rel) == pytest.approx((0.2375, 0.11875))
    assert found.abs_rel_ci95[0] < 0.11875 < found.abs_rel_ci95[1]
    assert found.drop_ci95[0] < 0 < 5 < found.drop_ci95[1]  # four images prove little
    assert found.agreement_ci95[0] < 60
    twice = depth_records([2 * each for each in planes], planes, None, "metric")
    unlabelled = depth_comparison(twice, max_difference=0.1)
    assert (unlabelled.metric, unlabelled.agreement, unlabelled.abs_rel) == (None, 0.0, None)
    assert depth_changes([planes[0], 2 * planes[1]], planes[:2], "metric").changed.tolist() == [False, True]
    with pytest.raises(DataError, match="no pixel of known depth"):
        depth_comparison(depth_records(planes, planes, [None] * 4, "metric"), max_difference=0.0)


@pytest.fixture
def folders(tmp_path):
    """Two images: one with a .npy, one with a PNG of 16 bits."""
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.mkdir(), labels.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (3, 2)).save(images / name)
    np.save(labels / "a.npy", np.array([[1, 2, 0], [-1, np.inf, 3.5]], np.float32))
    Image.fromarray(np.array([[0, 500, 65535]] * 2, np.uint16)).save(labels / "b.png")
    return images, labels


def test_labels_are_read_in_metres_and_what_is_unknown_is_no_number(folders):
    images, labels = folders
    (labels / "depth.json").write_text(json.dumps({"scale": 0.001}))
    first, second = read_depth(images, labels).annotations.values()
    np.testing.assert_array_equal(first.load(True), np.array([[1, 2, np.nan], [np.nan, np.nan, 3.5]], np.float32))
    np.testing.assert_allclose(second.load(True)[0], [np.nan, 0.5, 65.535], rtol=1e-6)


def test_a_unit_that_nobody_says_is_refused_for_metric_depth_alone(folders):
    images, labels = folders
    annotation = read_depth(images, labels).annotations[images / "b.png"]
    assert annotation.load(False)[0, 1] == 500
    with pytest.raises(DataError, match="has no depth unit") as caught:
        annotation.load(True)
    assert "depth.json" in caught.value.fix
    (labels / "depth.json").write_text('{"scale": 0}')
    with pytest.raises(DataError, match="has no valid scale"):
        read_depth(images, labels)


def test_broken_labels_are_refused(folders):
    images, labels = folders
    annotation = read_depth(images, labels).annotations[images / "a.png"]
    np.save(labels / "a.npy", np.array([["a"]]))
    with pytest.raises(DataError, match="is not a map of numbers"):
        annotation.load(False)
    np.save(labels / "a.npy", np.ones((4, 4)))
    with pytest.raises(DataError, match="does not have the size of its image"):
        annotation.load(False)
    (labels / "a.npy").write_bytes(b"nothing")
    with pytest.raises(ImageError, match="cannot be read"):
        annotation.load(False)


def test_the_result_says_its_range_and_its_png_is_in_millimetres():
    metres = Depth(np.array([[1.5, 0.25], [np.nan, 90.0]], np.float32), "metric")
    assert metres.to_dict() == {
        "width": 2, "height": 2, "values": "metric", "unit": "m", "min": 0.25, "median": 1.5, "max": 90.0
    }  # fmt: skip
    assert str(metres) == "depth from 0.25 to 90.00 m, median 1.50 m"
    assert np.asarray(Image.open(io.BytesIO(metres.png()))).tolist() == [[1500, 250], [0, 65535]]
    relative = Depth(np.array([[1.0, 3.0]], np.float32), "inverse")
    assert str(relative).startswith("relative inverse depth from 1 (far) to 3 (near)")

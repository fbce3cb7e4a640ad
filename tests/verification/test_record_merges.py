"""Records of pieces in any order make the comparison of all images, to the last bit; draws some at a time are all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verification.test_detection import random_set
from vitdeploy.tasks.depth import DepthError, depth_comparison, depth_records
from vitdeploy.tasks.segmentation import segmentation_comparison, segmentation_records
from vitdeploy.verification import intervals as bootstrap
from vitdeploy.verification.average_precision import match_boxes
from vitdeploy.verification.changes import joined
from vitdeploy.verification.comparison import differences, worst_of
from vitdeploy.verification.detection import DetectionComparison, object_records
from vitdeploy.verification.intervals import draws, replicates
from vitdeploy.verification.records import Answers

N, CLASSES = 14, 6


@st.composite
def pieces(draw):
    """The images in some order, cut into pieces."""
    places = np.array(draw(st.permutations(range(N))), np.int64)
    return np.split(places, sorted(draw(st.sets(st.integers(1, N - 1), max_size=5))))


@settings(max_examples=12, deadline=None)
@given(pieces(), st.integers(0, 50), st.booleans())
def test_objects(cut, seed, labelled):
    """Classes that a piece has no label of are found there wrongly, as in all images."""
    reference, truth = random_set(seed, N, 5)
    artifact = random_set(seed + 1000, N, 5)[0]
    known = truth if labelled else None
    found = [
        object_records(
            *([side[i] for i in piece] for side in (artifact, reference)),
            [truth[i] for i in piece] if labelled else None,
            match_boxes,
            threshold=0.3,
        )
        for piece in cut
    ]
    whole = object_records(artifact, reference, known, match_boxes, threshold=0.3)
    ours, theirs = (
        DetectionComparison.of(each, threshold=0.3, max_difference=0.5) for each in (joined(found, cut), whole)
    )
    assert ours == theirs


@settings(max_examples=12, deadline=None)
@given(pieces(), st.integers(0, 50))
def test_maps_of_classes(cut, seed):
    generator = np.random.default_rng(seed)
    ours, theirs, truth = (generator.integers(-1, CLASSES, (N, 4, 5)) for _ in range(3))
    found = [segmentation_records(ours[piece], theirs[piece], truth[piece], classes=CLASSES) for piece in cut]
    whole = segmentation_records(ours, theirs, truth, classes=CLASSES)
    both = [segmentation_comparison(each, classes=CLASSES, max_difference=0.0) for each in (joined(found, cut), whole)]
    assert both[0] == both[1]


@settings(max_examples=12, deadline=None)
@given(pieces(), st.integers(0, 50))
def test_depth(cut, seed):
    generator = np.random.default_rng(seed)
    ours, theirs = (generator.uniform(1, 2, (N, 3, 4)) for _ in range(2))
    errors = [
        None if i % 5 == seed % 5 else tuple(DepthError(*generator.uniform(0, 1, 2)) for _ in range(2))
        for i in range(N)
    ]
    found = [depth_records(ours[piece], theirs[piece], [errors[i] for i in piece], "metric") for piece in cut]
    whole = depth_records(ours, theirs, errors, "metric")
    assert depth_comparison(joined(found, cut), max_difference=0.0) == depth_comparison(whole, max_difference=0.0)


def test_the_draws_some_at_a_time_are_those_of_all_together(monkeypatch):
    values = np.arange(50.0)
    whole = replicates(50, 3, lambda weights: weights @ values)
    assert np.array_equal(whole, draws(50, 3) @ values) and len(whole) == bootstrap.REPLICATES
    monkeypatch.setattr(bootstrap, "BLOCK", 50 * 7)
    assert np.array_equal(replicates(50, 3, lambda weights: weights @ values), whole)


def test_the_worst_output_is_that_of_all_images():
    generator = np.random.default_rng(0)
    sides = [{name: list(generator.normal(size=(9, 4)).astype(np.float32)) for name in "ab"} for _ in range(2)]
    ours, theirs = (Answers({name: tuple(column) for name, column in side.items()}) for side in sides)
    shares = []
    for name in "ab":
        a, b = (np.stack(side[name]).astype(np.float64) for side in sides)
        shares.append(np.abs(a - b).max() / np.abs(b).max())
    expected = max(shares)
    assert worst_of(differences(ours, theirs, ["a", "b"])) == pytest.approx(expected, rel=1e-15)
    assert worst_of(differences(ours, theirs, [])) == 0.0


def test_maps_of_whole_numbers_are_kept_compressed(tmp_path):
    """And floats as they are; both are read as they were."""
    maps = tuple(np.full((64, 60 + i), i, np.int8) for i in range(3))
    noise = tuple(np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32))
    Answers({"map": maps, "raw": noise}).save(tmp_path / "answers.npz")
    found = Answers.load(tmp_path / "answers.npz")
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found.columns["map"], maps, strict=True))
    assert np.array_equal(found.stacked("raw"), np.stack(noise))
    assert 12_000 < (tmp_path / "answers.npz").stat().st_size < 14_000

"""Nearest neighbours by hand and against a plain search; what rounding may not change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.errors import DataError
from vitdeploy.tasks import features as module
from vitdeploy.tasks.features import compare_features
from vitdeploy.verification.intervals import paired_difference, wilson

# Four directions: 0 and 1 are near each other, 2 and 3 too.
ANGLES = np.array([0.0, 0.1, 1.5, 1.7])
REFERENCE = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1).astype(np.float32)
MOVED = REFERENCE.copy()
MOVED[1] = np.cos(1.4), np.sin(1.4)  # now 1 and 2 are near each other; 0 still has 1, and 3 still has 2
LABELS = np.array([0, 0, 1, 1])


def plain(features):
    unit = features.astype(np.float64) / np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    table = unit @ unit.T
    np.fill_diagonal(table, -2)
    return table.argmax(axis=1)


def test_agreement_is_the_share_of_equal_neighbours():
    found = compare_features(MOVED, REFERENCE, None)
    assert (found.n, found.agreement) == (4, 50.0)
    assert found.agreement_ci95 == pytest.approx([100 * limit for limit in wilson(2, 4)])
    assert (found.metric, found.value, found.reference_value, found.drop, found.drop_ci95) == (None,) * 5


def test_with_labels_the_neighbours_class_is_counted():
    found = compare_features(MOVED, REFERENCE, LABELS)
    # The neighbours are now 1, 2, 1, 2: of the right class for images 0 and 3.
    assert (found.metric, found.value, found.reference_value, found.drop) == ("1-NN top-1", 50.0, 100.0, 50.0)
    assert found.drop_ci95 == pytest.approx([100 * limit for limit in paired_difference(2, 2, 0, 0)])


def test_cosine_and_largest_difference_are_those_of_the_features():
    found = compare_features(MOVED, REFERENCE, None)
    assert found.cosine_min == pytest.approx(np.cos(1.3))
    assert found.cosine_mean == pytest.approx((3 + np.cos(1.3)) / 4)
    assert found.max_difference == pytest.approx(np.abs(MOVED - REFERENCE).max() / np.abs(REFERENCE).max())


def test_length_of_the_features_does_not_matter():
    scaled = REFERENCE * np.array([[1], [3], [0.1], [100]], np.float32)
    found = compare_features(scaled, REFERENCE, LABELS)
    assert (found.agreement, found.drop, found.cosine_min) == (100.0, 0.0, pytest.approx(1.0))


def test_copies_of_an_image_may_be_taken_for_each_other():
    copies, generator = np.concatenate([REFERENCE] * 3), np.random.default_rng(0)
    reference, ours = (copies + generator.normal(0, 1e-6, copies.shape).astype(np.float32) for _ in range(2))
    assert (plain(ours) != plain(reference)).any()
    assert compare_features(ours, reference, None).agreement == 100.0


def test_labels_without_two_of_a_kind_are_no_labels():
    assert compare_features(MOVED, REFERENCE, np.arange(4)).metric is None


def test_features_of_zeros_do_not_divide_by_zero():
    found = compare_features(np.zeros_like(REFERENCE), np.zeros_like(REFERENCE), None)
    assert (found.agreement, found.max_difference, found.cosine_min) == (100.0, 0.0, 0.0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 40), block=st.integers(1, 50))
def test_neighbours_are_those_of_a_plain_search_whatever_the_block(seed, n, block):
    generator = np.random.default_rng(seed)
    reference = generator.normal(size=(n, 6)).astype(np.float32)
    ours = reference + generator.normal(0, 0.5, reference.shape).astype(np.float32)
    labels = np.arange(n) // 2 if n > 2 else np.zeros(n, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        found, same = compare_features(ours, reference, labels), compare_features(ours, ours, labels)
    assert found.agreement == pytest.approx(100 * (plain(ours) == plain(reference)).mean())
    assert found.value == pytest.approx(100 * (labels[plain(ours)] == labels).mean())
    assert found.reference_value == pytest.approx(100 * (labels[plain(reference)] == labels).mean())
    assert found.drop == pytest.approx(found.reference_value - found.value)
    assert (same.agreement, same.drop, same.max_difference) == (100.0, 0.0, 0.0)


@pytest.mark.parametrize(("ours", "reference"), [((2, 3), (2, 4)), ((2, 3, 4), (2, 3, 4))], ids=str)
def test_arrays_that_cannot_be_compared_are_refused(ours, reference):
    with pytest.raises(ValueError, match="against"):
        compare_features(np.zeros(ours, np.float32), np.zeros(reference, np.float32), None)


def test_one_image_has_no_neighbour():
    with pytest.raises(DataError) as refused:
        compare_features(REFERENCE[:1], REFERENCE[:1], None)
    assert "add images" in refused.value.fix

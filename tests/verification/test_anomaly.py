"""AUROC of images and pixels: against scikit-learn, and a count of all pairs."""

import numpy as np
import pytest

from vitdeploy.tasks.anomaly import (
    STEPS,
    anomaly_changes,
    compare_anomalies,
    count_pixels,
)
from vitdeploy.verification.ranking import auroc, auroc_of_counts, average_precision, precisions


@pytest.fixture
def scored():
    """Scores with ties, and which images are defective."""
    generator = np.random.RandomState(0)
    defective = generator.uniform(size=80) < 0.3
    return np.round(generator.normal(size=80) + 1.2 * defective, 1), defective


def by_pairs(scores, defective):
    bad, good = scores[defective][:, None], scores[~defective][None]
    return float(((bad > good) + 0.5 * (bad == good)).mean())


def test_auroc_and_average_precision_are_scikit_learns(scored):
    metrics = pytest.importorskip("sklearn.metrics")
    assert auroc(*scored) == pytest.approx(by_pairs(*scored), abs=1e-12)
    assert auroc(*scored) == pytest.approx(metrics.roc_auc_score(scored[1], scored[0]), abs=1e-12)
    assert average_precision(*scored) == pytest.approx(metrics.average_precision_score(*scored[::-1]), abs=1e-12)
    assert np.isnan(auroc(scored[0], np.ones(80, bool))) and np.isnan(average_precision(scored[0], np.zeros(80, bool)))


def test_images_that_are_drawn_several_times_count_so_often(scored):
    """Of draws without a positive, without a negative, and without the images of the highest score."""
    metrics = pytest.importorskip("sklearn.metrics")
    scores, positive = scored
    weights = np.random.RandomState(2).multinomial(80, np.full(80, 1 / 80), size=20).astype(float)
    weights[0, positive], weights[1, ~positive], weights[2, scores == scores.max()] = 0, 0, 0
    found = precisions(scores, positive, weights.T)
    assert np.isnan(found[0]) and found[1] == 1
    expected = [metrics.average_precision_score(positive, scores, sample_weight=row) for row in weights[2:]]
    np.testing.assert_allclose(found[2:], expected, atol=1e-12)


def test_pixels_are_counted_as_precisely_as_the_steps_are(scored):
    metrics = pytest.importorskip("sklearn.metrics")
    generator = np.random.RandomState(1)
    masks = [generator.uniform(size=(20, 30)) < 0.1 for _ in range(6)]
    maps = [generator.normal(size=(20, 30)) + mask for mask in masks]
    low, high = min(map(np.min, maps)), max(map(np.max, maps))
    counts = count_pixels(zip(maps, masks, strict=True), (low, high))
    assert counts.defective.shape == (6, STEPS) and counts.defective.sum() == np.sum(masks)
    [found] = auroc_of_counts(counts.defective.sum(0)[None], counts.good.sum(0)[None])
    assert found == pytest.approx(metrics.roc_auc_score(np.ravel(masks), np.ravel(maps)), abs=1e-3)


def test_what_is_not_seen_counts_as_normal():
    seen, mask = np.array([[np.nan, 1.0, 2.0]]), np.array([[True, False, True]])
    counts = count_pixels([(seen, mask)], (1.0, 2.0))
    assert counts.defective[0, 0] == 1 and counts.good[0, 0] == 1 and counts.defective[0, -1] == 1


def compare(ours, theirs, defective=None, **more):
    return compare_anomalies(ours, theirs, threshold=0.8, max_difference=0.1, defective=defective, **more)


def test_the_intervals_are_those_of_resampled_images(scored):
    """By a bootstrap that draws images one by one; none is narrower than that of a share of so many images."""
    scores, defective = scored
    found = compare(scores, scores, defective)
    assert found.metric == "image AUROC" and found.value == found.reference_value == pytest.approx(100 * auroc(*scored))
    generator, drawn = np.random.default_rng(0), []
    good, bad = np.flatnonzero(~defective), np.flatnonzero(defective)
    for _ in range(1000):
        chosen = np.r_[generator.choice(good, len(good)), generator.choice(bad, len(bad))]
        drawn.append(100 * by_pairs(scores[chosen], defective[chosen]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    assert found.auroc_ci95[0] <= low + 1 and found.auroc_ci95[1] >= high - 1
    assert found.auroc_ci95 == pytest.approx((low, high), abs=6)
    assert found.drop == 0 and found.drop_ci95[0] < -1 and found.drop_ci95[1] > 1


def test_a_worse_artifact_drops_in_both_aurocs(scored):
    scores, defective = scored
    worse = scores + np.random.RandomState(2).normal(size=80)
    pixels = [(np.full((4, 4), each), np.full((4, 4), kind)) for each, kind in zip(scores, defective, strict=True)]
    noisy = [(np.full((4, 4), each), np.full((4, 4), kind)) for each, kind in zip(worse, defective, strict=True)]
    counts = count_pixels(noisy, (-4.0, 5.0)), count_pixels(pixels, (-4.0, 5.0))
    found = compare(worse, scores, defective, pixels=counts)
    assert found.drop == pytest.approx(found.reference_value - found.value) and found.drop > 1
    assert found.drop_ci95[0] < found.drop < found.drop_ci95[1]
    assert found.pixel_auroc == pytest.approx(found.value, abs=0.3)
    assert found.pixel_drop_ci95[0] < found.pixel_drop < found.pixel_drop_ci95[1]
    assert (found.anomalous, found.reference_anomalous) == ((worse > 0.8).sum(), (scores > 0.8).sum())


def test_without_labels_verdicts_are_compared():
    theirs = np.array([0.2, 0.7, 0.9, 1.5])
    found = compare(theirs + 0.15, theirs)
    assert found.metric is None and found.value is None and found.pixel_auroc is None
    assert found.agreement == 75 and found.agreement_ci95[0] < 75 < found.agreement_ci95[1]


def test_a_verdict_that_becomes_wrong_is_the_worst_change():
    ours, theirs = np.array([0.7, 0.9, 0.9, 1.5]), np.array([0.9, 0.7, 0.7, 1.5])
    found = anomaly_changes(ours, theirs, 0.8, np.array([True, True, False, True]))
    assert found.changed.tolist() == [True, True, True, False]
    assert found.lost.tolist() == [True, False, True, False] and found.gained.tolist() == [False, True, False, False]
    assert found.severity[0] > found.severity[1]
    assert anomaly_changes(ours, theirs, 0.8, None).lost is None

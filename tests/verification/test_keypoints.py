"""Key points compared: OKS AP against pycocotools' own summary, PCK and agreement by hand."""

import contextlib
import io

import numpy as np
import pytest

from vitdeploy.data.keypoints import COCO_SIGMAS, LabelledObject
from vitdeploy.tasks.keypoints import Points, PosedObjects, compare_keypoints

N, K = 24, 17


def drawn(seed=0, spread=4.0, sigmas=COCO_SIGMAS):
    """Labelled objects, two an image, and points near them."""
    generator = np.random.default_rng(seed)
    truth = generator.uniform(20, 180, (N, K, 2))
    visible = generator.integers(0, 3, (N, K))
    visible[:, 0] = 2
    labels = [
        LabelledObject(None, None, (10.0, 10.0, 190.0, 200.0), tuple(map(tuple, np.c_[t, v].tolist())), 9000.0, sigmas)
        for t, v in zip(truth, visible, strict=True)
    ]
    sides = [
        Points(truth + generator.normal(0, deviation, truth.shape), generator.uniform(0.2, 1, (N, K)))
        for deviation in (spread, spread / 2)
    ]
    return sides, PosedObjects(np.full(N, 190.0), np.arange(N) // 2, labels)


def official(points, objects):
    """AP, AP50 and AP75 as COCOeval summarises them."""
    coco = pytest.importorskip("pycocotools.coco").COCO
    evaluate = pytest.importorskip("pycocotools.cocoeval").COCOeval
    images = [{"id": i + 1} for i in range(N // 2)]
    labels = [
        {
            "id": i + 1, "image_id": i // 2 + 1, "category_id": 1, "iscrowd": 0, "area": o.area,
            "bbox": [10, 10, 180, 190], "keypoints": [v for p in o.points for v in p],
            "num_keypoints": sum(v > 0 for *_, v in o.points),
        }
        for i, o in enumerate(objects.labels)
    ]  # fmt: skip
    results = [
        {"image_id": i // 2 + 1, "category_id": 1, "keypoints": np.c_[p, s].ravel().tolist(), "score": float(s.mean())}
        for i, (p, s) in enumerate(zip(points.places, points.scores, strict=True))
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco()
        truth.dataset = {"images": images, "annotations": labels, "categories": [{"id": 1}]}
        truth.createIndex()
        run = evaluate(truth, truth.loadRes(results), "keypoints")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return 100 * run.stats[:3]


def test_oks_ap_is_that_of_pycocotools():
    (ours, theirs), objects = drawn(spread=8.0)
    found = compare_keypoints(ours, theirs, objects, threshold=0.3)
    np.testing.assert_allclose([found.value, found.oks_ap50, found.oks_ap75], official(ours, objects), rtol=1e-9)
    assert found.reference_value == pytest.approx(official(theirs, objects)[0])
    assert 5 < found.value < found.reference_value < 99
    assert found.metric == "OKS AP"
    assert found.drop_ci95[0] < found.drop < found.drop_ci95[1]


def test_pck_counts_labelled_points_within_a_tenth_of_the_longer_side():
    (_, _), objects = drawn(sigmas=None)
    truth = np.array([o.points for o in objects.labels])
    known = truth[..., 2] > 0
    places = truth[..., :2].copy()
    places[0, 0] += (18.9, 0)  # within 19 pixels
    places[1, 0] += (19.1, 0)
    places[~known] = -500  # what is not labelled does not count
    ours, theirs = Points(places, np.ones((N, K))), Points(truth[..., :2], np.ones((N, K)))
    found = compare_keypoints(ours, theirs, objects, threshold=0.5)
    assert (found.metric, found.reference_value) == ("PCK@0.1", 100)
    assert found.value == found.pck == pytest.approx(100 * (known.sum() - 1) / known.sum())
    assert found.drop_ci95[0] <= found.drop <= found.drop_ci95[1]
    assert found.drop_ci95[1] > found.drop


def test_agreement_counts_shown_points_at_the_same_place():
    places = np.zeros((2, 3, 2)) + 50.0
    ours, theirs = Points(places.copy(), np.ones((2, 3))), Points(places, np.ones((2, 3)))
    ours.places[0, 0] += (6, 0)  # beyond 5 % of 100 pixels
    ours.places[0, 1] += (4, 0)
    ours.scores[1, 2] = 0.1  # not shown
    found = compare_keypoints(ours, theirs, PosedObjects(np.full(2, 100.0), np.arange(2)), threshold=0.3)
    assert found.points == 6
    assert found.agreement == pytest.approx(200 * 4 / 11)
    assert found.distance_mean == pytest.approx((6 + 4) / 5)
    assert (found.metric, found.value, found.drop) == (None, None, None)
    assert found.max_difference == pytest.approx(0.9)
    assert found.agreement_ci95[0] < found.agreement < found.agreement_ci95[1]


def test_points_of_other_shapes_are_refused():
    a, b = Points(np.zeros((2, 3, 2)), np.zeros((2, 3))), Points(np.zeros((2, 4, 2)), np.zeros((2, 4)))
    with pytest.raises(ValueError, match="against"):
        compare_keypoints(a, b, PosedObjects(np.ones(2), np.arange(2)), threshold=0.3)

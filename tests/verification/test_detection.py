"""mAP against pycocotools and against values known by hand; pairs of objects; intervals that prove what they may."""

import importlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.data.detection import Boxes, read_detection
from vitdeploy.errors import DataError, MissingPackageError
from vitdeploy.verification.average_precision import Objects, average_precision, iou, match_boxes, matches_of
from vitdeploy.verification.detection import DetectionComparison, object_records, pair
from vitdeploy.verification.intervals import draws

DATA = Path(os.environ.get("VITDEPLOY_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
DETECTOR = DATA / "weights" / "deimv2_hgnetv2_atto_coco.onnx"
SIZE = (200, 200)


def objects(*rows):
    """From (class, score, x0, y0, x1, y1)."""
    table = np.array(rows, np.float64).reshape(-1, 6)
    return Objects(table[:, 0].astype(np.int64), table[:, 1].astype(np.float32), table[:, 2:].astype(np.float32))


def labelled(*rows, crowd=()):
    """From (class, x0, y0, x1, y1); `crowd` are the indices of crowds."""
    table = np.array(rows, np.float64).reshape(-1, 5)
    boxes = table[:, 1:]
    area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return Boxes(SIZE, boxes, table[:, 0].astype(np.int64), np.isin(np.arange(len(table)), crowd), area)


def exactly(truth, score=0.9):
    """Detections that are the labelled objects."""
    return Objects(truth.classes, np.full(len(truth.classes), score, np.float32), truth.boxes)


def compare(artifact, reference, truth=None, threshold=0.5):
    records = object_records(artifact, reference, truth, match_boxes, threshold=threshold)
    return DetectionComparison.of(records, threshold=threshold, max_difference=0.0)


def random_set(seed, images=12, classes=4):
    """Labelled images with crowds, and detections of all kinds: near, far, doubled, of wrong or unlabelled classes."""
    generator = np.random.default_rng(seed)
    truth, found = [], []
    for _ in range(images):
        n = int(generator.integers(0, 6))
        corner, size = generator.uniform(0, 140, (n, 2)), generator.uniform(10, 60, (n, 2))
        rows = np.concatenate([generator.integers(0, classes, (n, 1)), corner, corner + size], axis=1)
        truth.append(labelled(*rows, crowd=np.flatnonzero(generator.random(n) < 0.15)))
        near = np.repeat(truth[-1].boxes, 2, axis=0)[: 2 * n - 1 if n else 0]
        near = near + generator.normal(0, 4, near.shape)
        far = generator.uniform(0, 140, (3, 2))
        boxes = np.concatenate([near, np.concatenate([far, far + 30], axis=1)])
        kinds = np.concatenate([np.repeat(truth[-1].classes, 2)[: len(near)], generator.integers(0, classes + 1, 3)])
        wrong = generator.random(len(kinds)) < 0.1
        kinds = np.where(wrong, generator.integers(0, classes, len(kinds)), kinds)
        found.append(Objects(kinds, generator.random(len(kinds)), boxes))
    return found, truth


def coco_stats(found, truth):
    """AP, AP50, AP75 as pycocotools' own summary has them."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    gt, dt = COCO(), COCO()
    images = [{"id": i + 1} for i in range(len(truth))]
    categories = [{"id": c} for c in range(10)]
    annotations = [
        {"image_id": i + 1, "category_id": int(c), "bbox": [b[0], b[1], b[2] - b[0], b[3] - b[1]], "iscrowd": int(k),
         "area": float(a)}
        for i, t in enumerate(truth) for b, c, k, a in zip(t.boxes.tolist(), t.classes, t.crowd, t.area, strict=True)
    ]  # fmt: skip
    gt.dataset = {
        "images": images, "categories": categories,
        "annotations": [{"id": k, **each} for k, each in enumerate(annotations, 1)],
    }  # fmt: skip
    gt.createIndex()
    results = [
        {"image_id": i + 1, "category_id": int(c), "score": float(s), "bbox": [b[0], b[1], b[2] - b[0], b[3] - b[1]]}
        for i, f in enumerate(found) for b, c, s in zip(f.boxes.tolist(), f.classes, f.scores, strict=True)
    ]  # fmt: skip
    dt = gt.loadRes(results)
    run = COCOeval(gt, dt, "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    return run.stats[:3]


# --- mAP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_ap_is_that_of_pycocotools_summary(seed):
    found, truth = random_set(seed)
    result = compare(found, found, truth)
    ours = [result.value, result.ap50, result.ap75]
    np.testing.assert_allclose(ours, 100 * coco_stats(found, truth), rtol=0, atol=1e-10)
    assert 5 < result.value < 95


@pytest.mark.parametrize("seed", range(3))
def test_ap_of_a_draw_is_that_of_pycocotools_for_the_list_with_repeated_images(seed):
    found, truth = random_set(seed)
    weights = np.random.default_rng(seed).multinomial(12, np.full(12, 1 / 12), size=4)
    ours = average_precision(matches_of(match_boxes(found, truth), len(truth)), weights.astype(np.float64))
    for times, values in zip(weights, ours, strict=True):
        drawn = np.repeat(np.arange(12), times)
        theirs = coco_stats([found[i] for i in drawn], [truth[i] for i in drawn])
        np.testing.assert_allclose([values.mean(), values[0], values[5]], theirs, rtol=0, atol=1e-12)


TWO = [labelled((0, 10, 10, 60, 60)), labelled((0, 20, 20, 50, 50), (0, 100, 100, 150, 150), (1, 0, 0, 30, 30))]


def test_perfect_detections_have_an_ap_of_100():
    found = [exactly(t) for t in TWO]
    result = compare(found, found, TWO)
    assert (result.metric, result.value, result.ap50, result.ap75) == ("mAP", *[pytest.approx(100.0)] * 3)
    assert (result.drop, result.agreement, result.iou_mean, result.score_difference_mean) == (0.0, 100.0, 1.0, 0.0)


def test_half_of_the_objects_of_a_class_is_an_ap_of_51_of_101_recalls():
    truth = [labelled((0, 10, 10, 60, 60), (0, 100, 100, 150, 150))]
    found = [objects((0, 0.9, 10, 10, 60, 60))]
    result = compare(found, [exactly(t) for t in truth], truth)
    assert result.value == pytest.approx(100 * 51 / 101)
    assert result.drop == pytest.approx(100 * 50 / 101)


def test_a_false_detection_of_a_higher_score_halves_precision():
    truth = [labelled((0, 10, 10, 60, 60))]
    found = [objects((0, 0.9, 110, 110, 160, 160), (0, 0.8, 10, 10, 60, 60))]
    assert compare(found, found, truth).value == pytest.approx(50.0)


def test_an_iou_of_two_thirds_counts_up_to_65():
    """Of the ten thresholds .50, .55, .60, .65 are met."""
    truth = [labelled((0, 0, 0, 100, 100))]
    found = [objects((0, 0.9, 0, 0, 100, 150))]
    result = compare(found, found, truth)
    assert (result.value, result.ap50, result.ap75) == (pytest.approx(40.0), pytest.approx(100.0), 0.0)


def test_crowds_are_not_to_be_found_and_excuse_what_is_found_in_them():
    truth = [labelled((0, 10, 10, 60, 60), (0, 100, 100, 200, 200), crowd=[1])]
    found = [objects((0, 0.9, 110, 110, 140, 140), (0, 0.8, 10, 10, 60, 60))]
    assert compare(found, found, truth).value == pytest.approx(100.0)
    not_a_crowd = [labelled((0, 10, 10, 60, 60), (0, 100, 100, 200, 200))]
    assert compare(found, found, not_a_crowd).value < 60


def test_the_mean_is_over_the_classes_that_have_labels():
    truth = [labelled((0, 10, 10, 60, 60), (1, 100, 100, 150, 150))]
    found = [objects((0, 0.9, 10, 10, 60, 60), (2, 0.9, 0, 0, 50, 50))]
    assert compare(found, found, truth).value == pytest.approx(50.0)


def test_a_detector_that_finds_nothing_has_an_ap_of_0():
    nothing = [objects(), objects()]
    result = compare(nothing, [exactly(t) for t in TWO], TWO)
    assert (result.value, result.reference_value, result.drop, result.agreement) == (
        0.0,
        *[pytest.approx(100.0)] * 2,
        0.0,
    )
    assert result.drop_ci95[0] <= result.drop <= result.drop_ci95[1] <= 100.0


def test_images_in_another_order_have_the_same_numbers():
    found, truth = random_set(3)
    worse = [Objects(f.classes, f.scores, f.boxes + 5) for f in found]
    one, other = compare(worse, found, truth), compare(worse[::-1], found[::-1], truth[::-1])
    for name in ("value", "reference_value", "drop", "agreement", "iou_mean"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-9)


def test_objects_in_another_order_have_the_same_numbers():
    found, truth = random_set(4)
    turned = [Objects(f.classes[::-1], f.scores[::-1], f.boxes[::-1]) for f in found]
    result = compare(turned, found, truth)
    assert (result.agreement, result.drop, result.iou_mean) == (100.0, pytest.approx(0.0, abs=1e-9), 1.0)


def test_nothing_is_printed(capsys):
    compare([exactly(t) for t in TWO], [exactly(t) for t in TWO], TWO)
    assert capsys.readouterr().out == ""


def test_labels_without_an_object_are_refused():
    with pytest.raises(DataError, match="so mAP is undefined"):
        compare([objects()], [objects()], [labelled()])
    with pytest.raises(DataError, match="so mAP is undefined"):
        compare([objects()], [objects()], [labelled((0, 0, 0, 9, 9), crowd=[0])])


def test_without_pycocotools_the_package_is_named(monkeypatch):
    def missing(name, *args):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingPackageError) as caught:
        compare([objects()], [objects()], [labelled()])
    assert (caught.value.package, caught.value.extra) == ("pycocotools", "export")
    assert compare([objects()], [objects()]).metric is None


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_intervals_hold_their_estimates_and_are_the_same_again(seed):
    found, truth = random_set(seed)
    generator = np.random.default_rng(seed)
    worse = [Objects(f.classes, f.scores, f.boxes + generator.normal(0, 6, f.boxes.shape)) for f in found]
    result = compare(worse, found, truth, threshold=0.3)
    assert result.drop_ci95[0] < result.drop < result.drop_ci95[1]
    assert result.agreement_ci95[0] < result.agreement < result.agreement_ci95[1]
    assert result == compare(worse, found, truth, threshold=0.3)


def test_a_draw_pairs_both_models():
    """A drop that is the same in every image is certain, however different the images are."""
    truth = [labelled((0, 10, 10, 50, 50), (1, 100, 100, 150, 150))] * 60
    reference, artifact = [], []
    for i in range(60):
        easy = [(0, 0.9, 10, 10, 50, 50)] * (i % 2)  # class 0 is found in every second image, by both
        reference.append(objects(*easy, (1, 0.9, 100, 100, 150, 150)))
        artifact.append(objects(*easy, (1, 0.9, 100, 100, 150, 175)))  # IoU 2/3: right at 4 of 10 thresholds
    result = compare(artifact, reference, truth)
    matches = matches_of(match_boxes(reference, truth), len(truth))
    alone = np.percentile(100 * average_precision(matches, draws(60, 0)).mean(axis=1), [2.5, 97.5])
    assert result.drop == pytest.approx(30.0)
    assert alone[1] - alone[0] > 10
    assert result.drop_ci95[1] - result.drop_ci95[0] < 5


def test_a_few_equal_images_prove_little():
    found = [exactly(t) for t in TWO]
    result = compare(found, found, TWO)
    assert result.agreement_ci95[0] < 60
    assert result.drop_ci95[1] > 30
    many = compare(found * 100, found * 100, TWO * 100)
    assert result.agreement_ci95[0] < many.agreement_ci95[0] < 100
    assert 0 < many.drop_ci95[1] < 2


# --- agreement --------------------------------------------------------------------------------------------------------


def test_agreement_counts_objects_of_both_sides():
    reference = [objects((0, 0.9, 0, 0, 10, 10), (1, 0.8, 20, 20, 40, 40)), objects()]
    artifact = [objects((0, 0.7, 0, 0, 10, 10), (2, 0.8, 20, 20, 40, 40)), objects((0, 0.6, 0, 0, 5, 5))]
    result = compare(artifact, reference)
    # One pair of 2 and 3 objects.
    assert (result.agreement, result.objects, result.n) == (40.0, 2, 2)
    assert result.score_difference_mean == pytest.approx(0.2)
    assert (result.metric, result.value, result.drop, result.drop_ci95, result.ap50) == (None,) * 5


def test_objects_below_the_threshold_are_not_seen():
    reference = [objects((0, 0.9, 0, 0, 10, 10), (0, 0.3, 20, 20, 40, 40))]
    artifact = [objects((0, 0.9, 0, 0, 10, 10), (5, 0.49, 50, 50, 60, 60))]
    assert compare(artifact, reference).agreement == 100.0
    assert compare(artifact, reference, threshold=0.3).agreement == 50.0


def test_an_iou_of_a_half_makes_a_pair_and_less_does_not():
    one = objects((0, 0.9, 0, 0, 10, 10))
    assert len(pair(one, objects((0, 0.9, 0, 0, 10, 20)))) == 1
    assert len(pair(one, objects((0, 0.9, 0, 0, 10, 21)))) == 0


def test_the_best_fitting_pair_is_formed_first():
    ours = objects((0, 0.9, 0, 0, 10, 10), (0, 0.8, 0, 0, 10, 13))
    theirs = objects((0, 0.8, 0, 0, 10, 10), (0, 0.9, 0, 0, 10, 13))
    np.testing.assert_allclose(pair(ours, theirs), [[1.0, 0.1], [1.0, 0.1]], atol=1e-6)


def test_copies_of_one_box_are_paired_by_score():
    ours = objects(*[(0, score, 0, 0, 10, 10) for score in (0.5, 0.7, 0.9)])
    theirs = objects(*[(0, score, 0, 0, 10, 10) for score in (0.9, 0.5, 0.7)])
    np.testing.assert_array_equal(pair(ours, theirs), [[1, 0]] * 3)


def test_where_neither_shows_anything_agreement_is_full_but_proves_nothing():
    result = compare([objects()] * 3, [objects()] * 3)
    assert (result.agreement, result.agreement_ci95, result.objects, result.iou_mean) == (100.0, (0.0, 100.0), 0, None)


def test_iou_of_boxes_by_hand():
    a = np.array([[0, 0, 10, 10], [5, 5, 5, 5]])
    b = np.array([[5, 0, 15, 10], [0, 0, 10, 10], [20, 20, 30, 30], [5, 5, 5, 5], [10, 10, 0, 0]])
    np.testing.assert_allclose(iou(a, b), [[1 / 3, 1, 0, 0, 0], [0, 0, 0, 1, 0]])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), threshold=st.floats(0, 0.9))
def test_agreement_is_symmetric_and_full_for_equal_inputs(seed, threshold):
    one, other = random_set(seed, images=3)[0], random_set(seed + 1, images=3)[0]
    mixed = [
        b if i % 2 else Objects(a.classes, a.scores, a.boxes + 3)
        for i, (a, b) in enumerate(zip(one, other, strict=True))
    ]
    there, back = compare(mixed, one, threshold=threshold), compare(one, mixed, threshold=threshold)
    assert there.agreement == back.agreement
    assert there.agreement_ci95 == back.agreement_ci95
    assert there.agreement_ci95[0] <= there.agreement <= there.agreement_ci95[1]
    assert compare(one, one, threshold=threshold).agreement == 100.0


@pytest.mark.parametrize(("ours", "theirs", "truth"), [(1, 2, None), (0, 0, None), (2, 2, 1)])
def test_lists_that_do_not_belong_together_are_refused(ours, theirs, truth):
    with pytest.raises(ValueError, match="against"):
        compare([objects()] * ours, [objects()] * theirs, truth and [labelled()] * truth)


# --- a published detector on photographs ------------------------------------------------------------------------------


@pytest.mark.skipif(
    not (DETECTOR.is_file() and (DATA / "coco-val128").is_dir()),
    reason=f"set VITDEPLOY_TEST_DATA to a folder with weights/{DETECTOR.name} and coco-val128/images, labels",
)
def test_a_published_detector_finds_what_its_authors_say():
    """Precision .427 and recall .469 at a score above .3, as measured for this file by others on these images."""
    onnxruntime = pytest.importorskip("onnxruntime")
    from PIL import Image

    data = read_detection(DATA / "coco-val128/images", DATA / "coco-val128/labels", "yolo")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(DETECTOR, options, providers=["CPUExecutionProvider"])
    found = []
    for sample in data.samples:
        image = Image.open(sample.path).convert("RGB")
        pixels = np.asarray(image.resize((320, 320), Image.Resampling.BILINEAR), np.float32).transpose(2, 0, 1) / 255
        feeds = {"images": pixels[None], "orig_target_sizes": np.array([image.size], np.int64)}
        classes, boxes, scores = (output[0] for output in session.run(["labels", "boxes", "scores"], feeds))
        found.append(Objects(classes, scores, boxes))
    truth = [data.annotations[sample.path] for sample in data.samples]
    shown = [Objects(f.classes[k], f.scores[k], f.boxes[k]) for f in found for k in [f.scores > 0.3]]
    right = sum(len(pair(s, exactly(t))) for s, t in zip(shown, truth, strict=True))
    assert right / sum(len(s.classes) for s in shown) == pytest.approx(0.427, abs=0.001)
    assert right / sum(len(t.classes) for t in truth) == pytest.approx(0.469, abs=0.001)
    # Its classes are COCO's 80 in order, as those of the labels are.
    assert {int(c) for f in found for c in f.classes} == set(range(80))
    result = compare(found, found, truth, threshold=0.3)
    assert (round(result.value, 2), round(result.ap50, 2), result.agreement) == (31.35, 45.10, 100.0)

"""Mask mAP against COCO's own program, agreement of instances by their masks, and what changed."""

import contextlib
import io
import json

import numpy as np
import pytest

from vitdeploy.data.detection import Outlines
from vitdeploy.errors import DataError
from vitdeploy.runtime.masks import RunLengths
from vitdeploy.spec import decode, encode
from vitdeploy.tasks.instance_segmentation import InstanceComparison, Masks, match_masks
from vitdeploy.verification.changes import object_changes
from vitdeploy.verification.detection import object_records

SIZE, CLASSES, IMAGES = (40, 30), 3, 8
RANDOM = np.random.default_rng(0)


def ellipse(cx, cy, rx, ry):
    y, x = np.mgrid[: SIZE[1], : SIZE[0]]
    return ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 <= 1


def scene(count):
    """Labelled ellipses of an image; the second of some images is a crowd."""
    shapes = [(RANDOM.uniform(8, 32), RANDOM.uniform(6, 24), *RANDOM.uniform(3, 7, 2)) for _ in range(count)]
    return shapes, RANDOM.integers(0, CLASSES, count)


def found_in(shapes, classes, noise):
    """Ellipses near the labelled ones, some missing, some wrong, and some of nothing."""
    kept = RANDOM.random(len(shapes)) < 0.9
    masks = [ellipse(*np.array(shape) + RANDOM.normal(0, noise, 4)) for shape in np.array(shapes)[kept]]
    masks.append(ellipse(*RANDOM.uniform(8, 20, 2), 4, 4))
    indices = np.append(classes[kept], RANDOM.integers(0, CLASSES))
    order = np.argsort(-(scores := RANDOM.random(len(masks))))
    return Masks(indices[order], scores[order], tuple(RunLengths.of(masks[i]) for i in order))


def compare_instances(artifact, reference, truth, *, threshold, max_difference):
    records = object_records(artifact, reference, truth, match_masks, threshold=threshold)
    return InstanceComparison.of(records, threshold=threshold, max_difference=max_difference)


SCENES = [scene(4) for _ in range(IMAGES)]
TRUTH = [
    Outlines(SIZE, tuple(RunLengths.of(ellipse(*s)).to_dict() for s in shapes), classes, np.arange(4) == 1 + i % 4)
    for i, (shapes, classes) in enumerate(SCENES)
]
OURS = [found_in(*each, 0.8) for each in SCENES]
THEIRS = [found_in(*each, 0.4) for each in SCENES]


def coco_ap(found):
    """AP, AP at 0.50 and at 0.75 as COCOeval itself adds them up, of compressed masks."""
    coco = pytest.importorskip("pycocotools.coco").COCO
    evaluation = pytest.importorskip("pycocotools.cocoeval").COCOeval
    mask = pytest.importorskip("pycocotools.mask")
    labels, rows = [], []
    for i, (known, masks) in enumerate(zip(TRUTH, found, strict=True), 1):
        for c, outline, crowd in zip(known.classes, known.outlines, known.crowd, strict=True):
            runs = mask.frPyObjects(outline, *outline["size"])
            entry = {"image_id": i, "category_id": int(c), "segmentation": runs, "iscrowd": int(crowd)}
            labels.append({"id": len(labels) + 1, "area": float(mask.area(runs)), **entry})
        for c, score, each in zip(masks.classes, masks.scores, masks.runs, strict=True):
            runs = mask.encode(np.asfortranarray(each.mask.astype(np.uint8)))
            rows.append({"image_id": i, "category_id": int(c), "segmentation": runs, "score": float(score)})
    images = [{"id": i, "width": SIZE[0], "height": SIZE[1]} for i in range(1, IMAGES + 1)]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco()
        truth.dataset = {
            "info": {}, "images": images, "annotations": labels, "categories": [{"id": c} for c in range(CLASSES)],
        }  # fmt: skip
        truth.createIndex()
        run = evaluation(truth, truth.loadRes(rows), "segm")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return 100 * run.stats[:3]


def test_mask_map_is_cocos_and_the_interval_holds_the_drop():
    found = compare_instances(OURS, THEIRS, TRUTH, threshold=0.5, max_difference=0.5)
    ours, theirs = coco_ap(OURS), coco_ap(THEIRS)
    assert [found.value, found.ap50, found.ap75] == pytest.approx(list(ours), abs=1e-9)
    assert [found.reference_value, found.reference_ap50, found.reference_ap75] == pytest.approx(list(theirs), abs=1e-9)
    assert 5 < found.value < 95 and (found.metric, found.n, found.max_difference) == ("mask mAP", IMAGES, 0.5)
    assert found.drop == pytest.approx(found.reference_value - found.value)
    assert found.drop_ci95[0] < found.drop < found.drop_ci95[1]


def test_agreement_counts_pairs_of_what_is_shown():
    found = compare_instances(OURS, THEIRS, None, threshold=0.5, max_difference=0.0)
    shown = [[each.above(0.5) for each in side] for side in (OURS, THEIRS)]
    pairs, ious = 0, []
    for a, b in zip(*shown, strict=True):
        table = np.array(
            [[(x.mask & y.mask).sum() / (x.mask | y.mask).sum() for y in b.runs] for x in a.runs]
        ).reshape(len(a.runs), len(b.runs)) * (a.classes[:, None] == b.classes)  # fmt: skip
        while table.size and table.max() >= 0.5:
            i, j = np.unravel_index(table.argmax(), table.shape)
            ious.append(table[i, j])
            pairs, table[i], table[:, j] = pairs + 1, 0, 0
    total = sum(len(each.scores) for side in shown for each in side)
    assert found.agreement == pytest.approx(200 * pairs / total) and 0 < pairs < total / 2
    assert found.iou_mean == pytest.approx(np.mean(ious))
    assert (found.metric, found.value, found.objects) == (None, None, sum(len(b.scores) for b in shown[1]))
    assert found.agreement_ci95[0] < found.agreement < found.agreement_ci95[1]
    written = encode(found)
    assert (written["instances"], written["mask_iou_mean"]) == (found.objects, found.iou_mean)
    assert decode(InstanceComparison, json.loads(json.dumps(written))) == found


def test_an_image_has_changed_where_a_shown_instance_has_no_partner():
    def one(*masks):
        return Masks(np.zeros(len(masks), np.int64), np.full(len(masks), 0.9), tuple(map(RunLengths.of, masks)))

    a, moved, apart = ellipse(10, 10, 5, 5), ellipse(11, 10, 5, 5), ellipse(25, 20, 5, 5)
    changes = object_changes([one(a), one(a), one(a, apart), one()], [one(moved), one(apart), one(a), one()])
    assert changes.changed.tolist() == [False, True, True, False]
    assert changes.severity[1] > changes.severity[2] > 0


def test_labels_without_an_object_and_lists_of_other_lengths_are_errors():
    empty = [Outlines(SIZE, (), np.zeros(0, np.int64), np.zeros(0, bool))] * IMAGES
    with pytest.raises(DataError, match="so mAP of masks is undefined"):
        compare_instances(OURS, THEIRS, empty, threshold=0.5, max_difference=0.0)
    with pytest.raises(ValueError, match="8 images against 7"):
        compare_instances(OURS, THEIRS[1:], None, threshold=0.5, max_difference=0.0)

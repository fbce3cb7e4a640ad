"""mIoU against scikit-learn and by hand, agreement by pixels, and what labelled maps may hold."""

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import jaccard_score

from vitdeploy.data.masks import read_masks
from vitdeploy.errors import DataError, ImageError, MissingFileError
from vitdeploy.tasks.segmentation import mean_iou, segmentation_comparison, segmentation_records, tally
from vitdeploy.verification.changes import pixel_changes

CLASSES = 5
RANDOM = np.random.default_rng(0)
TRUTH = RANDOM.integers(-1, CLASSES, (6, 9, 7))  # -1: unlabelled
OURS = np.where(RANDOM.random(TRUTH.shape) < 0.6, TRUTH.clip(0), RANDOM.integers(0, CLASSES, TRUTH.shape))
THEIRS = np.where(RANDOM.random(TRUTH.shape) < 0.8, TRUTH.clip(0), RANDOM.integers(0, CLASSES, TRUTH.shape))


def compared(artifact, reference, truth, max_difference=0.0):
    records = segmentation_records(artifact, reference, truth, classes=CLASSES)
    return segmentation_comparison(records, classes=CLASSES, max_difference=max_difference)


def reference_iou(found):
    known = TRUTH >= 0
    return 100 * jaccard_score(TRUTH[known], found[known], average="macro")


def test_miou_is_that_of_scikit_learn_and_the_interval_holds_the_drop():
    found = compared(OURS, THEIRS, TRUTH, 0.5)
    assert (found.metric, found.n, found.max_difference) == ("mIoU", 6, 0.5)
    assert found.value == pytest.approx(reference_iou(OURS), abs=1e-9)
    assert found.reference_value == pytest.approx(reference_iou(THEIRS), abs=1e-9)
    assert found.drop == pytest.approx(found.reference_value - found.value)
    assert found.drop_ci95[0] < found.drop < found.drop_ci95[1]
    known = TRUTH >= 0
    assert found.pixel_accuracy == pytest.approx(100 * (OURS == TRUTH)[known].mean())
    assert found.agreement == pytest.approx(100 * (OURS == THEIRS).mean())
    assert found.agreement_ci95[0] < found.agreement < found.agreement_ci95[1]
    assert found.regions == sum(len(np.unique(each)) for each in THEIRS)


def test_classes_that_do_not_occur_do_not_count_and_an_answer_without_a_class_is_wrong():
    truth, found = np.array([[0, 0, 2, 2]]), np.array([[0, -1, 2, 0]])
    counts = tally(found, truth, 4)
    assert counts.tolist() == [[1, 0, 1, 0], [2, 0, 1, 0], [2, 0, 2, 0]]
    assert float(mean_iou(counts)) == pytest.approx(100 * (1 / 3 + 1 / 2) / 2)
    with pytest.raises(ValueError, match="a map of"):
        tally(found, truth[:, :2], 4)


def test_without_labels_only_agreement_is_known_and_equal_maps_prove_no_more_than_their_regions():
    found = compared(THEIRS, THEIRS, None)
    assert (found.metric, found.value, found.agreement, found.pixel_accuracy) == (None, None, 100.0, None)
    assert 80 < found.agreement_ci95[0] < 100
    changes = pixel_changes([OURS[0], THEIRS[1]], THEIRS[:2])
    assert changes.changed.tolist() == [True, False]
    with pytest.raises(DataError, match="contain no pixel with a class") as caught:
        compared(OURS, THEIRS, np.full_like(TRUTH, -1))
    assert "postprocess.ignore" in caught.value.fix


@pytest.fixture
def folders(tmp_path):
    """Two images, of which one has a map of 0, 1, 2 and 255 in a palette."""
    images, labels = tmp_path / "images", tmp_path / "labels"
    (images / "deep").mkdir(parents=True), (labels / "deep").mkdir(parents=True)
    for name in ("a.jpg", "deep/b.png"):
        Image.new("RGB", (4, 3)).save(images / name)
    map_ = Image.fromarray(np.array([[0, 1, 2, 255]] * 3, np.uint8), "P")
    map_.putpalette(list(range(256)) * 3)
    map_.save(labels / "deep" / "b.png")
    return images, labels


def test_maps_are_found_by_name_and_read_as_the_processor_says(folders):
    images, labels = folders
    found = read_masks(images, labels)
    assert ([each.path.name for each in found.samples], found.unannotated) == (["b.png"], 1)
    annotation = found.annotations[images / "deep" / "b.png"]
    assert annotation.load(3, 255, False)[0].tolist() == [0, 1, 2, -1]
    assert annotation.load(2, 255, True)[0].tolist() == [-1, 0, 1, -1]
    with pytest.raises(DataError, match="numbers that are not classes") as caught:
        annotation.load(2, 255, False)
    assert (caught.value.found, caught.value.expected) == ("2", "0 to 1, or 255 for unlabelled pixels")
    with pytest.raises(DataError, match="numbers that are not classes") as caught:
        annotation.load(1, 7, True)
    assert caught.value.found == "2, 255"


def test_maps_that_do_not_fit_are_refused(folders):
    images, labels = folders
    file = labels / "deep" / "b.png"
    annotation = read_masks(images, labels).annotations[images / "deep" / "b.png"]
    Image.new("L", (3, 4)).save(file)
    with pytest.raises(DataError, match="does not have the size of its image"):
        annotation.load(3, 255, False)
    Image.new("RGB", (4, 3)).save(file)
    with pytest.raises(DataError, match="is not a map of numbers"):
        annotation.load(3, 255, False)
    file.write_bytes(b"no picture")
    with pytest.raises(ImageError, match="cannot be read"):
        annotation.load(3, 255, False)
    file.unlink()
    with pytest.raises(DataError, match="annotates no image"):
        read_masks(images, labels)
    with pytest.raises(MissingFileError, match="no label folder"):
        read_masks(images, labels / "absent")

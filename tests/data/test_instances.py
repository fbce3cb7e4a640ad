"""Labelled outlines of COCO's JSON: the masks that pycocotools makes of them, and every way that one can be wrong."""

import json

import numpy as np
import pytest
from PIL import Image

from vitdeploy.data.detection import read_instances
from vitdeploy.errors import DataError

SQUARE = [2, 1, 6, 1, 6, 4, 2, 4]
RUNS = {"size": [6, 8], "counts": [6, 6, 36]}  # the second column
COCO = {
    "images": [{"id": 7, "file_name": "a.png", "width": 8, "height": 6}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 90, "bbox": [2, 1, 4, 3], "segmentation": [SQUARE]},
        {"id": 2, "image_id": 7, "category_id": 1, "iscrowd": 1, "segmentation": RUNS},
    ],
    "categories": [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}],
}


def read(folder, **changes):
    (folder / "images").mkdir(exist_ok=True)
    Image.new("RGB", (8, 6)).save(folder / "images" / "a.png")
    (folder / "labels.json").write_text(json.dumps({**COCO, **changes}))
    return read_instances(folder / "images", folder / "labels.json")


def test_polygons_and_run_lengths_become_masks(tmp_path):
    coco = pytest.importorskip("pycocotools.mask")
    compressed = {"size": [6, 8], "counts": coco.frPyObjects(RUNS, 6, 8)["counts"].decode()}
    more = {"id": 3, "image_id": 7, "category_id": 1, "segmentation": compressed}
    found = read(tmp_path, annotations=[*COCO["annotations"], more])
    assert [each.name for each in found.categories] == ["person", "toothbrush"]
    [known] = found.annotations.values()
    assert (known.size, known.classes.tolist(), known.crowd.tolist()) == ((8, 6), [90, 1, 1], [False, True, False])
    square, column = np.zeros((6, 8), bool), np.zeros((6, 8), bool)
    square[1:4, 2:6], column[:, 1] = True, True
    np.testing.assert_array_equal(known.masks(), [square, column, column])
    assert known.renumbered({90: 1, 1: 0}).classes.tolist() == [1, 0, 0]
    assert found.digest(found.samples) != read(tmp_path).digest(found.samples)


@pytest.mark.parametrize(
    "outline",
    [[[*SQUARE[:7], None]], {"size": [8, 6], "counts": [48]}, {"size": [6, 8], "counts": [6, 6]},
     {"size": 6, "counts": [48]}, "nothing"],
)  # fmt: skip
def test_what_is_no_outline_is_named(tmp_path, outline):
    wrong = {"id": 1, "image_id": 7, "category_id": 1, "bbox": [2, 1, 4, 3], "segmentation": outline}
    with pytest.raises(DataError, match=r"annotations\[1\] has no outline") as caught:
        read(tmp_path, annotations=[COCO["annotations"][0], wrong])
    assert "or run lengths of size [6, 8]" in caught.value.expected and "as well as boxes" in caught.value.fix


@pytest.mark.parametrize(
    ("outline", "kept", "note"),
    [
        (SQUARE, 2, "polygons not nested in a list, read as one polygon"),
        ([SQUARE, SQUARE[:4]], 2, "polygons with fewer than three corners, dropped from their outlines"),
        *((each, 1, "objects without an outline of at least three corners, ignored") for each in
          (None, [], [[]], SQUARE[:4], [SQUARE[:4]], [SQUARE[:7]])),
    ],
)  # fmt: skip
def test_some_outlines_that_are_repaired_are_counted(tmp_path, outline, kept, note):
    more = {"id": 3, "image_id": 7, "category_id": 1, "bbox": [2, 1, 4, 3], "segmentation": outline}
    found = read(tmp_path, annotations=[COCO["annotations"][0], more, {**COCO["annotations"][0], "id": 4}])
    [known] = found.annotations.values()
    assert known.outlines == (([SQUARE],) * kept)
    repeated = "labels: repeated annotations, counted once: 1 (first: annotations[2])"
    assert sorted(found.notes) == sorted([repeated, f"labels: {note}: 1 (first: annotations[1])"])


def test_outlines_of_no_object_are_no_labels(tmp_path):
    with pytest.raises(DataError, match="contains no object outline") as caught:
        read(tmp_path, annotations=[{"id": 1, "image_id": 7, "category_id": 1, "segmentation": []}])
    assert "as well as boxes" in caught.value.fix


@pytest.mark.parametrize(("key", "text"), [("image_id", "to an image that"), ("category_id", "to a category that")])
def test_annotations_of_what_is_not_listed_are_named(tmp_path, key, text):
    with pytest.raises(DataError, match=text) as caught:
        read(tmp_path, annotations=[{**COCO["annotations"][0], key: 5}])
    assert caught.value.found == f"{key} 5"

"""Labelled boxes from YOLO files and from COCO's JSON: the same boxes, and every way in which a file can be wrong."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitdeploy.data.annotations import Category
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.detection import read_detection
from vitdeploy.errors import DataError, ImageError, MissingFileError


@pytest.fixture
def images(tmp_path):
    """a.png (40x20), b.png (10x10), sub/c.jpg (8x16)."""
    for name, size in (("a.png", (40, 20)), ("b.png", (10, 10)), ("sub/c.jpg", (8, 16))):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(tmp_path / "images" / name)
    return tmp_path / "images"


@pytest.fixture
def labels(tmp_path):
    """YOLO files: two objects in a, none in b, one in sub/c."""
    (tmp_path / "labels/sub").mkdir(parents=True)
    (tmp_path / "labels/a.txt").write_text("3 0.5 0.5 0.25 0.5\n\n0 0.1 0.9 0.2 0.2\n")
    (tmp_path / "labels/sub/c.txt").write_text("1 0.5 0.5 1 1")
    return tmp_path / "labels"


COCO = {
    "images": [
        {"id": 7, "file_name": "a.png", "width": 40, "height": 20},
        {"id": 8, "file_name": "c.jpg", "width": 8, "height": 16},
        {"id": 9, "file_name": "elsewhere.jpg", "width": 1, "height": 1},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 90, "bbox": [15, 5, 10, 10], "area": 70, "iscrowd": 0},
        {"id": 2, "image_id": 7, "category_id": 1, "bbox": [0, 16, 8, 4], "iscrowd": 1},
        {"id": 3, "image_id": 9, "category_id": 1, "bbox": [0, 0, 1, 1]},
    ],
    "categories": [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}],
}


def coco_file(folder, **changes):
    path = folder / "instances.json"
    path.write_text(json.dumps({**COCO, **changes}))
    return path


def changed(name, index, **values):
    """COCO with other values in one entry of a list."""
    return {name: [{**entry, **values} if i == index else entry for i, entry in enumerate(COCO[name])]}


def relative(data):
    return [sample.path.relative_to(data.folder).as_posix() for sample in data.samples]


def test_yolo_boxes_are_corners_in_pixels(images, labels):
    data = read_detection(images, labels, "yolo")
    assert relative(data) == ["a.png", "b.png", "sub/c.jpg"]
    found = data.annotations[images / "a.png"]
    np.testing.assert_allclose(found.boxes, [[15, 5, 25, 15], [0, 16, 8, 20]])
    assert found.size == (40, 20)
    assert (found.classes.tolist(), found.crowd.tolist()) == ([3, 0], [False, False])
    np.testing.assert_allclose(found.area, [100, 32])
    np.testing.assert_allclose(data.annotations[images / "sub/c.jpg"].boxes, [[0, 0, 8, 16]])


def test_an_image_without_a_yolo_file_has_no_objects(images, labels):
    (labels / "sub/c.txt").write_text("")
    data = read_detection(images, labels, "yolo")
    for name in ("b.png", "sub/c.jpg"):
        found = data.annotations[images / name]
        assert (found.boxes.shape, found.classes.shape, found.crowd.shape) == ((0, 4), (0,), (0,))
    assert data.unannotated == 0


def test_yolo_classes_have_names_where_a_file_gives_them(images, labels):
    assert read_detection(images, labels, "yolo").categories == tuple(Category(i, None) for i in (0, 1, 3))
    (labels / "classes.txt").write_text("person\nbicycle\ncar \nbus\n\n")
    named = read_detection(images, labels, "yolo").categories
    assert named == tuple(Category(i, name) for i, name in enumerate(["person", "bicycle", "car", "bus"]))


def test_class_names_of_other_editors_are_read_or_refused_by_their_line(images, labels):
    names = "person\r\ncafé\r\ncar\r\nbus\r\n"
    for encoding in ("utf-8", "utf-8-sig"):
        (labels / "classes.txt").write_bytes(names.encode(encoding))
        named = read_detection(images, labels, "yolo").categories
        assert named == tuple(Category(i, name) for i, name in enumerate(["person", "café", "car", "bus"]))
    (labels / "classes.txt").write_bytes(names.encode("cp1252"))
    with pytest.raises(DataError, match=r"classes\.txt is not UTF-8") as caught:
        read_detection(images, labels, "yolo")
    assert caught.value.found == "line 2: b'caf\\xe9'"


def test_coco_boxes_are_corners_in_pixels_with_crowds_and_areas(images, tmp_path):
    data = read_detection(images, coco_file(tmp_path), "coco")
    assert relative(data) == ["a.png", "sub/c.jpg"]
    found = data.annotations[images / "a.png"]
    np.testing.assert_array_equal(found.boxes, [[15, 5, 25, 15], [0, 16, 8, 20]])
    assert (found.classes.tolist(), found.crowd.tolist(), found.area.tolist()) == ([90, 1], [False, True], [70, 32])
    assert len(data.annotations[images / "sub/c.jpg"].classes) == 0
    assert data.categories == (Category(1, "person"), Category(90, "toothbrush"))
    assert data.unannotated == 1


def test_classes_are_renumbered_as_the_model_counts(images, tmp_path):
    found = read_detection(images, coco_file(tmp_path), "coco").annotations[images / "a.png"]
    renumbered = found.renumbered({1: 0, 90: 79})
    assert (renumbered.classes.tolist(), renumbered.classes.dtype) == ([79, 0], np.int64)
    assert (found.classes.tolist(), renumbered.area.tolist()) == ([90, 1], [70, 32])


def test_content_tells_annotations_apart(images, tmp_path):
    def content(**changes):
        return read_detection(images, coco_file(tmp_path, **changes), "coco").annotations[images / "a.png"].content()

    variants = [{"category_id": 1}, {"bbox": [15, 5, 10, 11]}, {"iscrowd": 1}, {"area": 71}, {"image_id": 8}]
    assert len({content(), *(content(**changed("annotations", 0, **each)) for each in variants)}) == 6


@settings(max_examples=30, deadline=None)
@given(corners=st.lists(st.tuples(*[st.floats(0.01, 0.99)] * 2, *[st.floats(0, 1)] * 2), max_size=4, unique=True))
def test_yolo_lines_come_back(tmp_path_factory, corners):
    """Written from corners, read as corners."""
    folder = tmp_path_factory.mktemp("round")
    (folder / "images").mkdir()
    (folder / "labels").mkdir()
    Image.new("L", (64, 32)).save(folder / "images/x.png")
    boxes = np.array([[cx - cx * w, cy - cy * h, cx + cx * w, cy + cy * h] for cx, cy, w, h in corners]).reshape(-1, 4)
    boxes = boxes.clip(0, 1)
    boxes = boxes[(boxes[:, 2:] - boxes[:, :2] > 1e-3).all(axis=1)]
    lines = [f"0 {(a + c) / 2!r} {(b + d) / 2!r} {c - a!r} {d - b!r}" for a, b, c, d in boxes.tolist()]
    (folder / "labels/x.txt").write_text("\n".join(lines))
    found = read_detection(folder / "images", folder / "labels", "yolo").annotations[folder / "images/x.png"]
    np.testing.assert_allclose(found.boxes, boxes * [64, 32, 64, 32], atol=1e-9)


# --- what can be wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message", "expected"),
    [
        ("0 .5 .5 .1", "line 2 is not an object", "class cx cy width height"),
        ("0 .5 .5 .1 .1 .1 .1 .1", "line 2 is not an object", "class cx cy width height"),
        ("0 .5 .5 .1 .1 7", "line 2 is not an object", "class cx cy width height"),
        ("person .5 .5 .1 .1", "line 2 is not an object", "class cx cy width height"),
        ("1.5 .5 .5 .1 .1", "line 2 is not an object", "class cx cy width height"),
        ("0 .5 .5 .1 wide", "line 2 is not an object", "class cx cy width height"),
        ("0 20 10 5 5", r"line 2: a coordinate is outside 0\.\.1", "relative"),
        ("0 .5 -.1 .1 .1", r"line 2: a coordinate is outside 0\.\.1", "relative"),
        ("0 .5 nan .1 .1", r"line 2: a coordinate is outside 0\.\.1", "relative"),
        ("-1 .5 .5 .1 .1", "line 2: no class -1", "0 or more"),
    ],
)
def test_a_yolo_line_that_is_wrong_is_named(images, labels, line, message, expected):
    (labels / "a.txt").write_text(f"0 .5 .5 .1 .1\n{line}\n")
    with pytest.raises(DataError, match=rf"a\.txt.* {message}") as caught:
        read_detection(images, labels, "yolo")
    assert caught.value.found == line
    assert expected in caught.value.expected


def test_a_yolo_class_without_a_name_is_refused_where_classes_have_names(images, labels):
    (labels / "classes.txt").write_text("person\nbicycle\ncar\n")
    with pytest.raises(DataError, match=r"a\.txt, line 1: no class 3") as caught:
        read_detection(images, labels, "yolo")
    assert "0..2" in caught.value.expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"categories": None}, "no list 'categories'|not a COCO annotation file"),
        (changed("annotations", 0, bbox=None), r"annotations\[0\] has a missing or invalid bbox"),
        (changed("annotations", 0, bbox=[1, 2, 3]), r"annotations\[0\] has no box"),
        (changed("annotations", 0, bbox=[1, 2, 3, -4]), r"annotations\[0\] has no box"),
        (changed("annotations", 1, bbox=[1, 2, 3, float("nan")]), r"annotations\[1\] has no box"),
        (changed("annotations", 1, bbox=[1, 2, 3, [4]]), r"annotations\[1\] has no box"),
        (changed("annotations", 0, area="large"), r"annotations\[0\] has no box"),
        (changed("annotations", 1, category_id=2), r"annotations\[1\] refers to a category that is not listed"),
        (changed("annotations", 2, image_id=10), r"annotations\[2\] refers to an image that is not listed"),
        (changed("images", 0, width=41), r"a\.png does not have the size recorded in instances\.json"),
        ({"images": COCO["images"][2:], "annotations": []}, r"instances\.json annotates no image"),
    ],
)
def test_a_coco_file_that_is_wrong_says_where(images, tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        read_detection(images, coco_file(tmp_path, **changes), "coco")


def test_labels_of_other_images_are_refused(images, tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/other.txt").write_text("0 .5 .5 1 1")
    with pytest.raises(DataError, match="annotates no image"):
        read_detection(images, tmp_path / "labels", "yolo")


@pytest.mark.parametrize("kind", ["yolo", "coco"])
def test_folders_and_files_that_are_not_there_are_named(images, tmp_path, kind):
    with pytest.raises(MissingFileError, match="no image folder"):
        read_detection(tmp_path / "none", tmp_path, kind)
    with pytest.raises(MissingFileError, match=r"no (label folder|annotation file) at .*nowhere"):
        read_detection(images, tmp_path / "nowhere", kind)


@pytest.mark.parametrize("kind", ["yolo", "coco"])
def test_unreadable_images_are_an_error_or_left_out_and_listed(images, labels, tmp_path, kind):
    source = labels if kind == "yolo" else coco_file(tmp_path)
    (images / "a.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"a\.png"):
        read_detection(images, source, kind)
    skipped = Skipped([])
    data = read_detection(images, source, kind, skipped)
    assert skipped.paths == [str(images / "a.png")]
    assert "a.png" not in relative(data)
    assert "sub/c.jpg" in relative(data)


# --- names of YOLO's classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("labels/classes.txt", "a\n b \nc\nd\n"),
        ("classes.txt", "a\nb\nc\nd"),
        ("data.yaml", "train: ../images\nnc: 4\nnames: [a, b, c, d]\n"),
        ("data.yaml", "names: {0: a, 1: b, 3: d, 2: c}\n"),
    ],
)
def test_yolo_classes_have_names_where_people_put_them(images, labels, file, text):
    (labels.parent / file).write_text(text)
    data = read_detection(images, labels, "yolo")
    assert data.categories == tuple(Category(i, name) for i, name in enumerate("abcd"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"labels/classes.txt": "a\nb\nc\nd", "data.yaml": "names: [b, a, c, d]"},
            "two files give different class names",
        ),
        ({"data.yaml": "names: {1: a, 2: b}"}, "data.yaml does not name the classes"),
        ({"data.yaml": "names: [a, ["}, "data.yaml does not name the classes"),
        ({"data.yaml": "names: [a, b, c]"}, "line 1: no class 3"),
    ],
)
def test_names_that_do_not_fit_yolo_labels_are_refused(images, labels, files, message):
    for name, text in files.items():
        (labels.parent / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_detection(images, labels, "yolo")


def test_a_yaml_file_about_something_else_names_nothing(images, labels):
    (labels.parent / "data.yaml").write_text("version: 3\n")
    assert {category.name for category in read_detection(images, labels, "yolo").categories} == {None}

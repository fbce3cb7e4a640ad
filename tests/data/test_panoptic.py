"""Panoptic annotations: segment ids from colours, categories from JSON, and what can be wrong with either."""

import json

import numpy as np
import pytest
from PIL import Image

from vitdeploy.data.annotations import Category
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.masks import NO_SEGMENT, read_panoptic
from vitdeploy.errors import DataError, ImageError, MissingFileError
from vitdeploy.progress import silent
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.registry import make_adapter

# 2 high, 3 wide; the ids need all three colours.
IDS = np.array([[0, 5, 5], [70_000, 300, 300]])
MAPPING = {1: 0, 92: 1}
JSON = {
    "images": [
        {"id": 4, "file_name": "x.jpg", "width": 3, "height": 2},
        {"id": 5, "file_name": "y.jpg", "width": 3, "height": 2},
    ],
    "annotations": [
        {
            "image_id": 4,
            "file_name": "x.png",
            "segments_info": [
                {"id": 5, "category_id": 1, "iscrowd": 0, "area": 2},
                {"id": 300, "category_id": 1, "iscrowd": 1, "area": 2},
                {"id": 70_000, "category_id": 92, "area": 1},
            ],
        }
    ],
    "categories": [{"id": 92, "name": "banner", "isthing": 0}, {"id": 1, "name": "person", "isthing": 1}],
}


def draw(path, ids):
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.stack([ids % 256, ids // 256 % 256, ids // 65536], axis=-1).astype(np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for name in "xy":
        Image.new("RGB", (3, 2)).save(tmp_path / f"images/{name}.jpg")
    draw(tmp_path / "panoptic/x.png", IDS)
    return tmp_path


def read(folder, skipped=None, **changes):
    (folder / "panoptic.json").write_text(json.dumps({**JSON, **changes}))
    return read_panoptic(folder / "images", folder / "panoptic.json", skipped)


def with_segment(index, **values):
    """JSON with other values in one segment."""
    [annotation] = JSON["annotations"]
    segments = [{**s, **values} if i == index else s for i, s in enumerate(annotation["segments_info"])]
    return {"annotations": [{**annotation, "segments_info": segments}]}


def test_colours_are_segment_ids_with_the_classes_of_the_model(folder):
    data = read(folder)
    [sample] = data.samples
    found = data.annotations[sample.path].load(MAPPING)
    np.testing.assert_array_equal(found.ids, IDS)
    assert (found.ids.dtype, found.ids[0, 0]) == (np.int32, NO_SEGMENT)
    assert found.classes == {5: 0, 300: 0, 70_000: 1}
    assert found.crowd == {300}


def test_categories_are_sorted_and_tell_things_from_stuff(folder):
    assert read(folder).categories == (Category(1, "person", True), Category(92, "banner", False))


def test_images_without_an_annotation_are_counted_and_left_out(folder):
    data = read(folder)
    assert [sample.path.name for sample in data.samples] == ["x.jpg"]
    assert data.unannotated == 1


def test_content_tells_annotations_apart(folder):
    def content(**changes):
        data = read(folder, **changes)
        return data.annotations[data.samples[0].path].content()

    first = content()
    others = [content(**with_segment(0, category_id=92)), content(**with_segment(0, iscrowd=1))]
    draw(folder / "panoptic/x.png", IDS * 0)
    assert len({first, *others, content()}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": 3}, "is not a COCO annotation file"),
        ({"annotations": [{"image_id": 4, "file_name": "x.png"}]}, "has a missing or invalid segments_info"),
        ({"categories": [{"id": 1, "name": "person"}]}, r"categories\[0\] has a missing or invalid isthing"),
        (with_segment(1, category_id=2), r"x\.png, segments_info\[1\] has a category that is not listed"),
        (with_segment(1, id=None), r"x\.png, segments_info\[1\] has a missing or invalid id"),
        ({"images": [{**JSON["images"][0], "height": 3}]}, r"x\.jpg does not have the size recorded in panoptic\.json"),
        ({"images": [{**JSON["images"][0], "file_name": "z.jpg"}]}, "annotates no image"),
        ({"annotations": []}, "annotates no image"),
    ],
)
def test_a_file_that_is_wrong_says_where(folder, changes, message):
    with pytest.raises(DataError, match=message):
        read(folder, **changes)


def test_a_map_with_unknown_segments_is_refused(folder):
    draw(folder / "panoptic/x.png", IDS + 1)
    data = read(folder)
    with pytest.raises(DataError, match=r"x\.png contains segments that are not in its JSON") as caught:
        data.annotations[data.samples[0].path].load(MAPPING)
    assert caught.value.found == "ids 1, 6, 301, 70001"


def test_a_map_of_another_size_is_refused(folder):
    draw(folder / "panoptic/x.png", IDS.T)
    data = read(folder)
    with pytest.raises(DataError, match=r"x\.png does not have the size of its image") as caught:
        data.annotations[data.samples[0].path].load(MAPPING)
    assert (caught.value.found, caught.value.expected) == ("2x3", "3x2 pixels (upright)")


def test_a_map_that_is_not_there_or_no_image_is_named(folder):
    data = read(folder)
    (folder / "panoptic/x.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"x\.png"):
        data.annotations[data.samples[0].path].load(MAPPING)
    (folder / "panoptic/x.png").unlink()
    with pytest.raises(MissingFileError, match=r"no segment map at .*x\.png"):
        read(folder)


def test_folders_and_files_that_are_not_there_are_named(folder, tmp_path):
    with pytest.raises(MissingFileError, match="no image folder"):
        read_panoptic(tmp_path / "none", folder / "panoptic.json")
    with pytest.raises(MissingFileError, match="no annotation file"):
        read_panoptic(folder / "images", folder / "none.json")


def test_unreadable_images_are_an_error_or_left_out_and_listed(folder):
    (folder / "images/x.jpg").write_bytes(b"no image")
    with pytest.raises(ImageError):
        read(folder)
    skipped = Skipped([])
    assert read(folder, skipped).samples == ()
    assert skipped.paths == [str(folder / "images/x.jpg")]


def test_a_repeated_annotation_counts_once_and_two_that_differ_are_refused(folder):
    [annotation] = JSON["annotations"]
    found = read(folder, annotations=[annotation, {**annotation}])
    assert found.notes == ("labels: repeated annotations, counted once: 1 (first: annotations[1])",)
    with pytest.raises(DataError, match="an image has two different annotations") as caught:
        read(folder, annotations=[annotation, {**annotation, "segments_info": []}])
    assert caught.value.found == "annotations[0] and annotations[1]"
    segments = annotation["segments_info"]
    with pytest.raises(DataError, match=r"segments_info\[3\] has a duplicate id") as caught:
        read(folder, annotations=[{**annotation, "segments_info": [*segments, {"id": 5, "category_id": 92}]}])
    assert caught.value.found == "id 5 in the categories 1 and 92"


def test_copies_of_an_image_count_once(folder):
    """x.jpg and y.jpg have the same bytes."""
    [annotation] = JSON["annotations"]
    draw(folder / "panoptic/y.png", IDS)
    Image.new("RGB", (3, 2), "red").save(folder / "images/z.jpg")
    third = {"id": 6, "file_name": "z.jpg", "width": 3, "height": 2}
    more = [{**annotation, "image_id": id, "file_name": name} for id, name in ((5, "y.png"), (6, "y.png"))]
    read(folder, images=[*JSON["images"], third], annotations=[annotation, *more])
    setting = Setting(
        "panoptic", PreprocessSpec((8, 8), (8, 8)), PostprocessSpec(), labels=("person", "banner"), classes=2
    )
    choice = DataChoice(folder / "images", "panoptic", folder / "panoptic.json", 0, "all", 0)
    data = make_adapter(setting).load(choice, skip_bad=False, progress=silent)
    assert (len(data.evaluation), data.copies.evaluation, data.copies.relabelled) == (2, 1, 0)

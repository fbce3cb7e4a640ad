"""COCO's key points: whose points are whose, what is passed by, and what is refused."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from vitdeploy.data.keypoints import COCO_POINTS, COCO_SIGMAS, read_keypoints
from vitdeploy.errors import DataError, ImageError
from vitdeploy.progress import silent
from vitdeploy.runtime.tasks.keypoints import KeypointSpec
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.registry import make_adapter

NAMES = ["head", "hand", "foot"]


def person(image, *visible, **more):
    flat = [value for i, v in enumerate(visible) for value in (10 * i + 1, 10 * i + 2, v)]
    return {"image_id": image, "category_id": 1, "bbox": [2, 3, 20, 10], "area": 90, "keypoints": flat, **more}


@pytest.fixture
def labelled(tmp_path):
    """labelled(annotations, **category): a folder of three images of 40x30 with that file."""
    for name in "abc":
        Image.new("RGB", (40, 30)).save(tmp_path / f"{name}.png")

    def write(annotations, **category):
        images = [{"id": i, "file_name": f"{name}.png", "width": 40, "height": 30} for i, name in enumerate("abc")]
        categories = [{"id": 1, "name": "person", "keypoints": NAMES, **category}]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (tmp_path / "points.json").write_text(json.dumps(document))
        return tmp_path, tmp_path / "points.json"

    return write


def test_objects_with_a_labelled_point_are_samples_by_their_boxes(labelled):
    folder, file = labelled(
        [
            person(0, 2, 0, 1),
            person(0, 2, 2, 2, bbox=[2, 3, 0, 10]),
            person(0, 2, 2, 2),
            person(1, 0, 0, 0),
            person(2, 2, 2, 2, iscrowd=1),
            person(2, 1, 1, 1),
        ]
    )
    found = read_keypoints(folder, file, (), 3)
    assert [path.name for path in found.annotations] == ["a.png", "c.png"]
    assert found.unannotated == 1
    assert found.notes == ("labels: boxes without width or height, ignored: 1 (first: annotations[1])",)
    first, second = found.annotations[folder / "a.png"].objects
    assert (first.box, first.area, first.sigmas) == ((2, 3, 22, 13), 90, None)
    assert first.points == ((1, 2, 2), (11, 12, 0), (21, 22, 1))
    assert first.path == second.path == folder / "a.png"


def test_images_are_split_and_not_their_objects(labelled):
    folder, file = labelled([person(image, *seen) for image in (0, 1, 2) for seen in ((2, 2, 2), (1, 1, 1))])
    parts = read_keypoints(folder, file, (), 3).split(calibration=1, evaluation="all", seed=0)
    assert (len(parts.calibration), len(parts.evaluation)) == (2, 4)
    assert not {s.path for s in parts.calibration} & {s.path for s in parts.evaluation}


def test_a_model_of_points_is_calibrated_on_the_boxes_of_objects(labelled):
    folder, file = labelled([person(image, *seen) for image in (0, 1, 2) for seen in ((2, 2, 2), (1, 1, 1))])
    (folder / "c.png").write_bytes(b"no image")
    spec = PreprocessSpec((8, 8), (8, 8), fit="topdown")
    adapter = make_adapter(Setting("keypoints", spec, KeypointSpec(), classes=3))
    choice = DataChoice(folder, "coco", file, 0, "all", 0)
    found = adapter.calibration(choice, skip_bad=True, progress=silent)
    assert [each.box for each in found.samples] == 4 * [(2, 3, 22, 13)] and len(found.skipped) == 1
    fewer = adapter.calibration(replace(choice, calibration=1), skip_bad=True, progress=silent)
    assert len(fewer.samples) == 2 and len({each.path for each in fewer.samples}) == 1
    with pytest.raises(ImageError, match=r"c\.png"):
        adapter.calibration(choice, skip_bad=False, progress=silent)


def test_points_and_deviations_are_put_into_the_order_of_the_model(labelled):
    folder, file = labelled([person(0, 2, 0, 1)], sigmas=[0.1, 0.2, 0.3])
    [found] = read_keypoints(folder, file, ("foot", "head", "hand"), 3).annotations[folder / "a.png"].objects
    assert found.points == ((21, 22, 1), (1, 2, 2), (11, 12, 0))
    assert found.sigmas == (0.3, 0.1, 0.2)
    # Names that are not the same say nothing of the order.
    [kept] = read_keypoints(folder, file, ("Foot", "Head", "Hand"), 3).annotations[folder / "a.png"].objects
    assert kept.points[0] == (1, 2, 2)


def test_deviations_of_a_person_are_those_of_pycocotools(labelled):
    params = pytest.importorskip("pycocotools.cocoeval").Params("keypoints")
    assert pytest.approx(params.kpt_oks_sigmas) == COCO_SIGMAS
    folder, file = labelled([person(0, *[2] * 17)], keypoints=COCO_POINTS)
    [found] = read_keypoints(folder, file, (), 17).annotations[folder / "a.png"].objects
    assert found.sigmas == COCO_SIGMAS


@pytest.mark.parametrize(
    ("annotations", "category", "count", "text"),
    [
        ([person(0, 2, 2)], {}, 3, "has different key points than the model"),
        ([person(0, 2, 2, 2)], {}, 17, "has different key points than the model"),
        ([person(0, 0, 0, 0)], {}, 3, "labels no key points"),
        ([person(0, 2, 2, 2, bbox=[1, 2, -1, 4])], {}, 3, "has no box with key points"),
        ([person(0, 2, 2, 2, keypoints=[1, 2])], {}, 3, "has no box with key points"),
    ],
)
def test_what_does_not_fit_is_refused(labelled, annotations, category, count, text):
    with pytest.raises(DataError, match=text):
        read_keypoints(*labelled(annotations, **category), (), count)


def test_categories_with_different_points_are_refused(labelled):
    folder, file = labelled([person(0, 2, 2, 2)])
    document = json.loads(file.read_text())
    document["categories"].append({"id": 2, "name": "dog", "keypoints": ["tail"]})
    file.write_text(json.dumps(document))
    with pytest.raises(DataError, match="categories with different key points"):
        read_keypoints(folder, file, (), 3)

"""The JSON list of images and their texts."""

import json

import pytest
from PIL import Image

from vitdeploy.data.annotations import read_written
from vitdeploy.errors import DataError, MissingFileError


@pytest.fixture
def folder(tmp_path):
    for name in ("evaluation/a.png", "evaluation/b.png", "calibration/c.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(path)
    return tmp_path


def written(folder, value):
    path = folder / "texts.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_texts_belong_to_images_by_path_or_by_name(folder):
    rows = [{"file_name": "evaluation/a.png", "text": "één"}, {"file_name": "c.png", "text": ""}]
    found = read_written(folder / "images", written(folder, rows))
    assert {path.name: each.text for path, each in found.annotations.items()} == {"a.png": "één", "c.png": ""}
    assert (found.unannotated, len(found.samples)) == (1, 2)
    split = found.split(calibration=1, evaluation="all", seed=0)
    assert [sample.path.name for part in (split.calibration, split.evaluation) for sample in part] == ["c.png", "a.png"]


@pytest.mark.parametrize(
    ("value", "message", "found"),
    [
        ("{", "is not a JSON file", "Expecting"),
        ([], "not a list of images and their texts", "an empty list"),
        ({"a.png": "A"}, "not a list of images and their texts", "{'a.png': 'A'}"),
        ([{"file_name": "a.png", "text": 7}], "not a list of images and their texts", "'text': 7"),
        ([{"file_name": "a.png", "text": text} for text in "AB"], "two texts for one image", "a.png"),
        (
            [{"file_name": "z.png", "text": "A"}],
            "annotates no image",
            "1 images with other names, such as 'z.png' (the folder contains",
        ),
    ],
)
def test_what_is_no_such_list_is_refused(folder, value, message, found):
    with pytest.raises(DataError, match=message) as caught:
        read_written(folder / "images", written(folder, value))
    assert found in caught.value.found


def test_a_file_that_is_not_there_is_named(folder):
    with pytest.raises(MissingFileError, match="no text file at") as caught:
        read_written(folder / "images", folder / "none.json")
    assert "file_name" in caught.value.expected

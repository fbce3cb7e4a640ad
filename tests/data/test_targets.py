"""Target pictures: which belongs to which image, and what is refused."""

import pytest
from PIL import Image

from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.tasks.image_to_image import read_targets


def save(folder, name, size):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(folder / name)


@pytest.fixture
def folders(tmp_path):
    images, targets = tmp_path / "images", tmp_path / "targets"
    for name in ("a.png", "sub/b.png", "c.png"):
        save(images, name, (16, 12))
    for name in ("a.png", "sub/b.jpg"):
        save(targets, name, (32, 24))
    return images, targets


def test_a_target_has_the_path_of_its_image_whatever_its_suffix(folders):
    images, targets = folders
    found = read_targets(images, targets, (16, 12))
    assert {path.name: target.path.name for path, target in found.annotations.items()} == {
        "a.png": "a.png",
        "b.png": "b.jpg",
    }
    assert (found.unannotated, found.annotations[images / "a.png"].size) == (1, (32, 24))
    before = found.digest(found.samples)
    Image.new("RGB", (32, 24), "red").save(targets / "a.png")
    again = read_targets(images, targets, (16, 12))
    assert again.digest(again.samples) != before


def test_an_image_of_another_size_than_the_model_takes_is_refused(folders):
    with pytest.raises(DataError, match=r"a\.png does not have the model's input size") as refused:
        read_targets(*folders, (16, 16))
    assert (refused.value.found, refused.value.expected) == ("16x12 pixels", "16x16")


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("c.png", (33, 24), "the targets have different sizes"),
        ("a.jpg", (32, 24), "two targets have the same name"),
    ],
)
def test_targets_that_do_not_fit_each_other_are_refused(folders, name, size, text):
    save(folders[1], name, size)
    with pytest.raises(DataError, match=text):
        read_targets(*folders, (16, 12))


def test_folders_that_do_not_belong_together_are_refused(folders, tmp_path):
    with pytest.raises(MissingFileError, match="no target folder"):
        read_targets(folders[0], tmp_path / "nowhere", (16, 12))
    save(tmp_path / "others", "z.png", (32, 24))
    with pytest.raises(DataError, match="annotates no image"):
        read_targets(folders[0], tmp_path / "others", (16, 12))

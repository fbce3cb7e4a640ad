"""Splits and digests of annotated images."""

import pytest
from PIL import Image

from vitdeploy.data.annotations import AnnotatedSet, Category, folder_images, read_json
from vitdeploy.data.folder import Sample, split
from vitdeploy.data.label_file import Repairs
from vitdeploy.errors import DataError, MissingFileError

COCO = (Category(1, "person"), Category(2, "bicycle"), Category(13, "stop sign"))


class Note:
    """An annotation of one word."""

    def __init__(self, word):
        self.word = word

    def content(self):
        return self.word.encode()


def annotated(folder, *names):
    """Ten-pixel images with a note each; a name that ends in ? is there, but not annotated."""
    found = {}
    for name in names:
        path = folder / name.rstrip("?")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 2)).save(path)
        if not name.endswith("?"):
            found[path] = Note(name)
    samples = tuple(Sample(path, None) for path in sorted(found))
    return AnnotatedSet(folder, samples, found, COCO, len(names) - len(found))


# --- splits and digests -----------------------------------------------------------------------------------------------


def test_the_split_is_that_of_the_plain_folder(tmp_path):
    data = annotated(tmp_path, *(f"{i:02}.png" for i in range(12)))
    ours = data.split(calibration=4, evaluation=6, seed=3)
    theirs = split(tmp_path, "none", calibration=4, evaluation=6, seed=3)
    assert (ours.calibration, ours.evaluation) == (theirs.calibration, theirs.evaluation)
    assert ours.classes == ("person", "bicycle", "stop sign")


def test_only_annotated_images_are_in_the_split(tmp_path):
    data = annotated(tmp_path, *(f"{i:02}.png" + "?" * (i % 2) for i in range(12)))
    parts = data.split(calibration=2, evaluation="all", seed=0)
    assert data.unannotated == 6
    assert sorted(parts.calibration + parts.evaluation, key=lambda s: s.path) == list(data.samples)


def test_a_folder_with_its_own_split_keeps_it(tmp_path):
    names = [f"{part}/{i}.png" for part, n in (("calibration", 4), ("evaluation", 6)) for i in range(n)]
    data = annotated(tmp_path, *names)
    ours = data.split(calibration=3, evaluation="all", seed=1)
    theirs = split(tmp_path, "none", calibration=3, evaluation="all", seed=1)
    assert (ours.calibration, ours.evaluation) == (theirs.calibration, theirs.evaluation)
    with pytest.raises(DataError, match="too few images for calibration"):
        data.split(calibration=5, evaluation="all", seed=1)


@pytest.mark.parametrize(("calibration", "evaluation"), [(4, "all"), (2, 3)])
def test_too_few_images_are_refused(tmp_path, calibration, evaluation):
    data = annotated(tmp_path, "0.png", "1.png", "2.png", "3.png")
    with pytest.raises(DataError, match="too few images"):
        data.split(calibration=calibration, evaluation=evaluation, seed=0)


def test_the_digest_changes_with_names_annotations_and_order_but_not_with_the_place(tmp_path):
    one, other = (annotated(tmp_path / name, "0.png", "1.png") for name in ("one", "other"))
    assert one.digest(one.samples) == other.digest(other.samples)
    changed = AnnotatedSet(one.folder, one.samples, {**one.annotations, one.samples[0].path: Note("?")}, COCO, 0)
    renamed = AnnotatedSet(one.folder, one.samples, one.annotations, COCO[:2], 0)
    digests = [one.digest(one.samples), one.digest(one.samples[::-1]), one.digest(one.samples[:1])]
    assert len({*digests, changed.digest(one.samples), renamed.digest(one.samples)}) == 5


# --- images and files -------------------------------------------------------------------------------------------------


def test_images_are_found_by_their_path_and_by_a_name_that_is_unique(tmp_path):
    annotated(tmp_path, "a/x.png", "b/x.png", "b/y.png")
    found = folder_images(tmp_path)
    assert {name: path.relative_to(tmp_path).as_posix() for name, path in found.items()} == {
        "a/x.png": "a/x.png",
        "b/x.png": "b/x.png",
        "b/y.png": "b/y.png",
        "y.png": "b/y.png",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a JSON file"),
        ("[" * 100_000, "is not a JSON file"),
        ("\udcff", "is not a JSON file"),
        ("[]", "is not a COCO annotation file"),
        ('{"images": {}}', "is not a COCO annotation file"),
        ('{"images": [3]}', r"images\[0\] has a missing or invalid id, width"),
        ('{"images": [{"id": 1, "width": 2}, {"id": 1}]}', r"images\[1\] has a missing or invalid width"),
        ('{"images": [{"id": "one", "width": 2}]}', r"images\[0\] has a missing or invalid id"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=message):
        read_json(path, {"images": ("id", "width")}, Repairs())


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MissingFileError, match=r"no annotation file at .*x\.json"):
        read_json(tmp_path / "x.json", {}, Repairs())

"""Images from wherever they are become files that are read as the same pixels, or are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vitdeploy as vd
from vitdeploy.data.classes import match_folders
from vitdeploy.data.folder import scan
from vitdeploy.errors import DataError
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks.adapter import Setting

SPEC = PreprocessSpec(36, (32, 32), "bicubic", (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def setting(spec=SPEC, labels=(), classes=3):
    return Setting("classification", spec, labels=tuple(labels), classes=len(labels) or classes)


def noise(count, size=(40, 50), channels=3, seed=0):
    return list(np.random.default_rng(seed).integers(0, 256, (count, *size, channels), np.uint8))


def placed(source, labels=None, **how):
    """(image, class folder) of what is written for a model, in the order in which it is read."""
    folder, kind = vd.images(source, labels).place(setting(**how))
    samples, names = scan(folder, kind)
    return [(sample.path, names[sample.label] if sample.label is not None else None) for sample in samples]


class Listed(torch.utils.data.Dataset):
    """A data set as torchvision's are: items (image, index), and `classes`."""

    def __init__(self, images, labels, classes):
        self.images, self.labels, self.classes = images, labels, classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


# --- the same pixels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_as",
    [
        lambda array: array,
        Image.fromarray,
        lambda array: torch.from_numpy(array).permute(2, 0, 1),
    ],
)
def test_what_is_in_memory_is_read_as_the_same_pixels(given_as):
    images = noise(3)
    found = placed([given_as(image) for image in images])
    assert [label for _, label in found] == [None] * 3
    for image, (path, _) in zip(images, found, strict=True):
        np.testing.assert_array_equal(load_pixels(path, SPEC), load_pixels(image, SPEC))


def test_paths_are_linked_to_and_files_in_memory_are_decoded(tmp_path):
    Image.fromarray(noise(1)[0]).save(tmp_path / "one.jpg")
    content = (tmp_path / "one.jpg").read_bytes()
    [(linked, _), (decoded, _)] = placed([tmp_path / "one.jpg", content])
    assert linked.read_bytes() == content
    np.testing.assert_array_equal(load_pixels(decoded, SPEC), load_pixels(linked, SPEC))


@settings(max_examples=40, deadline=None)
@given(
    crop=st.tuples(st.integers(2, 24), st.integers(2, 24)),
    room=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    square=st.booleans(),
    rounding=st.sampled_from(["even", "down"]),
    fit=st.sampled_from(["stretch", "cover"]),
    channels=st.sampled_from([1, 3]),
)
def test_an_input_of_the_model_becomes_the_image_that_gives_it(crop, room, square, rounding, fit, channels):
    resize = max(crop) + room[0] if square else (crop[0] + room[0], crop[1] + room[1])
    mean, std = (0.48, 0.46, 0.41)[:channels], (0.27, 0.26, 0.28)[:channels]
    spec = PreprocessSpec(resize, crop, "bilinear", mean, std, fit, rounding)
    [pixels] = noise(1, crop, channels)
    tensor = torch.from_numpy(normalise(pixels[None], spec)[0])
    [(path, _)] = placed([tensor], spec=spec)
    np.testing.assert_array_equal(load_pixels(path, spec), pixels)


def test_a_generator_is_read_once_and_kept():
    images = vd.images(image for image in noise(2))
    assert images.place(setting())[0] == images.place(setting())[0]


# --- labels -----------------------------------------------------------------------------------------------------------


def test_numbers_are_the_models_classes_and_each_has_a_folder():
    found = placed(noise(3), [2, 0, 2])
    assert [label for _, label in found] == ["0", "2", "2"]
    folder = found[0][0].parent.parent
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"]


def test_a_data_set_in_another_order_is_matched_by_its_names():
    data = Listed(noise(3), [0, 1, 1], ["cat", "ant"])
    found = placed(data, labels=None, spec=SPEC)
    assert [label for _, label in found] == ["0", "1", "1"]  # a model without labels counts as the data set
    folder, kind = vd.images(data).place(setting(labels=["ant", "bee", "cat"]))
    samples, names = scan(folder, kind)
    assert [names[sample.label] for sample in samples] == ["ant", "ant", "cat"]


def test_an_index_is_that_of_the_model_where_its_names_are_numbers():
    folder, kind = vd.images(noise(3), labels=[0, 2, "0"]).place(setting(labels=["2", "0", "1"]))
    samples, names = scan(folder, kind)
    assert sorted(names[sample.label] for sample in samples) == ["0", "1", "2"]
    assert match_folders(names, (), ("2", "0", "1"), 3).index == {"2": 0, "0": 1, "1": 2}


def test_a_data_loader_gives_batches_of_a_subset():
    pixels = noise(4, (32, 32))
    tensors = [torch.from_numpy(normalise(each[None], SPEC)[0]) for each in pixels]
    data = torch.utils.data.Subset(Listed(tensors, [0, 1, 0, 1], ["cat", "ant"]), [0, 1, 3])
    folder, kind = vd.images(torch.utils.data.DataLoader(data, batch_size=2)).place(setting(labels=["ant", "cat"]))
    samples, names = scan(folder, kind)
    assert [names[sample.label] for sample in samples] == ["ant", "ant", "cat"]
    for sample, expected in zip(samples, [pixels[1], pixels[3], pixels[0]], strict=True):
        np.testing.assert_array_equal(load_pixels(sample.path, SPEC), expected)


def test_rows_of_columns_are_read_as_those_of_hugging_face():
    rows = [{"image": Image.fromarray(image), "label": label} for image, label in zip(noise(2), (1, 0), strict=True)]
    features = {"image": None, "label": SimpleNamespace(names=["cat", "ant"])}

    class Columns(list):
        pass

    data = Columns(rows)
    data.features = features
    folder, _ = vd.images(data).place(setting(labels=["ant", "cat"]))
    assert sorted(path.parent.name for path in folder.rglob("*.png")) == ["ant", "cat"]


# --- refusals ---------------------------------------------------------------------------------------------------------

FLOATS = np.zeros((3, 32, 32), np.float32)


@pytest.mark.parametrize(
    ("source", "labels", "says"),
    [
        ([], None, "the source has no images"),
        ([FLOATS[:, :30]], None, "image 1 does not have the type and shape of the model's input"),
        ([FLOATS.astype(np.int64)], None, "image 1 does not have the type and shape of the model's input"),
        ([FLOATS + 0.1234], None, "image 1 is not normalised like the model's input"),
        ([FLOATS * np.nan], None, "image 1 is not normalised like the model's input"),
        ([{"pixels": 0}], None, "no image column with a known name"),
        ([(noise(1)[0], 1.5)], None, "a label is not a class"),
        ([(noise(1)[0], 3)], None, "a label is not a class index of the model"),
        ([(noise(1)[0], "a/b")], None, "cannot be a folder name"),
        ([(noise(1)[0], 0), noise(1)[0]], None, "only some of the images have a label"),
        (noise(2), [0], "labels and images differ in number"),
        (noise(2), "folders", "labels='folders' needs a folder"),
    ],
)
def test_what_cannot_be_images_is_refused(source, labels, says):
    with pytest.raises(DataError, match=says):
        vd.images(source, labels).place(setting())


def test_labels_of_a_folder_are_no_list(tmp_path):
    with pytest.raises(DataError, match="labels of a folder must be a kind"):
        vd.images(tmp_path, [0, 1])


def test_a_resize_that_is_smaller_than_the_crop_has_no_image_for_an_input():
    spec = PreprocessSpec((8, 8), (12, 12), "bilinear", (0.5,), (0.5,))
    [pixels] = noise(1, (12, 12), 1)
    with pytest.raises(DataError, match="image 1 cannot be the result of the model's preprocessing"):
        placed([normalise(pixels[None], spec)[0]], spec=spec)

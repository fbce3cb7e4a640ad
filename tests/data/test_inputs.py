"""Files of what each image brings, by the image's path below the folder of all."""

import numpy as np
import pytest
from PIL import Image

from vitdeploy.data.folder import scan
from vitdeploy.data.inputs import InputFiles
from vitdeploy.errors import DataError, MissingFileError, TensorError
from vitdeploy.spec import TensorSpec

SIZE = TensorSpec("size", "float32", ("batch", 2))


@pytest.fixture
def made(tmp_path):
    """The folder of images, that of inputs, and the samples, each of which brings its number twice."""
    images, inputs = tmp_path / "images", tmp_path / "inputs"
    for number, name in enumerate(["7/a.jpg", "7/b.v2.png", "8/a.jpg"]):
        for folder in ((images / name).parent, (inputs / "size" / name).parent):
            folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(images / name)
        np.save((inputs / "size" / name).with_suffix(".npy"), np.full(2, number, np.float32))
    return images, inputs, scan(images, "none")[0]


def test_each_image_brings_its_own(made):
    images, inputs, samples = made
    files = InputFiles.of_images(inputs, images, (SIZE,))
    files.require_own(samples)
    assert [each["size"].tolist() for each in files.each(samples)] == [[0, 0], [1, 1], [2, 2]]
    contents = [files.content(sample) for sample in samples]
    np.save(inputs / "size/8/a.npy", np.zeros(2, np.float32))
    assert files.content(samples[2]) == contents[0] != contents[2] and files.content(samples[1]) == contents[1]


def test_what_is_missing_doubled_or_of_another_shape_is_named(made):
    images, inputs, samples = made
    files = InputFiles.of_images(inputs, images, (SIZE,))
    (inputs / "size/7/b.v2.npy").unlink()
    with pytest.raises(MissingFileError, match=r"b\.v2\.png has no file for the input size") as missing:
        list(files.each(samples))
    assert str(inputs / "size/7/b.v2.npy") in missing.value.found and "float32 [2]" in missing.value.expected
    np.save(inputs / "size/7/a.npy", np.zeros(3, np.float32))
    with pytest.raises(TensorError, match=r"a\.npy does not fit the input size"):
        files.of(samples[0])
    (inputs / "size/8/a.png").write_bytes(b"")
    with pytest.raises(DataError, match="has two files for the input size"):
        files.of(samples[2])
    Image.new("RGB", (8, 8)).save(images / "8/a.png")
    with pytest.raises(DataError, match=r"two images share the input files 8/a\.npy"):
        files.require_own(scan(images, "none")[0])


def test_a_model_and_its_data_have_to_go_together(made, tmp_path):
    images, inputs, _ = made
    assert InputFiles.of_images(None, images, ()) is None
    with pytest.raises(DataError, match="the model needs additional inputs") as refused:
        InputFiles.of_images(None, images, (SIZE,))
    assert "data.inputs" in refused.value.fix and "size/STEM.npy" in refused.value.fix
    with pytest.raises(DataError, match="the model takes only images"):
        InputFiles.of_images(inputs, images, ())
    with pytest.raises(MissingFileError, match="with the input size of each image"):
        InputFiles.of_images(inputs / "size", images, (SIZE,))
    (tmp_path / "list.txt").write_text("a.jpg\n", encoding="utf-8")
    with pytest.raises(DataError, match="require a folder of image files"):
        InputFiles.of_images(inputs, tmp_path / "list.txt", (SIZE,))

"""What each image brings besides its pixels: arrays and files, of the right type and shape, or refused with the fix."""

import numpy as np
import pytest
from PIL import Image

from vitdeploy.errors import CapabilityError, ImageError, InputError, MissingFileError, TensorError
from vitdeploy.runtime.inputs import further_inputs, random_inputs, read_further, read_input, require_image_alone
from vitdeploy.spec import TensorSpec

IMAGE = TensorSpec("image", "uint8", ("batch", 4, 6, 3))
MASK = TensorSpec("mask", "float32", ("batch", 1, 4, 6))
MAP = TensorSpec("classes", "uint8", ("batch", 4, 6))
SEEN = TensorSpec("seen", "bool", (2, 4, 6))
SIZE = TensorSpec("size", "int64", ("batch", 2))
AGE = TensorSpec("age", "float32", ("batch",))
GREY = np.random.default_rng(0).integers(0, 256, (4, 6), np.uint8)


def test_arrays_come_as_they_are():
    mask = np.random.default_rng(0).random((1, 4, 6), np.float32)
    found = read_further({"mask": mask, "age": np.array(3, np.float32)}, [MASK, AGE])
    assert found["mask"] is mask or np.array_equal(found["mask"], mask)
    assert found["age"].shape == () and found["age"] == 3


@pytest.mark.parametrize(
    ("tensor", "right"),
    [
        (MASK, GREY.astype(np.float32)[None] / np.float32(255)),
        (MAP, GREY),
        (SEEN, (GREY > 127)),
    ],
    ids=["float32", "uint8", "bool"],
)
def test_a_png_is_read_by_the_type_of_the_input(tmp_path, tensor, right):
    pixels = np.where(GREY > 127, 255, 0).astype(np.uint8) if tensor is SEEN else GREY
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = read_input(tmp_path / "a.png", tensor)
    assert found.dtype == tensor.dtype and np.array_equal(found, right)
    np.save(tmp_path / "a.npy", right)
    assert np.array_equal(read_input(str(tmp_path / "a.npy"), tensor), found)


def saved(path, value):
    if path.suffix == ".npy":
        np.save(path, value, allow_pickle=True)
    else:
        Image.fromarray(value).save(path)


@pytest.mark.parametrize(
    ("name", "value", "tensor", "error", "found"),
    [
        ("a.npy", np.zeros((4, 6), np.float32), MASK, TensorError, "float32 [4, 6]"),
        ("a.npy", np.zeros((1, 1, 4, 6), np.float32), MASK, TensorError, "float32 [1, 1, 4, 6]"),
        ("a.npy", np.zeros((1, 4, 6)), MASK, TensorError, "float64 [1, 4, 6]"),
        ("a.npy", np.zeros((1, 4, 6), ">f4"), MASK, TensorError, ">f4 [1, 4, 6]"),
        ("a.npy", np.full((1, 4, 6), np.nan, np.float32), MASK, TensorError, "NaN or infinity"),
        ("a.npy", np.array([{}]), SIZE, TensorError, "Python objects"),
        ("a.png", np.zeros((4, 6), np.uint16), MASK, TensorError, "a PNG with mode I;16, for float32"),
        ("a.png", np.zeros((4, 6, 3), np.uint8), MASK, TensorError, "a PNG with mode RGB, for float32"),
        ("a.png", np.zeros((8, 6), np.uint8), MASK, TensorError, "float32 [8, 6]"),
        ("a.png", np.zeros((6, 4), np.uint8), MAP, TensorError, "uint8 [6, 4]"),
        ("a.png", GREY, SEEN, TensorError, "grey pixels"),
        ("a.png", GREY, SIZE, TensorError, "a PNG with mode L, for int64"),
    ],
)
def test_other_files_are_refused(tmp_path, name, value, tensor, error, found):
    saved(tmp_path / name, value)
    with pytest.raises(error) as refused:
        read_input(tmp_path / name, tensor)
    assert found in refused.value.found and refused.value.expected and name in refused.value.message


def test_what_is_no_file_of_numbers_is_refused(tmp_path):
    for name, content, error in (
        ("a.npy", b"none", TensorError),
        ("a.npy", b"", TensorError),
        ("a.png", b"none", ImageError),
        ("a.txt", b"1 2", TensorError),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(error, match=r"a\.(npy|png|txt)"):
            read_input(tmp_path / name, MASK)
    with pytest.raises(MissingFileError, match="for the input mask") as missing:
        read_input(tmp_path / "none.npy", MASK)
    assert missing.value.expected == "float32 [1, 4, 6]"
    with pytest.raises(TensorError, match="the input mask is not a numpy array"):
        read_input([[0.0]], MASK)


def test_a_header_that_promises_more_than_the_file_has_takes_no_memory(tmp_path):
    for shape in ((1 << 40, 4, 6), (1, 4, 6)):
        with (tmp_path / "a.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            file.write(b"1234")
        with pytest.raises(TensorError, match="cannot be read"):
            read_input(tmp_path / "a.npy", MASK)


def test_inputs_that_are_missing_or_too_many_are_named():
    with pytest.raises(InputError, match="which takes an image, mask, size") as refused:
        read_further({"mask": np.zeros((1, 4, 6), np.float32)}, [MASK, SIZE])
    assert refused.value.found == "an image, mask" and "--input size=FILE" in refused.value.fix
    with pytest.raises(InputError) as refused:
        read_further({"mask": 1}, [])
    assert refused.value.expected == "only an image" and refused.value.fix == "remove the extra inputs"
    assert read_further(None, []) == {}


def test_only_what_a_task_has_no_use_for_is_brought_by_images():
    assert further_inputs("classification", (IMAGE, MASK, SIZE)) == (MASK, SIZE)
    assert further_inputs("tensors", (IMAGE,)) == ()
    for task in ("zero-shot", "promptable-segmentation", "sequence", "image-to-text"):
        assert further_inputs(task, (IMAGE, SIZE)) == ()


def test_the_refusal_names_the_input_and_what_works():
    require_image_alone("a model", (), "a server")
    with pytest.raises(CapabilityError, match="a server supports only models whose single") as refused:
        require_image_alone("lanes", (MASK,), "a server")
    assert "mask: float32[batch, 1, 4, 6]" in refused.value.found and "--bind mask=VALUE" in refused.value.fix


def test_random_inputs_are_valid_and_those_of_odd_seeds_differ_everywhere():
    tensors = (MASK, MAP, SEEN, SIZE, AGE)
    even, odd = (random_inputs(tensors, 3, seed) for seed in (4, 5))
    for tensor in tensors:
        a, b = even[tensor.name], odd[tensor.name]
        assert a.shape == b.shape == (3, *tensor.shape[1:]) and a.dtype == b.dtype == tensor.dtype
        assert (a != b).all() and (tensor.dtype == "bool" or (a.min() > 0 and b.min() > 0))

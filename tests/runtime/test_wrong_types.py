"""What an app may give by mistake: each is answered with what is accepted; and what it gets prints readably."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitdeploy.errors import ClosedError, InputError, TensorError, VitdeployError
from vitdeploy.runtime import Classification, Detections, Features, Panoptic, load
from vitdeploy.runtime.sequence import Sequence
from vitdeploy.runtime.tasks.classification import ClassScore
from vitdeploy.runtime.tasks.detection import Detection
from vitdeploy.runtime.tasks.panoptic import Segment

GREY = np.full((32, 32, 1), 128, np.uint8)


@pytest.fixture(scope="module")
def predictor(small_bundle):
    with load(small_bundle) as predictor:
        yield predictor


@pytest.mark.parametrize(
    ("image", "found"),
    [
        (None, "NoneType"),
        (7, "int"),
        ([GREY], "list"),
        ({}, "dict"),
        (torch.zeros(3, 32, 32), "torch.Tensor float32 [3, 32, 32]"),
        (io.BytesIO(b""), "BytesIO"),
        (np.zeros((32, 32, 3), np.float32), "float32 [32, 32, 3]"),
        (np.zeros((1, 32, 32, 3), np.uint8), "uint8 [1, 32, 32, 3]"),
        (np.zeros(3, np.uint8), "uint8 [3]"),
        (np.float32(1), "numpy.float32"),
    ],
)
def test_what_is_no_image_is_told_with_what_is_one(predictor, image, found):
    with pytest.raises(TensorError) as caught:
        predictor.predict(image)
    assert found in caught.value.found
    assert "uint8" in caught.value.expected


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_every_kind_are_images(predictor, kind):
    stream = io.BytesIO()
    Image.fromarray(GREY[:, :, 0]).save(stream, "PNG")
    assert predictor.predict(kind(stream.getvalue())).index == predictor.predict(GREY).index


@pytest.mark.parametrize("images", [None, "one.png", b"bytes", Path("one.png"), GREY, np.zeros((32, 32), np.uint8), 3])
def test_one_image_in_the_place_of_several(predictor, images):
    """The rows of an array would be images of one row each, the letters of a path files."""
    for call in (predictor.predict_batch, lambda given: list(predictor.stream(given))):
        with pytest.raises(TensorError, match="expected several images"):
            call(images)


@pytest.mark.parametrize("tensor", [None, [[1]], torch.zeros(1, 32, 32, 1, dtype=torch.uint8), "tensor"])
def test_what_is_no_array_is_no_tensor(predictor, tensor):
    with pytest.raises(TensorError) as caught:
        predictor.predict_tensor(tensor)
    assert caught.value.expected.startswith("numpy.ndarray, uint8")
    with pytest.raises(TensorError):
        predictor.runner.infer({predictor.runner.inputs[0].name: tensor})


@pytest.mark.parametrize("top", [0, -1, "five", None, 2.0])
def test_a_number_of_classes_that_is_none(predictor, top):
    with pytest.raises(InputError, match="top must be a positive integer"):
        predictor.predict(GREY, top)


@pytest.mark.parametrize("path", [None, 3, b"out/digits", ["out"]])
def test_a_bundle_that_is_no_path(path):
    with pytest.raises(InputError, match="the bundle path must be a str or Path"):
        load(path)


def test_a_closed_predictor_says_so(small_bundle):
    with load(small_bundle) as predictor:
        pass
    for call in (predictor.predict, lambda image: predictor.predict_tensor(image[None])):
        with pytest.raises(ClosedError, match="closed") as caught:
            call(GREY)
        assert isinstance(caught.value, VitdeployError)


@pytest.mark.parametrize(
    ("answer", "text", "shown"),
    [
        (
            Classification((ClassScore(7, "seven", 0.981), ClassScore(1, "one", 0.0123))),
            "seven 98.1 %, one 1.2 %",
            "<Classification: seven 98.1 %, one 1.2 %>",
        ),
        (Features(np.arange(768, dtype=np.float32)), "768 features: 0.0000 1.0000 2.0000 3.0000 ...", "<Features: 768"),
        (
            Detections((64, 48), (Detection(1, "cat", 0.9, (1.0, 2.0, 3.0, 4.0)),) * 5),
            "\n".join(["cat 90.0 % at 1 2 3 4"] * 5),
            "<Detections: 5 in 64x48: cat 90.0 % at 1 2 3 4, ",
        ),
        (Detections((64, 48), ()), "nothing above the threshold", "<Detections: 0 in 64x48"),
        (
            Panoptic(np.zeros((10, 20), np.int32), (Segment(1, 3, "sky", 0.9, 50, False),)),
            "sky 25.0 % of the image",
            "<Panoptic: 1 segments in 20x10: sky 25.0 %",
        ),
        (Sequence((3, 1, 2), -0.5), "3 1 2", "<Sequence of 3 tokens, score -0.500: 3 1 2>"),
    ],
)
def test_answers_print_in_a_line(answer, text, shown):
    assert str(answer) == text
    assert repr(answer).startswith(shown)
    assert len(repr(answer)) < 200

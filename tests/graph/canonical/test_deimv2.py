"""A published detector, exported by its authors: admitted, brought into the canonical form, its second input bound.

The data is not part of the repository: see `pytestmark` for where it is looked for.
"""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.graph.builder import census, checked, difference, run
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.admit import admit
from vitdeploy.graph.io.inputs import bind_input

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("VITDEPLOY_TEST_DATA", ROOT.parent / "shared" / "data"))
FILE = DATA / "weights" / "deimv2_hgnetv2_atto_coco.onnx"
PHOTOGRAPHS = DATA / "coco-val128" / "images"
SIZE = 320

pytestmark = pytest.mark.skipif(
    not (FILE.is_file() and PHOTOGRAPHS.is_dir()),
    reason=f"set VITDEPLOY_TEST_DATA to a folder with weights/{FILE.name} and coco-val128/images/*.jpg",
)


@pytest.fixture(scope="module")
def detector():
    model = admit(FILE)
    bind_input(model, "orig_target_sizes", np.array([1, 1]))
    normalise(model)
    return checked(model)


@pytest.fixture(scope="module")
def images():
    """Three photographs as float32 [3, 3, 320, 320] in 0..1."""
    from PIL import Image

    paths = sorted(PHOTOGRAPHS.iterdir())[:3]
    arrays = [np.asarray(Image.open(path).convert("RGB").resize((SIZE, SIZE)), np.float32) / 255 for path in paths]
    return np.stack(arrays).transpose(0, 3, 1, 2)


@pytest.fixture(scope="module")
def original():
    return onnx.load(FILE)


def test_one_input_is_left_and_the_batch_is_free(detector):
    assert [value.name for value in detector.graph.input] == ["images"]
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in detector.graph.output
    }
    assert shapes == {"labels": ["N", 300], "boxes": ["N", 300, 4], "scores": ["N", 300]}


def test_no_shape_arithmetic_is_left(detector):
    found = census(detector)
    assert not {"Gemm", "Identity", "Constant", "Cast", "Tile", "ConstantOfShape"} & found.keys()
    assert found["Shape"] == 1
    assert detector.opset_import[0].version == 20


def test_boxes_are_those_of_the_original_relative_to_the_image(detector, images, original):
    size = np.array([[640, 480], [333, 500], [1, 1]], np.int64)
    labels, boxes, scores = run(original, images=images, orig_target_sizes=size)
    ours = run(detector, images=images)
    np.testing.assert_array_equal(ours[0], labels)
    assert (
        difference([ours[1] * np.tile(size, 2)[:, None], ours[2]], [boxes, scores]) <= 5e-5
    )  # ONNX Runtime alone: 1e-5 between its levels
    assert scores.max() > 0.5  # there is something on the photographs


def test_a_batch_gives_what_its_images_give_alone(detector, images):
    together = run(detector, images=images)
    for i in range(len(images)):
        for one, all_of_them in zip(run(detector, images=images[i : i + 1]), together, strict=True):
            np.testing.assert_allclose(one[0], all_of_them[i], rtol=0, atol=1e-5)

"""The section of attention maps: whose they are, with both answers, and which are left out."""

import copy
import io

import numpy as np
import pytest
from PIL import Image

from tests.documents import page_of
from tests.report.test_html import HOSTILE, PNG, REPORT, Page, without_bench
from vitdeploy.report.attention import SMALL, attention_tile

ENGINE = "openvino-cpu-int8"
MAPS = [
    {"artifact": "original", "image": "0-original.png", "on_patches": 0.926, "shared": None},
    {"artifact": ENGINE, "image": "0-engine.png", "on_patches": 0.9, "shared": 0.984},
]
ATTENTION = {
    "grid": [14, 12],
    "reader": "last attention, read by the class token",
    "blocks": 12,
    "left_out": {"onnxruntime-cpu-int8": "1 of its 12 attention blocks can be read"},
    "examples": [{"example": 0, "maps": MAPS}],
}


def page(images=("0.png", "0-original.png", "0-engine.png"), **changes):
    report = without_bench()
    report["attention"] = {**copy.deepcopy(ATTENTION), **changes}
    return Page(page_of(report, dict.fromkeys(images, PNG)))


def test_maps_are_shown_with_both_answers_and_whose_they_are():
    found = page()
    text = " ".join(found.text.split())
    for words in ("12 attention blocks with 14 × 12 patches", "read by the class token", "cat, 90.0 %", "dog, 50.0 %"):
        assert words in text
    assert "93 % on patches" in text and "98.4 % overlap with the original" in text
    assert "No map for onnxruntime-cpu-int8: 1 of its 12 attention blocks can be read." in text
    assert "graph that it was compiled from" in text
    words = [values["alt"] for tag, values in found.elements if tag == "img"]
    assert words[-2:] == [f"Where {name} looks in example image 1" for name in ("original", ENGINE)]


def test_the_original_alone_is_not_said_to_be_of_an_engine():
    text = page(examples=[{"example": 0, "maps": MAPS[:1]}], left_out={}).text
    assert "Where the model looks" in text and "compiled from" not in text and "No map for" not in text


def test_without_maps_there_is_no_section_and_without_pictures_a_word():
    assert "Where the model looks" not in Page(page_of(REPORT, {})).text
    report = without_bench() | {"attention": None}
    assert "Where the model looks" not in Page(page_of(report, {})).text
    assert page(images=()).text.count("image not included") == 4


def test_names_are_text():
    changes = {"reader": HOSTILE, "left_out": {HOSTILE: HOSTILE}}
    assert "script" not in {tag for tag, _ in page(**changes).elements}


@pytest.mark.parametrize("shape", [(32, 32, 3), (48, 160, 3), (7, 2, 3)])
def test_a_tile_is_a_small_picture_that_is_lightest_where_attention_is(shape):
    values = np.zeros((2, 4))
    values[1, 2] = 0.5
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    png = attention_tile(noise, values, largest=0.5)
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("L"), float)
    assert max(pixels.shape) == SMALL and png == attention_tile(noise, values, largest=0.5)
    height, width = pixels.shape[0] // 2, pixels.shape[1] // 4
    means = [
        pixels[r * height : (r + 1) * height, c * width : (c + 1) * width].mean() for r in (0, 1) for c in range(4)
    ]
    assert int(np.argmax(means)) == 6

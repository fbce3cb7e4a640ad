"""Modules as people write them, by the commands that people type: to a bundle in INT8 for both runtimes.

Once with `--model`, once through the folder that `vitdeploy export --model` leaves, named in a recipe.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
from PIL import Image

from tests.command_line import command_line
from tests.compatibility.test_modules import MODULES, TARGETS, pictures
from tests.references import reference
from vitdeploy.quantization import place_openvino

# All others in `make modules`, which takes some ten minutes for them.
ALWAYS = ("dict_output",)
IMAGES = 24


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, pixels in enumerate(pictures(64, IMAGES, 3)):
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    return folder


def recipe(module, images, source):
    size = {} if module.size is None or source else {"image_size": list(module.size)}
    return {
        **{"vitdeploy": 1, "name": "walk", "source": {**source, **size}, "targets": list(TARGETS), "precision": "int8"},
        "data": {"path": str(images), "labels": "none", "calibration": {"images": 8}, "evaluation": {"images": 16}},
        # They have learnt nothing: what is asked is that the line is walked, and that nothing is lost on it.
        "budget": {"min_agreement": 0},
    }


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of ways that are slow in training
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.maker)
def test_a_module_becomes_a_bundle_by_model_and_by_recipe(module, images, tmp_path, monkeypatch):
    if module.maker not in ALWAYS and "VITDEPLOY_TEST_DEPTH" not in os.environ:
        pytest.skip("walked by `make modules`, or with VITDEPLOY_TEST_DEPTH=1")
    if module.library is not None:
        reference(module.library)
    monkeypatch.setattr(place_openvino, "FEW_WEIGHTS", 0)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    own, size = ("--model", module.function), ()
    if module.size is not None:
        size = ("--image-size", "x".join(map(str, module.size)))
    for name, source in (("own", {}), ("folder", {"model": "float"})):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(recipe(module, images, source)), encoding="utf-8")
    with command_line(tmp_path, tmp_path / "store", short_bench=True) as run:
        exported = run("export", *own, *size, "-o", "float", "--json").document
        assert exported["model"]
        reports = [
            run("run", "own.yaml", *own, "-o", "own", "--json").document,
            run("run", "folder.yaml", "-o", "folder", "--json").document,
        ]
        for folder, report in zip(("own", "folder"), reports, strict=True):
            shipped = [engine["artifact"] for engine in report["engines"] if engine["shipped"]]
            assert shipped == [f"{target}-int8" for target in TARGETS]
            assert all(engine["verify"]["agreement"] >= 50 for engine in report["engines"]), module.maker
            checked = run("inspect", folder, "--check", "--json").document
            assert checked
    assert [engine["verify"]["agreement"] for engine in reports[0]["engines"]] == [
        engine["verify"]["agreement"] for engine in reports[1]["engines"]
    ]

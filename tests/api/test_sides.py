"""`compare` and `sweep` of the API: the examples of their docstrings, images in memory, and what they write."""

import doctest
import json

import numpy as np
import pytest

import vitdeploy as vd
from vitdeploy.api import sweep

pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
MODEL = "vit_w32d2h2_patch8_32"


def test_the_examples_in_docstrings_are_true(workplace, digits):
    recipe = {
        "vitdeploy": 1,
        "name": "digits",
        "source": {"model": MODEL},
        "data": {"path": str(digits / "calibration"), "labels": "none", "calibration": {"images": 4}},
        "targets": ["onnxruntime-cpu"],
        "precision": "fp32",
        "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
    }
    (workplace / "digits.yaml").write_text(json.dumps(recipe))
    found = doctest.testmod(sweep, extraglobs={"RECIPE": workplace / "digits.yaml"}, verbose=False)
    assert found.attempted and not found.failed


def test_answers_alone_are_compared_without_a_bench(workplace):
    before, after = (
        vd.compile(vd.export(name, progress=False), "onnxruntime-cpu", progress=False)
        for name in (MODEL, "vit_w32d1h2_patch8_32")
    )
    noise = list(np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8))
    found = vd.compare(before, after, noise, max_drop=1.0, bench=False, progress=False)
    [engine] = found.document.engines
    assert found.document.bench is None and engine.ratios == () and engine.accuracy.n == 8
    slower = vd.compare(before, after, noise, max_slowdown=5, bench=False, progress=False)
    assert slower.status == "undecided" and "needs times" in slower.reasons[0]


def test_two_bundles_answer_images_in_memory_and_what_is_lost_is_written_and_shown(workplace):
    graph = vd.export(MODEL, progress=False)
    bundle = vd.compile(graph, "onnxruntime-cpu", progress=False)
    noise = list(np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8))
    found = vd.compare(
        bundle, str(bundle.folder), noise, "sides", max_drop=1.0, duration=0.1, junit="checks.xml", progress=False
    )
    written = json.loads((workplace / "sides" / "compare.json").read_text())
    assert found.document.engines[0].same_engine and str(found).splitlines()[-1] == written["sentence"]
    assert (workplace / "sides" / "compare.html").is_file() and "onnxruntime" in (workplace / "checks.xml").read_text()

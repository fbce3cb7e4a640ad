"""An INT8 engine that answers wrongly ships nowhere: not by the verdict, not in the bundle, not by `load`."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

from tests.command_line import command_line
from tests.sabotage import sabotage_int8
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import GateError
from vitdeploy.runtime import load

RECIPE = """
vitdeploy: 1
name: sabotaged
source: {{model: vit_w32d2h2_patch8_32, checkpoint: {checkpoint}}}
preprocess: {{resize: 32, crop: 32, mean: [0.5], std: [0.5]}}
data: {{path: {digits}, labels: {labels}, calibration: {{images: 16}}, evaluation: {{images: 80}}}}
targets: [onnxruntime-cpu]
bench: {{scenarios: [single], batch: [1], duration: 0.1}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_checkpoint, digits):
    """run(out, labels, *overrides): `vitdeploy run` whose INT8 engines are wrong."""
    home = tmp_path_factory.mktemp("sabotaged")

    def run(out, labels, *overrides):
        recipe = home / f"{labels}.yaml"
        recipe.write_text(RECIPE.format(checkpoint=small_checkpoint, digits=digits, labels=labels), encoding="utf-8")
        options = [text for override in overrides for text in ("--set", override)]
        with pytest.MonkeyPatch.context() as patch, command_line(home, home / "store", short_bench=True) as command:
            sabotage_int8(patch)
            return command("run", recipe, "-o", out, *options), home / out

    return run


@pytest.fixture(scope="module")
def guarded(run):
    """Nothing is bounded but the size of the file, and there are no labels."""
    return run("guarded", "none", "budget.max_size=100000000")


def test_the_guard_fails_it_and_the_float_engine_ships(guarded):
    done, bundle = guarded
    assert done.returncode == 5
    assert "VD5001  the budget is not met" in done.stderr
    assert "onnxruntime-cpu-int8: agreement" in done.stderr and "budget 95" in done.stderr
    assert "default guard: the budget sets neither max_drop nor min_agreement" in done.stderr
    assert "onnxruntime-cpu-int8 misses the budget" in done.stdout
    manifest = read_bundle(bundle)
    assert [engine.artifact for engine in manifest.engines] == ["onnxruntime-cpu-fp32"]
    assert manifest.gates == {"onnxruntime-cpu-fp32": "pass"}
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"]["ships"] == ["onnxruntime-cpu-fp32"] and report["verdict"]["gate"] == "fail"
    assert report["verdict"]["recommended"] != "onnxruntime-cpu-int8"
    with load(bundle) as predictor:
        assert predictor.target == "onnxruntime-cpu-fp32"


def test_with_labels_and_a_budget_on_the_drop_it_fails_too(run):
    done, bundle = run("labelled", "folders", "budget.max_drop=50", "budget.min_agreement=90")
    assert done.returncode == 5
    assert [engine.artifact for engine in read_bundle(bundle).engines] == ["onnxruntime-cpu-fp32"]


def test_who_asks_for_it_gets_it_and_is_told_everywhere(run):
    done, bundle = run("kept", "none", "bundle.include_failed=true")
    assert done.returncode == 5
    manifest = read_bundle(bundle)
    assert [engine.artifact for engine in manifest.engines] == ["onnxruntime-cpu-fp32", "onnxruntime-cpu-int8"]
    assert manifest.gates["onnxruntime-cpu-int8"] == "fail"
    with load(bundle) as predictor:
        assert predictor.target == "onnxruntime-cpu-fp32"
    golden = manifest.golden.engines["onnxruntime-cpu-int8"]
    assert golden.least_same == 6 and manifest.golden.engines["onnxruntime-cpu-fp32"].least_same == 6
    with command_line(bundle.parent, bundle.parent / "store") as here:
        checked = here("inspect", bundle, "--check")
        assert checked.returncode == 5
        assert "golden onnxruntime-cpu-fp32: ok, 8 of 8 " in checked.stdout
        [line] = [line for line in checked.stdout.splitlines() if line.startswith("golden onnxruntime-cpu-int8")]
        assert "DIFFERS" in line and line.endswith("its budget failed when the bundle was built")
    alone = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    alone["engines"] = [each for each in alone["engines"] if each["precision"] == "int8"]
    folder = shutil.copytree(bundle, bundle.parent / "alone")
    (folder / "manifest.json").write_text(json.dumps(alone), encoding="utf-8")
    with pytest.raises(GateError, match="failed its budget"):
        load(folder)
    Image.new("L", (32, 32)).save(bundle.parent / "image.png")
    with command_line(bundle.parent, bundle.parent / "store") as here:
        for verb in (("embed", folder, "--as", "triton", "-o", "served"), ("predict", folder, "image.png")):
            assert here(*verb).returncode == 5

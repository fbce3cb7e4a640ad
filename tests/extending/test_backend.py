"""A back end from outside: its own file and its entry points, through every command to a bundle that an app loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extending.installed import command_line_with, install
from vitdeploy.benchmark.gemm import best_rate, profile
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime import load

pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# All that a back end consists of.
FILES = (HERE / "toy_backend.py",)
ENTRY_POINTS = {
    "vitdeploy.targets": {"numpy-cpu": "toy_backend:TARGET"},
    "vitdeploy.runtime": {"numpy": "toy_backend:RUNTIME"},
    "vitdeploy.compilation": {"numpy": "toy_backend:COMPILE"},
    "vitdeploy.quantization": {"numpy": "toy_backend:QUANTIZE"},
    "vitdeploy.benchmark": {"numpy": "toy_backend:BENCH"},
}
RECIPE = """
vitdeploy: 1
name: digits
source: {{model: vit_w32d2h2_patch8_32, checkpoint: {checkpoint}}}
preprocess: {{resize: 32, crop: 32, mean: [0.5], std: [0.5]}}
data: {{path: {data}, labels: folders, calibration: {{images: 16}}, evaluation: {{images: 40}}}}
precision: int8
targets: [numpy-cpu]
budget: {{min_agreement: 50}}
bench: {{scenarios: [single], batch: [1], duration: 0.5}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder in which the package of the back end is installed."""
    folder = tmp_path_factory.mktemp("site-packages")
    install(folder, "vitdeploy-numpy", FILES, ENTRY_POINTS)
    return folder


@pytest.fixture(scope="module")
def vitdeploy(site, tmp_path_factory):
    """The command line, with that folder on the path."""
    with command_line_with(site, tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("store")) as run:
        yield run


@pytest.fixture(scope="module")
def bundle(vitdeploy, small_checkpoint, digits):
    Path("recipe.yaml").write_text(RECIPE.format(checkpoint=small_checkpoint, data=digits))
    done = vitdeploy("run", "recipe.yaml", "-o", "bundle")
    assert done.returncode == 0, done.stderr
    return Path("bundle").resolve()


def test_the_doctor_knows_it(vitdeploy):
    done = vitdeploy("doctor", "--json")
    assert done.document["targets"]["numpy-cpu"]["works"] is True, done.stderr


def test_a_recipe_goes_through_every_stage(bundle):
    """Placed in INT8, compiled, verified against the original, measured and bundled."""
    report = json.loads((bundle / "report.json").read_text())
    engines = {engine["artifact"]: engine for engine in report["engines"]}
    int8 = engines["numpy-cpu-int8"]
    assert int8["kernels"]["int8"] > 0
    assert "numpy-cpu-int8" in {entry["artifact"] for entry in report["bench"]["results"]}
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert "numpy-cpu-int8" in {f"{each['target']}-{each['precision']}" for each in manifest["engines"]}


def test_every_command_takes_it(vitdeploy, small_checkpoint, digits):
    images, source = digits / "calibration", ("vit_w32d2h2_patch8_32", "--checkpoint", small_checkpoint)
    for command in (
        ("export", *source, "-o", "float"),
        (
            "quantize",
            "float",
            "--data",
            digits / "calibration",
            "--num-samples",
            8,
            "--target",
            "numpy-cpu",
            "-o",
            "int8",
        ),
        ("compile", "int8", "--target", "numpy-cpu", "-o", "engine"),
        ("verify", "engine", "--against", "float", "--data", images),
        ("bench", "engine", "--duration", 0.5),
    ):
        done = vitdeploy(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_its_layers_are_timed_and_its_best_rate_is_measured(bundle):
    manifest = read_bundle(bundle)
    [int8] = [engine for engine in manifest.engines if engine.precision == "int8"]
    [layer] = profile(bundle, int8, "int8", 1, 0, 0.1).layers
    assert (layer.name, layer.milliseconds > 0) == ("the whole graph", True)
    assert best_rate("numpy-cpu", "fp32", 0, 0.1).kernel == "numpy.matmul"
    with pytest.raises(CapabilityError, match="numpy has no int8 product"):
        best_rate("numpy-cpu", "int8", 0, 0.1)


def test_an_app_loads_it_and_gets_the_answer_of_the_engine(vitdeploy, bundle, digits):
    image = next((digits / "evaluation" / "3").iterdir())
    with load(bundle) as predictor:
        label = predictor.predict(image).top[0].label
        assert predictor.target.startswith("numpy-cpu")
    done = vitdeploy("predict", bundle, image, "--json")
    assert label in done.stdout


def test_without_its_package_nobody_takes_it_for_another_back_end(bundle):
    code = f"import vitdeploy.runtime as r; r.load({str(bundle)!r}, target='numpy-cpu')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "unknown target 'numpy-cpu'" in done.stderr

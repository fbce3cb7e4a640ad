"""A task from outside: its two files and two entry points, from a graph through every stage to an app's answer."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.extending.installed import command_line_with, install
from tests.graph.small_graphs import Builder
from vitdeploy.document.report import Report
from vitdeploy.errors import ManifestError
from vitdeploy.extensions import entry_points_of
from vitdeploy.runtime import load
from vitdeploy.spec import decode

pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# All that a task consists of.
FILES = (HERE / "toy_task.py", HERE / "toy_task_workshop.py")
ENTRY_POINTS = {
    "vitdeploy.runtime.tasks": {"rating": "toy_task:TASK"},
    "vitdeploy.tasks": {"rating": "toy_task_workshop:RatingAdapter"},
}
RECIPE = """
vitdeploy: 1
name: ratings
source: {{model: model.onnx, task: rating}}
preprocess: {{resize: 32, crop: 32, mean: [0.5], std: [0.5]}}
data: {{path: {data}, labels: folders, calibration: {{images: 16}}, evaluation: {{images: 40}}}}
precision: int8
targets: [onnxruntime-cpu]
budget: {{min_agreement: 50}}
bench: {{scenarios: [single], batch: [1], duration: 0.5}}
"""


def model():
    """Patches and one number of their mean, far apart for different images."""
    b, width = Builder(0), 16
    weight = b.constant(b.random(width, 1, 8, 8), "patches.weight")
    patches = b.op("Conv", "image", weight, kernel_shape=[8, 8], strides=[8, 8])
    rows = b.op("Transpose", b.op("Reshape", patches, b.ints(-1, width, 16)), perm=[0, 2, 1])
    hidden = b.op("Relu", b.linear(rows, width, 64, "fc1"))
    mean = b.op("ReduceMean", b.linear(hidden, 64, width, "fc2"), b.ints(1), keepdims=0)
    head = b.constant((10 * b.random(width, 1)).astype(np.float32), "head.weight")
    return b.model({"image": ["batch", 1, 32, 32]}, b.linear(mean, width, 1, "head", weight=head))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder in which the package of the task is installed."""
    folder = tmp_path_factory.mktemp("site-packages")
    install(folder, "vitdeploy-rating", FILES, ENTRY_POINTS)
    return folder


@pytest.fixture(scope="module")
def vitdeploy(site, tmp_path_factory):
    """The command line, with that folder on the path."""
    with command_line_with(site, tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("store")) as run:
        onnx.save(ir.to_proto(model()), "model.onnx")
        yield run


@pytest.fixture(scope="module")
def bundle(vitdeploy, digits):
    Path("recipe.yaml").write_text(RECIPE.format(data=digits))
    done = vitdeploy("run", "recipe.yaml", "-o", "bundle")
    assert done.returncode == 0, done.stderr
    return Path("bundle").resolve()


def test_a_recipe_goes_through_every_stage(bundle):
    """Exported, placed in INT8, compiled, verified by the task's own measure, and bundled."""
    report = json.loads((bundle / "report.json").read_text())
    [int8] = [engine for engine in report["engines"] if engine["precision"] == "int8"]
    assert (report["model"]["task"], int8["verify"]["metric"], int8["verify"]["n"]) == ("rating", "near", 40)
    assert 0 < int8["verify"]["apart"] < 0.5 and int8["kernels"]["int8"] > 0
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert (manifest["task"], manifest["postprocess"]) == ("rating", {"best": 10.0})


def test_the_page_of_the_report_shows_its_metric_and_its_number(bundle):
    page = (bundle / "report.html").read_text()
    assert "within 0.5 of their folder" in page and "Apart, mean" in page


def test_its_document_is_a_value_that_other_processes_take(bundle):
    report = decode(Report, json.loads((bundle / "report.json").read_text()))
    verified = report.engines[0].verify
    sent = pickle.loads(pickle.dumps(verified))  # noqa: TID251 - our own
    assert sent == verified and type(sent).__name__ == "VerifiedRating"


def test_an_app_gets_the_answer_of_the_task(vitdeploy, bundle, digits):
    image = next((digits / "evaluation" / "3").iterdir())
    with load(bundle) as predictor:
        result = predictor.predict(image)
    assert (type(result).__name__, 0 <= result.rating <= 10) == ("Rating", True)
    done = vitdeploy("predict", bundle, image, "--json")
    assert f'"rating": {result.rating}' in done.stdout


def test_commands_take_its_name(vitdeploy, tmp_path):
    code = "from vitdeploy.cli.main import main; main()"
    command = [sys.executable, "-c", code, "export", "model.onnx", "--task", "rating", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_its_package_it_is_no_task(site, bundle, monkeypatch):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(site)])
    entry_points_of.cache_clear()
    with pytest.raises(ManifestError) as refused:
        load(bundle)
    assert "'rating', expected one of classification" in str(refused.value.found)
    entry_points_of.cache_clear()

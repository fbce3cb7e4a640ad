"""INT8 of a real trained model: both engines against a float simulation of their placement, answers, and memory."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.targets import CPU_TARGETS
from vitdeploy.data.folder import split
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.graph.half.half import emulate
from vitdeploy.graph.io.files import get_metadata, load_graph, serialised
from vitdeploy.quantization import place_openvino
from vitdeploy.quantization.placement import QUANTIZE
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import load_image
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.compile import compile_graph
from vitdeploy.stages.place import PlaceConfig, place_graph
from vitdeploy.stages.typed import place_typed
from vitdeploy.verification.agreement import compare
from vitdeploy.verification.records import collect

ROOT = Path(__file__).parent.parent.parent
PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
# What one of the targets leaves in float.
FLOAT = ("patch_embed.proj", "head")
SIMULATED_IMAGES = 96


@pytest.fixture(scope="module")
def parts(digits):
    return split(digits, "folders", calibration=128, evaluation="all", seed=0)


@pytest.fixture(scope="module")
def images(parts):
    """(uint8 [32, 32, 1], size) each, of the 640 evaluation images."""
    return [load_image(sample.path, PREPROCESS) for sample in parts.evaluation]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, digits_export, parts):
    """model.onnx of the digits model and statistics.npz of all its calibration images."""
    out = tmp_path_factory.mktemp("digits")
    shutil.copyfile(digits_export / "model.onnx", out / "model.onnx")
    calibrate(out / "model.onnx", parts.calibration, out)
    return out


@pytest.fixture(scope="module")
def float_logits(folder, images):
    return collect(OnnxRuntimeRunner(folder / "model.onnx", name="float"), images, PREPROCESS).stacked("logits")


def placed(folder, out, target, ignore=()):
    place_graph(PlaceConfig(target, "int8", ignore), folder / "model.onnx", folder / "statistics.npz", out)
    return out / "model.onnx"


def engine_logits(graph, out, target, images):
    (out / "engine").mkdir()
    engine = compile_graph(graph, target, 8, out / "engine")
    return collect(make_runner(out / "engine", engine), images, PREPROCESS).stacked("logits")


def simulated_logits(graph, images):
    """Q/DQ computed node by node in float: no fusion, no INT8 kernel."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"image": np.stack([pixels for pixels, _ in images])})[0]


@pytest.fixture(params=CPU_TARGETS)
def target(request):
    pytest.importorskip(CPU_TARGETS[request.param].package)
    return request.param


@pytest.fixture
def simulation(tmp_path_factory, monkeypatch, folder, images, target):
    """The layers that both targets quantize, fake-quantized: Q/DQ, with what is worth an operator to the target."""
    row = dataclasses.replace(place_openvino.BACKEND, gain_threshold=QUANTIZE[target].gain_threshold)
    monkeypatch.setattr(place_openvino, "BACKEND", row)
    graph = placed(folder, tmp_path_factory.mktemp("simulation"), "openvino-cpu", FLOAT)
    return simulated_logits(graph, images[:SIMULATED_IMAGES])


def test_engines_compute_what_the_placement_says(tmp_path, folder, images, float_logits, simulation, target):
    """The rounding of float sums may tip a value to the next step; that is small against the effect of INT8 itself."""
    graph = placed(folder, tmp_path, target, FLOAT)
    ours = engine_logits(graph, tmp_path, target, images[:SIMULATED_IMAGES])
    largest = np.abs(simulation).max()
    effect = np.abs(simulation - float_logits[:SIMULATED_IMAGES])
    difference = np.abs(ours - simulation)
    assert effect.mean() > 1e-4 * largest
    assert difference.mean() <= 0.4 * effect.mean()
    assert difference.max() <= 0.01 * largest


def test_int8_gives_the_answers_of_float_on_the_evaluation_images(
    tmp_path, folder, parts, images, float_logits, target
):
    logits = engine_logits(placed(folder, tmp_path, target), tmp_path, target, images)
    labels = np.array([sample.label for sample in parts.evaluation])
    found = compare(logits, float_logits, labels)
    assert found.n == 640
    assert found.agreement >= 99.5
    # Answers of so good a model forgive much. Of the power of the logits, INT8 changes 1.4e-5 and 0.8e-5.
    centred, expected = (each - each.mean(axis=1, keepdims=True) for each in (logits, float_logits))
    assert np.square(centred - expected).sum() <= 2e-5 * np.square(expected).sum()
    assert found.reference_top1 == pytest.approx(100 * 629 / 640)
    assert abs(found.drop) <= 1.0


OBSERVE = """
import json, sys
from pathlib import Path
import numpy as np
from vitdeploy.data.folder import scan
from vitdeploy.data.decoding import batches
from vitdeploy.graph.io.files import get_metadata, load_graph
from vitdeploy.quantization.observers import observe

model = load_graph(Path(sys.argv[1]))
spec = get_metadata(model, sys.argv[1]).preprocess
few = list(batches(scan(Path(sys.argv[2]), "folders")[0][:16], spec, 4))
ranges = observe(model, (batch for _ in range(int(sys.argv[3])) for batch in few), spec)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
peak = int(status["VmHWM"].split()[0]) / 1024
bounds = {name: [found.low.tolist(), found.high.tolist()] for name, found in ranges.items()}
print(json.dumps({"peak": peak, "ranges": bounds}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_the_number_of_calibration_images(folder, digits):
    """16 images shown once and 16 times, each in a process of its own; the same ranges follow.

    VmHWM and not `ru_maxrss`: the latter starts at the size of the process that forked the child, here pytest's own.
    """
    few, many = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", OBSERVE, str(folder / "model.onnx"), str(digits / "calibration"), str(times)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                check=True,
                text=True,
                timeout=120,
            ).stdout
        )
        for times in (1, 16)
    )
    assert many["ranges"] == few["ranges"]
    assert many["peak"] - few["peak"] < 30  # MiB


# --- types in the graph, as GPUs take them ----------------------------------------------------------------------------

EVALUATED = 320


def emulated_logits(file, images):
    data = serialised(emulate(load_graph(file)))
    with OnnxRuntimeRunner(data, name="emulated", as_written=True) as runner:
        return runner.infer({"image": np.stack([pixels for pixels, _ in images])})["logits"]


@pytest.mark.parametrize(
    ("target", "precision", "least"),
    [
        ("onnxruntime-cuda", "fp16", 99.8),
        ("tensorrt", "int8", 99),
        ("tensorrt", "fp8", 98),
    ],
)
def test_the_digits_keep_their_answers(folder, images, parts, float_logits, tmp_path, target, precision, least):
    config = PlaceConfig(target, precision)
    found = place_typed(config, folder / "model.onnx", folder / "statistics.npz", parts.calibration[:8], tmp_path)
    file = tmp_path / "model.onnx"
    assert compare(emulated_logits(file, images[:EVALUATED]), float_logits[:EVALUATED], None).agreement >= least
    assert found["half"]["type"] == "fp16"
    assert found["half"]["macs"]["float32"] == 0
    metadata = get_metadata(load_graph(file), str(file))
    assert (metadata.target, metadata.precision) == (target, precision)
    assert json.loads((tmp_path / "placement.json").read_text())["half"] == found["half"]
    size, whole = (each.stat().st_size for each in (file, folder / "model.onnx"))
    assert size < {"fp16": 0.52, "int8": 0.33, "fp8": 0.3}[precision] * whole
    if precision in ("int8", "fp8"):
        model = load_graph(folder / "model.onnx")
        products = {linear.name: layer_macs(model, linear) for linear in find_linears(model)}
        assert {*found["int8"], *found["float"]} == set(products)
        assert sum(products[name] for name in found["int8"]) >= 0.9 * sum(products.values())
        assert found["float"]["head"] == "INT8 has no kernel for fewer than 16 channels"

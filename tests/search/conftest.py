"""A small model with a planted layer, its statistics, and a reference outputs of calibration images."""

import pytest

from tests.search.planted_layer import IMAGES, PLANTED, plant
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.quantization.observers import observe
from vitdeploy.quantization.ranges import separate_scores
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.frame import ReferenceOutputs
from vitdeploy.search.trials import opened
from vitdeploy.spec import PreprocessSpec

PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
BATCH = 8


@pytest.fixture(scope="session")
def calibration_pixels(digits):
    samples = split(digits, "none", calibration=IMAGES, evaluation=1, seed=0).calibration
    [found] = batches(samples, PREPROCESS, IMAGES)
    return found


@pytest.fixture(scope="session")
def planted_file(tmp_path_factory, seeded_export):
    """The small model, whose layer PLANTED cannot be computed in INT8."""
    path = tmp_path_factory.mktemp("planted") / "model.onnx"
    save_graph(plant(load_graph(seeded_export / "model.onnx"), PLANTED), path)
    return path


@pytest.fixture(scope="session")
def planted_statistics(planted_file, calibration_pixels):
    model = load_graph(planted_file)
    separate_scores(model)  # as a calibration does
    return observe(model, [calibration_pixels], PREPROCESS)


@pytest.fixture(scope="session")
def planted_yardstick(planted_file, calibration_pixels):
    with OnnxRuntimeRunner(planted_file, name="float", batch=BATCH) as runner:
        return ReferenceOutputs(runner, calibration_pixels, PREPROCESS, "classification", batch=BATCH)


@pytest.fixture(scope="module", params=["openvino-cpu", "onnxruntime-cpu"])
def target(request):
    return request.param


@pytest.fixture(scope="module")
def trials(planted_file, planted_statistics, planted_yardstick, target):
    """Trials of the planted model on one target."""
    with opened(load_graph(planted_file), planted_statistics, target, planted_yardstick) as found:
        yield found

"""A rotated residual stream in INT8: the same layers, kernels and operators as without, and the same answers nearly."""

import numpy as np
import pytest

from tests.targets import CPU_TARGETS
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.graph.analysis.rows import count_int8
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions, optimize
from vitdeploy.runtime.engine import make_runner
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.place import PlaceConfig, place_graph


@pytest.fixture(scope="module")
def samples(digits):
    return split(digits, "none", calibration=8, evaluation=1, seed=0).calibration


@pytest.fixture(scope="module")
def calibrated(small_export, tmp_path_factory, samples):
    """The folders of the graph and its statistics, without a rotation and with it."""
    folders = [tmp_path_factory.mktemp(f"rotated-{rotated}") for rotated in (False, True)]
    for rotated, folder in enumerate(folders):
        model = load_graph(small_export / "model.onnx")
        assert optimize(model, OptimizeOptions(rotate_residual=bool(rotated))).get("rotate_residual", 0) == 5 * rotated
        save_graph(model, folder / "model.onnx")
        calibrate(folder / "model.onnx", samples, folder)
    return folders


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_layers_and_kernels_are_those_without_a_rotation(calibrated, target, tmp_path, samples):
    [pixels] = batches(samples, PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,)), 8)
    layers, kernels, operators, answers = [], [], [], []
    for rotated, folder in enumerate(calibrated):
        out, engine_folder = tmp_path / f"placed-{rotated}", tmp_path / f"engine-{rotated}"
        out.mkdir()
        engine_folder.mkdir()
        facts = place_graph(PlaceConfig(target, "int8"), folder / "model.onnx", folder / "statistics.npz", out)
        layers.append((facts["int8"], facts["scores"]))
        file, model = out / "model.onnx", load_graph(out / "model.onnx")
        operators.append({node.op_type for node in model.graph})
        engine = compile_engine(file, engine_folder, target=target, precision="int8", batch=8, placed=count_int8(model))
        kernels.append(engine.kernels)
        with make_runner(engine_folder, engine) as runner:
            answers.append(runner.infer({"image": pixels})["logits"])
    assert layers[0] == layers[1]
    assert kernels[0] == kernels[1]
    assert operators[0] == operators[1]
    assert np.abs(answers[1] - answers[0]).max() <= 0.1 * np.abs(answers[0]).max()

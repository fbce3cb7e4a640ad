"""More rows than tokens before INT8: calibrated, folded, placed and answered as without them."""

import json

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


@pytest.fixture(scope="module", params=["keep", "merged", "separate"])
def calibrated(request, small_export, tmp_path_factory, samples):
    """rows -> the folder of the graph and its statistics."""
    folders = {}
    for rows in (None, 24):
        model = load_graph(small_export / "model.onnx")
        optimize(model, OptimizeOptions(qkv=request.param, align_rows=rows))
        folders[rows] = tmp_path_factory.mktemp(f"rows-{rows}")
        save_graph(model, folders[rows] / "model.onnx")
        calibrate(folders[rows] / "model.onnx", samples, folders[rows])
    return folders


def test_ranges_are_those_of_the_tokens(calibrated):
    """Tensors of the same names, between the same bounds."""
    plain, aligned = (json.loads((folder / "ranges.json").read_text()) for folder in calibrated.values())
    assert plain.keys() == aligned.keys()
    for name, bounds in plain.items():
        np.testing.assert_allclose(list(aligned[name].values()), list(bounds.values()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_layers_kernels_folds_and_answers_are_those_without_further_rows(calibrated, target, tmp_path, samples):
    """From the statistics of the graph without: those of the other weigh some tokens twice, and round otherwise."""
    [pixels] = batches(samples, PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,)), 8)
    placed, kernels, operators, answers = [], [], [], []
    for rows, folder in calibrated.items():
        out, engine_folder = tmp_path / f"placed-{rows}", tmp_path / f"engine-{rows}"
        out.mkdir()
        engine_folder.mkdir()
        statistics = calibrated[None] / "statistics.npz"
        placed.append(place_graph(PlaceConfig(target, "int8"), folder / "model.onnx", statistics, out))
        model = load_graph(out / "model.onnx")
        operators.append([node.op_type for node in model.graph if node.op_type in ("MultiHeadAttention", "Softmax")])
        count = count_int8(model)
        file = out / "model.onnx"
        engine = compile_engine(file, engine_folder, target=target, precision="int8", batch=8, placed=count)
        kernels.append(engine.kernels)
        with make_runner(engine_folder, engine) as runner:
            answers.append(runner.infer({"image": pixels})["logits"])
    assert kernels[0] == kernels[1]
    assert operators[0] == operators[1]
    for part in ("int8", "float", "scores", "hidden"):
        assert placed[0][part] == placed[1][part], part
    assert [fold["layers"] for fold in placed[0]["folds"]] == [fold["layers"] for fold in placed[1]["folds"]]
    assert np.abs(answers[1] - answers[0]).max() <= 0.01 * np.abs(answers[0]).max()

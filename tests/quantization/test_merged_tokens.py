"""Merged tokens before INT8: everything is calibrated, folded and placed as without them."""

import numpy as np
import pytest

from tests.targets import CPU_TARGETS
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions, optimize
from vitdeploy.quantization.place_onnxruntime import fuse_attention
from vitdeploy.quantization.ranges import separate_scores
from vitdeploy.runtime.engine import make_runner
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.place import PlaceConfig, place_graph

MERGING = {"plain": (), "merged": ((0, 12),)}


@pytest.fixture(scope="module")
def samples(digits):
    return split(digits, "none", calibration=8, evaluation=1, seed=0).calibration


@pytest.fixture(scope="module")
def pixels(samples):
    [images] = batches(samples, PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,)), 8)
    return images


@pytest.fixture(scope="module")
def calibrated(small_export, tmp_path_factory, samples):
    """kind -> the folder of the graph and its statistics."""
    folders = {}
    for kind, merging in MERGING.items():
        model = load_graph(small_export / "model.onnx")
        optimize(model, OptimizeOptions(token_merging=merging))
        folders[kind] = tmp_path_factory.mktemp(kind)
        save_graph(model, folders[kind] / "model.onnx")
        calibrate(folders[kind] / "model.onnx", samples, folders[kind])
    return folders


def answers(file, folder, target, pixels, precision="fp32", placed=0):
    folder.mkdir()
    engine = compile_engine(file, folder, target=target, precision=precision, batch=8, placed=placed)
    with make_runner(folder, engine) as runner:
        return runner.infer({"image": pixels})["logits"]


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_layers_and_folds_are_those_of_the_graph_without_merging(calibrated, target, tmp_path, pixels):
    placed = {}
    for kind, folder in calibrated.items():
        (tmp_path / kind).mkdir()
        config = PlaceConfig(target, "int8")
        placed[kind] = place_graph(config, folder / "model.onnx", folder / "statistics.npz", tmp_path / kind)
    for part in ("int8", "float", "scores"):
        assert placed["merged"][part] == placed["plain"][part], part
    folds = {kind: [fold["layers"] for fold in facts["folds"]] for kind, facts in placed.items()}
    assert folds["merged"] == folds["plain"]
    assert len(folds["plain"]) >= 4
    floats = answers(calibrated["merged"] / "model.onnx", tmp_path / "float", target, pixels)
    file, layers = tmp_path / "merged" / "model.onnx", len(placed["merged"]["int8"])
    int8 = answers(file, tmp_path / "int8", target, pixels, "int8", layers)
    assert np.abs(int8 - floats).max() <= 0.05 * np.abs(floats).max()


def test_onnxruntime_fuses_attention_to_merged_tokens_too(small_export, tmp_path, pixels):
    model = load_graph(small_export / "model.onnx")
    optimize(model, OptimizeOptions(class_token_only=False, token_merging=((0, 12),)))
    separate_scores(model)
    save_graph(model, tmp_path / "float.onnx")
    assert fuse_attention(model) == 2
    save_graph(model, tmp_path / "fused.onnx")
    one, other = (answers(tmp_path / f"{n}.onnx", tmp_path / n, "onnxruntime-cpu", pixels) for n in ("float", "fused"))
    assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()


def test_both_runtimes_merge_the_same_tokens(calibrated, tmp_path, pixels):
    file = calibrated["merged"] / "model.onnx"
    [one, other] = [answers(file, tmp_path / target, target, pixels) for target in CPU_TARGETS]
    assert np.abs(one - other).max() <= 1e-4 * np.abs(one).max()

"""Two models that have nothing to do with each other pass nothing: no gate, no golden check, no canary; of any task."""

import numpy as np
import pytest

import vitdeploy as vd
from tests.conftest import REVERSE
from tests.sabotage import golden_checks, require_unproven
from tests.workflows.dense_graphs import HEADS, OTHERS, graph, picture
from vitdeploy.spec import task_names
from vitdeploy.tasks.registry import TASKS as ADAPTERS
from vitdeploy.workflows.placement import compile_bundle

TARGETS = ("onnxruntime-cpu", "openvino-cpu")
# So many that full agreement would prove the guard's 95 %.
IMAGES = 76
# Of several graphs: in the tests of these tasks.
FLOWS = {"sequence", "zero-shot", "open-vocabulary-detection", "promptable-segmentation", "image-to-text"}
TASKS = [*HEADS, *OTHERS]


def test_no_task_is_left_out():
    assert {*TASKS, *FLOWS} == {*task_names()}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for seed in range(IMAGES):
        picture(folder / f"{seed:03}.png", seed)
    return folder


def compiled(file, target, out):
    out.mkdir()
    compile_bundle(file, target, None, None, out)
    return out


def verified(ours, theirs, images, least=None):
    return vd.verify(ours, theirs, vd.images(images, labels="none"), min_agreement=least, progress=False)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("task", TASKS)
def test_models_with_shuffled_weights_never_pass(task, target, images, tmp_path):
    graphs = [graph(task, tmp_path / f"{seed}.onnx", shuffled=seed) for seed in (1, 2)]
    ours, other = (compiled(file, target, tmp_path / file.stem) for file in graphs)
    found = verified(other, graphs[0], images, ADAPTERS[task].guard)
    assert found.status != "pass", found.lines()
    assert "the same function" not in found.found.verified.diagnosis
    assert verified(ours, graphs[0], images).found.verified.diagnosis.startswith("the same function")
    pictures = vd.images(images, labels="none")
    right, wrong = golden_checks({"model": graphs[0]}, graphs[0], [ours, other], pictures, tmp_path / "bundle")
    assert right.within_bounds and not wrong.ok


def test_shuffled_weights_of_an_encoder_decoder_never_pass(sequence_export, tmp_path):
    with np.load(REVERSE / "tokens.npz") as arrays:
        np.savez(tmp_path / "tokens.npz", **{name: array[:IMAGES] for name, array in arrays.items()})
    require_unproven(sequence_export, "encoder.onnx", tmp_path / "tokens.npz", tmp_path)

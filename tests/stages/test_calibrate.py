"""Calibration as a stage: it goes on after an interruption, and says what is wrong with the images."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from tests.graph.builder import Builder
from vitdeploy.data.folder import Sample, split
from vitdeploy.errors import DataError, GraphError
from vitdeploy.graph.io.files import GraphMetadata, load_graph, save_graph, set_metadata
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages import calibrate as stage
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.calibrate_shards import STATE, load_state, save_state
from vitdeploy.stages.step import read_json

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def samples(digits):
    return split(digits, "folders", calibration=24, evaluation=1, seed=0).calibration


@pytest.fixture
def graph(small_export):
    return small_export / "model.onnx"


@pytest.fixture
def often(monkeypatch):
    """The state is saved after each fifth image, not only after each 32nd."""
    monkeypatch.setattr(stage, "SAVED_BATCHES", 5)


def made(graph, samples, out, *arguments):
    """What calibrating writes, and the progress that it told."""
    out.mkdir()
    told = []
    calibrate(graph, samples, out, lambda text, done, total: told.append(done), *arguments)
    return {path.name: path.read_bytes() for path in out.iterdir()}, told


# --- interruption -----------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from vitdeploy.data.folder import split
from vitdeploy.stages import calibrate as stage

def progress(text, done, total):
    if done == 13:
        os.kill(os.getpid(), getattr(signal, sys.argv[5]))

stage.SAVED_BATCHES = 5
signal.signal(signal.SIGINT, signal.default_int_handler)
samples = split(Path(sys.argv[2]), "folders", calibration=24, evaluation=1, seed=0).calibration
stage.calibrate(Path(sys.argv[1]), samples, Path(sys.argv[3]), progress, Path(sys.argv[4]))
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_calibration_that_was_interrupted_goes_on_and_gives_the_same_bytes(
    tmp_path, graph, digits, samples, often, name
):
    scratch = tmp_path / "scratch"
    (tmp_path / "killed").mkdir()
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(graph), str(digits), str(tmp_path / "killed"), str(scratch), name],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == -getattr(signal, name), child.stderr
    assert list((tmp_path / "killed").iterdir()) == []
    whole, told = made(graph, samples, tmp_path / "whole")
    assert told[:2] == [0, 1]
    resumed, told = made(graph, samples, tmp_path / "resumed", scratch)
    assert told[:3] == [0, 10, 11]
    assert resumed == whole
    assert set(whole) == {"statistics.npz", "ranges.json", "calibrate.json"}


def with_an_unknown_compression(data):
    method = data.rindex(b"PK\x01\x02") + 10  # of a member, in the directory
    return data[:method] + b"\x63" + data[method + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-100], lambda data: b"no numbers" * 50, with_an_unknown_compression],
)
def test_a_damaged_state_is_not_used(tmp_path, graph, samples, often, damage):
    whole, _ = made(graph, samples, tmp_path / "whole", tmp_path / "scratch")
    state = tmp_path / "scratch" / STATE
    state.write_bytes(damage(state.read_bytes()))
    again, told = made(graph, samples, tmp_path / "again", tmp_path / "scratch")
    assert told[:2] == [0, 1]
    assert again == whole


def test_a_state_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    save_state(tmp_path, {"a": np.arange(3)})

    def fails(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fails)
    with pytest.raises(OSError, match="No space"):
        save_state(tmp_path, {"a": np.arange(9)})
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    assert load_state(tmp_path)["a"].tolist() == [0, 1, 2]


# --- images -----------------------------------------------------------------------------------------------------------


def warnings(graph, samples, out):
    out.mkdir()
    facts = calibrate(graph, samples, out)
    assert read_json(out / "calibrate.json")["warnings"] == facts["warnings"]
    return facts["warnings"]


def test_images_enough_and_of_the_right_kind_are_not_warned_of(tmp_path, graph, samples):
    assert warnings(graph, samples, tmp_path / "out") == []


def test_too_few_images(tmp_path, graph, samples):
    assert warnings(graph, samples[:2], tmp_path / "out") == [
        "Only 2 calibration images: ranges will be too narrow for new data, and weights are rounded to nearest where "
        "GPTQ has too few rows. Use about 100 images."
    ]


def test_one_image_many_times_is_one(tmp_path, graph, samples):
    [warning] = warnings(graph, samples[:1] * 24, tmp_path / "out")
    assert warning.startswith("Only 1 calibration image, 24 with repetitions: ranges will be too narrow for new data")


def saved(folder, name, pixels):
    Image.fromarray(np.asarray(pixels, np.uint8)).save(folder / name)
    return Sample(folder / name, None)


def test_an_image_that_does_not_belong_to_the_others_is_named(tmp_path):
    """Two linears without any normalisation: their ranges are those of the pixels."""
    b = Builder()
    logits = b.add("MatMul", b.add("Flatten", b.input("image", ["batch", 1, 8, 8])), np.eye(64))
    model = ir.from_proto(b.model(b.add("MatMul", b.add("Relu", logits), np.ones((64, 2))), rank=2))
    preprocess = PreprocessSpec(8, (8, 8), "bicubic", (0.5,), (0.5,))
    set_metadata(model, GraphMetadata("linear", "classification", preprocess))
    save_graph(model, tmp_path / "model.onnx")
    generator = np.random.default_rng(0)
    images = [saved(tmp_path, f"{i}.png", 90 + 70 * generator.random((8, 8))) for i in range(9)]
    assert warnings(tmp_path / "model.onnx", images, tmp_path / "even") == []
    images.append(saved(tmp_path, "odd.png", 255 * generator.integers(0, 2, (8, 8))))
    [warning] = warnings(tmp_path / "model.onnx", images, tmp_path / "odd")
    assert warning.startswith(f"{tmp_path.name}/odd.png alone widens many ranges (median 3.9 times): check ")


def test_images_of_one_colour_leave_nothing_behind(tmp_path, graph):
    images = [saved(tmp_path, f"{i}.png", np.full((32, 32), i)) for i in range(9)]
    with pytest.raises(DataError, match="every calibration image has a single colour"):
        warnings(graph, images, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def fixed(tmp_path, graph):
    """The graph with a batch of 5."""
    model = load_graph(graph)
    for value in (*model.graph.inputs, *model.graph.outputs, *(v for node in model.graph for v in node.outputs)):
        if value.shape is not None and not isinstance(value.shape[0], int):
            value.shape = type(value.shape)([5, *list(value.shape)[1:]])
    save_graph(model, tmp_path / "fixed.onnx")
    return tmp_path / "fixed.onnx"


def test_a_fixed_batch_that_leaves_a_rest(tmp_path, fixed, samples):
    assert warnings(fixed, samples, tmp_path / "out") == [
        "4 of 24 calibration images are left out: the graph's batch is 5."
    ]
    assert read_json(tmp_path / "out" / "calibrate.json")["images"] == 20


def test_a_fixed_batch_of_more_images_than_there_are(tmp_path, fixed, samples):
    with pytest.raises(GraphError, match="the graph has a fixed batch size of 5") as caught:
        calibrate(fixed, samples[:4], tmp_path)
    assert (caught.value.found, caught.value.expected) == ("4 calibration images", "at least 5")


def test_the_memory_is_told_before_the_first_image(tmp_path, graph, samples):
    told = []
    facts = calibrate(graph, samples, tmp_path, lambda *each: told.append(each))
    assert set(facts["memory"]) == {"graph", "activations", "covariances"}
    assert told[0] == (f"calibrate (about {sum(facts['memory'].values()) / 1e6:.0f} MB of memory)", 0, 24)

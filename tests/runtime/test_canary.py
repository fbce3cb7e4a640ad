"""An engine that gives other answers than its golden ones never answers: not an app, not a server, not a bench."""

import dataclasses
import json

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from tests.command_line import command_line
from tests.golden_bundle import golden_of, golden_small_bundle, with_one_weight_changed
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import write_bundle
from vitdeploy.errors import AnswersError
from vitdeploy.runtime import golden, load
from vitdeploy.serve.engines import load_engines
from vitdeploy.workflows.placement import compile_bundle

TARGET = "onnxruntime-cpu"
IMAGE = np.zeros((32, 32, 1), np.uint8)


@pytest.fixture(scope="module")
def bundle(small_bundle, tmp_path_factory):
    return golden_small_bundle(small_bundle, tmp_path_factory)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where proofs are kept; an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitdeploy" / golden.PROVEN


@pytest.fixture
def checks(monkeypatch, cache):
    """The engines that golden inputs were run on, in order."""
    seen, check_golden = [], golden.check_golden

    def counted(folder, manifest, engine, runner, files=None):
        seen.append(engine.artifact)
        return check_golden(folder, manifest, engine, runner, files)

    monkeypatch.setattr(golden, "check_golden", counted)
    return seen


@pytest.fixture
def planted(bundle, tmp_path):
    """The bundle with an engine that has one weight changed, and is listed as it is."""
    return with_one_weight_changed(bundle, tmp_path / "planted")


def test_an_engine_is_asked_once_on_a_machine(bundle, checks, cache, monkeypatch):
    with load(bundle) as first:
        first.predict(IMAGE)
    [proof] = cache.iterdir()
    assert json.loads(proof.read_text())["engine"] == f"{TARGET}-fp32"
    load(bundle).close()
    assert len(checks) == 1
    load(bundle, batch=3).close()
    load(bundle, threads=2).close()  # one is what OMP_NUM_THREADS says here
    assert len(checks) == 3
    monkeypatch.setattr(onnxruntime, "__version__", "0.0")
    load(bundle).close()
    assert len(checks) == 4


def test_what_others_could_write_proves_nothing(bundle, checks, cache):
    load(bundle).close()
    cache.chmod(0o777)
    load(bundle).close()
    assert len(checks) == 2


def test_without_a_folder_to_write_to_it_is_asked_each_time(bundle, checks, tmp_path):
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        load(bundle).close()
    assert len(checks) == 2


def test_a_bundle_without_golden_answers_is_loaded(small_bundle, checks):
    load(small_bundle).close()
    assert checks == []


def test_a_wrong_engine_never_answers(planted, cache, tmp_path, shared_store):
    for allow_failed in (False, True):
        with pytest.raises(AnswersError, match="onnxruntime-cpu-fp32 gives wrong answers here") as refused:
            load(planted, allow_failed=allow_failed)
    assert f"onnxruntime {onnxruntime.__version__} on " in refused.value.found
    assert not cache.exists()
    with pytest.raises(AnswersError):
        load_engines(planted)
    Image.fromarray(IMAGE[..., 0]).save(tmp_path / "image.png")
    with command_line(tmp_path, shared_store, short_bench=True) as run:
        for command in (("predict", planted, "image.png"), ("bench", planted, "--duration", "0.1")):
            done = run(*command)
            assert (done.returncode, done.stdout, "VD4204" in done.stderr) == (4, "", True), done.stderr


def test_the_next_engine_that_is_right_is_taken(planted, small_export, cache, tmp_path):
    """The wrong one is the first and recommended; the answers are those of the other."""
    other, home = tmp_path / "openvino", tmp_path / "both"
    for each in (other, home):
        each.mkdir()
    compile_bundle(small_export / "model.onnx", "openvino-cpu", None, None, other)
    wrong, right = read_bundle(planted), read_bundle(other)
    with load(other) as predictor:
        expected = predictor.predict(IMAGE)
    inputs, outputs = (dict(np.load(planted / "golden" / f"{name}.npz")) for name in ("inputs", "outputs"))
    golden = golden_of(inputs, outputs, f"{TARGET}-fp32", 1e-3)
    own = {f"{each}-fp32": golden.engines[f"{TARGET}-fp32"] for each in (TARGET, "openvino-cpu")}
    write_bundle(
        home, name="small", task=wrong.task, graphs={"model": (planted / "model.onnx", wrong.graphs["model"])},
        preprocess=wrong.preprocess, engines=[(wrong.engines[0], planted), (right.engines[0], other)],
        golden=dataclasses.replace(golden, engines=own),
    )  # fmt: skip
    with load(home) as predictor:
        assert predictor.target == "openvino-cpu-fp32"
        assert f"{TARGET}-fp32: {TARGET}-fp32 gives wrong answers here" in predictor.why
        assert predictor.predict(IMAGE).label == expected.label

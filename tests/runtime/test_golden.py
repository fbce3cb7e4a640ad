"""The self-check: an engine on the golden inputs of its bundle."""

import dataclasses
import io
import json
import shutil
import sys
import zipfile

import numpy as np
import pytest

from tests.command_line import command_line
from tests.golden_bundle import golden_small_bundle
from vitdeploy.bundle.read import file_sha256, read_bundle
from vitdeploy.errors import DigestError, InputError, ManifestError, TargetError
from vitdeploy.runtime import load
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import check_golden, comparable
from vitdeploy.runtime.tasks.detection import PostprocessSpec

TARGET = "onnxruntime-cpu"


@pytest.fixture(scope="module")
def bundle(small_bundle, tmp_path_factory):
    """The small model with five golden inputs, which its engine answers exactly."""
    return golden_small_bundle(small_bundle, tmp_path_factory)


@pytest.fixture
def spoilt(bundle, tmp_path):
    """spoilt(file, arrays): the bundle with other arrays in one of its files, which is listed as it is."""

    def spoil(file, content):
        folder = shutil.copytree(bundle, tmp_path / "spoilt")
        path = folder / "golden" / file
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.savez(path, **content)
        manifest = json.loads((folder / "manifest.json").read_text())
        for entry in manifest["files"]:
            if entry["path"] == f"golden/{file}":
                entry.update(bytes=path.stat().st_size, sha256=file_sha256(path))
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return spoil


def check(folder):
    manifest = read_bundle(folder)
    (engine,) = manifest.engines
    with make_runner(folder, engine) as runner:
        return check_golden(folder, manifest, engine, runner)


def test_an_engine_that_answers_as_the_original_passes(bundle):
    found = check(bundle)
    assert found.inputs == 5 and found.ok and found.difference < 1e-6 and found.tolerance == 1e-3
    assert found.same == found.least_same == 5


ENGINE = f"{TARGET}-fp32.npz"


def test_an_engine_that_answers_otherwise_than_when_the_bundle_was_made_does_not(spoilt, bundle):
    logits = np.load(bundle / "golden" / ENGINE)["logits"]
    found = check(spoilt(ENGINE, {"logits": logits + 0.01 * np.abs(logits).max()}))
    assert found.difference == pytest.approx(0.01, rel=0.05) and not found.ok
    assert found.same == 5


def test_an_engine_that_was_wrong_when_the_bundle_was_made_does_not_pass_either(spoilt, bundle):
    """Its outputs are the same as then, so that no tolerance of its own could tell."""
    logits = np.load(bundle / "golden" / "outputs.npz")["logits"]
    found = check(spoilt("outputs.npz", {"logits": np.roll(logits, 1, axis=1)}))
    assert found.difference < 1e-6 and (found.same, found.least_same) == (0, 5) and not found.ok


def test_an_engine_without_answers_of_its_own_is_compared_with_the_original(bundle, tmp_path):
    folder = shutil.copytree(bundle, tmp_path / "earlier")
    document = json.loads((folder / "manifest.json").read_text())
    document["golden"] = {**document["golden"], "tolerance": {TARGET: 1e-4}}
    del document["golden"]["engines"]
    (folder / "manifest.json").write_text(json.dumps(document))
    found = check(folder)
    assert found.ok and found.tolerance == 1e-4 and (found.same, found.least_same) == (5, 0)


def test_a_number_that_is_none_does_not_pass(spoilt, bundle):
    logits = np.load(bundle / "golden" / ENGINE)["logits"]
    logits[0, 0] = np.nan
    assert not check(spoilt(ENGINE, {"logits": logits})).ok


def test_what_is_no_golden_set_is_refused(spoilt, small_bundle, bundle, tmp_path):
    with pytest.raises(InputError, match="no golden answers for onnxruntime-cpu-fp32"):
        check(small_bundle)
    logits = np.load(bundle / "golden" / "outputs.npz")["logits"]
    with pytest.raises(ManifestError, match="different outputs"):
        check(spoilt("outputs.npz", {"features": logits}))
    shutil.rmtree(tmp_path / "spoilt")
    with pytest.raises(ManifestError, match="different shapes"):
        check(spoilt("outputs.npz", {"logits": logits[:, :3]}))


@pytest.mark.parametrize("shape", [(1, 1000, 1000), (2, 32, 32, 4), (0, 32, 32, 1), (4,)])
def test_inputs_that_are_no_pictures_are_refused(spoilt, shape):
    with pytest.raises(ManifestError, match="golden inputs are not images"):
        check(spoilt("inputs.npz", {"pixels": np.zeros(shape, np.uint8)}))


@pytest.mark.parametrize("count", [65, 250_000])
def test_more_samples_than_a_bundle_has_are_refused_before_one_is_run(spoilt, count):
    packed = io.BytesIO()
    np.savez_compressed(packed, pixels=np.zeros((count, 2, 2, 1), np.uint8))
    with pytest.raises(ManifestError, match="too many golden samples") as caught:
        check(spoilt("inputs.npz", packed.getvalue()))
    assert (caught.value.found, caught.value.expected[:10]) == (f"{count:,}", "at most 64")


CLAIMS = {"features": None, "detection": {"scores": "softmax"}, "panoptic": {"scores": "sigmoid"}}


@pytest.mark.parametrize("task", CLAIMS)
def test_outputs_that_are_not_those_of_the_task_are_named(bundle, tmp_path, task):
    folder = shutil.copytree(bundle, tmp_path / "claims")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.update(task=task, postprocess=CLAIMS[task], labels=None)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match=f"do not fit the task {task}") as caught, load(folder) as predictor:
        predictor.predict(np.zeros((32, 32, 3), np.uint8))
    assert caught.value.found.startswith("logits [")


def test_files_that_are_no_arrays_are_refused(spoilt, tmp_path):
    with pytest.raises(ManifestError, match="cannot be read"):
        check(spoilt("inputs.npz", b"no archive"))
    shutil.rmtree(tmp_path / "spoilt")
    with pytest.raises(ManifestError, match="cannot be read"):  # a pickle, which is code
        check(spoilt("inputs.npz", {"pixels": np.array([{}], dtype=object)}))
    shutil.rmtree(tmp_path / "spoilt")
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("pixels.npy", "w") as entry:
        for _ in range(257):
            entry.write(bytes(1 << 20))
    with pytest.raises(ManifestError, match="too large"):
        check(spoilt("inputs.npz", bomb.read_bytes()))


def test_files_that_were_changed_are_refused(bundle, tmp_path):
    folder = shutil.copytree(bundle, tmp_path / "changed")
    (folder / "golden" / "outputs.npz").write_bytes(b"other")
    with pytest.raises(DigestError):
        check(folder)


def test_inspect_says_what_came_of_each_engine(bundle, spoilt, small_bundle, tmp_path, shared_store):
    with command_line(tmp_path, shared_store) as run:
        done = run("inspect", bundle, "--check")
        said = "golden onnxruntime-cpu-fp32: ok, 5 of 5 "
        assert done.returncode == 0 and said in done.stdout
        wrong = run("inspect", spoilt(ENGINE, {"logits": np.zeros((5, 10), np.float32)}), "--check", "--json")
        assert wrong.returncode == 5 and not json.loads(wrong.stdout)["check"][0]["ok"]
        assert "does not reproduce the golden answers" in wrong.stderr and "onnxruntime-cpu-fp32" in wrong.stderr
        assert run("inspect", small_bundle, "--check").returncode == 2
        for options in (("--check", "--target", "tensorrt"), ("--trust", "key.pem")):
            assert run("inspect", bundle, *options).returncode == 2
        assert run("inspect", small_bundle / "model.onnx", "--check").returncode == 2


def test_an_engine_that_does_not_run_here_is_told(bundle, tmp_path, shared_store, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with command_line(tmp_path, shared_store) as run:
        done = run("inspect", bundle, "--check")
    assert done.returncode == 4 and "no engine of" in done.stderr and "onnxruntime" in done.stderr


def test_of_a_detector_that_ranks_its_objects_only_scores_are_compared(bundle):
    """Two objects of nearly equal scores may change places, with their labels and boxes."""
    manifest = read_bundle(bundle)
    outputs = ("labels", "boxes", "scores")
    assert comparable(manifest, outputs) == list(outputs)
    ranked = dataclasses.replace(manifest, postprocess=PostprocessSpec(scores="given"))
    assert comparable(ranked, outputs) == ["scores"]
    queries = dataclasses.replace(manifest, postprocess=PostprocessSpec(scores="sigmoid"))
    assert comparable(queries, ("logits", "boxes")) == ["logits", "boxes"]


@pytest.mark.parametrize(
    "numbers",
    [{"batch": 2**63}, {"batch": 0}, {"batch": 1.5}, {"threads": 2**40}, {"threads": -1}, {"streams": 2**40}],
)
def test_numbers_that_no_engine_takes_are_refused(bundle, numbers):
    with pytest.raises(TargetError, match=f"cannot run with {next(iter(numbers))}"):
        load(bundle, **numbers)

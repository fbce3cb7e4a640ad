"""Slim packs: what a device needs to run one target, with the same answers, and refusals where the rest is needed."""

import shutil

import numpy as np
import pytest

from tests.bundle.test_sign import write_keys
from tests.command_line import command_line
from tests.golden_bundle import golden_of
from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, read_bundle
from vitdeploy.bundle.sign import SIGNATURE_FILE, sign_bundle
from vitdeploy.bundle.write import slim_bundle, write_bundle
from vitdeploy.errors import DigestError, MissingFileError, TargetError
from vitdeploy.runtime import load
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.workflows.explain import explain
from vitdeploy.workflows.placement import compile_bundle

TARGETS = ("openvino-cpu", "onnxruntime-cpu")


@pytest.fixture(scope="module")
def bundle(small_export, tmp_path_factory):
    """The small model for both targets, with golden answers of each engine and a report."""
    out, engines, answers = tmp_path_factory.mktemp("whole"), [], {}
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 1), np.uint8)
    for target in TARGETS:
        home = tmp_path_factory.mktemp(target)
        manifest = compile_bundle(small_export / "model.onnx", target, None, None, home)
        [engine] = manifest.engines
        with make_runner(home, engine) as runner:
            [tensor] = runner.inputs
            feeds = [{tensor.name: to_input(each[None], manifest.preprocess, tensor)} for each in pixels]
            answers[engine.artifact] = np.concatenate([runner.infer(feed)["logits"] for feed in feeds])
        engines.append((engine, home))
    inputs, outputs = {"pixels": pixels}, {"logits": answers["onnxruntime-cpu-fp32"]}
    golden = golden_of(inputs, outputs, "onnxruntime-cpu-fp32", 1e-3)
    golden.engines["openvino-cpu-fp32"] = golden.engines["onnxruntime-cpu-fp32"]
    write_bundle(
        out,
        name="small",
        task=manifest.task,
        graphs={"model": (small_export / "model.onnx", manifest.graphs["model"])},
        preprocess=manifest.preprocess,
        engines=engines,
        labels=[str(i) for i in range(10)],
        golden=golden,
        documents={"report.html": "<p>a report</p>" * 1000},
        gates={"openvino-cpu-fp32": "pass", "onnxruntime-cpu-fp32": "pass"},
        recommended="openvino-cpu-fp32",
        grade="recommended",
        rivals=("onnxruntime-cpu-fp32",),
    )
    return out


@pytest.fixture
def vitdeploy(tmp_path):
    with command_line(tmp_path, tmp_path / "store") as run:
        yield run


@pytest.mark.parametrize("target", TARGETS)
def test_a_slim_bundle_answers_as_the_whole_one(bundle, tmp_path, target):
    manifest, left_out = slim_bundle(bundle, target, tmp_path)
    whole, listed = read_bundle(bundle), {entry.path for entry in manifest.files}
    assert listed.isdisjoint(left_out) and listed | set(left_out) == {entry.path for entry in whole.files}
    assert {"model.onnx", "report.html"} <= set(left_out)
    assert [engine.target for engine in manifest.engines] == [target] and not manifest.graphs
    assert manifest.provenance["slim_of"] == file_sha256(bundle / MANIFEST_FILE)
    image = np.random.default_rng(1).integers(0, 256, (32, 32), np.uint8)
    with load(tmp_path, target) as slim, load(bundle, target) as own:
        assert slim.predict(image) == own.predict(image)
    assert sum(entry.bytes for entry in manifest.files) < 0.6 * sum(entry.bytes for entry in whole.files)


def test_the_recommendation_goes_with_its_engine(bundle, tmp_path):
    for target in TARGETS:
        (tmp_path / target).mkdir()
    first, other = (slim_bundle(bundle, target, tmp_path / target)[0] for target in TARGETS)
    assert (first.recommended, first.grade, first.rivals) == ("openvino-cpu-fp32", "recommended", ())
    assert (other.recommended, other.grade, other.rivals) == (None, None, ())
    assert first.gates == {"openvino-cpu-fp32": "pass"} and set(first.golden.engines) == {"openvino-cpu-fp32"}


def test_engines_that_are_rebuilt_keep_their_placement(bundle, tmp_path):
    [engine] = slim_bundle(bundle, "openvino-cpu", tmp_path, rebuilt=True)[0].engines
    assert (tmp_path / engine.graph).is_file()


def test_a_bundle_without_the_target_is_refused(bundle, tmp_path):
    with pytest.raises(TargetError) as caught:
        slim_bundle(bundle, "tensorrt", tmp_path)
    assert caught.value.found == "onnxruntime-cpu, openvino-cpu"


def test_a_file_that_was_changed_is_not_packed(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    (copy / "labels.txt").write_text("other\n" * 10)
    (tmp_path / "out").mkdir()
    with pytest.raises(DigestError):
        slim_bundle(copy, "openvino-cpu", tmp_path / "out")


def test_what_needs_a_graph_is_refused(bundle, tmp_path):
    slim_bundle(bundle, "openvino-cpu", tmp_path)
    with pytest.raises(MissingFileError) as caught:
        explain(tmp_path, tmp_path / "x.png", tmp_path / "out.png")
    assert "slim" in caught.value.message and caught.value.fix


def test_the_command_packs_and_says_what_it_left_out(bundle, tmp_path, vitdeploy):
    packed = vitdeploy("bundle", "pack", str(bundle), "--slim", "--target", "openvino-cpu", "-o", "x.vitb", "--json")
    assert packed.returncode == 0 and "model.onnx" in packed.document["left_out"]
    whole = vitdeploy("bundle", "pack", str(bundle), "-o", "whole.vitb", "--json").document
    assert packed.document["bytes"] < 0.6 * whole["bytes"]
    assert vitdeploy("bundle", "unpack", "x.vitb", "-o", "back").returncode == 0
    for command in (("inspect", "back", "--check"), ("bundle", "verify", "x.vitb")):
        assert vitdeploy(*command).returncode == 0
    again = vitdeploy("bundle", "pack", str(bundle), "--slim", "--target", "openvino-cpu", "-o", "y.vitb", "--json")
    assert again.document["sha256"] == packed.document["sha256"]


@pytest.mark.parametrize("arguments", [["--slim"], ["--target", "openvino-cpu"], ["--key", "key.pem"]])
def test_options_that_do_not_go_together_are_refused(bundle, vitdeploy, arguments):
    assert vitdeploy("bundle", "pack", str(bundle), "-o", "x.vitb", *arguments).returncode == 2


def test_a_signed_bundle_is_signed_again(bundle, tmp_path, vitdeploy):
    pytest.importorskip("model_signing", reason="pip install 'vitdeploy[sign]'")
    private, public = write_keys(tmp_path, "ours")
    signed = shutil.copytree(bundle, tmp_path / "signed")
    sign_bundle(signed, private)
    slim = ("bundle", "pack", "signed", "--slim", "--target", "openvino-cpu", "-o", "x.vitb")
    refused = vitdeploy(*slim)
    assert refused.returncode == 3 and "VD3105" in refused.stderr
    assert vitdeploy(*slim, "--key", str(private)).returncode == 0
    assert vitdeploy("bundle", "unpack", "x.vitb", "-o", "back", "--trust", str(public)).returncode == 0
    assert (tmp_path / "back" / SIGNATURE_FILE).is_file()

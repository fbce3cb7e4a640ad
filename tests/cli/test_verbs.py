"""Each command alone, with good input."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file, save_file

import vitdeploy
from vitdeploy import __version__
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.cli.main import main
from vitdeploy.pipeline.subjects import compile_bundle
from vitdeploy.runtime import load

MODEL = "vit_w32d2h2_patch8_32"
TARGETS = ("openvino-cpu", "onnxruntime-cpu")


def document(done):
    """What a command printed on standard output, which must be one JSON document and nothing else."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, small_export):
    """A bundle of the small model in FP32 for each target, by target. Tests copy what they change."""
    folders = {target: tmp_path_factory.mktemp(target) for target in TARGETS}
    for target, folder in folders.items():
        compile_bundle(small_export / "model.onnx", target, None, None, folder)
    return folders


@pytest.fixture(scope="module", autouse=True)
def measuring(compiled, tmp_path_factory):
    """`bench` of both bundles, which takes its time while the other tests run."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = [compiled["onnxruntime-cpu"], compiled["openvino-cpu"], "--batch", "1,2", "--duration", "0.5", "--json"]
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "vitdeploy.cli.main", "bench", *arguments, "--warmup", "0.1"],
            env={**os.environ, "PYTHONPATH": str(Path(vitdeploy.__file__).parents[1])},
            stdout=out,
            stderr=err,
        )
    yield process, folder
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The command line in this process, which spares loading PyTorch again where that is not the point."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def here(*arguments):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["vitdeploy", *map(str, arguments)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
            main()
        return SimpleNamespace(returncode=left.value.code, stdout=out.getvalue(), stderr=err.getvalue())

    yield here
    signal.signal(signal.SIGTERM, before)


# --- export, quantize, compile ----------------------------------------------------------------------------------------


def test_export_writes_a_checked_graph_and_says_how_near_it_is(cli, small_checkpoint, tmp_path):
    found = document(
        cli("export", MODEL, "--checkpoint", small_checkpoint, "-o", "out", "--opset", 18, "--batch", 2, "--json")
    )
    model = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [opset.version for opset in model.opset_import if opset.domain == ""] == [18]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    assert (found["opset"], found["model"]["classes"], found["path"]) == (18, 10, "out/model.onnx")
    assert found["largest_difference"] <= found["tolerance"]


def test_quantize_then_compile_gives_an_int8_engine(cli, small_export, digits, tmp_path):
    target = "openvino-cpu"
    command = ("quantize", small_export, "--data", digits, "--target", target, "-o", "int8", "--num-samples", 32)
    placed = document(cli(*command, "--ignore", "head", "--json"))
    assert placed["calibration_images"] == 32
    assert placed["path"] == "int8/model.onnx"
    assert [name for name in placed["float"] if "head" in name]
    assert len(placed["int8"]) >= 8
    assert sorted(path.name for path in (tmp_path / "int8").iterdir()) == [
        "calibration.json",
        "model.onnx",
        "placement.json",
    ]

    found = document(cli("compile", "int8", "--target", target, "-o", "engine", "--json"))
    assert (found["artifact"], found["precision"], found["batch"]) == (f"{target}-int8", "int8", 1)
    manifest = read_bundle(tmp_path / "engine")
    verify_files(tmp_path / "engine", manifest)
    assert manifest.engines[0].kernels["int8"] >= len(placed["int8"])


def test_compile_takes_the_batch_that_is_asked_for(here, small_export, tmp_path, digits):
    done = here("compile", small_export / "model.onnx", "--target", "openvino-cpu", "--batch", 4, "-o", "engine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("openvino-cpu-fp32 on ")
    assert "batch 4: linears and convolutions " in done.stdout
    images = sorted(digits.glob("evaluation/*/*.png"))[::100]
    with load(tmp_path / "engine") as predictor:
        assert predictor.runner.inputs[0].shape[0] == 4
        assert len(predictor.predict_batch(images)) == 7


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_tells_how_many_answers_are_kept(cli, compiled, small_checkpoint, digits):
    command = ("verify", compiled["openvino-cpu"], "--against", MODEL, "--checkpoint", small_checkpoint)
    found = document(cli(*command, "--data", digits, "--num-samples", 100, "--max-drop", 50, "--json"))
    assert {"n", "top1", "reference_top1", "drop", "drop_ci95", "agreement", "agreement_ci95", "kl"} <= set(found)
    assert (found["n"], found["agreement"], found["drop"]) == (100, 100.0, 0.0)
    assert found["top1"] == found["reference_top1"]
    assert found["agreement_ci95"][0] > 95
    assert found["drop_ci95"][0] < 0 < found["drop_ci95"][1]
    assert found["kl"] < 1e-6
    assert found["diagnosis"].startswith("the same function: largest difference ")
    assert found["gate"]["status"] == "pass"


def test_a_difference_of_preprocessing_is_told_as_such(here, compiled, digits, tmp_path):
    enlarged = shutil.copytree(compiled["onnxruntime-cpu"], tmp_path / "enlarged")
    manifest = json.loads((enlarged / "manifest.json").read_text(encoding="utf-8"))
    manifest["preprocess"]["resize"] = 64
    (enlarged / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    found = document(here("verify", enlarged, "--against", compiled["onnxruntime-cpu"], "--data", digits, "--json"))
    assert found["diagnosis"].startswith("preprocessing differs: resize 64 instead of 32; on the same tensor 100.0 %")
    assert found["same_tensor"]["max_difference"] < 1e-5 < found["max_difference"]


def test_a_difference_of_the_graph_is_told_as_such_and_fails_the_gate(
    here, compiled, small_checkpoint, digits, tmp_path
):
    state = load_file(small_checkpoint)
    negated = {name: -tensor if name.startswith("head.") else tensor for name, tensor in state.items()}
    save_file(negated, tmp_path / "negated.safetensors")
    command = ("verify", compiled["onnxruntime-cpu"], "--against", MODEL, "--checkpoint", "negated.safetensors")
    done = here(*command, "--data", digits, "--min-agreement", 50)
    assert done.returncode == 5
    assert "diagnosis   the graph differs: largest difference " in done.stdout
    assert "gate        fail; agreement 0.00 %" in done.stdout
    assert "VD5001  the gate is not met" in done.stderr


def test_without_labels_answers_are_compared_and_a_gate_may_stay_unproven(cli, compiled, digits, tmp_path):
    (tmp_path / "flat").mkdir()
    for number, path in enumerate(sorted(digits.glob("evaluation/*/*.png"))[::20]):
        shutil.copy(path, tmp_path / "flat" / f"{number}.png")
    command = ("verify", compiled["openvino-cpu"], "--against", compiled["onnxruntime-cpu"], "--data", "flat")
    done = cli(*command, "--min-agreement", 99, "--json")
    found = json.loads(done.stdout)
    assert (found["n"], found["top1"], found["drop"], found["agreement"]) == (32, None, None, 100.0)
    assert (done.returncode, found["gate"]["status"]) == (5, "undecided")
    assert "VD5001  the gate is not provably met" in done.stderr
    assert "fix:    evaluate on more images, or raise the budget" in done.stderr


# --- predict, inspect, doctor -----------------------------------------------------------------------------------------


def test_predict_prints_a_line_for_each_image(cli, compiled, digits):
    images = sorted(digits.glob("evaluation/*/*.png"))[:2]
    done = cli("predict", compiled["onnxruntime-cpu"], *images, "--top", 2, "-q")
    assert done.returncode == 0, done.stderr
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == [str(image) for image in images]
    assert done.stdout.count("%") == 4
    assert done.stderr == ""


def test_predict_gives_the_answers_of_the_library(cli, compiled, digits):
    image = next(digits.glob("evaluation/5/*.png"))
    found = document(cli("predict", compiled["openvino-cpu"], image, "--top", 10, "--json"))
    with load(compiled["openvino-cpu"]) as predictor:
        expected = predictor.predict(image, top=10)
    assert found["engine"] == "openvino-cpu-fp32"
    [answer] = found["predictions"]
    assert answer["label"] == expected.label
    scores = [entry["score"] for entry in answer["top"]]
    np.testing.assert_allclose(scores, [entry.score for entry in expected.top], rtol=1e-4)
    assert sum(scores) == pytest.approx(1, abs=1e-4)


def test_inspect_shows_a_graph(here, small_export):
    found = document(here("inspect", small_export, "--json"))
    assert found["opsets"]["ai.onnx"] == 20
    assert found["graph"]["inputs"] == [{"name": "image", "dtype": "uint8", "shape": ["batch", 32, 32, 1]}]
    assert len(found["float_layers"]) == 10  # the patch embedding, four linears a block, the head
    assert found["metadata"]["preprocess"]["resize"] == 32


def test_inspect_shows_a_bundle(cli, compiled):
    found = document(cli("inspect", compiled["openvino-cpu"], "--json"))
    assert [engine["target"] for engine in found["engines"]] == ["openvino-cpu"]
    assert found["preprocess"]["crop"] == [32, 32]


def test_doctor_says_what_works_here(cli):
    found = document(cli("doctor", "--json"))
    assert {name for name, target in found["targets"].items() if target["works"]} == set(TARGETS)
    assert found["export"] is True
    assert found["host"]["python"]


def test_help_names_every_command_without_loading_any(cli):
    done = cli("--help")
    assert done.returncode == 0
    for name in ("run", "export", "quantize", "compile", "verify", "bench", "predict", "inspect", "doctor"):
        assert f"  {name} " in done.stdout
    assert cli("--version").stdout.strip().endswith(__version__)


# --- bench ------------------------------------------------------------------------------------------------------------


def test_bench_measures_and_compares(measuring):
    process, folder = measuring
    assert process.wait(timeout=120) == 0, (folder / "stderr").read_text(encoding="utf-8")
    found = json.loads((folder / "stdout").read_text(encoding="utf-8"))
    engines = [(row["target"], row["precision"]) for row in found["results"]]
    assert engines == [("onnxruntime-cpu", "fp32"), ("openvino-cpu", "fp32")]
    for row in found["results"]:
        assert {"artifact", "target", "precision", "provider", "latency_ms", "throughput", "flags"} <= set(row)
        assert 0 < row["latency_ms"]["p50"] <= row["latency_ms"]["p90"] <= row["latency_ms"]["p99"]
        assert row["latency_ms"]["mean"] > 0
        assert row["throughput"] > 0
        assert row["batch"] == {"single": 1, "offline": 2}
    assert [ratio["metric"] for ratio in found["ratios"]] == ["latency", "throughput"]
    for ratio in found["ratios"]:
        assert (ratio["a"], ratio["b"]) == tuple(row["artifact"] for row in found["results"])
        assert ratio["ci95"][0] <= ratio["ratio"] <= ratio["ci95"][1]

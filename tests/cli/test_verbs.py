"""Each command alone, with good input, in a process of its own."""

import json
import shutil

import numpy as np
import onnx
import pytest

from vitdeploy import __version__
from vitdeploy.bundle.read import read_bundle, verify_files
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


@pytest.fixture
def cropped(compiled, tmp_path):
    """A copy of the ONNX Runtime bundle whose manifest says that images are enlarged before they are cropped."""
    folder = shutil.copytree(compiled["onnxruntime-cpu"], tmp_path / "cropped")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["preprocess"]["resize"] = 64
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


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


@pytest.mark.parametrize("target", TARGETS)
def test_quantize_then_compile_gives_an_int8_engine(cli, small_export, digits, tmp_path, target):
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


def test_compile_takes_the_batch_that_is_asked_for(cli, small_export, tmp_path, digits):
    done = cli("compile", small_export / "model.onnx", "--target", "openvino-cpu", "--batch", 4, "-o", "engine")
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
    found = document(cli(*command, "--data", digits, "--num-samples", 100, "--json"))
    assert {"n", "top1", "reference_top1", "drop", "drop_ci95", "agreement", "agreement_ci95", "kl"} <= set(found)
    assert (found["n"], found["agreement"], found["drop"]) == (100, 100.0, 0.0)
    assert found["top1"] == found["reference_top1"]
    assert found["agreement_ci95"][0] > 95
    assert found["drop_ci95"][0] < 0 < found["drop_ci95"][1]
    assert found["kl"] < 1e-6
    assert found["diagnosis"].startswith("the same function: largest difference ")
    assert found["gate"] == {"status": "none", "reasons": []}


def test_verify_tells_a_difference_of_preprocessing_from_one_of_the_graph(cli, compiled, cropped, digits):
    found = document(cli("verify", cropped, "--against", compiled["onnxruntime-cpu"], "--data", digits, "--json"))
    assert found["diagnosis"].startswith("preprocessing differs: resize 64 instead of 32; on the same tensor 100.0 %")
    assert found["same_tensor"]["agreement"] == 100
    assert found["agreement"] < 100


def test_verify_without_labels_compares_answers_only(cli, compiled, digits, tmp_path):
    (tmp_path / "flat").mkdir()
    for number, path in enumerate(sorted(digits.glob("evaluation/*/*.png"))[::20]):
        shutil.copy(path, tmp_path / "flat" / f"{number}.png")
    found = document(
        cli("verify", compiled["openvino-cpu"], "--against", compiled["onnxruntime-cpu"], "--data", "flat", "--json")
    )
    assert (found["n"], found["top1"], found["drop"], found["agreement"]) == (32, None, None, 100.0)


@pytest.mark.parametrize(("least", "status"), [("99.9", "fail"), ("1", "pass")])
def test_a_gate_that_is_not_met_exits_with_5(cli, compiled, cropped, digits, least, status):
    command = ("verify", cropped, "--against", compiled["onnxruntime-cpu"], "--data", digits, "--min-agreement", least)
    done = cli(*command)
    assert f"gate        {status}" in done.stdout
    assert done.returncode == (5 if status == "fail" else 0)
    assert ("VD5001  the gate is not met" in done.stderr) == (status == "fail")


def test_a_gate_that_is_not_proven_exits_with_5(cli, compiled, digits):
    command = ("verify", compiled["openvino-cpu"], "--against", compiled["onnxruntime-cpu"], "--data", digits)
    done = cli(*command, "--num-samples", 10, "--min-agreement", 99)
    assert done.returncode == 5
    assert "VD5001  the gate is not provably met" in done.stderr
    assert "fix:    evaluate on more images, or raise the budget" in done.stderr


# --- bench ------------------------------------------------------------------------------------------------------------


def test_bench_measures_and_compares(cli, compiled):
    a, b = compiled["onnxruntime-cpu"], compiled["openvino-cpu"]
    found = document(cli("bench", a, b, "--batch", "1,2", "--duration", 0.5, "--warmup", 0.1, "--json"))
    assert [(row["target"], row["precision"]) for row in found["results"]] == [
        ("onnxruntime-cpu", "fp32"),
        ("openvino-cpu", "fp32"),
    ]
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


def test_inspect_shows_a_graph(cli, small_export):
    found = document(cli("inspect", small_export, "--json"))
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

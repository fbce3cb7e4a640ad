"""Each command alone, with good input."""

import json
import shutil

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file, save_file

from tests.command_line import command_line
from vitdeploy import __version__
from vitdeploy.benchmark import survey
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.runtime import load
from vitdeploy.workflows.placement import compile_bundle

MODEL = "vit_w32d2h2_patch8_32"
TARGETS = ("openvino-cpu", "onnxruntime-cpu")
SHAPES = {"x": ["n", 3, 8, 8], "y": ["n", 3]}


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
def here(shared_store, tmp_path):
    """The command line in this process, which spares loading PyTorch again where that is not the point."""
    with command_line(tmp_path, shared_store, short_bench=True) as here:
        yield here


# --- export, quantize, compile ----------------------------------------------------------------------------------------


def test_export_recognises_a_bare_checkpoint_and_takes_class_names(here, small_checkpoint, tmp_path):
    names = [f"digit {index}" for index in range(10)]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    command = ("export", "--checkpoint", small_checkpoint, "--heads", 2, "--image-size", 40, "--labels", "names.txt")
    done = here(*command, "-o", "out", "--json")
    found = document(done)
    assert (found["model"]["source"], found["model"]["family"]) == ("small.safetensors", "vit")
    assert (found["model"]["image_size"], found["model"]["task"]) == ([40, 40], "classification")
    assert "resized from 32x32 to 40x40 pixels" in done.stderr
    assert "2 blocks of width 32, 2 heads" in done.stderr
    assert "images: resize to short side 43 (bicubic), crop 40x40, mean 0.5, std 0.5" in done.stderr
    assert (
        "labels: digit 0; digit 1; digit 2; digit 3; digit 4; digit 5; digit 6; digit 7; digit 8; digit 9"
        in done.stderr
    )
    assert (tmp_path / "out" / "labels.txt").read_text(encoding="utf-8").split("\n")[:-1] == names


def test_export_takes_a_recipe_and_flags_over_it(here, small_checkpoint, tmp_path):
    recipe = {
        "vitdeploy": 1,
        "name": "of-a-recipe",
        "source": {"model": MODEL, "checkpoint": str(small_checkpoint)},
        "preprocess": {"resize": 48, "crop": 32, "mean": [0.25], "std": [0.5]},
        "data": {"path": "absent"},
        "export": {"opset": 19, "batch": 3, "preprocess": False},
        "bench": {"batch": [3]},
        "targets": ["openvino-cpu"],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    found = document(here("export", "recipe.yaml", "-o", "out", "--opset", 18, "--json"))
    model = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [opset.version for opset in model.opset_import if opset.domain == ""] == [found["opset"]] == [18]
    assert (found["model"]["classes"], found["path"]) == (10, "out")
    assert {row["batch"] for row in found["parity"]} == {3}
    assert 0 < found["largest_difference"] <= found["tolerance"]
    graph = document(here("inspect", "out", "--json"))
    assert graph["graph"]["inputs"] == [{"name": "image", "dtype": "float32", "shape": [3, 1, 32, 32]}]
    assert (graph["metadata"]["name"], graph["metadata"]["preprocess"]["resize"]) == ("of-a-recipe", 48)


def test_export_list_shows_the_built_in_models_that_match(here):
    found = document(here("export", "list", "swin_tiny*", "--json"))["models"]
    assert [row["family"] for row in found] == ["swin"] * len(found)
    [row] = [row for row in found if row["name"] == "swin_tiny_patch4_window7_224"]
    assert (row["parameters"], row["image_size"], row["task"]) == (28_288_354, [224, 224], "classification")
    lines = here("export", "list").stdout.splitlines()
    for name in ("vit_base_patch16_224 ", "deit_tiny_distilled_patch16_224 ", "detr_resnet50 ", "transformer_base "):
        assert [line for line in lines if line.startswith(name)], name
    assert (
        "no built-in name matches 'zebra*'; `vitdeploy export list` shows all"
        in here("export", "list", "zebra*").stdout
    )
    assert "hf:FOLDER" in here("export", "list", "segformer").stderr
    rows = here("export", "list", "SigLIP").stdout.splitlines()[1:]
    assert [row for row in rows if row.startswith("vit_base_patch16_siglip_224 ")]
    assert not [row for row in rows if row.startswith("vit_") and "siglip" not in row]


def test_optimize_rewrites_and_compares(here, small_export, tmp_path):
    found = document(here("optimize", small_export, "-o", "out", "--qkv", "separate", "--json"))
    counts = found["rewrites"]["model"]
    assert (counts["class_token_only"], counts["fold_attention_scale"], counts["split_qkv"]) == (1, 2, 2)
    assert 0 < found["difference"]["model"] < 1e-4
    onnx.checker.check_model(onnx.load(tmp_path / "out" / "model.onnx"), full_check=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.onnx", "optimize.json"]
    options = ("--without", "class_token_only", "--qkv", "merged", "--rotate-residual")
    less = document(here("optimize", "out", "-o", "less", *options, "--json"))
    assert "class_token_only" not in less["rewrites"]["model"]
    assert less["rewrites"]["model"]["merge_qkv"] == 2
    assert less["rewrites"]["model"]["rotate_residual"] == 5


def test_optimize_merges_tokens_and_says_that_this_is_not_exact(here, small_export):
    done = here("optimize", small_export, "-o", "merged", "--merge-tokens", "0:12")
    assert done.returncode == 0, done.stderr
    assert "model: then merged 17 tokens to 12 after block 0; not exact" in done.stdout
    shown = here("inspect", "merged")
    assert "attention, 1 over 17 tokens, 1 over 12 tokens" in shown.stdout
    twice = here("optimize", "merged", "-o", "again", "--merge-tokens", "0:10")
    assert twice.returncode == 2
    assert "attention to 17 and 12 tokens" in twice.stderr


def test_optimize_names_a_next_command_that_works_for_a_graph_of_somebody_elses(here, digits, tmp_path):
    tensors = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in SHAPES.items()
    ]
    weight = onnx.numpy_helper.from_array(np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32), "w")
    bias = onnx.numpy_helper.from_array(np.zeros(3, np.float32), "b")
    nodes = [
        onnx.helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        onnx.helper.make_node("Flatten", ["p"], ["f"]),
        onnx.helper.make_node("Gemm", ["f", "w", "b"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", tensors[:1], tensors[1:], [weight, bias])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, tmp_path / "external.onnx")
    done = here("optimize", "external.onnx", "-o", "out")
    assert done.returncode == 0, done.stderr
    [then] = [line for line in done.stdout.splitlines() if line.startswith("next: vitdeploy ")]
    command = then.removeprefix("next: vitdeploy ").replace("--data DIR", f"--data {digits}").replace("DIR", "int8")
    made = document(here(*command.split(), "--num-samples", 16, "--json"))
    assert command.split()[0] == "quantize" and len(made["int8"]) == 1


def test_a_graph_of_any_image_size_is_optimized_and_exported_at_the_one_asked_for(here, tmp_path):
    """As optimum exports them: all four axes have names."""
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [5, 3, 4, 4], np.linspace(-1, 1, 240))
    tensors = [("x", ["b", "c", "h", "w_"]), ("y", ["b", 5])]
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in tensors]
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["f"], strides=[4, 4]),
        onnx.helper.make_node("GlobalAveragePool", ["f"], ["p"]),
        onnx.helper.make_node("Flatten", ["p"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", tensors[:1], tensors[1:], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, tmp_path / "any.onnx")
    for verb in ("optimize", "export"):
        for _ in range(2):  # the second time over its own output
            assert here(verb, "any.onnx", "--image-size", "8x12", "-o", verb).returncode == 0
        graph = document(here("inspect", f"{verb}/model.onnx", "--json"))["graph"]
        assert graph["inputs"][0]["shape"] == (["b", 3, 8, 12] if verb == "optimize" else ["batch", 8, 12, 3])
        done = here(verb, "any.onnx", "-o", "other")
        assert (done.returncode, "takes images of any size" in done.stderr) == (2, True)


def test_quantize_then_compile_gives_an_int8_engine(here, small_export, digits, tmp_path):
    target = "openvino-cpu"
    command = ("quantize", small_export, "--data", digits, "--target", target, "-o", "int8", "--num-samples", 32)
    placed = document(here(*command, "--ignore", "head", "--json"))
    assert placed["calibration_images"] == 32
    assert placed["path"] == "int8/model.onnx"
    assert [name for name in placed["float"] if "head" in name]
    assert len(placed["int8"]) >= 8
    assert sorted(path.name for path in (tmp_path / "int8").iterdir()) == [
        "calibration.json",
        "high_precision.json",
        "model.onnx",
        "monitor.json",
        "placement.json",
    ]

    found = document(here("compile", "int8", "--target", target, "-o", "engine", "--json"))
    assert (found["artifact"], found["precision"], found["batch"]) == (f"{target}-int8", "int8", 1)
    manifest = read_bundle(tmp_path / "engine")
    verify_files(tmp_path / "engine", manifest)
    assert manifest.engines[0].kernels["int8"] >= len(placed["int8"])
    with load(tmp_path / "engine", monitor=True) as predictor:
        assert predictor.monitor.watched == ("inputs", "non-finite")  # nobody has seen what the engine says to them


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


def test_verify_tells_how_many_answers_are_kept(here, compiled, small_checkpoint, digits):
    command = ("verify", compiled["openvino-cpu"], "--against", MODEL, "--checkpoint", small_checkpoint)
    done = here(*command, "--data", digits, "--num-samples", 100, "--max-drop", 50, "--json")
    found = json.loads(done.stdout)
    assert {"n", "top1", "reference_top1", "drop", "drop_ci95", "agreement", "agreement_ci95", "kl"} <= set(found)
    assert (found["n"], found["agreement"], found["drop"]) == (100, 100.0, 0.0)
    assert found["top1"] == found["reference_top1"]
    assert found["agreement_ci95"][0] > 95
    assert found["drop_ci95"][0] < 0 < found["drop_ci95"][1]
    assert found["kl"] < 1e-6
    assert found["diagnosis"].startswith("the same function: largest difference ")
    assert (done.returncode, found["gate"]["status"]) == (0, "pass") and 5 < found["control"]["agreement"] < 15


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


def test_without_labels_answers_are_compared_and_a_gate_may_stay_unproven(here, compiled, digits, tmp_path):
    (tmp_path / "flat").mkdir()
    for number, path in enumerate(sorted(digits.glob("evaluation/*/*.png"))[::20]):
        shutil.copy(path, tmp_path / "flat" / f"{number}.png")
    command = ("verify", compiled["openvino-cpu"], "--against", compiled["onnxruntime-cpu"], "--data", "flat")
    done = here(*command, "--min-agreement", 99, "--json")
    found = json.loads(done.stdout)
    assert (found["n"], found["top1"], found["drop"], found["agreement"]) == (32, None, None, 100.0)
    assert (done.returncode, found["gate"]["status"]) == (5, "undecided")
    assert "VD5001  the gate is not provably met" in done.stderr
    assert "evaluate on more images, or raise the budget" in done.stderr


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, shared_store, small_export, digits):
    """The small model in INT8, by target."""
    folders = {target: tmp_path_factory.mktemp(f"{target}-int8") / "int8" for target in TARGETS}
    with command_line(tmp_path_factory.mktemp("quantize"), shared_store) as run:
        for target, folder in folders.items():
            command = ("quantize", small_export, "--data", digits, "--target", target, "--num-samples", 16)
            done = run(*command, "-o", folder)
            assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("target", TARGETS)
def test_bisect_names_the_layer_that_was_broken_and_the_mend_works(
    here, quantized, small_export, digits, tmp_path, target
):
    broken = shutil.copytree(quantized[target], tmp_path / "broken")
    model = onnx.load(broken / "model.onnx")
    [scale] = [each for each in model.graph.initializer if each.name == "blocks.1.mlp.fc1.weight.scale"]
    scale.CopyFrom(onnx.numpy_helper.from_array(3 * onnx.numpy_helper.to_array(scale), scale.name))
    onnx.save(model, broken / "model.onnx")
    command = ("verify", "broken", "--against", small_export, "--data", digits, "--num-samples", 8, "--bisect")
    done = here(*command, "--json")
    found = document(done)
    assert "error enters at blocks.1.mlp.fc1 weight" in done.stderr
    assert "fix        quantize the float graph again with this version" in done.stderr
    [then] = [line for line in done.stderr.splitlines() if line.startswith("next: vitdeploy ")]
    mended = document(here(*then.removeprefix("next: vitdeploy ").replace("DIR", "fixed").split(), "--json"))
    assert mended["target"] == target
    assert (found["metric"], found["n"], found["culprit"]["layers"]) == ("kl", 8, ["blocks.1.mlp.fc1"])
    assert found["distance"] == found["fix"]["before"] > 2 * found["fix"]["after"]
    assert found["parts"][0]["share"] > 0.5


def test_bisect_takes_the_float_graph_of_a_bundle_and_says_where_nothing_is_wrong(here, compiled, digits):
    command = ("verify", compiled["openvino-cpu"], "--against", MODEL, "--data", digits, "--num-samples", 4, "--bisect")
    done = here(*command)
    assert done.returncode == 0, done.stderr
    assert "no error found: the answers equal those of the float graph" in done.stdout
    assert "next:" not in done.stdout


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
    assert {name for name, target in found["targets"].items() if target["works"]} >= {*TARGETS, "openvino-auto"}
    assert found["export"] is True
    assert found["host"]["python"]


def test_help_names_every_command_without_loading_any(cli):
    done = cli("--help")
    assert done.returncode == 0
    verbs = ("run", "export", "optimize", "quantize", "compile", "verify", "bench", "predict", "inspect", "doctor")
    for name in (*verbs, "bundle", "lab"):
        assert f"  {name} " in done.stdout
    assert cli("--version").stdout.strip().endswith(__version__)


# --- bench ------------------------------------------------------------------------------------------------------------


def test_bench_measures_and_compares(here, compiled):
    bundles = (compiled["onnxruntime-cpu"], compiled["openvino-cpu"])
    found = document(here("bench", *bundles, "--batch", "1,2", "--duration", 0.1, "--warmup", 0.1, "--json"))
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
        assert ratio["verdict"] in ("faster", "slower", "no difference")
    for row in found["results"]:
        stages = row["stages_ms"]
        assert stages["end_to_end"] > 0
        assert stages["copies"] == "not timed separately by this back end"
        assert row["energy"]["joules_per_image"] is None or row["energy"]["joules_per_image"] > 0


def test_bench_says_where_the_time_goes(here, compiled, monkeypatch):
    """Of real runtimes, each in processes of its own; a bench as short as this one does not by itself."""
    monkeypatch.setattr(survey, "LEAST_DURATION", 0.0)
    options = ("--scenario", "single", "--batch", "2", "--duration", 0.1, "--warmup", 0, "--threads", 1)
    context = document(here("bench", compiled["openvino-cpu"], *options, "--json"))["context"]
    assert [(rate["target"], rate["precision"]) for rate in context["rates"]] == [("openvino-cpu", "fp32")]
    assert context["memory"]["threads"] == 1
    assert context["left_out"] == []
    (found,) = context["artifacts"]
    assert set(found["work"]["flops"]) == {"fp32"}
    assert found["work"]["batch"] == found["batch"] == 2
    assert {layer["precision"] for layer in found["layers"] if layer["product"]} == {"fp32"}
    assert sum(layer["share"] for layer in found["layers"]) == pytest.approx(1)
    assert found["line"].startswith(f"{found['bound']}: ")


def test_bench_says_what_other_scenarios_found(here, compiled):
    options = ("--scenario", "single,server:200", "--percentiles", "50,99.9", "--duration", 0.1, "--batch", 1)
    done = here("bench", compiled["openvino-cpu"], *options)
    assert done.returncode == 0, done.stderr
    head, row, server, *_ = done.stdout.splitlines()
    assert head.split() == ["artifact", "p50", "ms", "p99.9", "ms", "mean", "ms", "images/s", "flags"]
    assert " >=" in row
    assert "server:200: p50 " in server
    assert " ms from arrival; " in server and " queries answered in " in server
    assert "end to end from a uint8 image of 640x480" in done.stdout

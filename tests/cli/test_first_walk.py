"""What a first user typed: the answer names what is meant, and the next step leads on."""

import json
import subprocess
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.command_line import command_line
from vitdeploy.backends import near_target
from vitdeploy.bundle import sign
from vitdeploy.errors import MissingPackageError, TargetError
from vitdeploy.runtime import load, openvino_device, ort

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory, shared_store):
    with command_line(tmp_path_factory.mktemp("typed"), shared_store) as typed:
        yield typed


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("openvino", "openvino-cpu"),
        ("onnxruntime", "onnxruntime-cpu"),
        ("openvino-npo", "openvino-npu"),
        ("tensort", "tensorrt"),
        ("x", ""),
    ],
)
def test_a_runtime_alone_means_its_cpu(run, small_export, name, meant):
    assert near_target(name) == meant
    done = run("compile", small_export, "--target", name, "-o", "out")
    assert done.returncode == 2
    assert (f"did you mean {meant}?" in done.stderr) == bool(meant)


def test_a_recipe_has_the_same_proposal(run):
    recipe = "vitdeploy: 1\nname: a\nsource: {model: vit_tiny_patch16_224}\ntargets: [openvino]\n"
    Path("recipe.yaml").write_text(recipe)
    done = run("run", "recipe.yaml", "-o", "out")
    assert "did you mean openvino-cpu?" in done.stderr


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        ("openvino-cpu", "vitdeploy compile BUNDLE --target openvino-cpu -o DIR"),
        ("openvino-cpu-fp32", "vitdeploy compile BUNDLE --target openvino-cpu --precision fp32 -o DIR"),
        ("onnxruntime-cpu-int8", "vitdeploy run RECIPE with `targets: [onnxruntime-cpu]`"),
        ("openvino-cpu-fp31", "is not a target"),
        ("openvino", "is not a target"),
    ],
)
def test_an_engine_that_a_report_lists_and_the_bundle_lacks(small_bundle, target, fix):
    with pytest.raises(TargetError) as refused:
        load(small_bundle, target)
    assert fix in refused.value.fix
    assert refused.value.found == "onnxruntime-cpu-fp32"


@pytest.mark.parametrize(
    ("require", "absent", "named"),
    [
        (lambda: sign._require("signing a bundle"), "model_signing", "model-signing"),
        (lambda: sign._require("signing a bundle"), "sigstore_models.bundle", "sigstore_models"),
        (ort.require, "onnxruntime", "onnxruntime"),
        (ort.require, "flatbuffers", "flatbuffers"),
    ],
)
def test_what_a_package_needs_is_named_and_not_the_package(monkeypatch, require, absent, named):
    def fails(name):
        raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)

    monkeypatch.setattr(sign.importlib, "import_module", fails)
    with pytest.raises(MissingPackageError, match=f"needs the package {named}, which is not installed") as refused:
        require()
    assert refused.value.fix in ("pip install 'vitdeploy[sign]'", "pip install 'vitdeploy[onnxruntime]'")


def test_a_plugin_that_does_not_load_is_quoted_from_the_start(monkeypatch):
    """However long the path in it is."""
    text = f'Cannot load library "/{"deep/" * 40}libopenvino_intel_gpu_plugin.so": libOpenCL.so.1: cannot open'

    class Core:
        available_devices = ("CPU",)

        def get_versions(self, device):
            raise RuntimeError(f"Exception from core.cpp:100:\n{text}\n")

    monkeypatch.setattr(openvino_device, "the_core", Core)
    assert openvino_device.missing_device("openvino-gpu") == f"its plugin does not load: {text}"


def test_no_history_is_told_and_fails(run):
    done = run("history", "TYPO")
    assert done.returncode == 2
    assert "no history at TYPO" in done.stderr


def test_after_optimising_a_file_of_others_it_is_quantized(run):
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 4, 4])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5])
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [48, 5], [0.01 * (i % 7) for i in range(240)])
    graph = helper.make_graph(nodes, "mine", [image], [logits], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), "mine.onnx")
    done = run("optimize", "mine.onnx", "-o", "optimized")
    assert done.returncode == 0, done.stderr
    assert "next: vitdeploy quantize optimized --data DIR" in done.stdout


def test_a_folder_that_is_replaced_is_said(run, small_export):
    first = run("compile", small_export, "--target", "onnxruntime-cpu", "-o", "engine")
    again = run("compile", small_export, "--target", "onnxruntime-cpu", "-o", "engine")
    assert (first.returncode, again.returncode) == (0, 0)
    said = "replaced the previous content of engine"
    assert said not in first.stdout and said in again.stdout
    told = run("compile", small_export, "--target", "onnxruntime-cpu", "-o", "engine", "--json")
    assert said in told.stderr and json.loads(told.stdout)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep")
    assert run("compile", small_export, "--target", "onnxruntime-cpu", "-o", "mine").returncode == 2
    assert Path("mine/notes.txt").read_text() == "keep"


def test_all_bad_paths_are_named(run, small_bundle):
    done = run("predict", small_bundle, "a.png", "b.png")
    assert done.returncode == 2
    assert "no image at a.png" in done.stdout and "no image at b.png" in done.stdout


def test_a_page_runs_the_demo_only_where_there_is_none(tmp_path):
    for there in (False, True):
        if there:
            (tmp_path / "out/digits").mkdir(parents=True)
            (tmp_path / "out/digits/manifest.json").touch()
        how = ["make", "-n", "-C", tmp_path, "-f", ROOT / "Makefile", "page", "-o", ".venv/.installed"]
        done = subprocess.run(how, capture_output=True, text=True, check=True)
        assert ("vitdeploy run recipes/digits.yaml" in done.stdout) != there
        assert "vitdeploy embed out/digits --as web" in done.stdout

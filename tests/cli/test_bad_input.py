"""Every kind of bad input: its exit code, its stable code, what was found and what helps, and nothing is written."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from tests import forked
from tests.command_line import ROOT, command_line
from tests.graph.builder import Builder
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.io.files import load_graph, save_graph

MODEL = "vit_w32d2h2_patch8_32"


@pytest.fixture
def run(shared_store, tmp_path):
    """The command line in this process, which spares loading PyTorch again for each case."""
    with command_line(tmp_path, shared_store) as run:
        yield run


@pytest.fixture
def refused(run, tmp_path):
    """Run a command that must be refused with this exit code, code and texts, and must not leave anything behind."""

    def refused(exit_code, code, *arguments, says=()):
        before = sorted(tmp_path.rglob("*"))
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
        [first] = [line for line in done.stderr.splitlines() if line.startswith("VD")]
        assert first.startswith(f"{code}  ")
        for text in says:
            assert text in done.stderr
        assert sorted(tmp_path.rglob("*")) == before
        return done

    return refused


@pytest.fixture
def recipe(tmp_path, digits, small_checkpoint):
    """A recipe that runs, and how to spoil it."""

    def recipe(**changes):
        fields = {
            "vitdeploy": 1,
            "name": "bad-input",
            "source": {"model": MODEL, "checkpoint": str(small_checkpoint)},
            "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
            "data": {"path": str(digits), "calibration": {"images": 8}, "evaluation": {"images": 8}},
            "targets": ["onnxruntime-cpu"],
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(fields), encoding="utf-8")
        return path

    return recipe


@pytest.fixture
def images(tmp_path, digits):
    """Nine images without labels, of which number 4 can be cut short."""

    def images(truncated=False):
        folder = tmp_path / "images"
        folder.mkdir()
        for number, path in enumerate(sorted(digits.glob("evaluation/*/*.png"))[::70][:9]):
            content = path.read_bytes()
            (folder / f"{number}.png").write_bytes(content[:60] if truncated and number == 4 else content)
        return folder

    return images


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_a_missing_recipe(refused):
    says = ["no recipe at absent.yaml", "`vitdeploy run --help` shows a recipe"]
    refused(2, "VD2002", "run", "absent.yaml", says=says)


def test_misspelt_fields_are_told_all_at_once(refused, recipe):
    path = recipe(precison="int8", budgets={})
    says = ["2 problems", "$.precison: unknown field; did you mean precision?", "did you mean budget?"]
    refused(
        2,
        "VD2001",
        "run",
        path,
        "-o",
        "out",
        says=[*says, "fix:      correct these fields; `vitdeploy run --help` shows"],
    )


def test_a_wrong_override(refused, recipe):
    refused(2, "VD2001", "run", recipe(), "-o", "out", "--set", "data.sed=1", says=["did you mean seed?"])


def test_a_missing_checkpoint(refused, recipe):
    path = recipe(source={"model": MODEL, "checkpoint": "absent.safetensors"})
    says = ["no checkpoint at", "absent.safetensors", "fix:      check the path of the checkpoint"]
    refused(2, "VD2002", "run", path, "-o", "out", says=says)


def test_an_unknown_model_is_named_with_those_that_are_near(refused, recipe):
    path = recipe(source={"model": "vit_bas_patch16_224"})
    says = ["no built-in model is called 'vit_bas_patch16_224'", "did you mean vit_base_patch16_224"]
    refused(2, "VD2101", "run", path, "-o", "out", says=says)


def test_missing_images(refused, recipe):
    path = recipe(data={"path": "absent"})
    refused(
        2, "VD2002", "run", path, "-o", "out", says=["no image folder at", "fix:      check the path of the images"]
    )


def test_class_folders_that_do_not_fit_the_model(refused, recipe, tmp_path, digits):
    for name in ("0", "1", "2"):
        shutil.copytree(digits / "calibration" / name, tmp_path / "three" / name)
    data = {"path": "three", "calibration": {"images": 8}, "evaluation": {"images": 8}}
    says = ["found:    3 folders (0, 1, 2), 10 model outputs", "expected: folders named like", "data.labels: none"]
    refused(2, "VD2301", "run", recipe(data=data), "-o", "out", says=says)


def test_more_calibration_images_asked_for_than_there_are(refused, recipe, digits):
    path = recipe(data={"path": str(digits), "calibration": {"images": 1000}})
    says = [
        "too few images for calibration",
        "found:    128 images",
        "expected: 1000 images",
        "data.calibration.images",
    ]
    refused(2, "VD2301", "run", path, "-o", "out", says=says)


def test_a_precision_that_the_target_does_not_have(refused, recipe):
    says = ["onnxruntime-cpu does not support bf16", "found:    bf16", "expected: fp32, int8", "or a target"]
    refused(4, "VD4002", "run", recipe(), "-o", "out", "--set", "precision=bf16", says=says)


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_an_output_with_other_files_is_refused_before_any_work(refused, recipe, tmp_path, options):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine", encoding="utf-8")
    says = [
        "out contains other files; it is not replaced",
        "found:    thesis.txt",
        "fix:      choose another place (-o)",
    ]
    refused(2, "VD2003", "run", recipe(), "-o", "out", *options, says=says)


# --- bisection --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def placed(tmp_path_factory, small_export):
    """A placement of the small model, with ranges out of the air: nothing runs it."""
    from dataclasses import replace

    from vitdeploy.graph.analysis.rows import find_linears
    from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph, set_metadata
    from vitdeploy.quantization.placement import place
    from vitdeploy.quantization.ranges import Range

    model = load_graph(small_export / "model.onnx")
    metadata = get_metadata(model, "small")
    place(model, {str(each.input.name): Range(-1, 1) for each in find_linears(model)}, "onnxruntime-cpu")
    set_metadata(model, replace(metadata, target="onnxruntime-cpu", precision="int8"))
    folder = tmp_path_factory.mktemp("placed")
    save_graph(model, folder / "model.onnx")
    return folder


def test_bisection_of_an_original(refused, small_bundle, digits):
    says = ["--bisect needs an engine compiled from a graph", f"found:    {MODEL}, an original", "expected: a bundle"]
    refused(2, "VD2000", "verify", MODEL, "--against", small_bundle, "--data", digits, "--bisect", says=says)


def test_bisection_without_a_float_graph(refused, placed, digits):
    for against in (MODEL, placed):
        says = [
            "no float graph to compare with",
            f"and {against} is not a graph",
            "fix:      pass that folder: --against FOLDER",
        ]
        refused(2, "VD2000", "verify", placed, "--against", against, "--data", digits, "--bisect", says=says)


def test_bisection_against_another_model(refused, run, placed, small_checkpoint, digits):
    run("export", "--checkpoint", small_checkpoint, "--heads", 2, "--image-size", 40, "-o", "other")
    says = ["other/model.onnx is the float graph of another model", "image: uint8[batch, 40, 40, 1]", "--against GRAPH"]
    refused(2, "VD2000", "verify", placed, "--against", "other", "--data", digits, "--bisect", says=says)


def test_bisection_of_a_model_that_takes_no_images(refused, sequence_export, digits):
    says = [
        "takes no images",
        "found:    the task sequence",
        "expected: a model that takes images",
        "--float-part NAME",
    ]
    command = ("verify", sequence_export, "--against", sequence_export, "--data", digits, "--bisect")
    refused(2, "VD2000", *command, says=says)


def test_bisection_with_a_budget(run, small_bundle, digits):
    command = ("verify", small_bundle, "--against", small_bundle, "--data", digits, "--bisect")
    for option in (("--max-drop", 1), ("--min-agreement", 99), ("--labels", "none")):
        done = run(*command, *option)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--bisect has no gate: leave --max-drop, --min-agreement and labels out." in done.stderr


def test_an_evaluation_by_an_executor_that_is_none(run, refused, small_bundle, digits):
    command = ("verify", small_bundle, "--against", small_bundle, "--data", digits)
    refused(2, "VD2000", *command, "--executor", "spark", says=["'spark'", "processes, ray or ray:HOST:PORT"])
    done = run(*command, "--jobs", 2, "--bisect")
    assert done.returncode == 2 and "cannot be combined with --bisect or --on" in done.stderr


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_shape(refused, small_checkpoint):
    command = ("export", "vit_w64d2h2_patch8_32", "--checkpoint", small_checkpoint, "-o", "out")
    says = [
        "small.safetensors is not a checkpoint of vit_w64d2h2_patch8_32",
        "width 32 instead of 64",
        "fix:      omit the name",
    ]
    refused(2, "VD2102", *command, says=says)


def test_weights_that_are_not_numbers(refused, small_checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    state = load_file(small_checkpoint)
    state["head.bias"][3] = float("nan")
    save_file(state, tmp_path / "nan.safetensors")
    says = ["head.bias has non-finite values", "found:    1 of 10 values are NaN or infinite"]
    refused(2, "VD2103", "export", MODEL, "--checkpoint", "nan.safetensors", "-o", "out", says=says)


class Bomb:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "plain"])
def test_a_checkpoint_that_runs_code_is_refused_and_does_not_run_it(refused, tmp_path, archive):
    import torch

    witness = tmp_path / "ran"
    torch.save({"head.bias": Bomb(witness)}, tmp_path / "w.pt", _use_new_zipfile_serialization=archive)
    says = ["a pickle that runs commands when it is read", "found:    posix.mkdir", "do not open it"]
    refused(3, "VD3001", "export", MODEL, "--checkpoint", "w.pt", "-o", "out", says=says)
    assert not witness.exists()


def test_a_checkpoint_that_is_cut_short(refused, small_checkpoint, tmp_path):
    (tmp_path / "half.safetensors").write_bytes(small_checkpoint.read_bytes()[:5000])
    says = ["is not a complete safetensors file", "fix:      download it again"]
    refused(2, "VD2102", "export", MODEL, "--checkpoint", "half.safetensors", "-o", "out", says=says)


# --- sources ----------------------------------------------------------------------------------------------------------

CODE = """
import torch

class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 8, 8)

    def forward(self, image):
        features = self.conv(image).mean((2, 3))
        if features.sum() > 0:
            features = 2 * features
        return features

class Decomposes(Doubles):
    def forward(self, image):
        return torch.linalg.svdvals(self.conv(image).flatten(2))[:, :2]

class Lists(Doubles):
    def forward(self, image):
        return [None, None]

class Narrow(Doubles):
    def forward(self, image):
        return super().forward(image.reshape(-1, 3, 64, 64))

def settings():
    return {"width": 4}

def fails():
    raise RuntimeError("the weights are on another machine")

class Bakes(Doubles):
    def forward(self, image):
        return self.conv(image).reshape(2, 4, 16).mean(-1)
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A user's module in the working folder; its name is new each time, as Python keeps modules."""
    name = f"usercode_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE, encoding="utf-8")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        ("settings", "VD2104", ["did not return a model", "found:    dict", "expected: a torch.nn.Module"]),
        ("fails", "VD2104", ["failed", "the weights are on another machine", ".py, line 31: raise RuntimeError("]),
        ("absent", "VD2104", ["has no function 'absent'", "settings, fails"]),
        ("Lists", "VD2102", ["match no task of vitdeploy", "logits [batch, classes]; or"]),
        ("Narrow", "VD2102", ["does not run on an image of 32x32", ".py, line 25: ", "fix:      --image-size"]),
        ("Bakes", "VD2201", ["contains the batch size 2 as a constant", "expected: batch dynamic", "fixed --batch"]),
        ("Doubles", "VD2201", ["cannot be exported", "data-dependent", ".py, line 11: if features.sum() > 0:)"]),
        (
            "Decomposes",
            "VD2201",
            ["cannot be exported", "found:    No ONNX function found for", "svd", "expected: operations"],
        ),
    ],
)
def test_a_function_of_the_users_that_gives_no_model_to_export(refused, code, function, kind, says):
    done = refused(2, kind, "export", "--model", f"{code}:{function}", "--image-size", 32, "-o", "out", says=says)
    assert "def forward(self, arg0_1" not in done.stderr  # what the exporter prints of its own


def test_a_module_that_cannot_be_imported(refused):
    says = ["absent_package.models cannot be imported", "No module named 'absent_package'", "in the working folder"]
    refused(2, "VD2104", "export", "--model", "absent_package.models:build", "-o", "out", says=says)


@pytest.mark.parametrize("field", ["function", "model"])
def test_a_recipe_cannot_name_code(refused, recipe, code, tmp_path, field):
    (tmp_path / f"{code}.py").write_text("open('ran', 'w').close()\ndef build(): pass\n", encoding="utf-8")
    path = recipe(source={field: f"{code}:build"})
    if field == "function":
        refused(2, "VD2001", "run", path, "-o", "out", says=["$.source.function: unknown field"])
    else:
        refused(2, "VD2101", "run", path, "-o", "out", says=[f"no built-in model is called '{code}:build'"])
    assert not (tmp_path / "ran").exists()


def test_no_model_at_all(refused):
    refused(2, "VD2000", "export", "-o", "out", says=["no model given", "fix:      vitdeploy export list"])


def test_heads_that_nothing_tells(refused, small_checkpoint):
    says = [
        "tensors do not determine the number of attention heads",
        "found:    width 32",
        "fix:      --heads N, a divisor of 32",
    ]
    refused(2, "VD2102", "export", "--checkpoint", small_checkpoint, "-o", "out", says=says)


@pytest.mark.parametrize(
    ("model", "size", "says"),
    [
        (MODEL, "36x40", ["36x40 is not divisible by the patch size 8", "for example 32x40, 40x40"]),
        ("swin_tiny_patch4_window7_224", "225", ["225x225 is not divisible by the patch size 4", "multiple of 4"]),
        ("detr_r1-1-1-1c8_w32h4e1d1q3_64", "16", ["expected: any height and width of at least 32 pixels"]),
    ],
)
def test_an_image_size_that_the_model_cannot_take_is_told_with_those_that_do(refused, model, size, says):
    refused(2, "VD2102", "export", model, "--image-size", size, "-o", "out", says=says)


@pytest.mark.parametrize("name", ["hf:google/vit-base-patch16-224", "timm:vit_tiny_patch16_224.augreg_in21k"])
def test_a_hub_without_a_network(refused, monkeypatch, tmp_path, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "absent"))
    repository = name.removeprefix("hf:").replace("timm:", "timm/")
    says = [f"{repository} cannot be downloaded", f"hf download {repository} --local-dir DIR; copy DIR here"]
    refused(4, "VD4102", "export", name, "-o", "out", says=says)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("folder", "fix:      hf:folder"),
        ("weights.pt", "fix:      --checkpoint weights.pt, with or without a model name"),
        ("google/vit-base-patch16-224", "hf:google/vit-base-patch16-224"),
    ],
)
def test_a_path_or_repository_instead_of_a_name(refused, tmp_path, name, fix):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "weights.pt").touch()
    refused(2, "VD2101", "export", name, "-o", "out", says=[f"no built-in model is called '{name}', which is", fix])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "w.pt is an empty file"),
        (b"<html>not found</html>", "found:    a file that begins with b'<html>not found</html>'"),
    ],
)
def test_a_checkpoint_that_is_none(refused, tmp_path, content, says):
    (tmp_path / "w.pt").write_bytes(content)
    refused(2, "VD2102", "export", "--checkpoint", "w.pt", "-o", "out", says=[says, "expected: a .safetensors file"])


def test_a_folder_as_checkpoint(refused, tmp_path):
    (tmp_path / "folder").mkdir()
    says = ["no checkpoint at folder", "found:    a folder", "expected: a file with weights"]
    refused(2, "VD2002", "export", "--checkpoint", "folder", "-o", "out", says=says)


def test_a_model_that_does_not_fit_into_memory(refused):
    says = ["this machine has too little memory", "you tried to allocate", "fix:      use a smaller model"]
    refused(4, "VD4002", "export", "vit_w32d2h2_patch8_100000000", "-o", "out", says=says)


WITHOUT_DESCRIPTORS = """
import os, resource, sys
from vitdeploy.cli.main import main
free = os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
sys.argv = ["vitdeploy", "inspect", "model.onnx"]
main()
"""


def test_no_more_files_can_be_opened():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, check=False)
    assert ended.returncode == 4, ended.stderr
    assert (
        "VD4002  too many open files" in ended.stderr
        and "fix:      raise it: ulimit -n 4096" in ended.stderr
    )


def test_weights_for_a_users_module_that_do_not_fit_it(refused, code, small_checkpoint):
    command = ("export", "--model", f"{code}:Doubles", "--checkpoint", small_checkpoint, "-o", "out")
    refused(2, "VD2102", *command, says=["does not fit the architecture", "2 missing: conv.weight, conv.bias"])


def test_labels_that_are_not_one_a_class(refused, small_checkpoint, tmp_path):
    (tmp_path / "names.txt").write_text("one\ntwo\n", encoding="utf-8")
    command = ("export", MODEL, "--checkpoint", small_checkpoint, "--labels", "names.txt", "-o", "out")
    says = ["names.txt does not fit", "found:    2 lines", "expected: 10 lines, one per class"]
    refused(2, "VD2102", *command, says=says)


def test_labels_of_another_task(refused, recipe, digits, small_checkpoint):
    data = {"path": str(digits), "labels": "yolo", "annotations": str(digits), "calibration": {"images": 8}}
    says = ["the task classification cannot use labels of kind 'yolo'", "expected: folders, none"]
    refused(2, "VD2301", "run", recipe(data=data), "-o", "out", says=says)


def test_the_layers_of_an_encoder_decoder_are_not_mixed(refused, recipe):
    path = recipe(source={"model": "transformer_w32e1d1h2_v12_l10"}, preprocess=None, precision="mixed")
    says = ["does not support models with several graphs", "fix:      set precision"]
    refused(4, "VD4002", "run", path, "-o", "out", says=says)


def test_float_parts_that_an_encoder_decoder_has_not(refused, recipe):
    source = {"model": "transformer_w32e1d1h2_v12_l10"}
    path = recipe(source=source, preprocess=None, precision="int8", float_parts=["decoder"])
    says = ["float_parts names unknown graphs: decoder", "expected: encoder or decoder_step"]
    refused(2, "VD2000", "run", path, "-o", "out", says=says)


def test_images_for_an_encoder_decoder(refused, recipe):
    path = recipe(source={"model": "transformer_w32e1d1h2_v12_l10"}, preprocess=None, precision="fp32")
    says = ["is not data for a sequence model", "found:    a folder", "fix:      change data.path"]
    refused(2, "VD2301", "run", path, "-o", "out", says=says)


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quantize(small_export):
    """The arguments of quantize but its images."""
    return ("quantize", small_export, "--target", "onnxruntime-cpu", "-o", "out", "--num-samples", 9, "--data")


def test_an_empty_image_folder(refused, quantize, tmp_path):
    (tmp_path / "images").mkdir()
    says = ["images contains no images", "found:    no files", "expected: files ending in .apng, .bmp, .gif"]
    refused(2, "VD2301", *quantize, "images", says=says)


def test_fewer_images_than_asked_for(refused, quantize, images):
    says = ["found:    9 images", "expected: 10 images", "--num-samples"]
    refused(2, "VD2301", *quantize, images(), "--num-samples", 10, says=says)


def test_a_truncated_image_is_named(refused, quantize, images):
    refused(2, "VD2302", *quantize, images(truncated=True), says=["images/4.png"])


def test_a_truncated_image_is_counted_when_it_may_be_skipped(run, quantize, images):
    done = run(*quantize, images(truncated=True), "--skip-bad", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["calibration_images"]) == (0, 8)
    assert [Path(path).name for path in document["skipped"]] == ["4.png"]
    assert "skipped 1 unreadable image:" in done.stderr


def test_images_of_one_colour(refused, quantize, tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(9):
        Image.new("L", (40, 40), number).save(tmp_path / "images" / f"{number}.png")
    says = ["every calibration image has a single colour", "images of a single colour: 9 of 9", "bit depth is 8"]
    refused(2, "VD2301", *quantize, "images", says=says)


def test_few_images_are_warned_of(run, quantize, images):
    done = run(*quantize, images(), "--num-samples", 2, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["calibration_images"]) == (0, 2)
    [warning] = document["warnings"]
    assert warning.startswith("Only 2 calibration images: ranges will be too narrow for new data")
    assert f"warning: {warning}" in done.stderr
    assert f"calibrate (about {sum(document['memory'].values()) / 1e6:.0f} MB of memory)" in done.stderr


def test_images_on_which_the_model_is_not_finite(refused, quantize, images, small_export, tmp_path):
    """The square root of what the first MLP reads, which is negative on any image."""
    model = load_graph(small_export / "model.onnx")
    editor = Editor(model)
    linear = next(each for each in editor.linears if each.name == "blocks.0.mlp.fc1")
    [root] = editor.node(linear.node, "Sqrt", [linear.input], linear.name, linear.input.shape)
    linear.node.replace_input_with(0, root)
    (tmp_path / "broken").mkdir()
    save_graph(model, tmp_path / "broken" / "model.onnx")
    says = [
        "the model's activations are not finite on the calibration images",
        "found:    NaN from the node blocks.0.mlp.fc1/Sqrt (Sqrt), on images/",
        ".png\n",
        "or remove this image",
    ]
    refused(2, "VD2301", "quantize", "broken", *quantize[2:], images(), says=says)


def test_images_of_which_none_can_be_read(refused, quantize, tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(9):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(b"no image")
    refused(2, "VD2301", *quantize, "images", "--skip-bad", says=["no image could be read", "9 unreadable files"])


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path):
    """A valid ONNX file of somebody else's."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, tmp_path / "external.onnx")
    return tmp_path / "external.onnx"


def test_a_file_that_is_no_onnx(refused, tmp_path):
    (tmp_path / "garbage.onnx").write_bytes(b"\x08garbage" * 50)
    says = ["garbage.onnx is not a valid ONNX file", "expected: a complete ONNX model", "download or copy it again"]
    refused(2, "VD2202", "inspect", "garbage.onnx", says=says)
    refused(2, "VD2202", "compile", "garbage.onnx", "--target", "onnxruntime-cpu", "-o", "out", says=says)


STEPS = {
    "inspect": (),
    "optimize": ("-o", "out"),
    "quantize": ("--data", ".", "--target", "openvino-cpu", "-o", "out"),
    "compile": ("--target", "onnxruntime-cpu", "-o", "out"),
    "bench": (),
}


@pytest.mark.parametrize("command", STEPS)
def test_a_text_is_refused_before_the_libraries_that_read_graphs_are_loaded(tmp_path, command):
    (tmp_path / "NOTES.md").write_text("# Notes\n")
    program = "import sys\nfrom vitdeploy.cli.main import main\ntry:\n    main()\nfinally:\n    print(*sys.modules)"
    argv = [sys.executable, "-c", program, command, "NOTES.md", *STEPS[command]]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "VD2202" in done.stderr
    assert "fix:" in done.stderr
    assert not {"onnx", "onnx_ir", "torch", "onnxruntime"} & set(done.stdout.split())


def test_the_config_of_a_model_folder_is_refused_with_the_export_that_takes_it(refused, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}", encoding="utf-8")
    command = ("quantize", "tiny/config.json", *STEPS["quantize"])
    refused(2, "VD2202", *command, says=["a JSON file", "for a model folder: vitdeploy export hf:tiny -o DIR"])


def test_a_graph_that_does_not_say_how_its_input_is_made(refused, foreign):
    says = ["found:    no vitdeploy metadata in the file", "expected: a graph written by `vitdeploy export`"]
    refused(2, "VD2202", "compile", foreign, "--target", "openvino-cpu", "-o", "out", says=says)


@pytest.mark.parametrize("verb", ["export", "verify", "bench", "quantize"])
def test_a_graph_that_takes_no_image_is_no_original(refused, foreign, small_bundle, images, verb):
    folder = images()
    command = {
        "export": ("export", foreign, "-o", "out"),
        "quantize": ("quantize", foreign, "--target", "openvino-cpu", "-o", "out", "--data", folder),
        "verify": ("verify", small_bundle, "--against", foreign, "--data", folder),
        "bench": ("bench", foreign),
    }
    refused(2, "VD2202", *command[verb], says=["the graph has no image or token input", "found:    x"])


def classifier(b, x):
    """Pixels of 8x8 -> a convolution -> the means of its channels -> 5 logits."""
    weights = np.random.default_rng(0)
    y = b.add("Relu", b.add("Conv", x, weights.standard_normal((6, 3, 2, 2)), strides=[2, 2]))
    y = b.add("ReduceMean", y, np.array([2, 3]), keepdims=0)
    return b.add("MatMul", y, weights.standard_normal((6, 5)))


@pytest.fixture
def bare(tmp_path):
    """Save a classifier of images as somebody else's tool would; `change(b, x)` is put in front of it."""

    def bare(change=lambda b, x: x, domains=(), shape=("n", 3, 8, 8)):
        b = Builder(opset=18)
        logits = classifier(b, change(b, b.input("pixels", shape)))
        onnx.save(b.model(logits, domains=domains), tmp_path / "bare.onnx")
        return "quantize", "bare.onnx", "-o", "out", "--num-samples", 9

    return bare


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "openvino-cpu"])
def test_a_bare_graph_is_quantized_with_what_is_assumed_of_it_said(run, bare, images, target):
    done = run(*bare(), "--data", images(), "--target", target, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["warnings"]) == (0, [])
    assert len(document["int8"]) + len(document["float"]) == 2
    assert "does not describe its preprocessing: / 255 and a plain resize are assumed" in done.stderr
    assert run("compile", "out", "--target", target, "-o", "engine").returncode == 0


def test_a_bare_graph_of_a_fixed_batch_and_an_open_size(run, refused, bare, images, small_export):
    command = (*bare(shape=(2, 3, "height", "width")), "--data", images(), "--target", "openvino-cpu")
    refused(2, "VD2202", *command, says=["--image-size"])
    done = run(*command, "--image-size", 8, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["calibration_images"]) == (0, 8)
    assert document["warnings"] == ["1 of 9 calibration images are left out: the graph's batch is 2."]
    done = run("quantize", small_export, *command[2:], "--image-size", 8)
    assert done.returncode == 2
    assert "already has a fixed image size" in done.stderr and "fix:      leave the image size out" in done.stderr


def test_a_graph_that_is_quantized_already(refused, bare, images, recipe):
    def quantized(b, x):
        zero = np.array(0, np.uint8)
        return b.add("DequantizeLinear", b.add("QuantizeLinear", x, 0.1, zero), 0.1, zero)

    says = [
        "bare.onnx is already quantized",
        "found:    1 DequantizeLinear, 1 QuantizeLinear",
        "expected: the float graph that it was quantized from",
    ]
    refused(2, "VD2202", *bare(quantized), "--data", images(), "--target", "openvino-cpu", says=says)
    path = recipe(source={"model": "bare.onnx"}, preprocess=None, precision="int8")
    refused(2, "VD2202", "run", path, "-o", "out", says=says)


def test_a_graph_with_an_operator_that_nobody_knows(refused, bare, images):
    command = bare(lambda b, x: b.add("Sharpen", x, domain="my.operators"), ["my.operators"])
    says = [
        "operators that no target supports",
        "found:    my.operators.Sharpen",
        "expected: operators of the domain ai.onnx",
    ]
    refused(2, "VD2202", *command, "--data", images(), "--target", "openvino-cpu", says=says)


def test_weights_that_int8_does_not_reach_are_listed(run, bare, images):
    def others(b, x):
        x = b.add("ConvTranspose", x, np.random.default_rng(1).standard_normal((3, 3, 1, 1)))
        return b.add("Einsum", x, np.random.default_rng(2).standard_normal((8, 8)), equation="nchw,wv->nchv")

    done = run(*bare(others), "--data", images(), "--target", "openvino-cpu", "--json")
    document = json.loads(done.stdout)
    assert len(document["int8"]) == 3  # an Einsum of a weight is a MatMul
    assert list(document["float"].values()) == ["ConvTranspose is not quantized"]
    assert "(ConvTranspose is not quantized)" in done.stderr


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd"])
def test_an_onnx_file_that_reaches_outside_its_folder_is_refused_as_unsafe(refused, recipe, tmp_path, location):
    """Its weights are said to lie in a file elsewhere."""
    home = tmp_path / "model"
    home.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3, 3, 8, 8])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, 16, 16])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 3, 2, 2])
    node = helper.make_node("Conv", ["image", "w"], ["scores"], strides=[8, 8])
    graph = helper.make_graph([node], "g", [image], [scores], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    (home / "evil.onnx").write_bytes(model.SerializeToString())
    for command in (("export", "model/evil.onnx", "-o", "out"), ("optimize", "model/evil.onnx", "-o", "out")):
        done = refused(3, "VD3103", *command)
        assert "found:" in done.stderr
    refused(3, "VD3103", "run", recipe(source={"model": "model/evil.onnx"}), "-o", "out")


def _hostile(path, text):
    """An exported file that claims to be vitdeploy's, and has a weight outside of its folder, or asks for too much."""
    proto = onnx.load(path)
    if text == "outside":
        weight = proto.graph.initializer[0]
        for name in ("raw_data", "float_data", "int64_data"):
            weight.ClearField(name)
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="../secret.bin")
    else:
        sides = helper.make_node("Constant", [], ["sides"], value_ints=[10**6, 10**6])
        proto.graph.node.extend([sides, helper.make_node("ConstantOfShape", ["sides"], ["square"])])
    return proto.SerializeToString()


GRAPH, BUNDLE = "hostile/model.onnx", "bundle"
ENTRIES = {
    "export": ("export", GRAPH, "-o", "out"),
    "optimize": ("optimize", GRAPH, "-o", "out"),
    "quantize": ("quantize", GRAPH, "--data", "images", "--target", "onnxruntime-cpu", "-o", "out"),
    "compile": ("compile", GRAPH, "--target", "onnxruntime-cpu", "-o", "out"),
    "verify": ("verify", GRAPH, "--against", GRAPH, "--data", "images"),
    "bench": ("bench", GRAPH),
    "inspect": ("inspect", GRAPH),
    "inspect for a target": ("inspect", GRAPH, "--target", "tensorrt"),
    "a bundle that is inspected": ("inspect", BUNDLE),
    "a bundle that is inspected for a target": ("inspect", BUNDLE, "--target", "tensorrt"),
    "a bundle that is bisected": ("verify", BUNDLE, "--against", "exported", "--bisect", "--data", "images"),
    "a bundle that is explained": ("explain", BUNDLE, "images/0.png", "-o", "out.png"),
}


@pytest.mark.parametrize("text", ["outside", "too much"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_hostile_graph_is_refused_wherever_it_enters(
    refused, small_export, small_bundle, images, tmp_path, entry, text
):
    """Also one that says it is vitdeploy's own, and in a bundle whose digests are right."""
    images()
    shutil.copytree(small_export, tmp_path / "exported")
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "model.onnx").write_bytes(_hostile(small_export / "model.onnx", text))
    shutil.copytree(small_bundle, tmp_path / "bundle")
    manifest = json.loads((small_bundle / "manifest.json").read_text("utf-8"))
    for entry_of in manifest["files"]:
        if entry_of["path"].endswith(".onnx"):
            content = _hostile(small_bundle / entry_of["path"], text)
            (tmp_path / "bundle" / entry_of["path"]).write_bytes(content)
            entry_of |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "bundle" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    refused(3, "VD3103", *ENTRIES[entry])


def test_inspect_takes_a_foreign_graph_all_the_same(run, foreign):
    done = run("inspect", foreign, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["metadata"], document["operators"]) == (0, None, {"Relu": 1})


def test_a_folder_without_a_graph(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    says = ["no graph at empty", "found:    no model.onnx in the folder", "fix:      vitdeploy export"]
    refused(2, "VD2002", "compile", "empty", "--target", "openvino-cpu", "-o", "out", says=says)


def test_an_unknown_target(refused, small_export):
    says = ["unknown target 'openvino-tpu'", "expected: onnxruntime-cpu, openvino-cpu"]
    refused(2, "VD2402", "compile", small_export, "--target", "openvino-tpu", "-o", "out", says=says)


def test_half_precision_where_the_target_has_none(refused, small_export):
    command = ("compile", small_export, "--target", "onnxruntime-cpu", "--precision", "bf16", "-o", "out")
    refused(4, "VD4002", *command, says=["onnxruntime-cpu does not support bf16", "expected: fp32, int8", "fix:"])


@pytest.mark.parametrize("make", ["file", "link", "folder"])
def test_an_output_that_is_not_ours_stays_as_it_is(refused, small_export, tmp_path, make):
    out = tmp_path / "out"
    if make == "file":
        out.write_text("mine", encoding="utf-8")
    elif make == "link":
        out.symlink_to(tmp_path)
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("mine", encoding="utf-8")
    refused(2, "VD2003", "compile", small_export, "--target", "onnxruntime-cpu", "-o", out, says=["another place"])


# --- bundles ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def image(digits):
    return next(digits.glob("evaluation/3/*.png"))


@pytest.mark.parametrize("verb", ["predict", "inspect", "verify", "bench"])
def test_an_engine_that_was_tampered_with(refused, small_bundle, tmp_path, image, images, verb):
    shutil.copytree(small_bundle, tmp_path / "copy")
    engine = tmp_path / "copy/engines/onnxruntime-cpu/graph.onnx"
    content = bytearray(engine.read_bytes())
    content[len(content) // 2] ^= 1
    engine.write_bytes(content)
    command = {
        "predict": ("predict", "copy", image),
        "inspect": ("inspect", "copy"),
        "verify": ("verify", "copy", "--against", small_bundle, "--data", images()),
        "bench": ("bench", "copy"),
    }
    says = [
        "engines/onnxruntime-cpu/graph.onnx is not the file",
        "found:    a different SHA-256",
        "fix:      copy the bundle",
    ]
    refused(3, "VD3101", *command[verb], says=says)


def test_a_manifest_that_names_a_path_outside(refused, small_bundle, tmp_path, image):
    shutil.copytree(small_bundle, tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.json"
    text = manifest.read_text(encoding="utf-8").replace('"engines/onnxruntime-cpu/graph.onnx"', '"../secret"')
    manifest.write_text(text, encoding="utf-8")
    refused(3, "VD3102", "predict", "copy", image, says=["lists an invalid path", "found:    '../secret'"])


def test_a_folder_that_is_no_bundle(refused, tmp_path, image):
    refused(
        2,
        "VD2002",
        "predict",
        tmp_path,
        image,
        says=["is not a bundle", "found:    no manifest.json in it", "expected:"],
    )


def test_a_target_that_the_bundle_was_not_made_for(refused, small_bundle, image):
    says = [
        "has no engine for openvino-cpu",
        "found:    onnxruntime-cpu",
        "fix:      vitdeploy compile BUNDLE --target",
    ]
    refused(2, "VD2402", "predict", small_bundle, image, "--target", "openvino-cpu", says=says)


def test_an_image_that_is_not_there(refused, small_bundle):
    refused(2, "VD2002", "predict", small_bundle, "absent.png", says=["absent.png"])


def test_an_image_that_is_none(refused, small_bundle, tmp_path):
    (tmp_path / "text.png").write_text("no image", encoding="utf-8")
    refused(2, "VD2302", "predict", small_bundle, "text.png", says=["text.png"])


def test_models_of_which_none_says_how_images_are_prepared(refused, images):
    command = ("verify", "vit_tiny_patch16_224", "--against", "vit_tiny_patch16_224", "--data", images())
    refused(2, "VD2000", *command, says=["neither side has preprocessing of its own", "expected: at least one"])


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "-1", "many", "1,2,3", "1,", "", "²"])
def test_a_batch_for_bench_that_is_no_batch(run, small_bundle, value):
    done = run("bench", small_bundle, f"--batch={value}")
    assert done.returncode == 2
    assert "Invalid value for --batch: expected one or two numbers from 1 to 65,536, such as 1,8" in done.stderr


@pytest.mark.parametrize("value", ["0", "-1", "many", "2.5", "²"])
def test_a_batch_for_export_that_is_no_batch(run, tmp_path, value):
    done = run("export", MODEL, "-o", "out", f"--batch={value}")
    assert done.returncode == 2
    assert "expected a number from 1 to 65,536, or dynamic" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quantise"], "No such command 'quantise'. Did you mean 'quantize'?"),
        (["zzz"], "No such command 'zzz'. Commands: run, tune, sweep, predict, serve, embed,"),
        (["run", "r.yaml", "--dryrun"], "--dry-run"),
        (["compile", "m.onnx"], "Missing option '--target'"),
        (["predict", "b"], "Missing argument 'INPUTS...'"),
        (["verify", "a", "--against", "b", "--data", "d", "--min-agreement", "101"], "0<=x<=100"),
        (["bench", "a", "--duration", "nan"], "nan is not a finite number"),
        (["bench", "a", "--warmup", "inf"], "inf is not a finite number"),
        (["bench", "a", "--scenario", "server"], "scenario 'server': expected single, offline, server:QPS"),
        (["bench", "a", "--scenario", "single,single"], "expected each scenario once"),
        (["bench", "a", "--scenario", "server:0"], "expected 0 to 1,000,000 queries per second"),
        (["bench", "a", "--scenario", "sustain:1s"], "expected 3 seconds to 24 hours"),
        (["bench", "a", "--percentiles", "100"], "expected numbers from 1 to 99.9999"),
        (["bench", "a", "--percentiles", "50,nan"], "expected numbers from 1 to 99.9999"),
        (["bench", "a", "--percentiles", "median"], "expected numbers from 1 to 99.9999"),
        (["verify", "a", "--against", "b", "--data", "d", "--max-drop", "nan"], "nan is not a finite number"),
        (["bench", "a", "--threads", "-1"], "x>=0"),
        (["verify", "a", "--against", "b", "--data", "d", "--seed", str(2**32)], "0<=x<=4294967295"),
        (["quantize", "a", "--data", "d", "--target", "t", "-o", "o", "--seed", str(2**32)], "0<=x<=4294967295"),
        (["export", "m", "-o", "out", "--opset", "17"], "'18', '19', '20'"),
        (["export", "m", "-o", "out", "--image-size", "0"], "'0' is not an image size; expected 384, or 256x320"),
        (["export", "m", "-o", "out", "--image-size", "1x2x3"], "'1x2x3' is not an image size"),
        (["export", "m", "n", "-o", "out"], "expected one model, found 2: m, n"),
        (["export", "m"], "Missing option '-o'"),
        (["export", "list", "vit*", "swin*"], "expected one pattern, in quotes"),
        (["export", "m", "--model", "a:b", "-o", "out"], "expected one model, found two: m, and --model a:b"),
        (["export", "--model", "a:b", "--heads", "3", "-o", "out"], "--heads does not apply to your own module"),
        (
            ["export", "m.onnx", "--checkpoint", "w.pt", "--heads", "3", "-o", "out"],
            "an .onnx file has its own weights; leave --checkpoint, --heads",
        ),
        (["optimize", "m", "-o", "out", "--without", "qkv"], "'class_token_only'"),
        (["optimize", "m", "-o", "out", "--merge-tokens", "192"], "'192' is not BLOCK:TOKENS, such as 1:192"),
        (
            ["optimize", "m", "-o", "out", "--merge-tokens", "1:9", "--merge-tokens", "1:8"],
            "--merge-tokens names a block twice",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_told_with_what_does(run, arguments, says):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_an_error_is_one_json_document_on_request(run):
    done = run("run", "absent.yaml", "--json")
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["exit_code"], done.returncode) == ("VD2002", 2, 2)
    assert error["message"] == "no recipe at absent.yaml"
    assert error["fix"]


def test_wrong_arguments_are_one_json_document_on_request(run):
    done = run("bench", "--json")
    assert json.loads(done.stdout)["error"]["exit_code"] == done.returncode == 2


def test_the_exit_code_is_that_of_the_process(cli, tmp_path):
    done = cli("predict", "absent", "image.png")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "VD2002  absent is not a bundle\n        found:    no such folder\n        expected: "
    )
    assert cli("quantise").returncode == 2
    assert list(tmp_path.iterdir()) == []


# --- this machine -----------------------------------------------------------------------------------------------------

WITHOUT = """
import importlib.util, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {package!r} else find_spec(name, package)
sys.meta_path.insert(0, Blocked())
from vitdeploy.cli.main import main
main()
"""


@pytest.fixture
def without(tmp_path, shared_store):
    """The command line in a process where one package cannot be imported."""

    def without(package, *arguments):
        return subprocess.run(
            [sys.executable, "-c", WITHOUT.format(package=package), *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "VITDEPLOY_STORE": str(shared_store)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return without


@pytest.mark.parametrize("verb", ["run", "predict"])
def test_a_runtime_that_is_not_installed_is_named_with_what_installs_it(
    without, recipe, small_bundle, image, tmp_path, verb
):
    commands = {
        "run": ("openvino", "run", recipe(targets=["openvino-cpu"]), "-o", "out"),
        "predict": ("onnxruntime", "predict", small_bundle, image),
    }
    package, *command = commands[verb]
    done = without(package, *command)
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert done.stderr.startswith("VD4001  ")
    assert f"needs the package {package}, which is not installed" in done.stderr
    assert f"fix:      pip install 'vitdeploy[{package}]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_package_of_the_export_extra_that_is_not_installed_is_named(without):
    done = without("torch", "export", MODEL, "-o", "out")
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("VD4001  this command needs the package torch, which is not installed")
    assert "fix:      pip install 'vitdeploy[export]'" in done.stderr


def test_doctor_says_what_is_missing_and_what_installs_it(without):
    done = without("openvino", "doctor", "--json")
    targets = json.loads(done.stdout)["targets"]
    assert targets["onnxruntime-cpu"]["works"] is True
    assert targets["openvino-cpu"]["works"] is False
    assert targets["openvino-cpu"]["fix"] == "pip install 'vitdeploy[openvino]'"


# The command line in a forked process that can write no file over 50 kB.
ON_A_FULL_DISK = """
import os, resource, signal, sys, tempfile
os.chdir(home)
os.environ.update(VITDEPLOY_STORE=os.path.join(home, "store"), TMPDIR=home)
tempfile.tempdir = None
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails with EFBIG, much as one on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
sys.argv = ["vitdeploy", *arguments]
from vitdeploy.cli.main import main
main()
"""


@pytest.fixture
def on_a_full_disk(tmp_path, tmp_path_factory):
    """Its exit status and what it wrote on standard error."""

    def on_a_full_disk(*arguments):
        log = tmp_path_factory.mktemp("log") / "stderr.txt"
        names = {"home": str(tmp_path), "log": str(log), "arguments": [*map(str, arguments)]}
        process = forked.start(exec, ON_A_FULL_DISK, names)
        process.join(timeout=120)
        return SimpleNamespace(returncode=process.exitcode, stderr=log.read_text(encoding="utf-8"))

    return on_a_full_disk


def test_a_full_disk_at_the_output_leaves_nothing_half_written(on_a_full_disk, small_export, tmp_path):
    done = on_a_full_disk("compile", small_export, "--target", "onnxruntime-cpu", "-o", "out")
    assert done.returncode == 4, done.stderr
    assert "VD4101  no space left to write out" in done.stderr
    assert "bytes free" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_store_leaves_nothing_half_written(on_a_full_disk, recipe, tmp_path):
    path = recipe()
    done = on_a_full_disk("run", path, "-o", "out")
    assert done.returncode == 4, done.stderr
    assert f"VD4101  no space left to write {tmp_path / 'store'}" in done.stderr
    # What was finished before is whole; nothing else is there but the log.
    finished = (tmp_path / "store" / "artifacts").rglob("artifact.json")
    whole = [file for artifact in finished for file in artifact.parent.iterdir()]
    left = {entry for entry in tmp_path.rglob("*") if entry.is_file()}
    assert left - {tmp_path / "store" / "log.jsonl"} == {path, *whole}
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out").exists()

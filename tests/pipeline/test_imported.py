"""What an export knows travels in its file: a folder of `vitdeploy export` is a source like any other."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest

from tests.command_line import command_line
from vitdeploy.errors import CheckpointError, DataError, GraphError, InputError, RecipeError
from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph, set_metadata
from vitdeploy.models.source import Source
from vitdeploy.pipeline.job import prepare, source_of
from vitdeploy.progress import silent
from vitdeploy.recipe.load import load_recipe, recipe_text
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.values import read_labels
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import ASSUMED, Overrides, find_reference_model, reference_runner
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.subjects import Finder, opened, settings_of
from vitdeploy.workflows.sweep import Entry
from vitdeploy.workflows.variants import begin_search, prepare_search

LABELS = tuple(f"digit {i}" for i in range(10))
PREPROCESS = PreprocessSpec(40, (32, 32), "bilinear", (0.4,), (0.3,), crop_rounding="down")


@pytest.fixture(scope="module", params=[True, False], ids=["pixels", "normalised"])
def exported(request, tmp_path_factory, small_checkpoint):
    """(the original, a folder of its export with or without preprocessing in the graph)."""
    home = tmp_path_factory.mktemp("exported")
    (home / "names.txt").write_text("".join(f"{label}\n" for label in LABELS))
    overrides = Overrides(PREPROCESS, labels=home / "names.txt")
    reference_model = find_reference_model(Source("vit_w32d2h2_patch8_32", small_checkpoint), overrides)
    (home / "float").mkdir()
    export(reference_model, ExportConfig("small", 20, None, request.param), home / "float")
    return reference_model, home / "float"


def test_nothing_is_lost_on_the_way_through_a_file(exported, tmp_path):
    original, folder = exported
    lone = tmp_path / "renamed.onnx"
    shutil.copyfile(folder / "model.onnx", lone)  # without labels.txt
    found = find_reference_model(Source(str(lone)))
    assert (found.preprocess, found.labels, found.task) == (PREPROCESS, LABELS, "classification")
    assert (found.image_size, found.channels, found.classes) == ((32, 32), 1, 10)
    assert found.notes == ("imported from renamed.onnx: classification, opset 20",)
    export(found, ExportConfig("again", 20, None, True), tmp_path)
    metadata = get_metadata(load_graph(tmp_path / "model.onnx"), "")
    assert (metadata.preprocess, metadata.labels) == (PREPROCESS, LABELS)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 1), np.uint8)
    with reference_runner(find_reference_model(Source(str(tmp_path / "model.onnx"))).source) as again:
        ours = again.infer({"image": pixels})["logits"]
    with reference_runner(original.source) as torch:
        theirs = torch.infer({"image": ((pixels / 255 - 0.4) / 0.3).astype(np.float32).transpose(0, 3, 1, 2)})["logits"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    out = tmp_path / "bundle"
    out.mkdir()
    manifest = compile_bundle(lone, "onnxruntime-cpu", None, None, out)
    assert tuple(read_labels(out, manifest)) == LABELS


def test_a_file_that_is_written_twice_has_the_same_bytes(exported, tmp_path):
    found = find_reference_model(Source(str(exported[1])))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        export(found, ExportConfig("again", 20, None, True), tmp_path / name)
    assert (tmp_path / "a/model.onnx").read_bytes() == (tmp_path / "b/model.onnx").read_bytes()


def test_what_is_given_wins_and_is_said(exported, tmp_path):
    _, folder = exported
    other = dataclasses.replace(PREPROCESS, resize=32)
    found = find_reference_model(Source(str(folder)), Overrides(other, PostprocessSpec(threshold=0.7)))
    assert found.preprocess == other
    assert found.notes[1] == "the requested preprocessing replaces that of the exported file (resize 40)"
    (tmp_path / "names.txt").write_text("".join(f"{i}\n" for i in range(10)))
    found = find_reference_model(Source(str(folder)), Overrides(labels=tmp_path / "names.txt"))
    assert found.labels == tuple("0123456789")
    assert "replaces the model's own labels" in found.notes[-1]


def test_a_mean_that_is_part_of_the_graph_cannot_be_changed(exported):
    _, folder = exported
    other = Overrides(dataclasses.replace(PREPROCESS, mean=(0.5,)))
    if load_graph(folder / "model.onnx").graph.inputs[0].dtype.numpy() != np.uint8:
        assert find_reference_model(Source(str(folder)), other).preprocess == other.preprocess
        return
    with pytest.raises(CheckpointError, match="differs from preprocess:") as caught:
        find_reference_model(Source(str(folder)), other)
    assert (caught.value.found, "--no-preprocess" in caught.value.fix) == ("mean 0.5, std 0.3", True)
    with pytest.raises(GraphError, match="takes pixels"):
        export(find_reference_model(Source(str(folder))), ExportConfig("a", 20, None, False), folder)


def test_thresholds_travel_too(tmp_path, exported):
    model = load_graph(exported[1] / "model.onnx")
    head = PostprocessSpec("sigmoid", "xyxy", 0.3, (1, 4), 0.6, 0.9)
    metadata = dataclasses.replace(get_metadata(model, ""), postprocess=head, task="detection")
    set_metadata(model, metadata)
    save_graph(model, tmp_path / "a.onnx")
    found = find_reference_model(
        Source(str(tmp_path / "a.onnx")), Overrides(postprocess=dataclasses.replace(head, threshold=1))
    )
    assert (found.task, found.postprocess.things) == ("detection", (1, 4))
    assert found.notes[-1] == "the requested post-processing replaces that of the exported file (threshold 0.3)"


def test_other_labels_beside_the_file_are_refused(exported, tmp_path):
    shutil.copyfile(exported[1] / "model.onnx", tmp_path / "model.onnx")
    (tmp_path / "labels.txt").write_text("".join(f"{label}\n" for label in (*LABELS[:3], "dog", *LABELS[4:])))
    with pytest.raises(GraphError, match=r"the class names in .*labels\.txt and model\.onnx differ") as caught:
        find_reference_model(Source(str(tmp_path)))
    assert (caught.value.found, caught.value.expected) == ("line 4: 'dog'", "'digit 3', as in model.onnx")


@pytest.mark.parametrize("how", ["given", "beside"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp1252", "utf-16"])
def test_labels_of_other_editors_are_read_or_refused_by_their_line(how, encoding, exported, tmp_path):
    model = load_graph(exported[1] / "model.onnx")
    set_metadata(model, dataclasses.replace(get_metadata(model, ""), labels=()))
    save_graph(model, tmp_path / "model.onnx")
    labels = tmp_path / ("names.txt" if how == "given" else "labels.txt")
    names = ("zéro", *map(str, range(1, 9)), "naïf")
    labels.write_bytes("".join(f"{name}\r\n" for name in names).encode(encoding))

    def found():
        given = Overrides(labels=labels) if how == "given" else None
        return find_reference_model(Source(str(tmp_path / "model.onnx")), given).labels

    if encoding != "utf-8-sig":
        with pytest.raises(DataError, match=rf"{labels.name} is not UTF-8") as caught:
            found()
        assert caught.value.found.startswith("line 1: b'")
        if shutil.which("iconv") is None:
            return
        subprocess.run(caught.value.fix[caught.value.fix.index("iconv") :], shell=True, cwd=tmp_path, check=True)  # noqa: S602
    assert found() == names


def test_metadata_of_another_image_size_do_not_fit(exported, tmp_path):
    model = onnx.load(str(exported[1] / "model.onnx"))
    if model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8:
        model.metadata_props[0].value = model.metadata_props[0].value.replace("[32, 32]", "[48, 48]")
        expected = (GraphError, "does not take one image")
    else:
        model.metadata_props[0].value = model.metadata_props[0].value.replace("[32, 32]", "[48, 48]")
        expected = (CheckpointError, "the preprocessing does not fit")
    onnx.save(model, str(tmp_path / "a.onnx"))
    with pytest.raises(expected[0], match=expected[1]):
        find_reference_model(Source(str(tmp_path / "a.onnx")))


@pytest.mark.parametrize("place", ["", "onnx"], ids=["beside it", "one folder up"])
def test_config_files_beside_a_file_of_others(tmp_path, place):
    """optimum leaves them there."""
    (tmp_path / place).mkdir(exist_ok=True)
    image = onnx.helper.make_tensor_value_info("pixel_values", onnx.TensorProto.FLOAT, ["batch", 3, 8, 8])
    logits = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 3])
    axes = onnx.numpy_helper.from_array(np.array([2, 3], np.int64), "axes")
    nodes = [onnx.helper.make_node("ReduceMean", ["pixel_values", "axes"], ["logits"], keepdims=0)]
    graph = onnx.helper.make_graph(nodes, "of others", [image], [logits], [axes])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, str(tmp_path / place / "model.onnx"))
    source = Source(str(tmp_path / place / "model.onnx"))
    assert find_reference_model(source).preprocess.mean == (0.0, 0.0, 0.0)
    assert find_reference_model(source).notes[-1] == ASSUMED
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}, "image_std": [0.2] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {0: "a", 1: "b", 2: "c"}}), encoding="utf-8")
    found = find_reference_model(source)
    assert (found.preprocess.mean, found.preprocess.std, found.labels) == ((0.5,) * 3, (0.2,) * 3, ("a", "b", "c"))
    assert found.notes[1:] == (
        "preprocessing: from preprocessor_config.json beside the file",
        "labels: from config.json beside the file",
    )
    (tmp_path / place / "labels.txt").write_text("x\ny\nz\n", encoding="utf-8-sig")
    assert find_reference_model(source).labels == ("x", "y", "z")
    (tmp_path / "preprocessor_config.json").write_text("{", encoding="utf-8")
    assert ASSUMED in find_reference_model(source).notes


def test_a_recipe_names_the_folder(exported, digits, tmp_path):
    _, folder = exported
    shutil.copytree(folder, tmp_path / "float")
    shutil.copytree(folder, tmp_path / "vit_w32d2h2_patch8_32")  # a built-in name stays one
    (tmp_path / "float" / "sizes" / "32x48").mkdir(parents=True)
    shutil.copyfile(folder / "model.onnx", tmp_path / "float" / "sizes" / "32x48" / "model.onnx")
    data = {"path": str(digits), "calibration": {"images": 4}, "evaluation": {"images": 4}}
    values = {"vitdeploy": 1, "name": "a", "source": {"model": "float"}, "data": data, "targets": ["onnxruntime-cpu"]}
    (tmp_path / "r.yaml").write_text(json.dumps(values), encoding="utf-8")
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.source.model == str(tmp_path / "float")
    [job] = prepare(recipe, skip_bad=False, progress=silent)
    assert (job.labels, job.reference_model.preprocess) == (LABELS, PREPROCESS)
    assert "model: ../float" in recipe_text(recipe, tmp_path / "tuned", "Mine.")
    named = load_recipe(tmp_path / "r.yaml", ["source.model=vit_w32d2h2_patch8_32"])
    assert named.source.model == "vit_w32d2h2_patch8_32"
    with pytest.raises(GraphError, match="of a different size"):  # the graph in that folder is one of 32x32
        find_reference_model(dataclasses.replace(source_of(recipe), image_size=(32, 48)))


# --- a module of one's own, on the command line -----------------------------------------------------------------------

NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_size = 32
        self.conv = nn.Conv2d(1, 16, 8, 8)
        self.head = nn.Linear(16, 10)

    def forward(self, image):
        return self.head(self.conv(image).flatten(2).mean(2)) * 1.0

def build():
    return Net()
"""


@pytest.fixture
def own(tmp_path, monkeypatch, digits):
    """A folder with a user's module, whose name is new each time, and a recipe that names no model."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETWORK)
    data = {"path": str(digits), "calibration": {"images": 8}, "evaluation": {"images": 20}}
    values = {
        **{"vitdeploy": 1, "name": "own", "data": data, "targets": ["onnxruntime-cpu"], "precision": "fp32"},
        "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
        "budget": {"min_agreement": 0},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(values), encoding="utf-8")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_the_whole_line_of_a_module_of_ones_own(own, tmp_path):
    model = ("--model", f"{own}:build")
    with command_line(tmp_path, tmp_path / "store", short_bench=True) as run:
        report = run("run", "r.yaml", *model, "-o", "out", "--json").document
        assert (report["model"]["source"], report["provenance"]["source"]["model"]) == (f"{own}:build",) * 2
        assert report["provenance"]["recipe"]["source"]["model"] is None
        assert report["engines"][0]["verify"]["agreement"] == 100
        plan = run("run", "r.yaml", *model, "--dry-run", "--json").document["plan"]
        assert all(step["reuse"] for step in plan)
        (tmp_path / f"{own}.py").write_text(NETWORK.replace("* 1.0", "* -1.0"))
        del sys.modules[own]
        plan = run("run", "r.yaml", *model, "--dry-run", "--json").document["plan"]
        assert not any(step["reuse"] for step in plan)  # the weights are the same


def test_tune_and_sweep_take_it_too(own, tmp_path):
    function = f"{own}:build"
    recipe = load_recipe(tmp_path / "r.yaml", (), function)
    search = begin_search(recipe, (), {}, store=tmp_path / "store", skip_bad=False, function=function)
    job = prepare_search(search, silent)
    assert job.reference_model.name == function
    [job] = Entry(recipe, tmp_path / "store", False, function).prepare()
    assert job.reference_model.source.function == function


@pytest.mark.parametrize("command", ["run", "tune", "sweep", "export"])
def test_two_models_are_refused(own, tmp_path, command):
    recipe = json.loads((tmp_path / "r.yaml").read_text())
    (tmp_path / "two.yaml").write_text(json.dumps({**recipe, "source": {"model": "vit_tiny_patch16_224", "heads": 3}}))
    with command_line(tmp_path, tmp_path / "store") as run:
        done = run(command, "two.yaml", "--model", f"{own}:build", "-o", "out")
        assert (done.returncode, "names the model vit_tiny_patch16_224, and --model" in done.stderr) == (2, True)
        if command != "export":
            done = run(command, "r.yaml", "-o", "out")
            assert (done.returncode, "$.source: " in done.stderr) == (2, True)


def test_heads_say_nothing_of_it(own, tmp_path):
    with pytest.raises(RecipeError, match="heads does not apply to your own module"):
        load_recipe(tmp_path / "r.yaml", ["source.heads=3"], f"{own}:build")


def test_verify_and_bench_name_it_as_it_is(own, small_export, tmp_path):
    with opened(target=None) as finder:
        [subject] = finder.find(f"{own}:build")
        assert subject.setting.images.crop == (32, 32)
        [ours] = finder.find(str(small_export))
        assert settings_of(ours, subject)[1].preprocess == ours.setting.preprocess
        other = dataclasses.replace(ours.setting.images, crop=(48, 48))
        larger = dataclasses.replace(ours, setting=dataclasses.replace(ours.setting, preprocess=other))
        with pytest.raises(InputError, match="a different image size than the other side") as caught:
            settings_of(larger, subject)
        assert "--image-size 48x48" in caught.value.fix
    source = Source(function=f"{own}:build")
    with pytest.raises(InputError, match="expected one model, found two: vit_tiny_patch16_224, and --model"):
        Finder(tmp_path).find("vit_tiny_patch16_224", source)

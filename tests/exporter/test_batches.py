"""Which batch sizes an ONNX file is one function at; graphs with the defects that exporters leave."""

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.command_line import ROOT, command_line
from vitdeploy.errors import CapabilityError, ExportError, GraphError, RecipeError, TargetError
from vitdeploy.exporter.batches import OneFunction, one_function
from vitdeploy.exporter.parity import worst_difference
from vitdeploy.graph.io.files import fixed_batch, graph_spec, load_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.models.source import Source
from vitdeploy.pipeline.job import export_config_of
from vitdeploy.pipeline.reference_worker import make_runner
from vitdeploy.recipe.load import validate
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.export import ExportConfig, export, settle_batch
from vitdeploy.stages.optimize import optimize
from vitdeploy.stages.reference_model import find_reference_model, reference_runner, to_request

DATA = Path(os.environ.get("VITDEPLOY_TEST_DATA", ROOT.parent / "shared" / "data"))
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
CLASSES, SIDE, QUERIES = 4, 4, 6
PREPROCESS = PreprocessSpec(SIDE, (SIDE, SIDE), "bilinear", (0.0,) * 3, (1.0,) * 3)


def node(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs, outputs, **attributes)


def saved(path, nodes, outputs, constants, batch="batch"):
    """A file that takes float32 [batch, 3, 4, 4] as "image"; `outputs`: name -> (type, shape)."""
    image = helper.make_tensor_value_info("image", FLOAT, [batch, 3, SIDE, SIDE])
    values = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "external", [image], values, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), str(path))
    return path


def classifier(path, baked=None, batch="batch", draws=False):
    """The flattened image times a matrix; `baked`: the batch in the constant of its Reshape."""
    shape = np.array([baked or -1, 3 * SIDE * SIDE] if baked != 1 else [1, 3 * SIDE * SIDE], np.int64)
    weight = np.random.default_rng(0).standard_normal((3 * SIDE * SIDE, CLASSES)).astype(np.float32)
    nodes = [node("Reshape", ["image", "shape"], ["flat"]), node("MatMul", ["flat", "weight"], ["clean"])]
    if draws:
        nodes += [node("RandomNormalLike", ["clean"], ["noise"]), node("Add", ["clean", "noise"], ["logits"])]
    else:
        nodes.append(node("Identity", ["clean"], ["logits"]))
    return saved(path, nodes, {"logits": (FLOAT, [batch, CLASSES])}, {"shape": shape, "weight": weight}, batch)


def first_boxes(path):
    """Boxes [batch, queries, 4] of which a Gather takes those of the first image, whatever the batch."""
    rng = np.random.default_rng(0)
    constants = {
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "shape": np.array([-1, QUERIES, 4], np.int64),
        "w": rng.standard_normal((3 * SIDE * SIDE, QUERIES * 4)).astype(np.float32) / 20,
    }
    nodes = [
        node("Flatten", ["image"], ["flat"]),
        node("MatMul", ["flat", "w"], ["all"]),
        node("Reshape", ["all", "shape"], ["logits"]),
        node("Sigmoid", ["logits"], ["each"]),
        node("Gather", ["each", "zero"], ["first"], axis=0),
        node("Shape", ["logits"], ["size"]),
        node("Expand", ["first", "size"], ["boxes"]),
    ]
    shape = ["batch", QUERIES, 4]
    return saved(path, nodes, {"logits": (FLOAT, shape), "boxes": (FLOAT, shape)}, constants)


def tied_top(path):
    """A detector that ranks 3 of 6 objects, two pairs of which are tied, one at the cut. What it adds to their scores
    is a rounding error that grows with the batch and turns each pair round."""
    turn = np.array([1, -1, 0, 1, -1, 0], np.float32) * 1e-7
    constants = {
        "scores0": np.array([[0.9, 0.9, 0.2, 0.5, 0.5, 0.1]], np.float32),
        "turn": turn[None],
        "two": np.array(2.0, np.float32),
        "k": np.array([3], np.int64),
        "zero": np.array([0.0], np.float32),
        "last": np.array([-1], np.int64),
        "four": np.array([1, 1, 4], np.int64),
        "weight": np.random.default_rng(0).uniform(0.1, 1, (1, QUERIES, 4)).astype(np.float32),
        "flat": np.array([-1, 1, 1], np.int64),
        "all": np.array([1, QUERIES, 1], np.int64),
        "axes": np.array([1, 2, 3], np.int64),
    }
    nodes = [
        node("ReduceMean", ["image", "axes"], ["mean4"], keepdims=0),
        node("Shape", ["image"], ["batch0"], start=0, end=1),
        node("Cast", ["batch0"], ["batch1"], to=FLOAT),
        node("Sub", ["two", "batch1"], ["way"]),  # 1 at batch 1, 0 at 2, -3 at 5
        node("Mul", ["turn", "way"], ["noise"]),
        node("Add", ["scores0", "noise"], ["noisy"]),
        node("Mul", ["mean4", "zero"], ["nothing"]),
        node("Unsqueeze", ["nothing", "last"], ["column"]),
        node("Add", ["noisy", "column"], ["every"]),
        node("TopK", ["every", "k"], ["scores", "index"], axis=1),
        node("Identity", ["index"], ["labels"]),
        node("Reshape", ["mean4", "flat"], ["mean"]),
        node("Mul", ["mean", "weight"], ["places"]),
        node("Unsqueeze", ["index", "last"], ["index1"]),
        node("Tile", ["index1", "four"], ["index4"]),
        node("GatherElements", ["places", "index4"], ["boxes"], axis=1),
    ]
    outputs = {"labels": (INT64, ["batch", 3]), "boxes": (FLOAT, ["batch", 3, 4]), "scores": (FLOAT, ["batch", 3])}
    return saved(path, nodes, outputs, constants)


def sizes_of(path):
    with OnnxRuntimeRunner(path, name="the file") as runner:
        return one_function(runner, PREPROCESS)


def test_a_file_with_an_open_batch_is_one_function_at_all(tmp_path):
    assert sizes_of(classifier(tmp_path / "a.onnx")) == OneFunction(())


@pytest.mark.parametrize("baked", [1, 2, 4])
def test_a_batch_in_a_constant_is_found(tmp_path, baked):
    found = sizes_of(classifier(tmp_path / "a.onnx", baked))
    assert found.sizes == (baked,)
    assert found.why.startswith(f"at batch {2 if baked == 1 else 1} it does not run (")


def test_a_file_that_mixes_its_images_is_one_function_at_batch_1(tmp_path):
    found = sizes_of(first_boxes(tmp_path / "a.onnx"))
    assert found.sizes == (1,)
    assert found.why.startswith("at batch 2 it makes the outputs of an image depend on the other images")


def test_ties_among_what_is_ranked_are_no_difference(tmp_path):
    path = tied_top(tmp_path / "a.onnx")
    image = np.full((5, 3, SIDE, SIDE), 0.5, np.float32)
    with OnnxRuntimeRunner(path, name="the file") as runner:
        alone, among = (runner.infer({"image": image[:count]})["labels"][0].tolist() for count in (1, 5))
    assert (alone, among) == ([0, 1, 3], [1, 0, 4])  # the pair is turned, and another object is the last
    assert sizes_of(path) == OneFunction(())


def test_an_object_that_is_not_there_is_a_difference():
    """One that lies above the cut of the other side is missing there, however low it is ranked here."""
    boxes = np.arange(12, dtype=np.float32).reshape(1, 3, 4) / 12
    scores = np.array([[0.9, 0.6, 0.1]], np.float32)
    ours = {"labels": np.array([[0, 1, 2]]), "boxes": boxes, "scores": scores}
    theirs = {**ours, "labels": np.array([[0, 2, 2]])}
    assert worst_difference(ours, ours) == 0
    assert worst_difference(ours, theirs) == pytest.approx(0.5 / boxes.max())  # 0.6 - 0.1
    moved = {**ours, "labels": np.array([[0, 1, 3]])}  # at the cut
    assert worst_difference(ours, moved) == 0


def test_queries_in_another_order_are_the_same_set():
    rng = np.random.default_rng(0)
    shapes = {"logits": (2, 5, 7), "boxes": (2, 5, 4), "masks": (2, 5, 3, 3)}
    ours = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    turned = {name: array[:, [3, 1, 0, 4, 2]] for name, array in ours.items()}
    assert worst_difference(turned, ours) == 0
    broken = {**turned, "masks": ours["masks"]}
    assert worst_difference(broken, ours) > 0.1
    assert np.isnan(worst_difference({**ours, "logits": ours["logits"] * np.nan}, ours))


def test_an_image_of_which_one_or_two_queries_are_others_is_left_out_where_one_is_whole():
    rng = np.random.default_rng(0)
    theirs = {"logits": rng.standard_normal((2, 120, 7)), "boxes": rng.standard_normal((2, 120, 4))}
    ours = {name: array + 2e-5 for name, array in theirs.items()}
    ours["logits"][1, 33:35] += 1
    ours["logits"][1, :5] += 1e-3  # which see other keys
    assert worst_difference(ours, theirs) < 1e-4
    one = [{name: array[1:] for name, array in each.items()} for each in (ours, theirs)]
    assert worst_difference(*one) > 0.1  # no image is whole
    ours["logits"][1, 35] += 1
    assert worst_difference(ours, theirs) > 0.1  # three are others
    few = [{name: array[:, 30:40] for name, array in each.items()} for each in (ours, theirs)]
    assert worst_difference(*few) > 0.1


def test_a_file_that_draws_is_told_by_its_two_answers(tmp_path):
    with pytest.raises(ExportError, match="two different results for the same image") as caught:
        sizes_of(classifier(tmp_path / "a.onnx", draws=True))
    assert "random numbers" in caught.value.fix


def test_a_file_that_never_runs(tmp_path):
    with pytest.raises(ExportError, match="does not run at any batch size") as caught:
        sizes_of(classifier(tmp_path / "a.onnx", baked=11))
    assert caught.value.found.startswith("at batch 1 it does not run")


# --- what is made of such files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda p: classifier(p, batch=1), lambda p: classifier(p, baked=1), first_boxes])
def test_it_is_imported_at_the_batch_that_it_has(tmp_path, make):
    path = make(tmp_path / "a.onnx")
    reference_model, batch = settle_batch(find_reference_model(Source(str(path))))
    assert (batch, reference_model.source.only_batch) == (1, 1)
    assert "works at batch 1 only" in reference_model.notes[-1]
    out = tmp_path / "out"
    out.mkdir()
    facts = export(reference_model, ExportConfig("a", 20, batch, True), out)
    assert [row["batch"] for row in facts["parity"]] == [1, 1, 1]
    assert fixed_batch(graph_spec(load_graph(out / "model.onnx"), "")) == 1
    with reference_runner(reference_model.source) as runner:
        assert runner.inputs[0].shape[0] == 1
    for asked in ("dynamic", 3):
        with pytest.raises(CapabilityError, match=f"at batch {asked}") as caught:
            settle_batch(find_reference_model(Source(str(path))), asked)
        assert caught.value.fix.startswith("--batch 1, in a recipe export.batch: 1")


def test_a_batch_that_is_asked_for_is_the_files(tmp_path):
    reference_model, batch = settle_batch(find_reference_model(Source(str(classifier(tmp_path / "a.onnx")))), 3)
    assert batch == 3
    export(reference_model, ExportConfig("a", 20, batch, True), tmp_path)
    assert fixed_batch(graph_spec(load_graph(tmp_path / "model.onnx"), "")) == 3


def test_optimize_names_what_takes_it(tmp_path):
    path = classifier(tmp_path / "a.onnx", baked=1)
    with pytest.raises(GraphError, match="has a dynamic batch, but does not run at every batch size") as caught:
        optimize({"model": path}, OptimizeOptions(), tmp_path)
    assert caught.value.fix.startswith(f"export it at a fixed batch size: vitdeploy export {path} -o DIR")


def test_it_is_not_benched_at_another_batch(tmp_path):
    reference_model, _ = settle_batch(find_reference_model(Source(str(classifier(tmp_path / "a.onnx", batch=1)))))
    request = {**to_request(reference_model.source), "threads": 1}
    with pytest.raises(TargetError, match="works at batch 1 only") as caught:
        make_runner({**request, "batch": 8})
    assert caught.value.fix == "--batch 1; in a recipe bench.batch: [1]"
    assert make_runner({**request, "batch": 1}).load().inputs[0].shape[0] == 1


def test_a_recipe_follows_the_batch_where_it_says_nothing():
    base = {"vitdeploy": 1, "name": "a", "source": {"model": "a.onnx"}, "data": {"path": "."}, "targets": ["tensorrt"]}
    fixed = validate(base, "here").at_batch(1)
    assert (fixed.export.batch, fixed.bench.batch, export_config_of(fixed).batch) == (1, (1,), 1)
    assert validate(fixed.model_dump(), "here") == fixed
    for section, value in (("bench", {"batch": [1, 8]}), ("tensorrt", {"profiles": [[1, 4, 8]]})):
        values = {"bench": {"batch": [1, 8]}, "tensorrt": {"profiles": [[1, 1, 8]]}} if section == "tensorrt" else {}
        with pytest.raises(RecipeError, match=section):
            validate({**base, section: values.get(section, value)}, "here").at_batch(1)


def test_the_whole_line_of_a_file_with_a_fixed_batch(tmp_path, digits):
    """Torch's default export has batch 1; nothing needs to be said of it."""
    shape = np.array([1, 32 * 32], np.int64)
    weight = np.random.default_rng(0).standard_normal((32 * 32, 10)).astype(np.float32)
    nodes = [node("Reshape", ["image", "shape"], ["flat"]), node("MatMul", ["flat", "weight"], ["logits"])]
    image = helper.make_tensor_value_info("image", FLOAT, [1, 1, 32, 32])
    logits = helper.make_tensor_value_info("logits", FLOAT, [1, 10])
    tensors = [numpy_helper.from_array(shape, "shape"), numpy_helper.from_array(weight, "weight")]
    graph = helper.make_graph(nodes, "fixed", [image], [logits], tensors)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), str(tmp_path / "f.onnx")
    )
    recipe = {
        "vitdeploy": 1,
        "name": "fixed",
        "source": {"model": "f.onnx"},
        "data": {"path": str(digits), "calibration": {"images": 8}, "evaluation": {"images": 20}},
        "targets": ["onnxruntime-cpu"],
        "budget": {"min_agreement": 50},
        "bench": {"duration": 0.1},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    with command_line(tmp_path, tmp_path / "store", short_bench=True) as run:
        done = run("run", "r.yaml", "-o", "out", "--json")
    report = done.document
    assert report["provenance"]["recipe"]["export"]["batch"] == "auto"
    assert "f.onnx works at batch 1 only (the batch size is fixed)" in done.stderr
    assert report["bench"]["protocol"]["batch"] == [1]


DETECTOR = DATA / "weights" / "deimv2_hgnetv2_atto_coco.onnx"


@pytest.mark.skipif(not DETECTOR.is_file(), reason=f"set VITDEPLOY_TEST_DATA to a folder with weights/{DETECTOR.name}")
def test_a_published_detector_is_one_function_at_all_sizes():
    """On noise most of its scores are near its cut."""
    reference_model, batch = settle_batch(find_reference_model(Source(str(DETECTOR))))
    assert (batch, reference_model.source.only_batch) == (None, None)

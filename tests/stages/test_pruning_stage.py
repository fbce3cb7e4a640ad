"""The pruned graph in the place of the optimized one: its folder, its plan, and what is refused."""

import json
import os

import numpy as np
import onnx_ir as ir
import pytest

from tests.command_line import command_line
from vitdeploy.data.folder import split
from vitdeploy.errors import CapabilityError, DataError, GraphError
from vitdeploy.graph.analysis.prunable import find_prunable
from vitdeploy.graph.analysis.work import count_work
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.search.pruning import prunable_parts
from vitdeploy.stages.optimize import optimize
from vitdeploy.stages.rows import PRUNING_SEARCH, check_prune, find_prunings, input_moments, prune

RECIPE = """
vitdeploy: 1
name: pruned
source: {{model: vit_w32d2h2_patch8_32, checkpoint: {checkpoint}}}
preprocess: {{resize: 32, crop: 32, interpolation: bicubic, mean: [0.5], std: [0.5]}}
data: {{path: {digits}, labels: folders, calibration: {{images: 64}}, evaluation: {{images: 64}}, seed: 0}}
optimize: {{prune: 0.1}}
precision: int8
targets: [openvino-cpu, onnxruntime-cpu]
bench: {{scenarios: [single], batch: [1], duration: 0.5}}
"""


@pytest.fixture(scope="module")
def samples(digits):
    return split(digits, "none", calibration=64, evaluation=1, seed=0).calibration


@pytest.fixture(scope="module")
def optimized(small_export, tmp_path_factory):
    out = tmp_path_factory.mktemp("optimized")
    optimize({"model": small_export / "model.onnx"}, OptimizeOptions(), out)
    return out / "model.onnx"


@pytest.fixture(scope="module")
def found(optimized, samples, tmp_path_factory):
    out = tmp_path_factory.mktemp("pruning")
    find_prunings(optimized, samples, out)
    return PRUNING_SEARCH.read(out)


def macs(file):
    return sum(count_work(load_graph(file), 1).flops.values()) // 2


def test_the_share_that_goes_is_that_of_the_graph(optimized, found, samples, tmp_path):
    prune(optimized, found, 0.1, samples, tmp_path)
    facts = json.loads((tmp_path / "optimize.json").read_text(encoding="utf-8"))
    share = 1 - macs(tmp_path / "model.onnx") / macs(optimized)
    assert facts["pruning"]["model"]["share"] == pytest.approx(share)
    assert share >= 0.1
    left = {name: part.count for name, (part, _) in prunable_parts(load_graph(tmp_path / "model.onnx")).items()}
    for name, (kind, count, stay) in facts["pruning"]["model"]["kept"].items():
        assert 0 < stay < count
        assert left.get(name, 1) == stay or kind == "heads"
    before = json.loads((optimized.parent / "optimize.json").read_text(encoding="utf-8"))
    assert facts["rewrites"] == before["rewrites"]
    assert facts["nodes"]["model"][1] == len(load_graph(tmp_path / "model.onnx").graph)


def test_more_than_can_go_is_refused_with_what_can(optimized, found, samples, tmp_path):
    with pytest.raises(GraphError, match=r"a share of 0\.99 of this graph's MACs cannot be pruned") as caught:
        prune(optimized, found, 0.99, samples, tmp_path)
    most = float(caught.value.expected.removeprefix("optimize.prune up to "))
    prune(optimized, found, most, samples, tmp_path)


def test_a_graph_with_nothing_to_prune_is_refused(optimized, samples, tmp_path):
    model = load_graph(optimized)
    model.graph.outputs.extend(part.reader.input for part in find_prunable(model))
    save_graph(model, tmp_path / "model.onnx")
    with pytest.raises(GraphError, match="nothing in this graph can be pruned") as caught:
        find_prunings(tmp_path / "model.onnx", samples, tmp_path)
    assert caught.value.fix == "omit optimize.prune"


def test_a_fixed_batch_of_more_images_than_there_are_is_refused(optimized, samples, tmp_path):
    model = load_graph(optimized)
    model.graph.inputs[0].shape = ir.Shape([48, *list(model.graph.inputs[0].shape)[1:]])
    save_graph(model, tmp_path / "model.onnx")
    with pytest.raises(GraphError, match="the graph has a fixed batch size of 48") as caught:
        input_moments(tmp_path / "model.onnx", samples)
    assert (caught.value.found, caught.value.expected) == ("32 images for the pruning statistics", "at least 48")


def test_activations_that_are_not_finite_are_refused(optimized, samples, tmp_path):
    model = load_graph(optimized)
    part = next(each for each in find_prunable(model) if each.kind == "channels")
    [(first, _)] = part.columns
    Editor(model).set_linear(first, bias=np.full_like(first.bias, np.inf))
    save_graph(model, tmp_path / "model.onnx")
    with pytest.raises(DataError, match="activations are not finite on the calibration images") as caught:
        input_moments(tmp_path / "model.onnx", samples)
    assert caught.value.found.endswith(", on one of 8 images from image 1 on")


def test_a_model_of_several_graphs_is_refused():
    with pytest.raises(CapabilityError, match="pruning does not support this model") as caught:
        check_prune("sequence", None)
    assert caught.value.found == "the task sequence"


@pytest.mark.skipif("VITDEPLOY_TEST_DEPTH" not in os.environ, reason="`tune` has a pruned engine too")
def test_a_recipe_makes_its_engines_of_the_pruned_graph(small_checkpoint, digits, tmp_path):
    """All stages of both runtimes, the report, and the steps that a run without pruning has stored."""
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(checkpoint=small_checkpoint, digits=digits), encoding="utf-8")
    with command_line(tmp_path, tmp_path / "store", short_bench=True) as command:
        done = command("run", "recipe.yaml", "-o", "out", "--json")
        assert done.returncode in (0, 5), done.stderr
        report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
        plain = command("run", "recipe.yaml", "--set", "optimize.prune=none", "--dry-run", "--json", "-o", "plain")
    facts = report["optimize"]["pruning"]["model"]
    assert facts["share"] >= 0.1
    assert {engine["precision"] for engine in report["engines"]} == {"int8", "fp32"}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "of the MACs pruned; remaining:" in page
    reused = {row["step"]: row["reuse"] for row in json.loads(plain.stdout)["plan"]}
    assert reused["optimize"] and reused["export"] and not reused["calibrate"]

"""Graphs of other exporters, each through import, canonical form, rewrites and INT8 placement; the page of them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.compatibility.graphs import GRAPHS, Graph
from tests.compatibility_page import Page
from tests.quantization.test_families import pictures
from vitdeploy.exporter.parity import TOLERANCE, relative_difference
from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.analysis.rows import find_linears, unplaced_weights
from vitdeploy.graph.analysis.work import count_work
from vitdeploy.graph.io.files import load_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.models.source import Source
from vitdeploy.quantization import place_openvino
from vitdeploy.quantization.observers import observe
from vitdeploy.quantization.ranges import save_statistics, separate_scores
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.stages.compile import compile_graph
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.optimize import optimize
from vitdeploy.stages.place import PlaceConfig, place_graph
from vitdeploy.stages.reference_model import find_reference_model, reference_runner

TARGETS = ("openvino-cpu", "onnxruntime-cpu")
# Shape arithmetic, written-out formulas and leftovers, none of which the canonical form has.
ABSENT = ("BatchNormalization", "ConstantOfShape", "CumSum", "Dropout", "Einsum", "Equal", "Erf", "Flatten")
ABSENT += ("GlobalAveragePool", "Gemm", "Identity", "IsNaN", "Mod", "Pow", "Range", "Reciprocal", "ReduceProd", "Sqrt")
ABSENT += ("Tanh", "Tile", "Where")
PAGE = Page(
    "graphs",
    """# Graphs of other exporters

What `vitdeploy export FILE.onnx` makes of small models from other exporters. `TorchScript` and `dynamo` are
`torch.onnx`'s exporters. "RT-DETR names" and similar rows use the output names of that project's export script, on
transformers' RT-DETR. "Found" counts layer norms/GELUs/attentions in the canonical form. The INT8 columns give layers
with weights in INT8, of all such layers, and their share of MACs. Outputs before and after agree: max|a-b| / max|b| is
at most 1e-4, on ONNX Runtime and OpenVINO. Opsets are 13 to 20. `tests/compatibility/test_graphs.py` writes this page.

- A file with free image sizes needs `--image-size`.
- Scores of a detector that selects queries by score are independent (sigmoid). Otherwise the number of labels in a
  `config.json` beside the file decides; without it, vitdeploy assumes softmax with a last column "no object", and a
  note says so.
- Refused: boxes multiplied by the image size; one tensor of boxes and scores without final sigmoids (YOLO); `Erfc`,
  which tf2onnx writes for Keras' exact GELU and ONNX does not have.
- RF-DETR's `masks` are left out.
""",
    ("graph", "task, scores", "found", "INT8, OpenVINO", "INT8, ONNX Runtime", "remarks"),
    tuple(each.name for each in GRAPHS),
)


@pytest.fixture
def page(request):
    return lambda *cells: PAGE.check(cells, write=request.config.getoption("--write-compatibility"))


def found_in(model):
    """ "layer norms/GELUs/attentions" of a canonical graph."""
    census = Counter(node.op_type for node in model.graph)
    return f"{census['LayerNormalization']}/{census['Gelu']}/{len(find_attentions(model))}"


def left_in(model):
    """The operators that the canonical form should not have, for people; "" where none is left."""
    census = Counter(node.op_type for node in model.graph)
    found = {name: census[name] for name in ABSENT if census[name]}
    if census["Shape"] > 1:  # one reads the batch
        found["Shape"] = census["Shape"]
    names = ", ".join(f"{count} {name}" for name, count in found.items())
    return f"operators left: {names}" if names else ""


def in_int8(graph, target, statistics, out):
    """ "layers/all, share of MACs" of a placement."""
    folder = out / target
    folder.mkdir()
    placement = place_graph(PlaceConfig(target, "int8"), graph, statistics, folder)
    flops = count_work(load_graph(folder / "model.onnx"), 1).flops
    layers = len(placement["int8"])
    return f"{layers}/{layers + len(placement['float'])}, {100 * flops.get('int8', 0) // sum(flops.values())} %"


def largest_difference(reference_model, graph, out):
    """Between the file on ONNX Runtime and the rewritten graph on OpenVINO."""
    height, width = reference_model.image_size
    batch = 1 if reference_model.outputs[0].shape[0] == 1 else 2
    pixels = pictures(64, 2, 7)[:batch, :height, :width]
    with reference_runner(reference_model.source) as theirs:
        expected = theirs.infer({"image": normalise(pixels, reference_model.images)})
    with make_runner(out, compile_graph(graph, "openvino-cpu", batch, out)) as ours:
        found = ours.infer({"image": pixels})
    kept = reference_model.postprocess.comparable(expected) if reference_model.postprocess else expected
    return max(relative_difference(found[name], expected[name]) for name in kept)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_a_graph_of_another_exporter_comes_out_canonical_and_in_int8(graph: Graph, tmp_path: Path, monkeypatch, page):
    if graph.alike and "VITDEPLOY_TEST_DEPTH" not in os.environ:
        pytest.skip("much like another graph; VITDEPLOY_TEST_DEPTH=1 runs it too, as `make modules` does")
    monkeypatch.setattr(place_openvino, "FEW_WEIGHTS", 0)  # all layers of these are so small that they would stay float
    graph.write(tmp_path / "theirs.onnx")
    assert onnx.load(tmp_path / "theirs.onnx", load_external_data=False).opset_import[0].version == graph.opset
    for name in ("exported", "rewritten", "engine"):
        (tmp_path / name).mkdir()
    reference_model = find_reference_model(Source(model=str(tmp_path / "theirs.onnx"), image_size=graph.size))
    scores = reference_model.postprocess.scores if reference_model.postprocess else None
    assert (reference_model.task, scores) == (graph.task, graph.scores)
    fixed = reference_model.outputs[0].shape[0]
    batch = fixed if isinstance(fixed, int) else None
    export(reference_model, ExportConfig("small", 20, batch, True), tmp_path / "exported")

    exported = tmp_path / "exported" / "model.onnx"
    model = load_graph(exported)
    assert len(find_attentions(model)) == graph.attentions
    assert all(linear.bias is not None for linear in find_linears(model)) or "without q, k, v biases" in graph.name
    assert not unplaced_weights(model)
    optimize({"model": exported}, OptimizeOptions(), tmp_path / "rewritten")
    rewritten = tmp_path / "rewritten" / "model.onnx"
    assert largest_difference(reference_model, rewritten, tmp_path / "engine") <= TOLERANCE

    observed = load_graph(rewritten)
    separate_scores(observed)
    height, width = reference_model.image_size
    images = np.split(pictures(64, 4, 1)[:, :height, :width], 4 if batch else 2)
    save_statistics(observe(observed, images, reference_model.images), tmp_path / "statistics.npz")
    placed = [in_int8(rewritten, target, tmp_path / "statistics.npz", tmp_path) for target in TARGETS]
    task = f"{graph.task}, {scores}" if scores else graph.task
    remarks = "; ".join(filter(None, (graph.remark, left_in(model)))) or "-"
    page(graph.name, task, found_in(model), *placed, remarks)

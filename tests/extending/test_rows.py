"""A fold, a rewrite and a section of the report: a file each, and one row of a table; all through one run."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.command_line import command_line
from tests.documents import page_of
from tests.extending.toy_fold import equalise_relu
from tests.extending.toy_rewrite import PASS, REWRITE, merge_transposes
from tests.extending.toy_section import SECTION
from tests.graph.small_graphs import Builder, operators, random_feeds, run
from tests.quantization.test_folds import assert_folded, layers, observed, wide_mlp
from tests.report.test_html import REPORT
from vitdeploy.graph.canonical import normalise
from vitdeploy.graph.io.files import load_graph
from vitdeploy.graph.passes import optimize
from vitdeploy.quantization import prepare
from vitdeploy.report import html

HERE = Path(__file__).parent
# All that each extension consists of, but for its row.
FOLD_FILES, REWRITE_FILES, SECTION_FILES = (
    (HERE / "toy_fold.py",),
    (HERE / "toy_rewrite.py",),
    (HERE / "toy_section.py", HERE / "toy_section.html.jinja"),
)
TARGET = "onnxruntime-cpu"
RECIPE = """
vitdeploy: 1
name: rows
source: {{model: model.onnx}}
preprocess: {{resize: 32, crop: 32, mean: [0.5], std: [0.5]}}
data: {{path: {data}, labels: folders, calibration: {{images: 16}}, evaluation: {{images: 40}}}}
precision: int8
targets: [onnxruntime-cpu]
budget: {{min_agreement: 0}}
bench: {{scenarios: [single], batch: [1], duration: 0.5}}
"""


def model():
    """Patches, three Transposes where one would do, a norm, a MLP with a Relu and uneven channels, logits."""
    b, width, hidden = Builder(0), 16, 64
    patches = b.op(
        "Conv", "image", b.constant(b.random(width, 1, 8, 8), "patches.weight"), kernel_shape=[8, 8], strides=[8, 8]
    )
    rows = b.op("Reshape", patches, b.ints(-1, width, 16))
    for _ in range(3):
        rows = b.op("Transpose", rows, perm=[0, 2, 1])
    factors = 4.0 ** b.generator.integers(-3, 4, hidden)
    uneven = b.constant((b.random(width, hidden) * factors).astype(np.float32), "uneven")
    hidden_rows = b.op("Relu", b.linear(b.norm(rows, "norm", width), width, hidden, "fc1", weight=uneven))
    mean = b.op("ReduceMean", b.linear(hidden_rows, hidden, width, "fc2"), b.ints(1), keepdims=0)
    return b.model({"image": ["batch", 1, 32, 32]}, b.linear(mean, width, 10, "head"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, digits):
    """Of a run of `vitdeploy run`, with each row in its table."""
    folder, store = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("store")
    with command_line(folder, store, short_bench=True) as vitdeploy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "FOLDS", (equalise_relu, *prepare.FOLDS))
        patch.setattr(optimize, "REWRITES", (REWRITE, *optimize.REWRITES))
        patch.setattr(html, "RUN", (*html.RUN, SECTION))
        patch.setattr(html, "TEMPLATES", (*html.TEMPLATES, HERE))
        onnx.save(ir.to_proto(model()), "model.onnx")
        Path("recipe.yaml").write_text(RECIPE.format(data=digits))
        done = vitdeploy("run", "recipe.yaml", "-o", "bundle")
        assert done.returncode == 0, done.stderr
        return Path("bundle").resolve()


# --- the fold ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", [8, 12, 100])
def test_the_fold_keeps_every_bit(reach):
    """The statistics follow, and powers of two round nothing: float32 answers are equal, not close."""
    folded = wide_mlp(0, reach, "Relu")
    before = ir.to_proto(folded)
    [fold] = assert_folded(folded, equalise_relu)
    assert (fold.layers, fold.gain > 1) == (("fc2",), True)
    feeds = random_feeds(before, 4, 5)
    for ours, theirs in zip(run(ir.to_proto(folded), feeds), run(before, feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_fold_leaves_other_activations_and_float_layers():
    for untouched, chosen in ((wide_mlp(0, 12), True), (wide_mlp(0, 12, "Relu"), False)):
        before, known = ir.to_proto(untouched), observed(untouched)
        request = prepare.FoldRequest(layers(untouched) if chosen else [], prepare.QUANTIZE[TARGET].gain_threshold)
        assert equalise_relu(untouched, known, request) == (known, [])
        assert ir.to_proto(untouched) == before


def test_the_fold_takes_part_in_a_placement_whose_engine_runs(bundle):
    report = report_of(bundle)
    [int8] = [each for each in report["engines"] if each["precision"] == "int8"]
    assert ["fc2"] in [fold["layers"] for fold in int8["quantization"]["folds"]]
    assert "fc2" in int8["quantization"]["int8"]
    assert int8["kernels"]["int8"] >= 3
    assert int8["verify"]["n"] == 40
    assert int8["artifact"] in [row["artifact"] for row in report["bench"]["results"]]


def report_of(bundle):
    return json.loads((bundle / "report.json").read_text())


# --- the rewrite ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("perms", "left", "count"),
    [
        (([1, 2, 0], [0, 2, 1]), 1, 1),
        (([1, 2, 0], [2, 0, 1]), 0, 1),
        (([0, 2, 1], [2, 1, 0], [1, 0, 2]), 1, 2),
        ((None, None), 0, 1),
        ((None, [0, 2, 1]), 1, 1),
        (([0, 2, 1],), 1, 0),
    ],
)
def test_the_rewrite_leaves_equal_numbers(perms, left, count):
    b = Builder(0)
    x = b.op("Relu", "x")
    for perm in perms:
        x = b.op("Transpose", x, **({} if perm is None else {"perm": perm}))
    graph = b.model({"x": [2, 3, 4]}, b.op("Neg", x))
    before = ir.to_proto(graph)
    assert [merge_transposes(graph), merge_transposes(graph)] == [count, 0]
    after = ir.to_proto(graph)
    onnx.checker.check_model(after)
    assert operators(graph)["Transpose"] == left
    feeds = random_feeds(before, 1, 1)
    np.testing.assert_array_equal(run(after, feeds)[0], run(before, feeds)[0])


def test_the_rewrite_is_told_and_stands_in_the_graph_of_the_bundle(bundle):
    assert report_of(bundle)["optimize"]["rewrites"]["model"]["merge_transposes"] == 1
    assert "merge transposes" in (bundle / "report.html").read_text()
    assert not has_double_transpose(load_graph(bundle / "model.onnx"))


def test_as_a_pass_it_is_part_of_the_canonical_form(monkeypatch):
    graph = model()
    assert has_double_transpose(graph)
    monkeypatch.setattr(normalise, "PASSES", (*normalise.PASSES, PASS))
    assert normalise.normalise(graph)["transposes"] == 1
    assert not has_double_transpose(graph)


def has_double_transpose(graph):
    makers = [node.inputs[0].producer() for node in graph.graph if node.op_type == "Transpose"]
    return "Transpose" in [maker.op_type for maker in makers if maker is not None]


# --- the section ------------------------------------------------------------------------------------------------------


def test_the_section_is_in_the_page_of_a_run(bundle):
    page, rows = (bundle / "report.html").read_text(), report_of(bundle)["bench"]["results"]
    slowest = max(rows, key=lambda row: row["latency_ms"]["p50"])["artifact"]
    assert f'<h2 id="slowest">Slowest: {slowest}</h2>' in page
    section = page.partition('<h2 id="slowest">')[2].partition("</section>")[0]
    assert [row["artifact"] for row in rows if f"<dt>{row['artifact']}</dt>" not in section] == []
    assert section.count(" ms</dd>") == len(rows) >= 2


def test_the_section_is_left_out_where_nothing_was_measured(monkeypatch):
    monkeypatch.setattr(html, "RUN", (*html.RUN, SECTION))
    monkeypatch.setattr(html, "TEMPLATES", (*html.TEMPLATES, HERE))
    assert 'id="slowest"' not in page_of({**REPORT, "bench": None}, {})

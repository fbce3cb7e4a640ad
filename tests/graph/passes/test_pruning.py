"""Structures that go: what is found, what a graph without them computes, and what is left alone."""

import numpy as np
import onnx
import onnx_ir as ir
import openvino
import pytest

from tests.graph.passes.test_token_merging import vit
from tests.graph.small_graphs import (
    CHANNELS,
    FORMS,
    HEADS,
    WIDTH,
    Builder,
    attention_model,
    difference,
    random_feeds,
    run,
    sequence_first,
)
from vitdeploy.graph.analysis.prunable import find_prunable
from vitdeploy.graph.analysis.work import count_work
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.graph.passes.tokens import class_token_only, prune

HIDDEN = 8


def gone(part):
    """Every other structure goes, the first one too."""
    return [each for each in range(part.count) if each % 2 == 0][: max(part.count // 2, 1)]


def without(model, parts=None):
    """(before, after): the graph whose readers ignore some structures, and the graph without these."""
    editor = Editor(model)
    found = {part.name: part for part in find_prunable(model)}
    for part in found.values():
        weight = part.reader.weight.copy()
        weight[part.inputs[gone(part)].ravel()] = 0
        editor.set_linear(part.reader, weight)
    before = ir.to_proto(model)
    editor = Editor(model)
    for part in find_prunable(model):
        kept = [each for each in range(part.count) if each not in gone(part)]
        stay = np.sort(part.inputs[kept].ravel())
        bias = np.zeros(part.reader.weight.shape[1]) if part.reader.bias is None else part.reader.bias
        prune(editor, part, kept, part.reader.weight[stay], bias)
    drop_unused(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after)
    onnx.shape_inference.infer_shapes(
        after, check_type=True, strict_mode=True
    )  # the shapes that we wrote are not wrong
    return before, after


def assert_pruned(model, batch=2):
    before, after = without(model)
    feeds = random_feeds(before, batch, 3)
    for ours, reference in zip(run(after, feeds), run(before, feeds), strict=True):
        assert difference(ours, reference) <= 1e-6
    core = openvino.Core()
    options = {"INFERENCE_PRECISION_HINT": "f32"}  # some CPUs compute in BF16 otherwise
    engine = core.compile_model(core.read_model(after.SerializeToString()), "CPU", options)
    for ours, reference in zip(engine(feeds).values(), run(before, feeds), strict=True):
        assert difference(ours, reference) <= 1e-4
    return ir.from_proto(after)


# --- what goes has no effect, and nothing else changes ----------------------------------------------------------------


@pytest.mark.parametrize("class_only", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_structures_that_nothing_reads_go_without_a_trace(form, class_only):
    model = vit(form, blocks=2)
    if class_only:
        class_token_only(model)
    parts = find_prunable(model)
    names = [f"blocks.{i}.{name}" for i in range(2) for name in ("attn.proj", "mlp.fc2")]
    assert [(part.name, part.kind, part.count) for part in parts] == [
        (name, "heads" if "attn" in name else "channels", HEADS if "attn" in name else 2 * WIDTH) for name in names
    ]
    macs = sum(count_work(model, 1).flops.values()) // 2
    foreseen = sum(part.macs(model) * len(gone(part)) for part in parts)
    pruned = assert_pruned(model)
    assert macs - sum(count_work(pruned, 1).flops.values()) // 2 == foreseen
    assert [part.count for part in find_prunable(pruned)] == [WIDTH, WIDTH]  # of one head nothing more can go


@pytest.mark.parametrize("scale", ["query", "key", "scores", "divisor", None])
def test_factors_of_attention_stay(scale):
    assert_pruned(attention_model(scale=scale, form="columns"))


def gated(b, *, one):
    """SwiGLU (arXiv 2002.05202): silu(x W) * (x V), by one linear for both or by two."""
    if one:
        gate, up = b.op("Split", b.linear("x", WIDTH, 2 * HIDDEN, "w12"), b.ints(HIDDEN, HIDDEN), outputs=2, axis=-1)
    else:
        gate, up = b.linear("x", WIDTH, HIDDEN, "w1"), b.linear("x", WIDTH, HIDDEN, "w2", bias=False)
    silu = b.op("Mul", gate, b.op("Sigmoid", gate))
    return b.linear(b.op("Mul", silu, up), HIDDEN, WIDTH, "w3", bias=False)


@pytest.mark.parametrize("one", [True, False])
def test_both_halves_of_a_gated_mlp_go_together(one):
    b = Builder(4)
    model = b.model({"x": ["batch", 5, WIDTH]}, b.op("Tanh", gated(b, one=one)))
    [part] = find_prunable(model)
    assert (part.count, sum(columns.size for _, columns in part.columns)) == (HIDDEN, 2 * HIDDEN)
    pruned = assert_pruned(model)
    [part] = find_prunable(pruned)
    assert part.count == HIDDEN // 2


def test_rows_may_be_folded_on_the_way():
    """As simplifiers write it: rows in one axis for every linear."""
    b = Builder(3)
    hidden = b.linear(b.op("Reshape", "x", b.ints(-1, WIDTH)), WIDTH, HIDDEN, "fc1")
    hidden = b.op("Gelu", b.op("Reshape", hidden, b.ints(-1, 5, HIDDEN)))
    result = b.linear(b.op("Reshape", hidden, b.ints(-1, HIDDEN)), HIDDEN, WIDTH, "fc2")
    model = b.model({"x": ["batch", 5, WIDTH]}, b.op("Reshape", result, b.ints(-1, 5, WIDTH)))
    assert [part.count for part in find_prunable(model)] == [HIDDEN]
    assert_pruned(model)


# --- what is left alone -----------------------------------------------------------------------------------------------


def mlp(b, between=lambda b, hidden: hidden, outputs=lambda hidden: ()):
    hidden = b.op("Gelu", b.linear("x", WIDTH, HIDDEN, "fc1"))
    result = b.linear(between(b, hidden), HIDDEN, WIDTH, "fc2")
    return b.model({"x": ["batch", 5, WIDTH]}, result, *outputs(hidden))


@pytest.mark.parametrize(
    "model",
    [
        lambda b: mlp(b, lambda b, hidden: b.norm(hidden, "norm", HIDDEN)),  # as in EVA-02
        lambda b: mlp(b, lambda b, hidden: b.op("Mul", hidden, b.constant(b.random(HIDDEN)))),
        lambda b: mlp(b, lambda b, hidden: b.op("Softmax", hidden, axis=-1)),
        lambda b: mlp(b, outputs=lambda hidden: (hidden,)),
        lambda b: mlp(b, outputs=lambda hidden: (b.op("ReduceMean", hidden, b.ints(-1)),)),
        lambda b: b.model({"x": ["batch", 5, WIDTH]}, b.linear("x", WIDTH, WIDTH, "alone")),
        lambda b: sequence_first(b, 5),
    ],
    ids=["norm", "vector", "softmax", "output", "read elsewhere", "no pair", "heads in the batch"],
)
def test_what_is_read_as_a_whole_stays(model):
    assert find_prunable(model(Builder(2))) == []


def test_heads_with_positions_of_their_own_stay():
    mask = np.random.default_rng(0).standard_normal((1, HEADS, 5, 5)).astype(np.float32)
    assert find_prunable(attention_model(mask=mask)) == []
    assert [part.count for part in find_prunable(attention_model(mask=mask[:, :1]))] == [HEADS]


def test_norms_of_queries_and_keys_keep_the_heads():
    assert find_prunable(attention_model(qk_norm=True)) == []


def test_a_linear_takes_part_in_one_pair_alone():
    """Of three linears in a row the one in the middle is the reader of the first."""
    b = Builder(1)
    first = b.op("Relu", b.linear("x", WIDTH, HIDDEN, "fc1"))
    second = b.op("Relu", b.linear(first, HIDDEN, HIDDEN, "fc2"))
    model = b.model({"x": ["batch", 5, WIDTH]}, b.linear(second, HIDDEN, CHANNELS, "fc3"))
    assert [part.name for part in find_prunable(model)] == ["fc2"]
    assert_pruned(model)

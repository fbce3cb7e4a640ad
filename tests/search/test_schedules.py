"""Schedules of token merging: which counts are tried, what costs predict, what merging does to the answers."""

from dataclasses import replace

import numpy as np
import pytest

from tests.search.conftest import BATCH, PREPROCESS
from tests.search.planted_layer import known_costs
from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.tokens import merge_tokens
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.frame import Expected, ReferenceOutputs
from vitdeploy.search.layers import Shape
from vitdeploy.search.rows import (
    Schedule,
    TokenStream,
    counts_to_try,
    find_tokens,
    predict_times,
    select,
    try_schedules,
)

# Three blocks of one linear over all tokens each, of which the last one is so dear that it alone counts.
CHEAP, DEAR = Shape(65, 8, 8), Shape(65, 8, 64)
TOKENS = TokenStream(
    65,
    1,
    {"a": CHEAP, "b": CHEAP, "c": DEAR},
    {0: frozenset("bc"), 1: frozenset("c"), 2: frozenset()},
)


def table(microseconds):
    """A table whose times are `microseconds(shape)`."""
    return known_costs(lambda shape, form: microseconds(shape))


def test_counts_are_multiples_of_a_tile_and_at_most_half_of_the_patches_go():
    assert counts_to_try(replace(TOKENS, count=197)) == (192, 176, 160, 144, 128, 112)
    assert counts_to_try(TOKENS) == (64, 48)
    counts = counts_to_try(replace(TOKENS, count=577))
    assert counts[0] == 576
    assert len(counts) <= 8
    assert all(count % 16 == 0 for count in counts)
    assert min(counts) >= 289
    assert counts_to_try(replace(TOKENS, count=17)) == (16,)
    assert counts_to_try(replace(TOKENS, count=16)) == ()


def test_times_of_rows_behind_a_merge_add_up():
    found = predict_times(TOKENS, table(lambda shape: shape.rows * shape.n / 8))
    # Without: 65 (1 + 1 + 8). Behind the attention of block 1, the second and the middle one, is the dear layer alone;
    # 64 tokens save less than merging takes.
    assert found == {((1, 48),): pytest.approx((65 * 2 + 48 * 8) / 650)}


def test_two_merges_go_to_the_largest_count_first():
    tokens = replace(TOKENS, behind={**TOKENS.behind, 3: frozenset(), 4: frozenset()})
    found = predict_times(tokens, table(lambda shape: {65: 10.0, 64: 6.0, 48: 5.0}[shape.rows] * shape.n / 8))
    # Block 1 and the middle one, 2, behind which nothing is left.
    assert found == {((1, 64),): pytest.approx(68 / 100), ((1, 48),): 0.6, ((1, 64), (2, 48)): pytest.approx(0.68)}


def test_a_count_that_is_slower_is_not_proposed():
    slow_at_48 = table(lambda shape: {65: 2.0, 64: 1.0, 48: 3.0}[shape.rows] * shape.n)
    assert list(predict_times(TOKENS, slow_at_48)) == [((1, 64),)]
    assert predict_times(TOKENS, table(lambda shape: 1.0)) == {}


def test_without_a_table_products_count():
    assert predict_times(TOKENS, None) == predict_times(TOKENS, table(lambda shape: shape.macs))


def test_the_tokens_of_a_graph(small_export):
    found = find_tokens(load_graph(small_export / "model.onnx"))
    assert (found.count, found.prefix) == (17, 1)
    assert set(found.shapes) >= {"blocks.0.attn.qkv", "blocks.1.mlp.fc2"}
    assert {shape.rows for shape in found.shapes.values()} == {17}
    assert "blocks.0.attn.qkv" not in found.behind[0]
    assert {"blocks.0.mlp.fc1", "blocks.1.attn.qkv"} <= found.behind[0]


def test_a_graph_whose_tokens_cannot_be_merged(sequence_export):
    with pytest.raises(GraphError, match="cannot be merged"):
        find_tokens(load_graph(sequence_export / "encoder.onnx"))


def test_what_merging_does_is_what_the_merged_graph_answers(small_export, calibration_pixels, tmp_path):
    graph = small_export / "model.onnx"
    with OnnxRuntimeRunner(graph, name="float", batch=BATCH) as runner:
        reference_outputs = ReferenceOutputs(runner, calibration_pixels, PREPROCESS, "classification", batch=BATCH)
    told = []
    [found] = try_schedules(graph, {((0, 12),): 0.75}, reference_outputs, lambda *step: told.append(step[1:]))
    assert told == [(0, 1), (1, 1)]
    model = load_graph(graph)
    merge_tokens(model, {0: 12})
    save_graph(model, tmp_path / "merged.onnx")
    with OnnxRuntimeRunner(tmp_path / "merged.onnx", name="merged", batch=BATCH) as runner:
        answers = reference_outputs.ask(runner)
    assert found.merges == ((0, 12),)
    assert found.time == 0.75
    assert found.distance == pytest.approx(float(np.mean(reference_outputs.distance(answers))))
    assert found.distance > 0
    assert found.expected == reference_outputs.expected(answers)


def schedule(distance, time):
    return Schedule(((1, 48),), time, distance, Expected(99.0, 0.1))


def test_the_mildest_and_the_fastest_of_the_front_are_selected():
    mild, middle, fast, beaten = schedule(1.0, 0.9), schedule(2.0, 0.8), schedule(3.0, 0.7), schedule(2.5, 0.85)
    assert select([fast, beaten, middle, mild], lambda each: True) == [mild, fast]
    assert select([fast, middle, mild], lambda each: each.distance < 3) == [mild, middle]
    assert select([fast, mild], lambda each: each.distance < 2) == [mild]
    assert select([fast], lambda each: False) == []

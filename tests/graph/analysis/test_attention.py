"""Attention is found in every form, and nothing else is taken for it."""

import numpy as np
import pytest

from tests.graph.small_graphs import FORMS, HEADS, WIDTH, Builder, attention_model
from vitdeploy.graph.analysis.attention import find_attentions

TOKENS = 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", ["query", "scores", "divisor", None])
def test_the_nodes_of_attention_are_found(form, scale):
    [found] = find_attentions(attention_model(TOKENS, form, scale=scale, mask=np.ones((1, 1, TOKENS), np.float32)))
    assert (found.scores.name, found.softmax.name, found.mix.name) == ("attn/scores", "attn/Softmax", "attn/mix")
    factor = {"scores": ["Mul"], "divisor": ["Div"]}.get(scale, [])
    assert [node.op_type for node in found.between] == [*factor, "Add"]
    assert found.query.shape[-2:] == (TOKENS, 4)
    assert found.key.shape[-2:] == (4, TOKENS)
    assert found.value.shape[-2:] == (TOKENS, 4)


def test_a_factor_for_each_head_and_a_mask_behind_a_reshape_are_between():
    b = Builder()
    query = b.op("Reshape", "x", b.ints(-1, HEADS, TOKENS, 4))
    scores = b.op("MatMul", query, b.op("Transpose", query, perm=[0, 1, 3, 2]))
    scores = b.op("Mul", scores, b.constant(b.random(HEADS, 1, 1)))
    scores = b.op("Reshape", scores, b.ints(-1, 1, HEADS, TOKENS, TOKENS))
    scores = b.op("Add", b.constant(b.random(1, 1, TOKENS, TOKENS)), scores)
    scores = b.op("Reshape", scores, b.ints(-1, HEADS, TOKENS, TOKENS))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("MatMul", b.op("Softmax", scores, axis=3), query))
    [found] = find_attentions(model)
    assert [node.op_type for node in found.between] == ["Mul", "Reshape", "Add", "Reshape"]


MASK = np.arange(TOKENS) != 1


@pytest.mark.parametrize("kept_first", [True, False])
def test_a_mask_of_truth_values_is_between(kept_first):
    def masked(b, scores):
        choices = [scores, b.constant(np.float32(-np.inf))]
        mask = b.constant(MASK if kept_first else ~MASK)
        return b.op("Where", mask, *(choices if kept_first else choices[::-1]))

    [found] = find_attentions(score_graph(masked))
    assert [node.op_type for node in found.between] == ["Where"]


@pytest.mark.parametrize("axis", [-2, 1])
def test_a_softmax_over_another_axis_is_not_attention(axis):
    assert find_attentions(attention_model(TOKENS, axis=axis)) == []


def score_graph(between, *, outputs=(), after=lambda b, softmax: softmax):
    """x x^T -> between -> Softmax -> after -> x, [batch, TOKENS, WIDTH]."""
    b = Builder()
    scores = b.op("MatMul", "x", b.op("Transpose", "x", perm=[0, 2, 1]), name="scores")
    result = b.op("MatMul", after(b, b.op("Softmax", between(b, scores), axis=-1)), "x")
    return b.model({"x": ["batch", TOKENS, WIDTH]}, result, *outputs)


def test_scores_that_leave_the_graph_are_not_to_be_changed():
    assert len(find_attentions(score_graph(lambda b, scores: scores))) == 1
    assert find_attentions(score_graph(lambda b, scores: scores, outputs=["scores"])) == []


@pytest.mark.parametrize(
    "between",
    [
        lambda b, scores: b.op("Relu", scores),
        lambda b, scores: b.op("Where", b.constant(MASK), scores, b.constant(np.float32(-9))),
        lambda b, scores: b.op("Mul", scores, b.constant(b.random(TOKENS))),
        lambda b, scores: b.op("Div", b.constant(np.float32(1)), scores),
        lambda b, scores: b.op("Add", scores, scores),
        lambda b, scores: b.op("MatMul", "x", b.constant(b.random(WIDTH, TOKENS))),
    ],
    ids=["relu", "finite mask", "factor along a row", "reciprocal", "twice", "weights"],
)
def test_scores_that_pass_anything_else_are_not_attention(between):
    assert find_attentions(score_graph(between)) == []


@pytest.mark.parametrize(("rows", "count"), [(TOKENS, 1), (1, 0)], ids=["each row", "all rows at once"])
def test_a_softmax_over_several_rows_is_not_attention(rows, count):
    b = Builder()
    scores = b.op("MatMul", "x", b.op("Transpose", "x", perm=[0, 2, 1]))
    length = TOKENS * TOKENS // rows
    softmax = b.op("Softmax", b.op("Reshape", scores, b.ints(-1, rows, length)), axis=-1)
    inputs = {"x": ["batch", TOKENS, WIDTH], "values": ["batch", length, WIDTH]}
    assert len(find_attentions(b.model(inputs, b.op("MatMul", softmax, "values")))) == count


def test_what_comes_between_softmax_and_values_ends_attention():
    assert find_attentions(score_graph(lambda b, scores: scores, after=lambda b, softmax: b.op("Relu", softmax))) == []


def test_a_softmax_that_two_products_read_is_not_attention():
    b = Builder()
    softmax = b.op("Softmax", b.op("MatMul", "x", b.op("Transpose", "x", perm=[0, 2, 1])), axis=-1)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, b.op("MatMul", softmax, "x"), b.op("MatMul", softmax, "x"))
    assert find_attentions(model) == []

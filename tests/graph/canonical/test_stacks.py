"""One part of a stack: what the other parts need is dead code."""

import numpy as np
import pytest

from tests.graph.small_graphs import Builder, assert_rewritten, operators
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.canonical.shapes import unstack


def stacked(index, axis=1, taken=1, between=None):
    """Three tensors [batch, 4] stacked behind the batch, and one of them."""
    b = Builder(0)
    parts = [b.op("Unsqueeze", b.linear("x", 4, 4, f"layer{i}"), b.ints(axis)) for i in range(3)]
    stack = b.op("Concat", *parts, axis=axis)
    if between is not None:
        stack = b.op(between, stack)
    return b.model({"x": ["batch", 4]}, b.op("Gather", stack, b.constant(index), axis=taken))


@pytest.mark.parametrize("index", [0, 2, -1, -3])
def test_one_part_is_taken_as_it_is(index):

    model = stacked(np.array(index))
    assert_rewritten(model, unstack, 1, bit_exact=True)
    normalise(model)
    assert operators(model) == {"MatMul": 1, "Add": 1}


@pytest.mark.parametrize(
    "options", [{"index": [0, 1]}, {"index": [1]}, {"taken": 2}, {"between": "Relu"}], ids=lambda each: next(iter(each))
)
def test_anything_else_stays(options):

    options = {"index": 1} | options
    assert_rewritten(stacked(**options | {"index": np.array(options["index"])}), unstack, 0)

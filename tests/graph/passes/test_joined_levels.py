"""Levels of feature maps joined before they are transposed, and what must stay."""

import pytest

from tests.graph.small_graphs import Builder, assert_rewritten, operators
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.passes.rows import join_before_transpose


def levels(perms=((0, 2, 1), (0, 2, 1)), axis=1, shown=False, read=True):
    """Two levels of 6 and 4 places with 8 channels, as one list of tokens that a linear reads."""
    b = Builder(0)
    maps = [b.op("Reshape", f"level{i}", b.ints(0, 8, -1)) for i in range(2)]
    tokens = [b.op("Transpose", each, perm=list(perm)) for each, perm in zip(maps, perms, strict=True)]
    joined = b.op("Concat", *tokens, axis=axis)
    out = b.linear(joined, 8, 4, "linear") if read else b.op("Relu", joined)
    inputs = {"level0": ["batch", 8, 2, 3], "level1": ["batch", 8, 2, 2]}
    return b.model(inputs, out, *(tokens[:1] if shown else ()))


def rewrite(model):
    return join_before_transpose(model, find_linears(model))


def test_maps_are_joined_and_transposed_once():
    model = levels()
    assert_rewritten(model, rewrite, 1)
    assert operators(model)["Transpose"] == 1


@pytest.mark.parametrize("options", [{"shown": True}, {"read": False}], ids=["shown", "no linear"])
def test_what_else_is_read_stays(options):
    assert_rewritten(levels(**options), rewrite, 0)

"""Products written by letters, and norms between heads and their product: one form, the same function."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.builder import Builder, census, checked, difference, run, values
from vitdeploy.graph.canonical.normalise import normalise

SIZES = {"b": 2, "c": 3, "d": 4, "e": 5, "f": 2, "g": 3}


def normalised(proto):
    model = ir.from_proto(proto)
    normalise(model)
    return checked(model)


def same(proto, **feeds):
    after = normalised(proto)
    assert difference(run(after, **feeds), run(proto, **feeds)) <= 1e-5
    return census(after)


@st.composite
def equations(draw):
    """Of distinct letters: some of both operands and the result, some summed up, some of one operand."""
    letters = draw(st.permutations(list(SIZES)))
    counts = [draw(st.integers(low, 2)) for low in (0, 1, 0, 0)]
    ends = np.cumsum(counts)
    batch, summed, left, right = ("".join(letters[end - n : end]) for n, end in zip(counts, ends, strict=True))
    parts = [batch + summed + left, batch + summed + right, batch + left + right]
    return ["".join(draw(st.permutations(list(part)))) for part in parts]


@settings(max_examples=30, deadline=None)
@given(equations().filter(lambda parts: all(parts)), st.sampled_from(["left", "right", "none"]))
def test_any_product_by_letters_is_the_same_function(parts, constant):
    first, second, out = parts
    shapes = [[SIZES[letter] for letter in part] for part in (first, second)]
    b, feeds, operands = Builder(), {}, []
    for side, shape, name in zip(("left", "right"), shapes, "xy", strict=True):
        array = values(*shape, seed=ord(name))
        operands.append(b.constant(array) if side == constant else b.input(name, shape))
        if side != constant:
            feeds[name] = array
    proto = b.model(b.add("Einsum", *operands, equation=f"{first},{second}->{out}"))
    same(proto, **feeds)


@pytest.mark.parametrize(
    ("equation", "weight", "left"),
    [
        ("bnd,dhe->bhne", (8, 2, 4), {"MatMul": 1, "Reshape": 1, "Transpose": 1}),
        ("bnd,de", (8, 6), {"MatMul": 1, "Transpose": 1}),  # the result in the order of the alphabet
        ("bnd,ed->bne", (6, 8), {"MatMul": 1}),
        ("bnd, nd -> bn", (5, 8), {"Einsum": 1}),  # no product of matrices
        ("...d,de->...e", (8, 6), {"Einsum": 1}),
    ],
)
def test_a_projection_by_letters_is_a_linear_at_any_batch(equation, weight, left):
    b = Builder()
    proto = b.model(b.add("Einsum", b.input("x", ["batch", 5, 8]), values(*weight), equation=equation))
    for batch in (1, 3):
        assert same(proto, x=values(batch, 5, 8)) == left


@pytest.mark.parametrize(("perm", "before"), [([0, 2, 1, 3], True), ([0, 3, 1, 2], False)])
def test_queries_are_normalised_before_their_heads_are_moved(perm, before):
    b = Builder()
    x = b.input("x", ["batch", 3, 3, 8])
    width = [3, 3, 3, 8][perm[3]]
    moved = b.add("Transpose", x, perm=perm)
    norm = b.add("LayerNormalization", moved, values(width, seed=1), values(width, seed=2), axis=3)
    proto = b.model(b.add("Mul", norm, 2.0), rank=4)
    after = normalised(proto)
    assert difference(run(after, x=values(2, 3, 3, 8)), run(proto, x=values(2, 3, 3, 8))) <= 1e-5
    order = [node.op_type for node in after.graph.node]
    assert (order.index("LayerNormalization") < order.index("Transpose")) == before

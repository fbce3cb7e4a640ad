"""What is the same for every image becomes a constant, through what a detector makes of a mask of padding."""

import numpy as np
import onnx_ir as ir
import pytest

from tests.graph.builder import Builder, census, checked, difference, run, values
from vitdeploy.graph.canonical.normalise import normalise

BOOL, FLOAT = 9, 1


def mask(b, x):
    """Ones [batch, 4, 6] of the free batch of x."""
    batch = b.add("Slice", b.add("Shape", x), np.array([0]), np.array([1]), np.array([0]))
    return b.add("Expand", np.ones(1, np.float32), b.add("Concat", batch, np.array([4, 6]), axis=0))


def divided(b, m):
    return b.add("Div", b.add("CumSum", m, np.int64(2)), b.add("Slice", m, np.array([1]), np.array([2]), np.array([1])))


STEPS = {
    "cumulated": lambda b, m: b.add("CumSum", m, np.int64(1)),
    "cast": lambda b, m: b.add("Cast", b.add("Cast", m, to=BOOL), to=FLOAT),
    "sliced": lambda b, m: b.add("Slice", m, np.array([1]), np.array([3]), np.array([1])),
    "moved": lambda b, m: b.add("Transpose", b.add("Sin", m), perm=[2, 0, 1]),
    "viewed": lambda b, m: b.add("Reshape", m, np.array([-1, 24])),
    "joined": lambda b, m: b.add("Concat", b.add("Sin", m), b.add("Cos", m), axis=2),
    "divided": divided,
    "picked": lambda b, m: b.add("Gather", b.add("Unsqueeze", m, np.array([0])), np.int64(0)),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_mask_of_ones_is_a_constant_after(step):
    b = Builder(17)
    x = b.input("x", ["batch", 1])
    made = STEPS[step](b, mask(b, x))
    counted = b.add("CumSum", mask(b, x), np.int64(1))  # what tells that the graph makes positions of masks
    shape = {"rank": 2 if step == "viewed" else 3}
    before = b.model(b.add("Add", b.add("Exp", made), np.float32(1)), b.add("Exp", counted), **shape)
    model = ir.from_proto(before)
    normalise(model, opset=20)
    after = checked(model)
    assert set(census(after)) <= {"Shape", "Concat", "Expand"}  # of the last result alone
    for batch in (1, 3):
        for ours, expected in zip(run(after, x=values(batch, 1)), run(before, x=values(batch, 1)), strict=True):
            assert difference(ours, expected) <= 1e-6


@pytest.mark.parametrize("step", ["cumulated", "sliced"])
def test_what_mixes_images_stays(step):
    b = Builder(17)
    x = b.input("x", ["batch", 1])
    ones = mask(b, x)
    if step == "cumulated":
        made = b.add("CumSum", ones, np.int64(0))
    else:
        made = b.add("Slice", ones, np.array([1]), np.array([9]), np.array([0]))
    before = b.model(b.add("Exp", made), b.add("Exp", b.add("CumSum", ones, np.int64(1))))
    model = ir.from_proto(before)
    normalise(model, opset=20)
    for ours, expected in zip(run(checked(model), x=values(3, 1)), run(before, x=values(3, 1)), strict=True):
        assert difference(ours, expected) <= 1e-6
    assert {"cumulated": "CumSum", "sliced": "Slice"}[step] in census(checked(model))

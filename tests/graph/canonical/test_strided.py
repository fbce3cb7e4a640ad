"""PyTorch's `as_strided`, a Gather by sums of Range nodes, is a view where the strides are those of a whole tensor."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from torch import nn

from tests.graph.builder import Builder, census, checked, difference, run, values
from vitdeploy.graph.canonical.normalise import normalise

SHAPE = (4, 3, 2)  # of one image


def strided(strides, offset=0, *, whole=SHAPE, sizes=SHAPE, constant=False):
    """x [batch, *whole], element by element: image i's are those of x.reshape(-1) at i strides[0] + ..."""
    b = Builder(18)
    x = b.input("x", ["batch", *whole])
    batch = b.add("Squeeze", b.add("Shape", x, start=0, end=1))
    rows = b.add("Range", np.int64(0), batch, np.int64(1))
    index = b.add("Unsqueeze", b.add("Mul", rows, np.int64(strides[0])), np.arange(1, 1 + len(sizes)))
    steps = [np.arange(size, dtype=np.int64) * stride for size, stride in zip(sizes, strides[1:], strict=True)]
    grids = [step.reshape([-1 if i == axis else 1 for i in range(len(sizes))]) for axis, step in enumerate(steps)]
    for grid in [sum(grids)] if constant else grids:
        index = b.add("Add", index, grid)
    index = b.add("Add", index, np.int64(offset)) if offset else index
    picked = b.add("Gather", b.add("Reshape", x, np.array([-1], np.int64)), index)
    return b.model(b.add("Neg", picked), rank=1 + len(sizes))


def normalised(proto):
    model = ir.from_proto(proto)
    normalise(model)
    return checked(model)


@pytest.mark.parametrize("constant", [True, False])
def test_strides_of_the_whole_tensor_leave_nothing(constant):
    before = strided((24, 6, 2, 1), constant=constant)
    after = normalised(before)
    assert census(after) == {"Neg": 1}
    x = values(3, *SHAPE)
    np.testing.assert_array_equal(run(after, x=x), run(before, x=x))


def test_another_shape_of_as_many_elements_is_one_view():
    before = strided((24, 4, 1, 7), sizes=(6, 4, 1))  # an axis of size 1 may have any stride
    after = normalised(before)
    assert census(after) == {"Reshape": 1, "Neg": 1}
    x = values(3, *SHAPE)
    np.testing.assert_array_equal(run(after, x=x), run(before, x=x))


@given(
    strides=st.permutations((24, 6, 2, 1)) | st.tuples(*[st.integers(0, 3)] * 4),
    sizes=st.sampled_from([SHAPE, (4, 3, 1), (2, 2, 2)]),
    offset=st.integers(0, 2),
    constant=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_whatever_the_strides_the_function_stays(strides, sizes, offset, constant):
    whole = (40, 3, 2)  # so that no index is out of range
    before = strided(strides, offset, whole=whole, sizes=sizes, constant=constant)
    after = normalised(before)
    assert census(after)["Gather"] == 1
    x = values(2, *whole)
    np.testing.assert_array_equal(run(after, x=x), run(before, x=x))


@pytest.mark.parametrize(
    ("strides", "sizes"), [((24, 6, 2, 1), (4, 3, 1)), ((24, 2, 8, 1), SHAPE), ((0, 6, 2, 1), SHAPE)]
)
def test_elements_that_move_keep_their_gather(strides, sizes):
    before = strided(strides, sizes=sizes)
    after = normalised(before)
    assert census(after)["Gather"] == 1
    x = values(1, *SHAPE)
    np.testing.assert_array_equal(run(after, x=x), run(before, x=x))


def test_a_table_is_still_read_by_its_index():
    b = Builder(18)
    index = b.input("index", ["batch", 3], TensorProto.INT64)
    after = normalised(b.model(b.add("Gather", values(6), index)))
    assert census(after) == {"Gather": 1}


class Pooled(nn.Module):
    """As the pooler of transformers' Swin and Swinv2."""

    def forward(self, tokens):
        return nn.functional.adaptive_avg_pool1d(tokens.transpose(1, 2), 1).flatten(1)


def test_adaptive_pooling_to_one_is_a_mean(tmp_path):
    example, path = torch.zeros(2, 9, 4), tmp_path / "pool.onnx"
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(
        Pooled().eval(), (example,), path, dynamo=True, opset_version=18, dynamic_shapes=shapes, verbose=False,
        input_names=["x"], external_data=False,
    )  # fmt: skip
    model = ir.load(path)
    normalise(model)
    found = census(checked(model))
    assert found["ReduceMean"] == 1
    assert not {"Shape", "Range", "Gather", "Mul", "Add"} & found.keys()
    for batch in (1, 3):
        x = values(batch, 9, 4)
        assert difference(run(checked(model), x=x), [x.mean(axis=1)]) <= 1e-6

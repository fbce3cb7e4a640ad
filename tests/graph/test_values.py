"""Reading constants: which initializers count as constants, for whom."""

import numpy as np
import onnx_ir as ir
import pytest

from vitdeploy.graph.edit import constant
from vitdeploy.graph.values import array_of, floats_of, integers_of, is_constant, scalar_of


def initializer(array, *, fed=False):
    """An initializer of a graph, which lists it among its inputs too where it is `fed`."""
    value = constant(np.asarray(array), "c")
    ir.Graph([value] if fed else [], [], nodes=[], initializers=[value], opset_imports={"": 20})
    return value


def test_a_constant_of_any_type_and_shape_is_read():
    for array in (np.float32(3), np.ones((2, 3), np.float16), np.array([True]), np.array([1, 2], np.int32)):
        np.testing.assert_array_equal(array_of(initializer(array)), array)
    assert scalar_of(initializer([[4]])) == 4
    assert scalar_of(initializer([4, 5])) is None


@pytest.mark.parametrize("read", [array_of, floats_of, integers_of, scalar_of])
def test_nothing_and_what_is_computed_are_no_constants(read):
    assert read(None) is None
    assert read(ir.node("Relu", [initializer(np.float32(1))]).outputs[0]) is None


def test_readers_of_one_type_leave_others():
    assert floats_of(initializer(np.ones(2, np.float16))) is None
    assert integers_of(initializer(np.ones(2, np.int32))) is None
    assert integers_of(initializer(np.array([[1, -1]]))) == [1, -1]


def test_a_weight_among_the_inputs_is_found_but_no_constant_to_fold():
    floats, integers = (
        initializer(np.ones(2, np.float32), fed=True),
        initializer(np.array([7]), fed=True),
    )
    assert floats.is_graph_input() and not is_constant(floats) and is_constant(floats, overridable=True)
    assert array_of(floats) is None and scalar_of(integers) is None
    assert floats_of(floats).tolist() == [1, 1] and integers_of(integers) == [7]

"""An operation that is called row-wise is: a row of its output does not see other rows of its inputs."""

import numpy as np
import onnx_ir as ir
import pytest

from tests.graph.small_graphs import Builder, run
from vitdeploy.graph.analysis.rows import rows_of_inputs

SHAPE = (2, 6, 4)  # of "x" and "y"


def op(operator, *inputs, **attributes):
    """An operation of "x", "y" and constants."""

    def write(b):
        return b.op(
            operator, *(b.constant(one) if isinstance(one, np.ndarray) else one for one in inputs), **attributes
        )

    return write


def ints(*values):
    return np.array(values, np.int64)


MATRIX, VECTOR = np.ones((4, 3), np.float32), np.arange(4, dtype=np.float32)
# operation -> for each axis of the output, the axis of each input that it goes with; None: not row-wise
OPERATIONS = {
    "unary": (op("Tanh", "x"), [{0: 0}, {0: 1}, {0: 2}]),
    "two tensors": (op("Add", "x", "y"), [{0: 0, 1: 0}, {0: 1, 1: 1}, {0: 2, 1: 2}]),
    "tensor and vector": (op("Mul", VECTOR, "x"), [{1: 0}, {1: 1}, {0: 0, 1: 2}]),
    "column": (op("Sub", "x", np.ones((6, 1), np.float32)), [{0: 0}, {0: 1, 1: 0}, {0: 2}]),
    "norm": (op("LayerNormalization", "x", VECTOR, axis=-1), [{0: 0}, {0: 1}, None]),
    "norm of two axes": (op("LayerNormalization", "x", np.ones((6, 4), np.float32), axis=1), [{0: 0}, None, None]),
    "softmax": (op("Softmax", "x", axis=1), [{0: 0}, None, {0: 2}]),
    "concat": (op("Concat", "x", "y", axis=2), [{0: 0, 1: 0}, {0: 1, 1: 1}, None]),
    "weights": (op("MatMul", "x", MATRIX), [{0: 0}, {0: 1}, None]),
    "two products": (op("MatMul", "x", np.ones((2, 4, 3), np.float32)), [None, {0: 1}, None]),
    "transpose": (op("Transpose", "x", perm=[2, 0, 1]), [{0: 2}, {0: 0}, {0: 1}]),
    "transpose without perm": (op("Transpose", "x"), [{0: 2}, {0: 1}, {0: 0}]),
    "reshape": (op("Reshape", "x", ints(2, 6, 2, 2)), [{0: 0}, {0: 1}, None, None]),
    "reshape that joins": (op("Reshape", "x", ints(12, -1)), [None, {0: 2}]),
    "squeeze": (op("Squeeze", "one", ints(1)), [{0: 0}, {0: 2}, {0: 3}]),
    "unsqueeze": (op("Unsqueeze", "x", ints(-2)), [{0: 0}, {0: 1}, None, {0: 2}]),
    "slice": (op("Slice", "x", ints(1), ints(5), ints(-2)), [{0: 0}, None, {0: 2}]),
    "gather of one": (op("Gather", "x", np.array(2, np.int64), axis=1), [{0: 0}, {0: 2}]),
    "gather of some": (op("Gather", "x", ints(2, 0), axis=1), [{0: 0}, None, {0: 2}]),
    "mean": (op("ReduceMean", "x", ints(-1), keepdims=1), [{0: 0}, {0: 1}, None]),
    "mean without its axis": (op("ReduceMean", "x", ints(1), keepdims=0), [{0: 0}, {0: 2}]),
    "cumulative sum": (op("CumSum", "x", np.array(1, np.int64)), [None, None, None]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_of_the_output_see_the_same_rows_of_the_inputs_only(name):
    write, expected = OPERATIONS[name]
    b = Builder()
    shapes = {"x": list(SHAPE), "y": list(SHAPE), "one": [2, 1, 6, 4]}
    result = write(b)
    model = b.model(shapes, result)
    [node] = model.graph
    [output] = node.outputs
    assert [rows_of_inputs(node, axis, size) for axis, size in enumerate(output.shape)] == expected
    generator = np.random.default_rng(0)
    feeds = {key: generator.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    [before] = run(ir.to_proto(model), feeds)
    for axis, rows in enumerate(expected):
        for index, own in (rows or {}).items():
            if node.inputs[index].name in feeds:
                other = feeds[node.inputs[index].name].copy()
                other.swapaxes(0, own)[1:] += 1  # all rows but the first
                [after] = run(ir.to_proto(model), {**feeds, node.inputs[index].name: other})
                np.testing.assert_array_equal(after.take(0, axis), before.take(0, axis))


def test_rows_are_those_of_the_axis_with_as_many_elements_behind_it():
    """[2, 6, 6, 4] -> [12, 6, 4]: the six of the output are the second six of the input."""
    b = Builder()
    [node] = b.model({"x": [2, 6, 6, 4]}, b.op("Reshape", "x", b.ints(-1, 6, 4))).graph
    assert rows_of_inputs(node, 1, 6) == {0: 2}


def test_unknown_shapes_and_operators_of_other_domains_are_not_row_wise():
    x = ir.Value(name="x")
    for node in (ir.node("Add", [x, x]), ir.node("Softmax", [x]), ir.node("Transpose", [x]), ir.node("MatMul", [x, x])):
        assert rows_of_inputs(node, 0, 6) is None
    assert rows_of_inputs(ir.node("Tanh", [x], domain="other"), 0, 6) is None

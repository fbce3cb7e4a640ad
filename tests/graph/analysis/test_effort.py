"""Multiplications of operators that `work` does not count, against their closed forms."""

import pytest
from onnx import helper

from tests.graph.analysis.test_work import model_of
from vitdeploy.graph.analysis.work import effort

MATRICES, STACKS = ([2, 3], [3, 5]), ([7, 2, 3], [7, 3, 5])


@pytest.mark.parametrize(
    ("operator", "attributes", "inputs", "output", "macs"),
    [
        ("Einsum", {"equation": "ij,jk->ik"}, MATRICES, [2, 5], 2 * 3 * 5),
        ("Einsum", {"equation": "ij, jk"}, MATRICES, [2, 5], 2 * 3 * 5),
        ("Einsum", {"equation": "...ij,...jk->...ik"}, STACKS, [7, 2, 5], 7 * 2 * 3 * 5),
        ("Einsum", {"equation": "...ij,...jk"}, STACKS, [7, 2, 5], 7 * 2 * 3 * 5),
        ("Einsum", {"equation": "ij->"}, ([2, 3],), [], 2 * 3),
        ("Einsum", {"equation": "ij"}, MATRICES, [2, 5], 0),  # not as many terms as inputs
        ("LSTM", {"hidden_size": 4}, ([5, 1, 3], [2, 16, 3], [2, 16, 4]), [5, 2, 1, 4], 2 * 5 * 16 * (3 + 4)),
        ("MaxPool", {"kernel_shape": [3, 3]}, ([1, 2, 8, 8],), [1, 2, 6, 6], 2 * 6 * 6 * 9),
        ("Attention", {}, ([1, 4, 6, 8], [1, 4, 10, 8], [1, 4, 10, 8]), [1, 4, 6, 8], 2 * 4 * 6 * 10 * 8),
    ],
)
def test_multiplications_are_those_of_the_operator(operator, attributes, inputs, output, macs):
    shapes = {f"x{index}": shape for index, shape in enumerate(inputs)}
    node = helper.make_node(operator, list(shapes), ["y"], **attributes)
    [found] = model_of([node], shapes, {"y": output}).graph
    assert effort(found, lambda value: [int(size) for size in value.shape]) == macs

"""What the first layer of a graph reads of images: the operators before it that scale, shift and move, run alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from vitdeploy.graph.values import array_of, is_constant

Floats = npt.NDArray[np.float32]
MOVES = frozenset(
    {"Cast", "Clip", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"}
)
LINEAR = MOVES | {"Add", "BatchNormalization", "Concat", "Div", "Mul", "Neg", "Sub", "Transpose"}
# Of these the first operand may be of the image, and no other one.
PRODUCTS = ("BatchNormalization", "Div")
# What makes the numbers that the operators use of a file's constants.
CONSTANT = LINEAR | {"Constant", "Expand", "Reciprocal", "Sqrt"}
# A graph whose pixels pass more operators than these before its first layer is not looked at.
MOST = 64


class FirstValues:
    """A function from images [1, channels, height, width] to what the graph's first layers read of them; [] where
    nothing stands before these, or more than is looked at."""

    def __init__(self, model: ir.Model) -> None:
        image = model.graph.inputs[0]
        followed, read, nodes = {image}, dict[ir.Value, None](), dict[ir.Node, None]()
        for node in model.graph:
            operands = [value for value in node.inputs if value in followed]
            if not operands:
                continue
            constants = _constants(value for value in node.inputs if value not in followed)
            if constants is None or not _linear(node, operands) or len(nodes) > MOST:
                read.update(dict.fromkeys(value for value in operands if value is not None))
                continue
            nodes.update(dict.fromkeys((*constants, node)))
            followed.update(node.outputs)
        size = image.shape[0] if image.shape is not None else 1
        self.batch = size if isinstance(size, int) else 1
        self.input, self.evaluator = str(image.name), _evaluator(model, image, list(nodes), list(read))

    def __call__(self, images: Floats) -> list[Floats]:
        if self.evaluator is None:
            return []
        try:
            with np.errstate(all="ignore"):
                values = self.evaluator.run(None, {self.input: images.repeat(self.batch, axis=0)})
        except Exception:  # of a graph of anybody's: what cannot be computed here says nothing of its pixels
            return []
        return [np.asarray(array) for array in values]


def _linear(node: ir.Node, operands: Sequence[ir.Value | None]) -> bool:
    if node.op_type in PRODUCTS and operands != [node.inputs[0]]:
        return False
    return not node.domain and node.op_type in LINEAR and (node.op_type != "Mul" or len(operands) == 1)


def _constants(values: Iterable[ir.Value | None]) -> list[ir.Node] | None:
    """The nodes that make the values of constants alone, in their order; None where one is of something else."""
    nodes: list[ir.Node] = []
    for value in values:
        node = value.producer() if value is not None else None
        if value is None or is_constant(value, overridable=True):
            continue
        before = _constants(node.inputs) if node is not None and not node.domain and node.op_type in CONSTANT else None
        if node is None or before is None or len(nodes) + len(before) > MOST:
            return None
        nodes += [*before, node]
    return nodes


def _evaluator(
    model: ir.Model, image: ir.Value, nodes: Sequence[ir.Node], read: Sequence[ir.Value]
) -> ReferenceEvaluator | None:
    if not nodes or not read:
        return None
    arrays = {str(value.name): array_of(value, overridable=True) for node in nodes for value in node.inputs if value}
    graph = onnx.helper.make_graph(
        [ir.to_proto(node) for node in nodes],
        "first",
        [onnx.helper.make_tensor_value_info(str(image.name), onnx.TensorProto.FLOAT, None)],
        [onnx.helper.make_tensor_value_info(str(value.name), onnx.TensorProto.FLOAT, None) for value in read],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items() if array is not None],
    )
    opsets = [onnx.helper.make_opsetid("", model.opset_imports.get("", 18))]
    return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets))

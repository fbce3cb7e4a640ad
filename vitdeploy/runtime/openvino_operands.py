"""A way around a fault of OpenVINO's CPU plugin: the order of operands, which changes no sum and no product.

On CPUs with AMX, the kernel that the plugin generates for attention also adds or multiplies what follows a product,
where that is one vector along its last axis: a mask of keys, the sizes of merged tokens. The answers are then wrong by
the size of the answers, in bf16 and behind INT8 scores in f32 too, without an error (the entry
`openvino-vector-behind-scores` of the table). The plugin looks for the product as the first operand only
(FuseBinaryEltwise in src/plugins/intel_cpu/src/transformations/snippets/x64/pass/fuse_brgemm_cpu_postops.cpp). As the
second one it is not found.
"""

from __future__ import annotations

import importlib
from typing import Any

_ELEMENTWISE = ("Add", "Multiply")
# What lies between a product and what is added to it.
_PASSED = (*_ELEMENTWISE, "Convert", "FakeQuantize", "Subtract")


def put_vectors_first(model: Any) -> int:
    """Exchange the operands of each sum and product in an `openvino.Model` whose second one is a vector along the last
    axis of a product of two activations; give how many there were."""
    found = [operation for operation in model.get_ordered_ops() if _adds_vector_to_scores(operation)]
    for operation in found:
        opset = importlib.import_module("openvino").opset13
        make = opset.add if operation.get_type_name() == "Add" else opset.multiply
        exchanged = make(operation.input_value(1), operation.input_value(0))
        exchanged.set_friendly_name(operation.get_friendly_name())
        exchanged.output(0).set_names(operation.output(0).get_names())
        operation.output(0).replace(exchanged.output(0))
    return len(found)


def _adds_vector_to_scores(operation: Any) -> bool:
    if operation.get_type_name() not in _ELEMENTWISE:
        return False
    scores, vector = operation.input_value(0), operation.input_value(1)
    return _is_row(vector, operation.get_output_partial_shape(0)) and _is_of_scores(scores)


def _is_row(vector: Any, shape: Any) -> bool:
    """Whether a value has only a last axis, which may be that of a result of this shape. An open size may be any."""
    if not (_ranked(vector) and shape.rank.is_static):
        return False
    sizes = list(vector.get_partial_shape())
    if not sizes or any(size.is_static and size.get_length() != 1 for size in sizes[:-1]):
        return False
    last = list(shape)[-1]
    return bool(sizes[-1].is_dynamic or last.is_dynamic or 1 != sizes[-1].get_length() == last.get_length())


def _is_of_scores(value: Any) -> bool:
    """Whether a value is a product of two activations, but for its scale and what is added to it."""
    seen, queue = set[str](), [value]
    while queue:
        node = queue.pop().get_node()
        if node.get_name() in seen:
            continue
        seen.add(node.get_name())
        operands = [node.input_value(i) for i in range(node.get_input_size())]
        if node.get_type_name() == "MatMul":
            if all(len(operand.get_partial_shape()) > 2 for operand in operands if _ranked(operand)):
                return True
        elif node.get_type_name() in _PASSED:
            queue += operands[:2]
    return False


def _ranked(value: Any) -> bool:
    return bool(value.get_partial_shape().rank.is_static)

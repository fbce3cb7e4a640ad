"""A smaller residual stream, by a power of two: the same function, with values that float16 can hold.

The stream of a Transformer whose norms stand in front of attention and MLP is read through these norms alone, and
LN(a x) = LN(x) if the epsilon becomes a^2 times itself. So everything that writes into the stream is multiplied by
a = 2^-k, which rounds nothing in binary floating point: weights and biases of linears, positions, tokens. Linears that
read the stream without a norm have their weights divided by a.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.residual_stream import find_stream
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.values import floats_of

# What ONNX takes where a norm does not say its epsilon.
EPSILON = 1e-5


def stream_tensors(model: ir.Model) -> set[str]:
    """The names of all tensors of the residual stream that `scale_residual` scales, with the products in front of
    biases; empty where there is no such stream."""
    editor = Editor(model)
    stream = find_stream(editor.linears, model)
    if stream is None:
        return set()
    products = {str(linear.node.outputs[0].name) for linear in editor.linears if linear.node in stream.writers}
    return products | {str(value.name) for value in stream.axes}


def scale_residual(model: ir.Model, exponent: int) -> int:
    """Multiply the residual stream by 2^-`exponent`, in place; exact but for numbers that leave the range of float32.

    Args:
        model: as `normalise` leaves it.

    Returns: how many norms read the stream; 0 if there is none that can be scaled, which is left as it is.
    """
    editor = Editor(model)
    stream = find_stream(editor.linears, model)
    if stream is None or not stream.norms:
        return 0
    factor = np.float32(2.0) ** -exponent
    for linear in editor.linears:
        writes, reads = linear.node in stream.writers, linear.node in stream.readers
        power = int(writes) - int(reads)  # 0: from the stream into the stream, or neither
        weight = linear.weight * factor**power if power else None
        bias = linear.bias * factor if writes and linear.bias is not None else None
        if weight is not None or bias is not None:
            editor.set_linear(linear, weight, bias)
    for node, index in stream.constants:
        array = floats_of(node.inputs[index])
        assert array is not None
        editor.set_input(node, index, array * factor)
    for node in stream.norms:
        epsilon = node.attributes.get_float("epsilon", EPSILON)
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", float(np.float32(epsilon) * factor * factor))
    return len(stream.norms)

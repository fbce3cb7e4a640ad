"""A convolution whose kernel tiles the image as a MatMul of patches: for bfloat16, which Conv has from opset 22 on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.edit import Editor


def patches_to_matmul(model: ir.Model) -> int:
    """Rewrite every convolution without groups, padding and overlap, whose stride is its kernel, in place; exact.

    [batch, channels, height, width] becomes rows of patches [batch, rows, columns, channels * kernel * kernel], in the
    order of the weight. Returns how many were rewritten.
    """
    editor, count = Editor(model), 0
    for linear in editor.linears:
        if linear.kind == "conv" and _tiles(linear):
            _rewrite(editor, linear)
            count += 1
    return count


def _tiles(linear: Linear) -> bool:
    node, kernel = linear.node, linear.weight.shape[2:]
    shape = linear.input.shape
    strides = tuple(node.attributes.get_ints("strides", ()) or ())
    dilated = any(each != 1 for each in node.attributes.get_ints("dilations", ()) or ())
    if linear.groups > 1 or linear.padded or dilated or len(kernel) != 2 or strides != kernel or shape is None:
        return False
    return all(
        isinstance(size, int) and size % each == 0 for size, each in zip(list(shape)[2:], kernel, strict=True)
    ) and isinstance(shape[1], int)


def _rewrite(editor: Editor, linear: Linear) -> None:
    node, image = linear.node, linear.input
    assert image.shape is not None
    batch, channels, height, width = image.shape
    out, _, rows, columns = linear.weight.shape
    assert isinstance(height, int) and isinstance(width, int) and isinstance(channels, int)
    down, across, depth = height // rows, width // columns, channels * rows * columns
    name = linear.name

    def step(operator: str, inputs: list[ir.Value], label: str, shape: list[Any], **attributes: Any) -> ir.Value:
        return editor.node(node, operator, inputs, f"{name}/{label}", shape, **attributes)[0]

    def sizes(label: str, *numbers: int) -> ir.Value:
        return editor.constant(np.array(numbers, np.int64), f"{name}.{label}")

    tiled = [batch, channels, down, rows, across, columns]
    value = step("Reshape", [image, sizes("tiles", -1, *tiled[1:])], "tiles", tiled)
    value = step(
        "Transpose", [value], "patches", [batch, down, across, channels, rows, columns], perm=[0, 2, 4, 1, 3, 5]
    )
    value = step("Reshape", [value, sizes("rows", -1, down, across, depth)], "rows", [batch, down, across, depth])
    weight = editor.constant(linear.weight.reshape(out, depth).T, f"{name}.patch_weight")
    value = step("MatMul", [value, weight], "product", [batch, down, across, out])
    if linear.bias is not None:
        value = step(
            "Add", [value, editor.constant(linear.bias, f"{name}.patch_bias")], "bias", [batch, down, across, out]
        )
    node.outputs[0].name, old = None, str(node.outputs[0].name)
    value = step("Transpose", [value], "channels_first", [batch, out, down, across], perm=[0, 3, 1, 2])
    ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
    value.name = old
    editor.graph.remove(node, safe=True)

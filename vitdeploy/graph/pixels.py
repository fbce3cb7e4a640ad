"""The cheap half of preprocessing in front of a graph: uint8 NHWC pixels -> float32 NCHW, (x / 255 - mean) / std."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.names import Names
from vitdeploy.spec import PreprocessSpec


def take_pixels(model: ir.Model, preprocess: PreprocessSpec) -> None:
    """Let a graph with one float32 NCHW input take uint8 [batch, height, width, channels] instead, in place.

    Written as the exporter writes it for a PyTorch model: one multiplication and one addition per pixel.

    Raises:
        GraphError: the input is not float32 [batch, channels, height, width] of the preprocessing's size.
    """
    image = model.graph.inputs[0]
    height, width = preprocess.crop
    shape = image.shape
    wanted = (preprocess.channels, height, width)
    if image.dtype != ir.DataType.FLOAT or shape is None or len(shape) != 4 or not _fits(shape, wanted):
        raise GraphError(
            "the preprocessing does not fit the graph's input",
            found=f"{image.name}: {image.dtype}{list(shape) if shape is not None else ''}",
            wanted=f"float32 [batch, {', '.join(map(str, wanted))}]",
        )
    mean, std = (np.array(values, np.float64).reshape(1, -1, 1, 1) for values in (preprocess.mean, preprocess.std))
    names, name, batch = Names(model), str(image.name), shape[0]
    scale = names.constant((1 / (255 * std)).astype(np.float32), "pixel_scale")
    shift = names.constant((-mean / std).astype(np.float32), "pixel_shift")
    pixels = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.UINT8),
        shape=ir.Shape([batch, height, width, preprocess.channels]),
    )
    image.name = names.free(f"{name}/normalised")
    transposed = names.node("Transpose", [pixels], "pixels/Transpose", {"perm": [0, 3, 1, 2]})
    floats = names.node("Cast", [transposed.outputs[0]], "pixels/Cast", {"to": ir.DataType.FLOAT})
    scaled = names.node("Mul", [floats.outputs[0], scale], "pixels/Mul")
    shifted = names.node("Add", [scaled.outputs[0], shift], "pixels/Add")
    nodes = [transposed, floats, scaled, shifted]
    for node in nodes:
        node.outputs[0].dtype = ir.DataType.UINT8 if node is transposed else ir.DataType.FLOAT
        node.outputs[0].shape = ir.Shape([batch, preprocess.channels, height, width])
    for user, index in list(image.uses()):
        user.replace_input_with(index, shifted.outputs[0])
    model.graph.inputs[0] = pixels
    model.graph.insert_before(model.graph[0], nodes)


def _fits(shape: ir.Shape, wanted: tuple[int, int, int]) -> bool:
    return all(not isinstance(size, int) or size == want for size, want in zip(shape[1:], wanted, strict=True))

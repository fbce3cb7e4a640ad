"""The size of the images that a graph takes, where its exporter left it open: optimum names all four axes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from vitdeploy.errors import GraphError


def set_image_size(model: ir.Model, size: tuple[int, int] | None) -> None:
    """Give the one input of four axes [batch, channels, height, width] its channels, height and width. In place.

    Open channels are those of the first convolution. A graph without such an input stays as it is.

    Args:
        size: (height, width) in pixels; None where the graph is to say it.

    Raises:
        GraphError: the size is open and none is given, or it is another one; or nothing tells the channels.
    """
    images = [value for value in model.graph.inputs if value.shape is not None and len(value.shape) == 4]
    if len(images) != 1:
        return
    [image] = images
    assert image.shape is not None
    batch, channels, *own = image.shape
    said = [side if isinstance(side, int) else None for side in own]
    if size is None and None in said:
        raise GraphError(
            "the graph takes images of any size",
            found=f"{image.name} {[str(side) for side in image.shape]}",
            wanted="one size",
            fix="--image-size HEIGHTxWIDTH, source.image_size of a recipe, or a preprocess: with a crop",
        )
    if size is not None and any(side not in (None, wanted) for side, wanted in zip(said, size, strict=True)):
        raise of_another_size(own, size)
    image.shape = ir.Shape([batch, channels if isinstance(channels, int) else _channels(model), *(size or said)])


def of_another_size(own: Sequence[object], wanted: Sequence[int]) -> GraphError:
    return GraphError(
        "the graph takes images of another size",
        found=f"{own[0]}x{own[1]}",
        wanted=f"{wanted[0]}x{wanted[1]}",
        fix="export it again at that size",
    )


def _channels(model: ir.Model) -> int:
    """Of the first convolution: it takes the image, at most cast before."""
    for node in model.graph:
        weight = node.inputs[1].shape if node.op_type == "Conv" and node.inputs[1] is not None else None
        if weight is not None and isinstance(weight[1], int):
            group = node.attributes.get("group")
            return weight[1] * (group.as_int() if group is not None else 1)
    raise GraphError(
        "the graph takes images of any number of channels",
        found="no convolution, which would tell it",
        wanted="a fixed number of channels",
        fix="export it again with channels that are not dynamic",
    )

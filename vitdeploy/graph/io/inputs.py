"""Change and inspect the inputs of a graph: pixels, their range, and inputs bound to values."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import Names
from vitdeploy.graph.io.bound import named, value_of
from vitdeploy.graph.values import array_of, is_constant
from vitdeploy.runtime.inputs import DTYPES
from vitdeploy.spec import PreprocessSpec, TensorSpec

# --- Change the inputs of a graph: bind one to a constant, set the image size, replace floats by pixels ---------------


def bind_input(model: ir.Model, name: str, value: npt.NDArray[Any]) -> None:
    """Replace the input `name` by the constant `value` for every sample of the batch, in place.

    A detector that scales its boxes by a second input, the image size in pixels, returns boxes relative to the image
    (0 to 1) if that size is bound to (1, 1). `normalise` then removes operations that the constant makes redundant.

    Args:
        value: the input of one sample, without a batch axis or with one of 1; or the whole of an input of fixed shape;
            or a number for every element. Cast to the input's type.

    Raises:
        GraphError: no such input, no other input to take the batch size from, or a `value` that does not fit the
            input's shape or type.
    """
    inputs = {str(item.name): item for item in model.graph.inputs}
    bound = inputs.pop(name, None)
    if bound is None or bound.dtype is None or bound.shape is None:
        raise GraphError(
            f"the graph has no input {name!r} to bind",
            found=", ".join(inputs) or "no inputs",
            expected="the name of an input other than the image",
        )
    if not inputs:
        raise GraphError(f"{name!r} is the only input of the graph", expected="another input for the images")
    array, repeats = _fitted(name, value, bound.shape)
    array = np.ascontiguousarray(_cast(name, array, bound.dtype.numpy()))
    constant = Names(model).constant(array, f"{name}.constant")
    batch = bound.shape[0] if repeats else 1
    if isinstance(batch, int) and batch == 1:
        repeated = constant
    else:
        images = [item for item in inputs.values() if item.shape is not None and len(item.shape) == 4]
        repeated = _repeated(model, constant, batch, (images or list(inputs.values()))[0])
    ir.convenience.replace_all_uses_with(bound, repeated, replace_graph_outputs=True)
    model.graph.inputs.remove(bound)


def _fitted(name: str, value: npt.NDArray[Any], shape: ir.Shape) -> tuple[npt.NDArray[Any], bool]:
    """The value with its leading axis, and whether it holds one sample to repeat over the batch."""
    declared = [size if isinstance(size, int) else None for size in shape]
    if list(value.shape) == declared:
        return value, False
    sample = declared[1:]
    if value.ndim == 0 and declared and None not in sample:
        value = np.full([size for size in sample if size is not None], value)
    if value.ndim == len(declared) and value.ndim and value.shape[0] == 1:
        value = value[0]
    fits = len(sample) == value.ndim and all(size in (None, own) for size, own in zip(sample, value.shape, strict=True))
    if not declared or not fits:
        raise GraphError(
            f"the value does not fit the input {name!r}",
            found=f"shape {list(value.shape)} for each sample",
            expected=f"shape {[size if isinstance(size, int) else str(size) for size in list(shape)[1:]]}",
            fix="bind a .npy file of that shape" if None in sample else "bind one number, or an array of that shape",
        )
    return value[np.newaxis], True


def _cast(name: str, value: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    cast = value.astype(dtype) if value.dtype.kind in "fiub" else None
    exact = dtype.kind == "f" or (cast is not None and bool(np.all(cast == value)))
    if cast is None or not exact:
        raise GraphError(
            f"the value does not fit the input {name!r}",
            found=f"{value.dtype}, from {value.min()} to {value.max()}" if cast is not None else str(value.dtype),
            expected=f"numbers that {dtype} represents exactly",
        )
    return cast


def bind_values(model: ir.Model, bind: Sequence[str]) -> None:
    """Bind each named input, in place; see `bound`. Raises as `value_of` and `bind_input`."""
    for text in bind:
        bind_input(model, named(text)[0], value_of(text))


def keep_inputs(model: ir.Model, further: Mapping[str, TensorSpec | None], path: Path) -> None:
    """Move the image before the `further` inputs that each image brings, in place.

    Raises:
        GraphError: an input is missing, several others could be the image, or an image cannot bring an input: its
            type is unsupported, its size is open, or it has no batch axis.
    """
    inputs = {str(value.name): value for value in model.graph.inputs}
    unknown = [name for name in further if name not in inputs]
    images = [value for name, value in inputs.items() if name not in further]
    if unknown or len(images) != 1:
        shown = "; ".join(f"{value.name}: {value.dtype}{_sizes(value)}" for value in model.graph.inputs)
        raise GraphError(
            f"{path} has no input {unknown[0]!r}" if unknown else f"{path} does not take one image",
            found=shown,
            expected="the name of an input other than the image" if unknown else "one input besides the named ones",
            fix="" if unknown else "--bind NAME=VALUE or NAME=input for each other input",
        )
    batch = images[0].shape[0] if images[0].shape is not None and len(images[0].shape) else None
    for name, expected in further.items():
        value = inputs[name]
        sizes = [] if value.shape is None else list(value.shape)
        own = str(value.dtype.numpy()) if value.dtype is not None and value.dtype.numpy() is not None else "none"
        follows = bool(sizes) and (sizes[0] == batch or not (isinstance(batch, int) or isinstance(sizes[0], int)))
        if own not in DTYPES or not follows or not all(isinstance(size, int) for size in sizes[1:]):
            raise GraphError(
                f"the input {name} of {path} cannot have a value per image",
                found=f"{own}{_sizes(value)}",
                expected=f"{' or '.join(DTYPES)}, [batch of the image, fixed sizes ...]",
                fix=f"bind it to one value for all images: --bind {name}=VALUE; or export the model again with a "
                "batch axis for it",
            )
        if expected is not None and (own, sizes[1:]) != (expected.dtype, list(expected.shape[1:])):
            raise GraphError(
                f"the type or shape of the input {name} of {path} does not match --bind",
                found=f"{own}{_sizes(value)}",
                expected=f"{expected.dtype}{list(expected.shape)}, as in --bind",
                fix=f"--bind {name}=input, which uses the type and shape of the file",
            )
    for name in further:
        model.graph.inputs.remove(inputs[name])
    for name in further:
        model.graph.inputs.append(inputs[name])


def _sizes(value: ir.Value) -> str:
    return "[]" if value.shape is None else str([size if isinstance(size, int) else str(size) for size in value.shape])


def _repeated(model: ir.Model, constant: ir.Value, batch: int | ir.SymbolicDim, images: ir.Value) -> ir.Value:
    """Repeat `constant` for each sample: Expand to (batch, 1, ...)."""
    rest, names, name = [1] * (len(constant.shape or ()) - 1), Names(model), constant.name
    if isinstance(batch, int):
        target = names.constant(np.array([batch, *rest], np.int64), f"{name}.shape")
        nodes = []
    else:
        size = names.node("Shape", [images], f"{name}/Shape")
        zero = names.constant(np.zeros(1, np.int64), f"{name}.axis")
        first = names.node("Gather", [size.outputs[0], zero], f"{name}/Gather", {"axis": 0})
        ones = names.constant(np.array(rest, np.int64), f"{name}.ones")
        shape = names.node("Concat", [first.outputs[0], ones], f"{name}/Concat", {"axis": 0})
        nodes, target = [size, first, shape], shape.outputs[0]
    nodes.append(names.node("Expand", [constant, target], f"{name}/Expand"))
    nodes[-1].outputs[0].type = constant.type
    model.graph.insert_before(model.graph[0], nodes)
    return nodes[-1].outputs[0]


def drop_overridable(model: ir.Model) -> None:
    """Remove initializers from the inputs, in place: some exporters list the weights as inputs too."""
    for value in [value for value in model.graph.inputs if str(value.name) in model.graph.initializers]:
        model.graph.inputs.remove(value)


# Channel counts of images; no other axis of an image is this short.
CHANNELS = (1, 3, 4)
TO_CHANNELS_LAST, TO_CHANNELS_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def put_channels_first(model: ir.Model, further: int = 0) -> bool:
    """Change the image input from channels-last to [batch, channels, height, width], in place.

    TensorFlow's images are [batch, height, width, channels]; its converters write a Transpose after the input, which is
    removed. Returns whether the graph had channels last. `further`: the number of other inputs at the end.
    """
    images = _images(model, further)
    if len(images) != 1 or not _channels_last(images[0]):
        return False
    [image] = images
    assert image.shape is not None
    batch, height, width, channels = image.shape
    names, index = Names(model), list(model.graph.inputs).index(image)
    new = ir.Value(name=image.name, type=image.type, shape=ir.Shape([batch, channels, height, width]))
    image.name = names.free(f"{image.name}/channels_last")
    for reader in [use.node for use in image.uses() if _to_channels_first(use.node)]:
        ir.convenience.replace_all_uses_with(reader.outputs[0], new)
        model.graph.remove(reader, safe=True)
    model.graph.inputs[index] = new
    if image.uses():
        transpose = names.node("Transpose", [new], f"{new.name}/Transpose", {"perm": TO_CHANNELS_LAST})
        transpose.outputs[0].type, transpose.outputs[0].shape = image.type, image.shape
        ir.convenience.replace_all_uses_with(image, transpose.outputs[0])
        model.graph.insert_before(model.graph[0], transpose)
    return True


def _images(model: ir.Model, further: int) -> list[ir.Value]:
    """The inputs with four axes, without the last `further`."""
    inputs = list(model.graph.inputs)[: len(model.graph.inputs) - further]
    return [value for value in inputs if value.shape is not None and len(value.shape) == 4]


def _channels_last(image: ir.Value) -> bool:
    """Whether channels are last: by the only axis that can be channels, else by the nodes that read the image."""
    assert image.shape is not None
    first, last = image.shape[1] in CHANNELS, image.shape[3] in CHANNELS
    if first != last:
        return last
    readers = [use.node for use in image.uses()]
    return bool(readers) and all(map(_to_channels_first, readers))


def _to_channels_first(node: ir.Node) -> bool:
    perm = list(node.attributes.get_ints("perm", ()))
    return node.op_type == "Transpose" and perm == TO_CHANNELS_FIRST and not node.outputs[0].is_graph_output()


def set_image_size(model: ir.Model, size: tuple[int, int] | None, further: int = 0) -> None:
    """Fix the channels, height and width of the single input [batch, channels, height, width], in place.

    An exporter may leave them open: optimum names all four axes. Open channels are set to those of the first
    convolution. A graph without such an input stays unchanged.

    Args:
        size: (height, width) in pixels; None for the size in the graph.
        further: the number of other inputs at the end.

    Raises:
        GraphError: the size is open and `size` is None, or `size` differs from it; or the channels are unknown.
    """
    images = _images(model, further)
    if len(images) != 1:
        return
    [image] = images
    assert image.shape is not None
    batch, channels, *own = image.shape
    declared = [side if isinstance(side, int) else None for side in own]
    if size is None and None in declared:
        raise GraphError(
            "the graph takes images of any size",
            found=f"{image.name} {[str(side) for side in image.shape]}",
            expected="a fixed image size",
            fix="--image-size HEIGHTxWIDTH, source.image_size of a recipe, or a preprocess: with a crop",
        )
    if size is not None and any(side not in (None, expected) for side, expected in zip(declared, size, strict=True)):
        raise of_another_size(own, size)
    image.shape = ir.Shape([batch, channels if isinstance(channels, int) else _channels(model), *(size or declared)])


def of_another_size(own: Sequence[object], expected: Sequence[int]) -> GraphError:
    return GraphError(
        "the graph takes images of a different size",
        found=f"{own[0]}x{own[1]}",
        expected=f"{expected[0]}x{expected[1]}",
        fix="export the model again at that size, or use the size of the graph",
    )


def _channels(model: ir.Model) -> int:
    """The input channels of the first convolution, which reads the image."""
    for node in model.graph:
        weight = node.inputs[1].shape if node.op_type == "Conv" and node.inputs[1] is not None else None
        if weight is not None and isinstance(weight[1], int):
            group = node.attributes.get("group")
            return weight[1] * (group.as_int() if group is not None else 1)
    raise GraphError(
        "the number of image channels is unknown",
        found="a dynamic channel axis and no convolution",
        expected="a fixed number of channels",
        fix="export the model again with a fixed number of channels",
    )


def take_pixels(model: ir.Model, preprocess: PreprocessSpec) -> None:
    """Change the float32 NCHW input of a graph to uint8 [batch, height, width, channels], in place: the graph then
    does the cheap half of preprocessing, (x / 255 - mean) / std with the channels in the model's order.

    Written as our exporter writes it for a PyTorch model: one multiplication and one addition per pixel.

    Raises:
        GraphError: the input is not float32 [batch, channels, height, width] of the preprocessing's size.
    """
    image = model.graph.inputs[0]
    height, width = preprocess.crop
    shape = image.shape
    expected = (preprocess.channels, height, width)
    if image.dtype != ir.DataType.FLOAT or shape is None or len(shape) != 4 or not _fits(shape, expected):
        raise GraphError(
            "the preprocessing does not fit the graph's input",
            found=f"{image.name}: {image.dtype}{list(shape) if shape is not None else ''}",
            expected=f"float32 [batch, {', '.join(map(str, expected))}]",
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
    nodes = [names.node("Transpose", [pixels], "pixels/Transpose", {"perm": [0, 3, 1, 2]})]
    nodes.append(names.node("Cast", [nodes[-1].outputs[0]], "pixels/Cast", {"to": ir.DataType.FLOAT}))
    if preprocess.channel_order == "bgr":
        order = names.constant(np.array([2, 1, 0], np.int64), "pixel_order")
        nodes.append(names.node("Gather", [nodes[-1].outputs[0], order], "pixels/Gather", {"axis": 1}))
    nodes.append(names.node("Mul", [nodes[-1].outputs[0], scale], "pixels/Mul"))
    nodes.append(names.node("Add", [nodes[-1].outputs[0], shift], "pixels/Add"))
    for node in nodes:
        node.outputs[0].dtype = ir.DataType.UINT8 if node is nodes[0] else ir.DataType.FLOAT
        node.outputs[0].shape = ir.Shape([batch, preprocess.channels, height, width])
    for user, index in list(image.uses()):
        user.replace_input_with(index, nodes[-1].outputs[0])
    model.graph.inputs[0] = pixels
    model.graph.insert_before(model.graph[0], nodes)


def _fits(shape: ir.Shape, expected: tuple[int, int, int]) -> bool:
    return all(not isinstance(size, int) or size == want for size, want in zip(shape[1:], expected, strict=True))


# --- The values that the first layer of a graph reads from images -----------------------------------------------------
# Computed by running only the operators before it, which scale, shift and move numbers.


Floats = npt.NDArray[np.float32]
MOVES = frozenset(
    {"Cast", "Clip", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"}
)
LINEAR = MOVES | {"Add", "BatchNormalization", "Concat", "Div", "Mul", "Neg", "Sub", "Transpose"}
# Only the first operand of these may depend on the image.
PRODUCTS = ("BatchNormalization", "Div")
# Operators that compute the operands from the constants of a file.
CONSTANT = LINEAR | {"Constant", "Expand", "Reciprocal", "Sqrt"}
# Graphs with more operators than this before the first layer are not examined.
MOST = 64


class FirstValues:
    """A function from images [1, channels, height, width] to the values that the graph's first layers read; [] if no
    operator precedes them, or more than `MOST`."""

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
        except Exception:  # a third-party graph: if it cannot be computed here, its pixel range stays unknown
            return []
        return [np.asarray(array) for array in values]


def _linear(node: ir.Node, operands: Sequence[ir.Value | None]) -> bool:
    if node.op_type in PRODUCTS and operands != [node.inputs[0]]:
        return False
    return not node.domain and node.op_type in LINEAR and (node.op_type != "Mul" or len(operands) == 1)


def _constants(values: Iterable[ir.Value | None]) -> list[ir.Node] | None:
    """The nodes that compute the values from constants only, in order; None if a value depends on anything else."""
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


# --- Graphs in float16 or bfloat16, computed in float32 ---------------------------------------------------------------
# The precision of an engine is chosen later, by measurement.


HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Attributes that set the output type of a node.
TYPES = ("to", "dtype", "output_dtype")
# The constants of GELU (arXiv 1606.08415): float16 keeps three digits of them, and GELU would not be recognised.
EXACT = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715, math.sqrt(2 / math.pi) * 0.044715)


def widened(model: ir.Model) -> list[str]:
    """Convert weights, casts, inputs and outputs from half precision to float32, in place; the weights keep their
    values.

    The graph then computes with the file's weights, without rounding at each step. Returns a list with a note, or an
    empty list if nothing is in half precision.
    """
    counts = Counter[str]()
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in HALF:
                counts[tensor.dtype.name.lower()] += 1
                value.const_value = ir.tensor(_float32(tensor), name=value.name)
                value.type = ir.TensorType(ir.DataType.FLOAT)
        for value in (*graph.inputs, *graph.outputs):
            _widen_value(value)
    for node in model.graph.all_nodes():
        counts.update(_widen_node(node))
        for value in node.outputs:
            _widen_value(value)
    if not counts:
        return []
    [(name, _)] = counts.most_common(1)
    return [f"the graph is in {name}: it is computed in float32, with the same weights"]


def _widen_value(value: ir.Value) -> None:
    if value.dtype in HALF:
        value.type = ir.TensorType(ir.DataType.FLOAT)


def _widen_node(node: ir.Node) -> list[str]:
    """Widen tensors in attributes and the output types of Cast, EyeLike and others; return the half types found."""
    found = []
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and (tensor := attribute.as_tensor()).dtype in HALF:
            found.append(tensor.dtype.name.lower())
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(_float32(tensor)))
        elif name in TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in map(int, HALF):
            found.append(ir.DataType(attribute.as_int()).name.lower())
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
    return found


def _float32(tensor: ir.TensorProtocol) -> npt.NDArray[np.float32]:
    """The values in float32; a rounded constant of `EXACT` becomes exact again."""
    array = tensor.numpy()
    if array.size == 1:
        for constant in EXACT:
            if array.item() == np.array(constant).astype(array.dtype).item():
                return np.full(array.shape, constant, np.float32)
    return array.astype(np.float32)

"""Estimate the effect of INT8 in each layer on the answers: one backward pass for all layers, not a run for each.

The distance is smallest at the float graph's answers, so near these it is a quadratic form in the outputs' error dz:
KL(p || q) = 1/2 dz' F dz + ..., F = diag(p) - p p' (Kullback, Information Theory and Statistics, 2.6); a relative
squared error is one itself. An error dy at a layer moves the outputs by J dy. With random vectors v, E[v v'] = F, the
mean of (v' J dy)^2 is dy' J' F J dy, and one backward pass gives v' J for all layers at once (Hutchinson's estimator).
dy is computed with the layer's own integers, on its input for each image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import EngineError
from vitdeploy.extensions import lazy
from vitdeploy.graph.analysis.rows import Linear, find_linears
from vitdeploy.graph.io.files import serialised
from vitdeploy.graph.passes.folds import takes_pixels
from vitdeploy.graph.values import weight_bytes
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization import ranges
from vitdeploy.runtime.ort import open_session
from vitdeploy.runtime.postprocess import softmax
from vitdeploy.search import frame, graphs

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as functional
    from torch import Tensor
else:
    torch, functional = lazy("torch"), lazy("torch.nn.functional")

# Images per backward pass in a graph of any batch, since a pass keeps data of all layers. One image for models with
# more weights than this.
BATCH, LARGE_BYTES = 2, 150 * 2**20
# Random vectors per image: the mean over draws and images has a relative error of about sqrt(2 / (draws x images)).
DRAWS, SEED = 4, 0
# Operators whose results do not depend on the values of their inputs.
SIZES = ("Shape", "Size")


def estimate_costs(
    model: ir.Model,
    forms: Mapping[str, graphs.LayerForm],
    biases: Mapping[str, npt.NDArray[np.float32] | None],
    reference_outputs: frame.ReferenceOutputs,
    progress: Progress = silent,
) -> tuple[dict[str, frame.Distances], tuple[str, ...]]:
    """The distance [images] with one layer in INT8 and all others in float, by layer, and the names of operators that
    no gradient passes. Layers whose outputs reach the graph's outputs through such an operator are missing.

    Args:
        model: the float graph of the forms.
        biases: biases of layers in float that differ from those in the graph.
    """
    graph = DifferentiableGraph(model, forms, biases)
    at_once = 1 if weight_bytes(model) > LARGE_BYTES else BATCH
    generator, images = np.random.default_rng(SEED), len(reference_outputs.pixels)
    costs: dict[str, list[frame.Distances]] = {}
    for start, feed in reference_outputs.feeds(graph.dtype, graph.batch or at_once):
        progress(f"sensitivity on {images} images", start, images)
        try:
            outputs, layers = graph.run(torch.from_numpy(feed))
        except EngineError:  # such as a node whose inner graph reads outer tensors
            return {}, tuple(sorted(graph.impassable))
        if graph.uncertain >= layers.keys():
            break
        ends = {name: output for name, output in outputs.items() if output.requires_grad}
        squares = {name: np.zeros(len(feed)) for name in layers}
        for draw in range(DRAWS):
            vectors = _draw(reference_outputs.task, ends, len(outputs), generator)
            kept = [output for name, output in ends.items() if name in vectors]
            slopes = torch.autograd.grad(
                kept,
                [output for output, _ in layers.values()],
                [vectors[name] for name, output in ends.items() if name in vectors],
                retain_graph=draw < DRAWS - 1,
                allow_unused=True,
            )
            for (name, (_, error)), slope in zip(layers.items(), slopes, strict=True):
                if slope is not None:
                    moved = (slope * error).reshape(len(feed), -1).sum(dim=1)
                    squares[name] += np.square(moved.double().numpy()) / DRAWS
        for name, distances in squares.items():
            costs.setdefault(name, []).append(distances[: images - start])
    progress(f"sensitivity on {images} images", images, images)
    estimates = {name: np.concatenate(parts) for name, parts in costs.items() if name not in graph.uncertain}
    return estimates, tuple(sorted(graph.impassable))


def _draw(task: str, outputs: Mapping[str, Tensor], count: int, generator: np.random.Generator) -> dict[str, Tensor]:
    """Random vectors v by output; the mean of v v' is the quadratic form of `ReferenceOutputs.distance`."""
    vectors = {}
    for name, output in outputs.items():
        values = output.detach().double().numpy()
        if task == "classification":
            roots = np.sqrt(softmax(values))  # F = L L' with L = diag(roots) - roots^2 roots'
            signs = generator.choice([-1.0, 1.0], values.shape)
            vector = np.sqrt(0.5) * roots * (signs - roots * (roots * signs).sum(axis=1, keepdims=True))
        else:
            power = np.square(values).reshape(len(values), -1).sum(axis=1) * count
            wide = np.maximum(power, 1e-300).reshape(-1, *[1] * (values.ndim - 1))
            vector = generator.standard_normal(values.shape) / np.sqrt(wide)
        vectors[name] = torch.from_numpy(vector.astype(np.float32))
    return vectors


class DifferentiableGraph:
    """A float graph in PyTorch: its outputs, the output of each layer, and the layer's INT8 error.

    `impassable`: operators after layers that no gradient passes; `uncertain`: these layers.
    """

    def __init__(
        self,
        model: ir.Model,
        forms: Mapping[str, graphs.LayerForm],
        biases: Mapping[str, npt.NDArray[np.float32] | None],
    ) -> None:
        self.model, self.forms = model, forms
        linears = [linear for linear in find_linears(model) if linear.name in forms]
        self.layers = {linear.bias_add or linear.node: linear for linear in linears}
        [image] = model.graph.inputs
        self.input, self.dtype = str(image.name), "uint8" if image.dtype == ir.DataType.UINT8 else "float32"
        size = image.shape[0] if image.shape is not None else None
        self.batch = size if isinstance(size, int) else None
        self.biases = {linear.name: biases.get(linear.name, linear.bias) for linear in linears}
        self.impassable, self.uncertain = set[str](), set[str]()
        self.sessions: dict[ir.Node, Any] = {}
        self.constants = {
            str(name): torch.from_numpy(np.array(value.const_value.numpy()))
            for name, value in model.graph.initializers.items()
            if value.const_value is not None
        }

    def run(self, image: Tensor) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """The graph's float outputs by name; and for each layer its output, to differentiate by, and the error of its
        INT8 output."""
        values: dict[str, Tensor] = {**self.constants, self.input: image}
        behind: dict[str, frozenset[str]] = {}
        layers: dict[str, tuple[Tensor, Tensor]] = {}
        for node in self.model.graph:
            inputs = [None if value is None else values[str(value.name)] for value in node.inputs]
            reached = frozenset().union(
                *(behind.get(str(value.name), ()) for value in node.inputs if value is not None)
            )
            outputs = self._outputs(node, inputs, reached)
            for value, output in zip(node.outputs, outputs, strict=False):
                values[str(value.name)], behind[str(value.name)] = output, reached
                if not output.is_floating_point() and value.uses():  # a selection has no gradient
                    self._stop(node, inputs, reached)
            if node in self.layers:
                linear, name = self.layers[node], str(node.outputs[0].name)
                output = _with_bias(linear, outputs[0], self.biases[linear.name])
                if not output.requires_grad:
                    output.requires_grad_()
                with torch.no_grad():
                    x = values[str(linear.input.name)]
                    layers[linear.name] = output, _rounded(linear, x, self.forms[linear.name]) - output
                values[name], behind[name] = output, reached | {linear.name}
        ends = {str(value.name): values[str(value.name)] for value in self.model.graph.outputs}
        return {name: value for name, value in ends.items() if value.is_floating_point()}, layers

    def _outputs(self, node: ir.Node, inputs: list[Tensor | None], reached: frozenset[str]) -> list[Tensor]:
        operator = _OPERATORS.get(node.op_type) if not node.domain else None
        if operator is not None:
            try:
                output = operator(_Attributes(node), inputs)
                return list(output) if isinstance(output, tuple) else [output]
            except _Unknown:
                pass
        self._stop(node, inputs, reached)
        if node not in self.sessions:
            try:
                self.sessions[node] = _alone(node, inputs, self.model.opset_imports[""])
            except EngineError:
                self.impassable.add(node.op_type)
                raise
        feeds = {str(place): _array(tensor) for place, tensor in enumerate(inputs) if tensor is not None}
        return [torch.from_numpy(np.array(output)) for output in self.sessions[node].run(None, feeds)]

    def _stop(self, node: ir.Node, inputs: list[Tensor | None], reached: frozenset[str]) -> None:
        """Record that no gradient passes a node, if it would have to."""
        if node.op_type not in SIZES and any(tensor is not None and tensor.requires_grad for tensor in inputs):
            self.impassable.add(node.op_type)
            self.uncertain |= reached


class _Unknown(Exception):
    """An operator, or a form of one, that `_OPERATORS` lacks."""


class _Attributes:
    """The attributes of a node by name, with defaults."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node

    def __call__(self, name: str, default: Any) -> Any:
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        return list(value) if isinstance(value, (tuple, list)) else value


def _alone(node: ir.Node, inputs: list[Tensor | None], opset: int) -> Any:
    """A session of ONNX Runtime for one node, whose inputs are named by their positions.

    Raises:
        EngineError: ONNX Runtime refuses the node.
    """
    values = [
        None
        if tensor is None
        else ir.Value(name=str(place), type=ir.TensorType(ir.DataType.from_numpy(_array(tensor).dtype)))
        for place, tensor in enumerate(inputs)
    ]
    attributes = list(node.attributes.values())
    copy = ir.Node(node.domain, node.op_type, values, attributes, num_outputs=len(node.outputs))
    for place, output in enumerate(copy.outputs):
        output.name = f"output {place}"
    sources = [value for value in values if value is not None]
    graph = ir.Graph(sources, copy.outputs, nodes=[copy], opset_imports={"": opset}, name="node")
    return open_session(serialised(ir.Model(graph, ir_version=10)), spinning=False)


def _array(value: Tensor) -> npt.NDArray[Any]:
    return np.asarray(value.detach().numpy())


# --- A layer in INT8 --------------------------------------------------------------------------------------------------


def _with_bias(linear: Linear, output: Tensor, bias: npt.NDArray[np.float32] | None) -> Tensor:
    """The output of a layer with this bias instead of its own."""
    own = 0.0 if linear.bias is None else linear.bias
    change = np.asarray((0.0 if bias is None else bias) - own, np.float32)
    if not change.any():
        return output
    shape = (-1, 1, 1) if linear.kind == "conv" else (-1,)
    return output + torch.from_numpy(change).reshape(shape if change.ndim else ())


def _rounded(linear: Linear, x: Tensor, form: graphs.LayerForm) -> Tensor:
    """The INT8 output of a layer for the float input `x`."""
    scale, zero = (float(value) for value in ranges.activation_scale(form.bounds))
    codes, steps = form.weight
    if linear.kind == "matmul" or not takes_pixels(linear):  # every placement keeps pixels exact
        x = (torch.clamp(torch.round(x / scale) + zero, 0, 255) - zero) * scale
    if linear.kind == "matmul":
        output = x @ torch.from_numpy(codes * steps)
    else:
        weight = torch.from_numpy((codes * steps[:, None, None, None]).astype(np.float32))
        output = _convolution(_Attributes(linear.node), [x, weight, None])
    if form.bias is not None:
        output = output + torch.from_numpy(form.bias).reshape((-1, 1, 1) if linear.kind == "conv" else (-1,))
    if form.output is not None:
        step = float(form.output)
        output = torch.clamp(torch.round(output / step), -128, 127) * step
    return output


# --- Operators that gradients pass ------------------------------------------------------------------------------------


Inputs = list["Tensor | None"]
Computed = Callable[[_Attributes, Any], Any]


def _numbers(value: Tensor | None) -> list[int] | None:
    return None if value is None else [int(number) for number in value.reshape(-1)]


def _norm(attribute: _Attributes, inputs: Any) -> Any:
    x, scale, *bias = inputs
    axis = attribute("axis", -1) % x.ndim
    shape = x.shape[axis:]
    offset = bias[0].expand(shape) if bias and bias[0] is not None else None
    return functional.layer_norm(x, shape, scale.expand(shape), offset, attribute("epsilon", 1e-5))


def _convolution(attribute: _Attributes, inputs: Any) -> Any:
    x, weight, *bias = inputs
    pads, spatial = attribute("pads", [0] * 2 * (x.ndim - 2)), x.ndim - 2
    if attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or spatial != 2:
        raise _Unknown
    x = functional.pad(x, (pads[1], pads[3], pads[0], pads[2])) if any(pads) else x
    offset = bias[0] if bias else None
    stride, dilation = attribute("strides", [1, 1]), attribute("dilations", [1, 1])
    return functional.conv2d(x, weight, offset, stride, 0, dilation, attribute("group", 1))


def _pooled(pool: Callable[..., Tensor]) -> Computed:
    """`pool` takes an image, a kernel, strides, pads, whether a partial last kernel counts, and whether pads count."""

    def pooled(attribute: _Attributes, inputs: Any) -> Any:
        pads, kernel = attribute("pads", [0, 0, 0, 0]), attribute("kernel_shape", [])
        plain = attribute("auto_pad", "NOTSET") in ("NOTSET", "VALID") and attribute("dilations", [1, 1]) == [1, 1]
        if len(kernel) != 2 or not plain or pads[:2] != pads[2:] or len(attribute.node.outputs) > 1:
            raise _Unknown
        ceil, count = bool(attribute("ceil_mode", 0)), bool(attribute("count_include_pad", 0))
        return pool(inputs[0], kernel, attribute("strides", [1, 1]), pads[:2], ceil, count)

    return pooled


def _max_pool(x: Tensor, kernel: list[int], strides: list[int], pads: list[int], ceil: bool, count: bool) -> Tensor:
    return functional.max_pool2d(x, kernel, strides, pads, ceil_mode=ceil)


def _grid_sample(attribute: _Attributes, inputs: Any) -> Any:
    mode, padding = attribute("mode", "linear"), attribute("padding_mode", "zeros")
    if inputs[0].ndim != 4 or mode not in ("linear", "bilinear"):
        raise _Unknown
    corners = bool(attribute("align_corners", 0))
    return functional.grid_sample(inputs[0], inputs[1], mode="bilinear", padding_mode=padding, align_corners=corners)


def _gemm(attribute: _Attributes, inputs: Any) -> Any:
    a, b, *c = inputs
    a, b = a.T if attribute("transA", 0) else a, b.T if attribute("transB", 0) else b
    product = attribute("alpha", 1.0) * (a @ b)
    return product + attribute("beta", 1.0) * c[0] if c and c[0] is not None else product


def _reshape(attribute: _Attributes, inputs: Any) -> Any:
    x, sizes = inputs[0], _numbers(inputs[1])
    assert sizes is not None
    if not attribute("allowzero", 0):
        sizes = [x.shape[place] if size == 0 else size for place, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(attribute: _Attributes, inputs: Any) -> Any:
    axis = attribute("axis", 1) % (inputs[0].ndim + 1)
    return inputs[0].reshape(int(np.prod(inputs[0].shape[:axis])), -1)


def _squeeze(attribute: _Attributes, inputs: Any) -> Any:
    x, axes = inputs[0], _numbers(inputs[1]) if len(inputs) > 1 else None
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueeze(attribute: _Attributes, inputs: Any) -> Any:
    x, axes = inputs[0], _numbers(inputs[1]) or []
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _slice(attribute: _Attributes, inputs: Any) -> Any:
    x, starts, ends = inputs[0], _numbers(inputs[1]) or [], _numbers(inputs[2]) or []
    axes = (_numbers(inputs[3]) if len(inputs) > 3 else None) or list(range(len(starts)))
    steps = (_numbers(inputs[4]) if len(inputs) > 4 else None) or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        places = range(
            *slice(start, end if step > 0 or end > -x.shape[axis] - 1 else None, step).indices(x.shape[axis])
        )
        x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64))
    return x


def _split(attribute: _Attributes, inputs: Any) -> tuple[Tensor, ...]:
    x, axis = inputs[0], attribute("axis", 0)
    sizes = _numbers(inputs[1]) if len(inputs) > 1 else None
    if sizes is None:
        count = attribute("num_outputs", len(attribute.node.outputs))
        sizes = [-(-x.shape[axis] // count)] * count
        sizes[-1] += x.shape[axis] - sum(sizes)
    return torch.split(x, sizes, axis)


def _gather(attribute: _Attributes, inputs: Any) -> Any:
    x, places = inputs
    axis = attribute("axis", 0) % x.ndim
    places = torch.where(places < 0, places + x.shape[axis], places)
    taken = x.index_select(axis, places.reshape(-1))
    return taken.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def _gather_elements(attribute: _Attributes, inputs: Any) -> Any:
    x, places = inputs
    axis = attribute("axis", 0)
    return x.gather(axis, torch.where(places < 0, places + x.shape[axis], places))


def _expand(attribute: _Attributes, inputs: Any) -> Any:
    x, sizes = inputs[0], _numbers(inputs[1]) or []
    return x.expand(torch.broadcast_shapes(x.shape, tuple(sizes)))  # type: ignore[no-untyped-call]


def _pad(attribute: _Attributes, inputs: Any) -> Any:
    x, pads = inputs[0], _numbers(inputs[1]) or []
    value = 0.0 if len(inputs) < 3 or inputs[2] is None else float(inputs[2])
    if attribute("mode", "constant") != "constant" or (len(inputs) > 3 and inputs[3] is not None):
        raise _Unknown
    count = len(pads) // 2
    sides = [side for axis in reversed(range(count)) for side in (pads[axis], pads[axis + count])]
    return functional.pad(x, sides, value=value)


def _reduced(reduce: Callable[..., Tensor]) -> Computed:
    def reduced(attribute: _Attributes, inputs: Any) -> Any:
        x, axes = inputs[0], attribute("axes", None) or (_numbers(inputs[1]) if len(inputs) > 1 else None)
        if axes is None and attribute("noop_with_empty_axes", 0):
            return x
        return reduce(x, dim=axes or list(range(x.ndim)), keepdim=bool(attribute("keepdims", 1)))

    return reduced


def _top_k(attribute: _Attributes, inputs: Any) -> tuple[Tensor, ...]:
    count, axis = int(inputs[1].reshape(())), attribute("axis", -1)
    return tuple(torch.topk(inputs[0], count, axis, bool(attribute("largest", 1)), sorted=True))


def _cast(attribute: _Attributes, inputs: Any) -> Any:
    kinds = {1: torch.float32, 2: torch.uint8, 3: torch.int8, 6: torch.int32, 7: torch.int64, 9: torch.bool}
    if attribute("to", 0) not in kinds:
        raise _Unknown
    return inputs[0].to(kinds[attribute("to", 0)])


def _resize(attribute: _Attributes, inputs: Any) -> Any:
    """Resize as in decoders: linear by an integer factor with half pixels, and nearest."""
    x, scales, sizes = inputs[0], *[*inputs[2:4], None, None][:2]
    mode, places = attribute("mode", "nearest"), attribute("coordinate_transformation_mode", "half_pixel")
    if x.ndim != 4 or attribute("antialias", 0) or attribute("axes", None) is not None:
        raise _Unknown
    if scales is not None and scales.numel():
        target = [int(size * scale) for size, scale in zip(x.shape, scales.tolist(), strict=True)]
    else:
        target = _numbers(sizes) or []
    if target[:2] != list(x.shape[:2]):
        raise _Unknown
    if mode == "linear" and places in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        return functional.interpolate(x, target[2:], mode="bilinear", align_corners=places == "align_corners")
    whole = all(wide % size == 0 for wide, size in zip(target[2:], x.shape[2:], strict=True))
    if mode == "nearest" and whole:
        return functional.interpolate(x, target[2:], mode="nearest")
    raise _Unknown


def _elementwise(compute: Callable[..., Tensor]) -> Computed:
    return lambda attribute, inputs: compute(*inputs)


def _operators() -> Iterator[tuple[str, Computed]]:
    """The operators by name; looked up on use, so that PyTorch is not loaded earlier."""
    for name, place in {
        **{"Add": "add", "Sub": "sub", "Mul": "mul", "Pow": "pow", "MatMul": "matmul", "Sqrt": "sqrt", "Exp": "exp"},
        **{"Log": "log", "Neg": "neg", "Abs": "abs", "Erf": "erf", "Tanh": "tanh", "Sigmoid": "sigmoid", "Sin": "sin"},
        **{"Cos": "cos", "Relu": "relu", "Reciprocal": "reciprocal", "Where": "where", "Max": "maximum"},
        **{"Min": "minimum", "Identity": "clone"},
    }.items():
        yield name, _elementwise(lambda *inputs, place=place: getattr(torch, place)(*inputs))


_OPERATORS: dict[str, Computed] = {
    **dict(_operators()),
    "Div": lambda attribute, inputs: (
        inputs[0] / inputs[1] if inputs[0].is_floating_point() else torch.div(*inputs, rounding_mode="trunc")
    ),
    "Softmax": lambda attribute, inputs: functional.softmax(inputs[0], attribute("axis", -1)),
    "LogSoftmax": lambda attribute, inputs: functional.log_softmax(inputs[0], attribute("axis", -1)),
    "Transpose": lambda attribute, inputs: inputs[0].permute(attribute("perm", list(range(inputs[0].ndim))[::-1])),
    "Concat": lambda attribute, inputs: torch.cat(inputs, attribute("axis", 0)),
    "Clip": lambda attribute, inputs: torch.clamp(inputs[0], *[*inputs[1:], None, None][:2]),
    "LeakyRelu": lambda attribute, inputs: functional.leaky_relu(inputs[0], attribute("alpha", 0.01)),
    "HardSigmoid": lambda attribute, inputs: torch.clamp(
        inputs[0] * attribute("alpha", 0.2) + attribute("beta", 0.5), 0, 1
    ),
    "ReduceMean": _reduced(lambda x, dim, keepdim: x.mean(dim, keepdim)),
    "ReduceSum": _reduced(lambda x, dim, keepdim: x.sum(dim, keepdim)),
    "ReduceMax": _reduced(lambda x, dim, keepdim: x.amax(dim, keepdim)),
    "ReduceL2": _reduced(lambda x, dim, keepdim: x.norm(dim=dim, keepdim=keepdim)),
    "LayerNormalization": _norm,
    "Conv": _convolution,
    "AveragePool": _pooled(lambda *settings: functional.avg_pool2d(*settings)),
    "MaxPool": _pooled(_max_pool),
    "GlobalAveragePool": lambda attribute, inputs: inputs[0].mean(dim=(2, 3), keepdim=True),
    "GridSample": _grid_sample,
    "Gemm": _gemm,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Split": _split,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Expand": _expand,
    "Pad": _pad,
    "Gelu": lambda attribute, inputs: functional.gelu(inputs[0], approximate=attribute("approximate", "none")),
    "TopK": _top_k,
    "Cast": _cast,
    "Resize": _resize,
}

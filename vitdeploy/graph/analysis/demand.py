"""Bound the memory and work of a graph, in elements and multiplications, before any node is computed.

All sizes are numbers here. An open batch is one sample; other open sizes are those of an image or a text. A size that
depends on the content of an image is replaced by its upper bound (NonZero finds all); an unbounded one by the size of
the largest input of its node. Loop bodies are followed trip by trip until their state stops changing.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis import work as budget
from vitdeploy.graph.analysis.work import MATMULS, STANDARD, GraphBudget, UnknownSize, effort, label
from vitdeploy.graph.shapes.infer import CONTENT_LIMIT, INTEGERS, Contents, Facts, Operators
from vitdeploy.graph.shapes.sizes import Dims
from vitdeploy.graph.values import array_of

# Numbers assumed for open sizes: the first axis, the channels and sides of an image, and any other axis.
SAMPLES, CHANNELS, SIDE, LENGTH = 1, 3, 224, 128
# The limit of nodes followed in loop bodies, and the trips after which a counter is no longer followed.
MAX_FOLLOWED, COUNTED_TRIPS = 20_000, 64
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
# Products, whose outputs may have more elements than their inputs.
PRODUCTS = frozenset(MATMULS) | {
    *("Gemm", "Conv", "ConvInteger", "QLinearConv", "ConvTranspose", "Einsum", "Attention", "MultiHeadAttention"),
    "MatMulNBits",
}
# Operators that join all their inputs, for outputs of unknown shape.
JOINED = frozenset({"Concat", "ConcatFromSequence", "SequenceConstruct", "SequenceInsert"})
VIEWS = frozenset({"Squeeze", "Unsqueeze", "Reshape", "Identity"})


def _of_all(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Extend a binary function to any number of operands; numpy's functions treat a third operand as the output."""
    return lambda *operands: functools.reduce(function, operands)


NUMERIC: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.true_divide,
    "Pow": np.power,
    "Min": _of_all(np.minimum),
    "Max": _of_all(np.maximum),
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Log": np.log,
    "Neg": np.negative,
    "Abs": np.absolute,
    "Cast": np.asarray,
}
COMPUTED = VIEWS | set(NUMERIC) | {"Concat", "Size"}


def check_demand(
    model: ir.Model, weights: Collection[str], name: str, image_size: tuple[int, int] | None = None
) -> None:
    """Refuse a graph that needs more memory or work than a vision model. Writes the types of values into `model`.

    Args:
        weights: names of inputs that stand for weights.
        name: the file name for messages.
        image_size: (height, width), if the graph leaves them open.

    Raises:
        UnsafeGraphError: a limit is exceeded; the error names the amount and the node.
        GraphError: a loop may run for ever, or an integer division traps.
    """
    _Demand(model, GraphBudget(name)).follow(model.graph, weights, image_size)


class _Known(NamedTuple):
    """Facts about a value, in a form that can be passed on."""

    dims: Dims | None = None
    contents: Contents | None = None
    array: npt.NDArray[Any] | None = None
    elements: int | None = None
    type: ir.TypeProtocol | None = None

    @property
    def state(self) -> tuple[object, ...]:
        """The facts in a form that can be compared."""
        contents = None if self.contents is None else (self.contents.shape, tuple(self.contents.ravel()))
        return self.dims, contents, None if self.array is None else self.array.tobytes(), self.elements


class _Demand(Facts):
    def __init__(self, model: ir.Model, limits: GraphBudget) -> None:
        super().__init__(Operators(model.graph.opset_imports))
        self._budget = limits
        self._arrays: dict[ir.Value, npt.NDArray[Any]] = {}  # small tensors of floats
        self._counts: dict[ir.Value, int] = {}  # elements, where the shape is not known
        self._stored: dict[ir.Value, int] = {}  # for values computed from constants: the elements of the constants
        # In the order of the fields of `_Known`.
        self._facts: tuple[dict[ir.Value, Any], ...] = (self.dims, self.contents, self._arrays, self._counts)
        self._followed = 0

    def follow(self, graph: ir.Graph, weights: Collection[str], image_size: tuple[int, int] | None) -> None:
        named: dict[str, int] = {}
        total = 0
        for value in graph.inputs:
            if value.shape is None:
                continue
            assumed = _assumed(value.shape, image_size)
            self.dims[value] = tuple(
                size if isinstance(size, int) else named.setdefault(str(size.value or f"{value.name}.{axis}"), usual)
                for axis, (size, usual) in enumerate(zip(value.shape, assumed, strict=True))
            )
            count = self.count(value) or 0
            if str(value.name) in weights:
                self._stored[value] = count
            else:
                total += count
        self._budget.check(budget.INPUTS, total, ", ".join(str(value.name)[:40] for value in graph.inputs[:3]))
        stored = [value.const_value for value in graph.initializers.values()]
        held = sum(tensor.size for tensor in stored if tensor is not None) + sum(self._stored.values())
        self._budget.allow(budget.CONSTANTS, 2 * held)
        self._graph(graph)

    def count(self, value: ir.Value | None) -> int | None:
        """The number of elements, exact or estimated; None if unknown."""
        dims = _numbers_in(self.dims_of(value))
        if dims is not None:
            return math.prod(max(size, 0) for size in dims)
        return self._counts.get(value) if value is not None else None

    def numbers(self, value: ir.Value) -> npt.NDArray[Any] | None:
        found = self._arrays.get(value)
        return super().numbers(value) if found is None else found

    def sizes(self, value: ir.Value | None) -> list[int]:
        """Raises UnknownSize."""
        dims = _numbers_in(self.dims_of(value))
        if dims is None:
            raise UnknownSize
        return list(dims)

    def entries(self, value: ir.Value | None) -> list[int] | None:
        """The integers in a small tensor with known content."""
        found = self.numbers(value) if value is not None else None
        return [int(entry) for entry in found.ravel()] if found is not None and found.dtype.kind in "iub" else None

    def _graph(self, graph: ir.Graph) -> None:
        for node in graph:
            self._node(node)

    def _node(self, node: ir.Node) -> None:
        standard = node.domain in STANDARD
        if standard and node.op_type == "Constant":
            _read_constant(node)
        elif standard and node.op_type in _CONTROL:
            _CONTROL[node.op_type](self, node)
        elif any(field.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for field in node.attributes.values()):
            raise self._budget.open_loop(label(node))
        else:
            self.visit(node)
            if standard:
                self._refuse_overflow(node)
                self._compute(node)
                self._bound(node)
            self._estimate(node)
        self._account(node)

    def _refuse_overflow(self, node: ir.Node) -> None:
        """Refuse the one integer quotient that overflows its type: processors trap it, and runtimes do not check."""
        if node.op_type not in ("Div", "Mod") or len(node.inputs) < 2:
            return
        a, b = (self._array(value) for value in node.inputs)
        if a is None or b is None or a.dtype.kind != "i" or b.dtype.kind != "i":
            return
        if np.any(b == -1) and np.any(a == np.iinfo(a.dtype).min):
            raise self._budget.overflow(label(node))

    def _array(self, value: ir.Value | None) -> npt.NDArray[Any] | None:
        """The content of an initializer of any size, or of a small computed tensor."""
        found = array_of(value)
        return self.numbers(value) if found is None and value is not None else found

    def _compute(self, node: ir.Node) -> None:
        """Compute small float tensors, which Resize and similar operators take their sizes from."""
        if node.op_type not in COMPUTED or len(node.outputs) != 1 or node.outputs[0] in self.contents:
            return
        output = node.outputs[0]
        arrays = [self.numbers(value) if value is not None else None for value in node.inputs]
        known = [array for array in arrays if array is not None]
        if node.op_type == "Size" and (count := self.count(node.inputs[0])) is not None:
            self._keep(output, np.asarray(count))
        if not known or len(known) < len(arrays):
            return
        dims, found = _numbers_in(self.dims.get(output)), None
        try:
            with np.errstate(all="ignore"):
                if node.op_type in VIEWS and dims is not None:
                    found = known[0].reshape(dims)
                elif node.op_type == "Concat" and all(array.ndim == 1 for array in known):
                    found = np.concatenate(known) if sum(map(len, known)) <= CONTENT_LIMIT else None
                elif node.op_type in NUMERIC and _fits(known):
                    found = NUMERIC[node.op_type](*known)
                if found is not None:
                    self._keep(output, np.asarray(found))
        except (ValueError, TypeError, OverflowError):  # an invalid file, which its runtime will report
            return

    def _keep(self, value: ir.Value, array: npt.NDArray[Any]) -> None:
        if value.dtype in INTEGERS:
            entries = np.empty(array.size, dtype=object)
            entries[:] = [int(entry) for entry in array.astype(np.int64).ravel()]
            self.contents[value] = entries.reshape(array.shape)
        elif value.dtype in FLOATS:
            self._arrays[value] = array.astype(value.dtype.numpy())
        else:
            return
        self.dims[value] = array.shape

    def _bound(self, node: ir.Node) -> None:
        rule = _BOUNDS.get(node.op_type)
        open_ones = [output for output in node.outputs if _numbers_in(self.dims.get(output)) is None]
        if rule is None or not open_ones:
            return
        try:
            found = rule(self, node)
        except (UnknownSize, IndexError, ValueError):
            return
        self.dims.update(dict.fromkeys(open_ones, found))

    def _estimate(self, node: ir.Node) -> None:
        """Estimate the number of elements of outputs with unknown shape."""
        counts = [self.count(value) or 0 for value in node.inputs if value is not None]
        amount = sum(counts) if node.op_type in JOINED else max(counts, default=0)
        if node.op_type == "Tile" and (repeats := self.entries(node.inputs[1])) is not None:
            amount *= math.prod(max(repeat, 0) for repeat in repeats)
        kind = next((value.type for value in node.inputs if value is not None and value.dtype in FLOATS), None)
        for output in node.outputs:
            if _numbers_in(self.dims.get(output)) is None:
                self._counts[output] = amount
                output.type = output.type or kind  # a guess, so that inference continues after an unknown operator

    def _account(self, node: ir.Node) -> None:
        where, given = label(node), [value for value in node.inputs if value is not None]
        largest = max((self.count(value) or 0 for value in given), default=0)
        stored = self._stored_behind(node, given)
        for output in node.outputs:
            amount = self.count(output) or 0
            if stored is not None:
                self._stored[output] = stored
                self._budget.add(budget.CONSTANTS, max(0, amount - stored), where)
            elif amount > largest:
                self._budget.check(budget.PRODUCT if node.op_type in PRODUCTS else budget.GROWN, amount, where)
            self._budget.add(budget.ELEMENTS, amount, where)
        self._budget.add(budget.STEPS, 1, where)
        self._budget.add(budget.MACS, effort(node, self.sizes), where)

    def _stored_behind(self, node: ir.Node, given: Sequence[ir.Value]) -> int | None:
        """The elements of the largest constant behind a node's outputs; None if the outputs depend on an input.

        Sizes of tensors count as constants: a runtime knows them from its input.
        """
        if node.op_type == "Constant":
            held = self.count(node.outputs[0]) or 0
            self._budget.allow(budget.CONSTANTS, 2 * held)
            return held
        if node.op_type in ("Shape", "Size"):
            return 0
        found = [
            value.const_value.size
            if value.const_value is not None and not value.is_graph_input()
            else self._stored.get(value)
            for value in given
        ]
        known = [count for count in found if count is not None]
        return max(known, default=0) if len(known) == len(found) and node.op_type not in _CONTROL else None

    # --- branches and loops ---

    def _known(self, value: ir.Value | None) -> _Known:
        if value is None:
            return _Known()
        contents, dims = self.contents_of(value), self.dims_of(value)
        array = self.numbers(value) if contents is None else None
        return _Known(dims, contents, array, self._counts.get(value), value.type)

    def _set(self, value: ir.Value, known: _Known) -> None:
        self._forget(value)
        for facts, fact in zip(self._facts, known[:-1], strict=True):
            if fact is not None:
                facts[value] = fact
        value.type = value.type or known.type

    def _forget(self, value: ir.Value) -> None:
        for facts in (*self._facts, self._stored):
            facts.pop(value, None)

    def branch(self, node: ir.Node) -> None:
        """If: both branches, and the larger of their results."""
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        for each in branches:
            self._graph(each)
        for output, *results in zip(node.outputs, *(each.outputs for each in branches), strict=False):
            self._set(output, self._known(max(results, key=self._extent)))

    def _extent(self, value: ir.Value) -> tuple[int, float]:
        """The number of elements, and the largest value, which may be a size."""
        count, numbers = self.count(value) or 0, self.numbers(value)
        if numbers is None or not numbers.size or numbers.dtype.kind not in "iufb":
            return count, 0.0
        return count, float(numbers.max())

    def loop(self, node: ir.Node) -> None:
        """Loop: the number of trips in its first input, regardless of its condition."""
        body = node.attributes["body"].as_graph()
        trips = self.entries(node.inputs[0])
        if trips is None or len(trips) != 1:
            raise self._budget.open_loop(label(node))
        self._set(body.inputs[0], _Known((), type=ir.TensorType(ir.DataType.INT64)))
        self._repeat(node, body, max(0, trips[0]), list(node.inputs)[2:], list(body.inputs)[2:], list(body.outputs)[1:])

    def scan(self, node: ir.Node) -> None:
        """Scan: a trip for each slice of its last inputs."""
        body = node.attributes["body"].as_graph()
        states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        scanned = list(node.inputs)[states:]
        axes = [int(axis) for axis in node.attributes.get_ints("scan_input_axes", ()) or [0] * len(scanned)]
        trips = 0
        for inner, outer, axis in zip(list(body.inputs)[states:], scanned, axes, strict=False):
            dims = _numbers_in(self.dims_of(outer))
            if outer is None or dims is None or not -len(dims) <= axis < len(dims):
                raise self._budget.open_loop(label(node))
            trips = max(trips, dims[axis])
            rest = tuple(size for index, size in enumerate(dims) if index != axis % len(dims))
            self._set(inner, _Known(rest, type=outer.type))
        given = list(node.inputs)[:states]
        self._repeat(node, body, trips, given, list(body.inputs)[:states], list(body.outputs))

    def _repeat(
        self,
        node: ir.Node,
        body: ir.Graph,
        trips: int,
        given: Sequence[ir.Value | None],
        carried: Sequence[ir.Value],
        results: Sequence[ir.Value],
    ) -> None:
        """The trips of a loop: the first results are carried to the next trip, the others are stacked."""
        where, nodes = label(node), max(1, len(body))
        self._budget.ahead(budget.STEPS, trips * nodes, where)
        known = [self._known(value) for value in given]
        for left in range(trips - 1, -1, -1):
            for inner, each in zip(carried, known, strict=False):
                self._set(inner, each)
            for value in (value for inner in body for value in inner.outputs):
                self._forget(value)
            mark = self._budget.mark()
            self._graph(body)
            found = [self._known(value) for value in results[: len(carried)]]
            if trips - left > COUNTED_TRIPS:
                found = [each._replace(contents=None, array=None) for each in found]
            if [each.state for each in found] == [each.state for each in known]:
                self._budget.repeat(mark, left, where)
                break
            self._followed += nodes
            if self._followed > MAX_FOLLOWED:
                raise self._budget.open_loop(f"{where}: tensors that change in each of {trips:,} trips")
            known = found
        for output, each in zip(node.outputs, known, strict=False):
            self._set(output, each)
        for output, result in zip(node.outputs[len(carried) :], results[len(carried) :], strict=False):
            dims, count = self.dims_of(result), self.count(result)
            stacked = None if dims is None else (trips, *dims)
            self._set(output, _Known(stacked, None, None, None if count is None else trips * count, result.type))


def _assumed(shape: ir.Shape, image_size: tuple[int, int] | None) -> list[int]:
    """The number to assume for each open axis of an input."""
    if len(shape) != 4:
        return [SAMPLES, *[LENGTH] * (len(shape) - 1)][: len(shape)]
    height, width = image_size or (SIDE, SIDE)
    last = shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4)
    return [SAMPLES, height, width, CHANNELS] if last else [SAMPLES, CHANNELS, height, width]


def _numbers_in(dims: Dims | None) -> tuple[int, ...] | None:
    """The shape, if all its sizes are known."""
    known = tuple(size for size in dims if isinstance(size, int)) if dims is not None else ()
    return known if dims is not None and len(known) == len(dims) else None


def _fits(operands: Sequence[npt.NDArray[Any]]) -> bool:
    return math.prod(np.broadcast_shapes(*(array.shape for array in operands))) <= CONTENT_LIMIT


def _read_constant(node: ir.Node) -> None:
    output = node.outputs[0]
    try:
        tensor = ir.convenience.get_const_tensor(output)
    except (ValueError, TypeError, OverflowError):  # not one value
        return
    if tensor is not None:
        output.const_value = tensor
        output.type = output.type or ir.TensorType(tensor.dtype)


_CONTROL: dict[str, Callable[[_Demand, ir.Node], None]] = {
    "If": _Demand.branch,
    "Loop": _Demand.loop,
    "Scan": _Demand.scan,
}


# --- upper bounds of sizes that depend on the content of an input, or that inference does not know ---


def _non_zero(demand: _Demand, node: ir.Node) -> Dims:
    dims = demand.sizes(node.inputs[0])
    return len(dims), math.prod(dims)


def _picked(demand: _Demand, node: ir.Node) -> Dims:
    """Compress, Unique: the whole input."""
    dims = demand.sizes(node.inputs[0])
    return tuple(dims) if "axis" in node.attributes else (math.prod(dims),)


def _reshaped(demand: _Demand, node: ir.Node) -> Dims:
    """An open size is the rest of the input's elements, so that its estimate does not grow."""
    dims, count = demand.dims.get(node.outputs[0]) or (), demand.count(node.inputs[0])
    known = [size for size in dims if isinstance(size, int)]
    if count is None or len(known) != len(dims) - 1:
        raise UnknownSize
    left = max(1, count // max(1, math.prod(known)))
    return tuple(size if isinstance(size, int) else left for size in dims)


def _same(demand: _Demand, node: ir.Node) -> Dims:
    return tuple(demand.sizes(node.inputs[0]))


def _boxes(demand: _Demand, node: ir.Node) -> Dims:
    """NonMaxSuppression: [batches * classes * boxes, 3]."""
    batches, classes, count = demand.sizes(node.inputs[1])
    most = demand.entries(node.inputs[2]) if len(node.inputs) > 2 else None
    return batches * classes * (min(count, max(most[0], 0)) if most else count), 3


def _one_hot(demand: _Demand, node: ir.Node) -> Dims:
    dims, depth = demand.sizes(node.inputs[0]), demand.numbers(node.inputs[1]) if node.inputs[1] is not None else None
    if depth is None or depth.size != 1:
        raise UnknownSize
    axis = node.attributes.get_int("axis", -1) or 0
    at = axis % (len(dims) + 1)
    return (*dims[:at], int(depth.ravel()[0]), *dims[at:])


def _sizes_from(index: int, *, plane: bool = False) -> Callable[[_Demand, ir.Node], Dims]:
    """A rule for outputs whose sizes are an input's content; `plane`: a grid [n, ..., axes] from [n, channels, ...]."""

    def dims(demand: _Demand, node: ir.Node) -> Dims:
        entries = demand.entries(node.inputs[index])
        if entries is None:
            raise UnknownSize
        return (entries[0], *entries[2:], len(entries) - 2) if plane else tuple(entries)

    return dims


_BOUNDS: dict[str, Callable[[_Demand, ir.Node], Dims]] = {
    "NonZero": _non_zero,
    "Compress": _picked,
    "Unique": _picked,
    "TopK": _same,
    "Reshape": _reshaped,
    "NonMaxSuppression": _boxes,
    "OneHot": _one_hot,
    "MaxUnpool": _sizes_from(2),
    "AffineGrid": _sizes_from(1, plane=True),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), _sizes_from(0)),
}

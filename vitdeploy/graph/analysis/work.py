"""How much work a graph is."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from vitdeploy.errors import GraphError, UnsafeGraphError
from vitdeploy.graph.analysis.rows import Linear
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.values import weight_bytes
from vitdeploy.limits import setting

# --- The least work of a graph (MACs and bytes moved) -----------------------------------------------------------------
# counted from its nodes and shapes, as a reference for latencies.
#
# Counted are the MACs of MatMul, Gemm, convolutions and attention. A MAC is two operations (FLOPs), as in the roofline
# model (Williams, Waterman and Patterson 2009), whatever its type. Norms, softmax, activations and sums are not
# counted: they are a percent or two of a ViT's operations. What cannot be counted exactly is an error: a wrong count is
# worse than none.


# The position of the second operand.
MATMULS = {"MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3, "MatMulIntegerToFloat": 1}
# Rows are quantized to INT8 by the kernel, whose products are those of INT8.
GROUPED = "MatMulNBits"
CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
INTEGER = {"MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger", "QLinearConv"}
# Operators of ONNX with MACs, or with graphs, inside that are not counted.
UNCOUNTED = {"Attention", "DeformConv", "Einsum", "GRU", "If", "LSTM", "Loop", "RNN", "Scan", "SequenceMap"}
STANDARD = ("", "ai.onnx")
OURS = {("com.microsoft", kind) for kind in ("MatMulIntegerToFloat", "MultiHeadAttention", GROUPED)}
STORED = {
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.INT4: "int4",
}
FLOATS = {ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}


@dataclass(frozen=True)
class Work:
    """The work of one query of `batch` images.

    `flops` by the precision that MACs are placed in: "int8" by weights in INT8 or INT4 (also as Q/DQ), else the type of
    their result. Bytes are those that have to be read or written at least once: weights and constants as they are
    stored in the graph, inputs, outputs. What flows between layers is not in them: it may stay in a cache.
    """

    batch: int
    flops: dict[str, int]
    weight_bytes: int
    input_bytes: int
    output_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.input_bytes + self.output_bytes


def count_work(model: ir.Model, batch: int) -> Work:
    """The work of `model` at a batch, which its free leading axis gets; shapes that it lacks are inferred, in place.

    Raises:
        GraphError: a size depends on more than the batch, or an operator with MACs is none of the known ones.
    """
    flops = _try(model, batch)
    if flops is None:
        Inference(model)
        flops = _try(model, batch)
    sides = [sum(_nbytes(model, value, batch) for value in side) for side in (model.graph.inputs, model.graph.outputs)]
    if flops is None:
        raise GraphError("the graph's operations cannot be counted", found="sizes that depend on more than the batch")
    return Work(batch, dict(sorted(flops.items())), weight_bytes(model), *sides)


def layer_macs(model: ir.Model, linear: Linear) -> int | None:
    """The MACs of a layer, at batch 1 if the batch is free; None if the size of its output depends on more than
    that."""
    try:
        count = math.prod(_Sizes(model, 1)(linear.output))
    except UnknownSize:
        return None
    return count * linear.weight.size // linear.weight.shape[linear.out_axis]


def node_macs(model: ir.Model, node: ir.Node) -> int | None:
    """The same of any MatMul or Conv, also of two computed tensors; 0 for other operations."""
    if node.domain or node.op_type not in ("MatMul", "Conv"):
        return 0
    try:
        return macs_of(node, _Sizes(model, 1))
    except UnknownSize:
        return None


def elements(model: ir.Model, node: ir.Node) -> int:
    """The elements of what a node makes, at batch 1 if the batch is free; 0 where its size depends on more than
    that."""
    try:
        return math.prod(_Sizes(model, 1)(node.outputs[0]))
    except UnknownSize:
        return 0


def _try(model: ir.Model, batch: int) -> Counter[str] | None:
    """FLOPs by precision; None if a size is not known."""
    sizes, found = _Sizes(model, batch), Counter[str]()
    for node in model.graph:
        domain = "" if node.domain in STANDARD else node.domain
        if (domain and (domain, node.op_type) not in OURS) or (not domain and node.op_type in UNCOUNTED):
            raise GraphError("the graph's operations cannot be counted", found=f"{node.op_type} {node.name}")
        try:
            macs = macs_of(node, sizes)
        except UnknownSize:
            return None
        if macs:
            found[_precision(node)] += 2 * macs
    return found


class UnknownSize(Exception):
    """A size is not known."""


class _Sizes:
    """The sizes of values as numbers, with the free batch axis of the first input set to a number."""

    def __init__(self, model: ir.Model, batch: int) -> None:
        shape = model.graph.inputs[0].shape if model.graph.inputs else None
        first = shape[0] if shape is not None and len(shape) else None
        self._free = {str(first.value): batch} if isinstance(first, ir.SymbolicDim) and first.value else {}

    def __call__(self, value: ir.Value | None) -> list[int]:
        """
        Raises:
            UnknownSize: of at least one axis.
        """
        if value is None:
            raise UnknownSize
        if value.shape is not None:
            return [size if isinstance(size, int) else self._number(size) for size in value.shape]
        if value.const_value is not None:
            return [int(size) for size in value.const_value.shape.numpy()]
        raise UnknownSize

    def _number(self, size: ir.SymbolicDim) -> int:
        """The number in a product as shape inference writes it: "4*batch"."""
        factors = str(size.value).replace(" ", "").split("*")
        if not all(factor.isdecimal() or factor in self._free for factor in factors):
            raise UnknownSize
        return math.prod(self._free[factor] if factor in self._free else int(factor) for factor in factors)


def macs_of(node: ir.Node, sizes: Callable[[ir.Value | None], list[int]]) -> int:
    """The number of MACs of a node; 0 of one that is not counted here.

    `sizes` raises UnknownSize for a value of unknown shape.
    """
    kind, inputs = node.op_type, node.inputs
    if kind in MATMULS:
        return math.prod(sizes(node.outputs[0])) * (sizes(inputs[MATMULS[kind]])[-2:])[0]
    if kind == GROUPED:
        return math.prod(sizes(node.outputs[0])) * (node.attributes.get_int("K", 0) or 0)
    if kind == "Gemm":
        return math.prod(sizes(node.outputs[0])) * sizes(inputs[0])[0 if node.attributes.get_int("transA", 0) else 1]
    if kind in CONVOLUTIONS:
        return math.prod(sizes(node.outputs[0])) * math.prod(sizes(inputs[CONVOLUTIONS[kind]])[1:])
    if kind == "ConvTranspose":
        return math.prod(sizes(inputs[0])) * math.prod(sizes(inputs[1])[1:])
    if kind == "MultiHeadAttention":
        (batch, rows, width), (_, keys, _), (_, _, out) = (sizes(each) for each in _query_key_value(node))
        return batch * rows * keys * (width + out)
    return 0


def _query_key_value(node: ir.Node) -> list[ir.Value | None]:
    """
    Raises:
        UnknownSize: they come in another form than as three tensors [batch, tokens, heads * channels].
    """
    found = list(node.inputs[:3])
    if len(found) < 3 or any(value is None or value.shape is None or len(value.shape) != 3 for value in found):
        raise UnknownSize
    return found


def _precision(node: ir.Node) -> str:
    stored = [_stored(value) for value in node.inputs[:2]]
    # A float input of weights in INT8 or INT4 is quantized by the runtime.
    if node.op_type in INTEGER or node.op_type == GROUPED or stored[1:] in (["int8"], ["int4"]):
        return "int8"
    if stored[0] is not None and stored[0] == stored[1]:
        return stored[0]
    dtype = node.outputs[0].dtype or next((value.dtype for value in node.inputs if value is not None), None)
    return FLOATS.get(dtype, dtype.name.lower()) if dtype is not None else "fp32"


def _stored(value: ir.Value | None) -> str | None:
    """The precision that a value is stored in before DequantizeLinear makes floats of it; None if nothing does."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "DequantizeLinear" or producer.inputs[0] is None:
        return None
    source = producer.inputs[0]
    dtype = source.const_value.dtype if source.const_value is not None else source.dtype
    if dtype is None:  # of QuantizeLinear: that of its zero point
        before = source.producer()
        zero = before.inputs[2] if before is not None and len(before.inputs) > 2 else None
        dtype = zero.dtype if zero is not None else ir.DataType.UINT8
    return STORED.get(dtype) if dtype is not None else "int8"


def _nbytes(model: ir.Model, value: ir.Value, batch: int) -> int:
    """
    Raises:
        GraphError: its size depends on more than the batch.
    """
    try:
        return math.ceil(math.prod(_Sizes(model, batch)(value)) * (value.dtype.itemsize if value.dtype else 0))
    except UnknownSize:
        raise GraphError("the graph's bytes cannot be counted", found=f"{value.name}: {value.shape}") from None


# --- Multiplications of a node ----------------------------------------------------------------------------------------
# near enough to refuse a graph that nobody could run; also what `work` does not count.


Sizes = Callable[[ir.Value | None], list[int]]


def effort(node: ir.Node, sizes: Sizes) -> int:
    """0 where a size is not known, and for operators that take a few operations an element."""
    rule = _RULES.get(node.op_type, macs_of)
    try:
        return max(0, rule(node, sizes))
    except (UnknownSize, IndexError, ValueError):
        return 0


def _einsum(node: ir.Node, sizes: Sizes) -> int:
    """The elements of the result, times the sizes of the labels that are summed over."""
    left, arrow, right = str(node.attributes.get_string("equation", "")).replace(" ", "").partition("->")
    if not arrow:  # the result has the labels that stand once
        right = "".join(name for name in left if left.count(name) == 1)
    found: dict[str, int] = {}
    for term, value in zip(left.split(","), node.inputs, strict=True):
        dims = sizes(value)
        before, dots, after = term.partition("...")
        found.update(zip(before, dims, strict=False))
        found.update(zip(reversed(after), reversed(dims), strict=False) if dots else ())
    return math.prod(sizes(node.outputs[0])) * math.prod(size for name, size in found.items() if name not in right)


def _recurrent(node: ir.Node, sizes: Sizes) -> int:
    steps, batch, width = sizes(node.inputs[0])
    directions, rows, hidden = sizes(node.inputs[2])
    return directions * steps * batch * rows * (width + hidden)


def _pool(node: ir.Node, sizes: Sizes) -> int:
    return math.prod(sizes(node.outputs[0])) * math.prod(
        int(size) for size in node.attributes.get_ints("kernel_shape", ()) or ()
    )


def _neighbours(node: ir.Node, sizes: Sizes) -> int:
    return math.prod(sizes(node.outputs[0])) * (node.attributes.get_int("size", 1) or 1)


def _regions(node: ir.Node, sizes: Sizes) -> int:
    return math.prod(sizes(node.outputs[0])) * max(2, node.attributes.get_int("sampling_ratio", 0) or 0) ** 2


def _suppressed(node: ir.Node, sizes: Sizes) -> int:
    return sizes(node.outputs[0])[0] * sizes(node.inputs[1])[-1]


def _attended(node: ir.Node, sizes: Sizes) -> int:
    return 2 * math.prod(sizes(node.outputs[0])) * sizes(node.inputs[1])[-2]


def _deformed(node: ir.Node, sizes: Sizes) -> int:
    return math.prod(sizes(node.outputs[0])) * math.prod(sizes(node.inputs[1])[1:])


_RULES: dict[str, Callable[[ir.Node, Sizes], int]] = {
    "Einsum": _einsum,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    "LRN": _neighbours,
    "RoiAlign": _regions,
    "NonMaxSuppression": _suppressed,
    "Attention": _attended,
    "DeformConv": _deformed,
}


# --- What a graph may ask for at most, and the refusal of one that asks for more --------------------------------------
# A file of 200 bytes can hold a loop of 2^62 trips, or forty doublings of one tensor. Constant folding, a runtime's
# optimizer and a comparison run would each try to compute that. The limits are above all vision models known to us:
# that of a product is 4 times what SAM ViT-H at 1024 pixels takes (2^28 attention scores, 3 * 10^12 MACs in all).


# A number by which all limits are multiplied: for a user who knows the file and has the memory.
VARIABLE = "VITDEPLOY_GRAPH_LIMITS"
SHOWN_CHARACTERS = 80


class _Limit(NamedTuple):
    """`what` is counted, and how much of it is allowed."""

    most: int
    what: str


INPUTS = _Limit(1 << 26, "elements in the inputs")
# Beyond what is stored: a constant that is transposed or cast is not made larger by that.
CONSTANTS = _Limit(1 << 26, "elements that constants are expanded to")
# By copies: 150 maps of 900 x 900 pixels. A doubled tensor is as cheap to ask for as it is dear to have.
GROWN = _Limit(1 << 27, "elements in a tensor")
PRODUCT = _Limit(1 << 30, "elements in a product")
# A bound of time, as MACS: a ViT-L at a fixed batch of 256 is within both.
ELEMENTS = _Limit(1 << 38, "elements in all tensors together")
MACS = _Limit(10**14, "multiplications")
STEPS = _Limit(1 << 18, "operations, each counted as often as its loop runs")


class GraphBudget:
    """The sums of what a graph asks for; `name` is that of its file, for people.

    Its methods raise UnsafeGraphError as soon as a limit is passed.
    """

    def __init__(self, name: str) -> None:
        self._name, self._factor = name, factor()
        self._sums: dict[_Limit, int] = {}
        self._extra: dict[_Limit, int] = {}

    def allow(self, limit: _Limit, more: int) -> None:
        """Raise a limit by what the file itself holds."""
        self._extra[limit] = self._extra.get(limit, 0) + more

    def check(self, limit: _Limit, amount: int, where: str) -> None:
        most = int((limit.most + self._extra.get(limit, 0)) * self._factor)
        if amount > most:
            number = f"{amount:,}" if amount < 10**18 else f"over 10^{len(str(amount)) - 1}"
            raise UnsafeGraphError(
                f"{self._name} asks for more memory or work than a vision model takes",
                found=f"{number} {limit.what}, at {where}",
                expected=f"at most {most:,}",
                fix=f"if you trust the file and have the memory: {VARIABLE}={2 * self._factor:.15g} doubles all limits",
            )

    def add(self, limit: _Limit, amount: int, where: str) -> None:
        self._sums[limit] = self._sums.get(limit, 0) + amount
        self.check(limit, self._sums[limit], where)

    def mark(self) -> dict[_Limit, int]:
        """The sums as they are, for `repeat`."""
        return dict(self._sums)

    def repeat(self, mark: dict[_Limit, int], times: int, where: str) -> None:
        """Add what was added since a mark as often again as `times`."""
        for limit, amount in list(self._sums.items()):
            self.add(limit, times * (amount - mark.get(limit, 0)), where)

    def ahead(self, limit: _Limit, more: int, where: str) -> None:
        """Check what is about to be added, without doing so."""
        self.check(limit, self._sums.get(limit, 0) + more, where)

    def overflow(self, where: str) -> GraphError:
        """The error of a quotient of constants that is beyond its type."""
        return GraphError(
            f"{self._name} divides the least integer by -1, which ends the process of a runtime",
            found=where,
            expected="quotients within their type",
            fix="export the model again; check where the file is from",
        )

    def open_loop(self, where: str) -> GraphError:
        """The error of a loop that ends when its data says so."""
        return GraphError(
            f"{self._name} has a loop of which nothing says how often it runs",
            found=where,
            expected="a number of trips that is constant, or follows from the sizes of tensors",
            fix="export the model without that loop: unrolled, or as operators on whole tensors",
        )


def factor() -> float:
    """What the limits are multiplied by: 1, unless the user's environment says otherwise; errors as `setting`."""
    return setting(VARIABLE) or 1.0


def label(node: ir.Node) -> str:
    """A node in an error."""
    name = str(node.name or node.outputs[0].name if node.outputs else "")
    return f"{node.op_type} {name[:SHOWN_CHARACTERS]}".strip()

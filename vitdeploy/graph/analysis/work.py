"""Count the work of a graph, and limit it."""

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

# --- The minimum work of a graph (MACs and bytes moved) ---------------------------------------------------------------
# Counted from nodes and shapes, as a reference for latencies.
#
# We count the MACs of MatMul, Gemm, convolutions and attention. A MAC is two operations (FLOPs), as in the roofline
# model (Williams, Waterman and Patterson 2009), whatever its type. Norms, softmax, activations and sums are not
# counted: they are 1-2 % of a ViT's operations. An operator that cannot be counted exactly is an error: a wrong count
# is worse than no count.


# Matrix products, with the position of the second operand.
MATMULS = {"MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3, "MatMulIntegerToFloat": 1}
# The kernel quantizes rows to INT8 and multiplies in INT8.
GROUPED = "MatMulNBits"
CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
INTEGER = {"MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger", "QLinearConv"}
# Operators of ONNX that contain MACs or graphs and are not counted.
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

    `flops` by the precision of the MACs: "int8" for weights in INT8 or INT4 (also as Q/DQ), else the type of their
    result. Bytes are those read or written at least once: weights and constants as stored in the graph, inputs and
    outputs. Activations between layers are not counted: they may stay in a cache.
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
    """The work of `model` at a batch size, used for a free leading axis. Infers missing shapes, in place.

    Raises:
        GraphError: a size depends on more than the batch, or an operator with MACs is unknown.
    """
    flops = _try(model, batch)
    if flops is None:
        Inference(model)
        flops = _try(model, batch)
    sides = [sum(_nbytes(model, value, batch) for value in side) for side in (model.graph.inputs, model.graph.outputs)]
    if flops is None:
        raise GraphError(
            "the operations of the graph cannot be counted",
            found="sizes that depend on more than the batch",
            expected="sizes that are fixed except for the batch",
        )
    return Work(batch, dict(sorted(flops.items())), weight_bytes(model), *sides)


def layer_macs(model: ir.Model, linear: Linear) -> int | None:
    """The MACs of a layer, at batch 1 if the batch is free; None if its output size depends on more than the batch."""
    try:
        count = math.prod(_Sizes(model, 1)(linear.output))
    except UnknownSize:
        return None
    return count * linear.weight.size // linear.weight.shape[linear.out_axis]


def node_macs(model: ir.Model, node: ir.Node) -> int | None:
    """The MACs of any MatMul or Conv, also with two computed operands; 0 for other operations, None as `layer_macs`."""
    if node.domain or node.op_type not in ("MatMul", "Conv"):
        return 0
    try:
        return macs_of(node, _Sizes(model, 1))
    except UnknownSize:
        return None


def elements(model: ir.Model, node: ir.Node) -> int:
    """The elements of a node's output, at batch 1 if the batch is free; 0 if they depend on more than the batch."""
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
            raise GraphError(
                "the operations of the graph cannot be counted",
                found=f"{node.op_type} {node.name}",
                expected="operators whose MACs are known",
            )
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
    """The sizes of values as numbers, with a number for the free batch axis of the first input."""

    def __init__(self, model: ir.Model, batch: int) -> None:
        shape = model.graph.inputs[0].shape if model.graph.inputs else None
        first = shape[0] if shape is not None and len(shape) else None
        self._free = {str(first.value): batch} if isinstance(first, ir.SymbolicDim) and first.value else {}

    def __call__(self, value: ir.Value | None) -> list[int]:
        """The sizes of a value.

        Raises:
            UnknownSize: at least one size is unknown.
        """
        if value is None:
            raise UnknownSize
        if value.shape is not None:
            return [size if isinstance(size, int) else self._number(size) for size in value.shape]
        if value.const_value is not None:
            return [int(size) for size in value.const_value.shape.numpy()]
        raise UnknownSize

    def _number(self, size: ir.SymbolicDim) -> int:
        """The value of a product as shape inference writes it: "4*batch"."""
        factors = str(size.value).replace(" ", "").split("*")
        if not all(factor.isdecimal() or factor in self._free for factor in factors):
            raise UnknownSize
        return math.prod(self._free[factor] if factor in self._free else int(factor) for factor in factors)


def macs_of(node: ir.Node, sizes: Callable[[ir.Value | None], list[int]]) -> int:
    """The number of MACs of a node; 0 for operators that are not counted here.

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
        (batch, rows, width), (_, keys, _), (_, _, out) = (sizes(value) for value in _query_key_value(node))
        return batch * rows * keys * (width + out)
    return 0


def _query_key_value(node: ir.Node) -> list[ir.Value | None]:
    """Query, key and value of a MultiHeadAttention.

    Raises:
        UnknownSize: they are not three tensors [batch, tokens, heads * channels].
    """
    found = list(node.inputs[:3])
    if len(found) < 3 or any(value is None or value.shape is None or len(value.shape) != 3 for value in found):
        raise UnknownSize
    return found


def _precision(node: ir.Node) -> str:
    stored = [_stored(value) for value in node.inputs[:2]]
    # The runtime quantizes a float input that meets weights in INT8 or INT4.
    if node.op_type in INTEGER or node.op_type == GROUPED or stored[1:] in (["int8"], ["int4"]):
        return "int8"
    if stored[0] is not None and stored[0] == stored[1]:
        return stored[0]
    dtype = node.outputs[0].dtype or next((value.dtype for value in node.inputs if value is not None), None)
    return FLOATS.get(dtype, dtype.name.lower()) if dtype is not None else "fp32"


def _stored(value: ir.Value | None) -> str | None:
    """The precision of a value before DequantizeLinear converts it to floats; None without a DequantizeLinear."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "DequantizeLinear" or producer.inputs[0] is None:
        return None
    source = producer.inputs[0]
    dtype = source.const_value.dtype if source.const_value is not None else source.dtype
    if dtype is None:  # the output of QuantizeLinear, which has the type of its zero point
        before = source.producer()
        zero = before.inputs[2] if before is not None and len(before.inputs) > 2 else None
        dtype = zero.dtype if zero is not None else ir.DataType.UINT8
    return STORED.get(dtype) if dtype is not None else "int8"


def _nbytes(model: ir.Model, value: ir.Value, batch: int) -> int:
    """The bytes of an input or output.

    Raises:
        GraphError: its size depends on more than the batch.
    """
    try:
        return math.ceil(math.prod(_Sizes(model, batch)(value)) * (value.dtype.itemsize if value.dtype else 0))
    except UnknownSize:
        raise GraphError(
            "the bytes of the graph's inputs and outputs cannot be counted",
            found=f"{value.name}: {value.shape}",
            expected="sizes that are fixed except for the batch",
        ) from None


# --- Multiplications of a node ----------------------------------------------------------------------------------------
# An estimate, good enough to refuse a graph that is too large to run; includes operators that `Work` does not count.


Sizes = Callable[[ir.Value | None], list[int]]


def effort(node: ir.Node, sizes: Sizes) -> int:
    """The estimated multiplications of a node; 0 if a size is unknown, and for elementwise operators."""
    rule = _RULES.get(node.op_type, macs_of)
    try:
        return max(0, rule(node, sizes))
    except (UnknownSize, IndexError, ValueError):
        return 0


def _einsum(node: ir.Node, sizes: Sizes) -> int:
    """The elements of the result times the sizes of the summed labels."""
    left, arrow, right = str(node.attributes.get_string("equation", "")).replace(" ", "").partition("->")
    if not arrow:  # the result has the labels that occur once
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


_RULES: dict[str, Callable[[ir.Node, Sizes], int]] = {
    "Einsum": _einsum,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    "LRN": _neighbours,
    "RoiAlign": _regions,
    "NonMaxSuppression": lambda node, sizes: sizes(node.outputs[0])[0] * sizes(node.inputs[1])[-1],
    "Attention": lambda node, sizes: 2 * math.prod(sizes(node.outputs[0])) * sizes(node.inputs[1])[-2],
    "DeformConv": lambda node, sizes: math.prod((*sizes(node.outputs[0]), *sizes(node.inputs[1])[1:])),
}


# --- Limits on the memory and work of a graph -------------------------------------------------------------------------
# A file of 200 bytes can hold a loop of 2^62 trips, or forty doublings of one tensor. Constant folding, a runtime's
# optimizer and a comparison run would each try to compute that. The limits are above all vision models known to us:
# the limit of a product is 4 times SAM ViT-H at 1024 pixels (2^28 attention scores, 3 * 10^12 MACs in all).


# The environment variable with a factor for all limits, for users who trust the file and have the memory.
VARIABLE = "VITDEPLOY_GRAPH_LIMITS"
SHOWN_CHARACTERS = 80


class _Limit(NamedTuple):
    """The allowed amount of `what`."""

    most: int
    what: str


INPUTS = _Limit(1 << 26, "elements in the inputs")
# In addition to stored constants: transposing or casting a constant does not enlarge it.
CONSTANTS = _Limit(1 << 26, "elements that constants are expanded to")
# Tensors that grow by copies: 150 maps of 900 x 900 pixels. Doubling a tensor is cheap to write and costly to run.
GROWN = _Limit(1 << 27, "elements in a tensor")
PRODUCT = _Limit(1 << 30, "elements in a product")
# Bounds the run time, like MACS: a ViT-L at a fixed batch of 256 is within both.
ELEMENTS = _Limit(1 << 38, "elements in all tensors together")
MACS = _Limit(10**14, "multiplications")
STEPS = _Limit(1 << 18, "operations, counted per loop trip")


class GraphBudget:
    """Sums the memory and work of a graph; `name` is its file name for messages.

    The methods raise UnsafeGraphError as soon as a limit is exceeded.
    """

    def __init__(self, name: str) -> None:
        self._name, self._factor = name, factor()
        self._sums: dict[_Limit, int] = {}
        self._extra: dict[_Limit, int] = {}

    def allow(self, limit: _Limit, more: int) -> None:
        """Raise a limit by data that the file itself stores."""
        self._extra[limit] = self._extra.get(limit, 0) + more

    def check(self, limit: _Limit, amount: int, where: str) -> None:
        most = int((limit.most + self._extra.get(limit, 0)) * self._factor)
        if amount > most:
            number = f"{amount:,}" if amount < 10**18 else f"over 10^{len(str(amount)) - 1}"
            raise UnsafeGraphError(
                f"{self._name} needs more memory or work than a vision model",
                found=f"{number} {limit.what}, at {where}",
                expected=f"at most {most:,}",
                fix=f"if you trust the file and have the memory: {VARIABLE}={2 * self._factor:.15g} doubles all limits",
            )

    def add(self, limit: _Limit, amount: int, where: str) -> None:
        self._sums[limit] = self._sums.get(limit, 0) + amount
        self.check(limit, self._sums[limit], where)

    def mark(self) -> dict[_Limit, int]:
        """The current sums, for `repeat`."""
        return dict(self._sums)

    def repeat(self, mark: dict[_Limit, int], times: int, where: str) -> None:
        """Add the amounts since a mark again, `times` times."""
        for limit, amount in list(self._sums.items()):
            self.add(limit, times * (amount - mark.get(limit, 0)), where)

    def ahead(self, limit: _Limit, more: int, where: str) -> None:
        """Check an amount before it is added, without adding it."""
        self.check(limit, self._sums.get(limit, 0) + more, where)

    def overflow(self, where: str) -> GraphError:
        """The error for an integer division of constants that overflows."""
        return GraphError(
            f"{self._name} divides the smallest integer by -1, which crashes a runtime",
            found=where,
            expected="quotients within the range of their type",
            fix="export the model again; check where the file comes from",
        )

    def open_loop(self, where: str) -> GraphError:
        """The error for a loop whose number of trips depends on data."""
        return GraphError(
            f"{self._name} has a loop with an unknown number of trips",
            found=where,
            expected="a number of trips that is constant, or follows from tensor sizes",
            fix="export the model without that loop: unrolled, or as operators on whole tensors",
        )


def factor() -> float:
    """The factor for all limits: 1, or the value of the environment variable; raises as `setting`."""
    return setting(VARIABLE) or 1.0


def label(node: ir.Node) -> str:
    """The description of a node in an error."""
    name = str(node.name or node.outputs[0].name if node.outputs else "")
    return f"{node.op_type} {name[:SHOWN_CHARACTERS]}".strip()

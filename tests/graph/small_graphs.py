"""Small ONNX graphs of transformer blocks in the forms that exporters write; proof that two graphs are one function.

All weights are multiples of 1/64 below 1/2, so that products and sums that a fold makes of them are exact in float32:
evaluated in float64, a correct fold then agrees to 1e-10, and agreement is not luck of rounding.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, checker, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

HEADS, CHANNELS = 2, 4
WIDTH = HEADS * CHANNELS
# How query, key and value come out of linears.
MERGED = ("slices", "gathers", "split", "columns")
FORMS = (*MERGED, "separate", "key at once")


class Builder:
    """Writes nodes one after the other; every method returns the name of a tensor."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def constant(self, array, name=None):
        name = name or f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def ints(self, *values):
        return self.constant(np.array(values, np.int64))

    def random(self, *shape):
        return (self.generator.integers(-31, 32, shape) / 64).astype(np.float32)

    def op(self, operator, *inputs, outputs=1, name=None, **attributes):
        name = name or f"n{len(self.nodes)}/{operator}"
        results = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, results, name=name, **attributes))
        return results[0] if outputs == 1 else results

    def linear(self, x, inside, outside, name, *, bias=True, weight=None):
        weight = weight or self.constant(self.random(inside, outside), f"{name}.weight_t")
        product = self.op("MatMul", x, weight, name=f"{name}/MatMul")
        if not bias:
            return product
        return self.op("Add", product, self.constant(self.random(outside), f"{name}.bias"), name=f"{name}/Add")

    def norm(self, x, name, width=WIDTH):
        gain, bias = (
            self.constant(self.random(width), f"{name}.weight"),
            self.constant(self.random(width), f"{name}.bias"),
        )
        return self.op("LayerNormalization", x, gain, bias, name=f"{name}/LayerNormalization", axis=-1, epsilon=1e-6)

    def model(self, inputs, *outputs, opset=20):
        """Checked, with the shapes of all tensors. `inputs`: name -> shape, or (shape, element type)."""
        values = []
        for name, shape in inputs.items():
            shape, element = shape if isinstance(shape, tuple) else (shape, TensorProto.FLOAT)
            values.append(helper.make_tensor_value_info(name, element, shape))
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "test", values, results, constants)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        proto = shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
        checker.check_model(proto)
        return ir.from_proto(proto)


def query_key_value(b, x, tokens, form, *, bias=True):
    """Query, key, value [batch, heads, tokens, channels] (K^T for "key at once") of `x` [batch, tokens, WIDTH]."""
    if form in MERGED:
        merged = b.linear(x, WIDTH, 3 * WIDTH, "attn.qkv", bias=bias)
    if form == "columns":
        parts = b.op("Split", merged, b.ints(WIDTH, WIDTH, WIDTH), outputs=3, axis=-1)
        return [_heads(b, part, tokens) for part in parts]
    if form in MERGED:
        split = b.op("Reshape", merged, b.ints(-1, tokens, 3, HEADS, CHANNELS))
        split = b.op("Transpose", split, perm=[2, 0, 3, 1, 4])
        if form == "gathers":
            return [b.op("Gather", split, b.constant(np.array(i, np.int64)), axis=0) for i in range(3)]
        if form == "split":
            parts = b.op("Split", split, b.ints(1, 1, 1), outputs=3, axis=0)
        else:
            parts = [b.op("Slice", split, b.ints(i), b.ints(i + 1), b.ints(0)) for i in range(3)]
        return [b.op("Squeeze", part, b.ints(0)) for part in parts]
    perms = ([0, 2, 1, 3], [0, 2, 3, 1] if form == "key at once" else [0, 2, 1, 3], [0, 2, 1, 3])
    names = ("attn.q", "attn.k", "attn.v")
    linears = [b.linear(x, WIDTH, WIDTH, name, bias=bias) for name in names]
    return [_heads(b, linear, tokens, perm) for linear, perm in zip(linears, perms, strict=True)]


def _heads(b, x, tokens, perm=(0, 2, 1, 3)):
    return b.op("Transpose", b.op("Reshape", x, b.ints(-1, tokens, HEADS, CHANNELS)), perm=list(perm))


def attention(b, x, tokens, form="slices", *, scale="query", factor=0.5, mask=None, axis=-1, bias=True, qk_norm=False):
    """Attention with its projection, [batch, tokens, WIDTH].

    Args:
        scale: where the factor is: "query", "key", "scores", "divisor" (of the scores) or None.
        mask: a constant added to the scores; one of truth values puts minus infinity where it is false.
        axis: that of the softmax.
    """
    if qk_norm and form == "key at once":  # the norm comes before the transposition, and that is the other form
        form = "separate"
    query, key, value = query_key_value(b, x, tokens, form, bias=bias)
    number = b.constant(np.float32(1 / factor if scale == "divisor" else factor))
    if qk_norm:
        query, key = b.norm(query, "attn.q_norm", CHANNELS), b.norm(key, "attn.k_norm", CHANNELS)
    if scale == "query":
        query = b.op("Mul", query, number)
    if form != "key at once":
        key = b.op("Transpose", key, perm=[0, 1, 3, 2])
    if scale == "key":
        key = b.op("Mul", number, key)
    scores = b.op("MatMul", query, key, name="attn/scores")
    if scale in ("scores", "divisor"):
        scores = b.op("Mul" if scale == "scores" else "Div", scores, number)
    if mask is not None and mask.dtype == bool:
        scores = b.op("Where", b.constant(mask), scores, b.constant(np.float32(-np.inf)))
    elif mask is not None:
        scores = b.op("Add", scores, b.constant(mask))
    softmax = b.op("Softmax", scores, axis=axis, name="attn/Softmax")
    mixed = b.op("Transpose", b.op("MatMul", softmax, value, name="attn/mix"), perm=[0, 2, 1, 3])
    return b.linear(b.op("Reshape", mixed, b.ints(-1, tokens, WIDTH)), WIDTH, WIDTH, "attn.proj")


def sequence_first(b, tokens):
    """Attention of torch.nn.MultiheadAttention: "x" [tokens, batch, WIDTH], heads joined with the batch."""
    parts = []
    for name, perm in (("q", [1, 0, 2]), ("k", [1, 2, 0]), ("v", [1, 0, 2])):
        heads = b.op("Reshape", b.linear("x", WIDTH, WIDTH, name), b.ints(tokens, -1, CHANNELS))
        parts.append(b.op("Transpose", heads, perm=perm))
    scores = b.op("MatMul", b.op("Mul", parts[0], b.constant(np.float32(0.5))), parts[1])
    mixed = b.op("Transpose", b.op("MatMul", b.op("Softmax", scores, axis=-1), parts[2]), perm=[1, 0, 2])
    result = b.linear(b.op("Reshape", mixed, b.ints(-1, WIDTH)), WIDTH, WIDTH, "proj")
    return b.model({"x": [tokens, "batch", WIDTH]}, result)


def any_length(b):
    """Attention over sequences of any length: "x" [batch, tokens, WIDTH], sizes copied by Reshape."""
    query, key, value = b.op("Split", b.linear("x", WIDTH, 3 * WIDTH, "qkv"), outputs=3, axis=2, num_outputs=3)
    parts = [b.op("Reshape", part, b.ints(0, 0, HEADS, CHANNELS)) for part in (query, key, value)]
    query, key, value = (
        b.op("Transpose", part, perm=perm)
        for part, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
    )
    scores = b.op("MatMul", b.op("Mul", query, b.constant(np.float32(0.5))), key)
    mixed = b.op("Transpose", b.op("MatMul", b.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    result = b.linear(b.op("Reshape", mixed, b.ints(0, 0, WIDTH)), WIDTH, WIDTH, "proj")
    return b.model({"x": ["batch", "tokens", WIDTH]}, result)


def block(b, x, tokens, form="slices", **options):
    """A pre-norm block: attention and MLP, each with its residual sum."""
    x = b.op("Add", x, attention(b, b.norm(x, "norm1"), tokens, form, **options))
    hidden = b.op("Gelu", b.linear(b.norm(x, "norm2"), WIDTH, 2 * WIDTH, "mlp.fc1"))
    return b.op("Add", x, b.linear(hidden, 2 * WIDTH, WIDTH, "mlp.fc2"))


def attention_model(tokens=5, form="slices", seed=0, **options):
    b = Builder(seed)
    result = attention(b, "x", tokens, form, **options)
    return b.model({"x": ["batch", tokens, WIDTH]}, result)


def operators(model):
    return Counter(node.op_type for node in model.graph)


def node_named(model, name):
    return next(node for node in model.graph if node.name == name)


def weights(model):
    return {str(value.name): value.const_value.numpy() for value in model.graph.initializers.values()}


# --- are two graphs the same function? --------------------------------------------------------------------------------


def assert_rewritten(model, rewrite, count, *, batch=2, seed=1, tolerance=1e-10, bit_exact=False):
    """`rewrite(model)` changes `count` places, the function stays the same, and a second run finds nothing."""
    before = ir.to_proto(model)
    assert rewrite(model) == count
    after = ir.to_proto(model)
    checker.check_model(after)
    shape_inference.infer_shapes(after, check_type=True, strict_mode=True)  # the shapes that we wrote are not wrong
    if not count:
        assert after.graph.node == before.graph.node
        assert weights(model).keys() == {tensor.name for tensor in before.graph.initializer}
    feeds = random_feeds(before, batch, seed)
    for ours, reference in zip(run(after, feeds), run(before, feeds), strict=True):
        if bit_exact:
            np.testing.assert_array_equal(ours, reference)
        assert difference(ours, reference) <= 1e-5
    if tolerance is not None:
        for ours, reference in zip(run_in_double(after, feeds), run_in_double(before, feeds), strict=True):
            assert difference(ours, reference) <= tolerance
    assert rewrite(model) == 0
    assert ir.to_proto(model).graph.node == after.graph.node


def difference(ours, reference):
    """max|a - b| / max|b|."""
    assert ours.shape == reference.shape
    assert np.abs(reference).max() > 1e-3  # something to compare with
    return float(np.abs(ours.astype(np.float64) - reference).max() / np.abs(reference).max())


def random_feeds(proto, batch, seed):
    generator, feeds = np.random.default_rng(seed), {}
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or batch for dim in tensor.shape.dim]
        if tensor.elem_type == TensorProto.UINT8:
            feeds[value.name] = generator.integers(0, 256, shape, dtype=np.uint8)
        else:
            feeds[value.name] = generator.standard_normal(shape).astype(np.float32)
    return feeds


def with_outputs(model, names):
    """The graph as a ModelProto, with the named tensors as further outputs."""
    proto = ir.to_proto(model)
    own = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in own)
    return proto


def run(proto, feeds):
    """Float32 on ONNX Runtime."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def run_in_double(proto, feeds):
    """The same graph with float64 in the place of float32, on ONNX's own reference implementation."""
    double = onnx.ModelProto()
    double.CopyFrom(proto)
    del double.graph.value_info[:]
    for tensor in double.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for value in (*double.graph.input, *double.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in double.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
    wide = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in feeds.items()}
    return ReferenceEvaluator(double).run(None, wide)

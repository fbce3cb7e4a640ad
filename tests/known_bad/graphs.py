"""For each entry of the table a graph that shows it and one that nearly does, by the entry's id.

Each is (proto, feeds): several feeds are run one after the other in one session.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tests.graph.builder import Builder, values


def attention(query, key, value, b):
    """softmax(query key^T) value; `key` is [.., channels, keys]."""
    return b.add("MatMul", b.add("Softmax", b.add("MatMul", query, key), axis=-1), value)


def over_lengths(keys="keys"):
    b = Builder()
    q = b.input("q", ["batch", 2, 1, 16])
    k, v = (b.input(name, ["batch", 2, keys, 16]) for name in "kv")
    proto = b.model(attention(q, b.add("Transpose", k, perm=[0, 1, 3, 2]), v, b), rank=4)
    lengths = (1, 2, 17, 40) if keys == "keys" else (keys,)
    query = values(1, 2, 1, 16)
    return proto, [{"q": query, **{n: values(1, 2, size, 16, seed=size) for n in "kv"}} for size in lengths]


def split_heads(queries, heads=2):
    """Attention from `queries` tokens to ten, behind a norm of queries and keys."""
    b = Builder()

    def projected(name, tokens, seed):
        x = b.add("MatMul", name, values(heads * 8, heads * 8, seed=seed))
        return b.add("Transpose", b.add("Reshape", x, np.array([-1, tokens, heads, 8])), perm=[0, 2, 1, 3])

    def norm(x):
        return b.add("LayerNormalization", x, values(8, seed=4), axis=-1)

    x, y = b.input("x", [2, queries, heads * 8]), b.input("y", [2, 10, heads * 8])
    key = b.add("Transpose", norm(projected(y, 10, 2)), perm=[0, 1, 3, 2])
    query = b.add("Mul", norm(projected(x, queries, 1)), 0.3)
    answer = attention(query, key, projected(y, 10, 3), b)
    proto = b.model(b.add("Transpose", answer, perm=[0, 2, 1, 3]), rank=4)
    return proto, [{"x": values(2, queries, heads * 8), "y": values(2, 10, heads * 8, seed=5)}]


def masked(first):
    """Attention with INT8 scores and a mask of keys, which is the first or the second operand of its sum."""
    b = Builder()
    q, k, v = (b.input(name, [1, 2, 65, 16]) for name in "qkv")
    mask = b.input("mask", [1, 1, 1, 65])

    def integer(x):
        step, zero = b.constant(np.float32(0.03)), b.constant(np.int8(0))
        return b.add("DequantizeLinear", b.add("QuantizeLinear", x, step, zero), step, zero)

    scores = b.add("MatMul", integer(q), b.add("Transpose", integer(k), perm=[0, 1, 3, 2]))
    scores = b.add("Add", *((mask, scores) if first else (scores, mask)))
    proto = b.model(b.add("MatMul", b.add("Softmax", scores, axis=-1), v), rank=4)
    feeds = {name: values(1, 2, 65, 16, seed=seed) for seed, name in enumerate("qkv")}
    return proto, [{**feeds, "mask": np.where(np.arange(65) < 40, 0, -20).astype(np.float32).reshape(1, 1, 1, 65)}]


def constant_values(constant=True):
    b = Builder()
    q, k = b.input("q", [2, 4, 12, 8]), b.input("k", [2, 4, 8, 12])
    v = values(2, 4, 12, 8, seed=3) if constant else b.input("v", [2, 4, 12, 8])
    feeds = {"q": values(2, 4, 12, 8), "k": values(2, 4, 8, 12, seed=2)}
    proto = b.model(attention(q, k, v, b), rank=4)
    return proto, [feeds if constant else {**feeds, "v": values(2, 4, 12, 8, seed=3)}]


def resize(scale):
    b = Builder()
    x = b.input("x", [1, 4, 13, 10])
    scales = np.array([1, 1, scale, scale], np.float32)
    y = b.add("Resize", x, "", scales, mode="linear", antialias=1, coordinate_transformation_mode="half_pixel")
    return b.model(y, rank=4), [{"x": values(1, 4, 13, 10)}]


def transposed_convolution(batch=1, **attributes):
    b = Builder(opset=11)
    x = b.input("x", [batch, 8, 7, 9])
    y = b.add("ConvTranspose", x, values(8, 16, 3, 3), kernel_shape=[3, 3], strides=[2, 2], **attributes)
    return b.model(y, rank=4), [{"x": values(1, 8, 7, 9)}]


def reduction(operator, opset, **attributes):
    """Over the last axis, which is an attribute or, without one, an input."""
    b = Builder(opset=opset)
    x = b.input("x", [2, 7, 32])
    axes = () if attributes else (np.array([-1]),)
    return b.model(b.add(operator, x, *axes, keepdims=1, **attributes)), [{"x": values(2, 7, 32, seed=1)}]


def selection(operator, *inputs, types, **attributes):
    b = Builder()
    x = b.input("x", [2, 400])
    names = b.add(operator, x, *inputs, outputs=len(types), axis=-1, **attributes)
    ties = np.random.default_rng(0).integers(0, 50, (2, 400)).astype(np.float32)
    return b.model(*([names] if len(types) == 1 else names), types=types, rank=2), [{"x": ties}]


def sampled(opset, selects=True):
    """GridSample, of values that TopK chose where it `selects`."""
    b = Builder(opset=opset)
    x, grid = b.input("x", [1, 4, 6, 6]), b.input("grid", [1, 3, 3, 2])
    picked = b.add("TopK", x, np.array([6]), outputs=2)[0] if selects else b.add("Relu", x)
    y = b.add("GridSample", picked, grid, mode="linear" if opset == 20 else "bilinear")
    return b.model(y, rank=4), [{"x": values(1, 4, 6, 6), "grid": np.clip(values(1, 3, 3, 2), -1, 1)}]


def windows(bias):
    """Attention in windows of 4 x 4 of an image of 8 x 8."""
    b = Builder()
    x = b.add("Reshape", b.input("x", [1, 8, 8, 8]), np.array([1, 2, 4, 2, 4, 8]))
    x = b.add("Reshape", b.add("Transpose", x, perm=[0, 1, 3, 2, 4, 5]), np.array([4, 16, 8]))
    scores = b.add("MatMul", x, b.add("Transpose", x, perm=[0, 2, 1]))
    scores = b.add("Add", scores, values(1, 16, 16)) if bias else scores
    return b.model(b.add("MatMul", b.add("Softmax", scores, axis=-1), x)), [{"x": values(1, 8, 8, 8)}]


def rotated(turned):
    """Attention whose queries are turned by their positions, or moved by them."""
    b = Builder()
    q, k, v = (b.input(name, [1, 2, 5, 8]) for name in "qkv")
    first, second = b.add("Split", q, axis=-1, num_outputs=2, outputs=2)
    half = b.add("Concat", b.add("Neg", second), first, axis=-1)
    angle = values(5, 8)
    query = b.add("Add", b.add("Mul", q, np.cos(angle)), b.add("Mul", half, np.sin(angle)) if turned else angle)
    proto = b.model(attention(query, b.add("Transpose", k, perm=[0, 1, 3, 2]), v, b), rank=4)
    return proto, [{name: values(1, 2, 5, 8, seed=ord(name)) for name in "qkv"}]


def scaled(key):
    b = Builder()
    q, k, v = b.input("q", [1, 2, 5, 8]), b.input("k", [1, 2, 8, 5]), b.input("v", [1, 2, 5, 8])
    proto = b.model(attention(b.add("Mul", q, 0.6), b.add("Mul", k, 0.6) if key else k, v, b), rank=4)
    return proto, [{"q": values(1, 2, 5, 8), "k": values(1, 2, 8, 5), "v": values(1, 2, 5, 8, seed=2)}]


def blocks(size):
    """A product with weights of 4 bits in blocks of `size`; all are 2, less a zero point of 3."""
    b = Builder()
    x, count = b.input("x", ["batch", 2048]), 2048 // size
    weights = np.full((4, count, size // 2), 0x22, np.uint8)
    scales, zero_points = np.full((4, count), 0.5, np.float32), np.full((4, (count + 1) // 2), 0x33, np.uint8)
    how = {"domain": "com.microsoft", "K": 2048, "N": 4, "bits": 4, "block_size": size}
    y = b.add("MatMulNBits", x, weights, scales, zero_points, **how)
    return b.model(y, domains=["com.microsoft"], rank=2), [{"x": values(3, 2048)}]


def padded(pads):
    b = Builder()
    x = b.input("x", [1, 8, 14, 13])
    y = b.add("Conv", x, values(8, 8, 3, 3), kernel_shape=[3, 3], pads=pads)
    return b.model(y, rank=4), [{"x": values(1, 8, 14, 13)}]


INDEX, VALUES = [TensorProto.INT64], [TensorProto.FLOAT, TensorProto.INT64]
CASES = {
    "openvino-free-lengths": (over_lengths, lambda: over_lengths(40)),
    "openvino-tokens-as-heads": (lambda: split_heads(2), lambda: split_heads(3)),
    "openvino-vector-behind-scores": (lambda: masked(False), lambda: masked(True)),
    "openvino-constant-attention": (constant_values, lambda: constant_values(False)),
    "openvino-resize-antialias": (lambda: resize(0.5), lambda: resize(2)),
    "openvino-transposed-convolution-auto-pad": (
        lambda: transposed_convolution(auto_pad="SAME_UPPER"),
        lambda: transposed_convolution(pads=[1, 1, 1, 1]),
    ),
    "openvino-transposed-convolution-free-auto-pad": (
        lambda: transposed_convolution("batch", auto_pad="SAME_UPPER"),
        lambda: transposed_convolution(auto_pad="SAME_UPPER"),
    ),
    "openvino-mean-axes": (lambda: reduction("ReduceMean", 20), lambda: reduction("ReduceMean", 17, axes=[-1])),
    "openvino-reduction-axes": (lambda: reduction("ReduceL1", 17, axes=[-1]), lambda: reduction("ReduceL1", 20)),
    "openvino-log-reduction-axes": (
        lambda: reduction("ReduceLogSumExp", 17, axes=[-1]),
        lambda: reduction("ReduceLogSumExp", 20),
    ),
    "openvino-argmax-ties": (
        lambda: selection("ArgMax", types=INDEX),
        lambda: selection("TopK", np.array([1]), types=VALUES),
    ),
    "openvino-topk-ties": (
        lambda: selection("TopK", np.array([300]), types=VALUES),
        lambda: selection("ArgMax", types=INDEX),
    ),
    "openvino-grid-sample-modes": (lambda: sampled(20), lambda: sampled(19)),
    "openvino-gpu-deformable-attention": (lambda: sampled(20), lambda: sampled(20, selects=False)),
    "openvino-npu-windowed-attention": (lambda: windows(True), lambda: windows(False)),
    "onnxruntime-large-blocks": (lambda: blocks(512), lambda: blocks(256)),
    "onnxruntime-sme-unequal-pads": (lambda: padded([0, 1, 0, 1]), lambda: padded([1, 1, 1, 1])),
    "tensorrt-10.3-rotary": (lambda: rotated(True), lambda: rotated(False)),
    "tensorrt-10.4-rotary": (lambda: rotated(True), lambda: rotated(False)),
    "tensorrt-10.3-free-lengths": (over_lengths, lambda: over_lengths(40)),
    "tensorrt-10.7-scaled-attention": (lambda: scaled(True), lambda: scaled(False)),
    "tensorrt-10.13-grid-sample": (lambda: sampled(20), lambda: sampled(19)),
    "tensorrt-blackwell-rotary": (lambda: rotated(True), lambda: rotated(False)),
}

"""One small graph for each rule of the linter that breaks it, and the same graph fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.graph.builder import Builder, values
from vitdeploy.lint.support import VERSIONS
from vitdeploy.runtime.profiles import Range

FLOAT, HALF, UINT8 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8
INT8, FP8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
ALL = ("query", "key", "softmax", "value", "output")


class Case(NamedTuple):
    """`build(fixed)` gives the graph; the finding is at the node or tensor whose name begins with `node`."""

    build: Callable[[bool], onnx.ModelProto]
    node: str
    found: str
    versions: tuple[str, ...]
    profiles: Callable[[bool], list[Any]] | None


CASES: dict[str, Case] = {}


def case(code, node, found, versions=VERSIONS, profiles=None):
    def keep(build):
        CASES[code] = Case(build, node, found, versions, profiles)
        return build

    return keep


def pair(b, x, scale=0.05, kind=INT8, **attributes):
    """QuantizeLinear and DequantizeLinear of a tensor, with zero point 0."""
    scale = np.asarray(scale, np.float32) if isinstance(scale, float) else scale
    zero = np.zeros(scale.shape, kind)
    scale = b.constant(scale)
    zero = b.constant(zero)
    return b.add("DequantizeLinear", b.add("QuantizeLinear", x, scale, zero, **attributes), scale, zero, **attributes)


def stored(b, weight, axis=None, kind=INT8, dtype=np.float32):
    """DequantizeLinear of weights that are stored quantized."""
    count = () if axis is None else (weight.shape[axis],)
    attributes = {} if axis is None else {"axis": axis}
    numbers = np.clip(np.round(weight * 16), -127, 127).astype(kind)
    return b.add("DequantizeLinear", numbers, np.full(count, 1 / 16, dtype), np.zeros(count, kind), **attributes)


def attention(
    quantized=(), *, dtype=np.float16, head=32, tokens=8, kinds=None, late=False, shared=False, capped=False, masks=0
):
    """softmax(scale Q K^T) V with quantizers at the named places, of the type `kinds[place]` where that is not INT8."""
    b, element = Builder(20), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    scale, factor = np.asarray(0.05, dtype), np.asarray(0.25, dtype)

    def place(name, value):
        return pair(b, value, scale, (kinds or {}).get(name, INT8)) if name in quantized else value

    query = b.input("query", ["batch", 2, tokens, head], element)
    key = b.input("key", ["batch", 2, head, tokens], element)
    value = b.input("value", ["batch", 2, tokens, head], element)
    query = query if late else b.add("Mul", query, factor)
    scores = b.add("MatMul", place("query", query), place("key", key))
    scores = b.add("Mul", scores, factor) if late else scores
    scores = b.add("Tanh", scores) if capped else scores
    for _ in range(masks):
        scores = b.add("Add", scores, np.zeros((1, 1, tokens, tokens), dtype))
    softmax = b.add("Softmax", scores, axis=-1)
    mix = b.add("MatMul", place("softmax", softmax), place("value", value))
    outputs = [place("output", mix), *([softmax] if shared else [])]
    return b.model(*outputs, types=[element] * len(outputs))


@case("TRT101", "the graph", "opset 22", ("10.3",))
def opset(mended):
    b = Builder(20 if mended else 22)
    return b.model(b.add("Relu", b.input("x", ["batch", 4])))


@case("TRT102", "the graph", "IR version 11", ("10.3",))
def ir_version(mended):
    b = Builder(20)
    proto = b.model(b.add("Relu", b.input("x", ["batch", 4])))
    proto.ir_version = 10 if mended else 11
    return proto


@case("TRT103", "gelu_", "com.microsoft.Gelu")
def domain(mended):
    b = Builder(20)
    x = b.input("x", ["batch", 4])
    y = b.add("Gelu", x) if mended else b.add("Gelu", x, domain="com.microsoft")
    return b.model(y, domains=() if mended else ("com.microsoft",))


@case("TRT104", "det_", "Det")
def operator(mended):
    b = Builder(20)
    x = b.input("x", ["batch", 4, 4])
    return b.model(b.add("ReduceProd" if mended else "Det", x))


@case("TRT105", "clip_", "Clip of int64")
def data_type(mended):
    b = Builder(20)
    x = b.input("x", ["batch", 4], TensorProto.INT64)
    if mended:
        return b.model(b.add("Clip", b.add("Cast", x, to=FLOAT), 0.0, 9.0))
    return b.model(b.add("Clip", x, np.int64(0), np.int64(9)), types=[TensorProto.INT64])


@case("TRT106", "maxpool_", "MaxPool with dilations [2, 2]")
def restriction(mended):
    b = Builder(20)
    dilations = [1, 1] if mended else [2, 2]
    x = b.input("x", ["batch", 3, 8, 8])
    return b.model(b.add("MaxPool", x, kernel_shape=[2, 2], dilations=dilations))


@case("TRT107", "conv_", "Conv of bfloat16 at opset 20")
def convolution_in_bfloat16(mended):
    b = Builder(22 if mended else 20)
    x = b.add("Cast", b.input("x", ["batch", 3, 8, 8]), to=TensorProto.BFLOAT16)
    y = b.add("Conv", x, values(4, 3, 2, 2).astype(ml_dtypes.bfloat16), kernel_shape=[2, 2])
    return b.model(b.add("Cast", y, to=FLOAT))


@case("TRT108", "x", "uint8 read by transpose_1 (Transpose)")
def pixels(mended):
    b = Builder(20)
    x = b.input("x", ["batch", 8, 8, 3], UINT8)
    if mended:
        return b.model(b.add("Transpose", b.add("Cast", x, to=FLOAT), perm=[0, 3, 1, 2]))
    return b.model(b.add("Cast", b.add("Transpose", x, perm=[0, 3, 1, 2]), to=FLOAT))


@case("TRT109", "cast_", "double")
def double(mended):
    b = Builder(20)
    x = b.add("Cast", b.input("x", ["batch", 4]), to=HALF if mended else TensorProto.DOUBLE)
    return b.model(b.add("Cast", x, to=FLOAT))


@case("TRT110", "if_", "If")
def branches(mended):
    b = Builder(20)
    x = b.input("x", [1, 4])
    if mended:
        return b.model(b.add("Relu", x))
    result = [helper.make_tensor_value_info("relu", FLOAT, [1, 4])]
    branch = helper.make_graph([helper.make_node("Relu", [x], ["relu"])], "branch", [], result)
    return b.model(b.add("If", b.input("c", [], TensorProto.BOOL), then_branch=branch, else_branch=branch))


@case("TRT111", "reshape_", "9 axes")
def axes(mended):
    b = Builder(20)
    x = b.input("x", [1, 2])
    if not mended:
        x = b.add("Reshape", x, np.array([1] * 8 + [2], np.int64))
    return b.model(b.add("Reshape", x, np.array([2, 1], np.int64)))


@case("TRT201", "mul_", "float16 x, float c_")
def operands(mended):
    b = Builder(20)
    return b.model(
        b.add("Mul", b.input("x", ["batch", 4], HALF), np.float16(0.5) if mended else np.float32(0.5)), types=[HALF]
    )


@case("TRT202", "layernormalization_", "float16 x, float c_")
def norm(mended):
    b = Builder(20)
    gain = np.ones(4, np.float16 if mended else np.float32)
    return b.model(b.add("LayerNormalization", b.input("x", ["batch", 4], HALF), gain, gain), types=[HALF])


@case("TRT203", "pow_", "float16 to the power of float")
def power(mended):
    b = Builder(20)
    exponent = np.float16(2) if mended else np.float32(2)
    return b.model(b.add("Pow", b.input("x", ["batch", 4], HALF), exponent), types=[HALF])


@case("TRT204", "relu_", "float16, declared as float")
def declared_output(mended):
    b = Builder(20)
    proto = b.model(b.add("Relu", b.input("x", ["batch", 4], HALF)), types=[HALF])
    if not mended:
        proto.graph.output[0].type.tensor_type.elem_type = FLOAT
    return proto


@case("TRT301", "quantizelinear_", "zero points other than 0, such as 3")
def zero_point(mended):
    b = Builder(20)
    x = b.input("x", ["batch", 4])
    y = b.add("QuantizeLinear", x, np.float32(0.1), np.int8(0 if mended else 3))
    return b.model(b.add("DequantizeLinear", y, np.float32(0.1), np.int8(0)))


@case("TRT302", "quantizelinear_", "QuantizeLinear of uint8")
def unsigned(mended):
    b = Builder(20)
    zero = np.int8(0) if mended else np.uint8(0)
    y = b.add("QuantizeLinear", b.input("x", ["batch", 4]), np.float32(0.1), zero)
    return b.model(b.add("DequantizeLinear", y, np.float32(0.1), zero))


@case("TRT303", "quantizelinear_", "4 scales of a computed tensor")
def channels_of_an_activation(mended):
    b = Builder(20)
    scale = np.float32(0.1) if mended else np.full(4, 0.1, np.float32)
    return b.model(pair(b, b.input("x", ["batch", 4]), np.asarray(scale), axis=1))


@case("TRT304", "dequantizelinear_", "scales along axis 0 of the weights of matmul_")
def channel_axis(mended):
    b = Builder(20)
    weight = stored(b, values(8, 4), axis=1 if mended else 0)
    return b.model(b.add("MatMul", pair(b, b.input("x", ["batch", 8])), weight))


@case("TRT305", "quantizelinear_", "1 scales such as 0")
def scale_that_underflowed(mended):
    b = Builder(20)
    return b.model(pair(b, b.input("x", ["batch", 4]), 0.1 if mended else 0.0))


@case("TRT306", "quantizelinear_", "a float scale for float16")
def scale_type(mended):
    b = Builder(20)
    scale = np.asarray(0.1, np.float16 if mended else np.float32)
    return b.model(pair(b, b.input("x", ["batch", 4], HALF), scale), types=[HALF if mended else FLOAT])


@case("TRT311", "matmul_", "operands of int8 and float8e4m3fn")
def mixed(mended):
    b = Builder(20)
    weight = stored(b, values(8, 4), kind=INT8 if mended else FP8)
    return b.model(b.add("MatMul", pair(b, b.input("x", ["batch", 8])), weight))


@case("TRT312", "matmul_", "Transpose between dequantizelinear_")
def transposed_weights(mended):
    b = Builder(20)
    if mended:
        weight = stored(b, values(8, 4), axis=1)
    else:
        weight = b.add("Transpose", stored(b, values(4, 8), axis=0), perm=[1, 0])
    return b.model(b.add("MatMul", pair(b, b.input("x", ["batch", 8])), weight))


@case("TRT313", "matmul_", "only the second operand is quantized")
def half_quantized(mended):
    b = Builder(20)
    x = b.input("x", ["batch", 8])
    return b.model(b.add("MatMul", pair(b, x) if mended else x, stored(b, values(8, 4), axis=1)))


@case("TRT314", "quantizelinear_", "the output of matmul_")
def output_quantizer(mended):
    b = Builder(20)
    y = b.add("MatMul", pair(b, b.input("x", ["batch", 8])), stored(b, values(8, 4), axis=1))
    y = b.add("Add", y, values(4))
    return b.model(b.add("Relu", y if mended else pair(b, y)))


@case("TRT315", "add_", "an addend comes from dequantizelinear_")
def residual(mended):
    b = Builder(20)
    x = b.input("x", ["batch", 8])
    return b.model(b.add("Add", x if mended else pair(b, x), b.add("Relu", x)))


@case("TRT401", "softmax_", "float16, heads of 32 channels, scores of 8 x 8")
def fused(mended):
    b = Builder(20)
    return b.model(b.add("Softmax", b.input("x", ["batch", 4]))) if mended else attention()


@case("TRT402", "softmax_", "products in float")
def single_precision(mended):
    return attention(dtype=np.float16 if mended else np.float32)


@case("TRT403", "softmax_", "heads of 12 channels in float16")
def head(mended):
    return attention(head=24 if mended else 12)


@case("TRT404", "softmax_", "scores of 520 x 520 in int8")
def length(mended):
    return attention(ALL, tokens=512 if mended else 520)


@case("TRT405", "softmax_", "no quantizer at softmax, value, output")
def incomplete(mended):
    return attention(ALL if mended else ("query", "key"))


@case("TRT406", "softmax_", "a factor after the first product (mul_")
def late_factor(mended):
    return attention(late=not mended)


@case("TRT407", "softmax_", "other readers of softmax_")
def shared_softmax(mended):
    return attention(shared=not mended)


@case("TRT408", "softmax_", "Tanh (tanh_")
def soft_cap(mended):
    return attention(capped=not mended)


@case("TRT501", "x", "[batch, 3, h, w]: dynamic along axis 2, 3")
def inner_axes(mended):
    b = Builder(20)
    return b.model(b.add("Relu", b.input("x", ["batch", 3, 8, 8] if mended else ["batch", 3, "h", "w"])))


def image(mended):
    b = Builder(20)
    return b.model(b.add("Relu", b.input("x", ["batch", 4])))


GOOD = {"x": Range((1, 4), (2, 4), (8, 4))}

case("TRT502", "x", "missing from profile 1", profiles=lambda mended: [GOOD, GOOD if mended else {}])(image)
case(
    "TRT503",
    "x of profile 0",
    "4 <= 2 <= 8 along axis 0",
    profiles=lambda mended: [GOOD if mended else {"x": Range((4, 4), (2, 4), (8, 4))}],
)(image)
case(
    "TRT504",
    "x of profile 0",
    "[1, 5] for [batch, 4]",
    profiles=lambda mended: [GOOD if mended else {"x": Range((1, 5), (2, 5), (8, 5))}],
)(image)


@case("TRT601", "c_", "1 of 4 numbers are infinite in float16")
def overflow(mended):
    b = Builder(20)
    gain = np.array([1, 2, 3, 4 if mended else np.inf], np.float16)
    return b.model(b.add("Mul", b.input("x", ["batch", 4], HALF), gain), types=[HALF])


@case("TRT602", "c_", "1 of 4 numbers are NaN")
def not_a_number(mended):
    b = Builder(20)
    gain = np.array([1, 2, 3, 4 if mended else np.nan], np.float32)
    return b.model(b.add("Mul", b.input("x", ["batch", 4]), gain))

"""What single rules say of forms beside the one graph that each has: every restriction, type and quantizer."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from tests.graph.builder import Builder, values
from tests.lint.cases import ALL, FLOAT, HALF, UINT8, attention, pair, stored
from vitdeploy.errors import TargetError
from vitdeploy.lint.linter import lint
from vitdeploy.lint.support import SUPPORTED, VERSIONS, nearest_version

INT64 = TensorProto.INT64


def found(proto, code, version="11.4"):
    return [finding.found for finding in lint(ir.from_proto(proto), (version,)) if finding.rule == code]


# --- facts ------------------------------------------------------------------------------------------------------------


def names(version, operator):
    types = SUPPORTED[version].types(operator)
    return None if types is None else {dtype.name for dtype in types}


@pytest.mark.parametrize(
    ("operator", "types"),
    [
        ("Softmax", [{"FLOAT", "FLOAT16", "BFLOAT16"}] * 3),
        ("Mish", [{"FLOAT", "FLOAT16"}] * 3),
        ("Xor", [{"BOOL"}] * 3),
        ("Cast", [{"FLOAT", "FLOAT16", "BFLOAT16", "INT32", "INT64", "BOOL", "UINT8"}] * 3),
        ("Pow", [{"FLOAT", "FLOAT16", "BFLOAT16"}, *[{"FLOAT", "FLOAT16", "BFLOAT16", "INT32", "INT64"}] * 2]),
        ("HannWindow", [None, *[{"FLOAT", "FLOAT16"}] * 2]),
        ("Attention", [None, *[{"FLOAT", "FLOAT16", "BFLOAT16", "INT8", "FLOAT8E4M3FN"}] * 2]),
        ("Swish", [None, None, {"FLOAT", "FLOAT16", "BFLOAT16"}]),
        ("QLinearMatMul", [None] * 3),
    ],
)
def test_rows_of_the_parser_s_tables(operator, types):
    assert [names(version, operator) for version in VERSIONS] == types


def test_opsets_of_the_releases():
    assert [(s.opsets.start, s.opsets.stop - 1) for s in SUPPORTED.values()] == [(9, 20), (9, 24), (9, 24)]


@pytest.mark.parametrize(
    ("installed", "version"),
    [("8.6.1", "10.3"), ("10.3.0", "10.3"), ("10.15.1.29", "10.3"), ("10.16.0", "10.16"), ("11.0", "10.16"),
     ("11.4.0.106", "11.4"), ("12.1", "11.4")],
)  # fmt: skip
def test_an_installed_release_is_judged_by_the_newest_that_is_not_newer(installed, version):
    assert nearest_version(installed) == version


@pytest.mark.parametrize("text", ["", "ten", "11"])
def test_what_is_no_version(text):
    with pytest.raises(TargetError, match="not a TensorRT version"):
        nearest_version(text)


# --- restrictions -----------------------------------------------------------------------------------------------------


def one(operator, inputs, opset=20, outputs=1, **attributes):
    """A graph of one node. Arrays are constants; (shape, type) are inputs."""
    b = Builder(opset)
    given = [b.input(f"x{index}", *value) if isinstance(value, tuple) else value for index, value in enumerate(inputs)]
    results = b.add(operator, *given, outputs=outputs, **attributes)
    results = [results] if outputs == 1 else results
    kinds = {"TopK": [FLOAT, INT64], "MaxPool": [FLOAT, INT64], "Dropout": [FLOAT, TensorProto.BOOL]}
    return b.model(*results, types=kinds.get(operator, [FLOAT] * outputs)[:outputs])


X = (["batch", 3, 8, 8], FLOAT)
AXES = (["n"], INT64)
RESIZED = [X, "", "", np.array([1, 3, 16, 16], np.int64)]
WINDOW = [([1, 64, 1], FLOAT), ([], INT64), np.ones(16, np.float32)]


@pytest.mark.parametrize(
    ("proto", "text"),
    [
        (one("AveragePool", [(["batch", 3, 8], FLOAT)], kernel_shape=[2]), "an input of 3 axes"),
        (one("MaxPool", [X], outputs=2, kernel_shape=[2, 2]), "an output of indices"),
        (one("LpPool", [X], kernel_shape=[2, 2], dilations=[1, 2]), "dilations [1, 2]"),
        (one("CumSum", [X, ([], INT64)]), "computed axis"),
        (one("ReduceMean", [X, AXES]), "computed axes"),
        (one("Unsqueeze", [X, AXES]), "computed axes"),
        (one("Squeeze", [X, AXES]), "computed axes"),
        (one("OneHot", [([4], INT64), ([], INT64), np.array([0, 1], np.float32)]), "computed depth"),
        (one("Dropout", [X, np.float32(0.5), np.bool_(True)]), "training_mode"),
        (one("Resize", RESIZED, mode="cubic"), "mode cubic"),
        (one("Resize", RESIZED, mode="linear", antialias=1), "antialias 1"),
        (one("Resize", RESIZED, mode="nearest", coordinate_transformation_mode="half_pixel_symmetric"),
         "coordinate_transformation_mode half_pixel_symmetric"),
        (one("ScatterND", [([4], FLOAT), ([2, 1], INT64), ([2], FLOAT)], reduction="add"), "reduction add"),
        (one("TopK", [X, np.array([2], np.int64)], outputs=2, sorted=0), "sorted 0"),
        (one("TopK", [(["batch", 4000], FLOAT), np.array([3840], np.int64)], outputs=2), "K 3840"),
        (one("GridSample", [(["b", 3, 8, 8, 8], FLOAT), (["b", 4, 4, 4, 3], FLOAT)]), "an input of 5 axes"),
        (one("EyeLike", [(["n", 4], FLOAT)]), "an input of a dynamic shape"),
        (one("Conv", [([1, 1, 4, 4, 4, 4], FLOAT), values(1, 1, 2, 2, 2, 2)]), "an input of 6 axes"),
        (one("Hardmax", [(["b", "n"], FLOAT)]), "a dynamic axis"),
        (one("STFT", WINDOW), "computed frame_step"),
        (one("DeformConv", [X, values(4, 3, 2, 2), (["batch", 8, 8, 8], FLOAT)], pads=[1, 1, 0, 0]),
         "pads [1, 1, 0, 0]"),
        (one("LayerNormalization", [X, np.ones(8, np.float32)], outputs=2), "2 outputs"),
        (one("Attention", [(["b", 8, 16], FLOAT)] * 3, opset=23, q_num_heads=2, kv_num_heads=2), "without 4 axes"),
        (one("Attention", [(["b", 2, 8, 16], FLOAT)] * 3, opset=23, softcap=1.0), "softcap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_restrictions(proto, text):
    [told] = found(proto, "TRT106")
    assert text in told


@pytest.mark.parametrize(
    ("proto", "text"),
    [
        (one("Pad", [X, (["p"], INT64), "", AXES]), "computed axes"),
        (one("Einsum", [(["b", 4, 4], FLOAT)], equation="bii->bi"), "the equation bii->bi"),
        (one("Einsum", [(["b", 4, 4], FLOAT)], equation="...i->..."), "the equation ...i->..."),
    ],
)
def test_restrictions_of_the_oldest_release(proto, text):
    assert [text in told for told in found(proto, "TRT106", "10.3")] == [True]
    assert not found(proto, "TRT106", "10.16")


# --- types ------------------------------------------------------------------------------------------------------------


def test_uint8_out_of_the_graph_needs_a_cast_in_front():
    b = Builder()
    x = b.input("x", ["batch", 4])
    assert not lint(ir.from_proto(b.model(b.add("Cast", x, to=UINT8), types=[UINT8])))


def test_uint8_inside_of_the_graph():
    b = Builder()
    y = b.add("Cast", b.add("Cast", b.input("x", ["batch", 4]), to=UINT8), to=FLOAT)
    assert found(b.model(y), "TRT108") == ["uint8 inside the graph"]


def test_uint8_out_of_the_graph_is_not_read_on():
    b = Builder()
    y = b.add("Cast", b.input("x", ["batch", 4]), to=UINT8)
    assert found(b.model(y, b.add("Cast", y, to=FLOAT), types=[UINT8, FLOAT]), "TRT108") == ["uint8 inside the graph"]


def test_uint8_is_cast_to_float_or_float16_alone():
    b = Builder()
    y = b.add("Cast", b.add("Cast", b.input("x", ["batch", 4], UINT8), to=TensorProto.BFLOAT16), to=FLOAT)
    assert found(b.model(y), "TRT108") == ["uint8 read by cast_1 (Cast)"]


def test_an_integer_exponent_came_after_the_oldest_release():
    b = Builder()
    proto = b.model(b.add("Pow", b.input("x", ["batch", 4]), np.int64(2)))
    assert found(proto, "TRT203", "10.3") == ["float to the power of int64"]
    assert not found(proto, "TRT203", "10.16")


@pytest.mark.parametrize("operator", ["Concat", "Sum", "Max"])
def test_operands_of_any_number_have_one_type(operator):
    b = Builder()
    x, y = b.input("x", ["batch", 4], HALF), b.input("y", ["batch", 4])
    attributes = {"axis": 0} if operator == "Concat" else {}
    [told] = found(b.model(b.add(operator, x, x, y, **attributes), types=[HALF]), "TRT201")
    assert told == f"{operator} of float16 x, float16 x, float y"


def test_a_condition_is_no_operand():
    b = Builder()
    x = b.input("x", ["batch", 4], HALF)
    y = b.add("Where", b.add("Greater", x, np.float16(0)), x, np.float16(0))
    assert not lint(ir.from_proto(b.model(y, types=[HALF])))


def test_constants_as_nodes_are_constants():
    b = Builder(constants_as_nodes=True)
    proto = b.model(b.add("Mul", b.input("x", ["batch", 4], HALF), np.float32(0.5)), types=[HALF])
    assert found(proto, "TRT201") == ["Mul of float16 x, float c_1"]
    b = Builder(constants_as_nodes=True)
    y = b.add("QuantizeLinear", b.input("x", ["batch", 4]), np.float32(0.1), np.int8(3))
    assert found(b.model(y, types=[TensorProto.INT8]), "TRT301") == ["zero points other than 0, such as 3"]


def test_a_norm_of_two_types_is_told_once():
    b = Builder()
    y = b.add("LayerNormalization", b.input("x", ["batch", 4], HALF), np.ones(4, np.float32))
    assert [finding.rule for finding in lint(ir.from_proto(b.model(y, types=[HALF])))] == ["TRT202"]


def test_a_batch_normalization_of_two_types_came_after_the_oldest_release():
    b = Builder()
    x, parameters = b.input("x", ["batch", 4], HALF), [np.ones(4, np.float32)] * 4
    proto = b.model(b.add("BatchNormalization", x, *parameters), types=[HALF])
    assert [bool(found(proto, "TRT202", version)) for version in VERSIONS] == [True, False, False]


# --- quantizers -------------------------------------------------------------------------------------------------------


def test_a_quantizer_without_zero_point_means_two_things():
    b = Builder()
    y = b.add("QuantizeLinear", b.input("x", ["batch", 4]), np.float32(0.1))
    proto = b.model(b.add("DequantizeLinear", y, np.float32(0.1)))
    assert "no zero point: uint8 in ONNX, int8 in TensorRT" in found(proto, "TRT302")


def test_a_bias_in_int32_is_not_dequantized():
    b = Builder()
    y = b.add("DequantizeLinear", np.zeros(4, np.int32), np.float32(0.1))
    assert found(b.model(b.add("Add", b.input("x", ["batch", 4]), y)), "TRT302") == ["DequantizeLinear of int32"]


def test_zero_points_must_be_known_and_as_many_as_scales():
    b = Builder()
    x, zero = b.input("x", ["batch", 4]), b.input("zero", [], TensorProto.INT8)
    proto = b.model(b.add("QuantizeLinear", x, np.float32(0.1), zero), types=[TensorProto.INT8])
    assert found(proto, "TRT301") == ["a computed zero point"]
    b = Builder()
    y = b.add("DequantizeLinear", np.ones((4, 2), np.int8), np.ones(4, np.float32), np.int8(0), axis=0)
    assert found(b.model(b.add("Relu", y)), "TRT301") == ["1 zero points for 4 scales"]


@pytest.mark.parametrize(
    ("operator", "shape", "axis", "attributes"),
    [
        ("MatMul", (8, 4), 1, {}),
        ("Gemm", (4, 8), 0, {"transB": 1}),
        ("Gemm", (8, 4), 1, {}),
        ("Conv", (4, 3, 2, 2), 0, {"kernel_shape": [2, 2]}),
        ("ConvTranspose", (3, 4, 2, 2), 1, {"kernel_shape": [2, 2]}),
    ],
)
def test_the_axis_of_output_channels(operator, shape, axis, attributes):
    for given in range(2):
        b = Builder()
        x = b.input("x", ["batch", 3, 8, 8] if "Conv" in operator else ["batch", 8])
        y = b.add(operator, pair(b, x), stored(b, values(*shape), axis=given), **attributes)
        assert bool(found(b.model(y), "TRT304")) == (given != axis)


def test_weights_on_the_left_have_their_channels_in_rows():
    for axis in range(2):
        b = Builder()
        y = b.add("MatMul", stored(b, values(8, 4), axis=axis), pair(b, b.input("x", [4, 5])))
        assert bool(found(b.model(y), "TRT304")) == (axis != 0)


def test_an_axis_that_is_not_written_means_two_things_to_the_oldest_release():
    b = Builder()
    weight = b.add("DequantizeLinear", np.ones((8, 4), np.int8), np.ones(4, np.float32), np.zeros(4, np.int8))
    proto = b.model(b.add("MatMul", pair(b, b.input("x", ["batch", 8])), weight))
    assert found(proto, "TRT304", "10.3") == ["no attribute axis: the default is 1 in ONNX, 0 in the parser"]
    assert not found(proto, "TRT304", "10.16")


def test_as_many_scales_as_channels():
    b = Builder()
    weight = b.add("DequantizeLinear", np.ones((8, 4), np.int8), np.ones(3, np.float32), np.zeros(3, np.int8), axis=1)
    proto = b.model(b.add("MatMul", pair(b, b.input("x", ["batch", 8])), weight))
    assert found(proto, "TRT304") == ["3 scales along axis 1, which has 4 entries"]


@pytest.mark.parametrize("scale", [np.float32(-1), np.float32(np.nan), np.float32(np.inf), np.float16(1e-9)])
def test_scales_are_finite_and_above_0(scale):
    b = Builder()
    x = b.input("x", ["batch", 4], HALF if scale.dtype == np.float16 else FLOAT)
    proto = b.model(pair(b, x, np.asarray(scale)), types=[HALF if scale.dtype == np.float16 else FLOAT])
    assert len(found(proto, "TRT305")) == 2


def test_a_cast_between_the_quantizer_and_the_product():
    b = Builder()
    x = b.add("Cast", pair(b, b.input("x", ["batch", 8])), to=HALF)
    y = b.add("MatMul", x, stored(b, values(8, 4), axis=1, dtype=np.float16))
    [told] = found(b.model(y, types=[HALF]), "TRT312")
    assert told.startswith("Cast between dequantizelinear_")


def test_a_quantizer_between_two_linears_is_the_second_one_s():
    b = Builder()
    y = b.add("MatMul", pair(b, b.input("x", ["batch", 4, 8])), stored(b, values(8, 8), axis=1))
    y = b.add("MatMul", pair(b, b.add("Add", y, values(8))), stored(b, values(8, 4), axis=1))
    assert not lint(ir.from_proto(b.model(y)))


def test_a_tensor_is_not_quantized_twice():
    b = Builder()
    x = b.input("x", ["batch", 4])
    y = b.add("Add", b.add("Relu", pair(b, x)), b.add("Relu", pair(b, x, kind=np.dtype(ml_dtypes.float8_e4m3fn))))
    assert found(b.model(y), "TRT311") == ["one tensor in int8 and in float8e4m3fn"]


def test_a_bias_and_a_mask_are_no_residual():
    b = Builder()
    y = b.add("Add", b.input("x", ["batch", 4]), stored(b, values(4)))
    assert not found(b.model(y), "TRT315")
    assert not found(attention(ALL, masks=1), "TRT315")
    b = Builder()
    q, k, v = (b.input(name, ["batch", 2, 8, 8]) for name in "qkv")
    scores = b.add("Add", b.add("MatMul", q, k), pair(b, b.input("mask", ["batch", 2, 8, 8])))
    assert not found(b.model(b.add("MatMul", b.add("Softmax", scores), v)), "TRT315")


def test_a_mask_that_is_a_product_itself_is_not_taken_for_the_scores():
    b = Builder()
    q, k, v = (b.input(name, ["batch", 2, *shape], HALF) for name, *shape in (("q", 8, 32), ("k", 32, 8), ("v", 8, 32)))
    mask = b.add("MatMul", b.input("rows", ["batch", 2, 8, 4], HALF), b.input("columns", ["batch", 2, 4, 8], HALF))
    y = b.add("MatMul", b.add("Softmax", b.add("Add", b.add("MatMul", q, k), mask), axis=-1), v)
    assert found(b.model(y, types=[HALF]), "TRT401") == ["float16, heads of 32 channels, scores of 8 x 8"]


# --- constants --------------------------------------------------------------------------------------------------------


def test_minus_infinity_in_a_mask_and_infinite_bounds_are_wanted():
    b = Builder()
    mask = np.where(np.tri(4, dtype=bool), 0, -np.inf).astype(np.float16)
    x = b.add("Clip", b.input("x", ["batch", 4, 4], HALF), np.float16(-np.inf), np.float16(np.inf))
    y = b.add("Softmax", b.add("Add", x, mask), axis=-1)
    assert not lint(ir.from_proto(b.model(y, types=[HALF])))


def test_plus_infinity_in_a_mask_is_not():
    b = Builder()
    y = b.add("Softmax", b.add("Add", b.input("x", ["batch", 4], HALF), np.full(4, np.inf, np.float16)), axis=-1)
    assert found(b.model(y, types=[HALF]), "TRT601") == ["4 of 4 numbers are infinite in float16"]

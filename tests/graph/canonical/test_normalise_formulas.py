"""Formulas written out in any order become one node, compute the same, and near misses are left alone."""

import math

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from tests.graph.builder import Builder, census, checked, difference, run, values
from vitdeploy.errors import GraphError
from vitdeploy.graph.canonical.normalise import normalise

few = settings(max_examples=12, deadline=None)


def normalised(proto, opset=None):
    model = ir.from_proto(proto)
    report = normalise(model, opset)
    return checked(model), report


def same_function(before, after, *shapes, tolerance=1e-5):
    for seed, shape in enumerate(shapes):
        x = values(*shape, seed=seed)
        assert difference(run(after, x=x), run(before, x=x)) <= tolerance


def swapped(b, order, operator, left, right):
    return b.add(operator, right, left) if order else b.add(operator, left, right)


# --- layer normalisation ----------------------------------------------------------------------------------------------


@st.composite
def layer_norms(draw):
    return {
        "opset": draw(st.sampled_from([11, 13, 17, 18, 20])),
        "square": draw(st.sampled_from(["pow", "mul"])),
        "root": draw(st.sampled_from(["div", "reciprocal", "one over"])),
        "twice": draw(st.booleans()),  # the deviation from the mean is computed twice
        "axis": draw(st.sampled_from([-1, 2])),
        "affine": draw(st.sampled_from(["both", "scale", "none"])),
        "vector": draw(st.sampled_from(["[width]", "[1, 1, width]"])),
        "orders": draw(st.lists(st.booleans(), min_size=4, max_size=4)),
        "nodes": draw(st.booleans()),
    }


def mean_of(b, x, axis):
    if b.opset < 18:
        return b.add("ReduceMean", x, axes=[axis], keepdims=1)
    return b.add("ReduceMean", x, np.array([axis], np.int64), keepdims=1)


def layer_norm(form, width=24):
    b = Builder(form["opset"], form["nodes"])
    x, orders = b.input("x", ["batch", 5, width]), form["orders"]
    deviation = b.add("Sub", x, mean_of(b, x, form["axis"]))
    again = b.add("Sub", x, mean_of(b, x, form["axis"])) if form["twice"] else deviation
    squared = b.add("Pow", deviation, 2.0) if form["square"] == "pow" else b.add("Mul", deviation, deviation)
    root = b.add("Sqrt", swapped(b, orders[0], "Add", mean_of(b, squared, form["axis"]), 1e-3))
    if form["root"] == "div":
        y = b.add("Div", again, root)
    else:
        inverse = b.add("Reciprocal", root) if form["root"] == "reciprocal" else b.add("Div", 1.0, root)
        y = swapped(b, orders[1], "Mul", again, inverse)
    shape = (width,) if form["vector"] == "[width]" else (1, 1, width)
    if form["affine"] != "none":
        y = swapped(b, orders[2], "Mul", y, values(*shape, seed=1))
    if form["affine"] == "both":
        y = swapped(b, orders[3], "Add", y, values(*shape, seed=2))
    return b.model(y)


@given(layer_norms())
@few
def test_layer_norm_becomes_one_node(form):
    before = layer_norm(form)
    after, report = normalised(before)
    assert census(after) == {"LayerNormalization": 1}
    assert report["layer_norm"] == 1
    assert len(after.graph.node[0].input) == (3 if form["affine"] == "both" else 2)
    same_function(before, after, (1, 5, 24), (3, 5, 24))


def test_layer_norm_of_a_half_precision_graph_keeps_its_type():
    b = Builder(18)
    half = b.input("x", ["batch", 5, 24], TensorProto.FLOAT16)
    x = b.add("Cast", half, to=TensorProto.FLOAT)
    deviation = b.add("Sub", x, mean_of(b, x, -1))
    root = b.add("Sqrt", b.add("Add", mean_of(b, b.add("Pow", deviation, 2.0), -1), 1e-3))
    y = b.add("Cast", b.add("Div", deviation, root), to=TensorProto.FLOAT16)
    y = b.add("Mul", y, values(24, seed=1).astype(np.float16))
    before = b.model(y, types=[TensorProto.FLOAT16])
    after, _ = normalised(before)
    assert census(after) == {"LayerNormalization": 1}
    x = values(2, 5, 24).astype(np.float16)
    assert difference(run(after, x=x), run(before, x=x)) <= 2e-3


@pytest.mark.parametrize("change", ["other axis", "rms", "not the mean", "exponent 4", "no keepdims"])
def test_what_only_looks_like_layer_norm_is_left_alone(change):
    b = Builder(18)
    x = b.input("x", ["batch", 24, 24])
    axis, keep = np.array([1 if change == "other axis" else -1], np.int64), int(change != "no keepdims")
    mean = b.add("ReduceMax" if change == "not the mean" else "ReduceMean", x, axis, keepdims=keep)
    deviation = x if change == "rms" else b.add("Sub", x, mean)
    squared = b.add("Pow", deviation, 4.0 if change == "exponent 4" else 2.0)
    variance = b.add("ReduceMean", squared, axis, keepdims=1)
    before = b.model(b.add("Div", deviation, b.add("Sqrt", b.add("Add", variance, 1e-3))))
    after, report = normalised(before)
    assert report["layer_norm"] == 0
    same_function(before, after, (24, 24, 24) if keep == 0 else (2, 24, 24))


# --- GELU -------------------------------------------------------------------------------------------------------------


@st.composite
def gelus(draw):
    return {
        "kind": draw(st.sampled_from(["none", "tanh"])),
        "scaled": draw(st.sampled_from(["div", "mul"])),
        "cube": draw(st.sampled_from(["pow", "mul mul", "factored"])),
        "half": draw(st.sampled_from(["x", "sum", "last", "last div", "spread"])),
        "orders": draw(st.lists(st.booleans(), min_size=6, max_size=6)),
        "nodes": draw(st.booleans()),
    }


def gelu(form):
    b = Builder(20, form["nodes"])
    source, orders = b.input("x", ["batch", 7]), form["orders"]
    x = b.add("Add", source, values(7))
    if form["kind"] == "none":
        inner = b.add("Div", x, math.sqrt(2)) if form["scaled"] == "div" else swapped(b, orders[0], "Mul", x, 0.5**0.5)
        t = b.add("Erf", inner)
    else:
        a, c = math.sqrt(2 / math.pi), 0.044715
        square = b.add("Mul", x, x)
        if form["cube"] == "factored":
            inner = b.add("Mul", b.add("Mul", x, a), swapped(b, orders[0], "Add", b.add("Mul", square, c), 1.0))
        else:
            cube = b.add("Pow", x, 3.0) if form["cube"] == "pow" else swapped(b, orders[1], "Mul", square, x)
            inner = swapped(b, orders[2], "Mul", swapped(b, orders[0], "Add", b.add("Mul", cube, c), x), a)
        t = b.add("Tanh", inner)
    if form["half"] == "spread":
        y = b.add("Add", b.add("Mul", t, 0.5), 0.5)
        return b.model(swapped(b, orders[3], "Mul", x, y))
    one_plus = swapped(b, orders[3], "Add", t, 1.0)
    if form["half"] == "x":
        return b.model(swapped(b, orders[4], "Mul", b.add("Mul", x, 0.5), one_plus))
    if form["half"] == "sum":
        return b.model(swapped(b, orders[4], "Mul", swapped(b, orders[5], "Mul", one_plus, 0.5), x))
    product = swapped(b, orders[4], "Mul", x, one_plus)
    return b.model(b.add("Div", product, 2.0) if form["half"] == "last div" else b.add("Mul", product, 0.5))


@given(gelus())
@few
def test_gelu_becomes_one_node(form):
    before = gelu(form)
    after, report = normalised(before)
    assert census(after) == {"Add": 1, "Gelu": 1}
    assert report["gelu"] == 1
    assert after.graph.node[1].attribute[0].s.decode() == form["kind"]
    same_function(before, after, (4, 7))


def test_gelu_stays_written_out_where_the_opset_has_no_operator_for_it():
    form = {"kind": "none", "scaled": "div", "cube": "", "half": "x", "orders": [False] * 6, "nodes": False}
    proto = gelu(form)
    proto.opset_import[0].version, proto.ir_version = 18, 8
    after, report = normalised(proto)
    assert (census(after)["Erf"], report["gelu"], after.opset_import[0].version) == (1, 0, 18)
    raised, report = normalised(proto, opset=20)
    assert (census(raised)["Gelu"], report["opset"], raised.opset_import[0].version) == (1, 1, 20)


@pytest.mark.parametrize(("inner", "outer"), [(0.7, 0.5), (0.5**0.5, 0.4)])
def test_an_erf_with_other_factors_is_left_alone(inner, outer):
    b = Builder(20)
    x = b.input("x", ["batch", 7])
    t = b.add("Add", b.add("Erf", b.add("Mul", x, inner)), 1.0)
    before = b.model(b.add("Mul", b.add("Mul", x, outer), t))
    after, report = normalised(before)
    assert (census(after)["Erf"], report["gelu"]) == (1, 0)


def test_quick_gelu_is_left_alone():
    b = Builder(20)
    x = b.input("x", ["batch", 7])
    before = b.model(b.add("Mul", x, b.add("Sigmoid", b.add("Mul", x, 1.702))))
    assert census(normalised(before)[0]) == {"Mul": 2, "Sigmoid": 1}


# --- attention --------------------------------------------------------------------------------------------------------


def attention(scale, mask=None, transpose=True, nan_check=False, opset=20):
    """`scale` names where the factor 1/4 stands: behind (mul or div), query, key, both, in front of the transpose."""
    b = Builder(opset)
    q = b.input("x", ["batch", 2, 5, 16])
    k, v = b.add("Neg", q), b.add("Abs", q)
    if scale == "below":
        k = b.add("Mul", k, 0.25)
    if scale in ("query", "both"):
        q = b.add("Mul", q, 0.25 if scale == "query" else 0.5)
    k = b.add("Transpose", k, perm=[0, 1, 3, 2])
    if scale in ("key", "both"):
        k = b.add("Mul", k, 0.25 if scale == "key" else 0.5)
    scores = b.add("MatMul", q, k)
    if scale == "div":
        scores = b.add("Div", scores, 4.0)
    if scale == "mul":
        scores = b.add("Mul", 0.25, scores)
    if mask is not None:
        scores = b.add("Add", scores, mask)
    p = b.add("Softmax", scores, axis=-1)
    if nan_check:
        p = b.add("Where", b.add("IsNaN", p), 0.0, p)
    return b.model(b.add("MatMul", p, v))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", ["mul", "div", "query", "key", "both", "below"])
def test_the_scale_of_attention_stands_on_the_query(scale, masked):
    before = attention(scale, values(1, 2, 5, 5) if masked else None)
    after, report = normalised(before)
    assert census(after)["Mul"] == 1 and census(after)["Div"] == 0
    product = next(node for node in after.graph.node if node.op_type == "MatMul")
    producers = {node.output[0]: node.op_type for node in after.graph.node}
    assert [producers.get(name) for name in product.input] == ["Mul", "Transpose"]
    assert report["attention"] == int(scale != "query")
    same_function(before, after, (1, 2, 5, 16), (3, 2, 5, 16))


def test_attention_without_a_scale_gets_none():
    after, report = normalised(attention("none"))
    assert (census(after)["Mul"], report["attention"]) == (0, 0)


@pytest.mark.parametrize(
    ("mask", "kept"),
    [(None, 0), (np.zeros((1, 1, 1, 5), np.float32), 0), (np.full((1, 1, 1, 5), -np.inf, np.float32), 1)],
    ids=["no mask", "mask of zeros", "mask of a whole row"],
)
def test_the_check_for_rows_without_scores_goes_where_there_are_none(mask, kept):
    before = attention("query", mask, nan_check=True)
    after, _ = normalised(before)
    assert (census(after)["IsNaN"], census(after)["Where"]) == (kept, kept)
    same_function(before, after, (2, 2, 5, 16))


def test_a_key_that_is_transposed_by_reshapes_is_transposed_once():
    b = Builder()
    q = b.input("x", ["batch", 2, 5, 16])
    flat = b.add("Reshape", b.add("Neg", q), np.array([-1, 5, 16], np.int64))
    turned = b.add("Transpose", flat, perm=[0, 2, 1])
    key = b.add("Reshape", turned, np.array([-1, 2, 16, 5], np.int64))
    before = b.model(b.add("Softmax", b.add("MatMul", q, key), axis=-1))
    after, _ = normalised(before)
    assert census(after) == {"Neg": 1, "Transpose": 1, "MatMul": 1, "Softmax": 1}
    same_function(before, after, (3, 2, 5, 16))


# --- convolutions -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(["batch norm", "mul", "mul left", "add", "sub", "div", "scalar"]), min_size=1, max_size=3),
    st.booleans(),
)
@few
def test_what_follows_a_convolution_channel_by_channel_is_folded_into_it(operators, biased):
    b = Builder()
    y = b.input("x", ["batch", 3, 8, 8])
    y = b.add("Conv", y, values(6, 3, 3, 3), *([values(6, seed=1)] if biased else []), kernel_shape=[3, 3])
    for seed, operator in enumerate(operators):
        channels = (values(6, 1, 1, seed=seed) ** 2 + 0.5).astype(np.float32)
        if operator == "batch norm":
            rows = [values(6, seed=seed), values(6, seed=seed + 1), values(6, seed=seed + 2), channels.ravel()]
            y = b.add("BatchNormalization", y, *rows, epsilon=1e-3)
        elif operator == "mul left":
            y = b.add("Mul", channels, y)
        elif operator == "scalar":
            y = b.add("Mul", y, 1.5)
        else:
            y = b.add(operator.capitalize(), y, channels)
    before = b.model(y)
    after, report = normalised(before)
    assert census(after) == {"Conv": 1}
    assert report["convolution"] == len(operators)
    same_function(before, after, (2, 3, 8, 8))


@pytest.mark.parametrize("case", ["second reader", "per position", "computed weight", "zero divisor"])
def test_a_convolution_is_left_alone_where_folding_would_change_something(case):
    b = Builder()
    x = b.input("x", ["batch", 3, 8, 8])
    weight = b.add("ReduceMean", x, np.array([0], np.int64)) if case == "computed weight" else values(6, 3, 3, 3)
    y = b.add("Conv", x, weight, **({} if case == "computed weight" else {"kernel_shape": [3, 3]}))
    if case == "zero divisor":
        before = b.model(b.add("Div", y, np.zeros((6, 1, 1), np.float32)))
    elif case == "per position":
        before = b.model(b.add("Mul", y, values(1, 1, 6, 6)))
    else:
        scaled = b.add("Mul", y, 2.0)
        before = b.model(b.add("Add", scaled, y) if case == "second reader" else scaled)
    after, report = normalised(before)
    assert report["convolution"] == 0
    assert census(after) == census(before)


# --- opset ------------------------------------------------------------------------------------------------------------


def test_a_graph_of_an_opset_that_is_too_old_is_refused():
    b = Builder(9)
    proto = b.model(b.add("Relu", b.input("x", [1, 3])))
    with pytest.raises(GraphError, match="too old") as caught:
        normalise(ir.from_proto(proto))
    assert caught.value.found == "opset 9"


def test_an_operator_that_cannot_be_converted_is_named():
    b = Builder(15)
    proto = b.model(b.add("Relu", b.input("x", [1, 3])))
    proto.graph.node[0].op_type = "Nonsense"
    with pytest.raises(GraphError, match="cannot be converted from opset 15 to 20") as caught:
        normalise(ir.from_proto(proto))
    assert "Nonsense" in caught.value.found


def test_a_constant_that_cannot_be_computed_is_an_error():
    b = Builder(20)
    proto = b.model(b.add("Add", b.input("x", [1, 3]), b.add("Cast", b.constant(1.0), to=TensorProto.FLOAT)))
    proto.graph.node[0].attribute[0].i = 99
    with pytest.raises(GraphError, match="a constant of the graph cannot be computed") as caught:
        normalise(ir.from_proto(proto))
    assert "99" in caught.value.found

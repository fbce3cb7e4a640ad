"""Graphs that ask for more memory or work than a vision model are refused before anything of them is computed."""

import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from tests.graph.builder import Builder, values
from vitdeploy.errors import GraphError, InputError, UnsafeGraphError
from vitdeploy.graph.analysis import work as budget
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.admit import COUNTED, admit, admit_graph, metadata_keys
from vitdeploy.graph.io.files import save_graph

HUGE = np.array([10**6, 10**6], np.int64)
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def image(b, batch="batch", side=8):
    return b.input("x", [batch, 3, side, side])


def written(tmp_path, proto):
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def unchecked(b, *outputs, rank=4):
    """A model that ONNX's own inference has not seen: some of these would keep it busy."""
    declared = [helper.make_tensor_value_info(name, FLOAT, [None] * rank) for name in outputs]
    graph = helper.make_graph(b.nodes, "test", b.inputs, declared, b.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", b.opset)], ir_version=9)


def body(*nodes, carried=(), results=("c_out",), types=()):
    """A loop's body: trip and condition come in, the condition and what is carried go out."""
    inputs = [helper.make_tensor_value_info("trip", INT64, []), helper.make_tensor_value_info("c_in", BOOL, [])]
    inputs += [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(carried, types, strict=True)]
    outputs = [helper.make_tensor_value_info(results[0], BOOL, [])]
    outputs += [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(results[1:], types, strict=True)]
    keep = helper.make_node("Identity", ["c_in"], ["c_out"])
    return helper.make_graph([keep, *nodes], "body", inputs, outputs)


def looped(trips, *of_image):
    """x + 1, so often."""
    b = Builder(20)
    x = image(b, *of_image)
    plus = helper.make_node("Add", ["state", b.constant(np.float32(1))], ["next"])
    inner = body(plus, carried=["state"], results=["c_out", "next"], types=[FLOAT])
    times = trips if isinstance(trips, str) else b.constant(np.int64(trips))
    return unchecked(b, b.add("Loop", times, np.bool_(True), x, body=inner))


def by_data():
    """As often as the brightest pixel says."""
    b = Builder(20)
    x = image(b)
    most = b.add("Cast", b.add("ReduceMax", x, keepdims=0), to=INT64)
    inner = body(carried=["state"], results=["c_out", "state"], types=[FLOAT])
    return unchecked(b, b.add("Loop", most, np.bool_(True), x, body=inner))


def growing(trips):
    """What is carried is as large again after each trip."""
    b = Builder(20)
    x = image(b)
    twice = helper.make_node("Concat", ["state", "state"], ["next"], axis=0)
    inner = body(twice, carried=["state"], results=["c_out", "next"], types=[FLOAT])
    return unchecked(b, b.add("Loop", np.int64(trips), np.bool_(True), x, body=inner))


def counting():
    """n = 2 n, forty times; then a tensor of n."""
    b = Builder(20)
    image(b)
    twice = helper.make_node("Add", ["n", "n"], ["m"])
    inner = body(twice, carried=["n"], results=["c_out", "m"], types=[INT64])
    count = b.add("Loop", np.int64(40), np.bool_(True), np.array([1], np.int64), body=inner)
    return unchecked(b, b.add("ConstantOfShape", count), rank=1)


def doubled(operator, times, *, constant=False):
    b = Builder(20)
    x = image(b)
    y = b.constant(values(1, 3, 8, 8)) if constant else x
    for _ in range(times):
        y = {
            "Concat": lambda y: b.add("Concat", y, y, axis=0),
            "Tile": lambda y: b.add("Tile", y, np.array([1, 1, 2, 1], np.int64)),
            "Pad": lambda y: b.add("Pad", y, np.array([0, 0, 0, 0, 0, 0, 2**20, 0], np.int64)),
            "Resize": lambda y: b.add("Resize", y, "", np.array([1, 1, 2, 2], np.float32)),
            "Sequence": lambda y: b.add("ConcatFromSequence", b.add("SequenceConstruct", y, y), axis=0),
        }[operator](y)
    return unchecked(b, y)


def made(operator, *inputs, **attributes):
    """A tensor that is made out of nothing, added to the image."""
    b = Builder(20)
    x = image(b)
    return unchecked(b, b.add("Add", b.add("ReduceMean", x, keepdims=0), b.add(operator, *inputs, **attributes)))


def sided(length):
    """A square whose sides are computed in floats, as sizes of Resize are."""
    b = Builder(20)
    x = image(b)
    sides = b.add("Concat", *2 * [b.add("Cast", b.add("Floor", length(b)), to=INT64)], axis=0)
    return unchecked(b, b.add("Add", x, b.add("ConstantOfShape", sides)))


def numbers(*values):
    return [np.array([value], np.float32) for value in values]


def branched():
    """A square with sides of 1 or of 10^6, as the brightest pixel says."""
    b = Builder(20)
    x = image(b)
    small, large = (
        helper.make_graph(
            [helper.make_node("Constant", [], [name], value_ints=sides)],
            name,
            [],
            [helper.make_tensor_value_info(name, INT64, [2])],
        )
        for name, sides in (("small", [1, 1]), ("large", HUGE.tolist()))
    )
    bright = b.add("Greater", b.add("ReduceMax", x, keepdims=0), 0.5)
    sides = b.add("If", bright, then_branch=small, else_branch=large)
    return unchecked(b, b.add("Add", b.add("ReduceMean", x, keepdims=0), b.add("ConstantOfShape", sides)))


def large_input(*sizes):
    b = Builder(20)
    return unchecked(b, b.add("Relu", b.input("x", list(sizes))))


REFUSED = {
    "a loop of 2^62 trips": lambda: looped(2**62),
    "a loop of 10^7 trips": lambda: looped(10**7),
    "a loop that doubles": lambda: growing(40),
    "a counter that doubles": counting,
    "a loop of too many elements": lambda: looped(8000, 256, 224),
    **{f"{name}, 34 times": lambda name=name: doubled(name, 34) for name in ("Concat", "Tile", "Resize", "Sequence")},
    "Pad, by a million": lambda: doubled("Pad", 20),
    "a constant, 34 times": lambda: doubled("Concat", 34, constant=True),
    "ConstantOfShape": lambda: made("ConstantOfShape", HUGE),
    "Expand": lambda: made("Expand", np.float32(1), HUGE),
    "Tile": lambda: made("Tile", values(1, 1), HUGE),
    "Range": lambda: made("Range", np.float32(0), np.float32(1e12), np.float32(1)),
    "OneHot": lambda: made("OneHot", np.array([1], np.int64), np.int64(10**12), np.array([0, 1], np.float32)),
    "RandomNormal": lambda: made("RandomNormal", shape=[10**6, 10**6]),
    "floats": lambda: sided(lambda b: b.add("Mul", *numbers(1000), b.add("Exp", *numbers(8)))),
    "the largest of three": lambda: sided(lambda b: b.add("Max", *numbers(1, 1, 1e6))),
    "a branch": branched,
    "an input": lambda: large_input(10**6, 3, 8, 8),
    "all inputs but one axis": lambda: large_input("batch", 3, 10**5, 10**4),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("read", [admit, admit_graph])
def test_what_no_vision_model_asks_for_is_refused_at_once(tmp_path, what, read):
    path, started = written(tmp_path, REFUSED[what]()), time.process_time()
    with pytest.raises(UnsafeGraphError, match="more memory or work than a vision model") as caught:
        read(path)
    assert time.process_time() - started < 2
    assert "at most" in str(caught.value) and budget.VARIABLE in caught.value.fix and "at " in caught.value.found


@pytest.mark.parametrize("proto", [by_data, lambda: looped("")], ids=["as data says", "without a number"])
def test_a_loop_that_may_run_for_ever_is_refused(tmp_path, proto):
    with pytest.raises(GraphError, match="a loop with an unknown number of trips") as caught:
        admit(written(tmp_path, proto()))
    assert caught.value.found.startswith("Loop") and "unrolled" in caught.value.fix


def scanned():
    b = Builder(20)
    x = b.input("x", [4, 3, 8, 8])
    total, row = (helper.make_tensor_value_info(name, FLOAT, [3, 8, 8]) for name in ("total", "row"))
    results = [helper.make_tensor_value_info(name, FLOAT, [3, 8, 8]) for name in ("sum", "each")]
    nodes = [helper.make_node("Add", ["total", "row"], ["sum"]), helper.make_node("Identity", ["row"], ["each"])]
    inner = helper.make_graph(nodes, "body", [total, row], results)
    _, each = b.add("Scan", values(3, 8, 8), x, outputs=2, body=inner, num_scan_inputs=1)
    return unchecked(b, each)


def attention():
    """16 heads over 4,096 tokens, as in the global blocks of SAM ViT-H."""
    b = Builder(20)
    q = b.add("Reshape", b.input("x", ["batch", 3, 1024, 1024]), np.array([0, 16, 4096, 48], np.int64))
    scores = b.add("MatMul", q, b.add("Transpose", q, perm=[0, 1, 3, 2]))
    weights = b.add("Softmax", b.add("Add", scores, values(16, 4096, 1)))
    return unchecked(b, b.add("MatMul", weights, q))


def rotary(layers, operator, width=64):
    """Products by an operator that ONNX knows nothing of, whose halves are turned as rotary positions do, and added."""
    b = Builder(20)
    x = b.add("Reshape", b.input("x", ["batch", 3, 8, width]), np.array([0, 24, -1], np.int64))
    for _ in range(layers):
        if operator == "MatMulNBits":
            packed = np.zeros((width, width // 32, 16), np.uint8)
            facts = {"K": width, "N": width, "bits": 4, "block_size": 32}
            y = b.add(operator, x, packed, values(width * width // 32), domain="com.microsoft", **facts)
        elif operator == "MatMulIntegerToFloat":
            codes, scale, zero = np.zeros((width, width), np.int8), np.float32(0.1), np.uint8(128)
            rows = b.add("QuantizeLinear", x, scale, zero)
            y = b.add(operator, rows, codes, scale, scale, zero, np.int8(0), domain="com.microsoft")
        else:
            y = b.add(operator, x, values(width, width), domain="com.microsoft")
        heads = b.add("Transpose", b.add("Reshape", y, np.array([-1, 24, 2, 32], np.int64)), perm=[0, 2, 1, 3])
        first, second = b.add("Split", heads, np.array([16, 16], np.int64), outputs=2, axis=-1)
        turned = b.add("Concat", b.add("Neg", second), first, axis=-1)
        turned = b.add("Add", b.add("Mul", heads, values(24, 32)), b.add("Mul", turned, values(24, 32)))
        back = b.add("Reshape", b.add("Transpose", turned, perm=[0, 2, 1, 3]), np.array([-1, 24, width], np.int64))
        x = b.add("Add", x, back)
    model = unchecked(b, x, rank=3)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


@pytest.mark.parametrize("operator", ["MatMulNBits", "MatMulIntegerToFloat", "FusedMatMul"])
def test_what_is_estimated_does_not_grow_with_the_layers(tmp_path, operator):
    assert len(admit_graph(written(tmp_path, rotary(40, operator))).graph)


@pytest.mark.parametrize("kind", [np.int64, np.int32])
@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_a_quotient_of_constants_that_no_integer_holds_is_refused(tmp_path, kind, operator):
    b = Builder(20)
    least = np.full(1000, np.iinfo(kind).min, kind)
    quotient = b.add(operator, least, kind(-1))
    added = b.add("ReduceMean", b.add("Cast", quotient, to=FLOAT), keepdims=0)
    with pytest.raises(GraphError, match="divides the smallest integer by -1"):
        admit_graph(written(tmp_path, unchecked(b, b.add("Add", image(b), added))))


def test_only_a_digest_that_was_noted_when_it_was_written_says_that_a_graph_is_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = written(tmp_path, doubled("Concat", 30))
    with pytest.raises(UnsafeGraphError):
        admit_graph(path)
    proto = onnx.load(path)
    claims = onnx.ModelProto.FromString(proto.SerializeToString())
    helper.set_model_props(claims, {"vitdeploy": "{}"})
    with pytest.raises(UnsafeGraphError):
        admit_graph(written(tmp_path, claims))
    save_graph(ir.from_proto(proto), path)
    assert len(admit_graph(path).graph) == 30
    registry = tmp_path / "cache" / "vitdeploy" / "written-graphs"
    registry.chmod(0o777)  # anybody could have written it
    COUNTED.clear()
    with pytest.raises(UnsafeGraphError):
        admit_graph(path)


ADMITTED = {
    "attention": attention,
    "loop": lambda: looped(1000),
    "loop over a large batch": lambda: looped(2000, 256, 224),
    "growing loop": lambda: growing(10),
    "doublings": lambda: doubled("Concat", 10),
    "scan": scanned,
    "batch": lambda: large_input(64, 3, 224, 224),
}


@pytest.mark.parametrize("what", ADMITTED)
def test_what_a_model_may_ask_for_is_admitted(tmp_path, what):
    path = written(tmp_path, ADMITTED[what]())
    assert len(admit(path).graph) and len(admit_graph(path).graph)


def test_the_limits_are_raised_by_the_user_alone(tmp_path, monkeypatch):
    path = written(tmp_path, large_input(10**6, 3, 8, 8))
    monkeypatch.setenv(budget.VARIABLE, "4")
    assert len(admit(path).graph)
    monkeypatch.setenv(budget.VARIABLE, "")
    with pytest.raises(UnsafeGraphError, match="VITDEPLOY_GRAPH_LIMITS=2 doubles all limits"):
        admit(path)
    for text in ("0", "-1", "many", "1" * 20):
        monkeypatch.setenv(budget.VARIABLE, text)
        with pytest.raises(InputError, match="VITDEPLOY_GRAPH_LIMITS must be a number above zero") as caught:
            admit(path)
        assert caught.value.code == "VD2000" and caught.value.found == text


def test_the_size_that_it_is_run_at_counts(tmp_path):
    b = Builder(20)
    x = b.input("x", ["batch", 3, "height", "width"])
    for _ in range(3):  # each makes an axis of as many as there are columns
        x = b.add("Tile", x, b.add("Concat", np.ones(3, np.int64), b.add("Shape", "x", start=3), axis=0))
    path = written(tmp_path, unchecked(b, x))
    assert len(admit(path, (16, 16)).graph)
    with pytest.raises(UnsafeGraphError, match="more memory or work"):
        admit(path, (448, 448))


def test_numbers_that_grow_without_end_are_not_followed(tmp_path):
    """A number squared eighty times, and a size as often, which a Reshape takes: Python would compute them."""
    b = Builder(20)
    x = image(b)
    number, size = b.constant(np.array([3], np.int64)), b.add("Shape", x, start=0, end=1)
    for _ in range(80):
        number, size = b.add("Mul", number, number), b.add("Mul", size, size)
    target = b.add("Concat", size, number, np.array([-1], np.int64), axis=0)
    model = admit(written(tmp_path, unchecked(b, b.add("Reshape", x, target), rank=3)))
    started = time.process_time()
    normalise(model)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("kind", ["UNDEFINED", "SPARSE_TENSOR"])
def test_an_attribute_without_a_value_is_refused(tmp_path, kind):
    b = Builder(20)
    proto = unchecked(b, b.add("Relu", image(b)))
    attribute = proto.graph.node[0].attribute.add(name="alpha")
    attribute.type = onnx.AttributeProto.AttributeType.Value(kind)
    with pytest.raises(GraphError, match=r"attribute alpha of Relu .* has no supported value") as caught:
        admit_graph(written(tmp_path, proto))
    assert kind in caught.value.found


def test_metadata_are_read_without_the_graph(tmp_path):
    b = Builder(20)
    proto = unchecked(b, b.add("Relu", image(b)))
    helper.set_model_props(proto, {"vitdeploy": "{}", "other": "x"})
    assert metadata_keys(written(tmp_path, proto)) == {"vitdeploy", "other"}
    (tmp_path / "cut.onnx").write_bytes(proto.SerializeToString()[:-1])
    with pytest.raises(GraphError, match="not a valid ONNX file"):
        metadata_keys(tmp_path / "cut.onnx")

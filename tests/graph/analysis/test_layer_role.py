"""How much a layer computes, and whether its outputs are ranked; and what OpenVINO therefore leaves in float."""

import onnx_ir as ir
import pytest

from tests.graph.small_graphs import Builder
from vitdeploy.graph.analysis.rows import find_linears, is_place, is_ranked
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.quantization import place_onnxruntime, place_openvino, place_tensorrt
from vitdeploy.quantization.place_openvino import reasons_for_float


def convolved(b, x, inside, outside, name, group=1):
    weight = b.constant(b.random(outside, inside // group, 3, 3), f"{name}.weight")
    return b.op("Conv", x, weight, name=f"{name}/Conv", group=group, kernel_shape=[3, 3], strides=[2, 2])


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [(("batch", 17), 17), ((1, "4*batch"), 4), (("batch * 4", 2), 8), ((3, 17), 51), (("batch", "tokens"), None)],
)
def test_macs_are_those_at_batch_one(sizes, rows):
    b = Builder(0)
    model = b.model({"x": ["batch", "tokens", 8]}, b.linear("x", 8, 24, "linear"))
    [linear] = find_linears(model)
    linear.output.shape = ir.Shape([*sizes, 24])
    assert layer_macs(model, linear) == (None if rows is None else rows * 8 * 24)
    linear.output.shape = None
    assert layer_macs(model, linear) is None


@pytest.mark.parametrize("group", [1, 2, 8])
def test_macs_of_a_convolution_are_those_of_its_positions(group):
    b = Builder(0)
    model = b.model({"x": ["batch", 8, 11, 9]}, convolved(b, "x", 8, 16, "conv", group))
    [linear] = find_linears(model)
    assert layer_macs(model, linear) == 5 * 4 * 16 * (8 // group) * 9


def ranked(b, scores):
    """The two rows with the largest scores."""
    best = b.op("ReduceMax", scores, b.ints(-1), keepdims=0)
    return b.op("TopK", best, b.ints(2), outputs=2)[0]


@pytest.mark.parametrize(
    ("between", "found"), [((), True), (("Sigmoid",), True), (("Relu",), False), (("Softmax", "Transpose"), True)]
)
def test_scores_that_a_topk_ranks_are_found(between, found):
    b = Builder(0)
    scores = b.linear(b.op("Relu", b.linear("x", 8, 8, "hidden")), 8, 4, "scores")
    for operator in between:
        scores = b.op(operator, scores, **({"perm": [0, 2, 1]} if operator == "Transpose" else {}))
    model = b.model({"x": ["batch", 6, 8]}, ranked(b, scores))
    assert [is_ranked(linear) for linear in find_linears(model)] == [False, found]


def test_the_number_that_a_topk_is_given_is_no_score():
    b = Builder(0)
    count = b.op("Reshape", b.op("Cast", b.linear("x", 8, 1, "count"), to=7), b.ints(1))
    model = b.model({"x": [1, 1, 8], "y": ["batch", 6]}, b.op("TopK", "y", count, outputs=2)[0])
    assert [is_ranked(linear) for linear in find_linears(model)] == [False]


@pytest.mark.parametrize("read", ["grid", "image"])
def test_offsets_and_boxes_that_say_where_to_sample_are_found_but_not_what_is_sampled(read):
    """As deformable attention has them: a box by a sigmoid, the offset in parts of its size, in -1 to 1."""
    b = Builder(0)
    hidden = b.op("Relu", b.linear("x", 8, 8, "hidden"))
    box = b.op("Sigmoid", b.linear(hidden, 8, 2, "box"))
    offset = b.op("Mul", b.linear(hidden, 8, 2, "offset"), box)
    grid = b.op("Sub", b.op("Mul", b.op("Add", box, offset), b.constant([2.0])), b.constant([1.0]))
    grid = b.op("Reshape", grid, b.ints(-1, 2, 3, 2))
    image = b.op("Reshape", b.linear(hidden, 8, 4, "value"), b.ints(-1, 4, 2, 3))
    names = {"grid": ["box", "offset"], "image": []}
    other = b.op("Reshape", "y", b.ints(-1, 2, 3, 2))
    sampled = b.op("GridSample", image, grid if read == "grid" else other)
    total = b.op("Add", b.op("ReduceSum", sampled), b.op("ReduceSum", grid))
    model = b.model({"x": ["batch", 6, 8], "y": ["batch", 6, 2]}, total)
    assert [linear.name for linear in find_linears(model) if is_place(linear)] == names[read]


@pytest.mark.parametrize("backend", [place_onnxruntime, place_openvino, place_tensorrt])
def test_no_target_has_places_in_int8(backend):
    b = Builder(0)
    hidden = b.op("Relu", b.linear("x", 256, 256, "hidden"))
    grid = b.op("Reshape", b.linear(hidden, 256, 128, "offsets"), b.ints(-1, 64, 100, 2))
    model = b.model({"x": ["batch", 100, 256], "y": ["batch", 4, 9, 9]}, b.op("GridSample", "y", grid))
    found = backend.BACKEND.reasons_for_float(model, find_linears(model))
    assert found["offsets"] == "its outputs are sampling positions"
    assert found.get("hidden") is None


def test_each_reason_for_float():
    b = Builder(0)
    x = convolved(b, "image", 4, 64, "large")
    x = convolved(b, x, 64, 64, "depthwise", 64)
    x = convolved(b, x, 64, 128, "wide")
    x = b.op("Transpose", b.op("Flatten", x, axis=2), perm=[1, 0])
    x = b.op("Relu", b.linear(x, 128, 256, "heavy"))
    few, scores = b.linear(x, 256, 1, "small"), b.linear(x, 256, 80, "scores")
    model = b.model({"image": [1, 4, 80, 80]}, few, ranked(b, scores))
    assert reasons_for_float(model, find_linears(model)) == {
        "depthwise": "a depthwise convolution loses too much in INT8",
        "small": "the layer is small and as fast in float",
        "scores": "its outputs are ranked",
    }


def test_openvino_has_convolutions_in_float_where_the_machine_is_arm(monkeypatch):
    b = Builder(0)
    x = convolved(b, "image", 4, 64, "large")
    x = b.op("Transpose", b.op("Flatten", x, axis=2), perm=[1, 0])
    model = b.model({"image": [1, 4, 80, 80]}, b.linear(x, 64, 256, "heavy"))
    for machine, expected in (
        ("x86_64", {}),
        ("aarch64", {"large": "OpenVINO has no INT8 kernel for this convolution on Arm"}),
    ):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert reasons_for_float(model, find_linears(model)) == expected

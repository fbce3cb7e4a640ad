"""Names that a file has already are never given twice, whatever they are: the file keeps its function in every pass."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.builder import Builder, checked, difference, run, values
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.edit import Names
from vitdeploy.graph.half.half import emulate, type_graph
from vitdeploy.graph.io.inputs import take_pixels
from vitdeploy.graph.passes.optimize import OptimizeOptions, optimize
from vitdeploy.quantization.observers import LARGEST, LOST, with_extremes
from vitdeploy.quantization.placement import place, shape
from vitdeploy.quantization.ranges import Range
from vitdeploy.spec import PreprocessSpec

PIXELS = PreprocessSpec(8, (8, 8), "bilinear", (0.5,) * 3, (0.5,) * 3)
EVERYTHING = OptimizeOptions(rotate_residual=True, qkv="merged")
INT8 = ("openvino-cpu", "onnxruntime-cpu", "tensorrt")


@functools.cache
def written_out() -> bytes:
    """A classifier of one block in the most nodes: norms, GELU and attention by their formulas, linears as Gemm, and
    a mask that only If knows. What most passes have something to do with."""
    b, width = Builder(17), 16
    weight = iter(range(100))
    x = b.input("image", ["batch", 3, 8, 8])

    def random(*sizes):
        return 0.4 * values(*sizes, seed=next(weight))

    def norm(x):
        deviation = b.add("Sub", x, b.add("ReduceMean", x, axes=[-1]))
        variance = b.add("ReduceMean", b.add("Mul", deviation, deviation), axes=[-1])
        quotient = b.add("Div", deviation, b.add("Sqrt", b.add("Add", variance, 1e-5)))
        return b.add("Add", b.add("Mul", quotient, random(width)), random(width))

    def linear(x, out):
        return b.add("Add", b.add("MatMul", x, random(width, out)), random(out))

    def heads(x, *perm):
        return b.add("Transpose", b.add("Reshape", x, np.array([0, 0, 2, 8])), perm=perm)

    x = b.add("Conv", x, random(width, 3, 4, 4), random(width), strides=[4, 4], kernel_shape=[4, 4])
    x = b.add("Transpose", b.add("Reshape", x, np.array([0, width, 4])), perm=[0, 2, 1])
    y = norm(x)
    query, key = heads(linear(y, width), 0, 2, 1, 3), heads(linear(y, width), 0, 2, 3, 1)
    scores = b.add("Softmax", b.add("Div", b.add("MatMul", query, key), 8**0.5), axis=-1)
    mixed = b.add("Transpose", b.add("MatMul", scores, heads(linear(y, width), 0, 2, 1, 3)), perm=[0, 2, 1, 3])
    x = b.add("Add", x, linear(b.add("Reshape", mixed, np.array([0, 0, width])), width))
    rows = b.add("Reshape", norm(x), np.array([-1, width]))
    hidden = b.add("Gemm", rows, random(32, width), random(32), transB=1)
    bent = b.add("Mul", b.add("Mul", hidden, b.add("Add", b.add("Erf", b.add("Div", hidden, 2**0.5)), 1.0)), 0.5)
    out = b.add("Reshape", b.add("Gemm", bent, random(width, 32), random(width), transB=1), np.array([-1, 4, width]))
    pooled = b.add("ReduceMean", norm(b.add("Add", x, out)), axes=[1], keepdims=0)
    logits = b.add("Gemm", pooled, random(5, width), random(5), transB=1)
    data: bytes = b.model(logits).SerializeToString()
    return data


def rewritten(proto):
    """The float graph behind all rewrites; then, for every target, its placement, and what is made of a float graph to
    look into it. All are valid files."""
    model = ir.from_proto(proto)
    normalise(model)
    take_pixels(model, PIXELS)
    optimize(model, EVERYTHING)
    plain = checked(model)
    others = []
    for target in INT8:
        placed = ir.from_proto(plain)
        shape(placed, target)
        ranges = {str(linear.input.name): Range(-4.0, 4.0) for linear in find_linears(placed)}
        ranges |= {f"{linear.name}:output": Range(-4.0, 4.0) for linear in find_linears(placed)}
        place(placed, ranges, target)
        others.append(checked(placed))
    half = ir.from_proto(plain)
    type_graph(half, "fp16", {})
    emulated, others = emulate(half), [*others, checked(half)]
    return plain, [*others, checked(emulated), checked(with_extremes(emulated)[0])]


def names_of(proto):
    graph = proto.graph
    return {
        *(node.name for node in graph.node),
        *(name for node in graph.node for name in node.output),
        *(tensor.name for tensor in graph.initializer),
    }


def renamed(proto, given):
    """The same file with names for its nodes, constants and inner values: `given` of each kind."""
    copy = onnx.ModelProto.FromString(proto)
    graph, kept = copy.graph, {value.name for value in (*copy.graph.input, *copy.graph.output)}
    inner = [tensor.name for tensor in graph.initializer]
    inner += [name for node in graph.node for name in node.output]
    names = dict(zip([name for name in inner if name not in kept], given, strict=False))
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node, name in zip(graph.node, reversed(given), strict=False):
        node.name = name
        for part in (node.input, node.output):
            part[:] = [names.get(each, each) for each in part]
    return copy


@functools.cache
def made():
    """What the passes call what they make, and the answer of the graph that they leave."""
    plain, others = rewritten(onnx.ModelProto.FromString(written_out()))
    names = set().union(*map(names_of, [plain, *others])) - {"image", plain.graph.output[0].name, LARGEST, LOST}
    return sorted(names), run(plain, image=PIXEL_VALUES)


PIXEL_VALUES = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)


@settings(max_examples=6, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_file_may_have_any_of_the_names_that_passes_give(random):
    names, expected = made()
    given = list(names)
    random.shuffle(given)
    plain, _ = rewritten(renamed(written_out(), given))
    assert difference(run(plain, image=PIXEL_VALUES), expected) <= 1e-5


def test_a_name_is_free_of_those_of_inputs_constants_nodes_values_and_branches():
    b = Builder()
    x = b.input("x", [2])
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["inside"], name="node_inside")],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inside", 1, [2])],
        [onnx.numpy_helper.from_array(np.zeros(1, np.float32), "constant_inside")],
    )
    chosen = b.add("If", np.array(True), then_branch=branch, else_branch=branch)
    names = Names(ir.from_proto(b.model(b.add("Add", x, chosen))))
    for name in ("x", "c_1", chosen, "inside", "node_inside", "constant_inside"):
        assert names.free(name) == f"{name}_2"
        assert names.free(name) == f"{name}_3"
    assert names.free("other") == "other"
    names.release("other")
    assert names.free("other") == "other"

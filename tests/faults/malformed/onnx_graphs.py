"""ONNX files that are whole messages, and no sane graphs: names, types, shapes, attributes, and work without an end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tests.faults.malformed.kinds import Attempt, Table
from tests.faults.malformed.onnx_wire import varint
from tests.faults.malformed.places import ODD_NAMES

GRAPHS = Table()
Change = Callable[[random.Random, Any], None]
HUGE = (1 << 24, 1 << 30, 1 << 34, 1 << 40, 1 << 62)
TRIPS = (10**7, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1)


def case(name: str) -> Callable[[Change], Change]:
    """A class of damage: a function that changes a `ModelProto` in place."""

    def added(change: Change) -> Change:
        @GRAPHS.add(name)
        def make(attempt: Attempt) -> None:
            proto = onnx.load(str(attempt.seeds.graph))
            change(attempt.random, proto)
            attempt.write("model.onnx", proto.SerializeToString())

        return change

    return added


# --- tools ------------------------------------------------------------------------------------------------------------


def constant(proto: Any, value: Any, name: str) -> str:
    proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def node(proto: Any, operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    """A node in front of all others, which run in the order of the file."""
    made = helper.make_node(operator, inputs, outputs, name=f"{operator}_{outputs[0]}", **attributes)
    proto.graph.node.insert(0, made)
    return made


def into_logits(proto: Any, name: str) -> None:
    """Make the answer depend on one number of a tensor of floats, so that it is no dead branch."""
    last = proto.graph.node[-1]
    last.output[0] = "before"
    nodes = [
        helper.make_node("Reshape", [name, constant(proto, np.array([-1], np.int64), "flat")], ["flattened"]),
        helper.make_node("ReduceMax", ["flattened"], ["largest"], axes=[0], keepdims=1),
        helper.make_node("Add", ["before", "largest"], ["logits"]),
    ]
    proto.graph.node.extend(nodes)


def node_of(proto: Any, operator: str) -> Any:
    return next(each for each in proto.graph.node if each.op_type == operator)


def body() -> Any:
    """A Loop's body that adds one to a number, for ever."""
    one = helper.make_node("Constant", [], ["one"], value_float=1.0)
    return helper.make_graph(
        [one, helper.make_node("Add", ["a", "one"], ["b"]), helper.make_node("Identity", ["go"], ["go_on"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, [1]),
        ],
    )


def branch(output: str, *nodes: Any) -> Any:
    made = list(nodes) or [helper.make_node("Constant", [], [output], value_float=1.0)]
    return helper.make_graph(made, "branch", [], [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)])


# --- the wiring -------------------------------------------------------------------------------------------------------


@case("a circle")
def _circle(chance, proto):
    nodes = proto.graph.node
    early, late = sorted(chance.sample(range(len(nodes)), 2))
    nodes[early].input[0] = nodes[late].output[0]


@case("a node that reads itself")
def _itself(chance, proto):
    chosen = chance.choice(proto.graph.node)
    chosen.input[0] = chosen.output[0]


@case("an input that nothing makes")
def _missing(chance, proto):
    chosen = chance.choice(proto.graph.node)
    chosen.input[chance.randrange(len(chosen.input))] = chance.choice(("nothing", ""))


@case("one name for two values")
def _two_makers(chance, proto):
    one, other = chance.sample(list(proto.graph.node), 2)
    other.output[0] = one.output[0]


@case("a value with the name of a weight or of the input")
def _shadowed(chance, proto):
    chance.choice(proto.graph.node).output[0] = chance.choice(("image", "patch", "head"))


@case("a weight twice, or missing")
def _weights(chance, proto):
    weights = proto.graph.initializer
    index = chance.randrange(len(weights))
    if chance.random() < 0.5:
        weights.append(weights[index])
    else:
        del weights[index]


@case("a weight that is an input too")
def _overridable(chance, proto):
    tensor = chance.choice(proto.graph.initializer)
    shape = list(tensor.dims) if chance.random() < 0.5 else [1 << 20]
    proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, shape))


@case("nodes in disorder, doubled or gone")
def _disorder(chance, proto):
    nodes = list(proto.graph.node)
    how = chance.randrange(3)
    if how == 0:
        chance.shuffle(nodes)
    elif how == 1:
        nodes.append(chance.choice(nodes))
    else:
        nodes.remove(chance.choice(nodes))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


@case("more or fewer inputs and outputs of a node")
def _arity(chance, proto):
    chosen = chance.choice(proto.graph.node)
    how = chance.randrange(4)
    if how == 0:
        chosen.input.append("image")
    elif how == 1:
        del chosen.input[-1:]
    elif how == 2:
        chosen.output.append("more")
    else:
        chosen.input.extend(["image"] * 100_000)


@case("outputs: none, one twice, one that nothing makes, very many")
def _outputs(chance, proto):
    outputs = proto.graph.output
    how = chance.randrange(4)
    if how == 0:
        del outputs[:]
    elif how == 1:
        outputs.append(outputs[0])
    elif how == 2:
        outputs[0].name = "nothing"
    else:
        outputs.extend([helper.make_tensor_value_info(f"o{i}", TensorProto.FLOAT, None) for i in range(5000)])


@case("inputs: none, a second image, very many")
def _inputs(chance, proto):
    inputs = proto.graph.input
    how = chance.randrange(3)
    if how == 0:
        del inputs[:]
    elif how == 1:
        inputs.append(helper.make_tensor_value_info("second", TensorProto.FLOAT, [1, 3, 8, 8]))
    else:
        inputs.extend([helper.make_tensor_value_info(f"i{i}", TensorProto.FLOAT, [1]) for i in range(5000)])


# --- names and header -------------------------------------------------------------------------------------------------


@case("odd names")
def _names(chance, proto):
    name = chance.choice([each for each in ODD_NAMES if "\ud800" not in each])
    holder = chance.choice(
        (chance.choice(proto.graph.node), proto.graph.input[0], proto.graph.output[0], proto.graph.initializer[0])
    )
    holder.name = name
    proto.graph.node[0].output[0] = chance.choice((name, "grid"))


@case("documentation and producers of any length")
def _told(chance, proto):
    proto.doc_string = "d" * chance.choice((10, 1 << 20, 1 << 24))
    proto.producer_name = chance.choice(ODD_NAMES[:8]) + "p" * 5000
    proto.graph.node[0].doc_string = "\x1b[2J" * 1000


@case("operators that nobody knows")
def _operators(chance, proto):
    chosen = chance.choice(proto.graph.node)
    chosen.op_type = chance.choice(("", "Rotate", "conv", "PyOp", "\x1b[2J", "C" * 5000, "EPContext", "Adam"))
    chosen.domain = chance.choice(("", "", "com.microsoft", "ai.onnx.ml", "com.custom", "ai.onnx.preview.training"))


@case("domains and opsets")
def _opsets(chance, proto):
    how = chance.randrange(5)
    if how == 0:
        del proto.opset_import[:]
    elif how == 1:
        proto.opset_import[0].version = chance.choice((-1, 0, 1, 6, 10, 24, 99, (1 << 63) - 1))
    elif how == 2:
        proto.opset_import.append(helper.make_opsetid("", chance.choice((1, 13, 20))))
    elif how == 3:
        proto.opset_import.extend([helper.make_opsetid(f"d{i}", 1) for i in range(20_000)])
    else:
        proto.opset_import[0].domain = chance.choice(("ai.onnx", "ai.onnx.ml", "\0"))


@case("versions of the format")
def _ir(chance, proto):
    proto.ir_version = chance.choice((-1, 0, 1, 2, 3, 5, 12, 99, (1 << 63) - 1))


@case("functions of its own, which call themselves")
def _functions(chance, proto):
    calls = helper.make_node("Again", ["a"], ["b"], domain="own")
    proto.functions.append(helper.make_function("own", "Again", ["a"], ["b"], [calls], proto.opset_import))
    proto.opset_import.append(helper.make_opsetid("own", 1))
    node(proto, "Again", ["image"], ["again"], domain="own")


@case("training, quantization and metadata in it")
def _annexes(chance, proto):
    how = chance.randrange(4)
    if how == 0:
        info = proto.training_info.add()
        info.algorithm.node.extend([helper.make_node("Relu", ["a"], ["b"])])
    elif how == 1:
        entry = proto.graph.quantization_annotation.add(tensor_name="image")
        entry.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="nothing")
    elif how == 2:
        for _ in range(2):
            proto.metadata_props.add(key="same", value="\x1b[2J")
    else:
        proto.graph.metadata_props.add(key="k", value="v" * 1_000_000)


# --- types and shapes -------------------------------------------------------------------------------------------------


@case("an input of another type")
def _input_type(chance, proto):
    tensor = proto.graph.input[0].type.tensor_type
    tensor.elem_type = chance.choice([*range(24), 99, -1])


@case("an input that is no tensor")
def _no_tensor(chance, proto):
    kind = proto.graph.input[0].type
    kind.Clear()
    how = chance.randrange(4)
    if how == 0:
        kind.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    elif how == 1:
        kind.optional_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    elif how == 2:
        kind.map_type.key_type = 99
    else:
        kind.sparse_tensor_type.elem_type = TensorProto.FLOAT


@case("an input of absurd sizes")
def _input_shape(chance, proto):
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    how = chance.randrange(5)
    if how == 0:
        chance.choice(dims).dim_value = chance.choice((-1, 0, 1, 10**6, 1 << 31, 1 << 62))
    elif how == 1:
        del dims[chance.randrange(4)]
    elif how == 2:
        dims.extend([onnx.TensorShapeProto.Dimension(dim_value=1)] * chance.choice((1, 30, 1000)))
    elif how == 3:
        for each in dims:
            each.dim_param = "n"
    else:
        proto.graph.input[0].type.tensor_type.ClearField("shape")


@case("a batch of a million images")
def _batch(chance, proto):
    sizes = [10**6, 3, 8, 8] if chance.random() < 0.5 else [1, 3, *chance.choice(((10**5, 10**5), (20_000, 20_000)))]
    for dim, size in zip(proto.graph.input[0].type.tensor_type.shape.dim, sizes, strict=True):
        dim.dim_value = size


@case("outputs declared otherwise than computed")
def _output_shape(chance, proto):
    tensor = proto.graph.output[0].type.tensor_type
    tensor.elem_type = chance.choice((TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, 0, 77))
    chance.choice(tensor.shape.dim).dim_value = chance.choice((0, 3, 4, 1 << 40, -7))


@case("values declared otherwise than computed")
def _value_info(chance, proto):
    for each in proto.graph.node:
        kind = chance.choice((TensorProto.FLOAT, TensorProto.INT8, TensorProto.STRING))
        shape = chance.choice(([], [0], [1 << 40], [-1, -1], ["a", "b", "c"]))
        proto.graph.value_info.append(helper.make_tensor_value_info(each.output[0], kind, shape))


# --- attributes -------------------------------------------------------------------------------------------------------


@case("an attribute of an undefined type")
def _undefined(chance, proto):
    """Python's protobuf sets no such number, and reads each."""
    chosen = chance.choice([each for each in proto.graph.node if each.attribute]).attribute[0]
    chosen.type = 0
    chosen.MergeFromString(b"\xa0\x01" + varint(chance.choice((0, 15, 99, 1 << 31, (1 << 64) - 1))))


@case("an attribute of another type")
def _attribute_type(chance, proto):
    chosen = chance.choice([each for each in proto.graph.node if each.attribute])
    name = chosen.attribute[0].name
    value = chance.choice((1, -1, 0.5, float("nan"), "text", [1, 2], [0.5], ["a"], helper.make_graph([], "g", [], [])))
    del chosen.attribute[0]
    chosen.attribute.append(helper.make_attribute(name, value))


@case("an attribute with several values, or none")
def _attribute_values(chance, proto):
    chosen = chance.choice([each for each in proto.graph.node if each.attribute]).attribute[0]
    how = chance.randrange(3)
    if how == 0:
        chosen.f, chosen.s = 0.5, b"\xff"
        chosen.floats.extend([1.0] * 1000)
    elif how == 1:
        for name in ("i", "ints", "f", "s"):
            chosen.ClearField(name)
    else:
        chosen.ref_attr_name = "alpha"


@case("attributes missing, doubled or unknown")
def _attributes(chance, proto):
    chosen = chance.choice([each for each in proto.graph.node if each.attribute])
    how = chance.randrange(3)
    if how == 0:
        del chosen.attribute[:]
    elif how == 1:
        chosen.attribute.append(chosen.attribute[0])
    else:
        chosen.attribute.append(AttributeProto(name="unknown", type=AttributeProto.INT, i=1))


@case("axes and permutations outside of the shape")
def _axes(chance, proto):
    wrong = chance.choice((-99, 99, 1 << 40, -(1 << 63)))
    operator = chance.choice(("Softmax", "LayerNormalization", "Transpose", "ReduceMean"))
    attribute = node_of(proto, operator).attribute[0]
    if attribute.ints:
        attribute.ints[0] = chance.choice((wrong, attribute.ints[-1]))
    else:
        attribute.i = wrong


@case("a convolution of absurd sizes")
def _convolution(chance, proto):
    conv = node_of(proto, "Conv")
    del conv.attribute[:]
    wrong = chance.choice((0, -1, 7, 1 << 31, 1 << 62))
    for name, value in (
        ("kernel_shape", [4, 4]),
        ("strides", [4, 4]),
        ("pads", [0] * 4),
        ("dilations", [1, 1]),
        ("group", 1),
    ):
        conv.attribute.append(helper.make_attribute(name, value))
    chosen = chance.choice(conv.attribute)
    if chosen.ints:
        chosen.ints[chance.randrange(len(chosen.ints))] = wrong
    else:
        chosen.i = wrong


# --- work without an end ----------------------------------------------------------------------------------------------


def _loop(proto, trips, *, in_node=False):
    count = np.array(trips, np.int64)
    if in_node:
        node(proto, "Constant", [], ["trips"], value=numpy_helper.from_array(count, "t"))
    else:
        constant(proto, count, "trips")
    constant(proto, np.array(True), "condition")
    constant(proto, np.zeros(1, np.float32), "start")
    made = helper.make_node("Loop", ["trips", "condition", "start"], ["looped"], name="loop", body=body())
    proto.graph.node.insert(1 if in_node else 0, made)


@case("a loop of very many trips")
def _many_trips(chance, proto):
    _loop(proto, chance.choice(TRIPS), in_node=chance.random() < 0.5)
    into_logits(proto, "looped")


@case("a loop of very many trips that nothing reads")
def _dead_loop(chance, proto):
    _loop(proto, chance.choice(TRIPS))


@case("a loop without a bound")
def _no_bound(chance, proto):
    _loop(proto, 1)
    node_of(proto, "Loop").input[0] = ""
    into_logits(proto, "looped")


@case("a loop whose trips come from the image")
def _counted_by_pixels(chance, proto):
    _loop(proto, 1)
    scale = constant(proto, np.float32(chance.choice((1e6, 1e12))), "scale")
    made = [
        helper.make_node("ReduceMax", ["image"], ["most"], keepdims=0),
        helper.make_node("Add", ["most", scale], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["counted"], to=TensorProto.INT64),
    ]
    node_of(proto, "Loop").input[0] = "counted"
    nodes = [*made, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    into_logits(proto, "looped")


@case("loops in loops")
def _nested_loops(chance, proto):
    inner = body()
    for level in range(chance.choice((2, 3, 6))):
        outer = body()
        trips = helper.make_node("Constant", [], [f"t{level}"], value_int=chance.choice((100, 10**4)))
        loop = helper.make_node("Loop", [f"t{level}", "go", "a"], ["b"], body=inner)
        del outer.node[:]
        outer.node.extend([trips, loop, helper.make_node("Identity", ["go"], ["go_on"])])
        inner = outer
    _loop(proto, 10**4)
    node_of(proto, "Loop").attribute[0].g.CopyFrom(inner)
    into_logits(proto, "looped")


@case("a scan over very many elements")
def _scan(chance, proto):
    constant(proto, np.array([chance.choice((10**7, 1 << 31))], np.int64), "long")
    step = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "step",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("s", "e")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("t", "o")],
    )
    constant(proto, np.float32(0), "begin")
    node(proto, "Scan", ["begin", "elements"], ["state", "scanned"], body=step, num_scan_inputs=1)
    node(proto, "ConstantOfShape", ["long"], ["elements"])
    into_logits(proto, "scanned")


@case("branches: one missing, of other types, deep")
def _branches(chance, proto):
    constant(proto, np.array(True), "condition")
    made = node(proto, "If", ["condition"], ["chosen"], then_branch=branch("p"), else_branch=branch("q"))
    how = chance.randrange(3)
    if how == 0:
        del made.attribute[chance.randrange(2)]
    elif how == 1:
        made.attribute[0].g.output[0].type.tensor_type.elem_type = TensorProto.STRING
    else:
        inner = branch("p")
        for _ in range(chance.choice((2, 4, 7))):
            deeper = helper.make_node("If", ["condition"], ["p"], then_branch=inner, else_branch=branch("p"))
            inner = branch("p", deeper)
        made.attribute[0].g.CopyFrom(inner)
    into_logits(proto, "chosen")


def _doubled(chance, proto, operator, start, steps):
    """A chain that doubles its elements with each node."""
    nodes, at = [], start
    for index in range(steps):
        name = f"double{index}"
        if operator == "Concat":
            nodes.append(helper.make_node("Concat", [at, at], [name], axis=0))
        elif operator == "Tile":
            nodes.append(helper.make_node("Tile", [at, constant(proto, np.array([2], np.int64), f"t{index}")], [name]))
        else:
            pads = constant(proto, np.array([0, 1 << index], np.int64), f"p{index}")
            nodes.append(helper.make_node("Pad", [at, pads], [name], mode="constant"))
        at = name
    rest = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes, *rest])
    into_logits(proto, at)


@case("a chain of doublings of a constant")
def _doublings(chance, proto):
    constant(proto, np.ones(1, np.float32), "seed")
    _doubled(chance, proto, chance.choice(("Concat", "Tile", "Pad")), "seed", chance.choice((28, 34, 45, 70)))


@case("a chain of doublings of the image")
def _doubled_image(chance, proto):
    flat = constant(proto, np.array([-1], np.int64), "minus_one")
    _doubled(chance, proto, chance.choice(("Concat", "Tile", "Pad")), "flat_image", chance.choice((24, 30, 60)))
    proto.graph.node.insert(0, helper.make_node("Reshape", ["image", flat], ["flat_image"]))


@case("sums of a value with itself, a hundred deep")
def _sums(chance, proto):
    """As a tree it has 2^100 leaves."""
    at, nodes = "image", []
    for index in range(chance.choice((60, 100, 400))):
        nodes.append(helper.make_node(chance.choice(("Add", "Max", "Mul")), [at, at], [f"s{index}"]))
        at = f"s{index}"
    nodes[-1].output[0] = "summed"
    rest = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes, *rest])
    node_of(proto, "Conv").input[0] = "summed"


def _made_of_little(name, nodes):
    """A class of tensors that few bytes make: `nodes` adds what makes the value "large"."""

    @case(f"a huge tensor out of {name}")
    def _huge(chance, proto):
        before = len(proto.graph.node)
        nodes(proto, chance.choice(HUGE))
        added = len(proto.graph.node) - before
        assert added
        if chance.random() < 0.7:
            into_logits(proto, "large")


def _shape_of(proto, size):
    return constant(proto, np.array([size], np.int64), "size")


def _range(proto, size):
    for name, value in (("from", 0.0), ("to", float(size)), ("by", 1.0)):
        constant(proto, np.float32(value), name)
    node(proto, "Range", ["from", "to", "by"], ["large"])


def _one_hot(proto, size):
    constant(proto, np.zeros(64, np.int64), "indices")
    constant(proto, np.array(size, np.int64), "depth")
    constant(proto, np.array([0, 1], np.float32), "off_on")
    node(proto, "OneHot", ["indices", "depth", "off_on"], ["large"])


def _eye(proto, size):
    side = int(size**0.5)
    node(proto, "EyeLike", ["square"], ["large"], dtype=TensorProto.FLOAT)
    constant(proto, np.array([side, side], np.int64), "sides")
    node(proto, "ConstantOfShape", ["sides"], ["square"])


def _resize(proto, size):
    constant(proto, np.array([1, 1, size**0.5, 1], np.float32), "scales")
    node(proto, "Resize", ["image", "", "scales"], ["large"], mode="nearest")


def _pad(proto, size):
    constant(proto, np.array([0, 0, 0, 0, 0, 0, size, 0], np.int64), "pads")
    node(proto, "Pad", ["image", "pads"], ["large"])


def _outer(proto, size):
    """Two small vectors, whose product is a large matrix."""
    side = min(int(size**0.5), 1 << 17)
    constant(proto, np.ones((side, 1), np.float32), "column")
    constant(proto, np.ones((1, side), np.float32), "row")
    node(proto, "MatMul", ["column", "row"], ["large"])


for _name, _nodes in {
    "ConstantOfShape": lambda p, n: node(p, "ConstantOfShape", [_shape_of(p, n)], ["large"]),
    "Expand": lambda p, n: node(p, "Expand", [constant(p, np.ones(1, np.float32), "one"), _shape_of(p, n)], ["large"]),
    "Tile": lambda p, n: node(p, "Tile", [constant(p, np.ones(1, np.float32), "one"), _shape_of(p, n)], ["large"]),
    "Range": _range,
    "OneHot": _one_hot,
    "EyeLike": _eye,
    "Resize": _resize,
    "Pad": _pad,
    "a product": _outer,
    "RandomNormal": lambda p, n: node(p, "RandomNormal", [], ["large"], shape=[n]),
}.items():
    _made_of_little(_name, _nodes)


@case("weights declared and not there")
def _declared(chance, proto):
    tensor = chance.choice(proto.graph.initializer)
    del tensor.dims[:]
    tensor.dims.extend(chance.choice(([10**6, 10**6], [1 << 62], [-1], [0], [1 << 31, 1 << 31, 4], [2] * 40)))


@case("very many nodes")
def _many_nodes(chance, proto):
    count, at = chance.choice((2000, 20_000, 120_000)), "image"
    names = [f"k{i}" for i in range(count)]
    nodes = []
    for name in names:
        nodes.append(helper.make_node("Identity", [at], [name]))
        at = name
    rest = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes, *rest])
    node_of(proto, "Conv").input[0] = at


@case("many nodes that a pass would go through again and again")
def _quadratic(chance, proto):
    """Each adds a constant to the sum of all before it."""
    one, at, nodes = constant(proto, np.float32(1), "one"), "image", []
    for index in range(chance.choice((300, 3000))):
        kind = chance.choice(("Add", "Mul", "Reshape"))
        if kind == "Reshape":
            shape = constant(proto, np.array([0, 3, 8, 8], np.int64), f"sh{index}")
            nodes.append(helper.make_node("Reshape", [at, shape], [f"c{index}"]))
        else:
            nodes.append(helper.make_node(kind, [at, one], [f"c{index}"]))
        at = f"c{index}"
    rest = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes, *rest])
    node_of(proto, "Conv").input[0] = at


# --- values -----------------------------------------------------------------------------------------------------------


@case("weights that are no numbers")
def _nan(chance, proto):
    tensor = chance.choice([each for each in proto.graph.initializer if each.data_type == TensorProto.FLOAT])
    array = numpy_helper.to_array(tensor).copy()
    array.flat[chance.randrange(array.size)] = chance.choice((np.nan, np.inf, -np.inf, 3e38, 1e-45))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


@case("weights of another type")
def _weight_type(chance, proto):
    tensor = chance.choice(proto.graph.initializer)
    array = numpy_helper.to_array(tensor)
    kind = chance.choice((np.float16, np.float64, np.int8, np.bool_, np.complex64, np.uint64))
    tensor.CopyFrom(numpy_helper.from_array(array.astype(kind), tensor.name))


@case("weights of rare types")
def _rare_type(chance, proto):
    tensor = chance.choice(proto.graph.initializer)
    tensor.data_type = chance.choice((*range(16, 27), 8, 0, 99))
    bits = {TensorProto.BFLOAT16: 16, TensorProto.UINT4: 4, TensorProto.INT4: 4}.get(tensor.data_type, 8)
    tensor.raw_data = bytes(-(-int(np.prod(tensor.dims)) * bits // 8))


@case("text, sparse and cut weights")
def _odd_weights(chance, proto):
    how = chance.randrange(3)
    tensor = proto.graph.initializer[0]
    if how == 0:
        tensor.ClearField("raw_data")
        tensor.data_type = TensorProto.STRING
        tensor.string_data.extend([b"\xff"] * int(np.prod(tensor.dims)))
    elif how == 1:
        sparse = proto.graph.sparse_initializer.add()
        sparse.dims.extend([1 << 40])
    else:
        tensor.segment.begin, tensor.segment.end = 0, 1 << 40


@case("shapes that do not multiply")
def _reshape(chance, proto):
    shape = chance.choice(([-1, -1, 4], [0, 0, 0, 0], [7], [1 << 40, -1], [-2, 8, 4], [], [0, 8, 5]))
    tensor = next(each for each in proto.graph.initializer if each.name == "tokens")
    tensor.CopyFrom(numpy_helper.from_array(np.array(shape, np.int64), "tokens"))


@case("indices outside")
def _gather(chance, proto):
    wrong = constant(proto, np.array([chance.choice((99, -99, 1 << 40, -(1 << 62)))], np.int64), "wrong")
    how = chance.randrange(3)
    if how == 0:
        node(proto, "Gather", ["patch", wrong], ["odd"])
    elif how == 1:
        node(proto, "Slice", ["patch", wrong, constant(proto, np.array([1 << 62], np.int64), "end")], ["odd"])
    else:
        node(proto, "TopK", ["patch", wrong], ["odd", "places"])
    into_logits(proto, "odd")


@case("divided by zero")
def _zero(chance, proto):
    operator = chance.choice(("Div", "Mod"))
    constant(proto, np.array([7, -(1 << 63)], np.int64), "seven")
    constant(proto, np.array([0, -1], np.int64), "nought")
    node(proto, "Cast", ["quotient"], ["odd"], to=TensorProto.FLOAT)
    node(proto, operator, ["seven", "nought"], ["quotient"])
    into_logits(proto, "odd")


@case("quantizers without a scale")
def _quantizers(chance, proto):
    scale = chance.choice((0.0, float("nan"), float("inf"), -1.0, 1e-45))
    constant(proto, np.float32(scale), "scale")
    constant(proto, np.uint8(0), "zero")
    node(proto, "DequantizeLinear", ["codes", "scale", "zero"], ["odd"])
    node(proto, "QuantizeLinear", ["image", "scale", "zero"], ["codes"])
    node_of(proto, "Conv").input[0] = "odd"


@case("casts to types that are none")
def _casts(chance, proto):
    node(proto, "Cast", ["image"], ["odd"], to=chance.choice((0, 8, 14, 99, -1)))
    node_of(proto, "Conv").input[0] = "odd"


@case("operators of text and sequences")
def _sequences(chance, proto):
    how = chance.randrange(3)
    if how == 0:
        node(proto, "SequenceConstruct", ["image", "image"], ["odd"])
    elif how == 1:
        node(proto, "Optional", ["image"], ["odd"])
    else:
        constant(proto, np.array(["a"], object), "words")
        node(proto, "StringNormalizer", ["words"], ["odd"])


@case("an equation without an end")
def _einsum(chance, proto):
    equation = chance.choice(("", "->", "bchw->" + "b" * 5000, "....", "bchw->x", "bchw,bchw->", "b" * 100_000))
    node(proto, "Einsum", ["image"], ["odd"], equation=equation)
    into_logits(proto, "odd")


@case("chance and training in a graph")
def _chance_in_graph(chance, proto):
    how = chance.randrange(3)
    if how == 0:
        node(proto, "RandomNormalLike", ["image"], ["odd"])
    elif how == 1:
        constant(proto, np.float32(0.5), "ratio")
        constant(proto, np.array(True), "training")
        node(proto, "Dropout", ["image", "ratio", "training"], ["odd"])
    else:
        node(proto, "Bernoulli", ["image"], ["odd"])
    node_of(proto, "Conv").input[0] = "odd"


@case("a tensor in an attribute, of another size")
def _attribute_tensor(chance, proto):
    made = node(proto, "Constant", [], ["odd"], value=numpy_helper.from_array(np.ones(4, np.float32), "t"))
    tensor = made.attribute[0].t
    how = chance.randrange(3)
    if how == 0:
        tensor.dims[0] = chance.choice((5, 0, -1, 1 << 40))
    elif how == 1:
        tensor.data_type = chance.choice((0, 7, 8, 99))
    else:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../../secret")
    into_logits(proto, "odd")


@case("another graph altogether")
def _another(chance, proto):
    """A graph of one node, as small as they get: of each operator of ONNX in turn."""
    operators = sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})
    operator = chance.choice(operators)
    schema = onnx.defs.get_schema(operator, 17) if onnx.defs.has(operator, 17) else None
    count = schema.min_input if schema is not None else 1
    made = helper.make_node(operator, ["image"] * max(1, count), ["logits"])
    del proto.graph.node[:]
    proto.graph.node.append(made)

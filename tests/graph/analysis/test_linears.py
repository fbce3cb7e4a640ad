"""Every linear and convolution with constant weights is found, under the name of its module."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from tests.graph.builder import Builder
from vitdeploy.graph.analysis.rows import count_int8, find_linears, name_apart, unplaced_weights
from vitdeploy.graph.io.files import load_graph

DEPTH = 2
PARTS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


@pytest.fixture(scope="module")
def linears(small_export):
    return find_linears(load_graph(small_export / "model.onnx"))


def test_a_vit_has_four_linears_a_block_its_patch_embedding_and_its_head(linears):
    assert len(linears) == 4 * DEPTH + 2
    assert [linear.name for linear in linears] == [
        "patch_embed.proj",
        *(f"blocks.{i}.{part}" for i in range(DEPTH) for part in PARTS),
        "head",
    ]


def test_only_the_patch_embedding_is_a_convolution(linears):
    assert [linear.name for linear in linears if linear.kind == "conv"] == ["patch_embed.proj"]


def test_weights_and_biases_are_those_of_the_checkpoint(linears, small_checkpoint):
    state = load_file(small_checkpoint)
    for linear in linears:
        weight = state[f"{linear.name}.weight"]
        np.testing.assert_array_equal(linear.weight, weight.T if linear.kind == "matmul" else weight)
        np.testing.assert_array_equal(linear.bias, state[f"{linear.name}.bias"])


def test_out_axis_is_the_axis_of_the_output_channels(linears, small_checkpoint):
    state = load_file(small_checkpoint)
    found = {linear.name: linear.weight.shape[linear.out_axis] for linear in linears}
    assert found == {name: len(state[f"{name}.bias"]) for name in found}


def test_output_is_behind_the_bias(linears):
    producers = {linear.name: linear.output.producer().op_type for linear in linears}
    assert producers.pop("patch_embed.proj") == "Conv"
    assert set(producers.values()) == {"Add"}


def test_products_of_attention_are_not_linears(small_export, linears):
    products = [node for node in load_graph(small_export / "model.onnx").graph if node.op_type == "MatMul"]
    assert len(products) == 4 * DEPTH + 1 + 2 * DEPTH
    assert not [linear for linear in linears if linear.name.endswith("attn")]


def test_a_float_graph_has_no_int8_layer(small_export):
    assert count_int8(load_graph(small_export / "model.onnx")) == 0


def two_layers(second, *, outputs=("y",)):
    """x @ w, then the given node."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    product = helper.make_node("MatMul", ["x", "w"], ["product"], name="fc/MatMul")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in outputs]
    constants = [
        numpy_helper.from_array(np.ones((3, 4), np.float32), "w"),
        numpy_helper.from_array(np.ones(4, np.float32), "b"),
        numpy_helper.from_array(np.ones((2, 4), np.float32), "matrix"),
    ]
    return ir.from_proto(helper.make_model(helper.make_graph([product, second], "test", [x], values, constants)))


@pytest.mark.parametrize("order", [["product", "b"], ["b", "product"]], ids=str)
def test_a_bias_is_found_on_either_side_of_the_add(order):
    [linear] = find_linears(two_layers(helper.make_node("Add", order, ["y"])))
    np.testing.assert_array_equal(linear.bias, np.ones(4, np.float32))
    assert linear.bias_add is not None


@pytest.mark.parametrize(
    ("second", "outputs"),
    [
        (helper.make_node("Relu", ["product"], ["y"]), ("y",)),
        (helper.make_node("Add", ["product", "matrix"], ["y"]), ("y",)),
        (helper.make_node("Add", ["product", "product"], ["y"]), ("y",)),
        (helper.make_node("Add", ["product", "b"], ["y"]), ("y", "product")),
    ],
    ids=["no add", "matrix", "itself", "product is read elsewhere"],
)
def test_an_add_that_is_no_bias_is_not_taken_for_one(second, outputs):
    [linear] = find_linears(two_layers(second, outputs=outputs))
    assert (linear.name, linear.bias, linear.bias_add) == ("fc", None, None)
    assert linear.output.name == "product"


@pytest.mark.parametrize("numbers", [1, 5])
def test_a_bias_has_a_number_for_each_output_channel(numbers):
    """One more column than there are: a runtime's linear would refuse it, or make more channels of one."""
    b = Builder()
    width = 1 if numbers > 1 else 4
    product = b.add("MatMul", b.input("x", ["batch", 3, 4]), weighted(0)[:, :width])
    [linear] = find_linears(ir.from_proto(b.model(b.add("Add", product, weighted(1).ravel()[:numbers]))))
    assert (linear.bias, linear.bias_add) == (None, None)


def test_a_convolution_whose_bias_is_computed_is_left_alone():
    """Its bias would be lost where rounding corrects it."""
    b = Builder()
    x, sizes = b.input("x", ["batch", 4, 3, 3]), b.input("y", [2, 4])
    bias = b.add("ReduceMean", sizes, np.array([0]), keepdims=0)
    model = ir.from_proto(b.model(b.add("Conv", x, weighted(0)[:, :, None, None], bias)))
    assert find_linears(model) == []
    assert list(unplaced_weights(model).values()) == ["its bias is not constant"]


def test_two_linears_of_one_module_have_two_names():
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 4]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="two")
    for name in ("block.attn/MatMul", "block.attn/MatMul_1"):
        weight = ir.Value(name=f"{name}.weight", const_value=ir.tensor(np.eye(4, dtype=np.float32), name=f"{name}.w"))
        graph.register_initializer(weight)
        graph.append(ir.node("MatMul", [x, weight], name=name))
    names = [linear.name for linear in find_linears(ir.Model(graph, ir_version=10))]
    assert len(set(names)) == 2 and all(name.startswith("block.attn") for name in names)


def test_a_product_and_a_convolution_of_one_module_are_told_apart():
    b = Builder()
    x = b.input("x", ["batch", 4, 3, 3])
    y = b.add("Conv", b.add("Conv", x, weighted(0)[:, :, None, None]), weighted(1)[:, :, None, None])
    y = b.add("MatMul", b.add("MatMul", b.add("Transpose", y, perm=[0, 2, 3, 1]), weighted(2)), weighted(3))
    model = ir.from_proto(b.model(y, rank=4))
    names = ["m/Conv", "m", "m/MatMul", "m/MatMul_2"]
    for linear, name in zip(find_linears(model), names, strict=True):
        linear.node.name = name
    name_apart(model)
    found = [linear.name for linear in find_linears(model)]
    assert found[0] == "m"
    assert len(set(found)) == 4
    assert len({node.name for node in model.graph}) == len(model.graph)


def weighted(number):
    """Weights [4, 4], seeded."""
    return np.random.default_rng(number).standard_normal((4, 4)).astype(np.float32)


def test_weights_that_are_of_no_linear_are_listed_with_the_reason():
    b = Builder()
    x = b.input("x", ["batch", 4, 4])
    y = b.add("MatMul", x, weighted(0))
    y = b.add("MatMul", y, weighted(1)[None])
    y = b.add("MatMul", weighted(2), y)
    y = b.add("Einsum", y, weighted(3), equation="bij,jk->bik")
    half = b.add("MatMul", b.add("Cast", y, to=TensorProto.FLOAT16), weighted(4).astype(np.float16))
    y = b.add("Reshape", b.add("Cast", half, to=TensorProto.FLOAT), np.array([-1, 4]))
    y = b.add("Gemm", y, weighted(5), alpha=2.0)
    y = b.add("Mul", y, weighted(6)[:1])  # a scale is no weight
    model = ir.from_proto(b.model(b.add("MatMul", y, b.add("Transpose", y, perm=[1, 0])), rank=2))
    assert len(find_linears(model)) == 1
    assert list(unplaced_weights(model).values()) == [
        "its weights have 3 axes",
        "its weights are the left operand",
        "Einsum is not quantized",
        "its weights are float16, not float32",
        "Gemm is not quantized",
    ]


def test_weights_inside_a_branch_are_listed():
    product = helper.make_node("MatMul", ["x", "inner"], ["y"], name="then/MatMul")
    inner = numpy_helper.from_array(weighted(0), "inner")
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    then = helper.make_graph([product], "then", [], [y], [inner])
    same = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "else", [], [y])
    branch = helper.make_node("If", ["condition"], ["z"], then_branch=then, else_branch=same)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 4])
    condition = helper.make_tensor_value_info("condition", TensorProto.BOOL, [])
    graph = helper.make_graph([branch], "graph", [x, condition], [z])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    assert unplaced_weights(model) == {"then": "it is in a branch or loop"}


def test_all_weights_of_a_vit_are_of_linears(small_export):
    assert unplaced_weights(load_graph(small_export / "model.onnx")) == {}

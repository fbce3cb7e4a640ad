"""Counted work is what PyTorch counts on the model, and what a ViT's sizes say; what is not known is an error."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import SMALL_MODEL
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.work import count_work
from vitdeploy.graph.io.files import load_graph

WIDTH, DEPTH, TOKENS, PATCH, CLASSES, IMAGE = 32, 2, 17, 8, 10, 32


def closed_form(batch):
    """Of a ViT: patches, query, key and value, scores and their products with values, projection, MLP, head."""
    patches = (TOKENS - 1) * PATCH * PATCH * WIDTH
    block = TOKENS * WIDTH * (4 * WIDTH + 8 * WIDTH) + 2 * TOKENS * TOKENS * WIDTH
    return 2 * batch * (patches + DEPTH * block + WIDTH * CLASSES)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_vit_is_counted_as_pytorch_and_its_sizes_say(small_export, small_checkpoint, batch):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from vitdeploy.models.load import load_model
    from vitdeploy.models.source import Source

    model = load_model(Source(SMALL_MODEL, small_checkpoint)).module
    # As products and a softmax: PyTorch does not count its fused attention on CPUs.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.zeros(batch, 1, IMAGE, IMAGE))
    work = count_work(load_graph(small_export / "model.onnx"), batch)
    assert work.flops == {"fp32": counter.get_total_flops()} == {"fp32": closed_form(batch)}
    assert work.input_bytes == batch * IMAGE * IMAGE
    assert work.output_bytes == 4 * batch * CLASSES
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    assert parameters <= work.weight_bytes <= parameters + 2000  # shapes, mean and deviation are constants too
    assert work.bytes == work.weight_bytes + work.input_bytes + work.output_bytes


def model_of(nodes, inputs, outputs, constants=(), domains=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants],
    )
    opsets = [helper.make_opsetid("", 20), *(helper.make_opsetid(each, 1) for each in domains)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_convolutions_are_counted_as_pytorch_counts_them(data):
    import torch

    groups = data.draw(st.sampled_from([1, 2]))
    inside, outside = (groups * data.draw(st.integers(1, 3)) for _ in range(2))
    kernel, stride, pad = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
    turned = data.draw(st.booleans())
    kind = torch.nn.ConvTranspose2d if turned else torch.nn.Conv2d
    layer = kind(inside, outside, kernel, stride, pad, groups=groups)
    image = torch.zeros(2, inside, 7, 6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        result = layer(image)
    node = helper.make_node(
        *("ConvTranspose" if turned else "Conv", ["x", "w"], ["y"]),
        **{"group": groups, "strides": [stride] * 2, "pads": [pad] * 4, "kernel_shape": [kernel] * 2},
    )
    weight = layer.weight.detach().numpy()
    found = count_work(model_of([node], {"x": image.shape}, {"y": result.shape}, [("w", weight)]), 2)
    assert found.flops == {"fp32": counter.get_total_flops()}


def test_gemm_and_attention_of_onnx_runtime_are_counted():
    weight = np.zeros((5, 4), np.float32)
    gemm = helper.make_node("Gemm", ["x", "w"], ["y"], transA=1, transB=1)
    assert count_work(model_of([gemm], {"x": [4, 3]}, {"y": [3, 5]}, [("w", weight)]), 1).flops == {
        "fp32": 2 * 3 * 4 * 5
    }
    fused = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", num_heads=2)
    tensors = {"q": ["batch", 3, 8], "k": ["batch", 7, 8], "v": ["batch", 7, 6]}
    model = model_of([fused], tensors, {"y": ["batch", 3, 6]}, domains=["com.microsoft"])
    assert count_work(model, 5).flops == {"fp32": 2 * 5 * 3 * 7 * (8 + 6)}


def test_products_of_integers_are_counted_apart():
    """Between DequantizeLinear nodes, whose zero points say the type; a float input is quantized by the runtime."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["e"]),
        helper.make_node("MatMul", ["d", "e"], ["y"]),
        helper.make_node("MatMul", ["y", "e"], ["v"]),
        helper.make_node("MatMul", ["v", "f"], ["u"]),
    ]
    constants = [("s", np.float32(1)), ("z", np.uint8(0)), ("w", np.zeros((4, 4), np.int8))]
    constants.append(("f", np.zeros((4, 4), np.float32)))
    model = model_of(nodes, {"x": ["n", 4]}, {"u": ["n", 4]}, constants)
    work = count_work(model, 3)
    assert work.flops == {"int8": 2 * 2 * 3 * 16, "fp32": 2 * 3 * 16}
    assert work.weight_bytes == 16 + 1 + 4 + 64


@pytest.mark.parametrize(
    ("node", "named"),
    [
        (helper.make_node("Einsum", ["x", "w"], ["y"], "e", equation="ij,jk->ik"), "Einsum e"),
        (helper.make_node("Attention", ["x", "w", "w"], ["y"], "a", domain="com.microsoft"), "Attention a"),
        (helper.make_node("Mystery", ["x", "w"], ["y"], "m", domain="mine"), "Mystery m"),
    ],
)
def test_what_is_not_known_to_have_no_products_is_an_error(node, named):
    model = model_of(
        [node], {"x": [2, 4]}, {"y": [2, 4]}, [("w", np.zeros((4, 4), np.float32))], ["com.microsoft", "mine"]
    )
    with pytest.raises(GraphError, match="cannot be counted") as caught:
        count_work(model, 1)
    assert caught.value.found == named


def test_sizes_that_depend_on_more_than_the_batch_are_an_error():
    weight = [("w", np.zeros((4, 4), np.float32))]
    product = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    free = model_of(product, {"x": ["batch", "length", 4]}, {"y": ["batch", "length", 4]}, weight)
    with pytest.raises(GraphError, match="cannot be counted"):
        count_work(free, 1)
    nameless = model_of(product, {"x": ["batch", None, 4]}, {"y": None}, weight)
    with pytest.raises(GraphError, match="cannot be counted"):
        count_work(nameless, 1)


def test_shapes_that_the_file_lacks_are_inferred(small_export):
    proto = onnx.load(small_export / "model.onnx")
    expected = count_work(ir.from_proto(proto), 2)
    del proto.graph.value_info[:]
    assert count_work(ir.from_proto(proto), 2) == expected

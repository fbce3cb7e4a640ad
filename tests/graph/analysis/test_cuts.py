"""Tensors that a graph can be cut at, and the parts between them."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tests.graph.small_graphs import WIDTH, Builder, block
from vitdeploy.graph.analysis.prunable import changed_tensors, part, single_cuts
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.io.files import load_graph

TOKENS = 5


@pytest.fixture(scope="module")
def model(small_export):
    return load_graph(small_export / "model.onnx")


def run(model, feeds):
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = {value.name for value in session.get_inputs()}
    return session.run(None, {name: array for name, array in feeds.items() if name in expected})


def separates(model, cut):
    """By search: without the node that makes `cut`, no output depends on what the input holds."""
    reached = {str(value.name) for value in model.graph.inputs}
    for node in model.graph:
        if node.op_type != "Shape" and any(value is not None and value.name in reached for value in node.inputs):
            reached |= {str(value.name) for value in node.outputs if value.name != cut}
    return not reached & {str(value.name) for value in model.graph.outputs}


def test_the_cuts_of_a_vit_are_all_tensors_that_separate_input_from_outputs(model):
    found = single_cuts(model)
    [image], outputs = model.graph.inputs, {str(value.name) for value in model.graph.outputs}
    expected = [
        str(value.name)
        for node in model.graph
        for value in node.outputs
        if value.dtype == ir.DataType.FLOAT and value.shape[0] == image.shape[0] and value.name not in outputs
        if separates(model, value.name)
    ]
    assert found == expected
    residuals = [name for name in found if name.startswith("blocks.")]
    assert len(residuals) >= 3


def test_what_reads_only_the_size_of_the_input_does_not_bridge_a_cut():
    b = Builder()
    x = b.op("Relu", "x", name="first")
    size = b.op("Shape", "x", start=0, end=1)
    rows = b.op("Expand", b.constant(b.random(1, WIDTH)), b.op("Concat", size, b.ints(WIDTH), axis=0))
    model = b.model({"x": ["batch", WIDTH]}, b.op("Add", x, rows))
    assert single_cuts(model) == ["first"]
    behind = part(model, ["first"], [str(model.graph.outputs[0].name)], 2)
    assert [str(value.name) for value in behind.graph.inputs] == ["x", "first"]  # its size is needed


def test_two_paths_have_no_cut_between_them():
    b = Builder()
    joined = b.op("Add", b.op("Relu", "x"), b.op("Neg", "x"), name="joined")
    assert single_cuts(b.model({"x": ["batch", WIDTH]}, b.op("Neg", joined))) == ["joined"]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_parts_before_and_behind_a_cut_are_the_whole(model, batch):
    [image], outputs = model.graph.inputs, [str(value.name) for value in model.graph.outputs]
    pixels = np.random.default_rng(0).integers(0, 256, (batch, *image.shape[1:]), dtype=np.uint8)
    whole = run(model, {str(image.name): pixels})
    cuts = single_cuts(model)
    for cut in cuts[:: max(len(cuts) // 3, 1)]:
        first, second = part(model, [], [cut], batch), part(model, [cut], outputs, batch)
        assert len(first.graph) + len(second.graph) <= len(model.graph)
        [value] = run(first, {str(image.name): pixels})
        assert second.graph.inputs[0].shape == value.shape
        for ours, expected in zip(run(second, {cut: value}), whole, strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_a_part_takes_only_what_it_needs(model):
    first, second, *_ = single_cuts(model)
    [output] = [str(value.name) for value in model.graph.outputs]
    assert [str(value.name) for value in part(model, [first, second], [output], 1).graph.inputs] == [second]


def test_folds_change_tensors_up_to_the_next_linear():
    def made():
        b = Builder()
        return b.model({"x": ["batch", TOKENS, WIDTH]}, block(b, "x", TOKENS))

    model, placement = made(), made()
    assert changed_tensors(placement, model) == set()
    [norm] = [node for node in placement.graph if node.name == "norm2/LayerNormalization"]
    norm.inputs[1].const_value = ir.tensor(norm.inputs[1].const_value.numpy() * 2)
    [weight] = [value for name, value in placement.graph.initializers.items() if name == "mlp.fc1.weight_t"]
    weight.const_value = ir.tensor(weight.const_value.numpy() / 2)
    assert changed_tensors(placement, model) == {"norm2/LayerNormalization", "mlp.fc1/MatMul"}


def test_a_bias_that_came_by_a_fold_is_still_to_come_at_the_output_of_the_linear():
    def made():
        b = Builder()
        x = b.linear("x", WIDTH, WIDTH, "first", bias=False)
        return b.model({"x": ["batch", WIDTH]}, b.op("Relu", b.op("Relu", x, name="next"), name="last"))

    model, placement = made(), made()
    assert single_cuts(model) == ["first/MatMul", "next"]
    editor = Editor(placement)
    [linear] = editor.linears
    editor.set_linear(linear, bias=np.ones(WIDTH))
    assert changed_tensors(placement, model) == {"first/MatMul"}

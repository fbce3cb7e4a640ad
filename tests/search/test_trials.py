"""One model switched layer by layer answers as the placements that it stands for."""

import re

import numpy as np
import onnx_ir as ir
import pytest

from tests.search.planted_layer import PLANTED
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import load_graph
from vitdeploy.quantization.placement import LayerPrecision, choose, place, shape
from vitdeploy.quantization.prepare import prepare
from vitdeploy.search.frame import answers_of
from vitdeploy.search.graphs import LayerChoice
from vitdeploy.search.layers import Shape, shapes_of
from vitdeploy.search.trials import SCALED, opened

FLOAT = LayerChoice(None)


def placed(file, statistics, target):
    model = load_graph(file)
    shape(model, target)
    prepared = prepare(model, statistics, choose(model, target))
    place(model, prepared.ranges, target, weights=prepared.weights)
    return model


def test_everything_in_float_answers_as_the_float_graph(trials):
    everything = {layer.name: FLOAT for layer in trials.layers}
    assert trials.distance(everything).max() < 1e-9


def test_everything_in_int8_answers_as_the_engine_of_the_target(
    trials, planted_file, planted_statistics, planted_yardstick, target
):
    model = placed(planted_file, planted_statistics, target)
    engine = planted_yardstick.distance(answers_of(model, target, "int8", planted_yardstick))
    ours = trials.distance({})
    assert ours.mean() > 1e-4
    np.testing.assert_allclose(ours, engine, rtol=0.2)


def test_mends_answer_as_their_placement(trials, planted_file, planted_statistics, planted_yardstick, target):
    """Another range of one tensor, and hidden channels scaled for any gain, where they are not scaled already."""
    scaled = next((layer.name for layer in trials.layers if layer.scaled is not None), PLANTED)
    can_scale = any(layer.scaled is not None for layer in trials.layers)
    clipped = next(layer for layer in trials.layers if layer.name == "blocks.0.mlp.fc1")
    choices = {clipped.name: LayerChoice(bounds=clipped.bounds.times(0.3))} | (
        {scaled: LayerChoice(SCALED)} if can_scale else {}
    )
    ours = trials.answers({**choices, PLANTED: FLOAT} if scaled != PLANTED else choices)
    model = load_graph(planted_file)
    ignore = [PLANTED] if scaled != PLANTED else []
    mends = [LayerPrecision(clipped.name, "int8", clip=0.3)]
    mends += [LayerPrecision(scaled, "int8", scaled=True)] if can_scale else []
    shape(model, target)
    prepared = prepare(model, planted_statistics, choose(model, target, ignore, mends))
    place(model, prepared.ranges, target, ignore, prepared.weights)
    theirs = answers_of(model, target, "mixed", planted_yardstick)
    plain = trials.answers({PLANTED: FLOAT} if scaled != PLANTED else {})
    near = np.abs(ours["logits"] - theirs["logits"]).max()
    assert near < 0.2 * np.abs(ours["logits"] - plain["logits"]).max()


def test_a_choice_holds_until_the_next_one(trials):
    whole = trials.distance({})
    assert trials.distance({PLANTED: FLOAT}).mean() < 0.5 * whole.mean()
    np.testing.assert_array_equal(trials.distance({}), whole)


def test_layers_that_read_one_tensor_are_known(trials):
    parts = tuple(f"blocks.0.attn.qkv.{part}" for part in ("query", "key", "value"))
    readers = {layer.name: layer.readers for layer in trials.layers}
    assert set(readers[parts[0]]) == set(parts)
    assert readers[PLANTED] == (PLANTED,)


def test_shapes_are_those_at_batch_one(trials, target):
    shapes = {layer.name: layer.shape for layer in trials.layers}
    tokens = 17
    assert shapes["blocks.0.attn.qkv.key"] == Shape(tokens, 32, 32)
    assert shapes[PLANTED].rows == tokens
    if target == "onnxruntime-cpu":
        assert shapes["head"] == Shape(1, 32, 10)
    else:
        layout = shapes["patch_embed.proj"]
        assert (layout.rows, layout.k, layout.n, layout.kind) == (16, 64, 32, "conv")
        assert (layout.convolution.kernel, layout.convolution.strides) == ((8, 8), (8, 8))


def test_a_layer_that_was_not_calibrated_is_refused(planted_file, planted_yardstick, planted_statistics):
    few = dict(planted_statistics)
    few.pop(next(str(each.input.name) for each in find_linears(load_graph(planted_file)) if each.name == PLANTED))
    with (
        pytest.raises(GraphError, match=f"the input of {PLANTED} was not calibrated"),
        opened(load_graph(planted_file), few, "openvino-cpu", planted_yardstick),
    ):
        pass


def test_an_axis_that_is_free_beside_the_batch_is_refused(planted_file):
    model = load_graph(planted_file)
    [value] = model.graph.inputs
    value.shape = ir.Shape(["batch", "height", *list(value.shape)[2:]])
    with pytest.raises(GraphError, match=r"the input size of .* is unknown"):
        shapes_of(model, [linear.name for linear in find_linears(model)])


def test_a_convolution_that_pads_by_itself_is_refused(planted_file):
    model = load_graph(planted_file)
    [convolution] = [linear.node for linear in find_linears(model) if linear.kind == "conv"]
    convolution.attributes["auto_pad"] = ir.AttrString("auto_pad", "SAME_UPPER")
    with pytest.raises(GraphError, match=re.escape("patch_embed.proj has automatic padding")):
        shapes_of(model, ["patch_embed.proj"])

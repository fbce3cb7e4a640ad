"""What cannot be prepared or exported is refused, with the reason and the way out."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from tests.qat.conftest import TARGETS
from vitdeploy import qat
from vitdeploy.errors import CapabilityError, ExportError, GraphError, InputError, NonFiniteWeightsError
from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph, set_metadata
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.qat import float_graph as float_graph_of
from vitdeploy.qat import prepared as preparing
from vitdeploy.qat.layers import LayerPiece
from vitdeploy.qat.plan import check_same
from vitdeploy.qat.trained import placed_file


@pytest.fixture(scope="module")
def graph(placed):
    return placed[TARGETS[0]]


def refused(kind, *words):
    return pytest.raises(kind, match="(?s)" + ".*".join(words))


@pytest.fixture(scope="module")
def own(prepared):
    return prepared[TARGETS[0]]


def test_modules_that_are_wrapped_or_prepared_are_refused(net, graph, own):
    with refused(InputError, "already prepared", "blocks.0.qkv"):
        qat.prepare(own, graph)
    with refused(InputError, "wrapped by DataParallel", r"prepare\(model.module"):
        qat.prepare(nn.DataParallel(net), graph)
    with refused(InputError, "wrapped by OptimizedModule", r"prepare\(model._orig_mod"):
        qat.prepare(torch.compile(net), graph)
    with refused(InputError, "is not prepared", "Net"):
        qat.export(net)
    with refused(InputError, "not in float32", "in float16", "autocast"):
        qat.prepare(copy.deepcopy(net).half(), graph)


def changed(graph, file, **metadata):
    model = load_graph(graph.file)
    set_metadata(model, dataclasses.replace(get_metadata(model, ""), **metadata))
    save_graph(model, file)
    return file


def test_graphs_without_int8_that_can_be_trained_are_refused(net, graph, float_graph, tmp_path):
    with refused(GraphError, "is not an INT8 graph", "precision float32"):
        qat.prepare(net, float_graph)
    with refused(InputError, "target applies to bundles only"):
        qat.prepare(net, graph, target="openvino-cpu")
    with refused(
        CapabilityError, "quantization-aware training does not support tensorrt", "openvino-cpu or onnxruntime-cpu"
    ):
        qat.prepare(net, changed(graph, tmp_path / "typed.onnx", target="tensorrt"))
    with refused(CapabilityError, "does not support models of several graphs", "sequence"):
        qat.prepare(net, changed(graph, tmp_path / "several.onnx", task="sequence"))


def test_another_module_is_refused(net, graph):
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.blocks[1].fc1.weight.normal_()
    with refused(GraphError, "the weights of model.blocks.1.fc1 differ", "a difference of .* %"):
        qat.prepare(other, graph)


def test_a_graph_of_another_module_is_refused(net, graph, tmp_path, monkeypatch):
    model = load_graph(graph.file)
    next(node for node in model.graph if node.op_type == "LayerNormalization").name = "another"
    save_graph(model, tmp_path / "other.onnx")
    monkeypatch.setattr(float_graph_of, "_candidates", lambda: [OptimizeOptions()])
    with refused(
        GraphError, "differs from the graph that was quantized", "another only in the graph; .* only in the module"
    ):
        qat.prepare(net, tmp_path / "other.onnx")


class Loose(nn.Linear):
    """A class of its own."""


def test_subclasses_are_refused(net, graph):
    other = copy.deepcopy(net)
    other.blocks[0].fc1.__class__ = Loose
    with refused(GraphError, "model.blocks.0.fc1 is a subclass", "Loose"):
        qat.prepare(other, graph)


def test_a_step_that_is_no_number_is_refused(own):
    own = copy.deepcopy(own)
    with torch.no_grad():
        next(iter(qat.steps(own).values())).fill_(torch.nan)
    with refused(
        NonFiniteWeightsError,
        "NaN or infinity in 1 of its tensors, 1 of them steps",
        "log_ratio",
        "smaller learning rate",
    ):
        qat.export(own)


def test_a_bundle_without_int8_is_refused(small_bundle):
    with refused(GraphError, "no INT8 engine", "onnxruntime-cpu-fp32"):
        placed_file(small_bundle, None)


def test_a_layer_called_twice_is_refused():
    twice = [LayerPiece(name, "fc", np.arange(4), np.arange(4)) for name in ("fc", "fc_2")]
    with refused(GraphError, "calls fc more than once", "fc, fc_2", "a separate layer for each call"):
        preparing._refuse_layer("fc", nn.Linear(4, 4), twice)


def test_weights_outside_of_layers_are_named(net, graph, monkeypatch):
    match = preparing.match
    monkeypatch.setattr(preparing, "match", lambda *given: {**match(*given), "model.blocks.0.proj": []})
    with refused(
        GraphError, "INT8 layers of the graph without .* in the module: 1", "model.blocks.0.proj", "MultiheadAttention"
    ):
        qat.prepare(net, graph)
    monkeypatch.setattr(preparing, "_refuse_unmatched", lambda *given: None)
    with refused(GraphError, "model.blocks.0.proj, which a fold needs, does not match a layer of the module"):
        qat.prepare(net, graph)


def test_a_placement_of_other_nodes_is_refused(net, graph, tmp_path):
    model = load_graph(graph.file)
    next(node for node in model.graph if node.op_type == "Expand").name = "another"
    save_graph(model, tmp_path / "other.onnx")
    with refused(GraphError, "have different nodes", "only in the placement: another", "without token merging"):
        qat.prepare(net, tmp_path / "other.onnx")


def test_a_module_that_does_not_give_what_its_graph_gives_is_refused(net, own):
    placement = own._vitdeploy_qat.placement
    with refused(ExportError, "the module and its graph give different outputs", "call each layer"):
        check_same(net, net, placement.model, placement, "the module")

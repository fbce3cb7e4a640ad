"""What INT8 costs by gradients: against runs of single layers, and graphs in PyTorch against ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as functional
from scipy import stats
from torch import nn

import vitdeploy as vd
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.edit import constant
from vitdeploy.graph.io.files import load_graph
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search import gradients, graphs
from vitdeploy.search.precision import measure_sensitivity
from vitdeploy.search.trials import opened


@pytest.mark.parametrize("target", ["openvino-cpu", "onnxruntime-cpu"])
def test_estimates_are_near_what_runs_of_single_layers_measure(
    target, planted_file, planted_statistics, planted_yardstick
):
    with opened(load_graph(planted_file), planted_statistics, target, planted_yardstick) as trials:
        costs, impassable = trials.estimated()
        measured = {layer.name: trials.only({layer.name: graphs.LayerChoice()}) for layer in trials.layers}
    assert impassable == () and costs.keys() == measured.keys()
    a, b = (np.array([side[name].mean() for name in measured]) for side in (costs, measured))
    assert stats.spearmanr(a, b)[0] > 0.9
    assert 0.5 < a.sum() / b.sum() < 2


def test_the_vectors_have_the_form_that_the_distance_is_of():
    logits = torch.tensor([[1.0, -0.5, 2.0]]).expand(20_000, 3).requires_grad_()
    drawn = gradients._draw("classification", {"logits": logits}, 1, np.random.default_rng(0))["logits"].numpy()
    p = np.exp([1.0, -0.5, 2.0])
    p /= p.sum()
    np.testing.assert_allclose(drawn.T @ drawn / len(drawn), (np.diag(p) - np.outer(p, p)) / 2, atol=5e-3)
    values = torch.tensor([[3.0, 4.0]]).expand(20_000, 2).requires_grad_()
    other = gradients._draw("depth", {"depth": values}, 1, np.random.default_rng(0))["depth"].numpy()
    np.testing.assert_allclose(other.T @ other / len(other), np.eye(2) / 25, atol=2e-3)


class Everything(nn.Module):
    """Most operators that gradients pass, in forms of several exporters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.first, self.second = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, image):
        x = functional.leaky_relu(self.stem(image))
        x = functional.max_pool2d(x, 3, 2, 1) + functional.avg_pool2d(x, 2)
        x = x * functional.hardsigmoid(functional.adaptive_avg_pool2d(x, 1))
        theta = torch.tensor([[[0.9, 0.1, 0.0], [-0.1, 0.8, 0.1]]]).expand(x.shape[0], 2, 3)
        grid = functional.affine_grid(theta, [x.shape[0], 8, 8, 8], align_corners=False)
        x = functional.grid_sample(x, grid, align_corners=False)
        wide = functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = (wide + functional.interpolate(x, scale_factor=2, mode="nearest"))[:, :, 2:14:3, 1:-3:3]
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], 1, 8), x], 1)
        query, key, value = self.first(self.norm(x)).split(8, -1)
        x = x + (query @ key.transpose(1, 2) / 8**0.5).softmax(-1) @ value
        x = x + functional.gelu(self.second(x)) - functional.gelu(x, approximate="tanh").clamp(-1, 2)
        x = x / x.square().sum(-1, keepdim=True).sqrt() + x.amax(1, keepdim=True).tanh() + x.mean(1, keepdim=True).exp()
        x = torch.where(torch.ones_like(x) > 0, x, -x)[:, torch.tensor([3, -1, 0])].abs().pow(1.5)
        return x.reshape(x.shape[0], -1).log_softmax(-1)


def test_a_graph_in_pytorch_is_the_graph(tmp_path):
    spec = vd.Preprocess(32, (32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    read = vd.model(Everything().eval(), preprocess=spec, task="classification")
    graph = vd.optimize(vd.export(read, tmp_path / "out", progress=False), progress=False)
    [file] = Path(graph.folder).glob("*.onnx")
    model = load_graph(file)
    image = np.random.default_rng(0).integers(0, 256, [2, 32, 32, 3]).astype(np.uint8)
    found = gradients.DifferentiableGraph(model, {}, {})
    outputs, layers = found.run(torch.from_numpy(image))
    with OnnxRuntimeRunner(file, name="graph", batch=2) as runner:
        expected = runner.infer({runner.inputs[0].name: image})
    assert not layers and outputs.keys() == expected.keys()
    for key, each in expected.items():
        np.testing.assert_allclose(outputs[key].numpy(), each, rtol=1e-4, atol=1e-4)
    assert not found.impassable and {node.op_type for node in found.sessions} <= {"Shape", "GatherND", "Gather"}


X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
Y, ONE = X[:, ::-1].copy(), X[:, :1]
INTEGERS = np.array([[[1, 0, -1, 2]]] * 2)
OPERATORS = [
    *(("Cos", [X]), ("Erf", [X]), ("Identity", [X]), ("Log", [abs(X)]), ("Max", [X, Y]), ("Min", [X, Y]), ("Neg", [X])),
    *(("Reciprocal", [X]), ("Relu", [X]), ("Sigmoid", [X]), ("Sin", [X]), ("GlobalAveragePool", [X[:, :, None]])),
    *(("Flatten", [X], {"axis": 2}), ("Gather", [X, np.array([[1, -1]])], {"axis": 1}), ("Where", [X > 0, X, Y])),
    *(("GatherElements", [X, INTEGERS], {"axis": 1}), ("Pad", [X, np.array([1, 0, 2, 0, 1, 0]), np.float32(7)])),
    ("Gemm", [X[0], X[1, :2], X[0, :, :2]], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    *(
        ("ReduceL2", [X, np.array([1])], {"keepdims": 0}),
        ("ReduceMax", [X]),
        ("TopK", [X, np.array([2])], {"axis": 1}, 2),
    ),
    *(("Squeeze", [ONE, np.array([1])]), ("Squeeze", [ONE]), ("Split", [X], {"axis": 2, "num_outputs": 3}, 3)),
    *(
        ("Slice", [X, np.array([-1]), np.array([-(2**62)]), np.array([2]), np.array([-2])]),
        ("Clip", [X, np.float32(0)]),
    ),
    *(("Div", [np.array([7, -7]), np.array([2, 2])]), ("Transpose", [X]), ("Unsqueeze", [X, np.array([0, -1])])),
]


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case[0])
def test_an_operator_is_onnx_runtimes(case):
    name, arrays, *others = case
    attributes, count = [*others, *({}, 1)[len(others) :]]
    node = ir.node(name, [ir.Value(name=str(place)) for place in range(len(arrays))], attributes, num_outputs=count)
    tensors = [torch.from_numpy(np.array(array)) for array in arrays]
    found = gradients._OPERATORS[name](gradients._Attributes(node), tensors)
    feeds = {str(place): np.array(array) for place, array in enumerate(arrays)}
    expected = gradients._alone(node, tensors, 20).run(None, feeds)
    for ours, theirs in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-6)


def test_layers_in_front_of_an_operator_without_a_gradient_are_measured(
    planted_file, planted_statistics, planted_yardstick
):
    """A slope of one changes no value, and PRelu is none of the operators that gradients pass."""
    model = load_graph(planted_file)
    [before] = [linear for linear in find_linears(model) if linear.name == "blocks.1.attn.proj"]
    old, slope = before.output, constant(np.array([1.0], np.float32), "slope")
    model.graph.register_initializer(slope)
    node = ir.node("PRelu", [old, slope], name="none/PRelu")
    new = node.outputs[0]
    new.name, new.type, new.shape = "none/PRelu", old.type, old.shape
    ir.convenience.replace_all_uses_with(old, new)
    node.replace_input_with(0, old)
    model.graph.insert_after(before.bias_add or before.node, node)
    with opened(model, planted_statistics, "onnxruntime-cpu", planted_yardstick) as trials:
        costs, impassable = trials.estimated()
        found = measure_sensitivity(trials, "onnxruntime-cpu")
        front = trials.only({"blocks.0.mlp.fc2": graphs.LayerChoice()})
    assert impassable == found.impassable == ("PRelu",)
    assert "blocks.1.mlp.fc2" in costs and not {"blocks.0.mlp.fc2", "blocks.1.attn.proj"} & costs.keys()
    measured = {layer.cost.name: layer.cost.distance for layer in found.layers}
    assert measured["blocks.0.mlp.fc2"] == pytest.approx(float(front.mean()))

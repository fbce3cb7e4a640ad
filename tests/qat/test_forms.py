"""Forms of a graph that are not the usual one; VITDEPLOY_TEST_DEPTH=1 runs them."""

import os

import pytest
import torch
from torch import nn

import vitdeploy as vd
from tests.qat.conftest import PREPROCESS, Net
from vitdeploy import qat
from vitdeploy.qat import float_graph
from vitdeploy.qat import prepared as preparing

DEEP = pytest.mark.skipif("VITDEPLOY_TEST_DEPTH" not in os.environ, reason="VITDEPLOY_TEST_DEPTH=1 runs it")


class Separate(nn.Module):
    """Query, key and value of a linear each."""

    def __init__(self, merged: nn.Linear) -> None:
        super().__init__()
        width = merged.in_features
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        with torch.no_grad():
            for number, linear in enumerate(self.linears):
                linear.weight.copy_(merged.weight[number * width :][:width])
                linear.bias.copy_(merged.bias[number * width :][:width])

    def forward(self, x):
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def separate(net):
    other = Net()
    other.load_state_dict(net.state_dict())
    for block in other.blocks:
        block.qkv = Separate(block.qkv)
    return other.eval()


@DEEP
@pytest.mark.parametrize("qkv", ["merged", "keep", None])
@pytest.mark.parametrize("target", ["onnxruntime-cpu", "openvino-cpu"])
def test_separate_linears_in_every_form_of_the_graph(net, digits, monkeypatch, qkv, target):
    monkeypatch.setattr(preparing, "export_like", float_graph.export_like)
    module = separate(net)
    graph = vd.export(vd.model(module, preprocess=PREPROCESS), progress=False)
    graph = vd.optimize(graph, qkv=qkv, progress=False) if qkv is not None else graph
    int8 = vd.quantize(graph, digits / "calibration", target, num_samples=32, progress=False)
    trained = qat.export(qat.prepare(module, int8))
    assert trained.int8 == int8.int8
    assert trained.document["difference"] < 2e-2

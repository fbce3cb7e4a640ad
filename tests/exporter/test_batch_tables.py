"""What depends on the batch's size alone is a constant of the graph, and nothing else is."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.graph.small_graphs import operators
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.io.files import save_graph
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.spec import PreprocessSpec

SIZE = (8, 12)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, image):
        return self.head(self.encoded(self.stem(image)).flatten(2).mean(2))


class Positions(Model):
    """A sine table of an all-valid mask, as DETR's descendants compute it."""

    def encoded(self, x):
        mask = torch.ones((len(x), *x.shape[-2:]), dtype=torch.bool)
        y = mask.cumsum(1, dtype=torch.float32) / 7
        return (x + torch.stack([y.sin(), y.cos(), y, 1 - y], 1)).masked_fill(~mask[:, None], 0.0)


class Numbered(Model):
    """Each image of a batch gets another number: no table."""

    def encoded(self, x):
        return x + torch.arange(x.shape[0]).sin()[:, None, None, None]


class Written(Model):
    """A table that an image is written into."""

    def encoded(self, x):
        table = torch.ones((x.shape[0], *x.shape[1:])).cumsum(1)
        before = table * 2
        table[:, 1] += x[:, 0]
        return table + x + before


class Checked(Model):
    def encoded(self, x):
        torch._check_tensor_all(torch.tensor([x.shape[-1]]) == SIZE[1] // 4)
        return x


class Token(Model):
    """Learned, repeated and changed by nothing: an Expand, as it was."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 4, 1, 1))

    def encoded(self, x):
        return torch.cat([self.token.expand(len(x), -1, x.shape[2], -1), x], 3)


@pytest.mark.parametrize(
    ("model", "gone", "left"),
    [
        (Positions, {"CumSum", "Sin", "Cos", "Where", "Expand", "Shape"}, set()),
        (Numbered, set(), {"Shape"}),
        (Written, set(), set()),
        (Checked, {"Equal", "ReduceMin"}, set()),
        (Token, set(), {"Expand"}),
    ],
)
def test_the_graph_is_the_module_at_any_batch(model, gone, left, tmp_path):
    torch.manual_seed(0)
    module, spec = model().eval(), PreprocessSpec(SIZE, SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
    graph = export_graph(
        module, name="model", preprocess=spec, image_size=SIZE, opset=20, batch=None, in_graph=False
    )  # fmt: skip
    found = set(operators(graph))
    assert not found & gone
    assert left <= found
    save_graph(graph, tmp_path / "model.onnx")
    with OnnxRuntimeRunner(tmp_path / "model.onnx", name="model") as runner, torch.no_grad():
        for batch in (1, 2, 5):
            image = torch.randn(batch, 3, *SIZE)
            np.testing.assert_allclose(runner.infer({"image": image.numpy()})["logits"], module(image), atol=1e-5)

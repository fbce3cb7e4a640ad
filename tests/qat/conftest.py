"""A module in the manner of timm, quantized for both runtimes with digits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import vitdeploy as vd
from vitdeploy import qat
from vitdeploy.qat import prepared as preparing

PREPROCESS = vd.Preprocess(32, (32, 32), mean=(0.5,), std=(0.4,))


class Block(nn.Module):
    """Query, key and value in one linear; LayerScale; dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*split.unbind(0)).transpose(1, 2)
        x = x + self.drop(self.scale * self.proj(mixed.reshape(batch, tokens, width)))
        return x + self.drop(self.fc2(functional.gelu(self.fc1(self.norm2(x)))))


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 8, 8)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@pytest.fixture(scope="session")
def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            if name == "blocks.0.fc1.weight":
                parameter[3] *= 10  # a hidden channel that reaches far: it becomes copies
    return model.eval()


@pytest.fixture(scope="session")
def float_graph(net, tmp_path_factory) -> vd.Graph:
    folder = tmp_path_factory.mktemp("qat")
    return vd.optimize(vd.export(vd.model(net, preprocess=PREPROCESS), progress=False), folder / "g", progress=False)


# OpenVINO's form has all that ONNX Runtime's has, and queries, keys and pixels in INT8.
TARGETS = ("openvino-cpu", *(("onnxruntime-cpu",) if "VITDEPLOY_TEST_DEPTH" in os.environ else ()))


@pytest.fixture(scope="session")
def placed(float_graph, digits) -> dict[str, vd.QuantizedGraph]:
    options = {"num_samples": 32, "progress": False, "vnni": True}
    return {name: vd.quantize(float_graph, digits / "calibration", name, **options) for name in TARGETS}


@pytest.fixture(scope="session", autouse=True)
def probed_once(tmp_path_factory) -> Iterator[None]:
    """The probes of all tests, which have the same random weights, are one export."""
    file, export = tmp_path_factory.mktemp("probe") / "probe.onnx", preparing.export_like

    def once(module, placement, to):
        if not file.exists():
            export(module, placement, file)
        shutil.copyfile(file, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "export_like", once)
        yield


@pytest.fixture(scope="session")
def prepared(net, placed) -> dict[str, nn.Module]:
    return {target: qat.prepare(net, graph) for target, graph in placed.items()}

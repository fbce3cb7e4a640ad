"""The original as PyTorch runs it fastest on a GPU: in FP16, compiled, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vitdeploy.errors import CapabilityError
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.reference import TorchRunner
from vitdeploy.runtime.runner import Array

PROVIDER = "PyTorch torch.compile, float16"


class CompiledRunner(TorchRunner):
    """Inputs and outputs are those of `TorchRunner`, float32 in host memory: copies to and from the GPU count.

    The original's module becomes a half-precision one on the device.
    """

    def __init__(self, original: LoadedModel, *, device: str = "cuda") -> None:
        super().__init__(original)
        self.device = device
        self._compiled: Any = None

    def _load(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise CapabilityError(
                "PyTorch here has no CUDA device",
                found=f"torch {torch.__version__}",
                wanted="a build of PyTorch for CUDA, and a GPU",
                fix="install PyTorch for CUDA: https://pytorch.org/get-started/locally",
            )
        super()._load()
        module = self.original.module.to(self.device, torch.float16)
        # "reduce-overhead" replays CUDA graphs, as the engines do that it is compared with. Without `dynamic=False` the
        # kernels of a second batch would be for any batch, and slower.
        self._compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
        self.provider = PROVIDER

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        image = torch.from_numpy(feeds["image"]).to(self.device).to(torch.float16)
        with torch.no_grad():
            result = self._compiled(image)
        tensors = (result,) if isinstance(result, torch.Tensor) else result
        return {spec.name: tensor.float().cpu().numpy() for spec, tensor in zip(self.outputs, tensors, strict=True)}

    def _close(self) -> None:
        self._compiled = None

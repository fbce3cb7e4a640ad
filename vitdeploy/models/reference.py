"""The original PyTorch model behind the same life-cycle as every engine: the reference of all comparisons."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vitdeploy.models.source import Original
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import TensorSpec

PROVIDER = "PyTorch eager"


class TorchRunner(Runner):
    """Runs the original module in eager mode, float32, on the CPU.

    Input "image": float32 [batch, channels, height, width], normalised. Output "logits": float32 [batch, classes].
    """

    def __init__(self, original: Original, *, threads: int = 0) -> None:
        super().__init__("pytorch")
        self.original = original
        self.threads = threads

    def _load(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)
        config = self.original.config
        self.inputs = (TensorSpec("image", "float32", ("batch", config.in_channels, *config.image_size)),)
        self.outputs = (TensorSpec("logits", "float32", ("batch", config.num_classes)),)
        self.provider = PROVIDER

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        with torch.inference_mode():
            logits = self.original.module(torch.from_numpy(feeds["image"]))
        return {"logits": logits.numpy()}

    def _close(self) -> None:
        pass

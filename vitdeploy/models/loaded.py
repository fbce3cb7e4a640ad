"""The original model: what everything else is measured against."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from vitdeploy.models.family import Signature
from vitdeploy.spec import PreprocessSpec


@dataclass(frozen=True)
class LoadedModel:
    """A PyTorch module in evaluation mode and float32, with everything that is known of it.

    `family` is a row of the catalog, or "timm", "transformers", "function", "module" (in memory) for a module that is
    not ours. `preprocess` is None if it takes no images. `labels` are the checkpoint's own class names, if it has
    any. `notes` say what was inferred, converted or left out, one per line.
    """

    name: str
    family: str
    module: nn.Module
    signature: Signature
    preprocess: PreprocessSpec | None
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def classes(self) -> int | None:
        """The number of classes of a classifier; None for any other task."""
        size = self.signature.outputs[0].shape[-1]
        return size if self.signature.task == "classification" and isinstance(size, int) else None

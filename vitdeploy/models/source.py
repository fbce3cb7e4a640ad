"""What a user says of a model: plain data, without PyTorch. `load` builds the model of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """Where a model comes from: plain data, that a measuring process can be given too.

    `image_size` is (height, width), other than the checkpoint's. `heads`: for a bare state dict that cannot say it.
    `text_features`: a .npy of float32 [classes, width], which makes a CLIP or SigLIP tower a zero-shot classifier.
    `function` is `package.module:function`, and comes from the command line only; it must return the weights of the
    digest `weights` where that is given. `program` is a file that `external.program` wrote of a module in memory.
    `only_batch`: an ONNX file is taken at that.
    """

    model: str | None = None
    checkpoint: Path | None = None
    image_size: tuple[int, int] | None = None
    heads: int | None = None
    text_features: Path | None = None
    function: str | None = None
    weights: str | None = None
    program: Path | None = None
    only_batch: int | None = None

    @property
    def name(self) -> str:
        file = self.checkpoint.name if self.checkpoint else self.program.stem if self.program else "model"
        return self.function or self.model or file

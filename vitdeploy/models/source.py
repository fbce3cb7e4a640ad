"""The user's description of a model: plain data, without PyTorch. `load` builds the model from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitdeploy.spec import PreprocessSpec, Task


@dataclass(frozen=True)
class Source:
    """Where a model comes from: plain data, which can also be passed to a measuring process.

    `image_size` is (height, width), other than the checkpoint's. `preprocess`: in place of what the model's own files
    say, which is then not read. `heads`: for a bare state dict that cannot say it.
    `text_features`: a .npy of float32 [classes, width], which makes a CLIP or SigLIP tower a zero-shot classifier.
    `function` is `package.module:function`, and comes from the command line only; it must return the weights of the
    digest `weights` if that is given. `only_batch`: the fixed batch size for an ONNX file.
    `module`: the file of a module in memory, which this user's own process has just written. `task`: what the outputs
    are to be taken for, where they do not say it.
    `bind`: "NAME=VALUE" for each further input of an ONNX file, see `graph.io.bound`.
    `normal`: the folder of normal images of a model of anomalies, and `memory` the file of what was fitted on them.
    """

    model: str | None = None
    checkpoint: Path | None = None
    image_size: tuple[int, int] | None = None
    heads: int | None = None
    text_features: Path | None = None
    function: str | None = None
    weights: str | None = None
    only_batch: int | None = None
    module: Path | None = None
    task: Task | None = None
    normal: Path | None = None
    memory: Path | None = None
    preprocess: PreprocessSpec | None = None
    bind: tuple[str, ...] = ()

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) that is asked for: that of `image_size`, else of `preprocess`."""
        return self.image_size or (self.preprocess.crop if self.preprocess is not None else None)

    @property
    def name(self) -> str:
        if self.module is not None:
            return self.module.stem
        return self.function or self.model or (self.checkpoint.name if self.checkpoint else "model")

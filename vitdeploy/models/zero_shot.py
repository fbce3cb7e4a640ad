"""Zero-shot classification with an image tower: the text features of the class names as a constant matrix.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021 (arXiv
2103.00020), section 3.1.2: logits = scale * (image / |image|) (text / |text|)^T.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.original import Original
from vitdeploy.spec import TensorSpec

# exp(t) at the end of CLIP's training, where t is clipped to log 100. It orders no two classes differently.
SCALE = 100.0


class ZeroShotClassifier(nn.Module):
    """float32 [b, classes] of a tower's features: cosines with the rows of `text`, times CLIP's scale."""

    text: Tensor

    def __init__(self, tower: nn.Module, text: Tensor) -> None:
        super().__init__()
        self.tower = tower
        # Transposed and scaled once, so that the graph has one plain linear.
        self.register_buffer("text", (SCALE * text / text.norm(dim=1, keepdim=True)).T.contiguous())

    def forward(self, image: Tensor) -> Tensor:
        outputs = self.tower(image)
        features = outputs if isinstance(outputs, Tensor) else outputs[0]
        return (features / features.norm(dim=1, keepdim=True)) @ self.text


def with_text_features(original: Original, path: Path) -> Original:
    """The classifier of a tower and a file of text features, float32 [classes, width] (.npy).

    Raises:
        MissingFileError: no such file.
        CheckpointError: the model gives no features, or the matrix does not fit them.
    """
    if not path.is_file():
        raise MissingFileError(f"no text features at {path}", wanted="a .npy file, float32 [classes, width]")
    output = original.signature.outputs[0]
    if original.signature.task == "sequence" or len(output.shape) != 2:
        raise CheckpointError(
            "text features need a model with image features", found=f"{original.signature.task}: {output}"
        )
    try:
        text = np.load(path, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a .npy file", found=str(error)[:200]) from None
    width = output.shape[1]
    if text.ndim != 2 or text.shape[1] != width or text.dtype.kind != "f" or not np.isfinite(text).all():
        raise CheckpointError(
            f"{path} does not fit the model",
            found=f"{text.dtype} {list(text.shape)}",
            wanted=f"float32 [classes, {width}], finite",
            fix="embed the class names with the text tower of the same checkpoint, and np.save the matrix",
        )
    module = ZeroShotClassifier(original.module, torch.from_numpy(text.astype(np.float32)))
    logits = TensorSpec("logits", "float32", ("batch", len(text)))
    signature = dataclasses.replace(original.signature, task="classification", outputs=(logits,))
    return dataclasses.replace(original, module=module.eval(), signature=signature, labels=())

"""Zero-shot classification with an image tower: the text features of the class names as a constant matrix.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021 (arXiv
2103.00020), section 3.1.2: logits = scale * (image / |image|) (text / |text|)^T.

Its softmax is CLIP's where the checkpoint's scale is 100, as in all of OpenAI's. SigLIP (arXiv 2303.15343, section 3.2)
gives sigmoid(scale * cosine + bias) for each class instead: the order of the classes is the same, the probabilities are
not.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.paths import is_file
from vitdeploy.spec import TensorSpec
from vitdeploy.zip_members import DAMAGED

# exp(t) at the end of CLIP's training, where t is clipped to log 100.
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


def with_text_features(original: LoadedModel, path: Path) -> LoadedModel:
    """The classifier of a tower and a file of text features, float32 [classes, width] (.npy).

    Raises:
        MissingFileError: no such file.
        CheckpointError: the model gives no image features, or the matrix does not fit them.
    """
    if not is_file(path):
        raise MissingFileError(f"no text features at {path}", wanted="a .npy file, float32 [classes, width]")
    output = original.signature.outputs[0]
    if original.signature.task == "sequence" or len(output.shape) != 2:
        raise CheckpointError(
            "text features need a model with image features",
            found=f"{original.signature.task}: {output}",
            wanted="the image tower of CLIP or SigLIP",
        )
    try:
        # Mapped, so that a header that promises more than the file has is found before memory is taken for it.
        text = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        raise CheckpointError(f"{path} is not a .npy file", found=str(error)[:200]) from None
    if not isinstance(text, np.ndarray):
        raise CheckpointError(f"{path} is not a .npy file", found="an .npz archive", fix="np.save the matrix alone")
    width = output.shape[1]
    fits = text.ndim == 2 and len(text) > 0 and text.shape[1] == width and text.dtype.kind == "f"
    lengths = np.linalg.norm(text.astype(np.float64), axis=1) if fits else np.zeros(1)
    if not np.isfinite(lengths).all() or not lengths.all():
        raise CheckpointError(
            f"{path} does not fit the model",
            found=f"{text.dtype} {list(text.shape)}",
            wanted=f"float32 [classes, {width}], finite, no row of zeros",
            fix="embed the class names with the text tower of the same checkpoint, and np.save the matrix",
        )
    module = ZeroShotClassifier(original.module, torch.from_numpy((text / lengths[:, None]).astype(np.float32)))
    logits = TensorSpec("logits", "float32", ("batch", len(text)))
    signature = dataclasses.replace(original.signature, task="classification", outputs=(logits,))
    return dataclasses.replace(original, module=module.eval(), signature=signature, labels=())

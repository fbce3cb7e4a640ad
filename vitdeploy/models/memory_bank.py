"""Anomalies as distances to normal patches: a model of features with a memory bank of theirs.

Source: Roth et al., "Towards Total Recall in Industrial Anomaly Detection", CVPR 2022 (arXiv 2106.08265), PatchCore,
sections 3.1 (features of a neighbourhood) and 3.3 (distances; equation 7, whose softmax is in `runtime.anomaly`).

Deviations, which keep the numbers well: features are those of one layer, a Transformer's last; their mean over the
normal patches is taken off, as |t|^2 - 2 t m + |m|^2 would else be the small difference of large numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.patch_tokens import PatchTokens, patch_tokens
from vitdeploy.runtime.geometry import input_window
from vitdeploy.spec import AnomalySpec, PreprocessSpec, TensorSpec
from vitdeploy.spec.anomaly import DISTANCES, NEIGHBOURS
from vitdeploy.zip_members import DAMAGED

Floats = npt.NDArray[np.float32]
LEAST_SEEN = 0.98  # of an image's area; below it, a note says that the rest is never looked at


@dataclass(frozen=True)
class MemoryBank:
    """What was fitted on normal images.

    memory: float32 [entries, width], features less `mean`, float32 [width]. neighbours: int64 [entries, b], of each
    entry itself and the entries nearest to it. window: patches on a side of the neighbourhood whose mean is a feature.
    threshold, pixel_threshold: the scores above which an image, and a pixel, is anomalous.
    patches: how many the entries were chosen from; asked: how many entries there would be without a cap.
    images: SHA-256 of the normal files, those of the bank and those of the threshold.
    """

    memory: Floats
    mean: Floats
    neighbours: npt.NDArray[np.int64]
    window: int
    threshold: float
    pixel_threshold: float
    patches: int
    asked: int
    images: tuple[str, ...]

    def save(self, path: Path) -> None:
        arrays = {field.name: np.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)}
        np.savez(path, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> MemoryBank:
        """Raises MissingFileError and CheckpointError: no such file, or not one of `save`."""
        if not path.is_file():
            raise MissingFileError(f"no memory bank at {path}", fix="fit it again: --normal DIR")
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {field.name: file[field.name] for field in dataclasses.fields(cls)}
        except DAMAGED as error:
            raise CheckpointError(
                f"{path} is no memory bank", found=str(error)[:200], wanted="the file that a fit wrote"
            ) from None
        plain: dict[str, Any] = {name: int(found[name]) for name in ("window", "patches", "asked")}
        plain |= {name: float(found[name]) for name in ("threshold", "pixel_threshold")}
        plain["images"] = tuple(found["images"].tolist())
        return cls(**{**found, **plain})


def features_of(tokens: Tensor, grid: tuple[int, int], window: int) -> Tensor:
    """Each patch as the mean over the `window` x `window` patches around it that there are (section 3.1).

    tokens: [b, rows * columns, width]; the result has the same shape.
    """
    if window == 1:
        return tokens
    maps = tokens.transpose(1, 2).unflatten(2, grid)
    maps = F.avg_pool2d(maps, window, stride=1, padding=window // 2, count_include_pad=False)
    return maps.flatten(2).transpose(1, 2)


class BankDistances(nn.Module):
    """float32 [b, patches, width] -> of each patch the distance to its nearest entry, [b, patches]; and of the patch
    with the largest of these the distances to its nearest entry and to the entries around that one, [b, k].

    The memory has an axis of 1 for the batch: it is no weight of a linear, and the quantization of these leaves it in
    float. A distance is a difference of products, whose rounding would be as large as itself. On the left of its
    product it would stay in float too, but the least of each patch is found twice as fast along the last axis.
    """

    mean: Tensor
    memory: Tensor
    lengths: Tensor
    neighbours: Tensor

    def __init__(self, bank: MemoryBank) -> None:
        super().__init__()
        memory = torch.from_numpy(bank.memory)
        self.register_buffer("mean", torch.from_numpy(bank.mean))
        self.register_buffer("memory", (-2 * memory).T.contiguous()[None])
        self.register_buffer("lengths", memory.double().square().sum(1).float())
        self.register_buffer("neighbours", torch.from_numpy(bank.neighbours))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        patches = features - self.mean
        squared = patches @ self.memory + self.lengths  # [b, patches, entries], less |patch|^2
        own = (patches * patches).sum(2)
        nearest = (squared.amin(2) + own).relu()
        farthest = nearest.argmax(1, keepdim=True)  # the patch that says most, [b, 1]
        row = squared.gather(1, farthest[:, :, None].expand(-1, -1, squared.shape[2]))[:, 0]
        around = row.gather(1, self.neighbours.index_select(0, row.argmin(1))) + own.gather(1, farthest)
        return nearest.sqrt(), around.relu().sqrt()


class AnomalyModel(nn.Module):
    """float32 [b, channels, height, width] -> "distances" [b, rows, columns] of the patches, and "neighbours" [b, k]:
    see `BankDistances`."""

    def __init__(self, features: PatchTokens, bank: MemoryBank) -> None:
        super().__init__()
        self.features, self.window = features, bank.window
        self.memory_bank = BankDistances(bank)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        grid = self.features.grid
        distances, neighbours = self.memory_bank(features_of(self.features(image), grid, self.window))
        return distances.unflatten(1, grid), neighbours


def with_memory(original: LoadedModel, path: Path) -> LoadedModel:
    """The anomaly model of a model of features and the file of a memory bank.

    Raises:
        MissingFileError, CheckpointError: as `MemoryBank.load` and `patch_tokens`; or the bank is of other features.
    """
    bank = MemoryBank.load(path)
    features, width = patch_tokens(original)
    if bank.memory.shape[1:] != (width,):
        raise CheckpointError(
            f"{path} is the memory bank of another model",
            found=f"features of {bank.memory.shape[1]}",
            wanted=f"{width}, as {original.name} has",
            fix="fit it again: --normal DIR",
        )
    outputs = (
        TensorSpec(DISTANCES, "float32", ("batch", *features.grid)),
        TensorSpec(NEIGHBOURS, "float32", ("batch", bank.neighbours.shape[1])),
    )
    head = AnomalySpec(bank.threshold, bank.pixel_threshold)
    signature = dataclasses.replace(original.signature, task="anomaly", outputs=outputs, postprocess=head, notes=())
    module = AnomalyModel(features, bank).eval()
    notes = (*original.notes, *_unseen(original.preprocess), told(bank))
    return dataclasses.replace(original, module=module, signature=signature, labels=(), notes=notes)


def _unseen(preprocess: PreprocessSpec | None) -> Iterator[str]:
    """A note where images are cropped: what lies outside is never looked at."""
    if preprocess is None:
        return
    seen = []
    for width, height in ((1000, 1000), (1600, 900)):
        window = input_window((width, height), preprocess)
        seen.append((window.right - window.left) * (window.bottom - window.top) / (width * height))
    if min(seen) < LEAST_SEEN:
        yield (
            f"of a square image {seen[0]:.0%} are looked at, of one of 16:9 {seen[1]:.0%}: no defect in the rest, its "
            "border, is ever found (preprocess with resize [height, width] of the crop and fit: stretch sees it all)"
        )


def told(bank: MemoryBank) -> str:
    """The bank in a line, for people."""
    count, width = bank.memory.shape
    cut = f", cut from {bank.asked:,}" if bank.asked > count else ""
    return (
        f"a memory bank of {count:,} of {bank.patches:,} normal patches{cut} ({4e-6 * count * width:.2g} MB); an image "
        f"is anomalous above {bank.threshold:.4g}, a pixel above {bank.pixel_threshold:.4g}: the largest scores of "
        "normal images that the bank does not hold"
    )

"""Anomaly detection by distances to normal patches: a feature extractor with a memory bank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.architectures import swin, vit
from vitdeploy.models.external.adapted import Adapted
from vitdeploy.models.family import LoadedModel
from vitdeploy.models.model_folder.folder import sides
from vitdeploy.runtime.geometry import input_window
from vitdeploy.runtime.tasks.anomaly import DISTANCES, NEIGHBOURS, AnomalySpec
from vitdeploy.spec import PreprocessSpec, TensorSpec
from vitdeploy.zip_members import DAMAGED

# --- The patch tokens of a feature extractor, as a module that returns only these -------------------------------------


Grid = tuple[int, int]


class PatchTokens(nn.Module):
    """float32 [b, channels, height, width] -> [b, rows * columns, width], the tokens of the patches, row by row.

    `tokens` returns them, perhaps after other tokens, which are dropped. `grid`: (rows, columns).
    """

    def __init__(self, model: nn.Module, tokens: Callable[[Any, Tensor], Tensor], grid: Grid) -> None:
        super().__init__()
        self.model, self.tokens, self.grid = model, tokens, grid

    def forward(self, image: Tensor) -> Tensor:
        return self.tokens(self.model, image)[:, -self.grid[0] * self.grid[1] :]


def patch_tokens(original: LoadedModel) -> tuple[PatchTokens, int]:
    """Return the module that computes a model's patch tokens, and their width.

    Raises:
        CheckpointError: the model has no patch tokens, or they do not form a grid over the image.
    """
    module, size = original.module, original.signature.image_size
    tokens = _reader(original)
    if tokens is None:
        outputs = ", ".join(map(str, original.signature.outputs))
        raise CheckpointError(
            f"{original.name} has no patch tokens, which the anomaly task needs",
            found=f"{original.signature.task}: {outputs}",
            expected="a built-in Vision Transformer or Swin, a timm module, or a model with the output "
            "patch_features [batch, patches, width]",
            fix="use the backbone alone, such as DINOv2's Dinov2Model, or wrap it in a module that returns "
            "features [batch, width] and patch_features",
        )
    with torch.no_grad():
        found = tokens(module, torch.zeros(1, original.signature.channels, *size))
    return PatchTokens(module, tokens, _grid(original, found.shape[1], size)).eval(), int(found.shape[2])


def _reader(original: LoadedModel) -> Callable[[Any, Tensor], Tensor] | None:
    module = original.module
    names = [tensor.name for tensor in original.signature.outputs]
    if isinstance(module, vit.VisionTransformer | swin.SwinTransformer):  # also a classifier, without its head
        return lambda model, image: model.encode(image)
    if "patch_features" in names:
        return (lambda model, image: model(image)[1]) if len(names) > 1 else lambda model, image: model(image)
    if isinstance(module, Adapted) and hasattr(module.model, "forward_features") and not module.passings:
        return _timm_features
    return None


def _timm_features(module: Any, image: Tensor) -> Tensor:
    """Return timm's tokens [b, n, d]; they may come as a map [b, d, h, w], or [b, h, w, d] if the width shows it."""
    model: Any = module.model
    found: Tensor = model.forward_features(image)
    if found.ndim == 3:
        return found
    last = found.shape[-1] == model.num_features and found.shape[1] != model.num_features
    return found.flatten(1, 2) if last else found.flatten(2).transpose(1, 2)


def _grid(original: LoadedModel, tokens: int, size: tuple[int, int]) -> Grid:
    """Return (rows, columns) of the patches: from the model, else the only grid with the image's aspect ratio.

    Tokens before the patches are dropped only if the model says how many there are (its registers)."""
    module = original.module
    model: Any = module.model if isinstance(module, Adapted) else module
    config = getattr(model, "config", None)
    if isinstance(module, vit.VisionTransformer):
        return module.config.grid
    before = getattr(model, "num_prefix_tokens", None) or getattr(config, "num_register_tokens", None) or 0
    patch = sides(getattr(config, "patch_size", None) or getattr(getattr(model, "patch_embed", None), "patch_size", 0))
    if patch and (size[0] // patch[0]) * (size[1] // patch[1]) in (tokens, tokens - before):
        return size[0] // patch[0], size[1] // patch[1]
    for count in dict.fromkeys((tokens - before, tokens)):
        for rows in range(1, count + 1):
            if count % rows == 0 and rows * size[1] == count // rows * size[0]:
                return rows, count // rows
    raise CheckpointError(
        f"the tokens of {original.name} do not form a grid over its images",
        found=f"{tokens} tokens for an image of {size[0]}x{size[1]}",
        expected="rows x columns tokens, in the proportions of the image",
        fix="wrap the model in a module whose patch_features are only the patches, or choose another --image-size",
    )


# --- Anomaly detection by distances to normal patches: a feature extractor with a memory bank -------------------------
# Source: Roth et al., "Towards Total Recall in Industrial Anomaly Detection", CVPR 2022 (arXiv 2106.08265), PatchCore,
# sections 3.1 (features of a neighbourhood) and 3.3 (distances; equation 7: its softmax is in `runtime.tasks.anomaly`).
#
# Deviations, for numerical accuracy: features come from one layer, a Transformer's last; their mean over the normal
# patches is subtracted, as |t|^2 - 2 t m + |m|^2 would otherwise be the small difference of large numbers.


Floats = npt.NDArray[np.float32]
LEAST_SEEN = 0.98  # share of an image's area; below it, a note says that the rest is never inspected


@dataclass(frozen=True)
class MemoryBank:
    """A memory bank fitted on normal images.

    memory: float32 [entries, width], features minus `mean`, float32 [width]. neighbours: int64 [entries, b], for each
    entry itself and the entries nearest to it. window: side, in patches, of the neighbourhood that a feature averages.
    threshold, pixel_threshold: the scores above which an image, and a pixel, is anomalous.
    patches: the number of patches that the entries were chosen from; asked: the number of entries without a cap.
    images: SHA-256 of the normal files, both for the bank and for the threshold.
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
        """Read a file that `save` wrote. Raises MissingFileError, or CheckpointError for any other file."""
        if not path.is_file():
            raise MissingFileError(f"no memory bank at {path}", fix="fit it again: --normal DIR")
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {field.name: file[field.name] for field in dataclasses.fields(cls)}
        except DAMAGED as error:
            raise CheckpointError(
                f"{path} is not a memory bank", found=str(error)[:200], expected="a file written by a fit"
            ) from None
        plain: dict[str, Any] = {name: int(found[name]) for name in ("window", "patches", "asked")}
        plain |= {name: float(found[name]) for name in ("threshold", "pixel_threshold")}
        plain["images"] = tuple(found["images"].tolist())
        return cls(**{**found, **plain})


def features_of(tokens: Tensor, grid: tuple[int, int], window: int) -> Tensor:
    """Return each patch as the mean over the existing patches in a `window` x `window` neighbourhood (section 3.1).

    tokens: [b, rows * columns, width]; the result has the same shape.
    """
    if window == 1:
        return tokens
    maps = tokens.transpose(1, 2).unflatten(2, grid)
    maps = F.avg_pool2d(maps, window, stride=1, padding=window // 2, count_include_pad=False)
    return maps.flatten(2).transpose(1, 2)


class BankDistances(nn.Module):
    """float32 [b, patches, width] -> the distance of each patch to its nearest entry, [b, patches]; and, for the patch
    with the largest one, the distances to its nearest entry and to that entry's neighbours, [b, k].

    The memory has a batch axis of 1, so that it is not a linear layer's weight and stays in float: a distance is a
    difference of products, and their INT8 rounding would be as large as the distance. As the left operand it would stay
    in float too, but the minimum of each patch is twice as fast along the last axis.
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
        squared = patches @ self.memory + self.lengths  # [b, patches, entries], minus |patch|^2
        own = (patches * patches).sum(2)
        nearest = (squared.amin(2) + own).relu()
        farthest = nearest.argmax(1, keepdim=True)  # the most anomalous patch, [b, 1]
        row = squared.gather(1, farthest[:, :, None].expand(-1, -1, squared.shape[2]))[:, 0]
        around = row.gather(1, self.neighbours.index_select(0, row.argmin(1))) + own.gather(1, farthest)
        return nearest.sqrt(), around.relu().sqrt()


class AnomalyModel(nn.Module):
    """float32 [b, channels, height, width] -> "distances" [b, rows, columns] of the patches and "neighbours" [b, k];
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
    """Return the anomaly model made of a feature extractor and the file of a memory bank.

    Raises:
        MissingFileError, CheckpointError: as `MemoryBank.load` and `patch_tokens`; or the feature width differs.
    """
    bank = MemoryBank.load(path)
    features, width = patch_tokens(original)
    if bank.memory.shape[1:] != (width,):
        raise CheckpointError(
            f"{path} is the memory bank of another model",
            found=f"features of width {bank.memory.shape[1]}",
            expected=f"width {width}, as in {original.name}",
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
    """Yield a note if images are cropped: the area outside the crop is never inspected."""
    if preprocess is None:
        return
    seen = []
    for width, height in ((1000, 1000), (1600, 900)):
        window = input_window((width, height), preprocess)
        seen.append((window.right - window.left) * (window.bottom - window.top) / (width * height))
    if min(seen) < LEAST_SEEN:
        yield (
            f"the crop covers {seen[0]:.0%} of a square image and {seen[1]:.0%} of a 16:9 one: defects outside it are "
            "never found (for the whole image: preprocess with resize [height, width] of the crop and fit: stretch)"
        )


def told(bank: MemoryBank) -> str:
    """Return a one-line summary of the bank."""
    count, width = bank.memory.shape
    cut = f", reduced from {bank.asked:,}" if bank.asked > count else ""
    return (
        f"memory bank: {count:,} of {bank.patches:,} normal patches{cut} ({4e-6 * count * width:.2g} MB); an image is "
        f"anomalous above {bank.threshold:.4g}, a pixel above {bank.pixel_threshold:.4g}: the largest scores of "
        "normal images outside the bank"
    )


# --- Greedy k-centre selection: few points that lie close to all others -----------------------------------------------
# Source: PatchCore (arXiv 2106.08265), section 3.2 and algorithm 1, after Sener & Savarese (arXiv 1708.00489): the next
# point is the one farthest from those already chosen, by distances in a random projection.


# Dimensions of the projection, as in the paper's code.
PROJECTED = 128
# Points closer to a chosen one than this share of the mean squared length count as duplicates.
SAME = 1e-6


def k_centres(
    points: Tensor, count: int, seed: int, progress: Callable[[int], None] = lambda chosen: None
) -> npt.NDArray[np.int64]:
    """Return the indices of at most `count` of the points, float32 [n, d], in the order of selection; fewer if all
    others are duplicates. `progress` is called after each selection."""
    generator = np.random.RandomState(seed)
    if points.shape[1] > PROJECTED:
        matrix = generator.standard_normal((points.shape[1], PROJECTED)) / np.sqrt(PROJECTED)
        points = points @ torch.from_numpy(matrix.astype(np.float32))
    lengths = points.square().sum(1)
    least = SAME * float(lengths.mean())
    chosen = [int(generator.randint(len(points)))]
    distances = torch.full((len(points),), torch.inf)
    while True:
        last = chosen[-1]
        found = torch.addmv(lengths + lengths[last], points, points[last], alpha=-2)
        torch.minimum(distances, found, out=distances)
        distances[last] = 0.0
        progress(1)
        farthest = int(distances.argmax())
        if len(chosen) >= count or float(distances[farthest]) <= least:
            return np.array(chosen, np.int64)
        chosen.append(farthest)


def nearest_entries(entries: Tensor, count: int, rows: int = 1024) -> npt.NDArray[np.int64]:
    """Return int64 [n, min(count, n)]: for each entry, float32 [n, d], itself and its nearest entries."""
    found = []
    for start in range(0, len(entries), rows):
        part = torch.arange(start, min(start + rows, len(entries)))
        distances = torch.cdist(entries[part], entries)
        distances[torch.arange(len(part)), part] = -1.0
        found.append(distances.topk(min(count, len(entries)), largest=False, sorted=True).indices)
    return np.asarray(torch.cat(found).numpy(), np.int64)

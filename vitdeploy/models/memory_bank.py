"""Anomalies as distances to normal patches: a model of features with a memory bank of theirs."""

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

# --- The patch tokens of a model of features, as a module that gives them alone: a row for each kind of module --------


Grid = tuple[int, int]


class PatchTokens(nn.Module):
    """float32 [b, channels, height, width] -> [b, rows * columns, width], the tokens of the patches, row by row.

    `tokens` gives them, perhaps after others, which are left out. `grid`: (rows, columns).
    """

    def __init__(self, model: nn.Module, tokens: Callable[[Any, Tensor], Tensor], grid: Grid) -> None:
        super().__init__()
        self.model, self.tokens, self.grid = model, tokens, grid

    def forward(self, image: Tensor) -> Tensor:
        return self.tokens(self.model, image)[:, -self.grid[0] * self.grid[1] :]


def patch_tokens(original: LoadedModel) -> tuple[PatchTokens, int]:
    """The module that gives a model's patch tokens, and their width.

    Raises:
        CheckpointError: it has none, or they form no grid over the image.
    """
    module, size = original.module, original.signature.image_size
    tokens = _reader(original)
    if tokens is None:
        outputs = ", ".join(map(str, original.signature.outputs))
        raise CheckpointError(
            f"{original.name} gives no patch tokens, which anomalies are found by",
            found=f"{original.signature.task}: {outputs}",
            expected="a Vision Transformer or Swin of vitdeploy's, timm's own module, or a model with the output "
            "patch_features [batch, patches, width]",
            fix="take the backbone alone, such as DINOv2's Dinov2Model, or wrap it in a module that returns "
            "features [batch, width] and patch_features",
        )
    with torch.no_grad():
        found = tokens(module, torch.zeros(1, original.signature.channels, *size))
    return PatchTokens(module, tokens, _grid(original, found.shape[1], size)).eval(), int(found.shape[2])


def _reader(original: LoadedModel) -> Callable[[Any, Tensor], Tensor] | None:
    module = original.module
    names = [tensor.name for tensor in original.signature.outputs]
    if isinstance(module, vit.VisionTransformer | swin.SwinTransformer):  # of a classifier too, whose head is passed by
        return lambda model, image: model.encode(image)
    if "patch_features" in names:
        return (lambda model, image: model(image)[1]) if len(names) > 1 else lambda model, image: model(image)
    if isinstance(module, Adapted) and hasattr(module.model, "forward_features") and not module.passings:
        return _timm_features
    return None


def _timm_features(module: Any, image: Tensor) -> Tensor:
    """timm's tokens [b, n, d], or a map [b, d, h, w], or [b, h, w, d] of a model that says so by its width."""
    model: Any = module.model
    found: Tensor = model.forward_features(image)
    if found.ndim == 3:
        return found
    last = found.shape[-1] == model.num_features and found.shape[1] != model.num_features
    return found.flatten(1, 2) if last else found.flatten(2).transpose(1, 2)


def _grid(original: LoadedModel, tokens: int, size: tuple[int, int]) -> Grid:
    """(rows, columns) of the patches: as the model says, else the only grid of the image's aspect.

    Tokens before the patches are left out only where the model says how many they are: its registers."""
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
        f"the tokens of {original.name} form no grid over its images",
        found=f"{tokens} tokens of an image of {size[0]}x{size[1]}",
        expected="rows times columns, in the proportions of the image",
        fix="wrap the model in a module whose patch_features are the patches alone, or choose another --image-size",
    )


# --- Anomalies as distances to normal patches: a model of features with a memory bank of theirs -----------------------
# Source: Roth et al., "Towards Total Recall in Industrial Anomaly Detection", CVPR 2022 (arXiv 2106.08265), PatchCore,
# sections 3.1 (features of a neighbourhood) and 3.3 (distances; equation 7: its softmax is in `runtime.tasks.anomaly`).
#
# Deviations, which keep the numbers well: features are those of one layer, a Transformer's last; their mean over the
# normal patches is taken off, as |t|^2 - 2 t m + |m|^2 would else be the small difference of large numbers.


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
                f"{path} is no memory bank", found=str(error)[:200], expected="the file that a fit wrote"
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
            expected=f"{width}, as {original.name} has",
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


# --- Choose few points that lie near all others: greedy k-centre selection --------------------------------------------
# Source: PatchCore (arXiv 2106.08265), section 3.2 and algorithm 1, after Sener & Savarese (arXiv 1708.00489): the next
# point is the one that is farthest from those chosen, by distances in a random projection.


# Dimensions of the projection, as in the paper's code.
PROJECTED = 128
# Points nearer to a chosen one than this share of their mean squared length are taken for the same.
SAME = 1e-6


def k_centres(
    points: Tensor, count: int, seed: int, progress: Callable[[int], None] = lambda chosen: None
) -> npt.NDArray[np.int64]:
    """The indices of at most `count` of the points, float32 [n, d], in the order in which they were chosen; fewer
    where the others are copies of these. `progress` is told after every one."""
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
    """int64 [n, min(count, n)]: of each entry, float32 [n, d], itself and those nearest to it."""
    found = []
    for start in range(0, len(entries), rows):
        part = torch.arange(start, min(start + rows, len(entries)))
        distances = torch.cdist(entries[part], entries)
        distances[torch.arange(len(part)), part] = -1.0
        found.append(distances.topk(min(count, len(entries)), largest=False, sorted=True).indices)
    return np.asarray(torch.cat(found).numpy(), np.int64)

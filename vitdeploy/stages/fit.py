"""Fit a memory bank: the patches of normal images that stand for all of them, and the score above which one is none.

Source: PatchCore (arXiv 2106.08265), section 3.2. The threshold is not the paper's, which has none: it is the largest
score of a fifth of the normal images that the bank does not hold. No image that anything is judged by is asked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vitdeploy.bundle.read import file_sha256
from vitdeploy.data.decoding import Skipped, batches
from vitdeploy.data.folder import Sample, digest
from vitdeploy.errors import CheckpointError, DataError
from vitdeploy.models import load, memory_bank
from vitdeploy.models.source import Source
from vitdeploy.progress import Counter, Progress
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.tasks.anomaly import DISTANCES, NEIGHBOURS, AnomalySpec, image_score, smoothed
from vitdeploy.spec import PreprocessSpec, encode
from vitdeploy.stages import reference_model, step

FIT, MEMORY_FILE = "fit", "memory.npz"
LEAST_IMAGES, BATCH = 5, 8
# Images whose features differ by less than this share of the largest number in them show the same.
SAME = 1e-4


@dataclass(frozen=True)
class FitOptions:
    """share: of the patches, those that the bank holds, and at most `most`. pool: patches that they are chosen from; of
    more images a seeded part of each. window: patches on a side of the neighbourhood whose mean is a feature.
    around: entries in equation 7. held_out: one in so many normal images is for the threshold."""

    share: float = 0.1
    most: int = 10_000
    pool: int = 100_000
    window: int = 1
    around: int = 9
    held_out: int = 5
    seed: int = 0


def distinct(samples: Sequence[Sample], folder: Path) -> dict[str, Sample]:
    """The images by the SHA-256 of their files, each content once.

    Raises:
        DataError: fewer than LEAST_IMAGES.
    """
    found = {file_sha256(sample.path): sample for sample in reversed(samples)}
    if len(found) < LEAST_IMAGES:
        copies = f", {len(samples)} with copies" if len(samples) > len(found) else ""
        raise DataError(
            f"{folder} has too few normal images to know by them what is normal",
            found=f"{len(found)} images{copies}",
            expected=f"at least {LEAST_IMAGES}, better some hundred",
            fix="add photographs of good parts",
        )
    return dict(sorted(found.items(), key=lambda each: each[1].path))


def fit(
    source: Source,
    preprocess: PreprocessSpec,
    normal: dict[str, Sample],
    out: Path,
    progress: Progress,
    skip_bad: bool = False,
    options: FitOptions | None = None,
) -> memory_bank.MemoryBank:
    """Writes memory.npz, of the features of `source` for the `normal` images, which stand by their digests.

    Raises:
        ImageError, DataError: an image cannot be read; none of the threshold's differs from those of the bank.
        CheckpointError: the model has no patch tokens, or such that are not finite.
    """
    chosen, skipped = options or FitOptions(), Skipped([]) if skip_bad else None
    tokens, _ = memory_bank.patch_tokens(load.load_features(source))
    order = np.random.RandomState(chosen.seed).permutation(len(normal))
    keys, count = list(normal), len(normal) // chosen.held_out
    held, kept = ([normal[keys[i]] for i in part] for part in (order[:count], order[count:]))
    with torch.no_grad():
        pool = _pool(tokens, kept, preprocess, chosen, skipped, progress)
        mean = pool.double().mean(0).float()
        pool -= mean
        memory, asked = _chosen(pool, chosen, progress)
        bank = memory_bank.MemoryBank(
            memory=np.asarray(memory.numpy(), np.float32),
            mean=np.asarray(mean.numpy(), np.float32),
            neighbours=memory_bank.nearest_entries(memory, chosen.around),
            window=chosen.window,
            threshold=1.0,
            pixel_threshold=1.0,
            patches=len(pool),
            asked=asked,
            images=tuple(keys),
        )
        bank = _with_thresholds(tokens, bank, held, preprocess, skipped, progress)
    bank.save(out / MEMORY_FILE)
    return bank


def _features(
    tokens: memory_bank.PatchTokens, pixels: np.ndarray, preprocess: PreprocessSpec, window: int
) -> torch.Tensor:
    found = memory_bank.features_of(tokens(torch.from_numpy(normalise(pixels, preprocess))), tokens.grid, window)
    if not bool(torch.isfinite(found).all()):
        raise CheckpointError(
            "the patch tokens are not finite", found="NaN or infinity", expected="finite features", fix="other weights"
        )
    return found


def _pool(
    tokens: memory_bank.PatchTokens,
    samples: Sequence[Sample],
    preprocess: PreprocessSpec,
    options: FitOptions,
    skipped: Skipped | None,
    progress: Progress,
) -> torch.Tensor:
    """float32 [patches, width] of all these images; of each a seeded part where there are too many."""
    generator, parts = np.random.RandomState(options.seed), []
    each = min(tokens.grid[0] * tokens.grid[1], max(1, options.pool // len(samples)))
    count, first, apart = Counter(progress, "fit: features of normal images", len(samples)), None, False
    for pixels in batches(samples, preprocess, BATCH, skipped):
        for found in _features(tokens, pixels, preprocess, options.window):
            first = found if first is None else first
            apart |= float((found - first).abs().max()) > SAME * float(first.abs().max())
            taken = np.sort(generator.permutation(len(found))[:each])
            parts.append(found[torch.from_numpy(taken)])
        count(len(pixels))
    if not apart:
        raise DataError(
            "the normal images all show the same",
            found=f"equal features of {len(parts)} images",
            expected="photographs that differ as good parts do",
            fix="take photographs of several good parts",
        )
    return torch.cat(parts)


def _chosen(pool: torch.Tensor, options: FitOptions, progress: Progress) -> tuple[torch.Tensor, int]:
    """The entries of the bank, and how many there would be without the cap."""
    asked = max(1, math.ceil(options.share * len(pool)))
    expected = min(asked, options.most)
    count = Counter(progress, "fit: entries of the memory bank", expected)
    return pool[memory_bank.k_centres(pool, expected, options.seed, count)], asked


def _with_thresholds(
    tokens: memory_bank.PatchTokens,
    bank: memory_bank.MemoryBank,
    samples: Sequence[Sample],
    preprocess: PreprocessSpec,
    skipped: Skipped | None,
    progress: Progress,
) -> memory_bank.MemoryBank:
    """The bank with the largest scores of these images, which it does not hold, and of their pixels."""
    module, scores, peaks = memory_bank.AnomalyModel(tokens, bank), [0.0], [0.0]
    count = Counter(progress, "fit: scores of other normal images", len(samples))
    for pixels in batches(samples, preprocess, BATCH, skipped):
        outputs = [each.numpy() for each in module(torch.from_numpy(normalise(pixels, preprocess)))]
        scores += [image_score({DISTANCES: a, NEIGHBOURS: b}) for a, b in zip(*outputs, strict=True)]
        peaks += [float(smoothed(plane, preprocess.crop, AnomalySpec.sigma).max()) for plane in outputs[0]]
        count(len(pixels))
    return replace(bank, threshold=max(scores), pixel_threshold=max(peaks))


def fit_step(
    features: reference_model.ReferenceModel, folder: Path, normal: dict[str, Sample], skip_bad: bool
) -> step.Step:
    """The memory bank of a model of features and the normal images, of `folder`."""
    options, preprocess, source = FitOptions(), features.images, replace(features.source, task="anomaly")

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        fit(source, preprocess, normal, out, progress, skip_bad, options)

    return step.Step(
        FIT,
        FIT,
        write,
        {**features.identity(), **encode(options), "skip_bad": skip_bad},
        (),
        {**features.digests, "images": digest(list(normal.values()), folder)},
        step.package_versions(("torch", "timm", "transformers", "pillow", "numpy")),
    )

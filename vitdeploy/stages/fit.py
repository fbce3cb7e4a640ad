"""Fit a memory bank: representative patches of the normal images, and the score threshold for an anomaly.

Source: PatchCore (arXiv 2106.08265), section 3.2. The paper defines no threshold; here it is the largest score of the
fifth of the normal images that is held out of the bank. No evaluation image is used.
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
# Images whose features differ by less than this share of their largest value are considered equal.
SAME = 1e-4


@dataclass(frozen=True)
class FitOptions:
    """share: the share of the patches that the bank holds, at most `most`. pool: the number of patches to choose from;
    with more, a seeded part of each image. window: the side, in patches, of the neighbourhood that is averaged into a
    feature. around: entries in equation 7. held_out: one in this many normal images sets the threshold."""

    share: float = 0.1
    most: int = 10_000
    pool: int = 100_000
    window: int = 1
    around: int = 9
    held_out: int = 5
    seed: int = 0


def distinct(samples: Sequence[Sample], folder: Path) -> dict[str, Sample]:
    """The images by the SHA-256 of their files, without duplicates.

    Raises:
        DataError: fewer than LEAST_IMAGES.
    """
    found = {file_sha256(sample.path): sample for sample in reversed(samples)}
    if len(found) < LEAST_IMAGES:
        copies = f", {len(samples)} with copies" if len(samples) > len(found) else ""
        raise DataError(
            f"{folder} has too few normal images",
            found=f"{len(found)} images{copies}",
            expected=f"at least {LEAST_IMAGES}, better a few hundred",
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
    """Write memory.npz from the features of `source` for the `normal` images, which are keyed by their digests.

    Raises:
        ImageError, DataError: an image cannot be read, or all images have the same features.
        CheckpointError: the model has no patch tokens, or they are not finite.
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
            "the model's patch tokens are not finite",
            found="NaN or infinity",
            expected="finite features",
            fix="check the checkpoint, or use other weights",
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
    """float32 [patches, width] of all these images; a seeded part of each image if there are too many patches."""
    generator, parts = np.random.RandomState(options.seed), []
    each = min(tokens.grid[0] * tokens.grid[1], max(1, options.pool // len(samples)))
    count, first, apart = Counter(progress, "fit: compute features of normal images", len(samples)), None, False
    for pixels in batches(samples, preprocess, BATCH, skipped):
        for found in _features(tokens, pixels, preprocess, options.window):
            first = found if first is None else first
            apart |= float((found - first).abs().max()) > SAME * float(first.abs().max())
            taken = np.sort(generator.permutation(len(found))[:each])
            parts.append(found[torch.from_numpy(taken)])
        count(len(pixels))
    if not apart:
        raise DataError(
            "all normal images have the same features",
            found=f"equal features in {len(parts)} images",
            expected="images that show the variation of good parts",
            fix="use photographs of several good parts",
        )
    return torch.cat(parts)


def _chosen(pool: torch.Tensor, options: FitOptions, progress: Progress) -> tuple[torch.Tensor, int]:
    """The entries of the bank, and their number without the cap."""
    asked = max(1, math.ceil(options.share * len(pool)))
    expected = min(asked, options.most)
    count = Counter(progress, "fit: select memory bank entries", expected)
    return pool[memory_bank.k_centres(pool, expected, options.seed, count)], asked


def _with_thresholds(
    tokens: memory_bank.PatchTokens,
    bank: memory_bank.MemoryBank,
    samples: Sequence[Sample],
    preprocess: PreprocessSpec,
    skipped: Skipped | None,
    progress: Progress,
) -> memory_bank.MemoryBank:
    """The bank with its thresholds: the largest image and pixel scores of these held-out images."""
    module, scores, peaks = memory_bank.AnomalyModel(tokens, bank), [0.0], [0.0]
    count = Counter(progress, "fit: score held-out normal images", len(samples))
    for pixels in batches(samples, preprocess, BATCH, skipped):
        outputs = [each.numpy() for each in module(torch.from_numpy(normalise(pixels, preprocess)))]
        scores += [image_score({DISTANCES: a, NEIGHBOURS: b}) for a, b in zip(*outputs, strict=True)]
        peaks += [float(smoothed(plane, preprocess.crop, AnomalySpec.sigma).max()) for plane in outputs[0]]
        count(len(pixels))
    return replace(bank, threshold=max(scores), pixel_threshold=max(peaks))


def fit_step(
    features: reference_model.ReferenceModel, folder: Path, normal: dict[str, Sample], skip_bad: bool
) -> step.Step:
    """The step that fits the memory bank of a feature model on the normal images in `folder`."""
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

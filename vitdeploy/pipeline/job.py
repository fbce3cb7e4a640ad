"""A recipe meets this machine: files hashed, images readable and split, runtimes there. All before any work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitdeploy import __version__
from vitdeploy.bundle.read import file_sha256
from vitdeploy.data.folder import DataSplit, Sample, digest, split
from vitdeploy.data.pixels import Skipped, readable
from vitdeploy.errors import MissingFileError, MissingPackageError
from vitdeploy.models.catalog import config_for
from vitdeploy.models.source import default_preprocess, load_original
from vitdeploy.pipeline.recipe import Recipe
from vitdeploy.pipeline.stages import Counter, Progress, check_precision
from vitdeploy.spec import TARGETS, PreprocessSpec


@dataclass(frozen=True)
class Job:
    """Everything a plan is a function of."""

    recipe: Recipe
    checkpoint: Path | None
    checkpoint_sha256: str | None
    preprocess: PreprocessSpec
    root: Path
    split: DataSplit
    calibration_digest: str
    evaluation_digest: str
    skipped: tuple[str, ...]


def prepare(recipe: Recipe, *, skip_bad: bool, progress: Progress) -> Job:
    """Resolve a recipe.

    Raises:
        MissingFileError, UnknownModelError, DataError, ImageError: an input is missing or unusable.
        MissingPackageError, CapabilityError: a target's runtime is not here, or cannot do the precision.
    """
    for target in recipe.targets:
        check_precision(target, recipe.precision)
        require_runtime(target)
    config_for(recipe.source.model)
    checkpoint = Path(recipe.source.checkpoint) if recipe.source.checkpoint else None
    if checkpoint is not None and not checkpoint.is_file():
        raise MissingFileError(f"no checkpoint at {checkpoint}", fix="--set source.checkpoint=FILE")
    preprocess = recipe.preprocess.to_spec() if recipe.preprocess else own_preprocess(recipe.source.model, checkpoint)
    root = Path(recipe.data.path)
    data = recipe.data
    images = split(
        root, data.labels, calibration=data.calibration.images, evaluation=data.evaluation.images, seed=data.seed
    )
    images, skipped = check_images(images, preprocess, skip_bad=skip_bad, progress=progress)
    return Job(
        recipe=recipe,
        checkpoint=checkpoint,
        checkpoint_sha256=file_sha256(checkpoint) if checkpoint else None,
        preprocess=preprocess,
        root=root,
        split=images,
        calibration_digest=digest(images.calibration, root),
        evaluation_digest=digest(images.evaluation, root),
        skipped=skipped,
    )


def own_preprocess(model: str, checkpoint: Path | None) -> PreprocessSpec:
    """The architecture's default preprocessing, with as many channels as the checkpoint's patch embedding has."""
    return default_preprocess(load_original(model, checkpoint).config)


def require_runtime(target: str) -> None:
    row = TARGETS[target]
    if importlib.util.find_spec(row.package) is None:
        raise MissingPackageError(row.package, row.extra, f"the target {target}")


def check_images(
    images: DataSplit, preprocess: PreprocessSpec, *, skip_bad: bool, progress: Progress
) -> tuple[DataSplit, tuple[str, ...]]:
    """Decode every image once, so that a broken file is found now and not after an hour.

    Raises:
        ImageError: a file cannot be read, and `skip_bad` is False.
        DataError: not one image of a part can be read.
    """
    skipped = Skipped([])
    count = Counter(progress, "check the images", len(images.calibration) + len(images.evaluation))
    calibration, evaluation = (
        _readable(part, preprocess, skipped if skip_bad else None, count) if part else ()
        for part in (images.calibration, images.evaluation)
    )
    return replace(images, calibration=calibration, evaluation=evaluation), tuple(skipped.paths)


def _readable(
    samples: Sequence[Sample], preprocess: PreprocessSpec, skipped: Skipped | None, count: Counter
) -> tuple[Sample, ...]:
    good = []
    for sample, _ in readable(samples, preprocess, skipped):
        good.append(sample)
        count(1)
    return tuple(good)


def tool_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of vitdeploy and of the named packages that are installed."""
    versions = {"vitdeploy": __version__}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions

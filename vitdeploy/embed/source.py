"""What every kind of embedding takes from a bundle: one engine that it can run, and the golden answers as its test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, read_bundle, verify_files
from vitdeploy.errors import CapabilityError, InputError, TargetError
from vitdeploy.runtime.golden import comparable, read_golden
from vitdeploy.runtime.labels import read_labels
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import EngineSpec, Manifest, PreprocessSpec


@dataclass(frozen=True)
class Embedded:
    """A bundle of an image model, and the engine of it that is embedded.

    `digest` is the SHA-256 of the manifest, which names that of everything else. `pixels` are the golden inputs, uint8
    [n, height, width, channels]; `outputs` what the original gives for them, [n, ...] by name, as far as it can be
    compared (`runtime.golden.comparable`); `tolerance` how far from that the engine may be (`spec.GoldenSpec`).
    """

    folder: Path
    manifest: Manifest
    engine: EngineSpec
    preprocess: PreprocessSpec
    labels: list[str]
    digest: str
    pixels: Array
    outputs: dict[str, Array]
    tolerance: float


def find_embedded(folder: Path, targets: Sequence[str], tasks: Sequence[str], what: str) -> Embedded:
    """The bundle in `folder` with its first engine for one of `targets`, every file of which is what it should be.

    Args:
        tasks: those that `what` can answer.

    Raises:
        CapabilityError: another task.
        TargetError: no such engine.
        InputError: no golden answers to test it with. Errors of reading the bundle come through.
    """
    manifest = read_bundle(folder)
    if manifest.task not in tasks or manifest.preprocess is None:
        raise CapabilityError(
            f"{what} does not answer for models of this task yet", found=manifest.task, wanted=", ".join(tasks)
        )
    engine = next((each for each in manifest.engines if each.target in targets), None)
    if engine is None:
        raise TargetError(
            f"the bundle {manifest.name} has no engine that {what} could run",
            found=", ".join(each.target for each in manifest.engines) or "none",
            wanted=" or ".join(targets),
            fix=f"vitdeploy run RECIPE --set 'targets=[{targets[0]}]'",
        )
    if manifest.golden is None or engine.target not in manifest.golden.tolerance:
        raise InputError(
            f"the bundle {manifest.name} has no golden answers to test {what} with",
            wanted="a bundle of `vitdeploy run`, which keeps some of the original's answers",
        )
    verify_files(folder, manifest)
    inputs, found = read_golden(folder, manifest)
    outputs = {name: found[name] for name in comparable(manifest, found)}
    (pixels,) = inputs.values()
    labels = read_labels(folder, manifest) or []
    tolerance = manifest.golden.tolerance[engine.target]
    digest = file_sha256(folder / MANIFEST_FILE)
    return Embedded(
        folder, manifest, engine, manifest.preprocess, labels, digest, np.asarray(pixels), outputs, tolerance
    )

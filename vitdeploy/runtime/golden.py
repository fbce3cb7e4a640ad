"""The self-check of an engine: does it give, here and now, what the original gave for the bundle's golden inputs?"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdeploy.bundle.read import verify_files
from vitdeploy.errors import InputError, ManifestError
from vitdeploy.runtime.batches import run_batches
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import EngineSpec, Manifest

MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class GoldenCheck:
    """`difference` is max|a - b| / max|b| over `inputs` golden inputs, of the output where it is worst; `tolerance` is
    what the manifest allows. Of a difference that is no number `ok` is False."""

    inputs: int
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance


def check_golden(folder: Path, manifest: Manifest, engine: EngineSpec, runner: Runner) -> GoldenCheck:
    """Run a loaded engine of the bundle in `folder` on the golden inputs.

    Raises:
        InputError: the bundle has no golden set, or none for this target.
        DigestError, ManifestError: its files are not the recorded ones, or no arrays that fit the engine.
        EngineError, TensorError: as `Runner.infer`.
    """
    golden = manifest.golden
    if golden is None or engine.target not in golden.tolerance:
        raise InputError(
            f"the bundle {manifest.name} has no golden answers for {engine.target}",
            wanted="a bundle of `vitdeploy run`, which keeps some of the original's answers",
        )
    inputs, wanted = read_golden(folder, manifest)
    if len(inputs) != 1 or len(runner.inputs) != 1:
        raise ManifestError("a golden set of other inputs", found=", ".join(inputs), wanted=str(runner.inputs))
    (samples,) = inputs.values()
    found = _outputs(manifest, runner, samples)
    if set(found) != set(wanted):
        raise ManifestError("a golden set of other outputs", found=", ".join(wanted), wanted=", ".join(found))
    difference = max(_difference(found[name], wanted[name]) for name in comparable(manifest, wanted))
    return GoldenCheck(len(samples), difference, golden.tolerance[engine.target])


def comparable(manifest: Manifest, outputs: Iterable[str]) -> list[str]:
    """Of a bundle's outputs those that its tolerance is for."""
    return list(outputs) if manifest.postprocess is None else manifest.postprocess.comparable(outputs)


def read_golden(folder: Path, manifest: Manifest) -> tuple[dict[str, Array], dict[str, Array]]:
    """The golden inputs of a bundle that has some, and the original's outputs for them, by name.

    Raises:
        DigestError, ManifestError: the files are not the recorded ones, or hold no arrays.
    """
    assert manifest.golden is not None
    names = manifest.golden.inputs, manifest.golden.outputs
    verify_files(folder, manifest, names)
    inputs, outputs = (_arrays(folder / name) for name in names)
    return inputs, outputs


def _arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file that may come from anywhere."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_BYTES:
            raise ManifestError(f"{path} is too large", found=f"{size:,} bytes", wanted=f"at most {MAX_BYTES:,}")
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ManifestError(f"{path} cannot be read", found=str(error)[:200], wanted="arrays in an .npz file") from None


def _outputs(manifest: Manifest, runner: Runner, samples: Array) -> dict[str, Array]:
    """Every output for all samples, [n, ...]."""
    tensor = runner.inputs[0]
    batch = tensor.shape[0] if isinstance(tensor.shape[0], int) else None
    size = batch or len(samples)
    chunks = (samples[start : start + size] for start in range(0, len(samples), size))
    fed = chunks if manifest.preprocess is None else (to_input(each, manifest.preprocess, tensor) for each in chunks)
    return run_batches(fed, batch, lambda feed: runner.infer({tensor.name: feed}))


def _difference(found: Array, wanted: Array) -> float:
    """Infinite where tokens, or the shapes of two outputs, are not the same."""
    if found.shape != wanted.shape or (wanted.dtype.kind in "iu" and not np.array_equal(found, wanted)):
        return float("inf")
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    return float(np.abs(a - b).max(initial=0.0) / max(float(np.abs(b).max(initial=0.0)), 1e-300))

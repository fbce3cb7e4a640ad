"""The self-check of an engine on the bundle's golden inputs: it compares the outputs here with those from when the
bundle was made, and the answers with the original's."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdeploy.bundle.checked import MAX_READ, CheckedFiles
from vitdeploy.bundle.read import too_large
from vitdeploy.errors import InputError, ManifestError
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.registry import bound, count_same
from vitdeploy.runtime.values import run_batches
from vitdeploy.spec import EngineSpec, Manifest, PreprocessSpec
from vitdeploy.zip_members import DAMAGED, members_of

# A bundle has eight at most; each is run before the first answer, so this is a bound of time too.
MAX_SAMPLES = 64


@dataclass(frozen=True)
class GoldenCheck:
    """Of `inputs` golden inputs.

    `difference` is max|a - b| / max|b| from what the same engine gave when the bundle was made (without
    any of its own: from the original), of the output where it is worst; `tolerance` what the manifest allows. `same` of
    the answers are the original's, where `least_same` must be. Of a difference that is no number `ok` is False, and
    where unrelated answers would pass as well: `proves_nothing` says why, "" where they would not.
    """

    inputs: int
    difference: float
    tolerance: float
    same: int
    least_same: int
    proves_nothing: str = ""

    @property
    def ok(self) -> bool:
        return self.within_bounds and not self.proves_nothing

    @property
    def within_bounds(self) -> bool:
        """Whether no answer is wrong, which may prove nothing."""
        return self.as_recorded and self.same >= self.least_same

    @property
    def as_recorded(self) -> bool:
        """Whether it answers as when the bundle was made, right or wrong."""
        return self.difference <= self.tolerance


def check_golden(
    folder: Path, manifest: Manifest, engine: EngineSpec, runner: Runner, files: CheckedFiles | None = None
) -> GoldenCheck:
    """Run a loaded engine of the bundle in `folder` on the golden inputs. `files`: the bundle's, where it is being
    loaded.

    Raises:
        InputError: the bundle has no golden set, or none for this engine.
        DigestError, ManifestError: its files are not the recorded ones, or no arrays that fit the engine.
        EngineError, TensorError: as `Runner.infer`.
    """
    golden = read_golden(folder, manifest, engine, files)
    if golden is None:
        raise no_golden(manifest, engine.artifact)
    if len(golden.inputs) != len(runner.inputs) or not golden.inputs:
        raise ManifestError("a golden set of other inputs", found=", ".join(golden.inputs), wanted=str(runner.inputs))
    runner, samples = bound(manifest.task, runner, golden.inputs, manifest.postprocess)
    if manifest.preprocess is not None and not _are_pictures(samples, manifest.preprocess):
        raise ManifestError(
            "golden inputs that are no pictures",
            found=f"{samples.dtype} {samples.shape}",
            wanted="uint8 [n, height, width, channels]",
        )
    found = engine_outputs(runner, manifest.preprocess, samples)
    for each in (golden.outputs, golden.original):
        if set(found) != set(each):
            raise ManifestError("a golden set of other outputs", found=", ".join(each), wanted=", ".join(found))
        shapes = [
            (each[name].shape, array.shape)
            for name, array in found.items()
            # A text is as long as its engine makes it: one of another length is another answer.
            if each[name].shape != array.shape and not ("tokens" in found and len(each[name]) == len(array))
        ]
        if shapes:
            raise ManifestError("golden outputs of other shapes", found=str(shapes[0][0]), wanted=str(shapes[0][1]))
    names = comparable(manifest, found)
    if golden.least_same:  # a token that was as likely as another may be the other elsewhere: its answer is counted
        names = [name for name in names if golden.outputs[name].dtype.kind not in "iu"]
    difference = largest_difference(found, golden.outputs, names)
    same = count_same(manifest.task, manifest.preprocess, manifest.postprocess, found, golden.original)
    return GoldenCheck(len(samples), difference, golden.tolerance, same, golden.least_same, golden.proves_nothing)


def _are_pictures(samples: Array, preprocess: PreprocessSpec) -> bool:
    """Whether there is at least one picture, and all have the channels that the model takes."""
    return (
        samples.dtype == np.uint8 and samples.ndim == 4 and samples.shape[3] == preprocess.channels and samples.size > 0
    )


def has_golden(manifest: Manifest, engine: EngineSpec) -> bool:
    """Whether a bundle keeps golden answers for this engine."""
    golden = manifest.golden
    return golden is not None and (engine.artifact in golden.engines or engine.target in golden.tolerance)


def golden_files(manifest: Manifest, engine: EngineSpec) -> tuple[str, ...]:
    """The files of a bundle with the golden answers of this engine; none if it has none."""
    golden = manifest.golden
    if golden is None or not has_golden(manifest, engine):
        return ()
    own = golden.engines.get(engine.artifact)
    return golden.inputs, golden.outputs, *([own.outputs] if own else [])


def no_golden(manifest: Manifest, what: str) -> InputError:
    return InputError(
        f"the bundle {manifest.name} has no golden answers for {what}",
        wanted="a bundle of `vitdeploy run`, which keeps some of the original's answers",
    )


def comparable(manifest: Manifest, outputs: Iterable[str]) -> list[str]:
    """The outputs of a bundle that its tolerance applies to."""
    return list(outputs) if manifest.postprocess is None else manifest.postprocess.comparable(outputs)


@dataclass(frozen=True)
class GoldenSet:
    """Arrays by tensor name: the golden inputs, what the original gives for them, and what one engine is to give within
    its tolerance; see `spec.GoldenEngine`."""

    inputs: dict[str, Array]
    original: dict[str, Array]
    outputs: dict[str, Array]
    tolerance: float
    least_same: int
    proves_nothing: str = ""


def read_golden(
    folder: Path, manifest: Manifest, engine: EngineSpec, files: CheckedFiles | None = None
) -> GoldenSet | None:
    """The golden set of one engine of a bundle; None if it has none. `files`: the bundle's, where it is being loaded.

    Raises:
        DigestError, ManifestError: the files are not the recorded ones, or hold no arrays.
    """
    golden = manifest.golden
    if golden is None or not has_golden(manifest, engine):
        return None
    own, names = golden.engines.get(engine.artifact), golden_files(manifest, engine)
    files = files or CheckedFiles(folder, manifest)
    inputs, original, *others = (_arrays(files, name) for name in names)
    _require_few(files.folder / golden.inputs, inputs)
    if own is None:
        return GoldenSet(inputs, original, original, golden.tolerance[engine.target], 0)
    return GoldenSet(inputs, original, others[0], own.tolerance, own.least_same, own.proves_nothing or "")


def _require_few(path: Path, inputs: Mapping[str, Array]) -> None:
    """Raise ManifestError for more samples, the first of the inputs, than a bundle has."""
    count = next((len(array) for array in inputs.values() if array.ndim), 0)
    if count > MAX_SAMPLES:
        raise ManifestError(
            f"{path} has too many golden samples",
            found=f"{count:,}",
            wanted=f"at most {MAX_SAMPLES}, each of which is run",
        )


def _arrays(files: CheckedFiles, name: str) -> dict[str, Array]:
    """The arrays of an .npz file that may come from anywhere."""
    path, data = files.folder / name, io.BytesIO(files.read(name))
    try:
        size = sum(member.file_size for member in members_of(data))
        if size > MAX_READ:
            raise too_large(path, size, MAX_READ)
        data.seek(0)
        with np.load(data, allow_pickle=False) as arrays:
            return dict(arrays)
    except DAMAGED as error:
        raise ManifestError(f"{path} cannot be read", found=str(error)[:200], wanted="arrays in an .npz file") from None


def engine_outputs(runner: Runner, preprocess: PreprocessSpec | None, samples: Array) -> dict[str, Array]:
    """Every output of a loaded engine for n golden samples, [n, ...]."""
    tensor = runner.inputs[0]
    batch = tensor.shape[0] if isinstance(tensor.shape[0], int) else None
    size = batch or len(samples)
    chunks = (samples[start : start + size] for start in range(0, len(samples), size))
    fed = chunks if preprocess is None else (to_input(each, preprocess, tensor) for each in chunks)
    return run_batches(fed, batch, lambda feed: runner.infer({tensor.name: feed}))


def largest_difference(found: Mapping[str, Array], wanted: Mapping[str, Array], names: Iterable[str]) -> float:
    """max|a - b| / max|b| of the output where it is worst; not a number where one of them is none. 0 of no names."""
    return float(np.max([_difference(found[name], wanted[name]) for name in names], initial=0.0))


def _difference(found: Array, wanted: Array) -> float:
    """The difference of one output; infinite if tokens differ, or their number."""
    if found.shape != wanted.shape or (wanted.dtype.kind in "iu" and not np.array_equal(found, wanted)):
        return float("inf")
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    return float(np.abs(a - b).max(initial=0.0) / max(float(np.abs(b).max(initial=0.0)), 1e-300))

"""Check an engine on the bundle's golden inputs: compare its outputs with those recorded when the bundle was made, and
its answers with the original's."""

import contextlib
import hashlib
import io
import json
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.bundle import checked, read
from vitdeploy.errors import AnswersError, InputError, ManifestError, StorageError, UnsafeError
from vitdeploy.runtime import backend, trust, values
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.registry import bound, count_same
from vitdeploy.spec import EngineSpec, Manifest, PreprocessSpec, encode
from vitdeploy.zip_members import DAMAGED, members_of

# vitdeploy writes at most eight; all run before the first answer, so this limits time as well.
MAX_SAMPLES = 64


@dataclass(frozen=True)
class GoldenCheck:
    """The result of a check on `inputs` golden inputs.

    `difference` is max|a - b| / max|b| of the worst output, compared with the same engine's outputs when the bundle was
    made (with the original's if the engine has none); `tolerance` is the limit in the manifest. `same` answers equal
    the original's; at least `least_same` must. `ok` is False if the difference is NaN, or if unrelated answers would
    pass as well: `proves_nothing` then says why ("" otherwise).
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
        """Whether no answer is wrong; see also `proves_nothing`."""
        return self.as_recorded and self.same >= self.least_same

    @property
    def as_recorded(self) -> bool:
        """Whether the outputs match those recorded when the bundle was made, right or wrong."""
        return self.difference <= self.tolerance


def check_golden(
    folder: Path, manifest: Manifest, engine: EngineSpec, runner: Runner, files: checked.CheckedFiles | None = None
) -> GoldenCheck:
    """Run a loaded engine of the bundle in `folder` on the golden inputs. `files`: the bundle's files while it is being
    loaded.

    Raises:
        InputError: the bundle has no golden set for this engine.
        DigestError, ManifestError: its files differ from the manifest's record, or hold arrays that do not fit the
        engine.
        EngineError, TensorError: as `Runner.infer`.
    """
    golden = read_golden(folder, manifest, engine, files)
    if golden is None:
        raise no_golden(manifest, engine.artifact)
    if len(golden.inputs) != len(runner.inputs) or not golden.inputs:
        raise ManifestError(
            "the golden set has different inputs from the engine",
            found=", ".join(golden.inputs),
            expected=str(runner.inputs),
        )
    runner, samples, further = bound(manifest.task, runner, golden.inputs, manifest.postprocess)
    if any(len(array) != len(samples) for array in further.values() if array.ndim) or not all(
        array.ndim for array in further.values()
    ):
        raise ManifestError(
            "inputs of the golden set lack rows", found=", ".join(further), expected="one row per image"
        )
    if manifest.preprocess is not None and not _are_pictures(samples, manifest.preprocess):
        raise ManifestError(
            "the golden inputs are not images",
            found=f"{samples.dtype} {samples.shape}",
            expected="uint8 [n, height, width, channels]",
        )
    found = engine_outputs(runner, manifest.preprocess, samples, further)
    for each in (golden.outputs, golden.original):
        if set(found) != set(each):
            raise ManifestError(
                "the golden set has different outputs from the engine", found=", ".join(each), expected=", ".join(found)
            )
        shapes = [
            (each[name].shape, array.shape)
            for name, array in found.items()
            # Texts vary in length: another length is another answer, not an error.
            if each[name].shape != array.shape and not ("tokens" in found and len(each[name]) == len(array))
        ]
        if shapes:
            raise ManifestError(
                "the golden outputs have different shapes from the engine's",
                found=str(shapes[0][0]),
                expected=str(shapes[0][1]),
            )
    names = comparable(manifest, found)
    if golden.least_same:  # equally likely tokens may swap on another machine: answers are counted instead
        names = [name for name in names if golden.outputs[name].dtype.kind not in "iu"]
    difference = largest_difference(found, golden.outputs, names)
    same = count_same(manifest.task, manifest.preprocess, manifest.postprocess, found, golden.original)
    return GoldenCheck(len(samples), difference, golden.tolerance, same, golden.least_same, golden.proves_nothing)


def _are_pictures(samples: Array, preprocess: PreprocessSpec) -> bool:
    """Whether there is at least one image, with the channels that the model takes."""
    return (
        samples.dtype == np.uint8 and samples.ndim == 4 and samples.shape[3] == preprocess.channels and samples.size > 0
    )


def has_golden(manifest: Manifest, engine: EngineSpec) -> bool:
    """Return whether a bundle has golden answers for this engine."""
    golden = manifest.golden
    return golden is not None and (engine.artifact in golden.engines or engine.target in golden.tolerance)


def golden_files(manifest: Manifest, engine: EngineSpec) -> tuple[str, ...]:
    """Return the bundle's files with the golden answers of this engine; () without any."""
    golden = manifest.golden
    if golden is None or not has_golden(manifest, engine):
        return ()
    own = golden.engines.get(engine.artifact)
    return golden.inputs, golden.outputs, *([own.outputs] if own else [])


def no_golden(manifest: Manifest, what: str) -> InputError:
    return InputError(
        f"the bundle {manifest.name} has no golden answers for {what}",
        expected="a bundle of `vitdeploy run`, which includes golden answers",
    )


def comparable(manifest: Manifest, outputs: Iterable[str]) -> list[str]:
    """Return the outputs that a bundle's tolerance applies to."""
    return list(outputs) if manifest.postprocess is None else manifest.postprocess.comparable(outputs)


@dataclass(frozen=True)
class GoldenSet:
    """Arrays by tensor name: the golden inputs, the original's outputs, and the expected outputs of one engine with
    their tolerance; see `spec.GoldenEngine`."""

    inputs: dict[str, Array]
    original: dict[str, Array]
    outputs: dict[str, Array]
    tolerance: float
    least_same: int
    proves_nothing: str = ""


def read_golden(
    folder: Path, manifest: Manifest, engine: EngineSpec, files: checked.CheckedFiles | None = None
) -> GoldenSet | None:
    """Return the golden set of one engine of a bundle; None without one. `files`: the bundle's files while it is being
    loaded.

    Raises:
        DigestError, ManifestError: the files differ from the manifest's record, or hold no arrays.
    """
    golden = manifest.golden
    if golden is None or not has_golden(manifest, engine):
        return None
    own, names = golden.engines.get(engine.artifact), golden_files(manifest, engine)
    files = files or checked.CheckedFiles(folder, manifest)
    inputs, original, *others = (_arrays(files, name) for name in names)
    count = next((len(array) for array in inputs.values() if array.ndim), 0)
    if count > MAX_SAMPLES:
        raise ManifestError(
            f"{files.folder / golden.inputs} has too many golden samples",
            found=f"{count:,}",
            expected=f"at most {MAX_SAMPLES}",
        )
    if own is None:
        return GoldenSet(inputs, original, original, golden.tolerance[engine.target], 0)
    return GoldenSet(inputs, original, others[0], own.tolerance, own.least_same, own.proves_nothing or "")


def _arrays(files: checked.CheckedFiles, name: str) -> dict[str, Array]:
    """Read the arrays of an untrusted .npz file."""
    path, data = files.folder / name, io.BytesIO(files.read(name))
    try:
        size = sum(member.file_size for member in members_of(data))
        if size > checked.MAX_READ:
            raise read.too_large(path, size, checked.MAX_READ)
        data.seek(0)
        with np.load(data, allow_pickle=False) as arrays:
            return dict(arrays)
    except DAMAGED as error:
        raise ManifestError(
            f"{path} cannot be read", found=str(error)[:200], expected="arrays in an .npz file"
        ) from None


def engine_outputs(
    runner: Runner, preprocess: PreprocessSpec | None, samples: Array, further: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Return every output of a loaded engine for n golden samples, [n, ...]. `further`: the samples' other inputs, [n,
    ...] by name."""
    tensor, more = runner.inputs[0], further or {}
    batch = tensor.shape[0] if isinstance(tensor.shape[0], int) else None
    size = batch or len(samples)

    def feeds(start: int) -> dict[str, Array]:
        chunk = samples[start : start + size]
        fed = chunk if preprocess is None else to_input(chunk, preprocess, tensor)
        return {tensor.name: fed, **{name: array[start : start + size] for name, array in more.items()}}

    return values.run_batches(map(feeds, range(0, len(samples), size)), batch, runner.infer)


def largest_difference(found: Mapping[str, Array], expected: Mapping[str, Array], names: Iterable[str]) -> float:
    """Return max|a - b| / max|b| of the worst output; NaN if an output has NaN, 0 without names."""
    return float(np.max([_difference(found[name], expected[name]) for name in names], initial=0.0))


def _difference(found: Array, expected: Array) -> float:
    """The difference of one output; infinite if shapes or tokens differ."""
    if found.shape != expected.shape or (expected.dtype.kind in "iu" and not np.array_equal(found, expected)):
        return float("inf")
    a, b = found.astype(np.float64), expected.astype(np.float64)
    return float(np.abs(a - b).max(initial=0.0) / max(float(np.abs(b).max(initial=0.0)), 1e-300))


# --- Refuse an engine that does not reproduce its golden answers ------------------------------------------------------
# A runtime may compile and run, yet answer wrongly on one device or in one version (openvinotoolkit/openvino#37264,
# NVIDIA/TensorRT#4419). So loading an engine runs the golden inputs first, once per engine, batch, runtime version and
# machine; a pass is recorded in the user's cache.


PROVEN = "proven-engines"
# Stack level of warnings from here to the caller of `load`, through `choice`.
WARNED = 7
COMMA = re.compile(rb' (?:eps|epsilon|min|max|alpha|beta|scale)="-?\d+,\d+(?:e[-+]?\d+)?"')
# Engines with these gates do not claim to match the original's answers.
UNPROVEN = ("fail", "undecided")


def require_golden_answers(
    folder: Path,
    manifest: Manifest,
    engine: EngineSpec,
    runner: Runner,
    *,
    threads: int = 0,
    allow_failed: bool = False,
    files: checked.CheckedFiles | None = None,
) -> None:
    """Raise AnswersError if a loaded engine of the bundle in `folder` does not reproduce its golden answers here.

    A bundle of `vitdeploy compile` has no golden answers, so its engines are not checked. With `allow_failed` only the
    comparison with the engine's own recorded outputs counts, not that with the original. `files`: the bundle's files
    while it is being loaded. If digests are not checked, an earlier pass is not used, and a pass is not recorded.

    Raises:
        AnswersError: the answers differ.
        DigestError, ManifestError: the golden files differ from the manifest's record.
        EngineError, TensorError: as `Runner.infer`.
    """
    if not has_golden(manifest, engine):
        return
    facts = _facts(manifest, engine, runner, threads, allow_failed)
    # An engine rebuilt from the bundle's graph has files that the manifest does not list.
    known = engine in manifest.engines and (files is None or files.hashed)
    # This file records that an engine with these facts has passed.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    proof = f"{digest}.json" if known else None
    if proof is not None and _is_proven(proof):
        return
    check = check_golden(folder, manifest, engine, runner, files)
    if check.as_recorded if allow_failed else check.ok:
        if proof is not None:
            _note(proof, {"bundle": manifest.name, "engine": engine.artifact, **facts["here"], **vars(check)})
        return
    if check.within_bounds:
        text = f"the golden answers of {engine.artifact} prove nothing: {check.proves_nothing}"
        warnings.warn(text, RuntimeWarning, stacklevel=WARNED)
        return
    error = wrong_answers(engine, check, facts["here"], of_graph=not manifest.engines)
    if _has_decimal_commas(folder, engine):
        error.found = "decimal commas in its model.xml: OpenVINO wrote it in a process with such a locale"
        error.fix = "compile the engine again: vitdeploy compile GRAPH --target openvino-cpu -o DIR"
    error.bundle, error.engine = str(folder), engine.artifact
    raise error


def _has_decimal_commas(folder: Path, engine: EngineSpec) -> bool:
    """Whether an IR was written with the decimal comma of a locale. Lists have commas too, but not in the attributes
    checked here."""
    with contextlib.suppress(OSError):
        return any(COMMA.search((folder / name).read_bytes()) for name in engine.files if name.endswith(".xml"))
    return False


def wrong_answers(
    engine: EngineSpec, found: GoldenCheck, here: Mapping[str, str], *, of_graph: bool = False
) -> AnswersError:
    """Return the error of an engine that does not reproduce its golden answers. `of_graph`: they come from its graph
    alone."""
    away = f"differ by {found.difference:.1e} (relative to the largest) from"
    if of_graph:
        return AnswersError(
            f"{engine.artifact} gives wrong answers here",
            found=f"its outputs for {found.inputs} random images {away} those of its graph "
            f"(limit {found.tolerance:.1e}); {_where(engine, here)}",
            expected="the outputs of unoptimised ONNX Runtime for the same graph",
            fix="use another runtime version, target or precision; `vitdeploy verify GRAPH "
            "--against FLOAT_GRAPH --data IMAGES --bisect` names the first layer that differs on your images",
        )
    return AnswersError(
        f"{engine.artifact} gives wrong answers here",
        found=f"{found.same} of {found.inputs} answers match the original's (at least {found.least_same} must); its "
        f"outputs {away} those recorded with the bundle (limit {found.tolerance:.1e}); {_where(engine, here)}",
        expected="the golden answers of the bundle",
        fix="use another engine of the bundle or another runtime version; "
        "`vitdeploy inspect BUNDLE --check` checks every engine, "
        "`vitdeploy verify BUNDLE --against MODEL --data IMAGES --bisect` names the first layer that differs",
    )


def _facts(
    manifest: Manifest, engine: EngineSpec, runner: Runner, threads: int, allow_failed: bool
) -> dict[str, Mapping[str, Any]]:
    """Everything that an engine's answers depend on: its files, its run settings, and this machine."""
    files = (*engine.files, *(file for part in engine.parts for file in part.files))
    names = {*files, *golden_files(manifest, engine)}
    target = TARGETS[engine.target]
    version = getattr(sys.modules.get(target.module), "__version__", "")
    return {
        "what": {entry.path: entry.sha256 for entry in manifest.files if entry.path in names},
        "how": {
            "engine": encode(engine),
            "golden": encode(manifest.golden),
            "inputs": [str(tensor) for tensor in runner.inputs],
            "streams": runner.at_once,
            "threads": threads or runner.engine_threads or 0,
            "allow_failed": allow_failed,
        },
        "here": {target.package: str(version), **describe_host(), **backend.RUNTIME[engine.target].describe_device()},
    }


def _is_proven(proof: str) -> bool:
    """Whether an engine with these facts has passed. A folder that is not private is ignored: other users could write
    to it."""
    folder = trust.user_cache() / PROVEN
    return trust.is_private(folder) and (folder / proof).is_file()


def _note(proof: str, facts: Mapping[str, Any]) -> None:
    """Record a pass. If the file cannot be written, each load runs the golden inputs again."""
    with contextlib.suppress(OSError, StorageError, UnsafeError):
        text = json.dumps(dict(facts), indent=1, sort_keys=True) + "\n"
        trust.write_atomic(trust.private_folder(PROVEN) / proof, text.encode(), 0o600)


def _where(engine: EngineSpec, here: Mapping[str, str]) -> str:
    package = TARGETS[engine.target].package
    return f"{package} {here.get(package, '')} on {here.get('cpu', 'this CPU')} ({here.get('isa', '')})"

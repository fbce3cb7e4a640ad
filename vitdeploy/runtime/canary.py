"""No engine answers on a machine before it has given its golden answers there.

Runtimes compile, run and answer wrongly on one device or in one version (openvinotoolkit/openvino#37264,
NVIDIA/TensorRT#4419). So whoever loads an engine of a bundle runs the golden inputs first, once for each engine, batch,
runtime version and machine: what has passed is noted in a folder of this user.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitdeploy.backends import TARGETS
from vitdeploy.bundle.checked import CheckedFiles
from vitdeploy.errors import AnswersError, StorageError, UnsafeError
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.golden import GoldenCheck, check_golden, golden_files, has_golden
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.trust import is_private, private_folder, user_cache, write_atomic
from vitdeploy.spec import EngineSpec, Manifest, encode

PROVEN = "proven-engines"
# Of warnings, from here to the call of `load`, through `choice`.
WARNED = 7
COMMA = re.compile(rb' (?:eps|epsilon|min|max|alpha|beta|scale)="-?\d+,\d+(?:e[-+]?\d+)?"')
# Of engines with these gates nobody says that their answers are the original's: they are measured to be compared.
UNPROVEN = ("fail", "undecided")


def require_golden_answers(
    folder: Path,
    manifest: Manifest,
    engine: EngineSpec,
    runner: Runner,
    *,
    threads: int = 0,
    allow_failed: bool = False,
    files: CheckedFiles | None = None,
) -> None:
    """Refuse a loaded engine of the bundle in `folder` that does not give its golden answers here.

    A bundle of `vitdeploy compile` has none, so nothing can be said of its engines. With `allow_failed` an engine may
    be as far from the original as it was when the bundle was made, but not otherwise than then.
    `files`: the bundle's, where it is being loaded. With digests that nobody checked nothing is known to have passed
    before, nor from now on.

    Raises:
        AnswersError: it answers otherwise.
        DigestError, ManifestError: the golden files are not the recorded ones.
        EngineError, TensorError: as `Runner.infer`.
    """
    if not has_golden(manifest, engine):
        return
    facts = _facts(manifest, engine, runner, threads, allow_failed)
    # One that was built again of the bundle's graph has files that the manifest does not list.
    known = engine in manifest.engines and (files is None or files.hashed)
    proof = _proof(facts) if known else None
    if proof is not None and _is_proven(proof):
        return
    found = check_golden(folder, manifest, engine, runner, files)
    if found.as_recorded if allow_failed else found.ok:
        if proof is not None:
            _note(proof, {"bundle": manifest.name, "engine": engine.artifact, **facts["here"], **vars(found)})
        return
    if found.within_bounds:
        text = f"the golden answers of {engine.artifact} prove nothing: {found.proves_nothing}"
        warnings.warn(text, RuntimeWarning, stacklevel=WARNED)
        return
    error = wrong_answers(engine, found, facts["here"], of_graph=not manifest.engines)
    if _has_decimal_commas(folder, engine):
        error.found = "numbers with a decimal comma in its model.xml: OpenVINO wrote it in a process of such a locale"
        error.fix = "compile the engine again: vitdeploy compile GRAPH --target openvino-cpu -o DIR"
    error.bundle, error.engine = str(folder), engine.artifact
    raise error


def _has_decimal_commas(folder: Path, engine: EngineSpec) -> bool:
    """Whether an IR was written with the decimal comma of a locale. Lists have commas too, but not the attributes that
    are looked at."""
    with contextlib.suppress(OSError):
        return any(COMMA.search((folder / name).read_bytes()) for name in engine.files if name.endswith(".xml"))
    return False


def wrong_answers(
    engine: EngineSpec, found: GoldenCheck, here: Mapping[str, str], *, of_graph: bool = False
) -> AnswersError:
    """The error of an engine that does not give its golden answers. `of_graph`: these are those of its graph alone."""
    away = f"{found.difference:.1e} of the largest from"
    if of_graph:
        return AnswersError(
            f"{engine.artifact} gives wrong answers here",
            found=f"its outputs for {found.inputs} seeded images are {away} those of its graph "
            f"(allowed {found.tolerance:.1e}); {_where(engine, here)}",
            wanted="what ONNX Runtime without optimisation gives for the same graph",
            fix="take another version of the runtime, another target or another precision; `vitdeploy verify GRAPH "
            "--against FLOAT_GRAPH --data IMAGES --bisect` names the first layer that differs on images of yours",
        )
    return AnswersError(
        f"{engine.artifact} gives wrong answers here",
        found=f"{found.same} of {found.inputs} answers are the original's (at least {found.least_same} must be); its "
        f"outputs are {away} those when the bundle was made (allowed {found.tolerance:.1e}); {_where(engine, here)}",
        wanted="the answers that the bundle keeps of its original and of this engine",
        fix="take another engine of the bundle or another version of the runtime; "
        "`vitdeploy inspect BUNDLE --check` tells all engines, "
        "`vitdeploy verify BUNDLE --against MODEL --data IMAGES --bisect` the first layer that differs",
    )


def _facts(
    manifest: Manifest, engine: EngineSpec, runner: Runner, threads: int, allow_failed: bool
) -> dict[str, Mapping[str, Any]]:
    """Everything that an engine's answers depend on: its files, how it is run, and what it runs on."""
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
        "here": {target.package: str(version), **describe_host(), **RUNTIME[engine.target].describe_device()},
    }


def _proof(facts: Mapping[str, Any]) -> str:
    """The name of the file that says that an engine with these facts has passed."""
    return f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}.json"


def _is_proven(proof: str) -> bool:
    """Others could write into a folder that is not private, and so vouch for an engine."""
    folder = user_cache() / PROVEN
    return is_private(folder) and (folder / proof).is_file()


def _note(proof: str, facts: Mapping[str, Any]) -> None:
    """Remember that it passed. Where nothing can be written, each load runs the golden inputs again."""
    with contextlib.suppress(OSError, StorageError, UnsafeError):
        text = json.dumps(dict(facts), indent=1, sort_keys=True) + "\n"
        write_atomic(private_folder(PROVEN) / proof, text.encode(), 0o600)


def _where(engine: EngineSpec, here: Mapping[str, str]) -> str:
    package = TARGETS[engine.target].package
    return f"{package} {here.get(package, '')} on {here.get('cpu', 'this CPU')} ({here.get('isa', '')})"

"""Choose the engine of a bundle for an app, with a reason."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.bundle import checked, sign
from vitdeploy.errors import GateError, HostError, TargetError, VitdeployError
from vitdeploy.runtime import golden, values
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import EngineSpec, Manifest

AUTO = "auto"
# Stack level of warnings from here to the caller of `load`, past its function `read`, `retry_if_replaced` and `load`.
CALLER = 5
_UNPROVEN = {
    "fail": "failed its budget when the bundle was made",
    "undecided": "was not shown to meet its budget when the bundle was made",
}


def choose_engine(
    folder: Path,
    manifest: Manifest,
    target: str,
    threads: int,
    trust: Path | None = None,
    batch: int | None = None,
    *,
    allow_failed: bool = False,
    streams: int = 1,
    files: checked.CheckedFiles | None = None,
) -> tuple[Runner, EngineSpec, str]:
    """Return the loaded runner, the spec and the reason for the first engine of the manifest that works here: its
    runtime is installed and loads it, and it reproduces its golden answers (`golden`). `target` is a target, an
    engine's name, or "auto" for all engines.

    The manifest lists the recommended engine first. An engine that failed its budget when the bundle was made is
    skipped, unless `allow_failed`. A RuntimeWarning is issued if INT8 products may saturate on this CPU, or if the
    engine was not shown to meet its budget. `files`: from `open_checked`, which has already verified the signature of
    `trust`.

    Raises:
        SignatureError: not signed by `trust`.
        DigestError: a file of an engine differs from the manifest's record.
        TargetError: no engine for `target`, or one with a fixed batch other than `batch`.
        GateError: every engine for `target` failed its budget.
        AnswersError: the only engine does not reproduce its golden answers.
        HostError: no engine works here.
    """
    if files is None:
        sign.signed_by(folder, trust)
        files = checked.CheckedFiles(folder, manifest)
    failures: list[HostError] = []
    engines = select_engines(manifest, target)
    engines = engines if allow_failed else usable_engines(manifest, engines)
    for engine in engines:
        files.require(engine.files)
        try:
            runner = _answering(make_runner(folder, engine, batch=batch, threads=threads, trust=trust, streams=streams))
            _checked(files, engine, runner, threads, allow_failed)
        except HostError as error:
            files.require_unchanged(engine.files)  # a changed file explains the failure: do not try another engine then
            failures.append(error)
            continue
        bits = values.bits_of(engine)
        if bits is not None and (text := values.saturation_warning(bits, describe_host()["isa"])):
            warnings.warn(f"{engine.artifact}: {text}", RuntimeWarning, stacklevel=CALLER)
        if manifest.gate(engine) in ("fail", "undecided"):
            warnings.warn(f"{engine.artifact} {_UNPROVEN[manifest.gate(engine)]}", RuntimeWarning, stacklevel=CALLER)
        return runner, engine, _why(manifest, engine, engines, target, failures)
    if len(failures) == 1:
        raise failures[0]
    raise HostError(
        f"no engine of {folder} works here",
        found="; ".join(error.message for error in failures) or "no engine at all",
        fix=" or ".join(error.fix for error in failures if error.fix),
    )


def _answering(runner: Runner) -> Runner:
    """Return the runner, loaded and run once: some runtimes fail only at the first run, and for all it is the
    slowest."""
    runner.load()
    try:
        feeds = runner.example(1)
        shapes = {tensor.name: (tensor.with_batch(1).shape, tensor.dtype) for tensor in runner.inputs}
        if feeds is None and all(isinstance(size, int) for shape, _ in shapes.values() for size in shape):
            feeds = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}  # type: ignore[arg-type]
        if feeds is not None:
            runner.infer(feeds)
    except VitdeployError:
        runner.close()
        raise
    return runner


def _checked(files: checked.CheckedFiles, engine: EngineSpec, runner: Runner, threads: int, allow_failed: bool) -> None:
    """Check the files and golden answers of a loaded runner; close it if a check fails."""
    try:
        files.require_unchanged(engine.files)
        golden.require_golden_answers(
            files.folder, files.manifest, engine, runner, threads=threads, allow_failed=allow_failed, files=files
        )
    except BaseException:
        runner.close()
        raise


def usable_engines(manifest: Manifest, engines: Sequence[EngineSpec]) -> list[EngineSpec]:
    """Return the engines that did not fail their budget when the bundle was made; `engines` is not empty.

    Raises:
        GateError: all of them failed.
    """
    usable = [engine for engine in engines if manifest.gate(engine) != "fail"]
    if not usable:
        raise GateError(
            f"every requested engine of the bundle {manifest.name} failed its budget",
            found=", ".join(engine.artifact for engine in engines),
            expected="an engine that meets its budget; the bundle's report.html gives the reasons",
            fix="choose another engine of the bundle, or `vitdeploy run` with another budget; "
            "in Python, load(..., allow_failed=True) loads it anyway",
        )
    return usable


def _why(
    manifest: Manifest,
    engine: EngineSpec,
    engines: Sequence[EngineSpec],
    target: str,
    failures: Sequence[VitdeployError],
) -> str:
    """The reason for the choice, for logs: the request, and the engines that do not work here."""
    if target != AUTO:
        reason = f"selected by the target {target}"
    elif engine.artifact == manifest.recommended:
        reason = "the bundle's recommended engine"
    elif len(engines) == 1:
        reason = "the bundle's only engine"
    elif manifest.grade == "leading" and engine == manifest.engines[0]:
        reason = f"the leading engine, measured on a busy machine; possibly as fast: {', '.join(manifest.rivals)}"
    elif manifest.grade == "no ranking":
        reason = "the first in a fixed order that works here: the engines were not ranked by latency"
    else:
        reason = "the first of the bundle's engines that works here"
    passed = [f"{other.artifact}: {error.message}" for other, error in zip(engines, failures, strict=False)]
    return f"{engine.artifact}: " + "; ".join([reason, *passed])


def _way_to(target: str) -> str:
    """The fix for an engine that a bundle lacks; `target` is a target, or an engine's name as in reports."""
    name = max((each for each in TARGETS if target == each or target.startswith(f"{each}-")), key=len, default="")
    precision = target.removeprefix(name).removeprefix("-")
    if not name or (precision and precision not in TARGETS[name].precisions):
        return f"{target} is not a target; omit it to use the best engine that works here"
    if precision in ("", "fp32", "fp16", "bf16"):
        how = f" --precision {precision}" if precision else ""
        return f"vitdeploy compile BUNDLE --target {name}{how} -o DIR"
    return f"vitdeploy run RECIPE with `targets: [{name}]` and a looser budget, or --set bundle.include_failed=true"


def select_engines(manifest: Manifest, target: str) -> list[EngineSpec]:
    """Return the engines of a target in the manifest's order (all engines for "auto"), or the engine with that name.

    Raises:
        TargetError: the bundle has no such engine.
    """
    chosen = [engine for engine in manifest.engines if target in (AUTO, engine.target, engine.artifact)]
    if not manifest.engines:
        raise TargetError(
            f"the bundle {manifest.name} has no engine",
            found="none",
            expected="an engine that meets its budget; the bundle's report.html gives the reasons",
            fix="vitdeploy run RECIPE with another budget, or with --set bundle.include_failed=true",
        )
    if not chosen:
        raise TargetError(
            f"the bundle {manifest.name} has no engine for {target}",
            found=", ".join(engine.artifact for engine in manifest.engines),
            expected="an engine of the bundle; its report also lists engines that were measured but not included",
            fix=_way_to(target),
        )
    return chosen

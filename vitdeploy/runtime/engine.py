"""From an EngineSpec to the runner of its back end."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.errors import TargetError
from vitdeploy.runtime.backend import RUNTIME, RunnerRequest
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import EngineSpec


def make_runner(
    folder: Path,
    engine: EngineSpec,
    *,
    batch: int | None = None,
    threads: int = 0,
    trust: Path | None = None,
    streams: int = 1,
) -> Runner:
    """The runner (not loaded yet) of an engine whose files lie under `folder`.

    `batch` None takes the batch that the engine was compiled at. `trust` is the file of an identity whose signature
    allows loading engines that are code (`bundle.sign.signed_by`). `streams` runs go on at once and share the threads:
    on OpenVINO only, others have one.

    Raises:
        TargetError: an unknown target, or a batch other than the one a static engine has.
    """
    if batch is not None and batch != engine.batch and not engine.dynamic_batch:
        raise TargetError(
            f"{engine.artifact} cannot run at batch {batch}",
            found=f"a graph with the fixed batch {engine.batch}",
            wanted="export: {batch: dynamic}",
            fix="export with a dynamic batch, or with the batch that you need",
        )
    size = batch or engine.batch
    if engine.parts:
        return _sequence_runner(folder, engine, size, threads, trust)
    request = RunnerRequest(folder, engine, size, threads, streams, trust)
    return RUNTIME[engine.target].make_runner(request)


def _sequence_runner(folder: Path, engine: EngineSpec, batch: int, threads: int, trust: Path | None) -> Runner:
    from vitdeploy.runtime.sequence_runner import SequenceRunner

    parts = {part.part: part for part in engine.parts}
    if engine.sequence is None or set(parts) != {"encoder", "decoder_step"}:
        raise TargetError(
            f"{engine.artifact} cannot be run",
            found=f"parts {', '.join(parts)}",
            wanted="the parts encoder and decoder_step, and how to decode with them",
        )
    encoder, step = (
        make_runner(folder, parts[name], batch=batch, threads=threads, trust=trust)
        for name in ("encoder", "decoder_step")
    )
    return SequenceRunner(encoder, step, engine.sequence, name=engine.artifact)

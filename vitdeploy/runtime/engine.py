"""From an EngineSpec to the runner of its back end: the one place that knows them all."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.errors import TargetError
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import TARGETS, EngineSpec


def make_runner(folder: Path, engine: EngineSpec, *, batch: int | None = None, threads: int = 0) -> Runner:
    """The runner (not loaded yet) of an engine whose files lie under `folder`.

    `batch` None takes the batch that the engine was compiled at.

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
    target = TARGETS.get(engine.target)
    if target is not None and target.backend == "onnxruntime":
        from vitdeploy.runtime.ort import OnnxRuntimeRunner

        return OnnxRuntimeRunner(folder / engine.files[0], name=engine.artifact, batch=size, threads=threads)
    if target is not None and target.backend == "openvino":
        from vitdeploy.runtime.openvino import OpenVinoRunner

        return OpenVinoRunner(
            folder / engine.files[0], name=engine.artifact, batch=size, options=engine.options, threads=threads
        )
    raise TargetError(f"no back end for the target {engine.target!r}", wanted=", ".join(TARGETS))

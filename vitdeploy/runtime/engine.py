"""From an EngineSpec to the runner of its back end."""

from pathlib import Path

from vitdeploy.errors import TargetError
from vitdeploy.runtime import backend, runner
from vitdeploy.spec import MAX_BATCH, EngineSpec

# Of one engine: above what any machine has cores.
MAX_THREADS = 4096


def make_runner(
    folder: Path,
    engine: EngineSpec,
    *,
    batch: int | None = None,
    threads: int = 0,
    trust: Path | None = None,
    streams: int = 1,
    spinning: bool = True,
) -> runner.Runner:
    """The runner (not loaded yet) of an engine whose files lie under `folder`.

    `batch` None takes the batch that the engine was compiled at. `trust` is the file of an identity whose signature
    allows loading engines that are code (`bundle.sign.signed_by`). `streams` runs go on at once and share the threads:
    engines of one graph on OpenVINO's and ONNX Runtime's CPU; others have one. `spinning`: threads of ONNX Runtime that
    have nothing to do wait awake for the next run, for some 30 ms; False leaves their cores to other processes.

    Raises:
        TargetError: an unknown target, a batch other than the one a static engine has, or numbers that none takes.
    """
    for what, number, least, most in (
        ("batch", engine.batch if batch is None else batch, 1, MAX_BATCH),
        ("threads", threads, 0, MAX_THREADS),
        ("streams", streams, 1, MAX_THREADS),
    ):
        if not isinstance(number, int) or not least <= number <= most:
            raise TargetError(
                f"{engine.artifact} cannot run with {what} {number!r}",
                expected=f"a whole number from {least} to {most:,}",
            )
    if batch is not None and batch != engine.batch and not engine.dynamic_batch:
        raise TargetError(
            f"{engine.artifact} cannot run at batch {batch}",
            found=f"a graph with the fixed batch {engine.batch}",
            expected="export: {batch: dynamic}",
            fix="export with a dynamic batch, or with the batch that you need",
        )
    size = batch or engine.batch
    if engine.parts:
        return _flow_runner(folder, engine, size, threads, trust, spinning)
    request = backend.RunnerRequest(folder, engine, size, threads, streams, trust, spinning)
    return backend.RUNTIME[engine.target].make_runner(request)


def _flow_runner(
    folder: Path, engine: EngineSpec, batch: int, threads: int, trust: Path | None, spinning: bool
) -> runner.Runner:
    """The runner of an engine of several parts. `batch` is that of the first; parts that count something else, such as
    texts beside images, keep the batch that they were compiled at."""
    from vitdeploy.runtime.flow import FlowRunner
    from vitdeploy.runtime.sequence import SequenceRunner
    from vitdeploy.runtime.text_decoder import TextRunner

    flow, specs = engine.flow, {part.part: part for part in engine.parts}
    if flow is None:
        raise TargetError(
            f"nothing says how the parts of {engine.artifact} run together", expected="a flow in the manifest"
        )
    decodes = flow.parts[-1].repeats
    decodable = engine.sequence is not None and len(flow.parts) == 2
    if set(specs) != {part.name for part in flow.parts} or (decodes and not decodable):
        raise TargetError(
            f"{engine.artifact} cannot be run",
            found=f"parts {', '.join(specs)}" + ("" if engine.sequence or not decodes else ", and no way to decode"),
            expected="the parts " + " and ".join(part.name for part in flow.parts) + ", and how to run them",
        )
    parts = {}
    for part in flow.parts:
        spec = specs[part.name]
        size = batch if part.batch == flow.parts[0].batch else spec.batch
        if part.repeats and engine.sequence is not None and engine.sequence.search is not None:
            size *= engine.sequence.search.beams  # which run side by side
        parts[part.name] = make_runner(folder, spec, batch=size, threads=threads, trust=trust, spinning=spinning)
    if not decodes:
        return FlowRunner(flow, parts, name=engine.artifact)
    assert engine.sequence is not None
    first, step = parts.values()
    kind = TextRunner if engine.sequence.source_vocabulary is None else SequenceRunner
    return kind(first, step, engine.sequence, name=engine.artifact, flow=flow)

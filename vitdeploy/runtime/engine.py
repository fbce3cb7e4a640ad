"""Make the runner of an EngineSpec."""

from pathlib import Path

from vitdeploy.errors import TargetError
from vitdeploy.runtime import backend, runner
from vitdeploy.spec import MAX_BATCH, EngineSpec

# Limit of threads per engine, above the cores of any machine.
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
    """Return the runner (not loaded yet) of an engine whose files are under `folder`.

    `batch` None uses the batch that the engine was compiled at. `trust` is the key or certificate of an identity whose
    signature allows loading native-code engines (`bundle.sign.signed_by`). `streams` is the number of concurrent runs,
    which share the threads: supported by single-graph engines on OpenVINO's and ONNX Runtime's CPU; others have one.
    `spinning`: idle threads of ONNX Runtime spin for some 30 ms, waiting for the next run; False leaves their cores to
    other processes.

    Raises:
        TargetError: an unknown target, a batch that differs from a static engine's, or a number out of range.
    """
    for what, number, least, most in (
        ("batch", engine.batch if batch is None else batch, 1, MAX_BATCH),
        ("threads", threads, 0, MAX_THREADS),
        ("streams", streams, 1, MAX_THREADS),
    ):
        if not isinstance(number, int) or not least <= number <= most:
            raise TargetError(
                f"{engine.artifact} cannot run with {what} {number!r}",
                expected=f"an integer from {least} to {most:,}",
            )
    if batch is not None and batch != engine.batch and not engine.dynamic_batch:
        raise TargetError(
            f"{engine.artifact} cannot run at batch {batch}",
            found=f"a graph with the fixed batch {engine.batch}",
            expected=f"batch {engine.batch}, or an engine with a dynamic batch",
            fix="export with `export: {batch: dynamic}`, or with the batch that you need",
        )
    size = batch or engine.batch
    if engine.parts:
        return _flow_runner(folder, engine, size, threads, trust, spinning)
    request = backend.RunnerRequest(folder, engine, size, threads, streams, trust, spinning)
    return backend.RUNTIME[engine.target].make_runner(request)


def _flow_runner(
    folder: Path, engine: EngineSpec, batch: int, threads: int, trust: Path | None, spinning: bool
) -> runner.Runner:
    """Return the runner of a multi-part engine. `batch` applies to the first part and those with the same leading axis;
    the others, such as a text encoder, keep the batch that they were compiled at."""
    from vitdeploy.runtime.flow import FlowRunner
    from vitdeploy.runtime.sequence import SequenceRunner
    from vitdeploy.runtime.text_decoder import TextRunner

    flow, specs = engine.flow, {part.part: part for part in engine.parts}
    if flow is None:
        raise TargetError(
            f"the manifest does not say how the parts of {engine.artifact} connect", expected="a flow in the manifest"
        )
    decodes = flow.parts[-1].repeats
    decodable = engine.sequence is not None and len(flow.parts) == 2
    if set(specs) != {part.name for part in flow.parts} or (decodes and not decodable):
        raise TargetError(
            f"{engine.artifact} cannot be run",
            found=f"parts {', '.join(specs)}"
            + ("" if engine.sequence or not decodes else ", without decoding settings"),
            expected="the parts " + " and ".join(part.name for part in flow.parts) + " with their decoding settings",
        )
    parts = {}
    for part in flow.parts:
        spec = specs[part.name]
        size = batch if part.batch == flow.parts[0].batch else spec.batch
        if part.repeats and engine.sequence is not None and engine.sequence.search is not None:
            size *= engine.sequence.search.beams  # beams run as rows of the batch
        parts[part.name] = make_runner(folder, spec, batch=size, threads=threads, trust=trust, spinning=spinning)
    if not decodes:
        return FlowRunner(flow, parts, name=engine.artifact)
    assert engine.sequence is not None
    first, step = parts.values()
    kind = TextRunner if engine.sequence.source_vocabulary is None else SequenceRunner
    return kind(first, step, engine.sequence, name=engine.artifact, flow=flow)

"""Reads a device's answers as untrusted data: nothing in them names a file here, or is accepted without a check."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from vitdeploy.benchmark.context import LONGEST_NAME, MOST_FUSED, Context
from vitdeploy.benchmark.protocol import Protocol, parse_scenario
from vitdeploy.benchmark.results import BenchRun, Entry
from vitdeploy.bundle.read import ENGINE_OPTIONS
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.devices.agent.documents import FORMAT, Failure, Job, Placed, Probe, Result, Status
from vitdeploy.devices.agent.stream import StreamError, read_json
from vitdeploy.devices.call import printable
from vitdeploy.errors import DeviceResultError, VitdeployError, error_with_code
from vitdeploy.spec import DecodeError, EngineSpec, decode

T = TypeVar("T")

# What a device may say of each kind of number: a query of an hour is none.
LONGEST_SECONDS = 24 * 3600.0
# Operations or bytes a second, far beyond any machine; layers, and runs, of any model.
FASTEST, MOST = 1e18, 100_000


def refuse(device: str, what: str, found: object = "", wanted: object = "") -> DeviceResultError:
    """The error that a device's answer is not what was requested."""
    return DeviceResultError(
        f"{device}: {what}",
        found=printable(str(found))[:300],
        wanted=str(wanted),
        fix="run the command again; if it comes back, something on the device changes results",
    )


def parse(device: str, line: bytes, kind: type[T]) -> T:
    """Parse a line to its dataclass.

    Raises:
        DeviceResultError: it does not.
        VitdeployError: the error that it reports instead, as the class that has its code.
    """
    try:
        document = read_json(line)
        if isinstance(document, dict) and set(document) == {"failure"}:
            raise reported(device, decode(Failure, document["failure"]))
        return decode(kind, document)
    except StreamError as error:
        raise refuse(device, "an answer that is none", error) from None
    except DecodeError as error:
        raise refuse(device, "an answer that does not fit", "; ".join(error.problems[:3])) from None


def reported(device: str, failure: Failure) -> VitdeployError:
    """The error that a device reports."""
    words = {name: printable(getattr(failure, name)) for name in ("message", "found", "wanted", "fix")}
    where = f"{device}: {failure.artifact}: " if failure.artifact else f"{device}: "
    if words["fix"]:
        words["fix"] = f"on {device}: {words['fix']}"
    return error_with_code(failure.code, printable(where) + words.pop("message"), **words)


def check_status(status: Status) -> Status:
    """The same, fit for a terminal."""
    progress = status.progress and (printable(status.progress[0]), *status.progress[1:])
    return Status(status.state, printable(status.detail), progress)


def check_probe(probe: Probe) -> Probe:
    """The same, fit for a terminal."""
    cleaned: Probe = _clean(probe)
    return cleaned


def _clean(value: Any) -> Any:
    """A tree of plain data with all its texts printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clean(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _clean(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def check_result(device: str, result: Result, job: Job) -> Result:
    """The result of just this job, with the engines that it asked for, and files of the names that these may have.

    Raises:
        DeviceResultError: it is not.
        VitdeployError: the whole job failed there.
    """
    if (result.format, result.job) != (FORMAT, job.digest):
        raise refuse(device, "the result of another job", result.job, job.digest)
    if result.failure is not None:
        raise reported(device, result.failure)
    asked = {placed.name: placed for placed in job.artifacts}
    said = [*result.engines, *(failure.artifact for failure in result.left_out)]
    if sorted(said) != sorted(asked):
        raise refuse(device, "a result of other artifacts", ", ".join(said), ", ".join(asked))
    for name, engine in result.engines.items():
        check_engine(device, engine, asked[name])
    wanted = [file for engine in result.engines.values() for file in product_files(engine)]
    given = [entry.path for entry in result.files] if job.kind == "compile" else []
    if sorted(given) != sorted(wanted if job.kind == "compile" else []) or (job.kind == "bench" and result.files):
        raise refuse(device, "other files than those of the engine", ", ".join(given), ", ".join(wanted))
    return dataclasses.replace(result, host=_clean(result.host), engines=_clean(result.engines))


def product_files(engine: EngineSpec) -> list[str]:
    """The files of an engine beside the graphs that it was made of."""
    return [name for name in engine.files if not name.endswith((".onnx", ".onnx.data"))]


def check_engine(device: str, engine: EngineSpec, asked: Placed) -> EngineSpec:
    """The engine of one placement: for its target, in its precision, of files whose names are known here."""
    facts = (engine.target, engine.precision, engine.batch, engine.weight_bits)
    wanted = (asked.target, asked.precision, asked.batch, asked.weight_bits)
    if facts != wanted:
        raise refuse(device, "the engine of something else than was sent", facts, wanted)
    if asked.plan is not None and engine == asked.plan:
        return engine
    parts = [graph.part for graph in asked.graphs] if len(asked.graphs) > 1 else []
    if [part.part for part in engine.parts] != parts or not engine.inputs or not engine.outputs:
        raise refuse(device, "an engine of other parts", [part.part for part in engine.parts], parts)
    # Compilers leave each graph's weights beside it, under the name that the graph has for them.
    own = {
        "graph.onnx",
        *COMPILE[asked.target].files,
        *(f"{graph.file.rpartition('/')[2]}.data" for graph in asked.graphs),
    }
    allowed = {f"{part}/{name}" for part in parts for name in own} if parts else own
    named = {name for part in (engine, *engine.parts) for name in (part.graph, *part.files)}
    options = {name for part in (engine, *engine.parts) for name in part.options}
    if named - allowed or options - ENGINE_OPTIONS:
        odd = sorted([*(named - allowed), *(options - ENGINE_OPTIONS)])
        raise refuse(device, "an engine that is not allowed", ", ".join(odd), "the files and options of its target")
    if parts and {name for part in engine.parts for name in part.files} != set(engine.files):
        raise refuse(device, "an engine whose parts have other files", ", ".join(engine.files))
    if any(count < 0 for count in engine.kernels.values()):
        raise refuse(device, "an engine with a negative number of kernels", engine.kernels)
    return engine


def check_run(device: str, document: Any, protocol: Protocol, names: list[str]) -> BenchRun:
    """The measurements of just these artifacts under just this protocol, with possible numbers only."""
    try:
        bench_run = decode(BenchRun, document)
    except DecodeError as error:
        raise refuse(device, "measurements that do not fit", "; ".join(error.problems[:3])) from None
    if bench_run.protocol != protocol:
        raise refuse(device, "measurements under another protocol", bench_run.protocol, protocol)
    found = [entry.artifact for entry in bench_run.entries]
    if found != names:
        raise refuse(device, "measurements of other artifacts", ", ".join(found), ", ".join(names))
    if not 1 <= bench_run.cpus <= 4096:
        raise refuse(device, "an impossible number of CPUs", bench_run.cpus)
    for entry in bench_run.entries:
        _check_entry(device, entry, protocol)
    for name in protocol.scenarios:
        if len(counts := {len(entry.rounds[name]) for entry in bench_run.entries}) > 1:
            raise refuse(device, f"rounds of {name} that were not measured in turns", sorted(counts))
    if bench_run.context is not None:
        _check_context(device, bench_run.context, protocol, names)
    cleaned: BenchRun = _clean(bench_run)
    return cleaned


def _check_entry(device: str, entry: Entry, protocol: Protocol) -> None:
    times = [entry.load_seconds, entry.first_inference_ms / 1e3]
    if sorted(entry.rounds) != sorted(protocol.scenarios):
        raise refuse(device, "measurements of other scenarios", ", ".join(entry.rounds), ", ".join(protocol.scenarios))
    for name, rounds in entry.rounds.items():
        spread = parse_scenario(name).spread
        least, most = protocol.blocks(name), protocol.most_rounds if spread else protocol.blocks(name)
        if not least <= len(rounds) <= most or {block.batch for block in rounds} != {protocol.batch_of(name)}:
            raise refuse(device, f"{len(rounds)} rounds of {name}", wanted=f"{least} to {most}")
        processes = protocol.processes * (protocol.most_sessions if spread else 1)
        for block in rounds:
            if not 0 <= block.process < processes:
                raise refuse(device, "a block of a process that was not asked for", block.process, processes)
            if not 0 <= block.begun_seconds < float("inf"):
                raise refuse(device, "a block of an impossible time", block.begun_seconds)
            latencies = block.latencies_ms / 1e3
            times += [block.seconds, *latencies.tolist()]
            if parse_scenario(name).kind == "server":
                continue  # queries may wait since before their block, and there may be none
            if not latencies.size or latencies.sum() > 1.01 * block.seconds:
                raise refuse(device, "a block without a query, or with queries that took longer than it")
    impossible = [seconds for seconds in times if not 0 < seconds <= LONGEST_SECONDS]
    if impossible or any(not 0 <= time < LONGEST_SECONDS * 1e3 for each in entry.stages_ms.values() for time in each):
        raise refuse(device, "impossible times", impossible[:3])


def _check_context(device: str, context: Context, protocol: Protocol, names: list[str]) -> None:
    """Check that rates and layers are the requested ones, with plausible sizes."""
    batch, memory = protocol.batch_of(protocol.latency_scenario), context.memory
    profiled = [profile.artifact for profile in context.profiles]
    probed = [(rate.target, rate.precision) for rate in context.rates]
    if set(profiled) - set(names) or len(set(profiled)) < len(profiled) or len(set(probed)) < len(probed):
        raise refuse(device, "a context of other artifacts", ", ".join(profiled), ", ".join(names))
    if any(profile.batch != batch or not 1 <= profile.runs <= MOST for profile in context.profiles):
        raise refuse(device, "layers at another batch, or of no run")
    if max((len(each) for each in (context.left_out, *(p.layers for p in context.profiles))), default=0) > MOST:
        raise refuse(device, "more layers than a model has")
    rates = [rate.flops for rate in context.rates] + ([] if memory is None else [memory.bytes_per_second])
    sizes = [size for rate in context.rates for size in rate.shape]
    sizes += [] if memory is None else [memory.array_bytes, memory.threads, memory.cache_bytes or 1]
    if any(not 0 < rate < FASTEST for rate in rates) or any(not 1 <= size < 1 << 50 for size in sizes):
        raise refuse(device, "impossible rates", rates)
    layers = [layer for profile in context.profiles for layer in profile.layers]
    times = [*(layer.milliseconds for layer in layers), *(profile.per_layer_ms for profile in context.profiles)]
    times += [profile.latency_ms for profile in context.profiles]
    if any(not 0 <= time < LONGEST_SECONDS * 1e3 for time in times):
        raise refuse(device, "layers with impossible times")
    texts = [text for layer in layers for text in (layer.name, layer.kind, layer.precision, *layer.fuses)]
    if any(len(text) > LONGEST_NAME for text in texts) or any(len(layer.fuses) > MOST_FUSED for layer in layers):
        raise refuse(device, "layers with longer names than a profile has")

"""Reads a device's answers as untrusted data: nothing in them names a file here, or is accepted without a check."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from vitdeploy.benchmark import results, summary
from vitdeploy.benchmark.context import LONGEST_NAME, MOST_FUSED, Context
from vitdeploy.benchmark.protocol import Protocol, parse_scenario
from vitdeploy.benchmark.tail import Tail, p99_ms, tail_of
from vitdeploy.bundle.read import ENGINE_OPTIONS
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.devices.agent import documents, stream
from vitdeploy.devices.call import printable
from vitdeploy.errors import DeviceError, DeviceResultError, VitdeployError, error_with_code
from vitdeploy.runtime.choice import select_engines, usable_engines
from vitdeploy.spec import DecodeError, EngineSpec, Manifest, TensorSpec, decode

T = TypeVar("T")
Shape = tuple[int | str, ...]

# What a device may say of each kind of number: a query of a day is none, nor one of less than a nanosecond.
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 24 * 3600.0
# Operations or bytes a second, far beyond any machine; layers, and runs, of any model; CPUs of any machine.
FASTEST, MOST, MOST_CPUS = 1e18, 100_000, 4096
# Of a whole run, and of the CPU time of a block.
LONGEST_RUN = MOST_CPUS * LONGEST_SECONDS
# Of the tensors of an engine: how many there are, their axes and sizes, what they take in bytes with dynamic axes of 1.
MOST_TENSORS, MOST_AXES, LARGEST_AXIS, MOST_TENSOR_BYTES = 1000, 16, 1 << 31, 4 << 30
BYTES_OF = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}
STAGES = {f.name for f in dataclasses.fields(summary.StageTimes)} - {"end_to_end_p90", "copies", "images"}
# An engine's files may be so many times larger than what it was made of, and so many bytes.
GROWTH, SPARE_BYTES = 8, 1 << 30


def refuse(device: str, what: str, found: object = "", expected: object = "") -> DeviceResultError:
    """The error that a device's answer is not what was requested."""
    return DeviceResultError(
        f"{device}: {what}",
        found=printable(str(found))[:300],
        expected=str(expected),
        fix="run the command again; if it comes back, something on the device changes results",
    )


def parse(device: str, line: bytes, kind: type[T]) -> T:
    """Parse a line to its dataclass.

    Raises:
        DeviceResultError: it does not.
        VitdeployError: the error that it reports instead, as the class that has its code.
    """
    odd = problem_of_line(line)
    if odd:
        raise refuse(device, "an answer of absurd sizes", odd)
    try:
        document = stream.read_json(line)
        odd = problem_of(document)
        if odd:
            raise refuse(device, "an answer of absurd sizes", odd)
        if isinstance(document, dict) and set(document) == {"failure"}:
            raise reported(device, decode(documents.Failure, document["failure"]))
        return decode(kind, document)
    except stream.StreamError as error:
        raise refuse(device, "an answer that is none", error) from None
    except DecodeError as error:
        raise refuse(device, "an answer that does not fit", "; ".join(error.problems[:3])) from None


def reported(device: str, failure: documents.Failure) -> VitdeployError:
    """The error that a device reports. One that only a bug explains, or no code of ours, is an error of the device: a
    bug here, or a gate, is not for it to say."""
    words = {name: printable(getattr(failure, name)) for name in ("message", "found", "expected", "fix")}
    where = f"{device}: {failure.artifact}: " if failure.artifact else f"{device}: "
    if words["fix"]:
        words["fix"] = f"on {device}: {words['fix']}"
    error = error_with_code(failure.code, printable(where) + words.pop("message"), **words)
    if error.exit_code in (2, 3, 4):
        return error
    fix = words["fix"] or "run the command again; if it comes back, look at the Python there, then please report it"
    return DeviceError(error.message, found=error.found, expected=error.expected, fix=fix)


def clean(value: T) -> T:
    """A tree of plain data with all its texts printable."""
    return cast(T, _clean(value))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clean(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _clean(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def check_result(device: str, result: documents.JobResult, job: documents.DeviceJob) -> documents.JobResult:
    """The result of just this job, with the engines that it asked for, and files of the names that these may have.

    Raises:
        DeviceResultError: it is not.
        VitdeployError: the whole job failed there.
    """
    if (result.format, result.job) != (documents.FORMAT, job.digest):
        raise refuse(device, "the result of another job", result.job, job.digest)
    if result.failure is not None:
        raise reported(device, result.failure)
    if (result.tried is None) != (job.kind in ("bench", "compile")):
        raise refuse(device, "the result of another kind of job", result.tried, job.kind)
    asked = {placed.name: placed for placed in job.artifacts}
    said = [*result.engines, *(failure.artifact for failure in result.left_out)]
    if sorted(said) != sorted(asked):
        raise refuse(device, "a result of other artifacts", ", ".join(said), ", ".join(asked))
    for name, engine in result.engines.items():
        check_engine(device, engine, asked[name])
    expected = [file for engine in result.engines.values() for file in product_files(engine)]
    given = [entry.path for entry in result.files] if job.kind == "compile" else []
    if sorted(given) != sorted(expected if job.kind == "compile" else []) or (job.kind != "compile" and result.files):
        raise refuse(device, "other files than those of the engine", ", ".join(given), ", ".join(expected))
    sent, size = sum(entry.bytes for entry in job.files), sum(entry.bytes for entry in result.files)
    if size > GROWTH * sent + SPARE_BYTES:
        raise refuse(device, "files of an impossible size", f"{size:,} bytes", f"what {sent:,} bytes can become")
    return dataclasses.replace(result, host=clean(result.host), engines=clean(result.engines))


def product_files(engine: EngineSpec) -> list[str]:
    """The files of an engine beside the graphs that it was made of."""
    return [name for name in engine.files if not name.endswith((".onnx", ".onnx.data"))]


def check_engine(device: str, engine: EngineSpec, asked: documents.PlacedArtifact) -> EngineSpec:
    """The engine of one placement: for its target, in its precision, of files whose names are known here."""
    facts = (engine.target, engine.precision, engine.batch, engine.weight_bits, engine.row_parts)
    expected = (asked.target, asked.precision, asked.batch, asked.weight_bits, asked.row_parts)
    if facts != expected:
        raise refuse(device, "the engine of something else than was sent", facts, expected)
    if engine.float_rest not in (None, asked.float_rest):
        raise refuse(device, "float operators that were not asked for", engine.float_rest, asked.float_rest)
    if asked.plan is not None and engine == asked.plan:
        return engine
    sent, made = [graph.part for graph in asked.graphs], [part.part for part in engine.parts or (engine,)]
    parts = sent if len(sent) > 1 else []
    # A part names a file here: the graph that it was made of.
    if made != sent or bool(engine.parts) != bool(parts) or not engine.inputs or not engine.outputs:
        raise refuse(device, "an engine of other parts", ", ".join(made), ", ".join(sent))
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
    nested, twice = (
        any(part.parts or part.row_parts for part in engine.parts),
        len(set(engine.files)) < len(engine.files),
    )
    if nested or twice:
        raise refuse(device, "an engine whose parts have parts, or a file twice", ", ".join(engine.files))
    if parts and {name for part in engine.parts for name in part.files} != set(engine.files):
        raise refuse(device, "an engine whose parts have other files", ", ".join(engine.files))
    if any(not 0 <= count <= MOST for part in (engine, *engine.parts) for count in part.kernels.values()):
        raise refuse(device, "an engine with an impossible number of kernels", engine.kernels)
    if engine.sequence not in (None, asked.sequence):
        raise refuse(device, "an engine whose tokens are chosen in another way", engine.sequence, asked.sequence)
    for part in (engine, *engine.parts):
        check_tensors(device, (*part.inputs, *part.outputs))
    return engine


def check_tensors(device: str, tensors: Sequence[TensorSpec]) -> None:
    """Raise DeviceResultError if no engine of ours has such inputs or outputs."""
    if len(tensors) > MOST_TENSORS:
        raise refuse(device, "an engine with more tensors than a model has", len(tensors), MOST_TENSORS)
    for tensor in tensors:
        sizes = [size for size in tensor.shape if isinstance(size, int)]
        fits = tensor.dtype in BYTES_OF and len(tensor.shape) <= MOST_AXES and all(0 <= s < LARGEST_AXIS for s in sizes)
        if not fits or tensor.shape[:1] == (0,) or math.prod(sizes) * BYTES_OF[tensor.dtype] > MOST_TENSOR_BYTES:
            raise refuse(device, "a tensor that no engine has", tensor)


def check_named(device: str, found: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> None:
    """Raise DeviceResultError if tensors are not those of the graph that was sent: its names, and its sizes where both
    are fixed."""
    theirs = {tensor.name: tensor.shape for tensor in found}
    named = len(found) == len(theirs) and theirs.keys() == {tensor.name for tensor in expected}
    if not named or not all(_fits(theirs[tensor.name], tensor.shape) for tensor in expected):
        words = [", ".join(map(str, each)) for each in (found, expected)]
        raise refuse(device, "an engine of another graph", *words)


def _fits(shape: Shape, expected: Shape) -> bool:
    return len(shape) == len(expected) and all(
        a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(shape, expected, strict=True)
    )


def check_run(device: str, document: Any, protocol: Protocol, names: list[str]) -> results.BenchRun:
    """The measurements of just these artifacts under just this protocol, with possible numbers only."""
    try:
        bench_run = decode(results.BenchRun, document)
    except DecodeError as error:
        raise refuse(device, "measurements that do not fit", "; ".join(error.problems[:3])) from None
    if bench_run.protocol != protocol:
        raise refuse(device, "measurements under another protocol", bench_run.protocol, protocol)
    found = [entry.artifact for entry in bench_run.entries]
    if found != names:
        raise refuse(device, "measurements of other artifacts", ", ".join(found), ", ".join(names))
    if not 1 <= bench_run.cpus <= MOST_CPUS:
        raise refuse(device, "an impossible number of CPUs", bench_run.cpus)
    if not 0 <= (bench_run.load_average or 0.0) <= MOST:
        raise refuse(device, "an impossible load", bench_run.load_average)
    for entry in bench_run.entries:
        _check_entry(device, entry, protocol)
    for name in protocol.scenarios:
        if len(counts := {len(entry.rounds[name]) for entry in bench_run.entries}) > 1:
            raise refuse(device, f"rounds of {name} that were not measured in turns", sorted(counts))
    if bench_run.context is not None:
        _check_context(device, bench_run.context, protocol, names)
    return clean(bench_run)


def _check_entry(device: str, entry: results.Measurements, protocol: Protocol) -> None:
    times = [entry.load_seconds, entry.first_inference_ms / 1e3]
    times += [] if entry.warm_load_seconds is None else [entry.warm_load_seconds]
    if sorted(entry.rounds) != sorted(protocol.scenarios):
        raise refuse(device, "measurements of other scenarios", ", ".join(entry.rounds), ", ".join(protocol.scenarios))
    for name, rounds in entry.rounds.items():
        spread = parse_scenario(name).spread
        least, most = protocol.blocks(name), protocol.most_rounds if spread else protocol.blocks(name)
        if not least <= len(rounds) <= most or {block.batch for block in rounds} != {protocol.batch_of(name)}:
            raise refuse(device, f"{len(rounds)} rounds of {name}", expected=f"{least} to {most}")
        if not any(block.latencies_ms.size or block.waiting_ms for block in rounds):
            raise refuse(device, f"rounds of {name} without a query")
        processes = protocol.processes * (protocol.most_sessions if spread else 1)
        for block in rounds:
            if not 0 <= block.process < processes:
                raise refuse(device, "a block of a process that was not asked for", block.process, processes)
            if not 0 <= block.begun_seconds < LONGEST_RUN or not 0 <= block.busy_seconds <= LONGEST_SECONDS:
                raise refuse(device, "a block of an impossible time", (block.begun_seconds, block.busy_seconds))
            if any(not 0 <= age < LONGEST_SECONDS * 1e3 for age in block.waiting_ms):
                raise refuse(device, "a query that has waited for an impossible time")
            if block.machine is not None:
                _check_machine(device, block.machine)
            latencies = block.latencies_ms / 1e3
            times += [block.seconds, *latencies.tolist()]
            if parse_scenario(name).kind == "server":
                continue  # queries may wait since before their block, and there may be none
            if not latencies.size or latencies.sum() > 1.01 * block.seconds:
                raise refuse(device, "a block without a query, or with queries that took longer than it")
    apart = (*entry.stages_ms.values(), *entry.parts_ms.values())
    impossible = [seconds for seconds in times if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS]
    if impossible or any(not 0 <= time < LONGEST_SECONDS * 1e3 for each in apart for time in each):
        raise refuse(device, "impossible times", impossible[:3])
    unknown = sorted(set(entry.stages_ms) - STAGES)
    if unknown or not all(apart) or (entry.stages_ms and "end_to_end" not in entry.stages_ms):
        raise refuse(device, "times of other stages, or of none", ", ".join(entry.stages_ms), ", ".join(sorted(STAGES)))


# Of a block, by the field of `BlockMachine`; what is not read is None. Differences of clocks may be slightly below 0.
POSSIBLE = {
    **dict.fromkeys(
        ("own_seconds", "other_seconds", "stolen_seconds"), (-LONGEST_SECONDS, MOST_CPUS * LONGEST_SECONDS)
    ),
    **dict.fromkeys(("suspended_seconds", "waited_seconds"), (-1.0, LONGEST_RUN)),
    "joules": (-1.0, 1e9),
    **dict.fromkeys(("mhz", "limit_mhz"), (0.0, 1e6)),
    "celsius": (-273.15, 1000.0),
    "throttles": (0, 1 << 62),
    "quota_seconds": (0.0, MOST_CPUS * LONGEST_SECONDS),
}


def _check_machine(device: str, machine: results.BlockMachine) -> None:
    for name, (least, most) in POSSIBLE.items():
        value = getattr(machine, name)
        if value is not None and not least <= value <= most:
            raise refuse(device, f"impossible {name.replace('_', ' ')} of a block", value)


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
    rates = [rate.flops_per_second for rate in context.rates] + ([] if memory is None else [memory.bytes_per_second])
    sizes = [size for rate in context.rates for size in (rate.rows, rate.width)]
    sizes += [] if memory is None else [memory.array_bytes, memory.threads, memory.cache_bytes or 1]
    if any(not 0 < rate < FASTEST for rate in rates) or any(not 1 <= size < 1 << 50 for size in sizes):
        raise refuse(device, "impossible rates", rates)
    layers = [layer for profile in context.profiles for layer in profile.layers]
    times = [*(layer.milliseconds for layer in layers), *(profile.per_layer_ms for profile in context.profiles)]
    whole = [profile.latency_ms for profile in context.profiles]
    if any(not 0 <= time < LONGEST_SECONDS * 1e3 for time in (*times, *whole)) or not all(whole):
        raise refuse(device, "layers with impossible times")
    texts = [text for layer in layers for text in (layer.name, layer.kind, layer.precision, *layer.fuses)]
    if any(len(text) > LONGEST_NAME for text in texts) or any(len(layer.fuses) > MOST_FUSED for layer in layers):
        raise refuse(device, "layers with longer names than a profile has")


# --- What a device says of deployments, and how a release did there, by the same rule as there ------------------------


# What an agent calls the two artifacts of its comparison (agent/rollout.py, which is not imported for two words).
NEW, CURRENT = "new", "current"
MOST_DEPLOYMENTS = 1000


@dataclass(frozen=True)
class ReleaseTrial:
    """How a release did on a device. `p99_ms` None: it was not measured. `tail`: against the release before it; None
    where `alone` says why there is none. `failed`: why it may not stay there; "" for a release that may."""

    engine: str
    golden: documents.GoldenResult
    p99_ms: float | None = None
    tail: Tail | None = None
    alone: str = ""
    failed: str = ""
    undecided: str = ""


def check_deployments(device: str, found: Sequence[documents.Deployed]) -> dict[str, documents.Deployed]:
    """By name, what is deployed on a device.

    Raises:
        DeviceResultError: it cannot be.
    """
    names = [each.name for each in found]
    named = len(set(names)) == len(names) and all(map(documents.DEPLOYMENT.fullmatch, names))
    if len(names) > MOST_DEPLOYMENTS or not named:
        raise refuse(device, "deployments of impossible names", names[:5])
    for each in found:
        for release in (each.current, each.previous, each.moving):
            if release and not documents.RELEASE.fullmatch(release):
                raise refuse(device, "a release that is no SHA-256", release)
    return {each.name: each for each in found}


def check_missing(device: str, found: Collection[str], asked: Collection[str]) -> set[str]:
    """Those of the paths that a device was asked for which it has not.

    Raises:
        DeviceResultError: it names others.
    """
    odd = set(found) - set(asked)
    if odd:
        raise refuse(device, "files that it was not asked for", ", ".join(sorted(odd)[:3]))
    return set(found)


def judge(
    device: str, result: documents.JobResult, job: documents.DeviceJob, manifest: Manifest | None
) -> ReleaseTrial:
    """How a release did on a device. Its bounds are those of its manifest here, never the device's; None for a release
    of which only the device has the manifest.

    Raises:
        DeviceResultError: the answer contradicts itself, the manifest, or what was asked.
    """
    tried, options = result.tried, job.release
    assert tried is not None and options is not None  # check_result
    if manifest is not None:
        engines = {each.artifact for each in usable_engines(manifest, select_engines(manifest, options.target))}
        if tried.engine not in engines:
            raise refuse(device, "an engine that the release has not", tried.engine, ", ".join(sorted(engines)))
        _check_bounds(device, tried, manifest)
    golden = tried.golden
    if not 1 <= golden.inputs <= MOST or golden.same > golden.inputs or (golden.difference or 0.0) < 0:
        raise refuse(device, "impossible golden answers", golden)
    if golden.ok and options.expected == "" and not tried.alone and job.protocol is not None:
        raise refuse(device, "a comparison with a release that was not there")
    trial = _trial(device, result, tried, job.protocol, options.worse)
    if tried.kept and (trial.failed or job.kind == "stage"):
        raise refuse(device, "a release is kept that may not stay", trial.failed or "nothing was to be switched")
    if job.kind == "switch" and not tried.kept and not trial.failed:
        return dataclasses.replace(trial, failed="the device took it back")
    return trial


def _trial(
    device: str, result: documents.JobResult, tried: documents.Tried, protocol: Protocol | None, worse: float
) -> ReleaseTrial:
    alone = clean(tried.alone)
    if not tried.golden.ok or protocol is None:
        if result.bench_run is not None:
            raise refuse(device, "measurements that nobody asked for")
        return ReleaseTrial(clean(tried.engine), tried.golden, failed=_wrong(tried.golden), alone=alone)
    names = [NEW] if tried.alone else [NEW, CURRENT]
    bench_run = check_run(device, result.bench_run, protocol, names)
    if tried.alone:
        return ReleaseTrial(tried.engine, tried.golden, p99_ms(bench_run, NEW), alone=alone)
    tail = tail_of(bench_run, NEW, CURRENT)
    failed = _slower(tail, worse) if tail.slower(worse) else ""
    undecided = tail.undecided(worse)
    return ReleaseTrial(tried.engine, tried.golden, tail.a_ms, tail, failed=failed, undecided=undecided)


def _slower(tail: Tail, worse: float) -> str:
    if tail.low > 1 + worse:
        what, (ratio, low, high) = "p99", (tail.ratio, tail.low, tail.high)
    else:
        what, (ratio, low, high) = "the median query", tail.median
    return (
        f"{what} takes {ratio:.2f} times as long as of the current release ({low:.2f} to {high:.2f}); "
        f"p99 is {tail.a_ms:.3g} and {tail.b_ms:.3g} ms"
    )


def _check_bounds(device: str, tried: documents.Tried, manifest: Manifest) -> None:
    golden, found = manifest.golden, tried.golden
    assert golden is not None  # a bundle without golden answers is not deployed
    own = golden.engines.get(tried.engine)
    target = next(each.target for each in manifest.engines if each.artifact == tried.engine)
    expected = (own.tolerance, own.least_same) if own is not None else (golden.tolerance.get(target), 0)
    if (found.tolerance, found.least_same) != expected:
        raise refuse(device, "other bounds than the bundle's", (found.tolerance, found.least_same), expected)


def _wrong(golden: documents.GoldenResult) -> str:
    if golden.ok:
        return ""
    away = "no number" if golden.difference is None else f"{golden.difference:.1e} of the largest"
    return (
        f"golden answers: {golden.same} of {golden.inputs} are the original's (at least {golden.least_same} must be); "
        f"outputs are {away} from the recorded ones (allowed {golden.tolerance:.1e})"
    )


# --- What a device may say at most, whatever is asked -----------------------------------------------------------------
# checked before a line is parsed, and before a document is decoded.
#
# A line of the allowed length can still be a document of many times its size in memory, or hold a number that no
# arithmetic here takes.


# Of a line: its lists and objects, its quotes (two a text), its values. Latencies are most of a result.
MOST_NESTED, MOST_QUOTES, MOST_VALUES = 2_000_000, 16_000_000, 16_000_000
# Of a document: items of a list or object; characters of a text; depth.
MOST_ITEMS, LONGEST_TEXT, DEEPEST = 100_000, 1 << 20, 32
# A number for each query, however many there were; `results.check_run` looks at each.
MEASURED = (".latencies_ms", ".waiting_ms")
# Operations a second are the largest numbers that there are.
LARGEST = 1e18
# What the host has chosen, and compares: tokens may have negative numbers there.
OURS = ("sequence", "protocol")


def problem_of_line(line: bytes) -> str:
    """Why a line is not even parsed; "" for one that is."""
    counts = {
        "lists and objects": (line.count(b"[") + line.count(b"{"), MOST_NESTED),
        "quotes": (line.count(b'"'), MOST_QUOTES),
        "values": (line.count(b","), MOST_VALUES),
    }
    return next((f"{found:,} {what}, more than {most:,}" for what, (found, most) in counts.items() if found > most), "")


def problem_of(value: Any, path: str = "$", depth: int = 0) -> str:
    """What of a parsed document is beyond every measure, with its path; "" for nothing. `path` and `depth` are those of
    `value` in the document.

    Whole numbers count something, so none is negative. One with a fraction may be: a temperature.
    """
    if not isinstance(value, dict | list):
        odd = _problem(value)
    elif path.endswith(MEASURED) and set(map(type, value)) <= {int, float}:
        odd = ""
    elif len(value) > MOST_ITEMS:
        odd = f"{len(value):,} items, more than {MOST_ITEMS:,}"
    elif depth >= DEEPEST:
        odd = f"nested more than {DEEPEST} deep"
    else:
        return next(filter(None, (problem_of(item, path + name, depth + 1) for name, item in _items(value))), "")
    return f"{path}: {odd}" if odd else ""


def _items(container: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """What is in a list or an object, each with the end of its path."""
    if isinstance(container, list):
        return ((f"[{index}]", item) for index, item in enumerate(container))
    return ((f".{key[:60]}", item) for key, item in container.items() if key not in OURS)


def _problem(value: object) -> str:
    if isinstance(value, str):
        return f"a text of {len(value):,} characters" if len(value) > LONGEST_TEXT else ""
    if type(value) is int and not 0 <= value <= LARGEST:
        return f"the number {_short(value)}"
    return f"the number {value:g}" if type(value) is float and not abs(value) <= LARGEST else ""


def _short(value: int) -> str:
    """A whole number, however long."""
    digits = str(abs(value))
    return f"{value}" if len(digits) <= 40 else f"{'-' if value < 0 else ''}{digits[:6]}... of {len(digits):,} digits"

"""Read a device's answers as untrusted data: they cannot name local files, and everything is checked."""

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

# Plausible durations of a query: from a nanosecond to a day.
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 24 * 3600.0
# Upper limits: operations or bytes per second; layers or runs of a model; CPUs of a machine.
FASTEST, MOST, MOST_CPUS = 1e18, 100_000, 4096
# Upper limit of a whole run, and of the CPU time of a block.
LONGEST_RUN = MOST_CPUS * LONGEST_SECONDS
# Upper limits of an engine's tensors: their number, axes, sizes, and bytes with dynamic axes of 1.
MOST_TENSORS, MOST_AXES, LARGEST_AXIS, MOST_TENSOR_BYTES = 1000, 16, 1 << 31, 4 << 30
BYTES_OF = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}
STAGES = {f.name for f in dataclasses.fields(summary.StageTimes)} - {"end_to_end_p90", "copies", "images"}
# The files of an engine may be this many times larger than the files it was built from, plus this many bytes.
GROWTH, SPARE_BYTES = 8, 1 << 30


def refuse(device: str, what: str, found: object = "", expected: object = "") -> DeviceResultError:
    """Return the error for an invalid answer of a device."""
    return DeviceResultError(
        f"{device}: {what}",
        found=printable(str(found))[:300],
        expected=str(expected),
        fix="run the command again; if the error persists, something on the device changes results",
    )


def parse(device: str, line: bytes, kind: type[T]) -> T:
    """Parse a line to its dataclass.

    Raises:
        DeviceResultError: the line is invalid.
        VitdeployError: the error that the device reports, in the class of its code.
    """
    odd = problem_of_line(line)
    if odd:
        raise refuse(device, "the answer exceeds the limits", odd)
    try:
        document = stream.read_json(line)
        odd = problem_of(document)
        if odd:
            raise refuse(device, "the answer exceeds the limits", odd)
        if isinstance(document, dict) and set(document) == {"failure"}:
            raise reported(device, decode(documents.Failure, document["failure"]))
        return decode(kind, document)
    except stream.StreamError as error:
        raise refuse(device, "an invalid answer", error) from None
    except DecodeError as error:
        raise refuse(device, "an answer of the wrong form", "; ".join(error.problems[:3])) from None


def reported(device: str, failure: documents.Failure) -> VitdeployError:
    """Return the error that a device reports. Internal errors, unknown codes and gate failures become a DeviceError: a
    device may not report those of this machine."""
    words = {name: printable(getattr(failure, name)) for name in ("message", "found", "expected", "fix")}
    where = f"{device}: {failure.artifact}: " if failure.artifact else f"{device}: "
    if words["fix"]:
        words["fix"] = f"on {device}: {words['fix']}"
    error = error_with_code(failure.code, printable(where) + words.pop("message"), **words)
    if error.exit_code in (2, 3, 4):
        return error
    fix = words["fix"] or "run the command again; if the error persists, check the Python there, then report a bug"
    return DeviceError(error.message, found=error.found, expected=error.expected, fix=fix)


def clean(value: T) -> T:
    """Return plain data with all texts made printable."""
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
    """Check that a result belongs to the job, with the requested engines and only permitted files; return it cleaned.

    Raises:
        DeviceResultError: it does not.
        VitdeployError: the whole job failed on the device.
    """
    if (result.format, result.job) != (documents.FORMAT, job.digest):
        raise refuse(device, "a result of another job", result.job, job.digest)
    if result.failure is not None:
        raise reported(device, result.failure)
    if (result.tried is None) != (job.kind in ("bench", "compile")):
        raise refuse(device, "a result of a different kind of job", result.tried, job.kind)
    requested = {placed.name: placed for placed in job.artifacts}
    returned = [*result.engines, *(failure.artifact for failure in result.left_out)]
    if sorted(returned) != sorted(requested):
        raise refuse(device, "a result of other artifacts", ", ".join(returned), ", ".join(requested))
    for name, engine in result.engines.items():
        check_engine(device, engine, requested[name])
    expected = [file for engine in result.engines.values() for file in product_files(engine)]
    listed = [entry.path for entry in result.files] if job.kind == "compile" else []
    if sorted(listed) != sorted(expected if job.kind == "compile" else []) or (job.kind != "compile" and result.files):
        raise refuse(device, "files that do not belong to the engine", ", ".join(listed), ", ".join(expected))
    sent, size = sum(entry.bytes for entry in job.files), sum(entry.bytes for entry in result.files)
    if size > GROWTH * sent + SPARE_BYTES:
        raise refuse(
            device, "implausible file sizes", f"{size:,} bytes", f"a plausible size for {sent:,} bytes of input"
        )
    return dataclasses.replace(result, host=clean(result.host), engines=clean(result.engines))


def product_files(engine: EngineSpec) -> list[str]:
    """Return the files of an engine without the graphs that it was built from."""
    return [name for name in engine.files if not name.endswith((".onnx", ".onnx.data"))]


def check_engine(device: str, engine: EngineSpec, placed: documents.PlacedArtifact) -> EngineSpec:
    """Check that an engine belongs to a placement: target, precision, known file names; return it."""
    facts = (engine.target, engine.precision, engine.batch, engine.weight_bits, engine.row_parts)
    expected = (placed.target, placed.precision, placed.batch, placed.weight_bits, placed.row_parts)
    if facts != expected:
        raise refuse(device, "an engine for another artifact", facts, expected)
    if engine.float_rest not in (None, placed.float_rest):
        raise refuse(device, "float operators in a different precision", engine.float_rest, placed.float_rest)
    if placed.plan is not None and engine == placed.plan:
        return engine
    sent, made = [graph.part for graph in placed.graphs], [part.part for part in engine.parts or (engine,)]
    parts = sent if len(sent) > 1 else []
    # The name of a part is also the name of a local file, its graph.
    if made != sent or bool(engine.parts) != bool(parts) or not engine.inputs or not engine.outputs:
        raise refuse(device, "an engine with other parts", ", ".join(made), ", ".join(sent))
    # Compilers keep each graph's weights next to it, under the name used in the graph.
    own = {
        "graph.onnx",
        *COMPILE[placed.target].files,
        *(f"{graph.file.rpartition('/')[2]}.data" for graph in placed.graphs),
    }
    allowed = {f"{part}/{name}" for part in parts for name in own} if parts else own
    named = {name for part in (engine, *engine.parts) for name in (part.graph, *part.files)}
    options = {name for part in (engine, *engine.parts) for name in part.options}
    if named - allowed or options - ENGINE_OPTIONS:
        odd = sorted([*(named - allowed), *(options - ENGINE_OPTIONS)])
        raise refuse(device, "an engine with unexpected files or options", ", ".join(odd), "those of its target")
    nested, twice = (
        any(part.parts or part.row_parts for part in engine.parts),
        len(set(engine.files)) < len(engine.files),
    )
    if nested or twice:
        raise refuse(device, "an engine with nested parts or duplicate files", ", ".join(engine.files))
    if parts and {name for part in engine.parts for name in part.files} != set(engine.files):
        raise refuse(device, "an engine whose parts have unexpected files", ", ".join(engine.files))
    if any(not 0 <= count <= MOST for part in (engine, *engine.parts) for count in part.kernels.values()):
        raise refuse(device, "an engine with an implausible number of kernels", engine.kernels)
    if engine.sequence not in (None, placed.sequence):
        raise refuse(device, "an engine with another token selection", engine.sequence, placed.sequence)
    for part in (engine, *engine.parts):
        check_tensors(device, (*part.inputs, *part.outputs))
    return engine


def check_tensors(device: str, tensors: Sequence[TensorSpec]) -> None:
    """Raise DeviceResultError for implausible inputs or outputs."""
    if len(tensors) > MOST_TENSORS:
        raise refuse(device, "an engine with too many tensors", len(tensors), MOST_TENSORS)
    for tensor in tensors:
        sizes = [size for size in tensor.shape if isinstance(size, int)]
        fits = tensor.dtype in BYTES_OF and len(tensor.shape) <= MOST_AXES and all(0 <= s < LARGEST_AXIS for s in sizes)
        if not fits or tensor.shape[:1] == (0,) or math.prod(sizes) * BYTES_OF[tensor.dtype] > MOST_TENSOR_BYTES:
            raise refuse(device, "an implausible tensor", tensor)


def check_named(device: str, found: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> None:
    """Raise DeviceResultError unless tensors match those of the graph that was sent, in names and fixed sizes."""
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
    """Check that measurements belong to these artifacts and this protocol and are plausible; return them cleaned."""
    try:
        bench_run = decode(results.BenchRun, document)
    except DecodeError as error:
        raise refuse(device, "measurements of the wrong form", "; ".join(error.problems[:3])) from None
    if bench_run.protocol != protocol:
        raise refuse(device, "measurements under another protocol", bench_run.protocol, protocol)
    found = [entry.artifact for entry in bench_run.entries]
    if found != names:
        raise refuse(device, "measurements of other artifacts", ", ".join(found), ", ".join(names))
    if not 1 <= bench_run.cpus <= MOST_CPUS:
        raise refuse(device, "an implausible number of CPUs", bench_run.cpus)
    if not 0 <= (bench_run.load_average or 0.0) <= MOST:
        raise refuse(device, "an implausible load", bench_run.load_average)
    for entry in bench_run.entries:
        _check_entry(device, entry, protocol)
    for name in protocol.scenarios:
        if len(counts := {len(entry.rounds[name]) for entry in bench_run.entries}) > 1:
            raise refuse(device, f"{name} rounds that were not measured alternately", sorted(counts))
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
            raise refuse(device, f"wrong number of {name} rounds", len(rounds), f"{least} to {most}")
        if not any(block.latencies_ms.size or block.waiting_ms for block in rounds):
            raise refuse(device, f"{name} rounds without a query")
        processes = protocol.processes * (protocol.most_sessions if spread else 1)
        for block in rounds:
            if not 0 <= block.process < processes:
                raise refuse(device, "a block of an unknown process", block.process, processes)
            if not 0 <= block.begun_seconds < LONGEST_RUN or not 0 <= block.busy_seconds <= LONGEST_SECONDS:
                raise refuse(device, "block timestamps are out of range", (block.begun_seconds, block.busy_seconds))
            if any(not 0 <= age < LONGEST_SECONDS * 1e3 for age in block.waiting_ms):
                raise refuse(device, "a query with an implausible waiting time")
            if block.machine is not None:
                _check_machine(device, block.machine)
            latencies = block.latencies_ms / 1e3
            times += [block.seconds, *latencies.tolist()]
            if parse_scenario(name).kind == "server":
                continue  # queries may wait since before their block, and there may be none
            if not latencies.size or latencies.sum() > 1.01 * block.seconds:
                raise refuse(device, "a block without queries, or shorter than its queries")
    apart = (*entry.stages_ms.values(), *entry.parts_ms.values())
    impossible = [seconds for seconds in times if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS]
    if impossible or any(not 0 <= time < LONGEST_SECONDS * 1e3 for each in apart for time in each):
        raise refuse(device, "implausible times", impossible[:3])
    unknown = sorted(set(entry.stages_ms) - STAGES)
    if unknown or not all(apart) or (entry.stages_ms and "end_to_end" not in entry.stages_ms):
        raise refuse(device, "unknown or missing stages", ", ".join(entry.stages_ms), ", ".join(sorted(STAGES)))


# Plausible ranges of the fields of a block's `BlockMachine`. Differences of clocks may be slightly negative.
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
            raise refuse(device, f"implausible {name.replace('_', ' ')} of a block", value)


def _check_context(device: str, context: Context, protocol: Protocol, names: list[str]) -> None:
    """Check that rates and layers are the requested ones, with plausible sizes."""
    batch, memory = protocol.batch_of(protocol.latency_scenario), context.memory
    profiled = [profile.artifact for profile in context.profiles]
    probed = [(rate.target, rate.precision) for rate in context.rates]
    if set(profiled) - set(names) or len(set(profiled)) < len(profiled) or len(set(probed)) < len(probed):
        raise refuse(device, "rates or layers of other artifacts", ", ".join(profiled), ", ".join(names))
    if any(profile.batch != batch or not 1 <= profile.runs <= MOST for profile in context.profiles):
        raise refuse(device, "layers at another batch size, or without a run")
    if max((len(each) for each in (context.left_out, *(p.layers for p in context.profiles))), default=0) > MOST:
        raise refuse(device, "too many layers")
    rates = [rate.flops_per_second for rate in context.rates] + ([] if memory is None else [memory.bytes_per_second])
    sizes = [size for rate in context.rates for size in (rate.rows, rate.width)]
    sizes += [] if memory is None else [memory.array_bytes, memory.threads, memory.cache_bytes or 1]
    if any(not 0 < rate < FASTEST for rate in rates) or any(not 1 <= size < 1 << 50 for size in sizes):
        raise refuse(device, "implausible rates", rates)
    layers = [layer for profile in context.profiles for layer in profile.layers]
    times = [*(layer.milliseconds for layer in layers), *(profile.per_layer_ms for profile in context.profiles)]
    whole = [profile.latency_ms for profile in context.profiles]
    if any(not 0 <= time < LONGEST_SECONDS * 1e3 for time in (*times, *whole)) or not all(whole):
        raise refuse(device, "implausible layer times")
    texts = [text for layer in layers for text in (layer.name, layer.kind, layer.precision, *layer.fuses)]
    if any(len(text) > LONGEST_NAME for text in texts) or any(len(layer.fuses) > MOST_FUSED for layer in layers):
        raise refuse(device, "layer names that are too long")


# --- Deployments on a device, and trials of releases, judged by the same rule as on the device ------------------------


# The names of the two artifacts of an agent's comparison (as in agent/rollout.py, not imported for two names).
NEW, CURRENT = "new", "current"
MOST_DEPLOYMENTS = 1000


@dataclass(frozen=True)
class ReleaseTrial:
    """The trial of a release on a device. `p99_ms`: None if not measured. `tail`: comparison with the previous release;
    if None, `alone` has the reason. `failed`: why the release is rejected; "" if it is accepted."""

    engine: str
    golden: documents.GoldenResult
    p99_ms: float | None = None
    tail: Tail | None = None
    alone: str = ""
    failed: str = ""
    undecided: str = ""


def check_deployments(device: str, found: Sequence[documents.Deployed]) -> dict[str, documents.Deployed]:
    """Check a device's deployments; return them by name.

    Raises:
        DeviceResultError: they are invalid.
    """
    names = [each.name for each in found]
    named = len(set(names)) == len(names) and all(map(documents.DEPLOYMENT.fullmatch, names))
    if len(names) > MOST_DEPLOYMENTS or not named:
        raise refuse(device, "invalid deployment names", names[:5])
    for deployed in found:
        for release in (deployed.current, deployed.previous, deployed.moving):
            if release and not documents.RELEASE.fullmatch(release):
                raise refuse(device, "a release that is not a SHA-256", release)
    return {each.name: each for each in found}


def check_missing(device: str, found: Collection[str], paths: Collection[str]) -> set[str]:
    """Check that the files that a device reports as missing are among `paths`; return them.

    Raises:
        DeviceResultError: they are not.
    """
    odd = set(found) - set(paths)
    if odd:
        raise refuse(device, "unknown missing files", ", ".join(sorted(odd)[:3]))
    return set(found)


def judge(
    device: str, result: documents.JobResult, job: documents.DeviceJob, manifest: Manifest | None
) -> ReleaseTrial:
    """Return the trial of a release on a device, judged by the bounds of the local manifest, never the device's.
    `manifest`: None if only the device has it.

    Raises:
        DeviceResultError: the answer contradicts itself, the manifest, or the job.
    """
    tried, options = result.tried, job.release
    assert tried is not None and options is not None  # check_result
    if manifest is not None:
        engines = {engine.artifact for engine in usable_engines(manifest, select_engines(manifest, options.target))}
        if tried.engine not in engines:
            raise refuse(device, "an engine that the release does not have", tried.engine, ", ".join(sorted(engines)))
        _check_bounds(device, tried, manifest)
    golden = tried.golden
    if not 1 <= golden.inputs <= MOST or golden.same > golden.inputs or (golden.difference or 0.0) < 0:
        raise refuse(device, "implausible golden answers", golden)
    if golden.ok and options.expected == "" and not tried.alone and job.protocol is not None:
        raise refuse(device, "a comparison with a release that the device does not have")
    trial = _trial(device, result, tried, job.protocol, options.worse)
    if tried.kept and (trial.failed or job.kind == "stage"):
        raise refuse(device, "the device keeps a rejected release", trial.failed or "the job must not switch releases")
    if job.kind == "switch" and not tried.kept and not trial.failed:
        return dataclasses.replace(trial, failed="the device reverted it")
    return trial


def _trial(
    device: str, result: documents.JobResult, tried: documents.Tried, protocol: Protocol | None, worse: float
) -> ReleaseTrial:
    alone = clean(tried.alone)
    if not tried.golden.ok or protocol is None:
        if result.bench_run is not None:
            raise refuse(device, "measurements that were not requested")
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
        f"{what} is {ratio:.2f} times that of the current release ({low:.2f} to {high:.2f}); "
        f"p99: {tail.a_ms:.3g} ms, current release {tail.b_ms:.3g} ms"
    )


def _check_bounds(device: str, tried: documents.Tried, manifest: Manifest) -> None:
    golden, found = manifest.golden, tried.golden
    assert golden is not None  # a bundle without golden answers is not deployed
    own = golden.engines.get(tried.engine)
    target = next(engine.target for engine in manifest.engines if engine.artifact == tried.engine)
    expected = (own.tolerance, own.least_same) if own is not None else (golden.tolerance.get(target), 0)
    if (found.tolerance, found.least_same) != expected:
        raise refuse(device, "bounds that differ from the bundle's", (found.tolerance, found.least_same), expected)


def _wrong(golden: documents.GoldenResult) -> str:
    if golden.ok:
        return ""
    difference = "NaN" if golden.difference is None else f"{golden.difference:.1e} of the largest value"
    return (
        f"golden answers: {golden.same} of {golden.inputs} equal the original's (required: {golden.least_same}); "
        f"difference from the recorded outputs: {difference} (limit {golden.tolerance:.1e})"
    )


# --- General limits of answers ----------------------------------------------------------------------------------------
# Checked before a line is parsed, and before a document is decoded.
#
# A line of permitted length can still become a much larger document in memory, or contain a number that overflows
# arithmetic here.


# Limits of a line: lists and objects, quotes (two per text), values. A result consists mostly of latencies.
MOST_NESTED, MOST_QUOTES, MOST_VALUES = 2_000_000, 16_000_000, 16_000_000
# Limits of a document: items of a list or object, characters of a text, depth.
MOST_ITEMS, LONGEST_TEXT, DEEPEST = 100_000, 1 << 20, 32
# Lists with one number per query, without a limit of items; `results.check_run` checks each number.
MEASURED = (".latencies_ms", ".waiting_ms")
# The largest plausible numbers are operations per second.
LARGEST = 1e18
# Fields that the host chose, and compares; tokens may be negative numbers there.
OURS = ("sequence", "protocol")


def problem_of_line(line: bytes) -> str:
    """Return why a line must not be parsed; "" if it may be."""
    counts = {
        "lists and objects": (line.count(b"[") + line.count(b"{"), MOST_NESTED),
        "quotes": (line.count(b'"'), MOST_QUOTES),
        "values": (line.count(b","), MOST_VALUES),
    }
    return next((f"{found:,} {what}, more than {most:,}" for what, (found, most) in counts.items() if found > most), "")


def problem_of(value: Any, path: str = "$", depth: int = 0) -> str:
    """Return the first implausible value of a parsed document with its path, or "". `path`, `depth`: those of
    `value` in the document.

    Integers are counts, so they must not be negative. Fractions may be negative, for example temperatures.
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
    """Yield the items of a list or an object, each with the end of its path."""
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
    """Return an integer as text, shortened if it is long."""
    digits = str(abs(value))
    return f"{value}" if len(digits) <= 40 else f"{'-' if value < 0 else ''}{digits[:6]}... of {len(digits):,} digits"

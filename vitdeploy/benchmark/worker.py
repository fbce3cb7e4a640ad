"""The measuring process of one artifact: it loads the artifact's runners and measures on command.

It reads one JSON command per line from standard input and answers each with one JSON line:

    {"do": "load", "request": {...}, "batches": [1, 8]}   facts about the load: see `_Session`
    {"do": "block", "batch": 1, "seconds": 0.5}           latencies, and the machine's state: see `_Session`
    {"do": "stages", "seconds": 0.5}                      {"stages_ns": {"decode": [...], ...}}, of images;
                                                          {"stages_ns": {}, "parts_ms": {...}}, of several graphs
    {"do": "close"}                                       {"closed": true}

A block may have "arrivals" (the rate, in queries per second) and "settle" (seconds of unrecorded queries before it).
Errors are answered as {"error": {"code", "message", "exit_code", "found", "expected", "fix"}}.
"""

import functools
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import gemm, protocol
from vitdeploy.benchmark import machine as probes
from vitdeploy.benchmark.load import Load, PoissonLoad, back_to_back
from vitdeploy.benchmark.machine import EnergyMeter, Throttle, clock_limit_mhz, slowed_between
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import TensorError, VitdeployError
from vitdeploy.runtime import golden, host, nvidia
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.inputs import DTYPES, random_inputs
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import EngineSpec, TensorSpec, decode

SEED = 0
MIN_QUERIES = 3

MakeRunner = Callable[[dict[str, Any]], Runner]
# Raises an error if the loaded runner of a request must not be measured.
Check = Callable[[Mapping[str, Any], Runner], None]
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(make_runner: MakeRunner, check: Check = lambda request, runner: None) -> int:
    """Run a measuring process, from its first command to its exit status.

    `make_runner` gets the request of the "load" command plus "batch" and returns a runner, loaded or not; `check` gets
    the request and each runner when it is loaded.
    """
    return answer_lines(_Session(make_runner, check).answer)


def answer_lines(answer: Answer) -> int:
    """Answer commands until "close" or until standard input ends; returns the exit status of the process.

    An error becomes an answer too, so that the parent can raise it.
    """
    # Ctrl-C reaches the whole process group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _take_stdout() as answers:
            for line in sys.stdin:
                command = json.loads(line)
                answers.write(json.dumps(_answered(answer, command)) + "\n")
                answers.flush()
                if command["do"] == "close":
                    break
    except BrokenPipeError:
        pass  # the parent has ended
    return 0


def _answered(answer: Answer, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return answer(command)
    except VitdeployError as error:
        return {"error": error.to_dict()}
    except Exception as error:
        traceback.print_exc()
        return {"error": VitdeployError(f"{type(error).__name__}: {str(error)[:300]}").to_dict()}


def _take_stdout() -> TextIO:
    """Return the original standard output; from now on, all output of this process goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


class _Session:
    """The loaded runners of one artifact, one per batch size, and the feeds for their measurements."""

    def __init__(self, make_runner: MakeRunner, check: Check = lambda request, runner: None) -> None:
        self._make_runner = make_runner
        self._check = check
        self._runners: dict[int, Runner] = {}
        self._feeds: dict[int, dict[str, Array]] = {}
        self._arrivals: dict[float, PoissonLoad] = {}
        self._stages: gemm.ImageStages | None = None
        self._cpus = probes.affinity()
        self._meter: EnergyMeter | nvidia.GpuEnergy = EnergyMeter()
        self._throttle = Throttle()

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one command."""
        if command["do"] == "load":
            return self._load(command["request"], command["batches"])
        if command["do"] == "block":
            return self._block(command)
        if command["do"] == "stages" and self._stages is not None:
            return {"stages_ns": self._stages.block(command["seconds"], MIN_QUERIES)}
        if command["do"] == "stages":
            return {"stages_ns": {}, "parts_ms": self._block_of_parts(command["seconds"])}
        if command["do"] == "close":
            return self._close()
        raise ValueError(f"unknown command {command['do']!r}")

    def _load(self, request: dict[str, Any], batches: list[int]) -> dict[str, Any]:
        """Load one runner per batch, and close earlier ones. Provider, seconds, first inference and memory belong to
        the first one: a cold load, with the runtime's import if it is the first load of this process."""
        self._close()
        first = self._load_one(request, batches[0])
        on_gpu = "engine" in request and TARGETS[request["engine"]["target"]].device == "GPU"
        self._meter = nvidia.GpuEnergy() if on_gpu else EnergyMeter()
        facts = {"peak_memory_bytes": probes.peak_memory(), "process_threads": probes.thread_count()}
        for batch in batches[1:]:
            self._load_one(request, batch)
        for runner in self._runners.values():  # after the memory of the first was read
            self._check(request, runner)
        if "images" in request:
            self._stages = gemm.ImageStages(self._runners[batches[0]], request["images"])
        # Existing objects stay. Frozen, they cost no time in a garbage collection inside a block.
        gc.collect()
        gc.freeze()
        return {**first, **facts, "affinity": self._cpus, "energy": self._meter.source}

    def _load_one(self, request: dict[str, Any], batch: int) -> dict[str, Any]:
        start = time.perf_counter_ns()
        runner = self._make_runner({**request, "batch": batch}).load()
        loaded = time.perf_counter_ns()
        feeds = runner.example(batch) or random_feeds(runner.inputs, batch)
        begin = time.perf_counter_ns()
        runner.infer(feeds)
        end = time.perf_counter_ns()
        self._runners[batch], self._feeds[batch] = runner, feeds
        return {
            "provider": runner.provider,
            "engine_threads": runner.engine_threads,
            "load_seconds": (loaded - start) / 1e9,
            "first_inference_ms": (end - begin) / 1e6,
        }

    def _block(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Measure a load, with the CPU seconds of this process and of all others on its CPUs, CPU seconds taken by a
        hypervisor, the time that a thread waited for a CPU, joules, clock, temperature, the number of throttle events
        so far, the time that the machine slept, and reasons for throttling."""
        batch, seconds = command["batch"], command["seconds"]
        query = functools.partial(self._runners[batch].measured, self._feeds[batch])
        # Before the queries, because this may start a program.
        throttle, kept = self._throttle.read(), host.quota_waits()
        # Unrecorded queries first, until the previous artifact has left the CPU and its caches.
        if settle := command.get("settle", protocol.SETTLE_SECONDS):
            back_to_back(query, settle, least=1)
        asleep, energy, delays = probes.suspended_seconds(), self._meter.read(), probes.run_delays()
        own, machine = time.process_time(), probes.cpu_times(self._cpus)
        load = self._query(query, seconds, command.get("arrivals"))
        own, after = time.process_time() - own, probes.cpu_times(self._cpus)
        waited, energy_after = probes.longest_wait(delays, probes.run_delays()), self._meter.read()
        return {
            **vars(load),
            "own_seconds": own,
            # May be below 0 because of the kernel's rounding to ticks; the average is right.
            "other_seconds": after.busy - machine.busy - own if machine and after else None,
            "stolen_seconds": after.stolen - machine.stolen if machine and after else None,
            "waited_seconds": waited,
            "joules": self._meter.joules(energy, energy_after, load.seconds),
            "mhz": probes.clock_mhz(self._cpus),
            "celsius": probes.temperature(),
            "throttles": probes.throttle_count(),
            "suspended_seconds": probes.suspended_seconds() - asleep,
            "throttled": slowed_between(throttle, self._throttle.read()),
            "limit_mhz": clock_limit_mhz(self._cpus),
            "quota_seconds": None if kept is None else (host.quota_waits() or kept) - kept,
        }

    def _query(self, query: Callable[[], object], seconds: float, rate: float | None) -> Load:
        if rate is None:
            return back_to_back(query, seconds, MIN_QUERIES)
        if rate not in self._arrivals:
            self._arrivals[rate] = PoissonLoad(rate, SEED)
        return self._arrivals[rate].block(query, seconds)

    def _block_of_parts(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds of each graph, from at least three queries in at least `seconds`; {} for a single graph."""
        batch, runner = next(iter(self._runners.items()))
        found: dict[str, list[float]] = {}
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or min(map(len, found.values()), default=0) < MIN_QUERIES:
            times = runner.part_times(self._feeds[batch])
            if times is None:
                return {}
            for part, milliseconds in times.items():
                found.setdefault(part, []).append(milliseconds)
        return found

    def _close(self) -> dict[str, Any]:
        self._stages = None
        self._arrivals.clear()
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        return {"closed": True}


def random_feeds(inputs: tuple[TensorSpec, ...], batch: int) -> dict[str, Array]:
    """Seeded random arrays for all inputs: pixels for uint8, standard normal values for float32, 1 or 2 for others.

    A dynamic leading axis becomes `batch`.

    Raises:
        TensorError: an input of an unsupported dtype, or with a further dynamic axis.
    """
    generator = np.random.default_rng(SEED)
    return {tensor.name: _random_array(generator, tensor.with_batch(batch)) for tensor in inputs}


def _random_array(generator: np.random.Generator, tensor: TensorSpec) -> Array:
    shape = tuple(size for size in tensor.shape if isinstance(size, int))
    if len(shape) == len(tensor.shape) and tensor.dtype == "uint8":
        return generator.integers(0, 256, shape, dtype=np.uint8)
    if len(shape) == len(tensor.shape) and tensor.dtype == "float32":
        return generator.standard_normal(shape, dtype=np.float32)
    if shape and len(shape) == len(tensor.shape) and tensor.dtype in DTYPES:
        return random_inputs([tensor], shape[0])[tensor.name]
    raise TensorError(
        f"cannot generate random values for the input {tensor.name!r}",
        found=str(tensor),
        expected=f"{' or '.join(DTYPES)}, with no dynamic axis except the leading one",
    )


def engine_runner(request: dict[str, Any]) -> Runner:
    """The runner of an engine from a request {"folder", "engine" (encoded), "threads", "batch"}, and optionally "trust"
    (a path)."""
    engine = decode(EngineSpec, request["engine"])
    trust = Path(request["trust"]) if request.get("trust") else None
    return make_runner(Path(request["folder"]), engine, batch=request["batch"], threads=request["threads"], trust=trust)


def check_answers(request: Mapping[str, Any], runner: Runner) -> None:
    """Check that an engine of a bundle gives its golden answers, if the request has "golden" (the bundle's path).

    An engine that failed its budget when the bundle was made may be measured, but not one whose answers have changed.
    """
    if "golden" not in request:
        return
    folder, engine = Path(request["golden"]), decode(EngineSpec, request["engine"])
    manifest = read_bundle(folder)
    failed = manifest.gate(engine) in golden.UNPROVEN
    golden.require_golden_answers(folder, manifest, engine, runner, threads=request["threads"], allow_failed=failed)


def main() -> int:
    return serve(engine_runner, check_answers)


if __name__ == "__main__":
    sys.exit(main())

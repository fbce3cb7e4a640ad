"""A benchmark run: processes measured alternately, block by block."""

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.benchmark import load, machine
from vitdeploy.benchmark.evidence import quiet_together, ratio_of_rounds, together
from vitdeploy.benchmark.process import WorkerProcess, end_all
from vitdeploy.benchmark.protocol import (
    BIN_SECONDS,
    SETTLE_SECONDS,
    STAGE_ROUNDS,
    WARMUP_LIMIT,
    Protocol,
    parse_scenario,
)
from vitdeploy.benchmark.results import BenchRun, BlockMachine, Measurements, Round, mostly_slowed
from vitdeploy.progress import Progress
from vitdeploy.runtime.host import require_real_times
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.spec import EngineSpec, encode

# --- The candidates of a benchmark run, and how their processes are started -------------------------------------------


ENGINE_WORKER = module_argv("vitdeploy.benchmark.worker")


@dataclass(frozen=True)
class BenchCandidate:
    """One artifact and how its worker is started.

    `request` describes the worker's runner; "threads" (from the protocol) and "batch" are added to it. `provider` is
    the provider that it ran on when it was built; empty if unknown.
    """

    artifact: str
    target: str
    precision: str
    argv: tuple[str, ...]
    request: dict[str, Any]
    provider: str = ""

    @property
    def has_stages(self) -> bool:
        """Whether one query has timed stages (from an image to its answer) or parts (several graphs)."""
        return "images" in self.request or bool(self.request.get("engine", {}).get("parts"))


def engine_candidate(
    engine: EngineSpec,
    folder: Path,
    name: str | None = None,
    trust: Path | None = None,
    images: dict[str, Any] | None = None,
    golden: Path | None = None,
) -> BenchCandidate:
    """An engine whose files lie under `folder`, in a process that never sees torch; `trust` as for `make_runner`.

    With `images` (see `stages.ImageStages`), the path from an image to its answer is measured too. `golden` is the
    bundle whose golden answers the engine must give first.
    """
    trusted = str(trust.resolve()) if trust else ""
    request = {"folder": str(folder.resolve()), "engine": encode(engine), "trust": trusted}
    if images is not None:
        request["images"] = images
    if golden is not None:
        request["golden"] = str(golden.resolve())
    return BenchCandidate(
        name or engine.artifact, engine.target, engine.precision, ENGINE_WORKER, request, engine.provider
    )


# --- One process of each artifact, measured alternately: load, warm-up, rounds, stages --------------------------------


STEADY_SPREAD = 0.02
# After the wait limit, rounds are repeated only if at least this share of them is undisturbed.
HOPEFUL_SHARE = 0.2

Pairs = Sequence[tuple[str, str]]


def no_progress(text: str, done: int, total: int) -> None:
    pass


class _Meter:
    """Measures process by process, and counts the blocks for the progress.

    Rounds in which other processes used the machine are repeated, so that each of the `pairs` of artifacts (or all
    artifacts together, without pairs) has enough rounds. `progress(text, done, total)` is called with each block, and
    with a total of 1 while waiting.
    """

    def __init__(
        self, protocol: Protocol, count: int, progress: Progress, pairs: Pairs = (), *, looks: bool = False
    ) -> None:
        self._protocol, self._progress, self._pairs, self._looks = protocol, progress, pairs, looks
        self._count, self._done, self._total = count, 0, 0
        self._quiet = True
        self._measured: dict[str, int] = {}
        self._begun = time.monotonic()
        self._patience = load.Patience(protocol.duration, lambda text: progress(text, 0, 1))

    def expect(self, scenarios: Sequence[str], process: int | None = None, count: int | None = None) -> None:
        """Add all rounds of these scenarios to the expected total, again if they were measured before. `process`: only
        the rounds of this process; `count`: the number of remaining artifacts."""
        self._count = count or self._count
        spread = [name for name in scenarios if parse_scenario(name).spread]
        of_one = {name: self._protocol.rounds_in(name, process) for name in spread} if process is not None else {}
        self._total += self._count * sum(of_one.get(name, self._protocol.blocks(name)) for name in scenarios)

    def wait(self) -> bool:
        """Wait for a quiet machine within the time limit; returns whether it is quiet."""
        self._quiet = self._patience.wait()
        return self._quiet

    def rounds(self, scenario: str) -> int:
        """The number of rounds of a scenario so far, in all processes."""
        return self._measured.get(scenario, 0)

    def measure(
        self,
        candidates: Sequence[BenchCandidate],
        workers: Sequence[WorkerProcess],
        process: int,
        order: Sequence[int],
        scenarios: Sequence[str],
    ) -> list[Measurements]:
        """Measure one process of each candidate in these scenarios. They are loaded in `order`.

        "server" and "sustain" are one long run, and so are measured in the first process only.
        """
        protocol = self._protocol
        loaded: dict[int, Measurements] = {}
        for index in order:
            self._progress(f"{candidates[index].artifact}: load and warm up", self._done, self._total)
            loaded[index] = _load(candidates[index], workers[index], protocol)
            for batch in protocol.batches(scenarios):
                _warm_up(workers[index], batch, protocol, steady=self._quiet)
        entries = [loaded[index] for index in range(len(workers))]
        for name in scenarios:
            scenario = parse_scenario(name)
            if scenario.spread:
                self._rounds_of(entries, workers, name, process)
            elif scenario.kind == "server":
                for number in range(0 if process else protocol.rounds):
                    self._round(entries, workers, name, process, number + 1, protocol.rounds)
            elif process == 0:
                self._sustain(entries, workers, name)
        if process == 0:
            _measure_stages(candidates, entries, workers, protocol)
        return entries

    def _rounds_of(
        self, entries: Sequence[Measurements], workers: Sequence[WorkerProcess], name: str, process: int
    ) -> None:
        """Measure the rounds of one process, and repeat disturbed ones."""
        expected = self._protocol.rounds_in(name, process) if self._looks else self._protocol.rounds_of(process)
        for _ in range(expected):
            number = self.rounds(name) + 1
            self._round(entries, workers, name, process, number, max(number, self._expected_rounds(process)))
        if self._looks and name != self._protocol.deciding_scenario:
            return
        while self._disturbed(entries, name, expected) and self.rounds(name) < self._protocol.spare_of(process):
            # A throttling machine does not cool down while it continues to measure.
            may_become_quiet = self.wait() and not mostly_slowed(entries, name)
            if not may_become_quiet and self._share_of_quiet(entries, name) < HOPEFUL_SHARE:
                break
            self._total += self._count
            number = self.rounds(name) + 1
            self._round(entries, workers, name, process, number, max(number, self._expected_rounds(process)))

    def _expected_rounds(self, process: int) -> int:
        if self._looks:
            return (process + 1) * self._protocol.rounds_of(process)
        return self._protocol.rounds * (process // self._protocol.starts + 1)

    def _disturbed(self, entries: Sequence[Measurements], name: str, expected: int) -> bool:
        """Whether some of the compared artifacts have too few quiet rounds in this process."""
        return any(len(quiet_together(each, name)) < expected for each in self._compared(entries))

    def _share_of_quiet(self, entries: Sequence[Measurements], name: str) -> float:
        quiet = min(len(quiet_together(each, name)) for each in self._compared(entries))
        return quiet / len(entries[0].rounds[name])

    def _compared(self, entries: Sequence[Measurements]) -> list[list[Measurements]]:
        named = {entry.artifact: entry for entry in entries}
        return [[named[a], named[b]] for a, b in self._pairs if a in named and b in named] or [list(entries)]

    def _round(
        self,
        entries: Sequence[Measurements],
        workers: Sequence[WorkerProcess],
        name: str,
        process: int,
        number: int,
        of: int,
    ) -> None:
        """One block of each candidate, in this round's order."""
        protocol, scenario = self._protocol, parse_scenario(name)
        command: dict[str, Any] = {"batch": protocol.batch_of(name), "seconds": protocol.block_seconds}
        if scenario.kind == "server":
            command["arrivals"] = scenario.value
        self._measured[name] = number
        for index in running_order(len(workers), number - 1):
            entries[index].rounds[name].append(self._block(workers[index], command, process))
            self._tell(f"{entries[index].artifact}: {name}, round {number} of {of}")

    def _sustain(self, entries: Sequence[Measurements], workers: Sequence[WorkerProcess], name: str) -> None:
        """Measure one artifact after the other without a pause, so that the machine heats up."""
        bins = self._protocol.blocks(name)
        for entry, worker in zip(entries, workers, strict=True):
            for number in range(bins):
                command = {"batch": self._protocol.batch_of(name), "seconds": BIN_SECONDS, "settle": 0.0}
                entry.rounds[name].append(self._block(worker, command, 0))
                self._tell(f"{entry.artifact}: {name}, second {number + 1} of {bins}")

    def _block(self, worker: WorkerProcess, command: dict[str, Any], process: int) -> Round:
        begun = time.monotonic() - self._begun
        answer = _ask_block(worker, command, self._protocol)
        return Round(
            command["batch"],
            np.asarray(answer["latencies_ns"], np.float64) / 1e6,
            answer["seconds"],
            process,
            answer["busy_seconds"],
            tuple(age / 1e6 for age in answer["waiting_ns"]),
            BlockMachine(
                **{
                    field.name: answer[field.name]
                    for field in dataclasses.fields(BlockMachine)
                    if field.name != "throttled"
                },
                throttled=tuple(answer["throttled"]),
            ),
            begun,
        )

    def _tell(self, text: str) -> None:
        self._done += 1
        self._progress(text, self._done, self._total)


def _load(candidate: BenchCandidate, worker: WorkerProcess, protocol: Protocol) -> Measurements:
    request = {**candidate.request, "threads": protocol.threads}
    answer = worker.ask(
        {"do": "load", "request": request, "batches": protocol.batches(protocol.scenarios)}, protocol.timeout
    )
    return Measurements(
        candidate.artifact,
        candidate.target,
        candidate.precision,
        provider=answer["provider"],
        load_seconds=answer["load_seconds"],
        first_inference_ms=answer["first_inference_ms"],
        rounds={scenario: [] for scenario in protocol.scenarios},
        made_for=candidate.provider,
        peak_memory_bytes=answer["peak_memory_bytes"],
        process_threads=answer["process_threads"],
        engine_threads=answer.get("engine_threads"),
        affinity=tuple(answer["affinity"]),
        energy=answer["energy"],
    )


def _warm_up(worker: WorkerProcess, batch: int, protocol: Protocol, *, steady: bool) -> None:
    """Run blocks for at least the warm-up time; if `steady`, until the latest median is close to the previous ones
    (which never happens on a busy machine)."""
    medians: list[float] = []
    seconds = 0.0
    while seconds < WARMUP_LIMIT * protocol.warmup:
        command = {"batch": batch, "seconds": min(protocol.block_seconds, protocol.warmup / 2)}
        answer = _ask_block(worker, command, protocol)
        seconds += answer["seconds"]
        newest = statistics.median(answer["latencies_ns"])
        if seconds >= protocol.warmup and not steady:
            return
        if seconds >= protocol.warmup and medians:
            before = statistics.median(medians)
            if abs(newest - before) < STEADY_SPREAD * before:
                return
        medians.append(newest)


def _measure_stages(
    candidates: Sequence[BenchCandidate],
    entries: Sequence[Measurements],
    workers: Sequence[WorkerProcess],
    protocol: Protocol,
) -> None:
    """Measure the stages of candidates that take images, and the parts of those with several graphs, alternately."""
    for number in range(STAGE_ROUNDS):
        for index in running_order(len(workers), number):
            if candidates[index].has_stages:
                command = {"do": "stages", "seconds": protocol.block_seconds}
                answer = workers[index].ask(command, protocol.block_seconds + protocol.timeout)
                for stage, times in answer["stages_ns"].items():
                    entries[index].stages_ms.setdefault(stage, []).extend(each / 1e6 for each in times)
                for part, milliseconds in answer.get("parts_ms", {}).items():
                    entries[index].parts_ms.setdefault(part, []).extend(milliseconds)


def _ask_block(worker: WorkerProcess, command: dict[str, Any], protocol: Protocol) -> dict[str, Any]:
    return worker.ask({"do": "block", **command}, command["seconds"] + protocol.timeout)


def running_order(count: int, number: int) -> list[int]:
    """The order of `count` candidates in round `number`: rows of a Williams design.

    Over `count` rounds (twice as many for an odd count) each candidate runs equally often in each position and directly
    after each other candidate. With a plain rotation, it would follow the same one in almost every round.
    """
    zigzag = [(index + 1) // 2 if index % 2 else -index // 2 for index in range(count)]
    order = [(place + number) % count for place in zigzag]
    return order[::-1] if count % 2 and (number // count) % 2 else order


# --- A benchmark run --------------------------------------------------------------------------------------------------
# Every artifact has its own processes and alternates with the others, so that drift of the machine affects all.
#
# It measures wall time from host memory to host memory, `Runner.infer` as apps call it. Scenarios, as named by MLPerf:
# "single" sends the next query when the previous one is done (latency), "offline" sends batches back to back
# (throughput), "server" lets queries arrive at random at a given rate. "sustain" is "single" for long enough to show
# the effect of heat.


def run_benchmark(
    candidates: Sequence[BenchCandidate],
    protocol: Protocol,
    progress: Progress | None = None,
    *,
    pairs: Pairs = (),
    still_open: Callable[[BenchRun], Collection[str]] | None = None,
) -> BenchRun:
    """Measure all candidates against each other.

    Processes of one artifact differ slightly because of their memory layout. So the rounds are spread over several
    processes of each artifact, started in a different order each time. A scenario in which the ratio of one of the
    `pairs` of artifacts is not yet narrow is measured again: see `Protocol`. `still_open` returns the artifacts that
    need further rounds, given the run so far: the next process measures only these, and the run ends if the result is
    empty. Scenarios other than the deciding one are then measured in the first process only.

    No other vitdeploy process measures on this machine at the same time. The run waits while other processes use the
    machine, at most as long as one scenario takes. Disturbed rounds are repeated.

    `progress(text, done, total)` is called when a warm-up starts and after each measured block; a total of 1 means that
    the run waits, for the reason in the text.

    Raises:
        ValueError: no candidates, or two with the same name.
        CapabilityError: this process runs in an emulator.
        WorkerError: a measuring process cannot be started, dies or does not answer.
        VitdeployError: an error of a worker, such as an EngineError for a graph that the runtime refuses.
    """
    names = [candidate.artifact for candidate in candidates]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"candidates need distinct names, found {names}")
    tell = progress or no_progress
    with alone(tell):
        meter = _Meter(protocol, len(candidates), tell, pairs, looks=still_open is not None)
        meter.wait()
        load_average, cpus = _load_average(), os.cpu_count() or 1
        entries: list[Measurements] = []
        measured = list(candidates)
        for process in range(protocol.most_sessions * protocol.starts):
            if process == 0:
                scenarios = list(protocol.scenarios)
            elif still_open is not None:
                left = still_open(BenchRun(protocol, tuple(entries), load_average, cpus))
                measured = [candidate for candidate in measured if candidate.artifact in left]
                again = bool(measured) and parse_scenario(protocol.deciding_scenario).spread
                scenarios = [protocol.deciding_scenario] if again else []
            elif process % protocol.starts == 0:
                scenarios = _unsettled(entries, protocol, pairs, meter)
            if not scenarios:
                break
            if still_open is not None or process % protocol.starts == 0:
                meter.expect(scenarios, None if still_open is None else process, len(measured))
            order = running_order(len(measured), process)
            with started({measured[index].artifact: measured[index].argv for index in order}) as running:
                workers = [running[order.index(index)] for index in range(len(measured))]
                entries = _joined(entries, meter.measure(measured, workers, process, order, scenarios))
                for worker in workers:
                    worker.ask({"do": "close"}, protocol.timeout)
        return BenchRun(protocol, tuple(entries), load_average, cpus)


@contextmanager
def alone(progress: Progress) -> Iterator[None]:
    """Make sure that no other vitdeploy process measures on this machine: wait for it, and report that to `progress`
    with a total of 1.

    Raises:
        CapabilityError: this process runs in an emulator.
    """
    require_real_times()
    with machine.machine_lock(lambda other: progress(f"waiting for another vitdeploy benchmark: {other}", 0, 1)):
        yield


def against_last(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of each artifact with the last one, which a list of artifacts is compared with."""
    return [(name, names[-1]) for name in names[:-1]]


@contextmanager
def started(argv: Mapping[str, tuple[str, ...]]) -> Iterator[list[WorkerProcess]]:
    """Start a measuring process for each name; leaving the context ends all of them, even busy ones.

    Raises:
        WorkerError: the operating system cannot start one.
    """
    workers: list[WorkerProcess] = []
    with tempfile.TemporaryDirectory(prefix="vitdeploy-bench-") as folder:
        try:
            for index, (name, arguments) in enumerate(argv.items()):
                workers.append(WorkerProcess(name, arguments, Path(folder) / f"{index}.txt"))
            yield workers
        finally:
            end_all(workers)


def measure_candidates(
    candidates: Sequence[BenchCandidate],
    workers: Sequence[WorkerProcess],
    protocol: Protocol,
    progress: Progress | None = None,
) -> BenchRun:
    """As `run_benchmark`, in running processes, one for each candidate. The processes may serve several runs; each run
    replaces the runners of the previous one."""
    single = dataclasses.replace(protocol, processes=1)
    tell = progress or no_progress
    with alone(tell):
        load_average, cpus = _load_average(), os.cpu_count() or 1
        meter = _Meter(single, len(candidates), tell)
        meter.expect(single.scenarios)
        entries = meter.measure(candidates, workers, 0, range(len(workers)), single.scenarios)
        return BenchRun(single, tuple(entries), load_average, cpus)


def _load_average() -> float | None:
    """The machine's load average over one minute; None if the system does not report it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _unsettled(entries: Sequence[Measurements], protocol: Protocol, pairs: Pairs, meter: _Meter) -> list[str]:
    """The scenarios that may be measured again and in which a pair's ratio is not yet narrow."""
    named = {entry.artifact: entry for entry in entries}
    return [
        name
        for name in protocol.scenarios
        if parse_scenario(name).spread
        and meter.rounds(name) + protocol.rounds <= protocol.most_rounds
        and not all(ratio_of_rounds(*together(protocol, (named[a], named[b]), name)).narrow for a, b in pairs)
    ]


def _joined(before: Sequence[Measurements], now: Sequence[Measurements]) -> list[Measurements]:
    """The entries, extended by the measurements of one more process."""
    if not before:
        return list(now)
    named = {entry.artifact: entry for entry in now}
    return [_continued(old, named[old.artifact]) if old.artifact in named else old for old in before]


def _continued(old: Measurements, new: Measurements) -> Measurements:
    return dataclasses.replace(
        old,
        rounds={name: old.rounds[name] + new.rounds[name] for name in old.rounds},
        warm_load_seconds=new.load_seconds if old.warm_load_seconds is None else old.warm_load_seconds,
    )


# --- The expected time of a benchmark run -----------------------------------------------------------------------------


# Seconds to start a process, import a runtime and load a typical model; an original in PyTorch takes longer.
LOAD_SECONDS, ORIGINAL_LOAD_SECONDS = 1.5, 5.0
# Seconds of one survey process; the memory, each rate and each profile have one.
SURVEY_SECONDS = 2.0


@dataclass(frozen=True)
class ExpectedTime:
    """Expected seconds on a quiet machine with immediately clear ratios, and at most. Slow answers and large models add
    to both."""

    seconds: float
    most: float

    def __str__(self) -> str:
        least, most = spelt(self.seconds), spelt(self.most)
        if least == most:
            return f"about {least}"
        return f"about {least}; up to {most} if the machine is busy or a result is unclear"


def expected(
    candidates: Sequence[BenchCandidate], protocol: Protocol, *, context: bool = False, looks: bool = False
) -> ExpectedTime:
    """The expected time of a bench of these candidates. `context`: include the survey after it; `looks`: the bench may
    end after its first process."""
    count = len(candidates)
    rounds = {name: protocol.rounds_in(name, 0) if looks else protocol.blocks(name) for name in protocol.scenarios}
    least = {name: rounds[name] if parse_scenario(name).spread else protocol.blocks(name) for name in rounds}
    blocks = count * sum(_block_seconds(protocol, name, least[name]) for name in protocol.scenarios)
    most = count * sum(
        _block_seconds(protocol, name, protocol.most_rounds if parse_scenario(name).spread else protocol.blocks(name))
        for name in protocol.scenarios
    )
    loads = [LOAD_SECONDS if "engine" in candidate.request else ORIGINAL_LOAD_SECONDS for candidate in candidates]
    start = sum(loads) + count * len(protocol.batches(protocol.scenarios)) * 1.5 * protocol.warmup
    slow = sum(loads) + count * len(protocol.batches(protocol.scenarios)) * WARMUP_LIMIT * protocol.warmup
    stages = STAGE_ROUNDS * protocol.block_seconds * sum(each.has_stages for each in candidates)
    survey = SURVEY_SECONDS * (2 + count) if context else 0.0
    return ExpectedTime(
        blocks + (1 if looks else protocol.starts) * start + stages + survey,
        most + protocol.most_sessions * protocol.starts * slow + stages + survey + protocol.duration,
    )


def _block_seconds(protocol: Protocol, scenario: str, blocks: int) -> float:
    if parse_scenario(scenario).kind == "sustain":
        return blocks * BIN_SECONDS
    return blocks * (protocol.block_seconds + SETTLE_SECONDS)


def spelt(seconds: float) -> str:
    """A duration in words, such as "40 s", "3 min" or "1 h 10 min"."""
    if seconds < 100:
        return f"{max(1.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

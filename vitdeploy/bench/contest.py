"""The contest: every artifact in a process of its own, measured in turns, so that drift of the machine hits all alike.

What is measured is wall time from host memory to host memory, `Runner.infer` as apps call it. Scenarios, as MLPerf
names them: "single" sends the next query when the previous one is done (latency), "offline" sends batches back to back
(throughput).
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.bench.process import WorkerProcess, end_all
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.spec import EngineSpec, encode

SCENARIOS = ("single", "offline")
STEADY = 0.02
WARMUP_LIMIT = 3
ENGINE_WORKER = module_argv("vitdeploy.bench.worker")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Contestant:
    """One artifact and how its worker is started.

    `request` is what the worker's runner is made from; "threads" (from the protocol) and "batch" are added to it.
    """

    artifact: str
    target: str
    precision: str
    argv: tuple[str, ...]
    request: dict[str, Any]


def engine_contestant(
    engine: EngineSpec, folder: Path, name: str | None = None, trust: Path | None = None
) -> Contestant:
    """An engine whose files lie under `folder`, in a process that never sees torch; `trust` as for `make_runner`."""
    trusted = str(trust.resolve()) if trust else ""
    request = {"folder": str(folder.resolve()), "engine": encode(engine), "trust": trusted}
    return Contestant(name or engine.artifact, engine.target, engine.precision, ENGINE_WORKER, request)


@dataclass(frozen=True)
class Protocol:
    """How a contest is run. All durations are in seconds.

    `batch`: the first is for "single", the last for "offline". `duration` is per artifact and scenario, measured in
    blocks of `block_seconds`, in at least `min_rounds` rounds. `warmup` is the least per artifact and batch; it goes on
    until block medians are steady within 2 %, at most three times as long. `threads` 0 is each runtime's own choice.
    `timeout` is the longest that a worker may take for one answer.
    """

    scenarios: tuple[str, ...] = SCENARIOS
    batch: tuple[int, ...] = (1, 8)
    duration: float = 10.0
    block_seconds: float = 0.5
    min_rounds: int = 12
    warmup: float = 1.0
    threads: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.scenarios or not set(self.scenarios) <= set(SCENARIOS):
            raise ValueError(f"scenarios {self.scenarios}: wanted some of {SCENARIOS}")
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch {self.batch}: wanted at least one size, each at least 1")

    @classmethod
    def of_singles(cls, block_seconds: float, warmup: float, rounds: int = min_rounds, batch: int = 1) -> Protocol:
        """Latency alone, in so many rounds of short blocks: for searches, which compare many engines."""
        return cls(("single",), (batch,), 0, block_seconds, rounds, warmup)

    @property
    def rounds(self) -> int:
        return max(self.min_rounds, math.ceil(self.duration / self.block_seconds))

    def batch_of(self, scenario: str) -> int:
        return self.batch[0] if scenario == "single" else self.batch[-1]

    def batches(self) -> list[int]:
        """The batch sizes that the scenarios need, each once."""
        return list(dict.fromkeys(self.batch_of(scenario) for scenario in self.scenarios))


@dataclass(frozen=True)
class Round:
    """One block of queries of `batch` images: the latency of each query in ms, and the seconds of the whole block."""

    batch: int
    latencies_ms: npt.NDArray[np.float64]
    seconds: float

    @property
    def images_per_second(self) -> float:
        return self.batch * self.latencies_ms.size / self.seconds


@dataclass(frozen=True)
class Entry:
    """What was measured of one contestant; `rounds` has one list per scenario.

    `load_seconds` (from the request to a loaded runner, with the import of the runtime) and `first_inference_ms` are
    those of the first batch size.
    """

    artifact: str
    target: str
    precision: str
    provider: str
    load_seconds: float
    first_inference_ms: float
    rounds: dict[str, list[Round]]


@dataclass(frozen=True)
class Contest:
    """The measurements of all contestants, in their order; `load_average` is the machine's at the start (1 minute)."""

    protocol: Protocol
    entries: tuple[Entry, ...]
    load_average: float | None
    cpus: int


def run_contest(contestants: Sequence[Contestant], protocol: Protocol, progress: Progress | None = None) -> Contest:
    """Measure all contestants against each other.

    `progress(text, done, total)` is called when a warm-up starts (with `done` 0) and after each measured block.

    Raises:
        ValueError: no contestant, or two of the same name.
        WorkerError: a measuring process cannot be started, dies or does not answer.
        VitdeployError: what a worker reports, such as an EngineError for a graph that the runtime refuses.
    """
    names = [contestant.artifact for contestant in contestants]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"contestants need distinct names, found {names}")
    with started({contestant.artifact: contestant.argv for contestant in contestants}) as workers:
        contest = hold_contest(contestants, workers, protocol, progress)
        for worker in workers:
            worker.ask({"do": "close"}, protocol.timeout)
    return contest


@contextmanager
def started(argv: Mapping[str, tuple[str, ...]]) -> Iterator[list[WorkerProcess]]:
    """A measuring process for each name, which are ended in the end, whatever they do.

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


def hold_contest(
    contestants: Sequence[Contestant],
    workers: Sequence[WorkerProcess],
    protocol: Protocol,
    progress: Progress | None = None,
) -> Contest:
    """As `run_contest`, in processes that were started before, one for each contestant. They may hold one contest after
    the other; what they loaded for the last one goes."""
    load_average, cpus = _load_average(), os.cpu_count() or 1
    return Contest(protocol, _measure(contestants, workers, protocol, progress or _no_progress), load_average, cpus)


def _no_progress(text: str, done: int, total: int) -> None:
    pass


def _load_average() -> float | None:
    """The machine's load average over one minute, where the system has one."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _measure(
    contestants: Sequence[Contestant], workers: Sequence[WorkerProcess], protocol: Protocol, progress: Progress
) -> tuple[Entry, ...]:
    total = len(protocol.scenarios) * protocol.rounds * len(workers)
    entries = []
    for contestant, worker in zip(contestants, workers, strict=True):
        progress(f"{contestant.artifact}: load and warm up", 0, total)
        entries.append(_load(contestant, worker, protocol))
        for batch in protocol.batches():
            _warm_up(worker, batch, protocol)
    done = 0
    for scenario in protocol.scenarios:
        batch = protocol.batch_of(scenario)
        for number in range(protocol.rounds):
            for index in running_order(len(workers), number):
                entries[index].rounds[scenario].append(_block(workers[index], batch, protocol))
                done += 1
                progress(f"{entries[index].artifact}: {scenario}, round {number + 1} of {protocol.rounds}", done, total)
    return tuple(entries)


def _load(contestant: Contestant, worker: WorkerProcess, protocol: Protocol) -> Entry:
    request = {**contestant.request, "threads": protocol.threads}
    command = {"do": "load", "request": request, "batches": protocol.batches()}
    answer = worker.ask(command, protocol.timeout)
    return Entry(
        contestant.artifact,
        contestant.target,
        contestant.precision,
        provider=answer["provider"],
        load_seconds=answer["load_seconds"],
        first_inference_ms=answer["first_inference_ms"],
        rounds={scenario: [] for scenario in protocol.scenarios},
    )


def _warm_up(worker: WorkerProcess, batch: int, protocol: Protocol) -> None:
    """Run blocks for at least the warm-up time, until the newest median is near that of the ones before."""
    medians: list[float] = []
    seconds = 0.0
    while seconds < WARMUP_LIMIT * protocol.warmup:
        answer = _ask_block(worker, batch, protocol)
        seconds += answer["seconds"]
        newest = statistics.median(answer["latencies_ns"])
        if seconds >= protocol.warmup and medians:
            before = statistics.median(medians)
            if abs(newest - before) < STEADY * before:
                return
        medians.append(newest)


def _block(worker: WorkerProcess, batch: int, protocol: Protocol) -> Round:
    answer = _ask_block(worker, batch, protocol)
    return Round(batch, np.asarray(answer["latencies_ns"], np.float64) / 1e6, answer["seconds"])


def _ask_block(worker: WorkerProcess, batch: int, protocol: Protocol) -> dict[str, Any]:
    command = {"do": "block", "batch": batch, "seconds": protocol.block_seconds}
    return worker.ask(command, protocol.block_seconds + protocol.timeout)


def running_order(count: int, number: int) -> list[int]:
    """The order of `count` contestants in round `number`: rows of a Williams design.

    Over `count` rounds (twice that for an odd count) each contestant runs equally often at each place, and right after
    each other one. A plain rotation would leave it behind the same one in almost every round.
    """
    zigzag = [(index + 1) // 2 if index % 2 else -index // 2 for index in range(count)]
    order = [(place + number) % count for place in zigzag]
    return order[::-1] if count % 2 and (number // count) % 2 else order

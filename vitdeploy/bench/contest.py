"""The contest: every artifact in processes of its own, measured in turns, so that drift of the machine hits all alike.

What is measured is wall time from host memory to host memory, `Runner.infer` as apps call it. Scenarios, as MLPerf
names them: "single" sends the next query when the previous one is done (latency), "offline" sends batches back to back
(throughput), "server" has queries arrive at random, at a rate. "sustain" is "single" for so long that heat shows.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.bench.process import WorkerProcess, end_all
from vitdeploy.bench.protocol import BIN_SECONDS, Protocol, parse_scenario
from vitdeploy.bench.results import Contest, Entry, Machine, Round
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.spec import EngineSpec, encode

STEADY = 0.02
WARMUP_LIMIT = 3
STAGE_ROUNDS = 4
ENGINE_WORKER = module_argv("vitdeploy.bench.worker")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Contestant:
    """One artifact and how its worker is started.

    `request` is what the worker's runner is made from; "threads" (from the protocol) and "batch" are added to it.
    `provider` is what it ran on when it was made; empty where nobody knows.
    """

    artifact: str
    target: str
    precision: str
    argv: tuple[str, ...]
    request: dict[str, Any]
    provider: str = ""


def engine_contestant(
    engine: EngineSpec,
    folder: Path,
    name: str | None = None,
    trust: Path | None = None,
    images: dict[str, Any] | None = None,
) -> Contestant:
    """An engine whose files lie under `folder`, in a process that never sees torch; `trust` as for `make_runner`.

    With `images` (see `stages.ImageStages`) the way from an image to its answer is measured too.
    """
    trusted = str(trust.resolve()) if trust else ""
    request = {"folder": str(folder.resolve()), "engine": encode(engine), "trust": trusted}
    if images is not None:
        request["images"] = images
    return Contestant(name or engine.artifact, engine.target, engine.precision, ENGINE_WORKER, request, engine.provider)


def run_contest(contestants: Sequence[Contestant], protocol: Protocol, progress: Progress | None = None) -> Contest:
    """Measure all contestants against each other.

    Two processes of one artifact differ a little for as long as they live, by where their memory lies. So the rounds
    are spread over several processes of each, which are started in another order each time.

    `progress(text, done, total)` is called when a warm-up starts and after each measured block.

    Raises:
        ValueError: no contestant, or two of the same name.
        WorkerError: a measuring process cannot be started, dies or does not answer.
        VitdeployError: what a worker reports, such as an EngineError for a graph that the runtime refuses.
    """
    names = [contestant.artifact for contestant in contestants]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"contestants need distinct names, found {names}")
    load_average, cpus = _load_average(), os.cpu_count() or 1
    meter = _Meter(protocol, len(contestants), progress or _no_progress)
    entries: list[Entry] = []
    for process in range(protocol.starts):
        order = running_order(len(contestants), process)
        with started({names[index]: contestants[index].argv for index in order}) as found:
            workers = [found[order.index(index)] for index in range(len(names))]
            entries = _joined(entries, meter.sit(contestants, workers, process, order))
            for worker in workers:
                worker.ask({"do": "close"}, protocol.timeout)
    return Contest(protocol, tuple(entries), load_average, cpus)


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
    single = dataclasses.replace(protocol, processes=1)
    load_average, cpus = _load_average(), os.cpu_count() or 1
    meter = _Meter(single, len(contestants), progress or _no_progress)
    return Contest(single, tuple(meter.sit(contestants, workers, 0, range(len(workers)))), load_average, cpus)


def _no_progress(text: str, done: int, total: int) -> None:
    pass


def _load_average() -> float | None:
    """The machine's load average over one minute, where the system has one."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _joined(before: Sequence[Entry], now: Sequence[Entry]) -> list[Entry]:
    """The entries with what one more process of each gave."""
    if not before:
        return list(now)
    return [
        dataclasses.replace(
            old,
            rounds={name: old.rounds[name] + new.rounds[name] for name in old.rounds},
            warm_load_seconds=new.load_seconds if old.warm_load_seconds is None else old.warm_load_seconds,
        )
        for old, new in zip(before, now, strict=True)
    ]


class _Meter:
    """Measures process by process, and counts the blocks for the progress."""

    def __init__(self, protocol: Protocol, count: int, progress: Progress) -> None:
        self._protocol, self._progress = protocol, progress
        self._done, self._begun = 0, time.monotonic()
        self._total = count * sum(map(protocol.blocks, protocol.scenarios))

    def sit(
        self, contestants: Sequence[Contestant], workers: Sequence[WorkerProcess], process: int, order: Sequence[int]
    ) -> list[Entry]:
        """What one process of each contestant gives. They are loaded in `order`.

        "server" and "sustain" are one long run, and so are measured in the first process only.
        """
        protocol = self._protocol
        loaded: dict[int, Entry] = {}
        for index in order:
            self._progress(f"{contestants[index].artifact}: load and warm up", self._done, self._total)
            loaded[index] = _load(contestants[index], workers[index], protocol)
            for batch in protocol.batches():
                _warm_up(workers[index], batch, protocol)
        entries = [loaded[index] for index in range(len(workers))]
        for name in protocol.scenarios:
            scenario = parse_scenario(name)
            if scenario.spread:
                begun = sum(protocol.rounds_of(each) for each in range(process))
                numbers = range(begun, begun + protocol.rounds_of(process))
            else:
                numbers = range(0 if process else protocol.rounds)
            if scenario.kind != "sustain":
                self._alternate(entries, workers, name, numbers, process)
            elif process == 0:
                self._sustain(entries, workers, name)
        if process == 0:
            _measure_stages(contestants, entries, workers, protocol)
        return entries

    def _alternate(
        self,
        entries: Sequence[Entry],
        workers: Sequence[WorkerProcess],
        name: str,
        numbers: range,
        process: int,
    ) -> None:
        protocol, scenario = self._protocol, parse_scenario(name)
        command: dict[str, Any] = {"batch": protocol.batch_of(name), "seconds": protocol.block_seconds}
        if scenario.kind == "server":
            command["arrivals"] = scenario.value
        for number in numbers:
            for index in running_order(len(workers), number):
                entries[index].rounds[name].append(self._block(workers[index], command, process))
                self._tell(f"{entries[index].artifact}: {name}, round {number + 1} of {protocol.rounds}")

    def _sustain(self, entries: Sequence[Entry], workers: Sequence[WorkerProcess], name: str) -> None:
        """One artifact after the other, without a pause: heat has no time to leave."""
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
            Machine(**{each.name: answer[each.name] for each in dataclasses.fields(Machine)}),
            begun,
        )

    def _tell(self, text: str) -> None:
        self._done += 1
        self._progress(text, self._done, self._total)


def _load(contestant: Contestant, worker: WorkerProcess, protocol: Protocol) -> Entry:
    request = {**contestant.request, "threads": protocol.threads}
    answer = worker.ask({"do": "load", "request": request, "batches": protocol.batches()}, protocol.timeout)
    return Entry(
        contestant.artifact,
        contestant.target,
        contestant.precision,
        provider=answer["provider"],
        load_seconds=answer["load_seconds"],
        first_inference_ms=answer["first_inference_ms"],
        rounds={scenario: [] for scenario in protocol.scenarios},
        made_for=contestant.provider,
        peak_memory_bytes=answer["peak_memory_bytes"],
        process_threads=answer["process_threads"],
        affinity=tuple(answer["affinity"]),
        energy=answer["energy"],
    )


def _warm_up(worker: WorkerProcess, batch: int, protocol: Protocol) -> None:
    """Run blocks for at least the warm-up time, until the newest median is near that of the ones before."""
    medians: list[float] = []
    seconds = 0.0
    while seconds < WARMUP_LIMIT * protocol.warmup:
        command = {"batch": batch, "seconds": min(protocol.block_seconds, protocol.warmup / 2)}
        answer = _ask_block(worker, command, protocol)
        seconds += answer["seconds"]
        newest = statistics.median(answer["latencies_ns"])
        if seconds >= protocol.warmup and medians:
            before = statistics.median(medians)
            if abs(newest - before) < STEADY * before:
                return
        medians.append(newest)


def _measure_stages(
    contestants: Sequence[Contestant], entries: Sequence[Entry], workers: Sequence[WorkerProcess], protocol: Protocol
) -> None:
    """The stages of those that take images, in turns too."""
    for number in range(STAGE_ROUNDS):
        for index in running_order(len(workers), number):
            if "images" in contestants[index].request:
                command = {"do": "stages", "seconds": protocol.block_seconds}
                answer = workers[index].ask(command, protocol.block_seconds + protocol.timeout)
                for stage, times in answer["stages_ns"].items():
                    entries[index].stages_ms.setdefault(stage, []).extend(each / 1e6 for each in times)


def _ask_block(worker: WorkerProcess, command: dict[str, Any], protocol: Protocol) -> dict[str, Any]:
    return worker.ask({"do": "block", **command}, command["seconds"] + protocol.timeout)


def running_order(count: int, number: int) -> list[int]:
    """The order of `count` contestants in round `number`: rows of a Williams design.

    Over `count` rounds (twice that for an odd count) each contestant runs equally often at each place, and right after
    each other one. A plain rotation would leave it behind the same one in almost every round.
    """
    zigzag = [(index + 1) // 2 if index % 2 else -index // 2 for index in range(count)]
    order = [(place + number) % count for place in zigzag]
    return order[::-1] if count % 2 and (number // count) % 2 else order

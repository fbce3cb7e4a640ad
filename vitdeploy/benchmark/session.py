"""One process of each artifact, measured in turns: load, warm-up, rounds, stages."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vitdeploy.benchmark.candidate import BenchCandidate
from vitdeploy.benchmark.patience import Patience
from vitdeploy.benchmark.process import WorkerProcess
from vitdeploy.benchmark.protocol import BIN_SECONDS, STAGE_ROUNDS, WARMUP_LIMIT, Protocol, parse_scenario
from vitdeploy.benchmark.quiet import quiet_together
from vitdeploy.benchmark.results import Entry, Machine, Round
from vitdeploy.benchmark.slowed import mostly_slowed

STEADY_SPREAD = 0.02
# Once the wait limit is reached, rounds are repeated only if others leave at least this share of them undisturbed.
HOPEFUL_SHARE = 0.2

Pairs = Sequence[tuple[str, str]]
Progress = Callable[[str, int, int], None]


def no_progress(text: str, done: int, total: int) -> None:
    pass


class Meter:
    """Measures process by process, and counts the blocks for the progress.

    Rounds in which others used the machine are repeated, so that each of the `pairs` of artifacts (all together,
    without any) has its rounds. `progress(text, done, total)` is called with each block, and with a total of 1 while
    waiting.
    """

    def __init__(
        self, protocol: Protocol, count: int, progress: Progress, pairs: Pairs = (), *, looks: bool = False
    ) -> None:
        self._protocol, self._progress, self._pairs, self._looks = protocol, progress, pairs, looks
        self._count, self._done, self._total = count, 0, 0
        self._measured: dict[str, int] = {}
        self._begun = time.monotonic()
        self._patience = Patience(protocol.duration, lambda text: progress(text, 0, 1))

    def expect(self, scenarios: Sequence[str], process: int | None = None) -> None:
        """Add all rounds of these scenarios to the expected total, once more if they were measured before; of one
        process only if it is named."""
        spread = [name for name in scenarios if parse_scenario(name).spread]
        of_one = {name: self._protocol.rounds_in(name, process) for name in spread} if process is not None else {}
        self._total += self._count * sum(of_one.get(name, self._protocol.blocks(name)) for name in scenarios)

    def wait(self) -> bool:
        """Wait for a quiet machine within the limit; returns whether it is quiet."""
        return self._patience.wait()

    def rounds(self, scenario: str) -> int:
        """How many rounds of a scenario were measured so far, in all processes."""
        return self._measured.get(scenario, 0)

    def measure(
        self,
        candidates: Sequence[BenchCandidate],
        workers: Sequence[WorkerProcess],
        process: int,
        order: Sequence[int],
        scenarios: Sequence[str],
    ) -> list[Entry]:
        """Measure one process of each candidate in these scenarios. They are loaded in `order`.

        "server" and "sustain" are one long run, and so are measured in the first process only.
        """
        protocol = self._protocol
        loaded: dict[int, Entry] = {}
        for index in order:
            self._progress(f"{candidates[index].artifact}: load and warm up", self._done, self._total)
            loaded[index] = _load(candidates[index], workers[index], protocol)
            for batch in protocol.batches(scenarios):
                _warm_up(workers[index], batch, protocol)
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

    def _rounds_of(self, entries: Sequence[Entry], workers: Sequence[WorkerProcess], name: str, process: int) -> None:
        """The rounds of one process, and as many more as others disturbed."""
        wanted = self._protocol.rounds_in(name, process) if self._looks else self._protocol.rounds_of(process)
        for _ in range(wanted):
            number = self.rounds(name) + 1
            self._round(entries, workers, name, process, number, max(number, self._expected_rounds(process)))
        if self._looks and name != self._protocol.deciding_scenario:
            return
        while self._disturbed(entries, name, wanted) and self.rounds(name) < self._protocol.spare_of(process):
            # A machine that throttles gets no cooler while it goes on measuring.
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

    def _disturbed(self, entries: Sequence[Entry], name: str, wanted: int) -> bool:
        """Whether some of the compared artifacts have too few quiet rounds in this process."""
        return any(len(quiet_together(each, name)) < wanted for each in self._compared(entries))

    def _share_of_quiet(self, entries: Sequence[Entry], name: str) -> float:
        quiet = min(len(quiet_together(each, name)) for each in self._compared(entries))
        return quiet / len(entries[0].rounds[name])

    def _compared(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        named = {entry.artifact: entry for entry in entries}
        return [[named[a], named[b]] for a, b in self._pairs] or [list(entries)]

    def _round(
        self,
        entries: Sequence[Entry],
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
            Machine(
                **{each.name: answer[each.name] for each in dataclasses.fields(Machine) if each.name != "throttled"},
                throttled=tuple(answer["throttled"]),
            ),
            begun,
        )

    def _tell(self, text: str) -> None:
        self._done += 1
        self._progress(text, self._done, self._total)


def _load(candidate: BenchCandidate, worker: WorkerProcess, protocol: Protocol) -> Entry:
    request = {**candidate.request, "threads": protocol.threads}
    answer = worker.ask(
        {"do": "load", "request": request, "batches": protocol.batches(protocol.scenarios)}, protocol.timeout
    )
    return Entry(
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


def _warm_up(worker: WorkerProcess, batch: int, protocol: Protocol) -> None:
    """Run blocks for at least the warm-up time, until the latest median is near that of the previous ones."""
    medians: list[float] = []
    seconds = 0.0
    while seconds < WARMUP_LIMIT * protocol.warmup:
        command = {"batch": batch, "seconds": min(protocol.block_seconds, protocol.warmup / 2)}
        answer = _ask_block(worker, command, protocol)
        seconds += answer["seconds"]
        newest = statistics.median(answer["latencies_ns"])
        if seconds >= protocol.warmup and medians:
            before = statistics.median(medians)
            if abs(newest - before) < STEADY_SPREAD * before:
                return
        medians.append(newest)


def _measure_stages(
    candidates: Sequence[BenchCandidate], entries: Sequence[Entry], workers: Sequence[WorkerProcess], protocol: Protocol
) -> None:
    """The stages of those that take images, and the parts of those of several graphs, also in turns."""
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

    Over `count` rounds (twice that for an odd count) each candidate runs equally often in each position, and right
    after each other one. With a plain rotation it would follow the same one in almost every round.
    """
    zigzag = [(index + 1) // 2 if index % 2 else -index // 2 for index in range(count)]
    order = [(place + number) % count for place in zigzag]
    return order[::-1] if count % 2 and (number // count) % 2 else order

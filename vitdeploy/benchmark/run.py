"""A benchmark run: every artifact in processes of its own, measured in turns, so that drift of the machine affects all.

It measures wall time from host memory to host memory, `Runner.infer` as apps call it. Scenarios, as MLPerf names them:
"single" sends the next query when the previous one is done (latency), "offline" sends batches back to back
(throughput), "server" has queries arrive at random, at a given rate. "sustain" is "single" for long enough to show
heat.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vitdeploy.benchmark.candidate import BenchCandidate
from vitdeploy.benchmark.machine_lock import machine_lock
from vitdeploy.benchmark.paired import ratio_of_rounds
from vitdeploy.benchmark.process import WorkerProcess, end_all
from vitdeploy.benchmark.protocol import Protocol, parse_scenario
from vitdeploy.benchmark.quiet import together
from vitdeploy.benchmark.results import BenchRun, Entry
from vitdeploy.benchmark.session import Meter, Pairs, Progress, no_progress, running_order
from vitdeploy.runtime.emulation import require_real_times


def run_benchmark(
    candidates: Sequence[BenchCandidate],
    protocol: Protocol,
    progress: Progress | None = None,
    *,
    pairs: Pairs = (),
    settled: Callable[[BenchRun], bool] | None = None,
) -> BenchRun:
    """Measure all candidates against each other.

    Two processes of one artifact differ a little for as long as they live, by where their memory lies. So the rounds
    are spread over several processes of each, started in a different order each time. A scenario in which the ratio of
    one of the `pairs` of artifacts is still not narrow is measured again: see `Protocol`. With `settled` it ends with
    the first process after which that says so of the run so far, and at the latest with the last one; scenarios other
    than the deciding one are measured in the first process only.

    No other vitdeploy process measures on this machine meanwhile. The run waits while others use the machine, at most
    as long as one scenario takes. Rounds in which somebody did use it are repeated.

    `progress(text, done, total)` is called when a warm-up starts and after each measured block; a total of 1 means that
    the run waits, and the text says for what.

    Raises:
        ValueError: no candidate, or two of the same name.
        CapabilityError: this process runs in an emulator.
        WorkerError: a measuring process cannot be started, dies or does not answer.
        VitdeployError: what a worker reports, such as an EngineError for a graph that the runtime refuses.
    """
    names = [candidate.artifact for candidate in candidates]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"candidates need distinct names, found {names}")
    tell = progress or no_progress
    with alone(tell):
        meter = Meter(protocol, len(candidates), tell, pairs, looks=settled is not None)
        meter.wait()
        load_average, cpus = _load_average(), os.cpu_count() or 1
        entries: list[Entry] = []
        for process in range(protocol.most_sessions * protocol.starts):
            if process == 0:
                scenarios = list(protocol.scenarios)
            elif settled is not None:
                done = settled(BenchRun(protocol, tuple(entries), load_average, cpus))
                again = not done and parse_scenario(protocol.deciding_scenario).spread
                scenarios = [protocol.deciding_scenario] if again else []
            elif process % protocol.starts == 0:
                scenarios = _unsettled(entries, protocol, pairs, meter)
            if not scenarios:
                break
            if settled is not None or process % protocol.starts == 0:
                meter.expect(scenarios, None if settled is None else process)
            order = running_order(len(candidates), process)
            with started({names[index]: candidates[index].argv for index in order}) as found:
                workers = [found[order.index(index)] for index in range(len(names))]
                entries = _joined(entries, meter.measure(candidates, workers, process, order, scenarios))
                for worker in workers:
                    worker.ask({"do": "close"}, protocol.timeout)
        return BenchRun(protocol, tuple(entries), load_average, cpus)


@contextmanager
def alone(progress: Progress) -> Iterator[None]:
    """Make sure that no other vitdeploy process measures on this machine; while one does, wait, and report it to
    `progress` with a total of 1.

    Raises:
        CapabilityError: this process runs in an emulator.
    """
    require_real_times()
    with machine_lock(lambda other: progress(f"waits for another measurement on this machine: {other}", 0, 1)):
        yield


def against_last(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of each artifact with the last, as artifacts named in a row are compared."""
    return [(name, names[-1]) for name in names[:-1]]


@contextmanager
def started(argv: Mapping[str, tuple[str, ...]]) -> Iterator[list[WorkerProcess]]:
    """Start a measuring process for each name; all are ended on exit, whatever they do.

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
    """As `run_benchmark`, in running processes, one for each candidate. They may serve several runs in a row; each run
    discards what they loaded for the last one."""
    single = dataclasses.replace(protocol, processes=1)
    tell = progress or no_progress
    with alone(tell):
        load_average, cpus = _load_average(), os.cpu_count() or 1
        meter = Meter(single, len(candidates), tell)
        meter.expect(single.scenarios)
        entries = meter.measure(candidates, workers, 0, range(len(workers)), single.scenarios)
        return BenchRun(single, tuple(entries), load_average, cpus)


def _load_average() -> float | None:
    """The machine's load average over one minute, where the system has one."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _unsettled(entries: Sequence[Entry], protocol: Protocol, pairs: Pairs, meter: Meter) -> list[str]:
    """The scenarios in which some pair's ratio is not narrow yet, and that may be measured again."""
    named = {entry.artifact: entry for entry in entries}
    return [
        name
        for name in protocol.scenarios
        if parse_scenario(name).spread
        and meter.rounds(name) + protocol.rounds <= protocol.most_rounds
        and not all(ratio_of_rounds(*together(protocol, (named[a], named[b]), name)).narrow for a, b in pairs)
    ]


def _joined(before: Sequence[Entry], now: Sequence[Entry]) -> list[Entry]:
    """The entries with the measurements of one more process of each."""
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

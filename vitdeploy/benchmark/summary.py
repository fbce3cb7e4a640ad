"""From the measurements of a run to the numbers of a report: percentiles, throughput, flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from vitdeploy.benchmark.flags import first_and_last, flags, taken_by_others
from vitdeploy.benchmark.percentiles import DEFAULT, nearest_rank, percentiles
from vitdeploy.benchmark.precision import percentile_interval, throughput_interval
from vitdeploy.benchmark.protocol import parse_scenario
from vitdeploy.benchmark.quiet import quiet, together, usable
from vitdeploy.benchmark.results import BenchRun, Entry, Round, Values
from vitdeploy.benchmark.row import (
    BatchSizes,
    Blocks,
    Claim,
    Energy,
    Latency,
    LatencyIntervals,
    MachineUse,
    Row,
    ScenarioResult,
    StageTimes,
)
from vitdeploy.benchmark.slowed import Throttled, throttled

NOT_APART = "not apart on this back end"


def rows(bench_run: BenchRun, percents: Sequence[float] = DEFAULT) -> list[Row]:
    """One row per candidate, in the benchmark run's order; `percents` are the percentiles to claim for each scenario.

    Blocks in which somebody else used the machine are left out, where enough others are left (see `usable`).
    """
    return [_row(bench_run, entry, percents) for entry in bench_run.entries]


def _row(bench_run: BenchRun, entry: Entry, percents: Sequence[float]) -> Row:
    single, offline = bench_run.protocol.latency_scenario, _throughput_scenario(bench_run)
    rounds, batches = (usable(bench_run.protocol, entry, name) for name in (single, offline))
    latencies, throughput = _latencies(rounds), _throughput(batches)
    counted = _with_unanswered(rounds)
    every = [block for blocks in entry.rounds.values() for block in blocks]
    return Row(
        artifact=entry.artifact,
        target=entry.target,
        precision=entry.precision,
        provider=entry.provider,
        batch=BatchSizes(bench_run.protocol.batch_of(single), bench_run.protocol.batch_of(offline)),
        latency_ms=Latency(
            p50=nearest_rank(latencies, 50),
            p90=nearest_rank(latencies, 90),
            p99=nearest_rank(latencies, 99),
            mean=float(latencies.mean()),
        ),
        latency_ms_ci95=LatencyIntervals(*(percentile_interval(counted, percent) for percent in (50, 90, 99))),
        throughput=throughput,
        throughput_ci95=throughput_interval(batches, throughput),
        flags=tuple(flags(bench_run, entry, single, percents)),
        samples=int(latencies.size),
        load_seconds=float(entry.load_seconds),
        warm_load_seconds=entry.warm_load_seconds,
        first_inference_ms=float(entry.first_inference_ms),
        peak_memory_bytes=entry.peak_memory_bytes,
        scenarios={name: _scenario(bench_run, entry, name, percents) for name in entry.rounds},
        stages_ms=_stages(entry.stages_ms),
        parts_ms={name: float(np.median(times)) for name, times in entry.parts_ms.items()} or None,
        energy=_energy(entry, rounds),
        machine=_machine(entry, every),
    )


def _scenario(bench_run: BenchRun, entry: Entry, name: str, percents: Sequence[float]) -> ScenarioResult:
    """The numbers of one scenario; "server" and "sustain" have some of their own in addition to the common ones."""
    rounds = usable(bench_run.protocol, entry, name)
    latencies, counted, scenario = _latencies(rounds), _with_unanswered(rounds), parse_scenario(name)
    seconds = sum(block.seconds for block in rounds)
    found = ScenarioResult(
        batch=rounds[0].batch,
        queries=int(latencies.size),
        seconds=seconds,
        percentiles=tuple(
            Claim(**vars(each), name=each.name, ci95=percentile_interval(counted, each.percent))
            for each in percentiles(latencies, percents)
        ),
        mean_ms=float(latencies.mean()),
        throughput=_throughput(rounds),
        blocks=_blocks(entry, entry.rounds[name]),
        throttled=_throttled(bench_run, entry, name),
    )
    if scenario.kind == "server":
        busy = sum(block.busy_seconds for block in rounds) / seconds
        return dataclasses.replace(found, offered=scenario.value, busy=busy, unanswered=len(rounds[-1].waiting_ms))
    if scenario.kind == "sustain":
        first, last = first_and_last(rounds)
        bins = tuple(block.images_per_second for block in rounds)
        return dataclasses.replace(found, first=first, last=last, last_over_first=last / first, bins=bins)
    return found


def _throttled(bench_run: BenchRun, entry: Entry, name: str) -> Throttled | None:
    """Of the blocks in which the machine throttled, with whether they are left out (see `usable`)."""
    every = entry.rounds[name]
    found = throttled(every, parse_scenario(name).spread)
    left_out = len(usable(bench_run.protocol, entry, name)) < len(every)
    return None if found is None else dataclasses.replace(found, left_out=left_out)


def _blocks(entry: Entry, rounds: Sequence[Round]) -> Blocks:
    return Blocks(
        tuple(round(block.begun_seconds, 3) for block in rounds),
        tuple(block.process for block in rounds),
        tuple(float(np.median(block.latencies_ms)) if block.latencies_ms.size else None for block in rounds),
        tuple(quiet(rounds, len(entry.affinity))),
    )


def _stages(stages: Mapping[str, Sequence[float]]) -> StageTimes | None:
    """The stage times; None if the artifact takes no images."""
    if not stages:
        return None
    whole = np.asarray(stages["end_to_end"])
    return StageTimes(
        **{name: float(np.median(times)) for name, times in stages.items()},
        end_to_end_p90=nearest_rank(whole, 90),
        copies="apart" if "copy_in" in stages else NOT_APART,
        images=len(whole),
    )


def _energy(entry: Entry, rounds: Sequence[Round]) -> Energy:
    joules = [block.machine.joules if block.machine is not None else None for block in rounds]
    known = [each for each in joules if each is not None]
    images = sum(block.batch * block.latencies_ms.size for block in rounds)
    complete = len(known) == len(joules) and images > 0
    return Energy(entry.energy, sum(known) / images if complete else None)


def _machine(entry: Entry, rounds: Sequence[Round]) -> MachineUse:
    machines = [block.machine for block in rounds if block.machine is not None]
    seconds = sum(block.seconds for block in rounds)
    return MachineUse(
        tuple(entry.affinity),
        entry.process_threads,
        sum(each.own_seconds for each in machines) / seconds if machines else None,
        taken_by_others(entry, rounds),
        _spread([each.mhz for each in machines if each.mhz is not None]),
        _spread([each.celsius for each in machines if each.celsius is not None]),
        entry.engine_threads,
        sum(each.quota_seconds or 0.0 for each in machines) / seconds if seconds else None,
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    return (min(values), float(np.median(values)), max(values)) if values else None


def block_medians(bench_run: BenchRun) -> dict[str, tuple[float, ...]]:
    """The median latency in ms of each round per artifact, in order of time. All artifacts have the same rounds: those
    in which nobody else used the machine, if they are enough. Rounds without an answered query are left out."""
    rounds = together(bench_run.protocol, bench_run.entries, bench_run.protocol.latency_scenario)
    return {
        entry.artifact: tuple(float(np.median(block.latencies_ms)) for block in blocks if block.latencies_ms.size)
        for entry, blocks in zip(bench_run.entries, rounds, strict=True)
    }


def samples(bench_run: BenchRun, limit: int = 600) -> dict[str, tuple[float, ...]]:
    """At most `limit` latencies in ms per artifact, sampled evenly over time."""
    scenario = bench_run.protocol.latency_scenario
    return {
        entry.artifact: _evenly(_latencies(usable(bench_run.protocol, entry, scenario)), limit)
        for entry in bench_run.entries
    }


def _throughput_scenario(bench_run: BenchRun) -> str:
    return "offline" if "offline" in bench_run.protocol.scenarios else bench_run.protocol.scenarios[0]


def _latencies(rounds: Sequence[Round]) -> Values:
    """Every latency in ms, including queries that were never answered."""
    return np.concatenate([block.latencies_ms for block in _with_unanswered(rounds)])


def _with_unanswered(rounds: Sequence[Round]) -> list[Round]:
    """The latencies with unanswered queries. Each counts with the time that it had waited at the end, a lower bound of
    its latency; without them, a server would look faster the more it is overloaded."""
    *before, last = rounds
    every = np.concatenate([last.latencies_ms, np.asarray(last.waiting_ms, np.float64)])
    return [*before, dataclasses.replace(last, latencies_ms=every)]


def _throughput(rounds: Sequence[Round]) -> float:
    """Images per second over all rounds."""
    images = sum(block.batch * block.latencies_ms.size for block in rounds)
    return float(images / sum(block.seconds for block in rounds))


def _evenly(values: Values, limit: int) -> tuple[float, ...]:
    if values.size > limit:
        values = values[np.linspace(0, values.size - 1, limit).round().astype(int)]
    return tuple(float(value) for value in values)
